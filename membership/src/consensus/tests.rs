//! A cluster in memory: every order of ticks, messages, writes and crashes is chosen by one seed. A crash keeps what was
//! synced and a part of what was not.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn place(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap()
    }
}

#[derive(Default)]
struct Disk {
    synced: RecoveredLog,
    unsynced: Vec<LogWrite>,
}

impl Disk {
    fn write(&mut self, write: LogWrite, sync: bool) {
        self.unsynced.push(write);
        if sync {
            self.keep(self.unsynced.len());
        }
    }

    fn keep(&mut self, writes: usize) {
        for write in self.unsynced.drain(..writes) {
            self.synced.record(&write).unwrap();
        }
        self.unsynced.clear();
    }
}

struct Node {
    machine: Option<Consensus>,
    disk: Disk,
    pending: Option<(u64, LogWrite, bool)>,
    applied: u64,
    chain: u64,
    boots: u64,
    restored: u64,
}

struct Cluster {
    chance: Chance,
    seed: u64,
    nodes: BTreeMap<u64, Node>,
    wire: Vec<(u64, u64, Bytes)>,
    isolated: BTreeSet<u64>,
    /// What was applied anywhere, and the hash over everything up to it.
    agreed: BTreeMap<u64, (Term, Bytes, Bytes)>,
    chains: BTreeMap<u64, u64>,
    leaders: BTreeMap<Term, u64>,
    proposals: u64,
    trace: u64,
    tail: u64,
    votes: u64,
    acknowledgements: u64,
}

impl Cluster {
    fn new(size: u64, seed: u64) -> Self {
        let node = || Node {
            machine: None,
            disk: Disk::default(),
            pending: None,
            applied: 0,
            chain: 0,
            boots: 0,
            restored: 0,
        };
        let mut cluster = Self {
            chance: Chance(seed),
            seed,
            nodes: (1..=size).map(|id| (id, node())).collect(),
            wire: Vec::new(),
            isolated: BTreeSet::new(),
            agreed: BTreeMap::new(),
            chains: BTreeMap::from([(1, 0)]),
            leaders: BTreeMap::new(),
            proposals: 0,
            trace: 0,
            tail: 8,
            votes: 0,
            acknowledgements: 0,
        };
        for id in 1..=size {
            cluster.start(id);
        }
        cluster
    }

    fn start(&mut self, id: u64) {
        let voters = self.nodes.keys().copied().collect();
        let node = self.nodes.get_mut(&id).unwrap();
        node.boots += 1;
        (node.applied, node.chain) = (1, 0);
        let config = ConsensusConfig {
            id,
            voters,
            election_ticks: 12,
            heartbeat_ticks: 3,
            seed: self.seed ^ (node.boots << 8),
        };
        let mut machine = Consensus::new(&config, node.disk.synced.clone());
        machine.tail_entries = self.tail;
        node.machine = Some(machine);
        self.drain(id);
    }

    fn crash(&mut self, id: u64) {
        let kept = self.chance.place(self.nodes[&id].disk.unsynced.len() + 1);
        let lands = self.chance.below(2) == 0;
        let node = self.nodes.get_mut(&id).unwrap();
        node.machine = None;
        let unconfirmed = node.pending.take();
        let all = kept == node.disk.unsynced.len();
        node.disk.keep(kept);
        // A write that was not confirmed may have reached the disk all the same, after all before it.
        if let Some((_, write, _)) = unconfirmed.filter(|_| all && lands) {
            node.disk.write(write, true);
        }
    }

    fn with(&mut self, id: u64, input: impl FnOnce(&mut Consensus)) {
        if let Some(machine) = self.nodes.get_mut(&id).unwrap().machine.as_mut() {
            input(machine);
            self.drain(id);
        }
    }

    fn confirm(&mut self, id: u64) -> bool {
        let node = self.nodes.get_mut(&id).unwrap();
        let Some((number, write, sync)) = node.pending.take() else { return false };
        node.disk.write(write, sync);
        self.with(id, |machine| machine.handle_persisted(number));
        true
    }

