//! What an operator orders of a running job, and what becomes of it.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Cluster, Job, Place, Traces, coordinator, free_port, play};
use serde_json::Value;

use crate::observing::ask;

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
fn orders_by_http_need_the_token_and_reach_the_leader_from_any_coordinator() -> anyhow::Result<()> {
    play(|cluster| {
        let token = "a-token-of-at-least-16";
        std::fs::write(cluster.folder().join("token"), format!("{token}\n"))?;
        let mut doors = Vec::new();
        for id in 1..=3 {
            let at = SocketAddr::from(([127, 0, 0, 1], free_port()?));
            let mut command = cluster.coordinator_command(id);
            command.args(["--http", &at.to_string()]);
            if id < 3 {
                command.args(["--http-token", "token"]);
            }
            cluster.start(&coordinator(id), command)?;
            doors.push(at);
        }
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "1h"];
        let job = Job::new(2000).with_leaf_ms(5).with_flags(&flags);
        let agent = cluster.start_agent(&job, Place::Coordinators, 3)?;
        cluster.wait("steps of three", |traces| settled(traces, 3))?;
        let name = job_name(&doors)?;
        let path = |rest: &str| format!("/v1/jobs/{name}{rest}");
        let right = format!("Authorization: Bearer {token}\r\nContent-Type: application/json\r\n");
        let wrong = right.replace(token, "another-token-of-16");
        let scale = format!("PUT {}", path("/scale"));

        let refused = [
            (doors[0], scale.as_str(), "", "{\"max\": 2}", 401, "Bearer"),
            (doors[0], &scale, &wrong, "{\"max\": 2}", 401, "wrong"),
            (doors[2], &scale, &right, "{\"max\": 2}", 403, "--http-token"),
            (doors[0], &scale, &right, "{\"most\": 2}", 400, "most"),
            (doors[0], &scale, &right, "{\"max\": 0}", 400, "min <= max"),
            (doors[0], "PUT /v1/jobs/other/scale", &right, "{\"max\": 2}", 404, "no job other"),
            (doors[0], "GET /v1/jobs/other", "", "", 404, "no job other"),
            (doors[0], &format!("POST {}", path("/drain")), &right, "{}", 400, "nodes"),
        ];
        for (at, request, headers, body, code, word) in refused {
            let (found, answer) = ask(at, request, headers, body)?;
            ensure!(found == code && answer.contains(word), "{request} {body}: {found} {answer}");
            let problem: Value = serde_json::from_str(&answer).context(answer)?;
            ensure!(problem["status"] == code, "{problem}");
        }
        ensure!(settled(cluster.traces(), 3).is_some(), "a refused order had an effect");

        // Only one of the two leads, if any.
        let (code, answer) = ask(doors[0], &scale, &right, "{\"max\": 2}")?;
        ensure!(code == 200 && answer.contains("\"max_members\":2"), "{code} {answer}");
        cluster.wait("a world of two", |traces| settled(traces, 2))?;
        let (code, answer) = ask(doors[1], &scale, &right, "{\"min\": 1, \"max\": 4}")?;
        ensure!(code == 200, "{code} {answer}");

        let (code, answer) = ask(doors[1], &format!("GET {}", path("/events?since=0")), "", "")?;
        ensure!(code == 200 && answer.contains("\"scaled\""), "{code} {answer}");
        let (code, answer) = ask(doors[0], &format!("POST {}", path("/checkpoint")), &right, "")?;
        ensure!(code == 202, "{code} {answer}");
        cluster.wait("a checkpoint", Traces::checkpoint)?;
        let (code, answer) = ask(doors[0], &format!("POST {}", path("/stop")), &right, "")?;
        ensure!(code == 202, "{code} {answer}");
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        Ok(())
    })
}

fn job_name(doors: &[SocketAddr]) -> anyhow::Result<String> {
    let (code, answer) = ask(doors[2], "GET /v1/jobs", "", "")?;
    ensure!(code == 200, "{code} {answer}");
    let jobs: Value = serde_json::from_str(&answer)?;
    Ok(jobs["jobs"][0]["job"].as_str().context("a job's name")?.to_owned())
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
