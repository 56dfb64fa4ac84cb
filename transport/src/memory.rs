//! A network inside one process, with the same endpoints and connections as the real one: for tests.
//!
//! Identities are taken at their word. Nothing is lost or reordered; [`MemoryNetwork::cut`] silences an address as a pulled cable would.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};
use types::Digest;

use crate::Arena;
use crate::identity::fingerprint;
use crate::queue::{Item, QueueReceiver, QueueSender, queue};
use crate::{
    Config, ConnectError, Connection, ConnectionError, ConnectionId, Endpoint, Expect, Frame, Lane,
    Role, Subject,
};

/// A network of endpoints in memory. Cheap to clone.
#[derive(Clone)]
pub struct MemoryNetwork(Arc<Network>);

impl MemoryNetwork {
    /// An empty network with the default time limits.
    #[must_use]
    pub fn new() -> Self {
        Self::with_config(&Config::default())
    }

    /// An empty network with these time limits.
    #[must_use]
    pub fn with_config(config: &Config) -> Self {
        let (changed, _) = watch::channel(());
        Self(Arc::new(Network { hosts: Mutex::default(), changed, idle: config.idle_timeout() }))
    }

    /// An endpoint of `subject` at `address` (port 0: any free one). Coordinators take enrolments.
    ///
    /// # Panics
    /// If the address is taken.
    #[must_use]
    pub fn endpoint(&self, subject: Subject, address: SocketAddr) -> Endpoint {
        self.bind(Some(subject), address)
    }

    /// An endpoint that can only enrol.
    ///
    /// # Panics
    /// If the address is taken.
    #[must_use]
    pub fn enrolling_endpoint(&self, address: SocketAddr) -> Endpoint {
        self.bind(None, address)
    }

    /// Silences an address: nothing reaches it and nothing leaves it. After the idle timeout its connections are lost.
    pub fn cut(&self, address: SocketAddr) {
        let Some((cut, lines)) = self.0.set_cut(address, true) else { return };
        let idle = self.0.idle;
        tokio::spawn(async move {
            let mut healed = cut.subscribe();
            let healed = healed.wait_for(|cut| !cut);
            if tokio::time::timeout(idle, healed).await.is_err() {
                for line in lines.iter().filter_map(Weak::upgrade) {
                    line.end([
                        ConnectionError::Silent { after: idle },
                        ConnectionError::Silent { after: idle },
                    ]);
                }
            }
        });
    }

    /// Undoes [`cut`](Self::cut). Connections that were not lost yet go on; frames were kept.
    pub fn heal(&self, address: SocketAddr) {
        let Some((_, lines)) = self.0.set_cut(address, false) else { return };
        for line in lines.iter().filter_map(Weak::upgrade) {
            line.end_if_half_ended();
        }
    }

    fn bind(&self, subject: Option<Subject>, mut address: SocketAddr) -> Endpoint {
        let (incoming, accepted) = mpsc::channel(MAX_UNACCEPTED);
        let (cut, _) = watch::channel(false);
        let mut hosts = self.0.hosts();
        if address.port() == 0 {
            let free = (1..=u16::MAX)
                .find(|port| !hosts.contains_key(&SocketAddr::new(address.ip(), *port)));
            address.set_port(free.expect("fewer than 65,535 endpoints in a test"));
        }
        let host =
            Host { subject: subject.clone(), incoming, cut: Arc::new(cut), lines: Vec::new() };
        assert!(hosts.insert(address, host).is_none(), "the address {address} is taken");
        drop(hosts);
        self.0.changed.send_replace(());
        MemoryEndpoint {
            network: Arc::clone(&self.0),
            subject,
            address,
            accepted: AsyncMutex::new(accepted),
            arena: Arena::private(),
        }
        .into()
    }
}

impl Default for MemoryNetwork {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryNetwork({} endpoints)", self.0.hosts().len())
    }
}

