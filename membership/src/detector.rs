//! Who has been silent for too long.
//!
//! It promises one verdict per node, and none because of its own delay: after a pause of the caller's loop everybody gets a fresh
//! deadline. Deliberately not here: other signs of death (an agent's word, a different state).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use types::{NodeId, Timestamp};

use crate::config::Timing;

/// Watches for silence. `handle_timeout` must be called at least each [`Timing::tick`].
#[derive(Debug)]
pub struct Detector {
    timing: Timing,
    deadlines: BTreeMap<NodeId, Timestamp>,
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
            deadlines: BTreeMap::new(),
            queue: BTreeSet::new(),
            last_turn: now,
            verdicts: VecDeque::new(),
        }
    }

    /// Watches a node, if it was not watched. It has the longer grace: it may first have to find this leader.
    pub fn handle_listed(&mut self, now: Timestamp, node: NodeId) {
        if !self.deadlines.contains_key(&node) {
            self.set(node, now + self.timing.grace());
        }
    }

    /// A watched node gave a sign of life.
    pub fn handle_heartbeat(&mut self, now: Timestamp, node: NodeId) {
        if self.deadlines.contains_key(&node) {
            self.set(node, now + self.timing.suspicion());
        }
    }

    /// Watches a node no longer.
    pub fn handle_gone(&mut self, node: NodeId) {
        if let Some(deadline) = self.deadlines.remove(&node) {
            self.queue.remove(&(deadline, node));
        }
    }

    /// Time has come, at the latest a tick after the last time.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        let pause = now.since(self.last_turn);
        self.last_turn = now;
        if pause > self.timing.stall() {
            let fresh = now + self.timing.suspicion();
            let early: Vec<NodeId> =
                self.queue.range(..(fresh, NodeId(0))).map(|(_, node)| *node).collect();
            early.into_iter().for_each(|node| self.set(node, fresh));
            return;
        }
        while let Some((deadline, node)) =
            self.queue.first().copied().filter(|(deadline, _)| *deadline <= now)
        {
            self.queue.remove(&(deadline, node));
            self.deadlines.remove(&node);
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
        if let Some(former) = self.deadlines.insert(node, deadline) {
            self.queue.remove(&(former, node));
        }
        self.queue.insert((deadline, node));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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

    #[test]
    fn a_silent_node_is_lost_once() {
        let mut detector = detector();
        detector.handle_heartbeat(at(100), NodeId(1));
        assert_eq!(run(&mut detector, 0, 2_900), [(600, NodeId(1))]);
        detector.handle_heartbeat(at(2_900), NodeId(1));
        assert_eq!(run(&mut detector, 2_900, 5_000), [(3_000, NodeId(2))]);
    }

    #[test]
    fn a_pause_of_its_own_gives_everybody_a_fresh_deadline() {
        let mut detector = detector();
        detector.handle_heartbeat(at(100), NodeId(1));
        assert!(run(&mut detector, 0, 500).is_empty());
        assert!(run(&mut detector, 900, 1_375).is_empty());
        assert_eq!(run(&mut detector, 1_400, 1_400), [(1_400, NodeId(1))]);
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