    fn drain(&mut self, id: u64) {
        loop {
            let node = self.nodes.get_mut(&id).unwrap();
            let Some(output) = node.machine.as_mut().unwrap().poll_output() else { return };
            for byte in format!("{id} {output:?}").bytes() {
                self.trace = (self.trace ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            match output {
                Output::Persist { number, write, sync } => {
                    assert!(node.pending.is_none(), "two writes at once");
                    node.pending = Some((number, write, sync));
                }
                Output::Send { to, bytes } => {
                    self.check_promise(id, &RaftMessage::decode(&bytes).unwrap());
                    self.wire.push((id, to, bytes));
                }
                Output::Apply { index, term, data, context } => {
                    assert_eq!(index, node.applied + 1, "a gap at node {id}");
                    node.applied = index;
                    node.chain = chained(node.chain, index, term, &data);
                    assert_eq!(node.machine.as_ref().unwrap().applied_index(), index);
                    let entry = (term, data, context);
                    let agreed = self.agreed.entry(index).or_insert_with(|| entry.clone());
                    assert_eq!(*agreed, entry, "node {id} applied another entry {index}");
                    let chain = *self.chains.entry(index).or_insert(node.chain);
                    assert_eq!(chain, node.chain);
                }
                Output::Restore { image } => {
                    assert!(image.index >= node.applied);
                    node.applied = image.index;
                    node.restored += 1;
                    node.chain = u64::from_le_bytes(image.data[..8].try_into().unwrap());
                    assert_eq!(
                        self.chains[&image.index], node.chain,
                        "image {} differs",
                        image.index
                    );
                }
                Output::Role { term, is_leader, .. } => {
                    if is_leader {
                        assert_eq!(
                            *self.leaders.entry(term).or_insert(id),
                            id,
                            "two leaders in {term}"
                        );
                    }
                }
            }
        }
    }

    /// What a message promises must lie on the disk, synced, when it leaves.
    fn check_promise(&mut self, id: u64, message: &RaftMessage) {
        let disk = &self.nodes[&id].disk.synced;
        if matches!(message.kind, Kind::RequestPreVote | Kind::RequestPreVoteResponse) {
            return;
        }
        assert!(
            disk.hard_state.term.0 >= message.term,
            "{message:?} left before its term was durable"
        );
        match message.kind {
            Kind::RequestVote => assert_eq!(disk.hard_state.vote, id),
            Kind::RequestVoteResponse if !message.reject => {
                assert_eq!(disk.hard_state.vote, message.to, "a vote left before it was durable");
                self.votes += 1;
            }
            Kind::AppendResponse if !message.reject => {
                assert!(
                    disk.last_index() >= message.index,
                    "entry {} was acknowledged before it was durable",
                    message.index
                );
                self.acknowledgements += 1;
            }
            _ => {}
        }
    }

    fn leader(&self) -> Option<u64> {
        let leads = |node: &Node| {
            node.machine.as_ref().filter(|machine| machine.is_leader()).map(Consensus::term)
        };
        self.nodes.iter().filter_map(|(id, node)| Some((leads(node)?, *id))).max().map(|(_, id)| id)
    }

    fn propose(&mut self, id: u64) {
        self.proposals += 1;
        let data = Bytes::from(self.proposals.to_le_bytes().to_vec());
        self.with(id, |machine| drop(machine.propose(data, Bytes::from_static(b"c"))));
    }

    fn compact(&mut self, id: u64) {
        let node = &self.nodes[&id];
        let (applied, image) = (node.applied, Bytes::from(node.chain.to_le_bytes().to_vec()));
        self.with(id, |machine| machine.compact(applied, image));
    }

    fn deliver(&mut self, place: usize, keep: bool) {
        let (from, to, bytes) =
            if keep { self.wire[place].clone() } else { self.wire.swap_remove(place) };
        if !self.isolated.contains(&from) && !self.isolated.contains(&to) {
            self.with(to, |machine| machine.step(from, &bytes).unwrap());
        }
    }

    fn someone(&mut self) -> u64 {
        let size = self.nodes.len() as u64;
        1 + self.chance.below(size)
    }

    /// One random thing happens.
    fn act(&mut self) {
        match self.chance.below(1000) {
            0..450 if !self.wire.is_empty() => {
                let place = self.chance.place(self.wire.len());
                match self.chance.below(20) {
                    0 => drop(self.wire.swap_remove(place)),
                    1 => self.deliver(place, true),
                    _ => self.deliver(place, false),
                }
            }
            450..650 => {
                let id = self.someone();
                self.with(id, Consensus::tick);
            }
            650..900 => {
                let id = self.someone();
                self.confirm(id);
            }
            900..970 => {
                let id = self.someone();
                self.propose(self.leader().unwrap_or(id));
            }
            970..976 => {
                let id = self.someone();
                self.crash(id);
            }
            976..988 => {
                let id = self.someone();
                if self.nodes[&id].machine.is_none() {
                    self.start(id);
                }
            }
            988..994 => {
                let id = self.someone();
                self.compact(id);
            }
            994..996 => {
                let id = self.someone();
                self.isolated = BTreeSet::from([id]);
            }
            996..998 => self.isolated.clear(),
            _ => {
                let (id, other) = (self.someone(), self.someone());
                self.with(id, |machine| machine.report_unreachable(other));
                self.with(id, |machine| machine.transfer_leader(other));
            }
        }
        let excess = self.wire.len().saturating_sub(200);
        self.wire.drain(..excess);
    }

    /// A round without faults: a tick everywhere, and all that follows from it.
    fn round(&mut self) {
        let ids: Vec<u64> = self.nodes.keys().copied().collect();
        for id in &ids {
            self.with(*id, Consensus::tick);
        }
        self.settle();
    }

    fn settle(&mut self) {
        let ids: Vec<u64> = self.nodes.keys().copied().collect();
        for _ in 0..10_000 {
            let mut is_busy = false;
            for id in &ids {
                is_busy |= self.confirm(*id);
            }
            if !self.wire.is_empty() {
                self.deliver(0, false);
                is_busy = true;
            }
            if !is_busy {
                return;
            }
        }
        panic!("no rest without faults");
    }

    fn elect(&mut self) -> u64 {
        for _ in 0..200 {
            self.round();
            if let Some(leader) = self.leader() {
                return leader;
            }
        }
        panic!("no leader after 200 ticks without faults");
    }

    /// All faults end: everybody must come to hold everything that anybody applied, and one more entry.
    fn heal(&mut self) {
        self.isolated.clear();
        let ids: Vec<u64> = self.nodes.keys().copied().collect();
        for id in &ids {
            if self.nodes[id].machine.is_none() {
                self.start(*id);
            }
        }
        for _ in 0..400 {
            self.round();
            let Some(leader) = self.leader() else { continue };
            let wanted = self.proposals + 1;
            self.propose(leader);
            self.round();
            self.round();
            self.round();
            let wanted = wanted.to_le_bytes();
            let Some(index) = self
                .agreed
                .iter()
                .find(|(_, entry)| entry.1[..] == wanted)
                .map(|(index, _)| *index)
            else {
                continue;
            };
            if self.nodes.values().all(|node| node.applied >= index) {
                let newest = *self.agreed.keys().next_back().unwrap();
                assert!(self.nodes.values().all(|node| node.applied <= newest));
                return;
            }
        }
        panic!("not level 400 rounds after the last fault");
    }
}

fn chained(chain: u64, index: u64, term: Term, data: &[u8]) -> u64 {
    data.iter().fold(chain ^ index ^ (term.0 << 32), |chain, byte| {
        (chain ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn commit(cluster: &mut Cluster, proposals: u64) {
    for _ in 0..proposals {
        let leader = cluster.leader().unwrap();
        cluster.propose(leader);
        cluster.settle();
    }
    cluster.round();
    cluster.round();
    cluster.round();
}

#[test]
fn a_leader_emerges_and_a_proposal_commits_everywhere() {
    for size in [1, 3, 5] {
        let mut cluster = Cluster::new(size, 7);
        cluster.elect();
        commit(&mut cluster, 3);
        assert_eq!(cluster.agreed.len(), 4, "the leader's entry and three more");
        for node in cluster.nodes.values() {
            assert_eq!(node.applied, 5);
            assert_eq!(node.machine.as_ref().unwrap().commit_index(), 5);
        }
    }
}

#[test]
fn leaders_crash_and_nothing_committed_is_lost() {
    let mut cluster = Cluster::new(3, 11);
    for _ in 0..6 {
        let leader = cluster.elect();
        commit(&mut cluster, 5);
        let committed = cluster.agreed.clone();
        cluster.crash(leader);
        assert_ne!(cluster.elect(), leader);
        commit(&mut cluster, 1);
        assert!(committed.iter().all(|(index, entry)| cluster.agreed[index] == *entry));
        cluster.start(leader);
    }
    cluster.heal();
}

#[test]
fn slow_disks_depose_no_leader() {
    for seed in 0..50 {
        let mut cluster = Cluster::new(3, seed);
        let leader = cluster.elect();
        let term = cluster.nodes[&leader].machine.as_ref().unwrap().term();
        for round in 0..600 {
            for id in 1..=3 {
                cluster.with(id, Consensus::tick);
                // A write takes longer than an election would, on each disk at another time.
                if cluster.chance.below(60) == 0 {
                    cluster.confirm(id);
                }
            }
            while !cluster.wire.is_empty() {
                cluster.deliver(0, false);
            }
            if round % 20 == 0 {
                cluster.propose(leader);
            }
        }
        let machine = cluster.nodes[&leader].machine.as_ref().unwrap();
        assert!(machine.is_leader() && machine.term() == term, "seed {seed}: another leader");
        cluster.heal();
    }
}

#[test]
fn nothing_that_depends_on_a_write_is_offered_before_it_is_confirmed() {
    let config =
        ConsensusConfig { id: 1, voters: vec![1], election_ticks: 12, heartbeat_ticks: 3, seed: 1 };
    let mut machine = Consensus::new(&config, RecoveredLog::default());
    let first = machine.poll_output();
    assert!(matches!(first, Some(Output::Persist { number: 1, sync: true, .. })), "{first:?}");
    for _ in 0..50 {
        machine.tick();
    }
    assert_eq!(machine.poll_output(), None, "the first image is not durable");
    machine.handle_persisted(9);
    assert_eq!(machine.poll_output(), None, "another number confirms nothing");
    machine.handle_persisted(1);
    for _ in 0..20 {
        machine.tick();
    }
    while !machine.is_leader() || machine.applied_index() < 2 {
        if let Some(Output::Persist { number, .. }) = machine.poll_output() {
            machine.handle_persisted(number);
        }
    }
    machine.propose(Bytes::from_static(b"x"), Bytes::new()).unwrap();
    let mut offered = std::iter::from_fn(|| machine.poll_output()).collect::<Vec<_>>();
    let Some(Output::Persist { number, write, sync: true }) = offered.pop() else {
        panic!("{offered:?}")
    };
    assert_eq!(write.entries.len(), 1);
    assert!(!offered.iter().any(|output| matches!(output, Output::Apply { index: 3, .. })));
    machine.propose(Bytes::from_static(b"y"), Bytes::new()).unwrap();
    machine.propose(Bytes::from_static(b"z"), Bytes::new()).unwrap();
    assert_eq!(machine.poll_output(), None);
    machine.handle_persisted(number);
    let offered = std::iter::from_fn(|| machine.poll_output()).collect::<Vec<_>>();
    assert!(
        offered.iter().any(|output| matches!(output, Output::Apply { index: 3, .. })),
        "{offered:?}"
    );
}

#[test]
fn a_coordinator_behind_the_tail_catches_up_by_an_image() {
    let mut cluster = Cluster::new(3, 3);
    cluster.tail = 512;
    let leader = cluster.elect();
    for node in cluster.nodes.values_mut() {
        node.machine.as_mut().unwrap().tail_entries = 512;
    }
    let behind = 1 + leader % 3;
    commit(&mut cluster, 1);
    cluster.crash(behind);
    commit(&mut cluster, 600);
    let leader = cluster.leader().unwrap();
    cluster.compact(leader);
    cluster.settle();
    let machine = cluster.nodes[&leader].machine.as_ref().unwrap();
    assert!(machine.image_index() > 600);
    let restored = cluster.nodes[&behind].restored;
    cluster.start(behind);
    cluster.heal();
    assert_eq!(cluster.nodes[&behind].restored, restored + 1);
    // What it was given is on its disk, and begins the next start.
    cluster.crash(behind);
    cluster.start(behind);
    cluster.heal();
    assert_eq!(cluster.nodes[&behind].restored, restored + 2);
}

#[test]
fn an_image_that_gets_lost_is_sent_again() {
    let mut cluster = Cluster::new(3, 5);
    let leader = cluster.elect();
    let behind = 1 + leader % 3;
    cluster.isolated = BTreeSet::from([behind]);
    commit(&mut cluster, 40);
    let leader = cluster.leader().unwrap();
    cluster.compact(leader);
    cluster.settle();
    cluster.isolated.clear();
    let mut lost = 0;
    for _ in 0..200 {
        let is_image = |bytes: &Bytes| RaftMessage::decode(bytes).unwrap().kind == Kind::Image;
        let sent = cluster.wire.len();
        cluster.wire.retain(|(_, _, bytes)| lost >= 3 || !is_image(bytes));
        lost += sent - cluster.wire.len();
        let ids: Vec<u64> = cluster.nodes.keys().copied().collect();
        if cluster.wire.is_empty() {
            for id in &ids {
                cluster.with(*id, Consensus::tick);
            }
        } else {
            cluster.deliver(0, false);
        }
        for id in ids {
            while cluster.confirm(id) {}
        }
    }
    assert!(lost > 0, "an image was sent and lost");
    cluster.heal();
    assert_eq!(cluster.nodes[&behind].restored, 1);
}

#[test]
fn a_restart_applies_the_log_again_even_if_the_commit_index_was_not_durable() {
    let mut cluster = Cluster::new(1, 2);
    cluster.elect();
    commit(&mut cluster, 20);
    cluster.compact(1);
    cluster.settle();
    commit(&mut cluster, 5);
    let (applied, chain) = (cluster.nodes[&1].applied, cluster.nodes[&1].chain);
    cluster.crash(1);
    // The worst disk that a crash may leave: a commit index older than the image.
    cluster.nodes.get_mut(&1).unwrap().disk.synced.hard_state.commit = 1;
    cluster.start(1);
    cluster.elect();
    assert_eq!(cluster.nodes[&1].applied, applied + 1, "and the new term's entry");
    assert_eq!(cluster.chains[&applied], chain);
}

#[test]
fn leadership_is_handed_over() {
    let mut cluster = Cluster::new(3, 13);
    let leader = cluster.elect();
    commit(&mut cluster, 1);
    let next = 1 + leader % 3;
    cluster.with(leader, |machine| machine.transfer_leader(next));
    cluster.settle();
    cluster.round();
    assert_eq!(cluster.leader(), Some(next));
}

#[test]
fn a_leader_without_a_majority_steps_down() {
    let mut cluster = Cluster::new(3, 17);
    let leader = cluster.elect();
    cluster.isolated = BTreeSet::from([leader]);
    for _ in 0..40 {
        cluster.round();
    }
    assert!(!cluster.nodes[&leader].machine.as_ref().unwrap().is_leader());
    let term = cluster.nodes[&leader].machine.as_ref().unwrap().term();
    assert_ne!(cluster.elect(), leader);
    assert!(
        cluster.nodes[&leader].machine.as_ref().unwrap().term() == term,
        "pre-vote keeps its term down"
    );
}

#[test]
fn proposals_are_refused_where_they_cannot_be_taken() {
    let mut cluster = Cluster::new(3, 19);
    let leader = cluster.elect();
    let follower = 1 + leader % 3;
    let propose = |machine: &mut Consensus, bytes: usize, context: usize| {
        machine.propose(vec![1; bytes].into(), vec![1; context].into())
    };
    let machine = cluster.nodes.get_mut(&follower).unwrap().machine.as_mut().unwrap();
    assert_eq!(propose(machine, 1, 0), Err(ConsensusError::NotLeader { leader: Some(leader) }));
    let machine = cluster.nodes.get_mut(&leader).unwrap().machine.as_mut().unwrap();
    for (bytes, context) in [(0, 0), (1 + (1 << 20), 0), (1, 65)] {
        assert!(matches!(propose(machine, bytes, context), Err(ConsensusError::Size { .. })));
    }
    let taken = (0..20).filter(|_| propose(machine, 1 << 20, 64).is_ok()).count();
    assert!((1..=8).contains(&taken), "{taken} proposals of 1 MiB were taken");
    assert_eq!(propose(machine, 1 << 20, 0), Err(ConsensusError::Busy));
    cluster.drain(leader);
    cluster.heal();
}

#[test]
fn a_queue_that_is_full_drops_and_recovers() {
    let mut cluster = Cluster::new(3, 23);
    let leader = cluster.elect();
    let follower = 1 + leader % 3;
    cluster.propose(leader);
    for _ in 0..5000 {
        cluster.with(leader, |machine| machine.report_unreachable(follower));
    }
    let machine = cluster.nodes[&leader].machine.as_ref().unwrap();
    assert!(machine.dropped_inputs() > 3000 && machine.queue.len() <= QUEUE_MAX);
    cluster.heal();
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = |seed| {
        let mut cluster = Cluster::new(3, seed);
        (0..2000).for_each(|_| cluster.act());
        cluster.trace
    };
    assert_eq!(run(99), run(99));
    assert_ne!(run(99), run(100));
}

#[test]
fn under_random_faults_all_agree_and_recover() {
    let (mut entries, mut restored, mut votes, mut acknowledgements) = (0, 0, 0, 0);
    for seed in 0..200 {
        let size = [3, 5, 3, 1][usize::try_from(seed % 4).unwrap()];
        let mut cluster = Cluster::new(size, seed);
        for _ in 0..2500 {
            cluster.act();
        }
        cluster.heal();
        entries += cluster.agreed.len();
        restored += cluster.nodes.values().map(|node| node.restored).sum::<u64>();
        votes += cluster.votes;
        acknowledgements += cluster.acknowledgements;
    }
    // The run must reach what it is about.
    assert!(entries > 2000 && restored > 200 && votes > 500 && acknowledgements > 5000);
}

#[test]
fn messages_for_others_or_by_strangers_are_refused() {
    let mut cluster = Cluster::new(3, 29);
    cluster.elect();
    let mut heartbeat = RaftMessage {
        kind: Kind::Heartbeat,
        to: 1,
        from: 2,
        term: 900,
        log_term: 0,
        index: 0,
        commit: 1 << 40,
        commit_term: 0,
        reject: false,
        reject_hint: 0,
        context: Bytes::new(),
        entries: Vec::new(),
        image: None,
    };
    let mut step = |from, message: &RaftMessage| {
        cluster.nodes.get_mut(&1).unwrap().machine.as_mut().unwrap().step(from, &message.encode())
    };
    assert_eq!(step(2, &heartbeat), Ok(()), "a commit index beyond the log is survived");
    assert!(step(3, &heartbeat).is_err());
    heartbeat.to = 3;
    assert!(step(2, &heartbeat).is_err());
    (heartbeat.to, heartbeat.from) = (1, 1);
    assert!(step(1, &heartbeat).is_err());
    heartbeat.from = 4;
    assert!(step(4, &heartbeat).is_err());
    (heartbeat.from, heartbeat.kind) = (2, Kind::Image);
    heartbeat.image = Some(LogImage { index: 500, ..LogImage::first(vec![1, 2]) });
    assert!(step(2, &heartbeat).is_err());
}

fn any_message() -> impl Strategy<Value = RaftMessage> {
    let kinds = [
        Kind::Append,
        Kind::AppendResponse,
        Kind::RequestVote,
        Kind::RequestVoteResponse,
        Kind::Image,
        Kind::Heartbeat,
        Kind::HeartbeatResponse,
        Kind::TimeoutNow,
        Kind::RequestPreVote,
        Kind::RequestPreVoteResponse,
    ];
    let numbers = (1..6u64, 0..6u64, 0..20u64, 0..20u64, 0..6u64, 0..20u64);
    let rest =
        (prop::sample::select(kinds.to_vec()), 2..4u64, any::<bool>(), any::<bool>(), 0..5u64);
    (numbers, rest).prop_map(
        |(
            (term, log_term, index, commit, commit_term, hint),
            (kind, from, reject, force, many),
        )| {
            let entry = |place| LogEntry {
                index: index + place,
                term: Term(term.min(log_term.max(1))),
                kind: LogEntry::NORMAL,
                data: Bytes::from_static(b"forged"),
                context: Bytes::new(),
            };
            let is_append = kind == Kind::Append;
            let image = LogImage {
                index: index + 1,
                term: Term(log_term.clamp(1, term)),
                ..LogImage::first(vec![1, 2, 3])
            };
            RaftMessage {
                kind,
                to: 1,
                from,
                term,
                log_term: if is_append { log_term.clamp(1, term) } else { log_term.min(term) },
                index,
                commit,
                commit_term,
                reject,
                reject_hint: hint,
                context: if force { Bytes::from_static(b"CampaignTransfer") } else { Bytes::new() },
                entries: if is_append { (1..=many).map(entry).collect() } else { Vec::new() },
                image: (kind == Kind::Image).then_some(image),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), version in any::<bool>()) {
        let config = ConsensusConfig { id: 1, voters: vec![1, 2, 3], election_ticks: 12, heartbeat_ticks: 3, seed: 1 };
        let mut machine = Consensus::new(&config, RecoveredLog::default());
        machine.handle_persisted(1);
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut().filter(|_| version) {
            *first = 1;
        }
        drop(machine.step(2, &bytes));
    }

    /// Whatever well-formed messages two lying coordinators send, in whatever order, this one stands.
    #[test]
    fn lies_never_panic(messages in prop::collection::vec((any_message(), 0..4u8), 1..150), seed in any::<u64>()) {
        let config = ConsensusConfig { id: 1, voters: vec![1, 2, 3], election_ticks: 12, heartbeat_ticks: 3, seed };
        let mut machine = Consensus::new(&config, RecoveredLog::default());
        let mut disk = RecoveredLog::default();
        for (message, then) in messages {
            let mut outstanding = None;
            while let Some(output) = machine.poll_output() {
                if let Output::Persist { number, write, .. } = output {
                    outstanding = Some((number, write));
                }
            }
            match then {
                0 => machine.tick(),
                1 => (0..25).for_each(|_| machine.tick()),
                2 => drop(machine.propose(Bytes::from_static(b"own"), Bytes::new())),
                _ => machine.compact(machine.applied_index(), Bytes::from_static(b"image")),
            }
            machine.step(message.from, &message.encode()).unwrap();
            if let Some((number, write)) = outstanding {
                disk.record(&write).unwrap();
                machine.handle_persisted(number);
            }
        }
        prop_assert!(disk.check().is_ok());
        let again = Consensus::new(&config, disk);
        prop_assert!(again.last_index() >= 1);
    }

    #[test]
    fn a_damaged_message_is_survived(seed in 0..50u64, place in any::<prop::sample::Index>(), mask in 1..=255u8) {
        let mut cluster = Cluster::new(3, seed);
        for _ in 0..150 {
            cluster.act();
        }
        if let Some((from, to, bytes)) = cluster.wire.pop() {
            let mut bytes = bytes.to_vec();
            let place = place.index(bytes.len());
            bytes[place] ^= mask;
            let machine = cluster.nodes.get_mut(&to).unwrap().machine.as_mut();
            machine.into_iter().for_each(|machine| drop(machine.step(from, &bytes)));
        }
    }
}
