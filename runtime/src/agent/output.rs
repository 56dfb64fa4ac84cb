//! What workers print: to the agent's own output with a prefix that says who, and to files.
//!
//! Promises: lines of different workers never mix; what a worker printed before it died is shown; a reader that is gone or a disk
//! that is full never stops a worker; files hold the bytes as they were written. A console that stands still does hold the
//! workers back, as a pipe to `tee` would, but not the agent. Deliberately not here: the agent's own messages.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::lines::Lines;
use super::spawn::Pipes;
use super::supervisor::Slot;

/// Reads the pipes of all workers; one thread writes.
#[derive(Debug)]
pub struct Output {
    config: Config,
    readers: JoinSet<()>,
    pieces: mpsc::Sender<Piece>,
    stop: watch::Sender<bool>,
    written: oneshot::Receiver<()>,
}

impl Output {
    /// Starts the thread that writes to `console` and to files.
    ///
    /// # Errors
    /// If the system has no thread for us.
    pub fn start(config: Config, console: Console) -> io::Result<Self> {
        let (pieces, inbox) = mpsc::channel(PIECES_MAX);
        let (done, written) = oneshot::channel();
        thread::Builder::new().name("ripstop-output".to_owned()).spawn(move || {
            Writer { console, files: BTreeMap::new() }.run(inbox);
            // Nobody waits if the agent's time was up.
            let _ = done.send(());
        })?;
        Ok(Self {
            config,
            readers: JoinSet::new(),
            pieces,
            stop: watch::Sender::new(false),
            written,
        })
    }

    /// Reads a new worker's pipes until they are closed.
    ///
    /// # Errors
    /// If the runtime cannot watch the pipes.
    pub fn attach(&mut self, slot: Slot, attempt: u32, pipes: Pipes) -> io::Result<()> {
        while self.readers.try_join_next().is_some() {}
        for (stream, pipe) in [(Stream::Stdout, pipes.stdout), (Stream::Stderr, pipes.stderr)] {
            let reader = Reader {
                pipe: pipe::Receiver::from_owned_fd(pipe)?,
                lines: Lines::default(),
                prefix: self.config.is_shown(slot, stream).then(|| self.config.prefix(slot)),
                file: self.config.file(slot, attempt, stream),
                source: Source { slot, attempt, stream },
                pieces: self.pieces.clone(),
            };
            self.readers.spawn(reader.run(self.stop.subscribe()));
        }
        Ok(())
    }

    /// The folder of a worker's files, if there are files.
    #[must_use]
    pub fn folder(&self, slot: Slot, attempt: u32) -> Option<PathBuf> {
        self.config.folder(slot, attempt)
    }

    /// Writes what has come and ends. Waits at most about three times `limit`: for pipes that a worker's own children hold open, and for a
    /// console that stands still. Says whether everything was written.
    pub async fn finish(mut self, limit: Duration) -> bool {
        let mut is_complete = timeout(limit, all(&mut self.readers)).await.is_ok();
        // Who still reads hands out the line it has begun. No reader may be left to hear it.
        let _ = self.stop.send(true);
        is_complete &= timeout(limit, all(&mut self.readers)).await.is_ok();
        self.readers.abort_all();
        while self.readers.join_next().await.is_some() {}
        drop(self.pieces);
        is_complete && timeout(limit, self.written).await.is_ok()
    }
}

async fn all(readers: &mut JoinSet<()>) {
    while readers.join_next().await.is_some() {}
}

/// Where output goes. The default shows everything, with a prefix; with a folder it goes there as well.
#[derive(Clone, Debug, Default)]
pub struct Config {
    host: Option<String>,
    log_folder: Option<PathBuf>,
    redirects: Option<Streams>,
    tee: Option<Streams>,
    shown_ranks: Option<Vec<u32>>,
}

impl Config {
    /// Everything to the console.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Names this host in the prefix: `[host/w0]`.
    #[must_use]
    pub fn with_host(mut self, host: impl Into<String>) -> Self {
        self.host = Some(host.into());
        self
    }

