//! [`Traces`]: what all processes of a cluster wrote about themselves, read while they write.
//!
//! Every process appends JSON lines to a file of its own, `worker-7.ndjson`. A line that is not whole yet stays for the next look.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

/// What was read so far.
#[derive(Debug)]
pub struct Traces {
    folder: PathBuf,
    files: BTreeMap<PathBuf, Tail>,
    lines: BTreeMap<Writer, Vec<Line>>,
    started: BTreeMap<u64, Started>,
    exited: BTreeMap<u64, String>,
    boundary: u64,
    checkpoint: Option<u64>,
    leader: Option<(u64, u64)>,
    worlds: BTreeMap<u64, Vec<u64>>,
}

impl Traces {
    /// Of a folder that may be empty or missing yet.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            files: BTreeMap::new(),
            lines: BTreeMap::new(),
            started: BTreeMap::new(),
            exited: BTreeMap::new(),
            boundary: 0,
            checkpoint: None,
            leader: None,
            worlds: BTreeMap::new(),
        }
    }

    /// Reads what was written since the last look.
    ///
    /// # Errors
    /// If a trace can't be read, or a line of it is no JSON object with an event and a time.
    pub fn read(&mut self) -> anyhow::Result<()> {
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten() {
            let path = entry?.path();
            if let Some(writer) = Writer::of(&path)
                && !self.files.contains_key(&path)
            {
                let file = File::open(&path).with_context(|| format!("{}", path.display()))?;
                self.files.insert(path, Tail { writer, file, rest: Vec::new() });
            }
        }
        let mut fresh = Vec::new();
        for (path, tail) in &mut self.files {
            let context = || format!("the trace {}", path.display());
            for line in tail.lines().with_context(context)? {
                fresh.push((tail.writer, Line::parse(&line).with_context(context)?));
            }
        }
        for (writer, line) in fresh {
            self.note(writer, &line);
            self.lines.entry(writer).or_default().push(line);
        }
        Ok(())
    }

    fn note(&mut self, writer: Writer, line: &Line) {
        match (writer, line.event.as_str()) {
            (Writer::Worker(_), "applied") => {
                self.boundary = self.boundary.max(line.number("boundary").unwrap_or(0));
            }
            (Writer::Agent(agent), "started") => {
                let numbers = (line.number("worker"), line.number("pid"), line.number("slot"));
                if let (Some(node), Some(pid), Some(slot)) = numbers {
                    self.started.insert(node, Started { agent, node, pid, slot });
                }
            }
            (Writer::Agent(_), "exited") => {
                let cause = line.fields["cause"].as_str().unwrap_or("?").to_owned();
                self.exited.extend(line.number("worker").map(|node| (node, cause)));
            }
            (Writer::Coordinator(_), "checkpoint_committed") => {
                self.checkpoint = self.checkpoint.max(line.number("step"));
            }
            (Writer::Coordinator(id), "leader") => {
                let claim = line.number("term").map(|term| (term, id));
                self.leader = self.leader.max(claim);
            }
            (Writer::Coordinator(_), "world" | "restart") => {
                let nodes = line.fields["nodes"].as_array().into_iter().flatten();
                let nodes = nodes.filter_map(Value::as_u64).collect();
                self.worlds.extend(line.number("generation").map(|g| (g, nodes)));
            }
            _ => {}
        }
    }

    /// What one process wrote.
    #[must_use]
    pub fn of(&self, writer: Writer) -> &[Line] {
        self.lines.get(&writer).map_or(&[], Vec::as_slice)
    }

    /// What all workers wrote, by worker.
    pub fn workers(&self) -> impl Iterator<Item = (u64, &[Line])> {
        self.lines.iter().filter_map(|(writer, lines)| match writer {
            Writer::Worker(node) => Some((*node, lines.as_slice())),
            _ => None,
        })
    }

    /// How often all coordinators together wrote of `event`; each event is in the trace of the one that led then.
    #[must_use]
    pub fn count(&self, event: &str) -> usize {
        let is_coordinator = |writer: &Writer| matches!(writer, Writer::Coordinator(_));
        let lines = self.lines.iter().filter(|(writer, _)| is_coordinator(writer));
        lines.flat_map(|(_, lines)| lines).filter(|line| line.event == event).count()
    }

    /// The digest of the state that the job finished with, by the coordinators.
    #[must_use]
    pub fn finished_state(&self) -> Option<&str> {
        let lines =
            self.lines.iter().filter(|(writer, _)| matches!(writer, Writer::Coordinator(_)));
        let finished = lines.flat_map(|(_, lines)| lines).find(|line| line.event == "finished")?;
        finished.fields["message"].as_str()?.split_whitespace().last()
    }

    /// The highest boundary that any worker has applied.
    #[must_use]
    pub fn boundary(&self) -> u64 {
        self.boundary
    }

    /// The boundary that one worker stands at.
    #[must_use]
    pub fn boundary_of(&self, node: u64) -> u64 {
        let lines = self.of(Writer::Worker(node)).iter().rev();
        lines.filter(|l| l.event == "applied").find_map(|l| l.number("boundary")).unwrap_or(0)
    }

    /// The boundary of the newest committed checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> Option<u64> {
        self.checkpoint
    }

    /// The coordinator that leads, as far as traces tell.
    #[must_use]
    pub fn leader(&self) -> Option<u64> {
        self.leader.map(|(_, id)| id)
    }

    /// The newest world's generation and members, if all of these have entered it.
    #[must_use]
    pub fn settled_world(&self) -> Option<(u64, &[u64])> {
        let (generation, nodes) = self.worlds.last_key_value()?;
        let has_entered = |node: &u64| {
            let mut lines = self.of(Writer::Worker(*node)).iter().rev();
            lines.any(|l| l.event == "entered" && l.number("generation") == Some(*generation))
        };
        nodes.iter().all(has_entered).then_some((*generation, nodes.as_slice()))
    }

    /// Every worker that an agent started.
    pub fn started(&self) -> impl Iterator<Item = &Started> {
        self.started.values()
    }

    /// The workers that were started and have not ended, as far as their agents know.
    #[must_use]
    pub fn alive(&self) -> Vec<u64> {
        self.started.keys().copied().filter(|node| !self.exited.contains_key(node)).collect()
    }

    /// Who started a worker, and its process id.
    #[must_use]
    pub fn start_of(&self, node: u64) -> Option<&Started> {
        self.started.get(&node)
    }

    /// How a worker ended, by its agent: "exited with code 75".
    #[must_use]
    pub fn exit_of(&self, node: u64) -> Option<&str> {
        self.exited.get(&node).map(String::as_str)
    }

    /// The states that workers had at each boundary: everywhere one, if the bits are the same.
    #[must_use]
    pub fn digests(&self) -> BTreeMap<u64, BTreeSet<String>> {
        let mut digests: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        let applied = self.workers().flat_map(|(_, lines)| lines).filter(|l| l.event == "applied");
        for line in applied {
            if let Some((boundary, digest)) =
                line.number("boundary").zip(line.fields["digest"].as_str())
            {
                digests.entry(boundary).or_default().insert(digest.to_owned());
            }
        }
        digests
    }
}

