//! [`Sim`]: one run of the whole system in one thread, under virtual time.
//!
//! Coordinators, participants and step machines are the real ones. What can lie is simulated here: links (late, broken, cut), disks
//! (a crash keeps what was synced, and some of the rest in order), processes (killed, frozen, drained), the store, and how long the user's
//! program takes. Nothing here decides anything that a machine should.

pub(crate) mod node;
mod worker;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use membership::{
    Action, Cause, Config, ConnectionKey, Coordinator, Event, Fingerprint, FoundCheckpoint,
    FromCoordinator, Intent, JobSpec, Join, LogWrite, Participant, ParticipantAction,
    ParticipantEvent, Peer, RecoveredLog, Release, Role, Timing, ToCoordinator, Turn,
};
use ripstop::step_cycle::PeerFrame;
use types::{Address, Digest, JobId, NodeId, Origin, Start, Step, Timestamp, VirtualRanks};

use crate::invariants::equal_digests_at_equal_steps::EqualDigestsAtEqualSteps;
use crate::invariants::one_world_per_generation::OneWorldPerGeneration;
use crate::invariants::{Violation, blocks_tile_the_virtual_ranks, every_wait_ends};
use crate::plan::{Fault, Plan};
use crate::seed::{Rng, mix};
use node::{Body, Node, Shape, TrainState, User, Work};
use worker::{Store, Worker};

/// A bug put in on purpose: the invariant of that name must catch it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// A coordinator tells one worker another world of the same generation.
    TwoWorlds,
    /// A world serves a virtual rank twice.
    ServedTwice,
    /// One worker's leaves are not pure.
    ImpureLeaf,
    /// Frames to one worker are lost without the link breaking.
    LostFrames,
}

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Events that happened.
    pub events: u64,
    /// Virtual time.
    pub elapsed: Duration,
    /// A digest of all that happened, in order.
    pub trace: Digest,
    /// Worlds that the log formed.
    pub worlds: u64,
    /// How many of them only evened out.
    pub evened: u64,
    /// Checkpoints that committed.
    pub checkpoints: u64,
    /// The invariant that did not hold, and the newest lines of the trace.
    pub failure: Option<(Violation, Vec<String>)>,
}

/// One run.
#[derive(Debug)]
pub struct Sim {
    plan: Plan,
    planted: Option<Planted>,
    shape: Shape,
    job: JobId,
    now: Timestamp,
    started: Timestamp,
    queue: BTreeMap<(Timestamp, u64), Happening>,
    next: u64,
    seats: BTreeMap<u64, Seat>,
    workers: BTreeMap<NodeId, Worker>,
    agent: Participant,
    control_links: BTreeMap<ConnectionKey, ControlLink>,
    cut: BTreeSet<(u64, u64)>,
    /// Links between workers: up, or coming up.
    links: BTreeMap<(NodeId, NodeId), bool>,
    /// When the last frame between two workers arrives: a lane keeps its order.
    arrivals: BTreeMap<(NodeId, NodeId), Timestamp>,
    enrolling: BTreeSet<u64>,
    store: Store,
    store_fails_until: Timestamp,
    disks_slow_until: Timestamp,
    network: Rng,
    program: Rng,
    chance: Rng,
    disks: Rng,
    speeds: Rng,
    /// Workers that no coordinator hears, and until when.
    unheard: BTreeMap<NodeId, Timestamp>,
    one_world: OneWorldPerGeneration,
    digests: EqualDigestsAtEqualSteps,
    told_events: BTreeSet<u64>,
    is_finished: bool,
    worlds: u64,
    evened: u64,
    checkpoints: u64,
    events: u64,
    hasher: blake3::Hasher,
    newest: VecDeque<String>,
    failure: Option<Violation>,
}

#[derive(Debug)]
struct Seat {
    config: Config,
    disk: RecoveredLog,
    /// Written and not yet on the disk: a crash keeps some of it, in order.
    unsynced: VecDeque<Written>,
    machine: Option<Coordinator>,
    incarnation: u64,
}

#[derive(Debug)]
struct Written {
    number: u64,
    write: LogWrite,
    is_synced: bool,
}

/// Who is at the client's end of a control connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Client {
    Agent,
    Worker(NodeId),
}

#[derive(Clone, Copy, Debug)]
struct ControlLink {
    client: Client,
    key: ConnectionKey,
    seat: u64,
}

#[derive(Debug)]
enum Happening {
    Fault(Fault),
    StartSeat(u64),
    Heal(u64, u64),
    Raft {
        from: u64,
        to: u64,
        bytes: Bytes,
    },
    Persisted {
        seat: u64,
        incarnation: u64,
        number: u64,
    },
    Up {
        client: Client,
        key: ConnectionKey,
        seat: u64,
    },
    Down {
        client: Client,
        key: ConnectionKey,
    },
    ToCoordinator {
        link: ConnectionKey,
        message: ToCoordinator,
    },
    ToClient {
        link: ConnectionKey,
        message: FromCoordinator,
    },
    Link(NodeId, NodeId),
    Frame {
        from: NodeId,
        to: NodeId,
        frame: PeerFrame,
        body: Body,
    },
    Done(NodeId),
    Tick(NodeId),
    Thaw(NodeId),
    Report(NodeId, Cause),
    Uploaded {
        node: NodeId,
        intent: Intent,
        digest: Digest,
    },
    Published {
        node: NodeId,
        intent: Intent,
    },
    Spawn,
    /// An operator says that a coordinator's disk is lost for good.
    Replace(u64),
    Quiet,
}

impl Happening {
    /// The worker that does this by itself.
    fn worker(&self) -> Option<NodeId> {
        match self {
            Self::Done(node)
            | Self::Tick(node)
            | Self::Uploaded { node, .. }
            | Self::Published { node, .. } => Some(*node),
            _ => None,
        }
    }
}

impl Seat {
    /// A write is confirmed. What asked for it is on the disk now, and all before it; what did not may still be lost.
    fn persisted(&mut self, number: u64) {
        if self.unsynced.iter().any(|w| w.number == number && w.is_synced) {
            while self.unsynced.front().is_some_and(|w| w.number <= number) {
                self.record_next();
            }
        }
    }

