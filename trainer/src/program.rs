//! The program: the model in a [`Session`]'s loop. The loop does not know about failures.

use std::borrow::Cow;
use std::io::Write;
use std::time::{Duration, Instant};

use ripstop::{Outcome, Remedy, Session, Settings, State};
use serde_json::{Value, json};
use types::DType;

use crate::{
    AdamW, ConfigError, Corpus, CorpusError, Model, ModelError, Sampling, TrainState,
    TrainerConfig, generate, printable, probe_digest,
};

/// Does nothing for good, as a program does that waits for itself.
fn hang() -> ! {
    tracing::warn!("this worker hangs from here on, as asked");
    loop {
        std::thread::park();
    }
}

/// Trains until the job is over for this process. Lines about progress, the sample and the digest go to `out`, as text or JSON lines.
///
/// # Errors
/// If the configuration, the text or the settings are wrong, or the session can't go on.
pub async fn train(
    config: &TrainerConfig,
    settings: Settings,
    out: &mut (dyn Write + Send),
    is_json: bool,
) -> Result<Outcome, ProgramError> {
    config.validate()?;
    let corpus = Corpus::load(config)?;
    let sampler = corpus.sampler(config, settings.virtual_rank_count())?;
    let model = Model::new(config)?;
    let optimizer = AdamW::new(config);
    let mut state =
        Trained { state: TrainState::new(config, &model), elements: model.layout().values() };
    let settings = config
        .fingerprint()
        .into_iter()
        .fold(settings, |settings, (flag, value)| settings.fingerprint(flag, value));
    let settings = settings
        .total_steps(config.steps)
        .fingerprint("data", corpus.digest())
        .fingerprint("model", model.layout().digest())
        .fingerprint("trainer_probe", probe_digest(config)?);
    let mut session = Session::join(settings).await?;
    let mut printer = Printer { out, is_json, began: Instant::now(), tokens: 0 };
    while let Some(mut step) = session.next_step(&mut state).await? {
        while let Some(rank) = step.next_virtual_rank().await? {
            let batch = corpus.batch(config, &sampler, step.number(), rank);
            let leaf = model.loss_and_gradients(state.state.parameters(), &batch)?;
            if !config.leaf_wait().is_zero() {
                tokio::time::sleep(config.leaf_wait()).await;
            }
            if config.hang_file.as_ref().is_some_and(|file| std::fs::remove_file(file).is_ok()) {
                hang();
            }
            step.report(rank, "loss", f64::from(leaf.loss));
            step.contribute(rank, &leaf.gradients).await?;
        }
        let (number, members) = (step.number().0, step.world().size().members());
        let sum = match step.finish().await {
            Ok(sum) => sum,
            // The next step starts from whatever state the new lineage starts with.
            Err(error) if error.remedy() == Remedy::Restore => continue,
            Err(error) => return Err(error.into()),
        };
        optimizer.apply(&mut state.state, &sum.gradients);
        let loss = sum.reports.get("loss").copied().unwrap_or(f64::NAN);
        session.trace("metric", json!({"step": number, "loss": loss, "members": members}));
        printer.tokens += session.settings().virtual_rank_count().count() as usize
            * config.batch
            * config.context;
        while config.pause_file.as_ref().is_some_and(|file| file.exists()) {
            // The thread is kept, as by a program that computes.
            std::thread::sleep(PAUSE_LOOK);
        }
        if session.is_first() {
            printer.step(number + 1, config.steps, loss, members);
        }
    }
    let outcome = session.outcome().unwrap_or(Outcome::Drained);
    if outcome == Outcome::Finished && session.is_first() {
        printer.end(config, &model, &state)?;
    } else if outcome == Outcome::Finished && printer.tokens == 0 {
        tracing::warn!(
            "the job was finished before this process joined it: take another --run-id to train anew"
        );
    }
    Ok(outcome)
}

/// How often it is looked whether the pause is over.
const PAUSE_LOOK: Duration = Duration::from_millis(20);

struct Printer<'a> {
    out: &'a mut (dyn Write + Send),
    is_json: bool,
    began: Instant,
    tokens: usize,
}

impl Printer<'_> {
    fn step(&mut self, done: u64, total: u64, loss: f64, members: u32) {
        let every = (total / LINES_WANTED).max(1);
        if !done.is_multiple_of(every) && done != total && done != 1 {
            return;
        }
        let rate = self.tokens as f64 / self.began.elapsed().as_secs_f64();
        if self.is_json {
            self.line(&json!({"step": done, "steps": total, "loss": loss, "tokens_per_s": rate, "members": members}).to_string());
        } else {
            self.line(&format!(
                "step {done:>5}/{total}  loss {loss:.4}  {rate:>8.0} tokens/s  members {members}"
            ));
        }
    }

    fn end(
        &mut self,
        config: &TrainerConfig,
        model: &Model,
        state: &Trained,
    ) -> Result<(), ProgramError> {
        let sampling = Sampling { bytes: config.sample_bytes, temperature: 0.8, seed: config.seed };
        let sample = printable(&generate(model, state.state.parameters(), b"The ", sampling)?);
        let digest = ripstop::state_digest(state)?;
        if self.is_json {
            self.line(
                &json!({"steps": state.state.applied(), "sample": sample, "digest": digest})
                    .to_string(),
            );
        } else {
            self.line(&format!("sample: {sample}"));
            self.line(&format!(
                "digest of parameters and optimizer state after {} steps: {digest}",
                state.state.applied()
            ));
        }
        Ok(())
    }

    /// A reader that is gone must not end training.
    fn line(&mut self, text: &str) {
        let written = writeln!(self.out, "{text}").and_then(|()| self.out.flush());
        if let Err(error) = written {
            tracing::debug!(%error, "nobody reads");
        }
    }
}

/// The trained state, as the session sees it.
struct Trained {
    state: TrainState,
    elements: usize,
}

impl State for Trained {
    fn tensors(&self) -> Vec<ripstop::TensorSpec> {
        let spec = |view: crate::TensorView<'_>| ripstop::TensorSpec {
            name: view.name,
            dtype: DType::F32,
            shape: view.shape.to_vec(),
        };
        self.state.tensors().map(spec).collect()
    }

    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.state.bytes(name).map(Cow::Borrowed)
    }

    fn load(&mut self, name: &str, offset: usize, bytes: &[u8]) {
        if let Err(error) = self.state.load(name, offset, bytes) {
            tracing::error!(%error, "a restored tensor does not fit");
        }
    }

    fn extra(&self) -> Value {
        self.state.extra()
    }

    fn set_extra(&mut self, extra: Value) -> Result<(), String> {
        self.state.load_extra(&extra).map_err(|e| e.to_string())
    }

    fn gradient_elements(&self) -> usize {
        self.elements
    }
}

/// Why training ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// A flag is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The text is missing, empty or too short.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The session can't go on.
    #[error(transparent)]
    Session(#[from] ripstop::Error),
}

impl ProgramError {
    /// The exit code to end with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_)
            | Self::Corpus(_)
            | Self::Model(ModelError::Config(_) | ModelError::Corpus(_)) => 78,
            Self::Model(ModelError::Compute { .. }) => 70,
            Self::Session(error) => error.exit_code(),
        }
    }
}

const LINES_WANTED: u64 = 20;
