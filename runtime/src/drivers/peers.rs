//! The data plane: one warm link to every node of the present worlds.
//!
//! Of two nodes the one with the lower id dials. A lost link is dialled again, with growing pauses, for as long as the node is listed; frames
//! for a node without a link are dropped, and the step machine offers again what matters when the link is up.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use transport::{Arena, Connection, ConnectionId, Endpoint, Expect, Frame, Lane, Role};
use types::{Address, JobId, NodeId};

use super::engine::Input;

/// Tells the data plane what to do; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct PeersHandle {
    commands: mpsc::UnboundedSender<Command>,
    /// Where frames for each node go in, while it has a link.
    doors: Doors,
    endpoint: Endpoint,
}

type Doors = Arc<Mutex<BTreeMap<NodeId, Door>>>;

#[derive(Clone, Debug)]
struct Door {
    link: ConnectionId,
    control: mpsc::Sender<Frame>,
    bulk: mpsc::Sender<Frame>,
}

#[derive(Debug)]
enum Command {
    SetPeers(BTreeMap<NodeId, Address>),
    Up { node: NodeId, connection: Connection },
    Down { node: NodeId, link: ConnectionId },
    Close { reply: tokio::sync::oneshot::Sender<()> },
}

impl PeersHandle {
    /// The nodes to be linked with from now on.
    pub(crate) fn set_peers(&self, peers: BTreeMap<NodeId, Address>) {
        let _ = self.commands.send(Command::SetPeers(peers));
    }

    /// Whether there is a link to this node.
    pub(crate) fn is_linked(&self, node: NodeId) -> bool {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&node)
    }

    /// Sends a frame, or drops it if there is no link.
    pub(crate) fn send(&self, to: NodeId, lane: Lane, frame: Frame) {
        let doors = self.doors.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(door) = doors.get(&to) else { return };
        let queue = match lane {
            Lane::Control => &door.control,
            Lane::Bulk => &door.bulk,
        };
        if queue.try_send(frame).is_err() {
            // A peer that reads so slowly gets a new link, and everything that still matters on it.
            tracing::warn!(node = %to, "the queue of a link is full or gone: the link is made anew");
            let _ = self.commands.send(Command::Down { node: to, link: door.link });
        }
    }

    /// Payload of all UDP packets sent so far.
    pub(crate) fn sent_wire_bytes(&self) -> u64 {
        self.endpoint.sent_wire_bytes()
    }

    /// Memory for what is sent.
    pub(crate) fn arena(&self) -> Arena {
        self.endpoint.arena().clone()
    }

    /// Delivers what was sent, as far as the deadline allows, and closes all links.
    pub(crate) async fn close(&self) {
        let (reply, done) = tokio::sync::oneshot::channel();
        let _ = self.commands.send(Command::Close { reply });
        let _ = tokio::time::timeout(CLOSE_DEADLINE * 2, done).await;
    }
}

/// Starts the data plane on this tokio runtime.
pub(crate) fn start(
    me: NodeId,
    job: JobId,
    endpoint: Endpoint,
    recovery_target: Duration,
    inputs: Sender<Input>,
) -> PeersHandle {
    let (commands, received) = mpsc::unbounded_channel();
    let doors = Doors::default();
    let handle = PeersHandle {
        commands: commands.clone(),
        doors: Arc::clone(&doors),
        endpoint: endpoint.clone(),
    };
    tokio::spawn(accept(endpoint.clone(), job, commands.clone()));
    let peers = Peers {
        me,
        endpoint,
        recovery_target,
        inputs,
        commands,
        listed: BTreeMap::new(),
        links: BTreeMap::new(),
        doors,
        dialling: BTreeMap::new(),
    };
    tokio::spawn(peers.run(received));
    handle
}

struct Peers {
    me: NodeId,
    endpoint: Endpoint,
    recovery_target: Duration,
    inputs: Sender<Input>,
    commands: mpsc::UnboundedSender<Command>,
    listed: BTreeMap<NodeId, Address>,
    links: BTreeMap<NodeId, Link>,
    doors: Doors,
    dialling: BTreeMap<NodeId, JoinHandle<()>>,
}

struct Link {
    connection: Connection,
    tasks: Vec<JoinHandle<()>>,
}

impl Peers {
    async fn run(mut self, mut received: mpsc::UnboundedReceiver<Command>) {
        while let Some(command) = received.recv().await {
            match command {
                Command::SetPeers(listed) => self.set_peers(listed),
                Command::Up { node, connection } => self.up(node, connection),
                Command::Down { node, link } => self.down(node, link),
                Command::Close { reply } => {
                    self.close().await;
                    let _ = reply.send(());
                    return;
                }
            }
        }
    }

