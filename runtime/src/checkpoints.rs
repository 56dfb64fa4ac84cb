//! What a person's command line does with checkpoints: list, verify, export.

use std::path::{Path, PathBuf};

use serde::Serialize;
use storage::{Manifest, Store};
use types::{Digest, JobId, Lineage, Step};

use crate::error::Error;
use crate::settings;

/// A checkpoint in a store.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Its boundary: how many steps are applied in it.
    pub step: Step,
    /// Its lineage.
    pub lineage: Lineage,
    /// Digest of its state; unknown if it is damaged.
    pub digest: Option<Digest>,
    /// Key of its manifest.
    pub manifest: String,
    /// Why it can't be restored, if so.
    pub damage: Option<String>,
}

/// What was read of a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Verified {
    /// Its boundary.
    pub step: Step,
    /// How many segments.
    pub segments: usize,
    /// How many bytes.
    pub bytes: u64,
}

/// All checkpoints of a job, newest first, damaged ones too.
///
/// # Errors
/// If the place does not exist, or can't be listed or read.
pub async fn list(url: &str, job: &JobId) -> Result<Vec<Listed>, Error> {
    let store = open_existing(url)?;
    let survey = storage::survey(&store, job).await.map_err(reason)?;
    let whole = survey.found.into_iter().map(|found| Listed {
        step: found.step,
        lineage: found.lineage,
        digest: Some(found.state),
        manifest: found.manifest.to_string(),
        damage: None,
    });
    let damaged = survey.damaged.into_iter().filter_map(|damaged| {
        let (lineage, step, _) = damaged.manifest.manifest_parts()?;
        let manifest = damaged.manifest.to_string();
        Some(Listed { step, lineage, digest: None, manifest, damage: Some(damaged.reason) })
    });
    let mut listed: Vec<Listed> = whole.chain(damaged).collect();
    listed.sort_by_key(|l| std::cmp::Reverse((l.lineage, l.step)));
    Ok(listed)
}

/// The jobs that have checkpoints, or anything else, at `url`.
///
/// # Errors
/// If the place does not exist, or can't be listed.
pub async fn jobs(url: &str) -> Result<Vec<JobId>, Error> {
    open_existing(url)?.jobs().await.map_err(reason)
}

/// Reads every segment of a checkpoint and compares its BLAKE3.
///
/// # Errors
/// If there is none, or a segment is missing or damaged; it is named.
pub async fn verify(url: &str, job: &JobId, step: Option<u64>) -> Result<Verified, Error> {
    let (store, manifest) = load(url, job, step).await?;
    let mut bytes = 0;
    for segment in manifest.layout().segments() {
        let read = storage::read_segment(&store, &manifest, segment.index).await.map_err(reason)?;
        bytes += read.len() as u64;
    }
    Ok(Verified { step: manifest.step(), segments: manifest.layout().segments().len(), bytes })
}

/// Writes a checkpoint as safetensors files and JSON into the folder `out`, which must be new or empty unless `overwrites`.
///
/// # Errors
/// If there is none, a segment is missing or damaged, the folder holds something, or a file can't be written.
pub async fn export(
    url: &str,
    job: &JobId,
    step: Option<u64>,
    out: &Path,
    overwrites: bool,
) -> Result<Vec<PathBuf>, Error> {
    let is_empty = std::fs::read_dir(out).map_or(true, |mut entries| entries.next().is_none());
    if !is_empty && !overwrites {
        return Err(Error::Settings(format!(
            "{}: the folder is not empty; give another one, or replace what is there by --overwrite",
            out.display()
        )));
    }
    let (store, manifest) = load(url, job, step).await?;
    Ok(storage::export(&store, &manifest, out).await.map_err(reason)?.files)
}

async fn load(url: &str, job: &JobId, step: Option<u64>) -> Result<(Store, Manifest), Error> {
    let store = open_existing(url)?;
    let found = storage::find(&store, job).await.map_err(reason)?;
    let wanted = found.into_iter().find(|f| step.is_none_or(|step| f.step == Step(step)));
    let wanted = wanted.ok_or_else(|| {
        let which =
            step.map_or("no checkpoint".to_owned(), |step| format!("no checkpoint of step {step}"));
        Error::Usage(format!(
            "{which} of job {job} at {url}: see `ripstop checkpoint ls {url} --run-id {job}`"
        ))
    })?;
    let manifest = storage::load(&store, &wanted.manifest, wanted.hash).await.map_err(reason)?;
    Ok((store, manifest))
}

/// Opens a store to read from it: unlike for a job that will write there, a folder must exist.
fn open_existing(url: &str) -> Result<Store, Error> {
    let folder = match url.strip_prefix("file://") {
        Some(path) => Some(path),
        None if url.contains("://") => None,
        None => Some(url),
    };
    if folder.is_some_and(|folder| !Path::new(folder).is_dir()) {
        return Err(Error::Settings(format!(
            "{url}: there is no such folder; give what the job was given as --checkpoint"
        )));
    }
    settings::store(url).map_err(|e| Error::Settings(format!("{url}: {e}")))
}

#[expect(clippy::needless_pass_by_value, reason = "a map_err function")]
fn reason(error: storage::StorageError) -> Error {
    Error::Checkpoint { reason: error.to_string() }
}
