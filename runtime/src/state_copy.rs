//! [`StateCopy`]: how a follower gets the state out of the members' memory, and how members give it.
//!
//! A pure machine, for both sides. The follower names a boundary just ahead of the members and asks each of them for a share of the state
//! there; each copies its share when it stands at that boundary, once for all followers, and goes on. Every piece is checked against the
//! digest that the members agree on. A member that has passed the boundary already says so, and the next round names a later one.
//!
//! Promises: a copy that is complete is of one boundary and one digest; a source that is slow, or sends another state's bytes, is dropped
//! and named, and comes back only when no other is left. Bytes never come here. Deliberately not here: the finals by which the follower
//! gets level afterwards, and when it enters (`step_cycle.rs`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use types::{Digest, Generation, Lineage, NodeId, Step, Timestamp, World};

use crate::step_cycle::{Envelope, PeerFrame, Verdict};

/// What the shell must do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CopyAction {
    /// Send a frame.
    Send(Envelope),
    /// Forget the pieces that are held: another round begins.
    Discard,
    /// Every piece is held and checked: load them.
    Complete {
        /// The lineage.
        lineage: Lineage,
        /// The boundary.
        applied: Step,
        /// The digest of the state.
        digest: Digest,
    },
    /// This source gives nothing any more.
    Dropped {
        /// The source.
        node: NodeId,
        /// Why.
        reason: &'static str,
    },
}

/// What the step machine knows of the members.
#[derive(Clone, Copy, Debug)]
pub struct Boundaries<'a> {
    /// The present world.
    pub world: &'a World,
    /// The boundary of this node's own state.
    pub applied: Option<Step>,
    /// The boundaries that members told, as far as known.
    pub known: &'a BTreeMap<NodeId, Step>,
    /// The highest boundary that anybody can have reached by now.
    pub highest: Step,
}

impl Boundaries<'_> {
    fn of(&self, node: NodeId) -> Step {
        self.known.get(&node).copied().unwrap_or_default()
    }
}

/// Both sides of copying the state.
#[derive(Debug)]
pub struct StateCopy {
    me: NodeId,
    target: Duration,
    pieces: u32,
    total_steps: Option<Step>,
    round: Option<Round>,
    rounds: u32,
    /// How far ahead of the members a round is.
    ahead: u64,
    /// Where members stood that had passed a boundary before they could copy.
    passed: BTreeMap<NodeId, Step>,
    dropped: BTreeSet<NodeId>,
    requests: BTreeMap<NodeId, Request>,
    actions: VecDeque<CopyAction>,
}

#[derive(Debug)]
struct Round {
    lineage: Lineage,
    generation: Generation,
    boundary: Step,
    shares: BTreeMap<NodeId, Share>,
    outline: Option<(Digest, Vec<Digest>)>,
}

#[derive(Debug)]
struct Share {
    wanted: BTreeSet<u32>,
    missing: BTreeSet<u32>,
    offered: Option<Digest>,
    asked: Timestamp,
    /// Since when it is this source's turn: it offered, sent something, or is known to stand behind the boundary.
    since: Option<Timestamp>,
}

#[derive(Debug)]
struct Request {
    lineage: Lineage,
    boundary: Step,
    pieces: BTreeSet<u32>,
}

impl StateCopy {
    /// For a state of so many pieces, in a job that ends at boundary `total_steps`.
    #[must_use]
    pub fn new(me: NodeId, pieces: u32, total_steps: Option<Step>, target: Duration) -> Self {
        Self {
            me,
            target,
            pieces,
            total_steps,
            round: None,
            rounds: 0,
            ahead: AHEAD_MIN,
            passed: BTreeMap::new(),
            dropped: BTreeSet::new(),
            requests: BTreeMap::new(),
            actions: VecDeque::new(),
        }
    }

    /// Time has passed, or the world has changed. `is_wanted`: this node is a follower without a state.
    pub fn handle_turn(&mut self, now: Timestamp, at: Boundaries<'_>, is_wanted: bool) {
        if !is_wanted {
            if self.round.take().is_some() {
                self.actions.push_back(CopyAction::Discard);
            }
            return;
        }
        let Some(round) = self.round.as_mut() else { return self.begin(now, at) };
        let is_other_lineage = round.lineage != at.world.lineage;
        let is_source_gone = round.shares.keys().any(|source| !at.world.has_member(*source));
        // In a held world nobody steps, so a boundary ahead is never reached.
        let is_out_of_reach = at.world.held && round.generation != at.world.generation;
        if is_other_lineage {
            self.ahead = AHEAD_MIN;
            self.passed.clear();
            self.dropped.clear();
        }
        if is_other_lineage || is_source_gone || is_out_of_reach {
            return self.begin(now, at);
        }
        round.generation = at.world.generation;
        let mut slow = None;
        for (source, share) in &mut round.shares {
            if share.offered.is_some() && share.missing.is_empty() {
                continue;
            }
            if share.since.is_none() && at.of(*source) > round.boundary {
                share.since = Some(now);
            }
            if share.since.is_some_and(|since| now.since(since) >= self.target * PATIENCE_TARGETS) {
                slow = Some(*source);
            } else if share.offered.is_none() && now.since(share.asked) >= self.target {
                // The request may have met a link that was not up yet. Asked twice is copied once.
                share.asked = now;
                let (lineage, boundary) = (round.lineage, round.boundary);
                let pieces = share.wanted.iter().copied().collect();
                let frame = PeerFrame::StateRequest { lineage, boundary, pieces };
                self.actions.push_back(CopyAction::Send(Envelope { node: *source, frame }));
            }
        }
        if let Some(source) = slow {
            self.drop_source(source, "it was too slow");
            self.begin(now, at);
        }
    }

