//! Endpoints and connections over QUIC. Only this file and its two submodules know quinn.
//!
//! Each side opens one stream per lane as soon as it has accepted the other, and [`establish`] waits for those of the peer: so a
//! connection that was handed out is one that both sides want. Writers are tasks of their own, so that a dropped `send` never leaves
//! half a frame; readers run in `recv`, so a program that does not read slows its peer down and costs no more than the windows.

mod closing;
mod socket;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{BufMut as _, Bytes};
use quinn::AsyncUdpSocket as _;
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, EndpointConfig, IdleTimeout, Incoming, MtuDiscoveryConfig, RecvStream,
    SendStream, ServerConfig, TokioRuntime, TransportConfig, TransportErrorCode, VarInt,
};
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::debug;
use types::Digest;

use self::closing::CloseableConfig;
use self::socket::{Socket, open_socket};
use crate::frame::{Assembly, Next};
use crate::identity::fingerprint;
use crate::queue::{Item, QueueReceiver, QueueSender, queue};
use crate::shared_memory::{Offer, PeerMemory};
use crate::tls::{self, Enrolment};
use crate::{
    Arena, Config, ConnectError, Connection, ConnectionError, ConnectionId, EndpointError, Expect,
    Frame, Identity,
};
use crate::{Lane, Role, Subject};

/// An endpoint on a UDP socket.
pub(crate) struct QuicEndpoint {
    quic: quinn::Endpoint,
    local: SocketAddr,
    identity: Option<Arc<Identity>>,
    client: ClientConfig,
    idle: Duration,
    accepted: Mutex<mpsc::Receiver<Connection>>,
    acceptor: Option<JoinHandle<()>>,
    /// Set before all connections are closed at once.
    closing: Arc<AtomicBool>,
    arena: Arena,
    sent_bytes: Arc<AtomicU64>,
}

impl QuicEndpoint {
    pub(crate) fn bind(
        address: SocketAddr,
        identity: Arc<Identity>,
        config: &Config,
    ) -> Result<Self, EndpointError> {
        let enrolment =
            if config.accepts_enrolment() { Enrolment::Taken } else { Enrolment::Refused };
        let refuse = |reason: String| EndpointError::Identity { reason };
        let server = tls::server(&identity, enrolment).map_err(refuse)?;
        let server =
            QuicServerConfig::try_from(server).map_err(|error| refuse(error.to_string()))?;
        let closing = Arc::default();
        let mut server = ServerConfig::with_crypto(Arc::new(server));
        server
            .transport_config(transport(config, &closing))
            .migration(false)
            .max_incoming(MAX_INCOMING)
            .incoming_buffer_size(INCOMING_BYTES)
            .incoming_buffer_size_total(INCOMING_BYTES * MAX_INCOMING as u64);
        let client = tls::client(&identity).map_err(refuse)?;
        let mut endpoint = Self::open(address, client, Some(server), config, closing)?;
        let (sender, receiver) = mpsc::channel(MAX_UNACCEPTED);
        let host = Host {
            own: identity.subject().clone(),
            idle: config.idle_timeout(),
            arena: endpoint.arena.clone(),
        };
        endpoint.acceptor = Some(tokio::spawn(accept_all(endpoint.quic.clone(), host, sender)));
        endpoint.accepted = Mutex::new(receiver);
        endpoint.identity = Some(identity);
        Ok(endpoint)
    }

    pub(crate) fn bind_enrolling(
        address: SocketAddr,
        authority: Digest,
    ) -> Result<Self, EndpointError> {
        let client = tls::enrolling_client(authority)
            .map_err(|reason| EndpointError::Identity { reason })?;
        Self::open(address, client, None, &Config::default(), Arc::default())
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_deref()
    }

    pub(crate) async fn connect(
        &self,
        address: SocketAddr,
        expect: &Expect,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        if self.identity.is_none() {
            return Err(ConnectError::Unsuited { reason: "has no certificate: enrol first" });
        }
        self.dial(address, expect, deadline).await
    }

