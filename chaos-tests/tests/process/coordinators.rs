//! Coordinators that die while a job trains.

use std::time::{Duration, Instant};

use anyhow::ensure;
use ripstop_chaos::process::{Cluster, Job, Place, Signal, Traces, coordinator, play};

#[test]
fn steps_go_on_while_a_leader_is_elected_and_the_dead_one_comes_back() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(200).with_leaf_ms(10).with_flags(&["--max-restarts", "0"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let leader = cluster.start_coordinators(&[1, 2, 3])?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 3)?;
        step(cluster, 20)?;
        cluster.kill(&coordinator(leader))?;
        let boundary = cluster.traces().boundary();
        cluster.wait("another leader", |t| t.leader().filter(|id| *id != leader))?;
        let elected_at = cluster.traces().boundary();
        ensure!(elected_at > boundary, "no step from the death of the leader to the next election");
        step(cluster, boundary + 20)?;
        let command = cluster.coordinator_command(leader);
        cluster.start(&coordinator(leader), command)?;

        // With the third one gone, the one that came back is needed for a majority.
        let third = (1..=3).find(|id| *id != leader && Some(*id) != cluster.traces().leader());
        let third = third.unwrap_or(leader);
        cluster.kill(&coordinator(third))?;
        kill_worker_and_see_a_new_world(cluster)?;
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_coordinator_that_lost_its_disk_stays_out_until_it_is_replaced() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(300).with_leaf_ms(10).with_flags(&["--max-restarts", "0"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let leader = cluster.start_coordinators(&[1, 2, 3])?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 4)?;
        step(cluster, 20)?;
        let lost = leader % 3 + 1;
        cluster.kill(&coordinator(lost))?;
        std::fs::remove_dir_all(cluster.folder().join(format!("coordinator-{lost}")))?;
        let command = cluster.coordinator_command(lost);
        cluster.start(&coordinator(lost), command)?;
        cluster.poll("its word that it takes no part", |cluster| {
            let (_, err) = cluster.output(&coordinator(lost))?;
            let says = err.contains(&format!("run `ripstop coordinator replace {lost}`"));
            Ok(says.then_some(()))
        })?;
        let list = cluster.coordinator_list();
        let id = lost.to_string();
        let flags = ["coordinator", "replace", &id, "--coordinators", &list, "--certs", "ca"];
        let said = cluster.run(&flags)?;
        ensure!(said.code == 0 && said.out.contains("has its seat"), "{said:?}");
        cluster.poll("its word that it takes part", |cluster| {
            let (_, err) = cluster.output(&coordinator(lost))?;
            Ok(err.contains("seat is this disk's").then_some(()))
        })?;

        // With another one gone, the replaced one is needed for a majority.
        cluster.kill(&coordinator(leader))?;
        cluster.wait("another leader", |t| t.leader().filter(|id| *id != leader))?;
        kill_worker_and_see_a_new_world(cluster)?;
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn steps_go_on_without_any_coordinator() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(260).with_leaf_ms(15).with_flags(&["--max-restarts", "0"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_coordinators(&[1, 2, 3])?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 4)?;
        step(cluster, 10)?;
        for id in 1..=3 {
            cluster.kill(&coordinator(id))?;
        }
        let (boundary, began) = (cluster.traces().boundary(), Instant::now());
        cluster.wait("seconds without any coordinator, and steps in them", |traces| {
            (began.elapsed() > OUTAGE && traces.boundary() > boundary + 20).then_some(())
        })?;
        restart_all(cluster)?;
        kill_worker_and_see_a_new_world(cluster)?;
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_worker_that_dies_without_coordinators_is_replaced_when_they_are_back() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(120).with_leaf_ms(10).with_flags(&["--max-restarts", "1"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_coordinators(&[1, 2, 3])?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 3)?;
        step(cluster, 20)?;
        for id in 1..=3 {
            cluster.kill(&coordinator(id))?;
        }
        let victim = *cluster.traces().alive().first().unwrap();
        ensure!(cluster.signal_worker(victim, Signal::KILL)?, "worker {victim} was gone already");
        let began = Instant::now();
        let exited = |traces: &Traces| {
            traces.exit_of(victim).filter(|_| began.elapsed() > OUTAGE / 2).map(drop)
        };
        cluster.wait("the agent to know it", exited)?;
        restart_all(cluster)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 0, "the agent ended with code {}", said.code);
        ensure!(cluster.traces().started().count() == 4, "the dead worker was not started again");
        cluster.check_end(&undisturbed, &said)
    })
}

/// Longer than the recovery target of a second: everybody has noticed.
const OUTAGE: Duration = Duration::from_secs(4);

fn step(cluster: &mut Cluster, boundary: u64) -> anyhow::Result<()> {
    let reached = |traces: &Traces| (traces.boundary() >= boundary).then_some(());
    cluster.wait(&format!("boundary {boundary}"), reached)
}

fn restart_all(cluster: &mut Cluster) -> anyhow::Result<()> {
    let before = cluster.traces().count("leader");
    for id in 1..=3 {
        let command = cluster.coordinator_command(id);
        cluster.start(&coordinator(id), command)?;
    }
    cluster.wait("a leader again", |traces| (traces.count("leader") > before).then_some(()))
}

/// A change of members shows that the coordinators work.
fn kill_worker_and_see_a_new_world(cluster: &mut Cluster) -> anyhow::Result<()> {
    let settled = |traces: &Traces| traces.settled_world().map(|(g, nodes)| (g, nodes.to_vec()));
    let (generation, nodes) = cluster.wait("a settled world", settled)?;
    let victim = *nodes.last().unwrap();
    ensure!(cluster.signal_worker(victim, Signal::KILL)?, "worker {victim} was gone already");
    cluster.wait("a world without the dead worker", |traces| {
        traces
            .settled_world()
            .filter(|(g, nodes)| *g > generation && !nodes.contains(&victim))
            .map(drop)
    })
}
