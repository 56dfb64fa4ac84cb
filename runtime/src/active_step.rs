//! [`ActiveStep`]: one step, as the program sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use collectives::{LeafReport, reduce};
use tokio::sync::oneshot;
use transport::{Arena, ArenaBuffer};
use types::{Lineage, Step, VirtualRank, World};

use crate::drivers::buffers::{Finals, Sum};
use crate::drivers::engine::{Input, RankReply, UserInput};
use crate::error::Error;

/// A step in hand. The program computes the leaf of each virtual rank that it is given, until there are none, and takes the sum.
#[must_use = "a step that is dropped is never finished, and the others wait for it"]
#[derive(Debug)]
pub struct ActiveStep {
    pub(crate) number: Step,
    pub(crate) lineage: Lineage,
    pub(crate) world: Arc<World>,
    pub(crate) is_first: bool,
    pub(crate) elements: usize,
    pub(crate) engine: Sender<Input>,
    pub(crate) reports: BTreeMap<VirtualRank, BTreeMap<String, f64>>,
    pub(crate) weights: BTreeMap<VirtualRank, u64>,
    pub(crate) arena: Arena,
    pub(crate) scratch: BTreeMap<VirtualRank, ArenaBuffer>,
    /// Set once the sum was given out: only then does calling `next_step` mean that it was applied.
    pub(crate) is_finished: Arc<AtomicBool>,
}

impl ActiveStep {
    /// The number of the step, from 0.
    #[must_use]
    pub fn number(&self) -> Step {
        self.number
    }

    /// The lineage that the step belongs to.
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// The world in which the step began; it may change while the step goes on.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// True on one member: a hint for logging and evaluation, never for state.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// The next virtual rank whose leaf this process should compute. There are more if somebody dies; `None` when the sum is final.
    ///
    /// # Errors
    /// If the engine is gone.
    pub async fn next_virtual_rank(&mut self) -> Result<Option<VirtualRank>, Error> {
        let (reply, answer) = oneshot::channel();
        self.tell(UserInput::Rank { step: self.number, reply })?;
        match answer.await.map_err(|_| Error::Internal("the engine ended"))? {
            RankReply::Compute(rank) => Ok(Some(rank)),
            // A void step ends the program's loop; `finish` says why.
            RankReply::Final | RankReply::Void => Ok(None),
        }
    }

    /// A buffer for the gradient of a virtual rank, zeroed, to be written in place; give it over by [`Self::contribute_buffer`].
    ///
    /// # Panics
    /// If the system has no more memory.
    pub fn gradients_mut(&mut self, rank: VirtualRank) -> &mut [f32] {
        let (arena, elements) = (&self.arena, self.elements);
        let buffer = self.scratch.entry(rank).or_insert_with(|| {
            let mut buffer = arena.allocate(elements * size_of::<f32>());
            buffer.fill(0);
            buffer
        });
        reduce::elements_of_mut(buffer).expect("an arena's buffers lie at multiples of 64")
    }

    /// Contributes the leaf of a virtual rank: copies the caller's gradient.
    ///
    /// # Errors
    /// If its length is not the state's [`gradient_elements`](crate::State::gradient_elements), or the engine is gone.
    pub async fn contribute(&mut self, rank: VirtualRank, gradients: &[f32]) -> Result<(), Error> {
        self.check(rank, gradients.len())?;
        let mut buffer = self.arena.allocate(size_of_val(gradients));
        buffer.copy_from_slice(reduce::as_bytes(gradients));
        self.give(rank, buffer)
    }

    /// Contributes the buffer that was written through [`Self::gradients_mut`], without a copy.
    ///
    /// # Errors
    /// If there is none, or the engine is gone.
    pub async fn contribute_buffer(&mut self, rank: VirtualRank) -> Result<(), Error> {
        let Some(gradients) = self.scratch.remove(&rank) else {
            return Err(Error::Usage(format!(
                "virtual rank {rank} has no buffer: write it through gradients_mut first"
            )));
        };
        self.give(rank, gradients)
    }

    /// Reports a scalar of a virtual rank, before its leaf is contributed; the canonical mean comes with [`Self::finish`]. All leaves must
    /// report the same names.
    pub fn report(&mut self, rank: VirtualRank, name: &str, value: f64) {
        self.reports.entry(rank).or_default().insert(name.to_owned(), value);
    }

    /// Sets a leaf's weight (its number of samples), before it is contributed; 1 if never set. The sum is divided by the total weight.
    pub fn weigh(&mut self, rank: VirtualRank, weight: u64) {
        self.weights.insert(rank, weight);
    }

    /// The mean over all virtual ranks, the same bits on every member. Call it after `next_virtual_rank` returned `None`.
    ///
    /// # Errors
    /// [`Error::RolledBack`] if the step became void: call `next_step` again, it restores the state.
    pub async fn finish(self) -> Result<Sum, Error> {
        let finals = self.finals().await?;
        let mut gradients = vec![0.0; finals.elements()];
        let sum = self.take(&finals, &mut gradients)?;
        Ok(Sum { gradients, ..sum })
    }

    /// The same, with the mean gradient in the caller's buffer, which the next step may use again; `gradients` of the result is empty.
    ///
    /// # Errors
    /// As [`Self::finish`], and if the buffer has not the gradient's length. What is in the buffer then is undefined.
    pub async fn finish_into(self, gradients: &mut [f32]) -> Result<Sum, Error> {
        let finals = self.finals().await?;
        if gradients.len() != finals.elements() {
            let (given, wanted) = (gradients.len(), finals.elements());
            return Err(Error::Usage(format!(
                "the buffer for the sum has {given} elements, not {wanted}"
            )));
        }
        self.take(&finals, gradients)
    }

    async fn finals(&self) -> Result<Finals, Error> {
        let (reply, answer) = oneshot::channel();
        self.tell(UserInput::Finish { step: self.number, reply })?;
        answer.await.map_err(|_| Error::Internal("the engine ended"))?
    }

    fn take(&self, finals: &Finals, gradients: &mut [f32]) -> Result<Sum, Error> {
        let sum = finals.write_to(gradients).map_err(|reason| {
            tracing::error!(%reason, "a finished step has no sum");
            Error::Internal("a finished step has no sum")
        })?;
        self.is_finished.store(true, Ordering::Release);
        Ok(sum)
    }

    fn check(&self, rank: VirtualRank, given: usize) -> Result<(), Error> {
        if given == self.elements {
            return Ok(());
        }
        let wanted = self.elements;
        Err(Error::Usage(format!(
            "the gradient of virtual rank {rank} has {given} elements, not {wanted}"
        )))
    }

    fn give(&mut self, rank: VirtualRank, gradients: ArenaBuffer) -> Result<(), Error> {
        let gradients = gradients.freeze();
        let values = self.reports.remove(&rank).unwrap_or_default();
        let weight = self.weights.remove(&rank).unwrap_or(1);
        let report = LeafReport::new(weight, values).map_err(|e| Error::Usage(e.to_string()))?;
        self.tell(UserInput::Leaf { step: self.number, rank, gradients, report })
    }

    fn tell(&self, input: UserInput) -> Result<(), Error> {
        self.engine.send(Input::User(input)).map_err(|_| Error::Internal("the engine ended"))
    }
}
