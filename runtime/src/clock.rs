//! The only clock. Machines get its readings as `now`.

use std::time::{SystemTime, UNIX_EPOCH};

use types::Timestamp;

/// CLOCK_MONOTONIC: the same on all processes of one host, so traces of one host can be laid side by side.
#[must_use]
pub fn now() -> Timestamp {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let nanos = i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    Timestamp(u64::try_from(nanos).unwrap_or(0))
}

/// Milliseconds since 1970, for people only: never compared between machines.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
