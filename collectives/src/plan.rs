//! How the nodes of one chunk of one step come together: who provides which part of the canonical tree.
//!
//! A pure function of the world, the chunk's owner and what the members hold, so every member that knows the same reports computes the same
//! plan and nobody has to be told. It promises that the pieces tile the leaves, that what anybody holds is never computed again, and that
//! a node already with the owner does not travel.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use types::{NodeId, TreeNode, VirtualRank, VirtualRanks, World};

/// What one member holds of a chunk.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Holding {
    /// The member.
    pub node: NodeId,
    /// Nodes of the chunk that it can send without computing.
    pub held: BTreeSet<TreeNode>,
}

/// A part of the tree that one member provides as one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The node, by its canonical name.
    pub tree_node: TreeNode,
    /// The member that brings it to the owner.
    pub provider: NodeId,
    /// Whether the provider holds all that it needs; at most it has yet to fold.
    pub is_held: bool,
}

/// How one chunk of one step comes together.
// Invariant: the pieces are disjoint and tile the job's leaves in leaf order; `to_compute` has no empty set, and each of its leaves lies in a
// piece of the member that it stands under. Kept by `plan_chunk`, which alone makes plans.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkPlan {
    /// The member that folds the chunk.
    pub owner: NodeId,
    /// Who provides what, in leaf order.
    pub pieces: Vec<Piece>,
    /// The leaves that nobody holds, by the member that computes them for its pieces.
    pub to_compute: BTreeMap<NodeId, BTreeSet<VirtualRank>>,
}

impl ChunkPlan {
    /// The nodes that this member provides, in leaf order.
    pub fn pieces_of(&self, provider: NodeId) -> impl Iterator<Item = TreeNode> {
        self.pieces.iter().filter(move |p| p.provider == provider).map(|p| p.tree_node)
    }

    /// The leaves that this member computes for its pieces, in order.
    pub fn needs(&self, provider: NodeId) -> impl Iterator<Item = VirtualRank> {
        self.to_compute.get(&provider).into_iter().flatten().copied()
    }
}

/// Plans one chunk, top-down over the canonical tree: a node that the owner holds stays with it; else the lowest-ranked holder provides it;
/// else a leaf is computed by its server; else both children are planned, and two whole children of one provider become one piece.
///
/// Holdings of nodes that are no members are passed over, and so are nodes outside of the job's leaves.
///
/// # Panics
/// If the world leaves a virtual rank unserved, which `World::check` refuses.
#[must_use]
pub fn plan_chunk(world: &World, owner: NodeId, holdings: &[Holding]) -> ChunkPlan {
    let mut planner = Planner {
        v: world.virtual_ranks,
        holders: holders(world, owner, holdings),
        servers: servers(world),
        plan: ChunkPlan { owner, pieces: Vec::new(), to_compute: BTreeMap::new() },
    };
    planner.visit(world.virtual_ranks.root());
    planner.plan
}

/// The plan of a chunk of which nobody holds anything yet.
///
/// # Panics
/// If the world leaves a virtual rank unserved, which `World::check` refuses.
#[must_use]
pub fn default_plan(world: &World, owner: NodeId) -> ChunkPlan {
    plan_chunk(world, owner, &[])
}

/// Who provides each node that somebody holds: the owner before the others, the lower rank before the higher.
fn holders(world: &World, owner: NodeId, holdings: &[Holding]) -> BTreeMap<TreeNode, NodeId> {
    let v = world.virtual_ranks;
    let ranked = |h: &&Holding| world.rank_of(h.node).map(|rank| (h.node != owner, rank));
    let mut members: Vec<_> = holdings.iter().filter(|h| ranked(h).is_some()).collect();
    members.sort_by_key(ranked);
    let mut holders = BTreeMap::new();
    for holding in members {
        for node in holding.held.iter().filter(|n| !n.is_outside(v)) {
            holders.entry(node.canonical(v)).or_insert(holding.node);
        }
    }
    holders
}

