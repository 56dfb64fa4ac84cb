//! What a leader knows beside the log, and its decisions. All of it is gone with its term.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use types::{Generation, JobId, NodeId, Term, Timestamp};

use crate::checkpointing::{CheckpointDecision, Checkpointing};
use crate::command::Command;
use crate::config::Timing;
use crate::coordinator::{Action, Coordinator};
use crate::detector::Detector;
use crate::formation::{Decision, Formation};
use crate::job::{Job, Stage};
use crate::message::{Cause, Change, FromCoordinator, JobSpec};
use crate::peer::{ConnectionKey, Role};
use crate::progress::{Progress, Stalled};
use crate::reports::Reports;
use crate::roster::{Reply, Touched};

/// A leader's memory.
#[derive(Debug)]
pub(super) struct Leading {
    pub(super) term: Term,
    pub(super) is_serving: bool,
    pub(super) detector: Detector,
    pub(super) jobs: BTreeMap<JobId, JobWatch>,
    pub(super) pending: BTreeMap<u64, Pending>,
    /// Coordinators whose seats are on their way into the log.
    pub(super) seating: BTreeSet<u64>,
    timing: Timing,
}

impl Leading {
    pub(super) fn new(term: Term, timing: Timing, now: Timestamp) -> Self {
        Self {
            term,
            is_serving: false,
            detector: Detector::new(timing, now),
            jobs: BTreeMap::new(),
            pending: BTreeMap::new(),
            seating: BTreeSet::new(),
            timing,
        }
    }

    pub(super) fn watch(&mut self, now: Timestamp, job: &JobId) -> &mut JobWatch {
        let timing = self.timing;
        self.jobs.entry(job.clone()).or_insert_with(|| JobWatch {
            formation: Formation::new(timing, now),
            checkpointing: Checkpointing::new(timing),
            reports: Reports::default(),
            progress: Progress::new(timing, now),
            below_since: None,
            busy: BTreeSet::new(),
            entering: None,
            settled: Generation(0),
            losing: BTreeSet::new(),
        })
    }
}

/// What a leader knows of one job.
#[derive(Debug)]
pub(super) struct JobWatch {
    pub(super) formation: Formation,
    pub(super) checkpointing: Checkpointing,
    pub(super) reports: Reports,
    pub(super) progress: Progress,
    /// Since when fewer than the minimum are there.
    pub(super) below_since: Option<Timestamp>,
    /// Decisions that are on their way into the log: one of a kind at a time.
    pub(super) busy: BTreeSet<Topic>,
    pub(super) entering: Option<Generation>,
    /// The newest world of which the log was told what the change cost.
    pub(super) settled: Generation,
    pub(super) losing: BTreeSet<NodeId>,
}

impl JobWatch {
    /// The end of a job that was too long below its minimum: all leave in good order.
    fn give_up(&mut self, now: Timestamp, job: &Job) -> Option<Command> {
        let JobSpec { min_members, min_timeout, .. } = *job.spec();
        let staying: Vec<NodeId> =
            job.nodes().keys().copied().filter(|node| !job.is_draining(*node)).collect();
        let is_below = !staying.is_empty() && staying.len() < min_members as usize;
        if !is_below || job.stage() == Stage::Finished {
            self.below_since = None;
            return None;
        }
        let since = *self.below_since.get_or_insert(now);
        let timeout = min_timeout.filter(|timeout| now.since(since) >= *timeout)?;
        self.below_since = None;
        let few = staying.len();
        let reason =
            format!("{few} of at least {min_members} members for {timeout:?} (--min-timeout)");
        Some(Command::Drain { job: job.spec().job.clone(), nodes: staying, reason })
    }
}

/// Kinds of decisions of which one at a time is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Topic {
    World,
    Checkpoint,
    Finish,
}

/// A command on its way.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) job: Option<JobId>,
    pub(super) purpose: Purpose,
    pub(super) since: Timestamp,
}

