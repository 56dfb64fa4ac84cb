use std::collections::BTreeMap;

use types::{
    Address, Block, Digest, Generation, JobId, Lineage, Origin, Start, Step, Term, TreeNode,
    VirtualRanks,
};

use super::*;
use crate::command::{Command, Entry, WorldPlan};
use crate::message::{Fingerprint, JobSpec, Join};
use crate::roster::{Reply, Roster};

/// Four members train in world 1; the leader looks each 100 ms.
struct Watch {
    roster: Roster,
    progress: Progress,
    now: Timestamp,
    beats: BTreeMap<u64, Heartbeat>,
    /// Whose heartbeats are always new.
    busy: Vec<u64>,
    verdicts: Vec<(f64, Stalled)>,
}

fn id() -> JobId {
    JobId::new("demo").unwrap()
}

impl Watch {
    fn new(change: impl Fn(&mut JobSpec)) -> Self {
        let mut spec = JobSpec {
            job: id(),
            virtual_ranks: VirtualRanks::new(4).unwrap(),
            min_members: 1,
            min_timeout: None,
            expected_members: 4,
            max_members: 4,
            total_steps: None,
            checkpoint_every: None,
            hang_timeout: None,
            pause_timeout: None,
            evens_out: true,
        };
        change(&mut spec);
        let mut roster = Roster::default();
        let mut index = 0;
        let mut apply = |command| {
            index += 1;
            let reply = roster.apply(index, Term(1), Entry { at_ms: 0, command }).reply;
            assert_eq!(reply, Reply::Done);
        };
        for node in MEMBERS {
            let join = Join {
                spec: spec.clone(),
                address: Address {
                    socket: "127.0.0.1:1".parse().unwrap(),
                    certificate: Digest::of(&node.to_le_bytes()),
                },
                host: "host".to_owned(),
                fingerprint: Fingerprint::default(),
                allow_mixed: false,
                found: None,
            };
            apply(Command::Join { node: NodeId(node), join: Box::new(join) });
        }
        let block = |rank: usize| -> Vec<Block> {
            vec![TreeNode::new(u32::try_from(rank).unwrap(), 0).unwrap()]
        };
        let members = MEMBERS.iter().enumerate().map(|(r, n)| (NodeId(*n), block(r))).collect();
        let plan = WorldPlan {
            generation: Generation(1),
            lineage: Lineage(1),
            from: None,
            held: false,
            start: Some(Start { step: Step(0), origin: Origin::Initial, digest: None }),
            members,
            followers: Vec::new(),
            evening: None,
        };
        apply(Command::FormWorld { job: id(), plan, term: Term(1) });
        let timing = Timing::new(Duration::from_secs(1)).unwrap();
        let waiting =
            Heartbeat { longest_leaf: Some(Duration::from_millis(100)), ..Heartbeat::default() };
        Self {
            roster,
            progress: Progress::new(timing, Timestamp(0)),
            now: Timestamp(0),
            beats: MEMBERS.iter().map(|node| (*node, waiting.clone())).collect(),
            busy: Vec::new(),
            verdicts: Vec::new(),
        }
    }

    fn beat(&mut self, node: u64) -> &mut Heartbeat {
        self.beats.get_mut(&node).unwrap()
    }

    /// All members have this turn from now on.
    fn all(&mut self, turn: Turn) {
        for node in MEMBERS {
            (self.beat(node).turn, self.beat(node).progress) = (turn, self.now.0);
        }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds * 10 {
            self.now = self.now + Duration::from_millis(100);
            for node in MEMBERS {
                let is_busy = self.busy.contains(&node);
                let beat = self.beats.get_mut(&node).unwrap();
                beat.progress += u64::from(is_busy);
                beat.pulse += u64::from(!HALTED.contains(&beat.pulse));
                self.progress.handle_heartbeat(self.now, NodeId(node), beat);
            }
            let stalled = self.progress.evaluate(self.now, self.roster.job(&id()).unwrap());
            let at = Duration::from_nanos(self.now.0).as_secs_f64();
            self.verdicts.extend(stalled.into_iter().map(|s| (at, s)));
        }
    }

    /// The nodes found so far, and when.
    fn found(&mut self) -> Vec<(u64, u64)> {
        let mut first = BTreeMap::new();
        for (at, stalled) in &self.verdicts {
            first.entry(stalled.node.0).or_insert(at.floor() as u64);
        }
        first.into_iter().collect()
    }
}

const MEMBERS: [u64; 4] = [201, 202, 203, 204];
/// A pulse that no longer grows.
const HALTED: [u64; 1] = [u64::MAX];

