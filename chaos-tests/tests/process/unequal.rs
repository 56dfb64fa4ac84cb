//! Members of unequal speed: blocks follow their leaf times, and the result does not change.

use anyhow::{Context, ensure};
use ripstop_chaos::process::{Job, Place, Signal, play};
use serde_json::Value;

#[test]
fn blocks_leave_a_slow_member_and_the_result_stays() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(400).with_leaf_ms(4).with_flags(&["--expected-members", "2"]);
        let undisturbed = cluster.undisturbed(&job)?;
        cluster.start_single_coordinator()?;
        let slow = job.clone().with_leaf_ms(40).with_flags(&["--host", "old"]);
        let slow = cluster.start_agent(&slow, Place::Coordinators, 1)?;
        let fast = job.with_flags(&["--host", "new"]);
        let fast = cluster.start_agent(&fast, Place::Coordinators, 1)?;
        let list = cluster.coordinator_list();
        let place = ["--coordinators", &list, "--certs", "ca"];
        cluster.poll("a single leaf is left to the slow one", |cluster| {
            let said = cluster.run(&[&["status", "-o", "json"], place.as_slice()].concat())?;
            let status: Value = serde_json::from_str(&said.out).with_context(|| said.err)?;
            let members = status["jobs"][0]["members"].as_array().into_iter().flatten();
            let mut blocks =
                members.filter(|m| m["host"] == "old").filter_map(|m| m["blocks"].as_str());
            Ok(blocks.next_back().and_then(|blocks| blocks.parse::<u32>().ok()))
        })?;
        ensure!(cluster.traces().boundary() < 400, "only at the end");
        let said = cluster.run(&[&["explain"], place.as_slice()].concat())?;
        ensure!(said.out.contains("evening out: a leaf takes node"), "{}", said.out);
        let (slow, fast) = (cluster.said(&slow)?, cluster.said(&fast)?);
        ensure!((slow.code, fast.code) == (0, 0), "the agents ended with {slow:?} and {fast:?}");
        let said = [slow, fast].into_iter().find(|said| said.digest().is_some());
        let said = said.context("no digest was printed")?;
        cluster.check_end(&undisturbed, &said)
    })
}

#[test]
fn blocks_stay_where_nobody_wants_them_moved() -> anyhow::Result<()> {
    play(|cluster| {
        let job = Job::new(10_000).with_flags(&["--expected-members", "2", "--no-even"]);
        cluster.start_single_coordinator()?;
        let slow = cluster.start_agent(&job.clone().with_leaf_ms(20), Place::Coordinators, 1)?;
        let fast = cluster.start_agent(&job, Place::Coordinators, 1)?;
        // More than twice as many as blocks need to move where they may.
        cluster.wait("60 steps", |traces| (traces.boundary() >= 60).then_some(()))?;
        let worlds = cluster.traces().settled_world().context("no world")?.0;
        ensure!(worlds == 1, "world {worlds}");
        for agent in [slow, fast] {
            cluster.signal(&agent, Signal::TERM)?;
            ensure!(cluster.said(&agent)?.code == 75, "{agent} failed");
        }
        Ok(())
    })
}
