//! Who is in the world.
//!
//! Coordinators replicate a [`Roster`] by Raft; their leader's [`Coordinator`] makes worlds, verdicts and checkpoint intents, and a
//! [`Participant`] is the other end of its connections. All of it is pure: time, bytes and certificates come in and actions go out.
//! Deliberately not here: sockets, clocks, disks, keys.

pub mod consensus;
pub mod message;

mod allocation;
mod checkpointing;
mod command;
mod config;
mod coordinator;
mod detector;
mod evening;
mod formation;
mod gathering;
mod job;
mod log;
mod participant;
mod peer;
mod progress;
mod reports;
mod roster;

pub use allocation::allocate;
pub use checkpointing::{CheckpointDecision, Checkpointing};
pub use command::{Command, Entry, ReceiptRoot, WorldPlan};
pub use config::{Config, ConfigBuilder, ConfigError, Timing};
pub use consensus::{HardState, LogEntry, LogGap, LogImage, LogWrite, RecoveredLog};
pub use coordinator::{Action, Coordinator};
pub use detector::Detector;
pub use formation::{Decision, Formation};
pub use job::{Committed, Gone, Job, Listed, OpenIntent, Stage};
pub use message::{
    Cause, Change, CheckpointStatus, ClusterStatus, CoordinatorStatus, Cost, Event, Fingerprint,
    FoundCheckpoint, FromCoordinator, Heartbeat, Intent, JobSpec, JobStatus, Join, MemberStatus,
    Phase, Release, Standing, ToCoordinator, Turn, describe_blocks,
};
pub use participant::{Participant, ParticipantAction, ParticipantEvent};
pub use peer::{ConnectionKey, EnrollRequest, Peer, Role};
pub use progress::{Progress, Stalled};
pub use reports::{Divergence, Reports};
pub use roster::{Applied, Reply, Roster, Touched};