/// What for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// To know that all former entries are applied.
    Lead,
    /// A decision.
    Decide(Topic),
    /// All entered a world.
    Enter,
    /// A verdict; the peer that brought it hears that it is noted.
    Lose { nodes: Vec<NodeId>, reporter: Option<(ConnectionKey, u64)> },
    /// A drain; the peer that asked hears that it is noted.
    Note { key: ConnectionKey, sequence: u64 },
    /// Listing; a refusal is told.
    Join { key: ConnectionKey },
    /// A new node id, to be certified.
    Enroll { key: ConnectionKey, sequence: Option<u64>, role: Role, job: Option<JobId>, csr: Bytes },
    /// A coordinator's disk, as it was seen first.
    Seat { coordinator: u64 },
    /// A receipt or the like: nobody waits for it.
    Record,
}

impl Coordinator {
    /// Each tick of a serving leader.
    pub(super) fn tick(&mut self) {
        let now = self.now;
        let Some(leading) = self.leading.as_mut() else { return };
        let stale: Vec<u64> = {
            let is_stale = |p: &Pending| now.since(p.since) > self.timing.target() * STALE_TARGETS;
            leading.pending.iter().filter(|(_, p)| is_stale(p)).map(|(number, _)| *number).collect()
        };
        for number in stale {
            if let Some(pending) = leading.pending.remove(&number) {
                if let Purpose::Seat { coordinator } = pending.purpose {
                    leading.seating.remove(&coordinator);
                }
                clear(leading, now, &pending);
            }
        }
        if !leading.is_serving {
            return;
        }
        leading.detector.handle_timeout(now);
        let mut silent: BTreeMap<JobId, Vec<NodeId>> = BTreeMap::new();
        while let Some(node) = leading.detector.poll_verdict() {
            if let Some(job) = self.roster.job_of(node).filter(|job| job.is_living(node)) {
                silent.entry(job.spec().job.clone()).or_default().push(node);
            }
        }
        for (job, nodes) in silent {
            let nodes = nodes.into_iter().map(|node| (node, Cause::Silent)).collect();
            self.lose(&job, nodes, format!("for {:?}", self.timing.suspicion()), None);
        }
        self.dirty.extend(self.roster.jobs().keys().cloned());
    }

    /// Puts a verdict into the log.
    pub(super) fn lose(
        &mut self,
        job: &JobId,
        nodes: Vec<(NodeId, Cause)>,
        detail: String,
        reporter: Option<(ConnectionKey, u64)>,
    ) {
        let (now, term) = (self.now, self.term());
        let ids: Vec<NodeId> = nodes.iter().map(|(node, _)| *node).collect();
        let command = Command::Lose { job: job.clone(), nodes, detail, term };
        let purpose = Purpose::Lose { nodes: ids.clone(), reporter };
        if self.propose(command, Some(job.clone()), purpose)
            && let Some(leading) = self.leading.as_mut()
        {
            let watch = leading.watch(now, job);
            watch.formation.handle_loss(now);
            watch.losing.extend(ids);
        } else if let Some(leading) = self.leading.as_mut() {
            // Not taken: silence must be noticed again.
            ids.into_iter().for_each(|node| leading.detector.handle_listed(now, node));
        }
    }

    /// An entry was applied while leading.
    pub(super) fn follow_up(&mut self, pending: Option<Pending>, reply: Reply, touched: Touched) {
        let now = self.now;
        if let Some(pending) = pending {
            if let Some(leading) = self.leading.as_mut() {
                clear(leading, now, &pending);
            }
            self.resolve(pending, reply);
        }
        if !self.is_serving() {
            return;
        }
        match touched {
            Touched::Nothing | Touched::Coordinator(_) => {}
            Touched::Node(_, node) => {
                if let Some(key) = self.keys.get(&node).copied() {
                    self.sync(key);
                }
            }
            Touched::Job(job) => self.attend(&job),
            Touched::Everything => {
                let jobs: Vec<JobId> = self.roster.jobs().keys().cloned().collect();
                jobs.iter().for_each(|job| self.attend(job));
            }
        }
    }

