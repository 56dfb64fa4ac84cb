//! Starts a worker's process and sees it end.
//!
//! Promises: a worker never outlives its agent, even if that is killed by KILL; its end is noticed at once, through a pidfd; a
//! signal never hits another process that got the same number. It shares no open file with the agent but its two pipes. Needs
//! Linux 5.4.
#![expect(
    unsafe_code,
    reason = "a hook between fork and exec, and the registration of a raw descriptor, have no safe form"
)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group,
    pidfd_open, pidfd_send_signal, set_parent_process_death_signal, waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::exit::{Exit, ExitCode};

/// Starts processes. They live as long as it (or a clone of it) does, at most.
///
/// The kernel ends a process with the *thread* that started it, not only with the process. So all are started by one thread, which
/// ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Spawner {
    requests: mpsc::SyncSender<Request>,
}

impl Spawner {
    /// Starts the thread that starts the processes.
    ///
    /// # Errors
    /// If the system has no thread or signal handler for us.
    pub fn start() -> io::Result<Self> {
        // Some launchers start us with CHLD ignored, and then the kernel keeps no exit status. A handler, any, ends that.
        signal_hook::flag::register(Signal::CHILD.as_raw(), Arc::new(AtomicBool::new(false)))?;
        let (requests, inbox) = mpsc::sync_channel::<Request>(REQUESTS_MAX);
        thread::Builder::new().name("ripstop-spawn".to_owned()).spawn(move || {
            for request in inbox {
                if let Err(Ok(started)) = request.answer.send(start(&request.command)) {
                    // Nobody waits for it any more.
                    started.discard();
                }
            }
        })?;
        Ok(Self { requests })
    }

    /// Starts a process. A caller that stops waiting leaves no process behind.
    ///
    /// # Errors
    /// If the program does not exist or cannot be executed, or the system refuses another process.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn spawn(&self, command: WorkerCommand) -> Result<Process, SpawnError> {
        let program = command.program.clone();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => SpawnError::NotFound { program: program.clone() },
            io::ErrorKind::PermissionDenied => {
                SpawnError::NotExecutable { program: program.clone(), source }
            }
            _ => SpawnError::Refused { program: program.clone(), source },
        };
        let (answer, answered) = oneshot::channel();
        self.requests
            .try_send(Request { command, answer })
            .map_err(|_| failed(io::ErrorKind::ResourceBusy.into()))?;
        let started = match answered.await {
            Ok(started) => started.map_err(failed)?,
            Err(_) => return Err(failed(io::ErrorKind::BrokenPipe.into())),
        };
        let Started { pid, is_group, pidfd, stdout, stderr } = started;
        // SAFETY: the pidfd is owned, and moves into the `AsyncFd`, which is only ever borrowed from and dropped as a whole: it stays
        // open and the same for as long as it is registered.
        let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
        match registered {
            Ok(pidfd) => {
                Ok(Process { pid, is_group, pidfd, pipes: Some(Pipes { stdout, stderr }) })
            }
            Err(error) => {
                let (pidfd, source) = error.into_parts();
                discard(&pidfd);
                Err(failed(source))
            }
        }
    }
}

/// What to start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerCommand {
    /// The program; one without a slash is looked for in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables on top of the inherited environment.
    pub environment: BTreeMap<OsString, OsString>,
    /// Where it runs; where the agent does, by default.
    pub directory: Option<PathBuf>,
    /// Its process group.
    pub group: ProcessGroup,
}

/// Which process group a worker is in. The session is the agent's in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ProcessGroup {
    /// The agent's: a signal to the whole group (Ctrl-C, Slurm's) reaches a worker twice, by itself and through its agent.
    #[default]
    Shared,
    /// One of its own: signals come through the agent only, and processes that a worker leaves behind are killed with it.
    Own,
}

/// A process that was started; not yet waited for.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    is_group: bool,
    pidfd: AsyncFd<OwnedFd>,
    pipes: Option<Pipes>,
}

impl Process {
    /// Its number, for people: it may be another process's after [`Self::reap`].
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Its output; once.
    #[must_use]
    pub fn take_pipes(&mut self) -> Option<Pipes> {
        self.pipes.take()
    }

    /// Returns when it has ended. Cancel safe.
    ///
    /// # Errors
    /// If the runtime is shutting down.
    pub async fn ended(&self) -> io::Result<()> {
        self.pidfd.readable().await.map(drop)
    }

