//! Many workers, an unkind network, a coordinator, and whatever can go wrong; one seed decides everything.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use types::{Digest, Lineage, NodeId, Start, Step, Timestamp, VirtualRanks, World};

use super::super::PeerFrame;
use super::coordinator::{Beat, Coordinator};
use super::node::{Body, Node, Note, Rng, Shape, TrainState, User, Work};

/// The last lines of what happened; empty unless a failing seed is run again.
pub(super) type Trace = Rc<RefCell<VecDeque<String>>>;

/// Runs one seed to its end.
///
/// # Panics
/// If an invariant does not hold, or something hangs.
pub(super) fn run(seed: u64, trace: Option<Trace>) -> Summary {
    let mut simulation = Simulation::new(seed, trace);
    simulation.run();
    for node in simulation.nodes.values() {
        simulation.summary.passed += node.cycle.counters().passed_finals;
        simulation.summary.recomputed += node.cycle.counters().recomputed_leaves;
    }
    simulation.summary
}

/// What a run was like: for knowing that the faults reach what they are meant to reach.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Summary {
    pub(super) events: u64,
    pub(super) worlds: u64,
    pub(super) crashes: u64,
    pub(super) evictions: u64,
    pub(super) restarts: u64,
    pub(super) joined: u64,
    pub(super) drained: u64,
    pub(super) passed: u64,
    pub(super) strays: u64,
    pub(super) recomputed: u64,
}

impl Summary {
    pub(super) fn add(&mut self, other: Self) {
        self.events += other.events;
        self.worlds += other.worlds;
        self.crashes += other.crashes;
        self.evictions += other.evictions;
        self.restarts += other.restarts;
        self.joined += other.joined;
        self.drained += other.drained;
        self.passed += other.passed;
        self.strays += other.strays;
        self.recomputed += other.recomputed;
    }
}

#[derive(Debug)]
enum Event {
    Frame { from: NodeId, to: NodeId, epoch: u64, frame: PeerFrame, body: Body },
    LinkUp { pair: Pair },
    Done { node: NodeId },
    Tick { node: NodeId },
    World { node: NodeId, world: Arc<World> },
    Beat { node: NodeId, beat: Beat },
    Lost { node: NodeId },
    Evaluate,
    Fault,
    Resume,
}

/// When an armed trap kills whoever does this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trap {
    SendsFinal,
    SendsNode,
    SendsReport,
    SendsState,
    Adopted,
    Entered,
    Ready,
    Applied,
}

type Pair = (NodeId, NodeId);

#[derive(Clone, Copy, Default, Debug)]
struct Link {
    is_up: bool,
    is_coming: bool,
    epoch: u64,
    /// When the last frame arrives, for each direction: a lane keeps its order.
    busy_until: [u64; 2],
}

struct Simulation {
    seed: u64,
    rng: Rng,
    now: u64,
    number: u64,
    queue: BTreeMap<(u64, u64), Event>,
    shape: Shape,
    is_impure: bool,
    nodes: BTreeMap<NodeId, Node>,
    links: BTreeMap<Pair, Link>,
    coordinator: Coordinator,
    coordinator_back: u64,
    next_node: u64,
    faults_left: u64,
    fault_pause: u64,
    quiet_since: u64,
    traps: Vec<(Trap, u64)>,
    /// Evicted by the coordinator, and alive.
    zombies: BTreeSet<NodeId>,
    reference: Vec<TrainState>,
    /// States that were made, for restores.
    states: BTreeMap<(Step, Digest), TrainState>,
    slow_network: u64,
    summary: Summary,
    trace: Option<Trace>,
}

/// No fault, and nothing finished, for so long: something hangs.
const PATIENCE: u64 = 400_000;
/// Workers tell how they are, and ask for what they lack.
const TICK: u64 = 400;
/// Lines that a failing seed prints.
const TRACE_LINES: usize = 60;
const NODES_MAX: u64 = 24;

