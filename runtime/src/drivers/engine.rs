//! The engine: the thread that runs [`StepCycle`] and holds the bytes of the steps in hand.
//!
//! Everything reaches it as an [`Input`] through one queue: frames of peers, words of the coordinators, calls of the user's thread, ends of
//! uploads. It answers the user's thread by [`Order`]s, since only that thread has the program's state. Sums and digests are computed
//! here, never on a thread that serves sockets.

mod checkpoint;
mod serve;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use bytes::Bytes;
use collectives::{ChunkLayout, LeafReport, OperationAction};
use membership::{Heartbeat, Intent, ParticipantEvent, Phase, Release, Turn};
use serde_json::json;
use storage::{Layout, StateDigest, StatePieces, Store};
use tokio::sync::{mpsc, oneshot};
use transport::{Arena, Frame, Lane};
use types::{Digest, Lineage, NodeId, Start, Step, Timestamp, VirtualRank, World, decode, encode};

use super::buffers::{Buffers, Finals};
use super::control::ControlHandle;
use super::peers::PeersHandle;
use crate::change::ChangeKeeper;
use crate::clock;
use crate::error::Error;
use crate::metrics::WorkerMetrics;
use crate::settings::Settings;
use crate::state_copy::StateCopy;
use crate::step_cycle::{Action, Envelope, PeerFrame, StepCycle, Verdict};
use crate::trace::Trace;
use crate::turn::TurnKeeper;

