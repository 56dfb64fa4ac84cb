use std::time::Duration;

use proptest::prelude::*;
use types::{
    Address, Attempt, Block, Generation, Lineage, Origin, Start, Step, TreeNode, VirtualRanks,
};

use super::*;
use crate::command::{ReceiptRoot, WorldPlan};
use crate::job::Stage;
use crate::message::{Fingerprint, FoundCheckpoint, JobSpec};
use crate::peer::Role;

const TERM: Term = Term(3);

fn id(name: &str) -> JobId {
    JobId::new(name).unwrap()
}

fn join(job: &str, node: u64) -> Command {
    let join = Join {
        spec: JobSpec {
            job: id(job),
            virtual_ranks: VirtualRanks::new(4).unwrap(),
            min_members: 1,
            min_timeout: None,
            expected_members: 2,
            max_members: 4,
            total_steps: Some(Step(10)),
            checkpoint_every: Some(Duration::from_secs(1)),
            hang_timeout: None,
            pause_timeout: None,
            evens_out: true,
        },
        address: Address { socket: "127.0.0.1:1".parse().unwrap(), certificate: Digest::default() },
        host: "host".to_owned(),
        fingerprint: Fingerprint::default(),
        allow_mixed: false,
        found: None,
    };
    Command::Join { node: NodeId(node), join: Box::new(join) }
}

fn block(start: u32, level: u8) -> Block {
    TreeNode::new(start, level).unwrap()
}

fn plan(generation: u64, lineage: u64, members: &[(u64, Block)]) -> WorldPlan {
    WorldPlan {
        generation: Generation(generation),
        lineage: Lineage(lineage),
        from: None,
        held: false,
        start: None,
        members: members.iter().map(|(node, block)| (NodeId(*node), vec![*block])).collect(),
        followers: Vec::new(),
        evening: None,
    }
}

fn first(members: &[(u64, Block)]) -> WorldPlan {
    let start = Start { step: Step(0), origin: Origin::Initial, digest: None };
    WorldPlan { start: Some(start), ..plan(1, 1, members) }
}

struct Log {
    roster: Roster,
    index: u64,
}

impl Log {
    /// Nodes 201 and 202 train in world 1, which both entered.
    fn training() -> Self {
        let mut log = Self { roster: Roster::default(), index: 1 };
        log.done(join("demo", 201));
        log.done(join("demo", 202));
        log.form(first(&[(201, block(0, 1)), (202, block(2, 1))])).unwrap();
        log.done(Command::Enter { job: id("demo"), generation: Generation(1) });
        log
    }

    fn apply(&mut self, command: Command) -> Reply {
        self.index += 1;
        self.roster.apply(self.index, TERM, Entry { at_ms: 0, command }).reply
    }

    fn done(&mut self, command: Command) {
        assert_eq!(self.apply(command), Reply::Done);
    }

    fn stale(&mut self, command: Command) -> String {
        let before = self.roster.jobs().clone();
        let reply = self.apply(command);
        assert_eq!(before, *self.roster.jobs(), "a stale command changes nothing");
        let Reply::Stale { reason } = reply else { panic!("{reply:?}") };
        reason
    }

    fn form(&mut self, plan: WorldPlan) -> Result<(), String> {
        match self.apply(Command::FormWorld { job: id("demo"), plan, term: TERM }) {
            Reply::Done => Ok(()),
            reply => Err(format!("{reply:?}")),
        }
    }

    fn lose(&mut self, node: u64) {
        let nodes = vec![(NodeId(node), Cause::Silent)];
        self.done(Command::Lose { job: id("demo"), nodes, detail: String::new(), term: TERM });
    }

    fn job(&self) -> &Job {
        self.roster.job(&id("demo")).unwrap()
    }

    fn intend(&mut self, attempt: u64, step: u64) {
        self.done(Command::Intend {
            job: id("demo"),
            attempt: Attempt(attempt),
            step: Step(step),
            is_last: false,
            term: TERM,
        });
    }

    fn receipt(&mut self, attempt: u64, node: u64, state: &[u8]) -> Reply {
        let receipt =
            ReceiptRoot { lineage: Lineage(1), digest: Digest::of(state), root: Digest::default() };
        self.apply(Command::Receipt {
            job: id("demo"),
            attempt: Attempt(attempt),
            node: NodeId(node),
            receipt,
        })
    }

    fn commit(&mut self, attempt: u64) -> Reply {
        self.apply(Command::Commit {
            job: id("demo"),
            attempt: Attempt(attempt),
            manifest: "m".to_owned(),
            hash: Digest::default(),
        })
    }
}

