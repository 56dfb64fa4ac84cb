//! What all coordinators agree on: jobs, workers, worlds, checkpoints, tokens and history.
//!
//! It changes only by [`Roster::apply`], which is deterministic and total: a stale, doubled or foreign command changes nothing and
//! says why. Equal logs give equal rosters, which [`Roster::digest`] shows.
//! Deliberately not here: anything that only the leader knows, such as heartbeats.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use types::{Attempt, Digest, Generation, JobId, NodeId, Term, WireError, World, decode, encode};

use crate::command::{Command, Entry};
use crate::config::COORDINATOR_ID_MAX;
use crate::job::{Job, USAGE};
use crate::message::{Cause, Cost, Event, Join};

/// The replicated state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roster {
    applied: u64,
    next_node: u64,
    /// The disk of each coordinator's log.
    seats: BTreeMap<u64, u128>,
    tokens: BTreeMap<[u8; 16], u32>,
    jobs: BTreeMap<JobId, Job>,
    events: VecDeque<Event>,
}

impl Default for Roster {
    fn default() -> Self {
        Self {
            applied: 0,
            next_node: COORDINATOR_ID_MAX + 1,
            seats: BTreeMap::new(),
            tokens: BTreeMap::new(),
            jobs: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }
}

impl Roster {
    /// Most jobs.
    pub const JOBS_MAX: usize = 1024;
    /// Most events that are remembered.
    pub const EVENTS_MAX: usize = 2048;
    /// Most tokens whose uses are counted; a new one beyond it is refused.
    pub const TOKENS_MAX: usize = 65_536;

    /// The log index of the newest entry in it.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// The disk that holds a coordinator's seat, once it is known.
    #[must_use]
    pub fn seat(&self, coordinator: u64) -> Option<u128> {
        self.seats.get(&coordinator).copied()
    }

    /// All jobs, by name.
    #[must_use]
    pub fn jobs(&self) -> &BTreeMap<JobId, Job> {
        &self.jobs
    }

    /// One job.
    #[must_use]
    pub fn job(&self, job: &JobId) -> Option<&Job> {
        self.jobs.get(job)
    }

    /// The job that lists a node, or that it is out of.
    #[must_use]
    pub fn job_of(&self, node: NodeId) -> Option<&Job> {
        let listing = self.jobs.values().find(|job| job.is_living(node));
        listing.or_else(|| self.jobs.values().find(|job| job.gone(node).is_some()))
    }

    /// Events from index `since` on, at most `limit` or those of one index; and where to ask on.
    #[must_use]
    pub fn events(&self, job: Option<&JobId>, since: u64, limit: usize) -> (Vec<Event>, u64) {
        let mut events: Vec<Event> = Vec::new();
        let wanted =
            |e: &&Event| e.index >= since && job.is_none_or(|job| e.job.as_ref() == Some(job));
        for event in self.events.iter().filter(wanted) {
            if events.len() >= limit && events.last().is_some_and(|last| last.index < event.index) {
                break;
            }
            events.push(event.clone());
        }
        let next = events.last().map_or(since, |last| last.index + 1);
        (events, next)
    }

    /// Equal on all coordinators that have applied equally far.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(&encode(self))
    }

    /// The bytes of a log image.
    #[must_use]
    pub fn to_image(&self) -> bytes::Bytes {
        encode(self)
    }

    /// From the bytes of a log image; empty ones are those of the first image.
    ///
    /// # Errors
    /// If they are no image of this version.
    pub fn from_image(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.is_empty() { Ok(Self::default()) } else { decode(bytes) }
    }

    /// Applies the entry at `index`, which a leader of `term` proposed. Entries at or before [`Self::applied`] change nothing.
    pub fn apply(&mut self, index: u64, term: Term, entry: Entry) -> Applied {
        let mut log = EventLog { index, at_ms: entry.at_ms, events: Vec::new() };
        if index <= self.applied {
            return Applied {
                reply: Reply::stale("applied already"),
                touched: Touched::Nothing,
                events: vec![],
            };
        }
        self.applied = index;
        let (reply, touched) = self.dispatch(term, entry.command, &mut log);
        self.events.extend(log.events.iter().cloned());
        while self.events.len() > Self::EVENTS_MAX {
            self.events.pop_front();
        }
        Applied { reply, touched, events: log.events }
    }

