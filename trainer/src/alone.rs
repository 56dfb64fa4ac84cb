//! The reference run: all virtual ranks in one process, folded by the canonical tree.
//!
//! Whatever a fleet does with members coming and going, it must end with this state. Tests compare digests with it; it knows
//! nothing of the runtime on purpose.

use types::{TreeNode, VirtualRank, VirtualRanks};

use crate::{AdamW, Applied, Corpus, Leaf, Model, ModelError, TrainState, TrainerConfig};

/// Trains `config.steps` steps without any runtime.
///
/// # Errors
/// If the configuration is not valid or candle fails.
pub fn train_alone(
    config: &TrainerConfig,
    corpus: &Corpus,
    virtual_ranks: VirtualRanks,
) -> Result<Outcome, ModelError> {
    let model = Model::new(config)?;
    let optimizer = AdamW::new(config);
    let sampler = corpus.sampler(config, virtual_ranks)?;
    let mut state = TrainState::new(config, &model);
    let mut outcome = Vec::new();
    for _ in 0..config.steps {
        let mut leaf = |virtual_rank: VirtualRank| {
            let batch = corpus.batch(config, &sampler, state.applied(), virtual_rank);
            model.loss_and_gradients(state.parameters(), &batch)
        };
        let mut sum = fold(virtual_ranks.root(), virtual_ranks, &mut leaf)?;
        let count = virtual_ranks.count() as f32;
        sum.gradients.iter_mut().for_each(|gradient| *gradient /= count);
        outcome.push((sum.loss / count, optimizer.apply(&mut state, &sum.gradients)));
    }
    let (losses, applied) = outcome.into_iter().unzip();
    Ok(Outcome { losses, applied, state })
}

/// What a reference run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The mean loss of each step, before it was applied.
    pub losses: Vec<f32>,
    /// What the optimizer did in each step.
    pub applied: Vec<Applied>,
    /// The state at the end.
    pub state: TrainState,
}

/// The value of `node`: left child + right child. At most one sum per level of the tree is held at a time.
fn fold(
    node: TreeNode,
    virtual_ranks: VirtualRanks,
    leaf: &mut impl FnMut(VirtualRank) -> Result<Leaf, ModelError>,
) -> Result<Leaf, ModelError> {
    let node = node.canonical(virtual_ranks);
    let Some((left, right)) = node.children() else { return leaf(VirtualRank(node.start())) };
    let mut sum = fold(left, virtual_ranks, leaf)?;
    let right = fold(right, virtual_ranks, leaf)?;
    sum.loss += right.loss;
    for (value, other) in sum.gradients.iter_mut().zip(&right.gradients) {
        *value += other;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sampling, generate};

    fn tiny() -> TrainerConfig {
        TrainerConfig {
            steps: 30,
            layers: 1,
            width: 32,
            heads: 2,
            context: 32,
            batch: 4,
            ..TrainerConfig::default()
        }
    }

    #[test]
    fn the_loss_falls_on_the_bundled_text() {
        let config = TrainerConfig { learning_rate: 1e-2, warmup: 3, ..tiny() };
        let corpus = Corpus::load(&config).unwrap();
        let outcome = train_alone(&config, &corpus, VirtualRanks::new(4).unwrap()).unwrap();
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        let (first, last) = (mean(&outcome.losses[..3]), mean(&outcome.losses[27..]));
        assert!(first > 4.5 && last < first - 1.5, "from {first} to {last}");
        assert!(outcome.applied.iter().all(|applied| !applied.skipped));
        assert_eq!(outcome.state.applied().0, 30);
        let model = Model::new(&config).unwrap();
        let sampling = Sampling { bytes: 20, temperature: 0.8, seed: 1 };
        assert_eq!(
            generate(&model, outcome.state.parameters(), b"the ", sampling).unwrap().len(),
            20
        );
    }

    #[test]
    fn a_run_is_decided_by_its_configuration() {
        let config = TrainerConfig { steps: 3, ..tiny() };
        let corpus = Corpus::load(&config).unwrap();
        let digest = |config: &TrainerConfig, virtual_ranks| {
            train_alone(config, &corpus, VirtualRanks::new(virtual_ranks).unwrap())
                .unwrap()
                .state
                .digest()
        };
        assert_eq!(digest(&config, 5), digest(&config, 5));
        assert_ne!(digest(&config, 5), digest(&config, 4));
        assert_ne!(digest(&config, 5), digest(&TrainerConfig { seed: 2, ..config.clone() }, 5));
    }

    #[test]
    fn the_fold_follows_the_canonical_tree() {
        let value = |rank: VirtualRank| 0.1f32 * (rank.0 + 1) as f32;
        let mut leaf = |rank| Ok(Leaf { loss: value(rank), gradients: vec![value(rank); 2] });
        let v = VirtualRanks::new(5).unwrap();
        let sum = fold(v.root(), v, &mut leaf).unwrap();
        let x: Vec<f32> = v.iter().map(value).collect();
        let expected = ((x[0] + x[1]) + (x[2] + x[3])) + x[4];
        assert_eq!(sum, Leaf { loss: expected, gradients: vec![expected; 2] });
    }
}