impl Simulation {
    fn new(seed: u64, trace: Option<Trace>) -> Self {
        let mut rng = Rng(seed);
        let v = rng.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 12, 16]).unwrap();
        let v = VirtualRanks::new(v).unwrap();
        let shape = Shape {
            v,
            chunks: rng.within(1, 5) as u32,
            elements: rng.within(3, 8) as usize,
            total: Step(rng.within(4, 14)),
        };
        let coordinator = Coordinator::new(v, shape.total, &mut rng);
        let initial = TrainState::initial(shape);
        let mut simulation = Self {
            seed,
            now: 0,
            number: 0,
            queue: BTreeMap::new(),
            shape,
            is_impure: rng.percent(50),
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            coordinator,
            coordinator_back: 0,
            next_node: 1,
            faults_left: rng.within(0, 14),
            fault_pause: rng.pick(&[60, 200, 800]).unwrap(),
            quiet_since: 0,
            traps: Vec::new(),
            zombies: BTreeSet::new(),
            reference: vec![initial.clone()],
            states: BTreeMap::from([((Step(0), initial.digest), initial)]),
            slow_network: rng.pick(&[0, 3, 15]).unwrap(),
            summary: Summary::default(),
            trace,
            rng,
        };
        while simulation.reference.len() as u64 <= shape.total.0 {
            let next = simulation.reference.last().unwrap().undisturbed_next(shape);
            simulation.reference.push(next);
        }
        for _ in 0..simulation.rng.within(1, 5) {
            simulation.spawn();
        }
        simulation.at(300, Event::Evaluate);
        let first = simulation.rng.within(300, 1500);
        simulation.at(first, Event::Fault);
        simulation
    }

    fn run(&mut self) {
        while let Some(((time, _), event)) = self.queue.pop_first() {
            assert!(time >= self.now, "time goes on");
            self.now = time;
            self.summary.events += 1;
            self.handle(event);
            if self.faults_left == 0 && self.is_finished() {
                return;
            }
            let waited = self.now - self.quiet_since;
            assert!(waited < PATIENCE, "it hangs\n{}", self.describe());
        }
        panic!("nothing is left to do\n{}", self.describe());
    }

    fn is_finished(&self) -> bool {
        let Some(world) = self.coordinator.newest() else { return false };
        world.nodes().all(|n| {
            self.nodes.get(&n).is_some_and(|node| {
                node.cycle.applied() == Some(self.shape.total)
                    && node.cycle.lineage() == Some(world.lineage)
            })
        })
    }

    fn at(&mut self, delay: u64, event: Event) {
        self.number += 1;
        self.queue.insert((self.now + delay, self.number), event);
    }

    fn log(&self, line: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let mut trace = trace.borrow_mut();
            trace.push_back(format!("{:>7} {}", self.now, line()));
            if trace.len() > TRACE_LINES {
                trace.pop_front();
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Frame { from, to, epoch, frame, body } => {
                let link = self.links.get(&pair(from, to)).copied().unwrap_or_default();
                if link.epoch != epoch || !link.is_up || !self.nodes.contains_key(&to) {
                    return;
                }
                if !matches!(frame, PeerFrame::FinalRequest { .. } | PeerFrame::StateRequest { .. })
                {
                    self.log(|| format!("{from} -> {to} {}", describe_frame(&frame)));
                }
                self.with(to, |node| node.handle_frame(from, frame, body));
            }
            Event::LinkUp { pair } => self.link_up(pair),
            Event::Done { node } => {
                let states = &self.states;
                let load = |start: &Start| match start.digest {
                    Some(digest) => states[&(start.step, digest)].clone(),
                    None => states.values().next().unwrap().clone(),
                };
                let Some(worker) = self.nodes.get_mut(&node) else { return };
                let before = worker.cycle.applied().zip(worker.cycle.lineage());
                let user = worker.user.clone();
                worker.handle_done(load);
                self.log(|| format!("{node} has done {}", describe_user(&user)));
                if matches!(user, User::Busy(Work::Apply { .. }, _)) {
                    self.check_applied(node, before);
                }
                self.settle(node);
            }
            Event::Tick { node } => self.tick(node),
            Event::World { node, world } => {
                let is_news = |n: &Node| n.cycle.newest_generation() < Some(world.generation);
                if self.nodes.get(&node).is_some_and(is_news) {
                    self.log(|| format!("{node} hears of {world}"));
                    self.with(node, |n| n.handle_world(world));
                }
            }
            Event::Beat { node, beat } => {
                self.coordinator.handle_beat(node, beat);
                self.evaluate();
            }
            Event::Lost { node } => {
                self.log(|| format!("node {node} is lost"));
                self.coordinator.handle_lost(node);
                self.evaluate();
            }
            Event::Evaluate => self.evaluate(),
            Event::Resume => {
                self.coordinator.is_pausing = false;
                self.quiet_since = self.now;
                self.evaluate();
            }
            Event::Fault => self.fault(),
        }
    }

    fn with(&mut self, node: NodeId, act: impl FnOnce(&mut Node)) {
        if let Some(worker) = self.nodes.get_mut(&node) {
            act(worker);
            self.settle(node);
        }
    }

    /// After each input: the user goes on, frames leave, traps snap.
    fn settle(&mut self, node: NodeId) {
        let Some(worker) = self.nodes.get_mut(&node) else { return };
        let work = worker.poll_work();
        let notes = std::mem::take(&mut worker.notes);
        let outbox = std::mem::take(&mut worker.outbox);
        for note in notes {
            self.log(|| format!("{node} notes {note:?}"));
            self.check_note(node, note);
            let trap = match note {
                Note::Adopted => Trap::Adopted,
                Note::Entered => Trap::Entered,
                Note::Ready(_) => Trap::Ready,
                Note::Excluded | Note::Diverged(_) => continue,
            };
            if self.snaps(trap) {
                return self.crash(node);
            }
        }
        for (to, frame, body) in outbox {
            let trap = match &frame {
                PeerFrame::Final(_) => Some(Trap::SendsFinal),
                PeerFrame::Node(_) => Some(Trap::SendsNode),
                PeerFrame::Report(_) => Some(Trap::SendsReport),
                PeerFrame::StateOffer { .. } | PeerFrame::StatePiece { .. } => {
                    Some(Trap::SendsState)
                }
                _ => None,
            };
            self.send(node, to, frame, body);
            if trap.is_some_and(|trap| self.snaps(trap)) {
                return self.crash(node);
            }
        }
        if let Some(work) = work {
            let slow = if self.rng.percent(10) { 20 } else { 1 };
            let delay = slow
                * match work {
                    Work::Leaf { .. } => self.rng.within(2, 40),
                    Work::Apply { .. } => self.rng.within(1, 20),
                    Work::Restore { .. } | Work::Load { .. } => self.rng.within(10, 200),
                };
            self.log(|| format!("{node} begins {}", describe_user(&User::Busy(work, None))));
            self.at(delay, Event::Done { node });
        }
        self.connect(node);
    }

    fn snaps(&mut self, trap: Trap) -> bool {
        let Some(place) = self.traps.iter().position(|(t, _)| *t == trap) else { return false };
        self.traps[place].1 -= 1;
        let is_due = self.traps[place].1 == 0;
        if is_due {
            self.traps.remove(place);
        }
        is_due && self.may_lose(1)
    }

    // The network.

    fn send(&mut self, from: NodeId, to: NodeId, frame: PeerFrame, body: Body) {
        let delay = if self.rng.percent(self.slow_network) {
            self.rng.within(100, 1500)
        } else {
            self.rng.within(1, 60)
        };
        let Some(link) = self.links.get_mut(&pair(from, to)).filter(|l| l.is_up) else { return };
        let direction = usize::from(from < to);
        let arrival = (self.now + delay).max(link.busy_until[direction]);
        link.busy_until[direction] = arrival;
        let epoch = link.epoch;
        self.at(arrival - self.now, Event::Frame { from, to, epoch, frame, body });
    }

    /// The lower id dials, as soon as it lists the other.
    fn connect(&mut self, node: NodeId) {
        let Some(worker) = self.nodes.get(&node) else { return };
        for other in worker.cycle.peers().into_keys().filter(|other| node < *other) {
            let link = self.links.entry((node, other)).or_default();
            if !link.is_up && !link.is_coming {
                link.is_coming = true;
                let delay = self.rng.within(1, 150);
                self.at(delay, Event::LinkUp { pair: (node, other) });
            }
        }
    }

    fn link_up(&mut self, (low, high): Pair) {
        let link = self.links.entry((low, high)).or_default();
        link.is_coming = false;
        let lists = |n: &Node| n.cycle.peers().contains_key(&high);
        let is_wanted = self.nodes.get(&low).is_some_and(lists);
        if link.is_up || !is_wanted || !self.nodes.contains_key(&high) {
            return;
        }
        *link = Link { is_up: true, epoch: link.epoch + 1, ..Link::default() };
        self.log(|| format!("link {low} - {high} is up"));
        self.with(low, |n| n.handle_link_up(high));
        self.with(high, |n| n.handle_link_up(low));
    }

    fn break_link(&mut self, pair: Pair, pause: u64) {
        let Some(link) = self.links.get_mut(&pair).filter(|l| l.is_up) else { return };
        link.is_up = false;
        link.is_coming = true;
        self.log(|| format!("link {} - {} breaks", pair.0, pair.1));
        self.at(pause, Event::LinkUp { pair });
    }

    // The coordinator and the workers' ears.

    fn tick(&mut self, node: NodeId) {
        if !self.nodes.contains_key(&node) {
            return;
        }
        self.at(TICK, Event::Tick { node });
        let worker = &self.nodes[&node];
        let boundary = worker.cycle.digests().last();
        if let Some((lineage, (applied, digest))) = worker.cycle.lineage().zip(boundary) {
            let beat = Beat {
                entered: worker.cycle.entered(),
                lineage,
                applied,
                digest,
                is_following: !worker.cycle.is_member(),
            };
            let delay = self.rng.within(1, 300);
            self.at(delay, Event::Beat { node, beat });
        }
        if self.nodes[&node].cycle.is_orphaned() && self.rng.percent(30) {
            // As it must: it ends, and another worker joins.
            return self.crash(node);
        }
        if self.coordinator.living.contains(&node)
            && let Some(world) = self.coordinator.newest().cloned()
            && self.rng.percent(15)
        {
            // The leader tells again.
            self.at(1, Event::World { node, world });
        }
        let now = Timestamp(self.now * 1_000_000);
        self.with(node, |node| node.handle_tick(now));
    }

    fn evaluate(&mut self) {
        if self.now < self.coordinator_back {
            let pause = self.coordinator_back - self.now;
            self.at(pause, Event::Evaluate);
            return;
        }
        let members = self.coordinator.living.len() - self.coordinator.draining.len();
        if members < self.coordinator.min_members {
            self.spawn();
        }
        if self.rng.percent(3)
            && let Some((step, digest)) = self.coordinator.agreed()
            && self.coordinator.checkpoint.is_none_or(|c| c.0 < step)
        {
            self.coordinator.checkpoint = Some((step, digest));
        }
        for node in self.coordinator.astray() {
            if self.rng.percent(5) && self.nodes.contains_key(&node) {
                self.crash(node);
            }
        }
        let before = self.coordinator.newest().map(|w| w.lineage);
        // Planned changes need not come at once; losses are told together where they are near.
        let waits = if self.coordinator.has_loss() { 60 } else { 40 };
        if self.rng.percent(waits) {
            self.at(25, Event::Evaluate);
            return;
        }
        let Some(world) = self.coordinator.evaluate(&mut self.rng) else { return };
        self.log(|| format!("the coordinator makes {world}"));
        self.summary.worlds += 1;
        self.summary.restarts += u64::from(before.is_some_and(|l| l != world.lineage));
        let lucky = self.rng.pick(&world.nodes().collect::<Vec<_>>());
        let all: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in all {
            let delay = match self.rng.below(10) {
                0 | 1 if Some(node) != lucky => self.rng.within(500, 4000),
                2 if Some(node) != lucky => continue,
                _ => self.rng.within(1, 120),
            };
            if self.coordinator.living.contains(&node) || self.rng.percent(40) {
                self.at(delay, Event::World { node, world: Arc::clone(&world) });
            }
        }
        self.evaluate();
    }

    fn spawn(&mut self) {
        if self.next_node > NODES_MAX && self.coordinator.living.len() >= 2 {
            return;
        }
        let id = NodeId(self.next_node);
        self.next_node += 1;
        let noise = if self.is_impure { id.0 } else { 0 };
        self.nodes.insert(id, Node::new(id, self.shape, noise));
        self.coordinator.living.insert(id);
        self.summary.joined += 1;
        let first = self.rng.within(1, TICK);
        self.at(first, Event::Tick { node: id });
        self.log(|| format!("node {id} joins"));
    }

    // Faults.

    fn may_lose(&self, count: usize) -> bool {
        self.next_node <= NODES_MAX || self.coordinator.living.len() > count + 1
    }

    fn crash(&mut self, node: NodeId) {
        self.log(|| format!("node {node} dies"));
        self.nodes.remove(&node);
        self.zombies.remove(&node);
        self.summary.crashes += 1;
        for (pair, link) in &mut self.links {
            if pair.0 == node || pair.1 == node {
                link.is_up = false;
            }
        }
        let delay = self.rng.pick(&[1, 20, 200, 1500]).unwrap();
        self.at(delay, Event::Lost { node });
        self.quiet_since = self.now;
    }

    fn fault(&mut self) {
        if self.faults_left == 0 {
            return;
        }
        self.faults_left -= 1;
        self.quiet_since = self.now;
        let pause = self.rng.within(1, 2 * self.fault_pause);
        self.at(pause, Event::Fault);
        if self.faults_left == 0 {
            self.traps.clear();
        }
        let alive: Vec<NodeId> = self.nodes.keys().copied().collect();
        let Some(victim) = self.rng.pick(&alive) else { return };
        match self.rng.below(13) {
            0 | 1 if self.may_lose(1) => self.crash(victim),
            2 if self.may_lose(2) => {
                let other = self.rng.pick(&alive).unwrap();
                self.crash(victim);
                if other != victim {
                    self.crash(other);
                }
            }
            3..=5 => {
                let traps = [
                    Trap::SendsFinal,
                    Trap::SendsFinal,
                    Trap::SendsNode,
                    Trap::SendsReport,
                    Trap::SendsState,
                    Trap::Adopted,
                    Trap::Entered,
                    Trap::Ready,
                    Trap::Applied,
                ];
                let trap = self.rng.pick(&traps).unwrap();
                let count = self.rng.within(1, 8);
                self.traps.push((trap, count));
            }
            6 | 7 if self.next_node <= NODES_MAX => self.spawn(),
            8 => {
                let may = self.coordinator.living.len() > self.coordinator.draining.len() + 1;
                if may && self.coordinator.living.contains(&victim) {
                    self.log(|| format!("node {victim} is to leave"));
                    self.coordinator.draining.insert(victim);
                    self.summary.drained += 1;
                }
            }
            9 if self.may_lose(1) && self.coordinator.living.contains(&victim) => {
                self.log(|| format!("node {victim} is evicted, and lives"));
                self.zombies.insert(victim);
                self.summary.evictions += 1;
                self.at(1, Event::Lost { node: victim });
            }
            10 => {
                let up: Vec<Pair> =
                    self.links.iter().filter(|(_, l)| l.is_up).map(|(p, _)| *p).collect();
                if let Some(pair) = self.rng.pick(&up) {
                    let pause = self.rng.within(1, 3000);
                    self.break_link(pair, pause);
                }
            }
            11 => {
                for other in alive.into_iter().filter(|n| *n != victim) {
                    let pause = self.rng.within(1, 1500);
                    self.break_link(pair(victim, other), pause);
                }
            }
            _ if self.rng.percent(50) => {
                self.coordinator.is_pausing = true;
                let pause = self.rng.within(500, 5000);
                self.at(pause, Event::Resume);
            }
            _ => self.coordinator_back = self.now + self.rng.within(100, 3000),
        }
        self.evaluate();
    }

    // Invariants.

    /// Agreement is asked of those whom the coordinator counts on: who died or was evicted with a state of its own binds nobody.
    fn is_counted(&self, node: NodeId) -> bool {
        let newest = self.coordinator.newest();
        newest.is_some_and(|w| w.has_member(node) || w.has_follower(node))
            && self.coordinator.living.contains(&node)
            && !self.zombies.contains(&node)
    }

    fn check_applied(&mut self, node: NodeId, before: Option<(Step, Lineage)>) {
        let worker = &self.nodes[&node];
        let (lineage, state) = worker.state.as_ref().unwrap();
        let (lineage, boundary, digest) = (*lineage, state.boundary, state.digest);
        if before.map(|(at, lineage)| (at.next(), lineage)) != Some((boundary, lineage)) {
            return; // the lineage ended meanwhile
        }
        if !self.is_impure {
            let expected = &self.reference[boundary.0 as usize];
            assert_eq!(digest, expected.digest, "node {node} at {boundary}: other bits");
        }
        self.states.insert((boundary, digest), state.clone());
        self.check_agreement(node, lineage, boundary, digest);
        if self.snaps(Trap::Applied) {
            self.crash(node);
        }
    }

    /// Nobody applies a step before all members have applied the one before.
    fn check_lag(&self, node: NodeId, step: Step) {
        let cycle = &self.nodes[&node].cycle;
        let world = cycle.world().unwrap();
        for other in world.nodes().filter(|_| cycle.is_member()) {
            let Some(other) = self.nodes.get(&other) else { continue };
            let is_behind = other.cycle.applied().is_none_or(|at| at < step);
            let is_comparable = other.cycle.lineage() == cycle.lineage();
            assert!(
                !is_comparable || !is_behind,
                "node {node} may apply {step} before node {}\n{}",
                other.id,
                self.describe()
            );
        }
    }

    /// Members agree always. A follower may have applied finals of members that died with them: it is evicted when it is seen.
    fn check_agreement(&mut self, node: NodeId, lineage: Lineage, boundary: Step, digest: Digest) {
        let is_member = |n: NodeId| self.nodes[&n].cycle.is_member();
        let mut strays = BTreeSet::new();
        for (id, other) in &self.nodes {
            let counts = *id != node && self.is_counted(*id) && self.is_counted(node);
            if !counts || other.cycle.lineage() != Some(lineage) {
                continue;
            }
            let theirs = other.cycle.digests().find(|(s, _)| *s == boundary);
            if theirs.is_some_and(|(_, theirs)| theirs != digest) {
                let stray = if is_member(*id) { node } else { *id };
                assert!(
                    !is_member(stray) && self.is_impure,
                    "nodes {node} and {id} differ at {boundary}\n{}",
                    self.describe()
                );
                strays.insert(stray);
            }
        }
        for stray in strays {
            self.log(|| format!("node {stray} strays at {boundary}"));
            self.summary.strays += 1;
            self.zombies.insert(stray);
            self.at(1, Event::Lost { node: stray });
        }
    }

    fn check_note(&self, node: NodeId, note: Note) {
        match note {
            Note::Diverged(other) => {
                let is_counted = self.is_counted(node) && self.is_counted(other);
                assert!(!is_counted || self.is_impure, "node {node} says that {other} diverged");
            }
            Note::Ready(step) => {
                let applied = self.nodes[&node].cycle.applied();
                assert_eq!(applied, Some(step), "ready is the present step");
                self.check_lag(node, step);
            }
            _ => {}
        }
        let worker = &self.nodes[&node];
        let steps: BTreeSet<Step> = worker.finals.keys().map(|(s, _)| *s).collect();
        assert!(steps.len() <= 66, "finals pile up at node {node}");
    }

    fn describe(&self) -> String {
        let mut text = format!(
            "seed {} at {}: V {}, {} chunks, {} steps, {}; min {} max {}, {} faults left\nliving {:?} draining {:?} zombies {:?}\n",
            self.seed,
            self.now,
            self.shape.v,
            self.shape.chunks,
            self.shape.total,
            if self.is_impure { "impure" } else { "pure" },
            self.coordinator.min_members,
            self.coordinator.max_members,
            self.faults_left,
            self.coordinator.living,
            self.coordinator.draining,
            self.zombies,
        );
        let worlds = &self.coordinator.worlds;
        for world in &worlds[worlds.len().saturating_sub(5)..] {
            text += &format!("{world}\n");
        }
        for (id, node) in &self.nodes {
            let cycle = &node.cycle;
            text += &format!(
                "node {id}: world {:?} pending {:?} entered {:?} applied {:?} user {} known {:?} lowest {} held {:?}\n",
                cycle.world().map(|w| w.generation.0),
                cycle.pending.as_ref().map(|w| w.generation.0),
                cycle.entered().map(|g| g.0),
                cycle.applied().map(|s| s.0),
                describe_user(&node.user),
                cycle.known_applied.iter().map(|(n, s)| (n.0, s.0)).collect::<Vec<_>>(),
                cycle.lowest,
                cycle.finals.iter().map(|(s, c)| (s.0, c.len())).collect::<Vec<_>>(),
            );
            text += &format!(
                "   reports of {:?}; operations {:?}\n",
                cycle.reports.keys().map(|n| n.0).collect::<Vec<_>>(),
                cycle
                    .operations
                    .iter()
                    .map(|(s, o)| (
                        s.0,
                        o.held().values().map(BTreeSet::len).collect::<Vec<_>>(),
                        o.to_compute()
                    ))
                    .collect::<Vec<_>>(),
            );
        }
        text
    }
}

