//! Who writes which segment.

use std::collections::BTreeSet;
use std::ops::Range;

use types::{Digest, NodeId};

use crate::{Layout, Segment, SegmentIndex};

/// The share of each member in one checkpoint: contiguous runs of segments, equal in bytes to within one segment.
// Invariant: runs are in member order and tile the layout's segments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharePlan {
    shares: Vec<(NodeId, Range<u32>)>,
    digest: Digest,
}

impl SharePlan {
    /// Shares the layout's segments out to `members`, in their order. A member may get none.
    ///
    /// # Panics
    /// If there is no member, or one is listed twice: worlds refuse both.
    #[must_use]
    pub fn new(layout: &Layout, members: &[NodeId]) -> Self {
        assert!(!members.is_empty(), "a plan has members");
        assert_eq!(
            members.iter().collect::<BTreeSet<_>>().len(),
            members.len(),
            "members are distinct"
        );
        let segments = layout.segments();
        let total = u128::from(layout.total_bytes());
        // The member in whose equal part of all bytes the middle of the segment lies; grows with the segment.
        let mut middle_x2 = 0u128;
        let owners: Vec<usize> = segments
            .iter()
            .map(|segment: &Segment| {
                let owner =
                    (middle_x2 + u128::from(segment.bytes)) * members.len() as u128 / (2 * total);
                middle_x2 += 2 * u128::from(segment.bytes);
                (owner as usize).min(members.len() - 1)
            })
            .collect();
        let shares: Vec<_> = members
            .iter()
            .enumerate()
            .map(|(place, node)| {
                let start = owners.partition_point(|&owner| owner < place) as u32;
                let end = owners.partition_point(|&owner| owner <= place) as u32;
                (*node, start..end)
            })
            .collect();
        let digest = digest(layout, &shares);
        Self { shares, digest }
    }

    /// The members, in the plan's order.
    pub fn members(&self) -> impl Iterator<Item = NodeId> {
        self.shares.iter().map(|(node, _)| *node)
    }

    /// Whether the node is in the plan.
    #[must_use]
    pub fn has_member(&self, node: NodeId) -> bool {
        self.members().any(|member| member == node)
    }

    /// The segments that `node` writes; none for a stranger.
    pub fn mine(&self, node: NodeId) -> impl Iterator<Item = SegmentIndex> + use<> {
        let share = self.shares.iter().find(|(member, _)| *member == node);
        share.map_or(0..0, |(_, range)| range.clone()).map(SegmentIndex)
    }

    /// The member that writes a segment.
    #[must_use]
    pub fn owner(&self, segment: SegmentIndex) -> Option<NodeId> {
        self.shares.iter().find(|(_, range)| range.contains(&segment.0)).map(|(node, _)| *node)
    }

    /// Digest of layout and shares: equal plans only.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

fn digest(layout: &Layout, shares: &[(NodeId, Range<u32>)]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"ripstop plan 1\0");
    hasher.update(&layout.digest().0);
    for (node, range) in shares {
        hasher.update(&node.0.to_le_bytes());
        hasher.update(&range.start.to_le_bytes());
        hasher.update(&range.end.to_le_bytes());
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorSpec;
    use proptest::prelude::*;
    use types::DType;

    fn layout(bytes: usize) -> Layout {
        let spec = TensorSpec { name: "t".into(), dtype: DType::U8, shape: vec![bytes] };
        Layout::new(vec![spec], 4096).unwrap()
    }

    #[test]
    fn other_members_or_another_layout_give_another_digest() {
        let (small, large) = (layout(10_000), layout(20_000));
        let plan = SharePlan::new(&small, &[NodeId(1), NodeId(2)]);
        assert_eq!(plan.digest(), SharePlan::new(&small, &[NodeId(1), NodeId(2)]).digest());
        assert_ne!(plan.digest(), SharePlan::new(&small, &[NodeId(2), NodeId(1)]).digest());
        assert_ne!(plan.digest(), SharePlan::new(&large, &[NodeId(1), NodeId(2)]).digest());
    }

    proptest! {
        #[test]
        fn every_segment_has_one_owner_and_shares_are_even(bytes in 0usize..400_000, members in 1u64..12) {
            let layout = layout(bytes);
            let nodes: Vec<NodeId> = (0..members).map(|n| NodeId(n * 7 + 1)).collect();
            let plan = SharePlan::new(&layout, &nodes);
            let all: Vec<_> = nodes.iter().flat_map(|n| plan.mine(*n)).collect();
            prop_assert_eq!(&all, &layout.segments().iter().map(|s| s.index).collect::<Vec<_>>());
            let even = layout.total_bytes() / members;
            for node in nodes {
                for index in plan.mine(node) {
                    prop_assert_eq!(plan.owner(index), Some(node));
                }
                let share: u64 = plan.mine(node).map(|i| layout.segment(i).unwrap().bytes).sum();
                prop_assert!(share.abs_diff(even) <= 2 * layout.segment_bytes(), "{} of {}", share, even);
            }
            prop_assert_eq!(plan.mine(NodeId(0)).count(), 0);
        }
    }
}
