//! What a fault cost, from the traces of all processes.
//!
//! [`Fault::measure`] says `None` until the job has come over the fault, so that one waits by asking again. All times are of one
//! clock. The recovery time is that of a fault in mid-step: from the fault until the last survivor has adopted the new world, and from
//! the last leaf until the last survivor has all final chunks. The recomputation between the two is told by itself.

use std::collections::BTreeSet;

use serde::Serialize;
use types::{NodeId, Step, Timestamp};

use super::trace::{CoordinatorEvent, History, WorkerEvent, WorldSeen};

/// A fault, as it was done.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) at: Timestamp,
    /// The world before it.
    pub(crate) world: WorldSeen,
    /// Workers that it was done to.
    pub(crate) victims: Vec<NodeId>,
    /// The step that was on its way.
    pub(crate) step: Step,
    /// The leader at that time.
    pub(crate) leader: Option<u64>,
}

/// What is done to the job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// A worker is killed in mid-step.
    Kill,
    /// The leader of the coordinators is killed.
    Leader,
    /// A worker joins.
    Join,
    /// A worker is asked to leave.
    Drain,
    /// All workers are killed at once.
    All,
    /// A host goes silent, with all its workers.
    SilentHost,
}

impl Kind {
    /// The demo's, in the order in which they come.
    pub(crate) const DEMO: [Self; 5] =
        [Self::Kill, Self::Leader, Self::Join, Self::Drain, Self::All];

    /// A few words for tables and charts.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "worker killed",
            Self::Leader => "leader killed",
            Self::Join => "worker joins",
            Self::Drain => "worker drained",
            Self::All => "all workers killed",
            Self::SilentHost => "host silent",
        }
    }

    /// What it means, in one sentence.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Self::Kill => {
                "One worker got SIGKILL in the middle of a step, with half of its share delivered: the others computed only what was \
                 missing, and finished the same step."
            }
            Self::Leader => {
                "The coordinator that led the other two got SIGKILL: training needs no coordinator from step to step, so steps went on \
                 while the two elected a new leader; the dead one was started again later."
            }
            Self::Join => {
                "One more worker was started by a third agent: it copied the state from the members, followed until it was level, and \
                 took over a part of the virtual ranks at a step named in advance."
            }
            Self::Drain => {
                "One worker got SIGTERM, as before a preemption: its virtual ranks were handed over between two steps, and it left with \
                 exit code 75."
            }
            Self::All => {
                "Every worker got SIGKILL at once and the agents ended; started again with the same checkpoint URL, the job went on from \
                 its last checkpoint and computed the lost steps again, to the same bits."
            }
            Self::SilentHost => {
                "All processes of one host were frozen, as if its packets were dropped: nobody says that they are gone, so silence must."
            }
        }
    }
}

/// What a fault cost. Times are milliseconds from the fault; what does not apply is null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Measured {
    pub(crate) kind: Kind,
    /// Step that was on its way.
    pub(crate) step: u64,
    /// Until it was noticed: by an agent (a death), the coordinators (join, drain), or the new leader (the former's death).
    pub(crate) detected_ms: Option<f64>,
    /// Until the last member had adopted the new world.
    pub(crate) world_ms: Option<f64>,
    /// Until the last member had the step's sum: of the step on its way, or the first one of the new world.
    pub(crate) step_ms: Option<f64>,
    /// How long leaves were computed after the new world and before the sum; after a restart, until the lost steps were made up for.
    pub(crate) recompute_ms: Option<f64>,
    /// Applied steps that had to be computed again.
    pub(crate) lost_steps: u64,
    /// As DESIGN §7 defines it: everything but recomputation.
    pub(crate) recovery_ms: Option<f64>,
    /// Leaves of a dead member that others computed in that step; of one that left, leaves that were computed twice.
    pub(crate) recomputed_leaves: Option<u64>,
    /// Steps that were finished while there was no leader.
    pub(crate) steps_meanwhile: Option<u64>,
    /// Until the process had ended (drain).
    pub(crate) left_ms: Option<f64>,
    /// What the recovery time is made of (deaths in mid-step).
    pub(crate) phases: Option<Phases>,
    /// By how much the longest step after the fault was longer than those before it.
    pub(crate) step_delay_ms: Option<f64>,
    /// Members before and after.
    pub(crate) members_before: usize,
    pub(crate) members_after: usize,
}

