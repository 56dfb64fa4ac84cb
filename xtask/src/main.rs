//! Development commands, run as `cargo xtask COMMAND`.
//!
//! One file per command. Everything they say goes to standard error, so that standard output stays what the tools they start
//! write there. Deliberately not here: anything that the product itself needs; no room imports this package.
#![expect(clippy::print_stderr, reason = "talking to a terminal is what these commands are for")]

mod ci;
mod suite;
mod tidy;
mod tools;
mod workspace;

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::tools::Tools;
use crate::workspace::Workspace;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    match run(&command, &arguments.collect::<Vec<_>>()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &str, arguments: &[String]) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    match command {
        "test" => suite::run(&workspace, &Tools::for_tests(&workspace)?, arguments),
        "ci" => ci::run(&workspace),
        "tidy" => tidy::run(&workspace).map(|()| ExitCode::SUCCESS),
        "chaos" => chaos(&workspace, arguments),
        "help" | "--help" | "-h" => {
            eprint!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        other => {
            eprint!("xtask: no command {other:?}\n\n{USAGE}");
            Ok(ExitCode::from(EXIT_USAGE))
        }
    }
}

/// Replays one seed of the simulation, or runs many.
fn chaos(workspace: &Workspace, arguments: &[String]) -> Result<ExitCode> {
    let mut command = workspace.cargo();
    command.args(["run", "--package", "ripstop-chaos", "--bin", "chaos", "--"]).args(arguments);
    workspace::exit_code(&mut command)
}

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [ARGS]       install what the tests need, then run all of them; ARGS go to `cargo nextest run` instead of --workspace
  ci                tidy, fmt, clippy, docs, deny, test: must pass before each commit
  tidy              refuse what is never right in this tree; list the longest files and functions
  chaos --seed N    replay one seed of the simulation
  chaos --seeds N   run N seeds of it
";

/// Bad usage, as in sysexits.h.
const EXIT_USAGE: u8 = 64;
