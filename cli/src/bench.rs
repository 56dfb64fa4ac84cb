//! `ripstop bench`: figures, measured on this machine with real processes.

mod recovery;

use std::process::ExitCode;

use clap::Subcommand;

use crate::OutputFormat;

/// Measure this program on this machine.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How long training stands still when something dies, joins or leaves.
    Recovery(recovery::RecoveryArgs),
}

pub(crate) fn run(command: BenchCommand, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Recovery(args) => recovery::run(&args, output),
    }
}
