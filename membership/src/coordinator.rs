//! One coordinator process: its part in raft, the roster, everybody's connections, and while it leads, every decision.
//!
//! The shell calls `handle_*`, then polls actions until `None`. It promises: nothing that rests on a write is offered before that
//! write was confirmed by [`Coordinator::handle_persisted`]; worlds and verdicts are said only after the log has them; any message
//! may come late, twice, or never. Deliberately not here: bytes on disks and sockets, keys, and clocks.

mod connection;
mod messages;
mod seats;
mod status;
mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use bytes::Bytes;
use types::{JobId, NodeId, Term, Timestamp, decode, encode};

use crate::command::{Command, Entry};
use crate::config::{Config, Timing};
use crate::consensus::{Consensus, ConsensusConfig, LogImage, LogWrite, Output, RecoveredLog};
use crate::message::{Event, FromCoordinator, ToCoordinator};
use crate::peer::{ConnectionKey, EnrollRequest, Peer, Role};
use crate::roster::{Applied, Roster, Touched};

use connection::{Changes, Connection};
use seats::Seats;
use watch::{JobWatch, Leading, Pending, Purpose};

/// A coordinator. See the file's head.
#[derive(Debug)]
pub struct Coordinator {
    config: Config,
    timing: Timing,
    consensus: Consensus,
    roster: Roster,
    seats: Seats,
    now: Timestamp,
    /// The wall clock where it was last told, for history only.
    unix_ms: (u64, Timestamp),
    next_tick: Timestamp,
    leading: Option<Leading>,
    connections: BTreeMap<ConnectionKey, Connection>,
    changes: Changes,
    keys: BTreeMap<NodeId, ConnectionKey>,
    /// Jobs to look at before the next action is offered.
    dirty: BTreeSet<JobId>,
    next_proposal: u64,
    image_at: u64,
    /// Events up to this index were offered before a restart.
    emitted: u64,
    dropped: u64,
    actions: VecDeque<Action>,
}

impl Coordinator {
    /// Takes up the log of this coordinator; an empty one is a first start.
    ///
    /// # Panics
    /// If the log does not hold together, or its image is not one of this version.
    #[must_use]
    pub fn new(config: &Config, log: RecoveredLog, now: Timestamp) -> Self {
        let timing = config.timing();
        let consensus_config = ConsensusConfig {
            id: config.id(),
            voters: config.voters().keys().copied().collect(),
            election_ticks: Timing::ELECTION_TICKS,
            heartbeat_ticks: Timing::HEARTBEAT_TICKS,
            seed: config.seed(),
        };
        let emitted = log.hard_state.commit;
        let mut coordinator = Self {
            config: config.clone(),
            timing,
            consensus: Consensus::new(&consensus_config, log),
            roster: Roster::default(),
            seats: Seats::default(),
            now,
            unix_ms: (0, now),
            next_tick: now + timing.tick(),
            leading: None,
            connections: BTreeMap::new(),
            changes: Changes::default(),
            keys: BTreeMap::new(),
            dirty: BTreeSet::new(),
            next_proposal: 1,
            image_at: 0,
            emitted,
            dropped: 0,
            actions: VecDeque::new(),
        };
        coordinator.drive();
        coordinator
    }

    /// Bytes came from another coordinator, as its certificate names it.
    pub fn handle_raft(&mut self, now: Timestamp, from: u64, bytes: &[u8]) {
        self.now = now;
        match self.open_envelope(from, bytes) {
            Some(message) if self.consensus.step(from, &message).is_ok() => {}
            _ => self.dropped += 1,
        }
        self.drive();
    }

    /// A worker, agent or operator connected.
    pub fn handle_connected(&mut self, now: Timestamp, peer: Peer) {
        self.now = now;
        let key = peer.key;
        if self.connections.len() >= CONNECTIONS_MAX {
            let reason = format!("this coordinator serves {CONNECTIONS_MAX} connections already");
            self.actions.push_back(Action::Close { key, reason });
            return;
        }
        self.keys.insert(peer.node, key);
        self.connections.insert(key, Connection::new(peer));
        self.greet(key);
        self.drive();
    }

    /// A connection ended. That alone says nothing about the peer.
    pub fn handle_disconnected(&mut self, now: Timestamp, key: ConnectionKey) {
        self.now = now;
        if let Some(connection) = self.connections.remove(&key) {
            let node = connection.peer.node;
            self.keys.retain(|other, own| *other != node || *own != key);
        }
        self.drive();
    }

    /// A peer said something. `unix_ms` is for people only.
    pub fn handle_message(
        &mut self,
        now: Timestamp,
        unix_ms: u64,
        peer: &Peer,
        message: ToCoordinator,
    ) {
        self.now = now;
        self.unix_ms = (unix_ms, now);
        if !self.connections.contains_key(&peer.key) {
            self.dropped += 1;
            return;
        }
        if self.leading.is_none() {
            self.greet(peer.key);
        } else if self.is_serving() {
            self.answer(peer, message);
        }
        self.drive();
    }

