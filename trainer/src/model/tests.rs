use super::*;

fn tiny() -> (Model, Vec<f32>, Batch) {
    let config = TrainerConfig {
        layers: 2,
        width: 8,
        heads: 2,
        context: 6,
        batch: 2,
        seed: 3,
        ..TrainerConfig::default()
    };
    let model = Model::new(&config).unwrap();
    // Away from the first parameters, where biases are zero and gains one: a wrong gradient could hide there.
    let mut random = Random::new(11, Purpose::Parameters, Step(1), VirtualRank(0));
    let parameters =
        model.initial_parameters().iter().map(|p| p + 0.3 * (random.unit() - 0.5)).collect();
    let batch =
        Batch { inputs: b"the sesum of".to_vec(), targets: b"he seaum of ".to_vec(), context: 6 };
    (model, parameters, batch)
}

/// The slope of the loss at `parameters` along `direction` in one tensor, by a central difference.
fn slope(
    model: &Model,
    parameters: &[f32],
    batch: &Batch,
    spec: &crate::TensorSpec,
    direction: &[f32],
) -> f64 {
    let reach = 1e-2;
    let at = |sign: f32| {
        let mut moved = parameters.to_vec();
        for (value, part) in moved[spec.range()].iter_mut().zip(direction) {
            *value += sign * reach * part;
        }
        f64::from(model.loss(&moved, batch).unwrap())
    };
    (at(1.0) - at(-1.0)) / f64::from(2.0 * reach)
}

fn unit(direction: &[f32]) -> Vec<f32> {
    let length = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
    direction.iter().map(|x| x / length).collect()
}

fn dot(left: &[f32], right: &[f32]) -> f64 {
    left.iter().zip(right).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn every_gradient_agrees_with_finite_differences() {
    let (model, parameters, batch) = tiny();
    let leaf = model.loss_and_gradients(&parameters, &batch).unwrap();
    assert_eq!(leaf.gradients.len(), model.layout().values());
    let mut random = Random::new(5, Purpose::Parameters, Step(2), VirtualRank(0));
    for spec in model.layout().tensors() {
        let gradient = &leaf.gradients[spec.range()];
        assert!(gradient.iter().any(|g| *g != 0.0), "{} has no gradient", spec.name());
        let length = dot(gradient, gradient).sqrt();
        // Along the gradient the slope is its length; along others it is the part that lies in that direction.
        let mut directions = vec![unit(gradient)];
        for _ in 0..3 {
            directions
                .push(unit(&gradient.iter().map(|_| random.unit() - 0.5).collect::<Vec<_>>()));
        }
        for direction in directions {
            let (expected, found) =
                (dot(gradient, &direction), slope(&model, &parameters, &batch, spec, &direction));
            let tolerance = 0.01 * length + 1e-4;
            assert!(
                (expected - found).abs() < tolerance,
                "{}: gradient {expected}, slope {found}",
                spec.name()
            );
        }
        assert!(
            length > 1e-3,
            "{}: a gradient of length {length} is not tested by this",
            spec.name()
        );
    }
}

#[test]
fn a_leaf_is_the_same_bits_each_time() {
    let (model, parameters, batch) = tiny();
    let first = model.loss_and_gradients(&parameters, &batch).unwrap();
    let again = model.loss_and_gradients(&parameters, &batch).unwrap();
    assert_eq!(first, again);
    assert_eq!(first.loss, model.loss(&parameters, &batch).unwrap());
}

#[test]
fn an_untrained_model_guesses_evenly() {
    let config = TrainerConfig { batch: 16, ..TrainerConfig::default() };
    let model = Model::new(&config).unwrap();
    let corpus = crate::Corpus::load(&config).unwrap();
    let sampler = corpus.sampler(&config, types::VirtualRanks::new(1).unwrap()).unwrap();
    let batch = corpus.batch(&config, &sampler, Step(0), VirtualRank(0));
    let loss = model.loss(&model.initial_parameters(), &batch).unwrap();
    assert!((loss - 256f32.ln()).abs() < 0.7, "{loss}");
}

#[test]
fn a_byte_never_sees_what_follows_it() {
    let (model, parameters, _) = tiny();
    let constants = model.constants(&parameters).unwrap();
    let weights = Weights { layout: model.layout(), tensors: constants.iter().collect() };
    let rows = |text: &[u8]| model.forward(&weights, text, 6).unwrap().to_vec2::<f32>().unwrap();
    let (left, right) = (rows(b"abcdef"), rows(b"abcxyz"));
    assert_eq!(left[..3], right[..3]);
    assert_ne!(left[3], right[3]);
}

#[test]
fn the_seed_decides_the_first_parameters() {
    let of = |seed| {
        Model::new(&TrainerConfig { seed, ..TrainerConfig::default() })
            .unwrap()
            .initial_parameters()
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn a_wrong_configuration_makes_no_model() {
    let error = Model::new(&TrainerConfig { heads: 5, ..TrainerConfig::default() }).unwrap_err();
    assert!(error.to_string().contains("--width 64 is no multiple of --heads 5"), "{error}");
}
