//! Cases that users of other systems lost jobs to, each at every moment that can make a difference.

use std::collections::BTreeSet;
use std::time::Duration;

use membership::{Cause, JobSpec, Release};
use types::{Lineage, NodeId, VirtualRanks};

use crate::harness::{Cluster, spec};
use crate::{S, boundary, goes_on, ms, training};

/// Worlds of the job so far.
fn worlds(cluster: &Cluster) -> usize {
    cluster.kinds("world").len() + cluster.kinds("restart").len()
}

/// Every one of `nodes` is a member, they step, and nobody else was lost.
fn trains_with(cluster: &mut Cluster, job: &JobSpec, nodes: &[NodeId], what: &str) {
    let wanted: BTreeSet<NodeId> = nodes.iter().copied().collect();
    cluster.run_until(S * 10, what, |c| {
        let world = c.world(&job.job);
        !world.held && world.nodes().collect::<BTreeSet<_>>() == wanted
    });
    goes_on(cluster, nodes, what);
    assert_eq!(cluster.world(&job.job).lineage, Lineage(1), "{what}: the state was lost");
}

#[test]
fn a_storm_of_100_joins_makes_at_most_three_worlds() {
    let mut job = spec("demo", (1, 4, 256));
    job.virtual_ranks = VirtualRanks::new(256).unwrap();
    let (mut cluster, mut nodes) = training(&job, 4);
    let before = worlds(&cluster);
    nodes.extend((0..100).map(|_| cluster.spawn(&job)));
    trains_with(&mut cluster, &job, &nodes, "104 members");
    cluster.run(S * 2);
    let made = worlds(&cluster) - before;
    assert!(made <= 3, "{made} worlds");
    assert_eq!(cluster.kinds("lost").len(), 0);
}

#[test]
fn a_killed_node_that_comes_back_after_any_time_leads_to_the_same_outcome() {
    let outcomes = [0, 5, 15, 30, 60].map(|seconds| {
        let job = spec("demo", (1, 3, 8));
        let (mut cluster, nodes) = training(&job, 3);
        cluster.kill_worker(nodes[1]);
        cluster.run(S * seconds);
        let back = cluster.spawn(&job);
        assert!(!nodes.contains(&back), "an id is never used again");
        let members = [nodes[0], nodes[2], back];
        trains_with(&mut cluster, &job, &members, "three members again");
        let status = cluster.machine().status().jobs[0].clone();
        let blocks: Vec<String> = status.members.into_iter().map(|member| member.blocks).collect();
        (cluster.kinds("lost").len(), cluster.kinds("restart").len(), blocks, status.state)
    });
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[4]), "{outcomes:#?}");
}

#[test]
fn the_only_node_that_comes_back_after_any_time_goes_on_from_the_checkpoint() {
    for seconds in [0, 5, 15, 30, 60] {
        let mut job = spec("demo", (1, 1, 8));
        job.checkpoint_every = Some(ms(500));
        let (mut cluster, nodes) = training(&job, 1);
        cluster.run_until(S * 5, "a checkpoint", |c| c.kinds("checkpoint_committed").len() >= 2);
        cluster.kill_worker(nodes[0]);
        cluster.run(S * seconds);
        let saved = cluster.machine().roster().job(&job.job).unwrap().committed().unwrap().step;
        let back = cluster.spawn(&job);
        goes_on(&mut cluster, &[back], "it goes on");
        let world = cluster.world(&job.job);
        assert_eq!((world.lineage, world.start.as_ref().unwrap().step), (Lineage(2), saved));
        assert_eq!(cluster.kinds("restart").len(), 1, "after {seconds} s");
    }
}

#[test]
fn the_former_first_rank_that_dies_while_a_world_forms_holds_up_nobody() {
    for delay in (0..60).step_by(3) {
        let job = spec("demo", (1, 4, 8));
        let (mut cluster, nodes) = training(&job, 4);
        assert_eq!(cluster.members(&job.job)[0], nodes[0]);
        cluster.kill_worker(nodes[2]);
        cluster.run(ms(delay));
        cluster.kill_worker(nodes[0]);
        let what = format!("two members, the second death {delay} ms after the first");
        trains_with(&mut cluster, &job, &[nodes[1], nodes[3]], &what);
        assert!(worlds(&cluster) <= 3, "{what}: {} worlds", worlds(&cluster));
    }
}

