use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// A machine with its clock and a shell that starts at once.
struct Agent {
    machine: Supervisor,
    now: Timestamp,
    nodes: u64,
    running: BTreeMap<u32, NodeId>,
    log: Vec<Action>,
    verdict: Option<Verdict>,
    /// What it exits with if the job is not finished.
    code: Option<ExitCode>,
}

impl Agent {
    fn new(config: Config) -> Self {
        let mut agent = Self {
            machine: Supervisor::new(config),
            now: Timestamp(1),
            nodes: 100,
            running: BTreeMap::new(),
            log: Vec::new(),
            verdict: None,
            code: None,
        };
        agent.act();
        agent
    }

    fn of(slots: u32) -> Self {
        Self::new(config(slots))
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            self.log.push(action);
            match action {
                Action::Start { slot, attempt } => {
                    self.nodes += 1;
                    self.running.insert(slot.0, NodeId(self.nodes));
                    self.machine.handle_started(self.now, slot, attempt, NodeId(self.nodes));
                }
                Action::Finished(verdict) => {
                    assert_eq!(self.verdict.replace(verdict), None);
                    self.code = Some(verdict.otherwise);
                }
                _ => {}
            }
        }
    }

    fn exit(&mut self, slot: u32, exit: Exit) {
        let node = self.running.remove(&slot).expect("runs");
        self.machine.handle_exit(self.now, node, exit);
        self.act();
    }

    fn code(&mut self, slot: u32, code: i32) {
        self.exit(slot, Exit::Code(code));
    }

    fn signal(&mut self, signal: Signal) {
        self.machine.handle_signal(self.now, signal);
        self.act();
    }

    fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.machine.handle_timeout(self.now);
        self.act();
    }

    /// Waits for the next timeout and says how long that took.
    fn wait_for_timeout(&mut self) -> Duration {
        let time = self.machine.poll_timeout().expect("waits for something").since(self.now);
        self.wait(time);
        time
    }

    fn count(&self, wanted: impl Fn(&Action) -> bool) -> usize {
        self.log.iter().filter(|action| wanted(action)).count()
    }

    fn starts(&self, slot: u32) -> usize {
        self.count(|action| matches!(action, Action::Start { slot: found, .. } if found.0 == slot))
    }
}

fn config(slots: u32) -> Config {
    Config::new(NonZeroU32::new(slots).unwrap())
}

/// The end of an agent whose only worker was never started.
fn finished(otherwise: ExitCode) -> Action {
    Action::Finished(Verdict { if_finished: ExitCode::Done, otherwise, has_done: false })
}

fn requeue() -> ExitCode {
    ExitCode::Requeue(RequeueCode::default())
}

#[test]
fn all_slots_start_at_once() {
    let agent = Agent::of(3);
    let starts: Vec<_> =
        (0..3).map(|slot| Action::Start { slot: Slot(slot), attempt: 0 }).collect();
    assert_eq!(agent.log, starts);
}

#[test]
fn the_agents_code_follows_from_its_workers_codes() {
    use Exit::{Code, Signal};
    // Budget 0, so that each exit is final.
    let table: &[(&[Exit], u8)] = &[
        (&[Code(0)], 0),
        (&[Code(0), Code(0)], 0),
        (&[Code(0), Code(1), Signal(9), Code(76), Code(75)], 75),
        (&[Signal(9), Code(0)], 137),
        (&[Code(0), Code(3)], 3),
        (&[Code(75), Code(75)], 75),
        (&[Code(75), Code(1), Signal(11), Code(76)], 75),
        (&[Code(64)], 64),
        (&[Code(76)], 76),
        (&[Code(78)], 78),
        (&[Code(69), Code(69)], 69),
        (&[Code(69), Code(76), Code(3)], 76),
        (&[Code(69), Code(3)], 3),
        (&[Code(77), Code(69)], 77),
        (&[Code(3), Code(4)], 3),
        (&[Signal(9)], 137),
        (&[Signal(15)], 143),
        (&[Signal(11), Code(1)], 139),
        (&[Code(70)], 70),
        (&[Code(255)], 255),
    ];
    for (exits, expected) in table {
        let mut agent = Agent::new(config(exits.len() as u32).with_max_restarts(0));
        for (exit, slot) in exits.iter().zip(0..) {
            assert_eq!(agent.code, None);
            agent.exit(slot, *exit);
        }
        assert_eq!(agent.code.map(ExitCode::code), Some(*expected), "{exits:?}");
        let verdict = agent.verdict.unwrap();
        let has_done = exits.contains(&Code(0));
        assert_eq!(verdict.has_done, has_done);
        assert!(!has_done || verdict.if_finished == ExitCode::Done, "{exits:?} {verdict:?}");
    }
}

