//! `ripstop status` and `ripstop drain`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ripstop::client::{Client, ClusterStatus, Contact, JobStatus, LocalRun};
use ripstop::settings::{parse_addresses, parse_duration};
use ripstop::{Error, NodeId};
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

fn text(status: &ClusterStatus) -> String {
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
        "job {}: {}, step {}, generation {}, lineage {}, {} virtual ranks{}",
        job.job,
        job.state,
        or_dash(job.step.map(|s| s.to_string())),
        or_dash(job.generation.map(|g| g.to_string())),
        or_dash(job.lineage.map(|l| l.to_string())),
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

/// Ask members to leave in good order.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The nodes, as `ripstop status` numbers them.
    #[arg(required = true, value_name = "NODE", value_parser = parse_node)]
    nodes: Vec<NodeId>,
}

pub(crate) fn drain(args: DrainArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client_to_change()?;
    let nodes = args.nodes;
    crate::block_on(async {
        let status = client.status(args.cluster.run_id.clone()).await?;
        let has_all =
            |job: &&JobStatus| nodes.iter().all(|n| job.members.iter().any(|m| m.node == *n));
        let job = status.jobs.iter().find(has_all).map(|job| job.job.clone());
        let job = job.ok_or_else(|| {
            Error::Usage(
                "no job has all these nodes: `ripstop status` shows who is there".to_owned(),
            )
        })?;
        client.drain(job, nodes, "asked by an operator".to_owned()).await
    })??;
    match output {
        OutputFormat::Json => print("{\"draining\": true}"),
        OutputFormat::Text => print("they leave in good order, at the next planned change"),
    }
    Ok(ExitCode::SUCCESS)
}

fn parse_node(text: &str) -> Result<NodeId, String> {
    text.parse()
        .map(NodeId)
        .map_err(|_| "a node is a number, in the first column of `ripstop status`".to_owned())
}