    /// The process ends; the disk has the first `kept` of the writes that were under way.
    fn crash(&mut self, kept: u64) {
        self.machine = None;
        for _ in 0..kept {
            self.record_next();
        }
        self.unsynced.clear();
    }

    fn record_next(&mut self) {
        if let Some(written) = self.unsynced.pop_front() {
            self.disk.record(&written.write).expect("a write that fits the log");
        }
    }
}

impl Sim {
    /// A run of `plan`, its chances drawn from `seed`.
    ///
    /// # Panics
    /// If the plan can't be: no workers, or more than virtual ranks.
    #[must_use]
    pub fn new(seed: u64, plan: Plan, planted: Option<Planted>) -> Self {
        let v = VirtualRanks::new(plan.virtual_ranks).expect("a plan has virtual ranks");
        let shape = Shape { v, chunks: plan.chunks, elements: 3, total: Step(plan.steps) };
        let now = Timestamp(1_000_000_000);
        let voters: BTreeMap<u64, SocketAddr> =
            (1..=plan.coordinators).map(|id| (id, address(id))).collect();
        let seat = |id: u64| Seat {
            config: Config::builder(id, voters.clone())
                .recovery_target(TARGET)
                .seed(mix(seed) ^ id)
                .build()
                .expect("a plan's voters can be"),
            disk: RecoveredLog::default(),
            unsynced: VecDeque::new(),
            machine: None,
            incarnation: 0,
        };
        let timing = Timing::new(TARGET).expect("the target is allowed");
        let agent = Participant::new(timing, voters.values().copied().collect(), None, now)
            .expect("there are voters");
        let mut sim = Self {
            shape,
            job: JobId::new("sim").expect("a good name"),
            now,
            started: now,
            queue: BTreeMap::new(),
            next: 0,
            seats: voters.keys().map(|id| (*id, seat(*id))).collect(),
            workers: BTreeMap::new(),
            agent,
            control_links: BTreeMap::new(),
            cut: BTreeSet::new(),
            links: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            enrolling: BTreeSet::new(),
            store: Store::new(),
            disks_slow_until: Timestamp::default(),
            store_fails_until: now,
            network: Rng::stream(seed, "network"),
            program: Rng::stream(seed, "program"),
            chance: Rng::stream(seed, "chance"),
            disks: Rng::stream(seed, "disks"),
            speeds: Rng::stream(seed, "speeds"),
            unheard: BTreeMap::new(),
            one_world: OneWorldPerGeneration::default(),
            digests: EqualDigestsAtEqualSteps::new(shape),
            told_events: BTreeSet::new(),
            is_finished: false,
            worlds: 0,
            evened: 0,
            checkpoints: 0,
            events: 0,
            hasher: blake3::Hasher::new(),
            newest: VecDeque::new(),
            failure: None,
            planted,
            plan,
        };
        for id in voters.keys() {
            sim.push(Duration::ZERO, Happening::StartSeat(*id));
        }
        for _ in 0..sim.plan.workers {
            let after = sim.chance.within(0, 400);
            sim.push(ms(after), Happening::Spawn);
        }
        let faults = sim.plan.faults.clone();
        for due in faults {
            sim.push(ms(1500 + due.at_ms), Happening::Fault(due.fault));
        }
        let last = sim.plan.last();
        sim.push(ms(1500) + last + ms(3500), Happening::Quiet);
        sim
    }

    /// Runs to the end of the job, or to the first invariant that does not hold.
    #[must_use]
    pub fn run(mut self) -> Outcome {
        let last = self.plan.last();
        let end = self.started + ms(1500) + last + every_wait_ends::LIMIT;
        while self.failure.is_none() && !self.is_over() {
            if !self.turn() || self.now > end || self.events > EVENTS_MAX {
                let state = self.describe();
                self.fail(every_wait_ends::violation(&state));
            }
        }
        Outcome {
            events: self.events,
            elapsed: self.now.since(self.started),
            trace: Digest(*self.hasher.finalize().as_bytes()),
            worlds: self.worlds,
            evened: self.evened,
            checkpoints: self.checkpoints,
            failure: self.failure.map(|violation| (violation, self.newest.into_iter().collect())),
        }
    }

    /// The job is finished, and everybody who lived to see it was let go.
    fn is_over(&self) -> bool {
        self.is_finished && self.workers.values().all(|w| !w.is_running())
    }

    fn describe(&self) -> String {
        let mut lines = vec![format!("finished {}", self.is_finished)];
        for worker in self.workers.values().filter(|w| w.is_running()) {
            let cycle = &worker.node.cycle;
            let world = cycle.world().map(ToString::to_string).unwrap_or_default();
            lines.push(format!(
                "node {}: {world} applied {:?} entered {:?} newest {:?} user {:?} intent {:?}",
                worker.id(),
                cycle.applied(),
                cycle.entered(),
                cycle.newest_generation(),
                worker.node.user,
                worker.intent
            ));
        }
        for (id, seat) in &self.seats {
            let Some(machine) = &seat.machine else { continue };
            lines.push(format!(
                "coordinator {id} leads {} status {:?}",
                machine.is_leader(),
                machine.status().jobs
            ));
        }
        lines.join("\n  ")
    }

    fn fail(&mut self, violation: Violation) {
        self.failure.get_or_insert(violation);
    }

    fn check(&mut self, result: Result<(), Violation>) {
        if let Err(violation) = result {
            self.fail(violation);
        }
    }

    fn push(&mut self, after: Duration, happening: Happening) {
        self.next += 1;
        self.queue.insert((self.now + after, self.next), happening);
    }

    fn trace(&mut self, line: String) {
        self.hasher.update(&self.now.0.to_le_bytes());
        self.hasher.update(line.as_bytes());
        if self.newest.len() == TRACE_LINES {
            self.newest.pop_front();
        }
        self.newest.push_back(format!("{} {line}", self.now));
    }

