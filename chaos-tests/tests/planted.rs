//! Each invariant catches the bug that was planted for it.

use ripstop_chaos::plan::Plan;
use ripstop_chaos::sim::{Planted, Sim};

fn is_caught(planted: Planted, invariant: &str) {
    for seed in 0..20 {
        let plan = Plan {
            workers: 3,
            virtual_ranks: 8,
            coordinators: 3,
            min_members: 1,
            faults: Vec::new(),
            ..Plan::draw(seed)
        };
        let outcome = Sim::new(seed, plan, Some(planted)).run();
        if let Some((violation, _)) = outcome.failure {
            assert_eq!(violation.invariant, invariant, "{violation}");
            return;
        }
    }
    panic!("{planted:?} was not caught within 20 seeds");
}

#[test]
fn two_worlds_of_one_generation_are_caught() {
    is_caught(Planted::TwoWorlds, "one_world_per_generation");
}

#[test]
fn a_virtual_rank_served_twice_is_caught() {
    is_caught(Planted::ServedTwice, "blocks_tile_the_virtual_ranks");
}

#[test]
fn an_impure_leaf_is_caught() {
    is_caught(Planted::ImpureLeaf, "equal_digests_at_equal_steps");
}

#[test]
fn frames_that_are_lost_for_ever_are_caught() {
    is_caught(Planted::LostFrames, "every_wait_ends");
}
