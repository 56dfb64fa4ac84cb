//! [`Session`]: a program's place in a job, from joining to leaving.

mod start;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use membership::Release;
use storage::{Layout, StateDigest, StatePieces};
use tokio::sync::mpsc;
use transport::Arena;
use types::{Lineage, Origin, Start, Step, Timestamp, VirtualRanks};

use self::start::LoadError;

use crate::active_step::ActiveStep;
use crate::clock;
use crate::drivers::control::ControlHandle;
use crate::drivers::engine::{Input, Order, UserInput};
use crate::drivers::peers::PeersHandle;
use crate::error::Error;
use crate::settings::Settings;
use crate::state::{self, State};
use crate::trace::Trace;

/// A program's place in a job. The same code trains alone and in a world of hundreds.
#[derive(Debug)]
pub struct Session {
    settings: Settings,
    running: Option<Running>,
    outcome: Option<Outcome>,
    is_first: bool,
}

/// How a session ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All steps are done, and the last checkpoint is durable.
    Finished,
    /// This process left in good order; the job goes on without it, or later.
    Drained,
}

impl Outcome {
    /// The exit code that a program should end with: 0, or 75 for "left in good order, requeue".
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Drained => 75,
        }
    }
}

struct Running {
    engine: Sender<Input>,
    orders: mpsc::UnboundedReceiver<Order>,
    layout: Arc<Layout>,
    pieces: Arc<StatePieces>,
    store: Option<storage::Store>,
    virtual_ranks: VirtualRanks,
    peers: Option<PeersHandle>,
    arena: Arena,
    control: Option<ControlHandle>,
    background: Option<tokio::runtime::Runtime>,
    trace: Trace,
    /// The boundary at which the program's state stands, and its lineage.
    stands: Option<(Lineage, Step)>,
    /// The digest of the state there.
    digest: Option<StateDigest>,
    /// The step that was handed out last.
    handed_out: Option<(Step, Arc<AtomicBool>)>,
    first_digest_at: Option<Timestamp>,
}

