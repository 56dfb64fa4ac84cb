//! `ripstop explain`: what became of each change of a job's members.

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::Args;
use ripstop::client::Event;
use ripstop::{Error, NodeId};
use serde::Serialize;
use types::{Generation, JobId};

use crate::status::{ClusterArgs, pick_job};
use crate::{OutputFormat, events, print};

/// Explain a change of a job's members: what happened, who noticed, how long each phase took and what it cost.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  ripstop explain            # the last change\n  ripstop explain 7          # the change to world 7\n  ripstop explain --all      # one line each"
)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The new world's number, as in `ripstop events`; the last change if not given.
    #[arg(value_name = "GENERATION")]
    generation: Option<u64>,
    /// All changes that the coordinators remember, one line each.
    #[arg(long, conflicts_with = "generation")]
    all: bool,
}

pub(crate) fn run(args: ExplainArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client()?;
    let (job, all) = crate::block_on(async {
        let status = client.status(args.cluster.run_id.clone()).await?;
        let job = pick_job(&status, args.cluster.run_id.as_ref())?.job.clone();
        let mut all = Vec::new();
        let mut since = 0;
        loop {
            let (events, next) = client.events(Some(job.clone()), since).await?;
            if events.is_empty() {
                return Ok::<_, Error>((job, all));
            }
            all.extend(events);
            since = next;
        }
    })??;
    let changes = changes(&all);
    let wanted: Vec<&Change> = match args.generation {
        _ if args.all => changes.iter().collect(),
        Some(wanted) => changes.iter().filter(|change| change.generation.0 == wanted).collect(),
        None => changes.last().into_iter().collect(),
    };
    if wanted.is_empty() {
        return Err(Error::Usage(missing(&job, args.generation, &changes)).into());
    }
    match (output, args.all) {
        (OutputFormat::Json, true) => print(&serde_json::to_string_pretty(&wanted)?),
        (OutputFormat::Json, false) => print(&serde_json::to_string_pretty(wanted[0])?),
        (OutputFormat::Text, true) => {
            print(&format!(
                "{:>5}  {:<13} {:>9} {:>9}  what happened",
                "world", "time", "agreed", "finished"
            ));
            wanted.iter().for_each(|change| print(&change.line()));
        }
        (OutputFormat::Text, false) => print(&wanted[0].text(&job)),
    }
    Ok(ExitCode::SUCCESS)
}

fn missing(job: &JobId, wanted: Option<u64>, changes: &[Change]) -> String {
    match (wanted, changes.first(), changes.last()) {
        (Some(wanted), Some(first), Some(last)) => format!(
            "job {job} has no world {wanted} that the coordinators remember: there are {} to {}",
            first.generation, last.generation
        ),
        _ => format!("job {job} has formed no world yet"),
    }
}

/// A change of a job's world, from its first cause to its first step.
#[derive(Debug, Serialize)]
struct Change {
    generation: Generation,
    /// Milliseconds since 1970, by the leader's clock, at which its first cause was noted.
    at_ms: u64,
    /// What led to it, in words, oldest first.
    causes: Vec<String>,
    /// Who noticed the loss: `agent`, `leader` or `member`; none where nothing was lost.
    noticed_by: Option<&'static str>,
    world: String,
    came: Vec<NodeId>,
    went: Vec<NodeId>,
    /// From the first cause in the log to the new world in the log.
    agreed_ms: u64,
    /// From the new world's arrival until all its members had entered it.
    entering_ms: Option<f64>,
    /// From the new world's arrival until its first step was summed.
    stepping_ms: Option<f64>,
    /// From the first cause to the first step.
    total_ms: Option<f64>,
    recomputed_leaves: Option<u64>,
    passed_chunks: Option<u64>,
    /// The job began anew from this step: the state was lost from all members' memory.
    restarted_from: Option<u64>,
}

/// Puts a job's events together, each with the world that it led to.
fn changes(events: &[Event]) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    let mut causes: Vec<&Event> = Vec::new();
    let mut members: BTreeSet<NodeId> = BTreeSet::new();
    for event in events {
        match event.kind.as_str() {
            "lost" | "diverged" | "drain" | "scaled" | "joined" | "evened" => causes.push(event),
            "world" | "restart" => {
                let Some(generation) = event.generation else { continue };
                let next: BTreeSet<NodeId> = event.nodes.iter().copied().collect();
                let came: Vec<NodeId> = next.difference(&members).copied().collect();
                let went: Vec<NodeId> = members.difference(&next).copied().collect();
                let mut words: Vec<String> = causes.iter().map(|c| c.message.clone()).collect();
                if words.is_empty() && !came.is_empty() {
                    words
                        .push(format!("{} had the state and took virtual ranks over", list(&came)));
                }
                let at_ms = causes.first().map_or(event.at_ms, |cause| cause.at_ms);
                changes.push(Change {
                    generation,
                    at_ms,
                    causes: words,
                    noticed_by: causes.iter().find_map(|cause| noticed_by(cause.cause.as_deref()?)),
                    world: event.message.clone(),
                    came,
                    went,
                    agreed_ms: event.at_ms.saturating_sub(at_ms),
                    entering_ms: None,
                    stepping_ms: None,
                    total_ms: None,
                    recomputed_leaves: None,
                    passed_chunks: None,
                    restarted_from: event.step.filter(|_| event.kind == "restart").map(|s| s.0),
                });
                members = next;
                causes.clear();
            }
            "settled" => {
                let Some(cost) = event.cost else { continue };
                let of_it = |change: &&mut Change| Some(change.generation) == event.generation;
                let Some(change) = changes.iter_mut().rev().find(of_it) else { continue };
                let ms = |time: std::time::Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
                change.entering_ms = Some(ms(cost.entering));
                change.stepping_ms = Some(ms(cost.stepping));
                change.total_ms = Some(change.agreed_ms as f64 + ms(cost.stepping));
                change.recomputed_leaves = Some(cost.recomputed_leaves);
                change.passed_chunks = Some(cost.passed_chunks);
            }
            _ => {}
        }
    }
    changes
}

