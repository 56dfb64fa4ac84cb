//! The raft log: what of it must be durable, and the part held in memory.
//!
//! A [`LogWrite`] is one transaction; [`RecoveredLog::record`] says what it does to the stored log, and the disk, the tests
//! and a restart all use that one function. [`Log`] is the copy that raft reads from: it holds only what is durable already,
//! and keeps a tail behind its image so that a slow coordinator catches up without being sent the image.
//! Deliberately not here: raft itself and any file.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use types::Term;

/// What must be made durable, in one transaction, before `handle_persisted(number)`.
///
/// The order within is: cut, image, entries, hard state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogWrite {
    /// Cut the stored entries whose index is at least this, before anything else.
    pub truncate_from: Option<u64>,
    /// Replaces the stored image and all entries up to its index; entries after it stay.
    pub image: Option<LogImage>,
    /// Entries to append, without a gap to what is stored.
    pub entries: Vec<LogEntry>,
    /// Replaces the stored hard state.
    pub hard_state: Option<HardState>,
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// Its place; the first image stands at 1, the first entry at 2.
    pub index: u64,
    /// The term of the leader that made it.
    pub term: Term,
    /// [`LogEntry::NORMAL`]; other kinds are kept for changes of the coordinators.
    pub kind: u8,
    /// What was proposed; empty for the entry that a new leader begins its term with.
    pub data: Bytes,
    /// What the proposer gave along, at most 64 bytes.
    pub context: Bytes,
}

/// Raft's small durable state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardState {
    /// The newest term known.
    pub term: Term,
    /// Who got this coordinator's vote in that term; 0 for nobody.
    pub vote: u64,
    /// The highest index known to be committed; may lag behind.
    pub commit: u64,
}

/// The state machine's compacted state, in place of all entries up to `index`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogImage {
    /// The last entry that the image includes.
    pub index: u64,
    /// That entry's term.
    pub term: Term,
    /// The coordinators that vote, ascending.
    pub voters: Vec<u64>,
    /// Coordinators that only listen; none in this version.
    pub learners: Vec<u64>,
    /// The state machine's own bytes; empty for the first image, at index 1.
    pub data: Bytes,
}

/// The log as it lies on the disk: what a restart begins with. The default is an empty disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveredLog {
    /// The newest hard state.
    pub hard_state: HardState,
    /// The newest image; `None` only on an empty disk.
    pub image: Option<LogImage>,
    /// The entries after the image, without a gap.
    pub entries: Vec<LogEntry>,
}

/// A write that does not fit the stored log, or a log that does not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogGap {
    /// Entries would leave a gap, or overwrite what was not cut.
    #[error("entry {index} does not follow entry {last}")]
    Entry {
        /// The entry that does not fit.
        index: u64,
        /// The last stored index.
        last: u64,
    },
    /// Entries without an image before them.
    #[error("there are entries from {index} on, but no log image before them")]
    NoImage {
        /// The first entry.
        index: u64,
    },
    /// An image older than the stored one.
    #[error("log image {index} is older than the stored one at {stored}")]
    Image {
        /// The image's index.
        index: u64,
        /// The stored image's index.
        stored: u64,
    },
    /// The log ends before what it says was committed.
    #[error("entry {commit} was committed, but the log ends at {last}")]
    Commit {
        /// The committed index.
        commit: u64,
        /// The last stored index.
        last: u64,
    },
}

/// The durable log as raft reads it.
///
/// Invariant: `truncated` ≤ `image.index` ≤ last index, and `entries` run from `truncated + 1` without a gap.
#[derive(Debug)]
pub(crate) struct Log {
    hard_state: HardState,
    image: LogImage,
    truncated: (u64, Term),
    entries: VecDeque<LogEntry>,
}

impl LogWrite {
    /// Whether there is nothing to make durable.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl LogEntry {
    /// The kind of an entry for the state machine.
    pub const NORMAL: u8 = 0;
}

impl LogImage {
    /// The index of the image that every coordinator starts with on an empty disk.
    pub const FIRST_INDEX: u64 = 1;

    /// The image that every coordinator starts with on an empty disk: no state, and the configured voters. All of them make
    /// the same one, so nobody needs to be told.
    #[must_use]
    pub fn first(mut voters: Vec<u64>) -> Self {
        voters.sort_unstable();
        voters.dedup();
        Self {
            index: Self::FIRST_INDEX,
            term: Term(1),
            voters,
            learners: Vec::new(),
            data: Bytes::new(),
        }
    }
}

