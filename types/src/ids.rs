//! Ids as newtypes, so that a rank can't be taken for a node or a step for a generation.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// One worker or agent process, or one coordinator's log; never reused.
    NodeId, u64
);
number!(
    /// A member's place in one generation.
    Rank, u32
);
number!(
    /// The number of a world; grows by one at each change of members.
    Generation, u64
);
number!(
    /// Grows by one at each restart or rollback; an ended lineage commits nothing.
    Lineage, u64
);
number!(
    /// The number of a training step, from 0. A *boundary* is the number of steps applied: at boundary 5, steps 0 to 4 are applied
    /// and step 5 is the next.
    Step, u64
);
number!(
    /// One of the job's fixed `V` shares of each step.
    VirtualRank, u32
);
number!(
    /// One try at writing a checkpoint; numbers the prefix of its objects.
    Attempt, u64
);
number!(
    /// Raft's term.
    Term, u64
);

impl Generation {
    /// The generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Lineage {
    /// The lineage after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Step {
    /// The step after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// How many members a generation has; at least one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorldSize(NonZeroU32);

impl WorldSize {
    /// A world of `members`, or `None` for an empty one.
    #[must_use]
    pub fn new(members: u32) -> Option<Self> {
        NonZeroU32::new(members).map(Self)
    }

    /// The number of members.
    #[must_use]
    pub fn members(self) -> u32 {
        self.0.get()
    }

    /// The rank `place`, if it lies in this world.
    #[must_use]
    pub fn rank(self, place: u32) -> Option<Rank> {
        (place < self.0.get()).then_some(Rank(place))
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a job (a run); letters, digits, `-`, `_` and `.`, at most 64 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct JobId(String);

impl JobId {
    /// Longest name, in bytes: it stands in certificates, object keys and file names.
    pub const MAX_BYTES: usize = 64;

    /// Checks a name.
    ///
    /// # Errors
    /// The reason, if the name is empty, too long or has other characters.
    pub fn new(name: impl Into<String>) -> Result<Self, String> {
        let name = name.into();
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > Self::MAX_BYTES {
            return Err(format!(
                "job name has {} bytes; allowed are 1 to {}",
                name.len(),
                Self::MAX_BYTES
            ));
        }
        if name.starts_with('.') || !name.chars().all(allowed) {
            return Err(format!(
                "job name {name:?} may have only letters, digits, '-', '_' and '.' (not first)"
            ));
        }
        Ok(Self(name))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for JobId {
    type Error = String;
    fn try_from(name: String) -> Result<Self, String> {
        Self::new(name)
    }
}

impl From<JobId> for String {
    fn from(job: JobId) -> Self {
        job.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_outside_the_world_cannot_be_made() {
        let size = WorldSize::new(3).unwrap();
        assert_eq!(size.rank(2), Some(Rank(2)));
        assert_eq!(size.rank(3), None);
        assert_eq!(WorldSize::new(0), None);
    }

    #[test]
    fn job_names_are_checked() {
        assert!(JobId::new("demo-1.a_b").is_ok());
        for bad in ["", "a/b", "..", "ä", " ", &"x".repeat(65)] {
            assert!(JobId::new(bad).is_err(), "{bad}");
        }
    }
}
