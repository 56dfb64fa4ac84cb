//! An endpoint: takes connections and makes them, all through one UDP socket, or through a [`MemoryNetwork`](crate::MemoryNetwork).

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use types::{Digest, NodeId, Remedy};

use crate::memory::MemoryEndpoint;
use crate::quic::QuicEndpoint;
use crate::{Arena, Config, Connection, Identity, Role, Subject};

/// Takes and makes connections under one identity. Cheap to clone. When the last clone is dropped no more connections are taken;
/// those that exist go on.
#[derive(Clone)]
pub struct Endpoint(Carrier);

#[derive(Clone)]
enum Carrier {
    Quic(Arc<QuicEndpoint>),
    Memory(Arc<MemoryEndpoint>),
}

impl Endpoint {
    /// Opens the UDP socket (port 0: any free one) and begins to take connections. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the address can't be bound, or there is no runtime.
    pub fn bind(
        address: SocketAddr,
        identity: Arc<Identity>,
        config: &Config,
    ) -> Result<Self, EndpointError> {
        QuicEndpoint::bind(address, identity, config)
            .map(|quic| Self(Carrier::Quic(Arc::new(quic))))
    }

    /// Opens a socket for one who has no certificate yet, but knows the fingerprint of the cluster's CA (from a join token). It takes no
    /// connections and can only [`connect_enrol`](Self::connect_enrol).
    ///
    /// # Errors
    /// If the address can't be bound, or there is no runtime.
    pub fn bind_enrolling(address: SocketAddr, authority: Digest) -> Result<Self, EndpointError> {
        QuicEndpoint::bind_enrolling(address, authority)
            .map(|quic| Self(Carrier::Quic(Arc::new(quic))))
    }

    /// Where it is bound.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        match &self.0 {
            Carrier::Quic(quic) => quic.local_addr(),
            Carrier::Memory(memory) => memory.local_addr(),
        }
    }

    /// Whom it speaks for; `None` if it is enrolling.
    #[must_use]
    pub fn subject(&self) -> Option<&Subject> {
        match &self.0 {
            Carrier::Quic(quic) => quic.identity().map(|identity| identity.subject()),
            Carrier::Memory(memory) => memory.subject(),
        }
    }

    /// SHA-256 of its own certificate, for others to expect.
    #[must_use]
    pub fn certificate(&self) -> Option<Digest> {
        match &self.0 {
            Carrier::Quic(quic) => quic.identity().map(|identity| identity.fingerprint()),
            Carrier::Memory(memory) => memory.certificate(),
        }
    }

    /// Connects to the peer at `address`. When it returns, both sides have accepted each other.
    ///
    /// # Errors
    /// If nobody answers in time, or the peer is not the expected one, or either side refuses the other.
    pub async fn connect(
        &self,
        address: SocketAddr,
        expect: &Expect,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        match &self.0 {
            Carrier::Quic(quic) => quic.connect(address, expect, deadline).await,
            Carrier::Memory(memory) => memory.connect(address, Some(expect), deadline).await,
        }
    }

    /// Connects to a coordinator without a certificate, in order to get one. The coordinator proves that it belongs to the CA.
    ///
    /// # Errors
    /// If nobody answers in time, or it is no coordinator of that CA, or it takes no enrolments.
    pub async fn connect_enrol(
        &self,
        address: SocketAddr,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        match &self.0 {
            Carrier::Quic(quic) => quic.connect_enrol(address, deadline).await,
            Carrier::Memory(memory) => memory.connect(address, None, deadline).await,
        }
    }

    /// The next connection that a peer made; `None` when the endpoint is closed. Bad peers don't show up here. Cancel-safe.
    pub async fn accept(&self) -> Option<Connection> {
        match &self.0 {
            Carrier::Quic(quic) => quic.accept().await,
            Carrier::Memory(memory) => memory.accept().await,
        }
    }

    /// Memory for the bodies of frames: recycled, and if the [`Config`] says so read by peers on this host without a copy.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        match &self.0 {
            Carrier::Quic(quic) => quic.arena(),
            Carrier::Memory(memory) => memory.arena(),
        }
    }

    /// Payload of all UDP packets that were sent through it, handshakes and repetitions too.
    #[must_use]
    pub fn sent_wire_bytes(&self) -> u64 {
        match &self.0 {
            Carrier::Quic(quic) => quic.sent_wire_bytes(),
            Carrier::Memory(_) => 0,
        }
    }

    /// Closes all connections at once, and takes no more.
    pub fn close(&self, code: u32, reason: &str) {
        match &self.0 {
            Carrier::Quic(quic) => quic.close(code, reason),
            Carrier::Memory(memory) => memory.close(code, reason),
        }
    }

    /// Waits until closed connections have told their peers, `deadline` at most. Before a process exits, or its peers must wait for the
    /// idle timeout.
    pub async fn wait_idle(&self, deadline: Duration) {
        match &self.0 {
            Carrier::Quic(quic) => quic.wait_idle(deadline).await,
            Carrier::Memory(_) => {}
        }
    }
}

