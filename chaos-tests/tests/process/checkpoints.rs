//! All workers killed: the job goes on from the last checkpoint. And what other programs read of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use ripstop_chaos::process::{Cluster, Job, Place, Signal, Traces, play};
use safetensors::{Dtype, SafeTensors};

use crate::leaving::begins;
use crate::object_server::ObjectServer;

#[test]
fn after_all_workers_were_killed_a_new_coordinator_adopts_the_checkpoint() -> anyhow::Result<()> {
    play(|cluster| all_killed(cluster, Place::Standalone, "checkpoints", &[]))
}

#[test]
fn after_all_workers_were_killed_the_old_coordinators_go_on_from_the_checkpoint()
-> anyhow::Result<()> {
    play(|cluster| {
        cluster.start_coordinators(&[1, 2, 3])?;
        all_killed(cluster, Place::Coordinators, "checkpoints", &[])
    })
}

#[test]
fn after_all_workers_were_killed_the_job_goes_on_from_an_s3_server() -> anyhow::Result<()> {
    play(|cluster| {
        let server = ObjectServer::start(&cluster.folder().join("objects"), "bucket")?;
        all_killed(cluster, Place::Standalone, "s3://bucket/some/prefix", &server.environment())
    })
}

fn all_killed(
    cluster: &mut Cluster,
    place: Place,
    url: &str,
    environment: &[(&str, String)],
) -> anyhow::Result<()> {
    let flags = ["--checkpoint", url, "--checkpoint-every", "200ms", "--max-restarts", "0"];
    let job = Job::new(150).with_leaf_ms(5).with_flags(&flags);
    let undisturbed = cluster.undisturbed(&job)?;
    let mut command = cluster.agent_command(&job, place, 3)?;
    cluster.start("first", with(command, environment))?;
    cluster.wait("a checkpoint, and steps behind it", |traces| {
        traces.checkpoint().filter(|saved| *saved > 0 && traces.boundary() > *saved + 2)
    })?;
    let killed = cluster.traces().alive();
    for node in &killed {
        cluster.signal_worker(*node, Signal::KILL)?;
    }
    let said = cluster.said("first")?;
    ensure!(said.code == 137, "the agent ended with code {}, not with 128 + 9", said.code);
    let (saved, stood) = (cluster.traces().checkpoint().unwrap_or(0), cluster.traces().boundary());
    ensure!(stood < job.steps(), "the job had ended before the kill");

    cluster.check_states(&undisturbed)?;
    if place == Place::Standalone {
        cluster.renew_traces()?;
    }
    command = cluster.agent_command(&job, place, 2)?;
    cluster.start("second", with(command, environment))?;
    let said = cluster.said("second")?;
    ensure!(said.code == 0, "the second agent ended with code {}", said.code);
    let mut begins = begins(cluster.traces());
    begins.retain(|begin| *begin > 0);
    // A commit may have been on its way when everybody was killed.
    let is_near = begins.len() == 1 && begins[0] >= saved && begins[0] <= stood;
    ensure!(
        is_near,
        "it went on from {begins:?}; the checkpoint was of {saved}, the kill at {stood}"
    );
    cluster.check_end(&undisturbed, &said)
}

fn with(mut command: Command, environment: &[(&str, String)]) -> Command {
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command
}

#[test]
fn an_exported_checkpoint_is_plain_safetensors_and_the_same_whoever_wrote_it() -> anyhow::Result<()>
{
    play(|cluster| {
        let one = exported(cluster, "one", 1)?;
        cluster.renew_traces()?;
        let four = exported(cluster, "four", 4)?;
        let names: Vec<&String> = one.keys().collect();
        let sections = ["model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."];
        for section in sections {
            let count = names.iter().filter(|name| name.starts_with(section)).count();
            ensure!(count * 3 == names.len(), "{count} of {} tensors are {section}*", names.len());
        }
        for (name, tensor) in &one {
            let elements: usize = tensor.shape.iter().product();
            ensure!(
                elements > 0 && tensor.values.len() == elements,
                "{name} has {elements} elements"
            );
            ensure!(tensor.values.iter().all(|value| value.is_finite()), "{name} is not finite");
        }
        ensure!(one.values().any(|t| t.values.iter().any(|v| *v != 0.0)), "all values are 0");
        ensure!(one == four, "one worker and four wrote different tensors");
        python_reads(&cluster.folder().join("four.export"), &four)
    })
}

