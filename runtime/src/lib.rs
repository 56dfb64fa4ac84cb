//! Fault-tolerant elastic training: a worker, a host, a coordinator or the object store may die at any moment, and training goes on, in
//! the same step, to the same bits.
//!
//! A program meets few types: [`Settings`], [`Session`], [`ActiveStep`], [`State`], [`Sum`], [`Error`].
//!
//! ```no_run
//! # async fn example(mut state: impl ripstop::State) -> Result<(), ripstop::Error> {
//! use ripstop::{Session, Settings};
//!
//! let mut session = Session::join(Settings::from_env()?.total_steps(1000)).await?;
//! while let Some(mut step) = session.next_step(&mut state).await? {
//!     while let Some(virtual_rank) = step.next_virtual_rank().await? {
//!         let gradients = vec![0.0; state.gradient_elements()]; // of this step's and virtual rank's samples
//!         step.report(virtual_rank, "loss", 0.5);
//!         step.contribute(virtual_rank, &gradients).await?;
//!     }
//!     let sum = step.finish().await?; // the mean over all virtual ranks, the same bits on every member
//!     # let _ = sum;
//!     // apply it to `state`
//! }
//! # Ok(()) }
//! ```
//!
//! This room promises that the program's loop never learns of failures: it only gets more virtual ranks to compute. It opens HTTP and the
//! agent's pipes, reads the environment and the clock. Everything that decides is a machine: [`step_cycle`], [`state_copy`], [`turn`] and [`change`] here, the rest
//! in the rooms below.

mod active_step;
pub mod agent;
pub mod certificates;
pub mod change;
pub mod checkpoints;
pub mod client;
pub mod clock;
mod credentials;
pub(crate) mod drivers;
pub mod durable_log;
mod error;
mod http;
pub mod logging;
pub mod metrics;
pub mod raw_exchange;
mod sampler;
mod session;
pub mod settings;
mod signals;
mod state;
pub mod state_copy;
pub mod step_cycle;
mod trace;
pub mod turn;

pub use active_step::ActiveStep;
pub use drivers::buffers::Sum;
pub use drivers::coordinator::{CoordinatorConfig, CoordinatorHandle, authority_for};
pub use error::Error;
pub use sampler::{Sampler, leaf_seed};
pub use session::{Outcome, Session};
pub use settings::Settings;
pub use state::{State, TensorSpec, digest as state_digest};
pub use types::{Digest, Lineage, NodeId, Remedy, Step, VirtualRank, VirtualRanks, World};