impl From<MemoryEndpoint> for Endpoint {
    fn from(memory: MemoryEndpoint) -> Self {
        Self(Carrier::Memory(Arc::new(memory)))
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}, ", self.local_addr())?;
        match self.subject() {
            Some(subject) => write!(f, "{subject})"),
            None => f.write_str("enrolling)"),
        }
    }
}

/// Whom one wants to reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expect {
    /// The role that it must have.
    pub role: Role,
    /// The node that it must be, if known.
    pub node: Option<NodeId>,
    /// SHA-256 of the certificate that it must show, if known.
    pub certificate: Option<Digest>,
}

impl Expect {
    /// Anyone of this role.
    #[must_use]
    pub fn role(role: Role) -> Self {
        Self { role, node: None, certificate: None }
    }

    /// This node.
    #[must_use]
    pub fn node(role: Role, node: NodeId) -> Self {
        Self { role, node: Some(node), certificate: None }
    }

    pub(crate) fn admits(&self, subject: &Subject, certificate: Digest) -> bool {
        self.role == subject.role
            && self.node.is_none_or(|node| node == subject.node)
            && self.certificate.is_none_or(|expected| expected == certificate)
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.role)?;
        if let Some(node) = self.node {
            write!(f, " {node}")?;
        }
        if let Some(certificate) = self.certificate {
            write!(f, " with certificate {certificate:#}")?;
        }
        Ok(())
    }
}

/// Why there is no endpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The socket can't be opened.
    #[error("can't take UDP at {address}: {source}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// Called outside a tokio runtime.
    #[error("an endpoint needs a tokio runtime")]
    NoRuntime,
    /// The identity can't be used for TLS.
    #[error("the identity can't be used: {reason}")]
    Identity {
        /// What is wrong.
        reason: String,
    },
}

/// Why there is no connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody answered in time.
    #[error("no answer from {address} within {deadline:?}")]
    Timeout {
        /// Who was called.
        address: SocketAddr,
        /// The time given.
        deadline: Duration,
    },
    /// The address can't be reached from here, or the connection broke before it stood.
    #[error("{address} can't be reached: {reason}")]
    Unreachable {
        /// Who was called.
        address: SocketAddr,
        /// What the transport says.
        reason: String,
    },
    /// The peer belongs to another cluster.
    #[error(
        "the peer's certificate is not signed by this cluster's CA: {address} belongs to another cluster"
    )]
    Foreign {
        /// Who was called.
        address: SocketAddr,
    },
    /// The peer takes us for one of another cluster.
    #[error("{address} refused our certificate: it is not signed by its cluster's CA")]
    ForeignHere {
        /// Who was called.
        address: SocketAddr,
    },
    /// A certificate is past its time, or a clock is wrong.
    #[error(
        "{owner} certificate is expired or not yet valid (called {address}): renew it, or set the clock"
    )]
    Expired {
        /// Who was called.
        address: SocketAddr,
        /// Whose certificate: "our" or "the peer's".
        owner: &'static str,
    },
    /// Somebody else answered.
    #[error("expected {expected} at {address}, found {found}")]
    WrongPeer {
        /// Who was called.
        address: SocketAddr,
        /// Who should have answered.
        expected: String,
        /// Who answered.
        found: String,
    },
    /// The peer speaks another version of the protocol, or takes no enrolments.
    #[error("{address} does not speak {ours}: use the same version of ripstop on both sides")]
    Version {
        /// Who was called.
        address: SocketAddr,
        /// What we speak.
        ours: String,
    },
    /// The peer does not want this connection.
    #[error("{address} refused: {reason}")]
    Refused {
        /// Who was called.
        address: SocketAddr,
        /// The peer's words.
        reason: String,
    },
    /// The peer has too much to do.
    #[error("{address} is busy")]
    Busy {
        /// Who was called.
        address: SocketAddr,
    },
    /// This endpoint has no certificate, or (for enrolment) has one already.
    #[error("this endpoint {reason}")]
    Unsuited {
        /// What is missing.
        reason: &'static str,
    },
    /// This endpoint is closed.
    #[error("the endpoint is closed")]
    Closed,
}

impl ConnectError {
    /// What to do next. [`Version`](Self::Version) is what exit code 76 is for.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Timeout { .. } | Self::Unreachable { .. } | Self::Busy { .. } => Remedy::Retry,
            // An address may have passed to another process; a newer world says where the peer is.
            Self::WrongPeer { .. } => Remedy::Regroup,
            Self::Foreign { .. }
            | Self::ForeignHere { .. }
            | Self::Expired { .. }
            | Self::Version { .. }
            | Self::Refused { .. }
            | Self::Unsuited { .. }
            | Self::Closed => Remedy::Stop,
        }
    }
}
