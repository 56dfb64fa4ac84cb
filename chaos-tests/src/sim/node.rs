//! A worker without sockets and threads: the real step machine, small gradients, and a simulated user.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use collectives::{Chunk, OperationAction};
use types::{
    Digest, Generation, Lineage, NodeId, Start, Step, Timestamp, TreeNode, VirtualRank,
    VirtualRanks, World,
};

use ripstop::state_copy::{CopyAction, StateCopy};
use ripstop::step_cycle::{Action, Envelope, PeerFrame, StepCycle, Verdict};

use crate::seed::{Rng, mix};

/// What all nodes of one run agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) v: VirtualRanks,
    pub(crate) chunks: u32,
    pub(crate) elements: usize,
    pub(crate) total: Step,
}

/// The state of the training: what a checkpoint would hold.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct TrainState {
    pub(crate) boundary: Step,
    pub(crate) digest: Digest,
    numbers: Vec<f32>,
}

impl TrainState {
    pub(crate) fn initial(shape: Shape) -> Self {
        let numbers = vec![1.0; shape.chunks as usize * shape.elements];
        Self { boundary: Step(0), digest: Digest::of(b"initial"), numbers }
    }

    /// The gradient of one virtual rank, with magnitudes so different that another order of summation gives other bits. `noise` is
    /// what an impure leaf function adds: it makes every computation of a leaf unique.
    pub(crate) fn leaf(&self, shape: Shape, rank: VirtualRank, chunk: u32, noise: u64) -> Vec<f32> {
        let head =
            u64::from_le_bytes(self.digest.0[..8].try_into().expect("a digest has 32 bytes"));
        let seed = mix(head ^ mix(u64::from(rank.0) << 32 | u64::from(chunk)) ^ noise);
        let mut rng = Rng(seed ^ u64::from(self.numbers[chunk as usize].to_bits()));
        let number = |_| {
            let bits = rng.next_u64();
            let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
            let mantissa = 1.0 + (bits >> 40) as f32 / (1 << 24) as f32;
            sign * mantissa * 2.0_f32.powi((bits >> 1) as i32 % 16)
        };
        (0..shape.elements).map(number).collect()
    }

    pub(crate) fn apply(&mut self, finals: &[Vec<f32>]) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.digest.0);
        for (number, x) in self.numbers.iter_mut().zip(finals.iter().flatten()) {
            hasher.update(&x.to_le_bytes());
            *number -= x * 0.01;
        }
        self.digest = hasher.finalize().into();
        self.boundary = self.boundary.next();
    }

    /// The next state of an undisturbed run: the canonical tree, folded by its definition.
    pub(crate) fn undisturbed_next(&self, shape: Shape) -> Self {
        let fold_chunk = |chunk| {
            let leaf = |node: TreeNode| Some(self.leaf(shape, VirtualRank(node.start()), chunk, 0));
            let only_leaves = |node: TreeNode| node.is_leaf().then(|| leaf(node)).flatten();
            finish(shape.v, &only_leaves)
        };
        let finals: Vec<Vec<f32>> = (0..shape.chunks).map(fold_chunk).collect();
        let mut next = self.clone();
        next.apply(&finals);
        next
    }
}

/// The digest of one piece of a state, which has no pieces here.
fn piece_digest(state: &TrainState, piece: u32) -> Digest {
    Digest::of(&[&state.digest.0[..], &piece.to_le_bytes()].concat())
}

fn add(left: Vec<f32>, right: &[f32]) -> Vec<f32> {
    left.into_iter().zip(right).map(|(l, r)| l + r).collect()
}

fn finish(v: VirtualRanks, held: &impl Fn(TreeNode) -> Option<Vec<f32>>) -> Vec<f32> {
    fn fold(
        v: VirtualRanks,
        node: TreeNode,
        held: &impl Fn(TreeNode) -> Option<Vec<f32>>,
    ) -> Vec<f32> {
        let node = node.canonical(v);
        if let Some(value) = held(node) {
            return value;
        }
        let (left, right) = node.children().expect("the cover has each leaf");
        add(fold(v, left, held), &fold(v, right, held))
    }
    let mut sum = fold(v, v.root(), held);
    sum.iter_mut().for_each(|x| *x /= v.count() as f32);
    sum
}

/// The body of a frame.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    Nothing,
    Floats(Vec<f32>),
    State(Box<TrainState>),
}

/// What the user's thread does for some time.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Leaf { lineage: Lineage, step: Step, rank: VirtualRank },
    Apply { finals: Vec<Vec<f32>> },
    Restore { lineage: Lineage, start: Start },
    Load { lineage: Lineage, state: TrainState },
}

