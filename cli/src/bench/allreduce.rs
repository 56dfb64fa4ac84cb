//! `ripstop bench allreduce`: the canonical sum among real processes of this host, beside what the machine could do.
//!
//! For each configuration `ripstop run --standalone` starts the members; each contributes its leaves and takes the sum, round after round,
//! and checks the last one to the bit. Over QUIC the same number of processes then pass the same bytes through the same endpoints without
//! folding anything, and with `--peer gloo` a Python program does the same work with Gloo: all in one run, since a machine is not the
//! same from one minute to the next.

mod member;
mod peer;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use ripstop::agent::exit::Exit;
use ripstop::agent::signals::Signal;
use ripstop::agent::spawn::{Process, ProcessGroup, Spawner, WorkerCommand};
use serde::{Deserialize, Serialize};

pub(crate) use self::member::{MemberArgs, run as run_member};
pub(crate) use self::peer::{PeerArgs, run as run_peer};
use crate::OutputFormat;
use crate::rehearsal::{Ended, duration, until_signal};

/// Sum gradients among processes of this host, and print a line a configuration.
///
/// GB/s are decimal, and bus bandwidth is NCCL's: 2(N-1)/N × bytes / time, of the median round. A round is a whole step: from the call of
/// next_step to the sum in the member's buffer, of the slowest member. Build with --release, or the compiler is what is measured.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: ripstop bench allreduce --members 4 --bytes 4KiB,64MiB,256MiB --carrier quic"
)]
pub(crate) struct AllreduceArgs {
    /// How many processes; several numbers make several lines.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "4", value_parser = clap::value_parser!(u32).range(1..=64))]
    members: Vec<u32>,
    /// Size of the gradient: a number of bytes, or with KiB, MiB or GiB.
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4KiB,1MiB,64MiB,256MiB", value_parser = parse_bytes)]
    bytes: Vec<u64>,
    /// What the elements are.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: ElementType,
    /// How the bytes go.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "quic")]
    carrier: Vec<CarrierName>,
    /// Virtual ranks; as many as members if not given.
    #[arg(long, value_name = "V")]
    virtual_ranks: Option<u32>,
    /// Rounds that are measured; chosen by the size if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rounds: Option<u64>,
    /// Also measure another library on the same sizes, in the same run.
    #[arg(long, value_enum, requires = "python")]
    peer: Option<PeerName>,
    /// A Python that has torch, for --peer.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
}

/// What elements are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum ElementType {
    /// IEEE 754, 32 bits.
    F32,
}

/// How bytes go between members.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CarrierName {
    /// QUIC on loopback, encrypted.
    Quic,
}

/// Another library.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum PeerName {
    /// PyTorch's Gloo, unencrypted TCP.
    Gloo,
}

/// One line of the output.
#[derive(Debug, Serialize)]
struct Line {
    members: u32,
    bytes: u64,
    dtype: ElementType,
    carrier: CarrierName,
    /// Bus bandwidth of the sum, GB/s.
    busbw_gbps: f64,
    /// The same bytes between the same number of processes over the same endpoint settings, without folding; null where nothing goes by QUIC.
    raw_quinn_gbps: Option<f64>,
    /// UDP payload that a member sent for one round, on average of all.
    wire_bytes: u64,
    p50_ms: f64,
    p99_ms: f64,
    /// CPU seconds of all members for one round.
    cpu_s: f64,
    virtual_ranks: u32,
    rounds: u64,
    /// Bus bandwidth of Gloo, where it was asked for.
    gloo_gbps: Option<f64>,
    gloo_p50_ms: Option<f64>,
    gloo_cpu_s: Option<f64>,
}

/// What a process of the bench measured.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Milliseconds of each measured round.
    times_ms: Vec<f64>,
    /// UDP payload sent in all of them.
    sent_bytes: u64,
    /// CPU seconds in all of them.
    cpu_s: f64,
}

