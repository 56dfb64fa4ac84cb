//! `ripstop coordinator`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use ripstop::{CoordinatorConfig, CoordinatorHandle, Error};

use crate::status::ClusterArgs;
use crate::{OutputFormat, print};

/// Run one coordinator, or change the set of them.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct CoordinatorArgs {
    #[command(subcommand)]
    command: Option<Change>,
    #[command(flatten)]
    process: Option<ProcessArgs>,
}

/// What can be done to a running set.
#[derive(Debug, Subcommand)]
enum Change {
    /// Give a coordinator whose disk is lost for good its seat again, on the empty disk that it was started with.
    Replace(ReplaceArgs),
}

#[derive(Debug, Args)]
struct ReplaceArgs {
    /// Its id among the peers. Start it with an empty --data-dir first.
    #[arg(value_name = "ID")]
    id: u64,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
struct ProcessArgs {
    /// Its id among the peers.
    #[arg(long, value_name = "N", default_value_t = 1)]
    id: u64,
    /// All coordinators with their addresses, this one included: 1=host:29700,2=host:29700,3=host:29700. The same list on all of them.
    #[arg(long, value_name = "LIST")]
    peers: String,
    /// Where its log lives. If it is lost for good: start with an empty folder, then `ripstop coordinator replace ID`.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// The folder made by `ripstop certs init`; needed at the first start, then kept in the data folder.
    #[arg(long, value_name = "DIR")]
    certs: Option<PathBuf>,
    /// Where to listen; the address among the peers if not given.
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Where to serve /metrics, /livez, /readyz and /v1/jobs.
    #[arg(long, value_name = "IP:PORT")]
    http: Option<SocketAddr>,
    /// A file with the token that orders by HTTP must bring (and reads, where HTTP listens elsewhere than on loopback); without it there are none.
    #[arg(long, value_name = "FILE", requires = "http")]
    http_token: Option<PathBuf>,
    /// How soon a loss must be overcome: the one knob of time, the same on all coordinators and agents.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = ripstop::settings::parse_duration, env = "RIPSTOP_RECOVERY_TARGET")]
    recovery_target: Duration,
    /// Write what happened and when, as NDJSON, into this folder.
    #[arg(long, value_name = "DIR")]
    trace_dir: Option<PathBuf>,
}

pub(crate) fn run(args: CoordinatorArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match (args.command, args.process) {
        (Some(Change::Replace(args)), _) => replace(args, output),
        (None, Some(args)) => serve(args),
        (None, None) => Err(Error::Usage("give --peers and --data-dir".to_owned()).into()),
    }
}

fn replace(args: ReplaceArgs, output: OutputFormat) -> anyhow::Result<ExitCode> {
    let id = args.id;
    let mut client = args.cluster.client_to_change()?;
    crate::block_on(client.replace_coordinator(id))??;
    match output {
        OutputFormat::Json => {
            print(&serde_json::json!({"coordinator": id, "replaced": true}).to_string());
        }
        OutputFormat::Text => print(&format!("coordinator {id} has its seat")),
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(args: ProcessArgs) -> anyhow::Result<ExitCode> {
    let voters = parse_peers(&args.peers)?;
    let own = voters.get(&args.id).copied().ok_or_else(|| {
        Error::Settings(format!(
            "--peers {:?} does not list --id {}: add {}=host:port",
            args.peers, args.id, args.id
        ))
    })?;
    if let Some(dir) = &args.trace_dir {
        std::fs::create_dir_all(dir).with_context(|| format!("--trace-dir {}", dir.display()))?;
    }
    std::fs::create_dir_all(&args.data_dir)
        .map_err(|e| Error::Settings(format!("--data-dir {}: {e}", args.data_dir.display())))?;
    let authority = ripstop::authority_for(&args.data_dir, args.certs.as_deref())?;
    let handle = CoordinatorHandle::start(CoordinatorConfig {
        id: args.id,
        voters,
        listen: args.listen.unwrap_or(own),
        data_dir: args.data_dir,
        authority,
        recovery_target: args.recovery_target,
        http: args.http,
        http_token: args.http_token.as_deref().map(read_token).transpose()?,
        trace: args.trace_dir.map(|dir| dir.join(format!("coordinator-{}.ndjson", args.id))),
    })?;
    tracing::info!(id = args.id, address = %handle.address(), http = ?handle.http(), "coordinator listens");
    crate::block_on(wait_for_end(&handle))?;
    handle.stop()?;
    Ok(ExitCode::SUCCESS)
}

/// Reads the token of HTTP.
fn read_token(file: &Path) -> Result<String, Error> {
    let wrong = |why: String| {
        Error::Settings(format!(
            "--http-token {}: {why}; make one by `head -c 32 /dev/urandom | base64 > FILE`",
            file.display()
        ))
    };
    let text = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    let token = text.trim();
    if token.len() < TOKEN_MIN || !token.chars().all(|c| c.is_ascii_graphic()) {
        return Err(wrong(format!(
            "it must be one word of at least {TOKEN_MIN} visible ASCII characters"
        )));
    }
    Ok(token.to_owned())
}

/// Shorter ones can be guessed.
const TOKEN_MIN: usize = 16;

async fn wait_for_end(handle: &CoordinatorHandle) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    let mut look = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            _ = terminate.recv() => return,
            _ = interrupt.recv() => return,
            _ = look.tick() => if !handle.is_running() { return },
        }
    }
}

fn parse_peers(list: &str) -> Result<BTreeMap<u64, SocketAddr>, Error> {
    let mut voters = BTreeMap::new();
    for item in list.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        let wrong = || {
            Error::Settings(format!(
                "--peers: {item:?} is no peer; write ID=host:port, as 1=10.0.0.5:29700"
            ))
        };
        let (id, address) = item.split_once('=').ok_or_else(wrong)?;
        let id: u64 = id.parse().map_err(|_| wrong())?;
        let address =
            ripstop::settings::parse_addresses(address)?.first().copied().ok_or_else(wrong)?;
        if voters.insert(id, address).is_some() {
            return Err(Error::Settings(format!("--peers lists id {id} twice")));
        }
    }
    if voters.len().is_multiple_of(2) {
        return Err(Error::Settings(format!(
            "--peers lists {} coordinators; an odd number survives as much with fewer: 1, 3 or 5",
            voters.len()
        )));
    }
    Ok(voters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_checked() {
        let three = parse_peers("1=127.0.0.1:1,2=127.0.0.1:2, 3=127.0.0.1:3").unwrap();
        assert_eq!(three.len(), 3);
        for bad in [
            "",
            "1",
            "x=127.0.0.1:1",
            "1=127.0.0.1:1,1=127.0.0.1:2",
            "1=127.0.0.1:1,2=127.0.0.1:2",
            "1=nohost",
        ] {
            assert!(parse_peers(bad).is_err(), "{bad}");
        }
    }
}