#[derive(Clone, Debug)]
pub(crate) enum User {
    /// Between two steps: it has asked for the next.
    AtBoundary,
    /// In a step: it has asked for a virtual rank.
    InStep(Step),
    Busy(Work, Option<Step>),
}

/// What happened that the simulation wants to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Note {
    Adopted(Generation),
    Entered(Generation),
    Ready,
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) cycle: StepCycle,
    pub(crate) state: Option<(Lineage, TrainState)>,
    pub(crate) user: User,
    pub(crate) outbox: Vec<(NodeId, PeerFrame, Body)>,
    pub(crate) notes: Vec<Note>,
    /// Every leaf that was contributed, by lineage and step.
    pub(crate) contributed: BTreeMap<(Lineage, Step), Vec<VirtualRank>>,
    /// Chunks that were folded to a final here.
    pub(crate) finished: Vec<(Step, Chunk)>,
    shape: Shape,
    noise: u64,
    nodes: BTreeMap<(Step, Chunk, TreeNode), Vec<f32>>,
    pub(crate) finals: BTreeMap<(Step, Chunk), Vec<f32>>,
    restore: Option<(Lineage, Start)>,
    copy: StateCopy,
    copied: BTreeMap<u32, TrainState>,
    fetched: Option<(Lineage, TrainState)>,
    now: Timestamp,
}

