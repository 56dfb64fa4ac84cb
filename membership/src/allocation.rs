//! Who serves which virtual ranks: a pure function from the former blocks and the new member list.
//!
//! It promises: the blocks tile the virtual ranks, each member gets one at least, nobody's share passes twice the fair one, a
//! member that was there before loses blocks only to one that was not, and no more than that one's fair share.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use types::{Block, NodeId, VirtualRanks};

/// Blocks for each of `members`, which are at least one and at most as many as there are virtual ranks. Members that `former`
/// lists keep their blocks; what nobody holds is handed out, halved where it is more than a fair share; new members then take from
/// whoever has most.
///
/// # Panics
/// If there is no member, one is listed twice, or there are more than virtual ranks.
#[must_use]
pub fn allocate(
    virtual_ranks: VirtualRanks,
    former: &BTreeMap<NodeId, Vec<Block>>,
    members: &[NodeId],
) -> BTreeMap<NodeId, Vec<Block>> {
    let mut shares = Shares::new(virtual_ranks, former, members);
    shares.hand_out_free();
    shares.even_out_new();
    shares.finish()
}

/// The blocks while they move.
struct Shares {
    virtual_ranks: VirtualRanks,
    held: BTreeMap<NodeId, Vec<Block>>,
    new: Vec<NodeId>,
    free: Vec<Block>,
}

impl Shares {
    fn new(
        virtual_ranks: VirtualRanks,
        former: &BTreeMap<NodeId, Vec<Block>>,
        members: &[NodeId],
    ) -> Self {
        let mut is_free = vec![true; virtual_ranks.count() as usize];
        let mut held: BTreeMap<NodeId, Vec<Block>> = BTreeMap::new();
        let mut new = Vec::new();
        for node in members {
            let mut kept = Vec::new();
            for block in former.get(node).into_iter().flatten() {
                let ranks = || block.leaves(virtual_ranks).map(|rank| rank.0 as usize);
                // A block that overlaps one already kept would be served twice: drop it.
                if ranks().next().is_some() && ranks().all(|rank| is_free[rank]) {
                    ranks().for_each(|rank| is_free[rank] = false);
                    kept.push(block.canonical(virtual_ranks));
                }
            }
            if kept.is_empty() {
                new.push(*node);
            }
            assert!(held.insert(*node, kept).is_none(), "node {node} is listed twice");
        }
        let fits = !members.is_empty() && members.len() <= virtual_ranks.count() as usize;
        assert!(fits, "{} members can't serve {virtual_ranks} virtual ranks", members.len());
        let mut free = Vec::new();
        collect_free(virtual_ranks.root(), virtual_ranks, &is_free, &mut free);
        Self { virtual_ranks, held, new, free }
    }

    fn size(&self, block: Block) -> u32 {
        let end = self.virtual_ranks.count().min(block.start() + block.span());
        end.saturating_sub(block.start())
    }

    fn load(&self, node: NodeId) -> u32 {
        self.held[&node].iter().map(|block| self.size(*block)).sum()
    }

    fn members(&self) -> u32 {
        u32::try_from(self.held.len()).expect("at most 65,536 members")
    }

    /// What nobody holds goes to whoever has least, or to the holder of its other half, as long as that stays a fair share.
    fn hand_out_free(&mut self) {
        let fair = self.virtual_ranks.count().div_ceil(self.members());
        let largest_first =
            |free: &Self, i: &usize| (Reverse(free.size(free.free[*i])), free.free[*i].start());
        while let Some(place) = (0..self.free.len()).min_by_key(|i| largest_first(self, i)) {
            let block = self.free.swap_remove(place);
            let size = self.size(block);
            let fits = |node: &NodeId| self.load(*node) + size <= fair;
            let holds_sibling =
                |node: &NodeId| block.sibling().is_some_and(|s| self.held[node].contains(&s));
            let buddy = self.held.keys().copied().find(|node| holds_sibling(node) && fits(node));
            let least = self.held.keys().copied().min_by_key(|node| self.load(*node));
            let taker = buddy.or(least.filter(|node| fits(node) || block.is_leaf()));
            match (taker, block.children()) {
                (Some(node), _) => self.held.entry(node).or_default().push(block),
                (None, Some((left, right))) => {
                    let halves = [left, right].map(|half| half.canonical(self.virtual_ranks));
                    self.free.extend(
                        halves.into_iter().filter(|half| !half.is_outside(self.virtual_ranks)),
                    );
                }
                (None, None) => unreachable!("a leaf always finds a taker"),
            }
        }
    }

