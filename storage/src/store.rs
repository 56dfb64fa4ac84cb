//! The store: a directory, memory shared by name, or a bucket of an S3-compatible server, behind one face.
//!
//! Promised: `create` never replaces anything, and an ambiguous answer to it is resolved by reading back; `get` gives exactly the
//! expected number of bytes or an error; what is missing is told apart from what can't be reached. Files of a directory are
//! synced before a write is said to be done. This is the only file that knows the `object_store` crate.

mod error;
mod open;

use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{TryStreamExt, future};
use object_store::path::Path;
use object_store::{
    Error as ObjectError, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use types::JobId;

use crate::{Call, Fault, FaultPlan, ObjectKey, Prefix};

pub use error::StorageError;
pub use open::StoreOptions;

/// Where checkpoints are kept. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    /// What keys are put under; empty, or without a slash at the end.
    prefix: String,
    /// The URL, for people; it never holds a secret.
    url: Arc<str>,
    faults: Option<FaultPlan>,
}

impl Store {
    /// Opens the store at `url`: an absolute `file:///dir` or a plain path (created when missing), `memory://name` (shared by all
    /// of this process that use the name), or `s3://bucket/prefix`. Contacts no server.
    ///
    /// # Errors
    /// If the URL or the options can't be used; the message says what to change.
    pub fn open(url: &str, options: &StoreOptions) -> Result<Self, StorageError> {
        let (objects, prefix) = open::open(url, options)?;
        Ok(Self { objects, prefix, url: url.into(), faults: None })
    }

    /// The same store, with requests failing by `plan`.
    #[must_use]
    pub fn with_faults(&self, plan: FaultPlan) -> Self {
        Self { faults: Some(plan), ..self.clone() }
    }

