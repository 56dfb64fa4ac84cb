//! What the leader puts into the log. Each command is refused by the roster if it is stale by the time it is applied.

use serde::{Deserialize, Serialize};
use types::{Attempt, Block, Digest, Generation, JobId, Lineage, NodeId, Start, Step, Term};

use crate::message::{Cause, Cost, Join};
use crate::peer::Role;

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The leader's wall clock when it proposed, in milliseconds since 1970; for people only.
    pub at_ms: u64,
    /// What to do.
    pub command: Command,
}

/// A change of the roster.
///
/// Commands that rest on what the leader saw (silence, reports) carry the term in which it saw it; the log refuses them in a
/// later one: a leader that paused must not act on what it saw before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// A coordinator begins to lead. Ends all attempts at checkpoints: their receipts were in its predecessor's memory.
    Lead {
        /// The coordinator.
        coordinator: u64,
    },
    /// This disk holds a coordinator's seat from now on.
    Seat {
        /// The coordinator.
        coordinator: u64,
        /// The disk that its log is on.
        disk: u128,
        /// The disk that held the seat before: if it is another one by now, the command is stale.
        replaces: Option<u128>,
    },
    /// Use a join token once; allocates a node id.
    UseToken {
        /// The token's name.
        token: [u8; 16],
        /// How often it may be used.
        uses: u32,
        /// The job of the certificate.
        job: Option<JobId>,
        /// The role of the certificate.
        role: Role,
    },
    /// Allocate a node id for a worker of an agent.
    EnrollWorker {
        /// Its job.
        job: JobId,
    },
    /// List a worker; registers the job if it is the first.
    Join {
        /// The worker.
        node: NodeId,
        /// What it said.
        join: Box<Join>,
    },
    /// These are out for good.
    Lose {
        /// Their job.
        job: JobId,
        /// Who, and why.
        nodes: Vec<(NodeId, Cause)>,
        /// For people; may be empty.
        detail: String,
        /// The term of the verdict.
        term: Term,
    },
    /// Make the next world.
    FormWorld {
        /// Its job.
        job: JobId,
        /// What it is to be.
        plan: WorldPlan,
        /// The term of the decision.
        term: Term,
    },
    /// All members of a world have entered it.
    Enter {
        /// The job.
        job: JobId,
        /// The world.
        generation: Generation,
    },
    /// All members of a world have finished their first step in it.
    Settle {
        /// The job.
        job: JobId,
        /// The world.
        generation: Generation,
        /// What the change cost.
        cost: Cost,
    },
    /// These are to leave in good order.
    Drain {
        /// Their job.
        job: JobId,
        /// Who; none means all.
        nodes: Vec<NodeId>,
        /// Why, for people.
        reason: String,
    },
    /// From now on the job has so many members.
    Scale {
        /// The job.
        job: JobId,
        /// Fewer hold it; `None`: as before.
        min: Option<u32>,
        /// More are hot spares; `None`: as before.
        max: Option<u32>,
    },
    /// These have handed everything over.
    Leave {
        /// Their job.
        job: JobId,
        /// Who.
        nodes: Vec<NodeId>,
        /// The term of the decision.
        term: Term,
    },
    /// All members are to leave, and their state is safe: the job stops until somebody joins again.
    Stop {
        /// The job.
        job: JobId,
        /// The term of the decision.
        term: Term,
    },
    /// Begin a checkpoint.
    Intend {
        /// The job.
        job: JobId,
        /// Its number: the last one plus one.
        attempt: Attempt,
        /// The boundary to stage.
        step: Step,
        /// Whether the job stops with it, if all its members still are to leave.
        is_last: bool,
        /// The term of the decision.
        term: Term,
    },
    /// A member's part of a checkpoint is in the store.
    Receipt {
        /// The job.
        job: JobId,
        /// Which checkpoint.
        attempt: Attempt,
        /// The member.
        node: NodeId,
        /// What it put.
        receipt: ReceiptRoot,
    },
    /// The manifest is in the store: the checkpoint is real.
    Commit {
        /// The job.
        job: JobId,
        /// Which checkpoint.
        attempt: Attempt,
        /// Key of the manifest.
        manifest: String,
        /// BLAKE3 of its bytes.
        hash: Digest,
    },
    /// A checkpoint will never be.
    Abandon {
        /// The job.
        job: JobId,
        /// Which checkpoint.
        attempt: Attempt,
        /// Why.
        reason: String,
    },
    /// All members reported the last boundary with one digest.
    Finish {
        /// The job.
        job: JobId,
        /// The lineage of the state.
        lineage: Lineage,
        /// Its digest.
        digest: Digest,
        /// The term of the reports.
        term: Term,
    },
}

/// A world before the roster adds what it knows of its members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldPlan {
    /// Its number: the last one plus one.
    pub generation: Generation,
    /// Its lineage.
    pub lineage: Lineage,
    /// See [`types::World::from`].
    pub from: Option<Step>,
    /// See [`types::World::held`].
    pub held: bool,
    /// See [`types::World::start`].
    pub start: Option<Start>,
    /// The members in rank order, with their blocks.
    pub members: Vec<(NodeId, Vec<Block>)>,
    /// Who follows.
    pub followers: Vec<NodeId>,
    /// Of a world that only evens out: what moves and why, for people.
    pub evening: Option<String>,
}

/// What the log keeps of a receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiptRoot {
    /// The lineage of the state.
    pub lineage: Lineage,
    /// Digest of the state.
    pub digest: Digest,
    /// One hash over all segments that the member put.
    pub root: Digest,
}