    pub(crate) async fn connect_enrol(
        &self,
        address: SocketAddr,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        if self.identity.is_some() {
            return Err(ConnectError::Unsuited { reason: "has a certificate already" });
        }
        // Any process of the cluster has a certificate of its CA, but only a coordinator may be told a join token.
        self.dial(address, &Expect::role(Role::Coordinator), deadline).await
    }

    pub(crate) async fn accept(&self) -> Option<Connection> {
        self.accepted.lock().await.recv().await
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn sent_wire_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self, code: u32, reason: &str) {
        self.closing.store(true, Ordering::Relaxed);
        self.quic.close(code.into(), reason.as_bytes());
    }

    pub(crate) async fn wait_idle(&self, deadline: Duration) {
        if timeout(deadline, self.quic.wait_idle()).await.is_err() {
            debug!(endpoint = %self.local, "some peers were not told that their connection is closed");
        }
    }

    async fn dial(
        &self,
        address: SocketAddr,
        expect: &Expect,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        let dial = async {
            let connecting = self.quic.connect_with(self.client.clone(), address, tls::SERVER_NAME);
            let connecting = connecting.map_err(|error| match error {
                quinn::ConnectError::EndpointStopping => ConnectError::Closed,
                error => ConnectError::Unreachable { address, reason: error.to_string() },
            })?;
            let failed = |error| self.connect_error(address, deadline, error);
            let quic = connecting.await.map_err(failed)?;
            let (peer, certificate) = self.check_server(address, expect, &quic)?;
            let established = establish(&quic, &self.arena).await.map_err(|error| match error {
                Some(error) => failed(error),
                None => ConnectError::Unreachable { address, reason: STRANGE_LANES.to_owned() },
            })?;
            Ok(QuicConnection::start(quic, Some(peer), certificate, self.idle, established).into())
        };
        timeout(deadline, dial).await.unwrap_or(Err(ConnectError::Timeout { address, deadline }))
    }

    fn check_server(
        &self,
        address: SocketAddr,
        expect: &Expect,
        quic: &quinn::Connection,
    ) -> Result<(Subject, Digest), ConnectError> {
        let wrong = |found: String| {
            closing::close(quic, Refusal::WrongPeer.code(), &found);
            Err(ConnectError::WrongPeer { address, expected: expect.to_string(), found })
        };
        let Some(der) = peer_certificate(quic) else {
            return wrong("a peer without a certificate".to_owned());
        };
        let certificate = fingerprint(&der);
        let subject = match Subject::from_certificate(&der) {
            Ok(subject) => subject,
            Err(error) => return wrong(error.to_string()),
        };
        if !expect.admits(&subject, certificate) {
            return wrong(format!("{subject} with certificate {certificate:#}"));
        }
        if self.identity.as_ref().is_some_and(|own| !own.subject().shares_job_with(&subject)) {
            return wrong(format!("{subject}, which is of another job"));
        }
        Ok((subject, certificate))
    }

    fn connect_error(
        &self,
        address: SocketAddr,
        deadline: Duration,
        error: quinn::ConnectionError,
    ) -> ConnectError {
        use quinn::ConnectionError as Quic;
        let (code, by_peer) = match &error {
            Quic::TransportError(error) => (error.code, false),
            Quic::ConnectionClosed(close) => (close.error_code, true),
            Quic::ApplicationClosed(close) if close.error_code == Refusal::Busy.code() => {
                return ConnectError::Busy { address };
            }
            Quic::ApplicationClosed(close) => {
                return ConnectError::Refused { address, reason: printable(&close.reason) };
            }
            Quic::TimedOut => {
                return ConnectError::Timeout { address, deadline: deadline.min(self.idle) };
            }
            Quic::LocallyClosed => return ConnectError::Closed,
            Quic::VersionMismatch => {
                return ConnectError::Version { address, ours: "QUIC version 1".to_owned() };
            }
            Quic::Reset | Quic::CidsExhausted => {
                return ConnectError::Unreachable { address, reason: error.to_string() };
            }
        };
        let alert = |alert| code == TransportErrorCode::crypto(alert);
        if code == TransportErrorCode::CONNECTION_REFUSED {
            ConnectError::Busy { address }
        } else if alert(ALERT_UNKNOWN_CA) {
            if by_peer {
                ConnectError::ForeignHere { address }
            } else {
                ConnectError::Foreign { address }
            }
        } else if alert(ALERT_CERTIFICATE_EXPIRED) {
            ConnectError::Expired { address, owner: if by_peer { "our" } else { "the peer's" } }
        } else if alert(ALERT_NO_APPLICATION_PROTOCOL) {
            let ours = if self.identity.is_some() { tls::alpn() } else { tls::enrol_alpn() };
            ConnectError::Version { address, ours: printable(&ours) }
        } else {
            ConnectError::Unreachable { address, reason: error.to_string() }
        }
    }