#[test]
fn the_first_rank_that_dies_while_the_first_world_forms_holds_up_nobody() {
    for delay in (0..120).step_by(4) {
        let job = spec("demo", (1, 3, 8));
        let mut cluster = Cluster::new(3, 7);
        let nodes: Vec<NodeId> = (0..3).map(|_| cluster.spawn(&job)).collect();
        cluster.run(ms(delay));
        cluster.kill_worker(nodes[0]);
        cluster.run_until(S * 10, "a world", |c| c.has_world(&job.job));
        let wanted: BTreeSet<NodeId> = [nodes[1], nodes[2]].into();
        cluster.run_until(S * 10, "two members", |c| {
            c.world(&job.job).nodes().collect::<BTreeSet<_>>() == wanted
        });
        goes_on(&mut cluster, &nodes[1..], &format!("a death {delay} ms after the third join"));
    }
}

#[test]
fn two_joiners_at_any_distance_both_get_in() {
    for delay in (0..300).step_by(15) {
        let job = spec("demo", (1, 2, 8));
        let (mut cluster, mut nodes) = training(&job, 2);
        nodes.push(cluster.spawn(&job));
        cluster.run(ms(delay));
        nodes.push(cluster.spawn(&job));
        trains_with(&mut cluster, &job, &nodes, &format!("four members, {delay} ms apart"));
    }
}

#[test]
fn a_leave_at_any_time_around_a_join_confuses_neither() {
    for delay in (0..300).step_by(15) {
        for is_first in [false, true] {
            let job = spec("demo", (1, 3, 8));
            let (mut cluster, nodes) = training(&job, 3);
            let leave = |cluster: &mut Cluster| cluster.drain_worker(&job.job, vec![nodes[1]]);
            if is_first {
                leave(&mut cluster);
                cluster.run(ms(delay));
            }
            let joiner = cluster.spawn(&job);
            if !is_first {
                cluster.run(ms(delay));
                leave(&mut cluster);
            }
            let what = format!("the leave first: {is_first}, {delay} ms apart");
            trains_with(&mut cluster, &job, &[nodes[0], nodes[2], joiner], &what);
            cluster.run_until(S * 5, "released", |c| c.worker(nodes[1]).released.is_some());
            assert_eq!(cluster.worker(nodes[1]).released, Some(Release::Drained), "{what}");
            assert_eq!(cluster.kinds("lost").len(), 0, "{what}");
        }
    }
}

#[test]
fn below_the_minimum_by_a_leave_or_a_death_a_join_at_any_time_resumes() {
    for delay in [0, 10, 30, 100, 400, 2000] {
        for is_killed in [false, true] {
            let job = spec("demo", (2, 2, 8));
            let (mut cluster, nodes) = training(&job, 2);
            let reached = boundary(&cluster, nodes[0]);
            if is_killed {
                cluster.kill_worker(nodes[1]);
            } else {
                cluster.drain_worker(&job.job, vec![nodes[1]]);
            }
            cluster.run(ms(delay));
            let joiner = cluster.spawn(&job);
            let what = format!("killed: {is_killed}, a join {delay} ms later");
            trains_with(&mut cluster, &job, &[nodes[0], joiner], &what);
            assert!(boundary(&cluster, nodes[0]) > reached, "{what}");
        }
    }
}

/// With what does not arrive in one direction, a world forms within `limit` after a death.
fn survives_one_way(cut: &[(u64, u64)], limit: Duration) {
    let job = spec("demo", (1, 3, 8));
    let (mut cluster, nodes) = training(&job, 3);
    cluster.cut_one_way.extend(cut);
    cluster.run(S * 3);
    cluster.kill_worker(nodes[0]);
    let alive = [nodes[1], nodes[2]];
    cluster.run_until(limit, &format!("a world although {cut:?} is cut"), |c| {
        c.leader().is_some() && c.members(&job.job) == alive
    });
    goes_on(&mut cluster, &alive, "steps go on");
    assert_eq!(cluster.kinds("lost").len(), 1, "{cut:?}: only who died is lost");
    cluster.cut_one_way.clear();
    cluster.run(S * 3);
    let worlds = worlds(&cluster);
    cluster.run(S * 3);
    assert_eq!(crate::cases::worlds(&cluster), worlds, "it comes to rest");
}

