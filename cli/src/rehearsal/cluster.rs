//! [`Cluster`]: processes of this program, all on loopback: three coordinators, the agents, and through them the workers.
//!
//! Every process is started by the launcher's own spawner, so none outlives the command, even if that is killed by KILL. Signals go through
//! pidfds: they never hit another process that got the same number. What a process prints goes to a file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use ripstop::agent::exit::Exit;
use ripstop::agent::signals::Signal;
use ripstop::agent::spawn::{Process, ProcessGroup, Spawner, WorkerCommand};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use types::{JobId, NodeId};

use super::trace::History;

/// What is trained, and how.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Steps of the job.
    pub(crate) steps: u64,
    /// The recovery target, as a flag has it.
    pub(crate) recovery_target: String,
    /// How often an agent starts a worker again that was killed.
    pub(crate) restarts: u32,
    /// Flags of the trainer.
    pub(crate) training: &'static [&'static str],
}

impl Plan {
    /// The demo's: nobody comes back by itself, so that what is seen is what the demo did.
    pub(crate) fn demo(steps: u64) -> Self {
        Self { steps, recovery_target: "1s".to_owned(), restarts: 0, training: &[] }
    }
}

/// All processes, and where they keep what they keep.
#[derive(Debug)]
pub(crate) struct Cluster {
    spawner: Spawner,
    program: OsString,
    folder: PathBuf,
    job: JobId,
    plan: Plan,
    ports: [u16; COORDINATORS],
    coordinators: BTreeMap<u64, Process>,
    agents: BTreeMap<u32, Process>,
    agents_started: u32,
    workers: BTreeMap<NodeId, OwnedFd>,
}

impl Cluster {
    /// Makes the folders, the authority and a place for everything; starts nothing yet.
    pub(crate) fn prepare(folder: &Path, plan: Plan) -> anyhow::Result<Self> {
        for name in ["trace", "logs", "checkpoints", "undisturbed", "tmp"] {
            let path = folder.join(name);
            std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        }
        ripstop::certificates::init(&folder.join("ca"))?;
        Ok(Self {
            spawner: Spawner::start().context("starting the thread that starts processes")?,
            program: std::env::current_exe().context("finding this program's own file")?.into(),
            folder: folder.to_path_buf(),
            job: JobId::new(JOB).map_err(anyhow::Error::msg)?,
            plan,
            ports: free_ports()?,
            coordinators: BTreeMap::new(),
            agents: BTreeMap::new(),
            agents_started: 0,
            workers: BTreeMap::new(),
        })
    }

    /// Where traces are written.
    pub(crate) fn trace_folder(&self) -> PathBuf {
        self.folder.join("trace")
    }

    /// Starts all coordinators.
    pub(crate) async fn start_coordinators(&mut self) -> anyhow::Result<()> {
        for id in 1..=COORDINATORS as u64 {
            self.start_coordinator(id).await?;
        }
        Ok(())
    }

    /// Starts one coordinator, for the first time or again.
    pub(crate) async fn start_coordinator(&mut self, id: u64) -> anyhow::Result<()> {
        let peers: Vec<String> =
            (1..).zip(self.ports).map(|(id, port)| format!("{id}=127.0.0.1:{port}")).collect();
        let mut arguments = words(&["coordinator"]);
        arguments.extend(pair("--recovery-target", &self.plan.recovery_target));
        arguments.extend(pair("--id", id.to_string()));
        arguments.extend(pair("--peers", peers.join(",")));
        arguments.extend(pair("--data-dir", self.folder.join(format!("coordinator-{id}"))));
        arguments.extend(pair("--certs", self.folder.join("ca")));
        arguments.extend(pair("--trace-dir", self.trace_folder()));
        let process = self.spawn(&format!("coordinator-{id}"), arguments, BTreeMap::new()).await?;
        self.coordinators.insert(id, process);
        Ok(())
    }

    /// Starts one more agent, with a join token of its own, and says its number.
    pub(crate) async fn start_agent(&mut self, workers: u32) -> anyhow::Result<u32> {
        self.agents_started += 1;
        let number = self.agents_started;
        let (folder, name) = (self.folder.clone(), format!("agent-{number}"));
        let token = ripstop::certificates::token(
            &folder.join("ca"),
            1,
            Some(self.job.clone()),
            Some(TOKEN_VALID),
        )?;
        let coordinators: Vec<String> =
            self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let mut arguments =
            words(&["run", "--listen", "127.0.0.1", "--nnodes", "1:3", "--notice", "none"]);
        arguments.extend(words(&["--min-members", "1", "--max-members", "8"]));
        arguments.extend(pair("--recovery-target", &self.plan.recovery_target));
        arguments.extend(pair("--max-restarts", self.plan.restarts.to_string()));
        arguments.extend(pair("--expected-members", EXPECTED_MEMBERS.to_string()));
        arguments.extend(pair("--virtual-ranks", VIRTUAL_RANKS.to_string()));
        arguments.extend(pair("--coordinators", coordinators.join(",")));
        arguments.extend(pair("--run-id", JOB));
        arguments.extend(pair("--host", &name));
        arguments.extend(pair("--nproc-per-node", workers.to_string()));
        arguments.extend(pair("--checkpoint", folder.join("checkpoints")));
        arguments.extend(pair("--checkpoint-every", CHECKPOINT_EVERY));
        arguments.extend(pair("--trace-dir", self.trace_folder()));
        arguments.extend(pair("--log-dir", folder.join("logs").join(&name)));
        arguments.push("--".into());
        arguments.push(self.program.clone());
        arguments.extend(self.trainer_arguments());
        arguments.extend(pair("--leaf-ms", LEAF_MS.to_string()));
        let environment = BTreeMap::from([("RIPSTOP_TOKEN".into(), token.into())]);
        let process = self.spawn(&name, arguments, environment).await?;
        self.agents.insert(number, process);
        Ok(number)
    }

