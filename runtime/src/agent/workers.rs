//! Runs the workers of one host: carries real processes to the [`Supervisor`] and its decisions to them.
//!
//! Deliberately not here: who the workers are to the coordinators. [`Prepare`] brings that, and [`Event`]s tell what to report.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use types::{NodeId, Timestamp};

use super::environment::Placement;
use super::exit::{Exit, ExitCode};
use super::output::Output;
use super::signals::Signal;
use super::spawn::{Process, ProcessGroup, SpawnError, Spawner, WorkerCommand};
use super::supervisor::{self, Action, Release, Slot, StartFailure, Supervisor, Verdict};
use crate::clock;

/// The workers of one host.
#[derive(Debug)]
pub struct Workers<P> {
    config: Config,
    prepare: Arc<P>,
    supervisor: Supervisor,
    spawner: Spawner,
    output: Output,
    tasks: JoinSet<Input>,
    slots: BTreeMap<Slot, Worker>,
    events: mpsc::UnboundedSender<Event>,
}

impl<P: Prepare> Workers<P> {
    /// Gets ready; nothing is started yet. Events are few (at most four for each start), so their channel has no bound.
    ///
    /// # Errors
    /// If the system has no thread for us.
    pub fn new(
        config: Config,
        output: Output,
        prepare: P,
        events: mpsc::UnboundedSender<Event>,
    ) -> io::Result<Self> {
        let supervisor = Supervisor::new(config.supervisor.clone());
        Ok(Self {
            config,
            prepare: Arc::new(prepare),
            supervisor,
            spawner: Spawner::start()?,
            output,
            tasks: JoinSet::new(),
            slots: BTreeMap::new(),
            events,
        })
    }

