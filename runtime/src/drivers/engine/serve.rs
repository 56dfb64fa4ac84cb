//! What the engine tells the user's thread, and how a follower gets a copy of the state.

use std::sync::Arc;

use bytes::Bytes;
use membership::Release;
use serde_json::json;
use transport::{Frame, Lane};
use types::{Digest, Lineage, NodeId, Step, Timestamp, encode};

use super::{Engine, Offered, Order, RankReply};
use crate::clock;
use crate::error::Error;
use crate::step_cycle::{Envelope, PeerFrame};

/// A copy of the state on its way to this follower.
#[derive(Debug)]
pub(super) struct Fetch {
    source: NodeId,
    asked: Timestamp,
    repeated: Timestamp,
    offer: Option<Offer>,
    pieces: Offered,
    attempts: u32,
}

#[derive(Debug)]
struct Offer {
    lineage: Lineage,
    applied: Step,
    digest: Digest,
    pieces: u32,
    extra: serde_json::Value,
}

impl Engine {
    /// Gives the user's thread what it waits for, if there is something.
    pub(super) fn answer_user(&mut self) {
        if let Some((step, reply)) = self.wish.take() {
            self.answer_wish(step, reply);
        }
        if self.is_user_waiting
            && let Some(order) = self.next_order()
        {
            self.is_user_waiting = false;
            self.idle_since = clock::now();
            let _ = self.parts.orders.send(order);
        }
    }

    fn answer_wish(&mut self, step: Step, reply: tokio::sync::oneshot::Sender<RankReply>) {
        let is_void = self.failure.is_some()
            || self.release.is_some()
            || self.restore.is_some()
            || self.cycle.applied() != Some(step)
            || self.cycle.is_excluded();
        // In a held world nobody computes: the user goes back to where the state can be copied, staged, or given up.
        let is_held = self.cycle.world().is_some_and(|w| w.held) && !self.cycle.is_ready(step);
        let answer = if is_void || is_held {
            self.void_step = Some(step);
            RankReply::Void
        } else if self.cycle.is_ready(step) {
            RankReply::Final
        } else if let Some(rank) = self.cycle.poll_virtual_rank() {
            self.parts
                .metrics
                .recomputed
                .set(i64::try_from(self.cycle.counters().recomputed_leaves).unwrap_or(0));
            if self.cycle.is_recomputed(rank) {
                self.parts.trace.event("recompute", json!({"step": step, "rank": rank}));
            }
            RankReply::Compute(rank)
        } else {
            self.wish = Some((step, reply));
            return;
        };
        self.idle_since = clock::now();
        let _ = reply.send(answer);
    }

    fn next_order(&mut self) -> Option<Order> {
        if let Some(error) = self.failure.take() {
            return Some(Order::Failed(error));
        }
        if let Some(Release::Evicted { reason }) = &self.release {
            return Some(Order::Failed(Error::Evicted { reason: reason.clone() }));
        }
        if let Some((lineage, start)) = self.restore.take() {
            return Some(Order::Restore { lineage, start });
        }
        if let Some(order) = self.fetched.take() {
            return Some(order);
        }
        if let Some(order) = self.stage_order() {
            return Some(order);
        }
        if let Some(release) = self.release.clone() {
            return Some(Order::Ended(release));
        }
        let step = self.cycle.applied()?;
        let world = Arc::clone(self.cycle.world()?);
        if !self.followers_waiting.is_empty() && self.cycle.entered().is_some() {
            return Some(Order::Copy);
        }
        if self.parts.settings.total_steps.is_some_and(|total| step >= total) {
            if self.parts.control.is_none() {
                return Some(Order::Ended(Release::Finished));
            }
            return None;
        }
        let is_in = if self.cycle.is_member() {
            self.cycle.entered().is_some()
        } else {
            world.has_follower(self.parts.me)
        };
        // In a held world a step begins only to be applied.
        if !is_in || (world.held && !self.cycle.is_ready(step)) {
            return None;
        }
        self.step_began = Some(clock::now());
        self.void_step = None;
        let is_first = world.rank_of(self.parts.me) == Some(types::Rank(0));
        Some(Order::Step { step, lineage: world.lineage, world, is_first })
    }