    fn open(
        address: SocketAddr,
        client: rustls::ClientConfig,
        server: Option<ServerConfig>,
        config: &Config,
        closing: Arc<AtomicBool>,
    ) -> Result<Self, EndpointError> {
        tokio::runtime::Handle::try_current().map_err(|_| EndpointError::NoRuntime)?;
        let client = QuicClientConfig::try_from(client)
            .map_err(|error| EndpointError::Identity { reason: error.to_string() })?;
        let mut client = ClientConfig::new(Arc::new(client));
        client.transport_config(transport(config, &closing));
        let failed = |source| EndpointError::Bind { address, source };
        let sent_bytes = Arc::default();
        let socket = open_socket(address)
            .and_then(|socket| Socket::new(socket, config, Arc::clone(&sent_bytes)))
            .map_err(failed)?;
        let local = socket.local_addr().map_err(failed)?;
        let mut settings = EndpointConfig::default();
        settings.max_udp_payload_size(config.max_mtu()).expect("a Config has at least 1,200");
        let runtime = Arc::new(TokioRuntime);
        let quic =
            quinn::Endpoint::new_with_abstract_socket(settings, server, Arc::new(socket), runtime);
        Ok(Self {
            quic: quic.map_err(failed)?,
            local,
            identity: None,
            client,
            idle: config.idle_timeout(),
            accepted: Mutex::new(mpsc::channel(1).1),
            acceptor: None,
            closing,
            arena: if config.shares_memory() { Arena::shared() } else { Arena::private() },
            sent_bytes,
        })
    }
}

impl Drop for QuicEndpoint {
    fn drop(&mut self) {
        self.quic.set_server_config(None);
        if let Some(acceptor) = &self.acceptor {
            acceptor.abort();
        }
    }
}

/// A connection between two endpoints that have accepted each other.
pub(crate) struct QuicConnection {
    id: ConnectionId,
    quic: quinn::Connection,
    peer: Option<Subject>,
    certificate: Digest,
    idle: Duration,
    senders: [QueueSender; 2],
    readers: [Mutex<LaneReader>; 2],
    /// The peer's memory, if it lies on this host and both sides share.
    peer_memory: Option<PeerMemory>,
    /// What the peer may read of this process.
    shared: Option<Arena>,
    /// Why this side broke it off, where it is more than "closed here".
    fault: OnceLock<ConnectionError>,
}

impl QuicConnection {
    fn start(
        quic: quinn::Connection,
        peer: Option<Subject>,
        certificate: Digest,
        idle: Duration,
        established: Established,
    ) -> Self {
        let Established { outgoing, incoming, peer_memory, shared } = established;
        let senders = outgoing.map(|stream| {
            let (sender, receiver) = queue();
            tokio::spawn(write_lane(stream, receiver, shared.clone()));
            sender
        });
        let readers =
            incoming.map(|stream| Mutex::new(LaneReader { stream, assembly: Assembly::default() }));
        Self {
            id: ConnectionId::next(),
            quic,
            peer,
            certificate,
            idle,
            senders,
            readers,
            peer_memory,
            shared,
            fault: OnceLock::new(),
        }
    }

