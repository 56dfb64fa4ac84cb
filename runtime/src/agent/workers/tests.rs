use std::future::pending;
use std::io::Write;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::super::output::{self, Console};
use super::super::spawn::tests::await_end;
use super::*;

/// Long enough for any machine; only a failure waits so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Numbers the nodes, and fails as often as it is told to.
#[derive(Default)]
struct Enroll {
    nodes: AtomicU64,
    failures: Mutex<Vec<ExitCode>>,
}

impl Prepare for Enroll {
    async fn prepare(&self, slot: Slot, attempt: u32) -> Result<Prepared, PrepareError> {
        if let Some(code) = self.failures.lock().unwrap().pop() {
            return Err(PrepareError { code, reason: format!("attempt {attempt} refused") });
        }
        let node = NodeId(1 + self.nodes.fetch_add(1, Ordering::Relaxed));
        Ok(Prepared {
            node,
            environment: BTreeMap::from([(
                "RIPSTOP_TEST_NODE".to_owned(),
                format!("{node}@{slot}"),
            )]),
        })
    }
}

/// Hands each write on; the output writes whole lines at once.
struct Screen(mpsc::UnboundedSender<String>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in String::from_utf8_lossy(bytes).lines() {
            self.0.send(line.to_owned()).map_err(io::Error::other)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An agent that runs.
struct Agent {
    commands: mpsc::Sender<Command>,
    events: mpsc::UnboundedReceiver<Event>,
    lines: mpsc::UnboundedReceiver<String>,
    run: JoinHandle<Verdict>,
}

impl Agent {
    fn start(config: Config, prepare: impl Prepare) -> Self {
        let (events, told) = mpsc::unbounded_channel();
        let (shown, lines) = mpsc::unbounded_channel();
        let console =
            Console { stdout: Box::new(Screen(shown.clone())), stderr: Box::new(Screen(shown)) };
        let output = Output::start(output::Config::new(), console).unwrap();
        let (commands, inbox) = mpsc::channel(8);
        let workers = Workers::new(config, output, prepare, events).unwrap();
        Self { commands, events: told, lines, run: tokio::spawn(workers.run(inbox)) }
    }

    async fn line(&mut self) -> String {
        timeout(LIMIT, self.lines.recv()).await.expect("a line").expect("a line")
    }

    async fn event(&mut self) -> Event {
        timeout(LIMIT, self.events.recv()).await.expect("an event").expect("an event")
    }

    async fn command(&self, command: Command) {
        self.commands.send(command).await.unwrap();
    }

    async fn verdict(self) -> Verdict {
        timeout(LIMIT, self.run).await.expect("ends").unwrap()
    }

    async fn code(self) -> ExitCode {
        self.verdict().await.otherwise
    }

    /// The code, and all events and lines that are left.
    async fn end(mut self) -> (ExitCode, Vec<Event>, Vec<String>) {
        let code = timeout(LIMIT, &mut self.run).await.expect("ends").unwrap().otherwise;
        let events = std::iter::from_fn(|| self.events.try_recv().ok()).collect();
        let lines = std::iter::from_fn(|| self.lines.try_recv().ok()).collect();
        (code, events, lines)
    }
}

fn config(slots: u32, script: &str) -> Config {
    Config {
        // Nobody is killed because a loaded machine is slow.
        supervisor: supervisor::Config::new(NonZeroU32::new(slots).unwrap()).with_grace(LIMIT),
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into()],
        directory: None,
        group: ProcessGroup::Own,
        placement: Placement {
            local_rank: 0,
            local_world_size: 0,
            group_rank: 1,
            group_world_size: 2,
            role: "default".to_owned(),
            master_address: "127.0.0.1".to_owned(),
            master_port: 29500,
            run: "test".to_owned(),
            restarts: 0,
            max_restarts: 0,
            error_file: None,
        },
        environment: BTreeMap::from([("RIPSTOP_TEST".to_owned(), "all".to_owned())]),
        inherited: BTreeSet::new(),
    }
}

fn with_restarts(config: Config, max_restarts: u32) -> Config {
    Config { supervisor: config.supervisor.with_max_restarts(max_restarts), ..config }
}

/// Waits for TERM and leaves in good order.
const LEAVES: &str = "trap 'kill -KILL $!; exit 75' TERM; sleep 100000 & echo ready; wait";

/// Hears no TERM.
const DEAF: &str = "trap '' TERM; echo ready; while :; do sleep 1; done";

#[tokio::test]
async fn workers_find_their_environment_and_finish() {
    let script = "echo $LOCAL_RANK/$LOCAL_WORLD_SIZE $RANK/$WORLD_SIZE $RIPSTOP_TEST $RIPSTOP_TEST_NODE \
                  $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS";
    let (code, events, lines) = Agent::start(config(1, script), Enroll::default()).end().await;
    assert_eq!(code, ExitCode::Done);
    assert_eq!(lines, ["[w0] 0/1 1/2 all 1@0 0/3"]);
    let [Event::Started { node, pid, .. }, Event::Exited { node: ended, exit, .. }] = events[..]
    else {
        panic!("{events:?}")
    };
    assert!(pid > 0);
    assert_eq!((node, ended, exit), (NodeId(1), NodeId(1), Exit::Code(0)));
}

#[tokio::test]
async fn a_killed_worker_comes_back_as_a_new_node_and_the_others_go_on() {
    let script = r#"
        if [ "$LOCAL_RANK$TORCHELASTIC_RESTART_COUNT" = 10 ]; then echo dying; kill -KILL $$; fi
        if [ "$LOCAL_RANK" = 1 ]; then exit 0; fi
    "#
    .to_owned()
        + LEAVES;
    let mut agent = Agent::start(config(2, &script), Enroll::default());
    let (mut started, mut exited) = (Vec::new(), Vec::new());
    while exited.len() < 2 {
        match agent.event().await {
            Event::Started { slot, attempt, node, .. } => started.push((slot.0, attempt, node)),
            Event::Exited { slot, node, exit, .. } => exited.push((slot.0, node, exit)),
            event => panic!("{event:?}"),
        }
    }
    let node = |slot, attempt| {
        started.iter().find(|start| (start.0, start.1) == (slot, attempt)).unwrap().2
    };
    assert_eq!(exited, [(1, node(1, 0), Exit::Signal(9)), (1, node(1, 1), Exit::Code(0))]);
    assert_eq!(started.iter().filter(|start| start.0 == 0).count(), 1);
    while agent.line().await != "[w0] ready" {}
    agent.command(Command::Signal(Signal::Terminate)).await;
    let verdict = agent.verdict().await;
    assert_eq!((verdict.if_finished, verdict.has_done), (ExitCode::Done, true));
    assert_eq!(verdict.otherwise.code(), 75, "who ended with 0 may have left early");
}

#[tokio::test]
async fn the_end_of_the_budget_is_the_programs_own_code() {
    for (script, code) in [("exit 3", 3), ("kill -SEGV $$", 139)] {
        let (found, events, _) =
            Agent::start(with_restarts(config(1, script), 1), Enroll::default()).end().await;
        assert_eq!(found.code(), code);
        let starts = events.iter().filter(|event| matches!(event, Event::Started { .. })).count();
        assert_eq!(starts, 2, "{script}");
    }
}

#[tokio::test]
async fn a_death_is_noticed_while_others_hold_its_output_open() {
    let config = Config {
        group: ProcessGroup::Shared,
        ..with_restarts(config(1, "sleep 100000 & echo $!; kill -KILL $$"), 0)
    };
    let mut agent = Agent::start(config, Enroll::default());
    let line = agent.line().await;
    let (code, ..) = agent.end().await;
    assert_eq!(code.code(), 137);
    let left = line
        .strip_prefix("[w0] ")
        .and_then(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        .unwrap();
    rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_signal_is_passed_on_and_leaving_is_code_75() {
    for group in [ProcessGroup::Own, ProcessGroup::Shared] {
        let mut agent = Agent::start(Config { group, ..config(2, LEAVES) }, Enroll::default());
        for _ in 0..2 {
            assert!(agent.line().await.ends_with("ready"));
        }
        agent.command(Command::Signal(Signal::User1)).await;
        let (code, events, _) = agent.end().await;
        assert_eq!(code.code(), 75);
        assert_eq!(
            events.iter().filter(|event| matches!(event, Event::Draining { .. })).count(),
            2
        );
    }
}

#[tokio::test]
async fn a_second_signal_kills() {
    for (signal, code) in [(Signal::Interrupt, 130), (Signal::Terminate, 143)] {
        let mut agent = Agent::start(config(1, DEAF), Enroll::default());
        assert_eq!(agent.line().await, "[w0] ready");
        agent.command(Command::Signal(Signal::Terminate)).await;
        while !matches!(agent.event().await, Event::Draining { .. }) {}
        agent.command(Command::Signal(signal)).await;
        let (found, events, _) = agent.end().await;
        assert_eq!(found.code(), code);
        assert!(matches!(events[..], [Event::Exited { exit: Exit::Signal(9), .. }]), "{events:?}");
    }
}

#[tokio::test]
async fn who_does_not_leave_in_time_is_killed() {
    let config = config(1, DEAF);
    let supervisor = config.supervisor.clone().with_grace(Duration::from_millis(1));
    let mut agent = Agent::start(Config { supervisor, ..config }, Enroll::default());
    assert_eq!(agent.line().await, "[w0] ready");
    agent.command(Command::Notice { time_left: LIMIT }).await;
    assert_eq!(agent.code().await.code(), 143);
}

#[tokio::test]
async fn a_start_that_fails_is_tried_again_within_the_budget() {
    let enroll = Enroll { failures: Mutex::new(vec![ExitCode::Bug]), ..Enroll::default() };
    let (code, events, _) = Agent::start(with_restarts(config(1, "exit 0"), 1), enroll).end().await;
    assert_eq!(code, ExitCode::Done);
    assert!(matches!(events[0], Event::StartFailed { attempt: 0, .. }), "{events:?}");

    let enroll = Enroll { failures: Mutex::new(vec![ExitCode::Bug; 5]), ..Enroll::default() };
    assert_eq!(
        Agent::start(with_restarts(config(1, "exit 0"), 1), enroll).code().await,
        ExitCode::Bug
    );

    let enroll = Enroll { failures: Mutex::new(vec![ExitCode::Incompatible]), ..Enroll::default() };
    assert_eq!(Agent::start(config(1, "exit 0"), enroll).code().await, ExitCode::Incompatible);
}

#[tokio::test]
async fn a_program_that_does_not_exist_ends_the_agent_at_once() {
    let config = Config { program: "/no/such/program".into(), ..config(1, "") };
    let (code, events, _) = Agent::start(config, Enroll::default()).end().await;
    assert_eq!(code.code(), 127);
    assert!(
        matches!(&events[..], [Event::StartFailed { reason, .. }] if reason.contains("/no/such/program"))
    );
}

#[tokio::test]
async fn a_signal_ends_a_start_that_does_not_come_forward() {
    struct Never;
    impl Prepare for Never {
        async fn prepare(&self, _: Slot, _: u32) -> Result<Prepared, PrepareError> {
            pending().await
        }
    }
    let agent = Agent::start(config(2, ""), Never);
    agent.command(Command::Signal(Signal::Terminate)).await;
    assert_eq!(agent.code().await.code(), 75);
}

#[tokio::test]
async fn one_worker_can_be_killed_and_comes_back() {
    let mut agent = Agent::start(config(1, LEAVES), Enroll::default());
    assert_eq!(agent.line().await, "[w0] ready");
    agent.command(Command::Kill { node: NodeId(99) }).await;
    agent.command(Command::Kill { node: NodeId(1) }).await;
    while !matches!(agent.event().await, Event::Started { node: NodeId(2), attempt: 1, .. }) {}
    assert_eq!(agent.line().await, "[w0] ready");
    agent.command(Command::Signal(Signal::Terminate)).await;
    assert_eq!(agent.code().await.code(), 75);
}

#[tokio::test]
async fn a_finished_job_is_done_even_if_the_last_worker_dies() {
    let mut agent = Agent::start(config(1, LEAVES), Enroll::default());
    assert_eq!(agent.line().await, "[w0] ready");
    agent.command(Command::Released(Release::Finished)).await;
    agent.command(Command::Kill { node: NodeId(1) }).await;
    assert_eq!(agent.code().await, ExitCode::Done);
}

#[tokio::test]
async fn an_agent_that_is_given_up_leaves_no_worker() {
    let mut agent = Agent::start(config(1, "exec sleep 100000"), Enroll::default());
    let Event::Started { pid, .. } = agent.event().await else { panic!("no start") };
    agent.run.abort();
    assert!(agent.run.await.is_err());
    await_end(pid);
}
