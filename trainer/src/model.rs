//! A small decoder-only transformer over bytes, and the gradient of its loss.
//!
//! Pre-norm, learned positions, causal attention, GELU. It holds no parameters: they come in as one flat array and the
//! gradients go out as one, in the order of [`Layout`]. Everything is composed of candle's primitive operations, because its
//! fused norms and softmax drop gradients without an error. All of candle stays in this file.

use std::error::Error;
use std::sync::Arc;

use candle_core::{D, Device, Tensor, Var};
use types::{Remedy, Step, VirtualRank};

use crate::layout::Initial;
use crate::{Batch, ConfigError, CorpusError, Layout, Purpose, Random, TrainerConfig};

/// The model: its shape, and what is constant in it.
#[derive(Clone, Debug)]
pub struct Model {
    layout: Arc<Layout>,
    layers: usize,
    width: usize,
    heads: usize,
    context: usize,
    seed: u64,
    /// 0 where a byte may look at another, -inf where that one comes later.
    mask: Tensor,
}

impl Model {
    /// The model that `config` describes.
    ///
    /// # Errors
    /// If the configuration is not valid.
    pub fn new(config: &TrainerConfig) -> Result<Self, ModelError> {
        config.validate()?;
        let context = config.context;
        let mask: Vec<f32> = (0..context * context)
            .map(|place| if place % context > place / context { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        Ok(Self {
            layout: Arc::new(Layout::new(config)),
            layers: config.layers,
            width: config.width,
            heads: config.heads,
            context,
            seed: config.seed,
            mask: Tensor::from_vec(mask, (context, context), &Device::Cpu)?,
        })
    }

    /// Names, shapes and order of the parameters.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// How many bytes the model sees at once.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// The parameters of step 0, a function of the seed.
    #[must_use]
    pub fn initial_parameters(&self) -> Vec<f32> {
        let mut random = Random::new(self.seed, Purpose::Parameters, Step(0), VirtualRank(0));
        let mut parameters = Vec::with_capacity(self.layout.values());
        for tensor in self.layout.tensors() {
            let mut draw = || match tensor.initial() {
                Initial::Zero => 0.0,
                Initial::One => 1.0,
                Initial::Uniform(reach) => (random.unit() * 2.0 - 1.0) * reach,
            };
            parameters.extend(tensor.range().map(|_| draw()));
        }
        parameters
    }

    /// One leaf: the mean loss over `batch` and its gradient, in the order of the layout.
    ///
    /// # Errors
    /// If candle fails; its message says why.
    ///
    /// # Panics
    /// If `parameters` has not the length of the layout.
    pub fn loss_and_gradients(
        &self,
        parameters: &[f32],
        batch: &Batch,
    ) -> Result<Leaf, ModelError> {
        let variables = self.variables(parameters)?;
        let weights = Weights {
            layout: &self.layout,
            tensors: variables.iter().map(Var::as_tensor).collect(),
        };
        let loss = self.forward_loss(&weights, batch)?;
        let store = loss.backward()?;
        let mut gradients = Vec::with_capacity(self.layout.values());
        for (variable, spec) in variables.iter().zip(self.layout.tensors()) {
            let gradient =
                store.get(variable).ok_or_else(|| format!("{} has no gradient", spec.name()))?;
            gradients.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(Leaf { loss: loss.to_scalar()?, gradients })
    }

    /// The mean loss over `batch` alone.
    ///
    /// # Errors
    /// If candle fails; its message says why.
    ///
    /// # Panics
    /// If `parameters` has not the length of the layout.
    pub fn loss(&self, parameters: &[f32], batch: &Batch) -> Result<f32, ModelError> {
        let constants = self.constants(parameters)?;
        let weights = Weights { layout: &self.layout, tensors: constants.iter().collect() };
        Ok(self.forward_loss(&weights, batch)?.to_scalar()?)
    }

    /// For the byte that follows `text` (1 to `context` bytes), a score per value: the higher, the likelier.
    ///
    /// # Errors
    /// If candle fails; its message says why.
    ///
    /// # Panics
    /// If `text` is empty or longer than the context, or `parameters` has not the length of the layout.
    pub fn scores(&self, parameters: &[f32], text: &[u8]) -> Result<Vec<f32>, ModelError> {
        assert!(
            !text.is_empty() && text.len() <= self.context,
            "{} bytes for a context of {}",
            text.len(),
            self.context
        );
        let constants = self.constants(parameters)?;
        let weights = Weights { layout: &self.layout, tensors: constants.iter().collect() };
        let scores = self.forward(&weights, text, text.len())?;
        Ok(scores.get(text.len() - 1)?.to_vec1::<f32>()?)
    }

    fn forward_loss(&self, weights: &Weights<'_>, batch: &Batch) -> candle_core::Result<Tensor> {
        let scores = self.forward(weights, &batch.inputs, batch.context)?;
        let targets = tokens(&batch.targets)?.unsqueeze(1)?;
        // Cross entropy: log of the sum of exp(score) minus the target's score, with the highest taken out against overflow.
        let shifted = scores.broadcast_sub(&scores.detach().max_keepdim(1)?)?;
        let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
        (log_sum - shifted.gather(&targets, 1)?)?.mean_all()
    }

    /// Scores for each of `inputs`, which are sequences of `length` bytes one after the other.
    fn forward(
        &self,
        weights: &Weights<'_>,
        inputs: &[u8],
        length: usize,
    ) -> candle_core::Result<Tensor> {
        let sequences = inputs.len() / length;
        let position = weights.get("embedding.position").narrow(0, 0, length)?;
        let mut stream = weights
            .get("embedding.token")
            .index_select(&tokens(inputs)?, 0)?
            .reshape((sequences, length, self.width))?
            .broadcast_add(&position)?
            .reshape((sequences * length, self.width))?;
        for layer in 0..self.layers {
            let weights = weights.of_layer(layer);
            let normed = norm(
                &stream,
                weights.get("attention_norm.gain"),
                weights.get("attention_norm.bias"),
            )?;
            stream = (stream + self.attention(&weights, &normed, length)?)?;
            let normed = norm(&stream, weights.get("mlp_norm.gain"), weights.get("mlp_norm.bias"))?;
            let inside = normed
                .matmul(weights.get("mlp.up.weight"))?
                .broadcast_add(weights.get("mlp.up.bias"))?;
            let outside = gelu(&inside)?.matmul(weights.get("mlp.down.weight"))?;
            stream = (stream + outside.broadcast_add(weights.get("mlp.down.bias"))?)?;
        }
        let normed = norm(&stream, weights.get("final_norm.gain"), weights.get("final_norm.bias"))?;
        normed.matmul(weights.get("output.weight"))
    }

    fn attention(
        &self,
        weights: &LayerWeights<'_>,
        input: &Tensor,
        length: usize,
    ) -> candle_core::Result<Tensor> {
        let sequences = input.dim(0)? / length;
        let head_width = self.width / self.heads;
        let project = |name: &str| {
            let all = input.matmul(weights.get(name))?;
            all.reshape((sequences, length, self.heads, head_width))?.transpose(1, 2)?.contiguous()
        };
        let query = (project("attention.query.weight")? * (1.0 / (head_width as f64).sqrt()))?;
        let key = project("attention.key.weight")?;
        let value = project("attention.value.weight")?;
        let mask = self.mask.narrow(0, 0, length)?.narrow(1, 0, length)?.contiguous()?;
        let scores = query.matmul(&key.transpose(2, 3)?)?.broadcast_add(&mask)?;
        let mixed = softmax(&scores)?.matmul(&value)?;
        let joined =
            mixed.transpose(1, 2)?.contiguous()?.reshape((sequences * length, self.width))?;
        joined
            .matmul(weights.get("attention.output.weight"))?
            .broadcast_add(weights.get("attention.output.bias"))
    }

    fn variables(&self, parameters: &[f32]) -> candle_core::Result<Vec<Var>> {
        self.constants(parameters)?.iter().map(Var::from_tensor).collect()
    }

    fn constants(&self, parameters: &[f32]) -> candle_core::Result<Vec<Tensor>> {
        assert_eq!(parameters.len(), self.layout.values(), "the parameters are another model's");
        let cut = self.layout.tensors().iter();
        cut.map(|spec| Tensor::from_slice(&parameters[spec.range()], spec.shape(), &Device::Cpu))
            .collect()
    }
}

/// What one virtual rank brings to a step.
#[derive(Clone, PartialEq, Debug)]
pub struct Leaf {
    /// Mean loss per byte, in nats.
    pub loss: f32,
    /// Its gradient, in the order of the layout.
    pub gradients: Vec<f32>,
}

/// Why the model gave no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The text is not enough.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The tensor library failed.
    #[error("the model could not be computed: {source}; this is a bug in the trainer, report it")]
    Compute {
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl ModelError {
    /// What to do: neither can heal by itself.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

impl From<candle_core::Error> for ModelError {
    fn from(source: candle_core::Error) -> Self {
        Self::Compute { source: Box::new(source) }
    }
}

impl From<String> for ModelError {
    fn from(reason: String) -> Self {
        Self::Compute { source: reason.into() }
    }
}

/// The parameters as tensors, found by name.
struct Weights<'a> {
    layout: &'a Layout,
    tensors: Vec<&'a Tensor>,
}

impl Weights<'_> {
    fn get(&self, name: &str) -> &Tensor {
        self.tensors
            [self.layout.position(name).expect("the model asks for the names of its own layout")]
    }

    fn of_layer(&self, layer: usize) -> LayerWeights<'_> {
        LayerWeights { weights: self, layer }
    }
}

struct LayerWeights<'a> {
    weights: &'a Weights<'a>,
    layer: usize,
}

impl LayerWeights<'_> {
    fn get(&self, name: &str) -> &Tensor {
        self.weights.get(&format!("layers.{}.{name}", self.layer))
    }
}

