//! The cluster's CA: signs certificates and makes join tokens. Its key lives in the coordinators' data directories.
//!
//! It decides nothing: who may have a certificate, and how often a token was used, is the roster's business.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519, SanType,
    SerialNumber,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use time::OffsetDateTime;
use types::Digest;

use crate::identity::{CERTIFICATE, PRIVATE_KEY, fingerprint};
use crate::token::{TokenSecret, random_bytes};
use crate::{
    CertificateError, CsrKey, Identity, JoinToken, Subject, TokenClaims, TokenError, pem, tls,
};

/// A certificate authority, with its private key. Prints without the key.
pub struct CertificateAuthority {
    certificate: Bytes,
    issuer: Issuer<'static, KeyPair>,
    tokens: TokenSecret,
}

impl CertificateAuthority {
    /// How long certificates are valid if nobody says otherwise.
    pub const DEFAULT_VALIDITY: Duration = Duration::from_secs(30 * 86_400);

    /// A new CA.
    ///
    /// # Errors
    /// If the system gives no randomness.
    pub fn create() -> Result<Self, CertificateError> {
        let key = KeyPair::generate_for(&PKCS_ED25519).map_err(CertificateError::make)?;
        // The name is unique, so that a certificate of another cluster is seen as such, and not as one with a wrong signature.
        let name = format!("ripstop cluster {:016x}", u64::from_le_bytes(random_bytes()));
        let mut params = params(&name, CA_VALIDITY);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(CertificateError::make)?;
        Self::new(Bytes::copy_from_slice(certificate.der()), key)
    }

    /// Writes `ca.pem` and `ca.key` into `dir`, which is made for its owner only. Never overwrites a CA.
    ///
    /// # Errors
    /// If there is one already, or the files can't be written.
    pub fn save(&self, dir: &Path) -> Result<(), CertificateError> {
        pem::create_private_dir(dir).map_err(|source| CertificateError::file(dir, source))?;
        let key = pem::encode(PRIVATE_KEY, self.issuer.key().serialized_der());
        for (name, text) in
            [(KEY_FILE, key), (CERTIFICATE_FILE, pem::encode(CERTIFICATE, &self.certificate))]
        {
            let path = dir.join(name);
            pem::create_private_file(&path, &text)
                .map_err(|source| CertificateError::file(&path, source))?;
        }
        Ok(())
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// If the files can't be read, or don't belong together.
    pub fn load(dir: &Path) -> Result<Self, CertificateError> {
        let read = |name: &str, label: &str| {
            let path = dir.join(name);
            let text = fs::read_to_string(&path)
                .map_err(|source| CertificateError::file(&path, source))?;
            let damaged =
                |reason| CertificateError::Damaged { what: path.display().to_string(), reason };
            pem::decode_one(label, &text).map_err(damaged)
        };
        let certificate = Bytes::from(read(CERTIFICATE_FILE, CERTIFICATE)?);
        let key = read(KEY_FILE, PRIVATE_KEY)?;
        let damaged = |reason: String| CertificateError::Damaged {
            what: dir.join(KEY_FILE).display().to_string(),
            reason,
        };
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key.as_slice().into(), &PKCS_ED25519)
            .map_err(|error| damaged(error.to_string()))?;
        tls::check_key(&certificate, key.serialized_der()).map_err(damaged)?;
        Self::new(certificate, key)
    }

