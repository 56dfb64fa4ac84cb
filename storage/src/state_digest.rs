//! The one digest of a state that every member compares, and the pieces of which it is made.
//!
//! Each tensor is cut in pieces of at most [`StatePieces::PIECE_BYTES`]; the digest is taken over the pieces' own digests. So whoever knows
//! them can check each piece of a state by itself, wherever it came from, against the one digest that all members agree on.

use std::ops::Range;

use bytes::Bytes;
use serde_json::Value;
use types::Digest;

use crate::{LayoutError, StateBytes, TensorSpec, canonical_json};

/// Which bytes of a state are in which piece: a pure function of its tensors' specs.
#[derive(Clone, Debug)]
pub struct StatePieces {
    /// In order of names.
    specs: Vec<TensorSpec>,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    /// Its tensor's place in `specs`.
    tensor: usize,
    bytes: Range<usize>,
}

/// The digest of a state, and those of its pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateDigest {
    /// Of the whole.
    pub whole: Digest,
    /// Of each piece's bytes, in order.
    pub pieces: Vec<Digest>,
}

impl StatePieces {
    /// Most bytes of a piece.
    pub const PIECE_BYTES: usize = 4 << 20;

    /// Cuts a state with these tensors. The order of `specs` doesn't matter.
    #[must_use]
    pub fn new(mut specs: Vec<TensorSpec>) -> Self {
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        let mut pieces = Vec::new();
        for (tensor, spec) in specs.iter().enumerate() {
            let bytes = spec.bytes().unwrap_or(0);
            for start in (0..bytes).step_by(Self::PIECE_BYTES) {
                let end = bytes.min(start + Self::PIECE_BYTES);
                pieces.push(Piece { tensor, bytes: start..end });
            }
        }
        Self { specs, pieces }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.pieces.len()).unwrap_or(u32::MAX)
    }

    /// The name of a piece's tensor, and where in the tensor it lies, in bytes.
    #[must_use]
    pub fn place(&self, piece: u32) -> Option<(&str, Range<usize>)> {
        let Piece { tensor, bytes } = self.pieces.get(piece as usize)?;
        Some((&self.specs[*tensor].name, bytes.clone()))
    }

    /// The bytes of one piece of `state`.
    ///
    /// # Errors
    /// If there is no such piece, or the state lacks its tensor or has it in another size.
    pub fn copy(&self, piece: u32, state: &dyn StateBytes) -> Result<Bytes, LayoutError> {
        let place = self.pieces.get(piece as usize);
        let Piece { tensor, bytes } = place.ok_or(LayoutError::NoPiece { piece })?;
        let tensor = self.specs[*tensor].bytes_in(state)?;
        Ok(Bytes::copy_from_slice(&tensor[bytes.clone()]))
    }

    /// The digests of `state` and of its pieces.
    ///
    /// # Errors
    /// If the state lacks a tensor, has it in another size, or `extra` is nested too deep.
    pub fn digest(
        &self,
        extra: &Value,
        state: &dyn StateBytes,
    ) -> Result<StateDigest, LayoutError> {
        let mut pieces = Vec::with_capacity(self.pieces.len());
        for spec in &self.specs {
            let bytes = spec.bytes_in(state)?;
            pieces.extend(bytes.chunks(Self::PIECE_BYTES).map(Digest::of));
        }
        Ok(StateDigest { whole: self.combine(extra, &pieces)?, pieces })
    }

    /// The digest of the state that has pieces with these digests: BLAKE3 over names, element types and shapes in order of names, over the
    /// BLAKE3 of each piece, and over the canonical JSON of the extra state.
    ///
    /// # Errors
    /// If `extra` is nested too deep.
    pub fn combine(&self, extra: &Value, pieces: &[Digest]) -> Result<Digest, LayoutError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"ripstop state 2\0");
        hasher.update(&(self.specs.len() as u64).to_le_bytes());
        for spec in &self.specs {
            hasher.update(&(spec.name.len() as u64).to_le_bytes());
            hasher.update(spec.name.as_bytes());
            hasher.update(&[spec.dtype.name().len() as u8]);
            hasher.update(spec.dtype.name().as_bytes());
            hasher.update(&(spec.shape.len() as u64).to_le_bytes());
            for dimension in &spec.shape {
                hasher.update(&(*dimension as u64).to_le_bytes());
            }
        }
        hasher.update(&(pieces.len() as u64).to_le_bytes());
        for piece in pieces {
            hasher.update(&piece.0);
        }
        hasher.update(&canonical_json(extra)?);
        Ok(hasher.finalize().into())
    }
}

