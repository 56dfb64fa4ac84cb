//! Finding, checking and restoring checkpoints.
//!
//! Without the log a manifest counts if all its segments are there; which one the job really stands on is the log's to say.
//! No byte is handed out before the BLAKE3 of its segment is checked.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use types::{Attempt, Digest, JobId, Lineage, Step};

use crate::{Layout, Manifest, ObjectKey, Prefix, SegmentIndex, StorageError, Store};

/// All checkpoints of a job, newest first by (lineage, step): those that are whole, and those that are not.
///
/// # Errors
/// If the store can't be listed or read: that is never taken for "no checkpoint".
pub async fn survey(store: &Store, job: &JobId) -> Result<Survey, StorageError> {
    let mut survey = Survey::default();
    for key in manifests(store, job).await? {
        match examine(store, key).await? {
            Ok(found) => survey.found.push(found),
            Err(damaged) => survey.damaged.push(damaged),
        }
    }
    Ok(survey)
}

/// The whole checkpoints of a job, newest first by (lineage, step).
///
/// # Errors
/// If the store can't be listed or read: that is never taken for "no checkpoint".
pub async fn find(store: &Store, job: &JobId) -> Result<Vec<Found>, StorageError> {
    Ok(survey(store, job).await?.found)
}

/// The newest whole checkpoint of a job; looks at older ones only as needed.
///
/// # Errors
/// If the store can't be listed or read, or there are two different newest ones.
pub async fn newest(store: &Store, job: &JobId) -> Result<Option<Found>, StorageError> {
    let mut newest: Option<Found> = None;
    for key in manifests(store, job).await? {
        let place = key.manifest_parts().map(|(lineage, step, _)| (lineage, step));
        if newest.as_ref().is_some_and(|found| place != Some((found.lineage, found.step))) {
            break;
        }
        let Ok(found) = examine(store, key).await? else { continue };
        match &newest {
            Some(first) if first.state != found.state => {
                let (first, second) = (first.manifest.to_string(), found.manifest.to_string());
                return Err(StorageError::Ambiguous {
                    lineage: found.lineage,
                    step: found.step,
                    first,
                    second,
                });
            }
            Some(_) => {}
            None => newest = Some(found),
        }
    }
    Ok(newest)
}

/// The manifest under `key`, whose bytes must have this `hash`.
///
/// # Errors
/// If it is missing, damaged or not decodable.
pub async fn load(store: &Store, key: &ObjectKey, hash: Digest) -> Result<Manifest, StorageError> {
    let mut bytes = read_twice(|| store.get_up_to(key, Manifest::BYTES_MAX)).await?;
    if Digest::of(&bytes) != hash {
        bytes = store.get_up_to(key, Manifest::BYTES_MAX).await?;
    }
    let found = Digest::of(&bytes);
    if found != hash {
        return Err(StorageError::Corrupt { key: key.to_string(), expected: hash, found });
    }
    decode(key, &bytes)
}

/// Reads the whole state: `sink` gets (tensor, offset in the tensor, bytes), each byte of each tensor once, in any order.
/// Tensors without elements are not named. The caller computes the state's digest afterwards and compares it with
/// [`Manifest::state`].
///
/// # Errors
/// If a segment is missing or damaged; it is named. Then the state is useless, since `sink` got a part of it.
pub async fn restore(
    store: &Store,
    manifest: &Manifest,
    mut sink: impl FnMut(&str, usize, &[u8]) + Send,
) -> Result<(), StorageError> {
    let layout: &Layout = manifest.layout();
    let indices: Vec<SegmentIndex> = layout.segments().iter().map(|s| s.index).collect();
    let mut reads = stream::iter(indices)
        .map(|index| read_with_index(store, manifest, index))
        .buffer_unordered(AT_ONCE);
    while let Some((index, bytes)) = reads.try_next().await? {
        layout.scatter(index, &bytes, &mut sink)?;
    }
    Ok(())
}

/// One segment, its length and BLAKE3 checked.
///
/// # Errors
/// If it is missing, damaged, or can't be read; it is named.
pub async fn read_segment(
    store: &Store,
    manifest: &Manifest,
    index: SegmentIndex,
) -> Result<Bytes, StorageError> {
    let named = |source| StorageError::Segment {
        index,
        manifest: manifest.key().to_string(),
        source: Box::new(source),
    };
    let found = manifest
        .layout()
        .segment(index)
        .zip(manifest.segment_key(index))
        .zip(manifest.segment_hash(index));
    let Some(((segment, key), hash)) = found else {
        return Err(StorageError::Layout(crate::LayoutError::NoSegment { index }));
    };
    read_twice(|| read_checked(store, &key, segment.bytes, hash)).await.map_err(named)
}

