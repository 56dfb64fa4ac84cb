//! A cluster of this program's own processes on loopback, for faults that are done on purpose: `ripstop demo` and `ripstop bench recovery`.
//!
//! `cluster` holds the processes, `stage` does faults and waits for what traces show, `measure` says what each of them cost.

pub(crate) mod cluster;
pub(crate) mod measure;
pub(crate) mod progress;
pub(crate) mod stage;
pub(crate) mod trace;

use ripstop::agent::signals::{Signal, Signals};

/// How work ended.
pub(crate) enum Ended<T> {
    Itself(T),
    Signal(Signal),
}

/// Runs `work`, and drops it, and with it all processes, at a signal that means the end.
pub(crate) async fn until_signal<T>(
    work: impl Future<Output = anyhow::Result<T>>,
) -> Ended<anyhow::Result<T>> {
    let mut signals = match Signals::listen() {
        Ok(signals) => signals,
        Err(error) => return Ended::Itself(Err(error.into())),
    };
    tokio::select! {
        ended = work => Ended::Itself(ended),
        signal = signals.next() => Ended::Signal(signal),
    }
}

/// A time as people read it: three digits are enough.
pub(crate) fn duration(millis: f64) -> String {
    if millis < 10.0 {
        format!("{millis:.1} ms")
    } else if millis < 1000.0 {
        format!("{millis:.0} ms")
    } else {
        format!("{:.2} s", millis / 1000.0)
    }
}

/// A number and its noun.
pub(crate) fn plural(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}
