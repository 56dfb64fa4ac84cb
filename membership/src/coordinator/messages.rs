//! What a serving leader does with each message.

use bytes::Bytes;
use types::{Attempt, JobId, NodeId};

use crate::checkpointing::Checkpointing;
use crate::command::{Command, ReceiptRoot};
use crate::coordinator::Coordinator;
use crate::coordinator::watch::Purpose;
use crate::job::{Job, Stage, USAGE};
use crate::message::{Cause, FromCoordinator, Heartbeat, Join, ToCoordinator};
use crate::peer::{Peer, Role};

impl Coordinator {
    /// Answers a message, or puts it into the log.
    pub(super) fn answer(&mut self, peer: &Peer, message: ToCoordinator) {
        match message {
            ToCoordinator::Join(join) => self.answer_join(peer, join),
            ToCoordinator::Heartbeat(heartbeat) => self.answer_heartbeat(peer, heartbeat),
            ToCoordinator::Lost { node, cause, sequence } => {
                self.answer_lost(peer, (node, cause), sequence);
            }
            ToCoordinator::Drain { nodes, job, reason, sequence } => {
                self.answer_drain(peer, (nodes, job, reason), sequence);
            }
            ToCoordinator::Receipt { attempt, lineage, digest, root, segments } => {
                self.answer_receipt(peer, attempt, ReceiptRoot { lineage, digest, root }, segments);
            }
            ToCoordinator::Published { attempt, manifest, hash } => {
                if let Some((job, true)) = self.open_attempt(peer, attempt) {
                    if manifest.len() > TEXT_MAX {
                        let reason = "the manifest's key is too long".to_owned();
                        self.record(Command::Abandon { job: job.clone(), attempt, reason }, job);
                        return;
                    }
                    self.record(Command::Commit { job: job.clone(), attempt, manifest, hash }, job);
                }
            }
            ToCoordinator::CheckpointFailed { attempt, reason } => {
                if let Some((job, _)) = self.open_attempt(peer, attempt) {
                    let reason = format!("node {}: {}", peer.node, clip(reason));
                    self.record(Command::Abandon { job: job.clone(), attempt, reason }, job);
                }
            }
            ToCoordinator::EnrollWorker { job, csr, sequence } => {
                self.answer_enroll(peer, job, csr, sequence);
            }
            ToCoordinator::AskJob { job, nodes, sequence } => {
                let known = self.roster.job(&job).filter(|_| peer.may_speak_for(&job));
                let verdict = |node: NodeId| {
                    let cause = known?.gone(node).filter(|cause| cause.is_verdict())?;
                    Some((node, cause))
                };
                let evicted = nodes.into_iter().take(DRAIN_MAX).filter_map(verdict).collect();
                let standing = known.map(Job::standing);
                self.send(peer.key, FromCoordinator::JobNews { sequence, evicted, standing });
            }
            ToCoordinator::Replace { coordinator, sequence } => {
                self.answer_replace(peer, coordinator, sequence);
            }
            ToCoordinator::Scale { job, min, max, sequence } => {
                if self.may_order(peer, &job) {
                    let command = Command::Scale { job: job.clone(), min, max };
                    let purpose = Purpose::Note { key: peer.key, sequence };
                    self.propose(command, Some(job), purpose);
                }
            }
            ToCoordinator::Checkpoint { job, sequence } => {
                self.answer_checkpoint(peer, &job, sequence);
            }
            ToCoordinator::Status { job, sequence } => {
                let mut status = self.status();
                let is_wanted =
                    |of: &JobId| job.as_ref().is_none_or(|job| job == of) && peer.may_speak_for(of);
                status.jobs.retain(|status| is_wanted(&status.job));
                self.send(peer.key, FromCoordinator::Status { sequence, status: Box::new(status) });
            }
            ToCoordinator::Events { job, since, sequence } => {
                let job = job.or_else(|| peer.job.clone());
                let allowed = job.as_ref().is_none_or(|job| peer.may_speak_for(job));
                let (events, next) = self.roster.events(job.as_ref(), since, EVENTS_PAGE);
                let (events, next) = if allowed { (events, next) } else { (Vec::new(), since) };
                self.send(peer.key, FromCoordinator::Events { sequence, events, next });
            }
        }
    }

