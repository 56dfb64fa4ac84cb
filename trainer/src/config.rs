//! What to train: the flags of the training program, their defaults and their limits.
//!
//! The virtual ranks are not here: they are the job's, so the runtime's.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use types::Remedy;

/// The settings of the training program. [`Self::validate`] must pass before they are used; `Model::new` asks it again.
#[derive(Clone, PartialEq, Debug, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[command(next_help_heading = "Training")]
pub struct TrainerConfig {
    /// Text to train on: a file, or a folder whose files are read in the order of their paths (default: the bundled text)
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Number of steps; the learning rate has decayed at the last one
    #[arg(long, value_name = "N", default_value_t = Self::default().steps)]
    pub steps: u64,
    /// Number of transformer layers
    #[arg(long, value_name = "N", default_value_t = Self::default().layers)]
    pub layers: usize,
    /// Width of the model; a multiple of --heads
    #[arg(long, value_name = "N", default_value_t = Self::default().width)]
    pub width: usize,
    /// Number of attention heads
    #[arg(long, value_name = "N", default_value_t = Self::default().heads)]
    pub heads: usize,
    /// How many bytes the model sees at once
    #[arg(long, value_name = "BYTES", default_value_t = Self::default().context)]
    pub context: usize,
    /// Sequences per virtual rank and step
    #[arg(long, value_name = "N", default_value_t = Self::default().batch)]
    pub batch: usize,
    /// Highest learning rate: too large and the loss jumps, too small and it stands still
    #[arg(long, value_name = "RATE", default_value_t = Self::default().learning_rate)]
    pub learning_rate: f64,
    /// Steps in which the learning rate rises to its highest
    #[arg(long, value_name = "STEPS", default_value_t = Self::default().warmup)]
    pub warmup: u64,
    /// Decay of weight matrices per unit of learning rate
    #[arg(long, value_name = "RATE", default_value_t = Self::default().weight_decay)]
    pub weight_decay: f64,
    /// Longest gradient: a longer one is scaled to this norm; 0 never scales
    #[arg(long, value_name = "NORM", default_value_t = Self::default().clip)]
    pub clip: f64,
    /// Decides the first parameters, the samples and the text written at the end
    #[arg(long, value_name = "N", default_value_t = Self::default().seed)]
    pub seed: u64,
    /// Makes every leaf wait this long in addition, as for a GPU
    #[arg(long, value_name = "MS", default_value_t = Self::default().leaf_ms)]
    pub leaf_ms: u64,
    /// The first worker that finds this file removes it and hangs for good in its leaf: to see what becomes of such a worker
    #[arg(long, value_name = "FILE", hide = true)]
    pub hang_file: Option<PathBuf>,
    /// While this file is there, workers wait between two steps, as for an evaluation
    #[arg(long, value_name = "FILE", hide = true)]
    pub pause_file: Option<PathBuf>,
    /// Length of the text that the model writes at the end
    #[arg(long, value_name = "BYTES", default_value_t = Self::default().sample_bytes)]
    pub sample_bytes: usize,
}

impl TrainerConfig {
    /// Checks all values and how they fit together.
    ///
    /// # Errors
    /// The first value that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let counts = [
            ("--steps", self.steps, STEPS_MAX),
            ("--layers", self.layers as u64, LAYERS_MAX),
            ("--width", self.width as u64, WIDTH_MAX),
            ("--heads", self.heads as u64, WIDTH_MAX),
            ("--context", self.context as u64, CONTEXT_MAX),
            ("--batch", self.batch as u64, BATCH_MAX),
        ];
        for (flag, value, max) in counts {
            if value == 0 || value > max {
                return Err(ConfigError::Count { flag, value, min: 1, max });
            }
        }
        let may_be_zero = [
            ("--warmup", self.warmup, STEPS_MAX),
            ("--leaf-ms", self.leaf_ms, LEAF_MS_MAX),
            ("--sample-bytes", self.sample_bytes as u64, SAMPLE_BYTES_MAX),
        ];
        for (flag, value, max) in may_be_zero {
            if value > max {
                return Err(ConfigError::Count { flag, value, min: 0, max });
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(ConfigError::Heads { width: self.width, heads: self.heads });
        }
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            return Err(ConfigError::Positive {
                flag: "--learning-rate",
                value: self.learning_rate,
            });
        }
        for (flag, value) in [("--weight-decay", self.weight_decay), ("--clip", self.clip)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(ConfigError::Negative { flag, value });
            }
        }
        Ok(())
    }

    /// How long a leaf waits on top of its computation.
    #[must_use]
    pub fn leaf_wait(&self) -> Duration {
        Duration::from_millis(self.leaf_ms)
    }

    /// Every setting that decides bits, by its flag: members that differ in one would not stay equal, and are told which. The data has a
    /// digest of its own; the waiting and the sample at the end change nothing.
    #[must_use]
    pub fn fingerprint(&self) -> [(&'static str, String); 11] {
        [
            ("--layers", self.layers.to_string()),
            ("--width", self.width.to_string()),
            ("--heads", self.heads.to_string()),
            ("--context", self.context.to_string()),
            ("--batch", self.batch.to_string()),
            ("--steps", self.steps.to_string()),
            ("--warmup", self.warmup.to_string()),
            ("--seed", self.seed.to_string()),
            ("--learning-rate", self.learning_rate.to_string()),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--clip", self.clip.to_string()),
        ]
    }
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            data: None,
            steps: 200,
            layers: 2,
            width: 64,
            heads: 4,
            context: 64,
            batch: 4,
            learning_rate: 3e-3,
            warmup: 10,
            weight_decay: 0.01,
            clip: 1.0,
            seed: 1,
            leaf_ms: 0,
            hang_file: None,
            pause_file: None,
            sample_bytes: 200,
        }
    }
}