/// An endpoint of a [`MemoryNetwork`].
pub(crate) struct MemoryEndpoint {
    network: Arc<Network>,
    subject: Option<Subject>,
    address: SocketAddr,
    accepted: AsyncMutex<mpsc::Receiver<Connection>>,
    arena: Arena,
}

impl MemoryEndpoint {
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn subject(&self) -> Option<&Subject> {
        self.subject.as_ref()
    }

    pub(crate) fn certificate(&self) -> Option<Digest> {
        self.subject.as_ref().map(pretended_certificate)
    }

    /// `expect` is `None` for enrolment.
    pub(crate) async fn connect(
        &self,
        address: SocketAddr,
        expect: Option<&Expect>,
        deadline: Duration,
    ) -> Result<Connection, ConnectError> {
        match (&self.subject, expect) {
            (None, Some(_)) => {
                return Err(ConnectError::Unsuited { reason: "has no certificate: enrol first" });
            }
            (Some(_), None) => {
                return Err(ConnectError::Unsuited { reason: "has a certificate already" });
            }
            _ => {}
        }
        let dial = async {
            let mut changed = self.network.changed.subscribe();
            loop {
                changed.borrow_and_update();
                if let Some(result) = self.try_connect(address, expect) {
                    return result;
                }
                // The sender lives in the network that we hold.
                let _ = changed.changed().await;
            }
        };
        tokio::time::timeout(deadline, dial)
            .await
            .unwrap_or(Err(ConnectError::Timeout { address, deadline }))
    }

    pub(crate) async fn accept(&self) -> Option<Connection> {
        self.accepted.lock().await.recv().await
    }

    pub(crate) fn close(&self, code: u32, reason: &str) {
        let host = self.network.hosts().remove(&self.address);
        self.network.changed.send_replace(());
        for line in host.iter().flat_map(|host| &host.lines).filter_map(Weak::upgrade) {
            line.close(line.side_of(self.address), code, reason);
        }
    }

    /// `None` if there is nobody, as far as can be seen.
    fn try_connect(
        &self,
        address: SocketAddr,
        expect: Option<&Expect>,
    ) -> Option<Result<Connection, ConnectError>> {
        let mut hosts = self.network.hosts();
        let Some(own) = hosts.get(&self.address) else { return Some(Err(ConnectError::Closed)) };
        let host = hosts.get(&address)?;
        let (Some(found), false, false) =
            (host.subject.clone(), *own.cut.borrow(), *host.cut.borrow())
        else {
            return None;
        };
        let expect = expect.copied().unwrap_or(Expect::role(Role::Coordinator));
        let certificate = pretended_certificate(&found);
        if !expect.admits(&found, certificate) {
            let found = format!("{found} with certificate {certificate:#}");
            return Some(Err(ConnectError::WrongPeer {
                address,
                expected: expect.to_string(),
                found,
            }));
        }
        if self.subject.as_ref().is_some_and(|own| !own.shares_job_with(&found)) {
            return Some(Err(ConnectError::Refused {
                address,
                reason: "the two belong to different jobs".to_owned(),
            }));
        }
        let cuts = [own.cut.subscribe(), host.cut.subscribe()];
        let (here, there) =
            pair([self.address, address], [self.subject.clone(), Some(found)], cuts);
        let line = Arc::downgrade(&here.line);
        if host.incoming.try_send(there.into()).is_err() {
            return Some(Err(ConnectError::Busy { address }));
        }
        for end in [self.address, address] {
            if let Some(host) = hosts.get_mut(&end) {
                host.lines.retain(|line| line.strong_count() > 0);
                host.lines.push(Weak::clone(&line));
            }
        }
        Some(Ok(here.into()))
    }
}

impl Drop for MemoryEndpoint {
    fn drop(&mut self) {
        self.network.hosts().remove(&self.address);
        self.network.changed.send_replace(());
    }
}

/// One end of a line.
pub(crate) struct MemoryConnection {
    id: ConnectionId,
    peer: Option<Subject>,
    side: usize,
    line: Arc<Line>,
    receivers: [AsyncMutex<Incoming>; 2],
}

