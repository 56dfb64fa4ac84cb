//! [`Report`]: what the demo found: both runs side by side. It is the JSON document on stdout; the table and the page are made from it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use types::{Digest, NodeId, Step, Timestamp};

use super::scenario::Played;
use crate::rehearsal::measure::{Kind, Measured};
use crate::rehearsal::trace::{History, WorkerEvent, WorldSeen};

/// Everything that is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of parameters and optimizer state at the end of the run with faults.
    pub(super) digest: Digest,
    /// The same of the run without.
    pub(super) undisturbed_digest: Digest,
    /// Whether both are equal, and the digests after every step, on every member, too.
    pub(super) equal: bool,
    pub(super) steps: u64,
    /// How many states were compared: one a step and member.
    pub(super) states_compared: usize,
    /// The first step after which states differ.
    pub(super) first_difference: Option<u64>,
    pub(super) events: Vec<Measured>,
    pub(super) wall_s: f64,
    #[serde(skip)]
    pub(super) curves: Curves,
}

/// What the page draws.
#[derive(Debug, Default)]
pub(super) struct Curves {
    pub(super) loss: BTreeMap<u64, f64>,
    pub(super) undisturbed_loss: BTreeMap<u64, f64>,
    /// Members from a time on, in seconds since training began.
    pub(super) members: Vec<(f64, usize)>,
    /// The time of each fault.
    pub(super) faults: Vec<(Kind, f64)>,
    /// From when to when nobody led.
    pub(super) leaderless: Option<(f64, f64)>,
    /// The steps that were computed twice.
    pub(super) lost: Option<(u64, u64)>,
    /// When the last step was finished.
    pub(super) end: f64,
}

impl Report {
    /// Compares a run with the undisturbed one.
    pub(super) fn new(
        played: Played,
        undisturbed: &History,
        steps: u64,
        wall: Duration,
    ) -> anyhow::Result<Self> {
        let history = played.reader.history();
        let reference: BTreeMap<Step, Digest> =
            states(undisturbed).map(|(_, boundary, digest)| (boundary, digest)).collect();
        let last = Step(steps);
        let undisturbed_digest = *reference.get(&last).with_context(|| {
            format!("the undisturbed run's trace has no state after step {steps}")
        })?;
        let finals: Vec<Digest> =
            states(history).filter(|(_, b, _)| *b == last).map(|(_, _, digest)| digest).collect();
        let differs = |digest: &&Digest| **digest != undisturbed_digest;
        let digest = finals.iter().find(differs).or(finals.first());
        let digest =
            *digest.with_context(|| format!("no member's trace has a state after step {steps}"))?;
        let mut first_difference = None;
        let mut states_compared = 0;
        for (_, boundary, state) in states(history) {
            states_compared += 1;
            if reference.get(&boundary) != Some(&state) {
                first_difference = Some(first_difference.unwrap_or(u64::MAX).min(boundary.0));
            }
        }
        Ok(Self {
            digest,
            undisturbed_digest,
            equal: digest == undisturbed_digest && first_difference.is_none(),
            steps,
            states_compared,
            first_difference,
            curves: Curves::new(&played, undisturbed),
            events: played.measured,
            wall_s: (wall.as_secs_f64() * 10.0).round() / 10.0,
        })
    }

    /// What was found out, in one sentence.
    pub(super) fn verdict(&self) -> String {
        if self.equal {
            return format!(
                "equal digests: the run with {} faults ended with the same bits as the undisturbed one, and so did every one of its {} steps",
                self.events.len(),
                self.steps
            );
        }
        let place = self
            .first_difference
            .map(|step| format!(", first after step {step}"))
            .unwrap_or_default();
        format!(
            "DIFFERENT digests: the run with faults did not end with the bits of the undisturbed one{place}"
        )
    }
}

impl Curves {
    fn new(played: &Played, undisturbed: &History) -> Self {
        let history = played.reader.history();
        // A world that nobody came to adopt, since its members died first, was never there.
        let adopted = |world: WorldSeen| {
            let times = world.nodes.iter().filter_map(|n| history.adopted(*n, world.generation));
            times.min().map(|at| (at, world.nodes.len()))
        };
        let adopted: Vec<(Timestamp, usize)> =
            history.worlds().into_iter().filter_map(adopted).collect();
        let began = adopted.iter().map(|(at, _)| *at).min().unwrap_or_default();
        let seconds = |at: Timestamp| at.since(began).as_secs_f64();
        let mut members: Vec<(f64, usize)> =
            adopted.into_iter().map(|(at, count)| (seconds(at), count)).collect();
        let killed = played.faults.iter().filter(|fault| fault.kind == Kind::All);
        members.extend(killed.map(|fault| (seconds(fault.at), 0)));
        members.sort_by(|a, b| a.0.total_cmp(&b.0));
        let ends = history
            .workers
            .values()
            .flatten()
            .filter(|line| matches!(line.event, WorkerEvent::Final { .. }));
        let pairs = || played.faults.iter().zip(&played.measured);
        let leaderless =
            pairs().find(|(fault, _)| fault.kind == Kind::Leader).and_then(|(fault, measured)| {
                let from = seconds(fault.at);
                Some((from, from + measured.detected_ms? / 1e3))
            });
        let lost =
            pairs().find(|(fault, _)| fault.kind == Kind::All).and_then(|(fault, measured)| {
                let reached = fault.reached(history).0;
                (measured.lost_steps > 0).then_some((reached - measured.lost_steps, reached))
            });
        Self {
            loss: losses(history),
            undisturbed_loss: losses(undisturbed),
            members,
            faults: played.faults.iter().map(|fault| (fault.kind, seconds(fault.at))).collect(),
            leaderless,
            lost,
            end: ends.map(|line| seconds(line.at)).fold(0.0, f64::max),
        }
    }
}

/// All states that were applied: by whom, after how many steps, and their digest.
fn states(history: &History) -> impl Iterator<Item = (NodeId, Step, Digest)> + '_ {
    history.workers.iter().flat_map(|(node, lines)| {
        lines.iter().filter_map(|line| match line.event {
            WorkerEvent::Applied { boundary, digest } => Some((*node, boundary, digest)),
            _ => None,
        })
    })
}

fn losses(history: &History) -> BTreeMap<u64, f64> {
    let metrics = history.workers.values().flatten().filter_map(|line| match line.event {
        WorkerEvent::Metric { step, loss } => Some((step.0, loss?)),
        _ => None,
    });
    metrics.collect()
}