    /// A job changed: whom to watch, whom to tell, what to decide.
    fn attend(&mut self, id: &JobId) {
        let now = self.now;
        let (Some(job), Some(leading)) = (self.roster.job(id), self.leading.as_mut()) else {
            return;
        };
        let watched = job.stage() != Stage::Finished;
        leading.watch(now, id);
        for node in job.nodes().keys() {
            if watched {
                leading.detector.handle_listed(now, *node);
            } else {
                leading.detector.handle_gone(*node);
            }
        }
        let of_job: Vec<ConnectionKey> = {
            let is_of_job =
                |c: &super::Connection| c.job.as_ref() == Some(id) || job.is_living(c.peer.node);
            self.connections.iter().filter(|(_, c)| is_of_job(c)).map(|(key, _)| *key).collect()
        };
        of_job.into_iter().for_each(|key| self.sync(key));
        self.dirty.insert(id.clone());
    }

    fn resolve(&mut self, pending: Pending, reply: Reply) {
        let now = self.now;
        match pending.purpose {
            Purpose::Lead => self.serve(),
            Purpose::Lose { nodes, reporter } => {
                if let Some(leading) = self.leading.as_mut() {
                    for node in &nodes {
                        leading.detector.handle_gone(*node);
                        if let Some(job) = &pending.job {
                            let watch = leading.watch(now, job);
                            watch.reports.handle_gone(*node);
                            watch.progress.handle_gone(*node);
                        }
                    }
                }
                if let Some((key, sequence)) = reporter {
                    self.send(key, FromCoordinator::Noted { sequence });
                }
            }
            Purpose::Note { key, sequence } => {
                let answer = match reply {
                    Reply::Refused { code, reason } => FromCoordinator::Refused { code, reason },
                    _ => FromCoordinator::Noted { sequence },
                };
                self.send(key, answer);
            }
            Purpose::Seat { coordinator } => {
                if let Some(leading) = self.leading.as_mut() {
                    leading.seating.remove(&coordinator);
                }
            }
            Purpose::Join { key } => {
                if let Reply::Refused { code, reason } = reply {
                    self.send(key, FromCoordinator::Refused { code, reason });
                }
            }
            Purpose::Enroll { key, sequence, role, job, csr } => match reply {
                Reply::Allocated { node } => {
                    self.actions.push_back(Action::SignCertificate {
                        key,
                        sequence,
                        node,
                        role,
                        job,
                        csr,
                    });
                }
                Reply::Refused { code, reason } => {
                    self.send(key, FromCoordinator::Refused { code, reason });
                }
                Reply::Done | Reply::Stale { .. } => {}
            },
            // What the log did not take is looked at again with the next tick: at once it would be decided alike, and go round for ever.
            Purpose::Decide(_) if matches!(reply, Reply::Stale { .. } | Reply::Refused { .. }) => {}
            Purpose::Decide(_) | Purpose::Enter | Purpose::Record => {
                self.dirty.extend(pending.job);
            }
        }
    }

    /// All that predecessors committed is applied: from here on it answers and decides.
    fn serve(&mut self) {
        let (now, term) = (self.now, self.term());
        let Some(leading) = self.leading.as_mut() else { return };
        leading.is_serving = true;
        leading.detector = Detector::new(self.timing, now);
        let keys: Vec<ConnectionKey> = self.connections.keys().copied().collect();
        for key in keys {
            self.send(key, FromCoordinator::Leading { term });
        }
        let (own, disk) = (self.config.id(), self.config.disk());
        self.seat(own, disk);
    }

