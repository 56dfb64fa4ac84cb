//! Join tokens: what a person hands to a new host so that it gets a certificate.
//!
//! The text is `ripstop1.` and base64url of the claims with a MAC. Whoever holds the cluster's CA can make and check one without
//! state; how often a token was used is counted in the coordinators' log, by its [`TokenId`]. A token carries the fingerprint of the
//! CA, so the first contact authenticates the coordinator.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use types::{Digest, JobId};

use crate::Role;

/// A join token. A secret: it prints redacted; [`secret_text`](Self::secret_text) gives the text itself.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    authority: Digest,
    claims: TokenClaims,
    text: String,
}

impl JoinToken {
    /// The text to hand over. Keep it out of logs.
    #[must_use]
    pub fn secret_text(&self) -> &str {
        &self.text
    }

    /// Fingerprint of the CA whose coordinators take the token.
    #[must_use]
    pub fn authority(&self) -> Digest {
        self.authority
    }

    /// What the token says; not proven to one who can't check the MAC.
    #[must_use]
    pub fn claims(&self) -> &TokenClaims {
        &self.claims
    }

    pub(crate) fn make(authority: Digest, claims: TokenClaims, secret: &TokenSecret) -> Self {
        let mut bytes =
            types::encode(&Body { authority: authority.0, claims: claims.clone() }).to_vec();
        let mac = secret.mac(&bytes).finalize().into_bytes();
        bytes.extend_from_slice(&mac);
        Self { authority, claims, text: format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes)) }
    }

    pub(crate) fn check(
        text: &str,
        authority: Digest,
        secret: &TokenSecret,
        now_unix: u64,
    ) -> Result<TokenClaims, TokenError> {
        let (body, signed, mac) = split(text)?;
        if body.authority != authority.0 {
            return Err(TokenError::Foreign { authority: Digest(body.authority), ours: authority });
        }
        secret.mac(&signed).verify_slice(&mac).map_err(|_| TokenError::Malformed)?;
        match body.claims.valid_until_unix {
            Some(until) if now_unix >= until => {
                Err(TokenError::Expired { seconds_ago: now_unix - until })
            }
            _ => Ok(body.claims),
        }
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    /// Reads a token as its bearer does: the MAC can't be checked without the CA.
    fn from_str(text: &str) -> Result<Self, TokenError> {
        let (body, _, _) = split(text)?;
        Ok(Self {
            authority: Digest(body.authority),
            claims: body.claims,
            text: text.trim().to_owned(),
        })
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "join token {} (secret redacted)", self.claims.id)
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a token allows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenClaims {
    /// Its name, under which uses are counted. Not a secret.
    pub id: TokenId,
    /// How many certificates it is good for.
    pub uses: u32,
    /// The job that those certificates belong to; `None`: any.
    pub job: Option<JobId>,
    /// The role that those certificates have.
    pub role: Role,
    /// When it ends, in seconds since 1970 by the coordinators' clock; `None`: never.
    pub valid_until_unix: Option<u64>,
}

/// The name of a token: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TokenId(pub [u8; 16]);

impl TokenId {
    /// A new one.
    #[must_use]
    pub fn random() -> Self {
        Self(random_bytes())
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a token is not taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// It belongs to another cluster.
    #[error(
        "the join token is for the cluster with CA {authority:#}, this one's is {ours:#}: make a token with this cluster's CA"
    )]
    Foreign {
        /// The CA that the token names.
        authority: Digest,
        /// This cluster's CA.
        ours: Digest,
    },
    /// Its time is over.
    #[error("the join token expired {seconds_ago} s ago: make a new one")]
    Expired {
        /// How long ago, by the checker's clock.
        seconds_ago: u64,
    },
    /// Damaged or forged.
    #[error("the join token is damaged: copy all of it, from `{PREFIX}` on")]
    Malformed,
}

/// The key of the MAC, derived from the CA's private key.
pub(crate) struct TokenSecret([u8; 32]);

impl TokenSecret {
    pub(crate) fn derive(authority_key: &[u8]) -> Self {
        let mac = keyed(authority_key).chain_update(b"ripstop join token 1");
        Self(mac.finalize().into_bytes().into())
    }