    /// Starts the same training in one process, with no coordinator and no waiting.
    pub(crate) async fn start_undisturbed(&mut self) -> anyhow::Result<Process> {
        let mut arguments = self.trainer_arguments();
        arguments.extend(pair("--virtual-ranks", VIRTUAL_RANKS.to_string()));
        // Whatever this shell has set for a job of its own must not reach it: an empty variable is an unset one.
        let own =
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RIPSTOP_"));
        let mut environment: BTreeMap<OsString, OsString> =
            own.map(|(name, _)| (name, OsString::new())).collect();
        // As the agents set it: on small matrices more threads only get in each other's way.
        environment.insert("RAYON_NUM_THREADS".into(), "1".into());
        environment.insert("RIPSTOP_TRACE_DIR".into(), self.undisturbed_folder().into());
        self.spawn("undisturbed", arguments, environment).await
    }

    /// Where the undisturbed run writes its trace.
    pub(crate) fn undisturbed_folder(&self) -> PathBuf {
        self.folder.join("undisturbed")
    }

    fn trainer_arguments(&self) -> Vec<OsString> {
        let mut arguments = words(&["trainer"]);
        arguments.extend(pair("--steps", self.plan.steps.to_string()));
        arguments.extend(words(self.plan.training));
        arguments
    }

    async fn spawn(
        &self,
        name: &str,
        arguments: Vec<OsString>,
        mut environment: BTreeMap<OsString, OsString>,
    ) -> anyhow::Result<Process> {
        // What a killed agent can't clear away goes with the demo's own folder.
        environment.insert("TMPDIR".into(), self.folder.join("tmp").into());
        let log = self.folder.join("logs").join(format!("{name}.log"));
        let open = || File::options().create(true).append(true).open(&log);
        let (out, err) = open()
            .and_then(|out| Ok((out, open()?)))
            .with_context(|| format!("the log {}", log.display()))?;
        let program = self.program.clone();
        let command = WorkerCommand {
            program,
            arguments,
            environment,
            directory: None,
            group: ProcessGroup::Own,
        };
        let mut process =
            self.spawner.spawn(command).await.with_context(|| format!("starting {name}"))?;
        let pipes = process.take_pipes().context("a new process has pipes")?;
        keep(pipes.stdout, out);
        keep(pipes.stderr, err);
        Ok(process)
    }

    /// Takes hold of the workers that agents have started since the last look.
    pub(crate) fn hold_workers(&mut self, history: &History) {
        for started in history.started() {
            if self.workers.contains_key(&started.worker)
                || history.exited(started.worker).is_some()
            {
                continue;
            }
            // Gone already is fine: then there is nobody to signal.
            if let Some(pid) = Pid::from_raw(started.pid)
                && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
            {
                self.workers.insert(started.worker, pidfd);
            }
        }
    }

    /// Kills a worker.
    pub(crate) fn kill_worker(&self, node: NodeId) -> anyhow::Result<()> {
        self.signal_worker(node, rustix::process::Signal::KILL)
    }

    /// Freezes the agent of that number, and `workers`: to all others their host has gone silent.
    pub(crate) fn freeze(&self, agent: u32, workers: &[NodeId]) -> anyhow::Result<()> {
        for node in workers {
            self.signal_worker(*node, rustix::process::Signal::STOP)?;
        }
        let process = self.agents.get(&agent).with_context(|| format!("no agent {agent} runs"))?;
        let pid = Pid::from_raw(process.pid()).context("a process has a number")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("the agent is gone")?;
        pidfd_send_signal(pidfd, rustix::process::Signal::STOP)
            .with_context(|| format!("agent {agent} could not be stopped"))
    }

    /// Kills an agent and waits until it is gone; its workers end with it.
    pub(crate) async fn kill_agent(&mut self, agent: u32) -> anyhow::Result<()> {
        let process =
            self.agents.remove(&agent).with_context(|| format!("no agent {agent} runs"))?;
        process.kill().with_context(|| format!("killing agent {agent}"))?;
        process.ended().await?;
        process.reap()?;
        Ok(())
    }

