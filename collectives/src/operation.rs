//! [`Operation`]: the sum of one step, as one member sees it.
//!
//! A pure machine: it speaks of chunks and tree nodes, never of their bytes. It knows which nodes are held here, follows the plan of the
//! current generation, and says what to do next: fold two held nodes, send a node to the owner of its chunk, finish an owned chunk.
//! What it holds never becomes stale: a new world changes the plan, not the nodes.
//!
//! Promises: nothing is folded, sent or finished while the plan is suspended (between adopting a world and having everybody's report);
//! only nodes inside of one's own pieces are folded, so whatever a report listed can still be provided; a chunk whose final is known is
//! never finished again.

use std::collections::{BTreeMap, BTreeSet};

use types::{NodeId, TreeNode, VirtualRank, VirtualRanks, World};

use crate::chunk::Chunk;
use crate::fold::{Fold, cover, foldable};
use crate::owner::owner;
use crate::plan::{ChunkPlan, Holding, default_plan, plan_chunk};

/// What the shell must do; the machine counts it as done once it was offered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Add two held nodes of a chunk: `parent` = `left` + `right`; the two are then gone.
    Fold {
        /// The chunk.
        chunk: Chunk,
        /// The left summand.
        left: TreeNode,
        /// The right summand.
        right: TreeNode,
        /// The name of the sum.
        parent: TreeNode,
    },
    /// Send a held node to the owner of its chunk; it stays held.
    Send {
        /// The chunk.
        chunk: Chunk,
        /// The node.
        node: TreeNode,
        /// The owner.
        to: NodeId,
    },
    /// Fold the held nodes that cover the tree, divide, and call [`Operation::handle_final`]: this member owns the chunk.
    Finish {
        /// The chunk.
        chunk: Chunk,
        /// The held nodes to fold, in leaf order.
        cover: Vec<TreeNode>,
    },
}

/// The sum of one step, as one member sees it.
#[derive(Clone, Debug)]
pub struct Operation {
    me: NodeId,
    virtual_ranks: VirtualRanks,
    chunks: Vec<ChunkState>,
    contributed: BTreeSet<VirtualRank>,
    /// The numbers of the chunks at which something may be to do.
    stirred: BTreeSet<u32>,
    /// All leaves that the plan wanted from this member when it was made. They only get fewer.
    planned: BTreeSet<VirtualRank>,
}

#[derive(Clone, Debug, Default)]
struct ChunkState {
    held: BTreeSet<TreeNode>,
    plan: Option<ChunkPlan>,
    /// My pieces of the plan.
    mine: BTreeSet<TreeNode>,
    sent: BTreeSet<TreeNode>,
    is_final: bool,
    is_finishing: bool,
}

impl Operation {
    /// The sum of `chunks` chunks over the job's virtual ranks, with nothing held and no plan.
    #[must_use]
    pub fn new(me: NodeId, virtual_ranks: VirtualRanks, chunks: u32) -> Self {
        let chunks = (0..chunks).map(|_| ChunkState::default()).collect();
        Self {
            me,
            virtual_ranks,
            chunks,
            contributed: BTreeSet::new(),
            stirred: BTreeSet::new(),
            planned: BTreeSet::new(),
        }
    }

    /// A new world was adopted: nothing is folded, sent or finished until [`Self::handle_plan`].
    pub fn suspend(&mut self) {
        self.planned.clear();
        for state in &mut self.chunks {
            state.plan = None;
            state.mine.clear();
            state.sent.clear();
        }
    }

    /// The world's plan takes effect. `holdings` is what the members reported to hold of each chunk (absent: nobody holds anything);
    /// chunks in `bound` have a final somewhere, so they are waited for instead of folded.
    pub fn handle_plan(
        &mut self,
        world: &World,
        holdings: &BTreeMap<Chunk, Vec<Holding>>,
        bound: &BTreeSet<Chunk>,
    ) {
        let members: Vec<NodeId> = world.nodes().collect();
        self.planned.clear();
        for (number, state) in (0..).zip(&mut self.chunks) {
            let chunk = Chunk(number);
            state.sent.clear();
            state.mine.clear();
            state.plan = None;
            if state.is_final || bound.contains(&chunk) {
                continue;
            }
            let owner = owner(chunk, &members);
            let plan = match holdings.get(&chunk) {
                Some(held) => plan_chunk(world, owner, held),
                None => default_plan(world, owner),
            };
            state.mine =
                plan.pieces.iter().filter(|p| p.provider == self.me).map(|p| p.tree_node).collect();
            self.planned.extend(plan.needs(self.me));
            self.stirred.insert(number);
            state.plan = Some(plan);
        }
    }

