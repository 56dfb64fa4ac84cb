//! Who has been silent for too long.
//!
//! It promises one verdict per node, and none because of its own delay: after a pause of the caller's loop everybody gets a fresh
//! deadline. A node is given [`GAPS`] times the longest pause that it made lately between two signs of life, at least
//! [`Timing::suspicion`] and at most [`PATIENCE_MAX`] times that: where a machine is so crowded that heartbeats come late, silence means
//! less. Deliberately not here: other signs of death (an agent's word, a different state).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use types::{NodeId, Timestamp};

use crate::config::Timing;

/// Watches for silence. `handle_timeout` must be called at least each [`Timing::tick`].
#[derive(Debug)]
pub struct Detector {
    timing: Timing,
    nodes: BTreeMap<NodeId, Watched>,
    queue: BTreeSet<(Timestamp, NodeId)>,
    last_turn: Timestamp,
    verdicts: VecDeque<NodeId>,
}

impl Detector {
    /// Watches nobody yet.
    #[must_use]
    pub fn new(timing: Timing, now: Timestamp) -> Self {
        Self {
            timing,
            nodes: BTreeMap::new(),
            queue: BTreeSet::new(),
            last_turn: now,
            verdicts: VecDeque::new(),
        }
    }

    /// Watches a node, if it was not watched. It has the longer grace: it may first have to find this leader.
    pub fn handle_listed(&mut self, now: Timestamp, node: NodeId) {
        if !self.nodes.contains_key(&node) {
            // As if it had been late once: many that start together are late together.
            let watched = Watched {
                deadline: now + self.timing.grace(),
                heard: None,
                gap: self.timing.suspicion(),
            };
            self.queue.insert((watched.deadline, node));
            self.nodes.insert(node, watched);
        }
    }

    /// A watched node gave a sign of life.
    pub fn handle_heartbeat(&mut self, now: Timestamp, node: NodeId) {
        let Some(watched) = self.nodes.get_mut(&node) else { return };
        if let Some(heard) = watched.heard {
            watched.gap = now.since(heard).max(watched.gap * GAP_KEPT_OF_20 / 20);
        }
        watched.heard = Some(now);
        let patience = patience(self.timing, watched.gap);
        self.set(node, now + patience);
    }

    /// Watches a node no longer.
    pub fn handle_gone(&mut self, node: NodeId) {
        if let Some(watched) = self.nodes.remove(&node) {
            self.queue.remove(&(watched.deadline, node));
        }
    }

    /// Time has come, at the latest a tick after the last time.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        let pause = now.since(self.last_turn);
        self.last_turn = now;
        if pause > self.timing.stall() {
            let timing = self.timing;
            let fresh = |(node, watched): (&NodeId, &mut Watched)| {
                // What comes late now is late because of us.
                watched.heard = None;
                (*node, watched.deadline.max(now + patience(timing, watched.gap)))
            };
            let deadlines: Vec<(NodeId, Timestamp)> = self.nodes.iter_mut().map(fresh).collect();
            deadlines.into_iter().for_each(|(node, deadline)| self.set(node, deadline));
            return;
        }
        while let Some((deadline, node)) =
            self.queue.first().copied().filter(|(deadline, _)| *deadline <= now)
        {
            self.queue.remove(&(deadline, node));
            self.nodes.remove(&node);
            self.verdicts.push_back(node);
        }
    }

    /// When the next deadline passes.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.queue.first().map(|(deadline, _)| *deadline)
    }

    /// A node that was silent for too long; it is watched no longer.
    pub fn poll_verdict(&mut self) -> Option<NodeId> {
        self.verdicts.pop_front()
    }

    fn set(&mut self, node: NodeId, deadline: Timestamp) {
        let Some(watched) = self.nodes.get_mut(&node) else { return };
        self.queue.remove(&(watched.deadline, node));
        watched.deadline = deadline;
        self.queue.insert((deadline, node));
    }
}

#[derive(Debug)]
struct Watched {
    deadline: Timestamp,
    /// The newest sign of life.
    heard: Option<Timestamp>,
    /// The longest pause between two of them; it is forgotten step by step.
    gap: Duration,
}