/// Where the time of a recovery went, in milliseconds. `reconnect` goes on while leaves are computed, so it is no part of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Phases {
    /// Until somebody knew it who could say so.
    pub(crate) detect: f64,
    /// Until the last survivor had adopted the new world.
    pub(crate) agree: f64,
    /// Until the last survivor had the reports of all others.
    pub(crate) reconnect: f64,
    /// From the last leaf until the last survivor had all final chunks.
    pub(crate) resend: f64,
}

impl Fault {
    /// The cost, once it is over.
    pub(crate) fn measure(&self, history: &History) -> Option<Measured> {
        match self.kind {
            Kind::Kill | Kind::SilentHost => self.measure_death(history),
            Kind::Leader => self.measure_leader(history),
            Kind::Join => self.measure_join(history),
            Kind::Drain => self.measure_drain(history),
            Kind::All => self.measure_all(history),
        }
    }

    /// The worker that a join brought.
    pub(crate) fn joiner(&self, history: &History) -> Option<NodeId> {
        history.started().filter(|s| s.at >= self.at).min_by_key(|s| s.at).map(|s| s.worker)
    }

    fn measure_death(&self, history: &History) -> Option<Measured> {
        let world = self
            .next_world(history, |world| !self.victims.iter().any(|v| world.nodes.contains(v)))?;
        let survivors: Vec<NodeId> =
            self.world.nodes.iter().copied().filter(|n| !self.victims.contains(n)).collect();
        let adopted = latest(&survivors, |node| history.adopted(node, world.generation))?;
        let mut step = self.step;
        let mut finished = latest(&survivors, |node| history.finished(node, step))?;
        if finished < self.at {
            // It came too late for the step that it was meant for, and hit the next.
            step = step.next();
            finished = latest(&survivors, |node| history.finished(node, step))?;
        }
        let lines = || survivors.iter().flat_map(|node| history.worker(*node));
        let is_leaf =
            |event: &WorkerEvent| matches!(event, WorkerEvent::Leaf { step: s, .. } if *s == step);
        let last_leaf =
            lines().filter(|l| is_leaf(&l.event)).map(|l| l.at).max().unwrap_or(self.at);
        let is_again =
            |event: &WorkerEvent| matches!(event, WorkerEvent::Recompute { step: s } if *s == step);
        let recomputed = lines().filter(|l| l.at >= self.at && is_again(&l.event)).count();
        let waiting = millis(adopted, last_leaf.min(finished));
        let detected = match self.kind {
            Kind::SilentHost => history.lost(*self.victims.first()?)?,
            _ => history.exited(*self.victims.first()?)?.0,
        };
        let entered = latest(&survivors, |node| history.entered(node, world.generation))?;
        let step_ms = millis(self.at, finished);
        let phases = Phases {
            detect: millis(self.at, detected),
            agree: millis(detected, adopted),
            reconnect: millis(adopted, entered),
            resend: millis(last_leaf.max(adopted), finished),
        };
        Some(Measured {
            step: step.0,
            detected_ms: Some(millis(self.at, detected)),
            world_ms: Some(millis(self.at, adopted)),
            step_ms: Some(step_ms),
            recompute_ms: Some(waiting),
            recovery_ms: Some(round(step_ms - waiting)),
            recomputed_leaves: Some(recomputed as u64),
            phases: Some(phases),
            ..self.blank(world.nodes.len())
        })
    }

    fn measure_leader(&self, history: &History) -> Option<Measured> {
        let elected = history.said().into_iter().find(|(id, line)| {
            let leads = matches!(line.event, CoordinatorEvent::Leader { term: Some(_) });
            leads && line.at > self.at && Some(*id) != self.leader
        })?;
        let elected = elected.1.at;
        let finished = latest(&self.world.nodes, |node| history.finished(node, self.step))?;
        let first_final =
            |step: Step| earliest(&self.world.nodes, |node| history.finished(node, step));
        let is_meanwhile =
            |step: &Step| first_final(*step).is_some_and(|at| at > self.at && at <= elected);
        let meanwhile = (self.step.0..history.boundary().0).map(Step).filter(is_meanwhile).count();
        Some(Measured {
            detected_ms: Some(millis(self.at, elected)),
            step_ms: Some(millis(self.at, finished)),
            steps_meanwhile: Some(meanwhile as u64),
            step_delay_ms: self.step_delay(history, &self.world.nodes, elected.max(finished))?,
            ..self.blank(self.world.nodes.len())
        })
    }

