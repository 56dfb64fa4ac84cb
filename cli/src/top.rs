//! `ripstop top`: status that renews itself.

use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use console::Term;
use ripstop::client::{Client, ClusterStatus, Event};
use ripstop::settings::parse_duration;
use serde_json::json;
use types::JobId;

use crate::status::ClusterArgs;
use crate::{OutputFormat, events, print, status};

/// Watch jobs live: speed, members and what happens. Ctrl-C ends it.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Between two looks.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration)]
    every: Duration,
    /// Ends after so many looks.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

pub(crate) fn run(args: TopArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client()?;
    let job = args.cluster.run_id;
    let term = Term::stdout();
    let is_live = output == OutputFormat::Text && term.is_term();
    let every = args.every.max(EVERY_MIN);
    let mut view = View::default();
    crate::block_on(async {
        for look in 1.. {
            let status = client.status(job.clone()).await?;
            view.look(Instant::now(), &status);
            view.read(&mut client, job.as_ref()).await?;
            if output == OutputFormat::Json {
                let rates: BTreeMap<&str, Option<f64>> =
                    status.jobs.iter().map(|j| (j.job.as_str(), view.rate(&j.job))).collect();
                print(&json!({"status": status, "steps_per_second": rates}).to_string());
            } else {
                let height = usize::from(term.size().0);
                let text = view.text(&status, if is_live { height } else { usize::MAX });
                if is_live {
                    term.clear_screen()?;
                }
                print(&text);
            }
            if args.count == Some(look) {
                break;
            }
            tokio::time::sleep(every).await;
        }
        anyhow::Ok(())
    })??;
    Ok(ExitCode::SUCCESS)
}

/// What was seen in former looks.
#[derive(Default)]
struct View {
    /// Steps by time, of each job.
    steps: BTreeMap<JobId, VecDeque<(Instant, u64)>>,
    events: VecDeque<Event>,
    next_event: u64,
}

impl View {
    fn look(&mut self, now: Instant, status: &ClusterStatus) {
        for job in &status.jobs {
            let Some(step) = job.step else { continue };
            let seen = self.steps.entry(job.job.clone()).or_default();
            // A job that was rolled back begins anew.
            if seen.back().is_some_and(|(_, last)| *last > step.0) {
                seen.clear();
            }
            seen.push_back((now, step.0));
            while seen.len() > 2 && seen.front().is_some_and(|(at, _)| now - *at > RATE_WINDOW) {
                seen.pop_front();
            }
        }
    }

    async fn read(
        &mut self,
        client: &mut Client,
        job: Option<&JobId>,
    ) -> Result<(), ripstop::Error> {
        loop {
            let (new, next) = client.events(job.cloned(), self.next_event).await?;
            self.next_event = next;
            if new.is_empty() {
                return Ok(());
            }
            self.events.extend(new);
            while self.events.len() > EVENTS_SHOWN {
                self.events.pop_front();
            }
        }
    }

    /// Steps a second, over the last seconds; `None` at the first look.
    fn rate(&self, job: &JobId) -> Option<f64> {
        let seen = self.steps.get(job)?;
        let ((from, first), (to, last)) = (seen.front()?, seen.back()?);
        (to > from).then(|| (last - first) as f64 / (*to - *from).as_secs_f64())
    }

    fn text(&self, status: &ClusterStatus, height: usize) -> String {
        let mut lines: Vec<String> = Vec::new();
        for job in &status.jobs {
            let active = job.members.iter().filter(|m| m.rank.is_some()).count();
            lines.push(format!(
                "{}: {}, {} steps/s, {active} of {} to {} members, {} spare or joining",
                job.job,
                job.state,
                self.rate(&job.job).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}")),
                job.min_members,
                job.max_members,
                job.members.len() - active
            ));
        }
        lines.push(String::new());
        lines.extend(status::text(status).lines().map(str::to_owned));
        lines.push(String::new());
        let room = height.saturating_sub(lines.len() + 1).min(EVENTS_SHOWN);
        let skipped = self.events.len().saturating_sub(room);
        lines.extend(self.events.iter().skip(skipped).map(events::text));
        lines.truncate(height.max(2) - 1);
        lines.join("\n")
    }
}

/// Over which speed is measured.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// The newest events.
const EVENTS_SHOWN: usize = 12;
/// Faster is a load, and nobody sees it.
const EVERY_MIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use ripstop::client::JobStatus;
    use types::{Step, Term as RaftTerm};

    use super::*;

    fn at(step: u64) -> ClusterStatus {
        let job = JobStatus {
            job: JobId::new("j").unwrap(),
            state: "training".to_owned(),
            generation: None,
            lineage: None,
            step: Some(Step(step)),
            virtual_ranks: 8,
            min_members: 1,
            max_members: 4,
            members: Vec::new(),
            has_store: false,
            checkpoint: None,
            mixed: false,
        };
        ClusterStatus { coordinators: Vec::new(), term: RaftTerm(1), jobs: vec![job] }
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds_and_begins_anew_after_a_rollback() {
        let (mut view, start) = (View::default(), Instant::now());
        let job = JobId::new("j").unwrap();
        view.look(start, &at(5));
        assert_eq!(view.rate(&job), None);
        for second in 1..=30 {
            let step = if second <= 15 { 5 + second } else { 20 + 4 * (second - 15) };
            view.look(start + Duration::from_secs(second), &at(step));
        }
        assert_eq!(view.rate(&job), Some(4.0));
        view.look(start + Duration::from_secs(31), &at(10));
        view.look(start + Duration::from_secs(33), &at(16));
        assert_eq!(view.rate(&job), Some(3.0));
        assert!(view.text(&at(16), 5).lines().count() <= 5);
    }
}
