//! Everything that must pass before a commit, the cheap checks first and the tests last.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;

use crate::tools::Tools;
use crate::workspace::{Workspace, succeed};
use crate::{suite, tidy};

/// Runs the phases in order and stops at the first that fails. Each but the last says how long it took; after the tests their
/// runner's summary is the last word.
pub(crate) fn run(workspace: &Workspace) -> Result<ExitCode> {
    let begin = Instant::now();
    let phase = |name: &str, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let started = Instant::now();
        work()?;
        let (took, total) = (started.elapsed().as_secs_f64(), begin.elapsed().as_secs_f64());
        eprintln!("xtask: {name} passed in {took:.1} s ({total:.1} s since the start)");
        Ok(())
    };
    phase("tidy", &|| tidy::run(workspace))?;
    phase("fmt", &|| succeed(workspace.cargo().args(["fmt", "--all", "--", "--check"])))?;
    let tools = Tools::for_ci(workspace)?;
    phase("clippy", &|| {
        let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
        succeed(workspace.cargo().args(arguments))
    })?;
    phase("docs", &|| {
        // Libraries only: the binary `ripstop` and the library of that name would write the same pages.
        let arguments = ["doc", "--workspace", "--no-deps", "--lib"];
        succeed(workspace.cargo().args(arguments).env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    phase("deny", &|| deny(workspace, &tools))?;
    suite::run(workspace, &tools, &[])
}

/// Licences, bans and sources by `deny.toml`. The advisories' database is not asked: it lies outside the registries.
fn deny(workspace: &Workspace, tools: &Tools) -> Result<()> {
    let Some(deny) = &tools.deny else {
        eprintln!("xtask: licences, bans and sources were not checked");
        return Ok(());
    };
    succeed(workspace.command(deny).args(["--locked", "check", "licenses", "bans", "sources"]))
}