fn list(nodes: &[NodeId]) -> String {
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    if names.is_empty() { "nobody".to_owned() } else { names.join(", ") }
}

/// Who is the first to know of such a loss.
fn noticed_by(cause: &str) -> Option<&'static str> {
    match cause {
        "exited" | "signalled" => Some("agent"),
        "silent" | "hung" | "cut_off" | "diverged" => Some("leader"),
        "orphaned" => Some("member"),
        _ => None,
    }
}

impl Change {
    fn line(&self) -> String {
        let what = match self.causes.as_slice() {
            [] => self.world.clone(),
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first}; and {} more", rest.len()),
        };
        let finished = self.total_ms.map_or("-".to_owned(), |ms| format!("{ms:.0} ms"));
        format!(
            "{:>5}  {:<13} {:>9} {finished:>9}  {what}",
            self.generation,
            events::time(self.at_ms),
            format!("{} ms", self.agreed_ms)
        )
    }

    fn text(&self, job: &JobId) -> String {
        let mut lines = vec![format!(
            "job {job}, the change to world {} at {}",
            self.generation,
            events::time(self.at_ms)
        )];
        let mut row = |name: &str, text: String| lines.push(format!("  {name:<10} {text}"));
        match self.causes.as_slice() {
            [] => row("what", "nobody was lost, nobody asked for it".to_owned()),
            causes => {
                for (cause, name) in
                    causes.iter().zip(std::iter::once("what").chain(std::iter::repeat("")))
                {
                    row(name, cause.clone());
                }
            }
        }
        match self.noticed_by {
            Some("agent") => row("noticed by", "the agent that watched the process".to_owned()),
            Some("leader") => row("noticed by", "the leading coordinator".to_owned()),
            Some(_) => row("noticed by", "the member itself".to_owned()),
            None => {}
        }
        row("world", self.world.clone());
        row("", format!("came: {}; went: {}", list(&self.came), list(&self.went)));
        if let Some(step) = self.restarted_from {
            row("restart", format!("all memory was lost: the job went on from step {step}"));
        }
        row("agreed", format!("{} ms after the first cause was noted", self.agreed_ms));
        let known = self.entering_ms.zip(self.stepping_ms).zip(self.total_ms);
        let counts = self.recomputed_leaves.zip(self.passed_chunks);
        match known.zip(counts) {
            Some((((entering, stepping), total), (leaves, chunks))) => {
                row("entered", format!("{entering:.1} ms after the world came, by all members"));
                row("first step", format!("{stepping:.1} ms after the world came"));
                row(
                    "cost",
                    format!(
                        "{total:.0} ms until the first step, {leaves} leaves computed again, {chunks} final chunks sent again"
                    ),
                );
            }
            None => row("cost", "not known: no step was done in this world, or not yet".to_owned()),
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ripstop::client::Cost;
    use types::Step;

    use super::*;

    fn event(at_ms: u64, kind: &str, message: &str) -> Event {
        Event {
            index: at_ms,
            at_ms,
            job: None,
            kind: kind.to_owned(),
            message: message.to_owned(),
            nodes: Vec::new(),
            generation: None,
            step: None,
            cause: None,
            cost: None,
        }
    }

    fn world(at_ms: u64, generation: u64, nodes: &[u64]) -> Event {
        let nodes = nodes.iter().copied().map(NodeId).collect();
        Event { nodes, generation: Some(Generation(generation)), ..event(at_ms, "world", "w") }
    }

    fn history() -> Vec<Event> {
        let cost = Cost {
            entering: Duration::from_micros(3_140),
            stepping: Duration::from_millis(20),
            recomputed_leaves: 2,
            passed_chunks: 5,
        };
        let lost = |at, node| Event {
            nodes: vec![NodeId(node)],
            cause: Some("signalled".to_owned()),
            ..event(at, "lost", "node is lost")
        };
        vec![
            event(1, "joined", "a"),
            world(5, 1, &[1, 2, 3, 4]),
            event(7, "checkpoint_committed", "c"),
            lost(100, 2),
            lost(110, 4),
            world(125, 2, &[1, 3]),
            Event {
                generation: Some(Generation(2)),
                cost: Some(cost),
                ..event(170, "settled", "s")
            },
            Event { kind: "restart".to_owned(), step: Some(Step(9)), ..world(300, 3, &[7]) },
        ]
    }

    #[test]
    fn losses_within_a_window_belong_to_one_change_and_its_times_add_up() {
        let changes = changes(&history());
        assert_eq!(changes.len(), 3);
        let change = &changes[1];
        assert_eq!((change.at_ms, change.agreed_ms, change.causes.len()), (100, 25, 2));
        assert_eq!(change.went, [NodeId(2), NodeId(4)]);
        assert_eq!((change.noticed_by, change.total_ms), (Some("agent"), Some(45.0)));
        assert_eq!(change.entering_ms, Some(3.1));
        let text = change.text(&JobId::new("j").unwrap());
        assert!(text.contains("2 leaves computed again") && text.contains("45 ms"), "{text}");
    }

    #[test]
    fn a_restart_says_what_it_went_on_from_and_an_open_change_that_its_cost_is_not_known() {
        let changes = changes(&history());
        let text = changes[2].text(&JobId::new("j").unwrap());
        assert!(text.contains("from step 9") && text.contains("not known"), "{text}");
        assert!(changes[0].noticed_by.is_none());
    }
}
