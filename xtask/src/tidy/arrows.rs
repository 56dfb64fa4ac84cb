//! Which package may import which: between our rooms, and of the outside crates that are kept behind one file.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{Workspace, words};

/// Asks cargo for the manifests and refuses each import that the tables below don't allow.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>> {
    let mut command = workspace.cargo();
    command.args(["metadata", "--no-deps", "--format-version", "1"]);
    let output = command.output().with_context(|| format!("can't start {}", words(&command)))?;
    if !output.status.success() {
        bail!("{}: {}", words(&command), String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut refusals = Vec::new();
    for package in packages {
        refusals.extend(check_package(package)?);
    }
    Ok(refusals)
}

fn check_package(package: &Value) -> Result<Vec<String>> {
    let folder = folder_of(
        package["manifest_path"]
            .as_str()
            .context("a package without manifest")?
            .trim_end_matches("/Cargo.toml"),
    );
    let Some((_, may)) = MAY_IMPORT.iter().find(|(room, _)| *room == folder) else {
        return Ok(vec![format!(
            "{folder}/Cargo.toml: give the new room {folder} its row in MAY_IMPORT, xtask/src/tidy/arrows.rs"
        )]);
    };
    let mut refusals = Vec::new();
    for dependency in
        package["dependencies"].as_array().context("a package without dependencies")?
    {
        let name = dependency["name"].as_str().context("a dependency without name")?;
        if let Some(room) = dependency["path"].as_str().map(folder_of) {
            if !may.contains(&room) {
                let allowed = if may.is_empty() { "no other room".into() } else { may.join(", ") };
                refusals.push(format!(
                    "{folder}/Cargo.toml: {folder} may import {allowed}, but it imports {room}"
                ));
            }
            continue;
        }
        let here = format!("{folder}/");
        let is_foreign = |owner: &&Owner| !owner.files.iter().any(|file| file.starts_with(&here));
        let owner = OWNERS.iter().filter(|owner| owner.krate == name).find(is_foreign);
        if let Some(owner) = owner {
            refusals.push(format!(
                "{folder}/Cargo.toml: the crate {name} belongs to {}",
                owner.files.join(", ")
            ));
        }
    }
    Ok(refusals)
}

/// The last part of a path.
fn folder_of(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// An outside crate and the only files that may name it.
pub(crate) struct Owner {
    /// The crate, as its package is called.
    pub(crate) krate: &'static str,
    /// Files, each with the folder of its submodules.
    pub(crate) files: &'static [&'static str],
}

impl Owner {
    /// Whether a file may name the crate.
    pub(crate) fn allows(&self, file: &str) -> bool {
        let is_submodule = |of: &str| {
            file.strip_prefix(of.trim_end_matches(".rs")).is_some_and(|rest| rest.starts_with('/'))
        };
        self.files.iter().any(|allowed| file == *allowed || is_submodule(allowed))
    }
}

/// Our rooms by folder, and what each may import. Arrows point down only, and the four middle rooms never see one another.
const MAY_IMPORT: [(&str, &[&str]); 12] = [
    ("types", &[]),
    ("membership", &["types"]),
    ("collectives", &["types"]),
    ("storage", &["types"]),
    ("transport", &["types"]),
    ("runtime", &["types", "membership", "collectives", "storage", "transport"]),
    ("trainer", &["types", "runtime"]),
    ("cli", &["types", "runtime", "trainer"]),
    ("python", &["types", "runtime"]),
    ("chaos-tests", &["types", "membership", "collectives", "storage", "transport", "runtime"]),
    ("fuzz", &["types", "membership", "collectives", "storage", "transport"]),
    ("xtask", &[]),
];

/// One outside crate, one file: its types appear in no `pub` signature of ours, and a new major version is one file's work.
pub(crate) const OWNERS: [Owner; 6] = [
    Owner { krate: "raft", files: &["membership/src/consensus.rs", "membership/src/log.rs"] },
    Owner { krate: "protobuf", files: &["membership/src/consensus.rs", "membership/src/log.rs"] },
    Owner { krate: "quinn", files: &["transport/src/quic.rs"] },
    Owner { krate: "cudarc", files: &["collectives/src/device/cuda.rs"] },
    Owner { krate: "prometheus", files: &["runtime/src/metrics.rs"] },
    Owner { krate: "object_store", files: &["storage/src/store.rs", "storage/src/faults.rs"] },
];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusals(folder: &str, dependencies: Value) -> usize {
        let manifest = format!("/tree/{folder}/Cargo.toml");
        check_package(&json!({ "manifest_path": manifest, "dependencies": dependencies }))
            .unwrap()
            .len()
    }

    #[test]
    fn arrows_point_down_only() {
        let on = |room: &str| json!([{ "name": format!("ripstop-{room}"), "path": format!("/tree/{room}"), "kind": "dev" }]);
        assert_eq!(refusals("membership", on("types")), 0);
        assert_eq!(refusals("membership", on("storage")), 1, "sideways");
        assert_eq!(refusals("types", on("runtime")), 1, "up");
        assert_eq!(refusals("chaos-tests", on("membership")), 0);
        assert_eq!(refusals("cli", on("membership")), 1, "past the runtime");
        assert_eq!(refusals("cellar", json!([])), 1, "a room without a row");
    }

    #[test]
    fn an_outside_crate_belongs_to_one_room() {
        let quinn = json!([{ "name": "quinn", "path": null }, { "name": "serde", "path": null }]);
        assert_eq!(refusals("transport", quinn.clone()), 0);
        assert_eq!(refusals("runtime", quinn), 1);
    }
}