#[test]
fn coordinators_that_hear_each_other_in_one_direction_only_still_lead() {
    for a in 1..=3 {
        for b in (1..=3).filter(|b| *b != a) {
            survives_one_way(&[(a, b)], S * 6);
        }
        // It hears all and is heard by nobody; it is heard and hears nobody.
        let others: Vec<u64> = (1..=3).filter(|b| *b != a).collect();
        survives_one_way(&others.iter().map(|b| (a, *b)).collect::<Vec<_>>(), S * 6);
        survives_one_way(&others.iter().map(|b| (*b, a)).collect::<Vec<_>>(), S * 6);
    }
}

#[test]
fn a_worker_whose_words_do_not_arrive_is_lost_by_its_silence() {
    let job = spec("demo", (1, 3, 8));
    let (mut cluster, nodes) = training(&job, 3);
    let mute = cluster.client_of(nodes[1]);
    cluster.clients.get_mut(&mute).unwrap().is_mute = true;
    cluster.run_until(S * 2, "it is lost", |c| c.members(&job.job) == [nodes[0], nodes[2]]);
    assert_eq!(cluster.kinds("lost")[0].cause.as_deref(), Some(Cause::Silent.name()));
    goes_on(&mut cluster, &[nodes[0], nodes[2]], "the others step");
    // It could hear that it is out.
    assert!(matches!(cluster.worker(nodes[1]).released, Some(Release::Evicted { .. })));
}

#[test]
fn a_worker_that_hears_nothing_does_not_keep_a_world_from_forming() {
    let job = spec("demo", (1, 4, 8));
    let (mut cluster, nodes) = training(&job, 4);
    let deaf = cluster.client_of(nodes[1]);
    cluster.clients.get_mut(&deaf).unwrap().is_deaf = true;
    cluster.kill_worker(nodes[3]);
    let alive = [nodes[0], nodes[2]];
    cluster.run_until(S * 20, "a world without it", |c| c.members(&job.job) == alive);
    goes_on(&mut cluster, &alive, "the others step");
}

#[test]
fn coordinators_whose_clocks_are_a_minute_apart_lead_one_after_the_other() {
    let mut job = spec("demo", (1, 3, 8));
    job.checkpoint_every = Some(ms(500));
    let (mut cluster, nodes) = training(&job, 3);
    for (round, ahead) in [60, 0, 120, 0, 60].into_iter().enumerate() {
        let leader = cluster.leader().unwrap();
        cluster.kill(leader);
        cluster.run_until(S * 3, "another leader", |c| c.leader().is_some());
        cluster.set_ahead(leader, S * ahead);
        cluster.start(leader);
        goes_on(&mut cluster, &nodes, "steps go on");
        let saved = cluster.kinds("checkpoint_committed").len();
        cluster.run_until(S * 5, "another checkpoint", |c| {
            c.kinds("checkpoint_committed").len() > saved
        });
        assert_eq!(cluster.kinds("lost").len(), 0, "round {round}");
        assert_eq!(worlds(&cluster), 1, "round {round}");
    }
    // The leader may be one whose clock is ahead or behind: a death is noticed all the same, and no earlier.
    for node in &nodes[1..] {
        cluster.die(*node);
        cluster.run(ms(300));
        assert!(cluster.members(&job.job).contains(node), "it was given its time");
        cluster.run_until(S * 2, "a smaller world", |c| !c.members(&job.job).contains(node));
        let leader = cluster.leader().unwrap();
        cluster.kill(leader);
        cluster.run_until(S * 3, "another leader", |c| c.leader().is_some());
        cluster.start(leader);
        cluster.run(S);
    }
    goes_on(&mut cluster, &nodes[..1], "the last one steps");
}

