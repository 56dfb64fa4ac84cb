//! What the agent tells a person about the job as a whole.

use std::time::Duration;

use membership::Standing;
use types::Timestamp;

/// Says what a person who waits for the job would ask: whom it waits for, now and then; and once, what came of it.
#[derive(Debug, Default)]
pub(super) struct StandingNotes {
    /// Since when the job waits, when to say so again, and how long that pause was.
    waiting: Option<(Timestamp, Duration)>,
    is_finished: bool,
}

impl StandingNotes {
    /// Whether the coordinators said that the job is finished.
    pub(super) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// What the coordinators said.
    #[must_use]
    pub(super) fn hear(&mut self, now: Timestamp, standing: Option<Standing>) -> Option<Note> {
        match standing {
            Some(Standing::Waiting { members, min }) => {
                let (due, pause) = *self.waiting.get_or_insert((now + WAIT_NOTE, WAIT_NOTE));
                (due <= now).then(|| {
                    let next = (pause * 2).min(WAIT_NOTE_MAX);
                    self.waiting = Some((now + next, next));
                    Note::warning(format!(
                        "the job waits for members: {members} of at least {min} are here; start more workers, or end this and give a smaller --min-members"
                    ))
                })
            }
            Some(Standing::Finished { steps, digest }) => {
                self.waiting = None;
                let is_known = std::mem::replace(&mut self.is_finished, true);
                (!is_known).then(|| {
                    Note::news(format!(
                        "the job is finished: {steps} steps, digest of the state {digest}"
                    ))
                })
            }
            Some(Standing::Running | Standing::Stopped) | None => {
                self.waiting = None;
                None
            }
        }
    }
}

/// A line for a person.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) text: String,
    /// Somebody should do something about it.
    pub(super) is_warning: bool,
}

impl Note {
    fn warning(text: String) -> Self {
        Self { text, is_warning: true }
    }

    fn news(text: String) -> Self {
        Self { text, is_warning: false }
    }
}

/// How long a job waits before the agent says so; then after twice as long each time.
const WAIT_NOTE: Duration = Duration::from_secs(5);
/// The longest pause between two such notes.
const WAIT_NOTE_MAX: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use types::{Digest, Step};

    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// The seconds at which the notes of a job that waits so long are due.
    fn notes(standing: impl Fn(u64) -> Standing, seconds: u64) -> Vec<u64> {
        let mut machine = StandingNotes::default();
        let is_due = |second: &u64| {
            let now = Timestamp(0) + S * u32::try_from(*second).unwrap();
            machine.hear(now, Some(standing(*second))).is_some()
        };
        (0..seconds).filter(is_due).collect()
    }

    #[test]
    fn a_wait_is_told_after_five_seconds_and_then_ever_less_often() {
        let waits = |_| Standing::Waiting { members: 2, min: 5 };
        assert_eq!(notes(waits, 1000), [5, 15, 35, 75, 155, 315, 615, 915]);
        // A pause in between starts it anew.
        let halts = |s| if s == 20 { Standing::Running } else { waits(s) };
        assert_eq!(notes(halts, 60), [5, 15, 26, 36, 56]);
    }

    #[test]
    fn the_result_is_told_once_with_its_digest() {
        let finished = Standing::Finished { steps: Step(7), digest: Digest([0xab; 32]) };
        assert_eq!(notes(|_| finished, 100), [0]);
        let mut machine = StandingNotes::default();
        let note = machine.hear(Timestamp(0), Some(finished)).unwrap();
        assert!(note.text.contains("7 steps") && note.text.contains(&"ab".repeat(32)), "{note:?}");
        assert!(machine.is_finished());
    }
}