    fn mac(&self, bytes: &[u8]) -> Hmac<Sha256> {
        keyed(&self.0).chain_update(bytes)
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    use rand::TryRngCore as _;
    let mut bytes = [0; N];
    rand::rngs::OsRng
        .try_fill_bytes(&mut bytes)
        .expect("the system gives randomness once it has booted");
    bytes
}

#[derive(Serialize, Deserialize)]
struct Body {
    authority: [u8; 32],
    claims: TokenClaims,
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// The claims, the bytes under the MAC, and the MAC. Only the one text that [`JoinToken::make`] would give is read.
fn split(text: &str) -> Result<(Body, Vec<u8>, [u8; MAC_BYTES]), TokenError> {
    let packed = text.trim().strip_prefix(PREFIX).ok_or(TokenError::Malformed)?;
    if packed.len() > MAX_TEXT_BYTES {
        return Err(TokenError::Malformed);
    }
    let mut bytes = URL_SAFE_NO_PAD.decode(packed).map_err(|_| TokenError::Malformed)?;
    let signed = bytes.len().checked_sub(MAC_BYTES).ok_or(TokenError::Malformed)?;
    let mac = bytes.split_off(signed).try_into().map_err(|_| TokenError::Malformed)?;
    let body = types::decode(&bytes).map_err(|_| TokenError::Malformed)?;
    Ok((body, bytes, mac))
}

const PREFIX: &str = "ripstop1.";
const MAC_BYTES: usize = 32;
/// Ours have about 200 characters, with the longest job name 290.
const MAX_TEXT_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret() -> TokenSecret {
        TokenSecret::derive(b"a CA key")
    }

    fn claims(valid_until_unix: Option<u64>) -> TokenClaims {
        let job = Some(JobId::new("demo").unwrap());
        TokenClaims { id: TokenId([7; 16]), uses: 3, job, role: Role::Agent, valid_until_unix }
    }

    const HERE: Digest = Digest([1; 32]);

    #[test]
    fn a_token_gives_back_its_claims() {
        let token = JoinToken::make(HERE, claims(Some(1000)), &secret());
        assert_eq!(
            JoinToken::check(token.secret_text(), HERE, &secret(), 999),
            Ok(claims(Some(1000)))
        );
        let read: JoinToken = format!(" {}\n", token.secret_text()).parse().unwrap();
        assert_eq!(read, token);
        assert_eq!(read.authority(), HERE);
    }

    #[test]
    fn an_expired_token_and_a_foreign_one_are_named() {
        let token = JoinToken::make(HERE, claims(Some(1000)), &secret());
        assert_eq!(
            JoinToken::check(token.secret_text(), HERE, &secret(), 1000),
            Err(TokenError::Expired { seconds_ago: 0 })
        );
        let there = JoinToken::check(token.secret_text(), Digest([2; 32]), &secret(), 0);
        assert!(matches!(there, Err(TokenError::Foreign { .. })));
        let forged = JoinToken::make(HERE, claims(None), &TokenSecret::derive(b"another key"));
        assert_eq!(
            JoinToken::check(forged.secret_text(), HERE, &secret(), 0),
            Err(TokenError::Malformed)
        );
    }

    #[test]
    fn a_token_prints_without_its_secret() {
        let token = JoinToken::make(HERE, claims(None), &secret());
        let (shown, debug) = (token.to_string(), format!("{token:?}"));
        let mac = &token.secret_text()[token.secret_text().len() - 20..];
        assert!(!shown.contains(mac) && !debug.contains(mac), "{debug}");
    }

    proptest! {
        #[test]
        fn a_flipped_or_cut_token_is_refused(bit in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
            let token = JoinToken::make(HERE, claims(None), &secret());
            let mut bytes = token.secret_text().as_bytes().to_vec();
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(text) = String::from_utf8(bytes) {
                prop_assert!(JoinToken::check(&text, HERE, &secret(), 0).is_err(), "{}", text);
            }
            let cut = cut.index(token.secret_text().len());
            prop_assert!(JoinToken::check(&token.secret_text()[..cut], HERE, &secret(), 0).is_err());
        }

        #[test]
        fn any_text_is_refused_without_panic(text in "\\PC{0,80}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(JoinToken::check(&text, HERE, &secret(), 0).is_err());
            let packed = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
            prop_assert!(JoinToken::check(&packed, HERE, &secret(), 0).is_err());
        }
    }
}
