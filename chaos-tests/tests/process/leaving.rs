//! TERM: leaving in good order, or at once. And an agent that is killed itself.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Cluster, Job, Line, Place, Signal, Traces, Writer, play};

#[test]
fn a_worker_that_gets_term_leaves_with_75_and_no_leaf_is_computed_twice() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(120).with_leaf_ms(5);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 3)?;
        step(cluster, 20)?;
        let leaver = cluster.traces().alive()[1];
        ensure!(cluster.signal_worker(leaver, Signal::TERM)?, "worker {leaver} was gone already");
        let exit = cluster.wait("its end", |t| t.exit_of(leaver).map(str::to_owned))?;
        ensure!(exit == "exited with code 75", "worker {leaver} {exit}");
        let left_at = cluster.traces().boundary();
        ensure!(left_at < job.steps(), "it left only at the end");
        let said = cluster.said(&agent)?;
        ensure!(said.code == 0, "the agent ended with code {}", said.code);
        ensure!(
            cluster.traces().started().count() == 3,
            "who left in good order is not started again"
        );
        let twice = computed_twice(cluster.traces());
        ensure!(
            twice.is_empty(),
            "leaves computed twice, as (step, rank) and by how many: {twice:?}"
        );
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn an_agent_that_gets_term_saves_and_leaves_with_75_and_nothing_is_lost() -> anyhow::Result<()> {
    play(|cluster| {
        // No checkpoint is due by itself.
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "1h"];
        let job = Job::new(120).with_leaf_ms(5).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 3)?;
        step(cluster, 20)?;
        let asked_at = cluster.traces().boundary();
        cluster.signal(&agent, Signal::TERM)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}", said.code);
        let all: Vec<u64> = cluster.traces().started().map(|s| s.node).collect();
        for node in all {
            let exit = cluster.traces().exit_of(node);
            ensure!(exit == Some("exited with code 75"), "worker {node} {exit:?}");
        }
        let saved = cluster.traces().checkpoint().context("nothing was saved")?;
        ensure!(saved < job.steps(), "the job had ended before");
        ensure!(saved >= asked_at, "saved {saved}, but asked to leave at {asked_at}");

        cluster.renew_traces()?;
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        let said = cluster.said(&agent)?;
        let begins = begins(cluster.traces());
        ensure!(begins == [saved], "the job went on from {begins:?}, not from {saved}");
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn an_agent_that_gets_term_while_it_starts_leaves_with_75() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(1000).with_leaf_ms(5);
        for delay in [0, 5, 15, 40, 100, 250] {
            cluster.renew_traces()?;
            let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
            cluster.poll("a worker's start", |cluster| {
                Ok(cluster.output(&agent)?.1.contains("worker started").then_some(()))
            })?;
            std::thread::sleep(Duration::from_millis(delay));
            cluster.signal(&agent, Signal::TERM)?;
            let said = cluster.said(&agent)?;
            ensure!(said.code == 75, "{delay} ms after its start: {said:?}");
        }
        Ok(())
    })
}

