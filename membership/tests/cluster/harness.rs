//! Coordinators, agents and workers in one process under virtual time.
//!
//! The machines are the real ones; disks, links and the training loop of the workers are simple models. Every message takes a
//! millisecond. Nothing here decides anything that a machine should.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use membership::{
    Action, Cause, Config, ConnectionKey, Coordinator, EnrollRequest, Event, FromCoordinator,
    JobSpec, Participant, ParticipantAction, ParticipantEvent, Peer, RecoveredLog, Role, Timing,
    ToCoordinator,
};
use types::{Digest, JobId, NodeId, Timestamp, VirtualRanks, World};

use crate::worker::Worker;

pub(crate) struct Cluster {
    pub(crate) now: Timestamp,
    target: Duration,
    seats: BTreeMap<u64, Seat>,
    pub(crate) clients: BTreeMap<u64, Client>,
    links: BTreeMap<ConnectionKey, Link>,
    queue: BTreeMap<(Timestamp, u64), Happening>,
    next: u64,
    /// What the log said, from whichever coordinator applied it first.
    pub(crate) events: BTreeMap<(u64, usize), Event>,
    /// Every world that anybody was told.
    pub(crate) worlds: BTreeMap<(JobId, u64), Arc<World>>,
    /// Raft messages between these pairs are lost.
    pub(crate) cut: BTreeSet<(u64, u64)>,
    /// Raft messages from the first to the second are lost; the other way they arrive.
    pub(crate) cut_one_way: BTreeSet<(u64, u64)>,
    /// Bytes that coordinators sent to clients, and to each other.
    pub(crate) sent_bytes: (u64, u64),
    digests: BTreeMap<u64, Digest>,
    without_seat: BTreeSet<u64>,
    pub(crate) enroll_answers: Vec<Result<NodeId, FromCoordinator>>,
    next_step: Timestamp,
}

/// A coordinator's place: its disk outlives its process.
struct Seat {
    config: Config,
    disk: RecoveredLog,
    machine: Option<Coordinator>,
    incarnation: u64,
    /// Where its roster was last compared.
    checked: u64,
    /// How far its clocks are ahead.
    ahead: Duration,
}

impl Seat {
    /// What its own clock shows.
    fn clock(&self, now: Timestamp) -> Timestamp {
        now + self.ahead
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        let at = self.machine.as_ref()?.poll_timeout()?;
        Some(Timestamp(at.0.saturating_sub(self.ahead.as_nanos() as u64)))
    }
}

pub(crate) struct Client {
    pub(crate) participant: Participant,
    pub(crate) peer: (Role, NodeId, Option<JobId>),
    pub(crate) worker: Option<Worker>,
    pub(crate) heard: Vec<ParticipantEvent>,
    /// Hears and says nothing, but its connection stands.
    pub(crate) is_silent: bool,
    /// It hears, but nothing that it says arrives.
    pub(crate) is_mute: bool,
    /// What it says arrives, but it hears nothing.
    pub(crate) is_deaf: bool,
    pub(crate) is_dead: bool,
}

#[derive(Clone, Copy)]
struct Link {
    client: u64,
    client_key: ConnectionKey,
    seat: u64,
}

enum Happening {
    Raft { from: u64, to: u64, bytes: Bytes },
    Persisted { seat: u64, incarnation: u64, number: u64 },
    Up { client: u64, key: ConnectionKey, address: SocketAddr },
    Down { client: u64, key: ConnectionKey },
    ToCoordinator { link: ConnectionKey, message: ToCoordinator },
    ToClient { link: ConnectionKey, message: FromCoordinator },
}

pub(crate) const AGENT: u64 = 1;
pub(crate) const OPERATOR: u64 = 2;

