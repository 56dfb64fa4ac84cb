use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::kill_process;
use tokio::time::timeout;

use super::*;

/// Long enough for any machine; only a failure waits so long.
const LIMIT: Duration = Duration::from_secs(60);

const PROCESS_VARIABLE: &str = "RIPSTOP_TEST_PROCESS";

/// This process was started by [`in_a_process_of_its_own`] for the test `name`.
pub(in super::super) fn is_own_process(name: &str) -> bool {
    std::env::var(PROCESS_VARIABLE).is_ok_and(|value| value == name)
}

/// The command that runs the test `name` of `module` again, in another process that `shell` starts as `"$@"`.
fn own_process(module: &str, name: &str, shell: &str) -> Command {
    let path = module.split_once("::").map_or(module, |(_, path)| path);
    let mut command = Command::new("sh");
    command.args(["-c", shell, "sh"]).arg(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--nocapture", &format!("{path}::{name}")])
        .env(PROCESS_VARIABLE, name);
    command
}

/// Runs the test `name` of `module` to its end in another process.
pub(in super::super) fn in_a_process_of_its_own(module: &str, name: &str, shell: &str) {
    let output = own_process(module, name, shell).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{}: {said}", output.status);
}

fn shell(script: &str) -> WorkerCommand {
    WorkerCommand {
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into()],
        environment: BTreeMap::new(),
        directory: None,
        group: ProcessGroup::Shared,
    }
}

/// A process that never ends by itself.
fn endless() -> WorkerCommand {
    shell("exec sleep 100000")
}

async fn end(process: &Process) -> Exit {
    timeout(LIMIT, process.ended()).await.expect("ends").unwrap();
    process.reap().unwrap().expect("ended")
}

/// Waits for the end of any process, holding the thread.
pub(in super::super) fn await_end(pid: i32) {
    let Ok(pidfd) = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()) else { return };
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "process {pid} lives on");
}

#[tokio::test]
async fn an_end_is_noticed_with_its_reason() {
    let spawner = Spawner::start().unwrap();
    let table = [
        ("exit 0", Exit::Code(0)),
        ("exit 7", Exit::Code(7)),
        ("exit 255", Exit::Code(255)),
        ("kill -KILL $$", Exit::Signal(9)),
        ("kill -TERM $$", Exit::Signal(15)),
    ];
    for (script, expected) in table {
        let process = spawner.spawn(shell(script)).await.unwrap();
        assert_eq!(end(&process).await, expected, "{script}");
    }
}

#[tokio::test]
async fn a_signal_reaches_the_process_and_after_its_end_nobody() {
    let spawner = Spawner::start().unwrap();
    let process = spawner.spawn(endless()).await.unwrap();
    assert_eq!(process.reap().unwrap(), None);
    process.signal(super::super::signals::Signal::User2).unwrap();
    assert_eq!(end(&process).await, Exit::Signal(Signal::USR2.as_raw()));
    process.signal(super::super::signals::Signal::Terminate).unwrap();
    process.kill().unwrap();
}

#[tokio::test]
async fn environment_directory_and_output_are_as_ordered() {
    let folder = tempfile::tempdir().unwrap();
    let spawner = Spawner::start().unwrap();
    let command = WorkerCommand {
        environment: BTreeMap::from([("WORD".into(), "ripstop".into())]),
        directory: Some(folder.path().into()),
        ..shell("echo $WORD; pwd; echo error >&2; cat")
    };
    let mut process = spawner.spawn(command).await.unwrap();
    assert_eq!(end(&process).await, Exit::Code(0), "and there is no input to wait for");
    let Pipes { stdout, stderr } = process.take_pipes().unwrap();
    assert!(process.take_pipes().is_none());
    let (mut out, mut err) = (String::new(), String::new());
    File::from(stdout).read_to_string(&mut out).unwrap();
    File::from(stderr).read_to_string(&mut err).unwrap();
    let folder = fs::canonicalize(folder.path()).unwrap();
    assert_eq!((out, err), (format!("ripstop\n{}\n", folder.display()), "error\n".to_owned()));
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let spawner = Spawner::start().unwrap();
    let command = |program: &str| WorkerCommand {
        program: program.into(),
        arguments: Vec::new(),
        ..endless()
    };
    for (program, code) in [
        ("/no/such/program", 127),
        ("no-such-program-anywhere", 127),
        ("/dev/null", 126),
        ("/", 126),
    ] {
        let error = spawner.spawn(command(program)).await.unwrap_err();
        assert_eq!((error.exit_code().code(), error.is_permanent()), (code, true), "{error}");
    }
}

