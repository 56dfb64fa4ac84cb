//! A connection to one peer: frames out and in on two lanes, and how it ends.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use types::{Digest, Remedy};

use crate::frame::{FrameError, PREFIX_BYTES};
use crate::memory::MemoryConnection;
use crate::quic::QuicConnection;
use crate::{Frame, Lane, Subject};

/// A connection to an authenticated peer. Cheap to clone; when the last clone is dropped the connection closes at once, and what was
/// not delivered yet is lost: [`finish`](Self::finish) first where that matters.
#[derive(Clone)]
#[must_use = "dropping the last clone closes the connection"]
pub struct Connection(Carrier);

#[derive(Clone)]
enum Carrier {
    Quic(Arc<QuicConnection>),
    Memory(Arc<MemoryConnection>),
}

impl Connection {
    /// The peer, as its certificate says; `None` on connections for enrolment, where the client has none.
    #[must_use]
    pub fn peer(&self) -> Option<&Subject> {
        match &self.0 {
            Carrier::Quic(quic) => quic.peer(),
            Carrier::Memory(memory) => memory.peer(),
        }
    }

    /// SHA-256 of the peer's certificate; all zeros if it has none.
    #[must_use]
    pub fn certificate(&self) -> Digest {
        match &self.0 {
            Carrier::Quic(quic) => quic.certificate(),
            Carrier::Memory(memory) => memory.certificate(),
        }
    }

    /// Where the peer is.
    #[must_use]
    pub fn remote_address(&self) -> SocketAddr {
        match &self.0 {
            Carrier::Quic(quic) => quic.remote_address(),
            Carrier::Memory(memory) => memory.remote_address(),
        }
    }

    /// A number that no other connection of this process has.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        match &self.0 {
            Carrier::Quic(quic) => quic.id(),
            Carrier::Memory(memory) => memory.id(),
        }
    }

    /// Queues a frame on a lane; waits while the lane is full. That it returns says nothing about delivery. Cancel-safe: the frame is
    /// queued whole or not at all.
    ///
    /// # Errors
    /// If the frame is over the limits, or the connection has ended or is finished.
    pub async fn send(&self, lane: Lane, frame: Frame) -> Result<(), ConnectionError> {
        match &self.0 {
            Carrier::Quic(quic) => quic.send(lane, frame).await,
            Carrier::Memory(memory) => memory.send(lane, frame).await,
        }
    }

    /// The next frame of any lane, control first. Each lane is ordered. Cancel-safe.
    ///
    /// # Errors
    /// When the connection has ended and all that came before was given out.
    pub async fn recv(&self) -> Result<(Lane, Frame), ConnectionError> {
        match &self.0 {
            Carrier::Quic(quic) => quic.recv().await,
            Carrier::Memory(memory) => memory.recv().await,
        }
    }

    /// Takes frames of one lane and throws them away unread, until `bytes` bytes of bodies in `frames` frames without heads have come: for
    /// measuring what the carrier alone can do. The lane must be between two frames.
    ///
    /// # Errors
    /// When the connection has ended before.
    pub async fn discard(
        &self,
        lane: Lane,
        bytes: u64,
        frames: u64,
    ) -> Result<(), ConnectionError> {
        match &self.0 {
            Carrier::Quic(quic) => quic.discard(lane, bytes + frames * PREFIX_BYTES as u64).await,
            Carrier::Memory(memory) => {
                for _ in 0..frames {
                    memory.recv().await?;
                }
                Ok(())
            }
        }
    }

    /// Whether the peer reads this process's [`Arena`](crate::Arena) instead of being sent what lies there.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        match &self.0 {
            Carrier::Quic(quic) => quic.shares_memory(),
            Carrier::Memory(_) => false,
        }
    }

    /// Ends both lanes after what is queued, and waits until the peer's transport has all of it. The connection stays open for what
    /// the peer sends. That its program has *handled* the frames only an answer of its own can say. Call it once.
    ///
    /// # Errors
    /// If the connection ends first, or the deadline passes.
    pub async fn finish(&self, deadline: Duration) -> Result<(), ConnectionError> {
        let finish = async {
            match &self.0 {
                Carrier::Quic(quic) => quic.finish().await,
                Carrier::Memory(memory) => memory.finish().await,
            }
        };
        tokio::time::timeout(deadline, finish)
            .await
            .unwrap_or(Err(ConnectionError::Unacknowledged { deadline }))
    }

    /// Closes at once; the peer is told the code and the reason. What is not delivered is lost.
    pub fn close(&self, code: u32, reason: &str) {
        match &self.0 {
            Carrier::Quic(quic) => quic.close(code, reason),
            Carrier::Memory(memory) => memory.close(code, reason),
        }
    }

    /// Waits until the connection has ended, and says why.
    pub async fn closed(&self) -> ConnectionError {
        match &self.0 {
            Carrier::Quic(quic) => quic.closed().await,
            Carrier::Memory(memory) => memory.closed().await,
        }
    }
}

impl From<QuicConnection> for Connection {
    fn from(quic: QuicConnection) -> Self {
        Self(Carrier::Quic(Arc::new(quic)))
    }
}

impl From<MemoryConnection> for Connection {
    fn from(memory: MemoryConnection) -> Self {
        Self(Carrier::Memory(Arc::new(memory)))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {}", self.id(), self.remote_address())?;
        match self.peer() {
            Some(peer) => write!(f, ", {peer})"),
            None => f.write_str(", enrolment)"),
        }
    }
}

/// Tells the connections of this process apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(u64);

impl ConnectionId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Why a connection ended, or does not take a frame.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer closed it.
    #[error("closed by the peer: {reason} (code {code})")]
    ClosedByPeer {
        /// The peer's code.
        code: u32,
        /// The peer's words.
        reason: String,
    },
    /// This side closed it, or has finished sending.
    #[error("closed here")]
    ClosedHere,
    /// The peer will send nothing more, and everything was received.
    #[error("the peer has finished")]
    Finished,
    /// Nothing came from the peer for the idle timeout.
    #[error("the peer has been silent for {after:?}")]
    Silent {
        /// The idle timeout.
        after: Duration,
    },
    /// The peer no longer knows the connection, or the transport broke.
    #[error("connection lost: {reason}")]
    Lost {
        /// What the transport says.
        reason: String,
    },
    /// The peer does not speak our protocol.
    #[error("the peer broke the protocol: {reason}")]
    Protocol {
        /// What it did.
        reason: String,
    },
    /// The frame is over the limits; the connection is as before.
    #[error("{part} of {bytes} bytes, allowed are {limit}: send it in several frames")]
    TooLarge {
        /// Which part.
        part: &'static str,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The peer did not acknowledge everything in time.
    #[error("the peer did not acknowledge everything within {deadline:?}")]
    Unacknowledged {
        /// The time given.
        deadline: Duration,
    },
}

impl ConnectionError {
    /// What to do next. A lost connection is dialled again, or given up with its generation.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::TooLarge { .. } | Self::Protocol { .. } => Remedy::Stop,
            Self::ClosedByPeer { .. }
            | Self::ClosedHere
            | Self::Finished
            | Self::Silent { .. }
            | Self::Lost { .. }
            | Self::Unacknowledged { .. } => Remedy::Regroup,
        }
    }
}

impl From<FrameError> for ConnectionError {
    fn from(error: FrameError) -> Self {
        Self::TooLarge { part: error.part, bytes: error.bytes, limit: error.limit }
    }
}
