//! The lying world: deterministic simulation of the real machines, and chaos with real processes.
//!
//! A simulated run ([`sim::Sim`]) has real coordinators (raft included), real participants and real step machines; time, links, disks, the
//! store and the user's program are simulated, and one seed decides them all. After each event the [`invariants`] are checked; when the
//! faults are over the job must finish. A failing run prints its replay line: `cargo xtask chaos --seed N`.
//!
//! [`process`] does the same to real binaries, with real signals.

pub mod invariants;
pub mod plan;
pub mod process;
pub mod seed;
pub mod sim;
