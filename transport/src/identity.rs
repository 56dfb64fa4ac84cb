//! A process's own certificate and key, and how it gets them without the key ever leaving: by a signing request.

use std::fmt;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use sha2::{Digest as _, Sha256};
use types::Digest;

use crate::{Subject, SubjectError, pem, tls};

/// A certificate, its private key and the cluster's CA certificate. Prints without the key.
// Invariant (checked by `new`): the CA signed the certificate, the key belongs to it, and it names `subject`.
pub struct Identity {
    subject: Subject,
    certificate: Bytes,
    key: Vec<u8>,
    authority: Bytes,
}

impl Identity {
    /// Whom it speaks for.
    #[must_use]
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// SHA-256 of the certificate: what peers may be told to expect.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        fingerprint(&self.certificate)
    }

    /// The certificate, in DER.
    #[must_use]
    pub fn certificate(&self) -> &Bytes {
        &self.certificate
    }

    /// The CA's certificate, in DER.
    #[must_use]
    pub fn authority(&self) -> &Bytes {
        &self.authority
    }

    /// SHA-256 of the CA's certificate.
    #[must_use]
    pub fn authority_fingerprint(&self) -> Digest {
        fingerprint(&self.authority)
    }

    /// Writes all of it to one PEM file that only its owner may read. An older file is replaced.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn save(&self, path: &Path) -> Result<(), CertificateError> {
        let text = [
            pem::encode(CERTIFICATE, &self.certificate),
            pem::encode(CERTIFICATE, &self.authority),
            pem::encode(PRIVATE_KEY, &self.key),
        ]
        .concat();
        pem::replace_private_file(path, &text)
            .map_err(|source| CertificateError::file(path, source))
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// If the file can't be read, or its parts don't belong together, or the certificate has expired.
    pub fn load(path: &Path) -> Result<Self, CertificateError> {
        let text =
            fs::read_to_string(path).map_err(|source| CertificateError::file(path, source))?;
        let damaged =
            |reason: String| CertificateError::Damaged { what: path.display().to_string(), reason };
        let key = pem::decode_one(PRIVATE_KEY, &text).map_err(damaged)?;
        let certificates: Result<[_; 2], _> =
            pem::decode(CERTIFICATE, &text).map_err(damaged)?.try_into();
        let [certificate, authority] = certificates.map_err(|found: Vec<_>| {
            damaged(format!("it has {} certificates, not its own and the CA's", found.len()))
        })?;
        Self::new(certificate.into(), key, authority.into())
    }

    pub(crate) fn new(
        certificate: Bytes,
        key: Vec<u8>,
        authority: Bytes,
    ) -> Result<Self, CertificateError> {
        let subject = Subject::from_certificate(&certificate)?;
        tls::check_issued(&certificate, &authority)
            .map_err(|reason| CertificateError::NotIssued { reason })?;
        tls::check_key(&certificate, &key)
            .map_err(|reason| CertificateError::NotIssued { reason })?;
        Ok(Self { subject, certificate, key, authority })
    }

    /// Parts that `new` would refuse, as a forger would put them together.
    #[cfg(test)]
    pub(crate) fn forged(certificate: Bytes, key: Vec<u8>, authority: Bytes) -> Self {
        Self {
            subject: Subject::from_certificate(&certificate).unwrap(),
            certificate,
            key,
            authority,
        }
    }

    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({}, certificate {:#}, key redacted)", self.subject, self.fingerprint())
    }
}

/// A private key that waits for its certificate. The key never leaves the process; the request is what to send.
pub struct CsrKey {
    key: KeyPair,
}

impl CsrKey {
    /// A new key, and the request (DER) for a certificate of it.
    ///
    /// # Errors
    /// If the system gives no randomness.
    pub fn generate() -> Result<(Bytes, Self), CertificateError> {
        let key = KeyPair::generate_for(&PKCS_ED25519).map_err(CertificateError::make)?;
        let request =
            CertificateParams::default().serialize_request(&key).map_err(CertificateError::make)?;
        Ok((Bytes::copy_from_slice(request.der()), Self { key }))
    }

