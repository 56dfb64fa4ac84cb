//! A few workers whose every move the test decides: frames arrive at once and in order, users work when they are told.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use types::{
    Address, Digest, Follower, Generation, Lineage, Member, NodeId, Origin, Start, Step, Timestamp,
    TreeNode, VirtualRanks, World,
};

use super::super::PeerFrame;
use super::node::{Body, Node, Shape, TrainState, User};

/// Members with their blocks.
pub(super) type Members<'a> = &'a [(u64, &'a [(u32, u8)])];

/// Says whether a frame from one node to another is lost.
type Loses = fn(u64, u64, &PeerFrame) -> bool;

/// A few workers.
pub(super) struct Rig {
    pub(super) nodes: BTreeMap<u64, Node>,
    pub(super) shape: Shape,
    /// Users begin no step from this boundary on.
    pub(super) limit: Step,
    pub(super) loses: Loses,
    generation: u64,
    queue: VecDeque<(u64, u64, PeerFrame, Body)>,
}

impl Rig {
    pub(super) fn new(ids: &[u64], v: u32, chunks: u32) -> Self {
        let total = Step(6);
        let v = VirtualRanks::new(v).unwrap();
        let shape = Shape { v, chunks, elements: 5, total };
        let node = |id: &u64| (*id, Node::new(NodeId(*id), shape, 0));
        Self {
            nodes: ids.iter().map(node).collect(),
            shape,
            limit: total,
            loses: |_, _, _| false,
            generation: 0,
            queue: VecDeque::new(),
        }
    }

    /// The next world, told to everybody alive.
    pub(super) fn world(&mut self, from: Option<u64>, members: Members<'_>, followers: &[u64]) {
        self.generation += 1;
        let address =
            Address { socket: ([127, 0, 0, 1], 1).into(), certificate: Digest::default() };
        let block = |(start, level): &(u32, u8)| TreeNode::new(*start, *level).unwrap();
        let member = |(id, blocks): &(u64, &[(u32, u8)])| Member {
            node: NodeId(*id),
            address: address.clone(),
            host: String::new(),
            blocks: blocks.iter().map(block).collect(),
        };
        let follower = |id: &u64| Follower {
            node: NodeId(*id),
            address: address.clone(),
            host: String::new(),
        };
        let start = Start { step: Step(0), origin: Origin::Initial, digest: None };
        let world = Arc::new(World {
            generation: Generation(self.generation),
            lineage: Lineage(1),
            virtual_ranks: self.shape.v,
            from: from.map(Step),
            held: false,
            start: (self.generation == 1).then_some(start),
            members: members.iter().map(member).collect(),
            followers: followers.iter().map(follower).collect(),
        });
        world.check().unwrap();
        for id in self.ids() {
            self.node(id).handle_world(Arc::clone(&world));
        }
        self.deliver();
    }

    pub(super) fn node(&mut self, id: u64) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    pub(super) fn kill(&mut self, id: u64) {
        self.nodes.remove(&id);
    }

    /// Everything that is under way arrives.
    pub(super) fn deliver(&mut self) {
        loop {
            for (id, node) in &mut self.nodes {
                for (to, frame, body) in std::mem::take(&mut node.outbox) {
                    self.queue.push_back((*id, to.0, frame, body));
                }
            }
            let Some((from, to, frame, body)) = self.queue.pop_front() else { return };
            if let Some(node) = self.nodes.get_mut(&to).filter(|_| !(self.loses)(from, to, &frame))
            {
                node.handle_frame(NodeId(from), frame, body);
            }
        }
    }

    /// One user does one thing; false if it has nothing to do.
    pub(super) fn work(&mut self, id: u64) -> bool {
        let (limit, shape) = (self.limit, self.shape);
        let node = self.node(id);
        let is_at_limit = node.cycle.applied().is_some_and(|at| at >= limit);
        if is_at_limit && matches!(node.user, User::AtBoundary) {
            return false;
        }
        let is_busy = node.poll_work().is_some();
        if is_busy {
            node.handle_done(|_| TrainState::initial(shape));
        }
        self.deliver();
        is_busy
    }

    fn work_all(&mut self) -> bool {
        let mut any = false;
        for id in self.ids() {
            any |= self.work(id);
        }
        any
    }

    /// All users work until nobody has anything to do.
    pub(super) fn run(&mut self, limit: u64) {
        self.limit = Step(limit);
        for _ in 0..2 {
            self.nodes.values_mut().for_each(|node| node.handle_tick(Timestamp(0)));
            self.deliver();
            while self.work_all() {}
        }
    }

    /// How many leaves a node contributed to a step.
    pub(super) fn leaves(&self, id: u64, step: u64) -> usize {
        let given = &self.nodes[&id].contributed;
        given.get(&(Lineage(1), Step(step))).map_or(0, Vec::len)
    }

    /// All have the bits of an undisturbed run at their boundary, which is this one.
    pub(super) fn check_bits(&self, boundary: u64) {
        let mut state = TrainState::initial(self.shape);
        for _ in 0..boundary {
            state = state.undisturbed_next(self.shape);
        }
        for (id, node) in &self.nodes {
            let (_, theirs) = node.state.as_ref().unwrap();
            assert_eq!(theirs.boundary, Step(boundary), "boundary of node {id}");
            assert_eq!(theirs.digest, state.digest, "bits of node {id}");
        }
    }
}
