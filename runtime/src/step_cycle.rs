//! [`StepCycle`]: the life of a member from step to step, and a death in it.
//!
//! A pure machine. It keeps the rules of DESIGN §4.2 that let a step survive any death and still end with the same bits:
//!
//! - *gate*: a member enters a world by its report to all members; it folds and sends nothing before it has all their reports;
//! - *wait*: a chunk whose final somebody reported is fetched from the lowest-ranked holder, never folded again;
//! - *refusal*: who has reported for a world takes no finals of older worlds;
//! - *lag*: step *t* is applied once all members have applied *t* − 1, so members are at most one step apart;
//! - *retention*: nodes of *t* are kept until *t* is applied here, finals of *t* until all members and followers have applied it;
//! - *hold*: a held world computes and folds nothing; finals are still passed on, until all stand at one boundary.
//!
//! Bytes never come here: the shell stores them under (step, chunk, node) and does what [`Action`] says. Deliberately not here: who is in
//! the world (coordinators decide), when to give up waiting for them (the session's deadlines).

mod frame;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use collectives::{Chunk, Holding, Operation, OperationAction};
use types::{
    Address, Digest, Generation, Lineage, NodeId, Start, Step, TreeNode, VirtualRank, World,
};

use crate::state_copy::Boundaries;

pub use frame::{Envelope, FinalName, NodeName, PeerFrame, Report};

/// What the shell must do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send a frame. The body of a node or a final is looked up by its name. If there is no link to the node, drop it:
    /// [`StepCycle::handle_link_up`] offers again what still matters.
    Send(Envelope),
    /// Fold, or finish, on held bytes of a step.
    Operation {
        /// The step.
        step: Step,
        /// Fold or finish.
        action: OperationAction,
    },
    /// All nodes of the step may be forgotten.
    DropNodes {
        /// The step.
        step: Step,
    },
    /// The finals of the step may be forgotten.
    DropFinals {
        /// The step.
        step: Step,
    },
    /// Forget everything, load the state that a new lineage starts with, and call [`StepCycle::handle_state`].
    Restore {
        /// The new lineage.
        lineage: Lineage,
        /// The state to load.
        start: Start,
    },
    /// This world is the present one from now on.
    Adopted {
        /// Its generation.
        generation: Generation,
    },
    /// The reports of all members of this generation have arrived.
    Entered {
        /// The generation.
        generation: Generation,
    },
    /// All finals of the step are held, and it may be applied.
    Ready {
        /// The step.
        step: Step,
    },
    /// The present world doesn't list this node any more: it was evicted, or left as planned.
    Excluded {
        /// The world without it.
        generation: Generation,
    },
    /// Another member computes from another state at the same boundary.
    Diverged {
        /// The other member.
        node: NodeId,
        /// The boundary.
        step: Step,
        /// The digest of its state.
        theirs: Digest,
        /// The digest of ours.
        ours: Digest,
    },
}

/// What became of a frame with a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Keep the body.
    Keep,
    /// Drop it.
    Drop,
}

/// The life of a member from step to step.
#[derive(Debug)]
pub struct StepCycle {
    me: NodeId,
    chunks: u32,
    world: Option<Arc<World>>,
    /// The world before it, if the change took effect in mid-step.
    former: Option<Arc<World>>,
    /// A planned world whose first step has not come yet.
    pending: Option<Arc<World>>,
    /// Who leaves with the present world and must still hear of it.
    leaving: BTreeSet<NodeId>,
    reports: BTreeMap<NodeId, Report>,
    early_reports: BTreeMap<Generation, BTreeMap<NodeId, Report>>,
    is_reported: bool,
    /// The newest generation for which this member reported: its finals are of that one.
    served: Option<Generation>,
    entry: Option<Entry>,
    state: Option<StateMark>,
    /// Whether all members of a world are known to have reached a boundary of this state. What a follower copied from a member that was
    /// ahead of the others may be gone with that member.
    is_level: bool,
    /// Own digests at the last boundaries.
    digests: BTreeMap<Step, Digest>,
    known_applied: BTreeMap<NodeId, Step>,
    /// The lowest boundary of all members, as finals told it.
    lowest: Step,
    operations: BTreeMap<Step, Operation>,
    /// Nodes of a step that this member has not begun: whether they start from its state is not known yet.
    quarantine: BTreeMap<Step, Quarantined>,
    /// The final chunks held, with the generation that said so.
    finals: BTreeMap<Step, BTreeMap<Chunk, Generation>>,
    handed_out: BTreeSet<VirtualRank>,
    offered_ready: Option<Step>,
    actions: VecDeque<Action>,
    counters: Counters,
}

/// What happened so far, for metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames of ended worlds, or late, or double.
    pub dropped_frames: u64,
    /// Leaves handed out because a world change lost them or moved them here in mid-step.
    pub recomputed_leaves: u64,
    /// Final chunks passed on because their reporter held them.
    pub passed_finals: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StateMark {
    applied: Step,
    digest: Digest,
}

