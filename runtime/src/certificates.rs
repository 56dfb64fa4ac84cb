//! Certificates and join tokens, for command lines.

use std::path::Path;
use std::time::Duration;

pub use transport::{CertificateAuthority, CertificateError, Role};
use transport::{TokenClaims, TokenId};
use types::JobId;

use crate::clock;
use crate::error::Error;

/// Makes a cluster's authority in an empty or new folder, and says its fingerprint.
///
/// # Errors
/// If there is one already, or the folder can't be written.
pub fn init(dir: &Path) -> Result<String, Error> {
    let reason = |e: CertificateError| Error::Settings(e.to_string());
    if CertificateAuthority::load(dir).is_ok() {
        return Err(Error::Settings(format!(
            "{} holds an authority already; clusters that use it would be cut off: take another --dir",
            dir.display()
        )));
    }
    let authority = CertificateAuthority::create().map_err(reason)?;
    authority.save(dir).map_err(reason)?;
    Ok(authority.fingerprint().to_string())
}

/// Makes a join token; its uses are counted in the coordinators' log.
///
/// # Errors
/// If there is no authority in the folder.
pub fn token(
    dir: &Path,
    uses: u32,
    job: Option<JobId>,
    valid: Option<Duration>,
) -> Result<String, Error> {
    let authority = CertificateAuthority::load(dir).map_err(|e| Error::Settings(e.to_string()))?;
    let valid_until_unix = valid.map(|valid| clock::unix_ms() / 1000 + valid.as_secs());
    let claims =
        TokenClaims { id: TokenId::random(), uses, job, role: Role::Agent, valid_until_unix };
    Ok(authority.token(claims).secret_text().to_owned())
}
