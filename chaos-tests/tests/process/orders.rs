//! What an operator orders of a running job, and what becomes of it.

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Cluster, Job, Place, Traces, play};
use serde_json::Value;

#[test]
fn a_running_job_is_scaled_saved_and_stopped_and_goes_on_to_the_same_digest() -> anyhow::Result<()>
{
    play(|cluster| {
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "1h"];
        let job = Job::new(400).with_leaf_ms(5).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_coordinators(&[1, 2, 3])?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 3)?;
        cluster.wait("steps of three", |traces| settled(traces, 3))?;

        let scaled = order(cluster, &["scale", "--max", "1"])?;
        ensure!(scaled["max_members"] == 1, "{scaled}");
        cluster.wait("a world of one", |traces| settled(traces, 1))?;
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");

        let stood = cluster.traces().boundary();
        let saved = order(cluster, &["checkpoint", "now"])?;
        ensure!(saved["step"].as_u64() >= Some(stood), "saved {saved}, asked at {stood}");

        let top = order(cluster, &["top", "--count", "1"])?;
        ensure!(top["status"]["jobs"][0]["max_members"] == 1, "{top}");

        let stopped = order(cluster, &["stop"])?;
        ensure!(stopped["stopping"] == 1, "{stopped}");
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");

        let agent = cluster.start_agent(&job, Place::Coordinators, 2)?;
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_host_is_drained_by_its_name() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(300).with_leaf_ms(5).with_flags(&["--expected-members", "3"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let host = |name| job.clone().with_flags(&["--host", name]);
        let stays = cluster.start_agent(&host("green"), Place::Coordinators, 1)?;
        let leaves = cluster.start_agent(&host("blue"), Place::Coordinators, 2)?;
        cluster.wait("steps of three", |traces| settled(traces, 3))?;
        let drained = order(cluster, &["drain", "--host", "blue"])?;
        ensure!(drained["draining"].as_array().context("nodes")?.len() == 2, "{drained}");
        let said = cluster.said(&leaves)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");
        let said = cluster.said(&stays)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_stop_that_would_lose_the_state_needs_a_word_more() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(2000).with_leaf_ms(5);
        cluster.start_single_coordinator()?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 1)?;
        cluster.wait("steps", |traces| settled(traces, 1))?;
        let list = cluster.coordinator_list();
        let place = ["--coordinators", &list, "--certs", "ca"];
        let said = cluster.run(&[&["stop"], place.as_slice()].concat())?;
        ensure!(said.code == 64 && said.err.contains("--lose-state"), "{said:?}");
        let said = cluster.run(&[&["checkpoint", "now"], place.as_slice()].concat())?;
        ensure!(said.code == 64 && said.err.contains("--checkpoint URL"), "{said:?}");
        let said = cluster.run(&[&["stop", "--lose-state"], place.as_slice()].concat())?;
        ensure!(said.code == 0, "{said:?}");
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        Ok(())
    })
}

/// Steps are done in a world of so many.
fn settled(traces: &Traces, members: usize) -> Option<()> {
    let is_full = traces.settled_world().is_some_and(|(_, nodes)| nodes.len() == members);
    (is_full && traces.boundary() >= 5).then_some(())
}

fn order(cluster: &mut Cluster, words: &[&str]) -> anyhow::Result<Value> {
    let list = cluster.coordinator_list();
    let place = ["--coordinators", &list, "--certs", "ca", "-o", "json"];
    let said = cluster.run(&[words, place.as_slice()].concat())?;
    ensure!(said.code == 0, "{words:?}: {said:?}");
    serde_json::from_str(&said.out).with_context(|| format!("{words:?}: {said:?}"))
}
