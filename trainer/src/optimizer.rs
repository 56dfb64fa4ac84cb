//! AdamW with gradient clipping and a schedule.
//!
//! All of it is a pure function of (state, mean gradient): one thread, one fixed order, no libm but the schedule's cosine. So
//! members that start equal and see the same mean stay equal, bit by bit.

use crate::state::Update;
use crate::{TrainState, TrainerConfig};

/// The optimizer's settings. Its moments are part of [`TrainState`].
#[derive(Clone, PartialEq, Debug)]
pub struct AdamW {
    learning_rate: f64,
    warmup: u64,
    steps: u64,
    weight_decay: f64,
    clip: f64,
}

impl AdamW {
    /// The optimizer that `config` describes.
    #[must_use]
    pub fn new(config: &TrainerConfig) -> Self {
        Self {
            learning_rate: config.learning_rate,
            warmup: config.warmup,
            steps: config.steps,
            weight_decay: config.weight_decay,
            clip: config.clip,
        }
    }

    /// Applies the mean gradient of one step. A gradient that is not finite changes nothing, and the step counts as applied.
    ///
    /// # Panics
    /// If `mean` has not the length of the state's layout.
    pub fn apply(&self, state: &mut TrainState, mean: &[f32]) -> Applied {
        assert_eq!(mean.len(), state.layout().values(), "the gradient is another model's");
        let learning_rate = self.learning_rate(state.applied().0);
        // The sum of squares of finite f32 can't overflow in f64: it is finite just when all of them are.
        let norm = mean.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
        if !norm.is_finite() {
            state.skip();
            return Applied { norm, learning_rate, skipped: true };
        }
        let scale =
            if self.clip > 0.0 && norm > self.clip { (self.clip / norm) as f32 } else { 1.0 };
        self.change(state.update(), mean, scale, learning_rate);
        Applied { norm, learning_rate, skipped: false }
    }

    /// The learning rate of step number `step`: it rises in a line over the warmup and falls along a cosine to a tenth at the
    /// last step, and stays there.
    #[must_use]
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.learning_rate * ((step + 1) as f64 / self.warmup as f64);
        }
        let length = self.steps.saturating_sub(self.warmup).max(1);
        let way = ((step - self.warmup) as f64 / length as f64).min(1.0);
        let fall = 0.5 * (1.0 + (std::f64::consts::PI * way).cos());
        self.learning_rate * (LAST_PART + (1.0 - LAST_PART) * fall)
    }

    fn change(&self, update: Update<'_>, mean: &[f32], scale: f32, learning_rate: f64) {
        let rate = learning_rate as f32;
        let first_part = (1.0 - power(f64::from(BETA_1), update.updates)) as f32;
        let second_part = (1.0 - power(f64::from(BETA_2), update.updates)) as f32;
        for tensor in update.tensors {
            let keep = if tensor.is_decayed() {
                1.0 - (learning_rate * self.weight_decay) as f32
            } else {
                1.0
            };
            for place in tensor.range() {
                let gradient = mean[place] * scale;
                let first = BETA_1 * update.first_moment[place] + (1.0 - BETA_1) * gradient;
                let second =
                    BETA_2 * update.second_moment[place] + (1.0 - BETA_2) * (gradient * gradient);
                let direction = (first / first_part) / ((second / second_part).sqrt() + EPSILON);
                update.first_moment[place] = first;
                update.second_moment[place] = second;
                update.parameters[place] = update.parameters[place] * keep - rate * direction;
            }
        }
    }
}

/// What a step did.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Applied {
    /// Length of the mean gradient before clipping.
    pub norm: f64,
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// Whether the gradient was not finite, so that nothing changed.
    pub skipped: bool,
}

/// `base` to the power of `exponent` by squaring: `powi` may give other bits with another compiler.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

/// The usual values of Adam; 0.95 as for short runs with small batches.
const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.95;
const EPSILON: f32 = 1e-8;
/// The part of the highest learning rate that is left at the end.
const LAST_PART: f64 = 0.1;

