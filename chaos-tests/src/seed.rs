//! One seed decides everything: named streams of chance, so that a draw in one place does not shift the others.

/// A small generator of numbers (SplitMix64): the same for one seed, for ever.
#[derive(Clone, Debug)]
pub struct Rng(pub(crate) u64);

impl Rng {
    /// The stream `name` of a seed.
    #[must_use]
    pub fn stream(seed: u64, name: &str) -> Self {
        let name = name.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Self(mix(seed ^ name))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// A number from `low` to `high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True in `chance` of 100 cases.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.below(of.len() as u64) as usize])
    }
}

pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
