//! [`Children`]: the processes that a test started, their logs and their ends.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
pub use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

/// Processes by name. When this is dropped they are killed.
#[derive(Debug)]
pub(super) struct Children {
    logs: PathBuf,
    running: BTreeMap<String, Child>,
    ended: BTreeMap<String, i32>,
    names: Vec<String>,
}

impl Children {
    /// Without any process yet; logs go to a folder that exists.
    pub(super) fn new(logs: &Path) -> Self {
        Self {
            logs: logs.to_path_buf(),
            running: BTreeMap::new(),
            ended: BTreeMap::new(),
            names: Vec::new(),
        }
    }

    /// Starts a process. One of the same name may have been before it.
    pub(super) fn start(&mut self, name: &str, mut command: Command) -> anyhow::Result<()> {
        ensure!(!self.running.contains_key(name), "{name} runs already");
        let log = |stream: &str| {
            let path = self.log(name, stream);
            File::options()
                .create(true)
                .append(true)
                .open(&path)
                .with_context(|| format!("{}", path.display()))
        };
        command.stdin(Stdio::null()).stdout(log("out")?).stderr(log("err")?);
        let child = command.spawn().with_context(|| format!("starting {name}: {command:?}"))?;
        self.ended.remove(name);
        self.running.insert(name.to_owned(), child);
        self.names.retain(|known| known != name);
        self.names.push(name.to_owned());
        Ok(())
    }

    fn log(&self, name: &str, stream: &str) -> PathBuf {
        self.logs.join(format!("{name}.{stream}"))
    }

    /// What a process has printed so far on stdout and stderr.
    pub(super) fn output(&self, name: &str) -> anyhow::Result<(String, String)> {
        let read = |stream: &str| {
            let path = self.log(name, stream);
            let bytes = std::fs::read(&path).with_context(|| format!("{}", path.display()))?;
            anyhow::Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok((read("out")?, read("err")?))
    }

    /// Takes note of who has ended.
    pub(super) fn look(&mut self) -> anyhow::Result<()> {
        for (name, child) in &mut self.running {
            if let Some(status) = child.try_wait()? {
                self.ended.insert(name.clone(), code(status));
            }
        }
        self.running.retain(|name, _| !self.ended.contains_key(name));
        Ok(())
    }

    /// How a process ended, as a shell would say it.
    pub(super) fn end_of(&self, name: &str) -> Option<i32> {
        self.ended.get(name).copied()
    }

    /// A process that has ended and that nobody has waited for.
    pub(super) fn ended_by_itself(&self) -> Option<(&str, i32)> {
        self.ended.iter().next().map(|(name, code)| (name.as_str(), *code))
    }

    /// The end of this process is what the test wanted.
    pub(super) fn forget(&mut self, name: &str) {
        self.ended.remove(name);
    }

    /// Sends a signal.
    pub(super) fn signal(&mut self, name: &str, signal: Signal) -> anyhow::Result<()> {
        let child = self.running.get(name).with_context(|| format!("{name} does not run"))?;
        // It is not waited for yet, so the number is its own.
        rustix::process::kill_process(Pid::from_child(child), signal)
            .with_context(|| format!("signalling {name}"))
    }

    /// Kills a process and waits for its end.
    pub(super) fn kill(&mut self, name: &str) -> anyhow::Result<()> {
        let mut child =
            self.running.remove(name).with_context(|| format!("{name} does not run"))?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// The process ids of those that run.
    pub(super) fn pids(&self) -> Vec<u64> {
        self.running.values().map(|child| u64::from(child.id())).collect()
    }

    /// The last lines that each process printed.
    pub(super) fn last_words(&self) -> String {
        let mut words = String::new();
        for name in &self.names {
            let end = match self.ended.get(name) {
                Some(code) => format!("ended with code {code}"),
                None if self.running.contains_key(name) => "runs".to_owned(),
                None => "ended".to_owned(),
            };
            let (out, err) = self.output(name).unwrap_or_default();
            if out.is_empty() && err.is_empty() {
                continue;
            }
            let _ = write!(words, "\n--- {name} ({end})");
            for (text, lines) in [(out, 4), (err, 25)] {
                let all: Vec<&str> = text.lines().collect();
                for line in &all[all.len().saturating_sub(lines)..] {
                    let _ = write!(words, "\n{}", line.chars().take(220).collect::<String>());
                }
            }
        }
        words
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        let workers = children_of(&self.pids());
        for child in self.running.values_mut() {
            // Whoever is gone already needs no killing.
            let _ = child.kill();
            let _ = child.wait();
        }
        // Workers end when their agents do; the folder goes after them.
        let deadline = Instant::now() + WORKERS_END;
        while Instant::now() < deadline && workers.iter().any(|pid| runs(*pid)) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Sends a signal to a worker if its parent is one of `parents`; `false` if there is no such process any more.
pub(super) fn signal_worker(pid: u64, parents: &[u64], signal: Signal) -> anyhow::Result<bool> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a process id")?;
    // Held first, looked at then: so the number can't have come to somebody else in between.
    let Ok(process) = pidfd_open(raw, PidfdFlags::empty()) else { return Ok(false) };
    if !parent(pid).is_some_and(|parent| parents.contains(&parent)) {
        return Ok(false);
    }
    match pidfd_send_signal(&process, signal) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::SRCH) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("signalling the worker {pid}")),
    }
}

/// The parent of a process that runs and is no zombie.
fn parent(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (state != "Z").then_some(parent)
}

/// Whether there is such a process, and it has not ended.
pub(super) fn runs(pid: u64) -> bool {
    parent(pid).is_some()
}

fn children_of(parents: &[u64]) -> Vec<u64> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|pid| parent(*pid).is_some_and(|found| parents.contains(&found))).collect()
}

fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1)
}

/// Far longer than the kernel takes to end a process.
const WORKERS_END: Duration = Duration::from_secs(5);