#[test]
fn a_verdict_of_an_older_term_is_refused() {
    let mut log = Log::training();
    let nodes = vec![(NodeId(201), Cause::Silent)];
    let verdict = Command::Lose { job: id("demo"), nodes, detail: String::new(), term: Term(2) };
    assert!(log.stale(verdict).contains("term 2"));
    let next = plan(2, 1, &[(201, block(0, 2))]);
    log.stale(Command::FormWorld { job: id("demo"), plan: next, term: Term(2) });
}

#[test]
fn a_world_follows_the_last_and_keeps_an_heir() {
    let mut log = Log::training();
    let all = [(201, block(0, 1)), (202, block(2, 1))];
    assert!(log.form(plan(1, 1, &all)).is_err(), "a repeat");
    assert!(log.form(plan(3, 1, &all)).is_err(), "a gap");
    assert!(log.form(plan(2, 1, &[(201, block(0, 1))])).is_err(), "not all virtual ranks");
    assert!(log.form(plan(2, 1, &[(201, block(0, 1)), (209, block(2, 1))])).is_err(), "a stranger");
    let restart = WorldPlan { generation: Generation(2), lineage: Lineage(2), ..first(&all) };
    assert!(log.form(restart.clone()).is_err(), "heirs live");
    log.done(join("demo", 203));
    log.lose(201);
    assert!(log.form(plan(2, 1, &all)).is_err(), "a dead member");
    assert!(log.form(plan(2, 1, &[(203, block(0, 2))])).is_err(), "no heir");
    log.lose(202);
    let restart = WorldPlan { members: vec![(NodeId(203), vec![block(0, 2)])], ..restart };
    log.form(restart).unwrap();
    assert_eq!(log.job().lineage(), Lineage(2));
}

#[test]
fn a_planned_world_waits_for_the_former_to_be_entered() {
    let mut log = Log::training();
    let all = [(201, block(0, 1)), (202, block(2, 1))];
    let planned = |generation| WorldPlan { from: Some(Step(5)), ..plan(generation, 1, &all) };
    log.form(planned(2)).unwrap();
    assert!(log.form(planned(3)).is_err());
    log.done(Command::Enter { job: id("demo"), generation: Generation(2) });
    log.stale(Command::Enter { job: id("demo"), generation: Generation(2) });
    log.stale(Command::Enter { job: id("demo"), generation: Generation(1) });
    log.stale(Command::Enter { job: id("demo"), generation: Generation(3) });
    log.form(planned(3)).unwrap();
}

#[test]
fn a_world_that_nobody_may_have_entered_keeps_its_start() {
    let mut log = Log { roster: Roster::default(), index: 1 };
    log.done(join("demo", 201));
    log.done(join("demo", 202));
    log.form(first(&[(201, block(0, 1)), (202, block(2, 1))])).unwrap();
    log.lose(202);
    assert!(log.form(plan(2, 1, &[(201, block(0, 2))])).is_err(), "without the start");
    let next = WorldPlan { generation: Generation(2), ..first(&[(201, block(0, 2))]) };
    log.form(next).unwrap();
}

#[test]
fn a_lost_node_is_never_listed_again() {
    let mut log = Log::training();
    log.lose(202);
    log.done(join("demo", 202));
    assert!(!log.job().is_living(NodeId(202)));
    assert_eq!(log.job().gone(NodeId(202)), Some(Cause::Silent));
    assert_eq!(
        log.apply(Command::EnrollWorker { job: id("demo") }),
        Reply::Allocated { node: NodeId(203) }
    );
}

#[test]
fn a_node_works_for_one_job() {
    let mut log = Log::training();
    assert!(matches!(log.apply(join("other", 201)), Reply::Refused { code: 64, .. }));
    assert!(
        matches!(log.apply(join("other", 7)), Reply::Refused { code: 64, .. }),
        "a coordinator's id"
    );
}

#[test]
fn a_checkpoint_commits_once_with_all_receipts_of_one_state() {
    let mut log = Log::training();
    log.intend(1, 4);
    assert_eq!(log.receipt(1, 201, b"a"), Reply::Done);
    assert!(matches!(log.receipt(1, 201, b"a"), Reply::Stale { .. }), "twice");
    assert!(matches!(log.receipt(1, 209, b"a"), Reply::Stale { .. }), "a stranger's");
    assert!(matches!(log.commit(1), Reply::Stale { .. }), "a receipt is missing");
    log.receipt(1, 202, b"b");
    assert!(matches!(log.commit(1), Reply::Stale { .. }), "two states");
    log.done(Command::Abandon { job: id("demo"), attempt: Attempt(1), reason: "x".to_owned() });
    log.intend(2, 4);
    log.receipt(2, 201, b"a");
    log.receipt(2, 202, b"a");
    assert_eq!(log.commit(2), Reply::Done);
    assert!(matches!(log.commit(2), Reply::Stale { .. }), "twice");
    let again = Command::Intend {
        job: id("demo"),
        attempt: Attempt(3),
        step: Step(4),
        is_last: false,
        term: TERM,
    };
    assert!(log.stale(again).contains("not newer"));
}

