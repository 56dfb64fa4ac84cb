use proptest::prelude::*;
use types::VirtualRank;

use super::*;

fn v(count: u32) -> VirtualRanks {
    VirtualRanks::new(count).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Values of the leaves, one inner vector each, of wild magnitudes.
fn leaves(v: VirtualRanks, elements: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut random = Random(seed);
    let leaf = |_| (0..elements).map(|_| random.element()).collect();
    v.iter().map(leaf).collect()
}

/// The definition, word for word.
fn recursive(v: VirtualRanks, x: u32, y: u8, leaves: &[Vec<f32>]) -> Vec<f32> {
    if y == 0 {
        return leaves[x as usize].clone();
    }
    let left = recursive(v, x, y - 1, leaves);
    let middle = x + (1 << (y - 1));
    if middle >= v.count() {
        return left;
    }
    let right = recursive(v, middle, y - 1, leaves);
    let add =
        |(l, r): (&f32, &f32)| if (l + r).is_nan() { f32::from_bits(0x7fc0_0000) } else { l + r };
    left.iter().zip(&right).map(add).collect()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        xxhash_rust::xxh3::xxh3_64(&self.0.to_le_bytes())
    }

    fn element(&mut self) -> f32 {
        let random = self.next();
        match random % 16 {
            0 => f32::from_bits((random >> 32) as u32), // anything: NaN, subnormal, infinite
            1 => -0.0,
            2 => f32::MIN_POSITIVE / 4.0,
            3 => f32::MAX,
            4..8 => (random >> 40) as f32 * 1e30,
            _ => ((random >> 40) as f32 - 8e6) * 1e-6,
        }
    }
}

/// A random cover with its values, perhaps with useless nodes beside it.
fn random_nodes(v: VirtualRanks, node: TreeNode, random: &mut Random, found: &mut Vec<TreeNode>) {
    let node = node.canonical(v);
    let stops = random.next().is_multiple_of(3);
    match node.children() {
        Some((left, right)) if !stops => {
            random_nodes(v, left, random, found);
            random_nodes(v, right, random, found);
        }
        _ => found.push(node),
    }
    if random.next().is_multiple_of(8) {
        found.push(node);
    }
}

#[test]
fn the_order_of_the_tree_decides_the_bits() {
    let leaves = [[1.0_f32], [1e8], [-1e8], [1.0]];
    let nodes =
        v(4).iter().map(TreeNode::leaf).zip(leaves.iter().map(<[f32; 1]>::as_slice)).collect();
    let mut out = vec![9.0; 7];
    fold_cover(v(4), &nodes, &mut out).unwrap();
    assert_eq!(out, [0.0]); // from left to right it would be 1
}

#[test]
fn nodes_that_cannot_be_folded_leave_the_output_alone() {
    let leaf = |rank| TreeNode::leaf(VirtualRank(rank));
    let (long, short) = ([1.0, 2.0], [3.0]);
    let mut out = vec![5.0];
    let nodes = BTreeMap::from([(leaf(0), &long[..])]);
    assert_eq!(fold_cover(v(2), &nodes, &mut out), Err(FoldError::NoCover { nodes: 1 }));
    let nodes = BTreeMap::from([(leaf(0), &long[..]), (leaf(1), &short[..])]);
    let expected = FoldError::Length { node: leaf(1), actual: 1, expected: 2 };
    assert_eq!(fold_cover(v(2), &nodes, &mut out), Err(expected));
    assert_eq!(out, [5.0]);
}

#[test]
fn empty_nodes_fold_to_nothing() {
    let nodes = v(3).iter().map(|r| (TreeNode::leaf(r), &[][..])).collect();
    let mut out = vec![1.0];
    fold_cover(v(3), &nodes, &mut out).unwrap();
    assert!(out.is_empty());
    assert_eq!(finish_mean(&mut out, 3), ChunkHeader { finite: true, square_sum: 0.0 });
}

#[test]
fn a_sum_that_makes_a_nan_makes_the_canonical_one() {
    let mut left = [f32::INFINITY, f32::from_bits(0xffa0_0001), 1.0, -0.0];
    add_into(&mut left, &[f32::NEG_INFINITY, 1.0, f32::from_bits(0x7fc1_2345), -0.0]);
    assert_eq!(bits(&left), [0x7fc0_0000, 0x7fc0_0000, 0x7fc0_0000, 0x8000_0000]);
}

#[test]
fn the_mean_divides_once_by_the_weight_as_f32() {
    let mut sum = [1.0, -3.0, f32::MIN_POSITIVE];
    let header = finish_mean(&mut sum, 3);
    assert_eq!(bits(&sum), bits(&[1.0 / 3.0, -1.0, f32::MIN_POSITIVE / 3.0]));
    assert!(header.finite && header.square_sum > 1.1);
    let mut sum = [1.0];
    let _ = finish_mean(&mut sum, (1 << 24) + 1); // rounds to even
    assert_eq!(sum, [1.0 / 16_777_216.0]);
}

#[test]
fn whatever_is_not_finite_is_said() {
    for (element, weight) in
        [(f32::NAN, 2), (f32::INFINITY, 2), (f32::NEG_INFINITY, 2), (0.0, 0), (1.0, 0)]
    {
        for place in [0, 7, 8, 10] {
            let mut sum = [0.5; 11];
            sum[place] = element;
            let header = finish_mean(&mut sum, weight);
            assert!(!header.finite, "{element} / {weight}");
            assert!(
                !header.square_sum.is_nan() || header.square_sum.to_bits() == 0x7ff8_0000_0000_0000
            );
        }
    }
    let mut sum = [f32::MAX; 33];
    assert!(finish_mean(&mut sum, 1).finite); // the squares don't overflow
    let mut sum = [f32::from_bits(0xffc0_0001)];
    let _ = finish_mean(&mut sum, 1);
    assert_eq!(sum[0].to_bits(), 0x7fc0_0000);
}

