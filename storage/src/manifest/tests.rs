use proptest::prelude::*;
use serde_json::json;
use types::DType;

use super::*;

fn manifest(tensors: &[(&str, usize)], extra: Value) -> Manifest {
    let specs = tensors.iter().map(|(name, bytes)| TensorSpec {
        name: (*name).to_owned(),
        dtype: DType::U8,
        shape: vec![*bytes],
    });
    let layout = Layout::new(specs.collect(), 4096).unwrap();
    let hashes = layout.segments().iter().map(|s| Digest::of(&s.index.0.to_le_bytes())).collect();
    let contents = Contents {
        job: JobId::new("demo").unwrap(),
        lineage: Lineage(2),
        step: Step(40),
        attempt: Attempt(3),
        virtual_ranks: VirtualRanks::new(8).unwrap(),
        layout: Arc::new(layout),
        extra,
    };
    Manifest::new(contents, Digest::of(b"state"), hashes).unwrap()
}

fn example() -> Manifest {
    manifest(
        &[("b", 5000), ("a", 10_000), ("zero", 0)],
        json!({"z": [1, null, "x"], "lr": 0.1, "a": {"n": -0.0}}),
    )
}

#[test]
fn a_manifest_comes_back_equal_and_has_one_spelling() {
    let first = example();
    let again = manifest(
        &[("zero", 0), ("a", 10_000), ("b", 5000)],
        serde_json::from_str(r#"{"a":{"n":-0.0},"lr":0.1,"z":[1,null,"x"]}"#).unwrap(),
    );
    assert_eq!(first.encode(), again.encode());
    let decoded = Manifest::decode(&first.encode()).unwrap();
    assert_eq!(decoded, first);
    assert_eq!(decoded.hash(), first.hash());
    assert_eq!(decoded.key().to_string(), "demo/manifests/0000000002-0000000000000040-3.json");
}

#[test]
fn the_stored_format_is_as_it_was() {
    let text =
        String::from_utf8(manifest(&[("a", 3)], json!({"lr": 0.5})).encode().to_vec()).unwrap();
    let hash = Digest::of(&0u32.to_le_bytes()).to_string();
    let state = Digest::of(b"state");
    let expected = format!(
        "{{\"attempt\":3,\"extra\":{{\"lr\":0.5}},\"files\":[{{\"bytes\":4099,\"name\":\"state-00001-of-00001.safetensors\"}}],\
         \"format\":1,\"job\":\"demo\",\"lineage\":2,\"ripstop\":\"{}\",\"segment_bytes\":4096,\"segments\":[",
        env!("CARGO_PKG_VERSION")
    );
    assert!(text.starts_with(&expected), "{text}");
    let segment = format!(
        "{{\"bytes\":4096,\"file\":\"state-00001-of-00001.safetensors\",\"hash\":\"{hash}\",\"index\":0,\
         \"key\":\"demo/attempt-3/{}/{hash}\",\"offset\":0}}",
        &hash[..2]
    );
    assert!(text.contains(&segment), "{text}");
    let end = format!(
        "\"state\":\"{state}\",\"step\":40,\"tensors\":[{{\"dtype\":\"U8\",\"name\":\"a\",\"shape\":[3]}}],\"virtual_ranks\":8}}"
    );
    assert!(text.ends_with(&end), "{text}");
}

#[test]
fn manifests_that_contradict_themselves_are_refused() {
    let original: Value = serde_json::from_slice(&example().encode()).unwrap();
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut value = original.clone();
        change(&mut value);
        Manifest::decode(&canonical_json(&value).unwrap()).unwrap_err().to_string()
    };
    let other_hash = |v: &mut Value| v["segments"][1]["hash"] = json!(Digest::of(b"other"));
    type Change<'a> = &'a dyn Fn(&mut Value);
    let table: Vec<(Change<'_>, &str)> = vec![
        (&|v| v["format"] = json!(2), "manifest format 2"),
        (&other_hash, "segment 1 contradicts"),
        (&|v| v["segments"][2]["offset"] = json!(1), "segment 2 contradicts"),
        (&|v| v["segments"][0]["bytes"] = json!(4095), "segment 0 contradicts"),
        (&|v| v["segments"][0]["file"] = json!("../x"), "segment 0 contradicts"),
        (&|v| v["segments"][0]["key"] = json!("demo/../x"), "no key"),
        (&|v| v["attempt"] = json!(4), "segment 0 contradicts"),
        (&|v| drop(v["segments"].as_array_mut().unwrap().pop()), "use larger segments"),
        (&|v| v["tensors"][0]["shape"] = json!([1]), "3 segments"),
        (&|v| v["tensors"][0]["shape"] = json!([u64::MAX]), "2^56"),
        (&|v| v["tensors"][1]["name"] = json!("a"), "twice"),
        (&|v| v["files"][0]["bytes"] = json!(1), "not spelled canonically"),
        (&|v| v["segment_bytes"] = json!(1), "allowed are"),
        (&|v| v["virtual_ranks"] = json!(0), "virtual ranks"),
        (&|v| v["more"] = json!(0), "unknown field"),
        (&|v| v["job"] = json!("InternalError"), "no key"),
    ];
    for (change, expected) in table {
        let error = refused(change);
        assert!(
            error.contains(expected) || expected == "no key" && error.contains("InternalError"),
            "{error}"
        );
    }
    let mut spaced = example().encode().to_vec();
    spaced.push(b'\n');
    assert!(matches!(Manifest::decode(&spaced), Err(ManifestError::NotCanonical)));
}

#[test]
fn extra_state_that_could_not_be_read_back_is_refused() {
    let example = example();
    let mut contents = example.contents.clone();
    for _ in 0..100 {
        contents.extra = json!([contents.extra]);
    }
    assert!(matches!(
        Manifest::new(contents, example.state, example.hashes),
        Err(ManifestError::Extra(_))
    ));
}

#[test]
fn every_truncation_is_refused() {
    let bytes = example().encode();
    for length in 0..bytes.len() {
        assert!(Manifest::decode(&bytes[..length]).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn changed_bytes_are_refused_or_mean_what_they_say(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = example().encode().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(manifest) = Manifest::decode(&bytes) {
            prop_assert_eq!(manifest.encode(), bytes);
        }
    }

    #[test]
    fn any_bytes_are_decoded_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Manifest::decode(&bytes).is_err());
    }

    #[test]
    fn spliced_manifests_are_decoded_without_a_panic(
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
        text in "[0-9a-z\\[\\]{}\",:.-]{0,20}",
    ) {
        let mut bytes = example().encode().to_vec();
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        bytes.splice(from.min(to)..from.max(to), text.into_bytes());
        if let Ok(manifest) = Manifest::decode(&bytes) {
            prop_assert_eq!(manifest.encode(), bytes);
        }
    }
}