impl Node {
    /// `noise` 0: pure leaf functions.
    pub(crate) fn new(id: NodeId, shape: Shape, noise: u64) -> Self {
        Self {
            id,
            cycle: StepCycle::new(id, shape.chunks),
            state: None,
            user: User::AtBoundary,
            outbox: Vec::new(),
            notes: Vec::new(),
            contributed: BTreeMap::new(),
            finished: Vec::new(),
            shape,
            noise,
            nodes: BTreeMap::new(),
            finals: BTreeMap::new(),
            restore: None,
            copy: StateCopy::new(id, STATE_PIECES, Some(shape.total), COPY_TARGET),
            copied: BTreeMap::new(),
            fetched: None,
            now: Timestamp(0),
        }
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn handle_world(&mut self, world: Arc<World>) {
        self.cycle.handle_world(world);
        self.drain();
    }

    pub(crate) fn handle_link_up(&mut self, node: NodeId) {
        self.cycle.handle_link_up(node);
        self.copy.handle_link_up(node);
        self.drain();
    }

    pub(crate) fn handle_frame(&mut self, from: NodeId, frame: PeerFrame, body: Body) {
        match (frame, body) {
            (PeerFrame::Report(report), _) => self.cycle.handle_report(from, *report),
            (PeerFrame::Node(name), Body::Floats(value)) => {
                if self.cycle.handle_node(from, name) == Verdict::Keep {
                    self.nodes.insert((name.step, name.chunk, name.node), value);
                }
            }
            (PeerFrame::Final(name), Body::Floats(value)) => {
                if self.cycle.handle_final(name) == Verdict::Keep {
                    self.finals.insert((name.step, name.chunk), value);
                }
            }
            (PeerFrame::Progress { lineage, applied, state }, _) => {
                self.cycle.handle_progress(from, lineage, applied, state);
            }
            (PeerFrame::FinalRequest { lineage, step, chunks }, _) => {
                self.cycle.handle_final_request(from, lineage, step, &chunks);
            }
            (PeerFrame::StateRequest { lineage, boundary, pieces }, _) => {
                if let Some(at) = self.cycle.boundaries() {
                    let pieces = pieces.into_iter().collect();
                    self.copy.handle_request(from, (lineage, boundary), pieces, at);
                }
            }
            (PeerFrame::StateOffer { lineage, applied, state: digest }, Body::State(state)) => {
                assert_eq!(state.digest, digest, "a state goes with its digest");
                let digests = (0..STATE_PIECES).map(|piece| piece_digest(&state, piece)).collect();
                self.copy.handle_offer(self.now, from, (lineage, applied, digest), digests);
            }
            (PeerFrame::StatePiece { lineage, applied, piece }, Body::State(state)) => {
                let digest = piece_digest(&state, piece);
                let what = (lineage, applied, piece);
                if self.copy.handle_piece(self.now, from, what, digest) == Verdict::Keep {
                    self.copied.insert(piece, *state);
                }
            }
            (PeerFrame::StateMissed { lineage, boundary, applied }, _) => {
                self.copy.handle_missed(from, lineage, boundary, applied);
                self.fetch_state();
            }
            (frame, body) => panic!("{frame:?} does not go with {body:?}"),
        }
        self.drain();
    }

    /// Now and then a follower asks for what it lacks.
    pub(crate) fn handle_tick(&mut self, now: Timestamp) {
        self.now = now;
        if !self.cycle.is_member()
            && let Some((node, frame)) = self.cycle.missing_finals()
        {
            self.outbox.push((node, frame, Body::Nothing));
        }
        self.fetch_state();
        self.drain();
    }

    fn fetch_state(&mut self) {
        let Some(at) = self.cycle.boundaries() else { return };
        let is_wanted = at.world.has_follower(self.id)
            && at.applied.is_none()
            && self.restore.is_none()
            && self.fetched.is_none()
            && matches!(self.user, User::AtBoundary);
        self.copy.handle_turn(self.now, at, is_wanted);
    }

    /// Lets the user go on; returns what it begins to do.
    pub(crate) fn poll_work(&mut self) -> Option<Work> {
        loop {
            let work = match self.user {
                User::Busy(..) => return None,
                User::AtBoundary => self.next_order()?,
                User::InStep(step) => self.next_rank(step)?,
            };
            if let Some(work) = work {
                let step = match self.user {
                    User::InStep(step) => Some(step),
                    _ => None,
                };
                self.user = User::Busy(work.clone(), step);
                return Some(work);
            }
        }
    }

    /// `None`: wait. `Some(None)`: something else became of the user.
    #[expect(clippy::option_option, reason = "three answers, used in one place")]
    fn next_order(&mut self) -> Option<Option<Work>> {
        if let Some((lineage, start)) = self.restore.take() {
            return Some(Some(Work::Restore { lineage, start }));
        }
        if let Some((lineage, state)) = self.fetched.take() {
            return Some(Some(Work::Load { lineage, state }));
        }
        let step = self.cycle.applied()?;
        let world = Arc::clone(self.cycle.world()?);
        if let Some(at) = self.cycle.boundaries() {
            self.copy.handle_boundary(at);
        }
        if self.cycle.entered().is_some() && self.copy.due(step).is_some() {
            self.send_state();
        }
        self.drain_copy();
        let may_step = !world.held || self.cycle.is_ready(step);
        let may_begin = if self.cycle.is_member() {
            self.cycle.entered().is_some() && may_step
        } else {
            world.has_follower(self.id) && may_step
        };
        if step >= self.shape.total || !may_begin {
            return None;
        }
        self.user = User::InStep(step);
        Some(None)
    }

    #[expect(clippy::option_option, reason = "three answers, used in one place")]
    fn next_rank(&mut self, step: Step) -> Option<Option<Work>> {
        let is_void = self.restore.is_some()
            || self.cycle.applied() != Some(step)
            || self.cycle.is_excluded();
        let is_held = self.cycle.world().is_some_and(|w| w.held);
        if self.cycle.is_ready(step) && !is_void {
            let sum = |chunk| {
                let name = (step, Chunk(chunk));
                self.finals.get(&name).cloned().expect("a step that is ready has its finals")
            };
            return Some(Some(Work::Apply { finals: (0..self.shape.chunks).map(sum).collect() }));
        }
        if is_void || is_held {
            self.user = User::AtBoundary;
            return Some(None);
        }
        let Some(rank) = self.cycle.poll_virtual_rank() else {
            assert_eq!(self.cycle.owed(), None, "node {}: each leaf was contributed", self.id);
            return None;
        };
        let lineage = self.cycle.lineage().expect("there is a world");
        Some(Some(Work::Leaf { lineage, step, rank }))
    }

    /// The user has done it. `load` finds the state that a lineage starts with.
    pub(crate) fn handle_done(&mut self, load: impl Fn(&Start) -> TrainState) {
        let User::Busy(work, step) = std::mem::replace(&mut self.user, User::AtBoundary) else {
            panic!("the user of node {} was not busy", self.id);
        };
        match work {
            Work::Leaf { lineage, step: at, rank } => {
                let (_, state) = self.state.as_ref().expect("a leaf needs a state");
                assert_eq!(state.boundary, at, "node {}: a leaf of another step", self.id);
                let leaf = |chunk| state.leaf(self.shape, rank, chunk, self.noise);
                let leaf: Vec<Vec<f32>> = (0..self.shape.chunks).map(leaf).collect();
                let given = self.contributed.entry((lineage, at)).or_default();
                assert!(!given.contains(&rank), "node {}: leaf {rank} of {at} twice", self.id);
                given.push(rank);
                for chunk in self.cycle.handle_leaf(at, rank) {
                    let name = (at, chunk, TreeNode::leaf(rank));
                    self.nodes.insert(name, leaf[chunk.0 as usize].clone());
                }
                self.user = User::InStep(step.expect("leaves are computed in a step"));
            }
            Work::Apply { finals } => {
                let (_, state) = self.state.as_mut().expect("a step needs a state");
                state.apply(&finals);
                self.cycle.handle_applied(state.boundary, state.digest);
            }
            Work::Restore { lineage, start } => {
                let state = load(&start);
                self.loaded(lineage, state);
            }
            Work::Load { lineage, state } => self.loaded(lineage, state),
        }
        self.drain();
    }

    fn loaded(&mut self, lineage: Lineage, state: TrainState) {
        let (applied, digest) = (state.boundary, state.digest);
        self.state = Some((lineage, state));
        self.cycle.handle_state(lineage, applied, digest);
    }

    fn send_state(&mut self) {
        let Some((lineage, state)) = self.state.clone() else { return };
        let (applied, digest) = (state.boundary, state.digest);
        assert_eq!(self.cycle.applied(), Some(applied), "the copy is of this boundary");
        for (node, pieces) in self.copy.take_due(applied) {
            let frame = PeerFrame::StateOffer { lineage, applied, state: digest };
            self.outbox.push((node, frame, Body::State(Box::new(state.clone()))));
            for piece in pieces {
                let frame = PeerFrame::StatePiece { lineage, applied, piece };
                self.outbox.push((node, frame, Body::State(Box::new(state.clone()))));
            }
        }
    }

    fn drain_copy(&mut self) {
        while let Some(action) = self.copy.poll_action() {
            match action {
                CopyAction::Send(Envelope { node, frame }) => {
                    assert_ne!(node, self.id, "nobody copies from itself");
                    self.outbox.push((node, frame, Body::Nothing));
                }
                CopyAction::Discard => self.copied.clear(),
                CopyAction::Complete { lineage, applied, digest } => {
                    let copied = std::mem::take(&mut self.copied);
                    assert_eq!(copied.len(), STATE_PIECES as usize, "all pieces are held");
                    let is_it = |s: &TrainState| s.boundary == applied && s.digest == digest;
                    assert!(copied.values().all(is_it), "all pieces are of one state");
                    self.fetched = copied.into_values().next().map(|state| (lineage, state));
                }
                CopyAction::Dropped { .. } => {}
            }
        }
    }

    fn drain(&mut self) {
        self.drain_copy();
        while let Some(action) = self.cycle.poll_action() {
            match action {
                Action::Send(Envelope { node, frame }) => {
                    let body = match &frame {
                        PeerFrame::Node(name) => {
                            let key = (name.step, name.chunk, name.node);
                            Body::Floats(self.nodes.get(&key).cloned().unwrap_or_else(|| {
                                panic!("node {} offers {name:?}, which is not held", self.id)
                            }))
                        }
                        PeerFrame::Final(name) => {
                            let key = (name.step, name.chunk);
                            Body::Floats(self.finals.get(&key).cloned().unwrap_or_else(|| {
                                panic!("node {} offers {name:?}, which is not held", self.id)
                            }))
                        }
                        _ => Body::Nothing,
                    };
                    assert_ne!(node, self.id, "nobody sends to itself");
                    self.outbox.push((node, frame, body));
                }
                Action::Operation { step, action } => self.operate(step, action),
                Action::DropNodes { step } => self.nodes.retain(|(s, ..), _| *s > step),
                Action::DropFinals { step } => self.finals.retain(|(s, _), _| *s > step),
                Action::Restore { lineage, start } => {
                    self.copy.handle_restart();
                    self.copied.clear();
                    self.fetched = None;
                    self.restore = Some((lineage, start));
                }
                Action::Adopted { generation } => self.notes.push(Note::Adopted(generation)),
                Action::Entered { generation } => self.notes.push(Note::Entered(generation)),
                Action::Ready { .. } => self.notes.push(Note::Ready),
                Action::Excluded { .. } | Action::Diverged { .. } => {}
            }
        }
    }

    fn operate(&mut self, step: Step, action: OperationAction) {
        match action {
            OperationAction::Fold { chunk, left, right, parent } => {
                let mut take = |node| {
                    let value = self.nodes.remove(&(step, chunk, node));
                    value.unwrap_or_else(|| panic!("node {} folds {node} unheld", self.id))
                };
                let sum = add(take(left), &take(right));
                self.nodes.insert((step, chunk, parent), sum);
            }
            OperationAction::Finish { chunk, cover } => {
                let held = |node: TreeNode| {
                    let value = cover.contains(&node).then(|| self.nodes.get(&(step, chunk, node)));
                    value.map(|v| v.cloned().expect("a cover is held"))
                };
                let value = finish(self.shape.v, &held);
                self.finals.insert((step, chunk), value);
                self.finished.push((step, chunk));
                self.cycle.handle_finished(step, chunk);
            }
            OperationAction::Send { .. } => panic!("sends of an operation come as frames"),
        }
    }
}

/// Into so many pieces a state is cut for copying.
const STATE_PIECES: u32 = 5;
const COPY_TARGET: Duration = Duration::from_millis(200);