    fn measure_join(&self, history: &History) -> Option<Measured> {
        let joiner = self.joiner(history)?;
        let noticed = history.said().into_iter().find_map(|(_, line)| match &line.event {
            CoordinatorEvent::Joined { nodes } if nodes.contains(&joiner) => Some(line.at),
            _ => None,
        })?;
        let world = self.next_world(history, |world| world.nodes.contains(&joiner))?;
        let adopted = latest(&world.nodes, |node| history.adopted(node, world.generation))?;
        let step = history.worker(joiner).find_map(|line| match line.event {
            WorkerEvent::Leaf { step, .. } => Some(step),
            _ => None,
        })?;
        let finished = latest(&world.nodes, |node| history.finished(node, step))?;
        Some(Measured {
            step: step.0,
            detected_ms: Some(millis(self.at, noticed)),
            world_ms: Some(millis(self.at, adopted)),
            step_ms: Some(millis(self.at, finished)),
            step_delay_ms: self.step_delay(history, &self.world.nodes, finished)?,
            ..self.blank(world.nodes.len())
        })
    }

    fn measure_drain(&self, history: &History) -> Option<Measured> {
        let victim = *self.victims.first()?;
        let noticed = history.said().into_iter().find_map(|(_, line)| match &line.event {
            CoordinatorEvent::Drain { nodes } if nodes.contains(&victim) => Some(line.at),
            _ => None,
        })?;
        let world = self.next_world(history, |world| !world.nodes.contains(&victim))?;
        let adopted = latest(&world.nodes, |node| history.adopted(node, world.generation))?;
        // The first step that it serves: a planned world names it.
        let step = world.step.unwrap_or(self.step);
        let finished = latest(&world.nodes, |node| history.finished(node, step))?;
        let (ended, _) = history.exited(victim)?;
        Some(Measured {
            step: step.0,
            detected_ms: Some(millis(self.at, noticed)),
            world_ms: Some(millis(self.at, adopted)),
            step_ms: Some(millis(self.at, finished)),
            recomputed_leaves: Some(self.computed_twice(history, finished)),
            left_ms: Some(millis(self.at, ended)),
            step_delay_ms: self.step_delay(history, &world.nodes, finished)?,
            ..self.blank(world.nodes.len())
        })
    }

    fn measure_all(&self, history: &History) -> Option<Measured> {
        let detected = latest(&self.victims, |node| history.exited(node).map(|(at, _)| at))?;
        let world = self.next_world(history, |world| world.is_restart)?;
        let adopted = latest(&world.nodes, |node| history.adopted(node, world.generation))?;
        let start = world.step?;
        let finished = latest(&world.nodes, |node| history.finished(node, start))?;
        let lost = self.reached(history).0.saturating_sub(start.0);
        let regained = match self.reached(history).0.checked_sub(1) {
            Some(last) if lost > 0 => {
                latest(&world.nodes, |node| history.finished(node, Step(last)))?
            }
            _ => adopted,
        };
        Some(Measured {
            detected_ms: Some(millis(self.at, detected)),
            world_ms: Some(millis(self.at, adopted)),
            step_ms: Some(millis(self.at, finished)),
            recompute_ms: Some(millis(adopted, regained)),
            lost_steps: lost,
            recovery_ms: Some(millis(self.at, finished)),
            ..self.blank(world.nodes.len())
        })
    }

    /// The highest boundary that a victim had applied when it was killed.
    pub(crate) fn reached(&self, history: &History) -> Step {
        self.victims.iter().map(|node| history.boundary_of(*node)).max().unwrap_or_default()
    }

    /// Leaves that more than one member of the world before computed from the fault until `end`.
    fn computed_twice(&self, history: &History, end: Timestamp) -> u64 {
        let mut seen = BTreeSet::new();
        let lines = self.world.nodes.iter().flat_map(|node| history.worker(*node));
        let leaves =
            lines.filter(|line| line.at >= self.at && line.at <= end).filter_map(|line| match line
                .event
            {
                WorkerEvent::Leaf { step, rank } => Some((step, rank)),
                _ => None,
            });
        leaves.filter(|leaf| !seen.insert(*leaf)).count() as u64
    }