    pub(crate) fn id(&self) -> ConnectionId {
        self.id
    }

    pub(crate) fn peer(&self) -> Option<&Subject> {
        self.peer.as_ref()
    }

    pub(crate) fn certificate(&self) -> Digest {
        self.certificate
    }

    pub(crate) fn remote_address(&self) -> SocketAddr {
        canonical(self.quic.remote_address())
    }

    pub(crate) async fn send(&self, lane: Lane, frame: Frame) -> Result<(), ConnectionError> {
        frame.prefix()?;
        // An idle writer does not notice the end of the connection.
        let open = self.quic.close_reason().is_none();
        if open && self.senders[lane.index()].push(frame).await {
            Ok(())
        } else {
            Err(self.why_ended())
        }
    }

    pub(crate) async fn recv(&self) -> Result<(Lane, Frame), ConnectionError> {
        let (control, bulk) = (self.read(Lane::Control), self.read(Lane::Bulk));
        tokio::pin!(control, bulk);
        let mut open = [true; 2];
        let mut why = ConnectionError::Finished;
        while open != [false; 2] {
            let (lane, read) = tokio::select! {
                biased;
                read = &mut control, if open[0] => (Lane::Control, read),
                read = &mut bulk, if open[1] => (Lane::Bulk, read),
            };
            // A lane that has ended does not hide what still stands in the other.
            match read {
                Ok(Some(frame)) => return Ok((lane, frame)),
                Ok(None) => {}
                Err(error) => why = error,
            }
            open[lane.index()] = false;
        }
        Err(why)
    }

    pub(crate) async fn discard(&self, lane: Lane, bytes: u64) -> Result<(), ConnectionError> {
        let mut reader = self.readers[lane.index()].lock().await;
        let mut left = bytes;
        while left > 0 {
            let limit = usize::try_from(left).unwrap_or(usize::MAX);
            match reader.stream.read_chunk(limit, true).await {
                Ok(Some(chunk)) => left -= chunk.bytes.len() as u64,
                Ok(None) | Err(_) => return Err(self.why_ended()),
            }
        }
        Ok(())
    }

    pub(crate) fn shares_memory(&self) -> bool {
        self.shared.is_some()
    }

    pub(crate) async fn finish(&self) -> Result<(), ConnectionError> {
        // Both at once, then wait for both.
        for heard in [self.senders[0].finish(), self.senders[1].finish()] {
            heard.await.map_err(|_| self.why_ended())?;
        }
        Ok(())
    }

    pub(crate) fn close(&self, code: u32, reason: &str) {
        closing::close(&self.quic, code.into(), reason);
    }

    pub(crate) async fn closed(&self) -> ConnectionError {
        let error = self.quic.closed().await;
        self.fault.get().cloned().unwrap_or_else(|| self.connection_error(error))
    }

    /// The next frame of a lane; `None` when the peer has finished it. Cancel-safe: what has arrived stays in the reader.
    async fn read(&self, lane: Lane) -> Result<Option<Frame>, ConnectionError> {
        let mut reader = self.readers[lane.index()].lock().await;
        let LaneReader { stream, assembly } = &mut *reader;
        loop {
            match assembly.next() {
                Ok(Next::Done(frame)) => return Ok(Some(frame)),
                Ok(Next::Elsewhere { head, location }) => {
                    let memory = self.peer_memory.as_ref();
                    let read = memory.ok_or_else(|| "memory that it never offered".to_owned());
                    let read = read.and_then(|m| m.read(location).map_err(|e| e.to_string()));
                    return match read {
                        Ok(body) => Ok(Some(Frame { head, body })),
                        Err(reason) => {
                            Err(self.break_off(format!("a frame in shared memory: {reason}")))
                        }
                    };
                }
                Ok(Next::Read { into, limit }) => match stream
                    .read_buf(&mut into.limit(limit))
                    .await
                {
                    Ok(0) if assembly.is_empty() => return Ok(None),
                    Ok(0) => return Err(self.break_off("a lane ended inside a frame".to_owned())),
                    Ok(_) => {}
                    Err(_) => return Err(self.why_ended()),
                },
                Err(error) => return Err(self.break_off(error.to_string())),
            }
        }
    }