    /// Does what is next; false if nothing is due any more.
    fn turn(&mut self) -> bool {
        let seats = self.seats.values().filter_map(|seat| seat.machine.as_ref()?.poll_timeout());
        let now = self.now;
        let awake = |w: &&Worker| w.is_running() && w.frozen_until.is_none();
        let workers =
            self.workers.values().filter(awake).filter_map(|w| w.participant.poll_timeout());
        let queued = self.queue.keys().next().map(|(at, _)| *at);
        let next = seats.chain(workers).chain(self.agent.poll_timeout()).chain(queued).min();
        let Some(next) = next.map(|at| at.max(now)) else { return false };
        self.now = next;
        self.events += 1;
        if queued.is_some_and(|at| at <= next)
            && let Some((_, happening)) = self.queue.pop_first()
        {
            self.happen(happening);
            return true;
        }
        for id in self.seats.keys().copied().collect::<Vec<_>>() {
            let due = |m: &&mut Coordinator| m.poll_timeout().is_some_and(|at| at <= next);
            if let Some(machine) = self.seat(id).machine.as_mut().filter(due) {
                machine.handle_timeout(next);
                self.drain_seat(id);
            }
        }
        if self.agent.poll_timeout().is_some_and(|at| at <= next) {
            self.agent.handle_timeout(next);
            self.drain_client(Client::Agent);
        }
        for id in self.workers.keys().copied().collect::<Vec<_>>() {
            let Some(worker) =
                self.workers.get_mut(&id).filter(|w| w.is_running() && w.frozen_until.is_none())
            else {
                continue;
            };
            if worker.participant.poll_timeout().is_some_and(|at| at <= next) {
                worker.participant.handle_timeout(next);
                self.drain_client(Client::Worker(id));
            }
        }
        true
    }

    fn seat(&mut self, id: u64) -> &mut Seat {
        self.seats.get_mut(&id).expect("seats are never removed")
    }

    fn happen(&mut self, happening: Happening) {
        let now = self.now;
        let until = happening.worker().and_then(|node| self.workers.get(&node)?.frozen_until);
        if let Some(until) = until {
            // A stopped process does it when it goes on.
            return self.push(until.since(now) + ms(1), happening);
        }
        match happening {
            Happening::Fault(fault) => self.strike(fault),
            Happening::StartSeat(id) => {
                let seat = self.seat(id);
                if seat.machine.is_none() {
                    seat.incarnation += 1;
                    seat.machine = Some(Coordinator::new(&seat.config, seat.disk.clone(), now));
                    self.trace(format!("coordinator {id} starts"));
                    self.drain_seat(id);
                }
            }
            Happening::Heal(a, b) => {
                self.cut.remove(&(a, b));
            }
            Happening::Raft { from, to, bytes } => {
                let is_cut = self.cut.contains(&(from.min(to), from.max(to)));
                if let Some(machine) = self.seat(to).machine.as_mut().filter(|_| !is_cut) {
                    machine.handle_raft(now, from, &bytes);
                    self.drain_seat(to);
                }
            }
            Happening::Persisted { seat: id, incarnation, number } => {
                let seat = self.seat(id);
                let is_same = seat.incarnation == incarnation;
                if is_same {
                    seat.persisted(number);
                }
                if let Some(machine) = seat.machine.as_mut().filter(|_| is_same) {
                    machine.handle_persisted(now, number);
                    self.drain_seat(id);
                }
            }
            Happening::Up { client, key, seat } => self.connect(client, key, seat),
            Happening::Down { client, key } => {
                self.with_participant(client, |p| p.handle_disconnected(now, key));
            }
            Happening::ToCoordinator { link, message } => self.hear_client(link, message),
            Happening::ToClient { link, message } => {
                if let Some(link) = self.control_links.get(&link).copied() {
                    self.with_participant(link.client, |p| {
                        p.handle_message(now, link.key, message);
                    });
                }
            }
            Happening::Link(a, b) => self.link_up(a, b),
            Happening::Frame { from, to, frame, body } => self.deliver(from, to, frame, body),
            Happening::Done(node) => {
                let store = std::mem::take(&mut self.store);
                if let Some(worker) = self.awake(node).filter(|w| !w.is_hung) {
                    let shape = worker.node.shape();
                    if matches!(worker.node.user, User::Busy(Work::Leaf { .. }, _)) {
                        worker.turn.end_leaf(now);
                    }
                    worker.node.handle_done(|start| load(&store, shape, start));
                }
                self.store = store;
                self.follow(node);
            }
            Happening::Tick(node) => {
                let linked: BTreeSet<NodeId> = self
                    .links
                    .iter()
                    .filter(|(_, up)| **up)
                    .filter_map(|(pair, _)| other(*pair, node))
                    .collect();
                if let Some(worker) = self.awake(node) {
                    worker.turn.pulse += 1;
                    let peers = worker.node.cycle.peers().into_keys();
                    worker.turn.handle_links(now, peers, |peer| linked.contains(&peer));
                    worker.node.handle_tick(now);
                    self.push(ms(250), Happening::Tick(node));
                    self.follow(node);
                }
            }
            Happening::Thaw(node) => self.thaw(node),
            Happening::Report(node, cause) => {
                let lost = ToCoordinator::Lost { node, cause, sequence: 0 };
                self.agent.request(now, lost);
                self.drain_client(Client::Agent);
            }
            Happening::Uploaded { node, intent, digest } => self.uploaded(node, &intent, digest),
            Happening::Published { node, intent } => self.published(node, &intent),
            Happening::Spawn => self.enrol(),
            Happening::Replace(id) => self.replace(id),
            Happening::Quiet => self.quiet(),
        }
    }

    /// The worker, if it runs and is not stopped.
    fn awake(&mut self, node: NodeId) -> Option<&mut Worker> {
        self.workers.get_mut(&node).filter(|w| w.is_running() && w.frozen_until.is_none())
    }

    fn running(&self) -> Vec<NodeId> {
        self.workers.values().filter(|w| w.is_running()).map(Worker::id).collect()
    }

    // ---- faults ----