fn tokens(bytes: &[u8]) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = bytes.iter().copied().map(u32::from).collect();
    Tensor::from_vec(ids, bytes.len(), &Device::Cpu)
}

/// Layer norm over the last dimension.
fn norm(input: &Tensor, gain: &Tensor, bias: &Tensor) -> candle_core::Result<Tensor> {
    let centred = input.broadcast_sub(&input.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let scale = (variance + NORM_EPSILON)?.sqrt()?.recip()?;
    centred.broadcast_mul(&scale)?.broadcast_mul(gain)?.broadcast_add(bias)
}

fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    // The highest score only keeps exp in range; it cancels, so it needs no gradient.
    let powers = scores.broadcast_sub(&scores.detach().max_keepdim(D::Minus1)?)?.exp()?;
    powers.broadcast_mul(&powers.sum_keepdim(D::Minus1)?.recip()?)
}

/// GELU in its sigmoid form, x * sigmoid(1.702 x): on a CPU the tanh form costs three times as much.
fn gelu(input: &Tensor) -> candle_core::Result<Tensor> {
    (input * GELU_SCALE)?.silu()? * (1.0 / GELU_SCALE)
}

/// Keeps a norm of equal values finite; the usual value.
const NORM_EPSILON: f64 = 1e-5;
/// Where the sigmoid is nearest to the normal distribution's integral (Hendrycks and Gimpel, 2016).
const GELU_SCALE: f64 = 1.702;

#[cfg(test)]
mod tests;
