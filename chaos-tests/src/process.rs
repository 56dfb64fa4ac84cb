//! [`Cluster`]: the built program as real processes, for tests that kill them.
//!
//! Coordinators, agents and through them workers run on this host, with ports and folders of their own. Tests wait for what the traces
//! say, never for a time to pass; every wait ends, and who waited in vain is shown the logs. Only processes that a cluster started are
//! ever signalled. Deliberately not here: what is tested.

mod children;
mod job;
mod traces;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

pub use children::Signal;
use children::{Children, runs, signal_worker};
pub use job::{Job, Place, Said, Undisturbed};
pub use traces::{Line, Started, Traces, Writer};

/// Plays one test with a cluster of its own, one test at a time. After a failure the logs are shown and the folder is kept.
///
/// # Errors
/// What `scene` fails with, or if the program has not been built.
pub fn play(scene: impl FnOnce(&mut Cluster) -> anyhow::Result<()>) -> anyhow::Result<()> {
    // A test that failed before is no reason for this one to.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut cluster = Cluster::prepare()?;
    let folder = cluster.folder.clone();
    if let Err(error) = scene(&mut cluster) {
        let words = cluster.last_words();
        return Err(error.context(format!("{words}\nlogs and traces are in {}", folder.display())));
    }
    drop(cluster);
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))
}

/// Processes of one test.
#[derive(Debug)]
pub struct Cluster {
    program: PathBuf,
    folder: PathBuf,
    peers: BTreeMap<u64, SocketAddr>,
    children: Children,
    traces: Traces,
    trace_folder: PathBuf,
    counter: u32,
}

