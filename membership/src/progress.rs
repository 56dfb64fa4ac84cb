//! Who holds the others up, though it gives signs of life.
//!
//! A worker's heartbeats come from a thread of their own and prove only that this thread lives. So they say whose turn it is, and a member that
//! has had the turn for too long while others wait is hung. Times are measured here, by the leader's clock, from heartbeat to heartbeat;
//! the leader's own pauses don't count. Too long is:
//!
//! - in a leaf: [`LEAVES`] times the longest leaf that any member reported, and at least the hang timeout;
//! - outside of leaves, or before a worker's first leaf is done: the pause timeout;
//! - an engine that does not turn: the hang timeout.
//!
//! Others wait once one of them has done nothing else for the hang timeout: where all members are slow together, nobody is hung. If nobody
//! waits, the only one left is given [`ALONE`] times the pause timeout.
//!
//! Members that can't reach each other are found here too: of the pair that holds a step up, the one that most others miss too is out, a tie is lost by the
//! higher rank. One member's word alone evicts nobody: both must say so, or two of a third.
//!
//! Deliberately not here: silence (see `detector`), and what becomes of a verdict.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use types::{NodeId, Timestamp};

use crate::config::Timing;
use crate::job::Job;
use crate::message::{Cause, Heartbeat, Turn};

/// A member that is to be taken out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stalled {
    /// Who.
    pub node: NodeId,
    /// Why: [`Cause::Hung`] or [`Cause::CutOff`].
    pub cause: Cause,
    /// What was seen, for people.
    pub detail: String,
}

/// Watches the workers of one job for progress. Lost with the leader: the next one begins to measure anew.
#[derive(Debug)]
pub struct Progress {
    timing: Timing,
    workers: BTreeMap<NodeId, Watched>,
    /// When the leader looked last.
    looked: Timestamp,
}

#[derive(Debug)]
struct Watched {
    turn: Turn,
    progress: u64,
    turn_since: Timestamp,
    pulse: u64,
    pulse_since: Timestamp,
    longest_leaf: Option<Duration>,
    /// Whom it can't reach, and since when it says so.
    cut_off: BTreeMap<NodeId, Timestamp>,
}

impl Progress {
    /// Watches nobody yet.
    #[must_use]
    pub fn new(timing: Timing, now: Timestamp) -> Self {
        Self { timing, workers: BTreeMap::new(), looked: now }
    }

    /// A worker's heartbeat.
    pub fn handle_heartbeat(&mut self, now: Timestamp, node: NodeId, heartbeat: &Heartbeat) {
        let Heartbeat { turn, progress, pulse, longest_leaf, .. } = *heartbeat;
        let worker = self.workers.entry(node).or_insert_with(|| Watched {
            turn,
            progress,
            turn_since: now,
            pulse,
            pulse_since: now,
            longest_leaf,
            cut_off: BTreeMap::new(),
        });
        if (worker.turn, worker.progress) != (turn, progress) {
            (worker.turn, worker.progress, worker.turn_since) = (turn, progress, now);
        }
        if worker.pulse != pulse {
            (worker.pulse, worker.pulse_since) = (pulse, now);
        }
        worker.longest_leaf = longest_leaf;
        let named = || heartbeat.cut_off.iter().take(Heartbeat::CUT_OFF_MAX);
        worker.cut_off.retain(|peer, _| named().any(|other| other == peer));
        for peer in named() {
            worker.cut_off.entry(*peer).or_insert(now);
        }
    }

    /// Forgets a worker.
    pub fn handle_gone(&mut self, node: NodeId) {
        self.workers.remove(&node);
    }

    /// Looks at the job and says who is to be taken out; empty most of the time. Looks no more often than heartbeats come.
    pub fn evaluate(&mut self, now: Timestamp, job: &Job) -> Vec<Stalled> {
        let elapsed = now.since(self.looked);
        if elapsed < self.timing.heartbeat() {
            return Vec::new();
        }
        self.looked = now;
        self.workers.retain(|node, _| job.is_living(*node));
        if elapsed > self.timing.heartbeat() + self.timing.stall() {
            self.forgive(elapsed);
        }
        let members = members(job);
        let hung = self.hung(now, job, &members);
        if hung.is_empty() { self.cut_off(now, &members).into_iter().collect() } else { hung }
    }