#[test]
fn only_crashes_are_restarted() {
    for code in [0, 64, 69, 75, 76, 77, 78] {
        let mut agent = Agent::of(1);
        agent.code(0, code);
        assert_eq!(
            (agent.starts(0), agent.code.map(ExitCode::code)),
            (1, Some(code as u8)),
            "{code}"
        );
    }
    for exit in [
        Exit::Code(1),
        Exit::Code(70),
        Exit::Code(130),
        Exit::Code(143),
        Exit::Signal(9),
        Exit::Signal(15),
    ] {
        let mut agent = Agent::of(1);
        agent.exit(0, exit);
        assert_eq!((agent.starts(0), agent.code), (2, None), "{exit}");
    }
}

#[test]
fn a_death_is_reported_and_leaves_the_others_alone() {
    let mut agent = Agent::of(3);
    let node = agent.running[&1];
    agent.exit(1, Exit::Signal(9));
    assert!(agent.log.contains(&Action::Report {
        slot: Slot(1),
        node,
        exit: Exit::Signal(9),
        at: agent.now
    }));
    assert_eq!([0, 1, 2].map(|slot| agent.starts(slot)), [1, 2, 1]);
    assert_ne!(agent.running[&1], node, "a restarted worker is a new node");
}

#[test]
fn quick_crashes_wait_longer_each_time_until_a_healthy_run() {
    let mut agent = Agent::new(config(1).with_max_restarts(100));
    let mut waits = Vec::new();
    for _ in 0..9 {
        agent.code(0, 1);
        waits.push(if agent.running.is_empty() {
            agent.wait_for_timeout()
        } else {
            Duration::ZERO
        });
    }
    let expected =
        [0, 500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000].map(Duration::from_millis);
    assert_eq!(waits, expected);
    agent.wait(Duration::from_secs(30));
    agent.code(0, 1);
    assert_eq!(agent.starts(0), 11, "at once");
}

#[test]
fn a_spent_budget_ends_its_slot_only() {
    let mut agent = Agent::of(2);
    for _ in 0..3 {
        agent.code(0, 7);
        if agent.running.len() < 2 {
            agent.wait_for_timeout();
        }
    }
    agent.code(0, 7);
    assert_eq!((agent.starts(0), agent.starts(1), agent.code), (4, 1, None));
    assert_eq!(agent.machine.poll_timeout(), None);
    agent.code(1, 0);
    let Verdict { if_finished, otherwise, .. } = agent.verdict.unwrap();
    assert_eq!((if_finished, otherwise.code()), (ExitCode::Done, 7));
}

#[test]
fn the_budget_heals_by_one_for_each_healthy_stretch() {
    let mut agent = Agent::new(config(1).with_max_restarts(1).with_heal_after(60 * SECOND));
    for _ in 0..20 {
        agent.wait(60 * SECOND);
        agent.code(0, 1);
        assert_eq!(agent.code, None);
    }
    agent.wait(59 * SECOND);
    agent.code(0, 1);
    assert_eq!(agent.code, Some(ExitCode::Program(1)));
}

#[test]
fn a_heal_time_of_zero_never_heals() {
    let mut agent = Agent::new(config(1).with_max_restarts(1).with_heal_after(Duration::ZERO));
    agent.wait(3600 * SECOND);
    agent.code(0, 1);
    agent.wait(3600 * SECOND);
    agent.code(0, 1);
    assert_eq!(agent.code, Some(ExitCode::Program(1)));
}

