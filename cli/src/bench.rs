//! `ripstop bench`: figures, measured on this machine with real processes.

mod allreduce;
mod recovery;

use std::process::ExitCode;

use clap::Subcommand;

use crate::OutputFormat;

/// Measure this program on this machine.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How long training stands still when something dies, joins or leaves.
    Recovery(recovery::RecoveryArgs),
    /// How fast gradients are summed among processes of this host.
    Allreduce(allreduce::AllreduceArgs),
    /// One member of `allreduce`, which starts it.
    #[command(hide = true)]
    AllreduceMember(allreduce::MemberArgs),
    /// One peer of the exchange that `allreduce` measures beside the sum.
    #[command(hide = true)]
    AllreducePeer(allreduce::PeerArgs),
}

pub(crate) fn run(command: BenchCommand, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Recovery(args) => recovery::run(&args, output),
        BenchCommand::Allreduce(args) => allreduce::run(&args, output),
        BenchCommand::AllreduceMember(args) => allreduce::run_member(&args),
        BenchCommand::AllreducePeer(args) => allreduce::run_peer(&args),
    }
}
