//! Evening out: at step boundaries, blocks follow the measured leaf times of unequal members.
//!
//! A step takes as long as its slowest member: leaves × leaf time. The rule, in `docs/decisions/0012-evening-out.md` with its reasons:
//!
//! - A change moves one block, or one half of a block, from the slowest member to one other: never more than one re-split.
//! - It is made only as the first of a row of such moves that together shorten the step by [`GAIN`] at least, and by [`GAIN_MIN`].
//! - The move must have paid at [`LOOKS`] different boundaries of the present world in a row, with the shortest leaf time that its giver
//!   told meanwhile and the longest that its taker told. So noise makes no worlds, and there is a pause after each.
//!
//! It promises: with times that stay, the step time never rises, and after finitely many changes there are no more. Deliberately not here: whether
//! anything more urgent is due (see `formation`), and how a leaf is measured (the worker does).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use types::{Block, NodeId, Step, VirtualRanks, World};

use crate::job::Job;
use crate::message::describe_blocks;
use crate::reports::Reports;

/// Watches one job for a move that pays. Lost with the leader: the next one begins to watch anew.
#[derive(Debug, Default)]
pub(crate) struct Evening {
    looked_at: Option<Step>,
    watched: Option<Watched>,
}

/// A move, and since it has paid.
#[derive(Debug)]
struct Watched {
    step: Move,
    /// The shortest leaf time that the giver told, in microseconds.
    giver_us: u64,
    /// The longest that the taker told.
    taker_us: u64,
    looks: u32,
}

/// Other blocks for the same members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evened {
    /// The blocks of each.
    pub(crate) blocks: BTreeMap<NodeId, Vec<Block>>,
    /// What moves and why, for people.
    pub(crate) reason: String,
}

impl Evening {
    /// Looks at the present world at a boundary that all its members have reached. The same boundary counts once.
    pub(crate) fn look(&mut self, boundary: Step, shares: &Shares) -> Option<Evened> {
        let is_new = self.looked_at.replace(boundary) != Some(boundary);
        if let Some(watched) = &mut self.watched {
            watched.looks += u32::from(is_new);
            let Move { giver, taker, .. } = watched.step;
            watched.giver_us = watched.giver_us.min(shares.leaf_us(giver));
            watched.taker_us = watched.taker_us.max(shares.leaf_us(taker));
            let cautious =
                shares.clone().with(giver, watched.giver_us).with(taker, watched.taker_us);
            if cautious.row(Some(watched.step)).is_none() {
                self.watched = None;
            } else if watched.looks >= LOOKS {
                return Some(shares.evened(watched.step));
            } else {
                return None;
            }
        }
        let step = shares.row(None)?;
        let (giver_us, taker_us) = (shares.leaf_us(step.giver), shares.leaf_us(step.taker));
        self.watched = Some(Watched { step, giver_us, taker_us, looks: 1 });
        None
    }

    /// Another world, or something more urgent: what was seen before does not count.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Who serves what, and how long a leaf takes each.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    virtual_ranks: VirtualRanks,
    members: BTreeMap<NodeId, Share>,
}

#[derive(Clone, Debug)]
struct Share {
    blocks: Vec<Block>,
    leaves: u64,
    leaf_us: u64,
}

impl Share {
    fn step_us(&self) -> u64 {
        self.leaves * self.leaf_us
    }
}

/// One re-split: a block, or a half of one, goes from one member to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Move {
    giver: NodeId,
    /// The block that the giver holds.
    block: Block,
    /// What moves of it.
    piece: Block,
    taker: NodeId,
}

impl Shares {
    /// Of the newest world; `None` while one of its members has not told its leaf time.
    pub(crate) fn of(job: &Job, world: &World, reports: &Reports) -> Option<Self> {
        let mut shares = Self { virtual_ranks: world.virtual_ranks, members: BTreeMap::new() };
        for member in &world.members {
            let leaf = reports.leaf_time(job, member.node)?;
            shares.insert(member.node, member.blocks.clone(), leaf);
        }
        Some(shares)
    }

    fn insert(&mut self, node: NodeId, blocks: Vec<Block>, leaf: Duration) {
        let leaves = blocks.iter().map(|block| self.size(*block)).sum();
        let leaf_us = u64::try_from(leaf.as_micros()).unwrap_or(u64::MAX).clamp(1, LEAF_US_MAX);
        self.members.insert(node, Share { blocks, leaves, leaf_us });
    }

    fn leaf_us(&self, node: NodeId) -> u64 {
        self.members.get(&node).map_or(1, |share| share.leaf_us)
    }

    fn with(mut self, node: NodeId, leaf_us: u64) -> Self {
        if let Some(share) = self.members.get_mut(&node) {
            share.leaf_us = leaf_us;
        }
        self
    }

    fn size(&self, block: Block) -> u64 {
        block.leaves(self.virtual_ranks).size_hint().0 as u64
    }

    /// The member that the others wait for; of equals the lowest.
    fn slowest(&self) -> Option<(NodeId, u64)> {
        let time = |(node, share): (&NodeId, &Share)| (*node, share.step_us());
        self.members.iter().map(time).max_by_key(|(node, us)| (*us, Reverse(*node)))
    }

