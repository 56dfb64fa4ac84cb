//! The numbers of the canonical sum, on host slices.
//!
//! Every result is defined to the bit: additions are IEEE f32, left + right at each node of the tree; NaN has one form; the mean divides once;
//! squares are summed in one fixed order. Nothing is reassociated and nothing is fused, so the vector width of a machine decides nothing.
//! The kernels are plain loops that the compiler vectorises, for the processor that they run on. Sums are of f32 only, so there is no type parameter; a bf16 wire format rounds
//! at nodes, before and after these kernels.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use types::{Remedy, TreeNode, VirtualRanks};

use crate::fold::{self, Move};

/// What a final chunk says about its elements, equal on all members: skips and clipping read it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ChunkHeader {
    /// Whether all elements are finite.
    pub finite: bool,
    /// Sum of the elements' squares.
    pub square_sum: f64,
}

/// left + right, element by element, in place of left. A NaN comes out in its canonical form, so that not even its payload tells which
/// operand it came from.
///
/// # Panics
/// If the lengths differ.
pub fn add_into(left: &mut [f32], right: &[f32]) {
    assert_eq!(left.len(), right.len(), "two nodes of one chunk have the same length");
    add_elements(left, right);
}

/// Folds a cover of the tree to the root's value in `out`: left + right at each node. Nodes may overlap; the largest are used. The bits are
/// those of the recursive definition, whichever cover it is.
///
/// It passes over memory once: all nodes are read block by block, and what lies between stays in cache.
///
/// # Errors
/// If the nodes don't cover all leaves, or have different lengths; `out` is untouched then.
pub fn fold_cover(
    v: VirtualRanks,
    nodes: &BTreeMap<TreeNode, &[f32]>,
    out: &mut Vec<f32>,
) -> Result<(), FoldError> {
    let moves = moves_of(v, nodes, None)?;
    let elements = moves.iter().flatten().next().map_or(0, |node| node.len());
    out.resize(elements, 0.0);
    // The stack gets as deep as the tree is high, plus one; its lowest place is `out` itself.
    let mut stack = vec![0.0; BLOCK * usize::from(v.root().level())];
    for (number, out) in out.chunks_mut(BLOCK).enumerate() {
        fold_block(&moves, number * BLOCK, out, &mut stack);
    }
    Ok(())
}

/// How a cover is folded: `Some(node)` pushes its elements, `None` adds the two on top.
type Moves<'a> = Vec<Option<&'a [f32]>>;

fn moves_of<'a>(
    v: VirtualRanks,
    nodes: &BTreeMap<TreeNode, &'a [f32]>,
    elements: Option<usize>,
) -> Result<Moves<'a>, FoldError> {
    let names: BTreeSet<TreeNode> = nodes.keys().copied().collect();
    let cover = fold::cover(v, &names).ok_or(FoldError::NoCover { nodes: names.len() })?;
    let elements = elements.unwrap_or_else(|| nodes[&cover[0]].len());
    if let Some(node) = cover.iter().find(|n| nodes[n].len() != elements) {
        return Err(FoldError::Length {
            node: *node,
            actual: nodes[node].len(),
            expected: elements,
        });
    }
    let moves = fold::moves(v, &cover).into_iter().map(|m| match m {
        Move::Push(node) => Some(nodes[&node]),
        Move::Add => None,
    });
    Ok(moves.collect())
}

/// Folds a cover of the tree and makes the mean, in one pass over memory: [`fold_cover`] and then [`finish_mean`], to the bit.
///
/// # Errors
/// If the nodes don't cover all leaves, or have another length than `out`; `out` is untouched then.
pub fn fold_mean(
    v: VirtualRanks,
    nodes: &BTreeMap<TreeNode, &[f32]>,
    weight: u64,
    out: &mut [f32],
) -> Result<ChunkHeader, FoldError> {
    let moves = moves_of(v, nodes, Some(out.len()))?;
    Ok(kernels::fold_mean(&moves, weight, usize::from(v.root().level()), out))
}

/// `out` = left + right, element by element, as [`add_into`] does it.
///
/// # Panics
/// If the lengths differ.
pub fn add(left: &[f32], right: &[f32], out: &mut [f32]) {
    out.copy_from_slice(left);
    add_into(out, right);
}