impl MemoryConnection {
    pub(crate) fn id(&self) -> ConnectionId {
        self.id
    }

    pub(crate) fn peer(&self) -> Option<&Subject> {
        self.peer.as_ref()
    }

    pub(crate) fn certificate(&self) -> Digest {
        self.peer.as_ref().map(pretended_certificate).unwrap_or_default()
    }

    pub(crate) fn remote_address(&self) -> SocketAddr {
        self.line.addresses[1 - self.side]
    }

    pub(crate) async fn send(&self, lane: Lane, frame: Frame) -> Result<(), ConnectionError> {
        frame.prefix()?;
        if self.line.senders[self.side][lane.index()].push(frame).await {
            Ok(())
        } else {
            Err(self.why_no_more())
        }
    }

    pub(crate) async fn recv(&self) -> Result<(Lane, Frame), ConnectionError> {
        let mut ended = self.line.ended[self.side].subscribe();
        let [mut mine, mut theirs] = self.line.cuts.clone();
        let mut finished = [false; 2];
        while finished != [true; 2] {
            tokio::select! {
                biased;
                () = async { open(&mut mine).await; open(&mut theirs).await; } => {}
                error = end(&mut ended) => return Err(error),
            }
            let (lane, frame) = tokio::select! {
                biased;
                frame = self.next(Lane::Control), if !finished[0] => (Lane::Control, frame),
                frame = self.next(Lane::Bulk), if !finished[1] => (Lane::Bulk, frame),
                error = end(&mut ended) => return Err(error),
                () = cut(&mut mine) => continue,
                () = cut(&mut theirs) => continue,
            };
            match frame {
                Some(frame) => return Ok((lane, frame)),
                None => finished[lane.index()] = true,
            }
        }
        // The bare fact that the peer has finished gives way to why it is gone.
        Err(self.line.ended[self.side].borrow().clone().unwrap_or(ConnectionError::Finished))
    }

    pub(crate) async fn finish(&self) -> Result<(), ConnectionError> {
        for sender in &self.line.senders[self.side] {
            // There is no transport that would acknowledge: what is queued has arrived, unless the line is cut.
            drop(sender.finish());
        }
        let mut ended = self.line.ended[self.side].subscribe();
        let [mut mine, mut theirs] = self.line.cuts.clone();
        tokio::select! {
            biased;
            error = end(&mut ended) => Err(error),
            () = async { open(&mut mine).await; open(&mut theirs).await; } => Ok(()),
        }
    }

    pub(crate) fn close(&self, code: u32, reason: &str) {
        self.line.close(self.side, code, reason);
    }

    pub(crate) async fn closed(&self) -> ConnectionError {
        end(&mut self.line.ended[self.side].subscribe()).await
    }

    /// The next frame of a lane; `None` when it is finished.
    async fn next(&self, lane: Lane) -> Option<Frame> {
        let mut incoming = self.receivers[lane.index()].lock().await;
        if incoming.finished {
            return None;
        }
        match incoming.queue.pop().await {
            Some(Item::Frame(frame, _)) => Some(frame),
            Some(Item::Finish(_)) | None => {
                incoming.finished = true;
                None
            }
        }
    }

    fn why_no_more(&self) -> ConnectionError {
        self.line.ended[self.side].borrow().clone().unwrap_or(ConnectionError::ClosedHere)
    }
}

impl Drop for MemoryConnection {
    fn drop(&mut self) {
        self.close(0, "dropped");
    }
}

struct Network {
    hosts: Mutex<BTreeMap<SocketAddr, Host>>,
    /// Told when a host comes, goes, is cut or healed.
    changed: watch::Sender<()>,
    idle: Duration,
}

impl Network {
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Host>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_cut(&self, address: SocketAddr, cut: bool) -> Option<(Arc<watch::Sender<bool>>, Lines)> {
        let hosts = self.hosts();
        let host = hosts.get(&address)?;
        let changed = host.cut.send_if_modified(|now| std::mem::replace(now, cut) != cut);
        let found = changed.then(|| (Arc::clone(&host.cut), host.lines.clone()));
        drop(hosts);
        self.changed.send_replace(());
        found
    }
}

