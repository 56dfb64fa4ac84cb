//! All tests, with one build.
//!
//! The documentation's tests go first and nextest last, so that its summary closes the output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::tools::Tools;
use crate::workspace::{Workspace, exit_code, is_ci, succeed, words};

/// Runs all tests. With `arguments` only those that nextest selects by them, with the binaries as they were last built.
pub(crate) fn run(workspace: &Workspace, tools: &Tools, arguments: &[String]) -> Result<ExitCode> {
    let selection = ["--workspace", "--lib", "--bins", "--tests", "--examples"];
    let mut documented = ExitCode::SUCCESS;
    if arguments.is_empty() {
        // Tests of real processes start our binaries, which a build of the tests alone would leave out.
        succeed(workspace.cargo().arg("build").args(selection))?;
        documented = exit_code(workspace.cargo().args(["test", "--workspace", "--doc"]))?;
    }
    let tested = match &tools.nextest {
        Some(nextest) => {
            let mut command = workspace.command(nextest);
            command.args(["nextest", "run", "--profile", if is_ci() { "ci" } else { "default" }]);
            if arguments.is_empty() {
                command.arg("--workspace");
            }
            exit_code(for_tests(command.args(arguments), tools))?
        }
        None => {
            let mut command = workspace.cargo();
            command.args(["test", "--no-fail-fast"]);
            if arguments.is_empty() {
                command.args(selection);
            }
            counted(for_tests(command.args(arguments), tools))?
        }
    };
    Ok(if tested == ExitCode::SUCCESS { documented } else { tested })
}

/// Tells the tests where the tools are.
fn for_tests<'a>(command: &'a mut Command, tools: &Tools) -> &'a mut Command {
    if let Some(python) = &tools.python {
        command.env("RIPSTOP_TEST_PYTHON", python);
    }
    command
}

/// Runs `cargo test` and closes with the sum over its many summaries.
fn counted(command: &mut Command) -> Result<ExitCode> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("can't start {}", words(command)))?;
    let output = child.stdout.take().context("cargo test has no output")?;
    let mut stdout = std::io::stdout().lock();
    let mut sum = Counts::default();
    for line in BufReader::new(output).lines() {
        let line = line?;
        writeln!(stdout, "{line}")?;
        sum.add(&line);
    }
    let succeeded = child.wait()?.success();
    writeln!(stdout, "{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.ignored)?;
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Default, PartialEq, Eq, Debug)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// Adds a line like `test result: ok. 3 passed; 0 failed; 1 ignored; …`; any other counts nothing.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let counts = result.split_once(". ").map_or("", |(_, counts)| counts);
        for (number, word) in counts.split("; ").filter_map(|part| part.split_once(' ')) {
            let Ok(number) = number.parse::<u64>() else { continue };
            match word {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_cargo_test_are_added_and_other_lines_are_not() {
        let mut sum = Counts::default();
        for line in [
            "running 4 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test a::b ... ok",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.00s",
            "the test result: ok. 9 passed",
        ] {
            sum.add(line);
        }
        assert_eq!(sum, Counts { passed: 4, failed: 2, ignored: 1 });
    }
}