    /// The first of a row of moves that pays; `first` is given, or found like the others. Each takes from the slowest and leaves the
    /// taker within the goal, so no move of the row makes a step longer.
    fn row(&self, first: Option<Move>) -> Option<Move> {
        let (_, before) = self.slowest()?;
        let gain = (before / GAIN).max(GAIN_MIN.as_micros() as u64);
        let goal = before.checked_sub(gain)?;
        // No blocks at all could do better than this.
        let leaves_per_us: f64 = self.members.values().map(|s| 1.0 / s.leaf_us as f64).sum();
        if f64::from(self.virtual_ranks.count()) > goal as f64 * leaves_per_us {
            return None;
        }
        let mut shares = self.clone();
        if let Some(step) = first {
            let is_slow = shares.members.get(&step.giver).is_some_and(|s| s.step_us() > goal);
            shares.apply(step);
            if !is_slow || shares.members.get(&step.taker).is_none_or(|s| s.step_us() > goal) {
                return None;
            }
        }
        let mut row = first;
        for _ in 0..=ROW_MAX {
            let (giver, us) = shares.slowest()?;
            if us <= goal {
                return row;
            }
            let step = shares.best(giver, goal)?;
            shares.apply(step);
            row.get_or_insert(step);
        }
        None
    }

    /// The move from this member after which the slower of the two is fastest. Of equals one after which two halves meet again, then one that
    /// cuts nothing.
    fn best(&self, giver: NodeId, goal: u64) -> Option<Move> {
        let share = self.members.get(&giver)?;
        let others = || self.members.iter().filter(|(node, _)| **node != giver);
        let of_block = |block: Block| {
            let whole = Some(block).filter(|_| share.blocks.len() > 1);
            let halves = block.children().map(|(l, r)| [l, r]).into_iter().flatten();
            let halves = halves.map(|half| half.canonical(self.virtual_ranks));
            halves.chain(whole).map(move |piece| (block, piece))
        };
        let pieces = share.blocks.iter().copied().flat_map(of_block);
        let of_piece = |(block, piece): (Block, Block)| {
            let size = self.size(piece);
            let left = share.leaves.checked_sub(size).filter(|left| *left > 0 && size > 0)?;
            let rank = |(node, other): (&NodeId, &Share)| {
                let after = (other.leaves + size) * other.leaf_us;
                let meets = piece.sibling().is_some_and(|half| other.blocks.contains(&half));
                (after.max(left * share.leaf_us), after, !meets, piece != block, *node)
            };
            let (peak, after, apart, cuts, taker) = others().map(rank).min()?;
            let step = Move { giver, block, piece, taker };
            (after <= goal).then_some(((peak, apart, cuts, taker, piece), step))
        };
        pieces.filter_map(of_piece).min_by_key(|(rank, _)| *rank).map(|(_, step)| step)
    }

    fn apply(&mut self, Move { giver, block, piece, taker }: Move) {
        let (size, virtual_ranks) = (self.size(piece), self.virtual_ranks);
        if let Some(share) = self.members.get_mut(&giver) {
            share.blocks.retain(|held| *held != block);
            let halves = block.children().filter(|_| piece != block);
            let halves = halves.map(|(l, r)| [l, r]).into_iter().flatten();
            let kept = halves.map(|half| half.canonical(virtual_ranks));
            share.blocks.extend(kept.filter(|half| *half != piece));
            share.leaves = share.leaves.saturating_sub(size);
        }
        if let Some(share) = self.members.get_mut(&taker) {
            share.blocks.push(piece);
            share.leaves += size;
        }
    }

    fn evened(&self, step: Move) -> Evened {
        let mut after = self.clone();
        after.apply(step);
        let Move { giver, taker, piece, .. } = step;
        let ratio = self.leaf_us(giver) as f64 / self.leaf_us(taker) as f64;
        let ms = |shares: &Self| shares.slowest().map_or(0.0, |(_, us)| us as f64 / 1e3);
        let reason = format!(
            "evening out: a leaf takes node {giver} {ratio:.1} × as long as node {taker}; virtual ranks {} move there, \
             the leaves of a step take {:.0} ms instead of {:.0}",
            describe_blocks(&[piece], self.virtual_ranks),
            ms(&after),
            ms(self),
        );
        let blocks = after.members.into_iter().map(|(node, share)| (node, share.blocks)).collect();
        Evened { blocks, reason }
    }
}

/// A row of moves must shorten the step by this part of it.
const GAIN: u64 = 10;
/// And by so much: steps that differ by less are made of messages, not of leaves.
const GAIN_MIN: Duration = Duration::from_millis(1);
/// At so many different boundaries in a row a move must have paid.
const LOOKS: u32 = 8;
/// Where so many members are as slow as the slowest, a move for each of them is not begun.
const ROW_MAX: usize = 64;
/// A leaf that takes longer than an hour is not told from one that takes an hour; the products below stay in range.
const LEAF_US_MAX: u64 = 3_600_000_000;

#[cfg(test)]
mod tests;
