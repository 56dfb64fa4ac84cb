//! A model of a worker's training loop: it enters worlds, steps in lockstep with its peers, follows, and stages checkpoints.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use membership::{
    Change, Cost, Fingerprint, Heartbeat, Intent, JobSpec, Join, ParticipantEvent, Phase, Release,
    ToCoordinator,
};
use types::{Address, Digest, Generation, Lineage, NodeId, Step, Timestamp, World};

use crate::harness::address;

#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) node: NodeId,
    pub(crate) join: Join,
    pub(crate) worlds: Vec<Arc<World>>,
    pub(crate) lineage: Lineage,
    pub(crate) boundary: Option<Step>,
    pub(crate) entered: Option<Generation>,
    synced_at: Option<Timestamp>,
    intent: Option<Intent>,
    pub(crate) released: Option<Release>,
    pub(crate) refused: Option<(u8, String)>,
    pub(crate) to_say: Vec<ToCoordinator>,
    /// Its state goes wrong from this step on.
    pub(crate) spoiled_from: Option<Step>,
    /// Its store fails.
    pub(crate) has_bad_store: bool,
    /// It never becomes level.
    pub(crate) never_syncs: bool,
    /// How long a leaf takes it, as far as it says so.
    pub(crate) leaf_time: Option<Duration>,
    progress: u64,
}

