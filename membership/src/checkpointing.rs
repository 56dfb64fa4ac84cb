//! When a job's next checkpoint is due, and when an attempt at one is given up.
//!
//! One per job, at the leader. It also keeps the members' segment lists, which the log does not carry: they die with the leader,
//! and so does the attempt. Deliberately not here: bytes, stores, and what makes a checkpoint real, which the roster decides.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use types::{Attempt, NodeId, Step, Timestamp};

use crate::config::Timing;
use crate::job::{Job, Stage};
use crate::reports::Reports;

/// Drives the checkpoints of one job.
#[derive(Debug)]
pub struct Checkpointing {
    timing: Timing,
    due: Option<Timestamp>,
    /// Somebody asked for one that has not begun yet.
    is_asked: bool,
    failures: u32,
    open: Option<Attempt>,
    lists: BTreeMap<NodeId, Bytes>,
    /// When all members had reached the boundary to stage.
    reached_at: Option<Timestamp>,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointDecision {
    /// Begin one.
    Intend {
        /// Its number.
        attempt: Attempt,
        /// The boundary to stage.
        step: Step,
        /// Whether the job stops with it.
        is_last: bool,
    },
    /// Give the open one up.
    Abandon {
        /// Its number.
        attempt: Attempt,
        /// Why.
        reason: String,
    },
}

impl Checkpointing {
    /// Largest segment list of one member.
    pub const LIST_BYTES_MAX: usize = 4 << 20;

    /// Knows nothing yet.
    #[must_use]
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            due: None,
            is_asked: false,
            failures: 0,
            open: None,
            lists: BTreeMap::new(),
            reached_at: None,
        }
    }

    /// Keeps a member's segment list.
    pub fn handle_list(&mut self, attempt: Attempt, node: NodeId, list: Bytes) {
        if self.open == Some(attempt) {
            self.lists.insert(node, list);
        }
    }

    /// The next one is due at once: somebody asked for it.
    pub fn hasten(&mut self, now: Timestamp) {
        self.due = Some(now);
        self.is_asked = true;
        self.failures = 0;
    }

    /// The lists of all members in rank order, once all are here and the log has their receipts, of one state.
    #[must_use]
    pub fn receipts(&self, job: &Job) -> Option<Vec<(NodeId, Bytes)>> {
        let open = job
            .intent()
            .filter(|open| self.open == Some(open.intent.attempt) && open.is_complete())?;
        open.digest()?;
        open.intent
            .members
            .iter()
            .map(|node| Some((*node, self.lists.get(node)?.clone())))
            .collect()
    }

    /// Looks at the job and says what is due. `is_last`: all members are to leave, and nobody takes over.
    pub fn evaluate(
        &mut self,
        now: Timestamp,
        job: &Job,
        reports: &Reports,
        is_last: bool,
    ) -> Option<CheckpointDecision> {
        let every = job.spec().checkpoint_every?;
        let open = job.intent().map(|open| open.intent.attempt);
        if self.open != open {
            self.note_end(now, job, every);
            self.open = open;
        }
        match open {
            Some(attempt) => {
                let reason = self.give_up(now, job, reports, every)?;
                Some(CheckpointDecision::Abandon { attempt, reason })
            }
            None => self.begin(now, job, reports, (every, is_last)),
        }
    }

    fn note_end(&mut self, now: Timestamp, job: &Job, every: Duration) {
        self.lists.clear();
        self.reached_at = None;
        let Some(ended) = self.open else { return };
        if job.committed().is_some_and(|c| c.attempt == ended) {
            self.failures = 0;
            self.due = Some(now + every);
        } else {
            self.failures = self.failures.saturating_add(1);
            let pause = self.timing.target() * (1 << self.failures.min(BACKOFF_DOUBLINGS_MAX)) / 2;
            self.due = Some(now + pause.min(every.max(self.timing.target())));
        }
        if self.is_asked {
            self.due = Some(now);
        }
    }

    fn give_up(
        &mut self,
        now: Timestamp,
        job: &Job,
        reports: &Reports,
        every: Duration,
    ) -> Option<String> {
        let open = job.intent()?;
        if !open.receipts.is_empty() && open.digest().is_none() {
            return Some("members staged different states".to_owned());
        }
        let has_reached =
            |node: &NodeId| reports.boundary(job, *node).is_some_and(|at| at >= open.intent.step);
        if self.reached_at.is_none() && open.intent.members.iter().all(has_reached) {
            self.reached_at = Some(now);
        }
        let limit = ATTEMPT_MIN + every * 2;
        let late = self.reached_at.is_some_and(|at| now >= at + limit);
        late.then(|| {
            let missing =
                open.intent.members.iter().filter(|node| !open.receipts.contains_key(node));
            let missing: Vec<String> = missing.map(NodeId::to_string).collect();
            format!("no end within {limit:?}; receipts missing from: {}", missing.join(", "))
        })
    }

    fn begin(
        &mut self,
        now: Timestamp,
        job: &Job,
        reports: &Reports,
        (every, is_last): (Duration, bool),
    ) -> Option<CheckpointDecision> {
        let world = job.world().filter(|_| job.stage() == Stage::Running)?;
        let is_whole = world.nodes().all(|node| job.is_living(node));
        if !is_whole
            || !reports.is_in_effect(job)
            || !reports.has_all(job)
            || (world.held && !is_last)
        {
            return None;
        }
        if self.due.is_none() {
            self.due = Some(now + every);
        }
        let step = reports.ahead(job, self.timing);
        let is_final = job.spec().total_steps.is_some_and(|total| step >= total);
        // What can't wait for its turn only waits after a failure.
        let is_urgent = is_final || is_last;
        let may_begin = self.due.is_none_or(|due| now >= due) || (is_urgent && self.failures == 0);
        if !may_begin || job.is_saved_at(step) {
            return None;
        }
        self.is_asked = false;
        Some(CheckpointDecision::Intend { attempt: Attempt(job.attempt().0 + 1), step, is_last })
    }
}

/// Even a small checkpoint may meet a slow store.
const ATTEMPT_MIN: Duration = Duration::from_secs(60);
/// 2^5 halves of the recovery target: 16 s at one second; the interval bounds it as well.
const BACKOFF_DOUBLINGS_MAX: u32 = 5;
