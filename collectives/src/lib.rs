//! Bytes between ranks: the canonical sum, and how the members of a world share the work of making it.
//!
//! A step's gradient is cut in chunks ([`ChunkLayout`]); each chunk has an [`owner`] among the members. For one chunk of one step every
//! member computes the same [`ChunkPlan`]: who provides which nodes of the canonical tree, by computing or from what it holds. Members fold
//! what [`fold::foldable`] allows, the owner folds the rest ([`reduce::fold_cover`]) and divides once ([`reduce::finish_mean`]). Scalars go
//! the same way in the report chunk ([`LeafReport`]).
//!
//! Promise: the bits of a final chunk depend on the leaves alone, never on who served, held or folded what.
//! Deliberately not here: sockets, clocks, threads, and where the bytes of a node are kept.

#[cfg(target_endian = "big")]
compile_error!(
    "chunks travel as little-endian f32 without conversion; a big-endian machine can't take part"
);

mod chunk;
pub mod fold;
mod leaf_report;
mod operation;
mod owner;
mod plan;
pub mod reduce;

pub use chunk::{Chunk, ChunkLayout, LayoutError};
pub use leaf_report::{LeafReport, ReportError};
pub use operation::{Action as OperationAction, Operation};
pub use owner::owner;
pub use plan::{ChunkPlan, Holding, Piece, default_plan, plan_chunk};
