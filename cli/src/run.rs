//! `ripstop run`: the agent, with torchrun's flags.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ripstop::agent::exit::RequeueCode;
use ripstop::agent::notices::NoticeSetting;
use ripstop::agent::output::{self, Streams};
use ripstop::agent::{self, AgentConfig};
use ripstop::settings::{MemberBounds, host_name, parse_addresses, parse_duration};
use ripstop::{Error, VirtualRanks};
use types::JobId;

use crate::certs::parse_job;

/// Start the workers of one host and watch them. Flags are spelt as torchrun's; PET_* variables are read too.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: ripstop run --standalone --nproc-per-node 4 -- ripstop trainer --steps 200"
)]
pub(crate) struct RunArgs {
    /// Hosts: N, or MIN:MAX.
    #[arg(long, alias = "nnodes", value_name = "MIN:MAX", default_value = "1", env = "PET_NNODES")]
    nnodes: HostBounds,
    /// Workers on this host.
    #[arg(
        long,
        alias = "nproc_per_node",
        value_name = "N",
        default_value = "1",
        env = "PET_NPROC_PER_NODE"
    )]
    nproc_per_node: Workers,
    /// This host's place among the hosts, a hint for programs.
    #[arg(long, alias = "node_rank", value_name = "N", default_value_t = 0, env = "PET_NODE_RANK")]
    node_rank: u32,
    /// Embed a coordinator in this agent, with certificates of its own: one host, nothing to set up.
    #[arg(long, env = "PET_STANDALONE")]
    standalone: bool,
    /// Where the coordinators listen: host:port,host:port,host:port.
    #[arg(
        long,
        alias = "rdzv-endpoint",
        alias = "rdzv_endpoint",
        value_name = "LIST",
        env = "RIPSTOP_COORDINATORS"
    )]
    coordinators: Option<String>,
    /// The join token, from `ripstop certs token`; better given by RIPSTOP_TOKEN than on a command line that others can read.
    #[arg(long, value_name = "TOKEN", env = "RIPSTOP_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// The job's name.
    #[arg(long, alias = "rdzv-id", alias = "rdzv_id", alias = "run_id", value_name = "NAME", default_value = "default", env = "RIPSTOP_RUN_ID", value_parser = parse_job)]
    run_id: JobId,
    /// How often each worker is started again; heals with time.
    #[arg(
        long,
        alias = "max_restarts",
        value_name = "N",
        default_value_t = 3,
        env = "PET_MAX_RESTARTS"
    )]
    max_restarts: u32,
    /// With fewer members the job waits, its state in memory.
    #[arg(long, alias = "min_members", value_name = "N", default_value_t = 1)]
    min_members: u32,
    /// After so long with fewer members all leave in good order, the state saved, with the exit code of --requeue-exit-code; without it the job waits however long.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    min_timeout: Option<Duration>,
    /// The first world forms at once when so many have joined; MIN hosts' workers if not given.
    #[arg(long, value_name = "N")]
    expected_members: Option<u32>,
    /// Members beyond are hot spares; MAX hosts' workers if not given.
    #[arg(long, value_name = "N")]
    max_members: Option<u32>,
    /// The job's fixed number V of virtual ranks: what training means, whoever is alive. At least as many as members.
    #[arg(long, alias = "virtual_ranks", value_name = "V", default_value_t = ripstop::settings::VIRTUAL_RANKS_DEFAULT)]
    virtual_ranks: u32,
    /// Where checkpoints go: a folder, file:///folder, or s3://bucket/prefix (credentials by AWS_* variables).
    #[arg(long, value_name = "URL", env = "RIPSTOP_CHECKPOINT")]
    checkpoint: Option<String>,
    /// How often.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    checkpoint_every: Duration,
    /// What of the workers' output goes also to the console when logs are kept: 1 stdout, 2 stderr, 3 both, or 0:1,1:2 by worker.
    #[arg(short, long, value_name = "STREAMS")]
    tee: Option<Streams>,
    /// What of the workers' output goes to files instead of the console (needs --log-dir).
    #[arg(short, long, value_name = "STREAMS")]
    redirects: Option<Streams>,
    /// Keep the workers' output in this folder.
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// How soon a loss must be overcome: the one knob of time.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration, env = "RIPSTOP_RECOVERY_TARGET")]
    recovery_target: Duration,
    /// How long coordinators may be silent where they are needed.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    coordinator_timeout: Duration,
    /// The least time in one leaf, while others wait, that counts as a hang; 30 recovery targets if not given. It is always at least 8 times the longest leaf seen.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    hang_timeout: Option<Duration>,
    /// The longest time outside of leaves (a load, an evaluation, a first leaf) while others wait; 600 recovery targets if not given.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pause_timeout: Option<Duration>,
    /// How long workers may take to leave after TERM.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    grace: Duration,
    /// The exit code of leaving in good order.
    #[arg(long, value_name = "CODE", default_value_t = 75)]
    requeue_exit_code: u8,
    /// The address of this host at which other hosts reach it.
    #[arg(
        long,
        alias = "local-addr",
        alias = "local_addr",
        value_name = "IP",
        env = "RIPSTOP_LISTEN"
    )]
    listen: Option<IpAddr>,
    /// This host's name, for people.
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Admit members whose numeric fingerprint differs; the run is then marked as not bit-exact.
    #[arg(long)]
    allow_mixed: bool,
    /// Leave the virtual ranks where they are, however much faster some members are than others.
    #[arg(long)]
    no_even: bool,
    /// Where to serve /metrics, /livez and /readyz; the workers' own are at the ports after it.
    #[arg(long, value_name = "IP:PORT")]
    http: Option<SocketAddr>,
    /// Who knows when this host goes away, may be repeated: auto (AWS, if it is there), aws, file:PATH (once it exists), command:COMMAND (once it ends with 0), none.
    #[arg(long, value_name = "SOURCE", default_value = "auto", env = "RIPSTOP_NOTICE")]
    notice: Vec<NoticeSetting>,
    /// Write what happened and when, as NDJSON, into this folder.
    #[arg(long, value_name = "DIR")]
    trace_dir: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub(crate) fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    Ok(agent::run(config(args)?)?.into())
}

