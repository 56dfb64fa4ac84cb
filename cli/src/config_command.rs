//! `ripstop config`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use ripstop::Error;
use ripstop::settings::{derived, parse_duration};
use serde_json::{Map, Value, json};

use crate::{OutputFormat, print};

/// What settings come to.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Show every time that follows from the recovery target.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// How soon a loss must be overcome: the one knob of time.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration, env = "RIPSTOP_RECOVERY_TARGET")]
    recovery_target: Duration,
}

pub(crate) fn run(command: ConfigCommand, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let ConfigCommand::Show(ShowArgs { recovery_target }) = command;
    let values =
        derived(recovery_target).map_err(|e| Error::Usage(format!("--recovery-target: {e}")))?;
    match output {
        OutputFormat::Json => {
            let map: Map<String, Value> = values
                .iter()
                .map(|value| (format!("{}_ms", value.name), json!(value.time.as_secs_f64() * 1e3)))
                .collect();
            print(&serde_json::to_string_pretty(&map)?);
        }
        OutputFormat::Text => {
            for value in values {
                print(&format!(
                    "{:<16} {:>8}  {}",
                    value.name,
                    format!("{:?}", value.time),
                    value.meaning
                ));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
