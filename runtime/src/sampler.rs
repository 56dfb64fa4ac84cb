//! Which samples a virtual rank uses, and its random numbers: pure functions of (seed, step, virtual rank), never of who is alive.

use types::{Step, VirtualRank, VirtualRanks};

/// Deals `samples` samples to virtual ranks, `per_rank` each step; each epoch uses every sample at most once, in its own order.
///
/// The order of an epoch is a permutation computed on the spot (a Feistel network over the index, walked until it lands inside), so that no
/// list of indices is kept, and any step can be asked for without the ones before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampler {
    seed: u64,
    samples: u64,
    per_rank: u64,
    virtual_ranks: VirtualRanks,
}

impl Sampler {
    /// `None` if an epoch would not give every virtual rank its `per_rank` samples.
    #[must_use]
    pub fn new(
        seed: u64,
        samples: u64,
        per_rank: u64,
        virtual_ranks: VirtualRanks,
    ) -> Option<Self> {
        let per_step = per_rank.checked_mul(u64::from(virtual_ranks.count()))?;
        (per_step > 0 && samples >= per_step).then_some(Self {
            seed,
            samples,
            per_rank,
            virtual_ranks,
        })
    }

    /// Steps until every sample was dealt once (but for a remainder smaller than one step, which that epoch leaves out).
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.samples / self.per_step()
    }

    /// The samples of one virtual rank in one step.
    pub fn batch(&self, step: Step, rank: VirtualRank) -> impl Iterator<Item = u64> + use<> {
        let sampler = *self;
        let epoch = step.0 / self.steps_per_epoch();
        let place =
            step.0 % self.steps_per_epoch() * self.per_step() + u64::from(rank.0) * self.per_rank;
        (place..place + self.per_rank).map(move |index| sampler.permuted(epoch, index))
    }

    fn per_step(&self) -> u64 {
        self.per_rank * u64::from(self.virtual_ranks.count())
    }

    fn permuted(&self, epoch: u64, index: u64) -> u64 {
        let half_bits = (64 - (self.samples.max(2) - 1).leading_zeros()).div_ceil(2);
        let mask = (1u64 << half_bits) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> half_bits, value & mask);
            for round in 0..4u64 {
                let mixed = mix(mix(self.seed ^ mix(epoch)) ^ (round << 60) ^ right);
                (left, right) = (right, left ^ (mixed & mask));
            }
            value = (left << half_bits) | right;
            if value < self.samples {
                return value;
            }
        }
    }
}

/// A seed for the random numbers of one leaf and one purpose (dropout, augmentation …).
#[must_use]
pub fn leaf_seed(seed: u64, step: Step, rank: VirtualRank, purpose: u64) -> u64 {
    mix(mix(mix(mix(seed) ^ step.0) ^ u64::from(rank.0)) ^ purpose)
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn an_epoch_deals_each_sample_at_most_once(seed: u64, v in 1u32..9, per_rank in 1u64..4, extra in 0u64..50) {
            let v = VirtualRanks::new(v).unwrap();
            let samples = u64::from(v.count()) * per_rank * 3 + extra;
            let sampler = Sampler::new(seed, samples, per_rank, v).unwrap();
            for epoch in 0..2 {
                let mut seen = BTreeSet::new();
                for step in 0..sampler.steps_per_epoch() {
                    for rank in v.iter() {
                        for sample in sampler.batch(Step(epoch * sampler.steps_per_epoch() + step), rank) {
                            prop_assert!(sample < samples);
                            prop_assert!(seen.insert(sample), "sample {} twice", sample);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn leaves_have_their_own_random_numbers() {
        let seeds: BTreeSet<u64> = (0..100)
            .flat_map(|s| (0..8).map(move |r| leaf_seed(7, Step(s), VirtualRank(r), 0)))
            .collect();
        assert_eq!(seeds.len(), 800);
    }
}
