//! Steps under fire: tables of single cases, and many seeded runs in which nearly everything goes wrong.

mod coordinator;
mod node;
mod simulation;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use simulation::{Summary, Trace};

#[test]
fn a_step_survives_any_death_with_the_same_bits() {
    let read = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let (from, seeds) = (read("RIPSTOP_FROM").unwrap_or(0), read("RIPSTOP_SEEDS").unwrap_or(300));
    let mut total = Summary::default();
    let mut failed = Vec::new();
    for seed in from..from + seeds {
        match catch_unwind(|| simulation::run(seed, None)) {
            Ok(summary) => total.add(summary),
            Err(_) => failed.push(seed),
        }
    }
    println!("{total:?}");
    if let Some(seed) = failed.first() {
        // Once more, with a trace.
        let trace: Trace = Rc::new(RefCell::new(VecDeque::new()));
        let again = Rc::clone(&trace);
        let _ = catch_unwind(AssertUnwindSafe(|| simulation::run(*seed, Some(again))));
        let lines: Vec<String> = trace.borrow().iter().cloned().collect();
        panic!(
            "seeds {failed:?} fail; RIPSTOP_FROM={seed} RIPSTOP_SEEDS=1 repeats the first, which ended so:\n{}",
            lines.join("\n")
        );
    }
}
