//! [`Job`]: what a cluster trains in a test, and what comes of it.

use std::collections::BTreeMap;

/// A job that is small enough to be killed fifty times.
#[derive(Clone, Debug)]
pub struct Job {
    steps: u64,
    leaf_ms: u64,
    virtual_ranks: u32,
    model: Vec<String>,
    flags: Vec<String>,
}

impl Job {
    /// `steps` steps of a tiny model with 8 virtual ranks, as fast as they go.
    #[must_use]
    pub fn new(steps: u64) -> Self {
        let model = "--layers 1 --width 32 --heads 2 --context 32 --batch 1 --sample-bytes 8";
        let model = model.split(' ').map(str::to_owned).collect();
        Self { steps, leaf_ms: 0, virtual_ranks: 8, model, flags: Vec::new() }
    }

    /// Makes every leaf wait so long; what comes out is the same.
    #[must_use]
    pub fn with_leaf_ms(self, leaf_ms: u64) -> Self {
        Self { leaf_ms, ..self }
    }

    /// Sets the number of virtual ranks.
    #[must_use]
    pub fn with_virtual_ranks(self, virtual_ranks: u32) -> Self {
        Self { virtual_ranks, ..self }
    }

    /// Adds flags of `ripstop run`.
    #[must_use]
    pub fn with_flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|&flag| flag.to_owned()));
        self
    }

    /// Sets a flag of the training program.
    #[must_use]
    pub fn with_training(mut self, flag: &str, value: &str) -> Self {
        match self.model.iter().position(|known| known == flag) {
            Some(place) => self.model[place + 1] = value.to_owned(),
            None => self.model.extend([flag.to_owned(), value.to_owned()]),
        }
        self
    }

    /// How many steps it has.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn leaf_ms(&self) -> u64 {
        self.leaf_ms
    }

    pub(super) fn virtual_ranks(&self) -> u32 {
        self.virtual_ranks
    }

    pub(super) fn flags(&self) -> &[String] {
        &self.flags
    }

    /// The training program's arguments, but for the waiting.
    pub(super) fn training(&self) -> Vec<String> {
        let mut arguments = vec!["--steps".to_owned(), self.steps.to_string()];
        arguments.extend_from_slice(&self.model);
        arguments
    }
}

/// With whom an agent works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// With a coordinator of its own.
    Standalone,
    /// With the cluster's coordinators.
    Coordinators,
}

/// What a process said until its end.
#[derive(Clone, Debug)]
pub struct Said {
    /// The exit code; 128 + n if signal n killed it.
    pub code: i32,
    /// stdout.
    pub out: String,
    /// stderr.
    pub err: String,
}

impl Said {
    /// The digest that the trainer prints at its end.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        let line = self.out.lines().rev().find(|line| line.contains("digest of parameters"))?;
        line.split_whitespace().last()
    }
}

/// What a job goes through when nothing happens to it.
#[derive(Clone, Debug)]
pub struct Undisturbed {
    /// The digest at its end.
    pub digest: String,
    pub(super) states: BTreeMap<u64, String>,
}
