//! What to do with an error.

/// What the caller of a failed operation should do next. Callers match on this, not on text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// The same call, later.
    Retry,
    /// The generation ended: wait for the next world.
    Regroup,
    /// The state is doubtful: restore it.
    Restore,
    /// Nothing here can help.
    Stop,
}
