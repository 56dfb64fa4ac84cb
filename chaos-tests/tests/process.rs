//! Chaos with real processes: the built program is started, killed, starved of coordinators and fed wrong input.
//!
//! Run alone by `cargo xtask test -p ripstop-chaos --test process`, after a `cargo build`.

#![expect(
    clippy::print_stderr,
    reason = "a test says there how to replay it, and what it could not do"
)]
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail as the test itself does")]

#[path = "process/checkpoints.rs"]
mod checkpoints;
#[path = "process/coordinators.rs"]
mod coordinators;
#[path = "process/input.rs"]
mod input;
#[path = "process/kills.rs"]
mod kills;
#[path = "process/leaving.rs"]
mod leaving;
#[path = "process/namespaces.rs"]
mod namespaces;
#[path = "process/object_server.rs"]
mod object_server;
#[path = "process/observing.rs"]
mod observing;
#[path = "process/orders.rs"]
mod orders;
#[path = "process/restarts.rs"]
mod restarts;
#[path = "process/unequal.rs"]
mod unequal;