    fn strike(&mut self, fault: Fault) {
        if self.is_finished {
            return;
        }
        self.trace(format!("fault {fault:?}"));
        let running = self.running();
        match fault {
            Fault::KillWorker { is_seen } => {
                if let Some(node) = self.chance.pick(&running) {
                    self.kill(node, is_seen);
                }
            }
            Fault::KillTwo => {
                for node in running.into_iter().take(2) {
                    self.kill(node, true);
                }
            }
            Fault::KillAll => running.into_iter().for_each(|node| self.kill(node, true)),
            Fault::Freeze { ms: time } => {
                if let Some(node) = self.chance.pick(&running) {
                    let until = self.now + ms(time);
                    if let Some(worker) = self.awake(node) {
                        worker.frozen_until = Some(until);
                        self.push(ms(time), Happening::Thaw(node));
                    }
                }
            }
            Fault::Hang => {
                if let Some(node) = self.chance.pick(&running)
                    && let Some(worker) = self.awake(node)
                {
                    worker.is_hung = true;
                    self.trace(format!("node {node} hangs"));
                }
            }
            Fault::Drain => {
                if let Some(node) = self.chance.pick(&running)
                    && let Some(worker) = self.awake(node)
                {
                    worker.drain();
                    let (job, now) = (self.job.clone(), self.now);
                    let drain = ToCoordinator::Drain {
                        nodes: vec![node],
                        job,
                        reason: "asked".into(),
                        sequence: 0,
                    };
                    self.with_participant(Client::Worker(node), |p| {
                        p.request(now, drain);
                    });
                    let after = self.chance.within(500, 4000);
                    self.push(ms(after), Happening::Spawn);
                }
            }
            Fault::Join => self.enrol(),
            Fault::Scale { min, max } => {
                let max = max.min(self.plan.virtual_ranks);
                self.scale(min.min(max), max);
            }
            Fault::Save => {
                let job = self.job.clone();
                self.order(&ToCoordinator::Checkpoint { job, sequence: 1 });
            }
            Fault::KillCoordinator { down_ms } => {
                let up: Vec<u64> = self
                    .seats
                    .iter()
                    .filter(|(_, s)| s.machine.is_some())
                    .map(|(id, _)| *id)
                    .collect();
                if let Some(id) = self.chance.pick(&up) {
                    self.kill_seat(id);
                    self.push(ms(down_ms), Happening::StartSeat(id));
                }
            }
            Fault::LoseDisk { down_ms } => {
                // A majority keeps its disks, else all is lost; and a seat is not known at once.
                let is_seated = |id: &u64| {
                    let known = |seat: &Seat| seat.machine.as_ref()?.roster().seat(*id);
                    self.seats.values().all(|seat| known(seat) == Some(seat_disk(&self.seats, *id)))
                };
                let ids: Vec<u64> = self.seats.keys().copied().filter(is_seated).collect();
                if ids.len() == 3
                    && let Some(id) = self.chance.pick(&ids)
                {
                    self.kill_seat(id);
                    self.lose_disk(id);
                    self.push(ms(down_ms), Happening::StartSeat(id));
                    self.push(ms(down_ms + 1000), Happening::Replace(id));
                }
            }
            Fault::CutCoordinators { ms: time } => {
                let (a, b) = (self.chance.within(1, 3), self.chance.within(1, 3));
                let pair = (a.min(b), a.max(b));
                if a != b {
                    self.cut.insert(pair);
                    self.push(ms(time), Happening::Heal(pair.0, pair.1));
                }
            }
            Fault::BreakLink { ms: time } => {
                let up: Vec<(NodeId, NodeId)> =
                    self.links.iter().filter(|(_, up)| **up).map(|(pair, _)| *pair).collect();
                if let Some((a, b)) = self.chance.pick(&up) {
                    self.break_link(a, b);
                    self.links.insert((a, b), false);
                    self.push(ms(time), Happening::Link(a, b));
                }
            }
            Fault::CutControl { ms: time } => {
                if let Some(node) = self.chance.pick(&running) {
                    self.unheard.insert(node, self.now + ms(time));
                    for key in self.lose_control(node) {
                        let client = Client::Worker(node);
                        self.push(ms(2), Happening::Down { client, key });
                    }
                }
            }
            Fault::SlowDisks { ms: time } => self.disks_slow_until = self.now + ms(time),
            Fault::StoreFails { ms: time } => self.store_fails_until = self.now + ms(time),
        }
    }

    /// The faults are over: whoever is needed for the job to finish is there again.
    fn quiet(&mut self) {
        self.trace("quiet".to_owned());
        for id in self.seats.keys().copied().collect::<Vec<_>>() {
            self.push(Duration::ZERO, Happening::StartSeat(id));
        }
        if !self.is_finished {
            self.scale(self.plan.min_members, self.plan.virtual_ranks);
            // Who hangs is replaced by others, which wait for it until the leader takes it out.
            let well =
                self.workers.values().filter(|w| w.is_running() && !w.is_hung).count() as u64;
            let needed = u64::from(self.plan.min_members).saturating_sub(well);
            for _ in 0..needed.max(u64::from(well == 0)) {
                self.push(Duration::ZERO, Happening::Spawn);
            }
            // Who was taken for dead, or left, is replaced as an agent would.
            self.push(ms(4000), Happening::Quiet);
        }
    }

    fn kill(&mut self, node: NodeId, is_seen: bool) {
        let Some(worker) = self.workers.get_mut(&node).filter(|w| w.is_running()) else { return };
        worker.is_dead = true;
        self.trace(format!("node {node} is killed"));
        self.gone(node);
        if is_seen {
            let after = self.chance.within(2, 30);
            self.push(ms(after), Happening::Report(node, Cause::Signalled { signal: 9 }));
        }
        if self.chance.percent(70) {
            let after = self.chance.within(100, 3000);
            self.push(ms(after), Happening::Spawn);
        }
    }

