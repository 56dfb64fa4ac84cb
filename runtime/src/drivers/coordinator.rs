//! Runs a [`Coordinator`] machine: its log on disk, its links to the other coordinators, and everybody's control connections.
//!
//! One thread owns the machine and the log. It makes a write durable before it tells the machine so, and the machine offers no message that
//! depends on it before. A disk that fails ends the process: nothing may be acknowledged after that.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use bytes::Bytes;
use membership::{
    Action, ClusterStatus, ConnectionKey, Coordinator, EnrollRequest, FromCoordinator, Peer,
    ToCoordinator,
};
use tokio::sync::{mpsc, watch};
use transport::{CertificateAuthority, Connection, Endpoint, Expect, Frame, Lane, Role, Subject};
use types::{Digest, NodeId, Timestamp, decode, encode};

use super::log_writer::{LogWriter, Written};
use crate::client::Client;
use crate::clock;
use crate::credentials::{EnrolAnswer, EnrolRequest};
use crate::durable_log::DurableLog;
use crate::error::Error;
use crate::http::jobs::Api;
use crate::metrics::{CoordinatorMetrics, Metrics};
use crate::trace::Trace;

/// What a coordinator is started with.
#[derive(Debug)]
pub struct CoordinatorConfig {
    /// Its id among the voters.
    pub id: u64,
    /// All voters and where they listen, this one included.
    pub voters: BTreeMap<u64, SocketAddr>,
    /// Where this one listens.
    pub listen: SocketAddr,
    /// Where its log lives.
    pub data_dir: PathBuf,
    /// The cluster's authority.
    pub authority: CertificateAuthority,
    /// The one knob of time.
    pub recovery_target: Duration,
    /// Where HTTP listens, if at all.
    pub http: Option<SocketAddr>,
    /// What whoever orders by HTTP must know; `None`: nobody may.
    pub http_token: Option<String>,
    /// Where to write what happened and when.
    pub trace: Option<PathBuf>,
}

/// A coordinator that runs in this process.
#[derive(Debug)]
pub struct CoordinatorHandle {
    address: SocketAddr,
    http: Option<SocketAddr>,
    inputs: Sender<Input>,
    thread: Option<std::thread::JoinHandle<Result<(), Error>>>,
    network: tokio::runtime::Runtime,
    metrics: Metrics,
}

#[derive(Debug)]
enum Input {
    Raft { from: u64, bytes: Bytes },
    Connected { peer: Peer, out: mpsc::Sender<FromCoordinator>, connection: Connection },
    Message { key: ConnectionKey, message: ToCoordinator },
    Disconnected { key: ConnectionKey },
    Enrol { request: EnrolRequest, reply: tokio::sync::oneshot::Sender<EnrolAnswer> },
    Written(Written),
    Stop,
}

