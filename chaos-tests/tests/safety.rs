//! 200 seeds: whatever happens, the invariants hold and the job finishes.

use ripstop_chaos::plan::Plan;
use ripstop_chaos::sim::Sim;

/// Four tests, so that they run on several cores.
fn run(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let outcome = Sim::new(seed, Plan::draw(seed), None).run();
        if let Some((violation, newest)) = outcome.failure {
            panic!(
                "{violation}\nnewest events:\n  {}\nreplay: cargo xtask chaos --seed {seed}",
                newest.join("\n  ")
            );
        }
        assert!(outcome.worlds > 0 && outcome.events > 100, "seed {seed} did nothing");
    }
}

#[test]
fn seeds_0_to_49_hold() {
    run(0..50);
}

#[test]
fn seeds_50_to_99_hold() {
    run(50..100);
}

#[test]
fn seeds_100_to_149_hold() {
    run(100..150);
}

#[test]
fn seeds_150_to_199_hold() {
    run(150..200);
}
