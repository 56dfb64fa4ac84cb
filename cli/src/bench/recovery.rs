//! `ripstop bench recovery`: many faults in one run, and what they cost.
//!
//! Three coordinators, two agents with two workers each, all processes of their own on loopback. The model is small and a leaf waits as if
//! for a GPU, so that two cores are not what is measured.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueEnum};
use ripstop::agent::signals::Signal;
use ripstop::settings::parse_duration;
use serde::Serialize;
use types::Step;

use crate::OutputFormat;
use crate::rehearsal::cluster::{Cluster, EXPECTED_MEMBERS, Plan};
use crate::rehearsal::measure::{Fault, Kind, Measured, Phases};
use crate::rehearsal::progress::Talk;
use crate::rehearsal::stage::{Endings, Stage, settled};
use crate::rehearsal::trace::{History, WorldSeen};
use crate::rehearsal::{Ended, duration, until_signal};

/// Kill a worker in mid-step, silence a host, kill the leader, let a worker join and leave, again and again; print a line a kind.
///
/// Recovery time is (fault → last survivor has the new world) + (last leaf → last survivor has the sum): recomputation of leaves is not in
/// it, everything else is. For `leader` it is the time to a new leader, for `join` from the start of the process to the sum of its first step,
/// for `drain` from TERM to the end of the process.
#[derive(Debug, Args)]
pub(crate) struct RecoveryArgs {
    /// Only these kinds of faults; all if not given.
    #[arg(long = "kind", value_name = "KIND", value_enum)]
    kinds: Vec<KindName>,
    /// How many faults of each kind; if not given, 20 of `kill` and 5 of each other kind.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: Option<u32>,
    /// The recovery target of the job and its coordinators.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = check_duration)]
    recovery_target: String,
}

/// A kind of fault, as it is named on the command line and in JSON.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum KindName {
    /// A worker gets SIGKILL in mid-step.
    Kill,
    /// An agent and its two workers are frozen in mid-step, as if all packets of their host were dropped.
    SilentHost,
    /// The coordinators' leader gets SIGKILL.
    Leader,
    /// An agent with one worker is started.
    Join,
    /// That worker gets SIGTERM.
    Drain,
}

pub(super) fn run(args: &RecoveryArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut kinds = args.kinds.clone();
    if kinds.is_empty() {
        kinds = KindName::value_variants().to_vec();
    }
    kinds.sort_unstable();
    kinds.dedup();
    let counts: BTreeMap<KindName, u32> = kinds
        .iter()
        .map(|kind| (*kind, args.count.unwrap_or(if *kind == KindName::Kill { 20 } else { 5 })))
        .collect();
    let folder = tempfile::Builder::new()
        .prefix("ripstop-bench-")
        .tempdir()
        .context("making a temporary folder; set TMPDIR to one that can be written")?;
    let mut talk = Talk::of_faults(counts.values().map(|count| u64::from(*count)).sum());
    let plan = Plan {
        steps: STEPS,
        recovery_target: args.recovery_target.clone(),
        restarts: RESTARTS,
        training: &[
            "--layers",
            "1",
            "--width",
            "32",
            "--heads",
            "2",
            "--context",
            "32",
            "--batch",
            "1",
        ],
    };
    let measured = crate::block_on(async {
        let mut cluster = Cluster::prepare(folder.path(), plan)?;
        anyhow::Ok(until_signal(Bench::new(&mut cluster, &mut talk).play(&counts)).await)
    })??;
    talk.end();
    let all = match measured {
        Ended::Signal(signal) => {
            crate::complain(&format!("ended by {signal}; all processes of the bench were killed"));
            return Ok(ExitCode::from(if signal == Signal::Interrupt { 130 } else { 143 }));
        }
        Ended::Itself(Ok(all)) => all,
        Ended::Itself(Err(error)) => {
            let kept = folder.keep();
            return Err(error.context(format!("logs and traces are in {}", kept.display())));
        }
    };
    let lines: Vec<Line> = counts.keys().filter_map(|kind| Line::of(*kind, &all)).collect();
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

/// A job that runs on while faults are done to it.
struct Bench<'a> {
    stage: Stage<'a>,
    measured: Vec<(KindName, Measured)>,
}

impl<'a> Bench<'a> {
    fn new(cluster: &'a mut Cluster, talk: &'a mut Talk) -> Self {
        Self { stage: Stage::new(cluster, talk), measured: Vec::new() }
    }