impl Cluster {
    pub(crate) fn new(coordinators: u64, seed: u64) -> Self {
        let target = Duration::from_secs(1);
        let voters: BTreeMap<u64, SocketAddr> =
            (1..=coordinators).map(|id| (id, address(id))).collect();
        let now = Timestamp(1_000_000_000);
        let seat = |id: u64| {
            let config = Config::builder(id, voters.clone())
                .recovery_target(target)
                .seed(seed * 10 + id)
                .build()
                .unwrap();
            Seat {
                config,
                disk: RecoveredLog::default(),
                machine: None,
                incarnation: 0,
                checked: 0,
                ahead: Duration::ZERO,
            }
        };
        let mut cluster = Self {
            now,
            target,
            seats: voters.keys().map(|id| (*id, seat(*id))).collect(),
            clients: BTreeMap::new(),
            links: BTreeMap::new(),
            queue: BTreeMap::new(),
            next: 0,
            events: BTreeMap::new(),
            worlds: BTreeMap::new(),
            cut: BTreeSet::new(),
            cut_one_way: BTreeSet::new(),
            sent_bytes: (0, 0),
            digests: BTreeMap::new(),
            enroll_answers: Vec::new(),
            without_seat: BTreeSet::new(),
            next_step: now,
        };
        for id in voters.keys() {
            cluster.start(*id);
        }
        cluster.client((Role::Agent, NodeId(50), None), None);
        cluster.client((Role::Operator, NodeId(0), None), None);
        cluster.run(Duration::from_secs(2));
        assert!(cluster.leader().is_some(), "no leader after 2 s");
        cluster
    }

    pub(crate) fn start(&mut self, id: u64) {
        let seat = self.seats.get_mut(&id).unwrap();
        seat.incarnation += 1;
        seat.machine =
            Some(Coordinator::new(&seat.config, seat.disk.clone(), seat.clock(self.now)));
        self.drain_seat(id);
    }

    /// The process dies; its disk stays.
    pub(crate) fn kill(&mut self, id: u64) {
        self.seats.get_mut(&id).unwrap().machine = None;
        let broken: Vec<Link> = self.links.values().filter(|l| l.seat == id).copied().collect();
        self.links.retain(|_, link| link.seat != id);
        for link in broken {
            self.push(Happening::Down { client: link.client, key: link.client_key });
        }
    }

    /// Sets a coordinator's clocks, the one for people too, while it is down.
    pub(crate) fn set_ahead(&mut self, id: u64, ahead: Duration) {
        let seat = self.seats.get_mut(&id).unwrap();
        assert!(seat.machine.is_none(), "it is down");
        seat.ahead = ahead;
    }

    pub(crate) fn leader(&self) -> Option<u64> {
        let leads = |seat: &Seat| seat.machine.as_ref().is_some_and(Coordinator::is_leader);
        self.seats.iter().filter(|(_, seat)| leads(seat)).map(|(id, _)| *id).next()
    }

    pub(crate) fn machine(&self) -> &Coordinator {
        self.seats[&self.leader().expect("a leader")].machine.as_ref().unwrap()
    }

    pub(crate) fn is_up(&self, id: u64) -> bool {
        self.seats[&id].machine.is_some()
    }

    pub(crate) fn coordinator(&self, id: u64) -> &Coordinator {
        self.seats[&id].machine.as_ref().unwrap()
    }

    fn client(&mut self, peer: (Role, NodeId, Option<JobId>), worker: Option<Worker>) -> u64 {
        let id = u64::try_from(self.clients.len()).unwrap() + 1;
        let timing = Timing::new(self.target).unwrap();
        let coordinators = self.seats.keys().map(|id| address(*id)).collect();
        let join = worker.as_ref().map(|worker| worker.join.clone());
        let participant = Participant::new(timing, coordinators, join, self.now).unwrap();
        let client = Client {
            participant,
            peer,
            worker,
            heard: Vec::new(),
            is_silent: false,
            is_mute: false,
            is_deaf: false,
            is_dead: false,
        };
        self.clients.insert(id, client);
        self.drain_client(id);
        id
    }

    /// Enrolls and starts a worker; it joins as the cluster runs on.
    pub(crate) fn spawn(&mut self, spec: &JobSpec) -> NodeId {
        self.spawn_with(spec, |_| {})
    }

    pub(crate) fn spawn_with(
        &mut self,
        spec: &JobSpec,
        change: impl FnOnce(&mut Worker),
    ) -> NodeId {
        let request =
            ToCoordinator::EnrollWorker { job: spec.job.clone(), csr: Bytes::new(), sequence: 0 };
        let sequence = self.ask(request);
        let enrolled = |cluster: &Self| {
            cluster.clients[&AGENT].heard.iter().find_map(|event| match event {
                ParticipantEvent::Enrolled { sequence: of, node, .. } if *of == sequence => {
                    Some(*node)
                }
                _ => None,
            })
        };
        self.run_until(Duration::from_secs(5), "enrolment", |cluster| enrolled(cluster).is_some());
        let node = enrolled(self).unwrap();
        let mut worker = Worker::new(node, spec);
        change(&mut worker);
        self.client((Role::Worker, node, Some(spec.job.clone())), Some(worker));
        node
    }