    /// Its connections end.
    fn gone(&mut self, node: NodeId) {
        let of_node = |(a, b): &(NodeId, NodeId)| *a == node || *b == node;
        let broken: Vec<(NodeId, NodeId)> =
            self.links.keys().filter(|pair| of_node(pair)).copied().collect();
        for (a, b) in broken {
            self.break_link(a, b);
            self.links.remove(&(a, b));
        }
        self.lose_control(node);
    }

    /// Its connections to coordinators end there; returns their names at the worker.
    fn lose_control(&mut self, node: NodeId) -> Vec<ConnectionKey> {
        let of_node = |(_, l): &(&ConnectionKey, &ControlLink)| l.client == Client::Worker(node);
        let ended: Vec<(ConnectionKey, ControlLink)> =
            self.control_links.iter().filter(of_node).map(|(key, l)| (*key, *l)).collect();
        for (key, link) in &ended {
            self.control_links.remove(key);
            let now = self.now;
            if let Some(machine) = self.seat(link.seat).machine.as_mut() {
                machine.handle_disconnected(now, *key);
                self.drain_seat(link.seat);
            }
        }
        ended.into_iter().map(|(_, link)| link.key).collect()
    }

    /// What is on its way between the two is lost.
    fn break_link(&mut self, a: NodeId, b: NodeId) {
        let is_between = |h: &Happening| matches!(h, Happening::Frame { from, to, .. } if (*from.min(to), *from.max(to)) == (a, b));
        self.queue.retain(|_, happening| !is_between(happening));
    }

    fn lose_disk(&mut self, id: u64) {
        self.trace(format!("coordinator {id} loses its disk"));
        let (seed, voters) = (self.seat(id).config.seed(), self.seat(id).config.voters().clone());
        let disk = self.seat(id).config.disk() + 1000;
        let builder = Config::builder(id, voters).recovery_target(TARGET).seed(seed).disk(disk);
        let seat = self.seat(id);
        seat.config = builder.build().expect("it was allowed before");
        seat.disk = RecoveredLog::default();
    }

    fn replace(&mut self, id: u64) {
        let disk = seat_disk(&self.seats, id);
        let is_done = |seat: &Seat| {
            seat.machine
                .as_ref()
                .is_some_and(|m| m.is_leader() && m.roster().seat(id) == Some(disk))
        };
        if self.seats.values().any(is_done) {
            return;
        }
        // Asked again until it is done: leaders change.
        self.push(ms(500), Happening::Replace(id));
        self.order(&ToCoordinator::Replace { coordinator: id, sequence: 1 });
    }

    /// What an operator says to whoever leads.
    fn order(&mut self, message: &ToCoordinator) {
        let now = self.now;
        for leader in self.seats.keys().copied().collect::<Vec<_>>() {
            self.next += 1;
            let key = ConnectionKey(self.next);
            let peer = Peer { key, role: Role::Operator, node: NodeId(0), job: None };
            let Some(machine) = self.seat(leader).machine.as_mut().filter(|m| m.is_leader()) else {
                continue;
            };
            machine.handle_connected(now, peer.clone());
            machine.handle_message(now, now.0 / 1_000_000, &peer, message.clone());
            machine.handle_disconnected(now, key);
            self.drain_seat(leader);
        }
    }

    fn scale(&mut self, min: u32, max: u32) {
        let job = self.job.clone();
        self.order(&ToCoordinator::Scale { job, min: Some(min), max: Some(max), sequence: 1 });
    }

    fn kill_seat(&mut self, id: u64) {
        let unsynced = self.seat(id).unsynced.len() as u64;
        let kept = self.disks.below(unsynced + 1);
        self.trace(format!("coordinator {id} is killed; {kept} of {unsynced} writes are kept"));
        self.seat(id).crash(kept);
        let broken: Vec<ControlLink> =
            self.control_links.values().filter(|l| l.seat == id).copied().collect();
        self.control_links.retain(|_, link| link.seat != id);
        for link in broken {
            self.push(ms(2), Happening::Down { client: link.client, key: link.key });
        }
    }

    /// A stopped process goes on: what was meant for it meanwhile comes late, since its sockets kept it.
    fn thaw(&mut self, node: NodeId) {
        let now = self.now;
        if let Some(worker) = self.workers.get_mut(&node).filter(|w| w.is_running()) {
            worker.frozen_until = None;
            self.trace(format!("node {node} goes on"));
            self.with_participant(Client::Worker(node), |p| p.handle_timeout(now));
        }
    }

    // ---- workers ----

    fn enrol(&mut self) {
        if self.is_finished || self.running().len() as u64 >= WORKERS_MAX {
            return;
        }
        let request =
            ToCoordinator::EnrollWorker { job: self.job.clone(), csr: Bytes::new(), sequence: 0 };
        if let Some(sequence) = self.agent.request(self.now, request) {
            self.enrolling.insert(sequence);
        }
        self.drain_client(Client::Agent);
    }

    fn spawn(&mut self, node: NodeId) {
        if self.workers.contains_key(&node) {
            return;
        }
        self.trace(format!("node {node} starts"));
        let noise = if self.planted == Some(Planted::ImpureLeaf) && self.workers.len() == 1 {
            node.0
        } else {
            0
        };
        let timing = Timing::new(TARGET).expect("the target is allowed");
        let voters = self.seats.keys().map(|id| address(*id)).collect();
        let participant = Participant::new(timing, voters, Some(self.join(node)), self.now)
            .expect("there are voters");
        let mut worker = Worker::new(Node::new(node, self.shape, noise), participant);
        if self.plan.is_uneven {
            worker.slowness = self.speeds.within(1, 4);
        }
        self.workers.insert(node, worker);
        self.push(ms(250), Happening::Tick(node));
        self.drain_client(Client::Worker(node));
    }

