//! The other end of a coordinator's connection: it finds the leader, says what must be heard, and passes on what the leader says.
//!
//! A worker gives its [`Join`] and heartbeats; agents and operators only make requests. It promises: one connection at a time;
//! `Join` and every unanswered request are said again on each new connection, to each new leader, and every half recovery target;
//! worlds, intents and ends of attempts are passed on once, in order. Deliberately not here: sockets and what a worker does.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use types::{Attempt, Generation, NodeId, Step, Term, Timestamp, World};

use crate::config::{ConfigError, Timing};
use crate::message::{
    Cause, ClusterStatus, Event, FromCoordinator, Heartbeat, Intent, Join, Release, Standing,
    ToCoordinator,
};
use crate::peer::ConnectionKey;

/// Keeps a connection to the coordinators' leader. See the file's head.
#[derive(Debug)]
pub struct Participant {
    timing: Timing,
    coordinators: Vec<SocketAddr>,
    next_coordinator: usize,
    /// Tries since a leader last spoke.
    failures: u32,
    /// `NotLeader` answers followed in a row.
    redirects: u32,
    link: Link,
    next_key: u64,
    join: Option<Box<Join>>,
    heartbeat: Option<Heartbeat>,
    heartbeat_at: Timestamp,
    requests: BTreeMap<u64, ToCoordinator>,
    next_sequence: u64,
    resend_at: Timestamp,
    unreachable_since: Timestamp,
    is_reported_unreachable: bool,
    seen: Seen,
    actions: VecDeque<ParticipantAction>,
}

impl Participant {
    /// Most requests that wait for an answer.
    pub const REQUESTS_MAX: usize = 4096;

    /// Begins to look for the leader among `coordinators`. With a `join` it is a worker's, without one an agent's or operator's.
    ///
    /// # Errors
    /// If there is no address.
    pub fn new(
        timing: Timing,
        coordinators: Vec<SocketAddr>,
        join: Option<Join>,
        now: Timestamp,
    ) -> Result<Self, ConfigError> {
        if coordinators.is_empty() {
            return Err(ConfigError::NoCoordinator);
        }
        let mut participant = Self {
            timing,
            coordinators,
            next_coordinator: 0,
            failures: 0,
            redirects: 0,
            link: Link::Idle { retry_at: now },
            next_key: 1,
            join: join.map(Box::new),
            heartbeat: None,
            heartbeat_at: now,
            requests: BTreeMap::new(),
            next_sequence: 1,
            resend_at: now + timing.resend(),
            unreachable_since: now,
            is_reported_unreachable: false,
            seen: Seen::default(),
            actions: VecDeque::new(),
        };
        participant.dial_next(now);
        Ok(participant)
    }

    /// The connection that was asked for stands.
    pub fn handle_connected(&mut self, now: Timestamp, key: ConnectionKey) {
        if !matches!(self.link, Link::Dialing { key: own, .. } if own == key) {
            return;
        }
        self.link = Link::Connected { key, heard: now, term: None };
        self.say_everything(now);
    }

    /// The connection ended, or could not be made.
    pub fn handle_disconnected(&mut self, now: Timestamp, key: ConnectionKey) {
        if self.link.key() == Some(key) {
            self.fail(now);
        }
    }

    /// A message came.
    pub fn handle_message(&mut self, now: Timestamp, key: ConnectionKey, message: FromCoordinator) {
        let Link::Connected { key: own, heard, term } = &mut self.link else { return };
        if *own != key {
            return;
        }
        *heard = now;
        let was_led = term.is_some();
        match message {
            FromCoordinator::NotLeader { leader } => return self.follow(now, leader),
            FromCoordinator::Leading { term: new } => {
                let is_news = was_led && *term != Some(new);
                *term = Some(new);
                if is_news {
                    self.say_everything(now);
                }
            }
            other => {
                if !was_led {
                    *term = Some(Term(0));
                }
                self.pass_on(other);
            }
        }
        self.led(now);
    }