fn config(args: RunArgs) -> Result<AgentConfig, Error> {
    let usage = |text: &str| Error::Usage(text.to_owned());
    // What a shell's environment says for other jobs does not stand against this flag; another flag does.
    let is_flag = |value: &Option<String>, variable: &str| {
        value.is_some() && *value != std::env::var(variable).ok()
    };
    if args.standalone
        && (is_flag(&args.coordinators, "RIPSTOP_COORDINATORS")
            || is_flag(&args.token, "RIPSTOP_TOKEN"))
    {
        return Err(usage(
            "--standalone embeds a coordinator of its own: leave --coordinators and --token away, or leave --standalone away",
        ));
    }
    let coordinators = match &args.coordinators {
        _ if args.standalone => Vec::new(),
        Some(list) => parse_addresses(list)?,
        None => {
            return Err(usage(
                "say where the coordinators are by --coordinators host:port,…, or use --standalone",
            ));
        }
    };
    let workers = args.nproc_per_node.0;
    let virtual_ranks = VirtualRanks::try_from(args.virtual_ranks).map_err(Error::Usage)?;
    let bounds = [
        ("--min-members", Some(args.min_members)),
        ("--expected-members", args.expected_members),
        ("--max-members", args.max_members),
    ];
    let given: Vec<(&str, u32)> =
        bounds.into_iter().filter_map(|(flag, n)| Some((flag, n?))).collect();
    for pair in given.windows(2) {
        let [(low, few), (high, many)] = [pair[0], pair[1]];
        if few > many {
            return Err(Error::Usage(format!(
                "{low} {few} is more than {high} {many}: the job would wait for ever"
            )));
        }
    }
    let expected =
        args.expected_members.unwrap_or(args.nnodes.min * workers.get()).max(args.min_members);
    let max = args.max_members.unwrap_or((args.nnodes.max * workers.get()).max(expected));
    let max = max.min(virtual_ranks.count());
    let max = max.max(args.min_members);
    let members = MemberBounds { min: args.min_members, expected: expected.min(max), max };
    let here = workers.get();
    if here > virtual_ranks.count() {
        tracing::warn!(
            "{here} workers on this host, but only {virtual_ranks} virtual ranks: those beyond are hot spares; for more to do give --virtual-ranks {here} or more",
            virtual_ranks = virtual_ranks.count()
        );
    }
    let mut output = output::Config::new();
    if args.nnodes.max > 1 {
        output = output.with_host(args.host.clone().unwrap_or_else(host_name));
    }
    if let Some(folder) = args.log_dir {
        output = output.with_log_folder(folder);
    }
    if let Some(streams) = args.redirects {
        output = output.with_redirects(streams).map_err(Error::Usage)?;
    }
    if let Some(streams) = args.tee {
        output = output.with_tee(streams);
    }
    let listen = args.listen.unwrap_or_else(|| own_address(&coordinators));
    let mut program = args.program.into_iter();
    Ok(AgentConfig {
        job: args.run_id,
        program: program.next().ok_or_else(|| usage("no program"))?,
        arguments: program.collect(),
        workers,
        hosts_max: args.nnodes.max,
        host_rank: args.node_rank,
        members,
        virtual_ranks,
        standalone: args.standalone,
        coordinators,
        token: args.token.filter(|_| !args.standalone),
        checkpoint: args.checkpoint,
        checkpoint_every: args.checkpoint_every,
        recovery_target: args.recovery_target,
        coordinator_timeout: args.coordinator_timeout,
        min_timeout: args.min_timeout,
        hang_timeout: args.hang_timeout,
        pause_timeout: args.pause_timeout,
        listen,
        host: args.host.unwrap_or_else(host_name),
        allow_mixed: args.allow_mixed,
        evens_out: !args.no_even,
        max_restarts: args.max_restarts,
        grace: args.grace,
        requeue: RequeueCode::new(args.requeue_exit_code).map_err(Error::Usage)?,
        output,
        http: args.http,
        notices: args.notice,
        trace_dir: args.trace_dir,
    })
}