pub(super) fn run(args: &AllreduceArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        crate::complain(
            "this is a debug build: the figures say more of the compiler than of the sum; build with --release",
        );
    }
    let ended = crate::block_on(until_signal(measure_all(args)))?;
    let lines = match ended {
        Ended::Signal(signal) => {
            crate::complain(&format!("ended by {signal}; all processes of the bench were killed"));
            return Ok(ExitCode::from(if signal == Signal::Interrupt { 130 } else { 143 }));
        }
        Ended::Itself(lines) => lines?,
    };
    match output {
        OutputFormat::Json => {
            for line in &lines {
                crate::print(&serde_json::to_string(line)?);
            }
        }
        OutputFormat::Text => crate::print(&table(&lines)),
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure_all(args: &AllreduceArgs) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for &members in &args.members {
        for &bytes in &args.bytes {
            for &carrier in &args.carrier {
                let rounds = args.rounds.unwrap_or_else(|| default_rounds(bytes));
                let virtual_ranks = args.virtual_ranks.unwrap_or(members);
                if virtual_ranks < members {
                    let text = format!(
                        "{members} members need at least {members} virtual ranks: raise --virtual-ranks"
                    );
                    return Err(ripstop::Error::Usage(text).into());
                }
                let case = Case { members, bytes, carrier, rounds, virtual_ranks };
                tracing::info!(members, bytes, rounds, "measuring");
                lines.push(case.measure(args).await?);
            }
        }
    }
    Ok(lines)
}

/// One configuration.
struct Case {
    members: u32,
    bytes: u64,
    carrier: CarrierName,
    rounds: u64,
    virtual_ranks: u32,
}

impl Case {
    async fn measure(&self, args: &AllreduceArgs) -> anyhow::Result<Line> {
        let folder = tempfile::Builder::new()
            .prefix("ripstop-bench-")
            .tempdir()
            .context("making a temporary folder; set TMPDIR to one that can be written")?;
        match self.measure_in(folder.path(), args).await {
            Ok(line) => Ok(line),
            Err(error) => {
                let kept = folder.keep();
                Err(error.context(format!("logs are in {}", kept.display())))
            }
        }
    }

    async fn measure_in(&self, folder: &Path, args: &AllreduceArgs) -> anyhow::Result<Line> {
        let group = Group { spawner: Spawner::start()?, folder: folder.to_owned() };
        let sum = Rounds::of(&self.sum(&group).await?)?;
        let raw = match self.carrier {
            CarrierName::Quic if self.members > 1 => Some(Rounds::of(&self.raw(&group).await?)?),
            CarrierName::Quic => None,
        };
        let gloo = match (args.peer, &args.python) {
            (Some(PeerName::Gloo), Some(python)) => {
                Some(Rounds::of(&self.gloo(&group, python).await?)?)
            }
            _ => None,
        };
        Ok(Line {
            members: self.members,
            bytes: self.bytes,
            dtype: args.dtype,
            carrier: self.carrier,
            busbw_gbps: self.bus_bandwidth(sum.p50_ms),
            raw_quinn_gbps: raw.as_ref().map(|raw| self.bus_bandwidth(raw.p50_ms)),
            wire_bytes: sum.sent_bytes,
            p50_ms: sum.p50_ms,
            p99_ms: sum.p99_ms,
            cpu_s: sum.cpu_s,
            virtual_ranks: self.virtual_ranks,
            rounds: self.rounds,
            gloo_gbps: gloo.as_ref().map(|gloo| self.bus_bandwidth(gloo.p50_ms)),
            gloo_p50_ms: gloo.as_ref().map(|gloo| gloo.p50_ms),
            gloo_cpu_s: gloo.as_ref().map(|gloo| gloo.cpu_s),
        })
    }

    async fn sum(&self, group: &Group) -> anyhow::Result<Vec<Measured>> {
        let own = std::env::current_exe().context("finding this program's own file")?;
        let mut arguments =
            words(&["run", "--standalone", "--max-restarts", "0", "--run-id", "bench"]);
        arguments.extend(pair("--nproc-per-node", self.members.to_string()));
        arguments.extend(pair("--min-members", self.members.to_string()));
        arguments.extend(pair("--virtual-ranks", self.virtual_ranks.to_string()));
        arguments.push("--".into());
        arguments.push(own.clone().into());
        arguments.extend(words(&["-q", "bench", "allreduce-member"]));
        arguments.extend(pair("--bytes", self.bytes.to_string()));
        arguments.extend(pair("--rounds", self.rounds.to_string()));
        arguments.extend(pair("--warm-up", self.warm_up().to_string()));
        arguments.extend(pair("--folder", &group.folder));
        let process = group.start("sum", own.into(), arguments).await?;
        group.ended("sum", process).await?;
        group.results("member", self.members)
    }

