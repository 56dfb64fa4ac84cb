//! [`Scenario`]: what happens in the demo and when.

use anyhow::{Context, bail, ensure};
use types::Step;

use super::table;
use crate::rehearsal::cluster::{self, Cluster};
use crate::rehearsal::measure::{Fault, Kind, Measured};
use crate::rehearsal::progress::Talk;
use crate::rehearsal::stage::{Endings, Stage, settled};
use crate::rehearsal::trace::{CoordinatorEvent, History, TraceReader, WorldSeen};

/// One run with its five faults.
#[derive(Debug)]
pub(super) struct Scenario<'a> {
    stage: Stage<'a>,
    steps: u64,
    faults: Vec<Fault>,
}

impl<'a> Scenario<'a> {
    /// Prepares a run of `steps`.
    pub(super) fn new(cluster: &'a mut Cluster, talk: &'a mut Talk, steps: u64) -> Self {
        Self { stage: Stage::new(cluster, talk), steps, faults: Vec::new() }
    }

    /// Runs it to its end.
    pub(super) async fn play(mut self) -> anyhow::Result<Played> {
        let leader = self.stage.start_coordinators().await?;
        self.stage.talk.say(&format!(
            "{} coordinators run, coordinator {leader} leads",
            cluster::COORDINATORS
        ));
        self.stage.cluster.start_agent(2).await?;
        self.stage.cluster.start_agent(2).await?;
        self.stage
            .wait("four workers to become members of one world", |h| {
                settled(h, cluster::EXPECTED_MEMBERS)
            })
            .await?;
        self.stage.talk.say("2 agents with 2 workers each have joined, training begins");

        self.kill_worker().await?;
        let dead = self.kill_leader().await?;
        self.join_worker(dead).await?;
        self.drain_worker().await?;
        self.kill_all().await?;

        self.stage.endings = Endings::WithTheJob;
        let finished = |history: &History| {
            let said = history.said();
            said.iter()
                .find(|(_, line)| matches!(line.event, CoordinatorEvent::Finished {}))
                .map(|(_, line)| line.at)
        };
        self.stage.wait("the job to finish", finished).await?;
        self.end().await
    }

    /// Waits for the agents to end with 0, then ends the coordinators.
    async fn end(mut self) -> anyhow::Result<Played> {
        self.stage.no_agents("the job is finished").await?;
        let reader = self.stage.close().await?;
        let measured: Option<Vec<Measured>> =
            self.faults.iter().map(|fault| fault.measure(reader.history())).collect();
        let measured = measured.context("a fault that was over is no longer")?;
        Ok(Played { faults: self.faults, measured, reader })
    }

    async fn kill_worker(&mut self) -> anyhow::Result<()> {
        let at_step = self.placed(15);
        let world =
            self.wait_for_step("a worker was killed", at_step, cluster::EXPECTED_MEMBERS).await?;
        let victim = self.stage.member_of_agent(&world, 0)?;
        let step = self.stage.mid_step(victim, at_step).await?;
        let fault = Fault { step, ..self.stage.fault(Kind::Kill, world, vec![victim]) };
        self.stage.cluster.kill_worker(victim)?;
        self.stage.talk.say(&format!("worker {victim} gets SIGKILL in mid-step, in step {step}"));
        self.overcome(fault).await.map(drop)
    }

    async fn kill_leader(&mut self) -> anyhow::Result<u64> {
        let world = self.wait_for_step("the leader was killed", self.placed(30), 1).await?;
        let leader = self.stage.history().leader().context("nobody has ever led")?;
        let step = self.stage.history().boundary();
        let said = format!("coordinator {leader}, the leader, gets SIGKILL in step {step}");
        self.stage.talk.say(&said);
        let mut fault = self.stage.fault(Kind::Leader, world, Vec::new());
        fault.leader = Some(leader);
        self.stage.cluster.kill_coordinator(leader).await?;
        self.overcome(fault).await?;
        Ok(leader)
    }