impl CoordinatorHandle {
    /// Opens the log and the endpoint, and starts.
    ///
    /// # Errors
    /// If the log is damaged or in use, the address is taken, or the certificates can't be made.
    pub fn start(config: CoordinatorConfig) -> Result<Self, Error> {
        let context = "starting the coordinator";
        let network = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("ripstop-control")
            .enable_all()
            .build()
            .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let (log, recovered) = DurableLog::open(&config.data_dir, config.id)
            .map_err(|e| Error::Settings(e.to_string()))?;
        let subject = Subject { role: Role::Coordinator, job: None, node: NodeId(config.id) };
        let identity = config
            .authority
            .identity(&subject, COORDINATOR_CERTIFICATE)
            .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let transport_config = transport::Config::builder()
            .recovery_target(config.recovery_target)
            .accept_enrolment()
            .build()
            .map_err(|e| Error::Settings(e.to_string()))?;
        let endpoint = {
            let _in_runtime = network.enter();
            Endpoint::bind(config.listen, Arc::new(identity), &transport_config).map_err(|e| {
                Error::Transport {
                    context: "opening the coordinator's address",
                    reason: e.to_string(),
                }
            })?
        };
        let address = endpoint.local_addr();
        let (inputs, received) = std::sync::mpsc::channel();
        let mut links = BTreeMap::new();
        let mut dialled = BTreeMap::new();
        for (id, voter) in config.voters.iter().filter(|(id, _)| **id != config.id) {
            let (out, frames) = mpsc::channel(RAFT_QUEUE_FRAMES);
            let (dialled_with, certificates) = watch::channel(None);
            dialled.insert(*id, dialled_with);
            let (to, target) = ((*id, *voter), config.recovery_target);
            network.spawn(raft_link(endpoint.clone(), to, target, frames, certificates));
            links.insert(*id, out);
        }
        network.spawn(accept(endpoint.clone(), inputs.clone(), dialled));
        let metrics = Metrics::default();
        let counters = CoordinatorMetrics::new(&metrics);
        let ready = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let http = match config.http {
            Some(at) => {
                let client = operator(&config)?;
                let api = Api::new(client, config.http_token.as_deref(), at);
                let serve = crate::http::serve(at, metrics.clone(), Arc::clone(&ready), Some(api));
                Some(network.block_on(serve)?)
            }
            None => None,
        };
        let trace = match &config.trace {
            Some(path) => Trace::open(path, NodeId(config.id)).map_err(|e| {
                Error::Settings(format!("the trace {} can't be opened: {e}", path.display()))
            })?,
            None => Trace::default(),
        };
        let machine = machine_config(&config, log.log_uuid())?;
        let id = config.id;
        let authority = config.authority;
        let written = inputs.clone();
        let log = LogWriter::start(log, move |write| drop(written.send(Input::Written(write))))
            .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        let thread = std::thread::Builder::new()
            .name("ripstop-raft".to_owned())
            .spawn(move || {
                let machine = Coordinator::new(&machine, recovered, clock::now());
                let driver = Driver {
                    id,
                    machine,
                    log,
                    authority,
                    links,
                    connections: BTreeMap::new(),
                    enrolling: BTreeMap::new(),
                    next_enrol: u64::MAX / 2,
                    metrics: counters,
                    ready,
                    trace,
                    was_leader: false,
                    status_at: Timestamp::default(),
                    slow_disk_at: Timestamp::default(),
                };
                driver.run(&received)
            })
            .map_err(|e| Error::Transport { context, reason: e.to_string() })?;
        Ok(Self { address, http, inputs, thread: Some(thread), network, metrics })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where HTTP listens.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Its metrics.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Whether the machine's thread still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }

    /// Stops it in order, or says why it stopped.
    ///
    /// # Errors
    /// If its disk failed, or a promise of ours was broken.
    pub fn stop(mut self) -> Result<(), Error> {
        let _ = self.inputs.send(Input::Stop);
        let joined = self.thread.take().map_or(Ok(Ok(())), std::thread::JoinHandle::join);
        self.network.shutdown_timeout(Duration::from_millis(500));
        joined.unwrap_or(Err(Error::Internal("the coordinator's thread panicked")))
    }
}

/// Speaks to whichever coordinator leads, for those who come by HTTP.
fn operator(config: &CoordinatorConfig) -> Result<Client, Error> {
    let subject = Subject { role: Role::Operator, job: None, node: NodeId(0) };
    let identity = config
        .authority
        .identity(&subject, COORDINATOR_CERTIFICATE)
        .map_err(|e| Error::Settings(e.to_string()))?;
    Client::start(config.voters.values().copied().collect(), Arc::new(identity), HTTP_DEADLINE)
}

fn machine_config(config: &CoordinatorConfig, disk: u128) -> Result<membership::Config, Error> {
    use rand::TryRngCore;
    let seed = rand::rngs::OsRng.try_next_u64().unwrap_or(config.id);
    tracing::debug!(seed, "election seed");
    membership::Config::builder(config.id, config.voters.clone())
        .recovery_target(config.recovery_target)
        .seed(seed)
        .disk(disk)
        .build()
        .map_err(|e| Error::Settings(e.to_string()))
}

struct Driver {
    id: u64,
    machine: Coordinator,
    log: LogWriter,
    authority: CertificateAuthority,
    links: BTreeMap<u64, mpsc::Sender<Frame>>,
    connections: BTreeMap<ConnectionKey, Open>,
    enrolling: BTreeMap<ConnectionKey, tokio::sync::oneshot::Sender<EnrolAnswer>>,
    next_enrol: u64,
    metrics: CoordinatorMetrics,
    ready: Arc<std::sync::atomic::AtomicBool>,
    trace: Trace,
    was_leader: bool,
    /// When the members are counted next: that walks all of them.
    status_at: Timestamp,
    /// When a slow disk is told of next.
    slow_disk_at: Timestamp,
}

struct Open {
    peer: Peer,
    out: mpsc::Sender<FromCoordinator>,
    connection: Connection,
}

impl Driver {
    fn run(mut self, inputs: &Receiver<Input>) -> Result<(), Error> {
        loop {
            self.drain();
            let now = clock::now();
            let wait =
                self.machine.poll_timeout().map_or(Duration::from_secs(1), |at| at.since(now));
            match inputs.recv_timeout(wait) {
                Ok(Input::Stop) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(input) => self.handle(input)?,
                Err(RecvTimeoutError::Timeout) => {}
            }
            for _ in 0..INPUTS_PER_TURN {
                match inputs.try_recv() {
                    Ok(Input::Stop) => return Ok(()),
                    Ok(input) => self.handle(input)?,
                    Err(_) => break,
                }
            }
            let now = clock::now();
            if self.machine.poll_timeout().is_some_and(|at| at <= now) {
                self.machine.handle_timeout(now);
            }
        }
    }

