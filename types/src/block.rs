//! Names in the canonical tree: nodes, and the dyadic blocks of virtual ranks that members serve.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::VirtualRank;

/// The job's fixed number `V` of virtual ranks: 1 to 65,536.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct VirtualRanks(NonZeroU32);

impl VirtualRanks {
    /// Most virtual ranks of a job; keeps every tree at most 16 high.
    pub const MAX: u32 = 65_536;

    /// `None` outside of 1 to [`Self::MAX`].
    #[must_use]
    pub fn new(count: u32) -> Option<Self> {
        NonZeroU32::new(count).filter(|n| n.get() <= Self::MAX).map(Self)
    }

    /// The number `V`.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.get()
    }

    /// All virtual ranks in order.
    pub fn iter(self) -> impl Iterator<Item = VirtualRank> {
        (0..self.0.get()).map(VirtualRank)
    }

    /// The root of the canonical tree.
    #[must_use]
    pub fn root(self) -> TreeNode {
        TreeNode { start: 0, level: self.0.get().next_power_of_two().trailing_zeros() as u8 }
    }
}

impl TryFrom<u32> for VirtualRanks {
    type Error = String;
    fn try_from(count: u32) -> Result<Self, String> {
        Self::new(count)
            .ok_or_else(|| format!("{count} virtual ranks; allowed are 1 to {}", Self::MAX))
    }
}

impl From<VirtualRanks> for u32 {
    fn from(v: VirtualRanks) -> Self {
        v.count()
    }
}

impl fmt::Display for VirtualRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Node (x, y) of the canonical tree: it covers leaves `start .. min(start + 2^level, V)`; `start` is a multiple of `2^level`.
/// Its value is left child + right child; an empty right half passes the left on.
// Invariant: start is a multiple of 2^level, level <= 16. Kept by `new`, the only door (fields are private).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "(u32, u8)", into = "(u32, u8)")]
pub struct TreeNode {
    start: u32,
    level: u8,
}

impl TreeNode {
    /// Highest level: that of 65,536 leaves.
    pub const LEVEL_MAX: u8 = 16;

    /// `None` if `start` is no multiple of `2^level`, or the level is above [`Self::LEVEL_MAX`].
    #[must_use]
    pub fn new(start: u32, level: u8) -> Option<Self> {
        (level <= Self::LEVEL_MAX && start < VirtualRanks::MAX && start.is_multiple_of(1 << level))
            .then_some(Self { start, level })
    }

    /// The leaf of one virtual rank.
    #[must_use]
    pub fn leaf(rank: VirtualRank) -> Self {
        Self { start: rank.0, level: 0 }
    }

    /// The first leaf that it covers (x).
    #[must_use]
    pub fn start(self) -> u32 {
        self.start
    }

    /// Its height over the leaves (y).
    #[must_use]
    pub fn level(self) -> u8 {
        self.level
    }

    /// How many leaves it would cover in an endless tree.
    #[must_use]
    pub fn span(self) -> u32 {
        1 << self.level
    }

    /// Whether this is a single leaf.
    #[must_use]
    pub fn is_leaf(self) -> bool {
        self.level == 0
    }

    /// The two halves; `None` for a leaf. The right half may lie outside of the job's leaves.
    #[must_use]
    pub fn children(self) -> Option<(Self, Self)> {
        let level = self.level.checked_sub(1)?;
        Some((Self { start: self.start, level }, Self { start: self.start + (1 << level), level }))
    }

    /// The node of which this is a half; `None` at the highest level.
    #[must_use]
    pub fn parent(self) -> Option<Self> {
        let level = self.level + 1;
        (level <= Self::LEVEL_MAX)
            .then_some(Self { start: self.start & !((1 << level) - 1), level })
    }

    /// The other half of its parent; `None` at the highest level.
    #[must_use]
    pub fn sibling(self) -> Option<Self> {
        (self.level < Self::LEVEL_MAX)
            .then_some(Self { start: self.start ^ (1 << self.level), level: self.level })
    }

    /// Whether `other` is this node or lies under it.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        other.level <= self.level && other.start & !(self.span() - 1) == self.start
    }

    /// Whether it covers no leaf of a job with `v` virtual ranks.
    #[must_use]
    pub fn is_outside(self, v: VirtualRanks) -> bool {
        self.start >= v.count()
    }

    /// The virtual ranks that it covers in a job with `v` of them.
    pub fn leaves(self, v: VirtualRanks) -> impl Iterator<Item = VirtualRank> {
        (self.start..v.count().min(self.start.saturating_add(self.span()))).map(VirtualRank)
    }

    /// The name of the same value with the least level: a node whose right half is outside is its left child.
    #[must_use]
    pub fn canonical(self, v: VirtualRanks) -> Self {
        let mut node = self;
        while let Some((left, right)) = node.children() {
            if !right.is_outside(v) {
                break;
            }
            node = left;
        }
        node
    }
}

impl TryFrom<(u32, u8)> for TreeNode {
    type Error = String;
    fn try_from((start, level): (u32, u8)) -> Result<Self, String> {
        Self::new(start, level).ok_or_else(|| format!("no tree node ({start}, {level})"))
    }
}

impl From<TreeNode> for (u32, u8) {
    fn from(node: TreeNode) -> Self {
        (node.start, node.level)
    }
}

impl fmt::Display for TreeNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({},{})", self.start, self.level)
    }
}

/// A dyadic block of virtual ranks that one member serves: the leaves under one tree node.
pub type Block = TreeNode;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn canonical_names_have_the_least_level() {
        let v = VirtualRanks::new(5).unwrap();
        assert_eq!(v.root(), TreeNode::new(0, 3).unwrap());
        assert_eq!(TreeNode::new(4, 2).unwrap().canonical(v), TreeNode::new(4, 0).unwrap());
        assert_eq!(v.root().canonical(v), v.root());
        let one = VirtualRanks::new(1).unwrap();
        assert_eq!(one.root().canonical(one), TreeNode::leaf(VirtualRank(0)));
    }

    proptest! {
        #[test]
        fn children_tile_their_parent(start in 0u32..1000, level in 1u8..10, v in 1u32..2000) {
            let node = TreeNode::new((start << level) % 65_536, level).unwrap();
            let v = VirtualRanks::new(v).unwrap();
            let (left, right) = node.children().unwrap();
            prop_assert_eq!(left.parent(), Some(node));
            prop_assert_eq!(right.parent(), Some(node));
            prop_assert_eq!(left.sibling(), Some(right));
            prop_assert!(node.contains(left) && node.contains(right) && !left.contains(right));
            let both: Vec<_> = left.leaves(v).chain(right.leaves(v)).collect();
            prop_assert_eq!(both, node.leaves(v).collect::<Vec<_>>());
        }
    }
}
