//! Which nodes may be folded, and in which order: the shape of the canonical tree, without its numbers.
//!
//! Everything here speaks of canonical names ([`TreeNode::canonical`]): where the right half of a node lies outside of the leaves, the node
//! *is* its left half, and nothing is folded.

use std::collections::BTreeSet;

use types::{TreeNode, VirtualRanks};

/// Two held halves of a node that is not held yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fold {
    /// The left half.
    pub left: TreeNode,
    /// The right half.
    pub right: TreeNode,
    /// What left + right is.
    pub parent: TreeNode,
}

/// The next fold of two held nodes into a parent that lies within one of `within` (the pieces that this member provides), leftmost first.
/// A parent that is held already is not folded again, so folding until `None` ends even if the halves are kept.
#[must_use]
pub fn foldable(
    v: VirtualRanks,
    held: &BTreeSet<TreeNode>,
    within: &BTreeSet<TreeNode>,
) -> Option<Fold> {
    held.iter().find_map(|&left| {
        let fold = fold_of_left(v, left)?;
        let is_next = held.contains(&fold.right) && !held.contains(&fold.parent);
        (is_next && lies_within(v, fold.parent, within)).then_some(fold)
    })
}

/// The held nodes that tile all leaves, in leaf order, if they do. Held nodes may overlap; the largest is taken.
#[must_use]
pub fn cover(v: VirtualRanks, held: &BTreeSet<TreeNode>) -> Option<Vec<TreeNode>> {
    let mut found = Vec::new();
    cover_node(v, v.root(), held, &mut found).then_some(found)
}

/// How the nodes of a cover are folded in tree order, for a machine with a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Move {
    /// Push this node.
    Push(TreeNode),
    /// Pop the right half, then the left half; push left + right.
    Add,
}

/// The moves that fold a cover (as [`cover`] gives it) to the root. The stack never gets deeper than the tree is high plus one.
pub(crate) fn moves(v: VirtualRanks, cover: &[TreeNode]) -> Vec<Move> {
    let mut moves = Vec::with_capacity(2 * cover.len());
    push_moves(v, v.root(), &mut cover.iter().copied().peekable(), &mut moves);
    moves
}

fn push_moves(
    v: VirtualRanks,
    node: TreeNode,
    cover: &mut std::iter::Peekable<impl Iterator<Item = TreeNode>>,
    moves: &mut Vec<Move>,
) {
    let node = node.canonical(v);
    if cover.next_if_eq(&node).is_some() {
        moves.push(Move::Push(node));
    } else if let Some((left, right)) = node.children() {
        push_moves(v, left, cover, moves);
        push_moves(v, right, cover, moves);
        moves.push(Move::Add);
    }
}

/// The fold of which this canonical node is the left half, unless the right half is outside.
fn fold_of_left(v: VirtualRanks, left: TreeNode) -> Option<Fold> {
    let parent = left.parent()?;
    let (first, right) = parent.children()?;
    (first == left && !right.is_outside(v)).then(|| Fold {
        left,
        right: right.canonical(v),
        parent,
    })
}

fn lies_within(v: VirtualRanks, node: TreeNode, within: &BTreeSet<TreeNode>) -> bool {
    std::iter::successors(Some(node), |n| n.parent())
        .any(|above| within.contains(&above.canonical(v)))
}

