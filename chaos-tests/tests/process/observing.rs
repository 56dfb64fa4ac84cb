//! What people and machines see of a running job: HTTP, status and events.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Job, Place, Signal, coordinator, free_port, play};
use serde_json::Value;

#[test]
fn http_status_and_events_show_a_running_job() -> anyhow::Result<()> {
    play(|cluster| {
        // Only one of three at first: it lives, and is not ready.
        let http = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let mut command = cluster.coordinator_command(1);
        command.args(["--http", &http.to_string()]);
        cluster.start(&coordinator(1), command)?;
        let alive =
            |_: &mut _| Ok(get(http, "/livez").ok().filter(|(code, _)| *code == 200).map(drop));
        cluster.poll("/livez", alive)?;
        ensure!(get(http, "/readyz")?.0 == 503, "ready without a leader");
        cluster.start_coordinators(&[2, 3])?;
        let ready =
            |_: &mut _| Ok(get(http, "/readyz").ok().filter(|(code, _)| *code == 200).map(drop));
        cluster.poll("/readyz", ready)?;

        let job = Job::new(300).with_leaf_ms(5).with_flags(&[
            "--expected-members",
            "2",
            "--checkpoint",
            "c",
            "--checkpoint-every",
            "300ms",
        ]);
        let agent = cluster.start_agent(&job, Place::Coordinators, 2)?;
        cluster.wait("a checkpoint of two members", |traces| {
            let is_full = traces.settled_world().is_some_and(|(_, nodes)| nodes.len() == 2);
            traces.checkpoint().filter(|_| is_full)
        })?;
        let (code, metrics) = get(http, "/metrics")?;
        ensure!(code == 200, "/metrics answers {code}");
        check_exposition(&metrics)?;
        ensure!(get(http, "/nothing")?.0 == 404, "a page that does not exist");

        let list = cluster.coordinator_list();
        let place = ["--coordinators", &list, "--certs", "ca", "-o", "json"];
        let status = cluster.run(&[&["status"], place.as_slice()].concat())?;
        let status: Value = serde_json::from_str(&status.out).context("status")?;
        let leaders = status["coordinators"].as_array().context("coordinators")?;
        ensure!(leaders.iter().filter(|c| c["is_leader"] == true).count() == 1, "{status}");
        let members = status["jobs"][0]["members"].as_array().context("members")?;
        ensure!(members.len() == 2 && members.iter().all(|m| m["rank"].is_u64()), "{status}");
        ensure!(status["jobs"][0]["checkpoint"]["step"].as_u64() > Some(0), "{status}");

        let events = cluster.run(&[&["events"], place.as_slice()].concat())?;
        let events: Result<Vec<Value>, _> = events.out.lines().map(serde_json::from_str).collect();
        let events = events.context("events")?;
        for kind in ["leader", "token_used", "joined", "world", "checkpoint_committed"] {
            ensure!(
                events.iter().any(|event| event["kind"] == kind),
                "no event {kind}: {events:?}"
            );
        }
        let indices: Vec<u64> = events.iter().filter_map(|event| event["index"].as_u64()).collect();
        ensure!(indices.is_sorted() && indices.len() == events.len(), "out of order: {indices:?}");
        let said = cluster.said(&agent)?;
        ensure!(said.code == 0, "the agent ended with code {}", said.code);
        Ok(())
    })
}

/// Every line is a comment or `name{labels} number`, and what people watch is there.
fn check_exposition(metrics: &str) -> anyhow::Result<()> {
    for line in metrics.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, value) = line.rsplit_once(' ').context("a metric without value")?;
        ensure!(name.starts_with("ripstop_") && value.parse::<f64>().is_ok(), "{line}");
    }
    for name in ["ripstop_raft_", "ripstop_events_total"] {
        ensure!(metrics.contains(name), "no {name}: {metrics}");
    }
    Ok(())
}

/// The answer to a GET, by hand.
fn get(at: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    ask(at, &format!("GET {path}"), "", "")
}

