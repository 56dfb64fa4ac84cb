//! `ripstop status`, and which cluster a command speaks to.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ripstop::Error;
use ripstop::client::{Client, ClusterStatus, Contact, JobStatus, LocalRun};
use ripstop::settings::{parse_addresses, parse_duration};
use types::JobId;

use crate::certs::parse_job;
use crate::{OutputFormat, print};

/// Which cluster to speak to.
#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    /// Where the coordinators listen; if not given, the newest `ripstop run --standalone` on this host.
    #[arg(long, value_name = "LIST", env = "RIPSTOP_COORDINATORS", requires = "certs")]
    coordinators: Option<String>,
    /// The folder made by `ripstop certs init`.
    #[arg(long, value_name = "DIR", env = "RIPSTOP_CERTS")]
    certs: Option<PathBuf>,
    /// The job.
    #[arg(long, value_name = "NAME", value_parser = parse_job)]
    pub(crate) run_id: Option<JobId>,
    /// The launcher, by its process id, if several `ripstop run --standalone` live on this host.
    #[arg(long, value_name = "PID", conflicts_with_all = ["coordinators", "certs"])]
    pid: Option<u32>,
    /// How long to wait for an answer.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    timeout: Duration,
}

impl ClusterArgs {
    /// To read only: of several local runs the newest is meant, and that is said.
    pub(crate) fn client(&self) -> Result<Client, Error> {
        self.client_of(|runs| {
            let newest = runs.last()?;
            if runs.len() > 1 {
                crate::complain(&format!(
                    "of {} runs on this host this is the newest, job {} of process {}; for another give --run-id or --pid: {}",
                    runs.len(),
                    newest.job,
                    newest.pid,
                    names(runs)
                ));
            }
            Some(newest)
        })
    }

    /// To change something: it must be clear where.
    pub(crate) fn client_to_change(&self) -> Result<Client, Error> {
        self.client_of(|runs| match runs {
            [run] => Some(run),
            _ => None,
        })
    }

    fn client_of(
        &self,
        pick: impl FnOnce(&[LocalRun]) -> Option<&LocalRun>,
    ) -> Result<Client, Error> {
        match (&self.coordinators, &self.certs) {
            (Some(list), Some(dir)) => {
                return Client::from_authority(parse_addresses(list)?, dir, self.timeout);
            }
            (None, Some(_)) => {
                return Err(Error::Usage(
                    "--certs needs --coordinators, where they listen: host:port,host:port,host:port".to_owned(),
                ));
            }
            _ => {}
        }
        let mut runs = Contact::find_local(self.run_id.as_ref());
        runs.retain(|run| self.pid.is_none_or(|pid| run.pid == pid));
        match pick(&runs) {
            Some(run) => Client::from_contact(&run.contact, self.timeout),
            None if runs.is_empty() => Err(Error::Usage(format!(
                "no `ripstop run --standalone`{} lives on this host: give --coordinators and --certs",
                self.run_id.as_ref().map_or(String::new(), |job| format!(" of job {job}"))
            ))),
            None => Err(Error::Usage(format!(
                "several runs live on this host, say which by --run-id or --pid: {}",
                names(&runs)
            ))),
        }
    }
}

/// The job that an order is for: the one named, or the only one.
pub(crate) fn pick_job<'a>(
    status: &'a ClusterStatus,
    named: Option<&JobId>,
) -> Result<&'a JobStatus, Error> {
    let mut jobs = status.jobs.iter().filter(|job| named.is_none_or(|named| job.job == *named));
    match (jobs.next(), jobs.next(), named) {
        (Some(job), None, _) => Ok(job),
        (None, _, Some(named)) => Err(Error::Usage(format!(
            "these coordinators know no job {named}: `ripstop status` without --run-id shows all"
        ))),
        (None, _, None) => Err(Error::Usage("these coordinators know no job yet".to_owned())),
        (Some(_), Some(_), _) => {
            let names: Vec<&str> = status.jobs.iter().map(|job| job.job.as_str()).collect();
            Err(Error::Usage(format!("say which job by --run-id: {}", names.join(", "))))
        }
    }
}

fn names(runs: &[LocalRun]) -> String {
    let names: Vec<String> =
        runs.iter().map(|run| format!("{} (--pid {})", run.job, run.pid)).collect();
    names.join(", ")
}

/// Show how things stand.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: StatusArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client()?;
    let job = args.cluster.run_id;
    let status = crate::block_on(client.status(job.clone()))??;
    if let Some(job) = job.filter(|_| status.jobs.is_empty()) {
        return Err(Error::Usage(format!(
            "these coordinators know no job {job}: `ripstop status` without --run-id shows all"
        ))
        .into());
    }
    match output {
        OutputFormat::Json => print(&serde_json::to_string_pretty(&status)?),
        OutputFormat::Text => print(&text(&status)),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn text(status: &ClusterStatus) -> String {
    let mut lines = vec![format!("coordinators (term {})", status.term)];
    for coordinator in &status.coordinators {
        let role = if coordinator.is_leader { "leader" } else { "" };
        lines.push(format!(
            "  {:>3}  {:<22} {role}",
            coordinator.id,
            coordinator.address.to_string()
        ));
    }
    if status.jobs.is_empty() {
        lines.push("no jobs yet".to_owned());
    }
    for job in &status.jobs {
        describe(job, &mut lines);
    }
    lines.join("\n")
}

fn describe(job: &JobStatus, lines: &mut Vec<String>) {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    lines.push(String::new());
    lines.push(format!(
        "job {}: {}, step {}, generation {}, lineage {}, {} to {} members, {} virtual ranks{}",
        job.job,
        job.state,
        or_dash(job.step.map(|s| s.to_string())),
        or_dash(job.generation.map(|g| g.to_string())),
        or_dash(job.lineage.map(|l| l.to_string())),
        job.min_members,
        job.max_members,
        job.virtual_ranks,
        if job.mixed { ", mixed (not bit-exact)" } else { "" }
    ));
    match &job.checkpoint {
        Some(checkpoint) => {
            lines
                .push(format!("  checkpoint at step {}: {}", checkpoint.step, checkpoint.manifest));
        }
        None => lines.push("  no checkpoint yet".to_owned()),
    }
    lines.push(format!(
        "  {:>6} {:>5} {:<16} {:<10} {:>8}  virtual ranks",
        "node", "rank", "host", "state", "step"
    ));
    for member in &job.members {
        lines.push(format!(
            "  {:>6} {:>5} {:<16} {:<10} {:>8}  {}",
            member.node.to_string(),
            or_dash(member.rank.map(|r| r.to_string())),
            member.host,
            member.state,
            or_dash(member.applied.map(|s| s.to_string())),
            member.blocks
        ));
    }
}
