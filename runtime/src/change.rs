//! [`ChangeKeeper`]: what a change of the world cost this member, for `ripstop explain`.
//!
//! Pure: the engine tells it what happens, and when.

use std::collections::VecDeque;

use membership::{Change, Cost, Heartbeat};
use types::{Generation, Timestamp};

use crate::step_cycle::Counters;

/// Measures from the arrival of a world to the end of its first step.
#[derive(Debug, Default)]
pub struct ChangeKeeper {
    open: Option<Open>,
    over: VecDeque<Change>,
}

#[derive(Debug)]
struct Open {
    generation: Generation,
    since: Timestamp,
    before: Counters,
    entered: Option<Timestamp>,
}

impl ChangeKeeper {
    /// Another world is the present one. The change to the one before, if it is not over, is forgotten: nothing was summed in it.
    pub fn handle_adopted(&mut self, now: Timestamp, generation: Generation, counters: Counters) {
        self.open = Some(Open { generation, since: now, before: counters, entered: None });
    }

    /// All members have entered it.
    pub fn handle_entered(&mut self, now: Timestamp, generation: Generation) {
        if let Some(open) = self.open.as_mut().filter(|open| open.generation == generation) {
            open.entered.get_or_insert(now);
        }
    }

    /// A step was summed.
    pub fn handle_ready(&mut self, now: Timestamp, counters: Counters) {
        let Some(Open { generation, since, before, entered }) = self.open.take() else { return };
        let cost = Cost {
            entering: entered.unwrap_or(now).since(since),
            stepping: now.since(since),
            recomputed_leaves: counters.recomputed_leaves.saturating_sub(before.recomputed_leaves),
            passed_chunks: counters.passed_finals.saturating_sub(before.passed_finals),
        };
        self.over.push_back(Change { generation, cost });
        if self.over.len() > Heartbeat::CHANGES_MAX {
            self.over.pop_front();
        }
    }

    /// The newest changes that are over, ascending.
    #[must_use]
    pub fn newest(&self) -> Vec<Change> {
        self.over.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000_000)
    }

    fn counters(leaves: u64) -> Counters {
        Counters { recomputed_leaves: leaves, ..Counters::default() }
    }

    #[test]
    fn a_change_is_over_with_the_first_step_and_counts_what_came_in_between() {
        let mut keeper = ChangeKeeper::default();
        keeper.handle_adopted(at(100), Generation(3), counters(7));
        assert_eq!(keeper.newest(), []);
        keeper.handle_entered(at(104), Generation(3));
        keeper.handle_entered(at(109), Generation(3));
        keeper.handle_ready(at(120), counters(9));
        let cost = keeper.newest().pop().unwrap().cost;
        assert_eq!(
            (cost.entering, cost.stepping),
            (Duration::from_millis(4), Duration::from_millis(20))
        );
        assert_eq!(cost.recomputed_leaves, 2);
        // The steps after it are no part of it.
        keeper.handle_ready(at(150), counters(30));
        assert_eq!(keeper.newest().pop().unwrap().cost, cost);
    }

    #[test]
    fn the_newest_few_are_told() {
        let mut keeper = ChangeKeeper::default();
        for generation in 1..=9 {
            keeper.handle_adopted(at(generation), Generation(generation), counters(0));
            keeper.handle_ready(at(generation), counters(0));
        }
        let told: Vec<u64> = keeper.newest().iter().map(|change| change.generation.0).collect();
        assert_eq!(told, [6, 7, 8, 9]);
    }

    #[test]
    fn a_world_in_which_nothing_was_summed_is_passed_over() {
        let mut keeper = ChangeKeeper::default();
        keeper.handle_adopted(at(1), Generation(3), counters(0));
        keeper.handle_adopted(at(5), Generation(4), counters(1));
        keeper.handle_entered(at(6), Generation(3));
        keeper.handle_ready(at(9), counters(1));
        let change = keeper.newest().pop().unwrap();
        assert_eq!((change.generation, change.cost.recomputed_leaves), (Generation(4), 0));
        assert_eq!(change.cost.entering, Duration::from_millis(4));
    }
}