    /// Each new member takes from whoever has most, until it has its fair share, rounded down.
    fn even_out_new(&mut self) {
        let fair = self.virtual_ranks.count() / self.members();
        for node in self.new.clone() {
            while self.load(node) < fair {
                let donor = self.held.keys().copied().max_by_key(|donor| self.load(*donor));
                let donor = donor.expect("there are members");
                // Somebody is below the average, so somebody is above: `spare` is at least 1.
                let spare = self.load(donor) - fair;
                let wanted = (fair - self.load(node)).min(spare);
                let block = self.cut(donor, wanted);
                self.held.entry(node).or_default().push(block);
            }
        }
    }

    /// Takes a block of at most `wanted` virtual ranks, as large as that allows, from the donor's.
    fn cut(&mut self, donor: NodeId, wanted: u32) -> Block {
        let blocks = self.held.get(&donor).cloned().unwrap_or_default();
        let fitting = (0..blocks.len()).filter(|i| self.size(blocks[*i]) <= wanted);
        let fitting = fitting.max_by_key(|i| self.size(blocks[*i]));
        // Halving the smallest block keeps the others whole. The larger of what fits is taken.
        let smallest = || (0..blocks.len()).min_by_key(|i| self.size(blocks[*i]));
        let place = fitting.filter(|i| self.size(blocks[*i]) * 2 > wanted).or_else(smallest);
        let place = place.expect("a donor holds blocks");
        let virtual_ranks = self.virtual_ranks;
        let mut block = self.held.get_mut(&donor).expect("a member").swap_remove(place);
        while self.size(block) > wanted {
            let (left, right) = block.children().expect("a leaf is not larger than what is wanted");
            let (left, right) = (left.canonical(virtual_ranks), right.canonical(virtual_ranks));
            self.held.get_mut(&donor).expect("a member").push(left);
            block = right;
        }
        block
    }

    /// Joins halves that met, and sorts.
    fn finish(self) -> BTreeMap<NodeId, Vec<Block>> {
        let Self { virtual_ranks, held, .. } = self;
        let mut is_mine = vec![false; virtual_ranks.count() as usize];
        let tidy = |(node, blocks): (NodeId, Vec<Block>)| {
            let ranks =
                || blocks.iter().flat_map(|b| b.leaves(virtual_ranks)).map(|r| r.0 as usize);
            ranks().for_each(|rank| is_mine[rank] = true);
            let mut tidied = Vec::new();
            collect_free(virtual_ranks.root(), virtual_ranks, &is_mine, &mut tidied);
            ranks().for_each(|rank| is_mine[rank] = false);
            (node, tidied)
        };
        held.into_iter().map(tidy).collect()
    }
}