    fn join(&self, node: NodeId) -> Join {
        let newest = self.store.iter().max_by_key(|(key, _)| (*key).clone());
        let found =
            newest.filter(|_| self.plan.has_store).map(|(manifest, state)| FoundCheckpoint {
                lineage: types::Lineage(manifest[..10].parse().expect("keys begin with a lineage")),
                step: state.boundary,
                manifest: manifest.clone(),
                hash: Digest::of(manifest.as_bytes()),
                digest: state.digest,
            });
        Join {
            spec: JobSpec {
                job: self.job.clone(),
                virtual_ranks: self.shape.v,
                min_members: self.plan.min_members,
                min_timeout: self.plan.steps.is_multiple_of(4).then_some(ms(3000)),
                expected_members: (self.plan.workers as u32).min(self.plan.virtual_ranks),
                max_members: self.plan.virtual_ranks,
                total_steps: Some(self.shape.total),
                checkpoint_every: self.plan.has_store.then_some(ms(700)),
                hang_timeout: None,
                pause_timeout: Some(PAUSE),
                evens_out: true,
            },
            address: Address {
                socket: address(node.0 % 60_000),
                certificate: Digest::of(&node.0.to_le_bytes()),
            },
            host: format!("host-{node}"),
            fingerprint: Fingerprint::default(),
            allow_mixed: false,
            found,
        }
    }

    /// After anything happened to a worker: its frames go out, its user goes on, its heartbeat follows, and the invariants are checked.
    fn follow(&mut self, id: NodeId) {
        let now = self.now;
        let Some(worker) = self.awake(id) else { return };
        let mut requests = Vec::new();
        let mut uploads = Vec::new();
        let mut works = Vec::new();
        let slowness = worker.slowness;
        while let Some(staged) = worker.stage() {
            match staged {
                Ok((intent, state)) => {
                    if intent.writer == id {
                        worker.staged = Some((intent.clone(), state.clone()));
                    }
                    uploads.push((intent, state.digest));
                }
                Err(message) => requests.push(message),
            }
        }
        match worker.node.poll_work() {
            Some(work) => {
                match work {
                    Work::Leaf { .. } => worker.turn.begin_leaf(now),
                    _ => worker.turn.give(Turn::Between),
                }
                works.push(work);
            }
            None if matches!(worker.node.user, User::Busy(..)) => {}
            None if worker.turn.turn == Turn::Waiting => {}
            None => worker.turn.give(Turn::Waiting),
        }
        let outbox = std::mem::take(&mut worker.node.outbox);
        worker.hear_notes(now);
        let heartbeat = worker.heartbeat(now);
        if worker.told.as_ref().map(|t| (&t.applied, t.entered, t.phase))
            != Some((&heartbeat.applied, heartbeat.entered, heartbeat.phase))
        {
            worker.told = Some(heartbeat.clone());
        }
        let stands = worker.node.cycle.applied().zip(worker.node.cycle.digest());
        let generation = worker.node.cycle.newest_generation();
        let is_news = generation != worker.seen_generation;
        worker.seen_generation = generation;
        let peers: Vec<NodeId> =
            if is_news { worker.node.cycle.peers().into_keys().collect() } else { Vec::new() };
        if let Some((boundary, digest)) = stands {
            let result = self.digests.check(id, boundary, digest);
            self.check(result);
        }
        for peer in peers {
            let pair = (id.min(peer), id.max(peer));
            let is_alive = self.workers.get(&peer).is_some_and(Worker::is_running);
            if is_alive && !self.links.contains_key(&pair) {
                self.links.insert(pair, false);
                let after = self.network.within(1, 30);
                self.push(ms(after), Happening::Link(pair.0, pair.1));
            }
        }
        for (to, frame, body) in outbox {
            self.send(id, to, frame, body);
        }
        for work in works {
            let time = match work {
                Work::Leaf { .. } if self.plan.is_uneven => slowness * self.program.within(10, 20),
                Work::Leaf { .. } => self.program.within(5, 60),
                Work::Apply { .. } => self.program.within(1, 3),
                Work::Restore { .. } | Work::Load { .. } => self.program.within(2, 80),
            };
            self.push(ms(time), Happening::Done(id));
        }
        for (intent, digest) in uploads {
            let time = self.program.within(5, 300);
            self.push(ms(time), Happening::Uploaded { node: id, intent, digest });
        }
        self.with_participant_quietly(Client::Worker(id), |p| {
            requests.into_iter().for_each(|message| {
                p.request(now, message);
            });
            p.set_heartbeat(now, heartbeat);
        });
    }

    fn send(&mut self, from: NodeId, to: NodeId, frame: PeerFrame, body: Body) {
        let pair = (from.min(to), from.max(to));
        if self.links.get(&pair) != Some(&true) {
            return;
        }
        if self.planted == Some(Planted::LostFrames) && self.workers.keys().next() == Some(&to) {
            return;
        }
        let earliest = self.now + Duration::from_micros(self.network.within(100, 8000));
        let arrival = self.arrivals.get(&(from, to)).map_or(earliest, |last| earliest.max(*last));
        self.arrivals.insert((from, to), arrival);
        self.next += 1;
        self.queue.insert((arrival, self.next), Happening::Frame { from, to, frame, body });
    }

    fn link_up(&mut self, a: NodeId, b: NodeId) {
        let is_alive = |node: &NodeId| self.workers.get(node).is_some_and(Worker::is_running);
        if !is_alive(&a) || !is_alive(&b) {
            self.links.remove(&(a, b));
            return;
        }
        self.links.insert((a, b), true);
        for (node, peer) in [(a, b), (b, a)] {
            if let Some(worker) = self.awake(node) {
                worker.node.handle_link_up(peer);
                self.follow(node);
            } else {
                // A stopped process makes no connections.
                self.links.insert((a, b), false);
                self.push(ms(50), Happening::Link(a, b));
                return;
            }
        }
    }

    fn deliver(&mut self, from: NodeId, to: NodeId, frame: PeerFrame, body: Body) {
        if let PeerFrame::Report(report) = &frame {
            let result = self.one_world.check_told(&report.world);
            self.check(result);
        }
        let Some(worker) = self.workers.get_mut(&to).filter(|w| w.is_running()) else { return };
        if let Some(until) = worker.frozen_until {
            // The kernel keeps it until the process goes on.
            let after = until.since(self.now) + ms(1);
            return self.push(after, Happening::Frame { from, to, frame, body });
        }
        worker.node.handle_frame(from, frame, body);
        self.follow(to);
    }