    fn answer_join(&mut self, peer: &Peer, join: Box<Join>) {
        let job = join.spec.job.clone();
        if peer.role != Role::Worker || !peer.may_speak_for(&job) {
            let role = peer.role.name();
            let reason = format!(
                "this certificate is {role} {}'s, and not good for joining job {job}",
                peer.node
            );
            return self.send(peer.key, FromCoordinator::Refused { code: NO_PERMISSION, reason });
        }
        if !is_bounded(&join) {
            let reason = format!(
                "a join has at most {FINGERPRINT_MAX} fingerprint parts and texts of {TEXT_MAX} bytes"
            );
            return self.send(peer.key, FromCoordinator::Refused { code: USAGE, reason });
        }
        if let Some(connection) = self.connections.get_mut(&peer.key) {
            connection.job = Some(job.clone());
            // Asked again, told again.
            connection.told.is_joined = false;
            connection.told.is_released = false;
        }
        let is_known = self.roster.job(&job).is_some_and(|known| {
            known.is_living(peer.node)
                || known.gone(peer.node).is_some()
                || known.stage() == Stage::Finished
        });
        if is_known {
            return self.sync(peer.key);
        }
        let command = Command::Join { node: peer.node, join };
        self.propose(command, Some(job), Purpose::Join { key: peer.key });
    }

    fn answer_heartbeat(&mut self, peer: &Peer, heartbeat: Heartbeat) {
        let (now, term) = (self.now, self.term());
        self.send(peer.key, FromCoordinator::Leading { term });
        let job = match self.connections.get(&peer.key).and_then(|c| c.job.clone()) {
            Some(job) => self.roster.job(&job),
            None => self.roster.job_of(peer.node).filter(|job| peer.may_speak_for(&job.spec().job)),
        };
        let Some(job) = job.filter(|_| peer.role == Role::Worker) else { return };
        if !job.is_living(peer.node) || job.stage() == Stage::Finished {
            if let Some(connection) = self.connections.get_mut(&peer.key) {
                connection.told.is_released = false;
            }
            return self.sync(peer.key);
        }
        let Some(leading) = self.leading.as_mut() else { return };
        leading.detector.handle_heartbeat(now, peer.node);
        let id = job.spec().job.clone();
        let watch = leading.watch(now, &id);
        let entered = heartbeat.entered;
        watch.progress.handle_heartbeat(now, peer.node, &heartbeat);
        watch.reports.handle_heartbeat(now, peer.node, heartbeat, job);
        let newest =
            job.worlds().filter(|w| w.has_member(peer.node) || w.has_follower(peer.node)).last();
        let newest = newest.map_or(types::Generation(0), |w| w.generation);
        // Who is a member there has the reports of all of them.
        let is_news = |generation: &types::Generation| {
            let is_member =
                job.worlds().any(|w| w.generation == *generation && w.has_member(peer.node));
            is_member && Some(*generation) > job.entered().max(watch.entering)
        };
        if let Some(generation) = entered.filter(is_news) {
            watch.entering = Some(generation);
            let command = Command::Enter { job: id.clone(), generation };
            if !self.propose(command, Some(id.clone()), Purpose::Enter)
                && let Some(leading) = self.leading.as_mut()
            {
                leading.watch(now, &id).entering = None;
            }
        }
        self.resend_worlds(peer.key, entered, newest);
    }

    fn answer_lost(&mut self, peer: &Peer, (node, cause): (NodeId, Cause), sequence: u64) {
        let may_say = matches!(peer.role, Role::Agent | Role::Operator) || peer.node == node;
        let job = self.roster.job_of(node).filter(|job| job.is_living(node));
        let job =
            job.map(|job| job.spec().job.clone()).filter(|job| may_say && peer.may_speak_for(job));
        match job {
            Some(job) => {
                self.lose(&job, vec![(node, cause)], String::new(), Some((peer.key, sequence)));
            }
            None => self.send(peer.key, FromCoordinator::Noted { sequence }),
        }
    }

    fn answer_drain(
        &mut self,
        peer: &Peer,
        (mut nodes, job, reason): (Vec<NodeId>, JobId, String),
        sequence: u64,
    ) {
        if peer.role == Role::Worker {
            nodes.retain(|node| *node == peer.node);
        }
        let means_all = nodes.is_empty();
        let is_void = means_all && !matches!(peer.role, Role::Agent | Role::Operator);
        if is_void
            || !peer.may_speak_for(&job)
            || self.roster.job(&job).is_none()
            || nodes.len() > DRAIN_MAX
        {
            return self.send(peer.key, FromCoordinator::Noted { sequence });
        }
        let command = Command::Drain { job: job.clone(), nodes, reason: clip(reason) };
        self.propose(command, Some(job), Purpose::Note { key: peer.key, sequence });
    }

    /// Whether an operator speaks, of a job that there is; else says why not.
    fn may_order(&mut self, peer: &Peer, job: &JobId) -> bool {
        let refusal = if peer.role != Role::Operator {
            let role = peer.role.name();
            Some((
                NO_PERMISSION,
                format!("only an operator may order this, and this is {role} {}", peer.node),
            ))
        } else if self.roster.job(job).is_none() {
            Some((USAGE, format!("there is no job {job}: `ripstop status` shows all")))
        } else {
            None
        };
        let may = refusal.is_none();
        if let Some((code, reason)) = refusal {
            self.send(peer.key, FromCoordinator::Refused { code, reason });
        }
        may
    }

