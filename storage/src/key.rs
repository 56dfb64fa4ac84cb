//! Names of objects in the store, under the checkpoint URL.
//!
//! The grammar is fixed: what a manifest or a listing names is parsed back before it is used, so no foreign text becomes a path.
//! No key has a `#` (the local file system uses it for its temporary files) or one of the two words by which clients of S3 tell
//! a failure in the body of a success.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use types::{Attempt, Digest, JobId, Lineage, Step};

/// The key of one object, relative to the checkpoint URL.
// Invariant: the job's name has none of the forbidden words; `new` is the only door.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectKey {
    job: JobId,
    kind: Kind,
}

impl ObjectKey {
    /// The key of a segment: `<job>/attempt-<n>/<2 hex>/<hash>`.
    ///
    /// # Errors
    /// If the job's name has a forbidden word.
    pub fn segment(job: &JobId, attempt: Attempt, hash: Digest) -> Result<Self, KeyError> {
        Self::new(job, Kind::Segment { attempt, hash })
    }

    /// The key of a manifest: `<job>/manifests/<lineage>-<step>-<attempt>.json`.
    ///
    /// # Errors
    /// If the job's name has a forbidden word.
    pub fn manifest(
        job: &JobId,
        lineage: Lineage,
        step: Step,
        attempt: Attempt,
    ) -> Result<Self, KeyError> {
        Self::new(job, Kind::Manifest { lineage, step, attempt })
    }

    /// The key of a numbered hint: `<job>/refs/<16 digits>`.
    ///
    /// # Errors
    /// If the job's name has a forbidden word.
    pub fn reference(job: &JobId, number: u64) -> Result<Self, KeyError> {
        Self::new(job, Kind::Reference { number })
    }

    /// The key of a probe's object: `<job>/probe/<16 hex digits>`.
    ///
    /// # Errors
    /// If the job's name has a forbidden word.
    pub fn probe(job: &JobId, nonce: u64) -> Result<Self, KeyError> {
        Self::new(job, Kind::Probe { nonce })
    }

    /// The job to which the object belongs.
    #[must_use]
    pub fn job(&self) -> &JobId {
        &self.job
    }

    /// Lineage, step and attempt, if this is a manifest's key.
    #[must_use]
    pub fn manifest_parts(&self) -> Option<(Lineage, Step, Attempt)> {
        match self.kind {
            Kind::Manifest { lineage, step, attempt } => Some((lineage, step, attempt)),
            _ => None,
        }
    }

    /// Attempt and hash, if this is a segment's key.
    #[must_use]
    pub fn segment_parts(&self) -> Option<(Attempt, Digest)> {
        match self.kind {
            Kind::Segment { attempt, hash } => Some((attempt, hash)),
            _ => None,
        }
    }

    /// The number, if this is a reference's key.
    #[must_use]
    pub fn reference_number(&self) -> Option<u64> {
        match self.kind {
            Kind::Reference { number } => Some(number),
            _ => None,
        }
    }

    fn new(job: &JobId, kind: Kind) -> Result<Self, KeyError> {
        check_words(job.as_str())?;
        Ok(Self { job: job.clone(), kind })
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = &self.job;
        match &self.kind {
            Kind::Segment { attempt, hash } => {
                let hash = hash.to_string();
                write!(f, "{job}/attempt-{attempt}/{}/{hash}", &hash[..2])
            }
            Kind::Manifest { lineage, step, attempt } => {
                write!(f, "{job}/manifests/{:010}-{:016}-{attempt}.json", lineage.0, step.0)
            }
            Kind::Reference { number } => write!(f, "{job}/refs/{number:016}"),
            Kind::Probe { nonce } => write!(f, "{job}/probe/{nonce:016x}"),
        }
    }
}

impl FromStr for ObjectKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let key = parse(text)
            .ok_or_else(|| KeyError::Unknown { key: text.chars().take(200).collect() })?;
        check_words(key.job.as_str())?;
        // One spelling only: what prints otherwise (signs, missing zeros, capital hex) is no key.
        if key.to_string() == text { Ok(key) } else { Err(KeyError::Unknown { key: text.into() }) }
    }
}

impl TryFrom<String> for ObjectKey {
    type Error = KeyError;
    fn try_from(text: String) -> Result<Self, KeyError> {
        text.parse()
    }
}

impl From<ObjectKey> for String {
    fn from(key: ObjectKey) -> Self {
        key.to_string()
    }
}

/// What a listing covers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Prefix {
    /// Everything of a job.
    Job(JobId),
    /// The segments of one attempt.
    Attempt(JobId, Attempt),
    /// The manifests of a job.
    Manifests(JobId),
    /// The numbered hints of a job.
    References(JobId),
    /// What probes of a job left.
    Probes(JobId),
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(job) => job.fmt(f),
            Self::Attempt(job, attempt) => write!(f, "{job}/attempt-{attempt}"),
            Self::Manifests(job) => write!(f, "{job}/manifests"),
            Self::References(job) => write!(f, "{job}/refs"),
            Self::Probes(job) => write!(f, "{job}/probe"),
        }
    }
}