    /// A follower without a state asks one member after the other for a copy.
    pub(super) fn fetch_state(&mut self) {
        let Some(world) = self.cycle.world().cloned() else { return };
        let is_needed = world.has_follower(self.parts.me)
            && self.cycle.applied().is_none()
            && self.restore.is_none()
            && self.fetched.is_none();
        if !is_needed {
            return;
        }
        let target = self.parts.settings.recovery_target;
        let patience = target * 10;
        let attempts = match &self.fetch {
            Some(fetch)
                if world.has_member(fetch.source) && clock::now().since(fetch.asked) < patience =>
            {
                // The request may have met a link that was not up yet. Asked twice is copied once.
                if fetch.offer.is_none() && clock::now().since(fetch.repeated) >= target {
                    self.repeat_request();
                }
                return;
            }
            Some(fetch) => fetch.attempts + 1,
            None => 0,
        };
        // Each follower starts at another member, so that several joiners do not load one source.
        let members: Vec<NodeId> = world.nodes().collect();
        let place = (self.parts.me.0 as usize + attempts as usize) % members.len();
        let source = members[place];
        tracing::info!(%source, "asking for the state");
        self.fetch = Some(Fetch {
            source,
            asked: clock::now(),
            repeated: clock::now(),
            offer: None,
            pieces: Offered::new(),
            attempts,
        });
        self.send(Envelope {
            node: source,
            frame: PeerFrame::StateRequest { lineage: world.lineage },
        });
    }

    /// A link is up: if it is the one to the source of the state, the request goes out again.
    pub(super) fn handle_source_up(&mut self, node: NodeId) {
        if self.fetch.as_ref().is_some_and(|f| f.source == node && f.offer.is_none()) {
            self.repeat_request();
        }
    }

    fn repeat_request(&mut self) {
        let Some((fetch, lineage)) = self.fetch.as_mut().zip(self.cycle.lineage()) else { return };
        fetch.repeated = clock::now();
        let node = fetch.source;
        self.send(Envelope { node, frame: PeerFrame::StateRequest { lineage } });
    }

    pub(super) fn handle_state_request(&mut self, from: NodeId, lineage: Lineage) {
        let is_follower =
            self.cycle.world().is_some_and(|w| w.has_follower(from) && w.lineage == lineage);
        if is_follower && self.cycle.is_member() {
            self.followers_waiting.insert(from);
        }
    }

    /// Sends the copied state to the followers that wait for it.
    pub(super) fn send_state(
        &mut self,
        digest: Digest,
        extra: &serde_json::Value,
        pieces: &[Bytes],
    ) {
        let waiting = std::mem::take(&mut self.followers_waiting);
        let known = self.parts.peers.as_ref().zip(self.cycle.lineage()).zip(self.cycle.applied());
        let Some(((peers, lineage), applied)) = known else { return };
        let extra = Bytes::from(extra.to_string());
        for node in waiting {
            let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
            let offer = PeerFrame::StateOffer { lineage, applied, state: digest, pieces: count };
            peers.send(node, Lane::Bulk, Frame { head: encode(&offer), body: extra.clone() });
            for (number, piece) in (0..).zip(pieces) {
                let head = encode(&PeerFrame::StatePiece { applied, piece: number });
                peers.send(node, Lane::Bulk, Frame { head, body: piece.clone() });
            }
            self.parts.trace.event("state_sent", json!({"to": node, "step": applied}));
        }
    }

    pub(super) fn handle_state_offer(
        &mut self,
        from: NodeId,
        (lineage, applied, digest): (Lineage, Step, Digest),
        pieces: u32,
        extra: &[u8],
    ) {
        let expected = self.parts.layout.segments().len();
        let Some(fetch) = self.fetch.as_mut().filter(|f| f.source == from) else { return };
        let Ok(extra) = serde_json::from_slice(extra) else { return };
        if pieces as usize != expected || self.cycle.lineage() != Some(lineage) {
            return;
        }
        fetch.asked = clock::now();
        fetch.pieces.clear();
        fetch.offer = Some(Offer { lineage, applied, digest, pieces, extra });
    }

    pub(super) fn handle_state_piece(
        &mut self,
        from: NodeId,
        applied: Step,
        piece: u32,
        body: Bytes,
    ) {
        let Some(fetch) = self.fetch.as_mut().filter(|f| f.source == from) else { return };
        let Some(offer) = fetch.offer.as_ref().filter(|o| o.applied == applied && piece < o.pieces)
        else {
            return;
        };
        fetch.asked = clock::now();
        fetch.pieces.insert(piece, body);
        if fetch.pieces.len() < offer.pieces as usize {
            return;
        }
        let pieces = std::mem::take(&mut fetch.pieces).into_values().collect();
        if let Some(offer) = fetch.offer.take() {
            let Offer { lineage, applied, digest, extra, .. } = offer;
            self.fetched = Some(Order::Load { lineage, applied, digest, extra, pieces });
        }
    }

    pub(super) fn handle_load_failed(&mut self, reason: String, is_incompatible: bool) {
        match self.fetch.as_mut() {
            Some(fetch) => {
                tracing::warn!(source = %fetch.source, %reason, "a copy of the state is refused");
                fetch.asked = Timestamp::default();
            }
            None if is_incompatible => self.failure = Some(Error::Refused { code: 76, reason }),
            None => self.failure = Some(Error::Restore { reason }),
        }
    }
}