fn cover_node(
    v: VirtualRanks,
    node: TreeNode,
    held: &BTreeSet<TreeNode>,
    found: &mut Vec<TreeNode>,
) -> bool {
    let node = node.canonical(v);
    if held.contains(&node) {
        found.push(node);
        return true;
    }
    let Some((left, right)) = node.children() else { return false };
    cover_node(v, left, held, found) && cover_node(v, right, held, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v(count: u32) -> VirtualRanks {
        VirtualRanks::new(count).unwrap()
    }

    fn node(start: u32, level: u8) -> TreeNode {
        TreeNode::new(start, level).unwrap()
    }

    fn set<const N: usize>(nodes: [(u32, u8); N]) -> BTreeSet<TreeNode> {
        nodes.into_iter().map(|(start, level)| node(start, level)).collect()
    }

    fn fold(left: (u32, u8), right: (u32, u8), parent: (u32, u8)) -> Option<Fold> {
        let [left, right, parent] = [left, right, parent].map(|(start, level)| node(start, level));
        Some(Fold { left, right, parent })
    }

    #[test]
    fn two_halves_fold_only_within_a_piece() {
        let held = set([(0, 0), (1, 0), (2, 1)]);
        assert_eq!(foldable(v(8), &held, &set([(0, 1)])), fold((0, 0), (1, 0), (0, 1)));
        assert_eq!(foldable(v(8), &held, &set([(0, 3)])), fold((0, 0), (1, 0), (0, 1)));
        assert_eq!(foldable(v(8), &held, &set([(0, 0), (1, 0), (2, 1), (4, 2)])), None);
        assert_eq!(foldable(v(8), &held, &set([])), None);
    }

    #[test]
    fn neighbours_of_different_parents_do_not_fold() {
        assert_eq!(foldable(v(8), &set([(1, 0), (2, 0)]), &set([(0, 3)])), None);
        assert_eq!(foldable(v(8), &set([(0, 1), (2, 0)]), &set([(0, 3)])), None);
    }

    #[test]
    fn a_half_that_is_cut_off_by_the_last_leaf_folds_by_its_canonical_name() {
        // Six leaves: (4,2) is (4,1), the right half of the root.
        assert_eq!(
            foldable(v(6), &set([(0, 2), (4, 1)]), &set([(0, 3)])),
            fold((0, 2), (4, 1), (0, 3))
        );
        // Its own right half is outside: it needs no fold.
        assert_eq!(foldable(v(6), &set([(4, 1)]), &set([(4, 1)])), None);
        assert_eq!(foldable(v(5), &set([(4, 0)]), &set([(4, 0)])), None);
        assert_eq!(foldable(v(1), &set([(0, 0)]), &set([(0, 0)])), None);
    }

    #[test]
    fn folding_ends_even_if_the_halves_are_kept() {
        assert_eq!(foldable(v(2), &set([(0, 0), (1, 0), (0, 1)]), &set([(0, 1)])), None);
    }

    #[test]
    fn a_cover_takes_the_largest_nodes_in_leaf_order() {
        let held = set([(0, 0), (1, 0), (0, 1), (2, 0), (3, 0), (4, 0)]);
        assert_eq!(cover(v(5), &held), Some(vec![node(0, 1), node(2, 0), node(3, 0), node(4, 0)]));
        assert_eq!(cover(v(6), &held), None);
        assert_eq!(cover(v(2), &held), Some(vec![node(0, 1)]));
        assert_eq!(cover(v(1), &set([])), None);
        assert_eq!(cover(v(1), &set([(0, 0)])), Some(vec![node(0, 0)]));
    }

    #[test]
    fn the_moves_follow_the_tree() {
        let nodes = [node(0, 1), node(2, 0), node(3, 0), node(4, 0)];
        let [a, b, c, d] = nodes.map(Move::Push);
        assert_eq!(moves(v(5), &nodes), [a, b, c, Move::Add, Move::Add, d, Move::Add]);
    }

    proptest! {
        #[test]
        fn all_leaves_fold_to_the_root(count in 1u32..200) {
            let v = v(count);
            let root = v.root().canonical(v);
            let mut held: BTreeSet<_> = v.iter().map(TreeNode::leaf).collect();
            let mut folds = 0;
            while let Some(Fold { left, right, parent }) = foldable(v, &held, &BTreeSet::from([root])) {
                prop_assert!(held.remove(&left) && held.remove(&right) && held.insert(parent));
                prop_assert_eq!(parent.canonical(v), parent);
                folds += 1;
            }
            prop_assert_eq!(held, BTreeSet::from([root]));
            prop_assert_eq!(folds, count - 1);
        }
    }
}
