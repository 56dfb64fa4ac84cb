//! `ripstop demo`.

use std::process::ExitCode;

use clap::Args;

use crate::OutputFormat;

/// See it happen.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {}

pub(crate) fn run(_args: DemoArgs, _output: OutputFormat) -> anyhow::Result<ExitCode> {
    anyhow::bail!("under construction")
}