/// What was known when the gate was complete.
#[derive(Debug)]
struct Entry {
    /// The highest boundary reported: the step in which the change happened.
    live: Step,
    holdings: BTreeMap<Chunk, Vec<Holding>>,
    bound: BTreeSet<Chunk>,
}

/// Nodes and who sent them, with the digest of the state that they start from.
type Quarantined = BTreeMap<(Chunk, TreeNode), (NodeId, Digest)>;

/// How many steps of finals are kept for followers and laggards at most.
pub const FOLLOW_STEPS_MAX: u64 = 64;
/// How many worlds ahead reports are kept.
const EARLY_WORLDS_MAX: usize = 4;

impl StepCycle {
    /// A node without a world and without a state. `chunks` counts the report chunk too.
    #[must_use]
    pub fn new(me: NodeId, chunks: u32) -> Self {
        Self {
            me,
            chunks,
            world: None,
            former: None,
            pending: None,
            leaving: BTreeSet::new(),
            reports: BTreeMap::new(),
            early_reports: BTreeMap::new(),
            is_reported: false,
            served: None,
            entry: None,
            state: None,
            is_level: false,
            digests: BTreeMap::new(),
            known_applied: BTreeMap::new(),
            lowest: Step(0),
            operations: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            finals: BTreeMap::new(),
            handed_out: BTreeSet::new(),
            offered_ready: None,
            actions: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// A world, from a coordinator or out of a member's report. Old and known ones change nothing.
    pub fn handle_world(&mut self, world: Arc<World>) {
        let known = self.pending.as_ref().or(self.world.as_ref()).map(|w| w.generation);
        if known.is_some_and(|g| world.generation <= g) || world.check().is_err() {
            return;
        }
        let is_listed = world.has_member(self.me) || world.has_follower(self.me);
        if self.world.is_none() && !is_listed {
            return; // a joiner hears of what was before it
        }
        if self.lineage() != Some(world.lineage) {
            self.forget();
            // Members alone begin with the start: others may be far ahead of it when a follower hears of it, so it takes a copy.
            if let Some(start) = world.start.clone().filter(|_| world.has_member(self.me)) {
                self.actions.push_back(Action::Restore { lineage: world.lineage, start });
            }
            self.adopt(world);
        } else if world.from.is_some_and(|from| self.applied().is_some_and(|a| a < from)) {
            // Who has no state serves nothing before it, and needs the newest members to get one.
            self.pending = Some(world);
        } else {
            self.adopt(world);
        }
        self.drive();
    }

    /// The state is loaded: the start of a lineage, or a copy that a follower fetched.
    pub fn handle_state(&mut self, lineage: Lineage, applied: Step, digest: Digest) {
        if self.lineage() != Some(lineage) {
            return;
        }
        let is_ahead = |n: NodeId| self.known_applied.get(&n).is_some_and(|at| *at < applied);
        let is_held = |w: &Arc<World>| w.held && w.has_follower(self.me);
        if self.world.as_ref().is_some_and(|w| is_held(w) && w.nodes().any(is_ahead)) {
            return; // a copy of somebody who is gone: where nobody steps, nobody gets there again
        }
        self.is_level = false;
        self.finals.retain(|step, _| *step >= applied);
        self.begin_boundary(applied, digest);
    }

    /// A member enters a world.
    pub fn handle_report(&mut self, from: NodeId, report: Report) {
        let generation = report.world.generation;
        self.handle_world(Arc::clone(&report.world));
        let current = self.world.as_ref().map(|w| w.generation);
        let is_listed = report.world.has_member(from);
        if !is_listed || current.is_some_and(|g| generation < g) {
            self.counters.dropped_frames += 1;
        } else if current == Some(generation) {
            self.note_applied(from, report.applied);
            self.reports.entry(from).or_insert(report);
            self.check_gate();
        } else {
            // A joiner hears so that the members stand at the boundary at which it enters.
            self.note_applied(from, report.applied);
            self.early_reports.entry(generation).or_default().entry(from).or_insert(report);
            while self.early_reports.len() > EARLY_WORLDS_MAX {
                self.early_reports.pop_first();
            }
            self.drive();
            self.drive();
        }
    }

    /// A node arrived. Nodes are good in every generation of their lineage, if they start from this member's own state.
    pub fn handle_node(&mut self, from: NodeId, name: NodeName) -> Verdict {
        // Members are at most one step apart, but a follower that takes the place of a dead member may be some steps behind.
        let is_near =
            |at: Step| name.step >= at && name.step.0 <= at.0.saturating_add(FOLLOW_STEPS_MAX);
        let Some(state) =
            self.state.filter(|s| is_near(s.applied) && self.lineage() == Some(name.lineage))
        else {
            self.counters.dropped_frames += 1;
            return Verdict::Drop;
        };
        self.note_applied(from, name.step);
        if name.step > state.applied {
            let waiting = self.quarantine.entry(name.step).or_default();
            // The state of who was evicted since may be another than that of the members.
            let members = self.world.as_deref();
            let is_member = |n: NodeId| members.is_some_and(|w| w.has_member(n));
            let is_better = |(maker, _): &(NodeId, Digest)| !is_member(*maker) && is_member(from);
            let is_new = name.chunk.0 < self.chunks
                && waiting.get(&(name.chunk, name.node)).is_none_or(is_better);
            if is_new {
                waiting.insert((name.chunk, name.node), (from, name.state));
            }
            return if is_new { Verdict::Keep } else { Verdict::Drop };
        }
        if name.state != state.digest {
            self.diverged(from, name.step, name.state);
            return Verdict::Drop;
        }
        let is_kept = self
            .operations
            .get_mut(&name.step)
            .is_some_and(|op| op.handle_node(name.chunk, name.node));
        self.drive();
        if is_kept { Verdict::Keep } else { Verdict::Drop }
    }

    /// A final chunk arrived; the shell has verified the digest of its bytes.
    pub fn handle_final(&mut self, name: FinalName) -> Verdict {
        let Some(world) = self.world.clone().filter(|w| w.lineage == name.lineage) else {
            self.counters.dropped_frames += 1;
            return Verdict::Drop;
        };
        let is_member = world.has_member(self.me);
        let is_refused = is_member && self.is_reported && name.generation < world.generation;
        let first = self.applied().unwrap_or(Step(0));
        let is_far =
            name.step < first || (self.state.is_some() && name.step.0 > first.0 + FOLLOW_STEPS_MAX);
        if is_refused || is_far || name.chunk.0 >= self.chunks {
            self.counters.dropped_frames += 1;
            return Verdict::Drop;
        }
        if name.generation == world.generation {
            self.note_lowest(name.lowest);
        } else if !is_member {
            self.lowest = self.lowest.max(name.lowest);
        }
        let held = self.finals.entry(name.step).or_default();
        // What a member holds binds it. To a follower a later world's word counts for more: who said the other may have died with it.
        let is_better = |g: &Generation| !is_member && *g < name.generation;
        let is_new = held.get(&name.chunk).is_none_or(is_better);
        if is_new {
            held.insert(name.chunk, name.generation);
        }
        if let Some(operation) = self.operations.get_mut(&name.step) {
            operation.handle_final(name.chunk);
        }
        self.bound_unready_finals();
        self.drive();
        if is_new { Verdict::Keep } else { Verdict::Drop }
    }

    /// A member or follower says how far it is.
    pub fn handle_progress(
        &mut self,
        from: NodeId,
        lineage: Lineage,
        applied: Step,
        state: Digest,
    ) {
        if self.lineage() != Some(lineage) {
            return;
        }
        let is_other = self.digests.get(&applied).is_some_and(|ours| *ours != state);
        if is_other {
            self.diverged(from, applied, state);
        }
        self.note_applied(from, applied);
        if self.is_astray(from, is_other) {
            self.forget_state();
        }
        self.retain_finals();
        self.drive();
    }

    /// A member or follower lacks finals that this one may hold.
    pub fn handle_final_request(
        &mut self,
        from: NodeId,
        lineage: Lineage,
        step: Step,
        chunks: &BTreeSet<Chunk>,
    ) {
        if self.lineage() != Some(lineage) {
            return;
        }
        self.tell_progress(vec![from]);
        let held: Vec<Chunk> = match self.finals.get(&step) {
            Some(held) => held.keys().filter(|c| chunks.contains(c)).copied().collect(),
            None => return,
        };
        for chunk in held {
            self.send_final(from, step, chunk);
        }
    }

    /// The user contributed a leaf of the present step. Returns the chunks whose bytes the shell must keep, before it polls for actions.
    pub fn handle_leaf(&mut self, step: Step, rank: VirtualRank) -> Vec<Chunk> {
        let kept = match self.operations.get_mut(&step) {
            Some(operation) => operation.handle_leaf(rank),
            None => Vec::new(),
        };
        self.drive();
        kept
    }

    /// The shell has finished a chunk that this member owns: it is final now, and goes to everybody.
    pub fn handle_finished(&mut self, step: Step, chunk: Chunk) {
        let Some(world) = self.world.clone() else { return };
        self.finals.entry(step).or_default().insert(chunk, world.generation);
        if let Some(operation) = self.operations.get_mut(&step) {
            operation.handle_final(chunk);
        }
        let others: Vec<NodeId> = world
            .nodes()
            .chain(world.followers.iter().map(|f| f.node))
            .filter(|n| *n != self.me)
            .collect();
        for node in others {
            self.send_final(node, step, chunk);
        }
        self.drive();
    }

    /// The user applied the step before `boundary`; its state has this digest now.
    pub fn handle_applied(&mut self, boundary: Step, digest: Digest) {
        let Some(state) = self.state.filter(|s| s.applied.next() == boundary) else { return };
        self.operations.remove(&state.applied);
        self.quarantine.remove(&state.applied);
        self.actions.push_back(Action::DropNodes { step: state.applied });
        self.begin_boundary(boundary, digest);
        let is_change = self.entry.as_ref().is_some_and(|e| boundary <= e.live.next());
        if is_change || !self.is_member() {
            self.tell_progress(self.listed().collect());
        }
    }

    /// A link to `node` is up, for the first time or again: everything that still matters is offered to it once more.
    pub fn handle_link_up(&mut self, node: NodeId) {
        let Some(world) = self.world.clone() else { return };
        if self.is_reported && (world.has_member(node) || self.leaving.contains(&node)) {
            self.send_report(node);
        }
        if let Some(state) = self.state {
            let (lineage, applied) = (world.lineage, state.applied);
            self.send(node, PeerFrame::Progress { lineage, applied, state: state.digest });
        }
        self.offer_finals(&world, node);
        for operation in self.operations.values_mut() {
            operation.handle_link_up(node);
        }
        self.drive();
    }

    /// The next virtual rank to compute in the present step, each once.
    pub fn poll_virtual_rank(&mut self) -> Option<VirtualRank> {
        let step = self.applied()?;
        let wanted = self.operations.get(&step)?.to_compute();
        let rank = *wanted.difference(&self.handed_out).next()?;
        self.handed_out.insert(rank);
        if self.is_recomputed(rank) {
            self.counters.recomputed_leaves += 1;
        }
        Some(rank)
    }

    /// A virtual rank that was handed out, and whose leaf is still missing here.
    #[must_use]
    pub fn owed(&self) -> Option<VirtualRank> {
        let wanted = self.operations.get(&self.applied()?)?.to_compute();
        wanted.intersection(&self.handed_out).next().copied()
    }

    /// What the shell must do, until `None`.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What this follower should ask for: the finals of its next step that it lacks although others have applied it; or, where it
    /// waits for a member's boundary alone, nothing but that, which is told with each answer.
    #[must_use]
    pub fn missing_finals(&self) -> Option<(NodeId, PeerFrame)> {
        let (world, step) = (self.world.as_ref()?, self.applied()?);
        let pending = self.pending.as_deref();
        let stays = |n: &NodeId| *n != self.me && pending.is_none_or(|p| p.has_member(*n));
        let planned = pending.into_iter().flat_map(World::nodes);
        let asked: Vec<NodeId> = world.nodes().chain(planned).filter(stays).collect();
        let known =
            |n: &NodeId| self.known_applied.get(n).copied().unwrap_or(Step(0)).max(self.lowest);
        let held = self.finals.get(&step);
        let chunks: BTreeSet<Chunk> = (0..self.chunks)
            .map(Chunk)
            .filter(|c| !held.is_some_and(|h| h.contains_key(c)))
            .collect();
        let waits = |n: &&NodeId| known(n) < step || (known(n) == step && chunks.is_empty());
        let node = match asked.iter().find(|n| known(n) > step) {
            Some(ahead) if !chunks.is_empty() => ahead,
            _ => asked.iter().find(waits)?,
        };
        Some((*node, PeerFrame::FinalRequest { lineage: world.lineage, step, chunks }))
    }

    /// How far everybody is, for copying the state; `None` without a world.
    #[must_use]
    pub fn boundaries(&self) -> Option<Boundaries<'_>> {
        let known = self.known_applied.values().max().copied().unwrap_or_default();
        // Whoever sent a final of a step stands at its boundary at least.
        let told = self.finals.last_key_value().map(|(step, _)| *step).unwrap_or_default();
        Some(Boundaries {
            world: self.world.as_deref()?,
            applied: self.applied(),
            known: &self.known_applied,
            highest: known.max(told).max(self.lowest),
        })
    }

    /// Whether a virtual rank of the present step came to this member by a change in mid-step.
    #[must_use]
    pub fn is_recomputed(&self, rank: VirtualRank) -> bool {
        let was_served_by = self.former.as_ref().and_then(|w| w.server(rank));
        let Some((world, step)) = self.world.as_ref().zip(self.applied()) else { return false };
        let is_mid_step = world.from.is_none_or(|from| from < step);
        let is_change = is_mid_step && self.entry.as_ref().is_some_and(|e| e.live == step);
        is_change && was_served_by.is_some_and(|n| n != self.me)
    }

    /// Whether the present world lists this node neither as member nor as follower.
    #[must_use]
    pub fn is_excluded(&self) -> bool {
        self.world.as_ref().is_some_and(|w| !w.has_member(self.me) && !w.has_follower(self.me))
    }

    /// Whether this member needs finals that others applied and that nobody in the present world holds any more. It can't go on: it must
    /// leave and join again, once coordinators know that the world was entered. (It was out, the others went on without it, and it was
    /// taken in again because none of them was known to be an heir.)
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        let Some((entry, state)) = self.entry.as_ref().zip(self.state) else { return false };
        let is_held = |step: Step, chunk: Chunk| {
            self.finals.get(&step).is_some_and(|held| held.contains_key(&chunk))
                || self.reports.values().any(|r| reports_final(r, step, chunk))
        };
        (state.applied.0..entry.live.0)
            .map(Step)
            .any(|step| (0..self.chunks).map(Chunk).any(|chunk| !is_held(step, chunk)))
    }