    /// Does all faults, the kinds one after the other.
    async fn play(
        mut self,
        counts: &BTreeMap<KindName, u32>,
    ) -> anyhow::Result<Vec<(KindName, Measured)>> {
        self.stage.endings = Endings::ByFault;
        self.stage.start_coordinators().await?;
        self.stage.cluster.start_agent(WORKERS).await?;
        self.stage.cluster.start_agent(WORKERS).await?;
        self.whole().await?;
        self.stage.talk.say("3 coordinators, 2 agents with 2 workers each: the job runs");
        for (kind, count) in counts {
            for number in 0..*count {
                match kind {
                    KindName::Kill => self.kill(number).await?,
                    KindName::SilentHost => self.silence().await?,
                    KindName::Leader => self.kill_leader().await?,
                    KindName::Join => self.join(counts.contains_key(&KindName::Drain)).await?,
                    // Each follows its join.
                    KindName::Drain if counts.contains_key(&KindName::Join) => {}
                    KindName::Drain => {
                        let agent = self.stage.cluster.start_agent(1).await?;
                        self.settled(EXPECTED_MEMBERS + 1).await?;
                        self.drain(agent, true).await?;
                    }
                }
            }
        }
        Ok(self.measured)
    }

    /// Waits for the world of all four, and for some quiet steps in it.
    async fn whole(&mut self) -> anyhow::Result<WorldSeen> {
        self.settled(EXPECTED_MEMBERS).await
    }

    async fn settled(&mut self, members: usize) -> anyhow::Result<WorldSeen> {
        let what = format!("a world of {members} that all have entered");
        let is_it = |h: &History| settled(h, members).filter(|w| w.nodes.len() == members);
        self.stage.wait(&what, is_it).await?;
        let quiet = Step(self.stage.history().boundary().0 + QUIET_STEPS);
        self.stage.wait(&what, |h| is_it(h).filter(|_| h.boundary() >= quiet)).await
    }

    async fn overcome(&mut self, kind: KindName, fault: &Fault) -> anyhow::Result<()> {
        let measured = self.stage.overcome(fault).await?;
        self.note(kind, measured);
        Ok(())
    }

    fn note(&mut self, kind: KindName, measured: Measured) {
        let time = kind.time(&measured).map_or_else(|| "?".to_owned(), duration);
        self.stage.talk.count_fault();
        self.stage.talk.say(&format!("{:<12} {time}", kind.name()));
        self.measured.push((kind, measured));
    }

    async fn kill(&mut self, number: u32) -> anyhow::Result<()> {
        let world = self.whole().await?;
        let victim = world.nodes[number as usize % world.nodes.len()];
        let step = self.stage.mid_step(victim, self.stage.history().boundary()).await?;
        let fault = Fault { step, ..self.stage.fault(Kind::Kill, world, vec![victim]) };
        self.stage.cluster.kill_worker(victim)?;
        self.overcome(KindName::Kill, &fault).await
    }

    async fn silence(&mut self) -> anyhow::Result<()> {
        let world = self.whole().await?;
        let number = *self.stage.cluster.agents().last().context("an agent runs")?;
        let agent = self.stage.agent(number as usize - 1)?;
        let is_there = |node: &types::NodeId| world.nodes.contains(node);
        let victims: Vec<types::NodeId> = self
            .stage
            .history()
            .started()
            .filter(|started| started.agent == agent)
            .map(|started| started.worker)
            .filter(is_there)
            .collect();
        let first = *victims.first().context("that agent has members")?;
        let step = self.stage.mid_step(first, self.stage.history().boundary()).await?;
        let mut fault = self.stage.fault(Kind::SilentHost, world, victims.clone());
        fault.step = step;
        self.stage.cluster.freeze(number, &victims)?;
        self.overcome(KindName::SilentHost, &fault).await?;
        for victim in &victims {
            self.stage.cluster.kill_worker(*victim)?;
        }
        self.stage.cluster.kill_agent(number).await?;
        self.stage.cluster.start_agent(WORKERS).await.map(drop)
    }

    async fn kill_leader(&mut self) -> anyhow::Result<()> {
        let world = self.whole().await?;
        let leader = self.stage.history().leader().context("nobody has ever led")?;
        let mut fault = self.stage.fault(Kind::Leader, world, Vec::new());
        fault.leader = Some(leader);
        self.stage.cluster.kill_coordinator(leader).await?;
        self.overcome(KindName::Leader, &fault).await?;
        self.stage.cluster.start_coordinator(leader).await?;
        // It must be back in the majority before the next one goes.
        self.whole().await.map(drop)
    }

    async fn join(&mut self, is_drain_measured: bool) -> anyhow::Result<()> {
        let world = self.whole().await?;
        let fault = self.stage.fault(Kind::Join, world, Vec::new());
        let agent = self.stage.cluster.start_agent(1).await?;
        self.overcome(KindName::Join, &fault).await?;
        self.drain(agent, is_drain_measured).await
    }

    /// Drains the only worker of an agent.
    async fn drain(&mut self, agent: u32, is_measured: bool) -> anyhow::Result<()> {
        let world = self.settled(EXPECTED_MEMBERS + 1).await?;
        let victim = self.stage.member_of_agent(&world, agent as usize - 1)?;
        let fault = self.stage.fault(Kind::Drain, world, vec![victim]);
        self.stage.cluster.drain_worker(victim)?;
        let measured = self.stage.overcome(&fault).await?;
        if is_measured {
            self.note(KindName::Drain, measured);
        }
        Ok(())
    }
}

