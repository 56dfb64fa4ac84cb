//! Runs a [`Participant`]: the one connection of a worker, an agent or an operator to the coordinators' leader.
//!
//! On a thread and an endpoint of its own, so that neither bulk data nor a busy program delays a heartbeat.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use membership::{
    ConnectionKey, FromCoordinator, Heartbeat, Join, Participant, ParticipantAction,
    ParticipantEvent, Timing, ToCoordinator,
};
use tokio::sync::{mpsc, oneshot};
use transport::{ConnectError, Connection, Endpoint, Expect, Frame, Identity, Lane, Role};
use types::{JobId, NodeId, decode, encode};

use crate::clock;
use crate::credentials;
use crate::error::Error;

/// Speaks to the coordinators; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ControlHandle {
    commands: mpsc::UnboundedSender<Command>,
}

#[derive(Debug)]
enum Command {
    Heartbeat(Heartbeat),
    Request { message: Box<ToCoordinator>, reply: Option<oneshot::Sender<Option<u64>>> },
    Close { reply: oneshot::Sender<()> },
}

impl ControlHandle {
    /// The signs of life to give from now on.
    pub(crate) fn heartbeat(&self, heartbeat: Heartbeat) {
        let _ = self.commands.send(Command::Heartbeat(heartbeat));
    }

    /// Says something until it is acknowledged or pointless.
    pub(crate) fn request(&self, message: ToCoordinator) {
        let _ = self.commands.send(Command::Request { message: Box::new(message), reply: None });
    }

    /// The same; the answer carries the sequence number returned here.
    pub(crate) async fn ask(&self, message: ToCoordinator) -> Option<u64> {
        let (reply, sequence) = oneshot::channel();
        let _ =
            self.commands.send(Command::Request { message: Box::new(message), reply: Some(reply) });
        sequence.await.ok().flatten()
    }

    /// Asks that a node may leave in good order.
    pub(crate) fn drain(&self, node: NodeId, job: JobId, reason: String) {
        self.request(ToCoordinator::Drain { nodes: vec![node], job, reason, sequence: 0 });
    }

    /// Closes the connection, after what was said last was delivered.
    pub(crate) async fn close(&self) {
        let (reply, done) = oneshot::channel();
        let _ = self.commands.send(Command::Close { reply });
        let _ = tokio::time::timeout(CLOSE_DEADLINE * 2, done).await;
    }
}

/// How a control connection is made.
#[derive(Debug)]
pub(crate) struct ControlConfig {
    /// Where the coordinators listen.
    pub(crate) coordinators: Vec<SocketAddr>,
    /// Who we are.
    pub(crate) identity: Arc<Identity>,
    /// The one knob of time.
    pub(crate) recovery_target: Duration,
    /// What a worker joins with.
    pub(crate) join: Option<Join>,
}

/// Starts the control thread; `sink` hears what the coordinators say and must not block.
///
/// # Errors
/// If the endpoint or the thread can't be made.
pub(crate) fn start(
    config: ControlConfig,
    sink: impl Fn(ParticipantEvent) + Send + 'static,
) -> Result<ControlHandle, Error> {
    let timing = Timing::new(config.recovery_target).map_err(|e| Error::Settings(e.to_string()))?;
    let endpoint_config = credentials::endpoint_config(config.recovery_target)?;
    let (commands, received) = mpsc::unbounded_channel();
    let (started, outcome) = std::sync::mpsc::channel();
    std::thread::Builder::new()
        .name("ripstop-control".to_owned())
        .spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(error.to_string()))),
            };
            raise_priority();
            runtime.block_on(async move {
                let any = any_address(config.coordinators.first());
                let endpoint = match Endpoint::bind(any, config.identity, &endpoint_config) {
                    Ok(endpoint) => endpoint,
                    Err(error) => return drop(started.send(Err(error.to_string()))),
                };
                match Participant::new(timing, config.coordinators, config.join, clock::now()) {
                    Ok(participant) => {
                        let _ = started.send(Ok(()));
                        let (events, inputs) = mpsc::unbounded_channel();
                        let driver = Driver {
                            participant,
                            endpoint,
                            events,
                            links: BTreeMap::new(),
                            dialling: None,
                            sink,
                            target: config.recovery_target,
                        };
                        driver.run(received, inputs).await;
                    }
                    Err(error) => drop(started.send(Err(error.to_string()))),
                }
            });
        })
        .map_err(|e| Error::Transport {
            context: "starting the control thread",
            reason: e.to_string(),
        })?;
    match outcome.recv() {
        Ok(Ok(())) => Ok(ControlHandle { commands }),
        Ok(Err(reason)) => {
            Err(Error::Transport { context: "starting the control connection", reason })
        }
        Err(_) => Err(Error::Internal("the control thread ended")),
    }
}

struct Driver<S> {
    participant: Participant,
    endpoint: Endpoint,
    events: mpsc::UnboundedSender<LinkEvent>,
    links: BTreeMap<ConnectionKey, Link>,
    /// The connection that is being made and still wanted.
    dialling: Option<ConnectionKey>,
    sink: S,
    target: Duration,
}

struct Link {
    connection: Connection,
    out: mpsc::UnboundedSender<ToCoordinator>,
}

enum LinkEvent {
    Up { key: ConnectionKey, connection: Connection },
    Failed { key: ConnectionKey, refusal: Option<(u8, String)> },
    Message { key: ConnectionKey, message: Box<FromCoordinator> },
}