    /// How it ended, or `None` if it runs. Call until `Some`, and then no more.
    ///
    /// # Errors
    /// If somebody else has waited for it.
    pub fn reap(&self) -> io::Result<Option<Exit>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        if self.is_group && wait(self.pidfd.get_ref(), look | WaitIdOptions::NOWAIT)?.is_some() {
            // While it is not waited for, its number is its own. Gone already is fine.
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
        Ok(wait(self.pidfd.get_ref(), look)?)
    }

    /// Sends it a signal; to nobody if it has ended.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn signal(&self, signal: super::signals::Signal) -> io::Result<()> {
        send(self.pidfd.get_ref(), signal.native())
    }

    /// Kills it. What is left of its own group, if it has one, follows in [`Self::reap`].
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&self) -> io::Result<()> {
        send(self.pidfd.get_ref(), Signal::KILL)
    }
}

/// The reading ends of a process's output.
#[derive(Debug)]
pub struct Pipes {
    /// Standard output.
    pub stdout: OwnedFd,
    /// Standard error.
    pub stderr: OwnedFd,
}

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// There is no such program.
    #[error(
        "cannot start {program:?}: no such program (or interpreter, or working directory); check the name and PATH"
    )]
    NotFound {
        /// Its name.
        program: OsString,
    },
    /// It is no program, or not ours to run.
    #[error("cannot start {program:?}: it is not executable; check its permissions")]
    NotExecutable {
        /// Its name.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused; perhaps not the next time.
    #[error(
        "cannot start {program:?}: the system refused; check the limits on processes, files and memory"
    )]
    Refused {
        /// Its name.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
}

impl SpawnError {
    /// What a shell would exit with.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::Program(match self {
            Self::NotFound { .. } => ExitCode::NOT_FOUND,
            Self::NotExecutable { .. } | Self::Refused { .. } => ExitCode::NOT_EXECUTABLE,
        })
    }

    /// Trying again cannot help.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        !matches!(self, Self::Refused { .. })
    }
}

struct Request {
    command: WorkerCommand,
    answer: oneshot::Sender<io::Result<Started>>,
}

/// A process before a runtime watches it.
struct Started {
    pid: Pid,
    is_group: bool,
    pidfd: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl Started {
    fn discard(self) {
        discard(&self.pidfd);
    }
}

/// Starts a process; on the spawner's thread only.
fn start(command: &WorkerCommand) -> io::Result<Started> {
    let is_group = command.group == ProcessGroup::Own;
    let mut native = Command::new(&command.program);
    native.args(&command.arguments).envs(&command.environment);
    // No input: several workers cannot share one.
    native.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(directory) = &command.directory {
        native.current_dir(directory);
    }
    if is_group {
        native.process_group(0);
    }
    let agent = getpid();
    let die_with_agent = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // An agent that died before that line will send nothing.
        if getppid() == Some(agent) { Ok(()) } else { Err(Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes two plain system calls and builds
    // errors from numbers: it allocates nothing, takes no lock and touches no memory of other threads.
    unsafe {
        native.pre_exec(die_with_agent);
    }
    let mut child = native.spawn()?;
    match watch(&mut child, is_group) {
        Ok(started) => Ok(started),
        Err(error) => {
            child.kill()?;
            child.wait()?;
            Err(error)
        }
    }
}

/// Opens the pidfd. Nobody but us waits for the child, so the number is still its own.
fn watch(child: &mut Child, is_group: bool) -> io::Result<Started> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Errno::BADF.into());
    };
    Ok(Started { pid, is_group, pidfd, stdout: stdout.into(), stderr: stderr.into() })
}

/// Kills a process and waits for it.
fn discard(pidfd: &OwnedFd) {
    // Both fail only if it is gone.
    let _ = send(pidfd, Signal::KILL);
    let _ = wait(pidfd, WaitIdOptions::EXITED);
}

fn send(pidfd: impl AsFd, signal: Signal) -> io::Result<()> {
    match pidfd_send_signal(pidfd.as_fd(), signal) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn wait(pidfd: impl AsFd, options: WaitIdOptions) -> rustix::io::Result<Option<Exit>> {
    let status = rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(pidfd.as_fd()), options))?;
    Ok(status.map(|status| match status.terminating_signal() {
        Some(signal) => Exit::Signal(signal),
        None => Exit::Code(status.exit_status().unwrap_or(i32::from(u8::MAX))),
    }))
}

/// How many starts may wait; more than workers on any host.
const REQUESTS_MAX: usize = 1024;

#[cfg(test)]
pub(super) mod tests;