#[test]
fn of_four_workers_those_that_get_a_signal_leave_one_by_one_and_the_last_goes_on()
-> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(250).with_leaf_ms(5);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 4)?;
        step(cluster, 20)?;
        let workers = cluster.traces().alive();
        for (leaver, signal) in workers.iter().zip([Signal::USR1, Signal::TERM, Signal::USR2]) {
            ensure!(cluster.signal_worker(*leaver, signal)?, "worker {leaver} was gone already");
            let exit = cluster.wait("its end", |t| t.exit_of(*leaver).map(str::to_owned))?;
            ensure!(exit == "exited with code 75", "worker {leaver} {exit} after {signal:?}");
        }
        let left_at = cluster.traces().boundary();
        ensure!(left_at < job.steps(), "they left only at the end");
        let said = cluster.said(&agent)?;
        ensure!(cluster.traces().started().count() == 4, "somebody was started again");
        let twice = computed_twice(cluster.traces());
        ensure!(twice.is_empty(), "leaves computed twice: {twice:?}");
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn term_while_a_checkpoint_is_under_way_leaves_with_75_and_nothing_is_lost() -> anyhow::Result<()> {
    play(|cluster| {
        // One follows the other.
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "100ms"];
        let job = Job::new(600).with_leaf_ms(2).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        let mut from = 0;
        for delay in [0, 3, 10, 30, 60] {
            cluster.renew_traces()?;
            let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
            cluster.wait("a checkpoint that is staged", |traces| {
                let staged = |(_, lines): (u64, &[Line])| lines.iter().any(|l| l.event == "stage");
                (traces.boundary() > from + 20 && traces.workers().any(staged)).then_some(())
            })?;
            std::thread::sleep(Duration::from_millis(delay));
            let asked_at = cluster.traces().boundary();
            cluster.signal(&agent, Signal::TERM)?;
            let said = cluster.said(&agent)?;
            ensure!(said.code == 75, "{delay} ms after it: {said:?}");
            let saved = cluster.traces().checkpoint().context("nothing was saved")?;
            ensure!(saved < job.steps(), "the job had ended before");
            ensure!(saved >= asked_at, "saved {saved}, but asked to leave at {asked_at}");
            let begins = begins(cluster.traces());
            ensure!(begins == [from], "{delay}: the job went on from {begins:?}, not from {from}");
            cluster.check_states(&undisturbed)?;
            from = saved;
        }
        cluster.renew_traces()?;
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn term_in_an_evaluation_waits_for_its_end_and_nothing_is_lost() -> anyhow::Result<()> {
    play(|cluster| {
        let pause = cluster.folder().join("pause");
        let path = pause.display().to_string();
        // It takes three times as long as a leaf may.
        let mut flags = vec!["--hang-timeout", "4s", "--grace", "10m"];
        flags.extend(["--checkpoint", "checkpoints", "--checkpoint-every", "1h"]);
        let job = Job::new(150).with_leaf_ms(5).with_training("--pause-file", &path);
        let job = job.with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        step(cluster, 20)?;
        std::fs::write(&pause, "")?;
        let both = |cluster: &mut Cluster, seconds: u64| {
            std::thread::sleep(Duration::from_secs(seconds));
            cluster.poll("the traces", |_| Ok(Some(())))?;
            ensure!(cluster.traces().alive().len() == 2, "somebody ended in the evaluation");
            anyhow::Ok(())
        };
        both(cluster, 8)?;
        let world = cluster.traces().settled_world().context("no world")?.0;
        ensure!(world == 1, "world {world}");
        cluster.signal(&agent, Signal::TERM)?;
        both(cluster, 5)?;
        std::fs::remove_file(&pause)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        let saved = cluster.traces().checkpoint().context("nothing was saved")?;
        ensure!((20..150).contains(&saved), "saved {saved}");

        cluster.renew_traces()?;
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        let said = cluster.said(&agent)?;
        let begins = begins(cluster.traces());
        ensure!(begins == [saved], "the job went on from {begins:?}, not from {saved}");
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn an_evaluation_longer_than_the_grace_is_left_to_recovery() -> anyhow::Result<()> {
    play(|cluster| {
        let pause = cluster.folder().join("pause");
        let path = pause.display().to_string();
        let flags = ["--grace", "2s", "--expected-members", "2"];
        let job = Job::new(150).with_leaf_ms(5).with_training("--pause-file", &path);
        let job = job.with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let stays = cluster.start_agent(&job, Place::Coordinators, 1)?;
        let leaves = cluster.start_agent(&job, Place::Coordinators, 1)?;
        step(cluster, 20)?;
        std::fs::write(&pause, "")?;
        cluster.signal(&leaves, Signal::TERM)?;
        let said = cluster.said(&leaves)?;
        ensure!(said.code == 143, "the agent ended with code {}: {}", said.code, said.err);
        std::fs::remove_file(&pause)?;
        let said = cluster.said(&stays)?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn the_workers_of_a_spot_host_leave_at_its_notice_and_the_others_go_on() -> anyhow::Result<()> {
    play(|cluster| {
        let service = MetadataService::start()?;
        let job = Job::new(300).with_leaf_ms(5).with_flags(&["--expected-members", "3"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let stays = cluster.start_agent(&job, Place::Coordinators, 1)?;
        let on_spot = job.clone().with_flags(&["--notice", "aws"]);
        let mut spot = cluster.agent_command(&on_spot, Place::Coordinators, 2)?;
        spot.env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &service.base);
        cluster.start("spot", spot)?;
        cluster.wait("steps of three", |traces| {
            let is_full = traces.settled_world().is_some_and(|(_, nodes)| nodes.len() == 3);
            (is_full && traces.boundary() >= 5).then_some(())
        })?;
        service.interrupt();
        let said = cluster.said("spot")?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        ensure!(said.err.contains("spot terminate"), "nothing is said of the notice: {}", said.err);
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");
        let twice = computed_twice(cluster.traces());
        ensure!(twice.is_empty(), "leaves computed twice: {twice:?}");
        let said = cluster.said(&stays)?;
        cluster.check_end(&undisturbed, &said)
    })
}

/// A cloud's metadata service: no notice, until it is told to give one.
struct MetadataService {
    base: String,
    is_interrupted: Arc<AtomicBool>,
}

impl MetadataService {
    fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let base = format!("http://{}", listener.local_addr()?);
        let is_interrupted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_interrupted);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A request that breaks off is the asker's affair.
                drop(answer(stream, &flag));
            }
        });
        Ok(Self { base, is_interrupted })
    }

    fn interrupt(&self) {
        self.is_interrupted.store(true, Ordering::SeqCst);
    }
}

fn answer(mut stream: TcpStream, is_interrupted: &AtomicBool) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let is_action = request.contains("spot/instance-action");
    let (status, body) = if request.starts_with("PUT /latest/api/token") {
        ("200 OK", "a-token")
    } else if is_action && is_interrupted.load(Ordering::SeqCst) {
        ("200 OK", "{\"action\": \"terminate\", \"time\": \"2099-01-01T00:00:00Z\"}")
    } else {
        ("404 Not Found", "")
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[test]
fn a_second_term_ends_everything_at_once_with_143() -> anyhow::Result<()> {
    play(|cluster| {
        // A step takes minutes: nobody can leave in good order soon.
        let job = Job::new(10).with_leaf_ms(120_000);
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        cluster.wait("a world", |traces| traces.settled_world().map(drop))?;
        cluster.signal(&agent, Signal::TERM)?;
        cluster.poll("the agent to hear it", |c| {
            Ok(c.output(&agent)?.1.contains("signal received").then_some(()))
        })?;
        let workers = cluster.traces().alive();
        ensure!(
            workers.len() == 2 && workers.iter().all(|w| cluster.is_running(*w)),
            "they did not wait"
        );
        cluster.signal(&agent, Signal::TERM)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 143, "the agent ended with code {}", said.code);
        ensure!(workers.iter().all(|w| !cluster.is_running(*w)), "a worker outlived its agent");
        Ok(())
    })
}

#[test]
fn a_worker_that_is_stopped_for_good_is_replaced_and_keeps_nobody() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(400).with_leaf_ms(15);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 3)?;
        step(cluster, 10)?;
        let stopped = cluster.traces().alive()[0];
        ensure!(cluster.signal_worker(stopped, Signal::STOP)?, "it does not run");
        cluster.poll("the stopped worker to be killed", |cluster| {
            Ok((!cluster.is_running(stopped)).then_some(()))
        })?;
        cluster.wait("another in its place", |traces| {
            let alive = traces.alive();
            (alive.len() == 3 && !alive.contains(&stopped)).then_some(())
        })?;
        let said = cluster.said(&agent)?;
        ensure!(said.err.contains("is killed"), "nothing is said of it: {}", said.err);
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_worker_that_hangs_while_its_heartbeats_go_on_is_named_and_replaced() -> anyhow::Result<()> {
    play(|cluster| {
        let trigger = cluster.folder().join("hang");
        let path = trigger.display().to_string();
        let job = Job::new(400).with_leaf_ms(10).with_training("--hang-file", &path);
        let job = job.with_flags(&["--hang-timeout", "4s"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let agent = cluster.start_agent(&job, Place::Standalone, 3)?;
        step(cluster, 10)?;
        let before = cluster.traces().alive();
        std::fs::write(&trigger, "")?;
        cluster.wait("another in its place", |traces| {
            let alive = traces.alive();
            let kept = alive.iter().filter(|worker| before.contains(worker)).count();
            (alive.len() == 3 && kept == 2).then_some(())
        })?;
        let said = cluster.said(&agent)?;
        ensure!(said.err.contains("hung: in one leaf for"), "its fault is not named: {}", said.err);
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_job_below_its_minimum_for_too_long_is_saved_and_leaves_with_75() -> anyhow::Result<()> {
    play(|cluster| {
        let mut flags = vec!["--min-members", "2", "--min-timeout", "2s"];
        flags.extend(["--checkpoint", "checkpoints", "--checkpoint-every", "1h"]);
        let job = Job::new(150).with_leaf_ms(5).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let doomed = cluster.start_agent(&job, Place::Coordinators, 1)?;
        let agent = cluster.start_agent(&job, Place::Coordinators, 1)?;
        step(cluster, 20)?;
        cluster.kill(&doomed)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        let stood = cluster.traces().boundary();
        ensure!(stood < job.steps(), "the job had ended before");
        let saved = cluster.traces().checkpoint().context("nothing was saved")?;
        ensure!(saved == stood, "saved {saved}, but it stood at {stood}");

        let agents = [1, 1].map(|n| cluster.start_agent(&job, Place::Coordinators, n));
        let [first, second] = agents;
        let said = [cluster.said(&first?)?, cluster.said(&second?)?];
        let digest = said.iter().find(|said| said.digest().is_some());
        cluster.check_end(&undisturbed, digest.context("nobody printed a digest")?)
    })
}

#[test]
fn workers_end_with_their_agent_and_others_go_on() -> anyhow::Result<()> {
    play(|cluster| {
        let flags = ["--expected-members", "4"];
        let job = Job::new(120).with_leaf_ms(5).with_flags(&flags);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let doomed = cluster.start_agent(&job, Place::Coordinators, 2)?;
        cluster.wait("its workers", |traces| (traces.alive().len() == 2).then_some(()))?;
        let orphans = cluster.traces().alive();
        let agent = cluster.start_agent(&job, Place::Coordinators, 2)?;
        step(cluster, 20)?;
        cluster.kill(&doomed)?;
        cluster.poll("its workers to end", |cluster| {
            Ok(orphans.iter().all(|worker| !cluster.is_running(*worker)).then_some(()))
        })?;
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");
        let said = cluster.said(&agent)?;
        cluster.check_end(&undisturbed, &said)
    })
}

fn step(cluster: &mut Cluster, boundary: u64) -> anyhow::Result<()> {
    let reached = |traces: &Traces| (traces.boundary() >= boundary).then_some(());
    cluster.wait(&format!("boundary {boundary}"), reached)
}

/// The leaves that more than one computation went into.
fn computed_twice(traces: &Traces) -> BTreeMap<(u64, u64), usize> {
    let mut times: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    for (_, lines) in traces.workers() {
        let leaves = lines.iter().filter(|line| line.event == "leaf");
        for leaf in leaves.filter_map(|line| line.number("step").zip(line.number("rank"))) {
            *times.entry(leaf).or_default() += 1;
        }
    }
    times.retain(|_, times| *times > 1);
    times
}

/// The boundaries at which workers of a cluster began.
pub(crate) fn begins(traces: &Traces) -> Vec<u64> {
    let first = |node: u64| {
        let mut lines = traces.of(Writer::Worker(node)).iter();
        lines.find(|line| line.event == "loaded").and_then(|line| line.number("step"))
    };
    let mut begins: Vec<u64> = traces.started().filter_map(|started| first(started.node)).collect();
    begins.sort_unstable();
    begins.dedup();
    begins
}

#[test]
fn the_helper_finds_a_leaf_that_was_computed_twice() -> anyhow::Result<()> {
    play(|cluster| {
        let leaf = "{\"event\":\"leaf\",\"t_ns\":1,\"step\":3,\"rank\":1}\n";
        let folder = cluster.folder().join("trace-1");
        std::fs::write(folder.join("worker-1.ndjson"), leaf)?;
        std::fs::write(folder.join("worker-2.ndjson"), leaf)?;
        cluster.wait("both", |traces| (traces.workers().count() == 2).then_some(()))?;
        let twice = computed_twice(cluster.traces());
        twice.get(&(3, 1)).filter(|times| **times == 2).map(drop).context("it was not found")
    })
}
