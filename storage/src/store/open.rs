//! From a URL and options to an object store.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use super::StorageError;
use crate::Layout;
use crate::key::check_words;

/// How to reach a store.
#[derive(Clone)]
pub struct StoreOptions {
    /// Credentials, endpoint and the like of an S3 server, by the names of the environment: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP` and so on. Case doesn't
    /// matter; unknown names are ignored, since the environment is full of them.
    pub settings: BTreeMap<String, String>,
    /// Size of a segment: the time allowed to one request follows from it.
    pub segment_bytes: u64,
    /// How long requests are repeated before the failure is told. Below five minutes, since credentials may end. Too small: a
    /// server's restart fails a checkpoint; too large: a wrong address is noticed late. Default: 3 minutes.
    pub patience: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let segment_bytes = Layout::SEGMENT_BYTES;
        Self { settings: BTreeMap::new(), segment_bytes, patience: Duration::from_secs(180) }
    }
}

impl fmt::Debug for StoreOptions {
    /// Shows the names of the settings only: their values are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions")
            .field("settings", &self.settings.keys())
            .field("segment_bytes", &self.segment_bytes)
            .field("patience", &self.patience)
            .finish()
    }
}

/// The objects at `url`, and the prefix under which ours are.
pub(super) fn open(
    url: &str,
    options: &StoreOptions,
) -> Result<(Arc<dyn ObjectStore>, String), StorageError> {
    let bad = |reason: String| StorageError::Url { url: url.to_owned(), reason };
    match url.split_once("://") {
        Some(("file", _)) => {
            let path = url::Url::parse(url).ok().and_then(|parsed| parsed.to_file_path().ok());
            let path =
                path.ok_or_else(|| bad("is no absolute path; write file:///directory".to_owned()))?;
            Ok((open_directory(&path).map_err(bad)?, String::new()))
        }
        Some(("memory", rest)) => {
            let (name, prefix) = split(rest).map_err(bad)?;
            if name.is_empty() {
                return Err(bad("lacks a name; write memory://name".to_owned()));
            }
            Ok((open_memory(name), prefix))
        }
        Some(("s3", rest)) => {
            let (bucket, prefix) = split(rest).map_err(bad)?;
            Ok((open_s3(url, bucket, options)?, prefix))
        }
        Some((scheme, _)) => Err(bad(format!(
            "unknown scheme {scheme:?}; use a directory, file:///directory, s3://bucket/prefix or memory://name"
        ))),
        None if url.is_empty() => {
            Err(bad("is empty; name a directory or s3://bucket/prefix".to_owned()))
        }
        None => Ok((open_directory(FilePath::new(url)).map_err(bad)?, String::new())),
    }
}

/// `name/prefix`, checked.
fn split(rest: &str) -> Result<(&str, String), String> {
    if let Some(c) = rest.chars().find(|c| matches!(c, '@' | '?' | '#' | '%')) {
        return Err(format!(
            "has a {c:?}; options and credentials go into the environment or the settings"
        ));
    }
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_matches('/');
    check_words(prefix).map_err(|error| error.to_string())?;
    match Path::parse(prefix) {
        // A prefix that the store would spell otherwise could not be taken off again.
        Ok(path) if Path::from(prefix) == path => Ok((name, path.to_string())),
        _ => Err(format!(
            "prefix {prefix:?} can't be used; keep to letters, digits, '-', '_', '.' and '/'"
        )),
    }
}

fn open_directory(path: &FilePath) -> Result<Arc<dyn ObjectStore>, String> {
    let exists = path.is_dir();
    if !exists {
        std::fs::create_dir_all(path)
            .map_err(|error| format!("can't create the directory: {error}"))?;
    }
    let path: PathBuf =
        path.canonicalize().map_err(|error| format!("can't open the directory: {error}"))?;
    let objects = LocalFileSystem::new_with_prefix(path).map_err(|error| error.to_string())?;
    Ok(Arc::new(objects.with_fsync(true)))
}

/// One store for each name, as long as the process lives.
fn open_memory(name: &str) -> Arc<dyn ObjectStore> {
    static STORES: Mutex<BTreeMap<String, Arc<InMemory>>> = Mutex::new(BTreeMap::new());
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let store: Arc<InMemory> = Arc::clone(stores.entry(name.to_owned()).or_default());
    store
}

fn open_s3(
    url: &str,
    bucket: &str,
    options: &StoreOptions,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    let bad = |reason: &str| StorageError::Url { url: url.to_owned(), reason: reason.to_owned() };
    if bucket.is_empty() {
        return Err(bad("lacks a bucket; write s3://bucket/prefix"));
    }
    let lower =
        options.settings.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.as_str()));
    let settings: BTreeMap<String, &str> = lower.filter(|(_, value)| !value.is_empty()).collect();
    let set = |name: &str| settings.get(name).copied();
    let is_true = |name: &str| {
        set(name).is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
    };

    let endpoint = set("aws_endpoint_url_s3")
        .or_else(|| set("aws_endpoint_url"))
        .or_else(|| set("aws_endpoint"));
    if endpoint.is_some_and(|e| e.starts_with("http://")) && !is_true("aws_allow_http") {
        return Err(bad(
            "its endpoint is not encrypted; use https, or set AWS_ALLOW_HTTP=true if the network is trusted",
        ));
    }
    if set("aws_access_key_id").is_some() != set("aws_secret_access_key").is_some() {
        return Err(bad(
            "has half of the credentials; set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ));
    }
    let has_credentials = is_true("aws_skip_signature")
        || set("aws_access_key_id").is_some()
        || (set("aws_web_identity_token_file").is_some() && set("aws_role_arn").is_some())
        || set("aws_container_credentials_relative_uri").is_some()
        || set("aws_container_credentials_full_uri").is_some();
    // A machine's role is worth asking for only where AWS itself is meant.
    if !has_credentials && (endpoint.is_some() || is_true("aws_ec2_metadata_disabled")) {
        return Err(StorageError::NoCredentials { url: url.to_owned() });
    }

    let timeout = Duration::from_secs(30 + options.segment_bytes / SLOWEST_BYTES_PER_SECOND);
    let client =
        ClientOptions::new().with_timeout(timeout).with_connect_timeout(Duration::from_secs(5));
    let backoff = BackoffConfig::default();
    let retry =
        RetryConfig { backoff, max_retries: 10, retry_timeout: options.patience.min(PATIENCE_MAX) };
    let mut builder = AmazonS3Builder::new().with_client_options(client).with_retry(retry);
    for (name, value) in &settings {
        if let Ok(key) = name.parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, *value);
        }
    }
    let builder =
        builder.with_bucket_name(bucket).with_conditional_put(S3ConditionalPut::ETagMatch);
    let objects = builder.build().map_err(|error| bad(&error.to_string()))?;
    Ok(Arc::new(objects))
}

/// A connection slower than this can't hold checkpoints; at 5 MB/s the crate's own 30 s would fail every large segment.
const SLOWEST_BYTES_PER_SECOND: u64 = 1 << 20;

/// Requests are repeated with the credentials of the first, which may end after five minutes.
const PATIENCE_MAX: Duration = Duration::from_secs(270);
