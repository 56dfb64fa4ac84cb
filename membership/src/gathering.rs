//! Joiners that come together get in together, so that a storm of joins makes few worlds.
//!
//! Two waits, both bounded: before joiners are listed as followers, for others that come right behind them; and before level followers
//! enter, for those that will be level soon: as long again as the first of them took.

use std::collections::BTreeSet;

use types::{NodeId, Timestamp};

use crate::config::Timing;

/// Who is waited for.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    /// Joiners that no world lists, since when there are any, and since when they are just these.
    unlisted: BTreeSet<NodeId>,
    unlisted_since: Timestamp,
    quiet_since: Timestamp,
    /// Since when there are followers with a place to take, and since when one of them is level.
    following_since: Option<Timestamp>,
    level_since: Option<Timestamp>,
}

impl Gathering {
    /// Joiners that no world lists yet. `None`: a world that lists them is due; else when to ask again.
    pub(crate) fn list(
        &mut self,
        now: Timestamp,
        timing: Timing,
        unlisted: BTreeSet<NodeId>,
    ) -> Option<Timestamp> {
        if self.unlisted.is_empty() {
            self.unlisted_since = now;
        }
        if !unlisted.is_subset(&self.unlisted) {
            self.quiet_since = now;
        }
        self.unlisted = unlisted;
        let quiet = self.quiet_since + timing.gather();
        let due = quiet.min(self.unlisted_since + timing.gather() * GATHERS_MAX);
        (now < due).then_some(due)
    }

    /// Followers of the newest world: `level` of them are level, and `places` could enter. `None`: those that are level may enter now; else when
    /// to ask again.
    pub(crate) fn enter(
        &mut self,
        now: Timestamp,
        timing: Timing,
        level: usize,
        places: usize,
    ) -> Option<Timestamp> {
        if places == 0 {
            (self.following_since, self.level_since) = (None, None);
            return None;
        }
        let following_since = *self.following_since.get_or_insert(now);
        if level == 0 {
            self.level_since = None;
            return None;
        }
        let level_since = *self.level_since.get_or_insert(now);
        let due = level_since + level_since.since(following_since) + timing.gather();
        (level < places && now < due).then_some(due)
    }

    /// A world is made: whoever still follows is waited for anew.
    pub(crate) fn handle_world(&mut self) {
        *self = Self::default();
    }
}

/// However they come, joiners are listed after so many times the pause that ends a gathering.
const GATHERS_MAX: u32 = 16;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000_000)
    }

    fn timing() -> Timing {
        Timing::new(Duration::from_secs(1)).unwrap()
    }

    fn nodes(count: u64) -> BTreeSet<NodeId> {
        (1..=count).map(NodeId).collect()
    }

    #[test]
    fn joiners_are_listed_once_no_more_come_or_they_come_for_too_long() {
        let mut gathering = Gathering::default();
        assert_eq!(gathering.list(at(0), timing(), nodes(1)), Some(at(250)));
        assert_eq!(gathering.list(at(200), timing(), nodes(2)), Some(at(450)));
        assert_eq!(gathering.list(at(449), timing(), nodes(2)), Some(at(450)));
        assert_eq!(gathering.list(at(450), timing(), nodes(2)), None);
        gathering.handle_world();
        for count in 0..39 {
            assert!(gathering.list(at(1000 + count * 100), timing(), nodes(count + 1)).is_some());
        }
        assert_eq!(gathering.list(at(5000), timing(), nodes(41)), None, "after 4 s");
    }

    #[test]
    fn one_who_is_gone_again_starts_no_new_wait() {
        let mut gathering = Gathering::default();
        gathering.list(at(0), timing(), nodes(2));
        assert_eq!(gathering.list(at(200), timing(), nodes(1)), Some(at(250)));
    }

    #[test]
    fn level_followers_wait_for_the_others_as_long_again_as_the_first_of_them_took() {
        let mut gathering = Gathering::default();
        assert_eq!(gathering.enter(at(0), timing(), 0, 3), None);
        assert_eq!(gathering.enter(at(400), timing(), 1, 3), Some(at(1050)));
        assert_eq!(gathering.enter(at(1049), timing(), 2, 3), Some(at(1050)));
        assert_eq!(gathering.enter(at(1050), timing(), 2, 3), None);
        gathering.handle_world();
        assert_eq!(gathering.enter(at(2000), timing(), 0, 1), None);
        assert_eq!(gathering.enter(at(9000), timing(), 1, 1), None, "nobody is left to wait for");
    }
}