#[test]
fn the_first_signal_asks_everybody_to_leave() {
    for signal in Signal::ALL {
        let mut agent = Agent::of(2);
        agent.signal(signal);
        for slot in [0, 1] {
            let node = agent.running[&slot];
            assert!(agent.log.contains(&Action::Forward {
                slot: Slot(slot),
                node,
                signal: Signal::Terminate
            }));
        }
        assert_eq!(agent.count(|action| *action == Action::KillAll), 0);
        agent.code(0, 75);
        agent.exit(1, Exit::Signal(9));
        assert_eq!((agent.starts(1), agent.code), (1, Some(requeue())), "{signal}");
    }
}

#[test]
fn a_worker_that_had_no_time_to_listen_to_term_has_left_in_good_order() {
    let mut agent = Agent::of(2);
    agent.signal(Signal::Terminate);
    agent.exit(0, Exit::Signal(15));
    agent.exit(1, Exit::Signal(15));
    assert_eq!(agent.code, Some(requeue()));

    // Another signal is a death, and so is a TERM that the agent did not send.
    let mut agent = Agent::of(1);
    agent.signal(Signal::Terminate);
    agent.exit(0, Exit::Signal(11));
    assert_eq!(agent.code.map(ExitCode::code), Some(139));
    let mut agent = Agent::new(config(1).with_max_restarts(0));
    agent.exit(0, Exit::Signal(15));
    assert_eq!(agent.code.map(ExitCode::code), Some(143));
}

#[test]
fn after_the_grace_period_who_is_left_is_killed() {
    for (signal, code) in [
        (Signal::Terminate, ExitCode::Terminated),
        (Signal::Interrupt, ExitCode::Interrupted),
        (Signal::User1, ExitCode::Terminated),
    ] {
        let mut agent = Agent::new(config(1).with_grace(7 * SECOND));
        agent.signal(signal);
        assert_eq!(agent.wait_for_timeout(), 7 * SECOND);
        assert_eq!(agent.count(|action| *action == Action::KillAll), 1);
        agent.exit(0, Exit::Signal(9));
        assert_eq!(agent.code, Some(code));
    }
}

#[test]
fn one_killed_at_the_end_of_grace_does_not_hide_those_who_left() {
    let mut agent = Agent::of(2);
    agent.signal(Signal::Terminate);
    agent.code(0, 75);
    agent.wait_for_timeout();
    agent.exit(1, Exit::Signal(9));
    assert_eq!(agent.code, Some(requeue()));
}

#[test]
fn the_second_signal_kills_at_once() {
    for (signal, code) in
        [(Signal::Terminate, ExitCode::Terminated), (Signal::Interrupt, ExitCode::Interrupted)]
    {
        let mut agent = Agent::of(2);
        agent.signal(Signal::User1);
        agent.code(0, 75);
        agent.signal(signal);
        agent.signal(signal);
        assert_eq!(agent.count(|action| *action == Action::KillAll), 1);
        agent.exit(1, Exit::Signal(9));
        assert_eq!(agent.code, Some(code));
    }
}

#[test]
fn a_job_finished_here_is_done_even_if_forced_to_end() {
    let mut agent = Agent::of(2);
    agent.code(0, 0);
    agent.signal(Signal::Interrupt);
    agent.signal(Signal::Interrupt);
    agent.exit(1, Exit::Signal(9));
    let Verdict { if_finished, otherwise, .. } = agent.verdict.unwrap();
    assert_eq!((if_finished, otherwise), (ExitCode::Done, ExitCode::Interrupted));
}

#[test]
fn processes_that_cannot_be_killed_do_not_hold_the_agent() {
    let mut agent = Agent::of(2);
    agent.signal(Signal::Terminate);
    agent.signal(Signal::Terminate);
    agent.exit(0, Exit::Signal(9));
    assert_eq!(agent.wait_for_timeout(), KILL_LIMIT);
    assert_eq!(agent.code, Some(ExitCode::Terminated));
}

#[test]
fn a_worker_that_waits_for_its_restart_has_left_already() {
    let mut agent = Agent::of(1);
    agent.code(0, 1);
    agent.code(0, 1);
    assert_eq!(agent.code, None);
    agent.signal(Signal::Terminate);
    assert_eq!(agent.code, Some(requeue()));
}