impl RecoveredLog {
    /// The last index that is stored; 0 on an empty disk.
    #[must_use]
    pub fn last_index(&self) -> u64 {
        let image = self.image.as_ref().map_or(0, |image| image.index);
        self.entries.last().map_or(image, |entry| entry.index)
    }

    /// The term of the stored entry at `index`, if it is known.
    #[must_use]
    pub fn term(&self, index: u64) -> Option<Term> {
        if let Some(image) = self.image.as_ref().filter(|image| image.index == index) {
            return Some(image.term);
        }
        let first = self.entries.first()?.index;
        let place = usize::try_from(index.checked_sub(first)?).ok()?;
        self.entries.get(place).map(|entry| entry.term)
    }

    /// Carries out one write.
    ///
    /// # Errors
    /// If it does not fit what is stored; the log is then as far as the write got.
    pub fn record(&mut self, write: &LogWrite) -> Result<(), LogGap> {
        if let Some(from) = write.truncate_from {
            let kept = self.entries.partition_point(|entry| entry.index < from);
            self.entries.truncate(kept);
        }
        if let Some(image) = &write.image {
            if let Some(stored) = self.image.as_ref().filter(|stored| stored.index > image.index) {
                return Err(LogGap::Image { index: image.index, stored: stored.index });
            }
            let covered = self.entries.partition_point(|entry| entry.index <= image.index);
            self.entries.drain(..covered);
            if let Some(next) = self.entries.first().filter(|next| next.index != image.index + 1) {
                return Err(LogGap::Entry { index: next.index, last: image.index });
            }
            self.image = Some(image.clone());
        }
        for entry in &write.entries {
            if self.image.is_none() {
                return Err(LogGap::NoImage { index: entry.index });
            }
            let last = self.last_index();
            if entry.index != last + 1 {
                return Err(LogGap::Entry { index: entry.index, last });
            }
            self.entries.push(entry.clone());
        }
        self.hard_state = write.hard_state.unwrap_or(self.hard_state);
        Ok(())
    }

    /// Checks that the log holds together, as [`Consensus`](crate::consensus::Consensus) needs it.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), LogGap> {
        let Some(image) = &self.image else {
            return self
                .entries
                .first()
                .map_or(Ok(()), |entry| Err(LogGap::NoImage { index: entry.index }));
        };
        let mut last = image.index;
        for entry in &self.entries {
            if entry.index != last + 1 {
                return Err(LogGap::Entry { index: entry.index, last });
            }
            last = entry.index;
        }
        if self.hard_state.commit > last {
            return Err(LogGap::Commit { commit: self.hard_state.commit, last });
        }
        Ok(())
    }
}

impl Log {
    /// The log over a disk's content, which starts with an image and has passed [`RecoveredLog::check`].
    pub(crate) fn new(image: LogImage, entries: Vec<LogEntry>, hard_state: HardState) -> Self {
        let mut log = Self {
            hard_state,
            truncated: (image.index, image.term),
            image,
            entries: entries.into(),
        };
        log.hard_state.term =
            log.hard_state.term.max(log.term(log.last_index()).unwrap_or_default());
        // A commit index is not always made durable by itself; the image never holds more than was committed.
        log.hard_state.commit = log.hard_state.commit.max(log.image.index);
        log
    }

    pub(crate) fn hard_state(&self) -> HardState {
        self.hard_state
    }

    pub(crate) fn image(&self) -> &LogImage {
        &self.image
    }

    pub(crate) fn first_index(&self) -> u64 {
        self.truncated.0 + 1
    }

    pub(crate) fn last_index(&self) -> u64 {
        self.entries.back().map_or(self.truncated.0, |entry| entry.index)
    }

    /// The term at `index`, known from the truncated index on.
    pub(crate) fn term(&self, index: u64) -> Option<Term> {
        if index == self.truncated.0 {
            return Some(self.truncated.1);
        }
        self.place(index).and_then(|place| self.entries.get(place)).map(|entry| entry.term)
    }

    /// The entries in `low..high`, as far as they are held.
    pub(crate) fn range(&self, low: u64, high: u64) -> impl Iterator<Item = &LogEntry> {
        let from = self.place(low).unwrap_or(self.entries.len());
        self.entries.iter().skip(from).take_while(move |entry| entry.index < high)
    }

