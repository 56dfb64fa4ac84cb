//! What workers, agents and operators say to the coordinators' leader, and what it says to them.
//!
//! Messages travel as postcard frames, in order, over one connection. Any of them may come late, twice, or from a node of an ended
//! generation: the receiver answers or drops it. What coordinators say to each other is opaque here: see `consensus`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use types::{
    Address, Attempt, Digest, Generation, JobId, Lineage, NodeId, Rank, Step, Term, VirtualRank,
    VirtualRanks, World, WorldChange,
};

/// What a job is. The first join registers it; later ones must agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Its name.
    pub job: JobId,
    /// Its fixed number of virtual ranks.
    pub virtual_ranks: VirtualRanks,
    /// Fewer living members than this make a held world.
    pub min_members: u32,
    /// After so long with fewer, all leave in good order; `None`: the job waits, however long.
    pub min_timeout: Option<Duration>,
    /// The first world forms as soon as this many have joined.
    pub expected_members: u32,
    /// More than this are hot spares.
    pub max_members: u32,
    /// The boundary at which the job is finished; `None` runs until it is drained.
    pub total_steps: Option<Step>,
    /// Pause between checkpoints; `None`: there is no checkpoint store.
    pub checkpoint_every: Option<Duration>,
    /// The least time in one leaf, while others wait, that counts as a hang; `None`: from the recovery target.
    pub hang_timeout: Option<Duration>,
    /// The longest time outside of leaves (loading, evaluation, a first leaf) while others wait; `None`: from the recovery target.
    pub pause_timeout: Option<Duration>,
    /// Whether blocks follow the measured leaf times of unequal members.
    pub evens_out: bool,
}

impl JobSpec {
    /// Checks that a world can exist under this.
    ///
    /// # Errors
    /// The first bound that contradicts another, in words.
    pub fn check(&self) -> Result<(), String> {
        let (min, expected, max) = (self.min_members, self.expected_members, self.max_members);
        if min == 0 || min > expected || expected > max {
            return Err(format!(
                "members must nest as 1 <= min <= expected <= max, not {min}, {expected}, {max}"
            ));
        }
        if min > self.virtual_ranks.count() {
            return Err(format!(
                "{min} members need as many virtual ranks, the job has {}",
                self.virtual_ranks
            ));
        }
        if let (Some(hang), Some(pause)) = (self.hang_timeout, self.pause_timeout)
            && hang > pause
        {
            return Err(format!(
                "a hang timeout of {hang:?} is longer than the pause timeout of {pause:?}"
            ));
        }
        if self.total_steps == Some(Step(0)) {
            return Err(
                "a job of 0 steps has nothing to do: set total_steps to 1 or more".to_owned()
            );
        }
        Ok(())
    }
}

/// Numeric fingerprint: what must be equal on two members for the bits of their leaves to be equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(pub BTreeMap<String, String>);

impl Fingerprint {
    /// The first part in which two fingerprints differ: its name, the value here and the value there (empty where absent).
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let value = |of: &Self, key: &str| of.0.get(key).cloned().unwrap_or_default();
        let differs = |key: &&String| self.0.get(*key) != other.0.get(*key);
        let key = self.0.keys().chain(other.0.keys()).find(differs)?;
        Some((key.clone(), value(self, key), value(other, key)))
    }
}

/// A checkpoint that a joiner found in the store: a hint, of use when the log knows none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundCheckpoint {
    /// The lineage that wrote it.
    pub lineage: Lineage,
    /// Boundary of the state.
    pub step: Step,
    /// Key of the manifest.
    pub manifest: String,
    /// BLAKE3 of the manifest's bytes.
    pub hash: Digest,
    /// Digest of the state.
    pub digest: Digest,
}

/// A worker's request to be listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The job, as this worker knows it.
    pub spec: JobSpec,
    /// Where its data endpoint listens.
    pub address: Address,
    /// Name of its host.
    pub host: String,
    /// Its numeric fingerprint.
    pub fingerprint: Fingerprint,
    /// Whether it may be listed in spite of another fingerprint; the job is then marked as not bit-exact.
    pub allow_mixed: bool,
    /// The newest checkpoint that it found.
    pub found: Option<FoundCheckpoint>,
}