/// Whose trace it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Writer {
    /// A worker, by its node id; 0 if it trains alone.
    Worker(u64),
    /// An agent, by its node id.
    Agent(u64),
    /// A coordinator, by its id.
    Coordinator(u64),
}

impl Writer {
    fn of(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".ndjson")?;
        let (kind, number) = stem.split_once('-')?;
        let number = number.parse().ok()?;
        match kind {
            "worker" => Some(Self::Worker(number)),
            "agent" => Some(Self::Agent(number)),
            "coordinator" => Some(Self::Coordinator(number)),
            _ => None,
        }
    }
}

/// One event.
#[derive(Clone, PartialEq, Debug)]
pub struct Line {
    /// What happened.
    pub event: String,
    /// When, in nanoseconds of CLOCK_MONOTONIC: equal clocks for all processes of one host.
    pub at_ns: u64,
    /// Everything that was written.
    pub fields: Value,
}

impl Line {
    fn parse(text: &[u8]) -> anyhow::Result<Self> {
        let fields: Value = serde_json::from_slice(text)?;
        let event = fields["event"].as_str().context("a line without event")?.to_owned();
        let at_ns = fields["t_ns"].as_u64().context("a line without time")?;
        Ok(Self { event, at_ns, fields })
    }

    /// A field that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.fields[name].as_u64()
    }
}

/// A worker's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Started {
    /// The agent's node id.
    pub agent: u64,
    /// The worker's.
    pub node: u64,
    /// The process.
    pub pid: u64,
    /// Its place at the agent.
    pub slot: u64,
}

/// A file that grows, and its last line as far as that is written.
#[derive(Debug)]
struct Tail {
    writer: Writer,
    file: File,
    rest: Vec<u8>,
}

impl Tail {
    fn lines(&mut self) -> std::io::Result<Vec<Vec<u8>>> {
        self.file.read_to_end(&mut self.rest)?;
        let Some(last) = self.rest.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let rest = self.rest.split_off(last + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        let lines = whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        Ok(lines.map(<[u8]>::to_vec).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_read_once_and_only_when_they_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mut worker = File::create(folder.path().join("worker-7.ndjson")).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "x").unwrap();
        let mut traces = Traces::new(folder.path());
        write!(worker, "{{\"event\":\"leaf\",\"t_ns\":5,\"step\":3}}\n{{\"event\":\"appl").unwrap();
        traces.read().unwrap();
        assert_eq!((traces.of(Writer::Worker(7)).len(), traces.boundary()), (1, 0));
        writeln!(worker, "ied\",\"t_ns\":9,\"boundary\":4,\"digest\":\"ab\"}}").unwrap();
        traces.read().unwrap();
        traces.read().unwrap();
        assert_eq!((traces.of(Writer::Worker(7)).len(), traces.boundary()), (2, 4));
        assert_eq!(traces.digests()[&4].iter().collect::<Vec<_>>(), ["ab"]);
        writeln!(worker, "rubbish").unwrap();
        assert!(traces.read().is_err());
    }

    #[test]
    fn a_world_is_settled_when_all_its_members_have_entered() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "coordinator-1.ndjson",
            "{\"event\":\"world\",\"t_ns\":1,\"generation\":2,\"nodes\":[7,8]}\n",
        );
        let entered = "{\"event\":\"entered\",\"t_ns\":1,\"generation\":2}\n";
        write("worker-7.ndjson", entered);
        let mut traces = Traces::new(folder.path());
        traces.read().unwrap();
        assert_eq!(traces.settled_world(), None);
        write("worker-8.ndjson", entered);
        traces.read().unwrap();
        assert_eq!(traces.settled_world(), Some((2, [7, 8].as_slice())));
    }
}