    async fn raw(&self, group: &Group) -> anyhow::Result<Vec<Measured>> {
        let own = std::env::current_exe().context("finding this program's own file")?;
        ripstop::raw_exchange::prepare(&group.folder, self.members)?;
        let mut processes = Vec::new();
        for index in 0..self.members {
            let mut arguments = words(&["-q", "bench", "allreduce-peer"]);
            arguments.extend(pair("--index", index.to_string()));
            arguments.extend(pair("--members", self.members.to_string()));
            arguments.extend(pair("--bytes", self.bytes.to_string()));
            arguments.extend(pair("--rounds", self.rounds.to_string()));
            arguments.extend(pair("--warm-up", self.warm_up().to_string()));
            arguments.extend(pair("--folder", &group.folder));
            let name = format!("peer-{index}");
            processes
                .push((name.clone(), group.start(&name, own.clone().into(), arguments).await?));
        }
        for (name, process) in processes {
            group.ended(&name, process).await?;
        }
        group.results("peer", self.members)
    }

    async fn gloo(&self, group: &Group, python: &Path) -> anyhow::Result<Vec<Measured>> {
        let script = group.folder.join("gloo.py");
        std::fs::write(&script, GLOO).with_context(|| format!("writing {}", script.display()))?;
        let mut processes = Vec::new();
        for index in 0..self.members {
            let mut arguments = vec![script.clone().into()];
            arguments.extend(pair("--rank", index.to_string()));
            arguments.extend(pair("--members", self.members.to_string()));
            arguments.extend(pair("--bytes", self.bytes.to_string()));
            arguments.extend(pair("--rounds", self.rounds.to_string()));
            arguments.extend(pair("--warm-up", self.warm_up().to_string()));
            arguments.extend(pair("--folder", &group.folder));
            let name = format!("gloo-{index}");
            processes.push((name.clone(), group.start(&name, python.into(), arguments).await?));
        }
        for (name, process) in processes {
            group.ended(&name, process).await?;
        }
        group.results("gloo", self.members)
    }

    /// Buffers are touched, windows open and packets grow in the first rounds.
    fn warm_up(&self) -> u64 {
        (self.rounds / 4).clamp(2, 200)
    }

    fn bus_bandwidth(&self, time_ms: f64) -> f64 {
        let n = f64::from(self.members);
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
        let bytes = self.bytes as f64;
        2.0 * (n - 1.0) / n * bytes / (time_ms * 1e6)
    }
}

/// The processes of one configuration, and where they put what they measured.
struct Group {
    spawner: Spawner,
    folder: PathBuf,
}

impl Group {
    async fn start(
        &self,
        name: &str,
        program: OsString,
        arguments: Vec<OsString>,
    ) -> anyhow::Result<Process> {
        let log = self.folder.join(format!("{name}.log"));
        let open = || std::fs::File::options().create(true).append(true).open(&log);
        let (out, err) = open()
            .and_then(|out| Ok((out, open()?)))
            .with_context(|| format!("the log {}", log.display()))?;
        // Whatever this shell has set for a job of its own must not reach them: an empty variable is an unset one.
        let own =
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RIPSTOP_"));
        let mut environment: BTreeMap<OsString, OsString> =
            own.map(|(name, _)| (name, OsString::new())).collect();
        environment.insert("TMPDIR".into(), self.folder.clone().into());
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
        for (pipe, mut log) in [(pipes.stdout, out), (pipes.stderr, err)] {
            std::thread::spawn(move || std::io::copy(&mut std::fs::File::from(pipe), &mut log));
        }
        Ok(process)
    }

    async fn ended(&self, name: &str, process: Process) -> anyhow::Result<()> {
        process.ended().await?;
        match process.reap()? {
            Some(Exit::Code(0)) => Ok(()),
            exit => {
                let log = std::fs::read_to_string(self.folder.join(format!("{name}.log")));
                let log = log.unwrap_or_default();
                let said = log.lines().rev().take(5).collect::<Vec<_>>();
                let said: Vec<&str> = said.into_iter().rev().collect();
                let how = exit.map_or_else(|| "without a status".to_owned(), |e| e.to_string());
                bail!("{name} ended: {how}; it said: {}", said.join(" | "))
            }
        }
    }

    fn results(&self, name: &str, members: u32) -> anyhow::Result<Vec<Measured>> {
        (0..members)
            .map(|index| {
                let path = self.folder.join(format!("{name}-{index}.json"));
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("reading {}", path.display()))?;
                serde_json::from_str(&text).with_context(|| format!("in {}", path.display()))
            })
            .collect()
    }
}

/// What all processes together measured.
struct Rounds {
    p50_ms: f64,
    p99_ms: f64,
    sent_bytes: u64,
    cpu_s: f64,
}