    /// The newest generation that this node has heard of.
    #[must_use]
    pub fn newest_generation(&self) -> Option<Generation> {
        self.pending.as_ref().or(self.world.as_ref()).map(|w| w.generation)
    }

    /// The nodes that this one must be linked with: those of the present, the planned and the former world.
    #[must_use]
    pub fn peers(&self) -> BTreeMap<NodeId, Address> {
        let worlds = self.former.iter().chain(&self.world).chain(&self.pending);
        let mut peers = BTreeMap::new();
        for world in worlds {
            peers.extend(world.members.iter().map(|m| (m.node, m.address.clone())));
            peers.extend(world.followers.iter().map(|f| (f.node, f.address.clone())));
        }
        peers.remove(&self.me);
        peers
    }

    /// The present world.
    #[must_use]
    pub fn world(&self) -> Option<&Arc<World>> {
        self.world.as_ref()
    }

    /// The present world's lineage.
    #[must_use]
    pub fn lineage(&self) -> Option<Lineage> {
        self.world.as_ref().map(|w| w.lineage)
    }

    /// The boundary of this node's state, once it has one.
    #[must_use]
    pub fn applied(&self) -> Option<Step> {
        self.state.map(|s| s.applied)
    }

    /// The digest of this node's state at its boundary.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        self.state.map(|s| s.digest)
    }

    /// Own digests at the newest boundaries, oldest first; none of a follower whose state is not known to be that of all members yet.
    pub fn digests(&self) -> impl Iterator<Item = (Step, Digest)> {
        self.digests.iter().filter(|_| self.is_level).map(|(s, d)| (*s, *d))
    }

    /// Whether the present world lists this node as a member.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.world.as_ref().is_some_and(|w| w.has_member(self.me))
    }

    /// The newest generation of which all members' reports are here.
    #[must_use]
    pub fn entered(&self) -> Option<Generation> {
        self.entry.as_ref().and(self.world.as_ref()).map(|w| w.generation)
    }

    /// Whether the step was offered as ready: all its finals are held, and it may be applied.
    #[must_use]
    pub fn is_ready(&self, step: Step) -> bool {
        self.offered_ready == Some(step)
    }

    /// What happened so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The highest boundary that any member is known to have reached.
    #[must_use]
    pub fn highest_known(&self) -> Option<Step> {
        self.known_applied.values().copied().max()
    }

    /// Whether this follower has the state of a member that was ahead of the others and died: then it takes another copy.
    fn is_astray(&self, teller: NodeId, is_other: bool) -> bool {
        let world = self.world.as_ref().filter(|w| w.has_member(teller) && w.has_follower(self.me));
        let Some((world, state)) = world.zip(self.state) else { return false };
        let is_behind = |n: NodeId| self.known_applied.get(&n).is_some_and(|a| *a < state.applied);
        // Once level it may be on its way into a world, and keeps what it has.
        !self.is_level && (is_other || (world.held && world.nodes().all(is_behind)))
    }

    fn forget_state(&mut self) {
        if let Some(state) = self.state.take() {
            self.actions.push_back(Action::DropNodes { step: state.applied.next() });
        }
        self.digests.clear();
        self.operations.clear();
        self.quarantine.clear();
        self.handed_out.clear();
        self.offered_ready = None;
        self.known_applied.remove(&self.me);
    }

    fn forget(&mut self) {
        let (me, chunks, counters) = (self.me, self.chunks, self.counters);
        let early = std::mem::take(&mut self.early_reports);
        let actions = std::mem::take(&mut self.actions);
        *self = Self { early_reports: early, actions, counters, ..Self::new(me, chunks) };
        let all = Step(u64::MAX);
        self.actions.extend([Action::DropNodes { step: all }, Action::DropFinals { step: all }]);
    }

    fn adopt(&mut self, world: Arc<World>) {
        let generation = world.generation;
        let former = self.world.replace(Arc::clone(&world));
        self.leaving = former
            .iter()
            .filter(|_| world.from.is_some())
            .flat_map(|w| w.nodes().collect::<Vec<_>>())
            .collect();
        self.former = former;
        self.leaving.retain(|n| !world.has_member(*n) && *n != self.me);
        if self.pending.as_ref().is_some_and(|p| p.generation <= generation) {
            self.pending = None;
        }
        self.reports = self.early_reports.remove(&generation).unwrap_or_default();
        self.early_reports = self.early_reports.split_off(&generation);
        let applied: Vec<(NodeId, Step)> =
            self.reports.iter().map(|(n, r)| (*n, r.applied)).collect();
        let has_passed = self.entry.take().is_some() || !self.is_reported;
        self.is_reported = false;
        self.known_applied.retain(|n, _| world.has_member(*n) || world.has_follower(*n));
        for (node, step) in applied {
            self.note_applied(node, step);
        }
        if let Some(state) = self.state {
            // It may have been out, and be needed again.
            self.note_applied(self.me, state.applied);
        }
        if !self.is_level && world.from.is_none() && world.has_follower(self.me) {
            self.forget_state();
        }
        for operation in self.operations.values_mut() {
            operation.suspend();
        }
        self.actions.push_back(Action::Adopted { generation });
        if self.is_excluded() {
            self.actions.push_back(Action::Excluded { generation });
            // Followers of the former world still wait for its boundary.
            self.tell_progress(self.listed().collect());
            // What it reported binds the others, and it leaves before it could pass it on.
            for node in world.nodes().filter(|_| world.from.is_some() && !has_passed) {
                self.offer_finals(&world, node);
            }
        }
        self.enter();
    }

    /// Reports, as soon as there is a world that lists this member and a state.
    fn enter(&mut self) {
        let Some(world) = self.world.clone() else { return };
        if self.is_reported || self.state.is_none() || !world.has_member(self.me) {
            return;
        }
        self.is_level = true;
        self.is_reported = true;
        self.served = Some(world.generation);
        let others: Vec<NodeId> =
            world.nodes().chain(self.leaving.iter().copied()).filter(|n| *n != self.me).collect();
        for node in others {
            self.send_report(node);
        }
        if let Some(report) = self.own_report() {
            self.reports.insert(self.me, report);
        }
        self.check_gate();
    }

    fn own_report(&self) -> Option<Report> {
        let (world, state) = (self.world.clone()?, self.state?);
        let mut nodes = Vec::new();
        for (step, operation) in &self.operations {
            nodes.extend(operation.held().into_iter().map(|(chunk, held)| (*step, chunk, held)));
        }
        for (step, waiting) in &self.quarantine {
            let mut by_chunk: BTreeMap<Chunk, BTreeSet<TreeNode>> = BTreeMap::new();
            // The others count on what is reported, so it must be of their state.
            for ((chunk, node), _) in waiting.iter().filter(|(_, (n, _))| world.has_member(*n)) {
                by_chunk.entry(*chunk).or_default().insert(*node);
            }
            nodes.extend(by_chunk.into_iter().map(|(chunk, held)| (*step, chunk, held)));
        }
        let finals = self.finals.iter().map(|(s, c)| (*s, c.keys().copied().collect())).collect();
        Some(Report { world, applied: state.applied, state: state.digest, finals, nodes })
    }

    fn send_report(&mut self, to: NodeId) {
        // The first report binds: what is sent again after a lost link is the one that was made on entering.
        let report = self.reports.get(&self.me).cloned().or_else(|| self.own_report());
        if let Some(report) = report {
            self.send(to, PeerFrame::Report(Box::new(report)));
        }
    }

    fn check_gate(&mut self) {
        let Some(world) = self.world.clone() else { return };
        if self.entry.is_some()
            || !self.is_reported
            || world.nodes().any(|n| !self.reports.contains_key(&n))
        {
            return;
        }
        let live = self.reports.values().map(|r| r.applied).max().unwrap_or(Step(0));
        let lowest = self.reports.values().map(|r| r.applied).min().unwrap_or(Step(0));
        let mut holdings: BTreeMap<Chunk, Vec<Holding>> = BTreeMap::new();
        let mut bound = BTreeSet::new();
        for node in world.nodes() {
            let Some(report) = self.reports.get(&node) else { continue };
            for (_, chunk, held) in report.nodes.iter().filter(|(step, ..)| *step == live) {
                holdings.entry(*chunk).or_default().push(Holding { node, held: held.clone() });
            }
            for (_, chunks) in report.finals.iter().filter(|(step, _)| *step == live) {
                bound.extend(chunks.iter().copied());
            }
        }
        self.entry = Some(Entry { live, holdings, bound });
        self.actions.push_back(Action::Entered { generation: world.generation });
        self.note_divergence();
        self.pass_finals(&world, lowest, live);
        // Followers count the boundaries of members; where nobody steps, no final tells them.
        self.tell_progress(world.followers.iter().map(|f| f.node).collect());
        self.plan_operations();
        self.retain_finals();
        self.drive();
    }

    /// Held finals pass on by their lowest-ranked holder's report.
    fn pass_finals(&mut self, world: &World, lowest: Step, live: Step) {
        for step in (lowest.0..=live.0).map(Step) {
            let held = self.finals.get(&step).into_iter().flat_map(|held| held.keys().copied());
            let passed: Vec<Chunk> = held.filter(|c| self.is_passer(step, *c)).collect();
            for chunk in passed {
                let lacking: Vec<NodeId> = world
                    .nodes()
                    .filter(|n| *n != self.me)
                    .filter(|n| {
                        self.reports
                            .get(n)
                            .is_some_and(|r| r.applied <= step && !reports_final(r, step, chunk))
                    })
                    .chain(world.followers.iter().map(|f| f.node))
                    .collect();
                for node in lacking {
                    self.counters.passed_finals += 1;
                    self.send_final(node, step, chunk);
                }
            }
        }
    }

    /// Offers the finals that a node may lack. To a member all that are held: who sent them first may have sent them under a world that
    /// it has left since. A follower asks for what it lacks, so it hears of those alone that nobody else offers.
    fn offer_finals(&mut self, world: &World, node: NodeId) {
        let known = self.known_applied.get(&node).copied().unwrap_or(Step(0));
        let members: Vec<NodeId> = world.nodes().collect();
        let held: Vec<(Step, Chunk)> =
            self.finals.range(known..).flat_map(|(s, cs)| cs.keys().map(|c| (*s, *c))).collect();
        let is_out = !self.is_member() && !world.has_follower(self.me);
        for (step, chunk) in held {
            let is_mine = || collectives::owner(chunk, &members) == self.me;
            if is_out || world.has_member(node) || is_mine() || self.is_passer(step, chunk) {
                self.send_final(node, step, chunk);
            }
        }
    }

    /// Whether this member is the lowest-ranked one that reported this final in the present world.
    fn is_passer(&self, step: Step, chunk: Chunk) -> bool {
        let Some(world) = &self.world else { return false };
        let holder =
            |n: &NodeId| self.reports.get(n).is_some_and(|r| reports_final(r, step, chunk));
        world.nodes().find(holder) == Some(self.me)
    }

    fn plan_operations(&mut self) {
        let Some((world, entry)) = self.world.as_ref().zip(self.entry.as_ref()) else { return };
        if world.held || !world.has_member(self.me) {
            return;
        }
        let applied = self.state.map(|s| s.applied);
        for (step, operation) in &mut self.operations {
            if Some(*step) == applied && *step == entry.live {
                operation.handle_plan(world, &entry.holdings, &entry.bound);
            } else if Some(*step) == applied && *step > entry.live {
                operation.handle_plan(world, &BTreeMap::new(), &BTreeSet::new());
            }
        }
    }

    fn begin_boundary(&mut self, applied: Step, digest: Digest) {
        self.state = Some(StateMark { applied, digest });
        self.digests.insert(applied, digest);
        while self.digests.len() > 8 {
            self.digests.pop_first();
        }
        self.handed_out.clear();
        self.offered_ready = None;
        self.note_applied(self.me, applied);
        self.quarantine.retain(|step, _| *step >= applied);
        let planned = self.pending.take_if(|w| w.from.is_none_or(|from| applied >= from));
        if let Some(world) = &self.world {
            let mut operation = Operation::new(self.me, world.virtual_ranks, self.chunks);
            for chunk in self.finals.get(&applied).into_iter().flat_map(BTreeMap::keys) {
                operation.handle_final(*chunk);
            }
            self.operations.insert(applied, operation);
        }
        for ((chunk, node), (from, state)) in self.quarantine.remove(&applied).unwrap_or_default() {
            if state != digest {
                self.diverged(from, applied, state);
            } else if let Some(operation) = self.operations.get_mut(&applied) {
                operation.handle_node(chunk, node);
            }
        }
        if let Some(world) = planned {
            self.adopt(world);
        } else {
            self.enter();
            self.plan_operations();
        }
        self.retain_finals();
        self.drive();
    }

    /// Offers what the present step's operation wants done, and the step itself once it may be applied.
    fn drive(&mut self) {
        let Some((world, state)) = self.world.clone().zip(self.state) else { return };
        let step = state.applied;
        self.is_level |= self.lowest_member() >= step;
        if let Some(operation) = self.operations.get_mut(&step) {
            while let Some(action) = operation.poll_action() {
                match action {
                    OperationAction::Send { chunk, node, to } => {
                        let (lineage, state) = (world.lineage, state.digest);
                        let frame = PeerFrame::Node(NodeName { lineage, step, chunk, node, state });
                        self.actions.push_back(Action::Send(Envelope { node: to, frame }));
                    }
                    OperationAction::Fold { .. } | OperationAction::Finish { .. } => {
                        self.actions.push_back(Action::Operation { step, action });
                    }
                }
            }
        }
        let all =
            self.finals.get(&step).is_some_and(|held| held.len() as u64 == u64::from(self.chunks));
        let may_apply = if world.has_member(self.me) {
            self.entry.is_some()
                && world.nodes().all(|n| self.known_applied.get(&n).is_some_and(|a| *a >= step))
        } else {
            world.has_follower(self.me) && self.is_applied_by_members(world.as_ref(), step)
        };
        if all && may_apply && self.offered_ready != Some(step) {
            self.offered_ready = Some(step);
            self.actions.push_back(Action::Ready { step });
        }
    }

    /// Whether a follower may take it that the members have applied a step. A planned world tells
    /// who of the present one may be gone: it leaves when the others have entered, and worlds between the two may have been missed here.
    fn is_applied_by_members(&self, world: &World, step: Step) -> bool {
        let is_applied = |n: NodeId| {
            self.known_applied.get(&n).copied().unwrap_or(Step(0)).max(self.lowest) > step
        };
        let pending = self.pending.as_deref();
        let stays = |n: &NodeId| pending.is_none_or(|p| p.has_member(*n));
        let mut listed = world.nodes().chain(pending.into_iter().flat_map(World::nodes));
        world.nodes().filter(stays).all(is_applied) && listed.any(|n| n != self.me && is_applied(n))
    }

    /// The boundary that all members are known to have reached.
    fn lowest_member(&self) -> Step {
        let members = self.world.iter().flat_map(|w| w.nodes());
        let known = members.map(|n| self.known_applied.get(&n).copied().unwrap_or(Step(0)));
        known.min().unwrap_or(Step(0)).max(self.lowest)
    }

    fn note_applied(&mut self, node: NodeId, applied: Step) {
        let known = self.known_applied.entry(node).or_insert(applied);
        *known = applied.max(*known);
    }

    fn note_lowest(&mut self, lowest: Step) {
        if lowest > self.lowest {
            self.lowest = lowest;
            let others = self.world.iter().flat_map(|w| w.nodes()).filter(|n| *n != self.me);
            for node in others.collect::<Vec<_>>() {
                self.note_applied(node, lowest);
            }
            self.retain_finals();
        }
    }

    fn note_divergence(&mut self) {
        let Some(state) = self.state else { return };
        let other = self
            .reports
            .iter()
            .filter(|(_, r)| r.applied == state.applied && r.state != state.digest);
        let found: Vec<(NodeId, Digest)> = other.map(|(n, r)| (*n, r.state)).collect();
        for (node, theirs) in found {
            self.diverged(node, state.applied, theirs);
        }
    }

    fn diverged(&mut self, node: NodeId, step: Step, theirs: Digest) {
        let ours = self.digests.get(&step).copied().unwrap_or_default();
        self.actions.push_back(Action::Diverged { node, step, theirs, ours });
    }

    /// Drops the finals that everybody has applied.
    fn retain_finals(&mut self) {
        let Some((world, state)) = self.world.as_ref().zip(self.state) else { return };
        let everybody = world.nodes().chain(world.followers.iter().map(|f| f.node));
        let needed =
            everybody.map(|n| self.known_applied.get(&n).copied().unwrap_or(Step(0))).min();
        let oldest = Step(state.applied.0.saturating_sub(FOLLOW_STEPS_MAX));
        let keep = needed.unwrap_or(oldest).max(oldest).min(state.applied);
        while let Some((&step, _)) = self.finals.first_key_value() {
            if step >= keep {
                break;
            }
            self.finals.remove(&step);
            self.actions.push_back(Action::DropFinals { step });
        }
    }

    /// A follower that has no state yet keeps only the newest finals.
    fn bound_unready_finals(&mut self) {
        while self.state.is_none() && self.finals.len() as u64 > FOLLOW_STEPS_MAX {
            if let Some((step, _)) = self.finals.pop_first() {
                self.actions.push_back(Action::DropFinals { step });
            }
        }
    }

    /// Members and followers of the present world.
    fn listed(&self) -> impl Iterator<Item = NodeId> {
        let world = self.world.iter();
        world.flat_map(|w| w.nodes().chain(w.followers.iter().map(|f| f.node)))
    }

    fn tell_progress(&mut self, to: Vec<NodeId>) {
        let Some((world, state)) = self.world.clone().zip(self.state) else { return };
        let (lineage, applied) = (world.lineage, state.applied);
        let me = self.me;
        for node in to.into_iter().filter(|n| *n != me) {
            self.send(node, PeerFrame::Progress { lineage, applied, state: state.digest });
        }
    }

    fn send_final(&mut self, to: NodeId, step: Step, chunk: Chunk) {
        // Who is out offers what it has under the world that it served: members of a later one count on reports alone.
        let Some((world, generation)) = self.world.as_ref().zip(self.served) else { return };
        let lowest =
            world.nodes().map(|n| self.known_applied.get(&n).copied().unwrap_or(Step(0))).min();
        let name = FinalName {
            generation,
            lineage: world.lineage,
            step,
            chunk,
            lowest: lowest.unwrap_or(Step(0)),
        };
        self.send(to, PeerFrame::Final(name));
    }

    fn send(&mut self, node: NodeId, frame: PeerFrame) {
        self.actions.push_back(Action::Send(Envelope { node, frame }));
    }
}

fn reports_final(report: &Report, step: Step, chunk: Chunk) -> bool {
    report.finals.iter().any(|(s, chunks)| *s == step && chunks.contains(&chunk))
}
