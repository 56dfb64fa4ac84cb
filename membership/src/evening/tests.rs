use proptest::prelude::*;

use super::*;
use crate::allocation::allocate;

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// A fresh world of members that take so many microseconds for a leaf.
fn shares(virtual_ranks: u32, leaf_us: &[u64]) -> Shares {
    let virtual_ranks = VirtualRanks::new(virtual_ranks).unwrap();
    let nodes: Vec<NodeId> = (1..=leaf_us.len() as u64).map(NodeId).collect();
    let mut blocks = allocate(virtual_ranks, &BTreeMap::new(), &nodes);
    let mut shares = Shares { virtual_ranks, members: BTreeMap::new() };
    for (node, leaf) in nodes.iter().zip(leaf_us) {
        shares.insert(*node, blocks.remove(node).unwrap(), us(*leaf));
    }
    shares
}

fn leaves(shares: &Shares) -> Vec<u64> {
    shares.members.values().map(|share| share.leaves).collect()
}

/// What the roster makes of it.
fn adopt(shares: &Shares, evened: &Evened) -> Shares {
    let nodes: Vec<NodeId> = shares.members.keys().copied().collect();
    let mut blocks = allocate(shares.virtual_ranks, &evened.blocks, &nodes);
    let mut next = Shares { virtual_ranks: shares.virtual_ranks, members: BTreeMap::new() };
    for (node, share) in &shares.members {
        next.insert(*node, blocks.remove(node).unwrap(), us(share.leaf_us));
    }
    next
}

/// Goes on for so many boundaries; returns the changes, and what they led to.
fn evens_out(mut shares: Shares, boundaries: u64) -> (Vec<Evened>, Vec<Shares>) {
    let (mut evening, mut changes) = (Evening::default(), Vec::new());
    let mut all = vec![shares.clone()];
    for boundary in 0..boundaries {
        if let Some(evened) = evening.look(Step(boundary), &shares) {
            shares = adopt(&shares, &evened);
            evening.forget();
            all.push(shares.clone());
            changes.push(evened);
        }
    }
    (changes, all)
}

#[test]
fn three_times_slower_is_served_by_a_leaf_and_the_others_by_five() {
    let (changes, all) = evens_out(shares(16, &[30_000, 10_000, 10_000, 10_000]), 1000);
    assert_eq!(leaves(all.last().unwrap()), [1, 5, 5, 5]);
    assert!(changes.len() <= 4, "{changes:#?}");
    assert_eq!(
        changes[0].reason,
        "evening out: a leaf takes node 1 3.0 × as long as node 2; virtual ranks 0-1 move there, \
         the leaves of a step take 60 ms instead of 120"
    );
}

#[test]
fn a_move_waits_for_eight_boundaries_and_the_same_one_counts_once() {
    let shares = shares(8, &[20_000, 10_000]);
    let mut evening = Evening::default();
    for boundary in 1..8 {
        for _ in 0..5 {
            assert_eq!(evening.look(Step(boundary), &shares), None, "boundary {boundary}");
        }
    }
    assert!(evening.look(Step(8), &shares).is_some());
    assert!(evening.look(Step(8), &shares).is_some(), "until the log has it");
    evening.forget();
    assert_eq!(evening.look(Step(9), &shares), None);
}

#[test]
fn one_look_at_which_it_would_not_pay_begins_the_wait_anew() {
    let slow = shares(8, &[20_000, 10_000]);
    let equal = shares(8, &[10_000, 10_000]);
    let mut evening = Evening::default();
    for boundary in 0..100 {
        let shares = if boundary % 8 == 7 { &equal } else { &slow };
        assert_eq!(evening.look(Step(boundary), shares), None, "boundary {boundary}");
    }
}

#[test]
fn what_is_faster_than_messages_is_left_alone() {
    let (changes, _) = evens_out(shares(16, &[200, 50, 50, 50]), 100);
    assert_eq!(changes, [], "0.8 ms a step");
}

#[test]
fn the_last_leaf_stays() {
    let (changes, all) = evens_out(shares(4, &[1_000_000, 1000, 1000, 1000]), 200);
    assert_eq!((changes.len(), leaves(&all[0])), (0, vec![1, 1, 1, 1]));
}

#[test]
fn where_many_are_slow_nothing_moves_unless_all_of_them_get_faster() {
    // One that can't give anything is as slow as the rest.
    let (changes, _) = evens_out(shares(5, &[20_000, 20_000, 20_000, 41_000]), 200);
    assert_eq!(changes, []);
}

proptest! {
    #[test]
    fn it_converges_and_rests_and_a_step_never_gets_longer(
        v in 1u32..300,
        leaf_us in prop::collection::vec(1u64..200_000, 1..12),
    ) {
        prop_assume!(leaf_us.len() <= v as usize);
        let (changes, all) = evens_out(shares(v, &leaf_us), 20_000);
        prop_assert!(changes.len() < 1000, "{} changes", changes.len());
        for pair in all.windows(2) {
            let (before, after) = (&pair[0], &pair[1]);
            let peak = |shares: &Shares| shares.slowest().unwrap().1;
            prop_assert!(peak(after) <= peak(before), "{before:?} {after:?}");
            prop_assert!(leaves(after).iter().all(|n| *n > 0));
            prop_assert_eq!(leaves(after).iter().sum::<u64>(), u64::from(v));
            // One re-split: of the blocks that are cut or moved, all lie in one.
            let held = |shares: &Shares| -> Vec<(NodeId, VirtualRanks, Vec<Block>)> {
                shares.members.iter().map(|(n, s)| (*n, shares.virtual_ranks, s.blocks.clone())).collect()
            };
            let mut moved: Vec<u32> = Vec::new();
            for ((_, v, old), (_, _, new)) in held(before).into_iter().zip(held(after)) {
                let lost = old.iter().flat_map(|b| b.leaves(v));
                moved.extend(lost.filter(|r| !new.iter().any(|b| b.contains(Block::leaf(*r)))).map(|r| r.0));
            }
            let first = *moved.iter().min().unwrap();
            let block = (0..=16).rev().filter_map(|level| Block::new(first, level))
                .map(|b| b.leaves(before.virtual_ranks).map(|r| r.0).collect::<Vec<_>>())
                .find(|leaves| *leaves == moved);
            prop_assert!(block.is_some(), "{moved:?} is no block");
        }
        let rested = all.last().unwrap();
        prop_assert!(rested.row(None).is_none());
    }

    #[test]
    fn equal_members_change_nothing(v in 1u32..3000, n in 1usize..60, leaf in 1u64..1_000_000) {
        prop_assume!(n <= v as usize);
        let (changes, _) = evens_out(shares(v, &vec![leaf; n]), 50);
        prop_assert_eq!(changes, []);
    }

    #[test]
    fn noise_of_a_fifth_changes_nothing(
        v in 1u32..300,
        n in 1usize..12,
        noise in prop::collection::vec(prop::collection::vec(80_000u64..120_000, 12), 400),
    ) {
        prop_assume!(n <= v as usize);
        // Each told time is off by itself: worse than medians of leaves can be.
        let mut evening = Evening::default();
        let equal = shares(v, &vec![100_000; n]);
        for (boundary, times) in noise.iter().enumerate() {
            let mut shares = equal.clone();
            for (share, time) in shares.members.values_mut().zip(times) {
                share.leaf_us = *time;
            }
            prop_assert_eq!(evening.look(Step(boundary as u64), &shares), None);
        }
    }
}