impl Cluster {
    fn prepare() -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let name = format!(
            "ripstop-chaos-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        for inner in ["logs", "trace-1"] {
            let inner = folder.join(inner);
            std::fs::create_dir_all(&inner).with_context(|| format!("{}", inner.display()))?;
        }
        let trace_folder = folder.join("trace-1");
        let mut cluster = Self {
            program: program()?,
            children: Children::new(&folder.join("logs")),
            peers: BTreeMap::new(),
            traces: Traces::new(&trace_folder),
            trace_folder,
            folder,
            counter: 1,
        };
        cluster.place_coordinators(&[IpAddr::V4(Ipv4Addr::LOCALHOST); 3])?;
        let made = cluster.run(&["certs", "init", "--dir", "ca"])?;
        ensure!(made.code == 0, "certs init: {made:?}");
        Ok(cluster)
    }

    /// The folder of this test; commands run there.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the processes have written of themselves; [`Self::wait`] reads on.
    #[must_use]
    pub fn traces(&self) -> &Traces {
        &self.traces
    }

    /// From now on processes write into a new folder, and what the former wrote is forgotten: for a cluster whose node ids begin anew.
    ///
    /// # Errors
    /// If the folder can't be made.
    pub fn renew_traces(&mut self) -> anyhow::Result<()> {
        self.counter += 1;
        self.trace_folder = self.folder.join(format!("trace-{}", self.counter));
        std::fs::create_dir_all(&self.trace_folder)?;
        self.traces = Traces::new(&self.trace_folder);
        Ok(())
    }

    /// The coordinators' addresses, by id.
    #[must_use]
    pub fn peers(&self) -> &BTreeMap<u64, SocketAddr> {
        &self.peers
    }

    /// Says at which addresses the coordinators 1, 2, … will listen; three on loopback if it is not said. Before any of them is started.
    ///
    /// # Errors
    /// If no port is free.
    pub fn place_coordinators(&mut self, addresses: &[IpAddr]) -> anyhow::Result<()> {
        self.peers.clear();
        for (id, ip) in (1..).zip(addresses) {
            self.peers.insert(id, SocketAddr::new(*ip, free_port()?));
        }
        Ok(())
    }

    /// The coordinators as `--coordinators` wants them.
    #[must_use]
    pub fn coordinator_list(&self) -> String {
        let addresses: Vec<String> = self.peers.values().map(ToString::to_string).collect();
        addresses.join(",")
    }

    /// A command of the program, in this test's folder, with nothing of a job in its environment.
    #[must_use]
    pub fn command<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.folder);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["RIPSTOP_", "PET_", "AWS_"].iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        // A test asks no cloud.
        command.env("RIPSTOP_NOTICE", "none");
        command
    }

    /// The command that starts a coordinator.
    #[must_use]
    pub fn coordinator_command(&self, id: u64) -> Command {
        let peers: Vec<String> = self.peers.iter().map(|(id, at)| format!("{id}={at}")).collect();
        let mut command = self.command(&["coordinator", "--certs", "ca"]);
        command.args(["--id", &id.to_string(), "--peers", &peers.join(",")]);
        command.args(["--data-dir", &format!("coordinator-{id}"), "--log-format", "text"]);
        command.arg("--trace-dir").arg(&self.trace_folder);
        command
    }

    /// The command that starts an agent with its workers.
    ///
    /// # Errors
    /// If no token can be made.
    pub fn agent_command(
        &mut self,
        job: &Job,
        place: Place,
        workers: u32,
    ) -> anyhow::Result<Command> {
        self.agent_command_by(job, place, workers, None)
    }

    /// The same; each worker is a shell with this script, whose arguments (`"$@"`) are the training program and its own.
    ///
    /// # Errors
    /// If no token can be made.
    pub fn agent_command_by(
        &mut self,
        job: &Job,
        place: Place,
        workers: u32,
        script: Option<&str>,
    ) -> anyhow::Result<Command> {
        let mut command = self.command(&["run", "--log-format", "text", "--nnodes", "1:3"]);
        match place {
            Place::Standalone => {
                command.arg("--standalone");
            }
            Place::Coordinators => {
                let made = self.run(&["certs", "token", "--dir", "ca"])?;
                ensure!(made.code == 0, "no token: {made:?}");
                command.args(["--coordinators", &self.coordinator_list()]);
                command.env("RIPSTOP_TOKEN", made.out.trim());
            }
        }
        command.args(["--nproc-per-node", &workers.to_string()]);
        command.args(["--virtual-ranks", &job.virtual_ranks().to_string()]);
        command.arg("--trace-dir").arg(&self.trace_folder);
        command.args(job.flags()).arg("--");
        command.args(script.map(|script| ["sh", "-c", script, "sh"]).into_iter().flatten());
        command.arg(&self.program);
        command.arg("trainer").args(job.training()).args(["--leaf-ms", &job.leaf_ms().to_string()]);
        Ok(command)
    }

    /// Starts coordinators and waits until one of them leads.
    ///
    /// # Errors
    /// If they don't come up.
    pub fn start_coordinators(&mut self, ids: &[u64]) -> anyhow::Result<u64> {
        for id in ids {
            let command = self.coordinator_command(*id);
            self.start(&coordinator(*id), command)?;
        }
        self.wait("a leader of the coordinators", Traces::leader)
    }

    /// Starts a coordinator that is the only one, and waits until it leads.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start_single_coordinator(&mut self) -> anyhow::Result<()> {
        self.place_coordinators(&[IpAddr::V4(Ipv4Addr::LOCALHOST)])?;
        self.start_coordinators(&[1]).map(drop)
    }

    /// Starts an agent and says its name.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_agent(&mut self, job: &Job, place: Place, workers: u32) -> anyhow::Result<String> {
        let command = self.agent_command(job, place, workers)?;
        let name = self.new_name("agent");
        self.start(&name, command)?;
        Ok(name)
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.counter += 1;
        format!("{kind}-{}", self.counter)
    }

    /// Starts a process; what it prints goes to a log of its name.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(&mut self, name: &str, command: Command) -> anyhow::Result<()> {
        self.children.start(name, command)
    }

    /// Runs a command of the program to its end.
    ///
    /// # Errors
    /// If it can't be started or does not end.
    pub fn run<S: AsRef<OsStr>>(&mut self, arguments: &[S]) -> anyhow::Result<Said> {
        let command = self.command(arguments);
        self.run_command(command)
    }

    /// The same, with a command of the test's own.
    ///
    /// # Errors
    /// If it can't be started or does not end.
    pub fn run_command(&mut self, command: Command) -> anyhow::Result<Said> {
        let name = self.new_name("command");
        self.start(&name, command)?;
        self.said(&name)
    }

    /// Waits for the end of a process, and says what it printed.
    ///
    /// # Errors
    /// If it does not end.
    pub fn said(&mut self, name: &str) -> anyhow::Result<Said> {
        let code =
            self.poll(&format!("the end of {name}"), |cluster| Ok(cluster.children.end_of(name)))?;
        self.children.forget(name);
        let (out, err) = self.children.output(name)?;
        Ok(Said { code, out, err })
    }

    /// What a process has printed so far on stdout and stderr.
    ///
    /// # Errors
    /// If its logs can't be read.
    pub fn output(&self, name: &str) -> anyhow::Result<(String, String)> {
        self.children.output(name)
    }

    /// Sends a signal to one of the processes that were started here.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn signal(&mut self, name: &str, signal: Signal) -> anyhow::Result<()> {
        self.children.signal(name, signal)
    }

    /// Kills one of them by KILL and waits for its end.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn kill(&mut self, name: &str) -> anyhow::Result<()> {
        self.children.kill(name)
    }

    /// Sends a signal to a worker. One that has ended is no error: `false`.
    ///
    /// # Errors
    /// If the signal can't be sent.
    pub fn signal_worker(&self, node: u64, signal: Signal) -> anyhow::Result<bool> {
        let Some(started) = self.traces.start_of(node) else { return Ok(false) };
        signal_worker(started.pid, &self.children.pids(), signal)
    }

    /// Whether a worker's process is there and has not ended.
    #[must_use]
    pub fn is_running(&self, node: u64) -> bool {
        self.traces.start_of(node).is_some_and(|started| runs(started.pid))
    }

    /// Waits until the traces show something.
    ///
    /// # Errors
    /// If nothing moves any more, or one of the processes has ended by itself.
    pub fn wait<T>(
        &mut self,
        what: &str,
        mut ready: impl FnMut(&Traces) -> Option<T>,
    ) -> anyhow::Result<T> {
        self.poll(what, |cluster| {
            if let Some(value) = ready(&cluster.traces) {
                return Ok(Some(value));
            }
            if let Some((name, code)) = cluster.children.ended_by_itself() {
                bail!("{name} ended with code {code}");
            }
            Ok(None)
        })
    }

    /// Looks again and again, as long as somewhere somebody does something.
    ///
    /// # Errors
    /// If nothing moves any more, or `look` fails.
    pub fn poll<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut Self) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let began = Instant::now();
        let (mut boundary, mut moved) = (self.traces.boundary(), began);
        loop {
            // Ends first: what a process did before its end is in its trace then.
            self.children.look()?;
            self.traces.read()?;
            let found = look(self).with_context(|| format!("while waiting for {what}"))?;
            if let Some(value) = found {
                return Ok(value);
            }
            if self.traces.boundary() != boundary {
                (boundary, moved) = (self.traces.boundary(), Instant::now());
            }
            if moved.elapsed() > PATIENCE || began.elapsed() > PATIENCE_WITH_STEPS {
                bail!(
                    "waited {} s for {what}, in vain; boundary {boundary} came {} s ago",
                    began.elapsed().as_secs(),
                    moved.elapsed().as_secs()
                );
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Trains the same job in one process, undisturbed, and says what states it went through.
    ///
    /// # Errors
    /// If it fails.
    pub fn undisturbed(&mut self, job: &Job) -> anyhow::Result<Undisturbed> {
        let name = self.new_name("undisturbed");
        let folder = self.folder.join(&name);
        std::fs::create_dir_all(&folder)?;
        let mut command =
            self.command(&["trainer", "--virtual-ranks", &job.virtual_ranks().to_string()]);
        command.args(job.training()).env("RIPSTOP_TRACE_DIR", &folder);
        self.start(&name, command)?;
        let said = self.said(&name)?;
        ensure!(said.code == 0, "the undisturbed run: {said:?}");
        let mut traces = Traces::new(&folder);
        traces.read()?;
        let one = |(boundary, digests): (u64, BTreeSet<String>)| {
            digests.into_iter().next().map(|digest| (boundary, digest))
        };
        let states: BTreeMap<u64, String> = traces.digests().into_iter().filter_map(one).collect();
        let steps = job.steps();
        ensure!(states.len() as u64 == steps, "{} states of {steps} steps", states.len());
        let digest = said.digest().context("the undisturbed run printed no digest")?.to_owned();
        Ok(Undisturbed { digest, states })
    }

    /// Checks that every state that any worker of this cluster had is the undisturbed run's.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_states(&self, undisturbed: &Undisturbed) -> anyhow::Result<()> {
        for (boundary, digests) in self.traces.digests() {
            let expected = undisturbed.states.get(&boundary);
            ensure!(
                digests.iter().all(|digest| Some(digest) == expected),
                "at boundary {boundary} states are {digests:?}, and undisturbed {expected:?}"
            );
        }
        Ok(())
    }

    /// Checks that an agent ended well, that the digest it printed is the undisturbed run's, and so was every state on the way.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_end(&self, undisturbed: &Undisturbed, last: &Said) -> anyhow::Result<()> {
        ensure!(last.code == 0, "the agent ended with code {}", last.code);
        self.check_states(undisturbed)?;
        let expected = &undisturbed.digest;
        let printed = last.digest().with_context(|| format!("no digest was printed: {last:?}"))?;
        ensure!(printed == expected, "digest {printed}, undisturbed {expected}");
        Ok(())
    }

    fn last_words(&self) -> String {
        let mut words = self.children.last_words();
        for (node, lines) in self.traces.workers() {
            let last = lines.iter().rev().take(4).rev().map(|line| line.fields.to_string());
            let last: Vec<String> = last.collect();
            let _ = write!(words, "\n--- trace of worker {node}\n{}", last.join("\n"));
        }
        words
    }
}