    fn dispatch(
        &mut self,
        entry_term: Term,
        command: Command,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let verdict_term = match &command {
            Command::Lose { term, .. }
            | Command::FormWorld { term, .. }
            | Command::Leave { term, .. }
            | Command::Stop { term, .. }
            | Command::Intend { term, .. }
            | Command::Finish { term, .. } => Some(*term),
            _ => None,
        };
        if let Some(term) = verdict_term.filter(|term| *term != entry_term) {
            let reason = format!("decided in term {term}, but logged in term {entry_term}");
            return (Reply::Stale { reason }, Touched::Nothing);
        }
        match command {
            Command::Lead { coordinator } => self.lead(coordinator, entry_term, log),
            Command::Seat { coordinator, disk, replaces } => {
                self.take_seat(coordinator, disk, replaces, log)
            }
            Command::UseToken { token, uses, job, role } => {
                self.use_token(token, uses, (job, role.name()), log)
            }
            Command::EnrollWorker { .. } => self.allocate(),
            Command::Join { node, join } => self.join(node, &join, log),
            Command::Lose { job, nodes, detail, .. } => self.lose(job, &nodes, &detail, log),
            Command::Leave { job, nodes, .. } => self.leave(job, &nodes, log),
            Command::Drain { job, nodes, reason } => self.drain(job, &nodes, &reason, log),
            Command::Scale { job, min, max } => self.scale(job, min, max, log),
            Command::Stop { job, .. } => self.stop(job, log),
            Command::Finish { job, lineage, digest, .. } => self.finish(job, lineage, digest, log),
            Command::Settle { job, generation, cost } => self.settle(job, generation, cost, log),
            world @ (Command::FormWorld { .. } | Command::Enter { .. }) => self.world(world, log),
            checkpoint @ (Command::Intend { .. }
            | Command::Receipt { .. }
            | Command::Commit { .. }
            | Command::Abandon { .. }) => self.checkpoint(checkpoint, log),
        }
    }

    fn lead(&mut self, coordinator: u64, term: Term, log: &mut EventLog) -> (Reply, Touched) {
        log.push("leader", None, format!("coordinator {coordinator} leads in term {term}"));
        for job in self.jobs.values_mut() {
            let reason = "another coordinator leads: receipts were lost with the former";
            let ended = job.abandon(None, reason.to_owned());
            log.abandoned(&job.spec().job, ended, reason);
        }
        (Reply::Done, Touched::Everything)
    }

    fn take_seat(
        &mut self,
        coordinator: u64,
        disk: u128,
        replaces: Option<u128>,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        if self.seat(coordinator) != replaces {
            return (Reply::stale("another disk holds this seat"), Touched::Nothing);
        }
        self.seats.insert(coordinator, disk);
        if let Some(former) = replaces {
            let message = format!(
                "coordinator {coordinator} goes on with disk {disk:032x} in the place of {former:032x}"
            );
            log.push("replaced", None, message);
            return (Reply::Done, Touched::Coordinator(coordinator));
        }
        (Reply::Done, Touched::Nothing)
    }

    fn use_token(
        &mut self,
        token: [u8; 16],
        uses: u32,
        (job, role): (Option<JobId>, &str),
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let used = self.tokens.get(&token).copied().unwrap_or(0);
        if used >= uses {
            let reason = format!(
                "the join token is used up: it was good for {uses}; make one by `ripstop certs token --dir DIR --uses N`"
            );
            log.push("refused", job, reason.clone());
            return (Reply::Refused { code: BAD_TOKEN, reason }, Touched::Nothing);
        }
        if used == 0 && self.tokens.len() >= Self::TOKENS_MAX {
            let reason = "too many join tokens are in use: make fewer, with more --uses".to_owned();
            return (Reply::Refused { code: BAD_TOKEN, reason }, Touched::Nothing);
        }
        self.tokens.insert(token, used + 1);
        let (reply, touched) = self.allocate();
        if let Reply::Allocated { node } = reply {
            log.push(
                "token_used",
                job,
                format!("{role} {node} enrolled, use {} of {uses}", used + 1),
            )
            .nodes = vec![node];
        }
        (reply, touched)
    }

    fn allocate(&mut self) -> (Reply, Touched) {
        let node = NodeId(self.next_node);
        self.next_node += 1;
        (Reply::Allocated { node }, Touched::Nothing)
    }