    fn break_off(&self, reason: String) -> ConnectionError {
        closing::close(&self.quic, Refusal::Protocol.code(), &reason);
        self.fault.get_or_init(|| ConnectionError::Protocol { reason }).clone()
    }

    fn why_ended(&self) -> ConnectionError {
        match (self.fault.get(), self.quic.close_reason()) {
            (Some(fault), _) => fault.clone(),
            (None, Some(error)) => self.connection_error(error),
            (None, None) => ConnectionError::ClosedHere,
        }
    }

    fn connection_error(&self, error: quinn::ConnectionError) -> ConnectionError {
        use quinn::ConnectionError as Quic;
        match error {
            Quic::ApplicationClosed(close) => {
                // Our own codes are 32 bits long; what is longer is nobody's.
                let code = u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX);
                ConnectionError::ClosedByPeer { code, reason: printable(&close.reason) }
            }
            Quic::LocallyClosed => ConnectionError::ClosedHere,
            Quic::TimedOut => ConnectionError::Silent { after: self.idle },
            error => ConnectionError::Lost { reason: error.to_string() },
        }
    }
}

impl Drop for QuicConnection {
    fn drop(&mut self) {
        closing::close(&self.quic, VarInt::from_u32(0), "dropped");
    }
}

struct Established {
    outgoing: [SendStream; 2],
    incoming: [RecvStream; 2],
    peer_memory: Option<PeerMemory>,
    shared: Option<Arena>,
}

struct LaneReader {
    stream: RecvStream,
    assembly: Assembly,
}

/// Writes what is queued, until the queue or the connection ends.
async fn write_lane(mut stream: SendStream, mut queue: QueueReceiver, shared: Option<Arena>) {
    while let Some(item) = queue.pop().await {
        match item {
            Item::Frame(frame, room) => {
                let location = shared
                    .as_ref()
                    .filter(|_| frame.body.len() >= SHARED_BODY_BYTES_MIN)
                    .and_then(|arena| arena.locate(&frame.body));
                let prefix = match location {
                    Some(_) => frame.prefix_elsewhere(),
                    None => frame.prefix(),
                };
                let Ok(prefix) = prefix else { continue };
                let body = match location {
                    Some(at) => Bytes::copy_from_slice(&at.encode()),
                    None => frame.body,
                };
                if stream.write_all_chunks(&mut [prefix, frame.head, body]).await.is_err() {
                    return;
                }
                drop(room);
            }
            Item::Finish(done) => {
                if stream.finish().is_ok() && matches!(stream.stopped().await, Ok(None)) {
                    // Whoever asked may have given up.
                    let _ = done.send(());
                }
                return;
            }
        }
    }
}

/// Opens the lanes in both directions. The peer opens its own when it has accepted us. The error is `None` where the peer's lanes are
/// not ours.
///
/// On the control lane both say in addition whether others on their host may read their memory, and then whether they can read the
/// peer's.
async fn establish(
    quic: &quinn::Connection,
    arena: &Arena,
) -> Result<Established, Option<quinn::ConnectionError>> {
    let strange = || {
        let lost = quic.close_reason();
        closing::close(quic, Refusal::Protocol.code(), STRANGE_LANES);
        lost
    };
    let mut outgoing = Vec::with_capacity(2);
    for lane in Lane::ALL {
        let mut stream = quic.open_uni().await.map_err(Some)?;
        let set = stream.set_priority(if lane == Lane::Control { 1 } else { 0 });
        // The peer hears of a stream by its first byte, which says which lane it is.
        if set.is_err() || stream.write_all(&[lane as u8]).await.is_err() {
            return Err(strange());
        }
        outgoing.push(stream);
    }
    let mut incoming = [None, None];
    for _ in Lane::ALL {
        let mut stream = quic.accept_uni().await.map_err(Some)?;
        let mut tag = [0];
        let read = stream.read_exact(&mut tag).await;
        match incoming.get_mut(usize::from(tag[0])) {
            Some(free @ None) if read.is_ok() => *free = Some(stream),
            _ => return Err(strange()),
        }
    }
    let (Ok(mut outgoing), [Some(mut control), Some(bulk)]) =
        (<[_; 2]>::try_from(outgoing), incoming)
    else {
        unreachable!("each loop ran for both lanes")
    };
    let Some((peer_memory, is_read)) = share(&mut outgoing[0], &mut control, arena).await else {
        return Err(strange());
    };
    let shared = is_read.then(|| arena.clone());
    Ok(Established { outgoing, incoming: [control, bulk], peer_memory, shared })
}