#[test]
fn squares_are_summed_by_lanes_in_a_fixed_order() {
    // Element i has the square 4^e: lanes 0 and 4 are added first, then 2 and 6, then the odd ones.
    let mut sum = [0.0; 10];
    (sum[0], sum[4], sum[8], sum[9]) = (2.0_f32.powi(30), 1.0, 1.0, 2.0_f32.powi(-10));
    let expected = ((2.0_f64.powi(60) + 1.0) + 1.0) + 2.0_f64.powi(-20);
    assert_eq!(finish_mean(&mut sum, 1).square_sum, expected);
}

#[test]
fn elements_survive_their_bytes_at_any_alignment() {
    let elements = [1.5, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX];
    let mut shifted = vec![0; 3];
    shifted.extend_from_slice(as_bytes(&elements));
    assert_eq!(shifted[3..7], 1.5_f32.to_le_bytes());
    for start in 0..=3 {
        let bytes = [&vec![0; start], as_bytes(&elements)].concat();
        assert_eq!(bits(&from_bytes(&bytes[start..]).unwrap()), bits(&elements));
    }
    assert_eq!(from_bytes(&[0; 5]), Err(FoldError::Bytes { bytes: 5 }));
    assert_eq!(from_bytes(&[]), Ok(vec![]));
}

#[test]
fn any_cover_gives_the_bits_of_the_definition() {
    for count in 1..=20 {
        for seed in 0..20 {
            check_cover(v(count), 37, seed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn large_trees_and_long_chunks_give_the_bits_of_the_definition(
        count in 1u32..150, elements in prop::sample::select(vec![1, 1023, 1024, 1025, 3000]), seed: u64,
    ) {
        check_cover(v(count), elements, seed);
    }
}

fn check_cover(v: VirtualRanks, elements: usize, seed: u64) {
    let mut random = Random(seed ^ 0x5eed);
    let leaves = leaves(v, elements, seed);
    let mut names = Vec::new();
    random_nodes(v, v.root(), &mut random, &mut names);
    let values: BTreeMap<_, _> =
        names.iter().map(|n| (*n, recursive(v, n.start(), n.level(), &leaves))).collect();
    let nodes = values.iter().map(|(n, x)| (*n, x.as_slice())).collect();
    let mut out = Vec::new();
    fold_cover(v, &nodes, &mut out).unwrap();
    let expected = recursive(v, 0, v.root().level(), &leaves);
    assert_eq!(bits(&out), bits(&expected), "V = {v}, seed {seed}, nodes {names:?}");
}

/// Numbers of every kind, NaN, infinities and subnormals among them.
fn wild(seed: u32, elements: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(state ^ (state >> 13))
    };
    (0..elements).map(|_| next()).collect()
}

#[test]
fn one_pass_and_every_vector_width_give_the_bits_of_the_definition() {
    // More than a block, and no multiple of any vector.
    let elements = 2 * BLOCK + 13;
    for count in [1_u32, 3, 4, 7] {
        let v = VirtualRanks::new(count).unwrap();
        let leaves: Vec<_> = v.iter().map(|r| (TreeNode::leaf(r), wild(r.0, elements))).collect();
        let nodes: BTreeMap<_, _> = leaves.iter().map(|(n, x)| (*n, x.as_slice())).collect();
        for weight in [0, 1, 3, 4, 1 << 40, u64::MAX] {
            let mut expected = Vec::new();
            fold_cover(v, &nodes, &mut expected).unwrap();
            // The definition divides, whatever the weight is.
            #[expect(clippy::cast_precision_loss, reason = "the documented rule")]
            let divisor = weight as f32;
            expected.iter_mut().for_each(|x| *x = canonical(*x / divisor));
            let mut squares = Squares::default();
            squares.take(&expected);
            let header = squares.header();
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let check = |name: &str, found: ChunkHeader, out: &[f32]| {
                assert_eq!(bits(out), bits(&expected), "{name}, {count} leaves, weight {weight}");
                assert_eq!(found.square_sum.to_bits(), header.square_sum.to_bits(), "{name}");
                assert_eq!(found.finite, header.finite, "{name}");
            };
            let mut out = vec![0.0; elements];
            let found = fold_mean(v, &nodes, weight, &mut out).unwrap();
            check("as called", found, &out);
            let moves = moves_of(v, &nodes, None).unwrap();
            let levels = usize::from(v.root().level());
            let found = kernels::portable(&moves, weight, levels, &mut out);
            check("portable", found, &out);
            check_wide(&moves, weight, levels, &mut out, &check);
            let mut summed = Vec::new();
            fold_cover(v, &nodes, &mut summed).unwrap();
            let found = finish_mean(&mut summed, weight);
            check("two passes", found, &summed);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the kernels are for what the processor is seen to have")]
fn check_wide(
    moves: &[Option<&[f32]>],
    weight: u64,
    levels: usize,
    out: &mut [f32],
    check: &dyn Fn(&str, ChunkHeader, &[f32]),
) {
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        let found = unsafe { kernels::avx2(moves, weight, levels, out) };
        check("avx2", found, out);
    }
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has it.
        let found = unsafe { kernels::avx512(moves, weight, levels, out) };
        check("avx512", found, out);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn check_wide(
    _: &[Option<&[f32]>],
    _: u64,
    _: usize,
    _: &mut [f32],
    _: &dyn Fn(&str, ChunkHeader, &[f32]),
) {
}