    fn handle(&mut self, input: Input) -> Result<(), Error> {
        let now = clock::now();
        match input {
            Input::Raft { from, bytes } => self.machine.handle_raft(now, from, &bytes),
            Input::Connected { peer, out, connection } => {
                self.connections.insert(peer.key, Open { peer: peer.clone(), out, connection });
                self.machine.handle_connected(now, peer);
            }
            Input::Message { key, message } => {
                if let Some(open) = self.connections.get(&key) {
                    self.machine.handle_message(now, clock::unix_ms(), &open.peer, message);
                }
            }
            Input::Disconnected { key } => {
                if self.connections.remove(&key).is_some() {
                    self.machine.handle_disconnected(now, key);
                }
            }
            Input::Enrol { request, reply } => self.enrol(request, reply),
            Input::Written(Written { number, sync, took, result }) => {
                result.map_err(|e| {
                    tracing::error!(error = %e, "the log can't be written: this coordinator stops");
                    Error::Settings(format!("the log can't be written: {e}"))
                })?;
                let kind = if sync { "synced" } else { "buffered" };
                self.metrics.fsync_seconds.with_label_values(&[kind]).observe(took.as_secs_f64());
                if took > SLOW_WRITE && now >= self.slow_disk_at {
                    self.slow_disk_at = now + SLOW_WRITE_EVERY;
                    tracing::warn!(?took, "the disk is slow: changes of members wait for it");
                }
                self.machine.handle_persisted(now, number);
            }
            Input::Stop => {}
        }
        Ok(())
    }

    fn enrol(&mut self, request: EnrolRequest, reply: tokio::sync::oneshot::Sender<EnrolAnswer>) {
        let claims = match self.authority.check_token(&request.token, clock::unix_ms() / 1000) {
            Ok(claims) => claims,
            Err(error) => {
                let _ = reply.send(EnrolAnswer::Refused { code: 78, reason: error.to_string() });
                return;
            }
        };
        // Enrolments have no connection of their own in the machine: their keys come from a range that connections never reach.
        let key = ConnectionKey(self.next_enrol);
        self.next_enrol += 1;
        self.enrolling.insert(key, reply);
        let request = EnrollRequest {
            key,
            token: claims.id.0,
            uses: claims.uses,
            job: claims.job,
            role: role_to_machine(claims.role),
            csr: request.csr,
        };
        self.machine.handle_enroll(clock::now(), clock::unix_ms(), request);
    }