    /// Joins the key with the certificate that was issued for it.
    ///
    /// # Errors
    /// If the certificate is not for this key, or not signed by that CA.
    pub fn into_identity(
        self,
        certificate: Bytes,
        authority: Bytes,
    ) -> Result<Identity, CertificateError> {
        Identity::new(certificate, self.key.serialize_der(), authority)
    }

    #[cfg(test)]
    pub(crate) fn forge(self, certificate: Bytes, authority: Bytes) -> Identity {
        Identity::forged(certificate, self.key.serialize_der(), authority)
    }
}

impl fmt::Debug for CsrKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CsrKey(redacted)")
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    /// A file can't be read or written.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// There is a CA already, and it is not replaced: every certificate of the cluster hangs on it.
    #[error(
        "{path} exists already: a CA is never overwritten, choose another directory or remove it yourself"
    )]
    Exists {
        /// Which file.
        path: String,
    },
    /// A file's contents are not what they should be.
    #[error("{what} is damaged: {reason}")]
    Damaged {
        /// Which file or message.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// The certificate names nobody.
    #[error(transparent)]
    Subject(#[from] SubjectError),
    /// Certificate, key and CA don't belong together.
    #[error("the certificate can't be used with this key and CA: {reason}")]
    NotIssued {
        /// What is wrong.
        reason: String,
    },
    /// The signing request is malformed, or its signature wrong.
    #[error("the signing request is refused: {reason}")]
    Request {
        /// What is wrong.
        reason: String,
    },
    /// The system could not make a key or a certificate.
    #[error("no certificate could be made: {reason}")]
    Make {
        /// What is wrong.
        reason: String,
    },
}

impl CertificateError {
    pub(crate) fn file(path: &Path, source: std::io::Error) -> Self {
        let path = path.display().to_string();
        if source.kind() == std::io::ErrorKind::AlreadyExists {
            Self::Exists { path }
        } else {
            Self::File { path, source }
        }
    }

    pub(crate) fn make(error: impl fmt::Display) -> Self {
        Self::Make { reason: error.to_string() }
    }
}

/// SHA-256 of a certificate in DER.
pub(crate) fn fingerprint(der: &[u8]) -> Digest {
    Digest(Sha256::digest(der).into())
}

pub(crate) const CERTIFICATE: &str = "CERTIFICATE";
pub(crate) const PRIVATE_KEY: &str = "PRIVATE KEY";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use types::{JobId, NodeId};

    use super::*;
    use crate::{CertificateAuthority, Role};

    const DAY: Duration = Duration::from_secs(86_400);

    fn worker() -> Subject {
        Subject { role: Role::Worker, job: Some(JobId::new("demo").unwrap()), node: NodeId(7) }
    }

    #[test]
    fn an_identity_survives_its_file_which_only_its_owner_may_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        let identity = CertificateAuthority::create().unwrap().identity(&worker(), DAY).unwrap();
        identity.save(&path).unwrap();
        identity.save(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let loaded = Identity::load(&path).unwrap();
        assert_eq!((loaded.subject(), loaded.fingerprint()), (&worker(), identity.fingerprint()));
        assert_eq!(loaded.key(), identity.key());
    }

    #[test]
    fn parts_that_do_not_belong_together_are_refused() {
        let (here, there) =
            (CertificateAuthority::create().unwrap(), CertificateAuthority::create().unwrap());
        let (request, key) = CsrKey::generate().unwrap();
        let certificate = here.issue(&worker(), &request, DAY).unwrap();
        assert!(key.into_identity(certificate.clone(), there.certificate().clone()).is_err());
        let (_, other) = CsrKey::generate().unwrap();
        assert!(other.into_identity(certificate, here.certificate().clone()).is_err());
    }

    #[test]
    fn a_key_does_not_print() {
        let identity = CertificateAuthority::create().unwrap().identity(&worker(), DAY).unwrap();
        let shown = format!("{identity:?}");
        assert!(
            shown.contains("ripstop://demo/worker/7") && shown.contains("key redacted"),
            "{shown}"
        );
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("identity.pem");
        assert!(matches!(Identity::load(&path), Err(CertificateError::File { .. })));
        fs::write(&path, "-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----\n").unwrap();
        let error = Identity::load(&path).unwrap_err().to_string();
        assert!(
            error.contains("identity.pem is damaged: the PRIVATE KEY block is no base64"),
            "{error}"
        );
    }
}