    fn hung(&self, now: Timestamp, job: &Job, members: &[NodeId]) -> Vec<Stalled> {
        // Members that were told less by hand are not taken out between two of their own pulses.
        let hang = job.spec().hang_timeout.unwrap_or(self.timing.hang()).max(self.timing.target());
        let pause = job.spec().pause_timeout.unwrap_or(self.timing.pause()).max(hang);
        let longest = self.workers.values().filter_map(|w| w.longest_leaf).max();
        let leaf = longest.map_or(pause, |leaf| (leaf * LEAVES).max(hang));
        let waits = |w: &Watched| w.turn == Turn::Waiting && now.since(w.turn_since) >= hang;
        let is_awaited = job.nodes().keys().any(|node| self.workers.get(node).is_some_and(waits));
        let patience = if is_awaited { 1 } else { ALONE };
        let stalled = |node: NodeId| {
            let worker = self.workers.get(&node)?;
            let still = now.since(worker.pulse_since);
            if still >= hang {
                return Some((node, format!("its engine has stood still for {}", seconds(still))));
            }
            let held = now.since(worker.turn_since);
            let (deadline, what) = match worker.turn {
                Turn::Waiting => return None,
                Turn::Leaf if worker.longest_leaf.is_none() => (pause, "in its first leaf"),
                Turn::Leaf if !is_awaited => (pause, "in one leaf"),
                Turn::Leaf => (leaf, "in one leaf"),
                Turn::Between => (pause, "between two leaves"),
            };
            (held >= deadline * patience).then(|| {
                let longest = longest.map_or(String::new(), |leaf| {
                    format!(", the longest leaf so far took {}", seconds(leaf))
                });
                (node, format!("{what} for {}{longest}", seconds(held)))
            })
        };
        let stalled = members.iter().copied().filter_map(stalled);
        stalled.map(|(node, detail)| Stalled { node, cause: Cause::Hung, detail }).collect()
    }

    fn cut_off(&self, now: Timestamp, members: &[NodeId]) -> Option<Stalled> {
        let after = self.timing.suspicion();
        // Nothing is broken as long as steps go on.
        let has_turn = |w: &Watched| w.turn != Turn::Waiting || now.since(w.turn_since) < after;
        if members.iter().any(|node| self.workers.get(node).is_none_or(has_turn)) {
            return None;
        }
        let says = |a: NodeId, b: NodeId| {
            let since = self.workers.get(&a).and_then(|w| w.cut_off.get(&b));
            since.is_some_and(|since| now.since(*since) >= after)
        };
        let blamed_by = |b: NodeId| members.iter().filter(|a| says(**a, b)).count();
        let missed = |(rank, b): (usize, &NodeId)| {
            let others = members.iter().filter(|a| {
                (says(**a, *b) && (says(*b, **a) || blamed_by(*b) >= 2))
                    || (says(*b, **a) && blamed_by(**a) >= 2)
            });
            let others: Vec<NodeId> = others.copied().collect();
            Some((others.len(), rank, *b, *others.first()?))
        };
        let (_, _, node, other) = members.iter().enumerate().filter_map(missed).max()?;
        let detail = format!("it and node {other} have not reached each other for {after:?}");
        Some(Stalled { node, cause: Cause::CutOff, detail })
    }

    /// The leader itself paused: nobody could be heard meanwhile.
    fn forgive(&mut self, pause: Duration) {
        for worker in self.workers.values_mut() {
            let Watched { turn_since, pulse_since, cut_off, .. } = worker;
            let times = [turn_since, pulse_since].into_iter().chain(cut_off.values_mut());
            times.for_each(|since| *since = *since + pause);
        }
    }
}

/// The living members of all worlds that may still be in use, by rank, older worlds first: before a world serves, those of the former one are
/// waited for.
fn members(job: &Job) -> Vec<NodeId> {
    let mut seen = BTreeSet::new();
    let listed = job.worlds().flat_map(|world| world.nodes());
    listed.filter(|node| job.is_living(*node) && seen.insert(*node)).collect()
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// So many times the longest leaf of all members is no longer a slow leaf. A member at an eighth of the others' speed is still waited for.
const LEAVES: u32 = 8;
/// Nobody waits for the only member: it gets so many times longer.
const ALONE: u32 = 6;

#[cfg(test)]
mod tests;
