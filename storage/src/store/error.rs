//! What can go wrong with objects, and what to do about it.

use std::error::Error;
use std::io::ErrorKind;
use std::path::PathBuf;

use object_store::Error as ObjectError;
use types::{Digest, Lineage, Remedy, Step};

use crate::{KeyError, LayoutError, ManifestError, SegmentIndex};

/// A failed operation on stored checkpoints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The URL or its options can't be used.
    #[error("checkpoint url {url:?}: {reason}")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The object isn't there. The store itself answered.
    #[error("{url} has no object {key}")]
    Missing {
        /// The store.
        url: String,
        /// The key.
        key: String,
    },
    /// The bucket isn't there.
    #[error("the bucket of {url} does not exist; create it, or correct the url")]
    NoBucket {
        /// The store.
        url: String,
    },
    /// There are no credentials.
    #[error(
        "no credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    )]
    NoCredentials {
        /// The store.
        url: String,
    },
    /// The store refuses.
    #[error(
        "not allowed to {operation} {key} at {url}; check the credentials' or the directory's permissions"
    )]
    Denied {
        /// What was tried.
        operation: &'static str,
        /// On which key.
        key: String,
        /// The store.
        url: String,
        /// Its answer.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The disk or quota is full.
    #[error("no space left to {operation} {key} at {url}; free some, or prune checkpoints")]
    Full {
        /// What was tried.
        operation: &'static str,
        /// On which key.
        key: String,
        /// The store.
        url: String,
        /// Its answer.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The store can't do that at all.
    #[error("{url} can't {operation} {key}; use a store with create-only writes")]
    Unsupported {
        /// What was tried.
        operation: &'static str,
        /// On which key.
        key: String,
        /// The store.
        url: String,
        /// Its answer.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No clear answer: the operation may or may not have had an effect.
    #[error("could not {operation} {key} at {url}: {source}")]
    Unavailable {
        /// What was tried.
        operation: &'static str,
        /// On which key.
        key: String,
        /// The store.
        url: String,
        /// The answer or its lack.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The object has another length than it must have.
    #[error("object {key} has {found} bytes instead of {expected}")]
    Length {
        /// The key.
        key: String,
        /// The length that it must have.
        expected: u64,
        /// The length found.
        found: u64,
    },
    /// The object is longer than anything of its kind.
    #[error("object {key} has {bytes} bytes, at most {bytes_max} are allowed")]
    TooLong {
        /// The key.
        key: String,
        /// Its length.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The object's bytes are not those that were stored.
    #[error("object {key} is damaged: its hash is {found:#} instead of {expected:#}")]
    Corrupt {
        /// The key.
        key: String,
        /// The hash that it must have.
        expected: Digest,
        /// The hash found.
        found: Digest,
    },
    /// Something else is stored under a key that is written once.
    #[error(
        "object {key} exists with other bytes; it was left alone: another job may be using this url and name"
    )]
    Conflict {
        /// The key.
        key: String,
    },
    /// The store doesn't keep what checkpoints rest on.
    #[error("{url} can't hold checkpoints: {reason}")]
    NotConformant {
        /// The store.
        url: String,
        /// What it did.
        reason: String,
    },
    /// An object is no manifest.
    #[error("object {key} is no usable manifest: {source}")]
    Manifest {
        /// The key.
        key: String,
        /// Why.
        source: ManifestError,
    },
    /// Two checkpoints of one place in the job's history differ.
    #[error(
        "{first} and {second} hold different states of step {step} in lineage {lineage}; delete the wrong one"
    )]
    Ambiguous {
        /// The lineage of both.
        lineage: Lineage,
        /// The step of both.
        step: Step,
        /// One manifest.
        first: String,
        /// The other.
        second: String,
    },
    /// A segment of a checkpoint can't be used.
    #[error("segment {index} of {manifest} can't be used: {source}")]
    Segment {
        /// The segment.
        index: SegmentIndex,
        /// The checkpoint.
        manifest: String,
        /// Why.
        source: Box<Self>,
    },
    /// The state or a segment doesn't fit the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A key can't be made.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A file of an export can't be written.
    #[error("could not write {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl StorageError {
    /// What to do next. After a damaged or missing object another checkpoint may do.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Unavailable { .. } => Remedy::Retry,
            Self::Segment { source, .. } => source.remedy(),
            _ => Remedy::Stop,
        }
    }
}

/// Tells what the store said for certain from what it left open.
pub(super) fn classify(
    url: &str,
    operation: &'static str,
    key: String,
    error: ObjectError,
) -> StorageError {
    let url = url.to_owned();
    let text = error.to_string();
    if text.contains("NoSuchBucket") {
        return StorageError::NoBucket { url };
    }
    // The address at which a cloud machine asks for its role: nobody answered, so there is no role.
    if text.contains("169.254.169.254") {
        return StorageError::NoCredentials { url };
    }
    let kind = io_kind(&error);
    let is_missing = matches!(error, ObjectError::NotFound { .. });
    // Listings come without the kind of failure that other requests have, so the answer's text must tell.
    let is_denied =
        matches!(error, ObjectError::PermissionDenied { .. } | ObjectError::Unauthenticated { .. })
            || ["401 Unauthorized", "403 Forbidden", "<Code>ExpiredToken"]
                .iter()
                .any(|code| text.contains(code));
    let is_unsupported =
        matches!(error, ObjectError::NotImplemented { .. } | ObjectError::NotSupported { .. });
    let source = Box::new(error);
    match kind {
        _ if is_missing => StorageError::Missing { url, key },
        _ if is_unsupported => StorageError::Unsupported { operation, key, url, source },
        Some(ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            StorageError::Denied { operation, key, url, source }
        }
        _ if is_denied => StorageError::Denied { operation, key, url, source },
        Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge) => {
            StorageError::Full { operation, key, url, source }
        }
        _ => StorageError::Unavailable { operation, key, url, source },
    }
}

fn io_kind(error: &ObjectError) -> Option<ErrorKind> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}