/// What a worker is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Has no world yet.
    #[default]
    Joining,
    /// Fetches the state.
    Syncing,
    /// Has the state and applies every step, without virtual ranks of its own.
    Following,
    /// Serves virtual ranks.
    Active,
    /// Leaves in good order.
    Leaving,
}

/// Whose turn it is in a worker. Whoever is not [`Turn::Waiting`] may be the one that all others wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Turn {
    /// The program waits for others, inside a call.
    #[default]
    Waiting,
    /// The program is within a step: it computes a leaf.
    Leaf,
    /// The program has the word otherwise: it starts, loads or copies a state, applies a step, evaluates.
    Between,
}

/// Sign of life of a worker, each tenth of the recovery target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Newest generation whose gate is complete here. It proves that all members of that generation had entered it.
    pub entered: Option<Generation>,
    /// The lineage of its state.
    pub lineage: Lineage,
    /// Its newest boundaries with the digest of the state there: at most [`Self::APPLIED_MAX`], ascending.
    pub applied: Vec<(Step, Digest)>,
    /// What it is doing.
    pub phase: Phase,
    /// Whose turn it is here.
    pub turn: Turn,
    /// Grows whenever the turn changes or the training loop gets on.
    pub progress: u64,
    /// Grows four times in each recovery target while the engine runs, whatever the program does.
    pub pulse: u64,
    /// The longest of this worker's newest leaves; `None` before the first.
    pub longest_leaf: Option<Duration>,
    /// The median of them; `None` as long as there are too few.
    pub leaf_time: Option<Duration>,
    /// Nodes of its world that it could not reach for half the recovery target: at most [`Self::CUT_OFF_MAX`].
    pub cut_off: Vec<NodeId>,
    /// What changes cost this member whose first step is done here: the newest, at most [`Self::CHANGES_MAX`], ascending.
    pub changes: Vec<Change>,
}

/// What a change of the world cost one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The new world.
    pub generation: Generation,
    /// What it cost.
    pub cost: Cost,
}

/// What a change of the world cost. Of all members together: the longest times, and the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// From the new world's arrival until all of its members were known to have entered it.
    pub entering: Duration,
    /// From the new world's arrival until its first step was summed.
    pub stepping: Duration,
    /// Leaves that were computed again.
    pub recomputed_leaves: u64,
    /// Final chunks that were sent again, to members that lacked them.
    pub passed_chunks: u64,
}

impl Cost {
    /// Of both together.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            entering: self.entering.max(other.entering),
            stepping: self.stepping.max(other.stepping),
            recomputed_leaves: self.recomputed_leaves.saturating_add(other.recomputed_leaves),
            passed_chunks: self.passed_chunks.saturating_add(other.passed_chunks),
        }
    }
}

impl Heartbeat {
    /// Most boundaries of one heartbeat.
    pub const APPLIED_MAX: usize = 4;
    /// Most changes of one heartbeat.
    pub const CHANGES_MAX: usize = 4;
    /// Most nodes in [`Self::cut_off`].
    pub const CUT_OFF_MAX: usize = 64;

    /// The newest boundary reported.
    #[must_use]
    pub fn boundary(&self) -> Option<Step> {
        self.applied.iter().map(|(step, _)| *step).max()
    }
}

/// Why a node is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// Its process ended.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// A signal killed its process.
    Signalled {
        /// The signal.
        signal: i32,
    },
    /// No sign of life within the deadline.
    Silent,
    /// Signs of life, but others waited for it and it did not get on.
    Hung,
    /// It and another member can't reach each other.
    CutOff,
    /// Its state differed from that of most members.
    Diverged,
    /// It needed a final chunk that nobody holds.
    Orphaned,
    /// It left in good order.
    Left,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exited with code {code}"),
            Self::Signalled { signal } => write!(f, "killed by signal {signal}"),
            Self::Silent => f.write_str("silent"),
            Self::Hung => f.write_str("hung"),
            Self::CutOff => f.write_str("cut off from another member"),
            Self::Diverged => f.write_str("state differs"),
            Self::Orphaned => f.write_str("missed a final chunk that nobody holds"),
            Self::Left => f.write_str("left"),
        }
    }
}