    fn drain(&mut self) {
        for _ in 0..ACTIONS_PER_TURN {
            let Some(action) = self.machine.poll_action() else { break };
            match action {
                Action::Persist { number, write, sync } => self.log.write(number, write, sync),
                Action::SendRaft { to, bytes } => {
                    if let Some(link) = self.links.get(&to) {
                        // A full queue drops: raft sends again.
                        let _ = link.try_send(Frame::message(bytes));
                    }
                }
                Action::Send { to, message } => self.send(to, message),
                Action::LostSeat { disk } => {
                    let id = self.id;
                    tracing::error!(
                        "the other coordinators know coordinator {id} by another disk ({disk:032x}): it takes no part. Start it with its former \
                         --data-dir; if that is lost for good, run `ripstop coordinator replace {id}`"
                    );
                }
                Action::FoundSeat => tracing::info!("this coordinator's seat is this disk's"),
                Action::Close { key, reason } => {
                    if let Some(open) = self.connections.get(&key) {
                        open.connection.close(1, &reason);
                    }
                }
                Action::SignCertificate { key, sequence, node, role, job, csr } => {
                    self.sign(
                        key,
                        sequence,
                        Subject { role: role_from_machine(role), job, node },
                        &csr,
                    );
                }
                Action::Emit(event) => {
                    tracing::info!(kind = event.kind, index = event.index, "{}", event.message);
                    self.metrics.events.with_label_values(&[&event.kind]).inc();
                    if self.machine.is_leader() {
                        self.trace.event(
                            &event.kind,
                            serde_json::json!({"nodes": event.nodes, "generation": event.generation,
                                "step": event.step, "message": event.message}),
                        );
                    }
                }
            }
        }
        self.follow();
    }

    fn send(&mut self, to: ConnectionKey, message: FromCoordinator) {
        if let Some(reply) = self.enrolling.remove(&to) {
            let _ = reply.send(match message {
                FromCoordinator::NotLeader { leader } => EnrolAnswer::NotLeader { leader },
                FromCoordinator::Refused { code, reason } => EnrolAnswer::Refused { code, reason },
                _ => EnrolAnswer::NotLeader { leader: None },
            });
            return;
        }
        let Some(open) = self.connections.get(&to) else { return };
        if open.out.try_send(message).is_err() {
            // A peer that does not read loses its connection, and asks anew for what it missed.
            open.connection.close(1, "too slow");
        }
    }

    fn sign(&mut self, key: ConnectionKey, sequence: Option<u64>, subject: Subject, csr: &[u8]) {
        let node = subject.node;
        let signed = self.authority.issue(&subject, csr, NODE_CERTIFICATE);
        if let Some(reply) = self.enrolling.remove(&key) {
            let _ = reply.send(match signed {
                Ok(certificate) => {
                    let authority = self.authority.certificate().clone();
                    EnrolAnswer::Enrolled { node, certificate, authority }
                }
                Err(error) => EnrolAnswer::Refused { code: 78, reason: error.to_string() },
            });
            return;
        }
        let answer = match (signed, sequence) {
            (Ok(certificate), Some(sequence)) => {
                FromCoordinator::Enrolled { sequence, node, certificate }
            }
            (Ok(_), None) => return,
            (Err(error), _) => FromCoordinator::Refused { code: 78, reason: error.to_string() },
        };
        self.send(key, answer);
    }