    /// Time has come: see [`Self::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Timestamp) {
        match self.link {
            Link::Idle { retry_at } if now >= retry_at => self.dial_next(now),
            Link::Dialing { key, deadline, .. } if now >= deadline => {
                self.actions.push_back(ParticipantAction::Disconnect { key });
                self.fail(now);
            }
            Link::Connected { key, heard, .. } => {
                if self.awaits_answer() && now >= heard + self.timing.leader_silence() {
                    self.actions.push_back(ParticipantAction::Disconnect { key });
                    self.fail(now);
                } else {
                    self.say_what_is_due(now);
                }
            }
            _ => {}
        }
        if !self.is_led()
            && !self.is_reported_unreachable
            && now >= self.unreachable_since + self.timing.target()
        {
            self.is_reported_unreachable = true;
            self.event(ParticipantEvent::Unreachable { since: self.unreachable_since });
        }
    }

    /// When to call [`Self::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let mut due = match self.link {
            Link::Idle { retry_at } => retry_at,
            Link::Dialing { deadline, .. } => deadline,
            Link::Connected { heard, .. } => {
                let mut due = Timestamp(u64::MAX);
                if self.awaits_answer() {
                    due = due.min(heard + self.timing.leader_silence()).min(self.resend_at);
                }
                if self.heartbeat.is_some() { due.min(self.heartbeat_at) } else { due }
            }
        };
        if !self.is_led() && !self.is_reported_unreachable {
            due = due.min(self.unreachable_since + self.timing.target());
        }
        (due < Timestamp(u64::MAX)).then_some(due)
    }

    /// What to say as sign of life from now on. Sent at once if the entered generation or the phase changed.
    pub fn set_heartbeat(&mut self, now: Timestamp, heartbeat: Heartbeat) {
        let told = self.heartbeat.as_ref().map(|h| (h.entered, h.phase, h.lineage));
        let is_news = told != Some((heartbeat.entered, heartbeat.phase, heartbeat.lineage));
        self.heartbeat = Some(heartbeat);
        if is_news {
            self.heartbeat_at = now;
            self.say_what_is_due(now);
        }
    }

    /// Says `message` until it is answered. Its sequence number is replaced by the one returned; a message without one is
    /// dropped when its attempt ends. `None`: too many wait already.
    pub fn request(&mut self, now: Timestamp, message: ToCoordinator) -> Option<u64> {
        if self.requests.len() >= Self::REQUESTS_MAX {
            return None;
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let message = message.with_sequence(sequence);
        self.requests.insert(sequence, message.clone());
        if let Link::Connected { key, heard, .. } = &mut self.link {
            // The answer is awaited from now on, not from whenever the leader last had something to say.
            *heard = (*heard).max(now);
            let key = *key;
            self.actions.push_back(ParticipantAction::Send { key, message });
            self.resend_at = now + self.timing.resend();
        }
        Some(sequence)
    }

    /// How many requests wait for an answer.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.requests.len()
    }

    /// Whether a leader answers.
    #[must_use]
    pub fn is_led(&self) -> bool {
        matches!(self.link, Link::Connected { term: Some(_), .. })
    }

    /// The next thing to do; ask until `None`.
    pub fn poll_action(&mut self) -> Option<ParticipantAction> {
        self.actions.pop_front()
    }

    fn awaits_answer(&self) -> bool {
        self.join.is_some()
            || self.heartbeat.is_some()
            || !self.requests.is_empty()
            || !self.is_led()
    }

    fn led(&mut self, now: Timestamp) {
        self.failures = 0;
        self.redirects = 0;
        self.unreachable_since = now;
        if std::mem::take(&mut self.is_reported_unreachable) {
            self.event(ParticipantEvent::Reachable);
        }
    }

    fn follow(&mut self, now: Timestamp, leader: Option<SocketAddr>) {
        if let Some(key) = self.link.key() {
            self.actions.push_back(ParticipantAction::Disconnect { key });
        }
        match leader {
            Some(leader) if self.redirects < REDIRECTS_MAX => {
                self.leave(now);
                self.redirects += 1;
                self.dial(now, leader);
            }
            _ => self.fail(now),
        }
    }

    fn leave(&mut self, now: Timestamp) {
        if self.is_led() {
            self.unreachable_since = now;
        }
    }

    /// This coordinator was of no use: the next one, at once until all were tried, then after a pause.
    fn fail(&mut self, now: Timestamp) {
        self.leave(now);
        self.redirects = 0;
        self.failures = self.failures.saturating_add(1);
        let tried = u32::try_from(self.coordinators.len()).unwrap_or(u32::MAX);
        let rounds = self.failures / tried;
        if !self.failures.is_multiple_of(tried) {
            return self.dial_next(now);
        }
        let doublings = rounds.saturating_sub(1).min(BACKOFF_DOUBLINGS_MAX);
        let pause = (self.timing.backoff_min() * (1 << doublings)).min(self.timing.backoff_max());
        self.link = Link::Idle { retry_at: now + pause };
    }

    fn dial_next(&mut self, now: Timestamp) {
        let address = self.coordinators[self.next_coordinator % self.coordinators.len()];
        self.next_coordinator = (self.next_coordinator + 1) % self.coordinators.len();
        self.dial(now, address);
    }

    fn dial(&mut self, now: Timestamp, address: SocketAddr) {
        let key = ConnectionKey(self.next_key);
        self.next_key += 1;
        self.link = Link::Dialing { key, deadline: now + self.timing.dial() };
        self.actions.push_back(ParticipantAction::Connect { key, address });
    }

    fn say_everything(&mut self, now: Timestamp) {
        let Link::Connected { key, .. } = self.link else { return };
        let join = self.join.clone().map(ToCoordinator::Join);
        let heartbeat = self.heartbeat.clone().map(ToCoordinator::Heartbeat);
        let requests = self.requests.values().cloned();
        for message in join.into_iter().chain(heartbeat).chain(requests) {
            self.actions.push_back(ParticipantAction::Send { key, message });
        }
        self.heartbeat_at = now + self.timing.heartbeat();
        self.resend_at = now + self.timing.resend();
    }

    fn say_what_is_due(&mut self, now: Timestamp) {
        let Link::Connected { key, .. } = self.link else { return };
        if now >= self.heartbeat_at
            && let Some(heartbeat) = self.heartbeat.clone()
        {
            self.heartbeat_at = now + self.timing.heartbeat();
            let message = ToCoordinator::Heartbeat(heartbeat);
            self.actions.push_back(ParticipantAction::Send { key, message });
        }
        if now < self.resend_at {
            return;
        }
        self.resend_at = now + self.timing.resend();
        let join = self.join.clone().filter(|_| !self.seen.is_answered).map(ToCoordinator::Join);
        for message in join.into_iter().chain(self.requests.values().cloned()) {
            self.actions.push_back(ParticipantAction::Send { key, message });
        }
    }

    fn event(&mut self, event: ParticipantEvent) {
        self.actions.push_back(ParticipantAction::Event(event));
    }

    /// Passes a leader's message on, unless it was passed on before.
    fn pass_on(&mut self, message: FromCoordinator) {
        let seen = &mut self.seen;
        let event = match message {
            FromCoordinator::NotLeader { .. } | FromCoordinator::Leading { .. } => return,
            FromCoordinator::Joined { node } => {
                if std::mem::replace(&mut seen.is_answered, true) {
                    return;
                }
                ParticipantEvent::Joined { node }
            }
            FromCoordinator::Refused { code, reason } => {
                seen.is_answered = true;
                ParticipantEvent::Refused { code, reason }
            }
            FromCoordinator::World(world) => {
                if Some(world.generation) <= seen.generation() {
                    return;
                }
                seen.world = Some(Arc::clone(&world));
                ParticipantEvent::World(world)
            }
            FromCoordinator::WorldChange(change) => {
                if Some(change.generation) <= seen.generation() {
                    return;
                }
                // Whoever can't follow says with each heartbeat how far it is, and is told the whole world.
                let world = seen.world.as_ref().and_then(|base| change.apply(base).ok());
                let Some(world) = world.map(Arc::new) else { return };
                seen.world = Some(Arc::clone(&world));
                ParticipantEvent::World(world)
            }
            FromCoordinator::Intent(intent) => {
                if Some(intent.attempt) <= seen.intent {
                    return;
                }
                seen.intent = Some(intent.attempt);
                self.end_attempts(|attempt| attempt < intent.attempt);
                ParticipantEvent::Intent(intent)
            }
            FromCoordinator::Publish { attempt, receipts } => {
                ParticipantEvent::Publish { attempt, receipts }
            }
            FromCoordinator::Committed { attempt, step, manifest } => {
                if !self.ended(attempt) {
                    return;
                }
                ParticipantEvent::Committed { attempt, step, manifest }
            }
            FromCoordinator::Abandoned { attempt, reason } => {
                if !self.ended(attempt) {
                    return;
                }
                ParticipantEvent::Abandoned { attempt, reason }
            }
            FromCoordinator::Released(release) => {
                if std::mem::replace(&mut seen.is_released, true) {
                    return;
                }
                seen.is_answered = true;
                ParticipantEvent::Released(release)
            }
            FromCoordinator::Noted { sequence } => {
                if self.requests.remove(&sequence).is_none() {
                    return;
                }
                ParticipantEvent::Noted { sequence }
            }
            FromCoordinator::Enrolled { sequence, node, certificate } => {
                if self.requests.remove(&sequence).is_none() {
                    return;
                }
                ParticipantEvent::Enrolled { sequence, node, certificate }
            }
            FromCoordinator::JobNews { sequence, evicted, standing } => {
                if self.requests.remove(&sequence).is_none() {
                    return;
                }
                ParticipantEvent::JobNews { sequence, evicted, standing }
            }
            FromCoordinator::Status { sequence, status } => {
                if self.requests.remove(&sequence).is_none() {
                    return;
                }
                ParticipantEvent::Status { sequence, status }
            }
            FromCoordinator::Events { sequence, events, next } => {
                if self.requests.remove(&sequence).is_none() {
                    return;
                }
                ParticipantEvent::Events { sequence, events, next }
            }
        };
        self.event(event);
    }

    /// Notes the end of an attempt: false if it was known.
    fn ended(&mut self, attempt: Attempt) -> bool {
        self.end_attempts(|other| other <= attempt);
        let is_news = Some(attempt) > self.seen.ended;
        self.seen.ended = self.seen.ended.max(Some(attempt));
        is_news
    }

    fn end_attempts(&mut self, is_over: impl Fn(Attempt) -> bool) {
        self.requests.retain(|_, message| !message.attempt().is_some_and(&is_over));
    }
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum ParticipantAction {
    /// Connect, and say so with this key.
    Connect {
        /// Names the connection.
        key: ConnectionKey,
        /// The coordinator.
        address: SocketAddr,
    },
    /// End this connection, or the try to make it.
    Disconnect {
        /// Which one.
        key: ConnectionKey,
    },
    /// Send on this connection.
    Send {
        /// Which one.
        key: ConnectionKey,
        /// What.
        message: ToCoordinator,
    },
    /// Tell the owner.
    Event(ParticipantEvent),
}