    fn answer_checkpoint(&mut self, peer: &Peer, id: &JobId, sequence: u64) {
        if !self.may_order(peer, id) {
            return;
        }
        let Some(job) = self.roster.job(id) else { return };
        let obstacle = match job.stage() {
            Stage::Finished | Stage::Stopped => Some("it does not run"),
            Stage::Running if job.spec().checkpoint_every.is_none() => {
                Some("it has no store: start it with --checkpoint URL")
            }
            Stage::Running => None,
        };
        if let Some(obstacle) = obstacle {
            let reason = format!("job {id} can't be saved: {obstacle}");
            return self.send(peer.key, FromCoordinator::Refused { code: USAGE, reason });
        }
        let now = self.now;
        if let Some(leading) = self.leading.as_mut() {
            leading.watch(now, id).checkpointing.hasten(now);
            self.dirty.insert(id.clone());
        }
        self.send(peer.key, FromCoordinator::Noted { sequence });
    }

    fn answer_receipt(
        &mut self,
        peer: &Peer,
        attempt: Attempt,
        receipt: ReceiptRoot,
        segments: Bytes,
    ) {
        let now = self.now;
        let Some((job, _)) = self.open_attempt(peer, attempt) else { return };
        if segments.len() > Checkpointing::LIST_BYTES_MAX {
            let reason =
                format!("node {} has a segment list of {} bytes", peer.node, segments.len());
            return self.record(Command::Abandon { job: job.clone(), attempt, reason }, job);
        }
        if let Some(leading) = self.leading.as_mut() {
            leading.watch(now, &job).checkpointing.handle_list(attempt, peer.node, segments);
        }
        self.record(Command::Receipt { job: job.clone(), attempt, node: peer.node, receipt }, job);
    }

    /// The job whose open attempt this is, if the peer takes part, and whether it is the writer. Else says what became of it.
    fn open_attempt(&mut self, peer: &Peer, attempt: Attempt) -> Option<(JobId, bool)> {
        let job =
            self.roster.job_of(peer.node).filter(|job| peer.may_speak_for(&job.spec().job))?;
        let open = job.intent().map(|open| &open.intent).filter(|intent| intent.attempt == attempt);
        if let Some(intent) = open {
            let takes_part = intent.members.contains(&peer.node);
            return takes_part.then(|| (job.spec().job.clone(), intent.writer == peer.node));
        }
        let committed = job.committed().filter(|committed| committed.attempt == attempt);
        let message = match (committed, job.abandoned()) {
            (Some(c), _) => {
                FromCoordinator::Committed { attempt, step: c.step, manifest: c.manifest.clone() }
            }
            (None, Some((last, reason))) if *last == attempt => {
                FromCoordinator::Abandoned { attempt, reason: reason.clone() }
            }
            _ => FromCoordinator::Abandoned { attempt, reason: "it is over".to_owned() },
        };
        self.send(peer.key, message);
        None
    }

    fn answer_enroll(&mut self, peer: &Peer, job: JobId, csr: Bytes, sequence: u64) {
        if peer.role != Role::Agent || !peer.may_speak_for(&job) || csr.len() > CSR_MAX {
            let reason = format!(
                "this agent may not start workers of job {job}: give --run-id the job that the join token was made for"
            );
            return self.send(peer.key, FromCoordinator::Refused { code: NO_PERMISSION, reason });
        }
        let command = Command::EnrollWorker { job: job.clone() };
        let key = peer.key;
        let purpose = Purpose::Enroll {
            key,
            sequence: Some(sequence),
            role: Role::Worker,
            job: Some(job),
            csr,
        };
        self.propose(command, None, purpose);
    }

    fn record(&mut self, command: Command, job: JobId) {
        self.propose(command, Some(job), Purpose::Record);
    }
}

fn is_bounded(join: &Join) -> bool {
    let Join { host, fingerprint, found, .. } = join;
    let texts = fingerprint.0.iter().flat_map(|(key, value)| [key, value]).chain([host]);
    let mut texts = texts.chain(found.iter().map(|found| &found.manifest));
    fingerprint.0.len() <= FINGERPRINT_MAX && texts.all(|text| text.len() <= TEXT_MAX)
}

/// The beginning of a text for people.
fn clip(mut text: String) -> String {
    let end =
        (0..=TEXT_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    text
}

/// Longest text that goes into the log: more than any key or host name.
const TEXT_MAX: usize = 1024;
/// Most parts of a fingerprint.
const FINGERPRINT_MAX: usize = 256;
/// Most nodes named by one drain.
const DRAIN_MAX: usize = 16_384;
/// Largest certificate signing request.
const CSR_MAX: usize = 16 << 10;
/// Events in one answer.
const EVENTS_PAGE: usize = 256;
/// Exit code of a node whose certificate does not allow this: a matter of configuration.
const NO_PERMISSION: u8 = 78;