#[test]
fn a_start_under_way_is_cancelled_or_asked_to_leave() {
    let mut machine = Supervisor::new(config(2));
    let now = Timestamp(5);
    machine.handle_signal(now, Signal::Terminate);
    let actions: Vec<_> = std::iter::from_fn(|| machine.poll_action()).skip(2).collect();
    assert_eq!(actions, [0, 1].map(|slot| Action::Cancel { slot: Slot(slot), attempt: 0 }));
    machine.handle_cancelled(Slot(0), 0);
    machine.handle_started(now, Slot(1), 0, NodeId(9));
    let forward = Action::Forward { slot: Slot(1), node: NodeId(9), signal: Signal::Terminate };
    assert_eq!(machine.poll_action(), Some(forward));
    machine.handle_signal(now, Signal::Terminate);
    assert_eq!(machine.poll_action(), Some(Action::KillAll));
}

#[test]
fn a_worker_that_starts_after_the_kill_is_killed_too() {
    let mut machine = Supervisor::new(config(1));
    machine.handle_signal(Timestamp(5), Signal::Terminate);
    machine.handle_signal(Timestamp(5), Signal::Terminate);
    while machine.poll_action().is_some() {}
    machine.handle_started(Timestamp(6), Slot(0), 0, NodeId(9));
    assert_eq!(machine.poll_action(), Some(Action::KillAll));
}

#[test]
fn a_start_that_fails_counts_as_a_crash_unless_it_is_permanent() {
    let now = Timestamp(5);
    let fail = |machine: &mut Supervisor, failure| {
        while machine.poll_action().is_some() {}
        machine.handle_start_failed(now, Slot(0), 0, failure);
        machine.poll_action()
    };
    for (failure, expected) in [
        (StartFailure::Crash(Exit::Code(70)), Action::Start { slot: Slot(0), attempt: 1 }),
        (StartFailure::Crash(Exit::Code(69)), finished(ExitCode::Unavailable)),
        (StartFailure::Crash(Exit::Code(76)), finished(ExitCode::Incompatible)),
        (StartFailure::Permanent(ExitCode::Program(127)), finished(ExitCode::Program(127))),
    ] {
        assert_eq!(fail(&mut Supervisor::new(config(1)), failure), Some(expected), "{failure:?}");
    }
    let mut machine = Supervisor::new(config(1));
    machine.handle_signal(now, Signal::Terminate);
    assert_eq!(fail(&mut machine, StartFailure::Crash(Exit::Code(69))), Some(finished(requeue())));
}

#[test]
fn a_notice_shortens_the_time_to_leave_and_is_no_signal() {
    let mut agent = Agent::of(1);
    agent.machine.handle_notice(agent.now, 5 * SECOND);
    agent.act();
    assert_eq!(agent.count(|action| matches!(action, Action::Forward { .. })), 1);
    agent.signal(Signal::Terminate);
    assert_eq!(
        agent.count(|action| matches!(action, Action::Forward { .. } | Action::KillAll)),
        1,
        "asked once"
    );
    assert_eq!(agent.wait_for_timeout(), 5 * SECOND);
    assert_eq!(agent.count(|action| *action == Action::KillAll), 1);
}

#[test]
fn a_finished_job_restarts_nobody_and_is_done() {
    for (exit, code) in [
        (Exit::Signal(9), ExitCode::Done),
        (Exit::Signal(11), ExitCode::Done),
        (Exit::Code(0), ExitCode::Done),
        (Exit::Code(75), ExitCode::Done),
        (Exit::Code(3), ExitCode::Program(3)),
    ] {
        let mut agent = Agent::of(1);
        agent.machine.handle_released(agent.now, Release::Finished);
        assert_eq!(agent.machine.poll_timeout(), None, "a program may go on after its last step");
        agent.exit(0, exit);
        assert_eq!((agent.starts(0), agent.code), (1, Some(code)), "{exit}");
    }
}

#[test]
fn a_worker_that_ends_with_0_early_changes_nothing_for_the_others() {
    let mut agent = Agent::of(3);
    agent.code(0, 0);
    for _ in 0..2 {
        agent.exit(1, Exit::Signal(9));
    }
    assert!(agent.machine.poll_timeout().is_some(), "the second restart waits");
    agent.wait_for_timeout();
    assert_eq!((agent.starts(0), agent.starts(1), agent.starts(2)), (1, 3, 1));
    agent.exit(1, Exit::Signal(9));
    // Now the job is finished.
    agent.machine.handle_released(agent.now, Release::Finished);
    agent.act();
    assert_eq!((agent.machine.poll_timeout(), agent.starts(1)), (None, 3));
    agent.exit(2, Exit::Signal(9));
    assert_eq!((agent.starts(2), agent.code), (1, Some(ExitCode::Done)));
}