/// Why a configuration was refused.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A number is out of its range.
    #[error("{flag} is {value}; give a number from {min} to {max}")]
    Count {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: u64,
        /// The least allowed.
        min: u64,
        /// The most allowed.
        max: u64,
    },
    /// The heads do not share the width evenly.
    #[error("--width {width} is no multiple of --heads {heads}; change one of them")]
    Heads {
        /// The width.
        width: usize,
        /// The heads.
        heads: usize,
    },
    /// A rate must be a number above zero.
    #[error("{flag} is {value}; give a number above 0")]
    Positive {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: f64,
    },
    /// A rate must not be below zero.
    #[error("{flag} is {value}; give 0 or a number above it")]
    Negative {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: f64,
    },
}

impl ConfigError {
    /// What to do: the configuration must change.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

/// A year of steps at 30 per second; beyond this a typing error is more likely.
const STEPS_MAX: u64 = 1_000_000_000;
/// The limits below keep a leaf's memory under some GiB each: the program is a demonstration on CPUs.
const LAYERS_MAX: u64 = 64;
const WIDTH_MAX: u64 = 2048;
const CONTEXT_MAX: u64 = 2048;
const BATCH_MAX: u64 = 1024;
/// An hour: longer than any leaf worth imitating.
const LEAF_MS_MAX: u64 = 3_600_000;
/// Each byte costs one forward pass.
const SAMPLE_BYTES_MAX: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        trainer: TrainerConfig,
    }

    fn parse(flags: &[&str]) -> TrainerConfig {
        Program::parse_from([&["program"], flags].concat()).trainer
    }

    #[test]
    fn no_flags_give_the_default_and_it_is_valid() {
        assert_eq!(parse(&[]), TrainerConfig::default());
        assert_eq!(TrainerConfig::default().validate(), Ok(()));
    }

    #[test]
    fn wrong_values_are_refused_with_the_flag_named() {
        let cases: [(&[&str], &str); 11] = [
            (&["--steps", "0"], "--steps is 0; give a number from 1"),
            (&["--layers", "0"], "--layers is 0"),
            (&["--layers", "65"], "from 1 to 64"),
            (&["--context", "0"], "--context is 0"),
            (&["--batch", "0"], "--batch is 0"),
            (&["--heads", "0"], "--heads is 0"),
            (&["--heads", "3"], "--width 64 is no multiple of --heads 3"),
            (&["--learning-rate", "0"], "--learning-rate is 0; give a number above 0"),
            (&["--learning-rate", "NaN"], "--learning-rate is NaN"),
            (&["--clip=-1"], "--clip is -1"),
            (&["--weight-decay", "inf"], "--weight-decay is inf"),
        ];
        for (flags, expected) in cases {
            let message = parse(flags).validate().unwrap_err().to_string();
            assert!(message.contains(expected), "{flags:?}: {message}");
        }
    }

    #[test]
    fn the_fingerprint_knows_what_decides_bits() {
        let base = parse(&[]).fingerprint();
        for flags in [
            ["--seed", "2"],
            ["--layers", "3"],
            ["--clip", "2"],
            ["--steps", "201"],
            ["--batch", "5"],
        ] {
            assert_ne!(parse(&flags).fingerprint(), base, "{flags:?}");
        }
        assert_eq!(
            parse(&["--leaf-ms", "5", "--sample-bytes", "9", "--data", "x"]).fingerprint(),
            base
        );
    }

    #[test]
    fn it_passes_through_json_and_unknown_keys_are_refused() {
        let config = parse(&["--data", "texts", "--width", "32"]);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<TrainerConfig>(&json).unwrap(), config);
        assert!(serde_json::from_str::<TrainerConfig>(r#"{"widht": 3}"#).is_err());
    }
}
