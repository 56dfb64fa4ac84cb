//! How a process ended, and the exit codes that schedulers read.
//!
//! The table is a promise to schedulers: a code never changes its meaning. `ripstop run` exits with one of these, and reads
//! the same ones from its workers. Deliberately not here: what to do about an exit; that is the supervisor's.

use std::fmt;

/// What `ripstop` exits with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitCode {
    /// 0: the job is done.
    Done,
    /// 64: bad usage; never try again.
    Usage,
    /// 69: the coordinators could not be reached; try again, perhaps elsewhere.
    Unavailable,
    /// 70: a bug of ours.
    Bug,
    /// 75, settable: left in good order with the state safe; queue again and do not count it as a failure.
    Requeue(RequeueCode),
    /// 76: refused as incompatible (version, model or numbers); never try again.
    Incompatible,
    /// 77: this host failed a check; try again on another one.
    BadNode,
    /// 78: bad configuration; never try again.
    Configuration,
    /// 130: forced to end by a second INT.
    Interrupted,
    /// 143: forced to end by a second TERM, or because the grace period ran out.
    Terminated,
    /// The program's own code.
    Program(u8),
    /// 128 + n: the program died of signal n.
    Signalled(u8),
}

impl ExitCode {
    /// The code of [`Self::Usage`].
    pub const USAGE: u8 = 64;
    /// The code of [`Self::Unavailable`].
    pub const UNAVAILABLE: u8 = 69;
    /// The code of [`Self::Bug`].
    pub const BUG: u8 = 70;
    /// The code of [`Self::Requeue`], unless another is set.
    pub const REQUEUE: u8 = 75;
    /// The code of [`Self::Incompatible`].
    pub const INCOMPATIBLE: u8 = 76;
    /// The code of [`Self::BadNode`].
    pub const BAD_NODE: u8 = 77;
    /// The code of [`Self::Configuration`].
    pub const CONFIGURATION: u8 = 78;
    /// A program that exists but cannot be executed, as shells report it.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// A program that does not exist, as shells report it.
    pub const NOT_FOUND: u8 = 127;
    /// What shells add to the number of the signal that killed a program.
    pub const SIGNAL_BASE: u8 = 128;
    /// The code of [`Self::Interrupted`].
    pub const INTERRUPTED: u8 = 130;
    /// The code of [`Self::Terminated`].
    pub const TERMINATED: u8 = 143;

    /// What a worker's exit means. Both 75 and the code set in its place read as [`Self::Requeue`].
    #[must_use]
    pub fn of(exit: Exit, requeue: RequeueCode) -> Self {
        let code = match exit {
            Exit::Signal(signal) => return Self::Signalled(u8::try_from(signal).unwrap_or(0)),
            // The kernel hands out eight bits; anything else is not from it and is no success.
            Exit::Code(code) => u8::try_from(code).unwrap_or(u8::MAX),
        };
        match code {
            0 => Self::Done,
            Self::USAGE => Self::Usage,
            Self::UNAVAILABLE => Self::Unavailable,
            Self::BUG => Self::Bug,
            Self::REQUEUE => Self::Requeue(requeue),
            Self::INCOMPATIBLE => Self::Incompatible,
            Self::BAD_NODE => Self::BadNode,
            Self::CONFIGURATION => Self::Configuration,
            Self::INTERRUPTED => Self::Interrupted,
            Self::TERMINATED => Self::Terminated,
            code if code == requeue.get() => Self::Requeue(requeue),
            code => Self::Program(code),
        }
    }