/// The digest of a whole state, by [`StatePieces::digest`]. The order of `specs` doesn't matter.
///
/// # Errors
/// If the state lacks a tensor, has it in another size, or `extra` is nested too deep.
pub fn state_digest(
    specs: &[TensorSpec],
    extra: &Value,
    state: &dyn StateBytes,
) -> Result<Digest, LayoutError> {
    Ok(StatePieces::new(specs.to_vec()).digest(extra, state)?.whole)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use types::DType;

    use super::*;

    fn spec(name: &str, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype: DType::U8, shape: shape.to_vec() }
    }

    #[test]
    fn every_part_of_the_state_is_in_the_digest() {
        let specs = [spec("a", &[2, 1]), spec("b", &[1])];
        let state = BTreeMap::from([("a".to_owned(), vec![1, 2]), ("b".to_owned(), vec![3])]);
        let digest = state_digest(&specs, &json!({"lr": 0.1}), &state).unwrap();
        let same = state_digest(&[specs[1].clone(), specs[0].clone()], &json!({"lr": 0.1}), &state)
            .unwrap();
        assert_eq!(digest, same);

        let other_bytes = BTreeMap::from([("a".to_owned(), vec![1, 3]), ("b".to_owned(), vec![3])]);
        let other_shape = [spec("a", &[1, 2]), specs[1].clone()];
        let mut other_dtype = specs.clone();
        other_dtype[1] = TensorSpec { name: "b".into(), dtype: DType::F32, shape: vec![1] };
        let wide =
            BTreeMap::from([("a".to_owned(), vec![1, 2]), ("b".to_owned(), vec![3, 0, 0, 0])]);
        let others = [
            state_digest(&specs, &json!({"lr": 0.2}), &state),
            state_digest(&specs, &json!({"lr": 0.1}), &other_bytes),
            state_digest(&other_shape, &json!({"lr": 0.1}), &state),
            state_digest(&other_dtype, &json!({"lr": 0.1}), &wide),
            state_digest(&specs[..1], &json!({"lr": 0.1}), &state),
        ];
        for other in others {
            assert_ne!(digest, other.unwrap());
        }
    }

    #[test]
    fn every_byte_is_in_one_piece_and_each_piece_can_be_checked_by_itself() {
        let bytes = StatePieces::PIECE_BYTES;
        let specs = vec![spec("b", &[2 * bytes + 3]), spec("a", &[5]), spec("c", &[0])];
        let content = |len: usize| (0..len).map(|i| (i % 251) as u8).collect::<Vec<u8>>();
        let mut state = BTreeMap::from([
            ("a".to_owned(), content(5)),
            ("b".to_owned(), content(2 * bytes + 3)),
            ("c".to_owned(), Vec::new()),
        ]);
        let pieces = StatePieces::new(specs);
        let digest = pieces.digest(&json!(1), &state).unwrap();
        assert_eq!((pieces.count(), digest.pieces.len()), (4, 4));
        assert_eq!(pieces.place(0), Some(("a", 0..5)));
        assert_eq!(pieces.place(3), Some(("b", 2 * bytes..2 * bytes + 3)));
        assert_eq!(pieces.place(4), None);
        assert!(pieces.copy(4, &state).is_err());
        let copied: Vec<Bytes> = (0..4).map(|piece| pieces.copy(piece, &state).unwrap()).collect();
        let digests: Vec<Digest> = copied.iter().map(|bytes| Digest::of(bytes)).collect();
        assert_eq!(digests, digest.pieces);
        assert_eq!(pieces.combine(&json!(1), &digests).unwrap(), digest.whole);
        state.get_mut("b").unwrap()[bytes] ^= 1;
        let other = pieces.digest(&json!(1), &state).unwrap();
        let differ: Vec<usize> = (0..4).filter(|i| other.pieces[*i] != digest.pieces[*i]).collect();
        assert_eq!(differ, [2]);
        assert_ne!(other.whole, digest.whole);
    }

    #[test]
    fn a_state_that_does_not_fit_its_specs_is_refused() {
        let state = BTreeMap::from([("a".to_owned(), vec![1])]);
        let error = state_digest(&[spec("a", &[2])], &json!(null), &state).unwrap_err().to_string();
        assert!(error.contains("\"a\" has 1 bytes, its shape says 2"), "{error}");
        let error = state_digest(&[spec("c", &[2])], &json!(null), &state).unwrap_err().to_string();
        assert!(error.contains("no tensor \"c\""), "{error}");
    }
}