/// A text that is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It doesn't follow the grammar.
    #[error("{key:?} is no key of a checkpoint object")]
    Unknown {
        /// The text.
        key: String,
    },
    /// It has a word that clients of S3 take for a failure.
    #[error(
        "{name:?} has the word {word:?}, which clients of s3 take for a failure; choose another name"
    )]
    Forbidden {
        /// The name.
        name: String,
        /// The word.
        word: &'static str,
    },
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Kind {
    Segment { attempt: Attempt, hash: Digest },
    Manifest { lineage: Lineage, step: Step, attempt: Attempt },
    Reference { number: u64 },
    Probe { nonce: u64 },
}

/// Refuses the two words that clients of S3 look for in the body of an answer.
pub(crate) fn check_words(name: &str) -> Result<(), KeyError> {
    match ["InternalError", "SlowDown"].into_iter().find(|word| name.contains(word)) {
        Some(word) => Err(KeyError::Forbidden { name: name.into(), word }),
        None => Ok(()),
    }
}

fn parse(text: &str) -> Option<ObjectKey> {
    let parts: Vec<&str> = text.splitn(5, '/').collect();
    let job = JobId::new(*parts.first()?).ok()?;
    let kind = match parts.get(1..)? {
        ["manifests", name] => {
            let mut numbers =
                name.strip_suffix(".json")?.splitn(3, '-').map(|n| n.parse::<u64>().ok());
            let (lineage, step, attempt) = (numbers.next()??, numbers.next()??, numbers.next()??);
            Kind::Manifest {
                lineage: Lineage(lineage),
                step: Step(step),
                attempt: Attempt(attempt),
            }
        }
        ["refs", number] => Kind::Reference { number: number.parse().ok()? },
        ["probe", nonce] => Kind::Probe { nonce: u64::from_str_radix(nonce, 16).ok()? },
        [attempt, _, hash] => {
            let attempt = Attempt(attempt.strip_prefix("attempt-")?.parse().ok()?);
            Kind::Segment { attempt, hash: Digest::from_hex(hash)? }
        }
        _ => return None,
    };
    Some(ObjectKey { job, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job() -> JobId {
        JobId::new("demo-1").unwrap()
    }

    #[test]
    fn keys_are_spelled_by_the_grammar() {
        let hash = Digest([0xab; 32]);
        let hex = "ab".repeat(32);
        let table = [
            (ObjectKey::segment(&job(), Attempt(7), hash), format!("demo-1/attempt-7/ab/{hex}")),
            (
                ObjectKey::manifest(&job(), Lineage(3), Step(42), Attempt(7)),
                "demo-1/manifests/0000000003-0000000000000042-7.json".to_owned(),
            ),
            (ObjectKey::reference(&job(), 5), "demo-1/refs/0000000000000005".to_owned()),
            (ObjectKey::probe(&job(), 255), "demo-1/probe/00000000000000ff".to_owned()),
        ];
        for (key, text) in table {
            let key = key.unwrap();
            assert_eq!(key.to_string(), text);
            assert_eq!(text.parse::<ObjectKey>().unwrap(), key);
        }
    }

    #[test]
    fn other_spellings_are_no_keys() {
        let hex = "ab".repeat(32);
        let bad = [
            String::new(),
            "demo".into(),
            "/refs/0000000000000005".into(),
            "demo/refs/5".into(),
            "demo/refs/+000000000000005".into(),
            "demo/refs/0000000000000005/".into(),
            "demo/refs/0000000000000005#1".into(),
            "../refs/0000000000000005".into(),
            "demo/manifests/0000000003-0000000000000042-07.json".into(),
            "demo/manifests/3-42-7.json".into(),
            format!("demo/attempt-7/ac/{hex}"),
            format!("demo/attempt-7/AB/{}", hex.to_uppercase()),
            format!("demo/attempt-7/ab/{hex}/x"),
        ];
        for text in bad {
            assert!(text.parse::<ObjectKey>().is_err(), "{text}");
        }
    }

    #[test]
    fn words_that_clients_take_for_failures_are_refused() {
        for name in ["xSlowDown", "InternalError"] {
            let job = JobId::new(name).unwrap();
            assert!(ObjectKey::reference(&job, 1).is_err());
            assert!(format!("{name}/refs/0000000000000005").parse::<ObjectKey>().is_err());
        }
    }

    proptest! {
        #[test]
        fn what_is_parsed_prints_the_same(lineage: u64, step: u64, attempt: u64, bytes: [u8; 32], noise in ".{0,60}") {
            let manifest = ObjectKey::manifest(&job(), Lineage(lineage), Step(step), Attempt(attempt)).unwrap();
            let segment = ObjectKey::segment(&job(), Attempt(attempt), Digest(bytes)).unwrap();
            for key in [manifest, segment, ObjectKey::reference(&job(), step).unwrap()] {
                prop_assert_eq!(key.to_string().parse::<ObjectKey>().unwrap(), key);
            }
            if let Ok(key) = noise.parse::<ObjectKey>() {
                prop_assert_eq!(key.to_string(), noise);
            }
        }
    }
}