    /// Takes over a write that is durable now. The image of a compaction leaves `tail` entries before it in memory.
    pub(crate) fn record(&mut self, write: LogWrite, tail: u64) {
        if let Some(from) = write.truncate_from {
            assert!(
                from > self.truncated.0,
                "raft cut entry {from}, but the log is compacted up to {}",
                self.truncated.0
            );
            while self.last_index() >= from && self.entries.pop_back().is_some() {}
        }
        if let Some(image) = write.image {
            self.replace_image(image, tail);
        }
        for entry in write.entries {
            assert!(
                entry.index == self.last_index() + 1,
                "raft left a gap before entry {}",
                entry.index
            );
            self.entries.push_back(entry);
        }
        self.hard_state = write.hard_state.unwrap_or(self.hard_state);
    }

    /// Raft's commit index moved without a write.
    pub(crate) fn commit_to(&mut self, commit: u64) {
        self.hard_state.commit = self.hard_state.commit.max(commit);
    }

    fn replace_image(&mut self, image: LogImage, tail: u64) {
        if self.term(image.index) == Some(image.term) {
            let end = image.index.saturating_sub(tail);
            while let Some(entry) = self.entries.pop_front_if(|entry| entry.index <= end) {
                self.truncated = (entry.index, entry.term);
            }
        } else {
            // The image of another coordinator: what is held here before it says nothing about what comes after it.
            self.entries.clear();
            self.truncated = (image.index, image.term);
        }
        self.image = image;
    }

    fn place(&self, index: u64) -> Option<usize> {
        usize::try_from(index.checked_sub(self.first_index())?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u64, term: u64) -> LogEntry {
        LogEntry {
            index,
            term: Term(term),
            kind: LogEntry::NORMAL,
            data: Bytes::from_static(b"x"),
            context: Bytes::new(),
        }
    }

    fn image(index: u64, term: u64) -> LogImage {
        LogImage { index, term: Term(term), ..LogImage::first(vec![1]) }
    }

    fn stored(last: u64) -> RecoveredLog {
        let entries = (2..=last).map(|index| entry(index, 1)).collect();
        RecoveredLog { hard_state: HardState::default(), image: Some(image(1, 1)), entries }
    }

    #[test]
    fn a_cut_removes_the_tail_before_new_entries_are_added() {
        let mut log = stored(6);
        let write = LogWrite {
            truncate_from: Some(4),
            entries: vec![entry(4, 2), entry(5, 2)],
            ..LogWrite::default()
        };
        log.record(&write).unwrap();
        assert_eq!((log.last_index(), log.term(3), log.term(5)), (5, Some(Term(1)), Some(Term(2))));
        assert_eq!(log.check(), Ok(()));
    }

    #[test]
    fn an_image_takes_the_place_of_the_entries_up_to_it() {
        let mut log = stored(6);
        log.record(&LogWrite { image: Some(image(4, 1)), ..LogWrite::default() }).unwrap();
        assert_eq!(log.entries.iter().map(|entry| entry.index).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(log.term(4), Some(Term(1)));
    }

    #[test]
    fn gaps_are_refused() {
        let gap = LogWrite { entries: vec![entry(9, 1)], ..LogWrite::default() };
        assert_eq!(stored(6).record(&gap), Err(LogGap::Entry { index: 9, last: 6 }));
        assert_eq!(RecoveredLog::default().record(&gap), Err(LogGap::NoImage { index: 9 }));
        let old = LogWrite { image: Some(image(0, 1)), ..LogWrite::default() };
        assert_eq!(stored(6).record(&old), Err(LogGap::Image { index: 0, stored: 1 }));
        let mut behind = stored(6);
        behind.hard_state.commit = 7;
        assert_eq!(behind.check(), Err(LogGap::Commit { commit: 7, last: 6 }));
    }

    #[test]
    fn compaction_keeps_a_tail_in_memory_and_a_foreign_image_keeps_nothing() {
        let recovered = stored(100);
        let mut log = Log::new(recovered.image.unwrap(), recovered.entries, recovered.hard_state);
        log.record(LogWrite { image: Some(image(90, 1)), ..LogWrite::default() }, 20);
        assert_eq!((log.first_index(), log.last_index(), log.term(70)), (71, 100, Some(Term(1))));
        assert_eq!(log.range(99, 101).count(), 2);
        log.record(LogWrite { image: Some(image(200, 3)), ..LogWrite::default() }, 20);
        assert_eq!((log.first_index(), log.last_index(), log.term(200)), (201, 200, Some(Term(3))));
    }
}
