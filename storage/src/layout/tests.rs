use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }
}

/// A state in which every byte tells where it belongs.
fn state(specs: &[TensorSpec]) -> BTreeMap<String, Vec<u8>> {
    let bytes = |s: &TensorSpec| {
        (0..s.bytes().unwrap()).map(|i| (i * 31 + s.name.len() * 7 + i / 251) as u8).collect()
    };
    specs.iter().map(|s| (s.name.clone(), bytes(s))).collect()
}

/// The whole files, out of segments.
fn assembled(layout: &Layout, state: &BTreeMap<String, Vec<u8>>) -> Vec<Vec<u8>> {
    let mut files = vec![Vec::new(); layout.files().len()];
    for segment in layout.segments() {
        assert_eq!(files[segment.file].len() as u64, segment.offset);
        files[segment.file].extend_from_slice(&layout.fill(segment.index, state).unwrap());
    }
    files
}

fn assert_readable_and_restorable(specs: Vec<TensorSpec>, segment_bytes: u64) {
    let state = state(&specs);
    let layout = Layout::new(specs, segment_bytes).unwrap();
    let files = assembled(&layout, &state);
    let placement = layout.placement();
    for (file, bytes) in layout.files().iter().zip(&files) {
        let read = SafeTensors::deserialize(bytes).unwrap();
        let mine = layout.tensors().iter().filter(|t| placement[t.name.as_str()] == file.name());
        assert_eq!(read.len(), mine.clone().count());
        for tensor in mine {
            let view = read.tensor(&tensor.name).unwrap();
            assert_eq!(view.shape(), tensor.shape);
            assert_eq!(format!("{:?}", view.dtype()), tensor.dtype.name());
            assert_eq!(view.data(), state[&tensor.name]);
            let at = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            assert!(at.is_multiple_of(tensor.dtype.bytes()), "{} is not aligned", tensor.name);
        }
    }
    let mut back: BTreeMap<String, Vec<u8>> =
        layout.tensors().iter().map(|t| (t.name.clone(), vec![0; t.bytes().unwrap()])).collect();
    let mut bytes_out = 0;
    for segment in layout.segments().iter().rev() {
        let bytes = layout.fill(segment.index, &state).unwrap();
        let mut sink = |name: &str, at: usize, piece: &[u8]| {
            back.get_mut(name).unwrap()[at..at + piece.len()].copy_from_slice(piece);
            bytes_out += piece.len();
        };
        layout.scatter(segment.index, &bytes, &mut sink).unwrap();
    }
    assert_eq!(back, state);
    assert_eq!(bytes_out, state.values().map(Vec::len).sum::<usize>(), "each byte comes once");
}

#[test]
fn files_of_many_shapes_are_read_by_safetensors() {
    let table: Vec<Vec<TensorSpec>> = vec![
        vec![],
        vec![spec("scalar", DType::F32, &[])],
        vec![spec("none", DType::F32, &[0]), spec("none.too", DType::U8, &[3, 0, 5])],
        vec![
            spec("b", DType::U8, &[3]),
            spec("a", DType::U8, &[0]),
            spec("c", DType::F64, &[1]),
            spec("z", DType::BF16, &[]),
        ],
        vec![spec("exactly", DType::U8, &[4096]), spec("two", DType::U8, &[4096])],
        vec![
            spec("large", DType::F32, &[77, 131]),
            spec("höhe \"quoted\"\\\n", DType::I64, &[5]),
            spec("h", DType::F16, &[7]),
        ],
    ];
    for specs in table {
        for segment_bytes in [4096, 5000, 1 << 20] {
            assert_readable_and_restorable(specs.clone(), segment_bytes);
        }
    }
}

#[test]
fn a_segment_boundary_may_lie_inside_the_header() {
    let specs: Vec<_> =
        (0..200).map(|n| spec(&format!("layer.{n:03}.weight"), DType::F32, &[n % 5, 3])).collect();
    let layout = Layout::new(specs.clone(), 4096).unwrap();
    assert!(layout.files()[0].header.len() > 2 * 4096);
    assert_readable_and_restorable(specs.clone(), 4096);
    assert_readable_and_restorable(specs, 4099);
}

