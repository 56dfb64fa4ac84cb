//! [`History`]: what all processes of the demo wrote into their traces, read while they write.
//!
//! Every process appends JSON lines to a file of its own; the times are CLOCK_MONOTONIC, so lines of different files can be laid side by
//! side. A line that is not whole yet stays for the next look; one that can't be understood is said in the log and skipped.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use types::{Digest, Generation, NodeId, Step, Timestamp, VirtualRank};

/// What is known so far, by who wrote it.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) workers: BTreeMap<NodeId, Vec<Stamped<WorkerEvent>>>,
    pub(crate) agents: BTreeMap<NodeId, Vec<Stamped<AgentEvent>>>,
    pub(crate) coordinators: BTreeMap<u64, Vec<Stamped<CoordinatorEvent>>>,
}

impl History {
    /// All worlds in the order of their generations.
    pub(crate) fn worlds(&self) -> Vec<WorldSeen> {
        let mut worlds: BTreeMap<Generation, WorldSeen> = BTreeMap::new();
        for line in self.coordinators.values().flatten() {
            let (shape, is_restart) = match &line.event {
                CoordinatorEvent::World(shape) => (shape, false),
                CoordinatorEvent::Restart(shape) => (shape, true),
                _ => continue,
            };
            worlds.entry(shape.generation).or_insert_with(|| WorldSeen {
                generation: shape.generation,
                nodes: shape.nodes.clone(),
                step: shape.step,
                is_restart,
            });
        }
        worlds.into_values().collect()
    }

    /// The newest world, if all its members have entered it.
    pub(crate) fn settled_world(&self) -> Option<WorldSeen> {
        let world = self.worlds().pop()?;
        let has_entered = |node: &NodeId| {
            self.worker(*node).any(
                |line| matches!(line.event, WorkerEvent::Entered { generation } if generation == world.generation),
            )
        };
        world.nodes.iter().all(has_entered).then_some(world)
    }

    /// What one worker wrote.
    pub(crate) fn worker(
        &self,
        node: NodeId,
    ) -> impl DoubleEndedIterator<Item = &Stamped<WorkerEvent>> {
        self.workers.get(&node).into_iter().flatten()
    }

    /// When `node` had adopted `generation` or a newer one.
    pub(crate) fn adopted(&self, node: NodeId, generation: Generation) -> Option<Timestamp> {
        let is_it = |event: &WorkerEvent| matches!(event, WorkerEvent::World { generation: g } if *g >= generation);
        self.worker(node).find(|line| is_it(&line.event)).map(|line| line.at)
    }

    /// When `node` had entered `generation` or a newer one.
    pub(crate) fn entered(&self, node: NodeId, generation: Generation) -> Option<Timestamp> {
        let is_it = |event: &WorkerEvent| matches!(event, WorkerEvent::Entered { generation: g } if *g >= generation);
        self.worker(node).find(|line| is_it(&line.event)).map(|line| line.at)
    }

    /// When a coordinator first said that `node` is lost.
    pub(crate) fn lost(&self, node: NodeId) -> Option<Timestamp> {
        let is_it = |event: &CoordinatorEvent| matches!(event, CoordinatorEvent::Lost { nodes } if nodes.contains(&node));
        let lines = self.coordinators.values().flatten().filter(|line| is_it(&line.event));
        lines.map(|line| line.at).min()
    }

    /// When `node` first had all final chunks of `step`.
    pub(crate) fn finished(&self, node: NodeId, step: Step) -> Option<Timestamp> {
        let is_it =
            |event: &WorkerEvent| matches!(event, WorkerEvent::Final { step: s } if *s == step);
        self.worker(node).find(|line| is_it(&line.event)).map(|line| line.at)
    }

    /// The highest boundary that any of all workers has applied.
    pub(crate) fn boundary(&self) -> Step {
        let nodes = self.workers.keys();
        nodes.map(|node| self.boundary_of(*node)).max().unwrap_or_default()
    }

    /// The boundary that `node` stands at.
    pub(crate) fn boundary_of(&self, node: NodeId) -> Step {
        let boundary = self.worker(node).rev().find_map(|line| match line.event {
            WorkerEvent::Applied { boundary, .. } => Some(boundary),
            _ => None,
        });
        boundary.unwrap_or_default()
    }

    /// The newest loss.
    pub(crate) fn newest_loss(&self) -> Option<f64> {
        let newest = |lines: &Vec<Stamped<WorkerEvent>>| {
            lines.iter().rev().find_map(|line| match line.event {
                WorkerEvent::Metric { loss, .. } => Some((line.at, loss)),
                _ => None,
            })
        };
        self.workers
            .values()
            .filter_map(newest)
            .max_by_key(|(at, _)| *at)
            .and_then(|(_, loss)| loss)
    }

