//! What holds of every endpoint, over QUIC and in memory alike, and what only QUIC must prove.

#![expect(clippy::unwrap_used, reason = "tests may panic")]

mod authentication;
mod conformance;
mod failure;
mod networks;