/// The blocks of all members by the first leaf that they cover.
fn servers(world: &World) -> BTreeMap<u32, (TreeNode, NodeId)> {
    let blocks =
        world.members.iter().flat_map(|m| m.blocks.iter().map(|b| (b.start(), (*b, m.node))));
    blocks.filter(|(start, _)| *start < world.virtual_ranks.count()).collect()
}

struct Planner {
    v: VirtualRanks,
    holders: BTreeMap<TreeNode, NodeId>,
    servers: BTreeMap<u32, (TreeNode, NodeId)>,
    plan: ChunkPlan,
}

impl Planner {
    /// Appends the pieces of one node that is not outside of the leaves and under no held node.
    fn visit(&mut self, node: TreeNode) {
        let node = node.canonical(self.v);
        if let Some(&provider) = self.holders.get(&node) {
            self.plan.pieces.push(Piece { tree_node: node, provider, is_held: true });
            return;
        }
        if let Some(server) = self.lone_server(node) {
            self.plan.to_compute.entry(server).or_default().extend(node.leaves(self.v));
            self.plan.pieces.push(Piece { tree_node: node, provider: server, is_held: false });
            return;
        }
        let (left, right) =
            node.children().expect("a world that passed its check serves every leaf");
        let before = self.plan.pieces.len();
        self.visit(left);
        self.visit(right);
        if let [left, right] = self.plan.pieces[before..]
            && left.provider == right.provider
        {
            self.plan.pieces.truncate(before);
            let is_held = left.is_held && right.is_held;
            self.plan.pieces.push(Piece { tree_node: node, provider: left.provider, is_held });
        }
    }

    /// The member that serves all of this node, if nobody holds anything under it: then going down would only merge it again.
    fn lone_server(&self, node: TreeNode) -> Option<NodeId> {
        // Nodes that start in this range lie under `node`: one above it would have been provided whole.
        let first = TreeNode::leaf(VirtualRank(node.start()));
        let end = TreeNode::leaf(VirtualRank(node.start() + node.span()));
        if self.holders.range(first..end).next().is_some() {
            return None;
        }
        let (_, &(block, server)) = self.servers.range(..=node.start()).next_back()?;
        block.contains(node).then_some(server)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Address, Digest, Generation, Lineage, Member};

    fn node(start: u32, level: u8) -> TreeNode {
        TreeNode::new(start, level).unwrap()
    }

    /// A world with these members, in rank order, and their blocks.
    fn world(v: u32, members: &[(u64, &[(u32, u8)])]) -> World {
        let member = |(id, blocks): &(u64, &[(u32, u8)])| Member {
            node: NodeId(*id),
            address: Address { socket: ([127, 0, 0, 1], 1).into(), certificate: Digest::default() },
            host: "host".to_owned(),
            blocks: blocks.iter().map(|(start, level)| node(*start, *level)).collect(),
        };
        let world = World {
            generation: Generation(1),
            lineage: Lineage(1),
            virtual_ranks: VirtualRanks::new(v).unwrap(),
            from: None,
            held: false,
            start: None,
            members: members.iter().map(member).collect(),
            followers: Vec::new(),
        };
        world.check().unwrap();
        world
    }

    fn holding(id: u64, held: &[(u32, u8)]) -> Holding {
        Holding {
            node: NodeId(id),
            held: held.iter().map(|(start, level)| node(*start, *level)).collect(),
        }
    }

    /// Pieces as (start, level, provider, is held).
    fn pieces(plan: &ChunkPlan) -> Vec<(u32, u8, u64, bool)> {
        let flat = |p: &Piece| (p.tree_node.start(), p.tree_node.level(), p.provider.0, p.is_held);
        plan.pieces.iter().map(flat).collect()
    }

    fn needs(plan: &ChunkPlan, id: u64) -> Vec<u32> {
        plan.needs(NodeId(id)).map(|r| r.0).collect()
    }

