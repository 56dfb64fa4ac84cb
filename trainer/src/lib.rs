//! The bundled training program: a byte-level transformer on any text, in candle on the CPU.
//!
//! This is the model's side. [`TrainerConfig`] says what to train, [`Corpus`] gives the samples of a virtual rank,
//! [`Model`] turns them into a leaf, [`AdamW`] applies the mean to a [`TrainState`], [`generate`] lets the model write. All of
//! it is pure: a leaf depends on (parameters, seed, step, virtual rank) and the CPU's arithmetic, never on the number of
//! threads; [`probe_digest`] makes a difference in arithmetic visible. Deliberately not here: any clock, any socket, any member.

mod alone;
mod config;
mod data;
mod generate;
mod layout;
mod model;
mod optimizer;
mod probe;
mod program;
mod random;
mod state;

pub use alone::{Outcome, train_alone};
pub use config::{ConfigError, TrainerConfig};
pub use data::{Batch, Corpus, CorpusError};
pub use generate::{Sampling, generate, printable};
pub use layout::{Layout, TensorSpec};
pub use model::{Leaf, Model, ModelError};
pub use optimizer::{AdamW, Applied};
pub use probe::probe_digest;
pub use program::{ProgramError, train};
pub use random::{Purpose, Random};
pub use state::{StateError, TensorView, TrainState};

#[cfg(target_endian = "big")]
compile_error!(
    "state is stored as little-endian f32 and shown as bytes in place: this crate needs a little-endian machine"
);