    /// The URL with which it was opened.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Stores `bytes`, replacing what is there: for objects whose key names their content.
    ///
    /// # Errors
    /// If it can't be stored, or that isn't known.
    pub async fn put(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StorageError> {
        self.write(key, bytes, Call::Put)
            .await
            .map_err(|error| self.whole_error("store", key, error))
    }

    /// Stores `bytes` if nothing is there. An answer that may hide a success is resolved by reading back.
    ///
    /// # Errors
    /// If it can't be stored, or that isn't known.
    pub async fn create(&self, key: &ObjectKey, bytes: Bytes) -> Result<Created, StorageError> {
        let mut tries = 0;
        loop {
            let error = match self.write(key, bytes.clone(), Call::Create).await {
                Ok(()) => return Ok(Created::Created),
                Err(error) => self.whole_error("create", key, error),
            };
            if !matches!(error, StorageError::Unavailable { .. }) {
                return Err(error);
            }
            match self.find_same(key, &bytes).await? {
                Some(true) => return Ok(Created::AlreadySame),
                Some(false) => return Ok(Created::Conflict),
                None if tries == 1 => return Err(error),
                None => tries += 1,
            }
        }
    }

    /// The object, which must have exactly `bytes_expected` bytes.
    ///
    /// # Errors
    /// If it is missing, has another length, or can't be read.
    pub async fn get(&self, key: &ObjectKey, bytes_expected: u64) -> Result<Bytes, StorageError> {
        if bytes_expected == 0 {
            return match self.head(key).await? {
                0 => Ok(Bytes::new()),
                found => Err(StorageError::Length { key: key.to_string(), expected: 0, found }),
            };
        }
        let mut whole = BytesMut::new();
        let mut at = 0;
        while at < bytes_expected {
            let end = bytes_expected.min(at + READ_BYTES);
            let piece = match self.read(key, at..end, bytes_expected).await {
                // Servers answer a range outside of the object with an error that names no length.
                Err(error @ StorageError::Unavailable { .. }) if at == 0 => {
                    match self.head(key).await? {
                        found if found == bytes_expected => return Err(error),
                        found => {
                            return Err(StorageError::Length {
                                key: key.to_string(),
                                expected: bytes_expected,
                                found,
                            });
                        }
                    }
                }
                other => other?,
            };
            if at == 0 && end == bytes_expected {
                return Ok(piece);
            }
            whole.reserve((bytes_expected - at) as usize);
            whole.extend_from_slice(&piece);
            at = end;
        }
        Ok(whole.freeze())
    }

    /// The object, whatever its length up to `bytes_max`.
    ///
    /// # Errors
    /// If it is missing, longer, or can't be read.
    pub async fn get_up_to(&self, key: &ObjectKey, bytes_max: u64) -> Result<Bytes, StorageError> {
        match self.head(key).await? {
            bytes if bytes > bytes_max => {
                Err(StorageError::TooLong { key: key.to_string(), bytes, bytes_max })
            }
            bytes => self.get(key, bytes).await,
        }
    }

    /// The length of an object.
    ///
    /// # Errors
    /// If it is missing, or can't be reached.
    pub async fn head(&self, key: &ObjectKey) -> Result<u64, StorageError> {
        let fault = self.fault(Call::Head);
        let result = match fault {
            Some(Fault::Before | Fault::After) => Err(injected()),
            _ if self.is_lost(key) => Err(absent(key)),
            _ => self.objects.head(&self.path(&key.to_string())).await,
        };
        result.map(|meta| meta.size).map_err(|error| self.error("look up", key, error))
    }

    /// The objects under a prefix, sorted by their keys' text. What isn't ours is left out.
    ///
    /// # Errors
    /// If the listing fails anywhere: a part of it is never taken for the whole.
    pub async fn list(&self, prefix: &Prefix) -> Result<Vec<Object>, StorageError> {
        if matches!(self.fault(Call::List), Some(Fault::Before | Fault::After)) {
            return Err(self.error("list", prefix, injected()));
        }
        let metas: Vec<_> = self
            .objects
            .list(Some(&self.path(&prefix.to_string())))
            .try_collect()
            .await
            .map_err(|error| self.whole_error("list", prefix, error))?;
        let mut named: Vec<(String, u64)> = metas
            .into_iter()
            .filter_map(|meta| Some((self.relative(&meta.location)?.to_owned(), meta.size)))
            .collect();
        named.sort_unstable();
        let known = named
            .into_iter()
            .filter_map(|(text, bytes)| Some(Object { key: text.parse().ok()?, bytes }));
        Ok(known.filter(|object| !self.is_lost(&object.key)).collect())
    }

    /// The jobs that have anything here, sorted.
    ///
    /// # Errors
    /// If the listing fails.
    pub async fn jobs(&self) -> Result<Vec<JobId>, StorageError> {
        if matches!(self.fault(Call::List), Some(Fault::Before | Fault::After)) {
            return Err(self.error("list", &"/", injected()));
        }
        let root = (!self.prefix.is_empty()).then(|| Path::from(self.prefix.as_str()));
        let listing = self.objects.list_with_delimiter(root.as_ref()).await;
        let listing = listing.map_err(|error| self.whole_error("list", &"/", error))?;
        let names = listing.common_prefixes.iter().filter_map(|path| self.relative(path));
        let mut jobs: Vec<JobId> = names.filter_map(|name| JobId::new(name).ok()).collect();
        jobs.sort_unstable();
        Ok(jobs)
    }

    /// Deletes an object; one that isn't there is no error.
    ///
    /// # Errors
    /// If it can't be deleted, or that isn't known.
    pub async fn delete(&self, key: &ObjectKey) -> Result<(), StorageError> {
        let fault = self.fault(Call::Delete);
        let result = match fault {
            Some(Fault::Before) => Err(injected()),
            _ => self.objects.delete(&self.path(&key.to_string())).await,
        };
        let result = if fault == Some(Fault::After) { Err(injected()) } else { result };
        match result.map_err(|error| self.error("delete", key, error)) {
            Err(StorageError::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Proves that the store keeps what checkpoints rest on: of several creates of one key exactly one wins, what was written is
    /// read and listed, and deleting deletes. `nonce` must be new at each call.
    ///
    /// # Errors
    /// If it doesn't, or can't be reached or written.
    pub async fn probe(&self, job: &JobId, nonce: u64) -> Result<(), StorageError> {
        let key = ObjectKey::probe(job, nonce)?;
        let verdict = self.try_probe(&key, job, nonce).await;
        let deleted = self.delete(&key).await;
        verdict?;
        deleted?;
        match self.head(&key).await {
            Err(StorageError::Missing { .. }) => Ok(()),
            Ok(_) => Err(self.not_conformant("an object is still there after it was deleted")),
            Err(error) => Err(error),
        }
    }

    async fn try_probe(
        &self,
        key: &ObjectKey,
        job: &JobId,
        nonce: u64,
    ) -> Result<(), StorageError> {
        let bodies: Vec<Bytes> =
            (0..PROBE_CREATES).map(|n| format!("ripstop probe {nonce:016x}-{n}").into()).collect();
        let creates =
            future::join_all(bodies.iter().map(|body| self.create(key, body.clone()))).await;
        let mut winners = Vec::new();
        for (body, outcome) in bodies.iter().zip(creates) {
            if outcome? != Created::Conflict {
                winners.push(body);
            }
        }
        let [winner] = winners[..] else {
            let count = winners.len();
            return Err(self.not_conformant(&format!(
                "of {PROBE_CREATES} creates of one key {count} won instead of 1; the server must honour If-None-Match"
            )));
        };
        let bytes = winner.len() as u64;
        if self.get(key, bytes).await? != winner {
            return Err(self.not_conformant("what was read is not what was written"));
        }
        if self.read(key, 8..16, bytes).await? != winner[8..16] {
            return Err(self.not_conformant("reading a range gives other bytes"));
        }
        if !self
            .list(&Prefix::Probes(job.clone()))
            .await?
            .contains(&Object { key: key.clone(), bytes })
        {
            return Err(self.not_conformant("what was written is not listed"));
        }
        Ok(())
    }

    /// Whether the object is there and has these bytes; `None` if it isn't there.
    async fn find_same(
        &self,
        key: &ObjectKey,
        bytes: &Bytes,
    ) -> Result<Option<bool>, StorageError> {
        match self.get(key, bytes.len() as u64).await {
            Ok(found) => Ok(Some(found == bytes)),
            Err(StorageError::Length { .. }) => Ok(Some(false)),
            Err(StorageError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn write(&self, key: &ObjectKey, bytes: Bytes, call: Call) -> Result<(), ObjectError> {
        let fault = self.fault(call);
        match fault {
            Some(Fault::Before) => return Err(injected()),
            Some(Fault::Lost) => return Ok(()),
            Some(Fault::Exists) => {
                return Err(ObjectError::AlreadyExists {
                    path: key.to_string(),
                    source: "injected".into(),
                });
            }
            _ => {}
        }
        let mode = if call == Call::Create { PutMode::Create } else { PutMode::Overwrite };
        let options = PutOptions { mode, ..PutOptions::default() };
        self.objects
            .put_opts(&self.path(&key.to_string()), PutPayload::from_bytes(bytes), options)
            .await?;
        if fault == Some(Fault::After) { Err(injected()) } else { Ok(()) }
    }

    /// One range of an object of `bytes_expected` bytes.
    async fn read(
        &self,
        key: &ObjectKey,
        range: std::ops::Range<u64>,
        bytes_expected: u64,
    ) -> Result<Bytes, StorageError> {
        let wanted = range.end - range.start;
        let fault = self.fault(Call::Read);
        let result = match fault {
            Some(Fault::Before | Fault::After) => Err(injected()),
            _ if self.is_lost(key) => Err(absent(key)),
            _ => self.read_range(key, range).await,
        };
        let (mut bytes, size) = result.map_err(|error| self.error("read", key, error))?;
        match fault {
            Some(Fault::Short) => bytes.truncate(bytes.len().saturating_sub(1)),
            Some(Fault::Corrupt) => {
                let mut changed = bytes.to_vec();
                let middle = changed.len() / 2;
                changed[middle] ^= 1;
                bytes = changed.into();
            }
            _ => {}
        }
        // A connection that ends early and cleanly is not an error to the client: count.
        let found = if size == bytes_expected {
            bytes_expected - wanted + bytes.len() as u64
        } else {
            size
        };
        if found == bytes_expected {
            Ok(bytes)
        } else {
            Err(StorageError::Length { key: key.to_string(), expected: bytes_expected, found })
        }
    }

    async fn read_range(
        &self,
        key: &ObjectKey,
        range: std::ops::Range<u64>,
    ) -> Result<(Bytes, u64), ObjectError> {
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let result = self.objects.get_opts(&self.path(&key.to_string()), options).await?;
        let size = result.meta.size;
        Ok((result.bytes().await?, size))
    }

    fn path(&self, key: &str) -> Path {
        if self.prefix.is_empty() {
            Path::from(key)
        } else {
            Path::from(format!("{}/{key}", self.prefix))
        }
    }

    fn relative<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let path: &str = path.as_ref();
        if self.prefix.is_empty() {
            Some(path)
        } else {
            path.strip_prefix(self.prefix.as_str())?.strip_prefix('/')
        }
    }

    fn fault(&self, call: Call) -> Option<Fault> {
        self.faults.as_ref()?.next(call)
    }

    fn is_lost(&self, key: &ObjectKey) -> bool {
        self.faults.as_ref().is_some_and(|plan| plan.is_lost(&key.to_string()))
    }

    fn error(
        &self,
        operation: &'static str,
        key: &dyn fmt::Display,
        error: ObjectError,
    ) -> StorageError {
        error::classify(&self.url, operation, key.to_string(), error)
    }

    /// For operations that need no object to be there: what they miss can only be the bucket.
    fn whole_error(
        &self,
        operation: &'static str,
        key: &dyn fmt::Display,
        error: ObjectError,
    ) -> StorageError {
        match self.error(operation, key, error) {
            StorageError::Missing { .. } => StorageError::NoBucket { url: self.url.to_string() },
            other => other,
        }
    }

    fn not_conformant(&self, reason: &str) -> StorageError {
        StorageError::NotConformant { url: self.url.to_string(), reason: reason.to_owned() }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("url", &self.url)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// How a create ended.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Created {
    /// It is stored now, by this call.
    Created,
    /// The same bytes were there: by an earlier try, or another member.
    AlreadySame,
    /// Other bytes are there; they were left alone.
    Conflict,
}

/// An object of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Object {
    /// Its key.
    pub key: ObjectKey,
    /// Its length.
    pub bytes: u64,
}

/// Most bytes of one read: small enough that a slow connection makes progress within a request's time.
const READ_BYTES: u64 = 16 << 20;

/// Creates of one key at once in a probe. Servers that only look before they write let several win.
const PROBE_CREATES: usize = 4;

fn injected() -> ObjectError {
    ObjectError::Generic { store: "faults", source: "injected fault".into() }
}

fn absent(key: &ObjectKey) -> ObjectError {
    ObjectError::NotFound { path: key.to_string(), source: "injected loss".into() }
}

#[cfg(test)]
mod tests;
