//! What the engine tells the user's thread, and how a follower gets a copy of the state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use membership::{Release, Turn};
use serde::{Deserialize, Serialize};
use serde_json::json;
use storage::StateDigest;
use transport::{Frame, Lane};
use types::{Digest, Lineage, NodeId, Step, decode, encode};

use super::{Engine, Order, RankReply};
use crate::clock;
use crate::error::Error;
use crate::state_copy::CopyAction;
use crate::step_cycle::{PeerFrame, Verdict};

/// What a copy of the state has beside its pieces: the body of an offer.
#[derive(Debug, Serialize, Deserialize)]
struct Outline {
    /// The extra state, as JSON text.
    extra: String,
    /// The digests of all pieces.
    pieces: Vec<Digest>,
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
            self.is_loading = matches!(order, Order::Restore { .. } | Order::Load { .. });
            self.idle_since = clock::now();
            let is_step = matches!(order, Order::Step { .. });
            self.turn.give(if is_step { Turn::Leaf } else { Turn::Between });
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
        } else if let Some(rank) = self.cycle.owed() {
            self.failure.get_or_insert(Error::Usage(format!(
                "virtual rank {rank} of step {step} was given out and its leaf never came: contribute it before asking for the next"
            )));
            self.void_step = Some(step);
            RankReply::Void
        } else {
            self.wish = Some((step, reply));
            return;
        };
        self.idle_since = clock::now();
        match answer {
            RankReply::Compute(_) => self.turn.begin_leaf(self.idle_since),
            RankReply::Final | RankReply::Void => self.turn.give(Turn::Between),
        }
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
        if let Some(pieces) = self.due_pieces() {
            return Some(Order::Copy { pieces });
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

    /// A follower without a state copies it from the members.
    pub(super) fn fetch_state(&mut self) {
        let Some(at) = self.cycle.boundaries() else { return };
        let is_wanted = at.world.has_follower(self.parts.me)
            && at.applied.is_none()
            && self.restore.is_none()
            && self.fetched.is_none()
            && !self.is_loading;
        self.copy.handle_turn(clock::now(), at, is_wanted);
        self.drain_copy();
    }

    /// Does what the copying machine says.
    fn drain_copy(&mut self) {
        while let Some(action) = self.copy.poll_action() {
            match action {
                CopyAction::Send(envelope) => {
                    if let PeerFrame::StateRequest { boundary, pieces, .. } = &envelope.frame {
                        let (source, pieces) = (envelope.node, pieces.len());
                        tracing::debug!(%source, %boundary, pieces, "asking for a share of the state");
                    }
                    self.send(envelope);
                }
                CopyAction::Discard => {
                    self.copied.clear();
                    self.copied_extra = None;
                }
                CopyAction::Complete { lineage, applied, digest } => {
                    let pieces = std::mem::take(&mut self.copied).into_iter().collect();
                    let extra = self.copied_extra.take().unwrap_or_default();
                    self.parts.trace.event("copied", json!({"step": applied}));
                    self.fetched = Some(Order::Load { lineage, applied, digest, extra, pieces });
                }
                CopyAction::Dropped { node, reason } => {
                    tracing::warn!(source = %node, reason, "nothing of the state is copied from this member any more");
                    self.parts
                        .trace
                        .event("source_dropped", json!({"source": node, "reason": reason}));
                }
            }
        }
    }

    /// A link is up: what was asked over it is asked again.
    pub(super) fn handle_source_up(&mut self, node: NodeId) {
        self.copy.handle_link_up(node);
        self.drain_copy();
    }

    pub(super) fn handle_state_request(
        &mut self,
        from: NodeId,
        what: (Lineage, Step),
        pieces: Vec<u32>,
    ) {
        let Some(at) = self.cycle.boundaries() else { return };
        self.copy.handle_request(from, what, pieces.into_iter().collect(), at);
        self.drain_copy();
    }

    /// The pieces that followers wait for at this boundary.
    fn due_pieces(&mut self) -> Option<BTreeSet<u32>> {
        let at = self.cycle.boundaries()?;
        let applied = at.applied?;
        self.copy.handle_boundary(at);
        let is_entered = self.cycle.entered().is_some();
        let due = self.copy.due(applied).filter(|_| is_entered);
        self.drain_copy();
        due
    }

    /// Sends the copied pieces to the followers that wait for them.
    pub(super) fn send_state(
        &mut self,
        digest: StateDigest,
        extra: &serde_json::Value,
        pieces: &BTreeMap<u32, Bytes>,
    ) {
        let known = self.parts.peers.as_ref().zip(self.cycle.lineage()).zip(self.cycle.applied());
        let Some(((peers, lineage), applied)) = known else { return };
        let StateDigest { whole: state, pieces: digests } = digest;
        let body = encode(&Outline { extra: extra.to_string(), pieces: digests });
        for (node, wanted) in self.copy.take_due(applied) {
            let head = super::head(&PeerFrame::StateOffer { lineage, applied, state }, 0);
            peers.send(node, Lane::Bulk, Frame { head, body: body.clone() });
            let mut bytes = 0;
            for (piece, body) in wanted.iter().filter_map(|piece| pieces.get_key_value(piece)) {
                let head =
                    super::head(&PeerFrame::StatePiece { lineage, applied, piece: *piece }, 0);
                bytes += body.len();
                peers.send(node, Lane::Bulk, Frame { head, body: body.clone() });
            }
            let sent = json!({"to": node, "step": applied, "bytes": bytes});
            self.parts.trace.event("state_sent", sent);
        }
    }

    pub(super) fn handle_state_offer(
        &mut self,
        from: NodeId,
        (lineage, applied, digest): (Lineage, Step, Digest),
        body: &[u8],
    ) {
        let outline: Option<Outline> = decode(body).ok();
        let whole = outline.and_then(|outline| {
            let extra: serde_json::Value = serde_json::from_str(&outline.extra).ok()?;
            let combined = self.parts.pieces.combine(&extra, &outline.pieces).ok()?;
            let is_whole = outline.pieces.len() as u64 == u64::from(self.parts.pieces.count());
            (is_whole && combined == digest).then_some((extra, outline.pieces))
        });
        match whole {
            Some((extra, pieces)) => {
                self.copied_extra.get_or_insert(extra);
                self.copy.handle_offer(clock::now(), from, (lineage, applied, digest), pieces);
            }
            None => self.copy.handle_nonsense(from, lineage, applied),
        }
        self.drain_copy();
    }

    pub(super) fn handle_state_piece(
        &mut self,
        from: NodeId,
        what: (Lineage, Step, u32),
        body: Bytes,
    ) {
        let digest = Digest::of(&body);
        if self.copy.handle_piece(clock::now(), from, what, digest) == Verdict::Keep {
            self.copied.insert(what.2, body);
        }
        self.drain_copy();
    }

    pub(super) fn handle_state_missed(
        &mut self,
        from: NodeId,
        (lineage, boundary): (Lineage, Step),
        applied: Step,
    ) {
        self.copy.handle_missed(from, lineage, boundary, applied);
        self.drain_copy();
        self.fetch_state();
    }

    pub(super) fn handle_load_failed(&mut self, reason: String, is_incompatible: bool) {
        let is_copy = self.cycle.world().is_some_and(|w| w.has_follower(self.parts.me));
        self.copies_refused += u32::from(is_copy);
        if is_copy && self.copies_refused < COPIES_MAX {
            tracing::warn!(%reason, "a copy of the state is refused, another is made");
        } else if is_incompatible {
            self.failure = Some(Error::Refused { code: 76, reason });
        } else {
            self.failure = Some(Error::Restore { reason });
        }
    }
}

/// If so many copies that were whole can't be loaded, the program is at fault.
const COPIES_MAX: u32 = 3;