    fn follow(&mut self) {
        let is_leader = self.machine.is_leader();
        self.metrics.term.set(i64::try_from(self.machine.term().0).unwrap_or(i64::MAX));
        self.metrics.is_leader.set(i64::from(is_leader));
        self.metrics
            .commit_index
            .set(i64::try_from(self.machine.commit_index()).unwrap_or(i64::MAX));
        self.metrics.connections.set(i64::try_from(self.connections.len()).unwrap_or(i64::MAX));
        self.ready.store(self.machine.leader().is_some(), std::sync::atomic::Ordering::Relaxed);
        if is_leader != self.was_leader {
            self.was_leader = is_leader;
            self.trace.event(
                if is_leader { "leader" } else { "follower" },
                serde_json::json!({"term": self.machine.term()}),
            );
            tracing::info!(term = %self.machine.term(), is_leader, "role changed");
        }
        let now = clock::now();
        if is_leader && now >= self.status_at {
            self.status_at = now + STATUS_EVERY;
            let status: ClusterStatus = self.machine.status();
            for job in &status.jobs {
                let members = job.members.iter().filter(|m| m.rank.is_some()).count();
                let name = job.job.as_str();
                self.metrics
                    .members
                    .with_label_values(&[name])
                    .set(i64::try_from(members).unwrap_or(0));
                let generation =
                    job.generation.map_or(0, |g| i64::try_from(g.0).unwrap_or(i64::MAX));
                self.metrics.generation.with_label_values(&[name]).set(generation);
            }
        }
    }
}

async fn accept(
    endpoint: Endpoint,
    inputs: Sender<Input>,
    dialled: BTreeMap<u64, watch::Sender<Option<Digest>>>,
) {
    let mut next_key = 1_u64;
    while let Some(connection) = endpoint.accept().await {
        let key = ConnectionKey(next_key);
        next_key += 1;
        let subject = connection.peer().cloned();
        match subject {
            None => drop(tokio::spawn(serve_enrolment(connection, inputs.clone()))),
            Some(subject) if subject.role == Role::Coordinator => {
                if let Some(dialled) = dialled.get(&subject.node.0) {
                    dialled.send_replace(Some(connection.certificate()));
                }
                drop(tokio::spawn(receive_raft(connection, subject.node.0, inputs.clone())));
            }
            Some(subject) => drop(tokio::spawn(serve(connection, key, subject, inputs.clone()))),
        }
    }
}

async fn serve_enrolment(connection: Connection, inputs: Sender<Input>) {
    let conversation = async {
        let (_, frame) = connection.recv().await.ok()?;
        let request = decode::<EnrolRequest>(&frame.head).ok()?;
        let (reply, answer) = tokio::sync::oneshot::channel();
        inputs.send(Input::Enrol { request, reply }).ok()?;
        let answer = answer.await.ok()?;
        connection.send(Lane::Control, Frame::message(encode(&answer))).await.ok()?;
        connection.finish(Duration::from_secs(2)).await.ok()
    };
    let _ = tokio::time::timeout(ENROL_DEADLINE, conversation).await;
    connection.close(0, "done");
}

async fn receive_raft(connection: Connection, from: u64, inputs: Sender<Input>) {
    while let Ok((_, frame)) = connection.recv().await {
        if inputs.send(Input::Raft { from, bytes: frame.head }).is_err() {
            return;
        }
    }
}

async fn serve(
    connection: Connection,
    key: ConnectionKey,
    subject: Subject,
    inputs: Sender<Input>,
) {
    let (out, mut messages) = mpsc::channel::<FromCoordinator>(CONTROL_QUEUE_MESSAGES);
    let peer =
        Peer { key, role: role_to_machine(subject.role), node: subject.node, job: subject.job };
    if inputs.send(Input::Connected { peer, out, connection: connection.clone() }).is_err() {
        return;
    }
    let writer = {
        let connection = connection.clone();
        tokio::spawn(async move {
            while let Some(message) = messages.recv().await {
                if connection.send(Lane::Control, Frame::message(encode(&message))).await.is_err() {
                    return;
                }
            }
        })
    };
    while let Ok((_, frame)) = connection.recv().await {
        match decode::<ToCoordinator>(&frame.head) {
            Ok(message) => {
                if inputs.send(Input::Message { key, message }).is_err() {
                    break;
                }
            }
            Err(error) => {
                tracing::warn!(node = %subject.node, %error, "a message is dropped");
            }
        }
    }
    writer.abort();
    let _ = inputs.send(Input::Disconnected { key });
}

/// Keeps a link to another coordinator, for what this one sends. `dialled` tells the certificate with which it dials us, and each start of a coordinator makes
/// a new one: if it was killed and began anew, the link from before leads nowhere, which by itself would show only after a long silence.
async fn raft_link(
    endpoint: Endpoint,
    (id, address): (u64, SocketAddr),
    recovery_target: Duration,
    mut frames: mpsc::Receiver<Frame>,
    mut dialled: watch::Receiver<Option<Digest>>,
) {
    let expect = Expect { role: Role::Coordinator, node: Some(NodeId(id)), certificate: None };
    loop {
        match endpoint.connect(address, &expect, recovery_target * 2).await {
            Ok(connection) => {
                // What it dialled with before is of a former life.
                dialled.borrow_and_update();
                loop {
                    tokio::select! {
                        frame = frames.recv() => match frame {
                            Some(frame) => {
                                if connection.send(Lane::Control, frame).await.is_err() {
                                    break;
                                }
                            }
                            None => return,
                        },
                        _ = connection.closed() => break,
                        Ok(()) = dialled.changed() => {
                            if *dialled.borrow_and_update() != Some(connection.certificate()) {
                                connection.close(0, "this coordinator began anew");
                                break;
                            }
                        }
                    }
                }
            }
            Err(error) => tracing::debug!(id, %address, %error, "no link to this coordinator yet"),
        }
        // What was queued for a dead link is stale by now.
        while frames.try_recv().is_ok() {}
        tokio::time::sleep(recovery_target / 20).await;
    }
}

pub(crate) fn role_to_machine(role: Role) -> membership::Role {
    match role {
        Role::Coordinator => membership::Role::Coordinator,
        Role::Agent => membership::Role::Agent,
        Role::Worker => membership::Role::Worker,
        Role::Operator => membership::Role::Operator,
    }
}

fn role_from_machine(role: membership::Role) -> Role {
    match role {
        membership::Role::Coordinator => Role::Coordinator,
        membership::Role::Agent => Role::Agent,
        membership::Role::Worker => Role::Worker,
        membership::Role::Operator => Role::Operator,
    }
}

/// Whatever the machine wants, inputs are heard in between.
const ACTIONS_PER_TURN: usize = 4096;
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// A write that takes longer is worth a word, now and then.
const SLOW_WRITE: Duration = Duration::from_secs(1);
const SLOW_WRITE_EVERY: Duration = Duration::from_secs(30);
const INPUTS_PER_TURN: usize = 256;
const RAFT_QUEUE_FRAMES: usize = 1024;
const CONTROL_QUEUE_MESSAGES: usize = 4096;
const ENROL_DEADLINE: Duration = Duration::from_secs(10);
/// A node's certificate outlives any sane job; rotation is an issue of its own.
const NODE_CERTIFICATE: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long a coordinator may take to answer whoever asked by HTTP.
const HTTP_DEADLINE: Duration = Duration::from_secs(10);
const COORDINATOR_CERTIFICATE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Opens or makes the authority of a data directory: the one that is there, else a copy of the one given.
///
/// # Errors
/// If there is none, or it can't be read or written.
pub fn authority_for(
    data_dir: &std::path::Path,
    given: Option<&std::path::Path>,
) -> Result<CertificateAuthority, Error> {
    let kept = data_dir.join("ca");
    let reason = |e: transport::CertificateError| Error::Settings(e.to_string());
    if kept.exists() {
        let ours = CertificateAuthority::load(&kept).map_err(reason)?;
        if let Some(given) = given {
            let theirs = CertificateAuthority::load(given).map_err(reason)?;
            if theirs.fingerprint() != ours.fingerprint() {
                return Err(Error::Settings(format!(
                    "{} holds the authority of another cluster than {}: take an empty --data-dir, or the right --certs",
                    kept.display(),
                    given.display()
                )));
            }
        }
        return Ok(ours);
    }
    let given = given.ok_or_else(|| {
        Error::Settings("no certificate authority: make one by `ripstop certs init --dir DIR`, and pass --certs DIR".to_owned())
    })?;
    let authority = CertificateAuthority::load(given).map_err(reason)?;
    authority.save(&kept).map_err(reason)?;
    Ok(authority)
}