type Lines = Vec<Weak<Line>>;

struct Host {
    subject: Option<Subject>,
    incoming: mpsc::Sender<Connection>,
    cut: Arc<watch::Sender<bool>>,
    lines: Lines,
}

/// What the two ends of a connection share. Side 0 made the connection.
struct Line {
    addresses: [SocketAddr; 2],
    cuts: [watch::Receiver<bool>; 2],
    ended: [watch::Sender<Option<ConnectionError>>; 2],
    /// By the side that sends, and the lane.
    senders: [[QueueSender; 2]; 2],
}

impl Line {
    fn side_of(&self, address: SocketAddr) -> usize {
        usize::from(self.addresses[0] != address)
    }

    /// Side `by` closes. The other hears of it, unless the line is cut.
    fn close(&self, by: usize, code: u32, reason: &str) {
        self.set_end(by, ConnectionError::ClosedHere);
        if !self.cuts.iter().any(|cut| *cut.borrow()) {
            self.set_end(1 - by, ConnectionError::ClosedByPeer { code, reason: reason.to_owned() });
        }
    }

    fn end(&self, [first, second]: [ConnectionError; 2]) {
        self.set_end(0, first);
        self.set_end(1, second);
    }

    /// One who went on through a cut in which the other closed, hears now that it is unknown there.
    fn end_if_half_ended(&self) {
        if self.ended.iter().any(|end| end.borrow().is_some()) {
            let lost = || ConnectionError::Lost { reason: "reset by peer".to_owned() };
            self.end([lost(), lost()]);
        }
    }

    /// Only the first reason counts.
    fn set_end(&self, side: usize, why: ConnectionError) {
        self.ended[side].send_if_modified(|end| {
            let first = end.is_none();
            if first {
                *end = Some(why);
            }
            first
        });
        for sender in &self.senders[side] {
            sender.end();
        }
    }
}

struct Incoming {
    queue: QueueReceiver,
    finished: bool,
}

fn pair(
    addresses: [SocketAddr; 2],
    subjects: [Option<Subject>; 2],
    cuts: [watch::Receiver<bool>; 2],
) -> (MemoryConnection, MemoryConnection) {
    let (to_there, at_there) = lanes();
    let (to_here, at_here) = lanes();
    let ended = [watch::channel(None).0, watch::channel(None).0];
    let line = Arc::new(Line { addresses, cuts, ended, senders: [to_there, to_here] });
    let end = |side: usize, peer: Option<Subject>, receivers| MemoryConnection {
        id: ConnectionId::next(),
        peer,
        side,
        line: Arc::clone(&line),
        receivers,
    };
    let [here, there] = subjects;
    (end(0, there, at_here), end(1, here, at_there))
}

fn lanes() -> ([QueueSender; 2], [AsyncMutex<Incoming>; 2]) {
    let [(control, control_in), (bulk, bulk_in)] = [queue(), queue()];
    let incoming = |queue| AsyncMutex::new(Incoming { queue, finished: false });
    ([control, bulk], [incoming(control_in), incoming(bulk_in)])
}

/// Without certificates, the subject itself is what is compared.
fn pretended_certificate(subject: &Subject) -> Digest {
    fingerprint(subject.to_string().as_bytes())
}

async fn open(cut: &mut watch::Receiver<bool>) {
    // A host that is gone is not cut.
    let _ = cut.wait_for(|cut| !cut).await;
}

async fn cut(cut: &mut watch::Receiver<bool>) {
    if cut.wait_for(|cut| *cut).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn end(ended: &mut watch::Receiver<Option<ConnectionError>>) -> ConnectionError {
    let end = ended.wait_for(Option::is_some).await;
    end.ok().and_then(|end| end.clone()).unwrap_or(ConnectionError::ClosedHere)
}

const MAX_UNACCEPTED: usize = 256;
