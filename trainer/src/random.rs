//! Chance as a pure function.
//!
//! A stream is named by (seed, purpose, step, virtual rank): who computes a leaf, and when, never matters. The generator is
//! SplitMix64 in counter form: one mixing of key + counter per number. No libm is used, so all machines draw the same bits.

use types::{Step, VirtualRank};

/// One stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    key: u64,
    counter: u64,
}

impl Random {
    /// The stream of this purpose, step and virtual rank.
    #[must_use]
    pub fn new(seed: u64, purpose: Purpose, step: Step, virtual_rank: VirtualRank) -> Self {
        let parts = [purpose as u64, step.0, u64::from(virtual_rank.0)];
        let key = parts
            .into_iter()
            .fold(mix(seed), |key, part| mix(key ^ mix(part.wrapping_add(GOLDEN))));
        Self { key, counter: 0 }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.counter = self.counter.wrapping_add(1);
        mix(self.key.wrapping_add(self.counter.wrapping_mul(GOLDEN)))
    }

    /// A number below `bound`. Its bias is below bound / 2^64: nothing for samples.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "no number is below 0");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [0, 1), exact in 24 bits.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
    }
}

/// What random numbers are for; each purpose has streams of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The first parameters.
    Parameters = 1,
    /// Which samples a leaf takes.
    Samples = 2,
    /// The text that the model writes.
    Text = 3,
}

/// SplitMix64's output function (Steele, Lea and Flood, 2014): every input bit changes every output bit.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// 2^64 divided by the golden ratio, odd: the increment that SplitMix64 uses.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_stream_is_decided_by_its_name() {
        let draw = |seed, purpose, step, virtual_rank| {
            Random::new(seed, purpose, Step(step), VirtualRank(virtual_rank)).next_u64()
        };
        assert_eq!(draw(1, Purpose::Samples, 2, 3), draw(1, Purpose::Samples, 2, 3));
        let mut seen = BTreeSet::new();
        for purpose in [Purpose::Parameters, Purpose::Samples, Purpose::Text] {
            for seed in 0..4 {
                for step in 0..4 {
                    for virtual_rank in 0..4 {
                        assert!(seen.insert(draw(seed, purpose, step, virtual_rank)));
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_numbers_never_change() {
        let mut random = Random::new(1, Purpose::Samples, Step(0), VirtualRank(0));
        let first = [random.next_u64(), random.next_u64()];
        assert_eq!(
            first,
            [0x74708f197cab5351, 0xd06de175f2de5dc5],
            "stored runs could not be replayed any more"
        );
    }

    #[test]
    fn numbers_stay_in_bounds_and_fill_them() {
        let mut random = Random::new(9, Purpose::Text, Step(0), VirtualRank(0));
        let mut hits = [0u32; 7];
        let mut sum = 0.0;
        for _ in 0..7000 {
            hits[random.below(7) as usize] += 1;
            let unit = random.unit();
            assert!((0.0..1.0).contains(&unit));
            sum += f64::from(unit);
        }
        assert!(hits.iter().all(|&n| (800..1200).contains(&n)), "{hits:?}");
        assert!((sum / 7000.0 - 0.5).abs() < 0.02);
    }
}
