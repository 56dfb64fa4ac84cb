//! [`State`]: what a program must keep so that training can go on anywhere: named tensors, and JSON for the rest.

use std::borrow::Cow;

use serde_json::Value;
pub use storage::TensorSpec;
use storage::{StateDigest, StatePieces};
use types::Digest;

use crate::error::Error;

/// The state of a program at a step boundary. All members hold the same, bit for bit: everything that the next step depends on belongs in it
/// (parameters, the optimizer's moments; schedules, scalers and counters as JSON).
pub trait State {
    /// Names, types and shapes of the tensors; the same on every call.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// The bytes of a tensor: little endian, row-major.
    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>>;

    /// Overwrites bytes of a tensor, from `offset` on.
    fn load(&mut self, name: &str, offset: usize, bytes: &[u8]);

    /// Everything else that is state.
    fn extra(&self) -> Value {
        Value::Null
    }

    /// Takes what [`State::extra`] gave.
    ///
    /// # Errors
    /// The reason, if the value is not understood.
    fn set_extra(&mut self, extra: Value) -> Result<(), String> {
        let _ = extra;
        Ok(())
    }

    /// How many elements a gradient has: the length of what is contributed.
    fn gradient_elements(&self) -> usize;
}

/// [`State`]'s bytes, as the storage room asks for them.
pub(crate) struct Bytes<'a, S: State + ?Sized>(pub(crate) &'a S);

impl<S: State + ?Sized> storage::StateBytes for Bytes<'_, S> {
    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.0.tensor(name)
    }
}

/// The digest of a state that all members compare.
///
/// # Errors
/// If a tensor is missing, or has another size than its shape says.
pub fn digest<S: State + ?Sized>(state: &S) -> Result<Digest, Error> {
    Ok(digests(&StatePieces::new(state.tensors()), state)?.whole)
}

/// The digests of a state and of its pieces.
pub(crate) fn digests<S: State + ?Sized>(
    pieces: &StatePieces,
    state: &S,
) -> Result<StateDigest, Error> {
    pieces
        .digest(&state.extra(), &Bytes(state))
        .map_err(|e| Error::Usage(format!("the state does not keep its shape: {e}")))
}
