//! Bytes at rest: checkpoints on a directory, in memory or on an S3-compatible store.
//!
//! The decisions are pure: [`Layout`] (which bytes are in which segment), [`SharePlan`] (who writes which segment), [`Manifest`]
//! (the object that makes a checkpoint real) and [`Commit`] (when it may be written). The doing is a few async functions over a
//! [`Store`]: [`upload`], [`publish`], [`survey`], [`newest`], [`load`], [`restore`] and [`export`].
//!
//! Promised: nothing that exists is ever replaced by something else, an ambiguous answer is resolved by reading back, an error is
//! never read as "empty", and no byte is handed out before its BLAKE3 is checked.
//! Deliberately not here: threads, clocks, the environment, sleeping; and which checkpoint counts, which the log decides.

mod canonical_json;
mod commit;
mod export;
mod faults;
mod key;
mod layout;
mod manifest;
mod plan;
mod reader;
mod state_digest;
mod store;
mod writer;

pub use canonical_json::{JsonError, canonical_json};
pub use commit::{Action, Commit, Receipt, Refusal};
pub use export::{Exported, export};
pub use faults::{Call, CrashPoint, Fault, FaultPlan};
pub use key::{KeyError, ObjectKey, Prefix};
pub use layout::{Layout, LayoutError, Segment, SegmentIndex, StateBytes, TensorSpec, VirtualFile};
pub use manifest::{Contents, Manifest, ManifestError};
pub use plan::SharePlan;
pub use reader::{Damaged, Found, Survey, find, load, newest, read_segment, restore, survey};
pub use state_digest::{StateDigest, StatePieces, state_digest};
pub use store::{Created, Object, StorageError, Store, StoreOptions};
pub use writer::{Published, Share, publish, stage, upload};
