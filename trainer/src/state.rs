//! What a run consists of between two steps: parameters, the optimizer's moments, and the number of steps applied.
//!
//! It shows itself as named tensors (bytes in place, little-endian f32) and one JSON value; that is all that a checkpoint or a
//! joiner needs. Names are `model.<name>`, `optimizer.exp_avg.<name>` and `optimizer.exp_avg_sq.<name>`.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use types::{Digest, Remedy, Step};

use crate::{Layout, Model, TensorSpec, TrainerConfig};

/// The state of a run at a boundary.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainState {
    config: TrainerConfig,
    layout: Arc<Layout>,
    // Invariant: each has `layout.values()` numbers; in the order of SECTIONS.
    sections: [Vec<f32>; 3],
    applied: Step,
    updates: u64,
}

impl TrainState {
    /// The state at boundary 0, a function of the configuration.
    #[must_use]
    pub fn new(config: &TrainerConfig, model: &Model) -> Self {
        let zeros = vec![0.0; model.layout().values()];
        Self {
            // Only what decides bits: members may differ in the rest.
            config: TrainerConfig {
                data: None,
                leaf_ms: 0,
                hang_file: None,
                pause_file: None,
                sample_bytes: TrainerConfig::default().sample_bytes,
                ..config.clone()
            },
            layout: Arc::clone(model.layout()),
            sections: [model.initial_parameters(), zeros.clone(), zeros],
            applied: Step(0),
            updates: 0,
        }
    }

    /// The model's parameters, flat, in the order of the layout.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        &self.sections[0]
    }

    /// Names, shapes and order of the parameters.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The boundary: how many steps are applied.
    #[must_use]
    pub fn applied(&self) -> Step {
        self.applied
    }

    /// How many of the applied steps changed the parameters; the others were skipped.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// All tensors in their fixed order.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        SECTIONS.iter().zip(&self.sections).flat_map(|(prefix, values)| {
            self.layout.tensors().iter().map(move |spec| TensorView {
                name: format!("{prefix}{}", spec.name()),
                shape: spec.shape(),
                bytes: bytemuck::cast_slice(&values[spec.range()]),
            })
        })
    }

    /// The bytes of the tensor of this name.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (section, range) = self.find(name)?;
        Some(bytemuck::cast_slice(&self.sections[section][range]))
    }

    /// The bytes of the tensor of this name, to be filled.
    pub fn bytes_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        let (section, range) = self.find(name)?;
        Some(bytemuck::cast_slice_mut(&mut self.sections[section][range]))
    }

    /// Writes `bytes` into the tensor of this name, from `offset_bytes` on.
    ///
    /// # Errors
    /// If there is no such tensor, or they do not fit into it. Nothing is written then.
    pub fn load(
        &mut self,
        name: &str,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), StateError> {
        let target =
            self.bytes_mut(name).ok_or_else(|| StateError::Name { name: name.to_owned() })?;
        let size = target.len();
        let place =
            offset_bytes.checked_add(bytes.len()).and_then(|end| target.get_mut(offset_bytes..end));
        let Some(place) = place else {
            return Err(StateError::Fit {
                name: name.to_owned(),
                offset: offset_bytes,
                length: bytes.len(),
                size,
            });
        };
        place.copy_from_slice(bytes);
        Ok(())
    }

    /// What is not in tensors: the counts, and the configuration for whoever reads a checkpoint.
    ///
    /// # Panics
    /// Never: all of it is numbers and strings.
    #[must_use]
    pub fn extra(&self) -> serde_json::Value {
        let extra = Extra {
            applied: self.applied,
            updates: self.updates,
            config: Some(self.config.clone()),
        };
        serde_json::to_value(extra).expect("numbers and strings are JSON")
    }

    /// Takes over what [`Self::extra`] gave. The configuration in it is compared, not taken: what was set now counts.
    ///
    /// # Errors
    /// If it is not what `extra` gives, or belongs to a model of another shape. Nothing is changed then.
    pub fn load_extra(&mut self, extra: &serde_json::Value) -> Result<(), StateError> {
        let extra = Extra::deserialize(extra).map_err(|source| StateError::Extra { source })?;
        if extra.updates > extra.applied.0 {
            return Err(StateError::Counts { applied: extra.applied, updates: extra.updates });
        }
        if let Some(stored) = &extra.config {
            let shape = |config: &TrainerConfig| {
                [
                    ("layers", config.layers),
                    ("width", config.width),
                    ("heads", config.heads),
                    ("context", config.context),
                ]
            };
            for ((flag, stored), (_, ours)) in shape(stored).into_iter().zip(shape(&self.config)) {
                if stored != ours {
                    return Err(StateError::Shape { flag, stored, ours });
                }
            }
        }
        self.applied = extra.applied;
        self.updates = extra.updates;
        Ok(())
    }

    /// The digest of all tensors and counts: equal states, and only those, have equal digests.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.layout.digest().0);
        hasher.update(&self.applied.0.to_le_bytes());
        hasher.update(&self.updates.to_le_bytes());
        for section in &self.sections {
            hasher.update(bytemuck::cast_slice(section));
        }
        hasher.finalize().into()
    }

    /// Counts a step as applied without a change.
    pub(crate) fn skip(&mut self) {
        self.applied = self.applied.next();
    }

    /// Counts a step as applied and gives what it changes.
    pub(crate) fn update(&mut self) -> Update<'_> {
        self.applied = self.applied.next();
        self.updates += 1;
        let [parameters, first_moment, second_moment] = &mut self.sections;
        Update {
            tensors: self.layout.tensors(),
            parameters,
            first_moment,
            second_moment,
            updates: self.updates,
        }
    }

    fn find(&self, name: &str) -> Option<(usize, Range<usize>)> {
        SECTIONS.iter().enumerate().find_map(|(section, prefix)| {
            let tensor = self.layout.tensor(name.strip_prefix(prefix)?)?;
            Some((section, tensor.range()))
        })
    }
}