    /// Says something as the agent; returns its sequence number.
    pub(crate) fn ask(&mut self, message: ToCoordinator) -> u64 {
        self.ask_as(AGENT, message)
    }

    pub(crate) fn ask_as(&mut self, client: u64, message: ToCoordinator) -> u64 {
        let now = self.now;
        let participant = &mut self.clients.get_mut(&client).unwrap().participant;
        let sequence = participant.request(now, message).unwrap();
        self.drain_client(client);
        sequence
    }

    /// What a client was told.
    pub(crate) fn told(&self, client: u64) -> &[ParticipantEvent] {
        &self.clients[&client].heard
    }

    /// Takes a coordinator's disk away; it finds an empty one when it comes back.
    pub(crate) fn take_disk(&mut self, id: u64) -> (Config, RecoveredLog) {
        let seat = &self.seats[&id];
        let former = (seat.config.clone(), seat.disk.clone());
        self.lose_disk(id);
        former
    }

    pub(crate) fn put_disk(&mut self, id: u64, (config, disk): (Config, RecoveredLog)) {
        let seat = self.seats.get_mut(&id).unwrap();
        (seat.config, seat.disk, seat.checked) = (config, disk, 0);
    }

    /// A coordinator that is down finds an empty disk when it comes back.
    pub(crate) fn lose_disk(&mut self, id: u64) {
        let seat = self.seats.get_mut(&id).unwrap();
        assert!(seat.machine.is_none(), "it is down");
        let disk = seat.config.disk() + 1000;
        let builder = Config::builder(id, seat.config.voters().clone());
        let builder = builder.recovery_target(self.target).seed(seat.config.seed()).disk(disk);
        seat.config = builder.build().unwrap();
        seat.disk = RecoveredLog::default();
        seat.checked = 0;
    }

    pub(crate) fn has_seat(&self, id: u64) -> bool {
        !self.without_seat.contains(&id)
    }

    pub(crate) fn enroll_by_token(&mut self, token: [u8; 16], uses: u32) {
        let (id, now) = (self.leader().unwrap(), self.now);
        let key = ConnectionKey(u64::MAX - self.next);
        let request =
            EnrollRequest { key, token, uses, job: None, role: Role::Agent, csr: Bytes::new() };
        let seat = self.seats.get_mut(&id).unwrap();
        let now = seat.clock(now);
        seat.machine.as_mut().unwrap().handle_enroll(now, 0, request);
        self.drain_seat(id);
    }

    /// The process dies, and its agent says so.
    pub(crate) fn kill_worker(&mut self, node: NodeId) {
        self.die(node);
        self.ask(ToCoordinator::Lost { node, cause: Cause::Signalled { signal: 9 }, sequence: 0 });
    }

    /// The process dies unseen.
    pub(crate) fn die(&mut self, node: NodeId) {
        let id = self.client_of(node);
        self.clients.get_mut(&id).unwrap().is_dead = true;
        let broken: Vec<(ConnectionKey, Link)> =
            self.links.iter().filter(|(_, l)| l.client == id).map(|(k, l)| (*k, *l)).collect();
        for (key, link) in broken {
            self.links.remove(&key);
            let seat = self.seats.get_mut(&link.seat).unwrap();
            let now = seat.clock(self.now);
            if let Some(machine) = seat.machine.as_mut() {
                machine.handle_disconnected(now, key);
                self.drain_seat(link.seat);
            }
        }
    }

    pub(crate) fn drain_worker(&mut self, job: &JobId, nodes: Vec<NodeId>) {
        let reason = "test".to_owned();
        self.ask(ToCoordinator::Drain { nodes, job: job.clone(), reason, sequence: 0 });
    }

    pub(crate) fn client_of(&self, node: NodeId) -> u64 {
        let is = |client: &Client| client.worker.as_ref().is_some_and(|worker| worker.node == node);
        *self.clients.iter().find(|(_, client)| is(client)).expect("a worker").0
    }

    pub(crate) fn worker(&self, node: NodeId) -> &Worker {
        self.clients[&self.client_of(node)].worker.as_ref().unwrap()
    }