/// The address from which this host reaches the coordinators: others reach it there too.
fn own_address(coordinators: &[SocketAddr]) -> IpAddr {
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let Some(coordinator) = coordinators.first() else { return loopback };
    let any = if coordinator.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    // A UDP socket that is connected, but sends nothing, shows the route.
    let route = std::net::UdpSocket::bind(any).and_then(|socket| {
        socket.connect(coordinator)?;
        socket.local_addr()
    });
    route.map_or(loopback, |address| address.ip())
}

/// torchrun's `--nnodes`.
#[derive(Clone, Copy, Debug)]
struct HostBounds {
    min: u32,
    max: u32,
}

impl std::str::FromStr for HostBounds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let parse = |part: &str| part.parse::<u32>().ok().filter(|n| *n > 0);
        match (parse(min), parse(max)) {
            (Some(min), Some(max)) if min <= max => Ok(Self { min, max }),
            _ => Err(format!("{text:?}: write a number of hosts, or MIN:MAX")),
        }
    }
}

/// torchrun's `--nproc-per-node`.
#[derive(Clone, Copy, Debug)]
struct Workers(NonZeroU32);

impl std::str::FromStr for Workers {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let count = match text {
            "auto" | "cpu" => {
                std::thread::available_parallelism().ok().and_then(|n| u32::try_from(n.get()).ok())
            }
            "gpu" | "xpu" => {
                return Err(
                    "gpu: there are no GPU kernels yet; write a number, auto or cpu".to_owned()
                );
            }
            number => number.parse().ok(),
        };
        count
            .and_then(NonZeroU32::new)
            .filter(|count| *count <= agent::WORKERS_MAX)
            .map(Self)
            .ok_or_else(|| {
                let most = agent::WORKERS_MAX;
                format!("{text:?}: write a number of workers, 1 to {most}, auto or cpu")
            })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        run: RunArgs,
    }

    #[test]
    fn flags_before_the_program_are_ours_and_those_after_it_are_its_own() {
        for words in [&["train", "--steps", "3"][..], &["--", "train", "--steps", "3"]] {
            let all = [&["run", "--standalone"], words].concat();
            assert_eq!(Program::parse_from(all).run.program, ["train", "--steps", "3"]);
        }
        for words in [&["--bogus", "train"][..], &["--bogus", "--", "train"], &["-z", "train"], &[]]
        {
            let all = [&["run", "--standalone"], words].concat();
            assert!(Program::try_parse_from(all).is_err(), "{words:?}");
        }
    }
}