    #[test]
    fn without_holdings_each_member_computes_its_block() {
        let world = world(8, &[(1, &[(4, 2)]), (2, &[(0, 2)])]);
        let plan = default_plan(&world, NodeId(1));
        assert_eq!(pieces(&plan), [(0, 2, 2, false), (4, 2, 1, false)]);
        assert_eq!(needs(&plan, 1), [4, 5, 6, 7]);
        assert_eq!(plan.pieces_of(NodeId(2)).collect::<Vec<_>>(), [node(0, 2)]);
    }

    #[test]
    fn two_sibling_blocks_of_one_member_are_one_piece() {
        let world = world(8, &[(1, &[(0, 1), (2, 1), (6, 1)]), (2, &[(4, 1)])]);
        assert_eq!(
            pieces(&default_plan(&world, NodeId(2))),
            [(0, 2, 1, false), (4, 1, 2, false), (6, 1, 1, false)]
        );
    }

    #[test]
    fn the_owners_node_stays_and_else_the_lowest_ranked_holder_provides() {
        let world = world(4, &[(7, &[(0, 1)]), (5, &[(2, 0)]), (6, &[(3, 0)])]);
        let holdings = [
            holding(7, &[(0, 1)]),
            holding(5, &[(0, 1), (2, 0)]),
            holding(6, &[(0, 1), (2, 0), (3, 0)]),
        ];
        let plan = plan_chunk(&world, NodeId(6), &holdings);
        assert_eq!(pieces(&plan), [(0, 2, 6, true)]);
        let plan = plan_chunk(&world, NodeId(5), &holdings[1..]);
        assert_eq!(pieces(&plan), [(0, 1, 5, true), (2, 0, 5, true), (3, 0, 6, true)]);
        let plan = plan_chunk(&world, NodeId(7), &holdings[1..]);
        assert_eq!(pieces(&plan), [(0, 1, 5, true), (2, 0, 5, true), (3, 0, 6, true)]);
        assert!(plan.to_compute.is_empty());
    }

    #[test]
    fn after_a_death_only_the_lost_leaves_are_computed() {
        // Node 3 died with leaves 4 to 7; its node (4,1) had reached the owner.
        let world = world(8, &[(1, &[(0, 2), (4, 1)]), (2, &[(6, 1)])]);
        let plan = plan_chunk(&world, NodeId(2), &[holding(1, &[(0, 2)]), holding(2, &[(4, 1)])]);
        assert_eq!(pieces(&plan), [(0, 2, 1, true), (4, 2, 2, false)]);
        assert_eq!(plan.to_compute, BTreeMap::from([(NodeId(2), [6, 7].map(VirtualRank).into())]));
    }

    #[test]
    fn a_merged_piece_computes_only_the_half_that_is_not_held() {
        let world = world(4, &[(1, &[(0, 1)]), (2, &[(2, 1)])]);
        let plan = plan_chunk(&world, NodeId(1), &[holding(2, &[(3, 0)])]);
        assert_eq!(pieces(&plan), [(0, 1, 1, false), (2, 1, 2, false)]);
        assert_eq!(needs(&plan, 2), [2]);
    }

    #[test]
    fn holdings_of_strangers_and_nodes_outside_are_passed_over() {
        let world = world(5, &[(1, &[(0, 2)]), (2, &[(4, 2)])]);
        let plan =
            plan_chunk(&world, NodeId(1), &[holding(9, &[(0, 3)]), holding(2, &[(8, 0), (4, 1)])]);
        // (4,1) is a long name of leaf 4.
        assert_eq!(pieces(&plan), [(0, 2, 1, false), (4, 0, 2, true)]);
    }

    #[test]
    fn a_member_that_holds_everything_computes_nothing() {
        let world = world(6, &[(1, &[(0, 2)]), (2, &[(4, 1)])]);
        let plan = plan_chunk(&world, NodeId(1), &[holding(2, &[(0, 0), (1, 0), (2, 1), (4, 1)])]);
        assert_eq!(pieces(&plan), [(0, 3, 2, true)]);
        assert!(plan.to_compute.is_empty());
    }
}
