use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::*;

/// A console that keeps what is written.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A few bytes at a time: whole lines must not depend on the size of a write.
        let part = &bytes[..bytes.len().min(7)];
        self.0.lock().unwrap().extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn console() -> (Screen, Screen, Console) {
    let (out, err) = (Screen::default(), Screen::default());
    (out.clone(), err.clone(), Console { stdout: Box::new(out), stderr: Box::new(err) })
}

/// Pipes as a worker has them, with the ends it writes to.
fn pipes() -> (Pipes, File, File) {
    let (stdout, out) = rustix::pipe::pipe().unwrap();
    let (stderr, err) = rustix::pipe::pipe().unwrap();
    let file = |end: OwnedFd| File::from(end);
    (Pipes { stdout, stderr }, file(out), file(err))
}

/// Long enough for any machine; only a failure waits so long.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn each_line_says_whose_it_is() {
    let (screen, errors, console) = console();
    let mut output = Output::start(Config::new(), console).unwrap();
    for slot in [0, 12] {
        let (pipes, mut out, mut err) = pipes();
        output.attach(Slot(slot), 0, pipes).unwrap();
        out.write_all(b"one\ntwo\r\n\nthe end").unwrap();
        err.write_all(b"oh \xff\n").unwrap();
    }
    assert!(output.finish(LIMIT).await);
    let mut lines: Vec<_> = screen.text().lines().map(str::to_owned).collect();
    lines.sort();
    let expected = [
        "[w0] ",
        "[w0] one",
        "[w0] the end",
        "[w0] two",
        "[w12] ",
        "[w12] one",
        "[w12] the end",
        "[w12] two",
    ];
    assert_eq!(lines, expected);
    assert!(
        errors.text().contains("[w0] oh \u{fffd}\n")
            && errors.text().contains("[w12] oh \u{fffd}\n")
    );
}

#[tokio::test]
async fn with_several_hosts_the_host_is_named() {
    let (screen, _, console) = console();
    let mut output = Output::start(Config::new().with_host("n7"), console).unwrap();
    let (pipes, mut out, err) = pipes();
    output.attach(Slot(1), 0, pipes).unwrap();
    out.write_all(b"hello\n").unwrap();
    drop((out, err));
    assert!(output.finish(LIMIT).await);
    assert_eq!(screen.text(), "[n7/w1] hello\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_of_many_workers_never_mix() {
    let (screen, _, console) = console();
    let mut output = Output::start(Config::new(), console).unwrap();
    let mut writers = Vec::new();
    for slot in 0..4 {
        let (pipes, mut out, err) = pipes();
        output.attach(Slot(slot), 0, pipes).unwrap();
        writers.push(thread::spawn(move || {
            let _open = err;
            for number in 0..500 {
                let line = format!("{number} {}\n", slot.to_string().repeat(100));
                // In two parts, so that lines arrive in pieces.
                out.write_all(&line.as_bytes()[..50]).unwrap();
                out.write_all(&line.as_bytes()[50..]).unwrap();
            }
        }));
    }
    for writer in writers {
        writer.join().unwrap();
    }
    assert!(output.finish(LIMIT).await);
    for slot in 0..4 {
        let text = screen.text();
        let prefix = format!("[w{slot}] ");
        let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<_> =
            (0..500).map(|number| format!("{number} {}", slot.to_string().repeat(100))).collect();
        assert_eq!(lines, expected);
    }
}

#[tokio::test]
async fn a_pipe_that_stays_open_loses_nothing_and_holds_nobody() {
    let (screen, _, console) = console();
    let mut output = Output::start(Config::new(), console).unwrap();
    let (pipes, mut out, _err) = pipes();
    output.attach(Slot(0), 0, pipes).unwrap();
    out.write_all(b"whole\npart").unwrap();
    assert!(!timeout(LIMIT, output.finish(Duration::from_millis(500))).await.unwrap());
    // On a slow machine the writer is not through yet.
    let shown = async {
        while screen.text() != "[w0] whole\n[w0] part\n" {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, shown).await.unwrap();
}

#[tokio::test]
async fn a_console_that_is_gone_stops_nobody() {
    struct Gone;
    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let console = Console { stdout: Box::new(Gone), stderr: Box::new(Gone) };
    let mut output = Output::start(Config::new(), console).unwrap();
    let (pipes, mut out, err) = pipes();
    output.attach(Slot(0), 0, pipes).unwrap();
    let writer = thread::spawn(move || {
        let _open = err;
        // Far more than all buffers hold.
        (0..1000).try_for_each(|_| out.write_all(&[b'x'; 10_000]))
    });
    let written = tokio::task::spawn_blocking(|| writer.join().unwrap());
    timeout(LIMIT, written).await.unwrap().unwrap().unwrap();
    assert!(output.finish(LIMIT).await);
}

#[tokio::test]
async fn a_console_that_stands_still_does_not_hold_the_end() {
    struct Still(std::sync::mpsc::Receiver<()>);
    impl Write for Still {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (hold, held) = std::sync::mpsc::channel();
    let console = Console { stdout: Box::new(Still(held)), stderr: Box::new(io::sink()) };
    let mut output = Output::start(Config::new(), console).unwrap();
    let (pipes, mut out, err) = pipes();
    output.attach(Slot(0), 0, pipes).unwrap();
    out.write_all(b"hello\n").unwrap();
    drop((out, err));
    assert!(!timeout(LIMIT, output.finish(Duration::from_millis(50))).await.unwrap());
    drop(hold);
}

#[tokio::test]
async fn files_hold_the_bytes_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let (screen, errors, console) = console();
    let config = Config::new()
        .with_log_folder(folder.path())
        .with_redirects("0:1".parse().unwrap())
        .unwrap();
    let mut output = Output::start(config.with_tee("0:2".parse().unwrap()), console).unwrap();
    let (pipes, mut out, mut err) = pipes();
    output.attach(Slot(0), 2, pipes).unwrap();
    out.write_all(b"50%\r100%\r\n\xff").unwrap();
    err.write_all(b"oh\n").unwrap();
    drop((out, err));
    assert!(output.finish(LIMIT).await);
    assert_eq!(
        fs::read(folder.path().join("attempt_2/0/stdout.log")).unwrap(),
        b"50%\r100%\r\n\xff"
    );
    assert_eq!(fs::read(folder.path().join("attempt_2/0/stderr.log")).unwrap(), b"oh\n");
    assert_eq!((screen.text(), errors.text()), (String::new(), "[w0] oh\n".to_owned()));
}

#[tokio::test]
async fn a_folder_that_cannot_be_made_costs_the_files_only() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("attempt_0"), b"in the way").unwrap();
    let (screen, _, console) = console();
    let mut output = Output::start(Config::new().with_log_folder(folder.path()), console).unwrap();
    let (pipes, mut out, err) = pipes();
    output.attach(Slot(0), 0, pipes).unwrap();
    out.write_all(b"hello\n").unwrap();
    drop((out, err));
    assert!(output.finish(LIMIT).await);
    assert_eq!(screen.text(), "[w0] hello\n");
}