fn pair(a: NodeId, b: NodeId) -> Pair {
    (a.min(b), a.max(b))
}

fn describe_frame(frame: &PeerFrame) -> String {
    match frame {
        PeerFrame::Report(r) => {
            let finals: Vec<_> = r.finals.iter().map(|(s, c)| (s.0, c.len())).collect();
            let nodes = r.nodes.iter().map(|(s, c, n)| format!("{s}/{c}:{}", n.len()));
            let nodes: Vec<String> = nodes.collect();
            format!(
                "report of {} at {} finals {finals:?} nodes {nodes:?}",
                r.world.generation, r.applied
            )
        }
        PeerFrame::Node(n) => format!("node {}/{}/{}", n.step, n.chunk, n.node),
        PeerFrame::Final(f) => {
            format!("final {}/{} gen {} lowest {}", f.step, f.chunk, f.generation, f.lowest)
        }
        PeerFrame::Progress { applied, .. } => format!("progress {applied}"),
        PeerFrame::StateOffer { applied, .. } => format!("state at {applied}"),
        _ => "asks".to_owned(),
    }
}

fn describe_user(user: &User) -> String {
    match user {
        User::AtBoundary => "at a boundary".to_owned(),
        User::InStep(step) => format!("in step {step}"),
        User::Busy(Work::Leaf { step, rank, .. }, _) => format!("leaf {rank} of step {step}"),
        User::Busy(Work::Apply { .. }, step) => format!("applying {step:?}"),
        User::Busy(Work::Restore { lineage, start }, _) => {
            format!("restoring lineage {lineage} at {}", start.step)
        }
        User::Busy(Work::Load { state, .. }, _) => format!("loading {}", state.boundary),
    }
}