    fn join(&mut self, node: NodeId, join: &Join, log: &mut EventLog) -> (Reply, Touched) {
        let id = &join.spec.job;
        let mut refuse = |code, reason: String| {
            log.push("refused", Some(id.clone()), reason.clone()).nodes = vec![node];
            (Reply::Refused { code, reason }, Touched::Nothing)
        };
        if node.0 <= COORDINATOR_ID_MAX || node.0 > NODE_ID_MAX {
            return refuse(
                USAGE,
                format!("node id {node} is not a worker's: enroll by a token or an agent"),
            );
        }
        if let Some(other) =
            self.jobs.values().find(|job| job.is_living(node) && job.spec().job != *id)
        {
            let reason = format!("node {node} is a worker of job {} already", other.spec().job);
            return refuse(USAGE, reason);
        }
        if let Err(reason) = join.spec.check() {
            return refuse(USAGE, reason);
        }
        if !self.jobs.contains_key(id) && self.jobs.len() >= Self::JOBS_MAX {
            return refuse(USAGE, format!("there are {} jobs already", self.jobs.len()));
        }
        let job = self.jobs.entry(id.clone()).or_insert_with(|| Job::new(join));
        let was_mixed = job.is_mixed();
        match job.join(node, join) {
            Err((code, reason)) => refuse(code, reason),
            Ok(false) => (Reply::Done, Touched::Node(id.clone(), node)),
            Ok(true) => {
                // An id from an earlier log, or of a certificate made by hand, must not be given away again.
                self.next_node = self.next_node.max(node.0 + 1);
                let marked = if job.is_mixed() && !was_mixed {
                    "; the job is not bit-exact from here on"
                } else {
                    ""
                };
                let message = format!("node {node} on {} joined{marked}", join.host);
                log.push("joined", Some(id.clone()), message).nodes = vec![node];
                (Reply::Done, Touched::Job(id.clone()))
            }
        }
    }

    fn lose(
        &mut self,
        id: JobId,
        nodes: &[(NodeId, Cause)],
        detail: &str,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        let is_over = job.stage() == crate::job::Stage::Finished;
        let (lost, ended) = job.lose(nodes);
        if lost.is_empty() {
            return (Reply::stale("listed no longer"), Touched::Nothing);
        }
        let (generation, lineage) = (job.world().map(|w| w.generation), job.lineage());
        for (node, cause) in lost.iter().filter(|_| !is_over) {
            let kind = if matches!(cause, Cause::Diverged) { "diverged" } else { "lost" };
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            let event =
                log.push(kind, Some(id.clone()), format!("node {node} is lost ({cause}{detail})"));
            (event.nodes, event.generation) = (vec![*node], generation);
            event.cause = Some(cause.name().to_owned());
        }
        log.abandoned(&id, ended, "a member is out");
        if job.nodes().is_empty() && !is_over {
            log.push(
                "lost",
                Some(id.clone()),
                format!("nobody is left of lineage {lineage}: waiting for joiners"),
            );
        }
        (Reply::Done, Touched::Job(id))
    }

