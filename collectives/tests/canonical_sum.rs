//! Plans and folds together: whoever serves, holds, dies or folds, the owner gets the same bits.

#![expect(clippy::unwrap_used, reason = "this file is a test from top to bottom")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng};
use ripstop_collectives::fold::{Fold, cover, foldable};
use ripstop_collectives::reduce::{add_into, finish_mean, fold_cover};
use ripstop_collectives::{ChunkPlan, Holding, Piece, default_plan, plan_chunk};
use types::{
    Address, Block, Digest, Generation, Lineage, Member, NodeId, TreeNode, VirtualRank,
    VirtualRanks, World,
};

/// One decision after another, all from one seed.
struct Random(TestRng);

impl Random {
    fn new(seed: u64) -> Self {
        let bytes = [seed.to_le_bytes(); 4].concat();
        Self(TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.0.next_u64() % bound as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn element(&mut self) -> f32 {
        let bits = self.0.next_u32();
        match self.below(12) {
            0 => f32::from_bits(bits), // anything: NaN with a payload, subnormal, infinite
            1 => -0.0,
            2 => f32::from_bits(bits & 0x807f_ffff), // subnormal
            3 => f32::from_bits(bits & 0x83ff_ffff | 0x7c00_0000), // huge, infinite or NaN
            4..8 => f32::from_bits(bits & 0x87ff_ffff | 0x3800_0000), // around 1e-4 … 1e0
            _ => bits as f32 - 2e9,
        }
    }
}

fn world(v: VirtualRanks, blocks: Vec<(NodeId, Vec<Block>)>) -> World {
    let member = |(node, blocks)| Member {
        node,
        address: Address { socket: ([127, 0, 0, 1], 1).into(), certificate: Digest::default() },
        host: "host".to_owned(),
        blocks,
    };
    let world = World {
        generation: Generation(1),
        lineage: Lineage(1),
        virtual_ranks: v,
        from: None,
        held: false,
        start: None,
        members: blocks.into_iter().map(member).collect(),
        followers: Vec::new(),
    };
    world.check().unwrap();
    world
}

/// Blocks of any size go to any member; each member gets one at least.
fn scattered_world(v: VirtualRanks, members: &[NodeId], random: &mut Random) -> World {
    let more = v.count() as usize - members.len() + 1;
    let count =
        if random.chance(30) { v.count() as usize } else { members.len() + random.below(more) };
    let mut served: Vec<_> = members.iter().map(|m| (*m, Vec::new())).collect();
    for (number, block) in blocks(v, count, random).into_iter().enumerate() {
        let place = if number < members.len() { number } else { random.below(members.len()) };
        served[place].1.push(block);
    }
    world(v, served)
}

/// Dyadic blocks that tile the leaves, by splitting the root until there are `count`.
fn blocks(v: VirtualRanks, count: usize, random: &mut Random) -> Vec<Block> {
    let mut blocks = vec![v.root().canonical(v)];
    while blocks.len() < count {
        let place = random.below(blocks.len());
        if let Some((left, right)) = blocks[place].children() {
            blocks[place] = left.canonical(v);
            blocks.push(right.canonical(v));
        }
    }
    for place in (1..count).rev() {
        blocks.swap(place, random.below(place + 1));
    }
    blocks
}

fn any_node(v: VirtualRanks, random: &mut Random) -> TreeNode {
    let mut node = TreeNode::leaf(VirtualRank(random.below(v.count() as usize) as u32));
    for _ in 0..random.below(4) {
        node = node.parent().unwrap();
    }
    node.canonical(v)
}

fn ids(count: usize, random: &mut Random) -> Vec<NodeId> {
    let mut ids: Vec<_> = (1..=count as u64).map(NodeId).collect();
    for place in (1..count).rev() {
        ids.swap(place, random.below(place + 1));
    }
    ids
}

/// The rule of a plan, word for word.
fn planned(world: &World, owner: NodeId, holdings: &[Holding], node: TreeNode) -> Vec<Piece> {
    let v = world.virtual_ranks;
    let node = node.canonical(v);
    let mut by_rank: Vec<_> = world.nodes().filter(|n| *n != owner).collect();
    by_rank.insert(0, owner);
    let holds = |m: &NodeId| holdings.iter().any(|h| h.node == *m && h.held.contains(&node));
    if let Some(provider) = by_rank.into_iter().find(holds) {
        return vec![Piece { tree_node: node, provider, is_held: true }];
    }
    let Some((left, right)) = node.children() else {
        let provider = world.server(VirtualRank(node.start())).unwrap();
        return vec![Piece { tree_node: node, provider, is_held: false }];
    };
    let pieces = [planned(world, owner, holdings, left), planned(world, owner, holdings, right)];
    match [&pieces[0][..], &pieces[1][..]] {
        [[l], [r]] if l.provider == r.provider => {
            vec![Piece { tree_node: node, provider: l.provider, is_held: l.is_held && r.is_held }]
        }
        _ => pieces.concat(),
    }
}

/// One member's memory of a chunk.
type Held = BTreeMap<TreeNode, Vec<f32>>;

#[derive(Clone)]
struct Members {
    v: VirtualRanks,
    leaves: Vec<Vec<f32>>,
    held: BTreeMap<NodeId, Held>,
}

impl Members {
    fn holdings(&self, world: &World) -> Vec<Holding> {
        let names =
            |n: &NodeId| self.held.get(n).map(|h| h.keys().copied().collect()).unwrap_or_default();
        world.nodes().map(|node| Holding { node, held: names(&node) }).collect()
    }

    fn compute(&mut self, member: NodeId, rank: VirtualRank) {
        let leaf = self.leaves[rank.0 as usize].clone();
        self.held.entry(member).or_default().insert(TreeNode::leaf(rank), leaf);
    }

    /// Folds what the plan lets this member fold; at most `limit` times.
    fn fold(&mut self, plan: &ChunkPlan, member: NodeId, limit: usize) {
        let held = self.held.entry(member).or_default();
        let within = plan.pieces_of(member).collect();
        for _ in 0..limit {
            let names = held.keys().copied().collect();
            let Some(Fold { left, right, parent }) = foldable(self.v, &names, &within) else {
                break;
            };
            let mut sum = held.remove(&left).unwrap();
            add_into(&mut sum, &held.remove(&right).unwrap());
            held.insert(parent, sum);
        }
    }

    fn send(&mut self, plan: &ChunkPlan, piece: TreeNode, from: NodeId) {
        let value = self.held[&from][&piece].clone();
        self.held.entry(plan.owner).or_default().insert(piece, value);
    }

    /// Follows the plan to its end and gives the mean's bits.
    fn finish(&mut self, world: &World, plan: &ChunkPlan) -> Vec<u32> {
        for member in world.nodes() {
            for rank in plan.needs(member) {
                self.compute(member, rank);
            }
            self.fold(plan, member, usize::MAX);
        }
        for piece in &plan.pieces {
            self.send(plan, piece.tree_node, piece.provider);
        }
        let held = &self.held[&plan.owner];
        assert!(cover(self.v, &held.keys().copied().collect()).is_some());
        self.mean(&held.iter().map(|(n, x)| (*n, x.as_slice())).collect())
    }

    fn mean(&self, nodes: &BTreeMap<TreeNode, &[f32]>) -> Vec<u32> {
        let mut sum = Vec::new();
        fold_cover(self.v, nodes, &mut sum).unwrap();
        let _ = finish_mean(&mut sum, u64::from(self.v.count()));
        sum.iter().map(|x| x.to_bits()).collect()
    }

    /// What one member alone makes of all leaves.
    fn alone(&self) -> Vec<u32> {
        let leaves = self.v.iter().map(TreeNode::leaf).zip(self.leaves.iter().map(Vec::as_slice));
        self.mean(&leaves.collect())
    }
}

fn members(v: VirtualRanks, random: &mut Random) -> Members {
    let leaf = |_| (0..4).map(|_| random.element()).collect();
    Members { v, leaves: v.iter().map(leaf).collect(), held: BTreeMap::new() }
}

proptest! {
    #[test]
    fn a_plan_is_that_of_the_rule_and_tiles_the_leaves(count in 1u32..70, size in 1usize..10, seed: u64) {
        let (v, random) = (VirtualRanks::new(count).unwrap(), &mut Random::new(seed));
        let nodes = ids(size.min(count as usize), random);
        let world = scattered_world(v, &nodes, random);
        let owner = nodes[random.below(nodes.len())];
        let mut holdings = Vec::new();
        for node in world.nodes() {
            let held = (0..random.below(6)).map(|_| any_node(v, random)).collect();
            holdings.push(Holding { node, held });
        }
        let plan = plan_chunk(&world, owner, &holdings);
        prop_assert_eq!(&plan.pieces, &planned(&world, owner, &holdings, v.root()));

        let tiled: Vec<_> = plan.pieces.iter().flat_map(|p| p.tree_node.leaves(v)).collect();
        prop_assert_eq!(tiled, v.iter().collect::<Vec<_>>());
        for holding in &holdings {
            let held = |r: &VirtualRank| holding.held.iter().any(|h| h.contains(TreeNode::leaf(*r)));
            let inside = plan.pieces_of(holding.node).flat_map(|p| p.leaves(v));
            let missing: BTreeSet<_> = inside.filter(|r| !held(r)).collect();
            prop_assert_eq!(plan.needs(holding.node).collect::<BTreeSet<_>>(), missing);
        }
        prop_assert!(plan.pieces.iter().all(|p| !p.is_held || plan.needs(p.provider).all(|r| !p.tree_node.contains(TreeNode::leaf(r)))));
        holdings.reverse();
        prop_assert_eq!(plan_chunk(&world, owner, &holdings), plan);
    }

    #[test]
    fn one_block_per_member_is_one_piece_per_member(count in 1u32..300, size in 1usize..20, seed: u64) {
        let (v, random) = (VirtualRanks::new(count).unwrap(), &mut Random::new(seed));
        let size = size.min(count as usize);
        let blocks = blocks(v, size, random);
        let served = blocks.iter().zip(ids(size, random)).map(|(b, n)| (n, vec![*b])).collect();
        let world = world(v, served);
        let plan = default_plan(&world, world.members[0].node);
        prop_assert_eq!(plan.pieces.len(), size);
        for member in &world.members {
            prop_assert_eq!(plan.pieces_of(member.node).collect::<Vec<_>>(), member.blocks.clone());
            prop_assert_eq!(plan.needs(member.node).count(), member.blocks[0].leaves(v).count());
        }
    }

    #[test]
    fn any_split_of_the_leaves_gives_equal_bits(count in 1u32..=70, size in 1usize..=9, seed: u64) {
        let (v, random) = (VirtualRanks::new(count).unwrap(), &mut Random::new(seed));
        let nodes = ids(size.min(count as usize), random);
        let world = scattered_world(v, &nodes, random);
        let mut members = members(v, random);
        let plan = default_plan(&world, nodes[random.below(nodes.len())]);
        prop_assert_eq!(members.finish(&world, &plan), members.alone());
    }

    #[test]
    fn deaths_in_mid_step_change_no_bits_and_nothing_held_is_computed_again(
        count in 1u32..=70, size in 1usize..=9, seed: u64,
    ) {
        let (v, random) = (VirtualRanks::new(count).unwrap(), &mut Random::new(seed));
        let mut nodes = ids(size.min(count as usize), random);
        let mut members = members(v, random);
        loop {
            let world = scattered_world(v, &nodes, random);
            let plan = plan_chunk(&world, nodes[random.below(nodes.len())], &members.holdings(&world));
            let held: Vec<_> = nodes.iter().filter_map(|n| members.held.get(n)).flat_map(BTreeMap::keys).collect();
            for rank in plan.to_compute.values().flatten() {
                prop_assert!(!held.iter().any(|h| h.contains(TreeNode::leaf(*rank))));
            }
            // This world might finish the step …
            prop_assert_eq!(members.clone().finish(&world, &plan), members.alone());
            if nodes.len() == 1 {
                break;
            }
            // … or some of the work gets done before the next death.
            for node in world.nodes() {
                for rank in plan.needs(node).filter(|_| random.chance(60)).collect::<Vec<_>>() {
                    members.compute(node, rank);
                }
                members.fold(&plan, node, random.below(8));
            }
            for piece in &plan.pieces {
                if members.held[&piece.provider].contains_key(&piece.tree_node) && random.chance(50) {
                    members.send(&plan, piece.tree_node, piece.provider);
                }
            }
            prop_assert_eq!(members.clone().finish(&world, &plan), members.alone());
            let dead = nodes.swap_remove(random.below(nodes.len()));
            members.held.remove(&dead);
        }
    }
}
