//! `ripstop events`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ripstop::client::Event;

use crate::status::ClusterArgs;
use crate::{OutputFormat, print};

/// Show what happened, oldest first.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Only events from this entry of the log on.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    since: u64,
    /// Goes on as events come, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
}

pub(crate) fn run(args: EventsArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.client()?;
    let job = args.cluster.run_id;
    crate::block_on(async {
        let mut since = args.since;
        loop {
            let (events, next) = client.events(job.clone(), since).await?;
            let is_all = events.is_empty();
            for event in &events {
                print(&line(event, output)?);
            }
            since = next;
            if is_all && !args.follow {
                return anyhow::Ok(());
            }
            if is_all {
                tokio::time::sleep(FOLLOW_PAUSE).await;
            }
        }
    })??;
    Ok(ExitCode::SUCCESS)
}

fn line(event: &Event, output: OutputFormat) -> anyhow::Result<String> {
    if output == OutputFormat::Json {
        return Ok(serde_json::to_string(event)?);
    }
    Ok(text(event))
}

/// One line for people.
pub(crate) fn text(event: &Event) -> String {
    let job = event.job.as_ref().map_or("-", |job| job.as_str());
    format!(
        "{:>6}  {}  {job:<12} {:<22} {}",
        event.index,
        time(event.at_ms),
        event.kind,
        event.message
    )
}

/// Milliseconds since 1970 as a time of day.
pub(crate) fn time(at_ms: u64) -> String {
    let seconds = at_ms / 1000 % 86_400;
    format!(
        "{:02}:{:02}:{:02}.{:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        at_ms % 1000
    )
}

const FOLLOW_PAUSE: Duration = Duration::from_millis(500);