    fn leave(&mut self, id: JobId, nodes: &[NodeId], log: &mut EventLog) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        let (left, ended) = job.leave(nodes);
        if left.is_empty() {
            return (Reply::stale("not to leave, or gone"), Touched::Nothing);
        }
        let message = format!("left in good order: {}", list(&left));
        log.push("left", Some(id.clone()), message).nodes = left;
        log.abandoned(&id, ended, "a member left");
        (Reply::Done, Touched::Job(id))
    }

    fn drain(
        &mut self,
        id: JobId,
        nodes: &[NodeId],
        reason: &str,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        let news = job.drain(nodes, reason);
        if news.is_empty() {
            return (Reply::Done, Touched::Nothing);
        }
        let message = format!("to leave: {} ({reason})", list(&news));
        log.push("drain", Some(id.clone()), message).nodes = news;
        (Reply::Done, Touched::Job(id))
    }

    fn scale(
        &mut self,
        id: JobId,
        min: Option<u32>,
        max: Option<u32>,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        match job.scale(min, max) {
            Err(reason) => (Reply::Refused { code: USAGE, reason }, Touched::Nothing),
            Ok(surplus) => {
                let (min, max) = (job.spec().min_members, job.spec().max_members);
                let leaving = match surplus.as_slice() {
                    [] => String::new(),
                    nodes => format!("; to leave: {}", list(nodes)),
                };
                let message = format!("{min} to {max} members from now on{leaving}");
                log.push("scaled", Some(id.clone()), message).nodes = surplus;
                (Reply::Done, Touched::Job(id))
            }
        }
    }

    fn stop(&mut self, id: JobId, log: &mut EventLog) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        let Some(left) = job.stop() else {
            return (Reply::stale("not all are to leave"), Touched::Nothing);
        };
        let message = format!("all members left: {}", list(&left));
        log.push("stopped", Some(id.clone()), message).nodes = left;
        (Reply::Done, Touched::Job(id))
    }

    fn finish(
        &mut self,
        id: JobId,
        lineage: types::Lineage,
        digest: Digest,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        match job.finish(lineage, digest) {
            Err(reason) => (Reply::Stale { reason }, Touched::Nothing),
            Ok(step) => {
                let message = format!("finished after {step} steps, state {digest}");
                log.push("finished", Some(id.clone()), message).step = Some(step);
                (Reply::Done, Touched::Job(id))
            }
        }
    }

    fn world(&mut self, command: Command, log: &mut EventLog) -> (Reply, Touched) {
        let (id, outcome) = match command {
            Command::FormWorld { job: id, plan, .. } => {
                let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
                let (former, attempt) =
                    (job.lineage(), job.intent().map(|open| open.intent.attempt));
                let former_world = job.world().cloned();
                let outcome = job.form_world(&plan).map(|world| {
                    if let Some((reason, former)) = plan.evening.clone().zip(former_world) {
                        let is_other = |node: &NodeId| {
                            let blocks = |w: &World| w.member(*node).map(|m| m.blocks.clone());
                            blocks(&former) != blocks(&world)
                        };
                        let event = log.push("evened", Some(id.clone()), reason);
                        event.nodes = world.nodes().filter(is_other).collect();
                        event.generation = Some(world.generation);
                    }
                    let ended = attempt.filter(|_| job.intent().is_none());
                    log.abandoned(&id, ended, "its lineage ended");
                    let is_restart = world.lineage != former && former.0 > 0;
                    let event = log.push(
                        if is_restart { "restart" } else { "world" },
                        Some(id.clone()),
                        world.to_string(),
                    );
                    event.nodes = world.nodes().collect();
                    event.generation = Some(world.generation);
                    event.step = world.from.or(world.start.as_ref().map(|s| s.step));
                });
                (id, outcome)
            }
            Command::Enter { job: id, generation } => {
                let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
                let outcome = job
                    .enter(generation)
                    .then_some(())
                    .ok_or_else(|| "known already, or over".to_owned());
                if outcome.is_ok() {
                    let message = format!("all members entered world {generation}");
                    log.push("entered", Some(id.clone()), message).generation = Some(generation);
                }
                (id, outcome)
            }
            _ => return (Reply::stale("not a world's command"), Touched::Nothing),
        };
        match outcome {
            Ok(()) => (Reply::Done, Touched::Job(id)),
            Err(reason) => (Reply::Stale { reason }, Touched::Nothing),
        }
    }

    fn settle(
        &mut self,
        id: JobId,
        generation: Generation,
        cost: Cost,
        log: &mut EventLog,
    ) -> (Reply, Touched) {
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        if !job.settle(generation) {
            return (Reply::stale("known already, or another world"), Touched::Nothing);
        }
        let message = format!(
            "the first step in world {generation} is done, {:.0} ms after it came: entered in {:.0} ms, {} leaves computed again, {} chunks sent again",
            cost.stepping.as_secs_f64() * 1e3,
            cost.entering.as_secs_f64() * 1e3,
            cost.recomputed_leaves,
            cost.passed_chunks
        );
        let event = log.push("settled", Some(id), message);
        (event.generation, event.cost) = (Some(generation), Some(cost));
        (Reply::Done, Touched::Nothing)
    }

    fn checkpoint(&mut self, command: Command, log: &mut EventLog) -> (Reply, Touched) {
        let id = match &command {
            Command::Intend { job, .. }
            | Command::Receipt { job, .. }
            | Command::Commit { job, .. }
            | Command::Abandon { job, .. } => job.clone(),
            _ => return (Reply::stale("not a checkpoint's command"), Touched::Nothing),
        };
        let Some(job) = self.jobs.get_mut(&id) else { return unknown(&id) };
        let outcome = match command {
            Command::Intend { attempt, step, is_last, .. } => {
                job.intend(attempt, step, is_last).map(|intent| {
                    let message = format!("checkpoint attempt {attempt} of step {step} begins");
                    let event = log.push("checkpoint_intent", Some(id.clone()), message);
                    (event.nodes, event.step) = (intent.members, Some(step));
                })
            }
            Command::Receipt { attempt, node, receipt, .. } => {
                if !job.receipt(attempt, node, receipt) {
                    return (Reply::stale("known already, or over"), Touched::Nothing);
                }
                let is_complete = job.intent().is_some_and(|open| open.is_complete());
                return (
                    Reply::Done,
                    if is_complete { Touched::Job(id) } else { Touched::Nothing },
                );
            }
            Command::Commit { attempt, manifest, hash, .. } => {
                job.commit(attempt, &manifest, hash).map(|(committed, stopped)| {
                    let message = format!(
                        "checkpoint attempt {attempt} of step {} is committed",
                        committed.step
                    );
                    log.push("checkpoint_committed", Some(id.clone()), message).step =
                        Some(committed.step);
                    if let Some(left) = stopped {
                        let message = format!("all members left: {}", list(&left));
                        log.push("stopped", Some(id.clone()), message).nodes = left;
                    }
                })
            }
            Command::Abandon { attempt, reason, .. } => {
                let ended = job.abandon(Some(attempt), reason.clone());
                log.abandoned(&id, ended, &reason);
                ended.map(|_| ()).ok_or_else(|| format!("attempt {attempt} is not open"))
            }
            _ => Ok(()),
        };
        match outcome {
            Ok(()) => (Reply::Done, Touched::Job(id)),
            Err(reason) => (Reply::Stale { reason }, Touched::Nothing),
        }
    }
}