    /// The newest boundary of which a committed checkpoint is known.
    pub(crate) fn checkpoint(&self) -> Option<Step> {
        let committed = self.coordinators.values().flatten().filter_map(|line| match line.event {
            CoordinatorEvent::CheckpointCommitted { step } => step,
            _ => None,
        });
        committed.max()
    }

    /// The coordinator that leads, as far as traces tell: who said so last.
    pub(crate) fn leader(&self) -> Option<u64> {
        let claims = self.coordinators.iter().flat_map(|(id, lines)| {
            lines.iter().filter_map(|line| match line.event {
                CoordinatorEvent::Leader { term } => Some((term.unwrap_or_default(), line.at, *id)),
                _ => None,
            })
        });
        claims.max().map(|(_, _, id)| id)
    }

    /// The workers that agents started, with their process ids.
    pub(crate) fn started(&self) -> impl Iterator<Item = Started> + '_ {
        self.agents.iter().flat_map(|(agent, lines)| {
            lines.iter().filter_map(|line| match line.event {
                AgentEvent::Started { worker, pid } => {
                    Some(Started { agent: *agent, worker, pid, at: line.at })
                }
                _ => None,
            })
        })
    }

    /// When and how a worker ended, by its agent.
    pub(crate) fn exited(&self, node: NodeId) -> Option<(Timestamp, &str)> {
        self.agents.values().flatten().find_map(|line| match &line.event {
            AgentEvent::Exited { worker, noticed_ns, cause } if *worker == node => {
                Some((*noticed_ns, cause.as_str()))
            }
            _ => None,
        })
    }

    /// What the coordinators said, in order of time.
    pub(crate) fn said(&self) -> Vec<(u64, &Stamped<CoordinatorEvent>)> {
        let all =
            self.coordinators.iter().flat_map(|(id, lines)| lines.iter().map(|line| (*id, line)));
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|(_, line)| line.at);
        all
    }
}

/// A world as its maker told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorldSeen {
    pub(crate) generation: Generation,
    pub(crate) nodes: Vec<NodeId>,
    /// The first step that it serves, if it is planned; where it starts, if it is a restart.
    pub(crate) step: Option<Step>,
    pub(crate) is_restart: bool,
}

/// A worker that an agent started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    pub(crate) agent: NodeId,
    pub(crate) worker: NodeId,
    pub(crate) pid: i32,
    pub(crate) at: Timestamp,
}

/// An event and its time.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Stamped<E> {
    #[serde(rename = "t_ns")]
    pub(crate) at: Timestamp,
    #[serde(flatten)]
    pub(crate) event: E,
}

/// What workers write, as far as it is needed here.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum WorkerEvent {
    World {
        generation: Generation,
    },
    Entered {
        generation: Generation,
    },
    Leaf {
        step: Step,
        rank: VirtualRank,
    },
    Recompute {
        step: Step,
    },
    Final {
        step: Step,
    },
    Applied {
        boundary: Step,
        digest: Digest,
    },
    Metric {
        step: Step,
        loss: Option<f64>,
    },
    #[serde(other)]
    Other,
}

/// What agents write, as far as it is needed here.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum AgentEvent {
    Started {
        worker: NodeId,
        pid: i32,
    },
    Exited {
        worker: NodeId,
        noticed_ns: Timestamp,
        cause: String,
    },
    #[serde(other)]
    Other,
}

/// What coordinators write, as far as it is needed here.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum CoordinatorEvent {
    /// This coordinator leads. The log's own event of that name has no term.
    Leader {
        term: Option<u64>,
    },
    World(WorldShape),
    Restart(WorldShape),
    Joined {
        nodes: Vec<NodeId>,
    },
    Drain {
        nodes: Vec<NodeId>,
    },
    Lost {
        nodes: Vec<NodeId>,
    },
    CheckpointCommitted {
        step: Option<Step>,
    },
    Finished {},
    #[serde(other)]
    Other,
}

/// A world in a coordinator's trace.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct WorldShape {
    pub(crate) generation: Generation,
    pub(crate) nodes: Vec<NodeId>,
    pub(crate) step: Option<Step>,
}

/// Reads the traces of one folder as they grow.
#[derive(Debug)]
pub(crate) struct TraceReader {
    folder: PathBuf,
    files: BTreeMap<PathBuf, Tail>,
    history: History,
}

