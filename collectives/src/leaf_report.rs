//! The payload of the report chunk: a step's scalars by name, folded over the canonical tree like a gradient.
//!
//! A leaf brings its weight (how many samples it stands for) and values such as its loss. Weights add as integers, values as f64, left + right
//! at each node; the root's values divide once by the number of leaves. So the means are equal on all members, to the bit.

use std::collections::BTreeMap;

use types::{Remedy, TreeNode, VirtualRanks};

use crate::fold::{self, Move};

/// The scalars of one leaf, or of all leaves under one node.
// Invariant: at most NAMES_MAX names, each of 1 to NAME_BYTES_MAX bytes; NaN in canonical form. Kept by `new`, the only door.
#[derive(Clone, PartialEq, Debug)]
pub struct LeafReport {
    weight: u64,
    values: BTreeMap<String, f64>,
}

impl LeafReport {
    /// Most names in a report.
    pub const NAMES_MAX: usize = 256;

    /// Longest name, in bytes.
    pub const NAME_BYTES_MAX: usize = 64;

    /// Longest encoding, in bytes: the weight and the count as varints, then each name with its length and eight bytes.
    pub const ENCODED_BYTES_MAX: usize = 10 + 2 + Self::NAMES_MAX * (1 + Self::NAME_BYTES_MAX + 8);

    /// The report of a leaf of this weight.
    ///
    /// # Errors
    /// If there are too many names, or one is empty or too long.
    pub fn new(weight: u64, values: BTreeMap<String, f64>) -> Result<Self, ReportError> {
        if values.len() > Self::NAMES_MAX {
            return Err(ReportError::TooMany { names: values.len() });
        }
        if let Some(name) = values.keys().find(|n| n.is_empty() || n.len() > Self::NAME_BYTES_MAX) {
            return Err(ReportError::NameBytes { bytes: name.len() });
        }
        let values = values.into_iter().map(|(name, x)| (name, canonical(x))).collect();
        Ok(Self { weight, values })
    }

    /// How many samples stand behind it; summed over the leaves.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// The scalars, summed over the leaves.
    #[must_use]
    pub fn values(&self) -> &BTreeMap<String, f64> {
        &self.values
    }

    /// left + right, at a node of the tree.
    ///
    /// # Errors
    /// If the halves don't have the same names, or the weights overflow.
    pub fn combine(left: &Self, right: &Self) -> Result<Self, ReportError> {
        let weight = left.weight.checked_add(right.weight).ok_or(ReportError::Weight)?;
        if let Some(name) = right.values.keys().find(|n| !left.values.contains_key(*n)) {
            return Err(ReportError::Missing { name: name.clone() });
        }
        let add = |(name, l): (&String, &f64)| match right.values.get(name) {
            Some(r) => Ok((name.clone(), canonical(l + r))),
            None => Err(ReportError::Missing { name: name.clone() }),
        };
        Ok(Self { weight, values: left.values.iter().map(add).collect::<Result<_, _>>()? })
    }

    /// Folds a cover of the tree to the root's report. Nodes may overlap; the largest are used.
    ///
    /// # Errors
    /// If the nodes don't cover all leaves, or two of them can't be combined.
    #[expect(clippy::missing_panics_doc, reason = "the moves of a cover are balanced")]
    pub fn fold_cover(
        v: VirtualRanks,
        nodes: &BTreeMap<TreeNode, Self>,
    ) -> Result<Self, ReportError> {
        let names = nodes.keys().copied().collect();
        let cover = fold::cover(v, &names).ok_or(ReportError::NoCover { nodes: nodes.len() })?;
        let mut stack: Vec<Self> = Vec::new();
        for step in fold::moves(v, &cover) {
            let top = match step {
                Move::Push(node) => nodes[&node].clone(),
                Move::Add => {
                    let (right, left) = (stack.pop(), stack.pop());
                    let (left, right) = left.zip(right).expect("an add follows its two halves");
                    Self::combine(&left, &right)?
                }
            };
            stack.push(top);
        }
        Ok(stack.pop().expect("a cover has a node"))
    }