    /// A lineage began: what is under way is of the former one.
    pub fn handle_restart(&mut self) {
        self.abandon();
        self.actions.retain(|action| !matches!(action, CopyAction::Complete { .. }));
    }

    /// A source stands at the boundary and will send its share. `pieces` are the digests of all pieces of its state; the shell has checked
    /// that together they make `digest`.
    pub fn handle_offer(
        &mut self,
        now: Timestamp,
        from: NodeId,
        (lineage, applied, digest): (Lineage, Step, Digest),
        pieces: Vec<Digest>,
    ) {
        let Some(round) = self.round_of(lineage, applied) else { return };
        let Some(share) = round.shares.get_mut(&from) else { return };
        share.offered = Some(digest);
        share.since = Some(now);
        match &round.outline {
            None => round.outline = Some((digest, pieces)),
            Some((known, _)) if *known == digest => {}
            Some(_) => {
                let odd = round.odd_source();
                self.drop_source(odd, "its state is another than that of the others");
                return self.abandon();
            }
        }
        self.complete();
    }

    /// A piece arrived; its bytes have this digest.
    pub fn handle_piece(
        &mut self,
        now: Timestamp,
        from: NodeId,
        (lineage, applied, piece): (Lineage, Step, u32),
        digest: Digest,
    ) -> Verdict {
        let Some(round) = self.round_of(lineage, applied) else { return Verdict::Drop };
        let expected = match &round.outline {
            Some((_, pieces)) => pieces.get(piece as usize).copied(),
            None => None,
        };
        let Some(share) = round.shares.get_mut(&from).filter(|s| s.missing.contains(&piece)) else {
            return Verdict::Drop;
        };
        if expected != Some(digest) {
            self.drop_source(from, "it sent a piece that is not of the members' state");
            self.abandon();
            return Verdict::Drop;
        }
        share.missing.remove(&piece);
        share.since = Some(now);
        self.complete();
        Verdict::Keep
    }

    /// What a source sent makes no sense.
    pub fn handle_nonsense(&mut self, from: NodeId, lineage: Lineage, applied: Step) {
        let is_source = |r: &mut Round| r.shares.contains_key(&from);
        if self.round_of(lineage, applied).is_some_and(is_source) {
            self.drop_source(from, "what it sent makes no sense");
            self.abandon();
        }
    }

    /// A source had passed the boundary when it heard of it.
    pub fn handle_missed(&mut self, from: NodeId, lineage: Lineage, boundary: Step, applied: Step) {
        let is_source = |r: &mut Round| r.shares.contains_key(&from);
        if self.round_of(lineage, boundary).is_some_and(is_source) {
            self.passed.insert(from, applied);
            self.ahead = (self.ahead * 2).min(AHEAD_MAX);
            self.abandon();
        }
    }

    /// A link is up: what was asked over it may be lost.
    pub fn handle_link_up(&mut self, node: NodeId) {
        let Some(round) = &mut self.round else { return };
        if let Some(share) = round.shares.get_mut(&node).filter(|s| !s.missing.is_empty()) {
            let (lineage, boundary) = (round.lineage, round.boundary);
            let pieces = share.missing.iter().copied().collect();
            let frame = PeerFrame::StateRequest { lineage, boundary, pieces };
            self.actions.push_back(CopyAction::Send(Envelope { node, frame }));
        }
    }

    /// A follower asks for a share of the state at a boundary. A new request takes the place of its last.
    pub fn handle_request(
        &mut self,
        from: NodeId,
        (lineage, boundary): (Lineage, Step),
        pieces: BTreeSet<u32>,
        at: Boundaries<'_>,
    ) {
        let is_known = at.world.lineage == lineage && at.world.has_follower(from);
        if !is_known || !at.world.has_member(self.me) {
            return;
        }
        self.requests.insert(from, Request { lineage, boundary, pieces });
        self.handle_boundary(at);
    }

    /// The member may have come to another boundary, or into another world: who asked for an earlier one hears that it is too late.
    pub fn handle_boundary(&mut self, at: Boundaries<'_>) {
        let Some(applied) = at.applied else { return };
        let world = at.world;
        self.requests.retain(|node, r| world.has_follower(*node) && r.lineage == world.lineage);
        let is_late = |r: &Request| r.boundary < applied;
        let late: Vec<NodeId> =
            self.requests.iter().filter(|(_, r)| is_late(r)).map(|(node, _)| *node).collect();
        for node in late {
            if let Some(Request { lineage, boundary, .. }) = self.requests.remove(&node) {
                let frame = PeerFrame::StateMissed { lineage, boundary, applied };
                self.actions.push_back(CopyAction::Send(Envelope { node, frame }));
            }
        }
    }

