//! The one spelling of a JSON value: keys sorted by bytes, no white space, numbers as `serde_json` prints them.
//!
//! Promised: equal values have equal bytes on every machine, whatever `serde_json`'s map keeps, and reading the bytes gives an
//! equal value (floats bit for bit).

use serde_json::Value;

/// Deepest nesting of arrays and objects; `serde_json` reads back at most 128.
pub(crate) const DEPTH_MAX: usize = 64;

/// The canonical bytes of `value`.
///
/// # Errors
/// If it is nested more than 64 deep.
pub fn canonical_json(value: &Value) -> Result<Vec<u8>, JsonError> {
    let mut out = Vec::new();
    write(value, 0, &mut out)?;
    Ok(out)
}

/// JSON that can't be stored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Nested too deep.
    #[error("json is nested more than {DEPTH_MAX} deep; make the extra state flatter")]
    TooDeep,
}

fn write(value: &Value, depth: usize, out: &mut Vec<u8>) -> Result<(), JsonError> {
    if depth > DEPTH_MAX {
        return Err(JsonError::TooDeep);
    }
    match value {
        Value::Array(items) => {
            out.push(b'[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    out.push(b',');
                }
                write(item, depth + 1, out)?;
            }
            out.push(b']');
        }
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by(|a, b| a.0.cmp(b.0));
            out.push(b'{');
            for (place, (key, item)) in entries.into_iter().enumerate() {
                if place > 0 {
                    out.push(b',');
                }
                quote(key, out);
                out.push(b':');
                write(item, depth + 1, out)?;
            }
            out.push(b'}');
        }
        Value::String(text) => quote(text, out),
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            out.extend_from_slice(value.to_string().as_bytes());
        }
    }
    Ok(())
}

/// Appends a JSON string.
pub(crate) fn quote(text: &str, out: &mut Vec<u8>) {
    serde_json::to_writer(out, text).expect("a string into memory");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn keys_are_sorted_and_spaces_are_gone() {
        let value: Value =
            serde_json::from_str(r#"{ "b": [1, 2.5, null], "a": {"y": true, "x": "\u0001é\""} }"#)
                .unwrap();
        let bytes = canonical_json(&value).unwrap();
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            r#"{"a":{"x":"\u0001é\"","y":true},"b":[1,2.5,null]}"#
        );
    }

    #[test]
    fn too_deep_json_is_refused() {
        let mut value = json!(1);
        for _ in 0..DEPTH_MAX {
            value = json!([value]);
        }
        assert!(canonical_json(&value).is_ok());
        assert!(canonical_json(&json!([value])).is_err());
    }

    proptest! {
        #[test]
        fn floats_come_back_bit_for_bit(bits in any::<u64>()) {
            let float = f64::from_bits(bits);
            prop_assume!(float.is_finite());
            let bytes = canonical_json(&json!(float)).unwrap();
            let back: f64 = serde_json::from_slice(&bytes).unwrap();
            prop_assert_eq!(back.to_bits(), bits);
        }
    }
}