    fn set_peers(&mut self, listed: BTreeMap<NodeId, Address>) {
        self.dialling.retain(|node, task| {
            let keep = listed.contains_key(node) && !task.is_finished();
            if !keep {
                task.abort();
            }
            keep
        });
        self.listed = listed;
        for node in self.listed.keys().copied().collect::<Vec<_>>() {
            self.dial(node);
        }
    }

    fn dial(&mut self, node: NodeId) {
        let Some(address) = self.listed.get(&node).cloned() else { return };
        let is_dialling = self.dialling.get(&node).is_some_and(|task| !task.is_finished());
        if node <= self.me || self.links.contains_key(&node) || is_dialling {
            return;
        }
        let (endpoint, commands, target) =
            (self.endpoint.clone(), self.commands.clone(), self.recovery_target);
        let task = tokio::spawn(async move {
            let expect = Expect {
                role: Role::Worker,
                node: Some(node),
                certificate: Some(address.certificate),
            };
            let mut pause = target / 50;
            loop {
                match endpoint.connect(address.socket, &expect, target).await {
                    Ok(connection) => {
                        let _ = commands.send(Command::Up { node, connection });
                        return;
                    }
                    Err(error) => tracing::debug!(%node, %error, "no link yet"),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(target);
            }
        });
        self.dialling.insert(node, task);
    }

    fn up(&mut self, node: NodeId, connection: Connection) {
        self.dialling.remove(&node);
        let (control, control_frames) = mpsc::channel(QUEUE_FRAMES);
        let (bulk, bulk_frames) = mpsc::channel(QUEUE_FRAMES);
        let tasks = vec![
            tokio::spawn(write(connection.clone(), Lane::Control, control_frames)),
            tokio::spawn(write(connection.clone(), Lane::Bulk, bulk_frames)),
            tokio::spawn(read(
                node,
                connection.clone(),
                self.inputs.clone(),
                self.commands.clone(),
            )),
        ];
        // A newer link takes the place of an older one: the other side dialled again.
        let door = Door { link: connection.id(), control, bulk };
        if let Some(old) = self.links.insert(node, Link { connection, tasks }) {
            old.end("replaced");
        }
        self.doors().insert(node, door);
        let _ = self.inputs.send(Input::LinkUp { node });
    }

    fn down(&mut self, node: NodeId, lost: ConnectionId) {
        if let Some(link) = self.links.get(&node).filter(|l| l.connection.id() == lost) {
            tracing::debug!(%node, "link lost");
            link.end("lost");
            self.links.remove(&node);
            self.doors().remove(&node);
            self.dial(node);
        }
    }

    fn doors(&self) -> MutexGuard<'_, BTreeMap<NodeId, Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn close(mut self) {
        for task in self.dialling.values() {
            task.abort();
        }
        let links: Vec<Link> = std::mem::take(&mut self.links).into_values().collect();
        // The writers end after what is queued.
        self.doors().clear();
        let mut finished = Vec::new();
        for link in links {
            let Link { connection, tasks } = link;
            finished.push(tokio::spawn(async move {
                let mut tasks = tasks.into_iter();
                for writer in tasks.by_ref().take(2) {
                    let _ = tokio::time::timeout(CLOSE_DEADLINE, writer).await;
                }
                let _ = connection.finish(CLOSE_DEADLINE).await;
                tasks.for_each(|reader| reader.abort());
            }));
        }
        for task in finished {
            let _ = task.await;
        }
        self.endpoint.close(0, "leaving");
        self.endpoint.wait_idle(CLOSE_DEADLINE).await;
    }
}

impl Link {
    fn end(&self, reason: &str) {
        self.connection.close(0, reason);
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn accept(endpoint: Endpoint, job: JobId, commands: mpsc::UnboundedSender<Command>) {
    while let Some(connection) = endpoint.accept().await {
        let subject = connection.peer().cloned();
        match subject.filter(|s| s.role == Role::Worker && s.job.as_ref() == Some(&job)) {
            Some(subject) => {
                let _ = commands.send(Command::Up { node: subject.node, connection });
            }
            None => connection.close(1, "this is a worker of another job"),
        }
    }
}

async fn write(connection: Connection, lane: Lane, mut frames: mpsc::Receiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        if connection.send(lane, frame).await.is_err() {
            return;
        }
    }
}

async fn read(
    node: NodeId,
    connection: Connection,
    inputs: Sender<Input>,
    commands: mpsc::UnboundedSender<Command>,
) {
    while let Ok((_, frame)) = connection.recv().await {
        if inputs.send(Input::Frame { from: node, frame }).is_err() {
            return;
        }
    }
    let _ = commands.send(Command::Down { node, link: connection.id() });
}

/// Frames that may wait for one peer on one lane: some steps' worth of chunks.
const QUEUE_FRAMES: usize = 16_384;
/// How long closing waits for what was sent last.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);
