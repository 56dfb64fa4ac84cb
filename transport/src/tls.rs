//! What TLS must do for us: version 1.3 only, both sides by the cluster's CA and nothing else, no early data, no tickets.
//!
//! Names are checked in two steps. Each certificate carries the DNS name [`SERVER_NAME`], which TLS itself compares; who the peer is
//! stands in the URI beside it and is compared after the handshake, by the endpoint.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, Error, RootCertStore,
    ServerConfig,
};
use rustls::{SignatureScheme, version};
use types::{Digest, PROTOCOL_VERSION};

use crate::Identity;
use crate::identity::fingerprint;

/// For endpoints that take connections. With `enrolment`, clients without a certificate pass too, if they ask for [`enrol_alpn`] only:
/// the endpoint must check that.
pub(crate) fn server(identity: &Identity, enrolment: Enrolment) -> Result<ServerConfig, String> {
    let verifier = WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(identity.authority())?),
        provider(),
    );
    let (verifier, protocols) = match enrolment {
        Enrolment::Refused => (verifier, vec![alpn()]),
        Enrolment::Taken => (verifier.allow_unauthenticated(), vec![alpn(), enrol_alpn()]),
    };
    let verifier = verifier.build().map_err(text)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .map_err(text)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(identity), key(identity.key()))
        .map_err(text)?;
    config.alpn_protocols = protocols;
    config.max_early_data_size = 0;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

/// For connections to a peer of the same cluster.
pub(crate) fn client(identity: &Identity) -> Result<ClientConfig, String> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .map_err(text)?
        .with_webpki_verifier(verifier(identity.authority())?)
        .with_client_auth_cert(chain(identity), key(identity.key()))
        .map_err(text)?;
    config.alpn_protocols = vec![alpn()];
    Ok(without_resumption(config))
}

/// For one without a certificate, who knows only the fingerprint of the CA.
pub(crate) fn enrolling_client(authority: Digest) -> Result<ClientConfig, String> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .map_err(text)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedAuthority {
            authority,
            provider: provider(),
        }))
        .with_no_client_auth();
    config.alpn_protocols = vec![enrol_alpn()];
    Ok(without_resumption(config))
}

/// Whether an endpoint takes clients without a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Enrolment {
    Taken,
    Refused,
}

/// Protocol name of connections between peers of one cluster.
pub(crate) fn alpn() -> Vec<u8> {
    format!("ripstop/{PROTOCOL_VERSION}").into_bytes()
}

/// Protocol name of connections of those who want a certificate.
pub(crate) fn enrol_alpn() -> Vec<u8> {
    format!("ripstop-enrol/{PROTOCOL_VERSION}").into_bytes()
}

/// Checks that a certificate is valid now and signed by `authority`.
pub(crate) fn check_issued(certificate: &[u8], authority: &[u8]) -> Result<(), String> {
    let name = server_name();
    let certificate = CertificateDer::from(certificate);
    let checked =
        verifier(authority)?.verify_server_cert(&certificate, &[], &name, &[], UnixTime::now());
    checked.map(|_| ()).map_err(text)
}

/// Checks that a private key is the certificate's.
pub(crate) fn check_key(certificate: &[u8], pkcs8: &[u8]) -> Result<(), String> {
    let key = provider().key_provider.load_private_key(key(pkcs8)).map_err(text)?;
    let certified = CertifiedKey::new(vec![CertificateDer::from(certificate.to_vec())], key);
    certified.keys_match().map_err(|_| "the private key is not this certificate's".to_owned())
}

/// Accepts a server if its chain brings the CA with the known fingerprint, and that CA signed it.
#[derive(Debug)]
struct PinnedAuthority {
    authority: Digest,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let pinned =
            intermediates.iter().find(|certificate| fingerprint(certificate) == self.authority);
        let pinned = pinned.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let verifier = verifier(pinned).map_err(Error::General)?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn verifier(authority: &[u8]) -> Result<Arc<WebPkiServerVerifier>, String> {
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots(authority)?), provider())
        .build()
        .map_err(text)
}

/// The cluster's CA and no other: no root of the system is ever trusted.
fn roots(authority: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(authority)).map_err(text)?;
    Ok(roots)
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    // The fastest first where AES is in hardware, which is everywhere that trains.
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn without_resumption(mut config: ClientConfig) -> ClientConfig {
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    config.enable_sni = false;
    config
}

fn chain(identity: &Identity) -> Vec<CertificateDer<'static>> {
    [identity.certificate(), identity.authority()]
        .map(|der| CertificateDer::from(der.to_vec()))
        .to_vec()
}

fn key(pkcs8: &[u8]) -> PrivateKeyDer<'static> {
    PrivatePkcs8KeyDer::from(pkcs8.to_vec()).into()
}

fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a valid DNS name")
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// The DNS name in each of our certificates. `.invalid` is reserved for names that never resolve.
pub(crate) const SERVER_NAME: &str = "ripstop.invalid";
