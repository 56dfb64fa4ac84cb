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
        Self { me, virtual_ranks, chunks, contributed: BTreeSet::new() }
    }

    /// A new world was adopted: nothing is folded, sent or finished until [`Self::handle_plan`].
    pub fn suspend(&mut self) {
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
        state.held.insert(node)
    }

    /// The final of a chunk is known here. Returns whether that is news.
    pub fn handle_final(&mut self, chunk: Chunk) -> bool {
        let Some(state) = self.chunks.get_mut(chunk.0 as usize) else { return false };
        !std::mem::replace(&mut state.is_final, true)
    }

    /// The link to `peer` was lost and is up again: what was sent to it is offered again.
    pub fn handle_link_up(&mut self, peer: NodeId) {
        for state in &mut self.chunks {
            if state.plan.as_ref().is_some_and(|p| p.owner == peer) {
                state.sent.clear();
            }
        }
    }

    /// What to do next, until `None`.
    pub fn poll_action(&mut self) -> Option<Action> {
        let (me, v) = (self.me, self.virtual_ranks);
        for (number, state) in (0..).zip(&mut self.chunks) {
            let Some(plan) = &state.plan else { continue };
            if state.is_final || state.is_finishing {
                continue;
            }
            let (chunk, owner) = (Chunk(number), plan.owner);
            if let Some(Fold { left, right, parent }) = foldable(v, &state.held, &state.mine) {
                state.held.remove(&left);
                state.held.remove(&right);
                state.held.insert(parent);
                return Some(Action::Fold { chunk, left, right, parent });
            }
            if owner == me {
                if let Some(cover) = cover(v, &state.held) {
                    state.is_finishing = true;
                    return Some(Action::Finish { chunk, cover });
                }
            } else if let Some(node) = state.unsent_piece() {
                state.sent.insert(node);
                return Some(Action::Send { chunk, node, to: owner });
            }
        }
        None
    }

    /// The virtual ranks whose leaves the plan still wants from this member, and which it neither holds nor was given.
    #[must_use]
    pub fn to_compute(&self) -> BTreeSet<VirtualRank> {
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