    /// The mean of each value over the job's leaves; call it on the root's report.
    #[must_use]
    pub fn mean(&self, leaves: VirtualRanks) -> BTreeMap<String, f64> {
        let leaves = f64::from(leaves.count());
        self.values.iter().map(|(name, sum)| (name.clone(), canonical(sum / leaves))).collect()
    }

    /// Its bytes; equal reports have equal bytes.
    #[must_use]
    pub fn encode(&self) -> bytes::Bytes {
        types::encode(&(self.weight, &self.values))
    }

    /// The report in `bytes`.
    ///
    /// # Errors
    /// If the bytes are malformed or beyond the limits.
    pub fn decode(bytes: &[u8]) -> Result<Self, ReportError> {
        if bytes.len() > Self::ENCODED_BYTES_MAX {
            return Err(ReportError::Bytes { bytes: bytes.len() });
        }
        let (weight, values) = types::decode(bytes)?;
        Self::new(weight, values)
    }
}

/// Every NaN becomes the one quiet NaN without payload.
fn canonical(x: f64) -> f64 {
    if x.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { x }
}

/// Why a report can't be made, read or combined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// More names than a report may have.
    #[error(
        "a report with {names} names; at most {} are allowed, report fewer scalars",
        LeafReport::NAMES_MAX
    )]
    TooMany {
        /// How many there were.
        names: usize,
    },
    /// A name that is empty or too long.
    #[error(
        "a report's name of {bytes} bytes; allowed are 1 to {}, choose another name",
        LeafReport::NAME_BYTES_MAX
    )]
    NameBytes {
        /// Its length.
        bytes: usize,
    },
    /// Some virtual ranks reported a name and others did not.
    #[error(
        "{name:?} is reported by some virtual ranks and not by others; report it for each virtual rank of a step"
    )]
    Missing {
        /// The name.
        name: String,
    },
    /// The weights' sum is above 2^64.
    #[error("the weights of a step add up to more than 2^64; give smaller weights")]
    Weight,
    /// Some leaf lies under none of the nodes.
    #[error("the {nodes} nodes at hand do not cover all leaves; wait for more")]
    NoCover {
        /// How many there were.
        nodes: usize,
    },
    /// More bytes than any report has.
    #[error(
        "a report of {bytes} bytes; at most {} are allowed, drop it",
        LeafReport::ENCODED_BYTES_MAX
    )]
    Bytes {
        /// How many there were.
        bytes: usize,
    },
    /// Bytes that are no report.
    #[error("not a report; drop it")]
    Malformed {
        /// What is wrong with them.
        #[from]
        source: types::WireError,
    },
}

impl ReportError {
    /// What to do next: all but missing nodes are the program's or the sender's fault.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::NoCover { .. } => Remedy::Retry,
            _ => Remedy::Stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn report(weight: u64, values: &[(&str, f64)]) -> LeafReport {
        LeafReport::new(weight, values.iter().map(|(n, x)| ((*n).to_owned(), *x)).collect())
            .unwrap()
    }

    fn reports() -> impl Strategy<Value = LeafReport> {
        let values = prop::collection::btree_map(
            "[a-zä/]{1,20}",
            any::<u64>().prop_map(f64::from_bits),
            0..10,
        );
        (any::<u64>(), values).prop_map(|(weight, values)| LeafReport::new(weight, values).unwrap())
    }

    #[test]
    fn weights_and_values_add_and_the_mean_divides_by_the_leaves() {
        let nodes = [(0, 3, 1.0), (1, 5, 2.5), (2, 0, -0.5)];
        let nodes = nodes.map(|(leaf, weight, loss)| {
            (TreeNode::new(leaf, 0).unwrap(), report(weight, &[("loss", loss)]))
        });
        let v = VirtualRanks::new(3).unwrap();
        let root = LeafReport::fold_cover(v, &BTreeMap::from(nodes)).unwrap();
        assert_eq!(root, report(8, &[("loss", 3.0)]));
        assert_eq!(root.mean(v), BTreeMap::from([("loss".to_owned(), 1.0)]));
    }

