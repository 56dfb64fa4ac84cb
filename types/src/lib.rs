//! The words of Ripstop.
//!
//! Every other room imports this one and this one imports none. It holds plain data: ids ([`NodeId`], [`Rank`],
//! [`Generation`], [`Step`], [`VirtualRank`]), the frozen member list of one generation ([`World`]), the names of nodes
//! in the canonical tree ([`TreeNode`]), digests, points in time, and what to do with an error ([`Remedy`]).
//! Deliberately not here: any clock, any I/O, any decision.

mod block;
mod digest;
mod dtype;
mod ids;
mod remedy;
mod time;
mod wire;
mod world;
mod world_change;

pub use block::{Block, TreeNode, VirtualRanks};
pub use digest::Digest;
pub use dtype::DType;
pub use ids::{
    Attempt, Generation, JobId, Lineage, NodeId, Rank, Step, Term, VirtualRank, WorldSize,
};
pub use remedy::Remedy;
pub use time::Timestamp;
pub use wire::{PROTOCOL_VERSION, WireError, decode, encode};
pub use world::{Address, Follower, Member, Origin, Start, World};
pub use world_change::WorldChange;
