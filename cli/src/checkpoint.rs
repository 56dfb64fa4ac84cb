//! `ripstop checkpoint`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use ripstop::checkpoints;
use ripstop::settings::parse_duration;
use serde_json::json;
use types::JobId;

use crate::certs::parse_job;
use crate::status::{ClusterArgs, pick_job};
use crate::{OutputFormat, print};

/// Checkpoints of a job.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List what can be restored, newest first.
    Ls(Place),
    /// Read every byte of a checkpoint and compare its BLAKE3.
    Verify {
        #[command(flatten)]
        place: Place,
        /// The step; the newest if not given.
        #[arg(long, value_name = "N")]
        step: Option<u64>,
    },
    /// Save a running job now, and wait until that is done.
    Now {
        #[command(flatten)]
        cluster: ClusterArgs,
        /// How long to wait for it.
        #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = parse_duration)]
        within: Duration,
    },
    /// Write a checkpoint as plain safetensors files.
    Export {
        #[command(flatten)]
        place: Place,
        /// The step; the newest if not given.
        #[arg(long, value_name = "N")]
        step: Option<u64>,
        /// The folder to write, new or empty.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Replace files that are there.
        #[arg(long)]
        overwrite: bool,
    },
}

/// Where checkpoints are.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The URL given as --checkpoint to `ripstop run`.
    #[arg(value_name = "URL")]
    url: String,
    /// The job's name.
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = parse_job)]
    run_id: JobId,
}

pub(crate) fn run(command: CheckpointCommand, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match command {
        CheckpointCommand::Ls(place) => {
            let listed = crate::block_on(checkpoints::list(&place.url, &place.run_id))??;
            match output {
                OutputFormat::Json => print(&serde_json::to_string_pretty(&listed)?),
                OutputFormat::Text if listed.is_empty() => {
                    crate::complain(&none_of(
                        &place,
                        crate::block_on(checkpoints::jobs(&place.url))??,
                    ));
                }
                OutputFormat::Text => {
                    print(&format!("{:>10} {:>8}  {:<12}  manifest", "step", "lineage", "digest"));
                    for found in &listed {
                        let damage = found
                            .damage
                            .as_ref()
                            .map_or(String::new(), |d| format!("  DAMAGED: {d}"));
                        let digest = found.digest.map_or(String::from("-"), |d| format!("{d:#}"));
                        print(&format!(
                            "{:>10} {:>8}  {digest:<12}  {}{damage}",
                            found.step, found.lineage, found.manifest
                        ));
                    }
                }
            }
        }
        CheckpointCommand::Now { cluster, within } => {
            let mut client = cluster.client_to_change()?;
            let saved = crate::block_on(async {
                let status = client.status(cluster.run_id.clone()).await?;
                let job = pick_job(&status, cluster.run_id.as_ref())?.job.clone();
                client.checkpoint(job, within).await
            })??;
            match output {
                OutputFormat::Json => print(&serde_json::to_string_pretty(&saved)?),
                OutputFormat::Text => {
                    print(&format!("saved at step {}: {}", saved.step, saved.manifest));
                }
            }
        }
        CheckpointCommand::Verify { place, step } => {
            let verified = crate::block_on(checkpoints::verify(&place.url, &place.run_id, step))??;
            match output {
                OutputFormat::Json => print(&serde_json::to_string_pretty(&verified)?),
                OutputFormat::Text => print(&format!(
                    "step {}: {} segments, {} bytes, all as written",
                    verified.step, verified.segments, verified.bytes
                )),
            }
        }
        CheckpointCommand::Export { place, step, out, overwrite } => {
            let (url, job) = (&place.url, &place.run_id);
            let files = crate::block_on(checkpoints::export(url, job, step, &out, overwrite))??;
            match output {
                OutputFormat::Json => print(&json!({"files": files}).to_string()),
                OutputFormat::Text => {
                    files.iter().for_each(|file| print(&file.display().to_string()));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says that a job has no checkpoints, and who has.
fn none_of(place: &Place, jobs: Vec<JobId>) -> String {
    let others: Vec<String> =
        jobs.iter().filter(|job| **job != place.run_id).map(ToString::to_string).collect();
    let hint = match others.as_slice() {
        [] => "no other job has any there either".to_owned(),
        others => format!("jobs there: {}; name one by --run-id", others.join(", ")),
    };
    format!("job {} has no checkpoints at {}; {hint}", place.run_id, place.url)
}
