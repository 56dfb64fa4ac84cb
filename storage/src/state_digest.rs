//! The one digest of a state that every member compares.

use serde_json::Value;
use types::Digest;

use crate::{LayoutError, StateBytes, TensorSpec, canonical_json};

/// The digest of a whole state: BLAKE3 over names, element types, shapes and the BLAKE3 of each tensor's bytes, in order of names,
/// and over the canonical JSON of the extra state. The order of `specs` doesn't matter.
///
/// # Errors
/// If the state lacks a tensor, has it in another size, or `extra` is nested too deep.
pub fn state_digest(
    specs: &[TensorSpec],
    extra: &Value,
    state: &dyn StateBytes,
) -> Result<Digest, LayoutError> {
    let mut sorted: Vec<&TensorSpec> = specs.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"ripstop state 1\0");
    hasher.update(&(sorted.len() as u64).to_le_bytes());
    for spec in sorted {
        hasher.update(&(spec.name.len() as u64).to_le_bytes());
        hasher.update(spec.name.as_bytes());
        hasher.update(&[spec.dtype.name().len() as u8]);
        hasher.update(spec.dtype.name().as_bytes());
        hasher.update(&(spec.shape.len() as u64).to_le_bytes());
        for dimension in &spec.shape {
            hasher.update(&(*dimension as u64).to_le_bytes());
        }
        hasher.update(blake3::hash(&spec.bytes_in(state)?).as_bytes());
    }
    hasher.update(&canonical_json(extra)?);
    Ok(hasher.finalize().into())
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
    fn a_state_that_does_not_fit_its_specs_is_refused() {
        let state = BTreeMap::from([("a".to_owned(), vec![1])]);
        let error = state_digest(&[spec("a", &[2])], &json!(null), &state).unwrap_err().to_string();
        assert!(error.contains("\"a\" has 1 bytes, its shape says 2"), "{error}");
        let error = state_digest(&[spec("c", &[2])], &json!(null), &state).unwrap_err().to_string();
        assert!(error.contains("no tensor \"c\""), "{error}");
    }
}