/// Offers this process's memory to the peer and takes its offer: the peer's memory, and whether the peer reads ours.
async fn share(
    stream: &mut SendStream,
    incoming: &mut RecvStream,
    arena: &Arena,
) -> Option<(Option<PeerMemory>, bool)> {
    let offer = arena.offer();
    let mut own = [0; 1 + Offer::BYTES];
    if let Some(offer) = offer {
        own[0] = 1;
        own[1..].copy_from_slice(&offer.encode());
    }
    stream.write_all(&own).await.ok()?;
    let mut theirs = [0; 1 + Offer::BYTES];
    incoming.read_exact(&mut theirs).await.ok()?;
    let theirs =
        theirs.split_first_chunk().filter(|(is_there, _): &(&[u8; 1], _)| **is_there == [1]);
    let theirs = theirs.and_then(|(_, rest)| rest.first_chunk()).map(Offer::decode);
    // Both or none: who keeps its own memory to itself reads nobody's.
    let memory = offer.and(theirs).and_then(|offer| match PeerMemory::open(offer) {
        Ok(memory) => Some(memory),
        Err(reason) => {
            debug!(reason, "a peer's memory is not read");
            None
        }
    });
    stream.write_all(&[u8::from(memory.is_some())]).await.ok()?;
    let mut answer = [0];
    incoming.read_exact(&mut answer).await.ok()?;
    Some((memory, answer == [1]))
}

/// Takes connections until the endpoint closes.
async fn accept_all(quic: quinn::Endpoint, host: Host, accepted: mpsc::Sender<Connection>) {
    let host = Arc::new(host);
    let pending = Arc::new(Semaphore::new(MAX_PENDING));
    loop {
        // While all places are taken, those who knock wait in quinn's own bounded queue.
        let Ok(place) = Arc::clone(&pending).acquire_owned().await else { return };
        let Some(incoming) = quic.accept().await else { return };
        if pending.available_permits() < MAX_PENDING - UNVALIDATED_PENDING && incoming.may_retry() {
            // Under load, only those who get our answer at their address.
            if let Err(error) = incoming.retry() {
                debug!(%error, "no retry was possible");
            }
            continue;
        }
        let (host, accepted) = (Arc::clone(&host), accepted.clone());
        tokio::spawn(async move {
            let address = canonical(incoming.remote_address());
            match timeout(HANDSHAKE_DEADLINE, take(incoming, &host)).await {
                Ok(Ok(connection)) => {
                    if let Err(error) = accepted.try_send(connection) {
                        debug!(%address, "connection dropped: nobody accepts it");
                        error
                            .into_inner()
                            .close(Refusal::Busy as u32, "nobody accepts the connection");
                    }
                }
                Ok(Err(reason)) => debug!(%address, reason, "connection refused"),
                Err(_) => debug!(%address, "connection refused: handshake not done in time"),
            }
            drop(place);
        });
    }
}

/// The side that takes connections.
struct Host {
    own: Subject,
    idle: Duration,
    arena: Arena,
}