#[test]
fn where_output_goes_follows_torchruns_flags() {
    let with_folder = || Config::new().with_log_folder("/logs");
    let redirects = |text: &str| with_folder().with_redirects(text.parse().unwrap()).unwrap();
    let tee = |text: &str| with_folder().with_tee(text.parse().unwrap());
    // For standard output and standard error of local rank 1: shown, in a file.
    let table = [
        ("default", Config::new(), [(true, false), (true, false)]),
        ("folder", with_folder(), [(true, true), (true, true)]),
        ("redirects 3", redirects("3"), [(false, true), (false, true)]),
        ("redirects 1", redirects("1"), [(false, true), (true, false)]),
        ("redirects 0", redirects("0"), [(true, false), (true, false)]),
        ("redirects 0:3", redirects("0:3"), [(true, false), (true, false)]),
        ("redirects 0:1,1:2", redirects("0:1,1:2"), [(true, false), (false, true)]),
        ("tee 3", tee("3"), [(true, true), (true, true)]),
        ("tee 2", tee("2"), [(true, false), (true, true)]),
        ("both", redirects("3").with_tee("1:1".parse().unwrap()), [(true, true), (false, true)]),
        (
            "tee, no folder",
            Config::new().with_tee("3".parse().unwrap()),
            [(true, false), (true, false)],
        ),
        ("filter", with_folder().with_shown_ranks(vec![0]), [(false, true), (false, true)]),
        ("filter 1", Config::new().with_shown_ranks(vec![0, 1]), [(true, false), (true, false)]),
    ];
    for (name, config, expected) in table {
        let found = [Stream::Stdout, Stream::Stderr].map(|stream| {
            (config.is_shown(Slot(1), stream), config.file(Slot(1), 0, stream).is_some())
        });
        assert_eq!(found, expected, "{name}");
    }
    let path = with_folder().file(Slot(1), 2, Stream::Stderr);
    assert_eq!(path, Some(PathBuf::from("/logs/attempt_2/1/stderr.log")));
}

#[test]
fn redirects_without_a_folder_are_refused() {
    assert!(
        Config::new().with_redirects("0:1".parse().unwrap()).unwrap_err().contains("--log-dir")
    );
    assert!(Config::new().with_redirects("0".parse().unwrap()).is_ok());
}

#[test]
fn choices_of_streams_are_checked() {
    for text in ["0", "3", "0:1,1:2", "7:3"] {
        assert_eq!(text.parse::<Streams>().unwrap().to_string(), text);
    }
    for text in
        ["", "4", "-1", "a", "0:4", "0:1,", "0:1,2", "0:1,0:2", ":", "1:", ",", "99999999999:1"]
    {
        assert!(text.parse::<Streams>().is_err(), "{text}");
    }
}