#[test]
fn a_signal_after_the_jobs_end_limits_what_comes_after() {
    let mut agent = Agent::of(1);
    agent.machine.handle_released(agent.now, Release::Finished);
    agent.signal(Signal::Terminate);
    assert_eq!(agent.count(|action| matches!(action, Action::Forward { .. })), 1);
    agent.wait_for_timeout();
    agent.exit(0, Exit::Signal(9));
    assert_eq!(agent.code, Some(ExitCode::Done));
}

#[test]
fn a_stopped_job_leaves_within_the_grace_period() {
    let mut agent = Agent::of(2);
    agent.machine.handle_released(agent.now, Release::Stopped);
    agent.act();
    assert_eq!(agent.count(|action| matches!(action, Action::Forward { .. })), 0);
    agent.code(0, 75);
    agent.wait_for_timeout();
    agent.exit(1, Exit::Signal(9));
    assert_eq!((agent.starts(1), agent.code), (1, Some(requeue())));
}

#[test]
fn what_comes_late_or_twice_is_dropped() {
    let mut agent = Agent::of(2);
    let node = agent.running[&0];
    agent.exit(0, Exit::Signal(9));
    let before = agent.log.len();
    agent.machine.handle_exit(agent.now, node, Exit::Code(0));
    agent.machine.handle_exit(agent.now, NodeId(1), Exit::Code(0));
    agent.machine.handle_started(agent.now, Slot(0), 0, node);
    agent.machine.handle_started(agent.now, Slot(9), 0, node);
    agent.machine.handle_start_failed(
        agent.now,
        Slot(0),
        1,
        StartFailure::Permanent(ExitCode::Usage),
    );
    agent.machine.handle_cancelled(Slot(1), 0);
    agent.act();
    assert_eq!((agent.log.len(), agent.machine.dropped()), (before, 6));
    agent.code(0, 0);
    agent.code(1, 0);
    agent.machine.handle_signal(agent.now, Signal::Terminate);
    agent.machine.handle_timeout(agent.now);
    agent.machine.handle_released(agent.now, Release::Finished);
    agent.machine.handle_notice(agent.now, SECOND);
    assert_eq!(agent.machine.poll_action(), None);
    assert_eq!(agent.machine.poll_timeout(), None);
}

#[derive(Clone, Debug)]
enum Input {
    Started(u32),
    StartFailed(u32, i32),
    Cancelled(u32),
    Exit(u32, Exit),
    Late(u64),
    Signal,
    Notice(u64),
    Released(bool),
    Pass(u64),
}

fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let code =
        prop_oneof![Just(0), Just(1), Just(64), Just(69), Just(75), Just(76), Just(77), 0..256];
    let exit = prop_oneof![code.clone().prop_map(Exit::Code), (1..65).prop_map(Exit::Signal)];
    let input = prop_oneof![
        8 => (0..4u32).prop_map(Input::Started),
        2 => (0..4u32, code).prop_map(|(slot, code)| Input::StartFailed(slot, code)),
        2 => (0..4u32).prop_map(Input::Cancelled),
        8 => (0..4u32, exit).prop_map(|(slot, exit)| Input::Exit(slot, exit)),
        1 => (0..40u64).prop_map(Input::Late),
        1 => Just(Input::Signal),
        1 => (0..60u64).prop_map(Input::Notice),
        1 => any::<bool>().prop_map(Input::Released),
        6 => (0..700u64).prop_map(Input::Pass),
    ];
    prop::collection::vec(input, 0..60)
}

/// What the shell of a machine under test knows.
#[derive(Default)]
struct Model {
    starting: BTreeMap<u32, u32>,
    running: BTreeMap<u32, NodeId>,
    nodes: u64,
    starts: BTreeMap<u32, u32>,
    is_leaving: bool,
    any_done: bool,
    code: Option<Verdict>,
}

