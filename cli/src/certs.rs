//! `ripstop certs`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use serde_json::json;
use types::JobId;

use crate::{OutputFormat, print};

/// Certificates of a cluster.
#[derive(Debug, Subcommand)]
pub(crate) enum CertsCommand {
    /// Make a cluster's certificate authority.
    Init {
        /// Where to; a new folder. Coordinators need it (--certs); it holds the cluster's secret key.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
    /// Make a join token for agents; coordinators count its uses.
    Token {
        /// The folder made by `ripstop certs init`.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// How many agents may join with it.
        #[arg(long, value_name = "N", default_value_t = 1)]
        uses: u32,
        /// The only job that it is good for; any if not given.
        #[arg(long, value_name = "NAME", value_parser = parse_job)]
        job: Option<JobId>,
        /// How long it is good for, by the coordinators' clock; for ever if not given.
        #[arg(long, value_name = "DURATION", value_parser = ripstop::settings::parse_duration)]
        valid: Option<Duration>,
    },
}

pub(crate) fn run(command: CertsCommand, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match command {
        CertsCommand::Init { dir } => {
            let fingerprint = ripstop::certificates::init(&dir)?;
            match output {
                OutputFormat::Json => {
                    print(&json!({"dir": dir, "fingerprint": fingerprint}).to_string());
                }
                OutputFormat::Text => {
                    print(&format!(
                        "certificate authority {fingerprint}\nin {dir}; its key is the cluster's: only coordinators' hosts get a copy of the folder, and nobody else may read it",
                        dir = dir.display()
                    ));
                }
            }
        }
        CertsCommand::Token { dir, uses, job, valid } => {
            let token = ripstop::certificates::token(&dir, uses, job, valid)?;
            match output {
                OutputFormat::Json => print(&json!({"token": token, "uses": uses}).to_string()),
                OutputFormat::Text => print(&token),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn parse_job(name: &str) -> Result<JobId, String> {
    JobId::new(name)
}