/// Takes one connection, or says why not.
async fn take(incoming: Incoming, host: &Host) -> Result<Connection, String> {
    let own = &host.own;
    let quic = incoming.await.map_err(|error| error.to_string())?;
    let refuse = |refusal: Refusal, reason: String| {
        closing::close(&quic, refusal.code(), &reason);
        Err(reason)
    };
    let protocol =
        quic.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok()?.protocol);
    let (peer, certificate) = if protocol == Some(tls::enrol_alpn()) {
        (None, Digest::default())
    } else {
        let Some(der) = peer_certificate(&quic) else {
            return refuse(
                Refusal::NoCertificate,
                "a certificate is needed here: enrol first".to_owned(),
            );
        };
        match Subject::from_certificate(&der) {
            Err(error) => return refuse(Refusal::WrongPeer, error.to_string()),
            Ok(peer) if !own.shares_job_with(&peer) => {
                return refuse(
                    Refusal::WrongPeer,
                    format!("{own} and {peer} belong to different jobs"),
                );
            }
            Ok(peer) => (Some(peer), fingerprint(&der)),
        }
    };
    let lanes = establish(&quic, &host.arena).await;
    let lanes =
        lanes.map_err(|error| error.map_or(STRANGE_LANES.to_owned(), |error| error.to_string()))?;
    Ok(QuicConnection::start(quic, peer, certificate, host.idle, lanes).into())
}

fn peer_certificate(quic: &quinn::Connection) -> Option<CertificateDer<'static>> {
    let chain = quic.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    chain.into_iter().next()
}

/// What a peer said, fit for a log: it may not have proven who it is.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_REASON_BYTES)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

fn transport(config: &Config, closing: &Arc<AtomicBool>) -> Arc<TransportConfig> {
    let initial_window = INITIAL_WINDOW_PACKETS * u64::from(config.max_mtu());
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(config.max_mtu());
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .max_concurrent_uni_streams(VarInt::from_u32(Lane::ALL.len() as u32))
        .datagram_receive_buffer_size(None)
        .stream_receive_window(config.stream_window_bytes().into())
        .receive_window(config.connection_window_bytes().into())
        .send_window(config.send_window_bytes().into())
        .initial_rtt(INITIAL_RTT)
        .congestion_controller_factory(Arc::new(CloseableConfig::new(initial_window, closing)))
        .mtu_discovery_config(Some(discovery))
        .keep_alive_interval(Some(config.keep_alive()))
        .max_idle_timeout(Some(
            IdleTimeout::try_from(config.idle_timeout()).expect("a Config has at most 50 minutes"),
        ));
    Arc::new(transport)
}

/// Codes with which the transport itself closes. Programs choose theirs below.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
enum Refusal {
    NoCertificate = 0x7269_7001,
    WrongPeer = 0x7269_7002,
    Protocol = 0x7269_7003,
    Busy = 0x7269_7004,
}

impl Refusal {
    fn code(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }
}

/// RFC 8446, section 6.
const ALERT_CERTIFICATE_EXPIRED: u8 = 45;
const ALERT_UNKNOWN_CA: u8 = 48;
/// RFC 7301, section 3.2.
const ALERT_NO_APPLICATION_PROTOCOL: u8 = 120;

/// Of one network; the default of 333 ms would make the first lost packet cost a second.
const INITIAL_RTT: Duration = Duration::from_millis(2);
/// RFC 9002, section 7.2, for the packets that we hope for.
const INITIAL_WINDOW_PACKETS: u64 = 10;
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(3);
/// Handshakes at a time; each costs some signatures.
const MAX_PENDING: usize = 64;
/// Handshakes at a time before a client must show that its address is its own.
const UNVALIDATED_PENDING: usize = 16;
/// Clients that wait for a place.
const MAX_INCOMING: usize = 256;
const INCOMING_BYTES: u64 = 16 << 10;
/// Established connections that wait for `accept`.
const MAX_UNACCEPTED: usize = 256;
const MAX_REASON_BYTES: usize = 512;
/// Smaller bodies go with their heads: a page is not worth a reference.
const SHARED_BODY_BYTES_MIN: usize = 256;
const STRANGE_LANES: &str = "the other side did not open the lanes of this protocol";