impl Session {
    /// Prepares to join a job. The coordinators hear of this process at the first [`Session::next_step`], when the shapes of its state are
    /// known and can be compared.
    ///
    /// # Errors
    /// If the settings can't work.
    #[expect(
        clippy::unused_async,
        reason = "joining may come to wait here; callers should not have to change then"
    )]
    pub async fn join(settings: Settings) -> Result<Self, Error> {
        Ok(Self { settings, running: None, outcome: None, is_first: false })
    }

    /// The settings of this session.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// True on one member: a hint for logging and evaluation, never for state.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Writes an event of the program's own into this process's trace, if there is one; `fields` is a JSON object.
    pub fn trace(&self, kind: &str, fields: serde_json::Value) {
        if let Some(running) = &self.running {
            running.trace.event(kind, fields);
        }
    }

    /// Payload of all UDP packets that this process has sent to other members so far.
    #[must_use]
    pub fn sent_wire_bytes(&self) -> u64 {
        let peers = self.running.as_ref().and_then(|running| running.peers.as_ref());
        peers.map_or(0, PeersHandle::sent_wire_bytes)
    }

    /// How the session ended, once `next_step` returned `None`.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// The next step, or `None` when the job is over for this process ([`Session::outcome`] says how). Between two steps it may copy from
    /// `state` for a checkpoint or a joiner, or fill it: with a checkpoint, or with a copy from the members.
    ///
    /// # Errors
    /// If this process is refused or evicted, the coordinators can't be reached in time, or the state can't be restored.
    pub async fn next_step<S: State + ?Sized>(
        &mut self,
        state: &mut S,
    ) -> Result<Option<ActiveStep>, Error> {
        if self.outcome.is_some() {
            return Ok(None);
        }
        if self.running.is_none() {
            self.running = Some(start::start(&self.settings, state).await?);
        }
        let Some(running) = self.running.as_mut() else { return Err(Error::Internal("no engine")) };
        running.tell_applied(state)?;
        loop {
            running.tell(UserInput::Waiting)?;
            let Some(order) = running.orders.recv().await else {
                return Err(Error::Internal("the engine ended"));
            };
            match order {
                Order::Restore { lineage, start } => {
                    running.restore(lineage, &start, state).await?;
                }
                Order::Load { lineage, applied, digest, extra, pieces } => {
                    running.load_copy(state, (lineage, applied, digest), extra, &pieces)?;
                }
                Order::Stage { intent, segments } => {
                    let view = state::Bytes(state);
                    let staged: Result<Vec<_>, _> = segments
                        .into_iter()
                        .map(|s| running.layout.fill(s, &view).map(|bytes| (s, bytes)))
                        .collect();
                    let segments = staged.map_err(|e| Error::Usage(e.to_string()))?;
                    let (digest, extra) = (running.digest_here(state)?.whole, state.extra());
                    running.tell(UserInput::Staged { intent, digest, extra, segments })?;
                }
                Order::Copy { pieces } => {
                    let view = state::Bytes(state);
                    let copied: Result<BTreeMap<u32, _>, _> = pieces
                        .into_iter()
                        .map(|piece| running.pieces.copy(piece, &view).map(|bytes| (piece, bytes)))
                        .collect();
                    let pieces = copied.map_err(|e| Error::Usage(e.to_string()))?;
                    let (digest, extra) = (running.digest_here(state)?, state.extra());
                    running.tell(UserInput::Copied { digest, extra, pieces })?;
                }
                Order::Step { step, lineage, world, is_first } => {
                    let is_finished = Arc::new(AtomicBool::new(false));
                    running.handed_out = Some((step, Arc::clone(&is_finished)));
                    self.is_first = is_first;
                    return Ok(Some(ActiveStep {
                        number: step,
                        lineage,
                        world,
                        is_first,
                        elements: state.gradient_elements(),
                        engine: running.engine.clone(),
                        reports: BTreeMap::new(),
                        weights: BTreeMap::new(),
                        arena: running.arena.clone(),
                        scratch: BTreeMap::new(),
                        is_finished,
                    }));
                }
                Order::Ended(release) => {
                    self.outcome = Some(match release {
                        Release::Finished => Outcome::Finished,
                        Release::Drained | Release::Stopped | Release::Evicted { .. } => {
                            Outcome::Drained
                        }
                    });
                    self.close().await;
                    return Ok(None);
                }
                Order::Failed(error) => {
                    self.close().await;
                    return Err(error);
                }
            }
        }
    }

    /// Delivers what others still need from here and closes all links.
    async fn close(&mut self) {
        let Some(mut running) = self.running.take() else { return };
        if let Some(peers) = &running.peers {
            peers.close().await;
        }
        if let Some(control) = &running.control {
            control.close().await;
        }
        if let Some(background) = running.background.take() {
            background.shutdown_background();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A tokio runtime may not be dropped inside of another one.
        if let Some(background) = self.running.as_mut().and_then(|r| r.background.take()) {
            background.shutdown_background();
        }
    }
}

impl Running {
    fn tell(&self, input: UserInput) -> Result<(), Error> {
        self.engine.send(Input::User(input)).map_err(|_| Error::Internal("the engine ended"))
    }

    /// The step handed out last was applied by now, if its sum was: that is what calling `next_step` means.
    fn tell_applied<S: State + ?Sized>(&mut self, state: &S) -> Result<(), Error> {
        let Some((step, is_finished)) = self.handed_out.take() else { return Ok(()) };
        if !is_finished.load(Ordering::Acquire) {
            return Ok(());
        }
        let boundary = step.next();
        if let Some((_, stands)) = &mut self.stands {
            *stands = boundary;
        }
        let began = clock::now();
        let digest = self.take_digest(state)?;
        if self.first_digest_at.is_none() {
            self.first_digest_at = Some(began);
            tracing::debug!(took = ?clock::now().since(began), "digest of the state");
        }
        self.tell(UserInput::Applied { boundary, digest })
    }