    /// Runs the workers to their end and says what the agent exits with. If this is dropped half-way, the workers are killed.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) -> Verdict {
        let mut has_commands = true;
        let verdict = loop {
            if let Some(verdict) = self.act() {
                break verdict;
            }
            let deadline = self.supervisor.poll_timeout();
            let wait = deadline.map_or(Duration::MAX, |deadline| deadline.since(clock::now()));
            tokio::select! {
                biased;
                Some(done) = self.tasks.join_next() => match done {
                    Ok(input) => self.handle(input),
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    // A preparation that was cancelled.
                    Err(_) => {}
                },
                command = commands.recv(), if has_commands => match command {
                    Some(command) => self.obey(command),
                    None => has_commands = false,
                },
                () = tokio::time::sleep(wait), if deadline.is_some() => self.supervisor.handle_timeout(clock::now()),
                else => {
                    tracing::error!("no worker is left and none is to come, but no end was decided; please report this");
                    let bug = ExitCode::Bug;
                    break Verdict { if_finished: bug, otherwise: bug, has_done: false };
                }
            }
        };
        if !self.output.finish(OUTPUT_LIMIT).await {
            tracing::warn!(
                "some output of workers is not shown: something holds it open, or does not read ours"
            );
        }
        verdict
    }

    /// Does what the machine wants; at the end, the verdict.
    fn act(&mut self) -> Option<Verdict> {
        while let Some(action) = self.supervisor.poll_action() {
            match action {
                Action::Start { slot, attempt } => {
                    let prepare = Arc::clone(&self.prepare);
                    let handle = self.tasks.spawn(async move {
                        let result = prepare.prepare(slot, attempt).await;
                        Input::Prepared { slot, attempt, result }
                    });
                    self.slots.insert(slot, Worker::Preparing { attempt, handle });
                }
                Action::Cancel { slot, attempt } => {
                    if let Some(Worker::Preparing { attempt: found, handle }) =
                        self.slots.get(&slot)
                        && *found == attempt
                    {
                        handle.abort();
                        self.slots.remove(&slot);
                        self.supervisor.handle_cancelled(slot, attempt);
                    }
                }
                Action::Report { slot, node, exit, at } => {
                    self.tell(Event::Exited { slot, node, exit, noticed_at: at });
                }
                Action::Forward { slot, node, signal } => {
                    self.tell(Event::Draining { slot, node });
                    self.send(slot, |process| process.signal(signal));
                }
                Action::KillAll => {
                    tracing::warn!("killing all workers that are left");
                    for slot in self.slots.keys().copied().collect::<Vec<_>>() {
                        self.send(slot, Process::kill);
                    }
                }
                Action::Finished(verdict) => return Some(verdict),
            }
        }
        None
    }

    fn obey(&mut self, command: Command) {
        let now = clock::now();
        match command {
            Command::Signal(signal) => {
                tracing::info!(%signal, "signal received");
                self.supervisor.handle_signal(now, signal);
            }
            Command::Notice { time_left } => {
                tracing::info!(?time_left, "this host goes away");
                self.supervisor.handle_notice(now, time_left);
            }
            Command::Released(release) => self.supervisor.handle_released(now, release),
            Command::Kill { node } => {
                let slot = self.slots.iter().find_map(|(slot, worker)| match worker {
                    Worker::Running { node: found, .. } if *found == node => Some(*slot),
                    _ => None,
                });
                if let Some(slot) = slot {
                    self.send(slot, Process::kill);
                }
            }
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Prepared { slot, attempt, result } => {
                // Not if it was cancelled when it was done already.
                if matches!(self.slots.get(&slot), Some(Worker::Preparing { attempt: found, .. }) if *found == attempt)
                {
                    match result {
                        Ok(prepared) => self.spawn(slot, attempt, prepared),
                        Err(error) => {
                            let failure = StartFailure::Crash(Exit::Code(error.code.code().into()));
                            self.fail(slot, attempt, failure, error.reason);
                        }
                    }
                }
            }
            Input::Spawned { slot, attempt, node, result: Ok(process) } => {
                self.watch(slot, attempt, node, process);
            }
            Input::Spawned { slot, attempt, result: Err(error), .. } => {
                let code = error.exit_code();
                let failure = if error.is_permanent() {
                    StartFailure::Permanent(code)
                } else {
                    StartFailure::Crash(Exit::Code(code.code().into()))
                };
                let cause = std::error::Error::source(&error)
                    .map(|cause| format!(": {cause}"))
                    .unwrap_or_default();
                self.fail(slot, attempt, failure, format!("{error}{cause}"));
            }
            Input::Ended { slot, node, at } => self.reap(slot, node, at),
        }
    }

    fn spawn(&mut self, slot: Slot, attempt: u32, prepared: Prepared) {
        let mut extra = self.config.environment.clone();
        extra.extend(prepared.environment);
        let placement = Placement {
            local_rank: slot.0,
            local_world_size: self.config.supervisor.slots().get(),
            restarts: attempt,
            max_restarts: self.config.supervisor.max_restarts(),
            error_file: self.output.folder(slot, attempt).map(|folder| folder.join("error.json")),
            ..self.config.placement.clone()
        };
        let command = WorkerCommand {
            program: self.config.program.clone(),
            arguments: self.config.arguments.clone(),
            environment: placement.environment(&self.config.inherited, &extra),
            directory: self.config.directory.clone(),
            group: self.config.group,
        };
        let (spawner, node) = (self.spawner.clone(), prepared.node);
        self.tasks.spawn(async move {
            let result = spawner.spawn(command).await;
            Input::Spawned { slot, attempt, node, result }
        });
        self.slots.insert(slot, Worker::Spawning);
    }

    fn watch(&mut self, slot: Slot, attempt: u32, node: NodeId, mut process: Process) {
        tracing::info!(%slot, attempt, %node, pid = process.pid(), "worker started");
        if let Some(pipes) = process.take_pipes()
            && let Err(error) = self.output.attach(slot, attempt, pipes)
        {
            tracing::warn!(%slot, %error, "a worker's output cannot be read");
        }
        self.tell(Event::Started { slot, attempt, node, pid: process.pid() });
        let process = Arc::new(process);
        self.slots.insert(slot, Worker::Running { node, process: Arc::clone(&process) });
        self.tasks.spawn(ended(slot, node, process));
        self.supervisor.handle_started(clock::now(), slot, attempt, node);
    }

    fn reap(&mut self, slot: Slot, node: NodeId, at: Timestamp) {
        let Some(Worker::Running { node: found, process }) = self.slots.get(&slot) else { return };
        if *found != node {
            return;
        }
        let exit = match process.reap() {
            Ok(Some(exit)) => exit,
            Ok(None) => {
                self.tasks.spawn(ended(slot, node, Arc::clone(process)));
                return;
            }
            Err(error) => {
                tracing::error!(%slot, %node, %error, "a worker ended but the system does not say how");
                Exit::Code(u8::MAX.into())
            }
        };
        tracing::info!(%slot, %node, %exit, "worker ended");
        self.slots.remove(&slot);
        self.supervisor.handle_exit(at, node, exit);
    }

    fn fail(&mut self, slot: Slot, attempt: u32, failure: StartFailure, reason: String) {
        tracing::warn!(%slot, attempt, reason, "worker not started");
        self.slots.remove(&slot);
        self.tell(Event::StartFailed { slot, attempt, reason });
        self.supervisor.handle_start_failed(clock::now(), slot, attempt, failure);
    }

    fn send(&self, slot: Slot, signal: impl FnOnce(&Process) -> io::Result<()>) {
        if let Some(Worker::Running { node, process }) = self.slots.get(&slot)
            && let Err(error) = signal(process)
        {
            tracing::warn!(%slot, %node, %error, "a worker cannot be signalled");
        }
    }

    fn tell(&self, event: Event) {
        // Nobody has to listen.
        let _ = self.events.send(event);
    }
}