    /// Somebody showed a valid join token and wants a certificate.
    pub fn handle_enroll(&mut self, now: Timestamp, unix_ms: u64, request: EnrollRequest) {
        self.now = now;
        self.unix_ms = (unix_ms, now);
        let EnrollRequest { key, token, uses, job, role, csr } = request;
        let command = Command::UseToken { token, uses, job: job.clone(), role };
        let purpose = Purpose::Enroll { key, sequence: None, role, job, csr };
        if !self.propose(command, None, purpose) {
            let leader = self.leader_address();
            self.send(key, FromCoordinator::NotLeader { leader });
        }
        self.drive();
    }

    /// The write of this number is durable.
    pub fn handle_persisted(&mut self, now: Timestamp, number: u64) {
        self.now = now;
        self.consensus.handle_persisted(number);
        self.drive();
    }

    /// The link to another coordinator broke, or bytes for it were dropped.
    pub fn handle_unreachable(&mut self, now: Timestamp, coordinator: u64) {
        self.now = now;
        self.consensus.report_unreachable(coordinator);
        self.drive();
    }

    /// Time has come: see [`Self::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.now = now;
        if now >= self.next_tick {
            // A process that was stopped must not depose a healthy leader by all the ticks that it missed.
            let missed = now.since(self.next_tick).as_nanos() / self.timing.tick().as_nanos();
            for _ in 0..=missed.min(CATCH_UP_TICKS) {
                // Who lost its disk promises nothing any more, so it may not ask for votes either.
                if !self.seats.is_lost() {
                    self.consensus.tick();
                }
            }
            self.next_tick = now + self.timing.tick();
            self.tick();
        }
        let due = |watch: &JobWatch| watch.formation.poll_timeout().is_some_and(|due| due <= now);
        if let Some(leading) = &self.leading {
            self.dirty.extend(
                leading.jobs.iter().filter(|(_, watch)| due(watch)).map(|(job, _)| job.clone()),
            );
        }
        self.drive();
    }

    /// When to call [`Self::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let formations = self.leading.iter().flat_map(|leading| leading.jobs.values());
        let due = formations.filter_map(|watch| watch.formation.poll_timeout()).min();
        // What was due and is not done waits for the log, not for the time.
        let due = due.filter(|due| *due > self.now);
        Some(due.map_or(self.next_tick, |due| due.min(self.next_tick)))
    }

    /// The next thing to do; ask until `None` after each input.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether it leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.consensus.is_leader()
    }

    /// Who leads, if known.
    #[must_use]
    pub fn leader(&self) -> Option<u64> {
        self.consensus.leader()
    }

    /// Raft's term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.consensus.term()
    }

    /// The last log index known to be committed.
    #[must_use]
    pub fn commit_index(&self) -> u64 {
        self.consensus.commit_index()
    }

    /// The replicated state, as far as it was applied here.
    #[must_use]
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Messages that were dropped because nothing could be done with them.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether it leads, and has applied all that its predecessors committed.
    fn is_serving(&self) -> bool {
        self.leading.as_ref().is_some_and(|leading| leading.is_serving)
    }

    fn leader_address(&self) -> Option<SocketAddr> {
        let leader = self.consensus.leader().filter(|leader| *leader != self.config.id())?;
        self.config.voters().get(&leader).copied()
    }

    fn send(&mut self, to: ConnectionKey, message: FromCoordinator) {
        self.actions.push_back(Action::Send { to, message });
    }

    /// Says who leads; a leader that still catches up says nothing yet.
    fn greet(&mut self, key: ConnectionKey) {
        if self.is_serving() {
            let term = self.term();
            self.send(key, FromCoordinator::Leading { term });
            self.sync(key);
        } else if self.leading.is_none() {
            let leader = self.leader_address();
            self.send(key, FromCoordinator::NotLeader { leader });
        }
    }

    /// Puts a command into the log; false if this coordinator can't, or already waits for too much.
    fn propose(&mut self, command: Command, job: Option<JobId>, purpose: Purpose) -> bool {
        let since_told = self.now.since(self.unix_ms.1).as_millis();
        let at_ms = self.unix_ms.0.saturating_add(u64::try_from(since_told).unwrap_or(u64::MAX));
        let Some(leading) = self.leading.as_mut().filter(|l| l.pending.len() < PENDING_MAX) else {
            return false;
        };
        let number = self.next_proposal;
        let entry = encode(&Entry { at_ms, command });
        if self.consensus.propose(entry, encode(&number)).is_err() {
            self.dropped += 1;
            return false;
        }
        self.next_proposal += 1;
        leading.pending.insert(number, Pending { job, purpose, since: self.now });
        true
    }

    /// Works until there is nothing to do without a further input.
    fn drive(&mut self) {
        for _ in 0..TURNS_MAX {
            while let Some(output) = self.consensus.poll_output() {
                self.take(output);
            }
            if self.dirty.is_empty() {
                return;
            }
            for job in std::mem::take(&mut self.dirty) {
                self.evaluate(&job);
            }
        }
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Persist { number, write, sync } => {
                self.actions.push_back(Action::Persist { number, write, sync });
            }
            Output::Send { to, bytes } => {
                let bytes = self.envelope(to, bytes);
                self.actions.push_back(Action::SendRaft { to, bytes });
            }
            Output::Apply { index, term, data, context } => {
                self.apply(index, term, &data, &context);
            }
            Output::Restore { image } => self.restore(&image),
            Output::Role { term, is_leader, .. } => self.take_role(term, is_leader),
        }
    }

    fn take_role(&mut self, term: Term, is_leader: bool) {
        if !is_leader {
            self.leading = None;
            let keys: Vec<ConnectionKey> = self.connections.keys().copied().collect();
            keys.into_iter().for_each(|key| self.greet(key));
        } else if self.leading.as_ref().is_none_or(|leading| leading.term != term) {
            self.leading = Some(Leading::new(term, self.timing, self.now));
            let coordinator = self.config.id();
            self.propose(Command::Lead { coordinator }, None, Purpose::Lead);
        }
    }

    fn restore(&mut self, image: &LogImage) {
        self.roster =
            Roster::from_image(&image.data).expect("the log image is the roster of this version");
        self.image_at = image.index;
    }

    fn apply(&mut self, index: u64, term: Term, data: &Bytes, context: &Bytes) {
        // A new leader's first entry is empty. What can't be read was written by another version, and is skipped by all alike.
        if let Ok(entry) = decode::<Entry>(data) {
            let own = self.leading.as_mut().filter(|leading| leading.term == term);
            let pending =
                own.and_then(|leading| leading.pending.remove(&decode::<u64>(context).ok()?));
            let Applied { reply, touched, events } = self.roster.apply(index, term, entry);
            if let Touched::Coordinator(coordinator) = touched {
                // What its former disk confirmed is gone.
                self.consensus.forget_progress(coordinator);
            }
            if index > self.emitted {
                self.actions.extend(events.into_iter().map(Action::Emit));
            }
            if self.leading.is_some() {
                self.follow_up(pending, reply, touched);
            }
        } else if !data.is_empty() {
            self.dropped += 1;
        }
        if index >= self.image_at + IMAGE_EVERY {
            self.image_at = index;
            self.consensus.compact(index, self.roster.to_image());
        }
    }
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make this write durable, then call [`Coordinator::handle_persisted`].
    Persist {
        /// Names the write.
        number: u64,
        /// The transaction.
        write: LogWrite,
        /// Whether it must survive a power cut before it is confirmed.
        sync: bool,
    },
    /// Send to another coordinator; it may be lost.
    SendRaft {
        /// Which one.
        to: u64,
        /// For its [`Coordinator::handle_raft`].
        bytes: Bytes,
    },
    /// Send to a peer.
    Send {
        /// Its connection.
        to: ConnectionKey,
        /// What.
        message: FromCoordinator,
    },
    /// The others know this coordinator by another disk: it takes no part until that one is back, or an operator replaces it.
    LostSeat {
        /// The disk that they know.
        disk: u128,
    },
    /// This coordinator's seat is this disk's again.
    FoundSeat,
    /// End a connection.
    Close {
        /// Which one.
        key: ConnectionKey,
        /// Why.
        reason: String,
    },
    /// Sign a certificate for this node and answer the connection: `Enrolled` to an agent, or the enrolment's own answer.
    SignCertificate {
        /// The connection to answer on.
        key: ConnectionKey,
        /// The sequence number of an agent's question; `None` for an enrolment by token.
        sequence: Option<u64>,
        /// The new node.
        node: NodeId,
        /// What the certificate is for.
        role: Role,
        /// The only job of it.
        job: Option<JobId>,
        /// The signing request.
        csr: Bytes,
    },
    /// This happened; for log and metrics. Each once, on every coordinator.
    Emit(Event),
}

/// Most control connections.
const CONNECTIONS_MAX: usize = 65_536;
/// Most proposals that wait for the log.
const PENDING_MAX: usize = 16_384;
/// Ticks made up for after a stall, besides the one that is due.
const CATCH_UP_TICKS: u128 = 2;
/// Entries between log images.
const IMAGE_EVERY: u64 = 1000;
/// Each turn needs a commit, and those come by inputs; a bound all the same.
const TURNS_MAX: usize = 1000;