impl Worker {
    pub(crate) fn new(node: NodeId, spec: &JobSpec) -> Self {
        let fingerprint =
            [("torch", "2.15"), ("probe", "aa")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        Self {
            node,
            join: Join {
                spec: spec.clone(),
                address: Address {
                    socket: address(1000),
                    certificate: Digest::of(&node.0.to_le_bytes()),
                },
                host: format!("host-{node}"),
                fingerprint: Fingerprint(fingerprint.into_iter().collect()),
                allow_mixed: false,
                found: None,
            },
            worlds: Vec::new(),
            lineage: Lineage(0),
            boundary: None,
            entered: None,
            synced_at: None,
            intent: None,
            released: None,
            refused: None,
            to_say: Vec::new(),
            spoiled_from: None,
            has_bad_store: false,
            never_syncs: false,
            leaf_time: None,
            progress: 0,
        }
    }

    pub(crate) fn heartbeat(&self, now: Timestamp) -> Heartbeat {
        let boundary = self.boundary.map_or(0, |b| b.0);
        let first = boundary.saturating_sub(3).max(self.first_boundary());
        let applied =
            self.boundary.map(|_| (first..=boundary).map(|b| (Step(b), self.digest(b))).collect());
        let phase = match (self.newest(), self.boundary) {
            (None, _) => Phase::Joining,
            (Some(_), None) => Phase::Syncing,
            (Some(world), _) if world.has_member(self.node) => Phase::Active,
            (Some(world), _) if world.has_follower(self.node) => Phase::Following,
            _ => Phase::Leaving,
        };
        let cost = Cost { recomputed_leaves: 1, ..Cost::default() };
        Heartbeat {
            entered: self.entered,
            lineage: self.lineage,
            applied: applied.unwrap_or_default(),
            phase,
            progress: self.progress,
            pulse: now.0,
            leaf_time: self.leaf_time,
            changes: self
                .entered
                .map(|generation| Change { generation, cost })
                .into_iter()
                .collect(),
            ..Heartbeat::default()
        }
    }

    fn first_boundary(&self) -> u64 {
        let of_lineage = self.worlds.iter().filter(|w| w.lineage == self.lineage);
        of_lineage.filter_map(|w| w.start.as_ref()).map(|s| s.step.0).min().unwrap_or(0)
    }

    pub(crate) fn digest(&self, boundary: u64) -> Digest {
        let is_spoiled = self.spoiled_from.is_some_and(|from| boundary >= from.0);
        Digest::of(format!("{boundary} {}", if is_spoiled { self.node.0 } else { 0 }).as_bytes())
    }

    pub(crate) fn newest(&self) -> Option<&Arc<World>> {
        self.worlds.last()
    }

    pub(crate) fn handle_event(&mut self, now: Timestamp, event: ParticipantEvent) {
        match event {
            ParticipantEvent::World(world) => {
                if world.lineage != self.lineage && world.has_member(self.node) {
                    self.lineage = world.lineage;
                    self.boundary = world.start.as_ref().map(|start| start.step);
                } else if world.has_follower(self.node) && world.lineage != self.lineage {
                    self.boundary = None;
                    self.lineage = world.lineage;
                    self.synced_at = Some(now + SYNC);
                }
                self.worlds.push(world);
            }
            ParticipantEvent::Intent(intent) => self.intent = Some(intent),
            ParticipantEvent::Publish { attempt, receipts } => {
                assert!(!receipts.is_empty());
                self.to_say.push(ToCoordinator::Published {
                    attempt,
                    manifest: format!("attempt-{attempt}/manifest"),
                    hash: Digest::of(b"manifest"),
                });
            }
            ParticipantEvent::Released(release) => self.released = Some(release),
            ParticipantEvent::Refused { code, reason } => self.refused = Some((code, reason)),
            _ => {}
        }
    }

    /// One round. `peers` is how all living workers stood before it.
    pub(crate) fn step(&mut self, now: Timestamp, peers: &BTreeMap<NodeId, Self>) {
        let has = |node: NodeId, generation: Generation| {
            peers
                .get(&node)
                .is_some_and(|peer| peer.worlds.iter().any(|w| w.generation == generation))
        };
        let complete = |w: &&Arc<World>| {
            w.has_member(self.node) && w.nodes().all(|node| has(node, w.generation))
        };
        self.entered =
            self.entered.max(self.worlds.iter().filter(complete).map(|w| w.generation).max());
        self.sync(now, peers);
        self.advance(peers);
        self.stage();
    }

    fn sync(&mut self, now: Timestamp, peers: &BTreeMap<NodeId, Self>) {
        if self.synced_at.is_some_and(|at| now >= at) && !self.never_syncs {
            self.boundary = self.front(peers);
            self.synced_at = None;
        }
    }

    fn front(&self, peers: &BTreeMap<NodeId, Self>) -> Option<Step> {
        let world = self.newest()?;
        let others =
            world.nodes().filter(|node| *node != self.node).filter_map(|node| peers.get(&node));
        let furthest = if world.has_member(self.node) { Iterator::max } else { Iterator::min };
        furthest(
            others
                .filter(|p| p.lineage == self.lineage)
                .filter_map(|p| p.boundary)
                .collect::<Vec<_>>()
                .into_iter(),
        )
    }

    fn advance(&mut self, peers: &BTreeMap<NodeId, Self>) {
        let (Some(boundary), Some(newest)) = (self.boundary, self.newest()) else { return };
        if self.join.spec.total_steps.is_some_and(|total| boundary >= total) {
            return;
        }
        let next = Some(boundary.next());
        let serves = |w: &&Arc<World>| w.from.is_none_or(|from| from <= boundary);
        let world = self.worlds.iter().rev().find(serves).filter(|w| w.has_member(self.node));
        let Some(world) = world else {
            let is_listed = newest.has_member(self.node) || newest.has_follower(self.node);
            if is_listed && self.front(peers) > Some(boundary) {
                self.boundary = next;
            }
            return;
        };
        // Levelling: one who is behind fetches finals, in a held world too.
        if self.front(peers) > Some(boundary) {
            self.boundary = next;
            return;
        }
        let is_ready = |node: NodeId| {
            let peer = peers.get(&node).filter(|peer| peer.lineage == self.lineage);
            peer.is_some_and(|peer| {
                peer.boundary >= Some(boundary)
                    && (peer.entered >= Some(world.generation) || peer.boundary > Some(boundary))
            })
        };
        let has_entered = self.entered >= Some(world.generation);
        if !world.held && has_entered && world.nodes().all(is_ready) {
            self.boundary = next;
            self.progress += 1;
        }
    }

    fn stage(&mut self) {
        let (Some(intent), Some(boundary)) = (self.intent.clone(), self.boundary) else { return };
        if boundary < intent.step {
            return;
        }
        self.intent = None;
        let attempt = intent.attempt;
        if boundary > intent.step || self.has_bad_store {
            let reason = if self.has_bad_store { "store failed" } else { "boundary missed" };
            self.to_say
                .push(ToCoordinator::CheckpointFailed { attempt, reason: reason.to_owned() });
            return;
        }
        self.to_say.push(ToCoordinator::Receipt {
            attempt,
            lineage: self.lineage,
            digest: self.digest(boundary.0),
            root: Digest::of(b"root"),
            segments: Bytes::from_static(b"segments"),
        });
    }
}

/// What a follower's first sync takes.
const SYNC: Duration = Duration::from_millis(100);