    /// Files go to `folder/attempt_<attempt>/<local rank>/stdout.log` and `stderr.log` (torchrun's `--log-dir`).
    #[must_use]
    pub fn with_log_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.log_folder = Some(folder.into());
        self
    }

    /// Where files go, if anywhere.
    #[must_use]
    pub fn log_folder(&self) -> Option<&Path> {
        self.log_folder.as_deref()
    }

    /// What goes to files only (torchrun's `--redirects`).
    ///
    /// # Errors
    /// If there is no log folder yet: what is not shown would be lost.
    pub fn with_redirects(mut self, streams: Streams) -> Result<Self, String> {
        if self.log_folder.is_none() && streams != Streams::default() {
            return Err(format!(
                "output {streams} is to be redirected, but to no folder; give one with --log-dir"
            ));
        }
        self.redirects = Some(streams);
        Ok(self)
    }

    /// What goes to files and to the console (torchrun's `--tee`). Without a log folder it is only shown.
    #[must_use]
    pub fn with_tee(mut self, streams: Streams) -> Self {
        self.tee = Some(streams);
        self
    }

    /// Shows these local ranks only (torchrun's `--local-ranks-filter`).
    #[must_use]
    pub fn with_shown_ranks(mut self, ranks: Vec<u32>) -> Self {
        self.shown_ranks = Some(ranks);
        self
    }

    fn is_shown(&self, slot: Slot, stream: Stream) -> bool {
        let has = |streams: &Option<Streams>| {
            streams.as_ref().is_some_and(|streams| streams.has(slot, stream))
        };
        let is_chosen = self.shown_ranks.as_ref().is_none_or(|ranks| ranks.contains(&slot.0));
        is_chosen && (has(&self.tee) || !has(&self.redirects))
    }

    fn file(&self, slot: Slot, attempt: u32, stream: Stream) -> Option<PathBuf> {
        let has = |streams: &Option<Streams>| {
            streams.as_ref().is_some_and(|streams| streams.has(slot, stream))
        };
        let is_default = self.tee.is_none() && self.redirects.is_none();
        let is_wanted = is_default || has(&self.tee) || has(&self.redirects);
        let folder = self.folder(slot, attempt).filter(|_| is_wanted)?;
        Some(folder.join(match stream {
            Stream::Stdout => "stdout.log",
            Stream::Stderr => "stderr.log",
        }))
    }

    fn folder(&self, slot: Slot, attempt: u32) -> Option<PathBuf> {
        Some(self.log_folder.as_ref()?.join(format!("attempt_{attempt}")).join(slot.to_string()))
    }

    fn prefix(&self, slot: Slot) -> String {
        match &self.host {
            Some(host) => format!("[{host}/w{slot}] "),
            None => format!("[w{slot}] "),
        }
    }
}

/// A choice of streams, for all workers or for each: `0` none, `1` output, `2` errors, `3` both; or `0:1,1:2` by local rank, and
/// none for the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Streams {
    /// The same for all.
    All(StreamSet),
    /// By local rank.
    ByRank(BTreeMap<u32, StreamSet>),
}

impl Streams {
    fn has(&self, slot: Slot, stream: Stream) -> bool {
        let set = match self {
            Self::All(set) => *set,
            Self::ByRank(sets) => sets.get(&slot.0).copied().unwrap_or_default(),
        };
        match stream {
            Stream::Stdout => set.0 & 1 != 0,
            Stream::Stderr => set.0 & 2 != 0,
        }
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self::All(StreamSet::default())
    }
}

impl FromStr for Streams {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "{text:?} chooses no streams; write 0 to 3 (1 output, 2 errors, 3 both), or 0:1,1:2 by local rank"
            )
        };
        let set = |text: &str| match text.trim().parse() {
            Ok(bits @ 0..=3) => Ok(StreamSet(bits)),
            _ => Err(bad()),
        };
        if !text.contains(':') {
            return set(text).map(Self::All);
        }
        let mut sets = BTreeMap::new();
        for part in text.split(',') {
            let (rank, streams) = part.split_once(':').ok_or_else(bad)?;
            let rank = rank.trim().parse().map_err(|_| bad())?;
            if sets.insert(rank, set(streams)?).is_some() {
                return Err(format!("{text:?} names local rank {rank} twice; name it once"));
            }
        }
        Ok(Self::ByRank(sets))
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All(set) => write!(f, "{}", set.0),
            Self::ByRank(sets) => {
                for (place, (rank, set)) in sets.iter().enumerate() {
                    write!(f, "{}{rank}:{}", if place == 0 { "" } else { "," }, set.0)?;
                }
                Ok(())
            }
        }
    }
}

/// A choice among standard output and standard error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamSet(u8);