    /// SHA-256 of the CA's certificate: the name of the cluster, as join tokens carry it.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        fingerprint(&self.certificate)
    }

    /// The CA's certificate, in DER.
    #[must_use]
    pub fn certificate(&self) -> &Bytes {
        &self.certificate
    }

    /// Signs a certificate (DER) for `subject` and the key in a signing request. The request's signature is checked, its names are
    /// ignored. Valid from an hour ago, for clocks that are behind.
    ///
    /// # Errors
    /// If the request is malformed, wrongly signed, or for a key that is not Ed25519.
    pub fn issue(
        &self,
        subject: &Subject,
        request: &[u8],
        valid: Duration,
    ) -> Result<Bytes, CertificateError> {
        let refuse = |reason: String| CertificateError::Request { reason };
        if request.len() > MAX_REQUEST_BYTES {
            return Err(refuse(format!(
                "it has {} bytes, allowed are {MAX_REQUEST_BYTES}",
                request.len()
            )));
        }
        let request =
            CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request))
                .map_err(|error| refuse(error.to_string()))?;
        if request.public_key.algorithm() != &PKCS_ED25519 {
            return Err(refuse("its key is not Ed25519".to_owned()));
        }
        let mut params = params(&format!("{} {}", subject.role, subject.node), valid);
        let uri = subject.to_string().try_into().map_err(CertificateError::make)?;
        let dns = tls::SERVER_NAME.try_into().map_err(CertificateError::make)?;
        params.subject_alt_names = vec![SanType::URI(uri), SanType::DnsName(dns)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate =
            params.signed_by(&request.public_key, &self.issuer).map_err(CertificateError::make)?;
        Ok(Bytes::copy_from_slice(certificate.der()))
    }

    /// A new key with its certificate, for processes on the CA's own machine.
    ///
    /// # Errors
    /// If the system gives no randomness.
    pub fn identity(
        &self,
        subject: &Subject,
        valid: Duration,
    ) -> Result<Identity, CertificateError> {
        let (request, key) = CsrKey::generate()?;
        key.into_identity(self.issue(subject, &request, valid)?, self.certificate.clone())
    }

    /// The join token that says `claims`.
    #[must_use]
    pub fn token(&self, claims: TokenClaims) -> JoinToken {
        JoinToken::make(self.fingerprint(), claims, &self.tokens)
    }

    /// What a join token allows, if this CA made it and it has not expired. Uses are not counted here.
    ///
    /// # Errors
    /// If it is another cluster's, expired, or damaged.
    pub fn check_token(&self, text: &str, now_unix: u64) -> Result<TokenClaims, TokenError> {
        JoinToken::check(text, self.fingerprint(), &self.tokens, now_unix)
    }

    fn new(certificate: Bytes, key: KeyPair) -> Result<Self, CertificateError> {
        let tokens = TokenSecret::derive(key.serialized_der());
        let der = CertificateDer::from(certificate.to_vec());
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(CertificateError::make)?;
        Ok(Self { certificate, issuer, tokens })
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CertificateAuthority({:#}, key redacted)", self.fingerprint())
    }
}

/// What all our certificates share.
fn params(common_name: &str, valid: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = OffsetDateTime::now_utc();
    let valid = time::Duration::try_from(valid).unwrap_or(CA_LONGEST);
    params.not_before = now - BACKDATED;
    params.not_after = now.saturating_add(valid.min(CA_LONGEST));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let mut serial: [u8; 16] = random_bytes();
    serial[0] &= 0x7f; // Serial numbers are positive.
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params
}

const KEY_FILE: &str = "ca.key";
const CERTIFICATE_FILE: &str = "ca.pem";
const CA_VALIDITY: Duration = Duration::from_secs(10 * 365 * 86_400);
/// No certificate outlives this, whatever is asked for.
const CA_LONGEST: time::Duration = time::Duration::days(100 * 365);
const BACKDATED: time::Duration = time::Duration::hours(1);
/// Ours have about 250 bytes.
const MAX_REQUEST_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use proptest::prelude::*;
    use types::NodeId;

    use super::*;
    use crate::{Role, TokenId};

    const DAY: Duration = Duration::from_secs(86_400);

    fn coordinator() -> Subject {
        Subject { role: Role::Coordinator, job: None, node: NodeId(1) }
    }

    #[test]
    fn a_ca_survives_its_files_and_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("pki");
        let authority = CertificateAuthority::create().unwrap();
        authority.save(&dir).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join(KEY_FILE))), (0o700, 0o600));
        let loaded = CertificateAuthority::load(&dir).unwrap();
        assert_eq!(loaded.fingerprint(), authority.fingerprint());
        let claims = TokenClaims {
            id: TokenId::random(),
            uses: 1,
            job: None,
            role: Role::Worker,
            valid_until_unix: None,
        };
        assert_eq!(
            loaded.check_token(authority.token(claims.clone()).secret_text(), 0),
            Ok(claims)
        );
        // What either issued, the other knows.
        let identity = loaded.identity(&coordinator(), DAY).unwrap();
        assert!(tls::check_issued(identity.certificate(), authority.certificate()).is_ok());
        assert!(matches!(
            CertificateAuthority::create().unwrap().save(&dir),
            Err(CertificateError::Exists { .. })
        ));
        assert_eq!(
            CertificateAuthority::load(&dir).unwrap().fingerprint(),
            authority.fingerprint()
        );
    }

    #[test]
    fn a_request_with_a_wrong_signature_is_refused_and_its_names_are_ignored() {
        let authority = CertificateAuthority::create().unwrap();
        let (request, key) = CsrKey::generate().unwrap();
        let mut forged = request.to_vec();
        *forged.last_mut().unwrap() ^= 1;
        assert!(matches!(
            authority.issue(&coordinator(), &forged, DAY),
            Err(CertificateError::Request { .. })
        ));
        let certificate = authority.issue(&coordinator(), &request, DAY).unwrap();
        let identity = key.into_identity(certificate, authority.certificate().clone()).unwrap();
        assert_eq!(identity.subject(), &coordinator());
    }

    #[test]
    fn a_leaf_is_no_ca() {
        let authority = CertificateAuthority::create().unwrap();
        let leaf = authority.identity(&coordinator(), DAY).unwrap();
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&leaf.key().into(), &PKCS_ED25519).unwrap();
        let impostor = CertificateAuthority::new(leaf.certificate().clone(), key).unwrap();
        let victim = Subject { role: Role::Operator, ..coordinator() };
        let (request, _) = CsrKey::generate().unwrap();
        let forged = impostor.issue(&victim, &request, DAY).unwrap();
        assert!(tls::check_issued(&forged, authority.certificate()).is_err());
    }

    proptest! {
        #[test]
        fn a_damaged_request_is_refused_or_was_damaged_outside_of_what_is_signed(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            flip in any::<prop::sample::Index>(),
        ) {
            let authority = CertificateAuthority::create().unwrap();
            prop_assert!(authority.issue(&coordinator(), &bytes, DAY).is_err());
            let (request, key) = CsrKey::generate().unwrap();
            let mut request = request.to_vec();
            let flip = flip.index(request.len());
            request[flip] ^= 0x55;
            if let Ok(certificate) = authority.issue(&coordinator(), &request, DAY) {
                // The key that is certified is still the one that signed.
                prop_assert!(key.into_identity(certificate, authority.certificate().clone()).is_ok());
            }
        }
    }
}