impl TraceReader {
    /// Of a folder that may be empty yet.
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), files: BTreeMap::new(), history: History::default() }
    }

    /// What was read so far.
    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// Looks for new files.
    pub(crate) fn find_files(&mut self) -> anyhow::Result<()> {
        let context = || format!("the traces in {} can't be listed", self.folder.display());
        for entry in std::fs::read_dir(&self.folder).with_context(context)? {
            let path = entry.with_context(context)?.path();
            let Some(source) = Source::of(&path) else { continue };
            if let Entry::Vacant(place) = self.files.entry(path) {
                let path = place.key();
                let file =
                    File::open(path).with_context(|| format!("the trace {}", path.display()))?;
                place.insert(Tail { source, file, rest: Vec::new() });
            }
        }
        Ok(())
    }

    /// Reads what was written since the last look.
    pub(crate) fn read(&mut self) -> anyhow::Result<()> {
        for (path, tail) in &mut self.files {
            let context = || format!("the trace {} can't be read", path.display());
            for line in tail.lines().with_context(context)? {
                let understood = match tail.source {
                    Source::Worker(node) => {
                        push(self.history.workers.entry(node).or_default(), &line)
                    }
                    Source::Agent(node) => {
                        push(self.history.agents.entry(node).or_default(), &line)
                    }
                    Source::Coordinator(id) => {
                        push(self.history.coordinators.entry(id).or_default(), &line)
                    }
                };
                if let Err(error) = understood {
                    let line = String::from_utf8_lossy(&line);
                    tracing::warn!(trace = %path.display(), %error, %line, "a line of a trace is not understood");
                }
            }
        }
        Ok(())
    }
}

fn push<E: DeserializeOwned>(lines: &mut Vec<Stamped<E>>, line: &[u8]) -> serde_json::Result<()> {
    lines.push(serde_json::from_slice(line)?);
    Ok(())
}

/// Who writes a file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Worker(NodeId),
    Agent(NodeId),
    Coordinator(u64),
}

impl Source {
    fn of(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".ndjson")?;
        let (kind, number) = stem.split_once('-')?;
        let number: u64 = number.parse().ok()?;
        match kind {
            "worker" => Some(Self::Worker(NodeId(number))),
            "agent" => Some(Self::Agent(NodeId(number))),
            "coordinator" => Some(Self::Coordinator(number)),
            _ => None,
        }
    }
}

/// A file that grows, and its last line as far as that is written.
#[derive(Debug)]
struct Tail {
    source: Source,
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
        Ok(whole
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(<[u8]>::to_vec)
            .collect())
    }
}

#[cfg(test)]
impl History {
    /// Of lines, each with the name of its file before it: `worker-7 {"event":…}`.
    pub(crate) fn of_lines(lines: &str) -> Self {
        let mut history = Self::default();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (name, line) = line.split_once(' ').unwrap();
            let line = line.as_bytes();
            match Source::of(Path::new(&format!("{name}.ndjson"))).unwrap() {
                Source::Worker(node) => push(history.workers.entry(node).or_default(), line),
                Source::Agent(node) => push(history.agents.entry(node).or_default(), line),
                Source::Coordinator(id) => push(history.coordinators.entry(id).or_default(), line),
            }
            .unwrap();
        }
        history
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_read_once_and_only_when_they_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = File::create(folder.path().join("worker-7.ndjson")).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "x").unwrap();
        let mut reader = TraceReader::new(folder.path());
        reader.find_files().unwrap();
        let cut = r#"{"event":"leaf","t_ns":5,"node":7,"step":3,"rank":1}
{"event":"final","t_n"#;
        file.write_all(cut.as_bytes()).unwrap();
        reader.read().unwrap();
        assert_eq!(reader.history().workers[&NodeId(7)].len(), 1);
        file.write_all("s\":9,\"node\":7,\"step\":3}\nrubbish\n".as_bytes()).unwrap();
        reader.read().unwrap();
        reader.read().unwrap();
        assert_eq!(reader.history().workers[&NodeId(7)].len(), 2);
        assert_eq!(reader.history().finished(NodeId(7), Step(3)), Some(Timestamp(9)));
    }

    #[test]
    fn every_line_that_a_coordinator_writes_has_a_meaning_or_is_passed_over() {
        let history = History::of_lines(
            r#"
            coordinator-2 {"event":"leader","t_ns":1,"node":2,"term":3}
            coordinator-2 {"event":"leader","t_ns":2,"node":2,"nodes":[],"generation":null,"step":null,"message":"coordinator 2 leads"}
            coordinator-2 {"event":"world","t_ns":3,"node":2,"nodes":[70,71],"generation":1,"step":null,"message":"w"}
            coordinator-2 {"event":"restart","t_ns":4,"node":2,"nodes":[72],"generation":2,"step":40,"message":"w"}
            coordinator-2 {"event":"checkpoint_committed","t_ns":5,"node":2,"nodes":[],"generation":null,"step":40,"message":"c"}
            coordinator-2 {"event":"checkpoint_intent","t_ns":6,"node":2,"nodes":[72],"generation":null,"step":44,"message":"c"}
            "#,
        );
        assert_eq!(history.leader(), Some(2));
        assert_eq!(history.checkpoint(), Some(Step(40)));
        let worlds = history.worlds();
        assert_eq!(worlds.len(), 2);
        assert!(worlds[1].is_restart && worlds[1].step == Some(Step(40)));
        assert_eq!(history.settled_world(), None);
    }
}