#[derive(PartialEq, Debug)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// The last checkpoint of a job of `workers` workers, exported and read.
fn exported(
    cluster: &mut Cluster,
    name: &str,
    workers: u32,
) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let job = Job::new(12).with_flags(&["--checkpoint", name, "--checkpoint-every", "1h"]);
    let agent = cluster.start_agent(&job, Place::Standalone, workers)?;
    let said = cluster.said(&agent)?;
    ensure!(said.code == 0, "the agent ended with code {}", said.code);
    let verified = cluster.run(&["checkpoint", "verify", name, "-o", "json"])?;
    let verified: serde_json::Value = serde_json::from_str(&verified.out)?;
    ensure!(verified["step"] == job.steps(), "the last checkpoint is of step {}", verified["step"]);
    let folder = cluster.folder().join(format!("{name}.export"));
    let text = folder.to_string_lossy().into_owned();
    let said = cluster.run(&["checkpoint", "export", name, "--out", &text])?;
    ensure!(said.code == 0, "{said:?}");
    let mut tensors = BTreeMap::new();
    for path in safetensors_files(&folder)? {
        let bytes = std::fs::read(&path)?;
        let file =
            SafeTensors::deserialize(&bytes).with_context(|| format!("{}", path.display()))?;
        for (name, view) in file.tensors() {
            ensure!(view.dtype() == Dtype::F32, "{name} is {:?}", view.dtype());
            let values = view.data().chunks_exact(4);
            let values = values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            tensors.insert(name, Tensor { shape: view.shape().to_vec(), values });
        }
    }
    ensure!(!tensors.is_empty(), "no tensors were exported: {said:?}");
    Ok(tensors)
}

fn safetensors_files(folder: &Path) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    Ok(files)
}

/// Python's own library must read the same names, shapes and sums.
fn python_reads(folder: &Path, tensors: &BTreeMap<String, Tensor>) -> anyhow::Result<()> {
    let Some(python) = std::env::var_os("RIPSTOP_TEST_PYTHON") else {
        if std::env::var_os("CI").is_some_and(|ci| ci == "true") {
            bail!("RIPSTOP_TEST_PYTHON is not set: run the tests by `cargo xtask test`");
        }
        eprintln!("not read by Python: RIPSTOP_TEST_PYTHON is not set; `cargo xtask test` sets it");
        return Ok(());
    };
    let script = "
import glob, json, sys
from safetensors.numpy import load_file
found = {}
for path in glob.glob(sys.argv[1] + '/*.safetensors'):
    for name, tensor in load_file(path).items():
        found[name] = [list(tensor.shape), tensor.tobytes().hex()]
print(json.dumps(found))
";
    let output = Command::new(&python).args(["-c", script]).arg(folder).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: BTreeMap<String, (Vec<usize>, String)> = serde_json::from_slice(&output.stdout)?;
    let hex = |tensor: &Tensor| -> String {
        tensor
            .values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .map(|byte| format!("{byte:02x}"))
            .collect()
    };
    let expected =
        tensors.iter().map(|(name, t)| (name.clone(), (t.shape.clone(), hex(t)))).collect();
    ensure!(found == expected, "Python read something else");
    Ok(())
}

#[test]
fn a_checkpoint_of_a_longer_run_is_committed_while_it_trains() -> anyhow::Result<()> {
    play(|cluster| {
        let flags = ["--checkpoint", "checkpoints", "--checkpoint-every", "100ms"];
        let job = Job::new(100).with_leaf_ms(5).with_flags(&flags);
        let agent = cluster.start_agent(&job, Place::Standalone, 2)?;
        let half =
            |traces: &Traces| traces.checkpoint().filter(|c| *c > 0 && traces.boundary() < 100);
        cluster.wait("a checkpoint before the end", half)?;
        let said = cluster.said(&agent)?;
        ensure!(said.code == 0, "the agent ended with code {}", said.code);
        let listed = cluster.run(&["checkpoint", "ls", "checkpoints", "-o", "json"])?;
        let listed: Vec<serde_json::Value> = serde_json::from_str(&listed.out)?;
        ensure!(listed.len() >= 2 && listed[0]["step"] == 100, "{listed:?}");
        ensure!(listed.iter().all(|c| c["damage"].is_null()), "{listed:?}");
        Ok(())
    })
}
