//! [`Stage`]: does faults to a cluster and waits until the job has come over them. It only looks at traces; nothing depends on how fast the
//! machine is, and every wait ends with words.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ripstop::agent::exit::Exit;
use ripstop::clock;
use types::{NodeId, Step, Timestamp};

use super::cluster::{Cluster, LEAF_MS};
use super::measure::{Fault, Kind, Measured};
use super::progress::Talk;
use super::trace::{History, TraceReader, WorkerEvent, WorldSeen};

/// A cluster, what is known of it, and who tells the user.
#[derive(Debug)]
pub(crate) struct Stage<'a> {
    pub(crate) cluster: &'a mut Cluster,
    pub(crate) talk: &'a mut Talk,
    pub(crate) endings: Endings,
    reader: TraceReader,
    files_found_at: Timestamp,
}

/// What an agent's end means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Endings {
    /// No agent may end: a fault is still to come.
    None,
    /// Agents end because their workers were killed or asked to leave, never as at the end of the job.
    ByFault,
    /// No more fault comes; agents end when the job does.
    WithTheJob,
}

impl<'a> Stage<'a> {
    /// Nothing runs yet.
    pub(crate) fn new(cluster: &'a mut Cluster, talk: &'a mut Talk) -> Self {
        let reader = TraceReader::new(&cluster.trace_folder());
        Self { cluster, talk, endings: Endings::None, reader, files_found_at: Timestamp(0) }
    }

    /// What traces have shown so far.
    pub(crate) fn history(&self) -> &History {
        self.reader.history()
    }

    /// Starts the coordinators and waits until one leads.
    pub(crate) async fn start_coordinators(&mut self) -> anyhow::Result<u64> {
        self.cluster.start_coordinators().await?;
        self.wait("the coordinators to elect a leader", History::leader).await
    }

    /// Waits until `node` is in mid-step, and says which step that is.
    pub(crate) async fn mid_step(&mut self, node: NodeId, from: Step) -> anyhow::Result<Step> {
        let since = clock::now();
        loop {
            let look = |history: &History| first_leaf(history, node, from, since);
            // Looked for often: what is wanted is over in a moment.
            let step = self.wait_closely("a worker to be in mid-step", look).await?;
            // Where it stands is sure only after everything that is written was read.
            self.look()?;
            if self.history().finished(node, step).is_none() {
                return Ok(step);
            }
        }
    }

    /// A fault that is done now, in the step on its way.
    pub(crate) fn fault(&self, kind: Kind, world: WorldSeen, victims: Vec<NodeId>) -> Fault {
        let step = self.history().boundary();
        Fault { kind, at: clock::now(), world, victims, step, leader: None }
    }

    /// Waits until the job has come over a fault.
    pub(crate) async fn overcome(&mut self, fault: &Fault) -> anyhow::Result<Measured> {
        let what = format!("the job to come over it: {}", fault.kind.name());
        self.wait(&what, |history| fault.measure(history)).await
    }

    /// The last member of a world that the agent started as number `agent` (from 0) has started.
    pub(crate) fn member_of_agent(
        &self,
        world: &WorldSeen,
        agent: usize,
    ) -> anyhow::Result<NodeId> {
        let agent = self.agent(agent)?;
        let members = self
            .history()
            .started()
            .filter(|s| s.agent == agent && world.nodes.contains(&s.worker));
        Ok(members.last().context("no worker of that agent is a member")?.worker)
    }

    /// The node of the agent started as number `agent`, from 0.
    pub(crate) fn agent(&self, agent: usize) -> anyhow::Result<NodeId> {
        let mut agents: Vec<NodeId> = self.history().started().map(|s| s.agent).collect();
        agents.sort_unstable();
        agents.dedup();
        agents.get(agent).copied().context("that agent has started no worker")
    }

    /// The workers that run, as far as their agents know.
    pub(crate) fn alive(&self) -> Vec<NodeId> {
        let history = self.history();
        let started = history.started().map(|s| s.worker);
        started.filter(|node| history.exited(*node).is_none()).collect()
    }

    /// Waits until all agents have ended.
    pub(crate) async fn no_agents(&mut self, why: &str) -> anyhow::Result<()> {
        let deadline = clock::now() + PATIENCE;
        while self.cluster.agents_running() > 0 {
            let running = self.cluster.agents_running();
            ensure!(clock::now() < deadline, "{why}, but {running} agent(s) still run");
            self.look()?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Ends the coordinators and reads the rest of the traces.
    pub(crate) async fn close(self) -> anyhow::Result<TraceReader> {
        let Self { cluster, mut reader, .. } = self;
        cluster.stop_coordinators().await?;
        reader.find_files()?;
        reader.read()?;
        Ok(reader)
    }

    /// Waits until `ready` finds in the traces what it looks for. As long as steps go on there is patience; without them it ends.
    pub(crate) async fn wait<T>(
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

    async fn wait_every<T>(
        &mut self,
        every: Duration,
        what: &str,
        mut ready: impl FnMut(&History) -> Option<T>,
    ) -> anyhow::Result<T> {
        let since = clock::now();
        let (mut boundary, mut moved_at) = (self.history().boundary(), since);
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
    pub(crate) fn look(&mut self) -> anyhow::Result<()> {
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
        match self.endings {
            Endings::ByFault if !is_done => Ok(()),
            Endings::WithTheJob if is_done => Ok(()),
            Endings::None | Endings::ByFault if is_done => {
                bail!("the job finished before all faults were done; give more --steps")
            }
            _ => bail!(
                "agent {number} ended by itself: {exit}; see logs/agent-{number}.log and what is in logs/agent-{number}"
            ),
        }
    }
}

/// The newest world, if at least so many are in it and all have entered.
pub(crate) fn settled(history: &History, members: usize) -> Option<WorldSeen> {
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
    let of_step = history.worker(node).rev().map_while(|line| match leaf(&line.event) {
        Some(other) if other != step => None,
        other => Some(other),
    });
    let count = of_step.flatten().count();
    let now = clock::now();
    // On a machine so slow that it is never seen in time, any moment must do.
    let is_fresh =
        now.since(at) < Duration::from_millis(LEAF_MS / 2) || now.since(since) > AIM_PATIENCE;
    (count == 1 && is_fresh && step >= from && history.finished(node, step).is_none())
        .then_some(step)
}

const LOOK_EVERY: Duration = Duration::from_millis(20);
const LOOK_CLOSELY_EVERY: Duration = Duration::from_millis(1);
const FIND_FILES_EVERY: Duration = Duration::from_millis(50);
/// Without any step for so long, something hangs: the slowest thing here is a process that starts on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Even with steps: a fault that is never overcome.
const PATIENCE_WITH_STEPS: Duration = Duration::from_secs(300);
const AIM_PATIENCE: Duration = Duration::from_secs(20);