#[test]
fn an_ended_lineage_commits_nothing() {
    let mut log = Log::training();
    log.intend(1, 4);
    log.receipt(1, 201, b"a");
    log.receipt(1, 202, b"a");
    log.done(join("demo", 203));
    // Their receipts are in, so their deaths end nothing; the restart does.
    log.lose(202);
    assert!(log.job().intent().is_some());
    log.lose(201);
    assert!(log.job().intent().is_none(), "the writer is out");
    let members = vec![(NodeId(203), vec![block(0, 2)])];
    log.form(WorldPlan { generation: Generation(2), lineage: Lineage(2), members, ..first(&[]) })
        .unwrap();
    assert!(matches!(log.commit(1), Reply::Stale { .. }));
    let finish = Command::Finish {
        job: id("demo"),
        lineage: Lineage(1),
        digest: Digest::default(),
        term: TERM,
    };
    log.stale(finish);
}

#[test]
fn finished_needs_the_last_checkpoint() {
    let mut log = Log::training();
    let finish = || Command::Finish {
        job: id("demo"),
        lineage: Lineage(1),
        digest: Digest::default(),
        term: TERM,
    };
    assert!(log.stale(finish()).contains("no checkpoint"));
    log.intend(1, 10);
    log.receipt(1, 201, b"a");
    log.receipt(1, 202, b"a");
    log.commit(1);
    log.done(finish());
    assert_eq!(log.job().stage(), Stage::Finished);
    assert!(log.form(plan(2, 1, &[(201, block(0, 2))])).is_err());
}

#[test]
fn a_restart_begins_at_what_joiners_found_if_the_log_knows_no_checkpoint() {
    let mut log = Log { roster: Roster::default(), index: 1 };
    for (node, step) in [(201, 30), (202, 70), (203, 50)] {
        let Command::Join { node, mut join } = join("demo", node) else { unreachable!() };
        let manifest = format!("m{step}");
        let (hash, digest) = (Digest::default(), Digest::of(b"s"));
        join.found =
            Some(FoundCheckpoint { lineage: Lineage(4), step: Step(step), manifest, hash, digest });
        log.done(Command::Join { node, join });
    }
    let (lineage, start) = log.job().restart(&[NodeId(201), NodeId(202), NodeId(203)]);
    assert_eq!((lineage, start.step, start.digest), (Lineage(5), Step(70), Some(Digest::of(b"s"))));
}

#[test]
fn an_image_is_the_whole_roster() {
    let mut log = Log::training();
    log.intend(1, 4);
    let copy = Roster::from_image(&log.roster.to_image()).unwrap();
    assert_eq!(copy, log.roster);
    assert_eq!(copy.digest(), log.roster.digest());
    assert!(Roster::from_image(b"nonsense").is_err());
}

#[test]
fn events_come_in_pages_that_do_not_split_an_entry() {
    let log = Log::training();
    let (page, next) = log.roster.events(None, 0, 2);
    assert_eq!(page.iter().map(|e| e.kind.as_str()).collect::<Vec<_>>(), ["joined", "joined"]);
    let (page, next) = log.roster.events(Some(&id("demo")), next, 100);
    assert_eq!(page.iter().map(|e| e.kind.as_str()).collect::<Vec<_>>(), ["world", "entered"]);
    assert_eq!(log.roster.events(None, next, 100), (vec![], next));
}

