//! The object that makes a checkpoint real.
//!
//! Canonical JSON without timestamps: who knows the same contents writes the same bytes, so that any member may write it, twice
//! too. Promised by `decode`: it never panics, it allocates no more than a small multiple of what came in, and what it accepts is
//! whole: the segments tile the files, every key follows from the contents, and encoding gives the same bytes again.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use types::{Attempt, Digest, JobId, Lineage, Step, VirtualRanks};

use crate::{
    JsonError, KeyError, Layout, LayoutError, ObjectKey, SegmentIndex, TensorSpec, canonical_json,
};

/// A checkpoint: where the bytes of the state are, what they are, and the extra state.
// Invariant: `hashes` has one entry for each segment of the layout; `encoded` is the canonical JSON of the rest.
#[derive(Clone, PartialEq, Debug)]
pub struct Manifest {
    contents: Contents,
    state: Digest,
    hashes: Vec<Digest>,
    ripstop: String,
    encoded: Bytes,
}

impl Manifest {
    /// Version of the stored format.
    pub const FORMAT: u32 = 1;
    /// Longest manifest: 2^18 segments of some 280 bytes, as many tensors, and the extra state.
    pub const BYTES_MAX: u64 = 256 << 20;
    /// Largest extra state, as JSON. What is larger should be a tensor.
    pub const EXTRA_BYTES_MAX: usize = 16 << 20;

    /// The manifest of a state with digest `state`, whose segments have these `hashes` in order of their index.
    ///
    /// # Errors
    /// If the number of hashes isn't that of the layout's segments, a limit is passed, or the job's name can't be in a key.
    pub fn new(
        contents: Contents,
        state: Digest,
        hashes: Vec<Digest>,
    ) -> Result<Self, ManifestError> {
        Self::with_version(contents, state, hashes, env!("CARGO_PKG_VERSION").to_owned())
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// If the bytes are too long, not canonical, of another format version, or contradict themselves.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > Self::BYTES_MAX {
            return Err(ManifestError::TooLong { bytes: bytes.len() as u64 });
        }
        let version: Version = serde_json::from_slice(bytes)?;
        if version.format != Self::FORMAT {
            return Err(ManifestError::Format { found: version.format });
        }
        let stored: Stored = serde_json::from_slice(bytes)?;
        let segments_max = stored.segments.len() as u64;
        let layout = Layout::with_segments_max(stored.tensors, stored.segment_bytes, segments_max)?;
        let contents = Contents {
            job: stored.job,
            lineage: stored.lineage,
            step: stored.step,
            attempt: stored.attempt,
            virtual_ranks: stored.virtual_ranks,
            layout: Arc::new(layout),
            extra: stored.extra,
        };
        let hashes = stored.segments.iter().map(|s| s.hash).collect();
        let manifest = Self::with_version(contents, stored.state, hashes, stored.ripstop)?;
        // Index, file, offset, length and key of each segment follow from the rest: equal bytes prove them all.
        if manifest.encoded != bytes {
            let differs =
                stored.segments.iter().zip(manifest.stored_segments()?).position(|(a, b)| *a != b);
            return Err(match differs.and_then(|place| u32::try_from(place).ok()) {
                Some(place) => ManifestError::Segment { index: SegmentIndex(place) },
                None => ManifestError::NotCanonical,
            });
        }
        Ok(manifest)
    }

    /// The bytes to store.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        self.encoded.clone()
    }

    /// BLAKE3 of the bytes to store.
    #[must_use]
    pub fn hash(&self) -> Digest {
        Digest::of(&self.encoded)
    }

    /// The key under which it is stored.
    ///
    /// # Panics
    /// Never: the job's name was checked when the manifest was made.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        let Contents { job, lineage, step, attempt, .. } = &self.contents;
        ObjectKey::manifest(job, *lineage, *step, *attempt)
            .expect("checked when the manifest was made")
    }

    /// The key of a segment's object; `None` outside of the layout.
    #[must_use]
    pub fn segment_key(&self, index: SegmentIndex) -> Option<ObjectKey> {
        ObjectKey::segment(&self.contents.job, self.contents.attempt, self.segment_hash(index)?)
            .ok()
    }

    /// BLAKE3 of a segment's bytes; `None` outside of the layout.
    #[must_use]
    pub fn segment_hash(&self, index: SegmentIndex) -> Option<Digest> {
        self.hashes.get(index.0 as usize).copied()
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> &JobId {
        &self.contents.job
    }

    /// The lineage in which it was written.
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        self.contents.lineage
    }

    /// The boundary: how many steps are applied in it.
    #[must_use]
    pub fn step(&self) -> Step {
        self.contents.step
    }

    /// The try at writing it.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.contents.attempt
    }

    /// The job's number of virtual ranks.
    #[must_use]
    pub fn virtual_ranks(&self) -> VirtualRanks {
        self.contents.virtual_ranks
    }

    /// The digest of the state.
    #[must_use]
    pub fn state(&self) -> Digest {
        self.state
    }

    /// Where the tensors are in the segments.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.contents.layout
    }

    /// The state that isn't tensors.
    #[must_use]
    pub fn extra(&self) -> &Value {
        &self.contents.extra
    }

    /// The version of Ripstop that wrote it.
    #[must_use]
    pub fn ripstop(&self) -> &str {
        &self.ripstop
    }

    fn with_version(
        contents: Contents,
        state: Digest,
        hashes: Vec<Digest>,
        ripstop: String,
    ) -> Result<Self, ManifestError> {
        let segments = contents.layout.segments().len();
        if hashes.len() != segments {
            return Err(ManifestError::Count { segments, hashes: hashes.len() });
        }
        let extra = canonical_json(&contents.extra)?;
        if extra.len() > Self::EXTRA_BYTES_MAX {
            return Err(ManifestError::ExtraTooLong { bytes: extra.len() });
        }
        let mut manifest = Self { contents, state, hashes, ripstop, encoded: Bytes::new() };
        let bytes = canonical_json(&serde_json::to_value(manifest.stored()?)?)?;
        if bytes.len() as u64 > Self::BYTES_MAX {
            return Err(ManifestError::TooLong { bytes: bytes.len() as u64 });
        }
        manifest.encoded = bytes.into();
        Ok(manifest)
    }

    fn stored(&self) -> Result<Stored, ManifestError> {
        let Contents { job, lineage, step, attempt, virtual_ranks, layout, extra } = &self.contents;
        Ok(Stored {
            format: Self::FORMAT,
            job: job.clone(),
            lineage: *lineage,
            step: *step,
            attempt: *attempt,
            virtual_ranks: *virtual_ranks,
            state: self.state,
            segment_bytes: layout.segment_bytes(),
            tensors: layout.tensors().to_vec(),
            files: layout
                .files()
                .iter()
                .map(|f| StoredFile { name: f.name().to_owned(), bytes: f.bytes() })
                .collect(),
            segments: self.stored_segments()?,
            extra: extra.clone(),
            ripstop: self.ripstop.clone(),
        })
    }

    fn stored_segments(&self) -> Result<Vec<StoredSegment>, ManifestError> {
        let Contents { job, attempt, layout, .. } = &self.contents;
        let pairs = layout.segments().iter().zip(&self.hashes);
        pairs
            .map(|(segment, hash)| {
                Ok(StoredSegment {
                    index: segment.index,
                    file: layout.files()[segment.file].name().to_owned(),
                    offset: segment.offset,
                    bytes: segment.bytes,
                    hash: *hash,
                    key: ObjectKey::segment(job, *attempt, *hash)?,
                })
            })
            .collect()
    }
}

