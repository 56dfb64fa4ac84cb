//! Each invariant catches the bug that was planted for it.

use ripstop_chaos::invariants::ALL;
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
fn each_invariant_catches_the_bug_planted_for_it() {
    for (invariant, planted) in ALL {
        is_caught(planted, invariant);
    }
}
