//! Whoever stands at a boundary has the state that the undisturbed run has there, bit for bit.

use types::{Digest, NodeId, Step};

use super::Violation;
use crate::sim::node::{Shape, TrainState};

/// The name of this invariant.
pub const NAME: &str = "equal_digests_at_equal_steps";

/// The undisturbed run, computed as far as it was asked for.
#[derive(Debug)]
pub struct EqualDigestsAtEqualSteps {
    shape: Shape,
    states: Vec<TrainState>,
}

impl EqualDigestsAtEqualSteps {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape, states: vec![TrainState::initial(shape)] }
    }

    /// The digest at a boundary.
    pub(crate) fn expected(&mut self, boundary: Step) -> Digest {
        while self.states.len() as u64 <= boundary.0 {
            let next = self.states[self.states.len() - 1].undisturbed_next(self.shape);
            self.states.push(next);
        }
        self.states[boundary.0 as usize].digest
    }

    /// A worker stands at a boundary.
    ///
    /// # Errors
    /// If its state is another one.
    pub fn check(&mut self, node: NodeId, boundary: Step, digest: Digest) -> Result<(), Violation> {
        let expected = self.expected(boundary);
        if digest == expected {
            return Ok(());
        }
        let seen = format!(
            "node {node} has {digest:#} at boundary {boundary}, the undisturbed run {expected:#}"
        );
        Err(Violation { invariant: NAME, seen })
    }
}