/// What a checkpoint is, before its bytes are known.
#[derive(Clone, PartialEq, Debug)]
pub struct Contents {
    /// The job.
    pub job: JobId,
    /// The lineage in which it is written.
    pub lineage: Lineage,
    /// The boundary: how many steps are applied in it.
    pub step: Step,
    /// The try at writing it; the prefix of its objects.
    pub attempt: Attempt,
    /// The job's number of virtual ranks.
    pub virtual_ranks: VirtualRanks,
    /// Where the tensors are in the segments.
    pub layout: Arc<Layout>,
    /// The state that isn't tensors.
    pub extra: Value,
}

/// Bytes that are no manifest, or contents that can't be one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Too long.
    #[error(
        "a manifest of {bytes} bytes, at most {} are allowed: use larger segments",
        Manifest::BYTES_MAX
    )]
    TooLong {
        /// Its length.
        bytes: u64,
    },
    /// The extra state is too long.
    #[error(
        "extra state of {bytes} bytes of json, at most {} are allowed: store it as a tensor",
        Manifest::EXTRA_BYTES_MAX
    )]
    ExtraTooLong {
        /// Its length.
        bytes: usize,
    },
    /// Another format version.
    #[error(
        "manifest format {found}, this program reads {}: use the ripstop that wrote it",
        Manifest::FORMAT
    )]
    Format {
        /// The version that was found.
        found: u32,
    },
    /// Not the JSON of a manifest.
    #[error("no manifest: {0}")]
    Json(#[from] serde_json::Error),
    /// JSON that can't be stored.
    #[error(transparent)]
    Extra(#[from] JsonError),
    /// The tensors can't be laid out.
    #[error("the manifest's tensors and segments don't fit: {0}")]
    Layout(#[from] LayoutError),
    /// The job's name can't be in a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Not one hash for each segment.
    #[error("{hashes} hashes for {segments} segments")]
    Count {
        /// How many segments the layout has.
        segments: usize,
        /// How many hashes there are.
        hashes: usize,
    },
    /// A segment is not where the layout has it, or its key doesn't follow from its hash.
    #[error("segment {index} contradicts the manifest's tensors, attempt or hash")]
    Segment {
        /// The segment.
        index: SegmentIndex,
    },
    /// The right contents in another spelling.
    #[error("the manifest is not spelled canonically: it was changed by another program")]
    NotCanonical,
}

#[derive(Deserialize)]
struct Version {
    format: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    format: u32,
    job: JobId,
    lineage: Lineage,
    step: Step,
    attempt: Attempt,
    virtual_ranks: VirtualRanks,
    state: Digest,
    segment_bytes: u64,
    tensors: Vec<TensorSpec>,
    files: Vec<StoredFile>,
    segments: Vec<StoredSegment>,
    extra: Value,
    ripstop: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredFile {
    name: String,
    bytes: u64,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredSegment {
    index: SegmentIndex,
    file: String,
    offset: u64,
    bytes: u64,
    hash: Digest,
    key: ObjectKey,
}

#[cfg(test)]
mod tests;