    /// Takes the digest of a state that has changed.
    fn take_digest<S: State + ?Sized>(&mut self, state: &S) -> Result<types::Digest, Error> {
        let digest = state::digests(&self.pieces, state)?;
        let whole = digest.whole;
        self.digest = Some(digest);
        Ok(whole)
    }

    /// The digest of a state that has not changed since it came to its boundary.
    fn digest_here<S: State + ?Sized>(&mut self, state: &S) -> Result<StateDigest, Error> {
        match &self.digest {
            Some(digest) => Ok(digest.clone()),
            None => state::digests(&self.pieces, state),
        }
    }

    async fn restore<S: State + ?Sized>(
        &mut self,
        lineage: Lineage,
        start: &Start,
        state: &mut S,
    ) -> Result<(), Error> {
        self.handed_out = None;
        let loaded = match &start.origin {
            // The program's own state is the initial one only as long as no step was applied to it.
            Origin::Initial
                if self.stands.is_none() || self.stands.is_some_and(|(_, s)| s == start.step) =>
            {
                Ok(())
            }
            Origin::Initial => Err(LoadError::Damaged(
                "the job starts over from the initial state, which this process no longer has"
                    .to_owned(),
            )),
            Origin::Checkpoint { manifest, hash } => match self.store.clone() {
                Some(store) => {
                    let what = (manifest.as_str(), *hash, self.virtual_ranks);
                    start::load_checkpoint(&self.layout, &store, what, state).await
                }
                None => Err(LoadError::Incompatible(format!(
                    "the job starts from {manifest}, but this process has no --checkpoint"
                ))),
            },
        };
        let digest = self.take_digest(state)?;
        let checked = loaded.and_then(|()| match start.digest.filter(|d| *d != digest) {
            // All bytes are as they were written, so it is the program that makes another state of them.
            Some(wanted) => Err(LoadError::Incompatible(format!(
                "with these settings of the program the checkpoint gives state {digest:#}, not {wanted:#}: give the flags that it \
                 was trained with, or another --run-id"
            ))),
            None => Ok(()),
        });
        match checked {
            Ok(()) => {
                self.stands = Some((lineage, start.step));
                self.tell(UserInput::Loaded { lineage, applied: start.step, digest })
            }
            Err(LoadError::Incompatible(reason)) => {
                self.tell(UserInput::LoadFailed { reason, is_incompatible: true })
            }
            Err(LoadError::Damaged(reason)) => {
                self.tell(UserInput::LoadFailed { reason, is_incompatible: false })
            }
        }
    }

    fn load_copy<S: State + ?Sized>(
        &mut self,
        state: &mut S,
        (lineage, applied, digest): (Lineage, Step, types::Digest),
        extra: serde_json::Value,
        pieces: &[(u32, bytes::Bytes)],
    ) -> Result<(), Error> {
        let mut loaded = state.set_extra(extra);
        for (piece, bytes) in pieces {
            match self.pieces.place(*piece) {
                Some((name, place)) => state.load(name, place.start, bytes),
                None => loaded = loaded.and(Err(format!("the state has no piece {piece}"))),
            }
        }
        let ours = self.take_digest(state)?;
        if loaded.is_ok() && ours != digest {
            loaded = Err(format!("the copy's digest is {ours:#}, not {digest:#}"));
        }
        match loaded {
            Ok(()) => {
                self.stands = Some((lineage, applied));
                self.tell(UserInput::Loaded { lineage, applied, digest })
            }
            Err(reason) => self.tell(UserInput::LoadFailed { reason, is_incompatible: false }),
        }
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("stands", &self.stands)
            .field("handed_out", &self.handed_out)
            .finish_non_exhaustive()
    }
}
