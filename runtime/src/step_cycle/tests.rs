//! Steps under fire: tables of single cases, and many seeded runs in which nearly everything goes wrong.

mod coordinator;
mod node;
mod simulation;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use simulation::Trace;

/// Runs a seed; if it fails, once more with a trace.
fn check_seed(seed: u64) -> simulation::Summary {
    let result = catch_unwind(|| simulation::run(seed, None));
    result.unwrap_or_else(|_| {
        let trace: Trace = Rc::new(RefCell::new(VecDeque::new()));
        let again = Rc::clone(&trace);
        let _ = catch_unwind(AssertUnwindSafe(|| simulation::run(seed, Some(again))));
        let lines: Vec<String> = trace.borrow().iter().cloned().collect();
        panic!("seed {seed} fails; the last it did:\n{}", lines.join("\n"));
    })
}

#[test]
fn a_step_survives_any_death_with_the_same_bits() {
    let read = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let (from, seeds) = (read("RIPSTOP_FROM").unwrap_or(0), read("RIPSTOP_SEEDS").unwrap_or(300));
    let mut total = simulation::Summary::default();
    for seed in from..from + seeds {
        let run = check_seed(seed);
        total.events += run.events;
        total.worlds += run.worlds;
        total.crashes += run.crashes;
        total.evictions += run.evictions;
        total.restarts += run.restarts;
        total.joined += run.joined;
        total.drained += run.drained;
    }
    println!("{total:?}");
}