    // ---- checkpoints ----

    fn uploaded(&mut self, node: NodeId, intent: &Intent, digest: Digest) {
        let now = self.now;
        let message = if now < self.store_fails_until {
            ToCoordinator::CheckpointFailed {
                attempt: intent.attempt,
                reason: "the store fails".to_owned(),
            }
        } else {
            ToCoordinator::Receipt {
                attempt: intent.attempt,
                lineage: intent.lineage,
                digest,
                root: digest,
                segments: Bytes::copy_from_slice(&digest.0),
            }
        };
        if self.awake(node).is_some() {
            self.with_participant(Client::Worker(node), |p| {
                p.request(now, message);
            });
        }
    }

    fn published(&mut self, node: NodeId, intent: &Intent) {
        let now = self.now;
        let fails = now < self.store_fails_until;
        let Some(worker) = self.awake(node) else { return };
        let staged = worker
            .staged
            .as_ref()
            .filter(|(i, _)| i.attempt == intent.attempt)
            .map(|(_, state)| state.clone());
        let Some(state) = staged else { return };
        let message = if fails {
            ToCoordinator::CheckpointFailed {
                attempt: intent.attempt,
                reason: "the store fails".to_owned(),
            }
        } else {
            let manifest =
                format!("{:010}-{:016}-{}", intent.lineage.0, intent.step.0, intent.attempt);
            let hash = Digest::of(manifest.as_bytes());
            self.store.entry(manifest.clone()).or_insert(state);
            ToCoordinator::Published { attempt: intent.attempt, manifest, hash }
        };
        self.with_participant(Client::Worker(node), |p| {
            p.request(now, message);
        });
    }

    // ---- control connections ----

    fn participant(&mut self, client: Client) -> Option<&mut Participant> {
        match client {
            Client::Agent => Some(&mut self.agent),
            Client::Worker(node) => self.awake(node).map(|w| &mut w.participant),
        }
    }

    fn with_participant(&mut self, client: Client, act: impl FnOnce(&mut Participant)) {
        self.with_participant_quietly(client, act);
        if let Client::Worker(node) = client {
            self.follow(node);
        }
    }

    fn with_participant_quietly(&mut self, client: Client, act: impl FnOnce(&mut Participant)) {
        if let Some(participant) = self.participant(client) {
            act(participant);
            self.drain_client(client);
        }
    }

    fn connect(&mut self, client: Client, key: ConnectionKey, seat: u64) {
        let now = self.now;
        if self.participant(client).is_none() {
            return;
        }
        let unheard = |node| self.unheard.get(&node).is_some_and(|until| *until > now);
        if matches!(client, Client::Worker(node) if unheard(node)) {
            return self.push(ms(20), Happening::Down { client, key });
        }
        let (role, node, job) = match client {
            Client::Agent => (Role::Agent, NodeId(1_000_000), None),
            Client::Worker(node) => (Role::Worker, node, Some(self.job.clone())),
        };
        self.next += 1;
        let link = ConnectionKey(self.next);
        let Some(machine) = self.seat(seat).machine.as_mut() else {
            return self.push(ms(1), Happening::Down { client, key });
        };
        machine.handle_connected(now, Peer { key: link, role, node, job });
        self.control_links.insert(link, ControlLink { client, key, seat });
        self.with_participant_quietly(client, |p| p.handle_connected(now, key));
        self.drain_seat(seat);
    }

    fn hear_client(&mut self, key: ConnectionKey, message: ToCoordinator) {
        let now = self.now;
        let Some(link) = self.control_links.get(&key).copied() else { return };
        let (role, node, job) = match link.client {
            Client::Agent => (Role::Agent, NodeId(1_000_000), None),
            Client::Worker(node) => (Role::Worker, node, Some(self.job.clone())),
        };
        let peer = Peer { key, role, node, job };
        if let Some(machine) = self.seat(link.seat).machine.as_mut() {
            machine.handle_message(now, now.0 / 1_000_000, &peer, message);
            self.drain_seat(link.seat);
        }
    }

    fn drain_seat(&mut self, id: u64) {
        loop {
            let seat = self.seat(id);
            let incarnation = seat.incarnation;
            let Some(action) = seat.machine.as_mut().and_then(Coordinator::poll_action) else {
                return;
            };
            match action {
                Action::LostSeat { disk } => {
                    self.trace(format!("coordinator {id} is known by disk {disk}"));
                }
                Action::FoundSeat => self.trace(format!("coordinator {id} has its seat again")),
                Action::Persist { number, write, sync } => {
                    seat.unsynced.push_back(Written { number, write, is_synced: sync });
                    let mut after = Duration::from_micros(self.network.within(200, 6000));
                    if self.now < self.disks_slow_until {
                        // Longer than any election.
                        after += ms(self.disks.within(50, 1500));
                    }
                    self.push(after, Happening::Persisted { seat: id, incarnation, number });
                }
                Action::SendRaft { to, bytes } => {
                    let after = Duration::from_micros(self.network.within(200, 8000));
                    if !self.network.percent(1) {
                        self.push(after, Happening::Raft { from: id, to, bytes });
                    }
                }
                Action::Send { to, message } => self.tell(to, message),
                Action::Close { key, .. } => {
                    if let Some(link) = self.control_links.remove(&key) {
                        self.push(ms(1), Happening::Down { client: link.client, key: link.key });
                    }
                }
                Action::SignCertificate { key, sequence, node, .. } => {
                    if let Some(sequence) = sequence {
                        self.tell(
                            key,
                            FromCoordinator::Enrolled { sequence, node, certificate: Bytes::new() },
                        );
                    }
                }
                Action::Emit(event) => self.emitted(&event),
            }
        }
    }