async fn ended(slot: Slot, node: NodeId, process: Arc<Process>) -> Input {
    if let Err(error) = process.ended().await {
        tracing::error!(%slot, %node, %error, "a worker cannot be watched any more");
    }
    Input::Ended { slot, node, at: clock::now() }
}

/// What is run, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many workers, and how they are treated.
    pub supervisor: supervisor::Config,
    /// The program.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Where it runs; where the agent does, by default.
    pub directory: Option<PathBuf>,
    /// Process groups of the workers.
    pub group: ProcessGroup,
    /// Where this host stands. What differs between workers and attempts (local rank, restarts, error file) is filled in.
    pub placement: Placement,
    /// Variables for all workers; the `RIPSTOP_` ones.
    pub environment: BTreeMap<String, String>,
    /// The names of the variables that the agent itself was started with.
    pub inherited: BTreeSet<String>,
}

/// Makes a worker somebody, before each start.
pub trait Prepare: Send + Sync + 'static {
    /// A new node's id and what its process needs to be that node. Dropped half-way if the agent is to leave.
    ///
    /// # Errors
    /// Counts as a crash of the worker with the error's code: 64, 69, 76, 77 and 78 are final, others are tried again.
    fn prepare(
        &self,
        slot: Slot,
        attempt: u32,
    ) -> impl Future<Output = Result<Prepared, PrepareError>> + Send;
}

/// Who a worker will be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Prepared {
    /// Its node.
    pub node: NodeId,
    /// Variables for this process only.
    pub environment: BTreeMap<String, String>,
}

/// Why a worker cannot be made a node.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{reason}")]
pub struct PrepareError {
    /// As if the worker had exited with it.
    pub code: ExitCode,
    /// For people.
    pub reason: String,
}

/// What an agent is told from outside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// It got a signal.
    Signal(Signal),
    /// The host goes away.
    Notice {
        /// In how long.
        time_left: Duration,
    },
    /// There is no more to do.
    Released(Release),
    /// Kill one worker (evicted, and too stuck to hear it); it is restarted within its budget.
    Kill {
        /// Which.
        node: NodeId,
    },
}

/// What happened to a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// It runs.
    Started {
        /// Where.
        slot: Slot,
        /// Which attempt, from 0.
        attempt: u32,
        /// Who it is.
        node: NodeId,
        /// Its process.
        pid: i32,
    },
    /// It does not.
    StartFailed {
        /// Where.
        slot: Slot,
        /// Which attempt, from 0.
        attempt: u32,
        /// Why.
        reason: String,
    },
    /// It was asked to leave.
    Draining {
        /// Where it runs.
        slot: Slot,
        /// Who.
        node: NodeId,
    },
    /// It ended.
    Exited {
        /// Where it ran.
        slot: Slot,
        /// Who it was.
        node: NodeId,
        /// How.
        exit: Exit,
        /// When that was noticed, by this host's monotonic clock.
        noticed_at: Timestamp,
    },
}

/// What a slot does.
#[derive(Debug)]
enum Worker {
    Preparing { attempt: u32, handle: AbortHandle },
    Spawning,
    Running { node: NodeId, process: Arc<Process> },
}

/// What a task brings back.
#[derive(Debug)]
enum Input {
    Prepared { slot: Slot, attempt: u32, result: Result<Prepared, PrepareError> },
    Spawned { slot: Slot, attempt: u32, node: NodeId, result: Result<Process, SpawnError> },
    Ended { slot: Slot, node: NodeId, at: Timestamp },
}

/// How long the end waits for output, in each of three stages: far longer than a pipe takes to empty, short beside any grace period.
const OUTPUT_LIMIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
