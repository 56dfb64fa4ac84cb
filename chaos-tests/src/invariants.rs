//! What must hold. Each has a file, is checked after each event, and has a planted bug that it must catch.

pub mod blocks_tile_the_virtual_ranks;
pub mod equal_digests_at_equal_steps;
pub mod every_wait_ends;
pub mod one_world_per_generation;

/// The names of all invariants, with the bug that is planted for each.
pub const ALL: [(&str, crate::sim::Planted); 4] = [
    (one_world_per_generation::NAME, crate::sim::Planted::TwoWorlds),
    (blocks_tile_the_virtual_ranks::NAME, crate::sim::Planted::ServedTwice),
    (equal_digests_at_equal_steps::NAME, crate::sim::Planted::ImpureLeaf),
    (every_wait_ends::NAME, crate::sim::Planted::LostFrames),
];

/// An invariant that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Its name: that of its file.
    pub invariant: &'static str,
    /// What was seen.
    pub seen: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.invariant, self.seen)
    }
}
