//! Who is at the other end of a control connection.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use types::{JobId, NodeId};

/// A peer of a coordinator, as its certificate names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its connection.
    pub key: ConnectionKey,
    /// What it is.
    pub role: Role,
    /// Its node id.
    pub node: NodeId,
    /// The only job that it may speak for; `None`: any.
    pub job: Option<JobId>,
}

impl Peer {
    /// Whether its certificate lets it speak for a job.
    #[must_use]
    pub fn may_speak_for(&self, job: &JobId) -> bool {
        self.job.as_ref().is_none_or(|own| own == job)
    }
}

/// One control connection at one coordinator process; never reused while that process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionKey(pub u64);

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// A Raft voter.
    Coordinator,
    /// Starts and watches the workers of one host.
    Agent,
    /// Trains.
    Worker,
    /// A person's command line.
    Operator,
}

impl Role {
    /// The name, as it stands in certificates.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Agent => "agent",
            Self::Worker => "worker",
            Self::Operator => "operator",
        }
    }
}

/// A request for a certificate by join token. The shell has checked the token's secret; whether uses are left is for the log to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrollRequest {
    /// The connection to answer on.
    pub key: ConnectionKey,
    /// The token's name, under which its uses are counted; not a secret.
    pub token: [u8; 16],
    /// How often the token may be used.
    pub uses: u32,
    /// The only job of the certificate; `None`: any.
    pub job: Option<JobId>,
    /// The role of the certificate.
    pub role: Role,
    /// The certificate signing request.
    pub csr: Bytes,
}