/// What the owner of a [`Participant`] learns. The fields are those of [`FromCoordinator`].
#[derive(Clone, Debug, PartialEq)]
pub enum ParticipantEvent {
    /// Listed, as this node.
    Joined {
        /// This node.
        node: NodeId,
    },
    /// It will never be done as asked.
    Refused {
        /// Exit code.
        code: u8,
        /// Why.
        reason: String,
    },
    /// A newer world than any before.
    World(Arc<World>),
    /// A newer intent than any before.
    Intent(Intent),
    /// Put the manifest. May come again.
    Publish {
        /// The attempt.
        attempt: Attempt,
        /// The segment lists.
        receipts: Vec<(NodeId, Bytes)>,
    },
    /// A checkpoint is real.
    Committed {
        /// The attempt.
        attempt: Attempt,
        /// Boundary of the state.
        step: Step,
        /// Key of the manifest.
        manifest: String,
    },
    /// An attempt is over.
    Abandoned {
        /// The attempt.
        attempt: Attempt,
        /// Why.
        reason: String,
    },
    /// Free to go. Comes once.
    Released(Release),
    /// A request is done.
    Noted {
        /// As [`Participant::request`] returned it.
        sequence: u64,
    },
    /// A certificate came.
    Enrolled {
        /// As [`Participant::request`] returned it.
        sequence: u64,
        /// The new node.
        node: NodeId,
        /// Its certificate.
        certificate: Bytes,
    },
    /// How the job is doing.
    JobNews {
        /// As [`Participant::request`] returned it.
        sequence: u64,
        /// Workers that are out by a verdict, and the causes.
        evicted: Vec<(NodeId, Cause)>,
        /// How far the job is; `None`: nobody joined it yet.
        standing: Option<Standing>,
    },
    /// How things stand.
    Status {
        /// As [`Participant::request`] returned it.
        sequence: u64,
        /// The document.
        status: Box<ClusterStatus>,
    },
    /// What happened.
    Events {
        /// As [`Participant::request`] returned it.
        sequence: u64,
        /// In log order.
        events: Vec<Event>,
        /// Ask again from here.
        next: u64,
    },
    /// No leader has answered for a recovery target. The search goes on.
    Unreachable {
        /// When one last answered.
        since: Timestamp,
    },
    /// A leader answers again after [`Self::Unreachable`].
    Reachable,
}

/// The one connection.
#[derive(Clone, Copy, Debug)]
enum Link {
    Idle { retry_at: Timestamp },
    Dialing { key: ConnectionKey, deadline: Timestamp },
    Connected { key: ConnectionKey, heard: Timestamp, term: Option<Term> },
}

impl Link {
    fn key(&self) -> Option<ConnectionKey> {
        match *self {
            Self::Idle { .. } => None,
            Self::Dialing { key, .. } | Self::Connected { key, .. } => Some(key),
        }
    }
}

/// What was passed on.
#[derive(Debug, Default)]
struct Seen {
    is_answered: bool,
    /// The newest one passed on.
    world: Option<Arc<World>>,
    intent: Option<Attempt>,
    ended: Option<Attempt>,
    is_released: bool,
}

impl Seen {
    fn generation(&self) -> Option<Generation> {
        self.world.as_ref().map(|world| world.generation)
    }
}

/// Leaders change their minds only by elections; more hops in a row mean that two coordinators point at each other.
const REDIRECTS_MAX: u32 = 3;
/// 2^4 times the shortest pause is more than the longest.
const BACKOFF_DOUBLINGS_MAX: u32 = 4;

#[cfg(test)]
mod tests;
