//! Endpoints of either kind, and the words that the tests share.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ripstop_transport::{
    CertificateAuthority, Config, Connection, Endpoint, Expect, Frame, MemoryNetwork, Role, Subject,
};
use types::{JobId, NodeId};

pub(crate) const DAY: Duration = Duration::from_secs(86_400);
/// Far beyond what a loaded machine needs; no test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) enum Network {
    Quic(Box<CertificateAuthority>),
    Memory(MemoryNetwork),
}

impl Network {
    pub(crate) fn quic() -> Self {
        Self::Quic(Box::new(CertificateAuthority::create().unwrap()))
    }

    pub(crate) fn memory() -> Self {
        Self::Memory(MemoryNetwork::with_config(&patient()))
    }

    pub(crate) fn endpoint(&self, subject: &Subject) -> Endpoint {
        match self {
            Self::Quic(authority) => {
                let identity = Arc::new(authority.identity(subject, DAY).unwrap());
                let enrols = subject.role == Role::Coordinator;
                let config = if enrols { enrolling() } else { patient() };
                Endpoint::bind(loopback(), identity, &config).unwrap()
            }
            Self::Memory(network) => network.endpoint(subject.clone(), loopback()),
        }
    }

    pub(crate) fn enrolling_endpoint(&self) -> Endpoint {
        match self {
            Self::Quic(authority) => {
                Endpoint::bind_enrolling(loopback(), authority.fingerprint()).unwrap()
            }
            Self::Memory(network) => network.enrolling_endpoint(loopback()),
        }
    }

    /// Two workers with a connection between them. The endpoints come along, or they would be gone.
    pub(crate) async fn connection(&self) -> (Connection, Connection, [Endpoint; 2]) {
        let (near, far) = (self.endpoint(&worker(1)), self.endpoint(&worker(2)));
        let expect = Expect::node(Role::Worker, NodeId(2));
        let connection = near.connect(far.local_addr(), &expect, PATIENCE).await.unwrap();
        let accepted = far.accept().await.unwrap();
        (connection, accepted, [near, far])
    }
}

pub(crate) fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub(crate) fn patient() -> Config {
    Config::builder().recovery_target(Duration::from_secs(12)).build().unwrap()
}

pub(crate) fn enrolling() -> Config {
    Config::builder().recovery_target(Duration::from_secs(12)).accept_enrolment().build().unwrap()
}

pub(crate) fn worker(node: u64) -> Subject {
    Subject { role: Role::Worker, job: Some(JobId::new("demo").unwrap()), node: NodeId(node) }
}

pub(crate) fn coordinator() -> Subject {
    Subject { role: Role::Coordinator, job: None, node: NodeId(100) }
}

pub(crate) fn frame(number: u32, body_bytes: usize) -> Frame {
    let body: Vec<u8> = (0..body_bytes)
        .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ number as u8)
        .collect();
    Frame { head: number.to_le_bytes().to_vec().into(), body: body.into() }
}

pub(crate) fn number(frame: &Frame) -> u32 {
    u32::from_le_bytes(frame.head.as_ref().try_into().unwrap())
}