impl Cause {
    /// One word for it, that stays the same between versions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exited { .. } => "exited",
            Self::Signalled { .. } => "signalled",
            Self::Silent => "silent",
            Self::Hung => "hung",
            Self::CutOff => "cut_off",
            Self::Diverged => "diverged",
            Self::Orphaned => "orphaned",
            Self::Left => "left",
        }
    }

    /// Whether the coordinators found it, so that the process may live on without knowing.
    #[must_use]
    pub fn is_verdict(self) -> bool {
        matches!(self, Self::Silent | Self::Hung | Self::CutOff | Self::Diverged | Self::Orphaned)
    }
}

/// From a worker, an agent or an operator to the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// List me. Said again on each new connection.
    Join(Box<Join>),
    /// I live.
    Heartbeat(Heartbeat),
    /// A worker is gone; from the agent that watched it, or from itself. Answered by `Noted`.
    Lost {
        /// The worker.
        node: NodeId,
        /// Why.
        cause: Cause,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// Let these leave in good order; from a worker itself, its agent, or an operator. Answered by `Noted`.
    Drain {
        /// The workers; none means all of the job.
        nodes: Vec<NodeId>,
        /// Their job.
        job: JobId,
        /// Why, for people.
        reason: String,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// My segments of a checkpoint are in the store.
    Receipt {
        /// The attempt of the intent.
        attempt: Attempt,
        /// The lineage of the state.
        lineage: Lineage,
        /// Digest of the state.
        digest: Digest,
        /// One hash over all segments that this member put.
        root: Digest,
        /// The list of segments, opaque here.
        segments: Bytes,
    },
    /// The manifest is in the store.
    Published {
        /// The attempt of the intent.
        attempt: Attempt,
        /// Key of the manifest.
        manifest: String,
        /// BLAKE3 of its bytes.
        hash: Digest,
    },
    /// The attempt can't be completed here: the store failed, or the boundary was missed.
    CheckpointFailed {
        /// The attempt of the intent.
        attempt: Attempt,
        /// Why.
        reason: String,
    },
    /// A certificate for a new worker, please; from an agent. Answered by `Enrolled`.
    EnrollWorker {
        /// The worker's job.
        job: JobId,
        /// Its certificate signing request.
        csr: Bytes,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// How is the job doing, and which of these workers were taken out of it, though they may not know it? From their agent. Answered by
    /// `JobNews`.
    AskJob {
        /// Their job.
        job: JobId,
        /// The workers.
        nodes: Vec<NodeId>,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// The disk of this coordinator is lost for good: let the one that it has now hold its seat. From an operator; answered by `Noted`.
    Replace {
        /// The coordinator.
        coordinator: u64,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// From now on the job has so many members. From an operator; answered by `Noted`.
    Scale {
        /// The job.
        job: JobId,
        /// Fewer hold it; `None`: as before.
        min: Option<u32>,
        /// More are hot spares; `None`: as before.
        max: Option<u32>,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// Begin a checkpoint as soon as one can begin. From an operator; answered by `Noted`.
    Checkpoint {
        /// The job.
        job: JobId,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// How do things stand? Answered by `Status`.
    Status {
        /// Only this job.
        job: Option<JobId>,
        /// Repeated in the answer.
        sequence: u64,
    },
    /// What happened? Answered by `Events`.
    Events {
        /// Only this job.
        job: Option<JobId>,
        /// From this log index on.
        since: u64,
        /// Repeated in the answer.
        sequence: u64,
    },
}

impl ToCoordinator {
    /// The same message under another sequence number, if it has one.
    #[must_use]
    pub fn with_sequence(mut self, number: u64) -> Self {
        match &mut self {
            Self::Lost { sequence, .. }
            | Self::Drain { sequence, .. }
            | Self::EnrollWorker { sequence, .. }
            | Self::AskJob { sequence, .. }
            | Self::Replace { sequence, .. }
            | Self::Scale { sequence, .. }
            | Self::Checkpoint { sequence, .. }
            | Self::Status { sequence, .. }
            | Self::Events { sequence, .. } => *sequence = number,
            Self::Join(_)
            | Self::Heartbeat(_)
            | Self::Receipt { .. }
            | Self::Published { .. }
            | Self::CheckpointFailed { .. } => {}
        }
        self
    }

    /// The attempt that it speaks of.
    #[must_use]
    pub fn attempt(&self) -> Option<Attempt> {
        match self {
            Self::Receipt { attempt, .. }
            | Self::Published { attempt, .. }
            | Self::CheckpointFailed { attempt, .. } => Some(*attempt),
            _ => None,
        }
    }
}

/// From a coordinator to a worker, an agent or an operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromCoordinator {
    /// Ask that one, or ask around.
    NotLeader {
        /// Where the leader listens, if it is known.
        leader: Option<SocketAddr>,
    },
    /// I lead. Said to everybody when a connection or a term begins, and in answer to each heartbeat. In a new term, say again
    /// what was not answered.
    Leading {
        /// The leader's term.
        term: Term,
    },
    /// You are listed.
    Joined {
        /// You.
        node: NodeId,
    },
    /// It will never be done as asked: exit with this code.
    Refused {
        /// Exit code: 64 usage, 70 our bug, 76 incompatible, 78 wrong token or certificate.
        code: u8,
        /// Why, and what to do.
        reason: String,
    },
    /// A world that lists you, or the first one that no longer does. The same one may come again.
    World(Arc<World>),
    /// The same for one who was told the world before it on this connection.
    WorldChange(Arc<WorldChange>),
    /// Stage a checkpoint.
    Intent(Intent),
    /// You are the writer and all receipts are in: put the manifest.
    Publish {
        /// The attempt of the intent.
        attempt: Attempt,
        /// The segment list of each member, in rank order.
        receipts: Vec<(NodeId, Bytes)>,
    },
    /// The checkpoint is real.
    Committed {
        /// The attempt of the intent.
        attempt: Attempt,
        /// Boundary of the state.
        step: Step,
        /// Key of the manifest.
        manifest: String,
    },
    /// The attempt will never commit.
    Abandoned {
        /// The attempt of the intent.
        attempt: Attempt,
        /// Why.
        reason: String,
    },
    /// You are free to go.
    Released(Release),
    /// Your message of this sequence number is in the log, or there was nothing to do.
    Noted {
        /// From the question.
        sequence: u64,
    },
    /// A certificate for the new worker.
    Enrolled {
        /// From the question.
        sequence: u64,
        /// The new worker's node id.
        node: NodeId,
        /// Its certificate and chain, as the shell encodes them.
        certificate: Bytes,
    },
    /// How the job is doing.
    JobNews {
        /// Of the question.
        sequence: u64,
        /// Of the workers asked for, those that are out by a verdict, and why.
        evicted: Vec<(NodeId, Cause)>,
        /// How far it is; `None`: nobody joined it yet.
        standing: Option<Standing>,
    },
    /// How things stand.
    Status {
        /// From the question.
        sequence: u64,
        /// The document.
        status: Box<ClusterStatus>,
    },
    /// What happened.
    Events {
        /// From the question.
        sequence: u64,
        /// In log order.
        events: Vec<Event>,
        /// Ask again from here; equal to the question's `since` when there was nothing newer.
        next: u64,
    },
}

/// Stage a checkpoint of one boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Numbers the prefix of its objects.
    pub attempt: Attempt,
    /// The lineage of the state.
    pub lineage: Lineage,
    /// The boundary to stage.
    pub step: Step,
    /// Who stages, in rank order.
    pub members: Vec<NodeId>,
    /// Who puts the manifest.
    pub writer: NodeId,
}

/// How far a job is, in a word for those who wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It has too few members: no step is done.
    Waiting {
        /// Those who joined and live.
        members: u32,
        /// So many are needed.
        min: u32,
    },
    /// Steps are done, or soon are.
    Running,
    /// All members left in good order.
    Stopped,
    /// All steps are done.
    Finished {
        /// So many.
        steps: Step,
        /// Digest of the state that they led to.
        digest: Digest,
    },
}

/// Why a worker may go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// The job is done: exit 0.
    Finished,
    /// Left in good order: exit 75.
    Drained,
    /// This node is out, and is never listed again: a new process may join.
    Evicted {
        /// Why.
        reason: String,
    },
    /// The job was stopped.
    Stopped,
}

/// How things stand, for `ripstop status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The voters.
    pub coordinators: Vec<CoordinatorStatus>,
    /// Raft's term.
    pub term: Term,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
}

/// One voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorStatus {
    /// Its id.
    pub id: u64,
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether the answering coordinator takes it for the leader.
    pub is_leader: bool,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    pub job: JobId,
    /// `waiting`, `forming`, `training`, `below_min`, `finishing`, `finished` or `stopped`.
    pub state: String,
    /// The newest world.
    pub generation: Option<Generation>,
    /// The newest lineage.
    pub lineage: Option<Lineage>,
    /// The highest boundary reported.
    pub step: Option<Step>,
    /// The job's virtual ranks.
    pub virtual_ranks: u32,
    /// Fewer than these hold the job.
    pub min_members: u32,
    /// More than these are hot spares.
    pub max_members: u32,
    /// Its workers.
    pub members: Vec<MemberStatus>,
    /// Whether it has a checkpoint store.
    pub has_store: bool,
    /// The newest committed checkpoint.
    pub checkpoint: Option<CheckpointStatus>,
    /// Whether unequal fingerprints were admitted: runs are then not bit-exact.
    pub mixed: bool,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The process.
    pub node: NodeId,
    /// Its place in the newest world.
    pub rank: Option<Rank>,
    /// Its host.
    pub host: String,
    /// `joining`, `syncing`, `following`, `active`, `draining` or `leaving`.
    pub state: String,
    /// The boundary that it reported.
    pub applied: Option<Step>,
    /// Its blocks, as `0-3,8-9`.
    pub blocks: String,
}

