//! A thousand members: what a change of the member list costs.

use types::{NodeId, VirtualRanks};

use crate::harness::{Cluster, spec};
use crate::{S, ms};

#[derive(Debug)]
struct Costs {
    members: usize,
    /// Bytes that the leader sent to clients while the first world formed.
    first: u64,
    /// Bytes to clients and to other coordinators for one death.
    death: (u64, u64),
    /// Bytes to clients in a tenth of a second without a change.
    idle: u64,
}

fn costs(members: usize) -> Costs {
    let count = u32::try_from(members).unwrap();
    let mut job = spec("demo", (1, count, count));
    job.virtual_ranks = VirtualRanks::new(count.next_power_of_two()).unwrap();
    let mut cluster = Cluster::new(3, 7);
    let nodes: Vec<NodeId> = (0..members).map(|_| cluster.spawn(&job)).collect();
    let before = cluster.sent_bytes;
    cluster.run_until(S * 60, "one world of all", |c| {
        c.has_world(&job.job) && c.members(&job.job).len() == members
    });
    cluster.run_until(S * 60, "entered", |c| c.kinds("entered").len() == 1);
    let first = cluster.sent_bytes.0 - before.0;
    assert_eq!(cluster.kinds("world").len(), 1, "one world");
    cluster.run(S);
    let before = cluster.sent_bytes;
    cluster.run(ms(100));
    let idle = cluster.sent_bytes.0 - before.0;
    let before = cluster.sent_bytes;
    cluster.kill_worker(nodes[members / 2]);
    cluster.run_until(S * 60, "entered again", |c| c.kinds("entered").len() == 2);
    let after = cluster.sent_bytes;
    Costs { members, first, death: (after.0 - before.0, after.1 - before.1), idle }
}

/// A world of N members goes to N members once, when there is none before it; later what has changed goes to each.
#[test]
#[expect(clippy::print_stdout, reason = "docs/scale.md says how to see the figures")]
fn a_thousand_members_form_one_world_and_a_death_costs_in_proportion_to_the_change() {
    let [small, large] = [100, 1000].map(costs);
    println!("{small:#?}\n{large:#?}");
    for costs in [&small, &large] {
        let members = costs.members as u64;
        assert!(costs.first < members * members * 80, "the whole list once to each: {costs:?}");
        assert!(costs.idle < members * 4, "a rest costs heartbeats only: {costs:?}");
    }
    let per_member = |costs: &Costs| costs.death.0 / costs.members as u64;
    assert!(
        per_member(&large) < per_member(&small) * 2,
        "{} bytes a member at 1,000, {} at 100",
        per_member(&large),
        per_member(&small)
    );
}