    /// The number that the process exits with.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Usage => Self::USAGE,
            Self::Unavailable => Self::UNAVAILABLE,
            Self::Bug => Self::BUG,
            Self::Requeue(requeue) => requeue.get(),
            Self::Incompatible => Self::INCOMPATIBLE,
            Self::BadNode => Self::BAD_NODE,
            Self::Configuration => Self::CONFIGURATION,
            Self::Interrupted => Self::INTERRUPTED,
            Self::Terminated => Self::TERMINATED,
            Self::Program(code) => code,
            Self::Signalled(signal) => Self::SIGNAL_BASE.saturating_add(signal),
        }
    }
}

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self {
            Self::Done => "done",
            Self::Usage => "bad usage",
            Self::Unavailable => "coordinators unreachable",
            Self::Bug => "internal error",
            Self::Requeue(_) => "left in good order",
            Self::Incompatible => "refused as incompatible",
            Self::BadNode => "bad host",
            Self::Configuration => "bad configuration",
            Self::Interrupted | Self::Terminated => "forced to end",
            Self::Program(_) => "program's own code",
            Self::Signalled(_) => "program killed by a signal",
        };
        write!(f, "{} ({meaning})", self.code())
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code.code())
    }
}

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// The code that says "left in good order": 75, or what a scheduler wants in its place (99 for Grid Engine).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequeueCode(u8);

impl RequeueCode {
    /// Checks a code: it must not have another meaning already.
    ///
    /// # Errors
    /// The reason, if the code is 0 to 2 (success, and what crashes use), one of the other codes of [`ExitCode`], or above 125.
    pub fn new(code: u8) -> Result<Self, String> {
        let taken = match code {
            0..=2 => "programs exit with it for other reasons",
            ExitCode::USAGE
            | ExitCode::UNAVAILABLE
            | ExitCode::BUG
            | ExitCode::INCOMPATIBLE
            | ExitCode::BAD_NODE
            | ExitCode::CONFIGURATION => "it has another meaning here",
            126.. => "shells use it for programs that did not run or were killed",
            _ => return Ok(Self(code)),
        };
        Err(format!(
            "requeue exit code {code} cannot be used: {taken}; take one from 3 to 125, such as 75 or 99"
        ))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }
}

impl Default for RequeueCode {
    fn default() -> Self {
        Self(ExitCode::REQUEUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_keeps_its_number_on_the_way_through() {
        let requeue = RequeueCode::default();
        for code in 0..=255 {
            assert_eq!(i32::from(ExitCode::of(Exit::Code(code), requeue).code()), code);
        }
        assert_eq!(ExitCode::of(Exit::Signal(9), requeue).code(), 137);
        assert_eq!(ExitCode::of(Exit::Signal(15), requeue).code(), 143);
    }

    #[test]
    fn the_table_of_codes_is_fixed() {
        let table = [
            (ExitCode::Done, 0),
            (ExitCode::Usage, 64),
            (ExitCode::Unavailable, 69),
            (ExitCode::Bug, 70),
            (ExitCode::Requeue(RequeueCode::default()), 75),
            (ExitCode::Incompatible, 76),
            (ExitCode::BadNode, 77),
            (ExitCode::Configuration, 78),
            (ExitCode::Interrupted, 130),
            (ExitCode::Terminated, 143),
        ];
        for (code, number) in table {
            assert_eq!(code.code(), number);
            assert_eq!(ExitCode::of(Exit::Code(i32::from(number)), RequeueCode::default()), code);
        }
    }

    #[test]
    fn impossible_numbers_are_no_success() {
        for exit in [
            Exit::Code(-1),
            Exit::Code(256),
            Exit::Code(i32::MIN),
            Exit::Signal(-1),
            Exit::Signal(i32::MAX),
        ] {
            assert_ne!(ExitCode::of(exit, RequeueCode::default()).code(), 0, "{exit}");
        }
    }

    #[test]
    fn a_set_requeue_code_replaces_75() {
        let requeue = RequeueCode::new(99).unwrap();
        for code in [75, 99] {
            assert_eq!(ExitCode::of(Exit::Code(code), requeue).code(), 99);
        }
    }

    #[test]
    fn a_requeue_code_with_another_meaning_is_refused() {
        for code in [0, 1, 2, 64, 69, 70, 76, 77, 78, 126, 127, 130, 143, 255] {
            assert!(RequeueCode::new(code).is_err(), "{code}");
        }
        for code in [3, 75, 99, 125] {
            assert!(RequeueCode::new(code).is_ok(), "{code}");
        }
    }
}