    /// The leaf of a virtual rank was contributed here. Returns the chunks for which the shell must keep its bytes: those that are not
    /// final and hold no node over it yet.
    pub fn handle_leaf(&mut self, rank: VirtualRank) -> Vec<Chunk> {
        if rank.0 >= self.virtual_ranks.count() || !self.contributed.insert(rank) {
            return Vec::new();
        }
        let leaf = TreeNode::leaf(rank);
        let mut kept = Vec::new();
        for (number, state) in (0..).zip(&mut self.chunks) {
            if !state.is_final && !state.covers(leaf) {
                state.held.insert(leaf);
                self.stirred.insert(number);
                kept.push(Chunk(number));
            }
        }
        kept
    }

    /// A node arrived from another member. Returns whether the shell must keep its bytes.
    pub fn handle_node(&mut self, chunk: Chunk, node: TreeNode) -> bool {
        let v = self.virtual_ranks;
        let Some(state) = self.chunks.get_mut(chunk.0 as usize) else { return false };
        if state.is_final || node.is_outside(v) || node.canonical(v) != node || state.covers(node) {
            return false;
        }
        self.stirred.insert(chunk.0);
        state.held.insert(node)
    }

    /// The final of a chunk is known here. Returns whether that is news.
    pub fn handle_final(&mut self, chunk: Chunk) -> bool {
        let Some(state) = self.chunks.get_mut(chunk.0 as usize) else { return false };
        !std::mem::replace(&mut state.is_final, true)
    }

    /// The link to `peer` was lost and is up again: what was sent to it is offered again.
    pub fn handle_link_up(&mut self, peer: NodeId) {
        for (number, state) in (0..).zip(&mut self.chunks) {
            if state.plan.as_ref().is_some_and(|p| p.owner == peer) {
                self.stirred.insert(number);
                state.sent.clear();
            }
        }
    }

    /// What to do next, until `None`.
    pub fn poll_action(&mut self) -> Option<Action> {
        while let Some(number) = self.stirred.first().copied() {
            if let Some(action) = self.next_action(number) {
                return Some(action);
            }
            self.stirred.remove(&number);
        }
        None
    }

    fn next_action(&mut self, number: u32) -> Option<Action> {
        let (me, v) = (self.me, self.virtual_ranks);
        let state = self.chunks.get_mut(number as usize)?;
        if state.is_final || state.is_finishing {
            return None;
        }
        let (chunk, owner) = (Chunk(number), state.plan.as_ref()?.owner);
        if let Some(Fold { left, right, parent }) = foldable(v, &state.held, &state.mine) {
            state.held.remove(&left);
            state.held.remove(&right);
            state.held.insert(parent);
            return Some(Action::Fold { chunk, left, right, parent });
        }
        if owner == me {
            let cover = cover(v, &state.held)?;
            state.is_finishing = true;
            return Some(Action::Finish { chunk, cover });
        }
        let node = state.unsent_piece()?;
        state.sent.insert(node);
        Some(Action::Send { chunk, node, to: owner })
    }

    /// The virtual ranks whose leaves the plan still wants from this member, and which it neither holds nor was given.
    #[must_use]
    pub fn to_compute(&self) -> BTreeSet<VirtualRank> {
        if self.planned.is_subset(&self.contributed) {
            return BTreeSet::new();
        }
        let planned = self.chunks.iter().filter(|s| !s.is_final && !s.is_finishing);
        let mut ranks = BTreeSet::new();
        for state in planned {
            let wanted = state.plan.as_ref().and_then(|plan| plan.to_compute.get(&self.me));
            ranks.extend(
                wanted
                    .into_iter()
                    .flatten()
                    .filter(|r| !state.covers(TreeNode::leaf(**r)))
                    .copied(),
            );
        }
        ranks.retain(|rank| !self.contributed.contains(rank));
        ranks
    }

