//! The model's tensors: names, shapes, order, and their place in one flat array.
//!
//! The order is part of what a job's members must agree on: gradients travel as one flat array in this order.

use std::collections::BTreeMap;
use std::ops::Range;

use types::Digest;

use crate::TrainerConfig;

/// All tensors of a model in their fixed order.
#[derive(Clone, PartialEq, Debug)]
pub struct Layout {
    // Invariant: the ranges tile 0..values in order, and `index` has each name once.
    tensors: Vec<TensorSpec>,
    index: BTreeMap<String, usize>,
    values: usize,
}

impl Layout {
    /// The tensors of the model that `config` describes.
    #[must_use]
    pub fn new(config: &TrainerConfig) -> Self {
        let mut layout = Self { tensors: Vec::new(), index: BTreeMap::new(), values: 0 };
        let (width, hidden) = (config.width, MLP_FACTOR * config.width);
        let inner = spread(1, width);
        // The residual stream is a sum over layers: what writes to it starts smaller, so that the sum starts at one size.
        let outer = |inputs| spread(2 * config.layers, inputs);
        layout.push("embedding.token", &[VOCABULARY, width], Initial::Uniform(EMBEDDING_SPREAD));
        layout.push(
            "embedding.position",
            &[config.context, width],
            Initial::Uniform(EMBEDDING_SPREAD),
        );
        for layer in 0..config.layers {
            let mut push = |name: &str, shape: &[usize], initial| {
                layout.push(&format!("layers.{layer}.{name}"), shape, initial);
            };
            push("attention_norm.gain", &[width], Initial::One);
            push("attention_norm.bias", &[width], Initial::Zero);
            // No biases here: a key's bias shifts all scores of a query alike, so its gradient would be nothing but rounding.
            for name in ["query", "key", "value"] {
                push(&format!("attention.{name}.weight"), &[width, width], inner);
            }
            push("attention.output.weight", &[width, width], outer(width));
            push("attention.output.bias", &[width], Initial::Zero);
            push("mlp_norm.gain", &[width], Initial::One);
            push("mlp_norm.bias", &[width], Initial::Zero);
            push("mlp.up.weight", &[width, hidden], inner);
            push("mlp.up.bias", &[hidden], Initial::Zero);
            push("mlp.down.weight", &[hidden, width], outer(hidden));
            push("mlp.down.bias", &[width], Initial::Zero);
        }
        layout.push("final_norm.gain", &[width], Initial::One);
        layout.push("final_norm.bias", &[width], Initial::Zero);
        layout.push("output.weight", &[width, VOCABULARY], spread(4, width));
        layout
    }

    /// The tensors in order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorSpec> {
        self.position(name).map(|place| &self.tensors[place])
    }

    /// How many numbers all tensors have together.
    #[must_use]
    pub fn values(&self) -> usize {
        self.values
    }

    /// The digest of all names and shapes in order.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for tensor in &self.tensors {
            hasher.update(format!("{} {:?}\n", tensor.name, tensor.shape).as_bytes());
        }
        hasher.finalize().into()
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    fn push(&mut self, name: &str, shape: &[usize], initial: Initial) {
        let end = self.values + shape.iter().product::<usize>();
        let spec = TensorSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            range: self.values..end,
            initial,
        };
        self.index.insert(spec.name.clone(), self.tensors.len());
        self.tensors.push(spec);
        self.values = end;
    }
}

/// One tensor of the model.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorSpec {
    name: String,
    shape: Vec<usize>,
    range: Range<usize>,
    initial: Initial,
}

impl TensorSpec {
    /// Its name, like `layers.0.mlp.up.weight`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Where it lies in the flat array.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether weight decay applies: to matrices, not to gains and biases.
    #[must_use]
    pub fn is_decayed(&self) -> bool {
        self.shape.len() > 1
    }

    pub(crate) fn initial(&self) -> Initial {
        self.initial
    }
}

/// What a tensor holds at step 0.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Initial {
    Zero,
    One,
    /// Evenly spread in [-x, x).
    Uniform(f32),
}

/// The spread with which a product over `inputs` keeps the size of its input, divided by sqrt(`terms`).
fn spread(terms: usize, inputs: usize) -> Initial {
    // An even spread in [-x, x) has the variance x^2 / 3. sqrt is exact in IEEE arithmetic: all machines start alike.
    Initial::Uniform((3.0 / (terms * inputs) as f64).sqrt() as f32)
}

/// One token per byte.
pub(crate) const VOCABULARY: usize = 256;
/// How much wider than the model the MLP's inside is; 4 as in the first transformers.
const MLP_FACTOR: usize = 4;
/// A standard deviation of 0.1 for each of the two embeddings.
const EMBEDDING_SPREAD: f32 = 0.173;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tensors_tile_the_flat_array() {
        let layout = Layout::new(&TrainerConfig::default());
        let mut end = 0;
        for tensor in layout.tensors() {
            assert_eq!(tensor.range().start, end, "{}", tensor.name());
            assert_eq!(tensor.range().len(), tensor.shape().iter().product::<usize>());
            assert_eq!(layout.tensor(tensor.name()), Some(tensor));
            end = tensor.range().end;
        }
        assert_eq!(end, layout.values());
        assert!((100_000..300_000).contains(&end), "{end} parameters");
        assert_eq!(layout.tensor("no.such"), None);
    }

    #[test]
    fn another_shape_gives_another_digest() {
        let narrow = TrainerConfig { width: 32, ..TrainerConfig::default() };
        assert_ne!(Layout::new(&narrow).digest(), Layout::new(&TrainerConfig::default()).digest());
    }
}