/// The largest blocks under `node` of which every leaf is marked, in order.
fn collect_free(
    node: Block,
    virtual_ranks: VirtualRanks,
    marked: &[bool],
    blocks: &mut Vec<Block>,
) {
    if node.is_outside(virtual_ranks) {
        return;
    }
    let mut leaves = node.leaves(virtual_ranks);
    if leaves.all(|rank| marked[rank.0 as usize]) {
        blocks.push(node.canonical(virtual_ranks));
    } else if let Some((left, right)) = node.children() {
        collect_free(left, virtual_ranks, marked, blocks);
        collect_free(right, virtual_ranks, marked, blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::describe_blocks;
    use proptest::prelude::*;

    fn nodes(ids: impl IntoIterator<Item = u64>) -> Vec<NodeId> {
        ids.into_iter().map(NodeId).collect()
    }

    fn described(v: VirtualRanks, shares: &BTreeMap<NodeId, Vec<Block>>) -> Vec<String> {
        shares.values().map(|blocks| describe_blocks(blocks, v)).collect()
    }

    #[test]
    fn a_loss_and_a_join_restore_the_even_blocks() {
        let v = VirtualRanks::new(16).unwrap();
        let four = allocate(v, &BTreeMap::new(), &nodes(1..=4));
        assert_eq!(described(v, &four), ["0-3", "4-7", "8-11", "12-15"]);
        let three = allocate(v, &four, &nodes([1, 3, 4]));
        assert_eq!(described(v, &three), ["0-5", "6-11", "12-15"]);
        let again = allocate(v, &three, &nodes([1, 3, 4, 5]));
        assert_eq!(again[&NodeId(5)].iter().map(|b| b.leaves(v).count()).sum::<usize>(), 4);
        assert!(again.values().all(|blocks| blocks.len() <= 2));
    }

    #[test]
    fn one_member_serves_one_whole_block() {
        let v = VirtualRanks::new(6).unwrap();
        let one = allocate(v, &BTreeMap::new(), &nodes([7]));
        assert_eq!(one[&NodeId(7)], [v.root()]);
    }

    fn loads(v: VirtualRanks, shares: &BTreeMap<NodeId, Vec<Block>>) -> Vec<u32> {
        let load = |blocks: &Vec<Block>| blocks.iter().flat_map(|b| b.leaves(v)).count();
        shares.values().map(|blocks| u32::try_from(load(blocks)).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn shares_tile_and_survivors_keep_theirs(
            v in 1u32..200,
            changes in prop::collection::vec((0u64..24, 0u64..4), 1..12),
        ) {
            let v = VirtualRanks::new(v).unwrap();
            let mut shares = BTreeMap::new();
            let mut next = 100;
            for (leave, join) in changes {
                let mut members: Vec<NodeId> = shares.keys().copied().collect();
                members.retain(|n: &NodeId| n.0 % 24 != leave);
                let survivors = members.clone();
                for _ in 0..join {
                    members.push(NodeId(next));
                    next += 1;
                }
                members.truncate(v.count() as usize);
                if members.is_empty() {
                    continue;
                }
                let after = allocate(v, &shares, &members);
                let mut served = vec![0u32; v.count() as usize];
                for rank in after.values().flatten().flat_map(|b| b.leaves(v)) {
                    served[rank.0 as usize] += 1;
                }
                prop_assert!(served.iter().all(|n| *n == 1), "not tiled: {:?}", described(v, &after));
                let fair = v.count().div_ceil(u32::try_from(members.len()).unwrap());
                let loads = loads(v, &after);
                prop_assert!(loads.iter().all(|n| *n >= 1 && *n <= 2 * fair), "{loads:?} of {fair}");
                let joined = members.iter().any(|n| !shares.contains_key(n));
                let mut moved = 0;
                for node in survivors.iter().filter(|n| members.contains(n)) {
                    let lost = |b: &&Block| b.leaves(v).any(|r| !after[node].iter().any(|a| a.contains(Block::leaf(r))));
                    let lost: usize = shares[node].iter().filter(lost).flat_map(|b| b.leaves(v))
                        .filter(|r| !after[node].iter().any(|a| a.contains(Block::leaf(*r)))).count();
                    prop_assert!(joined || lost == 0, "node {node} lost {lost} without a joiner");
                    moved += lost;
                }
                let joiners = members.iter().filter(|n| !shares.contains_key(n)).count();
                prop_assert!(moved <= joiners * (v.count() as usize / members.len()));
                shares = after;
            }
        }
    }
}