#[cfg(test)]
mod tests {
    use types::Step;

    use super::*;
    use crate::Model;

    fn start() -> (TrainerConfig, TrainState) {
        let config =
            TrainerConfig { width: 8, heads: 2, context: 4, warmup: 0, ..TrainerConfig::default() };
        let state = TrainState::new(&config, &Model::new(&config).unwrap());
        (config, state)
    }

    #[test]
    fn the_first_update_goes_one_learning_rate_against_the_gradient() {
        let (config, mut state) = start();
        let before = state.parameters().to_vec();
        let mut mean = vec![0.0; before.len()];
        let gain = state.layout().tensor("final_norm.gain").unwrap().range();
        mean[gain.start] = 0.5;
        let applied = AdamW::new(&config).apply(&mut state, &mean);
        assert_eq!((applied.norm, applied.skipped), (0.5, false));
        assert!((before[gain.start] - state.parameters()[gain.start] - 3e-3).abs() < 1e-6);
        assert_eq!(before[gain.start + 1], state.parameters()[gain.start + 1]);
        let decayed = before[0] * (1.0 - 3e-5);
        assert!((state.parameters()[0] - decayed).abs() < 1e-7);
    }

    #[test]
    fn a_long_gradient_is_clipped() {
        let (config, state) = start();
        let mean = |size: f32| vec![size; state.parameters().len()];
        // Adam forgets the scale of a single gradient, so the second moment is what shows it.
        let second = |config: &TrainerConfig, size| {
            let mut state = state.clone();
            let applied = AdamW::new(config).apply(&mut state, &mean(size));
            let squares =
                state.tensors().find(|t| t.name == "optimizer.exp_avg_sq.embedding.token").unwrap();
            (applied.norm, f32::from_le_bytes(squares.bytes[..4].try_into().unwrap()))
        };
        let (short_norm, _) = second(&config, 1e-4);
        assert!(short_norm < 1.0);
        let (norm, clipped) = second(&config, 3.0);
        let expected = 0.05 * (3.0 / norm).powi(2);
        assert!((f64::from(clipped) / expected - 1.0).abs() < 1e-4);
        let (_, free) = second(&TrainerConfig { clip: 0.0, ..config }, 3.0);
        assert!((f64::from(free) / (0.05 * 9.0) - 1.0).abs() < 1e-4);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_skipped_and_counted() {
        let (config, mut state) = start();
        let before = state.parameters().to_vec();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut mean = vec![0.1; before.len()];
            mean[5] = bad;
            assert!(AdamW::new(&config).apply(&mut state, &mean).skipped);
        }
        assert_eq!((state.applied(), state.updates()), (Step(2), 0));
        assert_eq!(state.parameters(), before);
    }

    #[test]
    fn the_learning_rate_rises_and_falls_to_a_tenth() {
        let config = TrainerConfig {
            steps: 100,
            warmup: 10,
            learning_rate: 1.0,
            ..TrainerConfig::default()
        };
        let optimizer = AdamW::new(&config);
        let rates: Vec<f64> = (0..101).map(|step| optimizer.learning_rate(step)).collect();
        assert_eq!((rates[0], rates[9], rates[10]), (0.1, 1.0, 1.0));
        assert!(rates[10..].windows(2).all(|pair| pair[0] > pair[1]));
        assert!((rates[55] - 0.55).abs() < 1e-12 && (rates[100] - 0.1).abs() < 1e-12);
        assert_eq!(optimizer.learning_rate(1_000_000), rates[100]);
        let flat = AdamW::new(&TrainerConfig { steps: 5, warmup: 50, ..config });
        assert!(flat.learning_rate(49) <= 1.0 && flat.learning_rate(60).is_finite());
    }

    #[test]
    fn powers_are_right() {
        for exponent in [0, 1, 2, 7, 200, 1_000_000] {
            let expected = 0.95f64.powf(exponent as f64);
            assert!((power(0.95, exponent) - expected).abs() <= 1e-12 * expected, "{exponent}");
        }
    }
}