impl Rounds {
    /// A round takes as long as its slowest process.
    fn of(all: &[Measured]) -> anyhow::Result<Self> {
        let rounds = all.iter().map(|one| one.times_ms.len()).min().unwrap_or(0);
        let slowest = |round: usize| all.iter().map(|one| one.times_ms[round]).fold(0.0, f64::max);
        let mut times: Vec<f64> = (0..rounds).map(slowest).collect();
        times.sort_by(f64::total_cmp);
        if times.is_empty() {
            bail!("no round was measured");
        }
        // The smallest that is not below so many percent of all.
        let at = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
        #[expect(clippy::cast_precision_loss, reason = "rounds are few")]
        let cpu_s = all.iter().map(|one| one.cpu_s).sum::<f64>() / rounds as f64;
        let sent: u64 = all.iter().map(|one| one.sent_bytes).sum();
        let sent_bytes = sent / (rounds as u64 * all.len() as u64);
        Ok(Self { p50_ms: at(50), p99_ms: at(99), sent_bytes, cpu_s })
    }
}

/// A measured stretch of one process: its CPU time.
pub(super) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    #[expect(
        clippy::cast_precision_loss,
        reason = "a process that runs for days keeps its microseconds"
    )]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}

pub(super) fn write_measured(path: &Path, measured: &Measured) -> anyhow::Result<()> {
    let text = serde_json::to_string(measured)?;
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// So many rounds that a configuration takes some seconds.
fn default_rounds(bytes: u64) -> u64 {
    ((2 << 30) / bytes.max(1)).clamp(10, 1000)
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!("{text:?}: write a number of bytes, a multiple of 4, as 4096, 4KiB, 64MiB or 1GiB")
    };
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(wrong()),
    };
    let bytes = number.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
    bytes.filter(|b| *b > 0 && b.is_multiple_of(4) && *b <= 16 << 30).ok_or_else(wrong)
}

fn table(lines: &[Line]) -> String {
    let speed = |gbps: Option<f64>| gbps.map_or_else(|| "–".to_owned(), |g| format!("{g:.3}"));
    let ratio = |of: Option<f64>, to: f64| {
        of.map_or_else(|| "–".to_owned(), |of| format!("{:.2}", to / of))
    };
    let mut rows = vec![
        [
            "members",
            "bytes",
            "carrier",
            "GB/s (bus)",
            "raw quinn",
            "of raw",
            "Gloo",
            "of Gloo",
            "p50",
            "p99",
            "CPU s",
            "wire bytes",
        ]
        .map(str::to_owned),
    ];
    for line in lines {
        let carrier = match line.carrier {
            CarrierName::Quic => "quic",
        };
        rows.push([
            line.members.to_string(),
            line.bytes.to_string(),
            carrier.to_owned(),
            speed(Some(line.busbw_gbps)),
            speed(line.raw_quinn_gbps),
            ratio(line.raw_quinn_gbps, line.busbw_gbps),
            speed(line.gloo_gbps),
            ratio(line.gloo_gbps, line.busbw_gbps),
            duration(line.p50_ms),
            duration(line.p99_ms),
            format!("{:.3}", line.cpu_s),
            line.wire_bytes.to_string(),
        ]);
    }
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let text = |row: &[String; 12]| {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{}{cell}", " ".repeat(width - cell.chars().count())));
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(text).collect::<Vec<_>>().join("\n")
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn pair(flag: &str, value: impl Into<OsString>) -> [OsString; 2] {
    [flag.into(), value.into()]
}

/// The program that measures Gloo; it prints the same files.
const GLOO: &str = include_str!("../../../benches/gloo.py");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_hold_whole_elements() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("4KiB"), Ok(4096));
        assert_eq!(parse_bytes("1GiB"), Ok(1 << 30));
        for bad in ["", "0", "5", "KiB", "4kb", "-4", "99999999999GiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_round_takes_as_long_as_its_slowest_process() {
        let one =
            |times_ms: &[f64]| Measured { times_ms: times_ms.to_vec(), sent_bytes: 30, cpu_s: 1.5 };
        let rounds = Rounds::of(&[one(&[1.0, 5.0, 2.0]), one(&[4.0, 1.0, 3.0])]).unwrap();
        assert_eq!((rounds.p50_ms, rounds.p99_ms), (4.0, 5.0));
        assert_eq!((rounds.sent_bytes, rounds.cpu_s), (10, 1.0));
        assert!(Rounds::of(&[]).is_err());
    }

    #[test]
    fn bus_bandwidth_is_that_of_a_ring() {
        let case = Case {
            members: 4,
            bytes: 1_000_000,
            carrier: CarrierName::Quic,
            rounds: 1,
            virtual_ranks: 4,
        };
        assert!((case.bus_bandwidth(1.0) - 1.5).abs() < 1e-9);
    }
}