/// What reaches the engine.
#[derive(Debug)]
pub(crate) enum Input {
    /// A frame of another member.
    Frame { from: NodeId, frame: Frame },
    /// A link to another member is up.
    LinkUp { node: NodeId },
    /// A world made without coordinators: this process trains alone.
    Alone(Arc<World>),
    /// The coordinators' word, or their silence.
    Control(ParticipantEvent),
    /// A call of the user's thread.
    User(UserInput),
    /// An upload or a publication ended.
    Storage(checkpoint::StorageEvent),
    /// A signal asks to leave in good order.
    LeaveSignal { name: &'static str },
}

/// Calls of the user's thread.
#[derive(Debug)]
pub(crate) enum UserInput {
    /// The state stands at a boundary, freshly loaded.
    Loaded { lineage: Lineage, applied: Step, digest: Digest },
    /// A state could not be loaded.
    LoadFailed { reason: String, is_incompatible: bool },
    /// The user applied a step; the state stands at `boundary`.
    Applied { boundary: Step, digest: Digest },
    /// The user waits for an order.
    Waiting,
    /// The share of a checkpoint, copied from the state.
    Staged {
        intent: Intent,
        digest: Digest,
        extra: serde_json::Value,
        segments: Vec<(storage::SegmentIndex, Bytes)>,
    },
    /// Pieces of the state, copied for followers, and the digests of all.
    Copied { digest: StateDigest, extra: serde_json::Value, pieces: BTreeMap<u32, Bytes> },
    /// The user wants the next virtual rank.
    Rank { step: Step, reply: oneshot::Sender<RankReply> },
    /// The user contributes a leaf.
    Leaf { step: Step, rank: VirtualRank, gradients: Bytes, report: LeafReport },
    /// The user wants the sum.
    Finish { step: Step, reply: oneshot::Sender<Result<Finals, Error>> },
}

/// What became of the wish for a virtual rank.
#[derive(Debug)]
pub(crate) enum RankReply {
    /// Compute this one.
    Compute(VirtualRank),
    /// The sum is final.
    Final,
    /// The step is void: its lineage ended, or this process left the job.
    Void,
}

/// What the user's thread must do, because it has the state.
#[derive(Debug)]
pub(crate) enum Order {
    /// Load the state that a lineage starts with.
    Restore { lineage: Lineage, start: Start },
    /// Load the copy that members sent.
    Load {
        lineage: Lineage,
        applied: Step,
        digest: Digest,
        extra: serde_json::Value,
        pieces: Vec<(u32, Bytes)>,
    },
    /// Copy the share of a checkpoint.
    Stage { intent: Intent, segments: Vec<storage::SegmentIndex> },
    /// Copy these pieces of the state, for followers.
    Copy { pieces: BTreeSet<u32> },
    /// Compute a step.
    Step { step: Step, lineage: Lineage, world: Arc<World>, is_first: bool },
    /// The job is over for this process.
    Ended(Release),
    /// It can't go on.
    Failed(Error),
}

/// What the engine is made of.
pub(crate) struct Parts {
    pub(crate) me: NodeId,
    pub(crate) settings: Settings,
    pub(crate) chunks: ChunkLayout,
    pub(crate) arena: Arena,
    pub(crate) layout: Arc<Layout>,
    pub(crate) pieces: Arc<StatePieces>,
    pub(crate) store: Option<Store>,
    pub(crate) peers: Option<PeersHandle>,
    pub(crate) control: Option<ControlHandle>,
    pub(crate) background: tokio::runtime::Handle,
    pub(crate) inputs: Receiver<Input>,
    pub(crate) sender: std::sync::mpsc::Sender<Input>,
    pub(crate) orders: mpsc::UnboundedSender<Order>,
    pub(crate) trace: Trace,
    pub(crate) metrics: WorkerMetrics,
}

/// The thread that runs the step machine.
pub(crate) struct Engine {
    parts: Parts,
    cycle: StepCycle,
    buffers: Buffers,
    is_user_waiting: bool,
    wish: Option<(Step, oneshot::Sender<RankReply>)>,
    restore: Option<(Lineage, Start)>,
    copy: StateCopy,
    /// The pieces that came so far, and what they don't hold.
    copied: BTreeMap<u32, Bytes>,
    copied_extra: Option<serde_json::Value>,
    copies_refused: u32,
    /// The user's thread loads a state.
    is_loading: bool,
    fetched: Option<Order>,
    intent: Option<Intent>,
    publish: Option<checkpoint::Publishing>,
    release: Option<Release>,
    failure: Option<Error>,
    is_leaving: bool,
    unreachable_since: Option<Timestamp>,
    idle_since: Timestamp,
    joined: bool,
    turn: TurnKeeper,
    change: ChangeKeeper,
    seen_generation: Option<types::Generation>,
    step_began: Option<Timestamp>,
    /// The sign of life that was given last, and when.
    told: Option<(Heartbeat, Timestamp)>,
    /// When the last one was given, if there is a newer one.
    untold: Option<Timestamp>,
    /// The step in hand of which the user was told that it is void.
    void_step: Option<Step>,
}

impl Engine {
    /// Runs until the user's thread is gone.
    pub(crate) fn run(parts: Parts) {
        let mut engine = Self {
            cycle: StepCycle::new(parts.me, parts.chunks.chunks()),
            buffers: Buffers::new(parts.chunks, parts.settings.virtual_ranks, parts.arena.clone()),
            is_user_waiting: false,
            wish: None,
            restore: None,
            copy: StateCopy::new(
                parts.me,
                parts.pieces.count(),
                parts.settings.total_steps,
                parts.settings.recovery_target,
            ),
            copied: BTreeMap::new(),
            copied_extra: None,
            copies_refused: 0,
            is_loading: false,
            fetched: None,
            intent: None,
            publish: None,
            release: None,
            failure: None,
            is_leaving: false,
            unreachable_since: None,
            idle_since: clock::now(),
            joined: parts.control.is_none(),
            turn: TurnKeeper::new(),
            change: ChangeKeeper::default(),
            seen_generation: None,
            step_began: None,
            told: None,
            untold: None,
            void_step: None,
            parts,
        };
        let tick = (engine.parts.settings.recovery_target / 4).max(Duration::from_millis(20));
        let mut next_tick = clock::now() + tick;
        while !engine.parts.orders.is_closed() {
            let now = clock::now();
            let due = engine.untold.map_or(next_tick, |since| next_tick.min(since + TELL_PAUSE));
            match engine.parts.inputs.recv_timeout(due.since(now)) {
                Ok(input) => engine.handle(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // What has queued up meanwhile is taken before anything is told to the outside.
            for _ in 0..INPUTS_PER_TURN {
                let Ok(input) = engine.parts.inputs.try_recv() else { break };
                engine.handle(input);
            }
            if clock::now() >= next_tick {
                next_tick = clock::now() + tick;
                engine.handle_tick();
            }
            engine.answer_user();
            engine.tell_control();
            engine.parts.metrics.follow(&engine.cycle, &engine.buffers);
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Frame { from, frame } => self.handle_frame(from, frame),
            Input::LinkUp { node } => {
                self.cycle.handle_link_up(node);
                self.handle_source_up(node);
            }
            Input::Alone(world) => self.handle_world(world),
            Input::Control(event) => self.handle_control(event),
            Input::User(call) => self.handle_user(call),
            Input::Storage(event) => self.handle_storage(event),
            Input::LeaveSignal { name } => self.leave(name),
        }
        self.drain();
    }

    fn handle_world(&mut self, world: Arc<World>) {
        self.cycle.handle_world(world);
        self.drain();
        self.connect_peers();
    }

    fn connect_peers(&mut self) {
        let generation = self.cycle.newest_generation();
        if generation == self.seen_generation {
            return;
        }
        self.seen_generation = generation;
        if let Some(peers) = &self.parts.peers {
            peers.set_peers(self.cycle.peers());
        }
    }

    fn handle_control(&mut self, event: ParticipantEvent) {
        match event {
            ParticipantEvent::Joined { .. } => {
                self.joined = true;
                self.unreachable_since = None;
            }
            ParticipantEvent::Reachable => self.unreachable_since = None,
            ParticipantEvent::Unreachable { since } => {
                self.unreachable_since.get_or_insert(since);
            }
            ParticipantEvent::Refused { code, reason } => {
                self.failure = Some(Error::Refused { code, reason });
            }
            ParticipantEvent::World(world) => self.handle_world(world),
            ParticipantEvent::Intent(intent) => self.handle_intent(intent),
            ParticipantEvent::Publish { attempt, receipts } => {
                self.handle_publish(attempt, receipts);
            }
            ParticipantEvent::Committed { attempt, step, .. } => {
                self.parts.metrics.checkpoint_step.set(i64::try_from(step.0).unwrap_or(i64::MAX));
                self.parts.trace.event("checkpoint", json!({"attempt": attempt, "step": step}));
                self.intent.take_if(|i| i.attempt <= attempt);
                self.publish.take_if(|p| p.attempt() <= attempt);
            }
            ParticipantEvent::Abandoned { attempt, reason } => {
                tracing::info!(%attempt, %reason, "checkpoint attempt abandoned");
                self.intent.take_if(|i| i.attempt == attempt);
                self.publish.take_if(|p| p.attempt() == attempt);
            }
            ParticipantEvent::Released(release) => {
                self.parts.trace.event("released", json!({"release": format!("{release:?}")}));
                self.release = Some(release);
            }
            ParticipantEvent::Noted { .. }
            | ParticipantEvent::Enrolled { .. }
            | ParticipantEvent::JobNews { .. }
            | ParticipantEvent::Status { .. }
            | ParticipantEvent::Events { .. } => {}
        }
    }

    fn handle_user(&mut self, call: UserInput) {
        self.idle_since = clock::now();
        match call {
            UserInput::Loaded { lineage, applied, digest } => {
                self.parts.trace.event("loaded", json!({"lineage": lineage, "step": applied}));
                (self.is_loading, self.copies_refused) = (false, 0);
                self.cycle.handle_state(lineage, applied, digest);
            }
            UserInput::LoadFailed { reason, is_incompatible } => {
                self.is_loading = false;
                self.handle_load_failed(reason, is_incompatible);
            }
            UserInput::Applied { boundary, digest } => {
                self.turn.advance();
                if let Some(began) = self.step_began.take() {
                    self.parts
                        .metrics
                        .step_seconds
                        .observe(clock::now().since(began).as_secs_f64());
                    self.parts.metrics.steps.inc();
                }
                self.cycle.handle_applied(boundary, digest);
                self.drain();
                self.buffers.advance();
                self.parts.trace.event("applied", json!({"boundary": boundary, "digest": digest}));
            }
            UserInput::Waiting => {
                self.is_user_waiting = true;
                self.turn.give(Turn::Waiting);
            }
            UserInput::Staged { intent, digest, extra, segments } => {
                self.handle_staged(intent, digest, extra, segments);
            }
            UserInput::Copied { digest, extra, pieces } => self.send_state(digest, &extra, &pieces),
            UserInput::Rank { step, reply } => {
                self.wish = Some((step, reply));
                self.turn.give(Turn::Waiting);
            }
            UserInput::Leaf { step, rank, gradients, report } => {
                self.turn.end_leaf(clock::now());
                let chunks = self.cycle.handle_leaf(step, rank);
                self.buffers.put_leaf(step, rank, &chunks, (&gradients, &report));
                self.parts.metrics.leaves.inc();
                self.parts.trace.event("leaf", json!({"step": step, "rank": rank}));
            }
            UserInput::Finish { step, reply } => {
                let result = if self.cycle.is_ready(step) {
                    self.buffers.finals(step).map_err(|reason| {
                        tracing::error!(%reason, "a finished step has no sum");
                        Error::Internal("a finished step has no sum")
                    })
                } else if self.cycle.applied() == Some(step) && self.void_step != Some(step) {
                    Err(Error::Usage("finish before next_virtual_rank returned None".to_owned()))
                } else {
                    Err(Error::RolledBack)
                };
                let _ = reply.send(result);
            }
        }
    }

    fn handle_frame(&mut self, from: NodeId, frame: Frame) {
        let (head, weight): (PeerFrame, u64) = match decode(&frame.head) {
            Ok(decoded) => decoded,
            Err(error) => return tracing::warn!(%from, %error, "a frame is dropped"),
        };
        match head {
            PeerFrame::Report(report) => {
                self.cycle.handle_report(from, *report);
                self.drain();
                self.connect_peers();
            }
            PeerFrame::Node(name) => match self.buffers.decode_node(name.chunk, weight, frame.body)
            {
                Ok(value) => {
                    if self.cycle.handle_node(from, name) == Verdict::Keep {
                        self.buffers.put_node(name.step, name.chunk, name.node, value);
                    }
                }
                Err(reason) => tracing::warn!(%from, %reason, "a node is dropped"),
            },
            PeerFrame::Final(name) => {
                match self.buffers.check_final(name.chunk, &frame.body, false) {
                    Ok(()) => {
                        if self.cycle.handle_final(name) == Verdict::Keep {
                            self.buffers.put_final(name.step, name.chunk, frame.body);
                        }
                    }
                    Err(reason) => tracing::warn!(%from, %reason, "a final chunk is dropped"),
                }
            }
            PeerFrame::Progress { lineage, applied, state } => {
                self.cycle.handle_progress(from, lineage, applied, state);
            }
            PeerFrame::FinalRequest { lineage, step, chunks } => {
                self.cycle.handle_final_request(from, lineage, step, &chunks);
            }
            PeerFrame::StateRequest { lineage, boundary, pieces } => {
                self.handle_state_request(from, (lineage, boundary), pieces);
            }
            PeerFrame::StateOffer { lineage, applied, state } => {
                self.handle_state_offer(from, (lineage, applied, state), &frame.body);
            }
            PeerFrame::StatePiece { lineage, applied, piece } => {
                self.handle_state_piece(from, (lineage, applied, piece), frame.body);
            }
            PeerFrame::StateMissed { lineage, boundary, applied } => {
                self.handle_state_missed(from, (lineage, boundary), applied);
            }
        }
    }

    /// Does what the machine says.
    fn drain(&mut self) {
        while let Some(action) = self.cycle.poll_action() {
            match action {
                Action::Send(envelope) => self.send(envelope),
                Action::Operation { step, action } => self.operate(step, action),
                Action::DropNodes { step } => self.buffers.drop_nodes(step),
                Action::DropFinals { step } => self.buffers.drop_finals(step),
                Action::Restore { lineage, start } => {
                    self.parts
                        .trace
                        .event("restore", json!({"lineage": lineage, "step": start.step}));
                    self.buffers.clear();
                    self.intent = None;
                    self.copy.handle_restart();
                    self.copied.clear();
                    self.fetched = None;
                    self.restore = Some((lineage, start));
                }
                Action::Entered { generation } => {
                    self.parts
                        .metrics
                        .generation
                        .set(i64::try_from(generation.0).unwrap_or(i64::MAX));
                    self.parts.trace.event("entered", json!({"generation": generation}));
                    self.change.handle_entered(clock::now(), generation);
                    tracing::debug!(%generation, "entered");
                }
                Action::Adopted { generation } => {
                    let world = self.cycle.world().map(ToString::to_string).unwrap_or_default();
                    self.turn.advance();
                    self.change.handle_adopted(clock::now(), generation, self.cycle.counters());
                    self.parts.trace.event(
                        "world",
                        json!({"generation": generation, "step": self.cycle.applied()}),
                    );
                    tracing::info!(%world, "world adopted");
                }
                Action::Ready { step } => {
                    self.turn.advance();
                    self.change.handle_ready(clock::now(), self.cycle.counters());
                    self.parts.trace.event("final", json!({"step": step}));
                }
                Action::Excluded { generation } => {
                    self.parts.trace.event("excluded", json!({"generation": generation}));
                }
                Action::Diverged { node, step, theirs, ours } => {
                    tracing::error!(%node, %step, theirs = %format!("{theirs:#}"), ours = %format!("{ours:#}"),
                        "another member computes from another state");
                    self.parts.metrics.divergences.inc();
                }
            }
        }
    }

    fn operate(&mut self, step: Step, action: OperationAction) {
        let result = match action {
            OperationAction::Fold { chunk, left, right, parent } => {
                self.buffers.fold((step, chunk), left, right, parent)
            }
            OperationAction::Finish { chunk, cover } => {
                let finished = self.buffers.finish(step, chunk, &cover);
                if finished.is_ok() {
                    self.cycle.handle_finished(step, chunk);
                }
                finished
            }
            OperationAction::Send { .. } => Ok(()),
        };
        if let Err(reason) = result {
            // Reports of unequal names are the program's fault: they can't be added.
            self.failure
                .get_or_insert(Error::Usage(format!("step {step} can't be summed: {reason}")));
        }
    }

    fn send(&self, envelope: Envelope) {
        let Some(peers) = &self.parts.peers else { return };
        let body = match &envelope.frame {
            PeerFrame::Node(name) => self.buffers.node_body(name.step, name.chunk, name.node),
            PeerFrame::Final(name) => {
                self.buffers.final_body(name.step, name.chunk).map(|body| (0, body))
            }
            _ => Some((0, Bytes::new())),
        };
        let Some((weight, body)) = body else { return };
        self.parts.metrics.sent_bytes.inc_by(body.len() as u64);
        // Who enters a world, or asks, is heard before chunks that wait.
        let lane = if body.is_empty() { Lane::Control } else { Lane::Bulk };
        peers.send(envelope.node, lane, Frame { head: head(&envelope.frame, weight), body });
    }

    fn leave(&mut self, name: &str) {
        let Some(control) = self.parts.control.as_ref().filter(|_| self.joined) else {
            self.release.get_or_insert(Release::Drained);
            return;
        };
        if !std::mem::replace(&mut self.is_leaving, true) {
            tracing::info!(signal = name, "leaving in good order");
            control.drain(self.parts.me, self.parts.settings.job.clone(), format!("signal {name}"));
        }
    }

    fn tell_control(&mut self) {
        let Some(control) = &self.parts.control else { return };
        let phase = match (self.cycle.world(), self.cycle.applied()) {
            _ if self.is_leaving => Phase::Leaving,
            (None, _) => Phase::Joining,
            (Some(_), None) => Phase::Syncing,
            (Some(_), Some(_)) if self.cycle.is_member() => Phase::Active,
            (Some(_), Some(_)) => Phase::Following,
        };
        let applied: Vec<(Step, Digest)> = self.cycle.digests().collect();
        let newest = applied.len().saturating_sub(Heartbeat::APPLIED_MAX);
        let now = clock::now();
        let heartbeat = Heartbeat {
            entered: self.cycle.entered(),
            lineage: self.cycle.lineage().unwrap_or_default(),
            applied: applied[newest..].to_vec(),
            phase,
            turn: self.turn.turn,
            progress: self.turn.progress,
            pulse: self.turn.pulse,
            longest_leaf: self.turn.longest_leaf(),
            leaf_time: self.turn.leaf_time(),
            cut_off: self.turn.cut_off(now, self.parts.settings.recovery_target / 2),
            changes: self.change.newest(),
        };
        // A step of a millisecond would wake the control thread all the time for what it says a few times a second.
        if let Some((told, at)) = &self.told {
            let is_same = *told == heartbeat;
            let is_news = told.entered != heartbeat.entered
                || told.phase != heartbeat.phase
                || told.lineage != heartbeat.lineage;
            if is_same || (!is_news && now.since(*at) < TELL_PAUSE) {
                self.untold = (!is_same).then_some(*at);
                return;
            }
        }
        self.untold = None;
        control.heartbeat(heartbeat.clone());
        self.told = Some((heartbeat, now));
    }

    fn handle_tick(&mut self) {
        self.turn.pulse += 1;
        if let Some(peers) = &self.parts.peers {
            let listed = self.cycle.peers().into_keys();
            self.turn.handle_links(clock::now(), listed, |node| peers.is_linked(node));
        }
        if !self.cycle.is_member()
            && let Some((node, frame)) = self.cycle.missing_finals()
        {
            self.send(Envelope { node, frame });
        }
        self.fetch_state();
        let timeout = self.parts.settings.coordinator_timeout;
        let now = clock::now();
        let Some(since) = self.unreachable_since.filter(|s| now.since(*s) >= timeout) else {
            return;
        };
        let is_idle =
            (self.is_user_waiting || self.wish.is_some()) && now.since(self.idle_since) >= timeout;
        if !self.joined || is_idle {
            let waited_s = now.since(since).as_secs();
            let addresses: Vec<String> =
                self.parts.settings.coordinators.iter().map(ToString::to_string).collect();
            self.failure.get_or_insert(match self.cycle.world().filter(|_| self.joined) {
                None => Error::Unreachable { waited_s, addresses: addresses.join(",") },
                Some(world) => Error::NoWorld { generation: world.generation, waited_s },
            });
        }
    }
}

const INPUTS_PER_TURN: usize = 256;
/// The shortest recovery target's heartbeats are 10 ms apart; what is newer waits no longer than that.
const TELL_PAUSE: Duration = Duration::from_millis(10);

/// The head of a frame between members; a node's has its weight beside its name.
fn head(frame: &PeerFrame, weight: u64) -> Bytes {
    encode(&(frame, weight))
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("cycle", &self.cycle).finish_non_exhaustive()
    }
}
