//! What a user of a session can get back instead of a step.

use types::{Generation, Remedy};

/// Why a session can't go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is wrong.
    #[error("{0}")]
    Settings(String),
    /// The coordinators refused this process.
    #[error("{reason}")]
    Refused {
        /// The exit code that the refusal asks for (76: incompatible).
        code: u8,
        /// Why, in words.
        reason: String,
    },
    /// No coordinator answered before joining, or a change of members waited too long for one.
    #[error(
        "no coordinator answered for {waited_s} s at {addresses}; start them, or correct --coordinators"
    )]
    Unreachable {
        /// How long.
        waited_s: u64,
        /// Whom we asked.
        addresses: String,
    },
    /// This process was taken out of the job; a new one may join.
    #[error("evicted: {reason}")]
    Evicted {
        /// Why.
        reason: String,
    },
    /// The lineage ended: the step is void, and the next one starts from restored state.
    #[error("the lineage ended in mid-step: call next_step again, it restores the state")]
    RolledBack,
    /// The checkpoint that the job starts from can't be read.
    #[error("the state can't be restored: {reason}")]
    Restore {
        /// Why.
        reason: String,
    },
    /// A checkpoint can't be listed, read or written.
    #[error("{reason}")]
    Checkpoint {
        /// Why.
        reason: String,
    },
    /// Wrong use of the session.
    #[error("{0}")]
    Usage(String),
    /// The data or control plane can't start.
    #[error("{context}: {reason}")]
    Transport {
        /// What was tried.
        context: &'static str,
        /// Why it failed.
        reason: String,
    },
    /// A thread of ours ended: a bug.
    #[error("internal: {0}")]
    Internal(&'static str),
    /// The generation ended and no other came.
    #[error("generation {generation} ended and no new world came within {waited_s} s")]
    NoWorld {
        /// The generation.
        generation: Generation,
        /// How long.
        waited_s: u64,
    },
}

impl Error {
    /// What to do next.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::RolledBack => Remedy::Restore,
            Self::Unreachable { .. } => Remedy::Retry,
            Self::NoWorld { .. } => Remedy::Regroup,
            Self::Settings(_)
            | Self::Refused { .. }
            | Self::Evicted { .. }
            | Self::Restore { .. }
            | Self::Checkpoint { .. }
            | Self::Usage(_)
            | Self::Transport { .. }
            | Self::Internal(_) => Remedy::Stop,
        }
    }

    /// The exit code that a program should end with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Settings(_) | Self::Transport { .. } => 78,
            Self::Refused { code, .. } => *code,
            Self::Unreachable { .. } | Self::NoWorld { .. } => 69,
            Self::Usage(_) => 64,
            Self::Internal(_) => 70,
            Self::Evicted { .. }
            | Self::RolledBack
            | Self::Restore { .. }
            | Self::Checkpoint { .. } => 1,
        }
    }
}
