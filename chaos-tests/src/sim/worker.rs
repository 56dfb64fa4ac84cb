//! One simulated worker process: its participant, its step machine, its part in checkpoints.

use std::collections::BTreeMap;
use std::time::Duration;

use membership::{Heartbeat, Intent, Participant, ParticipantEvent, Phase, Release, ToCoordinator};
use types::{Attempt, Digest, Generation, NodeId, Step, Timestamp};

use ripstop::change::ChangeKeeper;
use ripstop::turn::TurnKeeper;

use super::node::{Node, Note, TrainState, User};

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) node: Node,
    pub(crate) participant: Participant,
    pub(crate) is_dead: bool,
    /// Stopped until then: it hears and says nothing.
    pub(crate) frozen_until: Option<Timestamp>,
    pub(crate) release: Option<Release>,
    pub(crate) refusal: Option<String>,
    pub(crate) intent: Option<Intent>,
    /// What was staged for the attempt in hand, if this worker will publish it.
    pub(crate) staged: Option<(Intent, TrainState)>,
    pub(crate) is_publishing: Option<Attempt>,
    pub(crate) seen_generation: Option<Generation>,
    pub(crate) told: Option<Heartbeat>,
    /// Its program never comes back.
    pub(crate) is_hung: bool,
    pub(crate) turn: TurnKeeper,
    /// Its leaves take so many times as long as another's.
    pub(crate) slowness: u64,
    change: ChangeKeeper,
    is_draining: bool,
}

impl Worker {
    pub(crate) fn new(node: Node, participant: Participant) -> Self {
        Self {
            node,
            participant,
            is_dead: false,
            frozen_until: None,
            release: None,
            refusal: None,
            intent: None,
            staged: None,
            is_publishing: None,
            seen_generation: None,
            told: None,
            is_hung: false,
            turn: TurnKeeper::new(),
            slowness: 1,
            change: ChangeKeeper::default(),
            is_draining: false,
        }
    }

    pub(crate) fn id(&self) -> NodeId {
        self.node.id
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.is_dead && self.release.is_none() && self.refusal.is_none()
    }

    pub(crate) fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Takes what the coordinators said; what the caller must do is left in the fields.
    pub(crate) fn handle_event(&mut self, event: ParticipantEvent) -> Option<ParticipantEvent> {
        match event {
            ParticipantEvent::World(world) => self.node.handle_world(world),
            ParticipantEvent::Intent(intent) if intent.members.contains(&self.id()) => {
                self.intent = Some(intent);
            }
            ParticipantEvent::Committed { attempt, .. }
            | ParticipantEvent::Abandoned { attempt, .. } => {
                self.intent.take_if(|i| i.attempt <= attempt);
                self.staged.take_if(|(i, _)| i.attempt <= attempt);
            }
            ParticipantEvent::Released(release) => self.release = Some(release),
            ParticipantEvent::Refused { reason, .. } => self.refusal = Some(reason),
            publish @ ParticipantEvent::Publish { .. } => return Some(publish),
            _ => {}
        }
        None
    }

    /// The staged share, if the boundary of an intent has come and the user stands at it; or the word that it has passed.
    pub(crate) fn stage(&mut self) -> Option<Result<(Intent, TrainState), ToCoordinator>> {
        let applied = self.node.cycle.applied()?;
        let (lineage, state) = self.node.state.clone()?;
        if !matches!(self.node.user, User::AtBoundary) {
            return None;
        }
        let intent = self.intent.take_if(|i| i.step <= applied)?;
        if intent.step < applied
            || lineage != intent.lineage
            || self.node.cycle.lineage() != Some(lineage)
        {
            let reason = format!("boundary {} has passed: at {applied}", intent.step);
            return Some(Err(ToCoordinator::CheckpointFailed { attempt: intent.attempt, reason }));
        }
        Some(Ok((intent, state)))
    }

    /// Takes up what the machine said of changes.
    pub(crate) fn hear_notes(&mut self, now: Timestamp) {
        let counters = self.node.cycle.counters();
        for note in self.node.notes.drain(..) {
            match note {
                Note::Adopted(generation) => self.change.handle_adopted(now, generation, counters),
                Note::Entered(generation) => self.change.handle_entered(now, generation),
                Note::Ready => self.change.handle_ready(now, counters),
            }
        }
    }

    pub(crate) fn heartbeat(&mut self, now: Timestamp) -> Heartbeat {
        let cycle = &self.node.cycle;
        let applied: Vec<(Step, Digest)> = cycle.digests().collect();
        let newest = applied.len().saturating_sub(Heartbeat::APPLIED_MAX);
        let phase = match (cycle.world(), cycle.applied()) {
            _ if self.is_draining => Phase::Leaving,
            (None, _) => Phase::Joining,
            (Some(_), None) => Phase::Syncing,
            (Some(_), Some(_)) if cycle.is_member() => Phase::Active,
            (Some(_), Some(_)) => Phase::Following,
        };
        Heartbeat {
            entered: cycle.entered(),
            lineage: cycle.lineage().unwrap_or_default(),
            applied: applied[newest..].to_vec(),
            phase,
            turn: self.turn.turn,
            progress: self.turn.progress,
            pulse: self.turn.pulse,
            longest_leaf: self.turn.longest_leaf(),
            leaf_time: self.turn.leaf_time(),
            cut_off: self.turn.cut_off(now, CUT_OFF_AFTER),
            changes: self.change.newest(),
        }
    }
}

/// Half the recovery target.
const CUT_OFF_AFTER: Duration = Duration::from_millis(500);

/// The simulated store: manifests by key, and the states that they make real.
pub(crate) type Store = BTreeMap<String, TrainState>;
