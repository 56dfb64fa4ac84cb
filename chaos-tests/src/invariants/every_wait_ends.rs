//! When faults stop, the job finishes: a world forms, steps go on, the last checkpoint commits, everybody is let go.

use std::time::Duration;

use super::Violation;

/// The name of this invariant.
pub const NAME: &str = "every_wait_ends";

/// How long after the last fault a job may take, in virtual time: far longer than any deadline that derives from the recovery target, and
/// than the steps themselves.
pub const LIMIT: Duration = Duration::from_secs(240);

/// The job was not done within [`LIMIT`].
#[must_use]
pub fn violation(state: &str) -> Violation {
    Violation {
        invariant: NAME,
        seen: format!("the job is not done {LIMIT:?} after the last fault: {state}"),
    }
}