/// The name of a coordinator's process.
#[must_use]
pub fn coordinator(id: u64) -> String {
    format!("coordinator-{id}")
}

/// The program, where cargo puts it: beside the folder of the tests' own executables.
fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder =
        own.parent().and_then(Path::parent).context("tests run from target/PROFILE/deps")?;
    let program = folder.join("ripstop");
    ensure!(program.is_file(), "{} is missing: run `cargo build` first", program.display());
    Ok(program)
}

/// A port that nobody has. Below those that the system hands out by itself, so that nobody gets it while its owner is dead.
///
/// # Errors
/// If there is none.
pub fn free_port() -> anyhow::Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORTS {
        let number =
            NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id() * 64) % PORTS;
        let port = u16::try_from(PORT_FIRST + number)?;
        let at = (Ipv4Addr::LOCALHOST, port);
        if UdpSocket::bind(at).is_ok() && TcpListener::bind(at).is_ok() {
            return Ok(port);
        }
    }
    bail!("none of {PORTS} ports is free")
}

static TURN: Mutex<()> = Mutex::new(());
/// Linux hands out ports from 32768 on.
const PORT_FIRST: u32 = 20_000;
const PORTS: u32 = 10_000;
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Without any step for so long, something hangs: the slowest thing here is a process that starts on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(45);
/// Even with steps: what is waited for never comes.
const PATIENCE_WITH_STEPS: Duration = Duration::from_secs(180);
