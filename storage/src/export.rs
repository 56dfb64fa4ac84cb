//! A checkpoint as plain files: safetensors that any program reads, and JSON.
//!
//! Each file is written under a temporary name, synced, and renamed: under its own name it is whole. Every byte is verified.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;

use crate::{
    LayoutError, Manifest, SegmentIndex, StorageError, Store, canonical_json, read_segment,
};

/// Writes the checkpoint to the directory `out_dir`, which is created when missing: the safetensors files, `extra.json`, and, where
/// there are several files, `model.safetensors.index.json`. Files of these names are replaced.
///
/// # Errors
/// If a segment is missing or damaged, or a file can't be written.
pub async fn export(
    store: &Store,
    manifest: &Manifest,
    out_dir: &Path,
) -> Result<Exported, StorageError> {
    fs::create_dir_all(out_dir)
        .map_err(|source| StorageError::File { path: out_dir.to_owned(), source })?;
    let layout = manifest.layout();
    let mut written = Vec::new();
    for (place, file) in layout.files().iter().enumerate() {
        let indices: Vec<SegmentIndex> =
            layout.segments().iter().filter(|s| s.file == place).map(|s| s.index).collect();
        let mut reads = stream::iter(indices)
            .map(|index| read_segment(store, manifest, index))
            .buffered(AT_ONCE);
        let mut output = Output::create(out_dir, file.name())?;
        while let Some(bytes) = reads.try_next().await? {
            output.write(&bytes)?;
        }
        written.push(output.finish()?);
    }
    let mut documents = vec![("extra.json", manifest.extra().clone())];
    if layout.files().len() > 1 {
        let total: usize = layout.tensors().iter().filter_map(crate::TensorSpec::bytes).sum();
        let index =
            json!({ "metadata": { "total_size": total }, "weight_map": layout.placement() });
        documents.push(("model.safetensors.index.json", index));
    }
    for (name, value) in documents {
        let mut output = Output::create(out_dir, name)?;
        output.write(&canonical_json(&value).map_err(LayoutError::from)?)?;
        written.push(output.finish()?);
    }
    sync(out_dir)?;
    Ok(Exported { files: written })
}

/// What was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exported {
    /// The files.
    pub files: Vec<PathBuf>,
}

/// A file under its temporary name; removed if it isn't finished.
struct Output {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl Output {
    fn create(dir: &Path, name: &str) -> Result<Self, StorageError> {
        let (temporary, path) = (dir.join(format!(".{name}.partial")), dir.join(name));
        let file = File::create(&temporary)
            .map_err(|source| StorageError::File { path: temporary.clone(), source })?;
        Ok(Self { file, temporary, path, is_finished: false })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageError> {
        self.file
            .write_all(bytes)
            .map_err(|source| StorageError::File { path: self.temporary.clone(), source })
    }

    fn finish(mut self) -> Result<PathBuf, StorageError> {
        let synced = self.file.sync_all().and_then(|()| fs::rename(&self.temporary, &self.path));
        synced.map_err(|source| StorageError::File { path: self.path.clone(), source })?;
        self.is_finished = true;
        Ok(self.path.clone())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.is_finished {
            // Best effort: what stays behind has a name that nobody reads.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Segments read ahead.
const AT_ONCE: usize = 4;

/// Makes renames in a directory durable.
fn sync(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|source| StorageError::File { path: dir.to_owned(), source })
}