/// The agent's own standard output and error, or what stands for them.
pub struct Console {
    /// Gets what workers print.
    pub stdout: Box<dyn Write + Send>,
    /// Gets what they print as errors.
    pub stderr: Box<dyn Write + Send>,
}

impl Console {
    /// This process's.
    #[must_use]
    pub fn own() -> Self {
        Self { stdout: Box::new(io::stdout()), stderr: Box::new(io::stderr()) }
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Stream {
    Stdout,
    Stderr,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Source {
    slot: Slot,
    attempt: u32,
    stream: Stream,
}

/// What goes to the writing thread. Lines are whole, with prefix and end.
#[derive(Debug)]
enum Piece {
    Open(Source, PathBuf),
    Lines(Stream, Vec<u8>),
    Bytes(Source, Vec<u8>),
    Close(Source),
}

/// Reads one pipe.
struct Reader {
    pipe: pipe::Receiver,
    lines: Lines,
    /// Given if the stream is shown.
    prefix: Option<String>,
    /// Given if the stream goes to a file.
    file: Option<PathBuf>,
    source: Source,
    pieces: mpsc::Sender<Piece>,
}

impl Reader {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let has_file = self.file.is_some();
        if let Some(path) = self.file.take() {
            self.send(Piece::Open(self.source, path)).await;
        }
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let read = tokio::select! {
                biased;
                read = self.pipe.read(&mut buffer) => read,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            match read {
                Ok(0) => break,
                Ok(length) => {
                    let bytes = &buffer[..length];
                    self.show(|lines, line| lines.push(bytes, line)).await;
                    if has_file {
                        self.send(Piece::Bytes(self.source, bytes.to_vec())).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(slot = %self.source.slot, %error, "a worker's output cannot be read any more");
                    break;
                }
            }
        }
        self.show(|lines, line| lines.finish(line)).await;
        if has_file {
            self.send(Piece::Close(self.source)).await;
        }
    }

    async fn show(&mut self, cut: impl FnOnce(&mut Lines, &mut dyn FnMut(&str))) {
        let Some(prefix) = &self.prefix else { return };
        let mut text = Vec::new();
        cut(&mut self.lines, &mut |line| {
            text.extend_from_slice(prefix.as_bytes());
            text.extend_from_slice(line.as_bytes());
            text.push(b'\n');
        });
        if !text.is_empty() {
            self.send(Piece::Lines(self.source.stream, text)).await;
        }
    }

    async fn send(&self, piece: Piece) {
        // The writer outlives all readers.
        let _ = self.pieces.send(piece).await;
    }
}

/// Writes; on its own thread.
struct Writer {
    console: Console,
    files: BTreeMap<Source, File>,
}

impl Writer {
    fn run(mut self, mut inbox: mpsc::Receiver<Piece>) {
        while let Some(piece) = inbox.blocking_recv() {
            match piece {
                Piece::Open(source, path) => match create(&path) {
                    Ok(file) => drop(self.files.insert(source, file)),
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "a worker's log cannot be made");
                    }
                },
                Piece::Lines(Stream::Stdout, text) => {
                    write(&mut self.console.stdout, &text, "standard output");
                }
                Piece::Lines(Stream::Stderr, text) => {
                    write(&mut self.console.stderr, &text, "standard error");
                }
                Piece::Bytes(source, bytes) => {
                    if let Some(file) = self.files.get_mut(&source)
                        && let Err(error) = file.write_all(&bytes)
                    {
                        tracing::warn!(slot = %source.slot, %error, "a worker's log cannot be written; the rest of it is dropped");
                        self.files.remove(&source);
                    }
                }
                Piece::Close(source) => drop(self.files.remove(&source)),
            }
        }
    }
}

/// Writes to the console, or from its first failure on to nowhere.
fn write(console: &mut Box<dyn Write + Send>, text: &[u8], name: &str) {
    if let Err(error) = console.write_all(text).and_then(|()| console.flush()) {
        tracing::warn!(%error, "{name} cannot be written; what workers print there is dropped from now on");
        *console = Box::new(io::sink());
    }
}

fn create(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    File::create(path)
}

/// How many pieces may wait for the writer: with [`READ_BYTES`] each a few megabytes at most.
const PIECES_MAX: usize = 64;

/// How much is read at once: a pipe's usual capacity is four times that.
const READ_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
