//! Which member owns a chunk: rendezvous hashing.
//!
//! A rule by which a death moves only the dead owner's chunks is a fixed order of preference over all nodes for each chunk, made before
//! anybody knows which nodes will be alive. So it can't also deal the chunks out evenly: the balance is that of the hash, and gets better with
//! more chunks per member (by the square root). Where that matters, make the chunks smaller.

use types::NodeId;
use xxhash_rust::xxh3::xxh3_64;

use crate::Chunk;

/// The member that folds this chunk and spreads its final value. It depends on which nodes are members, not on their order.
///
/// # Panics
/// If there are no members.
#[must_use]
pub fn owner(chunk: Chunk, members: &[NodeId]) -> NodeId {
    let best = members.iter().copied().max_by_key(|node| (preference(chunk, *node), *node));
    best.expect("a world has members")
}

/// How much a chunk prefers a node. Part of the protocol: members of one world must agree on it.
fn preference(chunk: Chunk, node: NodeId) -> u64 {
    let mut name = [0; 12];
    name[..4].copy_from_slice(&chunk.0.to_le_bytes());
    name[4..].copy_from_slice(&node.0.to_le_bytes());
    xxh3_64(&name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn shares(chunks: u32, members: &[NodeId]) -> BTreeMap<NodeId, u32> {
        let mut shares: BTreeMap<_, _> = members.iter().map(|m| (*m, 0)).collect();
        for chunk in 0..chunks {
            *shares.get_mut(&owner(Chunk(chunk), members)).unwrap() += 1;
        }
        shares
    }

    #[test]
    fn few_chunks_are_balanced_within_reason() {
        let shares = shares(64, &[NodeId(1), NodeId(2), NodeId(3), NodeId(4)]);
        assert!(shares.values().all(|n| (8..=24).contains(n)), "{shares:?}");
    }

    #[test]
    fn many_chunks_are_balanced_well_for_any_ids() {
        for first in (0..40).chain([1 << 32, u64::MAX - 4]) {
            let shares = shares(4096, &[0, 1, 2, 3].map(|i| NodeId(first + i)));
            assert!(shares.values().all(|n| (874..=1174).contains(n)), "{shares:?}");
        }
    }

    #[test]
    fn the_owners_are_part_of_the_protocol_and_stay_as_they_are() {
        let members = [1, 2, 3].map(NodeId);
        let owners: Vec<_> = (0..8).map(|c| owner(Chunk(c), &members).0).collect();
        assert_eq!(owners, [3, 2, 1, 3, 3, 2, 1, 2]);
    }

    proptest! {
        #[test]
        fn a_death_moves_only_the_dead_owners_chunks(
            ids in prop::collection::btree_set(any::<u64>(), 2..12),
            dead in any::<prop::sample::Index>(),
            chunk in any::<u32>(),
        ) {
            let mut members: Vec<_> = ids.into_iter().map(NodeId).collect();
            let before = owner(Chunk(chunk), &members);
            let dead = members.swap_remove(dead.index(members.len())); // the order of the members changes too
            let after = owner(Chunk(chunk), &members);
            prop_assert!(before == dead || after == before);
            prop_assert!(members.contains(&after));
        }
    }
}
