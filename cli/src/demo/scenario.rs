//! [`Scenario`]: what happens in the demo and when. It only looks at traces and waits for what they show; nothing depends on how fast the
//! machine is, and every wait ends with words.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ripstop::agent::exit::Exit;
use ripstop::clock;
use types::{NodeId, Step, Timestamp};

use super::cluster::{self, Cluster};
use super::measure::{Fault, Kind, Measured};
use super::progress::Talk;
use super::trace::{CoordinatorEvent, History, TraceReader, WorkerEvent, WorldSeen};

/// One run with its five faults.
#[derive(Debug)]
pub(super) struct Scenario<'a> {
    cluster: &'a mut Cluster,
    reader: TraceReader,
    talk: &'a mut Talk,
    steps: u64,
    stage: Stage,
    files_found_at: Timestamp,
    faults: Vec<Fault>,
}

/// What an agent's end means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No agent may end: a fault is still to come.
    Faults,
    /// All agents end, since all their workers were killed.
    Killed,
    /// No more fault comes; agents end when the job does.
    Last,
}

impl<'a> Scenario<'a> {
    /// Prepares a run of `steps`.
    pub(super) fn new(cluster: &'a mut Cluster, talk: &'a mut Talk, steps: u64) -> Self {
        let reader = TraceReader::new(&cluster.trace_folder());
        Self {
            cluster,
            reader,
            talk,
            steps,
            stage: Stage::Faults,
            files_found_at: Timestamp(0),
            faults: Vec::new(),
        }
    }

    /// Runs it to its end.
    pub(super) async fn play(mut self) -> anyhow::Result<Played> {
        self.cluster.start_coordinators().await?;
        let led = |history: &History| history.leader();
        let leader = self.wait("the coordinators to elect a leader", led).await?;
        self.talk.say(&format!(
            "{} coordinators run, coordinator {leader} leads",
            cluster::COORDINATORS
        ));
        self.cluster.start_agent(2).await?;
        self.cluster.start_agent(2).await?;
        self.wait("four workers to become members of one world", |h| {
            settled(h, cluster::EXPECTED_MEMBERS)
        })
        .await?;
        self.talk.say("2 agents with 2 workers each have joined, training begins");

        self.kill_worker().await?;
        let dead = self.kill_leader().await?;
        self.join_worker(dead).await?;
        self.drain_worker().await?;
        self.kill_all().await?;

        self.stage = Stage::Last;
        let finished = |history: &History| {
            let said = history.said();
            said.iter()
                .find(|(_, line)| matches!(line.event, CoordinatorEvent::Finished {}))
                .map(|(_, line)| line.at)
        };
        self.wait("the job to finish", finished).await?;
        self.end().await
    }