    /// By how much the longest step on `nodes` that was under way between the fault and `end` was longer than the median of those
    /// just before it. A step's length is the time between its end, which is when the last of them had its sum, and the former one's.
    /// `None` until that is known; nothing inside if no step before was measured.
    fn step_delay(
        &self,
        history: &History,
        nodes: &[NodeId],
        end: Timestamp,
    ) -> Option<Option<f64>> {
        let ended = |step: u64| latest(nodes, |node| history.finished(node, Step(step)));
        let length =
            |step: u64| Some((ended(step)?, millis(ended(step.checked_sub(1)?)?, ended(step)?)));
        let first = self.step.0.saturating_sub(STEPS_BEFORE);
        let mut before: Vec<f64> = (first..self.step.0)
            .filter_map(length)
            .filter(|(at, _)| *at <= self.at)
            .map(|(_, length)| length)
            .collect();
        before.sort_by(f64::total_cmp);
        let Some(median) = before.get(before.len() / 2).copied() else { return Some(None) };
        let mut longest: f64 = 0.0;
        for step in self.step.0.saturating_sub(1).. {
            let Some((at, length)) = length(step) else { break };
            if at >= self.at {
                longest = longest.max(length);
            }
            if at >= end {
                return Some(Some(round((longest - median).max(0.0))));
            }
        }
        None
    }

    fn next_world(
        &self,
        history: &History,
        is_wanted: impl Fn(&WorldSeen) -> bool,
    ) -> Option<WorldSeen> {
        history
            .worlds()
            .into_iter()
            .find(|world| world.generation > self.world.generation && is_wanted(world))
    }

    fn blank(&self, members_after: usize) -> Measured {
        Measured {
            kind: self.kind,
            step: self.step.0,
            detected_ms: None,
            world_ms: None,
            step_ms: None,
            recompute_ms: None,
            lost_steps: 0,
            recovery_ms: None,
            recomputed_leaves: None,
            steps_meanwhile: None,
            left_ms: None,
            phases: None,
            step_delay_ms: None,
            members_before: self.world.nodes.len(),
            members_after,
        }
    }
}

/// When the last of `nodes` had it; `None` if one of them has it not, or there is none.
fn latest(nodes: &[NodeId], when: impl Fn(NodeId) -> Option<Timestamp>) -> Option<Timestamp> {
    let times: Option<Vec<Timestamp>> = nodes.iter().map(|node| when(*node)).collect();
    times?.into_iter().max()
}

/// When the first of `nodes` had it.
fn earliest(nodes: &[NodeId], when: impl Fn(NodeId) -> Option<Timestamp>) -> Option<Timestamp> {
    nodes.iter().filter_map(|node| when(*node)).min()
}

/// From `earlier` to `later`; zero if it is the other way round.
fn millis(earlier: Timestamp, later: Timestamp) -> f64 {
    round(later.since(earlier).as_secs_f64() * 1e3)
}

/// To microseconds: what is behind them is noise.
fn round(millis: f64) -> f64 {
    (millis * 1e3).round() / 1e3
}

/// Enough steps for a median.
const STEPS_BEFORE: u64 = 20;

#[cfg(test)]
mod tests {
    use types::Generation;

    use super::*;

    /// Workers 5, 6 and 7; 7 is killed at 100 ms in step 3, after its first leaf.
    const KILL: &str = r#"
        worker-7 {"event":"leaf","t_ns":95000000,"step":3,"rank":6}
        agent-4 {"event":"exited","t_ns":103000001,"worker":7,"noticed_ns":103000000,"cause":"killed by signal 9"}
        coordinator-1 {"event":"world","t_ns":120000000,"generation":2,"nodes":[5,6],"step":null}
        worker-5 {"event":"leaf","t_ns":110000000,"step":3,"rank":0}
        worker-5 {"event":"world","t_ns":125000000,"generation":2,"step":3}
        worker-6 {"event":"world","t_ns":130000000,"generation":2,"step":3}
        worker-5 {"event":"entered","t_ns":132000000,"generation":2}
        worker-6 {"event":"entered","t_ns":133000000,"generation":2}
        worker-6 {"event":"recompute","t_ns":131000000,"step":3,"rank":7}
        worker-6 {"event":"leaf","t_ns":190000000,"step":3,"rank":7}
        worker-5 {"event":"final","t_ns":194000000,"step":3}
        "#;

    fn fault(kind: Kind, nodes: &[u64], victims: &[u64]) -> Fault {
        let ids = |numbers: &[u64]| numbers.iter().copied().map(NodeId).collect();
        let world = WorldSeen {
            generation: Generation(1),
            nodes: ids(nodes),
            step: None,
            is_restart: false,
        };
        let at = Timestamp(100_000_000);
        Fault { kind, at, world, victims: ids(victims), step: Step(3), leader: None }
    }