impl<S: Fn(ParticipantEvent) + Send + 'static> Driver<S> {
    async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        mut inputs: mpsc::UnboundedReceiver<LinkEvent>,
    ) {
        loop {
            self.drain();
            let now = clock::now();
            let wait =
                self.participant.poll_timeout().map_or(Duration::from_secs(1), |at| at.since(now));
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Heartbeat(heartbeat)) => self.participant.set_heartbeat(clock::now(), heartbeat),
                    Some(Command::Request { message, reply }) => {
                        let sequence = self.participant.request(clock::now(), *message);
                        if let Some(reply) = reply {
                            let _ = reply.send(sequence);
                        }
                    }
                    Some(Command::Close { reply }) => {
                        self.drain();
                        for link in std::mem::take(&mut self.links).into_values() {
                            drop(link.out);
                            let _ = link.connection.finish(CLOSE_DEADLINE).await;
                        }
                        self.endpoint.close(0, "leaving");
                        self.endpoint.wait_idle(CLOSE_DEADLINE).await;
                        let _ = reply.send(());
                        return;
                    }
                    None => {
                        self.endpoint.close(0, "leaving");
                        self.endpoint.wait_idle(CLOSE_DEADLINE).await;
                        return;
                    }
                },
                Some(event) = inputs.recv() => self.handle(event),
                () = tokio::time::sleep(wait) => {}
            }
            let now = clock::now();
            if self.participant.poll_timeout().is_some_and(|at| at <= now) {
                self.participant.handle_timeout(now);
            }
        }
    }

    fn handle(&mut self, event: LinkEvent) {
        let now = clock::now();
        match event {
            LinkEvent::Up { key, connection } if self.dialling != Some(key) => {
                connection.close(0, "too late");
            }
            LinkEvent::Up { key, connection } => {
                self.dialling = None;
                let (out, messages) = mpsc::unbounded_channel();
                tokio::spawn(write(connection.clone(), messages));
                tokio::spawn(read(key, connection.clone(), self.events.clone()));
                self.links.insert(key, Link { connection, out });
                self.participant.handle_connected(now, key);
            }
            LinkEvent::Failed { key, refusal } => {
                if let Some((code, reason)) = refusal {
                    (self.sink)(ParticipantEvent::Refused { code, reason });
                }
                self.links.remove(&key);
                self.participant.handle_disconnected(now, key);
            }
            LinkEvent::Message { key, message } => {
                self.participant.handle_message(now, key, *message);
            }
        }
    }

    fn drain(&mut self) {
        while let Some(action) = self.participant.poll_action() {
            match action {
                ParticipantAction::Connect { key, address } => {
                    self.dialling = Some(key);
                    let (endpoint, events, target) =
                        (self.endpoint.clone(), self.events.clone(), self.target);
                    tokio::spawn(async move {
                        let expect = Expect::role(Role::Coordinator);
                        let event = match endpoint.connect(address, &expect, target * 2).await {
                            Ok(connection) => LinkEvent::Up { key, connection },
                            Err(error) => LinkEvent::Failed { key, refusal: refusal(&error) },
                        };
                        let _ = events.send(event);
                    });
                }
                ParticipantAction::Disconnect { key } => {
                    self.dialling.take_if(|dialling| *dialling == key);
                    if let Some(link) = self.links.remove(&key) {
                        link.connection.close(0, "going to another coordinator");
                    }
                }
                ParticipantAction::Send { key, message } => {
                    if let Some(link) = self.links.get(&key) {
                        let _ = link.out.send(message);
                    }
                }
                ParticipantAction::Event(event) => (self.sink)(event),
            }
        }
    }
}

async fn write(connection: Connection, mut messages: mpsc::UnboundedReceiver<ToCoordinator>) {
    while let Some(message) = messages.recv().await {
        if connection.send(Lane::Control, Frame::message(encode(&message))).await.is_err() {
            return;
        }
    }
}

async fn read(
    key: ConnectionKey,
    connection: Connection,
    events: mpsc::UnboundedSender<LinkEvent>,
) {
    while let Ok((_, frame)) = connection.recv().await {
        match decode::<FromCoordinator>(&frame.head) {
            Ok(message) => {
                drop(events.send(LinkEvent::Message { key, message: Box::new(message) }));
            }
            Err(error) => tracing::warn!(%error, "a message of the coordinators is dropped"),
        }
    }
    let _ = events.send(LinkEvent::Failed { key, refusal: None });
}

/// The exit code and the words for a coordinator that will never take us; `None` where another try may help.
fn refusal(error: &ConnectError) -> Option<(u8, String)> {
    match error {
        ConnectError::Version { .. } => Some((76, error.to_string())),
        ConnectError::Foreign { .. }
        | ConnectError::ForeignHere { .. }
        | ConnectError::Expired { .. } => Some((78, error.to_string())),
        _ => {
            tracing::debug!(%error, "no coordinator there yet");
            None
        }
    }
}

/// The unspecified address of the same family.
pub(crate) fn any_address(like: Option<&SocketAddr>) -> SocketAddr {
    match like {
        Some(SocketAddr::V6(_)) => SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
        _ => SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    }
}

/// Heartbeats go before computing, where we may say so; where not, nothing is lost.
fn raise_priority() {
    let thread = Some(rustix::thread::gettid());
    let _ = rustix::process::setpriority_process(thread, -10);
}

const CLOSE_DEADLINE: Duration = Duration::from_secs(1);