    pub(crate) fn worker_mut(&mut self, node: NodeId) -> &mut Worker {
        let id = self.client_of(node);
        self.clients.get_mut(&id).unwrap().worker.as_mut().unwrap()
    }

    pub(crate) fn heard(&self, node: NodeId) -> &[ParticipantEvent] {
        &self.clients[&self.client_of(node)].heard
    }

    pub(crate) fn kinds(&self, kind: &str) -> Vec<&Event> {
        self.events.values().filter(|event| event.kind == kind).collect()
    }

    /// The newest world that the leader's log has.
    pub(crate) fn world(&self, job: &JobId) -> Arc<World> {
        Arc::clone(self.machine().roster().job(job).unwrap().world().expect("a world"))
    }

    pub(crate) fn has_world(&self, job: &JobId) -> bool {
        let leader = self.leader().map(|id| self.coordinator(id));
        leader.and_then(|machine| machine.roster().job(job)?.world()).is_some()
    }

    pub(crate) fn members(&self, job: &JobId) -> Vec<NodeId> {
        self.world(job).nodes().collect()
    }

    pub(crate) fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.turn(end) {}
        self.check();
    }

    pub(crate) fn run_until(
        &mut self,
        limit: Duration,
        what: &str,
        mut is_done: impl FnMut(&Self) -> bool,
    ) {
        let end = self.now + limit;
        while !is_done(self) {
            if !self.turn(end) {
                let events: Vec<String> = self
                    .events
                    .values()
                    .rev()
                    .take(30)
                    .map(|e| format!("{} {}", e.kind, e.message))
                    .collect();
                panic!("not within {limit:?}: {what}; newest events first: {events:#?}");
            }
        }
        self.check();
    }

    /// Does what is next; false when nothing is due before `end`.
    fn turn(&mut self, end: Timestamp) -> bool {
        let machines = self.seats.values().filter_map(Seat::poll_timeout);
        let clients = self
            .clients
            .values()
            .filter(|c| !c.is_dead)
            .filter_map(|c| c.participant.poll_timeout());
        let queued = self.queue.keys().next().map(|(at, _)| *at);
        let next = machines
            .chain(clients)
            .chain(queued)
            .min()
            .unwrap_or(end)
            .min(self.next_step)
            .max(self.now);
        if next > end {
            self.now = end;
            return false;
        }
        self.now = next;
        if queued.is_some_and(|at| at <= next) {
            let (_, happening) = self.queue.pop_first().unwrap();
            self.happen(happening);
            return true;
        }
        if self.next_step <= next {
            self.next_step = next + STEP;
            self.step_workers();
            return true;
        }
        for id in self.seats.keys().copied().collect::<Vec<_>>() {
            let seat = self.seats.get_mut(&id).unwrap();
            let now = seat.clock(next);
            if seat.poll_timeout().is_some_and(|at| at <= next)
                && let Some(machine) = seat.machine.as_mut()
            {
                machine.handle_timeout(now);
                self.drain_seat(id);
            }
        }
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            let client = self.clients.get_mut(&id).unwrap();
            if !client.is_dead && client.participant.poll_timeout().is_some_and(|at| at <= next) {
                client.participant.handle_timeout(next);
                self.drain_client(id);
            }
        }
        true
    }

    fn happen(&mut self, happening: Happening) {
        let now = self.now;
        match happening {
            Happening::Raft { from, to, bytes } => {
                let seat = self.seats.get_mut(&to).unwrap();
                let now = seat.clock(now);
                if let Some(machine) = seat.machine.as_mut() {
                    machine.handle_raft(now, from, &bytes);
                    self.drain_seat(to);
                }
            }
            Happening::Persisted { seat: id, incarnation, number } => {
                let seat = self.seats.get_mut(&id).unwrap();
                let now = seat.clock(now);
                if let Some(machine) =
                    seat.machine.as_mut().filter(|_| seat.incarnation == incarnation)
                {
                    machine.handle_persisted(now, number);
                    self.drain_seat(id);
                }
            }
            Happening::Up { client: id, key, address: to } => {
                let seat_id = u64::from(to.port());
                if self.clients[&id].is_dead {
                    return;
                }
                let seat = self.seats.get_mut(&seat_id).unwrap();
                let its_now = seat.clock(now);
                let Some(machine) = seat.machine.as_mut() else {
                    return self.happen(Happening::Down { client: id, key });
                };
                self.next += 1;
                let link = ConnectionKey(self.next);
                self.links.insert(link, Link { client: id, client_key: key, seat: seat_id });
                let client = self.clients.get_mut(&id).unwrap();
                let (role, node, job) = client.peer.clone();
                machine.handle_connected(its_now, Peer { key: link, role, node, job });
                client.participant.handle_connected(now, key);
                self.drain_seat(seat_id);
                self.drain_client(id);
            }
            Happening::Down { client: id, key } => {
                if !self.clients[&id].is_dead {
                    self.clients.get_mut(&id).unwrap().participant.handle_disconnected(now, key);
                    self.drain_client(id);
                }
            }
            Happening::ToCoordinator { link: key, message } => {
                let Some(link) = self.links.get(&key).copied() else { return };
                let (role, node, job) = self.clients[&link.client].peer.clone();
                let peer = Peer { key, role, node, job };
                let seat = self.seats.get_mut(&link.seat).unwrap();
                let now = seat.clock(now);
                if let Some(machine) = seat.machine.as_mut() {
                    machine.handle_message(now, now.0 / 1_000_000, &peer, message);
                    self.drain_seat(link.seat);
                }
            }
            Happening::ToClient { link, message } => {
                let Some(link) = self.links.get(&link).copied() else { return };
                let client = self.clients.get_mut(&link.client).unwrap();
                if !client.is_silent && !client.is_deaf && !client.is_dead {
                    client.participant.handle_message(now, link.client_key, message);
                    self.drain_client(link.client);
                }
            }
        }
    }

    fn push(&mut self, happening: Happening) {
        self.next += 1;
        self.queue.insert((self.now + LATENCY, self.next), happening);
    }

    fn drain_seat(&mut self, id: u64) {
        loop {
            let seat = self.seats.get_mut(&id).unwrap();
            let incarnation = seat.incarnation;
            let Some(machine) = seat.machine.as_mut() else { return };
            let Some(action) = machine.poll_action() else { break };
            match action {
                Action::Persist { number, write, .. } => {
                    // Nothing is confirmed before its time, so writing at once is the same as writing then.
                    seat.disk.record(&write).expect("a write that fits the log");
                    self.push(Happening::Persisted { seat: id, incarnation, number });
                }
                Action::SendRaft { to, bytes } => {
                    self.sent_bytes.1 += bytes.len() as u64;
                    let is_cut = self.cut.contains(&(id, to)) || self.cut.contains(&(to, id));
                    if !is_cut && !self.cut_one_way.contains(&(id, to)) {
                        self.push(Happening::Raft { from: id, to, bytes });
                    }
                }
                Action::Send { to, message } => {
                    if self.links.contains_key(&to) {
                        self.sent_bytes.0 += types::encode(&message).len() as u64;
                        self.push(Happening::ToClient { link: to, message });
                    } else if to.0 > u64::MAX / 2 {
                        self.enroll_answers.push(Err(message));
                    }
                }
                Action::Close { key, .. } => {
                    if let Some(link) = self.links.remove(&key) {
                        self.push(Happening::Down { client: link.client, key: link.client_key });
                    }
                }
                Action::SignCertificate { key, sequence: Some(sequence), node, .. } => {
                    let message =
                        FromCoordinator::Enrolled { sequence, node, certificate: Bytes::new() };
                    self.push(Happening::ToClient { link: key, message });
                }
                Action::SignCertificate { sequence: None, node, .. } => {
                    self.enroll_answers.push(Ok(node));
                }
                Action::LostSeat { .. } => {
                    self.without_seat.insert(id);
                }
                Action::FoundSeat => {
                    self.without_seat.remove(&id);
                }
                Action::Emit(event) => {
                    let place = (0..).find(|place| match self.events.get(&(event.index, *place)) {
                        None => true,
                        Some(known) => *known == event,
                    });
                    self.events.insert((event.index, place.unwrap()), event);
                }
            }
        }
        let seat = self.seats.get_mut(&id).unwrap();
        let roster = seat.machine.as_ref().unwrap().roster();
        if seat.checked != roster.applied() {
            seat.checked = roster.applied();
            let digest = roster.digest();
            let known = self.digests.entry(seat.checked).or_insert(digest);
            assert_eq!(*known, digest, "rosters differ at index {}", seat.checked);
        }
    }

    fn drain_client(&mut self, id: u64) {
        while let Some(action) = self.clients.get_mut(&id).unwrap().participant.poll_action() {
            match action {
                ParticipantAction::Connect { key, address } => {
                    self.push(Happening::Up { client: id, key, address });
                }
                ParticipantAction::Disconnect { key } => {
                    let of = |link: &Link| link.client == id && link.client_key == key;
                    let link =
                        self.links.iter().find(|(_, link)| of(link)).map(|(k, l)| (*k, l.seat));
                    if let Some((link, seat)) = link {
                        self.links.remove(&link);
                        let its = self.seats.get_mut(&seat).unwrap();
                        let now = its.clock(self.now);
                        if let Some(machine) = its.machine.as_mut() {
                            machine.handle_disconnected(now, link);
                            self.drain_seat(seat);
                        }
                    }
                }
                ParticipantAction::Send { key, message } => {
                    let of = |link: &Link| link.client == id && link.client_key == key;
                    let link = self.links.iter().find(|(_, link)| of(link)).map(|(key, _)| *key);
                    let client = &self.clients[&id];
                    let is_heard = !client.is_silent && !client.is_mute && !client.is_dead;
                    if let Some(link) = link.filter(|_| is_heard) {
                        self.push(Happening::ToCoordinator { link, message });
                    }
                }
                ParticipantAction::Event(event) => {
                    let client = self.clients.get_mut(&id).unwrap();
                    client.heard.push(event.clone());
                    let Some(worker) = client.worker.as_mut() else { continue };
                    if let ParticipantEvent::World(world) = &event {
                        let name = (worker.join.spec.job.clone(), world.generation.0);
                        let known = self.worlds.entry(name).or_insert_with(|| Arc::clone(world));
                        assert_eq!(known, world, "two worlds of one generation");
                    }
                    worker.handle_event(self.now, event);
                    self.tell(id);
                }
            }
        }
    }

    /// Passes on what a worker has to say.
    fn tell(&mut self, id: u64) {
        let now = self.now;
        let client = self.clients.get_mut(&id).unwrap();
        let Some(worker) = client.worker.as_mut() else { return };
        for message in std::mem::take(&mut worker.to_say) {
            client.participant.request(now, message).unwrap();
        }
        client.participant.set_heartbeat(now, worker.heartbeat(now));
        self.drain_client(id);
    }

    /// One round of the training loop: gates, steps, staging.
    fn step_workers(&mut self) {
        let now = self.now;
        let alive: Vec<u64> = self
            .clients
            .iter()
            .filter(|(_, c)| {
                !c.is_dead
                    && !c.is_silent
                    && c.worker.as_ref().is_some_and(|w| w.released.is_none())
            })
            .map(|(id, _)| *id)
            .collect();
        let peers: BTreeMap<NodeId, Worker> = alive
            .iter()
            .filter_map(|id| self.clients[id].worker.clone())
            .map(|w| (w.node, w))
            .collect();
        for id in alive {
            self.clients.get_mut(&id).unwrap().worker.as_mut().unwrap().step(now, &peers);
            self.tell(id);
        }
    }

    /// What must hold at any time.
    fn check(&self) {
        let mut generations: BTreeMap<JobId, u64> = BTreeMap::new();
        for event in self.events.values().filter(|e| e.kind == "world" || e.kind == "restart") {
            let last = generations.entry(event.job.clone().unwrap()).or_default();
            assert_eq!(event.generation.unwrap().0, *last + 1, "generations repeat or skip");
            *last += 1;
        }
    }
}

pub(crate) fn address(id: u64) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], u16::try_from(id).unwrap()))
}

pub(crate) fn spec(job: &str, members: (u32, u32, u32)) -> JobSpec {
    JobSpec {
        job: JobId::new(job).unwrap(),
        virtual_ranks: VirtualRanks::new(16).unwrap(),
        min_members: members.0,
        min_timeout: None,
        expected_members: members.1,
        max_members: members.2,
        total_steps: None,
        checkpoint_every: None,
        hang_timeout: None,
        pause_timeout: None,
        evens_out: true,
    }
}

/// What a message or a write takes.
const LATENCY: Duration = Duration::from_millis(1);
/// What a step takes.
const STEP: Duration = Duration::from_millis(20);