/// The checkpoints of a job.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Those that can be restored, newest first.
    pub found: Vec<Found>,
    /// Those that can't, newest first.
    pub damaged: Vec<Damaged>,
}

/// A checkpoint that can be restored: its manifest is decodable and its segments are there with the right lengths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Key of the manifest.
    pub manifest: ObjectKey,
    /// BLAKE3 of the manifest's bytes.
    pub hash: Digest,
    /// The lineage in which it was written.
    pub lineage: Lineage,
    /// The boundary: how many steps are applied in it.
    pub step: Step,
    /// The try at writing it.
    pub attempt: Attempt,
    /// Digest of the state.
    pub state: Digest,
    /// Bytes of its segments.
    pub bytes: u64,
}

/// A manifest that can't be restored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damaged {
    /// Its key.
    pub manifest: ObjectKey,
    /// Why.
    pub reason: String,
}

/// Segments under way at once: bounds memory, and fills a link.
const AT_ONCE: usize = 4;

/// Keys of the manifests, newest first.
async fn manifests(store: &Store, job: &JobId) -> Result<Vec<ObjectKey>, StorageError> {
    let listed = store.list(&Prefix::Manifests(job.clone())).await?;
    let mut keys: Vec<ObjectKey> = listed.into_iter().map(|object| object.key).collect();
    keys.retain(|key| key.manifest_parts().is_some());
    keys.sort_by_key(|key| Reverse(key.manifest_parts()));
    Ok(keys)
}

async fn examine(store: &Store, key: ObjectKey) -> Result<Result<Found, Damaged>, StorageError> {
    let manifest = match read_manifest(store, &key).await {
        Ok(manifest) => manifest,
        Err(
            error @ (StorageError::Manifest { .. }
            | StorageError::Missing { .. }
            | StorageError::Length { .. }
            | StorageError::TooLong { .. }),
        ) => return Ok(Err(Damaged { manifest: key, reason: error.to_string() })),
        Err(error) => return Err(error),
    };
    if manifest.key() != key {
        return Ok(Err(Damaged {
            manifest: key,
            reason: format!("it says that it is {}", manifest.key()),
        }));
    }
    let listed = store.list(&Prefix::Attempt(manifest.job().clone(), manifest.attempt())).await?;
    let lengths: BTreeMap<ObjectKey, u64> =
        listed.into_iter().map(|object| (object.key, object.bytes)).collect();
    for segment in manifest.layout().segments() {
        let length = manifest.segment_key(segment.index).and_then(|key| lengths.get(&key).copied());
        if length != Some(segment.bytes) {
            let found =
                length.map_or("is missing".to_owned(), |bytes| format!("has {bytes} bytes"));
            let reason =
                format!("segment {} {found} instead of {} bytes", segment.index, segment.bytes);
            return Ok(Err(Damaged { manifest: key, reason }));
        }
    }
    Ok(Ok(Found {
        manifest: key,
        hash: manifest.hash(),
        lineage: manifest.lineage(),
        step: manifest.step(),
        attempt: manifest.attempt(),
        state: manifest.state(),
        bytes: manifest.layout().total_bytes(),
    }))
}

async fn read_manifest(store: &Store, key: &ObjectKey) -> Result<Manifest, StorageError> {
    read_twice(|| async { decode(key, &store.get_up_to(key, Manifest::BYTES_MAX).await?) }).await
}

fn decode(key: &ObjectKey, bytes: &[u8]) -> Result<Manifest, StorageError> {
    Manifest::decode(bytes)
        .map_err(|source| StorageError::Manifest { key: key.to_string(), source })
}

async fn read_with_index(
    store: &Store,
    manifest: &Manifest,
    index: SegmentIndex,
) -> Result<(SegmentIndex, Bytes), StorageError> {
    Ok((index, read_segment(store, manifest, index).await?))
}

async fn read_checked(
    store: &Store,
    key: &ObjectKey,
    bytes: u64,
    hash: Digest,
) -> Result<Bytes, StorageError> {
    let bytes = store.get(key, bytes).await?;
    let found = Digest::of(&bytes);
    if found == hash {
        Ok(bytes)
    } else {
        Err(StorageError::Corrupt { key: key.to_string(), expected: hash, found })
    }
}

/// Reads again, once, what came damaged: the object may be whole and the way to it bad.
async fn read_twice<T, F>(mut read: impl FnMut() -> F) -> Result<T, StorageError>
where
    F: Future<Output = Result<T, StorageError>>,
{
    match read().await {
        Err(
            StorageError::Corrupt { .. }
            | StorageError::Length { .. }
            | StorageError::Manifest { .. },
        ) => read().await,
        other => other,
    }
}
