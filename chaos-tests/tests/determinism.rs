//! The same seed is the same run.

use ripstop_chaos::plan::Plan;
use ripstop_chaos::sim::Sim;

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [3, 7, 11, 42] {
        let run = || Sim::new(seed, Plan::draw(seed), None).run();
        assert_eq!(run(), run(), "seed {seed}");
    }
    let traces: std::collections::BTreeSet<_> =
        (0..5).map(|seed| Sim::new(seed, Plan::draw(seed), None).run().trace).collect();
    assert_eq!(traces.len(), 5, "different seeds are different runs");
}
