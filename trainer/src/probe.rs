//! A numeric probe, taken when a member joins.
//!
//! Two CPUs may give other bits for the same sum: one has FMA, one sums in wider vectors, one splits a long product to fit its
//! cache, one has another libm. The probe makes such differences visible before they cost a run: it is one fixed leaf at the
//! job's own shapes (cache splits depend on them), two updates of the optimizer, and points of the schedule.

use types::Digest;

use crate::data::Batch;
use crate::{AdamW, Model, ModelError, Purpose, Random, TrainState, TrainerConfig};

/// The digest of a fixed computation on this machine: members with different digests would not stay equal. The time is
/// that of two leaves.
///
/// # Errors
/// If the configuration is not valid or candle fails.
pub fn probe_digest(config: &TrainerConfig) -> Result<Digest, ModelError> {
    let model = Model::new(config)?;
    let optimizer = AdamW::new(config);
    let mut state = TrainState::new(config, &model);
    let mut random =
        Random::new(PROBE_SEED, Purpose::Samples, types::Step(0), types::VirtualRank(0));
    let mut hasher = blake3::Hasher::new();
    for _ in 0..2 {
        let mut draw =
            || (0..config.batch * config.context).map(|_| random.next_u64() as u8).collect();
        let batch = Batch { inputs: draw(), targets: draw(), context: config.context };
        let leaf = model.loss_and_gradients(state.parameters(), &batch)?;
        optimizer.apply(&mut state, &leaf.gradients);
        hasher.update(&leaf.loss.to_le_bytes());
        hasher.update(bytemuck::cast_slice(&leaf.gradients));
    }
    for part in 0..=SCHEDULE_POINTS {
        let step = config.steps / SCHEDULE_POINTS * part;
        hasher.update(&optimizer.learning_rate(step).to_le_bytes());
    }
    hasher.update(&state.digest().0);
    Ok(hasher.finalize().into())
}

/// Any fixed number: the probe's samples have nothing to do with the run's.
const PROBE_SEED: u64 = 0x5eed;
/// Enough of them that two cosines which differ anywhere likely differ here.
const SCHEDULE_POINTS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_gives_the_same_digest_each_time() {
        let config = TrainerConfig {
            layers: 1,
            width: 16,
            heads: 2,
            context: 8,
            ..TrainerConfig::default()
        };
        assert_eq!(probe_digest(&config).unwrap(), probe_digest(&config).unwrap());
        let wide = TrainerConfig { width: 32, ..config };
        assert_ne!(
            probe_digest(&wide).unwrap(),
            probe_digest(&TrainerConfig { heads: 4, ..wide }).unwrap()
        );
    }
}
