//! How processes get their certificates: from a certificate authority at hand, or from a coordinator for a join token.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use transport::{CsrKey, Endpoint, Frame, Identity, JoinToken, Lane};
use types::{NodeId, decode, encode};

use crate::error::Error;

/// What a process that has no certificate yet asks of a coordinator, over the enrolment protocol.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EnrolRequest {
    /// The token's text.
    pub(crate) token: String,
    /// A signing request; the names in it are ignored.
    pub(crate) csr: Bytes,
}

/// The coordinator's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum EnrolAnswer {
    /// A certificate for this node, and the authority's.
    Enrolled {
        /// The node id; never reused.
        node: NodeId,
        /// The certificate.
        certificate: Bytes,
        /// The authority's certificate.
        authority: Bytes,
    },
    /// Another coordinator leads.
    NotLeader {
        /// Which, if known.
        leader: Option<SocketAddr>,
    },
    /// Refused.
    Refused {
        /// Exit code.
        code: u8,
        /// Why, and what to do.
        reason: String,
    },
}

/// Exchanges a join token for an identity. Asks every coordinator until one answers or the deadline has passed.
pub(crate) async fn enrol(
    token: &str,
    coordinators: &[SocketAddr],
    deadline: Duration,
) -> Result<Arc<Identity>, Error> {
    let parsed: JoinToken =
        token.parse().map_err(|e| Error::Settings(format!("the join token is wrong: {e}")))?;
    let unspecified = crate::drivers::control::any_address(coordinators.first());
    let endpoint = Endpoint::bind_enrolling(unspecified, parsed.authority())
        .map_err(|e| Error::Transport { context: "opening an endpoint", reason: e.to_string() })?;
    let (csr, key) = CsrKey::generate()
        .map_err(|e| Error::Transport { context: "making a key", reason: e.to_string() })?;
    let request = EnrolRequest { token: token.to_owned(), csr };
    let answer =
        tokio::time::timeout(deadline, ask_until_answered(&endpoint, coordinators, &request)).await;
    endpoint.close(0, "enrolled");
    let unreachable = || Error::Unreachable {
        waited_s: deadline.as_secs(),
        addresses: coordinators.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    };
    let answer = answer.map_err(|_| unreachable())??;
    match answer {
        EnrolAnswer::Enrolled { certificate, authority, .. } => {
            let identity = key.into_identity(certificate, authority).map_err(|e| {
                Error::Transport { context: "taking the certificate", reason: e.to_string() }
            })?;
            Ok(Arc::new(identity))
        }
        EnrolAnswer::Refused { code, reason } => Err(Error::Refused { code, reason }),
        EnrolAnswer::NotLeader { .. } => Err(unreachable()),
    }
}

async fn ask_until_answered(
    endpoint: &Endpoint,
    coordinators: &[SocketAddr],
    request: &EnrolRequest,
) -> Result<EnrolAnswer, Error> {
    let mut turn = 0_usize;
    let mut hint = None;
    loop {
        let address = hint.take().unwrap_or(coordinators[turn % coordinators.len()]);
        turn += 1;
        match ask(endpoint, address, request).await {
            Ok(EnrolAnswer::NotLeader { leader }) => hint = leader.filter(|l| *l != address),
            Ok(answer) => return Ok(answer),
            Err(transport::ConnectError::Foreign { .. }) => {
                return Err(Error::Refused {
                    code: 78,
                    reason: format!(
                        "the coordinator at {address} is of another cluster than the join token: make a token with its own `ripstop certs token`"
                    ),
                });
            }
            Err(error) => tracing::debug!(%address, %error, "no enrolment there yet"),
        }
        tokio::time::sleep(ENROL_PAUSE).await;
    }
}

async fn ask(
    endpoint: &Endpoint,
    address: SocketAddr,
    request: &EnrolRequest,
) -> Result<EnrolAnswer, transport::ConnectError> {
    let connection = endpoint.connect_enrol(address, ENROL_DEADLINE).await?;
    let conversation = async {
        connection.send(Lane::Control, Frame::message(encode(request))).await.ok()?;
        let (_, frame) = connection.recv().await.ok()?;
        decode::<EnrolAnswer>(&frame.head).ok()
    };
    let answer = tokio::time::timeout(ENROL_DEADLINE, conversation).await.ok().flatten();
    connection.close(0, "done");
    Ok(answer.unwrap_or(EnrolAnswer::NotLeader { leader: None }))
}

/// The endpoint settings that follow from the recovery target.
pub(crate) fn endpoint_config(recovery_target: Duration) -> Result<transport::Config, Error> {
    transport::Config::builder()
        .recovery_target(recovery_target)
        .build()
        .map_err(|e| Error::Settings(format!("recovery_target: {e}")))
}

const ENROL_DEADLINE: Duration = Duration::from_secs(5);
const ENROL_PAUSE: Duration = Duration::from_millis(100);