/// How many leaves each of the members serves, in the order given.
fn leaves(cluster: &Cluster, job: &JobSpec, nodes: &[NodeId]) -> Vec<usize> {
    let world = cluster.world(&job.job);
    let of = |node: &NodeId| world.member(*node).map_or(&[][..], |member| &member.blocks[..]);
    nodes
        .iter()
        .map(|n| of(n).iter().flat_map(|block| block.leaves(world.virtual_ranks)).count())
        .collect()
}

#[test]
fn blocks_leave_a_member_three_times_slower_and_then_rest() {
    let job = spec("demo", (1, 4, 16));
    let (mut cluster, nodes) = training(&job, 4);
    for (node, leaf) in nodes.iter().zip([30, 10, 10, 10]) {
        cluster.worker_mut(*node).leaf_time = Some(ms(leaf));
    }
    let before = worlds(&cluster);
    let begun = boundary(&cluster, nodes[0]);
    cluster.run_until(S * 30, "one leaf of sixteen is left to it", |c| {
        leaves(c, &job, &nodes) == [1, 5, 5, 5]
    });
    let steps = boundary(&cluster, nodes[0]).0 - begun.0;
    assert!(steps <= 200, "after {steps} steps");
    assert!(worlds(&cluster) - before <= 4, "{} worlds", worlds(&cluster) - before);
    let events = cluster.kinds("evened");
    assert_eq!(events.len(), worlds(&cluster) - before);
    assert_eq!(events[0].nodes.len(), 2, "{events:#?}");
    cluster.run(S * 20);
    assert_eq!(cluster.kinds("evened").len(), worlds(&cluster) - before, "it rests");
    // The slow one dies: the others are equal and stay so.
    cluster.kill_worker(nodes[0]);
    trains_with(&mut cluster, &job, &nodes[1..], "the three others");
    assert_eq!(leaves(&cluster, &job, &nodes[1..]).iter().sum::<usize>(), 16);
    assert_eq!(cluster.world(&job.job).lineage, Lineage(1));
}

#[test]
fn blocks_stay_where_they_are_among_equals_without_times_or_when_told_so() {
    let (slow, equal) = ([30, 10, 10, 10], [10, 10, 11, 10]);
    let cases =
        [(Some(equal), true, 4), (None, true, 4), (Some(slow), false, 4), (Some(slow), true, 3)];
    for (times, evens_out, tell) in cases {
        let mut job = spec("demo", (1, 4, 16));
        job.evens_out = evens_out;
        let (mut cluster, nodes) = training(&job, 4);
        for (node, leaf) in nodes.iter().zip(times.into_iter().flatten()).take(tell) {
            cluster.worker_mut(*node).leaf_time = Some(ms(leaf));
        }
        let before = worlds(&cluster);
        cluster.run(S * 20);
        assert_eq!(worlds(&cluster), before, "{times:?} {evens_out} {tell}");
    }
}

#[test]
fn who_joins_dies_or_leaves_while_blocks_move_holds_up_nobody() {
    for delay in (0..4000).step_by(150) {
        let job = spec("demo", (1, 5, 16));
        let (mut cluster, mut nodes) = training(&job, 4);
        for (node, leaf) in nodes.iter().zip([30, 10, 15, 10]) {
            cluster.worker_mut(*node).leaf_time = Some(ms(leaf));
        }
        cluster.run(ms(delay));
        let gone = nodes.remove((delay / 150 % 4) as usize);
        match delay / 150 % 3 {
            0 => cluster.kill_worker(gone),
            1 => cluster.drain_worker(&job.job, vec![gone]),
            _ => cluster.die(gone),
        }
        let joiner = cluster.spawn(&job);
        cluster.worker_mut(joiner).leaf_time = Some(ms(40));
        nodes.push(joiner);
        trains_with(&mut cluster, &job, &nodes, &format!("after {delay} ms"));
        cluster.run(S * 20);
        let events = cluster.kinds("evened").len();
        cluster.run(S * 20);
        assert_eq!(cluster.kinds("evened").len(), events, "after {delay} ms it rests");
        assert_eq!(leaves(&cluster, &job, &nodes).iter().sum::<usize>(), 16);
    }
}
