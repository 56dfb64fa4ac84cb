//! One peer of the exchange that `ripstop bench allreduce` measures beside the sum: the same bytes, without folding.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use ripstop::raw_exchange::RawExchange;

use super::{Measured, cpu_seconds, write_measured};

/// One peer of the exchange.
#[derive(Debug, Args)]
pub(crate) struct PeerArgs {
    #[arg(long)]
    index: u32,
    #[arg(long)]
    members: u32,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    rounds: u64,
    #[arg(long)]
    warm_up: u64,
    #[arg(long)]
    folder: PathBuf,
}

pub(crate) fn run(args: &PeerArgs) -> anyhow::Result<ExitCode> {
    // As a member's endpoints: their tasks on two threads of their own.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let measured = runtime.block_on(measure(args))?;
    write_measured(&args.folder.join(format!("peer-{}.json", args.index)), &measured)?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &PeerArgs) -> anyhow::Result<Measured> {
    let exchange = RawExchange::connect(&args.folder, args.index, args.members).await?;
    let each = 2 * args.bytes / u64::from(args.members);
    let mut measured = Measured { times_ms: Vec::new(), sent_bytes: 0, cpu_s: 0.0 };
    for _ in 0..args.warm_up {
        exchange.round(each).await?;
    }
    let before = (cpu_seconds(), exchange.sent_wire_bytes());
    for _ in 0..args.rounds {
        let began = Instant::now();
        exchange.round(each).await?;
        measured.times_ms.push(began.elapsed().as_secs_f64() * 1e3);
    }
    measured.cpu_s = cpu_seconds() - before.0;
    measured.sent_bytes = exchange.sent_wire_bytes() - before.1;
    exchange.close().await;
    Ok(measured)
}