#[test]
fn a_member_that_keeps_others_waiting_in_a_leaf_is_hung() {
    let mut watch = Watch::new(|_| {});
    watch.beat(203).turn = Turn::Leaf;
    watch.run(29);
    assert_eq!(watch.found(), []);
    watch.run(3);
    assert_eq!(watch.found(), [(203, 30)]);
    let (_, stalled) = &watch.verdicts[0];
    assert_eq!(stalled.cause, Cause::Hung);
    assert!(stalled.detail.contains("longest leaf so far took 0.1 s"), "{}", stalled.detail);
}

#[test]
fn the_deadline_follows_the_longest_leaf_of_all_members() {
    let mut watch = Watch::new(|_| {});
    watch.beat(203).turn = Turn::Leaf;
    watch.beat(201).longest_leaf = Some(Duration::from_secs(20));
    watch.run(155);
    assert_eq!(watch.found(), [], "8 times 20 s are not over");
    watch.run(10);
    assert_eq!(watch.found(), [(203, 160)]);
}

#[test]
fn a_slow_member_that_gets_on_is_not_hung() {
    let mut watch = Watch::new(|_| {});
    watch.beat(203).turn = Turn::Leaf;
    for _ in 0..20 {
        watch.run(25);
        watch.beat(203).progress += 1;
    }
    assert_eq!(watch.found(), []);
}

#[test]
fn where_all_are_slow_together_nobody_is_hung() {
    let mut watch = Watch::new(|_| {});
    watch.all(Turn::Leaf);
    watch.run(500);
    assert_eq!(watch.found(), []);
    // One gets on, and waits: the others have as long again as it then waits.
    watch.beat(201).turn = Turn::Waiting;
    watch.run(28);
    assert_eq!(watch.found(), []);
}

#[test]
fn evaluation_and_first_leaves_have_the_pause_timeout() {
    let mut watch = Watch::new(|spec| spec.pause_timeout = Some(Duration::from_secs(120)));
    watch.beat(202).turn = Turn::Between;
    (watch.beat(203).turn, watch.beat(203).longest_leaf) = (Turn::Leaf, None);
    watch.run(118);
    assert_eq!(watch.found(), []);
    watch.run(5);
    assert_eq!(watch.found(), [(202, 120), (203, 120)]);
}

#[test]
fn a_hang_timeout_of_the_job_is_taken() {
    let mut watch = Watch::new(|spec| spec.hang_timeout = Some(Duration::from_secs(5)));
    watch.beat(204).turn = Turn::Leaf;
    watch.run(4);
    assert_eq!(watch.found(), []);
    watch.run(3);
    assert_eq!(watch.found(), [(204, 5)]);
}

#[test]
fn an_engine_that_stands_still_is_found_although_its_program_waits() {
    let mut watch = Watch::new(|_| {});
    watch.beat(202).pulse = u64::MAX;
    watch.run(32);
    assert_eq!(watch.found(), [(202, 30)]);
    assert!(watch.verdicts[0].1.detail.contains("engine"));
}

#[test]
fn a_pause_of_the_leader_itself_does_not_count() {
    let mut watch = Watch::new(|_| {});
    watch.beat(203).turn = Turn::Leaf;
    watch.run(20);
    watch.now = watch.now + Duration::from_secs(60);
    watch.run(8);
    assert_eq!(watch.found(), []);
    watch.run(4);
    assert_eq!(watch.found().len(), 1);
}

#[test]
fn of_two_that_miss_each_other_the_higher_rank_is_out() {
    let mut watch = Watch::new(|_| {});
    watch.beat(202).cut_off = vec![NodeId(203)];
    watch.beat(203).cut_off = vec![NodeId(202)];
    watch.run(2);
    assert_eq!(watch.found(), [(203, 0)]);
    assert_eq!(watch.verdicts[0].1.cause, Cause::CutOff);
}

#[test]
fn who_is_missed_by_most_is_out_whatever_its_rank() {
    let mut watch = Watch::new(|_| {});
    watch.beat(201).cut_off = MEMBERS[1..].iter().map(|n| NodeId(*n)).collect();
    for node in &MEMBERS[1..] {
        watch.beat(*node).cut_off = vec![NodeId(201)];
    }
    watch.run(2);
    assert_eq!(watch.found(), [(201, 0)]);
}

#[test]
fn one_members_word_evicts_nobody() {
    let mut watch = Watch::new(|_| {});
    watch.beat(202).cut_off = vec![NodeId(201), NodeId(203), NodeId(204)];
    watch.run(20);
    assert_eq!(watch.found(), []);
    // Two of them agree on a third.
    watch.beat(204).cut_off = vec![NodeId(201)];
    watch.run(2);
    assert_eq!(watch.found(), [(201, 20)]);
}

#[test]
fn links_do_not_matter_while_steps_go_on() {
    let mut watch = Watch::new(|_| {});
    watch.beat(202).cut_off = vec![NodeId(203)];
    watch.beat(203).cut_off = vec![NodeId(202)];
    watch.busy = vec![204];
    watch.run(10);
    assert_eq!(watch.found(), []);
}
