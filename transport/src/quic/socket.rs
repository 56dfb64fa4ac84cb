//! The UDP socket under an endpoint.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime as _, TokioRuntime, UdpPoller};
use tracing::debug;

use crate::Config;

/// quinn's socket, without two traps: a batch larger than a UDP packet is lost silently, and an error of one packet must not end the
/// endpoint.
pub(super) struct Socket {
    inner: Arc<dyn AsyncUdpSocket>,
    max_mtu: usize,
    sent_bytes: Arc<AtomicU64>,
}

impl Socket {
    pub(super) fn new(
        socket: std::net::UdpSocket,
        config: &Config,
        sent_bytes: Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let inner = TokioRuntime.wrap_udp_socket(socket)?;
        Ok(Self { inner, max_mtu: config.max_mtu().into(), sent_bytes })
    }

    fn send_some(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        match self.inner.try_send(transmit) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                // QUIC sends again what is lost, and gives up a path that loses all.
                debug!(%error, to = %transmit.destination, "a packet could not be sent");
                Ok(())
            }
            Ok(()) => {
                self.sent_bytes.fetch_add(transmit.contents.len() as u64, Ordering::Relaxed);
                Ok(())
            }
            full => full,
        }
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Some(segment) =
            transmit.segment_size.filter(|_| transmit.contents.len() > MAX_UDP_BYTES)
        else {
            return self.send_some(transmit);
        };
        let batch = (MAX_UDP_BYTES / segment).max(1) * segment;
        for contents in transmit.contents.chunks(batch) {
            let segment_size = (contents.len() > segment).then_some(segment);
            // If the socket fills up between two batches, quinn sends all of them again; QUIC drops doubles.
            self.send_some(&Transmit { contents, segment_size, ..transmit.clone() })?;
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        match self.inner.poll_recv(cx, bufs, meta) {
            Poll::Ready(Err(error)) => {
                debug!(%error, "receiving failed once");
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            received => received,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    /// quinn reserves this many times the largest packet for each of 32 buffers. The kernel never joins more than a UDP packet holds, so
    /// this is enough, and 64 would cost 18 MiB per endpoint.
    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments().min(usize::from(u16::MAX).div_ceil(self.max_mtu))
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Opens a UDP socket with buffers as large as the system allows.
pub(super) fn open_socket(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    use socket2::{Domain, Protocol, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    // Larger buffers and IPv4 on an IPv6 socket are welcome, not needed: the system may refuse.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    if address.is_ipv6() {
        let _ = socket.set_only_v6(false);
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Largest UDP payload in IPv4: 65,535 without two headers.
const MAX_UDP_BYTES: usize = 65_507;
const SOCKET_BUFFER_BYTES: usize = 8 << 20;