/// What applying an entry did.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// For who proposed it.
    pub reply: Reply,
    /// Who may have to hear of it.
    pub touched: Touched,
    /// History.
    pub events: Vec<Event>,
}

/// What became of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done, or so already.
    Done,
    /// A new node id.
    Allocated {
        /// The id.
        node: NodeId,
    },
    /// Never as asked.
    Refused {
        /// Exit code.
        code: u8,
        /// Why.
        reason: String,
    },
    /// It came too late to mean anything; nothing changed.
    Stale {
        /// Why.
        reason: String,
    },
}

impl Reply {
    fn stale(reason: &str) -> Self {
        Self::Stale { reason: reason.to_owned() }
    }
}

/// Whom an entry concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Nobody who listens.
    Nothing,
    /// A coordinator whose disk is a new one.
    Coordinator(u64),
    /// One worker.
    Node(JobId, NodeId),
    /// All of a job.
    Job(JobId),
    /// Everybody.
    Everything,
}

/// Events of one entry.
struct EventLog {
    index: u64,
    at_ms: u64,
    events: Vec<Event>,
}

impl EventLog {
    fn push(&mut self, kind: &str, job: Option<JobId>, message: String) -> &mut Event {
        self.events.push(Event {
            index: self.index,
            at_ms: self.at_ms,
            job,
            kind: kind.to_owned(),
            message,
            nodes: Vec::new(),
            generation: None,
            step: None,
            cause: None,
            cost: None,
        });
        self.events.last_mut().expect("just pushed")
    }

    fn abandoned(&mut self, job: &JobId, attempt: Option<Attempt>, reason: &str) {
        if let Some(attempt) = attempt {
            let message = format!("checkpoint attempt {attempt} is given up: {reason}");
            self.push("checkpoint_abandoned", Some(job.clone()), message);
        }
    }
}

fn unknown(job: &JobId) -> (Reply, Touched) {
    (Reply::Stale { reason: format!("job {job} is unknown") }, Touched::Nothing)
}

fn list(nodes: &[NodeId]) -> String {
    nodes.iter().map(NodeId::to_string).collect::<Vec<_>>().join(", ")
}

/// Exit code of a wrong token: a matter of configuration, that another node would not cure.
const BAD_TOKEN: u8 = 78;
/// Ids above it could not be counted on from.
const NODE_ID_MAX: u64 = u64::MAX / 2;

#[cfg(test)]
mod tests;