    /// The pieces to copy at this boundary; empty if there is nothing to copy, but somebody who waits for the rest of the state.
    #[must_use]
    pub fn due(&self, applied: Step) -> Option<BTreeSet<u32>> {
        let mut due = self.requests.values().filter(|r| r.boundary == applied).peekable();
        due.peek()?;
        let pieces = due.flat_map(|r| r.pieces.iter().copied());
        Some(pieces.filter(|piece| *piece < self.pieces).collect())
    }

    /// The copies of this boundary are made: who gets which.
    pub fn take_due(&mut self, applied: Step) -> Vec<(NodeId, BTreeSet<u32>)> {
        let due = self.requests.extract_if(.., |_, r| r.boundary == applied);
        due.map(|(node, request)| (node, request.pieces)).collect()
    }

    /// What the shell must do, until `None`.
    pub fn poll_action(&mut self) -> Option<CopyAction> {
        self.actions.pop_front()
    }

    fn round_of(&mut self, lineage: Lineage, boundary: Step) -> Option<&mut Round> {
        self.round.as_mut().filter(|r| r.lineage == lineage && r.boundary == boundary)
    }

    fn begin(&mut self, now: Timestamp, at: Boundaries<'_>) {
        self.abandon();
        let members = || at.world.nodes().filter(|node| *node != self.me);
        let mut sources: Vec<NodeId> =
            members().filter(|node| !self.dropped.contains(node)).collect();
        if sources.is_empty() {
            // A source that failed once is better than none.
            sources = members().collect();
            self.dropped.clear();
        }
        if sources.is_empty() {
            return;
        }
        // Another round takes other shares: whatever went wrong may have been the fault of one pair of share and source.
        let turn = self.rounds as usize % sources.len();
        sources.rotate_left(turn);
        self.rounds += 1;
        let stands = |source: &NodeId| {
            at.of(*source).max(self.passed.get(source).copied().unwrap_or_default())
        };
        let highest = sources.iter().map(stands).max().unwrap_or_default();
        let boundary =
            if at.world.held { highest } else { Step(at.highest.max(highest).0 + self.ahead) };
        let boundary = boundary.min(self.total_steps.unwrap_or(boundary));
        let lineage = at.world.lineage;
        let count = sources.len() as u64;
        let cut = |place: u64| u32::try_from(u64::from(self.pieces) * place / count).unwrap_or(0);
        let mut shares = BTreeMap::new();
        for (place, source) in (0..).zip(&sources) {
            let wanted: BTreeSet<u32> = (cut(place)..cut(place + 1)).collect();
            // A state with fewer pieces than members needs fewer sources, but one at least.
            if wanted.is_empty() && !(self.pieces == 0 && place == 0) {
                continue;
            }
            let pieces = wanted.iter().copied().collect();
            let frame = PeerFrame::StateRequest { lineage, boundary, pieces };
            self.actions.push_back(CopyAction::Send(Envelope { node: *source, frame }));
            let missing = wanted.clone();
            let share = Share { wanted, missing, offered: None, asked: now, since: None };
            shares.insert(*source, share);
        }
        let generation = at.world.generation;
        self.round = Some(Round { lineage, generation, boundary, shares, outline: None });
    }

    /// The next turn begins another round.
    fn abandon(&mut self) {
        if self.round.take().is_some() {
            self.actions.push_back(CopyAction::Discard);
        }
    }

    fn drop_source(&mut self, node: NodeId, reason: &'static str) {
        if self.dropped.insert(node) {
            self.actions.push_back(CopyAction::Dropped { node, reason });
        }
    }

    fn complete(&mut self) {
        let is_complete =
            |r: &mut Round| r.shares.values().all(|s| s.offered.is_some() && s.missing.is_empty());
        let Some(round) = self.round.take_if(is_complete) else { return };
        if let Some((digest, _)) = round.outline {
            let (lineage, applied) = (round.lineage, round.boundary);
            self.actions.push_back(CopyAction::Complete { lineage, applied, digest });
        }
    }
}

impl Round {
    /// Of sources with different states, one of the fewest; in doubt the highest.
    fn odd_source(&self) -> NodeId {
        let offers = || self.shares.iter().filter_map(|(node, s)| Some((*node, s.offered?)));
        let like = |digest: Digest| offers().filter(|(_, d)| *d == digest).count();
        let odd = offers().min_by_key(|(node, digest)| (like(*digest), std::cmp::Reverse(*node)));
        odd.map(|(node, _)| node).unwrap_or_default()
    }
}

/// So many recovery targets without a sign of progress make a source a slow one.
const PATIENCE_TARGETS: u32 = 10;
/// A final of a step shows that its boundary may be left at any moment.
const AHEAD_MIN: u64 = 2;
/// Farther ahead than this no round goes: a follower whose words take longer than so many steps would never get level.
const AHEAD_MAX: u64 = 32;
