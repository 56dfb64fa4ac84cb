//! Election timeouts from a seed, in place of the raft core's own, which are drawn from the thread's generator.

use super::ConsensusConfig;

/// The election timeout that holds until term, leader or role change, or a campaign got no majority.
pub(super) struct PinnedTimeout {
    state: u64,
    min: usize,
    max: usize,
    pub(super) ticks: usize,
    pub(super) drawn_for: (u64, u64, bool),
}

impl PinnedTimeout {
    pub(super) fn new(config: &ConsensusConfig) -> Self {
        let (min, max) = (config.election_ticks, config.election_ticks_max());
        let mut timeout = Self {
            state: config.seed ^ config.id.rotate_left(32),
            min,
            max,
            ticks: max,
            drawn_for: (0, 0, false),
        };
        timeout.draw((0, 0, false));
        timeout
    }

    pub(super) fn draw(&mut self, drawn_for: (u64, u64, bool)) {
        // SplitMix64: a counter and a mixer, enough to keep coordinators apart.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let span = (self.max - self.min + 1) as u64;
        self.ticks = self.min + usize::try_from(mixed % span).expect("less than the span");
        self.drawn_for = drawn_for;
    }
}
