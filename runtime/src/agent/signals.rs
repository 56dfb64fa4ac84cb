//! The signals that an agent listens to, as a stream.
//!
//! A signal that was ignored when the agent started stays ignored: that is how `nohup` keeps HUP, and a shell's background
//! job INT and QUIT, away from it. Deliberately not here: what a signal means; that is the supervisor's.

use std::fmt;
use std::fs;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// The stream of signals to this process.
#[derive(Debug)]
pub struct Signals {
    streams: Vec<(Signal, Stream)>,
}

impl Signals {
    /// Listens to all of [`Signal::ALL`], except those that are ignored. From now on they no longer end this process.
    ///
    /// # Errors
    /// If the system refuses a handler.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn listen() -> io::Result<Self> {
        // Without /proc nothing is known to be ignored.
        let ignored = fs::read_to_string("/proc/self/status").map_or(0, |status| ignored(&status));
        let mut streams = Vec::new();
        for name in Signal::ALL {
            // TERM is how schedulers ask; nobody means to have it ignored.
            if name != Signal::Terminate && ignored & (1 << (name.number() - 1)) != 0 {
                continue;
            }
            streams.push((name, signal(SignalKind::from_raw(name.number()))?));
        }
        Ok(Self { streams })
    }

    /// The next signal. Signals of one kind that come together count as one, as always on Unix. Cancel safe.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Signal> {
        for (name, stream) in &mut self.streams {
            if stream.poll_recv(context) == Poll::Ready(Some(())) {
                return Poll::Ready(*name);
            }
        }
        Poll::Pending
    }
}

/// A signal that an agent listens to or passes on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Signal {
    /// TERM: what schedulers send.
    Terminate,
    /// INT: Ctrl-C.
    Interrupt,
    /// HUP: the terminal is gone.
    Hangup,
    /// QUIT: Ctrl-\.
    Quit,
    /// USR1: a batch system's early warning.
    User1,
    /// USR2: another one's.
    User2,
}

impl Signal {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Terminate, Self::Interrupt, Self::Hangup, Self::Quit, Self::User1, Self::User2];

    /// Its number.
    #[must_use]
    pub fn number(self) -> i32 {
        self.native().as_raw()
    }

    /// Its name to the system.
    pub(super) fn native(self) -> rustix::process::Signal {
        match self {
            Self::Terminate => rustix::process::Signal::TERM,
            Self::Interrupt => rustix::process::Signal::INT,
            Self::Hangup => rustix::process::Signal::HUP,
            Self::Quit => rustix::process::Signal::QUIT,
            Self::User1 => rustix::process::Signal::USR1,
            Self::User2 => rustix::process::Signal::USR2,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Terminate => "TERM",
            Self::Interrupt => "INT",
            Self::Hangup => "HUP",
            Self::Quit => "QUIT",
            Self::User1 => "USR1",
            Self::User2 => "USR2",
        })
    }
}

/// The set of ignored signals (bit n−1 for signal n) in the text of `/proc/self/status`; none if it does not say.
fn ignored(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use rustix::process::{getpid, kill_process};

    use super::super::spawn::tests::{in_a_process_of_its_own, is_own_process};
    use super::*;

    #[test]
    fn the_set_of_ignored_signals_is_read() {
        for (status, expected) in [
            (
                "Name:\tx\nSigBlk:\t00000000000000ff\nSigIgn:\t0000000000001001\nSigCgt:\t0\n",
                0x1001,
            ),
            ("SigIgn:\tffffffffffffffff\n", u64::MAX),
            ("SigIgn:\tnonsense\n", 0),
            ("SigIgn:\t1ffffffffffffffff\n", 0),
            ("", 0),
        ] {
            assert_eq!(ignored(status), expected, "{status:?}");
        }
    }

    /// Listens, sends all but those in `ignored` to this very process, and expects each once.
    fn each_signal_arrives(ignored: &[Signal]) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut signals = Signals::listen().unwrap();
            // The ignored ones first: were they listened to, they would come out first.
            for name in ignored {
                kill_process(getpid(), name.native()).unwrap();
            }
            for name in Signal::ALL.into_iter().filter(|name| !ignored.contains(name)) {
                kill_process(getpid(), name.native()).unwrap();
                assert_eq!(signals.next().await, name);
            }
        });
    }

    #[test]
    fn every_signal_arrives_and_none_kills() {
        let name = "every_signal_arrives_and_none_kills";
        if is_own_process(name) {
            each_signal_arrives(&[]);
        } else {
            in_a_process_of_its_own(module_path!(), name, "exec \"$@\"");
        }
    }

    #[test]
    fn what_was_ignored_at_the_start_stays_ignored() {
        let name = "what_was_ignored_at_the_start_stays_ignored";
        if is_own_process(name) {
            each_signal_arrives(&[Signal::Hangup, Signal::Interrupt]);
        } else {
            in_a_process_of_its_own(module_path!(), name, "trap '' HUP INT; exec \"$@\"");
        }
    }
}
