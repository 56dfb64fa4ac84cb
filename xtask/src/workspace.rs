//! Where the tree lies, and how the other tools are started in it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

/// The source tree and its target folder.
pub(crate) struct Workspace {
    root: PathBuf,
    target: PathBuf,
}

impl Workspace {
    /// The tree whose xtask this is.
    pub(crate) fn find() -> Result<Self> {
        let package = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root =
            package.parent().context("the package xtask lies in no workspace")?.to_path_buf();
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let target = if target.is_absolute() { target } else { env::current_dir()?.join(target) };
        Ok(Self { root, target })
    }

    /// The folder with the root manifest.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder for everything that is made and may be thrown away.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// The cargo that started us.
    pub(crate) fn cargo(&self) -> Command {
        self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// A program to run in the root, without the variables that `cargo run` set for this package: build scripts that watch
    /// them would build their crates again.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        for (name, _) in env::vars_os() {
            let ours = |n: &str| OURS.iter().any(|prefix| n.starts_with(prefix));
            if name.to_str().is_some_and(ours) {
                command.env_remove(name);
            }
        }
        command
    }
}

/// Whether this run decides if a change may land: then nothing that a test needs may be missing.
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| value == "true")
}

/// Runs a command to its end.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("can't start {}", words(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", words(command));
    }
    Ok(())
}

/// Runs a command to its end and passes its exit code on, in silence: it said itself what was wrong.
pub(crate) fn exit_code(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("can't start {}", words(command)))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The command line, for people.
pub(crate) fn words(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Variables that cargo sets for the package it runs.
const OURS: [&str; 5] =
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE"];