#[tokio::test]
async fn no_file_of_the_agent_is_open_in_a_worker() {
    let spawner = Spawner::start().unwrap();
    let _other = spawner.spawn(shell("exit 0")).await.unwrap();
    let mut process = spawner.spawn(shell("exec ls -l /proc/self/fd")).await.unwrap();
    let mut listing = String::new();
    File::from(process.take_pipes().unwrap().stdout).read_to_string(&mut listing).unwrap();
    end(&process).await;
    assert!(listing.contains("/dev/null"), "{listing}");
    assert!(
        !["pidfd", "eventpoll", "eventfd"].iter().any(|kind| listing.contains(kind)),
        "{listing}"
    );
}

#[test]
fn a_worker_outlives_the_thread_that_asked_for_it() {
    let spawner = Spawner::start().unwrap();
    let clone = spawner.clone();
    let (told, thread) = mpsc::channel();
    let asking = thread::spawn(move || {
        told.send(fs::read_link("/proc/thread-self").unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(clone.spawn(endless())).unwrap().pid()
    });
    let pid = asking.join().unwrap();
    // The kernel is through with the thread only when it is listed no more.
    let listed = PathBuf::from("/proc").join(thread.recv().unwrap());
    let start = Instant::now();
    while fs::exists(&listed).unwrap() {
        assert!(start.elapsed() < LIMIT);
        thread::yield_now();
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(!status.contains("State:\tZ") && !status.contains("State:\tX"), "{status}");
    drop(spawner);
    await_end(pid);
}

#[tokio::test]
async fn workers_end_with_their_spawner() {
    let spawner = Spawner::start().unwrap();
    let process = spawner.spawn(endless()).await.unwrap();
    drop(spawner);
    assert_eq!(end(&process).await, Exit::Signal(9));
}

#[test]
fn a_process_that_nobody_waits_for_is_ended() {
    let Started { pidfd, .. } = start(&endless()).unwrap();
    discard(&pidfd);
    assert_eq!(pidfd_send_signal(&pidfd, Signal::TERM), Err(Errno::SRCH));
}

#[tokio::test]
async fn what_a_worker_leaves_in_its_own_group_ends_with_it() {
    let spawner = Spawner::start().unwrap();
    let command =
        WorkerCommand { group: ProcessGroup::Own, ..shell("sleep 100000 & echo $!; exit 3") };
    let mut process = spawner.spawn(command).await.unwrap();
    let mut line = String::new();
    BufReader::new(File::from(process.take_pipes().unwrap().stdout)).read_line(&mut line).unwrap();
    assert_eq!(end(&process).await, Exit::Code(3));
    await_end(line.trim().parse().unwrap());
}

#[test]
fn a_worker_ends_with_its_agent() {
    let name = "a_worker_ends_with_its_agent";
    if is_own_process(name) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(async {
            let process = Spawner::start().unwrap();
            let process = (process.spawn(endless()).await.unwrap(), process);
            writeln!(io::stdout(), "worker {}", process.0.pid()).unwrap();
            process.0.ended().await.unwrap();
            panic!("the worker ended before its agent");
        });
    }
    let mut agent =
        own_process(module_path!(), name, "exec \"$@\"").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    // The test harness may have begun the line.
    let worker =
        lines.find_map(|line| line.unwrap().split_once("worker ")?.1.trim().parse().ok()).unwrap();
    let alive = pidfd_open(Pid::from_raw(worker).unwrap(), PidfdFlags::empty()).unwrap();
    kill_process(Pid::from_child(&agent), Signal::KILL).unwrap();
    agent.wait().unwrap();
    drop(alive);
    await_end(worker);
}

#[test]
fn an_exit_code_arrives_even_if_the_agent_was_started_with_chld_ignored() {
    let name = "an_exit_code_arrives_even_if_the_agent_was_started_with_chld_ignored";
    if is_own_process(name) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(async {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
            let ignored = u64::from_str_radix(ignored, 16).unwrap();
            assert_ne!(ignored & (1 << (Signal::CHILD.as_raw() - 1)), 0, "the test tests nothing");
            let spawner = Spawner::start().unwrap();
            let process = spawner.spawn(shell("exit 5")).await.unwrap();
            assert_eq!(end(&process).await, Exit::Code(5));
        });
    }
    // A shell will not have CHLD ignored for its children; `env` will.
    in_a_process_of_its_own(module_path!(), name, "exec env --ignore-signal=CHLD \"$@\"");
}