/// A committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointStatus {
    /// Boundary of the state.
    pub step: Step,
    /// Its attempt.
    pub attempt: Attempt,
    /// Its lineage.
    pub lineage: Lineage,
    /// Key of the manifest.
    pub manifest: String,
}

/// One line of history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Log index of the entry that caused it.
    pub index: u64,
    /// The leader's wall clock when it proposed, in milliseconds since 1970; for people only.
    pub at_ms: u64,
    /// The job concerned.
    pub job: Option<JobId>,
    /// `joined`, `lost`, `world`, `entered`, `drain`, `left`, `restart`, `checkpoint_intent`, `checkpoint_committed`,
    /// `checkpoint_abandoned`, `finished`, `stopped`, `scaled`, `settled`, `evened`, `refused`, `leader`, `token_used`, `diverged`.
    pub kind: String,
    /// For people.
    pub message: String,
    /// The nodes concerned.
    pub nodes: Vec<NodeId>,
    /// The world concerned.
    pub generation: Option<Generation>,
    /// The step concerned.
    pub step: Option<Step>,
    /// Of a loss: [`Cause::name`].
    pub cause: Option<String>,
    /// Of a world that has settled: what the change cost.
    pub cost: Option<Cost>,
}

/// Blocks of virtual ranks as people read them: `0-3,8-9`.
#[must_use]
pub fn describe_blocks(blocks: &[types::Block], virtual_ranks: VirtualRanks) -> String {
    let mut ranks: Vec<u32> =
        blocks.iter().flat_map(|b| b.leaves(virtual_ranks)).map(|VirtualRank(r)| r).collect();
    ranks.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if rank <= *last + 1 => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |(first, last): &(u32, u32)| {
        if first == last { format!("{first}") } else { format!("{first}-{last}") }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(",")
}