    /// Waits for the agents to end with 0, then ends the coordinators.
    async fn end(mut self) -> anyhow::Result<Played> {
        let deadline = clock::now() + PATIENCE;
        while self.cluster.agents_running() > 0 {
            ensure!(
                clock::now() < deadline,
                "the job is finished, but {} agent(s) still run",
                self.cluster.agents_running()
            );
            self.look()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.cluster.stop_coordinators().await?;
        self.reader.find_files()?;
        self.reader.read()?;
        let measured: Option<Vec<Measured>> =
            self.faults.iter().map(|fault| fault.measure(self.reader.history())).collect();
        let measured = measured.context("a fault that was over is no longer")?;
        Ok(Played { faults: self.faults, measured, reader: self.reader })
    }

    async fn kill_worker(&mut self) -> anyhow::Result<()> {
        let at_step = self.placed(Kind::Kill);
        let world =
            self.wait_for_step("a worker was killed", at_step, cluster::EXPECTED_MEMBERS).await?;
        let victim = self.member_of_agent(&world, 0)?;
        let since = clock::now();
        let step = loop {
            let look = |history: &History| first_leaf(history, victim, at_step, since);
            // Looked for often: what is wanted is over in a moment.
            let step = self.wait_closely("a worker to be in mid-step", look).await?;
            // Where it stands is sure only after everything that is written was read.
            self.look()?;
            if self.reader.history().finished(victim, step).is_none() {
                break step;
            }
        };
        let fault = self.fault(Kind::Kill, world, vec![victim], step);
        self.cluster.kill_worker(victim)?;
        self.talk.say(&format!("worker {victim} gets SIGKILL in mid-step, in step {step}"));
        self.overcome(fault).await.map(drop)
    }

    async fn kill_leader(&mut self) -> anyhow::Result<u64> {
        let world =
            self.wait_for_step("the leader was killed", self.placed(Kind::Leader), 1).await?;
        let leader = self.reader.history().leader().context("nobody has ever led")?;
        let step = self.reader.history().boundary();
        let mut fault = self.fault(Kind::Leader, world, Vec::new(), step);
        fault.leader = Some(leader);
        self.talk.say(&format!("coordinator {leader}, the leader, gets SIGKILL in step {step}"));
        fault.at = clock::now();
        self.cluster.kill_coordinator(leader).await?;
        self.overcome(fault).await?;
        Ok(leader)
    }

    /// Starts the dead coordinator again, and one more agent.
    async fn join_worker(&mut self, dead: u64) -> anyhow::Result<()> {
        let back = Step(self.reader.history().boundary().0 + STEPS_BETWEEN);
        self.wait_for_step("the coordinator was back", back, 1).await?;
        self.cluster.start_coordinator(dead).await?;
        self.talk.say(&format!("coordinator {dead} is started again"));
        let world = self.wait_for_step("a worker joined", self.placed(Kind::Join), 1).await?;
        let step = self.reader.history().boundary();
        let fault = self.fault(Kind::Join, world, Vec::new(), step);
        self.cluster.start_agent(1).await?;
        self.talk.say(&format!("a third agent is started with 1 worker, in step {step}"));
        self.overcome(fault).await.map(drop)
    }

    async fn drain_worker(&mut self) -> anyhow::Result<()> {
        let world = self.wait_for_step("a worker was drained", self.placed(Kind::Drain), 2).await?;
        let step = self.reader.history().boundary();
        let victim = self.member_of_agent(&world, 1)?;
        let fault = self.fault(Kind::Drain, world, vec![victim], step);
        self.cluster.drain_worker(victim)?;
        self.talk.say(&format!("worker {victim} gets SIGTERM, in step {step}"));
        self.overcome(fault).await?;
        let (_, cause) = self.reader.history().exited(victim).context("a drained worker ends")?;
        ensure!(cause == "exited with code 75", "the drained worker {cause}, not with code 75");
        Ok(())
    }

    async fn kill_all(&mut self) -> anyhow::Result<()> {
        let placed = self.placed(Kind::All);
        self.wait_for_step("all were killed", placed, 1).await?;
        let saved = |history: &History| {
            history.checkpoint().filter(|step| *step < history.boundary()).map(drop)
        };
        self.wait("a checkpoint to be committed, and steps behind it", saved).await?;
        let world =
            self.wait("all members to have entered the newest world", |h| settled(h, 1)).await?;
        let history = self.reader.history();
        let alive: Vec<NodeId> = history
            .started()
            .map(|s| s.worker)
            .filter(|node| history.exited(*node).is_none())
            .collect();
        let fault = self.fault(Kind::All, world, alive.clone(), history.boundary());
        self.stage = Stage::Killed;
        for node in &alive {
            self.cluster.kill_worker(*node)?;
        }
        self.talk.say(&format!("all {} workers get SIGKILL, in step {}", alive.len(), fault.step));
        let deadline = clock::now() + PATIENCE;
        while self.cluster.agents_running() > 0 {
            ensure!(
                clock::now() < deadline,
                "{} agent(s) still run without workers",
                self.cluster.agents_running()
            );
            self.look()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.stage = Stage::Last;
        self.cluster.start_agent(2).await?;
        self.cluster.start_agent(2).await?;
        self.talk.say("2 new agents with 2 workers each are started, with the same checkpoints");
        self.overcome(fault).await.map(drop)
    }

    /// A fault that is done now.
    fn fault(&self, kind: Kind, world: WorldSeen, victims: Vec<NodeId>, step: Step) -> Fault {
        Fault { kind, at: clock::now(), world, victims, step, leader: None }
    }

    /// Waits until the job has come over a fault.
    async fn overcome(&mut self, fault: Fault) -> anyhow::Result<Measured> {
        let what = format!("the job to come over it: {}", fault.kind.name());
        let measured = self.wait(&what, |history| fault.measure(history)).await?;
        self.talk.say(&format!("  {}", super::table::sentence(&measured)));
        self.faults.push(fault);
        Ok(measured)
    }

    /// The step at which a fault is due.
    fn placed(&self, kind: Kind) -> Step {
        Step(self.steps * percent(kind) / 100)
    }

    /// Waits for a step and a world of at least `members` that all have entered, some steps after the last fault.
    async fn wait_for_step(
        &mut self,
        what: &str,
        step: Step,
        members: usize,
    ) -> anyhow::Result<WorldSeen> {
        let boundary = self.reader.history().boundary();
        let due =
            Step(step.0.max(if self.faults.is_empty() { 0 } else { boundary.0 + STEPS_BETWEEN }));
        if due.0 + STEPS_BETWEEN >= self.steps {
            bail!(
                "the job would have ended before {what}: it stands at step {boundary} of {}; give more --steps",
                self.steps
            );
        }
        let ready = move |h: &History| settled(h, members).filter(|_| h.boundary() >= due);
        self.wait(&format!("step {due}, before {what}"), ready).await
    }

    fn member_of_agent(&self, world: &WorldSeen, agent: usize) -> anyhow::Result<NodeId> {
        let history = self.reader.history();
        let mut agents: Vec<NodeId> = history.started().map(|s| s.agent).collect();
        agents.sort_unstable();
        agents.dedup();
        let agent = agents.get(agent).context("that agent has started no worker")?;
        let members =
            history.started().filter(|s| s.agent == *agent && world.nodes.contains(&s.worker));
        Ok(members.last().context("no worker of that agent is a member")?.worker)
    }

    async fn wait<T>(
        &mut self,
        what: &str,
        ready: impl FnMut(&History) -> Option<T>,
    ) -> anyhow::Result<T> {
        self.wait_every(LOOK_EVERY, what, ready).await
    }

    async fn wait_closely<T>(
        &mut self,
        what: &str,
        ready: impl FnMut(&History) -> Option<T>,
    ) -> anyhow::Result<T> {
        self.wait_every(LOOK_CLOSELY_EVERY, what, ready).await
    }

    /// Looks again and again. As long as steps go on there is patience; without them it ends.
    async fn wait_every<T>(
        &mut self,
        every: Duration,
        what: &str,
        mut ready: impl FnMut(&History) -> Option<T>,
    ) -> anyhow::Result<T> {
        let since = clock::now();
        let (mut boundary, mut moved_at) = (self.reader.history().boundary(), since);
        loop {
            self.look().with_context(|| format!("while waiting for {what}"))?;
            let history = self.reader.history();
            if let Some(value) = ready(history) {
                return Ok(value);
            }
            let now = clock::now();
            if history.boundary() != boundary {
                (boundary, moved_at) = (history.boundary(), now);
            }
            if now.since(moved_at) > PATIENCE || now.since(since) > PATIENCE_WITH_STEPS {
                bail!(
                    "waited {} s for {what}, in vain; the job stands at step {boundary}",
                    now.since(since).as_secs()
                );
            }
            tokio::time::sleep(every).await;
        }
    }

    /// Reads what is new, and sees that nobody is gone who should be there.
    fn look(&mut self) -> anyhow::Result<()> {
        let now = clock::now();
        if now.since(self.files_found_at) >= FIND_FILES_EVERY {
            self.files_found_at = now;
            self.reader.find_files()?;
        }
        self.reader.read()?;
        self.cluster.hold_workers(self.reader.history());
        self.cluster.check_coordinators()?;
        for (number, exit) in self.cluster.ended_agents()? {
            self.agent_ended(number, exit)?;
        }
        let history = self.reader.history();
        let members = history.worlds().pop().map_or(0, |world| world.nodes.len());
        self.talk.show(history.boundary().0, history.newest_loss(), members);
        Ok(())
    }

    fn agent_ended(&self, number: u32, exit: Exit) -> anyhow::Result<()> {
        let is_done = exit == Exit::Code(0);
        match self.stage {
            Stage::Killed if !is_done => Ok(()),
            Stage::Last if is_done => Ok(()),
            Stage::Faults | Stage::Killed if is_done => {
                bail!("the job finished before all faults were done; give more --steps")
            }
            _ => bail!(
                "agent {number} ended by itself: {exit}; see logs/agent-{number}.log and what is in logs/agent-{number}"
            ),
        }
    }
}

/// What a run left.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) faults: Vec<Fault>,
    pub(super) measured: Vec<Measured>,
    pub(super) reader: TraceReader,
}

/// At which part of the run a fault is due, in percent of its steps.
fn percent(kind: Kind) -> u64 {
    match kind {
        Kind::Kill => 15,
        Kind::Leader => 30,
        Kind::Join => 45,
        Kind::Drain => 62,
        Kind::All => 80,
    }
}

/// The newest world, if at least so many are in it and all have entered.
fn settled(history: &History, members: usize) -> Option<WorldSeen> {
    history.settled_world().filter(|world| world.nodes.len() >= members)
}

/// The step in which `node` has just contributed its first leaf, so that it now computes its second.
fn first_leaf(history: &History, node: NodeId, from: Step, since: Timestamp) -> Option<Step> {
    let leaf = |event: &WorkerEvent| match event {
        WorkerEvent::Leaf { step, .. } => Some(*step),
        _ => None,
    };
    let (at, step) = history
        .worker(node)
        .rev()
        .find_map(|line| leaf(&line.event).map(|step| (line.at, step)))?;
    let count = history.worker(node).filter(|line| leaf(&line.event) == Some(step)).count();
    let now = clock::now();
    // On a machine so slow that it is never seen in time, any moment must do.
    let is_fresh = now.since(at) < Duration::from_millis(cluster::LEAF_MS / 2)
        || now.since(since) > AIM_PATIENCE;
    (count == 1 && is_fresh && step >= from && history.finished(node, step).is_none())
        .then_some(step)
}

/// With fewer steps the faults would come too close.
pub(super) const STEPS_MIN: u64 = 60;
/// So many steps pass between a fault that was overcome and the next one.
const STEPS_BETWEEN: u64 = 3;
const LOOK_EVERY: Duration = Duration::from_millis(20);
const LOOK_CLOSELY_EVERY: Duration = Duration::from_millis(1);
const FIND_FILES_EVERY: Duration = Duration::from_millis(50);
/// Without any step for so long, something hangs: the slowest thing here is a process that starts on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Even with steps: a fault that is never overcome.
const PATIENCE_WITH_STEPS: Duration = Duration::from_secs(300);
const AIM_PATIENCE: Duration = Duration::from_secs(20);
