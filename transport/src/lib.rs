//! Connections between processes: mutual TLS inside QUIC, frames on two ordered lanes, and an in-memory network with the same
//! behaviour for tests.
//!
//! This room promises that a [`Connection`] ends at the process whose [`Subject`] it names, that frames arrive whole and in the
//! order of their lane, that nothing is allocated because a peer only *claims* a size, and that no bad peer ends an [`Endpoint`].
//! It opens all data and control sockets. Deliberately not here: what frames mean, who may do what, and when to dial again.

mod authority;
mod config;
mod connection;
mod endpoint;
mod frame;
mod identity;
mod memory;
mod pem;
mod queue;
mod quic;
mod shared_memory;
mod subject;
mod tls;
mod token;

pub use authority::CertificateAuthority;
pub use config::{Config, ConfigBuilder, ConfigError};
pub use connection::{Connection, ConnectionError, ConnectionId};
pub use endpoint::{ConnectError, Endpoint, EndpointError, Expect};
pub use frame::{Frame, Lane, MAX_BODY_BYTES, MAX_HEAD_BYTES};
pub use identity::{CertificateError, CsrKey, Identity};
pub use memory::MemoryNetwork;
pub use shared_memory::{Arena, ArenaBuffer};
pub use subject::{Role, Subject, SubjectError};
pub use token::{JoinToken, TokenClaims, TokenError, TokenId};
