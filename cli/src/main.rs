//! The command `ripstop`. stdout is data, stderr is talk; the exit codes are those of DESIGN §6.

mod bench;
mod certs;
mod checkpoint;
mod config_command;
mod coordinator;
mod demo;
mod events;
mod explain;
mod orders;
mod rehearsal;
mod run;
mod status;
mod top;
mod trainer_command;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// Fault-tolerant elastic training: a worker, a host or a coordinator may die at any moment, and training goes on, in the same step, to the
/// same bits.
#[derive(Debug, Parser)]
#[command(name = "ripstop", version, max_term_width = 110, after_help = EXIT_CODES)]
struct Cli {
    /// How results are printed on stdout.
    #[arg(short = 'o', long, global = true, value_enum, default_value = "text")]
    output: OutputFormat,
    /// How logs are printed on stderr; RIPSTOP_LOG filters them (as warn, info, debug).
    #[arg(long, global = true, value_enum, default_value = "auto", value_name = "FORMAT")]
    log_format: LogFormat,
    /// Says more.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Says only warnings.
    #[arg(short, long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start the workers of one host and watch them (torchrun's flags).
    Run(Box<run::RunArgs>),
    /// Run one coordinator: a Raft voter that serves many jobs.
    Coordinator(coordinator::CoordinatorArgs),
    /// Show how jobs, members and coordinators stand.
    Status(status::StatusArgs),
    /// Watch jobs live: speed, members and what happens.
    Top(top::TopArgs),
    /// Show what happened.
    Events(events::EventsArgs),
    /// Explain a change of members: what happened, who noticed, what each phase took, what it cost.
    Explain(explain::ExplainArgs),
    /// Ask members to leave in good order; others take over their virtual ranks.
    Drain(orders::DrainArgs),
    /// Change how many members a running job has.
    Scale(orders::ScaleArgs),
    /// Stop a job: its state is saved, and its members leave in good order.
    Stop(orders::StopArgs),
    /// Save a running job, and list, verify and export checkpoints.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Make a cluster's certificates and join tokens.
    #[command(subcommand)]
    Certs(certs::CertsCommand),
    /// Show what settings come to.
    #[command(subcommand)]
    Config(config_command::ConfigCommand),
    /// The bundled training program: a byte-level transformer on any text.
    Trainer(trainer_command::TrainerArgs),
    /// Measure this program on this machine.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// See it happen: a job that loses workers and a leader, beside the same job undisturbed.
    Demo(demo::DemoArgs),
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Auto,
    Text,
    Json,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; the program's own code, or 128+n for signal n; 64 usage; 69 coordinators unreachable; 70 a bug of ours; \
75 left in good order, requeue; 76 incompatible; 77 bad node; 78 configuration; 130/143 forced.";

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let is_wrong = error.use_stderr();
            let _ = error.print();
            return if is_wrong { ExitCode::from(64) } else { ExitCode::SUCCESS };
        }
    };
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => "warn",
        (false, 0) => default_level(&cli.command),
        (false, 1) => "debug",
        (false, _) => "trace",
    };
    let format = match cli.log_format {
        LogFormat::Auto => ripstop::logging::LogFormat::Auto,
        LogFormat::Text => ripstop::logging::LogFormat::Text,
        LogFormat::Json => ripstop::logging::LogFormat::Json,
    };
    ripstop::logging::start(format, level);
    let result = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Coordinator(args) => coordinator::run(args, cli.output),
        Command::Status(args) => status::run(args, cli.output),
        Command::Events(args) => events::run(args, cli.output),
        Command::Explain(args) => explain::run(args, cli.output),
        Command::Drain(args) => orders::drain(args, cli.output),
        Command::Scale(args) => orders::scale(args, cli.output),
        Command::Stop(args) => orders::stop(args, cli.output),
        Command::Top(args) => top::run(args, cli.output),
        Command::Config(command) => config_command::run(command, cli.output),
        Command::Checkpoint(command) => checkpoint::run(command, cli.output),
        Command::Certs(command) => certs::run(command, cli.output),
        Command::Trainer(args) => trainer_command::run(&args, cli.output),
        Command::Bench(command) => bench::run(command, cli.output),
        Command::Demo(args) => demo::run(args, cli.output),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Commands that a person waits for talk little; servers say what they do.
fn default_level(command: &Command) -> &'static str {
    match command {
        Command::Run(_) | Command::Coordinator(_) => "info",
        _ => "warn",
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<ripstop::Error>() {
        return error.exit_code();
    }
    error.downcast_ref::<trainer::ProgramError>().map_or(1, trainer::ProgramError::exit_code)
}

/// Prints data.
/// A reader that has gone (as `head` goes) ends the command quietly.
pub(crate) fn print(text: &str) {
    use std::io::Write;
    if writeln!(std::io::stdout(), "{text}").is_err() {
        std::process::exit(0);
    }
}

/// Prints one clear line for a person.
#[expect(clippy::print_stderr, reason = "stderr is where a command talks")]
pub(crate) fn complain(text: &str) {
    eprintln!("ripstop: {text}");
}

/// Runs a future to its end on this thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}