    fn tell(&mut self, to: ConnectionKey, mut message: FromCoordinator) {
        if let FromCoordinator::World(world) = &mut message {
            let is_to_last = self.control_links.get(&to).map(|l| l.client)
                == self.workers.keys().last().map(|n| Client::Worker(*n));
            let wrong = Arc::make_mut(world);
            match self.planted {
                Some(Planted::TwoWorlds) if is_to_last && wrong.members.len() > 1 => {
                    wrong.members.reverse();
                }
                Some(Planted::ServedTwice) if wrong.members.len() > 1 => {
                    let block = wrong.members[0].blocks[0];
                    wrong.members[1].blocks.push(block);
                }
                _ => {}
            }
            let world = Arc::clone(world);
            let result = blocks_tile_the_virtual_ranks::check(&world);
            self.check(result);
            let result = self.one_world.check_told(&world);
            self.check(result);
        }
        let after = Duration::from_micros(self.network.within(200, 4000));
        // Control messages of one connection keep their order, too.
        let at = (self.now + after).max(self.order_of(to));
        self.next += 1;
        self.queue.insert((at, self.next), Happening::ToClient { link: to, message });
    }

    /// When the last message on this control connection arrives.
    fn order_of(&self, link: ConnectionKey) -> Timestamp {
        let is_on = |h: &Happening| matches!(h, Happening::ToClient { link: l, .. } | Happening::ToCoordinator { link: l, .. } if *l == link);
        self.queue.iter().rev().find(|(_, h)| is_on(h)).map_or(self.now, |((at, _), _)| *at)
    }

    fn emitted(&mut self, event: &Event) {
        let is_world = event.kind == "world" || event.kind == "restart";
        let key =
            if is_world { event.generation.map_or(0, |g| g.0) } else { event.index | 1 << 40 };
        if !self.told_events.insert(key) {
            return;
        }
        self.trace(format!("log {} {}", event.kind, event.message));
        if let Some(generation) = event.generation.filter(|_| is_world) {
            self.worlds += 1;
            let result = self.one_world.check_formed(generation);
            self.check(result);
        }
        match event.kind.as_str() {
            "evened" => self.evened += 1,
            "checkpoint_committed" => self.checkpoints += 1,
            "finished" => self.is_finished = true,
            _ => {}
        }
    }

    fn drain_client(&mut self, client: Client) {
        while let Some(action) = self.participant(client).and_then(Participant::poll_action) {
            match action {
                ParticipantAction::Connect { key, address } => {
                    let after = self.network.within(1, 6);
                    self.push(
                        ms(after),
                        Happening::Up { client, key, seat: u64::from(address.port()) },
                    );
                }
                ParticipantAction::Disconnect { key } => {
                    let found =
                        self.control_links.iter().find(|(_, l)| l.client == client && l.key == key);
                    if let Some((link, seat)) = found.map(|(link, l)| (*link, l.seat)) {
                        self.control_links.remove(&link);
                        let now = self.now;
                        if let Some(machine) = self.seat(seat).machine.as_mut() {
                            machine.handle_disconnected(now, link);
                            self.drain_seat(seat);
                        }
                    }
                }
                ParticipantAction::Send { key, message } => {
                    let found =
                        self.control_links.iter().find(|(_, l)| l.client == client && l.key == key);
                    if let Some(link) = found.map(|(link, _)| *link) {
                        let after = Duration::from_micros(self.network.within(200, 4000));
                        let at = (self.now + after).max(self.order_of(link));
                        self.next += 1;
                        self.queue
                            .insert((at, self.next), Happening::ToCoordinator { link, message });
                    }
                }
                ParticipantAction::Event(event) => self.heard(client, event),
            }
        }
    }

    fn heard(&mut self, client: Client, event: ParticipantEvent) {
        let Client::Worker(id) = client else {
            if let ParticipantEvent::Enrolled { sequence, node, .. } = event
                && self.enrolling.remove(&sequence)
            {
                self.spawn(node);
            }
            return;
        };
        if let ParticipantEvent::World(world) = &event {
            let result = self.one_world.check_told(world);
            self.check(result);
        }
        let Some(worker) = self.awake(id) else { return };
        if let Some(ParticipantEvent::Publish { attempt, .. }) = worker.handle_event(event) {
            let is_new = worker.is_publishing != Some(attempt);
            let intent = worker
                .staged
                .as_ref()
                .map(|(i, _)| i.clone())
                .filter(|i| i.attempt == attempt && is_new);
            if let Some(intent) = intent {
                worker.is_publishing = Some(attempt);
                let time = self.program.within(5, 150);
                self.push(ms(time), Happening::Published { node: id, intent });
            }
        }
        let ended = self.workers.get(&id).filter(|w| !w.is_running()).map(|w| w.release.clone());
        match ended {
            None => self.follow(id),
            Some(release) => {
                self.trace(format!("node {id} ends: {release:?}"));
                self.gone(id);
                if !matches!(release, Some(Release::Finished)) {
                    // As an agent restarts who was evicted by mistake.
                    let after = self.chance.within(100, 2000);
                    self.push(ms(after), Happening::Spawn);
                }
            }
        }
    }
}

fn load(store: &Store, shape: Shape, start: &Start) -> TrainState {
    match &start.origin {
        Origin::Initial => TrainState::initial(shape),
        Origin::Checkpoint { manifest, .. } => {
            store.get(manifest).cloned().expect("a committed checkpoint is in the store")
        }
    }
}

/// The disk that a coordinator has now.
fn seat_disk(seats: &BTreeMap<u64, Seat>, id: u64) -> u128 {
    seats[&id].config.disk()
}

/// The other one of a pair.
fn other((a, b): (NodeId, NodeId), node: NodeId) -> Option<NodeId> {
    (a == node).then_some(b).or((b == node).then_some(a))
}

fn address(id: u64) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], u16::try_from(id % 65_536).expect("a remainder")))
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const TARGET: Duration = Duration::from_secs(1);
/// A program that hangs outside of its leaves is found within it; longer would only take longer.
const PAUSE: Duration = Duration::from_secs(60);
/// A run with so many events does not get anywhere.
const EVENTS_MAX: u64 = 3_000_000;
/// More joiners than these prove nothing more.
const WORKERS_MAX: u64 = 8;
const TRACE_LINES: usize = 60;