fn command() -> impl Strategy<Value = Command> {
    let node = 199u64..206;
    let job = prop_oneof![Just(id("demo")), Just(id("other"))];
    let term = (2u64..4).prop_map(Term);
    let members = prop::collection::vec((node.clone(), (0u32..5, 0u8..3)), 0..4);
    let members = members.prop_map(|all| {
        let member = |(node, (start, level)): (u64, (u32, u8))| {
            (NodeId(node), vec![TreeNode::new(start & !((1 << level) - 1), level).unwrap()])
        };
        all.into_iter().map(member).collect::<Vec<_>>()
    });
    let even = prop::collection::btree_set(node.clone(), 1..3).prop_map(|nodes| {
        let level = if nodes.len() == 1 { 2 } else { 1 };
        let place = |(i, node): (usize, u64)| {
            (NodeId(node), vec![block(u32::try_from(i).unwrap() * 2, level)])
        };
        nodes.into_iter().enumerate().map(place).collect::<Vec<_>>()
    });
    let start =
        prop::option::of(Just(Start { step: Step(0), origin: Origin::Initial, digest: None }));
    let from = prop::option::of((0u64..20).prop_map(Step));
    let plan =
        (1u64..12, 0u64..6, from, any::<bool>(), start, prop_oneof![members, even.clone(), even]);
    let plan = plan.prop_map(|(generation, lineage, from, held, start, members)| WorldPlan {
        generation: Generation(generation),
        lineage: Lineage(lineage),
        from,
        held,
        start,
        members,
        followers: vec![],
        evening: None,
    });
    let attempt = (0u64..8).prop_map(Attempt);
    let lineage = (0u64..4).prop_map(Lineage);
    let digest = prop_oneof![Just(Digest::of(b"a")), Just(Digest::of(b"b"))];
    prop_oneof![
        6 => (node.clone(), prop_oneof![Just("demo"), Just("other")]).prop_map(|(n, j)| join(j, n)),
        8 => (job.clone(), plan, term.clone()).prop_map(|(job, plan, term)| Command::FormWorld { job, plan, term }),
        4 => (job.clone(), 0u64..12).prop_map(|(job, g)| Command::Enter { job, generation: Generation(g) }),
        3 => (job.clone(), node.clone(), term.clone()).prop_map(|(job, n, term)| Command::Lose {
            job, nodes: vec![(NodeId(n), Cause::Orphaned)], detail: String::new(), term,
        }),
        1 => (job.clone(), node.clone()).prop_map(|(job, n)| Command::Drain {
            job, nodes: vec![NodeId(n)], reason: String::new(),
        }),
        1 => (job.clone(), node.clone(), term.clone()).prop_map(|(job, n, term)| Command::Leave {
            job, nodes: vec![NodeId(n)], term,
        }),
        1 => (job.clone(), term.clone()).prop_map(|(job, term)| Command::Stop { job, term }),
        3 => (job.clone(), attempt.clone(), 0u64..12, any::<bool>(), term.clone()).prop_map(
            |(job, attempt, step, is_last, term)| Command::Intend { job, attempt, step: Step(step), is_last, term }),
        6 => (job.clone(), attempt.clone(), node, lineage.clone(), digest.clone()).prop_map(
            |(job, attempt, n, lineage, digest)| Command::Receipt {
                job, attempt, node: NodeId(n), receipt: ReceiptRoot { lineage, digest, root: Digest::default() },
            }),
        3 => (job.clone(), attempt.clone()).prop_map(|(job, attempt)| Command::Commit {
            job, attempt, manifest: "m".to_owned(), hash: Digest::default(),
        }),
        1 => (job.clone(), attempt).prop_map(|(job, attempt)| Command::Abandon { job, attempt, reason: String::new() }),
        1 => (job, lineage, digest, term).prop_map(|(job, lineage, digest, term)| Command::Finish {
            job, lineage, digest, term,
        }),
        1 => Just(Command::Lead { coordinator: 1 }),
        1 => (0u8..3, 0u32..3).prop_map(|(token, uses)| Command::UseToken {
            token: [token; 16], uses, job: None, role: Role::Agent,
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn any_stream_of_commands_keeps_the_promises(commands in prop::collection::vec(command(), 0..150)) {
        let (mut roster, mut twin) = (Roster::default(), Roster::default());
        let mut allocated = std::collections::BTreeSet::new();
        for (place, command) in commands.into_iter().enumerate() {
            let index = place as u64 + 2;
            let before = roster.jobs().clone();
            let entry = Entry { at_ms: 0, command };
            let applied = roster.apply(index, TERM, entry.clone());
            prop_assert_eq!(&applied, &twin.apply(index, TERM, entry.clone()));
            // Said twice, it changes nothing.
            let digest = roster.digest();
            roster.apply(index, TERM, entry);
            prop_assert_eq!(digest, roster.digest());
            prop_assert_eq!(digest, twin.digest());
            if let Reply::Allocated { node } = applied.reply {
                prop_assert!(allocated.insert(node), "a node id is given away twice");
            } else if matches!(applied.reply, Reply::Stale { .. } | Reply::Refused { .. }) {
                prop_assert_eq!(&before, roster.jobs());
            }
            for (id, job) in roster.jobs() {
                let Some(former) = before.get(id) else { continue };
                prop_assert!(job.generation().0 - former.generation().0 <= 1);
                prop_assert!(job.lineage() >= former.lineage());
                prop_assert!(job.attempt() >= former.attempt());
                let newest = |job: &Job| job.committed().map(|c| (c.lineage, c.step));
                prop_assert!(newest(job) >= newest(former));
                prop_assert!(former.gone(NodeId(201)).is_none() || !job.is_living(NodeId(201)));
                if let Some(world) = job.world() {
                    world.check().map_err(TestCaseError::fail)?;
                }
                if job.generation() > former.generation() && job.lineage() == former.lineage() {
                    let world = job.world().unwrap();
                    prop_assert!(former.heirs().iter().any(|heir| world.has_member(*heir)));
                }
            }
        }
    }
}