impl Model {
    fn act(&mut self, machine: &mut Supervisor) {
        while let Some(action) = machine.poll_action() {
            assert_eq!(self.code, None, "nothing follows the end");
            match action {
                Action::Start { slot, attempt } => {
                    assert!(!self.is_leaving, "nothing starts when leaving");
                    assert!(!self.running.contains_key(&slot.0), "one process per slot");
                    assert_eq!(self.starting.insert(slot.0, attempt), None, "one start at a time");
                    *self.starts.entry(slot.0).or_default() += 1;
                }
                Action::Finished(verdict) => self.code = Some(verdict),
                _ => {}
            }
        }
    }

    fn started(&mut self, machine: &mut Supervisor, now: Timestamp, slot: u32) {
        if let Some(attempt) = self.starting.remove(&slot) {
            self.nodes += 1;
            self.running.insert(slot, NodeId(self.nodes));
            machine.handle_started(now, Slot(slot), attempt, NodeId(self.nodes));
        }
    }

    fn exit(&mut self, machine: &mut Supervisor, now: Timestamp, slot: u32, exit: Exit) {
        if let Some(node) = self.running.remove(&slot) {
            self.any_done |= exit == Exit::Code(0) && self.code.is_none();
            machine.handle_exit(now, node, exit);
        }
    }
}

proptest! {
    #[test]
    fn the_machine_always_ends_when_all_workers_have(slots in 1..4u32, inputs in inputs()) {
        // Healing is off, so that starts can be counted.
        let mut machine = Supervisor::new(config(slots).with_heal_after(Duration::ZERO));
        let (mut model, mut now) = (Model::default(), Timestamp(1));
        model.act(&mut machine);
        let mut finished = false;
        for input in inputs {
            match input {
                Input::Started(slot) => model.started(&mut machine, now, slot),
                Input::StartFailed(slot, code) => {
                    if let Some(attempt) = model.starting.remove(&slot) {
                        machine.handle_start_failed(now, Slot(slot), attempt, StartFailure::Crash(Exit::Code(code.max(1))));
                    }
                }
                Input::Cancelled(slot) => {
                    if model.is_leaving && let Some(attempt) = model.starting.remove(&slot) {
                        machine.handle_cancelled(Slot(slot), attempt);
                    }
                }
                Input::Exit(slot, exit) => model.exit(&mut machine, now, slot, exit),
                Input::Late(node) if !model.running.values().any(|found| found.0 == node) => {
                    machine.handle_exit(now, NodeId(node), Exit::Code(0));
                }
                Input::Late(_) => {}
                Input::Signal => { machine.handle_signal(now, Signal::Terminate); model.is_leaving = true; }
                Input::Notice(time) => { machine.handle_notice(now, Duration::from_secs(time)); model.is_leaving = true; }
                Input::Released(is_finished) => {
                    machine.handle_released(now, if is_finished { Release::Finished } else { Release::Stopped });
                    finished |= is_finished && model.code.is_none();
                    model.is_leaving = true;
                }
                Input::Pass(time) => { now = now + Duration::from_secs(time); machine.handle_timeout(now); }
            }
            model.act(&mut machine);
        }
        // From here everything that runs ends, and everything that starts runs.
        for _ in 0..20 {
            for slot in 0..slots {
                model.started(&mut machine, now, slot);
                model.act(&mut machine);
                model.exit(&mut machine, now, slot, Exit::Signal(9));
                model.act(&mut machine);
            }
            if let Some(next) = machine.poll_timeout() {
                now = now.max(next);
                machine.handle_timeout(now);
                model.act(&mut machine);
            }
        }
        let code = model.code.expect("it ended");
        prop_assert!(model.starts.values().all(|starts| *starts <= 4), "{:?}", model.starts);
        let Verdict { if_finished, otherwise, has_done } = code;
        prop_assert_eq!(has_done, model.any_done);
        prop_assert!(if_finished == ExitCode::Done || !model.any_done, "{if_finished}");
        prop_assert!(otherwise != ExitCode::Done || model.any_done || finished, "{otherwise}");
        prop_assert!(!finished || otherwise == if_finished, "{code:?}");
    }
}