/// Makes the mean of the root's sum, in place, and says what it holds.
///
/// The rule: the weight is rounded to the nearest f32 (ties to even), each element is divided by it (IEEE division, not a product with the
/// inverse), and NaN takes its canonical form, 0x7fc00000. A weight of 0 therefore gives NaN or infinities, and `finite` is false.
/// Squares are exact in f64; lane i of 8 sums those of the elements i, i + 8, … in order, and the lanes are summed as a
/// tree: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
#[must_use]
pub fn finish_mean(sum: &mut [f32], weight: u64) -> ChunkHeader {
    let divisor = Divisor::of(weight);
    let mut squares = Squares::default();
    divide(sum, divisor, &mut squares);
    squares.header()
}

/// The little-endian bytes of elements, without a copy.
#[must_use]
pub fn as_bytes(elements: &[f32]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// The little-endian bytes of elements, to be written.
#[must_use]
pub fn as_bytes_mut(elements: &mut [f32]) -> &mut [u8] {
    bytemuck::cast_slice_mut(elements)
}

/// The elements in little-endian bytes, which need no alignment.
///
/// # Errors
/// If the bytes are no whole number of f32.
pub fn from_bytes(bytes: &[u8]) -> Result<Vec<f32>, FoldError> {
    if !bytes.len().is_multiple_of(size_of::<f32>()) {
        return Err(FoldError::Bytes { bytes: bytes.len() });
    }
    let mut elements = vec![0.0_f32; bytes.len() / size_of::<f32>()];
    bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
    Ok(elements)
}

/// The elements in little-endian bytes, without a copy.
///
/// # Errors
/// If the bytes are no whole number of f32, or don't lie at a multiple of 4.
pub fn elements_of(bytes: &[u8]) -> Result<&[f32], FoldError> {
    bytemuck::try_cast_slice(bytes).map_err(|_| FoldError::Bytes { bytes: bytes.len() })
}

/// Little-endian bytes that are written as elements.
///
/// # Errors
/// As for [`elements_of`].
pub fn elements_of_mut(bytes: &mut [u8]) -> Result<&mut [f32], FoldError> {
    let len = bytes.len();
    bytemuck::try_cast_slice_mut(bytes).map_err(|_| FoldError::Bytes { bytes: len })
}

/// What a sum is divided by.
#[derive(Clone, Copy)]
enum Divisor {
    /// The inverse of a power of two: its product is the quotient, to the bit, since it is exact.
    Inverse(f32),
    Weight(f32),
}

impl Divisor {
    fn of(weight: u64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "the documented rule")]
        let rounded = weight as f32;
        if weight.is_power_of_two() {
            Self::Inverse(rounded.recip())
        } else {
            Self::Weight(rounded)
        }
    }
}

/// Sums of squares by lane; a chunk may come in parts, each but the last a multiple of [`LANES`] long.
#[derive(Default)]
struct Squares([f64; LANES]);

impl Squares {
    #[inline(always)]
    fn take(&mut self, mean: &[f32]) {
        let lanes = &mut self.0;
        let mut blocks = mean.chunks_exact(LANES);
        for block in &mut blocks {
            for (lane, x) in lanes.iter_mut().zip(block) {
                *lane += f64::from(*x) * f64::from(*x);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(blocks.remainder()) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }

    fn header(self) -> ChunkHeader {
        let [a, b, c, d, e, f, g, h] = self.0;
        let square_sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
        // A square of a finite f32 is below 2^256, so no number of them that fits in memory overflows f64.
        let square_sum = if square_sum.is_nan() { CANONICAL_NAN_F64 } else { square_sum };
        ChunkHeader { finite: square_sum.is_finite(), square_sum }
    }
}

#[inline(always)]
fn divide(sum: &mut [f32], divisor: Divisor, squares: &mut Squares) {
    match divisor {
        Divisor::Inverse(inverse) => {
            for x in sum.iter_mut() {
                *x = canonical(*x * inverse);
            }
        }
        Divisor::Weight(weight) => {
            for x in sum.iter_mut() {
                *x = canonical(*x / weight);
            }
        }
    }
    squares.take(sum);
}

#[inline(always)]
fn add_elements(left: &mut [f32], right: &[f32]) {
    for (l, r) in left.iter_mut().zip(right) {
        *l = canonical(*l + *r);
    }
}

/// The same loops, compiled for what the processor has. Nothing is fused or reassociated in either, so the bits are equal.
mod kernels {
    #![expect(
        unsafe_code,
        reason = "a function for wider vectors may be called only where they are"
    )]