    /// What is held of each chunk, for a report. Chunks of which nothing is held are left out.
    #[must_use]
    pub fn held(&self) -> BTreeMap<Chunk, BTreeSet<TreeNode>> {
        let all = (0..).map(Chunk).zip(&self.chunks);
        all.filter(|(_, s)| !s.held.is_empty() && !s.is_final)
            .map(|(c, s)| (c, s.held.clone()))
            .collect()
    }

    /// How many leaves were contributed here.
    #[must_use]
    pub fn contributed(&self) -> usize {
        self.contributed.len()
    }
}

impl ChunkState {
    /// A held node that provides one of my pieces and was not sent yet. It may be larger than the piece: a late frame of a dead member may
    /// have brought a node that no report listed, and whatever covers the piece is as good.
    fn unsent_piece(&self) -> Option<TreeNode> {
        let provided =
            |piece: &TreeNode| self.held.iter().find(|held| held.contains(*piece)).copied();
        self.mine.iter().filter_map(provided).find(|node| !self.sent.contains(node))
    }

    fn covers(&self, node: TreeNode) -> bool {
        self.held.iter().any(|held| held.contains(node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Address, Digest, Generation, Lineage, Member};

    fn node(start: u32, level: u8) -> TreeNode {
        TreeNode::new(start, level).unwrap()
    }

    /// A world of these members and their blocks; four virtual ranks.
    fn world(members: &[(u64, (u32, u8))]) -> World {
        let member = |(id, (start, level)): &(u64, (u32, u8))| Member {
            node: NodeId(*id),
            address: Address { socket: ([127, 0, 0, 1], 1).into(), certificate: Digest::default() },
            host: String::new(),
            blocks: vec![node(*start, *level)],
        };
        World {
            generation: Generation(1),
            lineage: Lineage(1),
            virtual_ranks: VirtualRanks::new(4).unwrap(),
            from: None,
            held: false,
            start: None,
            members: members.iter().map(member).collect(),
            followers: Vec::new(),
        }
    }

    fn two() -> World {
        let world = world(&[(1, (0, 1)), (2, (2, 1))]);
        assert_eq!(owner(CHUNK, &[NodeId(1), NodeId(2)]), NodeId(2), "the cases below count on it");
        world
    }

    fn operation(me: u64) -> Operation {
        Operation::new(NodeId(me), VirtualRanks::new(4).unwrap(), 1)
    }

    fn planned(me: u64) -> Operation {
        let mut operation = operation(me);
        operation.handle_plan(&two(), &BTreeMap::new(), &BTreeSet::new());
        operation
    }

    fn actions(operation: &mut Operation) -> Vec<Action> {
        std::iter::from_fn(|| operation.poll_action()).collect()
    }

    fn ranks(operation: &Operation) -> Vec<u32> {
        operation.to_compute().into_iter().map(|r| r.0).collect()
    }

    fn fold(left: TreeNode, right: TreeNode) -> Action {
        Action::Fold { chunk: CHUNK, left, right, parent: left.parent().unwrap() }
    }

    const CHUNK: Chunk = Chunk(0);

    #[test]
    fn a_member_folds_its_piece_and_sends_it_once() {
        let mut one = planned(1);
        assert_eq!(ranks(&one), [0, 1]);
        assert_eq!(one.handle_leaf(VirtualRank(1)), [CHUNK]);
        assert_eq!(actions(&mut one), [], "a piece travels whole");
        assert_eq!(one.handle_leaf(VirtualRank(0)), [CHUNK]);
        assert_eq!(one.handle_leaf(VirtualRank(0)), [], "a leaf counts once");
        let send = Action::Send { chunk: CHUNK, node: node(0, 1), to: NodeId(2) };
        assert_eq!(actions(&mut one), [fold(node(0, 0), node(1, 0)), send.clone()]);
        assert_eq!(one.held()[&CHUNK], BTreeSet::from([node(0, 1)]), "what was sent stays");
        assert_eq!(actions(&mut one), []);
        one.handle_link_up(NodeId(3));
        assert_eq!(actions(&mut one), []);
        one.handle_link_up(NodeId(2));
        assert_eq!(actions(&mut one), [send]);
    }

    #[test]
    fn an_owner_finishes_once_with_nodes_in_leaf_order() {
        let mut two = planned(2);
        two.handle_leaf(VirtualRank(3));
        two.handle_leaf(VirtualRank(2));
        assert!(two.handle_node(CHUNK, node(0, 1)));
        assert!(!two.handle_node(CHUNK, node(0, 1)), "it is held");
        assert!(!two.handle_node(CHUNK, node(0, 0)), "it is covered");
        let finish = Action::Finish { chunk: CHUNK, cover: vec![node(0, 1), node(2, 1)] };
        assert_eq!(actions(&mut two), [fold(node(2, 0), node(3, 0)), finish]);
        assert!(two.handle_final(CHUNK));
        assert!(!two.handle_final(CHUNK));
        assert_eq!((actions(&mut two), ranks(&two)), (vec![], vec![]));
        assert!(two.held().is_empty(), "nobody needs the nodes of a final chunk");
    }

    #[test]
    fn nothing_moves_while_the_plan_is_suspended() {
        let mut one = planned(1);
        one.handle_leaf(VirtualRank(0));
        one.suspend();
        assert_eq!(one.handle_leaf(VirtualRank(1)), [CHUNK], "what was begun is still good");
        assert!(one.handle_node(CHUNK, node(2, 1)), "so is what arrives");
        assert_eq!((actions(&mut one), ranks(&one)), (vec![], vec![]));
        let held: BTreeSet<TreeNode> = [node(0, 0), node(1, 0), node(2, 1)].into();
        assert_eq!(one.held()[&CHUNK], held, "as a report lists it");
        // Node 2 died: node 1 serves all, and holds all.
        let holdings = BTreeMap::from([(CHUNK, vec![Holding { node: NodeId(1), held }])]);
        one.handle_plan(&world(&[(1, (0, 2))]), &holdings, &BTreeSet::new());
        assert_eq!(ranks(&one), [] as [u32; 0]);
        let finish = Action::Finish { chunk: CHUNK, cover: vec![node(0, 2)] };
        let folds = [fold(node(0, 0), node(1, 0)), fold(node(0, 1), node(2, 1))];
        assert_eq!(actions(&mut one), [&folds[..], &[finish]].concat());
    }

    #[test]
    fn a_chunk_whose_final_was_reported_is_waited_for() {
        let mut two = operation(2);
        for rank in 0..4 {
            two.handle_leaf(VirtualRank(rank));
        }
        two.handle_plan(&two_alone(), &BTreeMap::new(), &BTreeSet::from([CHUNK]));
        assert_eq!((actions(&mut two), ranks(&two)), (vec![], vec![]));
    }

    fn two_alone() -> World {
        world(&[(2, (0, 2))])
    }

    #[test]
    fn after_a_death_only_what_nobody_holds_is_computed() {
        let mut two = planned(2);
        two.handle_leaf(VirtualRank(2));
        assert!(two.handle_node(CHUNK, node(0, 0)), "node 1 had sent a part when it died");
        two.suspend();
        let held = two.held()[&CHUNK].clone();
        let holdings = BTreeMap::from([(CHUNK, vec![Holding { node: NodeId(2), held }])]);
        two.handle_plan(&two_alone(), &holdings, &BTreeSet::new());
        assert_eq!(ranks(&two), [1, 3]);
    }

    #[test]
    fn a_late_node_of_the_dead_serves_for_a_piece_under_it() {
        let mut one = planned(1);
        one.suspend();
        let lone = world(&[(1, (0, 1)), (2, (2, 1))]);
        one.handle_plan(&lone, &BTreeMap::new(), &BTreeSet::new());
        one.handle_leaf(VirtualRank(0));
        assert!(one.handle_node(CHUNK, node(0, 2)), "it covers the job");
        assert_eq!(one.handle_leaf(VirtualRank(1)), [], "the leaf is covered");
        assert_eq!(
            actions(&mut one),
            [Action::Send { chunk: CHUNK, node: node(0, 2), to: NodeId(2) }]
        );
    }

    #[test]
    fn names_that_cannot_be_are_dropped() {
        let mut one = planned(1);
        assert!(!one.handle_node(Chunk(1), node(0, 0)));
        assert!(!one.handle_node(CHUNK, node(4, 0)), "outside of the leaves");
        assert!(!one.handle_node(CHUNK, node(0, 3)), "a long name of the root");
        assert!(!one.handle_final(Chunk(7)));
        assert_eq!(one.handle_leaf(VirtualRank(4)), []);
    }
}
