//! `ripstop trainer`.

use std::process::ExitCode;

use clap::Args;
use ripstop::Settings;
use trainer::TrainerConfig;

use crate::OutputFormat;

/// Train a byte-level transformer. Alone, or as a worker under `ripstop run`.
#[derive(Debug, Args)]
pub(crate) struct TrainerArgs {
    #[command(flatten)]
    config: TrainerConfig,
    /// Number of virtual ranks, when it trains alone; under `ripstop run` that command's flag decides.
    #[arg(long, value_name = "V")]
    virtual_ranks: Option<u32>,
}

pub(crate) fn run(args: &TrainerArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut settings = Settings::from_env()?;
    if let Some(count) = args.virtual_ranks {
        let given = settings.virtual_rank_count().count();
        if !settings.is_alone() && given != count {
            let text = format!(
                "--virtual-ranks {count} here, but {given} at `ripstop run`: set it there only"
            );
            return Err(ripstop::Error::Settings(text).into());
        }
        settings = settings.virtual_ranks(count)?;
    }
    let is_json = output == OutputFormat::Json;
    let mut out = std::io::stdout();
    let outcome = crate::block_on(trainer::train(&args.config, settings, &mut out, is_json))?;
    Ok(ExitCode::from(outcome?.exit_code()))
}