fn patience(timing: Timing, gap: Duration) -> Duration {
    let least = timing.suspicion();
    (gap * GAPS).clamp(least, least * PATIENCE_MAX)
}

/// So many times its longest pause a node may be silent. With heartbeats that come when they should this is less than the least.
const GAPS: u32 = 3;
/// And never longer than so many times the least.
const PATIENCE_MAX: u32 = 8;
/// With each sign of life a longer pause before it counts so much less: two seconds of heartbeats make a third of it.
const GAP_KEPT_OF_20: u32 = 19;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000_000)
    }

    fn run(detector: &mut Detector, from: u64, to: u64) -> Vec<(u64, NodeId)> {
        let mut verdicts = Vec::new();
        for ms in (from..=to).step_by(25) {
            detector.handle_timeout(at(ms));
            verdicts.extend(std::iter::from_fn(|| detector.poll_verdict()).map(|node| (ms, node)));
        }
        verdicts
    }

    fn detector() -> Detector {
        let mut detector = Detector::new(Timing::new(Duration::from_secs(1)).unwrap(), at(0));
        detector.handle_listed(at(0), NodeId(1));
        detector.handle_listed(at(0), NodeId(2));
        detector
    }

    /// Heartbeats of node 1 so far apart, and nothing after `to`. When is it lost?
    fn lost_after(detector: &mut Detector, gap: u64, from: u64, to: u64) -> u64 {
        let mut last = from;
        for ms in (from..=to).step_by(gap as usize) {
            assert!(run(detector, last, ms).is_empty(), "while it lives");
            detector.handle_heartbeat(at(ms), NodeId(1));
            detector.handle_heartbeat(at(ms), NodeId(2));
            last = ms;
        }
        detector.handle_gone(NodeId(2));
        let [(lost, NodeId(1))] = run(detector, last, last + 20_000)[..] else { panic!() };
        lost - last
    }

    #[test]
    fn a_silent_node_is_lost_once() {
        let mut detector = detector();
        detector.handle_heartbeat(at(100), NodeId(1));
        assert_eq!(run(&mut detector, 0, 2_900), [(1_600, NodeId(1))], "it is new");
        detector.handle_heartbeat(at(2_900), NodeId(1));
        assert_eq!(run(&mut detector, 2_900, 5_000), [(3_000, NodeId(2))]);
    }

    #[test]
    fn who_was_punctual_for_three_seconds_is_lost_after_half_a_recovery_target() {
        assert_eq!(lost_after(&mut detector(), 100, 100, 3_100), 500);
    }

    #[test]
    fn who_is_late_for_want_of_a_processor_is_given_longer_but_not_for_ever() {
        assert_eq!(lost_after(&mut detector(), 300, 300, 6_000), 900);
        assert_eq!(lost_after(&mut detector(), 1_200, 1_200, 12_000), 3_600);
        let mut late = detector();
        assert_eq!(lost_after(&mut late, 1_400, 1_400, 14_000), 4_000, "at most");
        // Once it is punctual again this is forgotten.
        let mut late = detector();
        for ms in (0..10_000).step_by(1_000) {
            assert!(run(&mut late, ms, ms + 1_000).is_empty());
            late.handle_heartbeat(at(ms + 1_000), NodeId(1));
            late.handle_heartbeat(at(ms + 1_000), NodeId(2));
        }
        assert_eq!(lost_after(&mut late, 100, 10_100, 14_100), 500);
    }

    #[test]
    fn a_pause_of_its_own_gives_everybody_a_fresh_deadline() {
        let mut detector = detector();
        detector.handle_heartbeat(at(100), NodeId(1));
        assert!(run(&mut detector, 0, 1_000).is_empty());
        assert!(run(&mut detector, 1_500, 2_975).is_empty());
        assert_eq!(run(&mut detector, 3_000, 3_000), [(3_000, NodeId(1)), (3_000, NodeId(2))]);
    }

    #[test]
    fn who_is_gone_is_not_watched() {
        let mut detector = detector();
        detector.handle_gone(NodeId(1));
        detector.handle_gone(NodeId(2));
        assert!(run(&mut detector, 0, 5_000).is_empty());
        assert_eq!(detector.poll_timeout(), None);
    }
}