    /// Decides what is due for a job.
    pub(super) fn evaluate(&mut self, id: &JobId) {
        let (now, term) = (self.now, self.term());
        if !self.is_serving() {
            return;
        }
        let (Some(job), Some(leading)) = (self.roster.job(id), self.leading.as_mut()) else {
            return;
        };
        let watch = leading.watch(now, id);
        if !watch.losing.is_empty() || watch.busy.contains(&Topic::World) {
            // What the log is about to say decides.
            return;
        }
        if let Some(divergence) = watch.reports.poll_diverged(job) {
            let nodes = divergence
                .nodes
                .into_iter()
                .filter(|n| job.is_living(*n))
                .map(|n| (n, Cause::Diverged));
            let nodes: Vec<_> = nodes.collect();
            if !nodes.is_empty() {
                return self.lose(id, nodes, divergence.detail, None);
            }
        }
        let stalled = watch.progress.evaluate(now, job);
        if !stalled.is_empty() {
            for Stalled { node, cause, detail } in stalled {
                self.lose(id, vec![(node, cause)], detail, None);
            }
            return;
        }
        if let Some(command) = watch.give_up(now, job) {
            return self.decide(id.clone(), Topic::World, command);
        }
        if let Some(decision) = watch.formation.evaluate(now, job, &watch.reports) {
            let id = id.clone();
            let command = match decision {
                Decision::Form(plan) => Command::FormWorld { job: id.clone(), plan, term },
                Decision::Leave(nodes) => Command::Leave { job: id.clone(), nodes, term },
                Decision::Stop => Command::Stop { job: id.clone(), term },
            };
            return self.decide(id, Topic::World, command);
        }
        let is_last = job.is_all_draining() && !watch.formation.waits_for_successor(now, job);
        let decision = watch.checkpointing.evaluate(now, job, &watch.reports, is_last);
        if let Some(change) = watch.reports.cost(job, job.settled().max(watch.settled)) {
            let Change { generation, cost } = change;
            watch.settled = generation;
            let command = Command::Settle { job: id.clone(), generation, cost };
            self.propose(command, Some(id.clone()), Purpose::Record);
            return;
        }
        let finished = job.spec().total_steps.filter(|total| {
            job.stage() == Stage::Running
                && watch.reports.is_in_effect(job)
                && job.is_saved_at(*total)
        });
        let finished = finished.and_then(|total| watch.reports.agreed(job, total));
        let lineage = job.lineage();
        if let Some(digest) = finished {
            let command = Command::Finish { job: id.clone(), lineage, digest, term };
            return self.decide(id.clone(), Topic::Finish, command);
        }
        let job = id.clone();
        match decision {
            Some(CheckpointDecision::Intend { attempt, step, is_last }) => {
                let command = Command::Intend { job, attempt, step, is_last, term };
                self.decide(id.clone(), Topic::Checkpoint, command);
            }
            Some(CheckpointDecision::Abandon { attempt, reason }) => {
                let command = Command::Abandon { job, attempt, reason };
                self.decide(id.clone(), Topic::Checkpoint, command);
            }
            None => {}
        }
    }

    /// Puts a decision into the log, unless one of its kind is on its way.
    fn decide(&mut self, job: JobId, topic: Topic, command: Command) {
        let now = self.now;
        let Some(leading) = self.leading.as_mut() else { return };
        if !leading.watch(now, &job).busy.insert(topic) {
            return;
        }
        if !self.propose(command, Some(job.clone()), Purpose::Decide(topic))
            && let Some(leading) = self.leading.as_mut()
        {
            leading.watch(now, &job).busy.remove(&topic);
        }
    }
}

/// A command is no longer on its way.
fn clear(leading: &mut Leading, now: Timestamp, pending: &Pending) {
    let Some(job) = &pending.job else { return };
    let watch = leading.watch(now, job);
    match &pending.purpose {
        Purpose::Decide(topic) => {
            watch.busy.remove(topic);
        }
        Purpose::Enter => watch.entering = None,
        Purpose::Lose { nodes, .. } => watch.losing.retain(|node| !nodes.contains(node)),
        _ => {}
    }
}

/// A proposal that did not come back for so many recovery targets was dropped on the way.
const STALE_TARGETS: u32 = 5;
