//! How messages become bytes: postcard, with the protocol's version negotiated in TLS (ALPN), so no message carries it again.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Version of every message between processes. It stands in the ALPN names: processes of different versions refuse each other
/// before the first message.
pub const PROTOCOL_VERSION: u32 = 1;

/// Bytes that are no message.
#[derive(Debug, thiserror::Error)]
#[error("undecodable message: {reason}")]
pub struct WireError {
    reason: String,
}

/// The bytes of a message.
///
/// # Panics
/// If the value can't be serialized, which for our plain message types is a bug.
pub fn encode<T: Serialize>(message: &T) -> bytes::Bytes {
    postcard::to_stdvec(message).expect("messages are plain data").into()
}

/// The message in `bytes`, all of them. Never panics, and allocates no more than a small multiple of what came in.
///
/// # Errors
/// If the bytes are malformed, or some are left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes::<T>(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError { reason: format!("{} bytes left over", rest.len()) }),
        Err(error) => Err(WireError { reason: error.to_string() }),
    }
}
