//! [`TurnKeeper`]: whose turn it is in this worker, for the leader to see who holds the others up.
//!
//! Pure: the engine, and the simulation's worker, tell it what happens. The verdict is the leader's: see `membership`'s `Progress`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use membership::{Heartbeat, Turn};
use types::{NodeId, Timestamp};

/// What a heartbeat says of the program and the engine.
#[derive(Clone, Debug)]
pub struct TurnKeeper {
    /// Whose turn it is.
    pub turn: Turn,
    /// Grows whenever the turn changes or the training loop gets on.
    pub progress: u64,
    /// Grows with the engine's ticks.
    pub pulse: u64,
    leaf_since: Option<Timestamp>,
    leaves: VecDeque<Duration>,
    leaf_time: Option<Duration>,
    /// Since when there is no link to a peer.
    unlinked: BTreeMap<NodeId, Timestamp>,
}

impl TurnKeeper {
    /// The program has the word: it has not called yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            turn: Turn::Between,
            progress: 0,
            pulse: 0,
            leaf_since: None,
            leaves: VecDeque::new(),
            leaf_time: None,
            unlinked: BTreeMap::new(),
        }
    }

    /// The training loop got on, whoever has the turn.
    pub fn advance(&mut self) {
        self.progress += 1;
    }

    /// The turn goes to somebody else, or back to the same for something new.
    pub fn give(&mut self, turn: Turn) {
        self.turn = turn;
        self.progress += 1;
    }

    /// The program was given a virtual rank.
    pub fn begin_leaf(&mut self, now: Timestamp) {
        self.give(Turn::Leaf);
        self.leaf_since = Some(now);
    }

    /// The program contributed a leaf.
    pub fn end_leaf(&mut self, now: Timestamp) {
        self.give(Turn::Leaf);
        if let Some(since) = self.leaf_since.replace(now) {
            self.leaves.push_back(now.since(since));
            if self.leaves.len() > LEAVES_KEPT {
                self.leaves.pop_front();
            }
            let mut sorted: Vec<Duration> = self.leaves.iter().copied().collect();
            sorted.sort_unstable();
            self.leaf_time = Some(sorted[sorted.len() / 2]).filter(|_| sorted.len() >= LEAVES_MIN);
        }
    }

    /// The longest of the newest leaves.
    #[must_use]
    pub fn longest_leaf(&self) -> Option<Duration> {
        self.leaves.iter().max().copied()
    }

    /// The median of the newest leaves: how long a leaf takes this worker. `None` while there are too few to say.
    #[must_use]
    pub fn leaf_time(&self) -> Option<Duration> {
        self.leaf_time
    }

    /// Looks which of the peers have a link.
    pub fn handle_links(
        &mut self,
        now: Timestamp,
        peers: impl Iterator<Item = NodeId>,
        is_linked: impl Fn(NodeId) -> bool,
    ) {
        let missing: BTreeSet<NodeId> = peers.filter(|node| !is_linked(*node)).collect();
        self.unlinked.retain(|node, _| missing.contains(node));
        for node in missing {
            self.unlinked.entry(node).or_insert(now);
        }
    }

    /// Whom this worker has not reached for so long.
    #[must_use]
    pub fn cut_off(&self, now: Timestamp, after: Duration) -> Vec<NodeId> {
        let long = self.unlinked.iter().filter(|(_, since)| now.since(**since) >= after);
        long.map(|(node, _)| *node).take(Heartbeat::CUT_OFF_MAX).collect()
    }
}

impl Default for TurnKeeper {
    fn default() -> Self {
        Self::new()
    }
}

/// Enough to remember that some leaves are longer than others.
const LEAVES_KEPT: usize = 64;
/// A first leaf compiles, a second may warm up; of five the median is neither.
const LEAVES_MIN: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_longest_of_the_newest_leaves_is_told() {
        let mut keeper = TurnKeeper::new();
        assert_eq!(keeper.longest_leaf(), None);
        let mut now = 0;
        for leaf in [50, 10, 10] {
            keeper.begin_leaf(Timestamp(now));
            now += leaf * MS;
            keeper.end_leaf(Timestamp(now));
        }
        assert_eq!(keeper.longest_leaf(), Some(Duration::from_millis(50)));
        for _ in 0..LEAVES_KEPT {
            keeper.begin_leaf(Timestamp(now));
            now += 20 * MS;
            keeper.end_leaf(Timestamp(now));
        }
        assert_eq!(keeper.longest_leaf(), Some(Duration::from_millis(20)), "the 50 ms are old");
    }

    #[test]
    fn the_leaf_time_is_what_half_of_the_newest_leaves_take_whatever_the_first_took() {
        let mut keeper = TurnKeeper::new();
        let mut now = 0;
        let mut leaf = |keeper: &mut TurnKeeper, ms: u64| {
            keeper.begin_leaf(Timestamp(now));
            now += ms * MS;
            keeper.end_leaf(Timestamp(now));
            keeper.give(Turn::Waiting);
            now += 1000 * MS;
        };
        for ms in [5000, 900, 12, 10] {
            leaf(&mut keeper, ms);
            assert_eq!(keeper.leaf_time(), None);
        }
        leaf(&mut keeper, 11);
        assert_eq!(keeper.leaf_time(), Some(Duration::from_millis(12)));
        for _ in 0..=LEAVES_KEPT / 2 {
            leaf(&mut keeper, 30);
        }
        assert_eq!(keeper.leaf_time(), Some(Duration::from_millis(30)), "it follows");
    }

    #[test]
    fn a_peer_counts_as_cut_off_only_after_a_while_without_a_link() {
        let mut keeper = TurnKeeper::new();
        let peers = || [NodeId(1), NodeId(2)].into_iter();
        let after = Duration::from_millis(500);
        keeper.handle_links(Timestamp(0), peers(), |node| node == NodeId(1));
        assert_eq!(keeper.cut_off(Timestamp(499 * MS), after), []);
        assert_eq!(keeper.cut_off(Timestamp(500 * MS), after), [NodeId(2)]);
        keeper.handle_links(Timestamp(600 * MS), peers(), |_| true);
        keeper.handle_links(Timestamp(700 * MS), peers(), |_| false);
        assert_eq!(keeper.cut_off(Timestamp(1100 * MS), after), []);
    }
}