/// The answer to a request line with these further headers and this body, by hand.
pub(crate) fn ask(
    at: SocketAddr,
    request: &str,
    headers: &str,
    body: &str,
) -> anyhow::Result<(u16, String)> {
    let limit = Duration::from_secs(10);
    let mut stream = TcpStream::connect_timeout(&at, limit)?;
    stream.set_read_timeout(Some(limit))?;
    let length = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the head")?;
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no code")?;
    Ok((code, body.to_owned()))
}

#[test]
fn a_death_is_explained_with_who_noticed_and_what_it_cost() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(2000).with_leaf_ms(5).with_flags(&["--max-restarts", "0"]);
        cluster.start_single_coordinator()?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 3)?;
        cluster.wait("steps", |traces| (traces.boundary() >= 5).then_some(()))?;
        let victim = cluster.traces().alive()[1];
        ensure!(cluster.signal_worker(victim, Signal::KILL)?, "worker {victim} was gone already");
        let list = cluster.coordinator_list();
        let place = ["--coordinators", &list, "--certs", "ca"];
        let change = cluster.poll("the cost of its death", |cluster| {
            let said = cluster.run(&[&["explain", "-o", "json"], place.as_slice()].concat())?;
            let change: Value =
                serde_json::from_str(&said.out).with_context(|| format!("{said:?}"))?;
            let is_it = change["went"] == serde_json::json!([victim]);
            Ok((is_it && change["total_ms"].is_f64()).then_some(change))
        })?;
        ensure!(change["noticed_by"] == "agent" && change["generation"] == 2, "{change}");
        ensure!(change["recomputed_leaves"].as_u64() <= Some(8), "{change}");
        let said = cluster.run(&[&["explain"], place.as_slice()].concat())?;
        ensure!(said.out.contains("killed by signal 9"), "{said:?}");
        let said = cluster.run(&[&["explain", "77"], place.as_slice()].concat())?;
        ensure!(said.code == 64 && said.err.contains("there are 1 to 2"), "{said:?}");
        cluster.signal(&agent, Signal::TERM)?;
        ensure!(cluster.said(&agent)?.code == 75, "the agent failed");
        Ok(())
    })
}

#[test]
fn an_agent_says_whom_its_job_waits_for_and_what_came_of_it() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(20).with_flags(&["--min-members", "3"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 2)?;
        cluster.poll("a word of whom it waits for", |cluster| {
            Ok(cluster.output(&agent)?.1.contains("2 of at least 3 are here").then_some(()))
        })?;
        let third = cluster.start_agent(&job, Place::Coordinators, 1)?;
        let said = [cluster.said(&agent)?, cluster.said(&third)?];
        let result = format!("20 steps, digest of the state {}", undisturbed.digest);
        for said in &said {
            ensure!(said.code == 0 && said.err.contains(&result), "no result: {said:?}");
        }
        let printed = said.iter().find(|said| said.digest().is_some());
        cluster.check_end(&undisturbed, printed.context("nobody printed a digest")?)
    })
}

#[test]
fn a_standalone_job_is_found_by_status_without_any_flag() -> anyhow::Result<()> {
    play(|cluster| {
        let name = format!("chaos-{}", std::process::id());
        let job = Job::new(200).with_leaf_ms(5).with_flags(&["--run-id", &name]);
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        cluster.wait("steps", |traces| (traces.boundary() >= 5).then_some(()))?;
        let status = cluster.run(&["status", "--run-id", &name, "-o", "json"])?;
        let status: Value =
            serde_json::from_str(&status.out).with_context(|| format!("{status:?}"))?;
        ensure!(status["jobs"][0]["job"] == name.as_str(), "{status}");
        ensure!(cluster.said(&agent)?.code == 0, "the agent failed");
        let gone = cluster.run(&["status", "--run-id", &name])?;
        ensure!(gone.code == 64 && gone.err.contains("--coordinators"), "{gone:?}");
        Ok(())
    })
}