    use super::{BLOCK, ChunkHeader, Divisor, Squares, divide, fold_block};

    pub(super) fn fold_mean(
        moves: &[Option<&[f32]>],
        weight: u64,
        levels: usize,
        out: &mut [f32],
    ) -> ChunkHeader {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has what the function is compiled for.
                return unsafe { avx512(moves, weight, levels, out) };
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: as above.
                return unsafe { avx2(moves, weight, levels, out) };
            }
        }
        portable(moves, weight, levels, out)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(
        moves: &[Option<&[f32]>],
        weight: u64,
        levels: usize,
        out: &mut [f32],
    ) -> ChunkHeader {
        portable(moves, weight, levels, out)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    pub(super) fn avx2(
        moves: &[Option<&[f32]>],
        weight: u64,
        levels: usize,
        out: &mut [f32],
    ) -> ChunkHeader {
        portable(moves, weight, levels, out)
    }

    #[inline(always)]
    pub(super) fn portable(
        moves: &[Option<&[f32]>],
        weight: u64,
        levels: usize,
        out: &mut [f32],
    ) -> ChunkHeader {
        let (divisor, mut squares) = (Divisor::of(weight), Squares::default());
        let mut stack = vec![0.0; BLOCK * levels];
        for (number, out) in out.chunks_mut(BLOCK).enumerate() {
            fold_block(moves, number * BLOCK, out, &mut stack);
            divide(out, divisor, &mut squares);
        }
        squares.header()
    }
}

/// Folds the elements from `start` on that fit in `out`; `Some(node)` pushes, `None` adds.
#[inline(always)]
fn fold_block(moves: &[Option<&[f32]>], start: usize, out: &mut [f32], stack: &mut [f32]) {
    let elements = out.len();
    let mut depth = 0; // how many values are on the stack
    let mut moves = moves.iter().copied().peekable();
    while let Some(step) = moves.next() {
        let place = |depth: usize| (depth - 1) * BLOCK..(depth - 1) * BLOCK + elements;
        match step {
            Some(node) if depth > 0 && moves.next_if_eq(&None).is_some() => {
                let top = if depth == 1 { &mut *out } else { &mut stack[place(depth - 1)] };
                add_elements(top, &node[start..start + elements]);
            }
            Some(node) => {
                depth += 1;
                let top = if depth == 1 { &mut *out } else { &mut stack[place(depth - 1)] };
                top.copy_from_slice(&node[start..start + elements]);
            }
            None => {
                let (below, top) = stack.split_at_mut((depth - 2) * BLOCK);
                let left = if depth == 2 { &mut *out } else { &mut below[place(depth - 2)] };
                add_elements(left, &top[..elements]);
                depth -= 1;
            }
        }
    }
}

/// Every NaN becomes the one quiet NaN without payload.
#[inline(always)]
fn canonical(x: f32) -> f32 {
    if x.is_nan() { CANONICAL_NAN } else { x }
}

/// Why nodes can't be folded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FoldError {
    /// Some leaf lies under none of the nodes.
    #[error("the {nodes} nodes at hand do not cover all leaves; wait for more")]
    NoCover {
        /// How many there were.
        nodes: usize,
    },
    /// A node of another chunk or another model.
    #[error(
        "node {node} has {actual} elements, the first one has {expected}; drop it and ask for it again"
    )]
    Length {
        /// The node that differs.
        node: TreeNode,
        /// Its length.
        actual: usize,
        /// The length of the first node.
        expected: usize,
    },
    /// Bytes that are no elements.
    #[error("{bytes} bytes are no whole number of f32; drop them and ask for them again")]
    Bytes {
        /// How many there were.
        bytes: usize,
    },
}

impl FoldError {
    /// What to do next: the same call with other input.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Retry
    }
}

/// The one NaN that leaves this file.
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);
const CANONICAL_NAN_F64: f64 = f64::from_bits(0x7ff8_0000_0000_0000);

/// Elements folded at a time: 4 KiB, so that the few top places of the stack stay in the first-level cache.
const BLOCK: usize = 1024;

/// Partial sums of squares; part of the definition of a header, not a matter of the machine.
const LANES: usize = 8;

#[cfg(test)]
mod tests;
