//! Lets the model write.

use types::{Step, VirtualRank};

use crate::{Model, ModelError, Purpose, Random};

/// Continues `prompt` by `sampling.bytes` bytes; only those are returned. The same (parameters, prompt, sampling) give the
/// same text.
///
/// # Errors
/// If candle fails; its message says why.
///
/// # Panics
/// If `parameters` has not the length of the model's layout.
pub fn generate(
    model: &Model,
    parameters: &[f32],
    prompt: &[u8],
    sampling: Sampling,
) -> Result<Vec<u8>, ModelError> {
    let mut random = Random::new(sampling.seed, Purpose::Text, Step(0), VirtualRank(0));
    let mut text = if prompt.is_empty() { b"\n".to_vec() } else { prompt.to_vec() };
    let start = text.len();
    for _ in 0..sampling.bytes {
        let seen = &text[text.len().saturating_sub(model.context())..];
        let scores = model.scores(parameters, seen)?;
        text.push(choose(&scores, sampling.temperature, random.unit()));
    }
    Ok(text.split_off(start))
}

/// How a text is drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// How many bytes to write.
    pub bytes: usize,
    /// 0 always takes the likeliest byte; 1 draws as the model thinks; between them it is more careful.
    pub temperature: f32,
    /// Decides the draws.
    pub seed: u64,
}

/// `text` for a terminal: what is not UTF-8 and all control characters but line feeds and tabs become U+FFFD.
#[must_use]
pub fn printable(text: &[u8]) -> String {
    let keep = |c: char| {
        if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c }
    };
    String::from_utf8_lossy(text).chars().map(keep).collect()
}

/// The byte at `draw` of the way through all bytes, each as wide as it is likely.
fn choose(scores: &[f32], temperature: f32, draw: f32) -> u8 {
    let best = (0..scores.len())
        .fold(0, |best, byte| if scores[byte] > scores[best] { byte } else { best });
    if temperature <= 0.0 {
        return best as u8;
    }
    let weight = |score: f32| f64::from((score - scores[best]) / temperature).exp();
    let mut rest = f64::from(draw) * scores.iter().map(|score| weight(*score)).sum::<f64>();
    for (byte, score) in scores.iter().enumerate() {
        rest -= weight(*score);
        if rest < 0.0 {
            return byte as u8;
        }
    }
    // Rounding may leave a rest, and scores that are not finite have no order: the best one is never wrong.
    best as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainerConfig;

    #[test]
    fn a_text_is_decided_by_its_seed() {
        let config =
            TrainerConfig { layers: 1, width: 8, heads: 1, context: 4, ..TrainerConfig::default() };
        let model = Model::new(&config).unwrap();
        let parameters = model.initial_parameters();
        let write = |temperature, seed| {
            generate(&model, &parameters, b"prompt", Sampling { bytes: 12, temperature, seed })
                .unwrap()
        };
        assert_eq!(write(1.0, 1), write(1.0, 1));
        assert_ne!(write(1.0, 1), write(1.0, 2));
        assert_eq!(write(0.0, 1), write(0.0, 2));
        assert_eq!(write(1.0, 1).len(), 12);
        let none =
            generate(&model, &parameters, b"", Sampling { bytes: 3, temperature: 1.0, seed: 1 })
                .unwrap();
        assert_eq!(none.len(), 3);
    }

    #[test]
    fn draws_follow_the_scores() {
        let scores = [0.0, f32::NEG_INFINITY, 1.0f32.exp().ln() + 2f32.ln() - 1.0];
        assert_eq!(choose(&scores, 0.0, 0.9), 2);
        assert_eq!(
            (choose(&scores, 1.0, 0.32), choose(&scores, 1.0, 0.35), choose(&scores, 1.0, 0.999)),
            (0, 2, 2)
        );
        assert_eq!(choose(&[f32::NAN; 4], 1.0, 0.5), 0);
    }

    #[test]
    fn any_bytes_can_be_printed() {
        assert_eq!(
            printable(b"a\tb\n\x1b[0m\xff\0\r"),
            "a\tb\n\u{fffd}[0m\u{fffd}\u{fffd}\u{fffd}"
        );
        assert_eq!(printable("ä".as_bytes()), "ä");
    }
}