    #[test]
    fn values_are_folded_in_tree_order() {
        // (1 + 1e16) + (-1e16 + 1) loses both ones where a fold from left to right would keep the last.
        let v = VirtualRanks::new(4).unwrap();
        let values = [1.0, 1e16, -1e16, 1.0];
        let leaves =
            v.iter().map(TreeNode::leaf).zip(values.map(|x| report(1, &[("x", x)]))).collect();
        assert_eq!(LeafReport::fold_cover(v, &leaves).unwrap().values()["x"], 0.0);
    }

    #[test]
    fn a_name_that_one_half_lacks_is_named() {
        let (with, without) = (report(1, &[("a", 1.0), ("b", 1.0)]), report(1, &[("a", 1.0)]));
        for result in [LeafReport::combine(&with, &without), LeafReport::combine(&without, &with)] {
            assert!(matches!(result, Err(ReportError::Missing { name }) if name == "b"));
        }
    }

    #[test]
    fn weights_that_overflow_and_nodes_that_do_not_cover_are_refused() {
        let result = LeafReport::combine(&report(u64::MAX, &[]), &report(1, &[]));
        assert!(matches!(result, Err(ReportError::Weight)));
        let nodes = BTreeMap::from([(TreeNode::new(0, 0).unwrap(), report(1, &[]))]);
        let result = LeafReport::fold_cover(VirtualRanks::new(2).unwrap(), &nodes);
        assert!(matches!(result, Err(ReportError::NoCover { nodes: 1 })));
    }

    #[test]
    fn reports_beyond_the_limits_are_neither_made_nor_read() {
        let largest: BTreeMap<_, _> = (0..256).map(|i| (format!("{i:064}"), 1.0)).collect();
        let mut too_many = largest.clone();
        too_many.insert("one more".to_owned(), 1.0);
        let too_long = BTreeMap::from([("x".repeat(65), 1.0)]);
        let empty = BTreeMap::from([(String::new(), 1.0)]);

        let report = LeafReport::new(u64::MAX, largest).unwrap();
        assert_eq!(report.encode().len(), LeafReport::ENCODED_BYTES_MAX);
        assert_eq!(LeafReport::decode(&report.encode()).unwrap(), report);
        for values in [too_many, too_long, empty] {
            assert!(LeafReport::decode(&types::encode(&(1_u64, &values))).is_err());
            assert!(LeafReport::new(1, values).is_err());
        }
        let bytes = vec![0; LeafReport::ENCODED_BYTES_MAX + 1];
        assert!(matches!(LeafReport::decode(&bytes), Err(ReportError::Bytes { .. })));
    }

    #[test]
    fn a_nan_has_one_form_from_the_leaf_to_the_mean() {
        let odd = f64::from_bits(0xfff0_0000_0000_0001);
        let leaf = report(1, &[("x", odd)]);
        assert_eq!(leaf.values()["x"].to_bits(), 0x7ff8_0000_0000_0000);
        let (up, down) =
            (report(1, &[("x", f64::INFINITY)]), report(1, &[("x", f64::NEG_INFINITY)]));
        let node = LeafReport::combine(&up, &down).unwrap();
        assert_eq!(node.values()["x"].to_bits(), 0x7ff8_0000_0000_0000);
    }

    proptest! {
        #[test]
        fn a_report_survives_its_encoding(report in reports()) {
            let bytes = report.encode();
            let read = LeafReport::decode(&bytes).unwrap();
            prop_assert_eq!(read.encode(), bytes); // to the bit, NaN included
            prop_assert_eq!(read.weight(), report.weight());
        }

        #[test]
        fn decoding_never_panics(
            noise in prop::collection::vec(any::<u8>(), 0..300),
            report in reports(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            drop(LeafReport::decode(&noise));
            let mut bytes = report.encode().to_vec();
            *at.get_mut(&mut bytes) = byte;
            drop(LeafReport::decode(&bytes));
            bytes.truncate(cut.index(bytes.len() + 1));
            drop(LeafReport::decode(&bytes));
        }
    }
}
