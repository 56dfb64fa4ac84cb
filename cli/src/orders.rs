//! What a person orders: `ripstop drain`, `scale` and `stop`.

use std::process::ExitCode;

use clap::Args;
use ripstop::client::JobStatus;
use ripstop::{Error, NodeId};
use serde_json::json;

use crate::status::{ClusterArgs, pick_job};
use crate::{OutputFormat, print};

/// Ask members to leave in good order.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  ripstop drain 103 104\n  ripstop drain --host gpu-17   # before its maintenance"
)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The nodes, as `ripstop status` numbers them.
    #[arg(required_unless_present = "host", value_name = "NODE", value_parser = parse_node)]
    nodes: Vec<NodeId>,
    /// All members on this host, of all jobs unless --run-id names one.
    #[arg(long, value_name = "NAME", conflicts_with = "nodes")]
    host: Option<String>,
}

pub(crate) fn drain(args: DrainArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client_to_change()?;
    let nodes = crate::block_on(async {
        let status = client.status(args.cluster.run_id.clone()).await?;
        let leaving = match &args.host {
            Some(host) => on_host(&status.jobs, host)?,
            None => vec![of_nodes(&status.jobs, args.nodes)?],
        };
        let reason = args.host.as_ref().map_or_else(
            || "asked by an operator".to_owned(),
            |host| format!("host {host} is drained"),
        );
        let mut all = Vec::new();
        for (job, nodes) in leaving {
            client.drain(job, nodes.clone(), reason.clone()).await?;
            all.extend(nodes);
        }
        Ok::<_, Error>(all)
    })??;
    match output {
        OutputFormat::Json => print(&json!({"draining": nodes}).to_string()),
        OutputFormat::Text => {
            let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
            print(&format!(
                "{} leave in good order, at the next planned change, with exit code 75",
                nodes.join(", ")
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

type Leaving = (types::JobId, Vec<NodeId>);

fn of_nodes(jobs: &[JobStatus], nodes: Vec<NodeId>) -> Result<Leaving, Error> {
    let has_all = |job: &&JobStatus| nodes.iter().all(|n| job.members.iter().any(|m| m.node == *n));
    let job = jobs.iter().find(has_all).map(|job| job.job.clone());
    let missing = || {
        Error::Usage("no job has all these nodes: `ripstop status` shows who is there".to_owned())
    };
    Ok((job.ok_or_else(missing)?, nodes))
}

fn on_host(jobs: &[JobStatus], host: &str) -> Result<Vec<Leaving>, Error> {
    let members = |job: &JobStatus| -> Vec<NodeId> {
        job.members.iter().filter(|m| m.host == host).map(|m| m.node).collect()
    };
    let leaving: Vec<Leaving> = jobs
        .iter()
        .map(|job| (job.job.clone(), members(job)))
        .filter(|(_, nodes)| !nodes.is_empty())
        .collect();
    if leaving.is_empty() {
        let mut hosts: Vec<&str> =
            jobs.iter().flat_map(|job| &job.members).map(|m| m.host.as_str()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let hosts = if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") };
        return Err(Error::Usage(format!("no member is on host {host}; hosts: {hosts}")));
    }
    Ok(leaving)
}

/// Change how many members a running job has.
#[derive(Debug, Args)]
#[command(after_help = "Example: ripstop scale --min 4 --max 16")]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// With fewer members the job waits, its state in memory.
    #[arg(long, value_name = "N", required_unless_present = "max")]
    min: Option<u32>,
    /// Members beyond are hot spares. If there are more now, the last of them leave in good order.
    #[arg(long, value_name = "N")]
    max: Option<u32>,
}

pub(crate) fn scale(args: ScaleArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client_to_change()?;
    let (min, max) = (args.min, args.max);
    let scaled = crate::block_on(async {
        let status = client.status(args.cluster.run_id.clone()).await?;
        let job = pick_job(&status, args.cluster.run_id.as_ref())?.job.clone();
        client.scale(job.clone(), min, max).await?;
        let status = client.status(Some(job.clone())).await?;
        pick_job(&status, Some(&job)).cloned()
    })??;
    let JobStatus { job, min_members: min, max_members: max, members, .. } = scaled;
    let here = members.iter().filter(|m| m.state != "draining" && m.state != "leaving").count();
    match output {
        OutputFormat::Json => print(
            &json!({"job": job, "min_members": min, "max_members": max, "members": here})
                .to_string(),
        ),
        OutputFormat::Text => {
            let what = match here {
                n if n < min as usize => "the job waits until enough are here",
                n if n > max as usize => "those beyond are hot spares",
                _ => "nobody else has to come or go",
            };
            print(&format!(
                "job {job}: {min} to {max} members from now on, {here} are here; {what}"
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Stop a job: its state is saved and all its members leave in good order. The next member that joins goes on from there.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Stop it although it has no checkpoint store: its state is lost.
    #[arg(long)]
    lose_state: bool,
}

pub(crate) fn stop(args: StopArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client_to_change()?;
    let stopped = crate::block_on(async {
        let status = client.status(args.cluster.run_id.clone()).await?;
        let job = pick_job(&status, args.cluster.run_id.as_ref())?.clone();
        if job.members.is_empty() {
            return Err(Error::Usage(format!(
                "job {} has no members: it is {}",
                job.job, job.state
            )));
        }
        if !job.has_store && !args.lose_state {
            return Err(Error::Usage(format!(
                "job {} has no checkpoint store, so its state would be lost: give --lose-state if that is meant",
                job.job
            )));
        }
        client.drain(job.job.clone(), Vec::new(), "stopped by an operator".to_owned()).await?;
        Ok(job)
    })??;
    let (job, count) = (stopped.job, stopped.members.len());
    match output {
        OutputFormat::Json => print(&json!({"job": job, "stopping": count}).to_string()),
        OutputFormat::Text => {
            let saved = if stopped.has_store { "the state is saved, then " } else { "" };
            print(&format!("job {job} stops: {saved}{count} members leave with exit code 75"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn parse_node(text: &str) -> Result<NodeId, String> {
    text.parse()
        .map(NodeId)
        .map_err(|_| "a node is a number, in the first column of `ripstop status`".to_owned())
}
