//! Who a certificate speaks for: role, job and node, written as a URI in the certificate.
//!
//! The text form is `ripstop://<job>/<role>/<node>`, with `_` for a subject of no single job. Reading is total: any bytes give a
//! subject or an error, and each subject has exactly one text.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use types::{JobId, NodeId};

/// The process that a certificate speaks for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Subject {
    /// What it does.
    pub role: Role,
    /// The job that it belongs to; `None` for those that serve several, as coordinators do.
    pub job: Option<JobId>,
    /// Which one it is.
    pub node: NodeId,
}

impl Subject {
    /// True if the two may speak to each other as far as their jobs go: the same job, or one of them has none.
    #[must_use]
    pub fn shares_job_with(&self, other: &Self) -> bool {
        match (&self.job, &other.job) {
            (Some(mine), Some(theirs)) => mine == theirs,
            _ => true,
        }
    }

    /// Reads the subject of a certificate (DER). Checks nothing else in it.
    ///
    /// # Errors
    /// If the bytes are no certificate, or it has no subject of ours, or more than one.
    pub fn from_certificate(der: &[u8]) -> Result<Self, SubjectError> {
        use x509_parser::extensions::GeneralName;
        let unreadable = |_| SubjectError::new("the certificate can't be read");
        let (rest, certificate) =
            x509_parser::parse_x509_certificate(der).map_err(|_| unreadable(()))?;
        if !rest.is_empty() {
            return Err(SubjectError::new("bytes follow the certificate"));
        }
        let names = certificate.subject_alternative_name().map_err(|_| unreadable(()))?;
        let names =
            names.map(|extension| extension.value.general_names.as_slice()).unwrap_or_default();
        let mut ours = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) if uri.starts_with(SCHEME) => Some(*uri),
            _ => None,
        });
        match (ours.next(), ours.next()) {
            (Some(uri), None) => uri.parse(),
            (None, _) => Err(SubjectError::new("the certificate names no subject of a cluster")),
            (Some(_), Some(_)) => Err(SubjectError::new("the certificate names several subjects")),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = match &self.job {
            None => NO_JOB,
            Some(job) if job.as_str() == NO_JOB => JOB_CALLED_UNDERSCORE,
            Some(job) => job.as_str(),
        };
        write!(f, "{SCHEME}{job}/{}/{}", self.role, self.node)
    }
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, SubjectError> {
        let wrong = || SubjectError::new("a subject looks like ripstop://<job or _>/<role>/<node>");
        let mut parts = text.strip_prefix(SCHEME).ok_or_else(wrong)?.split('/');
        let (Some(job), Some(role), Some(node), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        let job = match job {
            NO_JOB => None,
            JOB_CALLED_UNDERSCORE => Some(NO_JOB),
            job => Some(job),
        };
        let job = job.map(JobId::new).transpose().map_err(SubjectError::new)?;
        let subject =
            Self { role: role.parse()?, job, node: NodeId(node.parse().map_err(|_| wrong())?) };
        // One text for each subject: no `+7`, no `007`.
        if subject.to_string() == text { Ok(subject) } else { Err(wrong()) }
    }
}

/// What a process does in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A voter of the replicated roster.
    Coordinator,
    /// The one that starts and watches workers on a host.
    Agent,
    /// A training process.
    Worker,
    /// A person's command line.
    Operator,
}

impl Role {
    const ALL: [Self; 4] = [Self::Coordinator, Self::Agent, Self::Worker, Self::Operator];

    /// Its name in certificates and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Agent => "agent",
            Self::Worker => "worker",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, SubjectError> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| SubjectError::new("a role is coordinator, agent, worker or operator"))
    }
}

/// Text or a certificate that names no subject.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no subject: {reason}")]
pub struct SubjectError {
    reason: String,
}

impl SubjectError {
    fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}

const SCHEME: &str = "ripstop://";
const NO_JOB: &str = "_";
/// A job may be called `_`; its certificates must not read as those of no single job.
const JOB_CALLED_UNDERSCORE: &str = "%5F";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn subjects() -> impl Strategy<Value = Subject> {
        let job = proptest::option::of("[A-Za-z0-9_-][A-Za-z0-9_.-]{0,20}");
        (prop::sample::select(Role::ALL.to_vec()), job, any::<u64>()).prop_map(
            |(role, job, node)| Subject {
                role,
                job: job.map(|name| JobId::new(name).unwrap()),
                node: NodeId(node),
            },
        )
    }

    proptest! {
        #[test]
        fn each_subject_has_one_text(subject in subjects()) {
            prop_assert_eq!(subject.to_string().parse::<Subject>(), Ok(subject));
        }

        #[test]
        fn any_text_is_read_without_panic(text in "(ripstop://)?[a-z_/%0-9.]{0,40}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(subject) = text.parse::<Subject>() {
                prop_assert_eq!(subject.to_string(), text);
            }
            prop_assert!(Subject::from_certificate(&bytes).is_err());
        }
    }

    #[test]
    fn a_job_called_underscore_is_not_every_job() {
        let subject =
            Subject { role: Role::Worker, job: Some(JobId::new("_").unwrap()), node: NodeId(1) };
        assert_eq!(subject.to_string(), "ripstop://%5F/worker/1");
        assert_eq!(subject.to_string().parse(), Ok(subject));
    }

    #[test]
    fn other_spellings_are_refused() {
        for bad in [
            "",
            "ripstop://",
            "ripstop://_/worker/07",
            "ripstop://_/worker/+7",
            "ripstop://_/boss/7",
            "ripstop://_/worker/7/8",
        ] {
            assert!(bad.parse::<Subject>().is_err(), "{bad}");
        }
    }
}
