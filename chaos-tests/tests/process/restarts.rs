//! Workers that crash again and again, or end before the job does: nobody else is restarted for them.

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Cluster, Job, Place, Signal, play};

#[test]
fn a_worker_that_always_crashes_at_its_start_spends_its_own_budget_only() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(150).with_leaf_ms(5).with_flags(&["--max-restarts", "2"]);
        let undisturbed = cluster.undisturbed(&job)?;
        let script = r#"if [ "$LOCAL_RANK" = 1 ]; then exit 3; fi; exec "$@""#;
        let agent = cluster.agent_command_by(&job, Place::Standalone, 3, Some(script))?;
        cluster.start("agent", agent)?;
        let said = cluster.said("agent")?;
        let starts = |slot: u64| {
            let of = |line: &&str| {
                line.contains("worker started") && line.contains(&format!("slot={slot} "))
            };
            said.err.lines().filter(of).count()
        };
        ensure!([0, 1, 2].map(starts) == [1, 3, 1], "starts: {:?}", [0, 1, 2].map(starts));
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn a_worker_that_ends_with_0_while_others_train_is_missed_and_not_started_again()
-> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(200).with_leaf_ms(5);
        let undisturbed = cluster.undisturbed(&job)?;
        leaves_early(cluster, &job)?;
        // Its end with 0 is not the job's: who crashes now is still started again.
        let killed = *cluster.traces().alive().last().context("nobody is left")?;
        ensure!(cluster.signal_worker(killed, Signal::KILL)?, "worker {killed} was gone already");
        cluster.wait("another in the place of the killed", |traces| {
            (traces.started().count() == 4).then_some(())
        })?;
        let said = cluster.said("agent")?;
        ensure!(said.err.contains("ended with 0, but the job goes on"), "{}", said.err);
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn an_agent_one_of_whose_workers_ended_early_still_asks_to_be_requeued() -> anyhow::Result<()> {
    play(|cluster| {
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "1h"];
        let job = Job::new(300).with_leaf_ms(5).with_flags(&flags);
        leaves_early(cluster, &job)?;
        cluster.signal("agent", Signal::TERM)?;
        let said = cluster.said("agent")?;
        ensure!(said.code == 75, "the agent ended with code {}: {}", said.code, said.err);
        ensure!(cluster.traces().boundary() < job.steps(), "the job had ended before");
        Ok(())
    })
}

/// Starts an agent with three workers, the second of which ends with 0 after some steps, and waits until the others go on without it.
fn leaves_early(cluster: &mut Cluster, job: &Job) -> anyhow::Result<()> {
    let script = r#"
        if [ "$LOCAL_RANK" != 1 ]; then exec "$@"; fi
        "$@" & trainer=$!
        while [ ! -e go ]; do sleep 0.02; done
        kill -KILL $trainer
        exit 0
    "#;
    let agent = cluster.agent_command_by(job, Place::Standalone, 3, Some(script))?;
    cluster.start("agent", agent)?;
    cluster.wait("steps of three", |traces| {
        let is_full = traces.settled_world().is_some_and(|(_, nodes)| nodes.len() == 3);
        (is_full && traces.boundary() >= 10).then_some(())
    })?;
    std::fs::write(cluster.folder().join("go"), "")?;
    cluster.wait("a world of two", |traces| {
        traces.settled_world().filter(|(_, nodes)| nodes.len() == 2).map(drop)
    })
}