    /// Starts the dead coordinator again, and one more agent.
    async fn join_worker(&mut self, dead: u64) -> anyhow::Result<()> {
        let back = Step(self.stage.history().boundary().0 + STEPS_BETWEEN);
        self.wait_for_step("the coordinator was back", back, 1).await?;
        self.stage.cluster.start_coordinator(dead).await?;
        self.stage.talk.say(&format!("coordinator {dead} is started again"));
        let world = self.wait_for_step("a worker joined", self.placed(45), 1).await?;
        let fault = self.stage.fault(Kind::Join, world, Vec::new());
        self.stage.cluster.start_agent(1).await?;
        let said = format!("a third agent is started with 1 worker, in step {}", fault.step);
        self.stage.talk.say(&said);
        self.overcome(fault).await.map(drop)
    }

    async fn drain_worker(&mut self) -> anyhow::Result<()> {
        let world = self.wait_for_step("a worker was drained", self.placed(62), 2).await?;
        let victim = self.stage.member_of_agent(&world, 1)?;
        let fault = self.stage.fault(Kind::Drain, world, vec![victim]);
        self.stage.cluster.drain_worker(victim)?;
        self.stage.talk.say(&format!("worker {victim} gets SIGTERM, in step {}", fault.step));
        self.overcome(fault).await?;
        let exited = self.stage.history().exited(victim);
        let (_, cause) = exited.context("a drained worker ends")?;
        ensure!(cause == "exited with code 75", "the drained worker {cause}, not with code 75");
        Ok(())
    }

    async fn kill_all(&mut self) -> anyhow::Result<()> {
        self.wait_for_step("all were killed", self.placed(80), 1).await?;
        let saved = |history: &History| {
            history.checkpoint().filter(|step| *step < history.boundary()).map(drop)
        };
        self.stage.wait("a checkpoint to be committed, and steps behind it", saved).await?;
        let world = self
            .stage
            .wait("all members to have entered the newest world", |h| settled(h, 1))
            .await?;
        let alive = self.stage.alive();
        let fault = self.stage.fault(Kind::All, world, alive.clone());
        self.stage.endings = Endings::ByFault;
        for node in &alive {
            self.stage.cluster.kill_worker(*node)?;
        }
        let said = format!("all {} workers get SIGKILL, in step {}", alive.len(), fault.step);
        self.stage.talk.say(&said);
        self.stage.no_agents("all workers were killed").await?;
        self.stage.endings = Endings::WithTheJob;
        self.stage.cluster.start_agent(2).await?;
        self.stage.cluster.start_agent(2).await?;
        let said = "2 new agents with 2 workers each are started, with the same checkpoints";
        self.stage.talk.say(said);
        self.overcome(fault).await.map(drop)
    }

    /// Waits until the job has come over a fault.
    async fn overcome(&mut self, fault: Fault) -> anyhow::Result<Measured> {
        let measured = self.stage.overcome(&fault).await?;
        self.stage.talk.say(&format!("  {}", table::sentence(&measured)));
        self.faults.push(fault);
        Ok(measured)
    }

    /// The step at which a fault is due, `percent` of the way.
    fn placed(&self, percent: u64) -> Step {
        Step(self.steps * percent / 100)
    }

    /// Waits for a step and a world of at least `members` that all have entered, some steps after the last fault.
    async fn wait_for_step(
        &mut self,
        what: &str,
        step: Step,
        members: usize,
    ) -> anyhow::Result<WorldSeen> {
        let boundary = self.stage.history().boundary();
        let due =
            Step(step.0.max(if self.faults.is_empty() { 0 } else { boundary.0 + STEPS_BETWEEN }));
        if due.0 + STEPS_BETWEEN >= self.steps {
            bail!(
                "the job would have ended before {what}: it stands at step {boundary} of {}; give more --steps",
                self.steps
            );
        }
        let ready = move |h: &History| settled(h, members).filter(|_| h.boundary() >= due);
        self.stage.wait(&format!("step {due}, before {what}"), ready).await
    }
}

/// What a run left.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) faults: Vec<Fault>,
    pub(super) measured: Vec<Measured>,
    pub(super) reader: TraceReader,
}

/// With fewer steps the faults would come too close.
pub(super) const STEPS_MIN: u64 = 60;
/// So many steps pass between a fault that was overcome and the next one.
const STEPS_BETWEEN: u64 = 3;