    /// The agents that run, in the order in which they started.
    pub(crate) fn agents(&self) -> Vec<u32> {
        self.agents.keys().copied().collect()
    }

    /// Asks a worker to leave, as a scheduler does.
    pub(crate) fn drain_worker(&self, node: NodeId) -> anyhow::Result<()> {
        self.signal_worker(node, rustix::process::Signal::TERM)
    }

    fn signal_worker(&self, node: NodeId, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pidfd = self
            .workers
            .get(&node)
            .with_context(|| format!("worker {node} is no process that runs"))?;
        pidfd_send_signal(pidfd, signal)
            .with_context(|| format!("worker {node} could not be signalled"))
    }

    /// Kills a coordinator and waits until it is gone.
    pub(crate) async fn kill_coordinator(&mut self, id: u64) -> anyhow::Result<()> {
        let process = self
            .coordinators
            .remove(&id)
            .with_context(|| format!("coordinator {id} does not run"))?;
        process.kill().with_context(|| format!("killing coordinator {id}"))?;
        process.ended().await?;
        process.reap()?;
        Ok(())
    }

    /// Takes note of agents that ended: how, and which.
    pub(crate) fn ended_agents(&mut self) -> anyhow::Result<Vec<(u32, Exit)>> {
        let mut ended = Vec::new();
        for (number, process) in &self.agents {
            if let Some(exit) =
                process.reap().with_context(|| format!("looking after agent {number}"))?
            {
                ended.push((*number, exit));
            }
        }
        for (number, _) in &ended {
            self.agents.remove(number);
        }
        Ok(ended)
    }

    /// How many agents run.
    pub(crate) fn agents_running(&self) -> usize {
        self.agents.len()
    }

    /// A coordinator that ends by itself is a failure of the demo.
    pub(crate) fn check_coordinators(&self) -> anyhow::Result<()> {
        for (id, process) in &self.coordinators {
            if let Some(exit) =
                process.reap().with_context(|| format!("looking after coordinator {id}"))?
            {
                bail!("coordinator {id} ended by itself: {exit}; see coordinator-{id}.log");
            }
        }
        Ok(())
    }

    /// Ends the coordinators in good order.
    pub(crate) async fn stop_coordinators(&mut self) -> anyhow::Result<()> {
        for process in self.coordinators.values() {
            process.signal(Signal::Terminate)?;
        }
        for (id, process) in std::mem::take(&mut self.coordinators) {
            if tokio::time::timeout(STOP_DEADLINE, process.ended()).await.is_err() {
                tracing::warn!(id, "a coordinator did not end when asked to, and is killed");
                process.kill()?;
                process.ended().await?;
            }
            process.reap()?;
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in self.coordinators.values().chain(self.agents.values()) {
            // Workers end with their agents. An ended process can't be killed, and need not be.
            let _ = process.kill();
        }
    }
}

/// Copies what a process prints into its log until it ends.
fn keep(pipe: OwnedFd, mut log: File) {
    std::thread::spawn(move || {
        if let Err(error) = std::io::copy(&mut File::from(pipe), &mut log) {
            tracing::warn!(%error, "a log ends: it can't be written");
        }
    });
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn pair(flag: &str, value: impl Into<OsString>) -> [OsString; 2] {
    [flag.into(), value.into()]
}

/// Ports below the range from which the system gives ports to those who ask for any: a coordinator that is started again finds its own
/// one free.
fn free_ports() -> anyhow::Result<[u16; COORDINATORS]> {
    let first = PORTS.start
        + u16::try_from(std::process::id() % u32::from(PORTS.end - PORTS.start)).unwrap_or(0);
    let candidates = (first..PORTS.end).chain(PORTS.start..first);
    let is_free = |port: &u16| UdpSocket::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let found: Vec<u16> = candidates.filter(is_free).take(COORDINATORS).collect();
    let wanted =
        || format!("no {COORDINATORS} free UDP ports from {} to {}", PORTS.start, PORTS.end);
    found.try_into().ok().with_context(wanted)
}

pub(crate) const COORDINATORS: usize = 3;
/// Two agents with two workers each.
pub(crate) const EXPECTED_MEMBERS: usize = 4;
pub(crate) const VIRTUAL_RANKS: u32 = 8;
/// A leaf waits so long on top of its computation, as for a GPU: so a moment in mid-step can be hit.
pub(crate) const LEAF_MS: u64 = 40;
const JOB: &str = "demo";
/// Often enough that a demo of seconds has something to go back to.
const CHECKPOINT_EVERY: &str = "2s";
const TOKEN_VALID: Duration = Duration::from_secs(3600);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// Linux gives ports from 32768 on to those who ask for any.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_three_different_ones() {
        let ports = free_ports().unwrap();
        assert!(ports[0] != ports[1] && ports[1] != ports[2] && ports[0] != ports[2]);
        assert!(ports.iter().all(|port| PORTS.contains(port)));
    }
}
