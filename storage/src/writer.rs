//! Writing a checkpoint: stage, upload one's share, publish.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use types::{Attempt, Digest, JobId, Lineage, NodeId};

use crate::{
    Created, Layout, LayoutError, Manifest, ObjectKey, Prefix, Receipt, SegmentIndex, SharePlan,
    StateBytes, StorageError, Store, canonical_json,
};

/// Copies the segments of `node`'s share out of the state: after this the state may change.
///
/// # Errors
/// If the state doesn't fit the layout.
pub fn stage(
    layout: &Layout,
    plan: &SharePlan,
    node: NodeId,
    state: &dyn StateBytes,
) -> Result<Vec<(SegmentIndex, Bytes)>, LayoutError> {
    plan.mine(node).map(|index| Ok((index, layout.fill(index, state)?))).collect()
}

/// One member's share of one attempt.
#[derive(Clone, Copy, Debug)]
pub struct Share<'a> {
    /// The job.
    pub job: &'a JobId,
    /// Who shares what.
    pub plan: &'a SharePlan,
    /// The member.
    pub node: NodeId,
    /// The try at writing the checkpoint.
    pub attempt: Attempt,
    /// The lineage in which the member stands.
    pub lineage: Lineage,
    /// Digest of the whole state.
    pub state: Digest,
}

/// Stores the staged segments of a share, and gives the receipt. `progress` hears the bytes of each segment that is done.
/// May be repeated: the same segments go to the same keys.
///
/// # Errors
/// If a segment can't be stored.
///
/// # Panics
/// If what is staged is not exactly the share.
pub async fn upload(
    store: &Store,
    share: Share<'_>,
    staged: Vec<(SegmentIndex, Bytes)>,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Receipt, StorageError> {
    assert!(
        share.plan.mine(share.node).eq(staged.iter().map(|(index, _)| *index)),
        "exactly the share is staged"
    );
    let mut uploads = stream::iter(staged)
        .map(|(index, bytes)| store_segment(store, share, index, bytes))
        .buffered(AT_ONCE);
    let mut segments = Vec::new();
    while let Some((index, hash, bytes)) = uploads.try_next().await? {
        progress(bytes);
        segments.push((index, hash, bytes));
    }
    let Share { plan, node, attempt, lineage, state, .. } = share;
    Ok(Receipt { attempt, node, plan: plan.digest(), state, lineage, segments })
}

/// Writes the manifest, once: a manifest is never replaced. Then leaves a numbered hint for people and tools without the log, as
/// well as it can. May be repeated.
///
/// # Errors
/// If the manifest can't be stored, or another one has its key.
pub async fn publish(store: &Store, manifest: &Manifest) -> Result<Published, StorageError> {
    let (key, bytes, hash) = (manifest.key(), manifest.encode(), manifest.hash());
    if store.create(&key, bytes.clone()).await? == Created::Conflict {
        return Err(StorageError::Conflict { key: key.to_string() });
    }
    // The commit in the log follows: what it will name must be there to be read.
    let found = Digest::of(&store.get(&key, bytes.len() as u64).await?);
    if found != hash {
        return Err(StorageError::Corrupt { key: key.to_string(), expected: hash, found });
    }
    let reference = refer(store, manifest.job(), &Reference { manifest: key.clone(), hash }).await;
    Ok(Published { manifest: key, hash, reference: reference.unwrap_or(None) })
}

/// A manifest that is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Published {
    /// Its key.
    pub manifest: ObjectKey,
    /// BLAKE3 of its bytes.
    pub hash: Digest,
    /// The number of the hint that names it; `None` if none could be left.
    pub reference: Option<u64>,
}

/// What a numbered hint says.
#[derive(PartialEq, Serialize, Deserialize)]
struct Reference {
    manifest: ObjectKey,
    hash: Digest,
}

/// Segments under way at once: enough to fill a link, little enough that a failure wastes little.
const AT_ONCE: usize = 4;

/// Numbers tried for a hint before giving up; each loss means that another member left one.
const REFERENCE_TRIES: u64 = 8;

/// Longest hint that is read.
const REFERENCE_BYTES_MAX: u64 = 4096;

async fn store_segment(
    store: &Store,
    share: Share<'_>,
    index: SegmentIndex,
    bytes: Bytes,
) -> Result<(SegmentIndex, Digest, u64), StorageError> {
    let hash = Digest::of(&bytes);
    let length = bytes.len() as u64;
    let key = ObjectKey::segment(share.job, share.attempt, hash)?;
    store.put(&key, bytes).await?;
    Ok((index, hash, length))
}

async fn refer(
    store: &Store,
    job: &JobId,
    reference: &Reference,
) -> Result<Option<u64>, StorageError> {
    let listed = store.list(&Prefix::References(job.clone())).await?;
    let newest = listed.iter().filter_map(|object| object.key.reference_number()).max();
    if let Some(number) = newest {
        let bytes =
            store.get_up_to(&ObjectKey::reference(job, number)?, REFERENCE_BYTES_MAX).await?;
        if serde_json::from_slice::<Reference>(&bytes).is_ok_and(|found| found == *reference) {
            return Ok(Some(number));
        }
    }
    let value = serde_json::json!({ "manifest": reference.manifest.to_string(), "hash": reference.hash.to_string() });
    let bytes = Bytes::from(canonical_json(&value).map_err(LayoutError::from)?);
    let first = newest.map_or(0, |number| number.saturating_add(1));
    for number in first..first.saturating_add(REFERENCE_TRIES) {
        if store.create(&ObjectKey::reference(job, number)?, bytes.clone()).await?
            != Created::Conflict
        {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