    #[test]
    fn a_kill_is_measured_when_the_last_survivor_has_the_step() {
        let fault = fault(Kind::Kill, &[5, 6, 7], &[7]);
        assert_eq!(fault.measure(&History::of_lines(KILL)), None);
        let last = r#"worker-6 {"event":"final","t_ns":196000000,"step":3}"#;
        let measured = fault.measure(&History::of_lines(&format!("{KILL}{last}"))).unwrap();
        assert_eq!(measured.detected_ms, Some(3.0));
        assert_eq!(measured.world_ms, Some(30.0));
        assert_eq!(measured.step_ms, Some(96.0));
        assert_eq!(measured.recompute_ms, Some(60.0));
        assert_eq!(measured.recovery_ms, Some(36.0));
        assert_eq!(measured.recomputed_leaves, Some(1));
        assert_eq!((measured.members_before, measured.members_after), (3, 2));
        let phases = Phases { detect: 3.0, agree: 27.0, reconnect: 3.0, resend: 6.0 };
        assert_eq!(measured.phases, Some(phases));
    }

    #[test]
    fn a_kill_that_came_too_late_for_its_step_is_measured_on_the_next() {
        let earlier = KILL.replace("194000000", "99000000");
        let lines = r#"
            worker-6 {"event":"final","t_ns":99500000,"step":3}
            worker-5 {"event":"leaf","t_ns":210000000,"step":4,"rank":0}
            worker-5 {"event":"final","t_ns":220000000,"step":4}
            worker-6 {"event":"final","t_ns":221000000,"step":4}
            "#;
        let history = History::of_lines(&format!("{earlier}{lines}"));
        let measured = fault(Kind::Kill, &[5, 6, 7], &[7]).measure(&history).unwrap();
        assert_eq!((measured.step, measured.step_ms), (4, Some(121.0)));
        assert_eq!(measured.recovery_ms, Some(41.0));
    }

    #[test]
    fn another_coordinator_ends_the_time_without_a_leader() {
        let lines = r#"
            coordinator-1 {"event":"leader","t_ns":1000000,"term":1}
            coordinator-2 {"event":"leader","t_ns":400000000,"term":2}
            coordinator-2 {"event":"leader","t_ns":400000001,"nodes":[],"message":"coordinator 2 leads"}
            worker-5 {"event":"final","t_ns":150000000,"step":3}
            worker-5 {"event":"applied","t_ns":151000000,"boundary":4,"digest":"0000000000000000000000000000000000000000000000000000000000000000"}
            "#;
        let mut fault = fault(Kind::Leader, &[5], &[]);
        fault.leader = Some(1);
        let measured = fault.measure(&History::of_lines(lines)).unwrap();
        assert_eq!((measured.detected_ms, measured.step_ms), (Some(300.0), Some(50.0)));
        assert_eq!((measured.steps_meanwhile, measured.world_ms), (Some(1), None));
    }

    #[test]
    fn after_the_death_of_all_the_lost_steps_are_counted() {
        let zeros = "0".repeat(64);
        let lines = format!(
            r#"
            worker-7 {{"event":"applied","t_ns":90000000,"boundary":3,"digest":"{zeros}"}}
            agent-4 {{"event":"exited","t_ns":104000000,"worker":7,"noticed_ns":104000000,"cause":"killed by signal 9"}}
            coordinator-1 {{"event":"restart","t_ns":900000000,"generation":2,"nodes":[8],"step":1}}
            worker-8 {{"event":"world","t_ns":910000000,"generation":2,"step":1}}
            worker-8 {{"event":"final","t_ns":950000000,"step":1}}
            "#
        );
        let fault = fault(Kind::All, &[7], &[7]);
        assert_eq!(fault.measure(&History::of_lines(&lines)), None);
        let regained = r#"worker-8 {"event":"final","t_ns":990000000,"step":2}"#;
        let measured = fault.measure(&History::of_lines(&format!("{lines}{regained}"))).unwrap();
        assert_eq!((measured.lost_steps, measured.recompute_ms), (2, Some(80.0)));
        assert_eq!((measured.detected_ms, measured.recovery_ms), (Some(4.0), Some(850.0)));
    }
}
