//! The shell around the machines: each driver carries inputs in and actions out, and decides nothing.

pub(crate) mod buffers;
pub(crate) mod control;
pub(crate) mod coordinator;
pub(crate) mod engine;
mod log_writer;
pub(crate) mod peers;