#[test]
fn states_over_four_gigabytes_make_several_files() {
    let specs = vec![
        spec("a", DType::F32, &[1 << 29]),
        spec("b", DType::F32, &[1 << 29]),
        spec("c", DType::F32, &[1 << 31]),
        spec("d", DType::U8, &[1]),
    ];
    let layout = Layout::new(specs, Layout::SEGMENT_BYTES).unwrap();
    let names: Vec<_> = layout.files().iter().map(VirtualFile::name).collect();
    assert_eq!(
        names,
        [
            "state-00001-of-00003.safetensors",
            "state-00002-of-00003.safetensors",
            "state-00003-of-00003.safetensors"
        ]
    );
    let placement = layout.placement();
    assert_eq!(placement["a"], placement["b"]);
    assert_eq!(placement["c"], names[1], "what is too large by itself stands alone");
    assert_eq!(placement["d"], names[2]);
}

#[test]
fn the_order_of_the_specs_does_not_matter() {
    let specs =
        vec![spec("a", DType::F32, &[2]), spec("b", DType::U8, &[3]), spec("c", DType::F32, &[4])];
    let mut reversed = specs.clone();
    reversed.reverse();
    let layout = Layout::new(specs.clone(), 4096).unwrap();
    assert_eq!(layout, Layout::new(reversed, 4096).unwrap());
    assert_ne!(layout.digest(), Layout::new(specs.clone(), 8192).unwrap().digest());
    assert_ne!(layout.digest(), Layout::new(specs[..2].to_vec(), 4096).unwrap().digest());
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    let name = "n".repeat(513);
    let table: Vec<(Vec<TensorSpec>, u64, &str)> = vec![
        (vec![], 4095, "4095 bytes"),
        (vec![], (1 << 30) + 1, "allowed are"),
        (
            vec![spec("a", DType::U8, &[1]), spec("a", DType::U8, &[2])],
            4096,
            "\"a\" is there twice",
        ),
        (vec![spec("", DType::U8, &[1])], 4096, "1 to 512 bytes"),
        (vec![spec(&name, DType::U8, &[1])], 4096, "1 to 512 bytes"),
        (vec![spec("__metadata__", DType::U8, &[1])], 4096, "not be"),
        (vec![spec("a", DType::F32, &[usize::MAX, 2])], 4096, "2^56"),
        (vec![spec("a", DType::F32, &[usize::MAX, 0])], 4096, "2^56"),
        (vec![spec("a", DType::F32, &[1; 33])], 4096, "32 dimensions"),
        (vec![spec("a", DType::U8, &[1 << 55])], 4096, "use larger segments"),
    ];
    for (specs, segment_bytes, expected) in table {
        let error = Layout::new(specs, segment_bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn segments_that_do_not_fit_are_refused_before_anything_is_handed_out() {
    let specs = vec![spec("a", DType::U8, &[10])];
    let layout = Layout::new(specs.clone(), 8192).unwrap();
    let bytes = layout.fill(SegmentIndex(0), &state(&specs)).unwrap();
    let mut sink = |_: &str, _: usize, _: &[u8]| panic!("nothing may be handed out");
    assert!(matches!(
        layout.scatter(SegmentIndex(1), &bytes, &mut sink),
        Err(LayoutError::NoSegment { .. })
    ));
    assert!(matches!(
        layout.scatter(SegmentIndex(0), &bytes[1..], &mut sink),
        Err(LayoutError::SegmentLength { .. })
    ));
    let mut changed = bytes.to_vec();
    changed[20] ^= 1;
    assert!(matches!(
        layout.scatter(SegmentIndex(0), &changed, &mut sink),
        Err(LayoutError::Header { .. })
    ));

    let short = BTreeMap::from([("a".to_owned(), vec![1; 9])]);
    assert!(matches!(layout.fill(SegmentIndex(0), &short), Err(LayoutError::TensorLength { .. })));
    assert!(matches!(
        layout.fill(SegmentIndex(0), &BTreeMap::new()),
        Err(LayoutError::Missing { .. })
    ));
}

const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U8];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_state_is_readable_and_restorable(
        shapes in prop::collection::vec((0usize..7, prop::collection::vec(0usize..20, 0..4)), 0..12),
        segment_bytes in 4096u64..20_000,
    ) {
        let named = shapes.into_iter().enumerate();
        let specs = named.map(|(n, (dtype, shape))| spec(&format!("t{n}"), DTYPES[dtype], &shape)).collect();
        assert_readable_and_restorable(specs, segment_bytes);
    }
}