/// One tensor of the state.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorView<'a> {
    /// Its full name.
    pub name: String,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its values, f32 in little-endian order.
    pub bytes: &'a [u8],
}

/// Why something could not be loaded into a state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// No tensor has this name.
    #[error(
        "no tensor is named {name}; is this another model's checkpoint? give the same --layers as the run that wrote it"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The bytes reach over the tensor's end.
    #[error(
        "{length} bytes at {offset} do not fit in {name}, which has {size}; give the same --width, --context as the run that wrote them"
    )]
    Fit {
        /// The tensor.
        name: String,
        /// Where they would begin.
        offset: usize,
        /// How many bytes were given.
        length: usize,
        /// How many bytes the tensor has.
        size: usize,
    },
    /// The JSON is not what this program writes.
    #[error("the extra state is not this program's: {source}; restore a checkpoint that it wrote")]
    Extra {
        /// The cause.
        source: serde_json::Error,
    },
    /// More changes than steps.
    #[error(
        "the extra state counts {updates} updates in {applied} steps; restore another checkpoint"
    )]
    Counts {
        /// Steps applied.
        applied: Step,
        /// Steps that changed something.
        updates: u64,
    },
    /// A model of another shape.
    #[error(
        "the checkpoint was written with --{flag} {stored}, this run has {ours}; give --{flag} {stored} or start a new run"
    )]
    Shape {
        /// The flag.
        flag: &'static str,
        /// Its value in the checkpoint.
        stored: usize,
        /// Its value now.
        ours: usize,
    },
}

impl StateError {
    /// What to do: this state can't be loaded here.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

/// What a step changes.
pub(crate) struct Update<'a> {
    pub(crate) tensors: &'a [TensorSpec],
    pub(crate) parameters: &'a mut [f32],
    pub(crate) first_moment: &'a mut [f32],
    pub(crate) second_moment: &'a mut [f32],
    /// How many updates there were, this one included.
    pub(crate) updates: u64,
}

#[derive(Serialize, Deserialize)]
struct Extra {
    applied: Step,
    updates: u64,
    config: Option<TrainerConfig>,
}

/// Name prefixes; the second and third as in PyTorch's state of Adam.
const SECTIONS: [&str; 3] = ["model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."];

#[cfg(test)]
mod tests {
    use super::*;

    fn state(seed: u64) -> TrainState {
        let config =
            TrainerConfig { width: 8, heads: 2, context: 4, seed, ..TrainerConfig::default() };
        TrainState::new(&config, &Model::new(&config).unwrap())
    }

    #[test]
    fn a_state_is_rebuilt_from_its_names_and_bytes() {
        let mut from = state(1);
        for (place, value) in from.sections[2].iter_mut().enumerate() {
            *value = place as f32;
        }
        from.update();
        from.skip();
        let mut to = state(2);
        assert_ne!(from.digest(), to.digest());
        for tensor in from.tensors() {
            assert_eq!(tensor.bytes.len(), 4 * tensor.shape.iter().product::<usize>());
            assert_eq!(from.bytes(&tensor.name), Some(tensor.bytes));
            // In two pieces, the second one cut inside a number.
            let cut = tensor.bytes.len() / 2 + 1;
            to.load(&tensor.name, 0, &tensor.bytes[..cut]).unwrap();
            to.load(&tensor.name, cut, &tensor.bytes[cut..]).unwrap();
        }
        to.load_extra(&from.extra()).unwrap();
        assert_eq!(to.digest(), from.digest());
        assert_eq!((to.applied(), to.updates()), (Step(2), 1));
    }

    #[test]
    fn names_are_unique_and_come_in_three_sections() {
        let state = state(1);
        let names: std::collections::BTreeSet<String> =
            state.tensors().map(|tensor| tensor.name).collect();
        assert_eq!(names.len(), 3 * state.layout().tensors().len());
        for name in [
            "model.final_norm.gain",
            "optimizer.exp_avg.final_norm.gain",
            "optimizer.exp_avg_sq.final_norm.gain",
        ] {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_nothing_changes() {
        let mut state = state(1);
        let before = state.digest();
        assert!(matches!(state.load("model.no.such", 0, &[]), Err(StateError::Name { .. })));
        for (offset, length) in [(0, 33), (32, 1), (33, 0), (usize::MAX, 2)] {
            let result = state.load("model.final_norm.gain", offset, &vec![0; length]);
            assert!(matches!(result, Err(StateError::Fit { size: 32, .. })), "{offset} {length}");
        }
        assert!(matches!(
            state.load_extra(&serde_json::json!({"steps": 3})),
            Err(StateError::Extra { .. })
        ));
        let counts = serde_json::json!({"applied": 1, "updates": 2});
        assert!(matches!(state.load_extra(&counts), Err(StateError::Counts { .. })));
        let mut other = state.extra();
        other["config"]["heads"] = 4.into();
        let message = state.load_extra(&other).unwrap_err().to_string();
        assert!(message.contains("written with --heads 4, this run has 2"), "{message}");
        assert_eq!(state.digest(), before);
    }

    #[test]
    fn the_digest_sees_every_part() {
        let base = state(1);
        for section in 0..3 {
            let mut other = base.clone();
            other.sections[section][7] += 1.0;
            assert_ne!(other.digest(), base.digest());
        }
        let mut other = base.clone();
        other.skip();
        assert_ne!(other.digest(), base.digest());
    }
}