impl KindName {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::SilentHost => "silent-host",
            Self::Leader => "leader",
            Self::Join => "join",
            Self::Drain => "drain",
        }
    }

    /// The time by which the kind is judged.
    fn time(self, measured: &Measured) -> Option<f64> {
        match self {
            Self::Kill | Self::SilentHost => measured.recovery_ms,
            Self::Leader => measured.detected_ms,
            Self::Join => measured.step_ms,
            Self::Drain => measured.left_ms,
        }
    }
}

/// One line of the output. Times are milliseconds; what does not apply is null.
#[derive(Debug, PartialEq, Serialize)]
struct Line {
    kind: KindName,
    count: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// How long leaves were computed again, which is no part of the times above.
    recompute_p50_ms: Option<f64>,
    /// Medians.
    phases: Option<Phases>,
    /// By how much the longest step around the fault was longer than the median of those before: the worst of all faults.
    step_delay_ms: Option<f64>,
    /// The same, the median of all faults.
    step_delay_p50_ms: Option<f64>,
}

impl Line {
    fn of(kind: KindName, all: &[(KindName, Measured)]) -> Option<Self> {
        let mine: Vec<&Measured> = all.iter().filter(|(k, _)| *k == kind).map(|(_, m)| m).collect();
        let times = Sample::of(mine.iter().filter_map(|m| kind.time(m)))?;
        let phase = |pick: fn(&Phases) -> f64| {
            Sample::of(mine.iter().filter_map(|m| m.phases.as_ref()).map(pick)).map(|s| s.at(50))
        };
        let phases = || {
            Some(Phases {
                detect: phase(|p| p.detect)?,
                agree: phase(|p| p.agree)?,
                reconnect: phase(|p| p.reconnect)?,
                resend: phase(|p| p.resend)?,
            })
        };
        let delays = Sample::of(mine.iter().filter_map(|m| m.step_delay_ms));
        Some(Self {
            kind,
            count: times.0.len(),
            p50_ms: times.at(50),
            p99_ms: times.at(99),
            max_ms: times.at(100),
            recompute_p50_ms: Sample::of(mine.iter().filter_map(|m| m.recompute_ms))
                .map(|s| s.at(50)),
            phases: phases(),
            step_delay_ms: delays.as_ref().map(|s| s.at(100)),
            step_delay_p50_ms: delays.map(|s| s.at(50)),
        })
    }
}

/// Numbers in order; at least one.
struct Sample(Vec<f64>);

impl Sample {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then_some(Self(values))
    }

    /// The smallest number that is not below `percent` of all (nearest rank).
    fn at(&self, percent: usize) -> f64 {
        let rank = (self.0.len() * percent).div_ceil(100);
        self.0[rank.max(1) - 1]
    }
}

fn table(lines: &[Line]) -> String {
    let time = |millis: Option<f64>| millis.map_or_else(|| "–".to_owned(), duration);
    let mut rows = vec![
        [
            "kind",
            "count",
            "p50",
            "p99",
            "max",
            "detect",
            "agree",
            "reconnect",
            "resend",
            "recompute",
            "step delay",
        ]
        .map(str::to_owned),
    ];
    for line in lines {
        let phase = |pick: fn(&Phases) -> f64| time(line.phases.as_ref().map(pick));
        rows.push([
            line.kind.name().to_owned(),
            line.count.to_string(),
            duration(line.p50_ms),
            duration(line.p99_ms),
            duration(line.max_ms),
            phase(|p| p.detect),
            phase(|p| p.agree),
            phase(|p| p.reconnect),
            phase(|p| p.resend),
            time(line.recompute_p50_ms),
            time(line.step_delay_ms),
        ]);
    }
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let text: Vec<String> = rows
        .iter()
        .map(|row| {
            let mut text = format!("{:<width$}", row[0], width = width(0));
            for (column, cell) in row.iter().enumerate().skip(1) {
                text.push_str(&format!("  {cell:>width$}", width = width(column)));
            }
            text
        })
        .collect();
    text.join("\n")
}

fn check_duration(text: &str) -> Result<String, String> {
    parse_duration(text).map(|_| text.to_owned())
}

/// More than are ever reached: the job is ended from outside.
const STEPS: u64 = 1_000_000;
/// More than are ever needed.
const RESTARTS: u32 = 100_000;
/// Workers of an agent.
const WORKERS: u32 = 2;
/// So many steps pass in the whole world before the next fault.
const QUIET_STEPS: u64 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_nearest() {
        let sample = Sample::of((1..=20).rev().map(f64::from)).unwrap();
        assert_eq!([50, 99, 100].map(|percent| sample.at(percent)), [10.0, 20.0, 20.0]);
        let one = Sample::of(std::iter::once(7.0)).unwrap();
        assert_eq!([0, 50, 99, 100].map(|percent| one.at(percent)), [7.0; 4]);
        assert!(Sample::of(std::iter::empty()).is_none());
    }
}
