//! Raft among the coordinators, as a pure machine: with its submodules the only place that knows the raft core.
//!
//! It has no clock, disk, network or thread. Inputs are ticks, bytes of other coordinators, and proposals; outputs are polled.
//! It promises: a vote, an acknowledgement or a committed entry is not offered before the [`Output::Persist`] that it depends
//! on was confirmed by [`Consensus::handle_persisted`]; the same seed and inputs give the same outputs; no bytes make it panic.
//! While a write is outstanding the core is not touched: inputs wait in a bounded queue.
//!
//! A coordinator with an empty disk begins with a log image at index 1, term 1, and the configured voters, the same on all.
//! Deliberately not here: changes of the voters, which are refused from the wire, and reads that bypass the log.

mod timeout;
mod translation;
mod wire;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;
use raft::eraftpb::{self, MessageType};
use raft::{RawNode, Ready, SnapshotStatus, StateRole};

use types::{Remedy, Term};

pub use crate::log::{HardState, LogEntry, LogGap, LogImage, LogWrite, RecoveredLog};

use crate::log::Log;
use timeout::PinnedTimeout;
use translation::{from_raft, from_raft_entry, from_raft_hard_state, to_raft, write_of};
use wire::{Kind, RaftMessage};

/// One coordinator's part in raft.
pub struct Consensus {
    node: RawNode<Log>,
    voters: Vec<u64>,
    outputs: VecDeque<Output>,
    /// The write that was offered and is not durable yet.
    outstanding: Option<Outstanding>,
    next_number: u64,
    queue: VecDeque<Input>,
    queued_bytes: usize,
    /// Ticks that came while a write was outstanding; taken after the queue, so that a slow disk is no silent leader.
    late_ticks: u32,
    /// Ticks since a write is outstanding.
    waited_ticks: usize,
    heartbeat_ticks: usize,
    /// Peers that an image was just sent to.
    images_sent: Vec<u64>,
    role: Role,
    applied: u64,
    timeout: PinnedTimeout,
    dropped: u64,
    /// Entries kept in memory before a new image.
    tail_entries: u64,
}

/// How a coordinator takes part.
#[derive(Clone, Debug)]
pub struct ConsensusConfig {
    /// This coordinator; not 0.
    pub id: u64,
    /// All coordinators, this one included. Used on an empty disk only: after that the log knows them.
    pub voters: Vec<u64>,
    /// The shortest silence of a leader before an election, in ticks; the longest is 5/3 of it: 12 means 12 to 20. A leader
    /// that hears of no majority for this long steps down.
    pub election_ticks: usize,
    /// Ticks between a leader's heartbeats; at most a third of `election_ticks`.
    pub heartbeat_ticks: usize,
    /// Decides the election timeouts.
    pub seed: u64,
}

/// What the owner of a [`Consensus`] has to do, in the order polled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Make `write` durable, then call [`Consensus::handle_persisted`]. At most one is outstanding.
    Persist {
        /// Names the write.
        number: u64,
        /// The transaction.
        write: LogWrite,
        /// Whether it must survive a power cut before it is confirmed.
        sync: bool,
    },
    /// Send bytes to another coordinator; they may be lost.
    Send {
        /// The receiver.
        to: u64,
        /// For its [`Consensus::step`].
        bytes: Bytes,
    },
    /// A committed entry. They come without gaps. Empty `data` is the entry a new leader begins its term with.
    Apply {
        /// Its place in the log.
        index: u64,
        /// The term of the leader that proposed it.
        term: Term,
        /// What was proposed.
        data: Bytes,
        /// What was given along.
        context: Bytes,
    },
    /// Replace the state machine's state by this image. Comes at a restart too, before the entries after it.
    Restore {
        /// The image.
        image: LogImage,
    },
    /// The leader, the term or this coordinator's part changed.
    Role {
        /// Who leads, if known.
        leader: Option<u64>,
        /// The current term.
        term: Term,
        /// Whether it is this coordinator.
        is_leader: bool,
    },
}

/// Why an input was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConsensusError {
    /// The bytes are no message that another coordinator may send.
    #[error("refused the raft message of coordinator {from}: {reason}")]
    Message {
        /// Whose connection it came on.
        from: u64,
        /// What is wrong.
        reason: String,
    },
    /// Only the leader takes proposals.
    #[error("this coordinator does not lead; the leader is {leader:?}")]
    NotLeader {
        /// Who leads, if known.
        leader: Option<u64>,
    },
    /// Too much waits to be written or committed, or leadership is being handed over.
    #[error(
        "too many proposals are waiting to be committed, or leadership is moving; propose again later"
    )]
    Busy,
    /// A proposal beyond the limits, or an empty one.
    #[error(
        "a proposal of {bytes} bytes; allowed are 1 to {limit}, and a context of {context_limit}"
    )]
    Size {
        /// Bytes of data.
        bytes: usize,
        /// Most bytes of data.
        limit: usize,
        /// Most bytes of context.
        context_limit: usize,
    },
}

impl ConsensusError {
    /// What to do next.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::NotLeader { .. } | Self::Busy => Remedy::Retry,
            Self::Message { .. } | Self::Size { .. } => Remedy::Stop,
        }
    }
}

impl Consensus {
    /// Takes up the log. Poll at once: an empty disk gets its first image, a used one gives back its image and entries.
    ///
    /// # Panics
    /// If the configuration can't work (see [`ConsensusConfig`]), or the log fails [`RecoveredLog::check`].
    #[must_use]
    pub fn new(config: &ConsensusConfig, recovered: RecoveredLog) -> Self {
        config.check();
        let intact = recovered.check();
        assert!(intact.is_ok(), "the recovered log does not hold together: {intact:?}");
        let RecoveredLog { hard_state, image, entries } = recovered;
        let is_new = image.is_none();
        let image = image.unwrap_or_else(|| LogImage::first(config.voters.clone()));
        let log = Log::new(image.clone(), entries, hard_state);
        let (voters, applied, hard_state) = (image.voters.clone(), image.index, log.hard_state());
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let node = RawNode::new(&config.raft(applied), log, &logger)
            .expect("the configuration and the log were checked");
        let mut consensus = Self {
            node,
            voters,
            outputs: VecDeque::new(),
            outstanding: None,
            next_number: 1,
            queue: VecDeque::new(),
            queued_bytes: 0,
            late_ticks: 0,
            waited_ticks: 0,
            heartbeat_ticks: config.heartbeat_ticks,
            images_sent: Vec::new(),
            role: Role::default(),
            applied,
            timeout: PinnedTimeout::new(config),
            dropped: 0,
            tail_entries: TAIL_ENTRIES,
        };
        consensus.pin_timeout(false);
        if is_new {
            let write = LogWrite {
                image: Some(image),
                hard_state: Some(hard_state),
                ..LogWrite::default()
            };
            consensus.persist(write, true, None);
        } else if image.index > LogImage::FIRST_INDEX {
            consensus.outputs.push_back(Output::Restore { image });
        }
        consensus.pump();
        consensus
    }

    /// Time passes by one tick. After a stall of the process call it a few times at most, not once for each tick missed.
    pub fn tick(&mut self) {
        self.keep_alive();
        self.late_ticks = LATE_TICKS_MAX.min(self.late_ticks + 1);
        self.pump();
    }

    /// Takes bytes that coordinator `from` sent; its certificate must have said so.
    ///
    /// # Errors
    /// If the bytes are no message that `from` may send to this coordinator. A message that is well-formed but late, doubled
    /// or too much is dropped without an error.
    pub fn step(&mut self, from: u64, bytes: &[u8]) -> Result<(), ConsensusError> {
        let refuse = |reason| ConsensusError::Message { from, reason };
        let message = RaftMessage::decode(bytes).map_err(refuse)?;
        self.check_sender(from, &message).map_err(refuse)?;
        self.answer_alive(&message);
        self.enqueue(Input::Message(message));
        Ok(())
    }

    /// Proposes an entry. It is committed when it comes back as [`Output::Apply`]; it may be lost when leadership is.
    ///
    /// # Errors
    /// If it was not taken. `Ok` is no promise.
    pub fn propose(&mut self, data: Bytes, context: Bytes) -> Result<(), ConsensusError> {
        if data.is_empty()
            || data.len() > wire::ENTRY_BYTES_MAX
            || context.len() > wire::CONTEXT_BYTES_MAX
        {
            return Err(ConsensusError::Size {
                bytes: data.len(),
                limit: wire::ENTRY_BYTES_MAX,
                context_limit: wire::CONTEXT_BYTES_MAX,
            });
        }
        if !self.is_leader() {
            return Err(ConsensusError::NotLeader { leader: self.leader() });
        }
        let waiting = self.node.raft.uncommitted_size() + self.queued_bytes + data.len();
        let is_full = waiting > UNCOMMITTED_BYTES_MAX || self.queue.len() >= QUEUE_MAX;
        if is_full || self.node.raft.lead_transferee.is_some() {
            return Err(ConsensusError::Busy);
        }
        self.enqueue(Input::Propose { data, context });
        Ok(())
    }

    /// The write of this number is durable. A number that is not outstanding is ignored.
    pub fn handle_persisted(&mut self, number: u64) {
        let Some(outstanding) =
            self.outstanding.take_if(|outstanding| outstanding.number == number)
        else {
            return;
        };
        match outstanding.ready {
            Some(ready) => self.finish(ready, outstanding.write),
            None => self.node.mut_store().record(outstanding.write, self.tail_entries),
        }
        self.pump();
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.outputs.pop_front()?;
        match &output {
            Output::Apply { index, .. } => self.applied = *index,
            Output::Restore { image } => self.applied = image.index,
            _ => {}
        }
        Some(output)
    }

    /// Replaces the log up to `index`, which was applied, by the state machine's state after it. Ignored if there is a newer
    /// image, or if the image is larger than 16 MiB.
    pub fn compact(&mut self, index: u64, image_data: Bytes) {
        if index <= self.applied && image_data.len() <= wire::IMAGE_BYTES_MAX {
            self.enqueue(Input::Compact { index, data: image_data });
        }
    }

    /// Hands leadership to `to`, if this coordinator leads. Proposals are refused meanwhile; given up after an election timeout.
    pub fn transfer_leader(&mut self, to: u64) {
        self.enqueue(Input::Transfer { to });
    }

    /// The connection to a coordinator was lost, or bytes for it were dropped.
    pub fn report_unreachable(&mut self, to: u64) {
        self.enqueue(Input::Unreachable { to });
    }

    /// What another coordinator confirmed counts no longer: its disk is a new one.
    pub fn forget_progress(&mut self, of: u64) {
        self.enqueue(Input::Forget { of });
    }

    /// Whether this coordinator leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.node.raft.state == StateRole::Leader
    }

    /// Who leads, if known.
    #[must_use]
    pub fn leader(&self) -> Option<u64> {
        Some(self.node.raft.leader_id).filter(|leader| *leader != raft::INVALID_ID)
    }

    /// The current term.
    #[must_use]
    pub fn term(&self) -> Term {
        Term(self.node.raft.term)
    }

    /// The last entry that was polled as [`Output::Apply`] or with an [`Output::Restore`].
    #[must_use]
    pub fn applied_index(&self) -> u64 {
        self.applied
    }

    /// The last entry known to be committed.
    #[must_use]
    pub fn commit_index(&self) -> u64 {
        self.node.raft.raft_log.committed
    }

    /// The last entry of the log, durable or not.
    #[must_use]
    pub fn last_index(&self) -> u64 {
        self.node.raft.raft_log.last_index()
    }

    /// The index of the newest log image.
    #[must_use]
    pub fn image_index(&self) -> u64 {
        self.node.store().image().index
    }

    /// The coordinators, as the log knows them, ascending. Refuse to run if the configuration names others.
    #[must_use]
    pub fn voters(&self) -> &[u64] {
        &self.voters
    }

    /// Messages and proposals dropped because the queue was full, or because the log showed them to be impossible.
    #[must_use]
    pub fn dropped_inputs(&self) -> u64 {
        self.dropped
    }

    fn check_sender(&self, from: u64, message: &RaftMessage) -> Result<(), String> {
        let id = self.node.raft.id;
        if message.from != from {
            return Err(format!("it says it is from {}", message.from));
        }
        if message.to != id {
            return Err(format!("it is for {}, this is {id}", message.to));
        }
        if from == id || !self.voters.contains(&from) {
            return Err(format!("the other coordinators are {:?}, less {id}", self.voters));
        }
        if let Some(image) = message.image.as_ref().filter(|image| image.voters != self.voters) {
            return Err(format!(
                "its image has voters {:?}, here they are {:?}",
                image.voters, self.voters
            ));
        }
        Ok(())
    }

    fn enqueue(&mut self, input: Input) {
        let bytes = input.bytes();
        if self.queue.len() >= QUEUE_MAX || self.queued_bytes + bytes > QUEUE_BYTES_MAX {
            self.dropped += 1;
            return;
        }
        self.queued_bytes += bytes;
        self.queue.push_back(input);
        self.pump();
    }

    /// A slow disk must not look like a dead leader: while a write is outstanding the core stands still, so the leader's heartbeats
    /// leave from here. They promise nothing about the log, and their term is durable, or they do not leave.
    fn keep_alive(&mut self) {
        if self.outstanding.is_none() {
            self.waited_ticks = 0;
            return;
        }
        self.waited_ticks += 1;
        let is_due = self.waited_ticks.is_multiple_of(self.heartbeat_ticks);
        if is_due && self.is_leader() && self.is_term_durable() {
            let id = self.node.raft.id;
            for to in self.voters.clone().into_iter().filter(|voter| *voter != id) {
                self.send_alive(Kind::Heartbeat, to);
            }
        }
    }

    /// The same for a follower: it is alive, whatever its disk does.
    fn answer_alive(&mut self, message: &RaftMessage) {
        let is_heartbeat = message.kind == Kind::Heartbeat
            && message.term == self.node.raft.term
            && self.leader() == Some(message.from);
        if self.outstanding.is_some() && is_heartbeat && self.is_term_durable() {
            self.send_alive(Kind::HeartbeatResponse, message.from);
        }
    }

    fn send_alive(&mut self, kind: Kind, to: u64) {
        let (from, term) = (self.node.raft.id, self.node.raft.term);
        let bytes = RaftMessage::bare(kind, from, to, term).encode();
        self.outputs.push_back(Output::Send { to, bytes });
    }

    /// Whether the present term is on the disk: the log in memory has what was confirmed.
    fn is_term_durable(&self) -> bool {
        self.node.store().hard_state().term.0 == self.node.raft.term
    }

    /// Works until a write is outstanding or nothing is left to do.
    fn pump(&mut self) {
        while self.outstanding.is_none() {
            if self.node.has_ready() {
                self.take_ready();
            } else if let Some(to) = self.images_sent.pop() {
                // Whether it arrives shows in its answers; without a report raft would not speak to it again.
                self.node.report_snapshot(to, SnapshotStatus::Finish);
            } else if let Some(input) = self.queue.pop_front() {
                self.queued_bytes -= input.bytes();
                self.take_input(input);
            } else if self.late_ticks > 0 {
                self.late_ticks -= 1;
                self.node.tick();
                self.pin_timeout(self.node.raft.election_elapsed == 0);
            } else {
                break;
            }
        }
    }

    fn take_input(&mut self, input: Input) {
        match input {
            Input::Message(message) => self.take_message(message),
            Input::Propose { data, context } => {
                self.take_proposal(data, context);
                self.take_further_proposals();
            }
            Input::Compact { index, data } => self.take_compaction(index, data),
            Input::Transfer { to } => self.node.transfer_leader(to),
            Input::Unreachable { to } => self.node.report_unreachable(to),
            Input::Forget { of } => self.take_forgetting(of),
        }
        self.pin_timeout(false);
    }

    fn take_forgetting(&mut self, of: u64) {
        let is_other = of != self.node.raft.id && self.is_leader();
        if let Some(progress) = self.node.raft.mut_prs().get_mut(of).filter(|_| is_other) {
            progress.snapshot_failure();
            progress.matched = 0;
            progress.become_probe();
        }
    }

    fn take_message(&mut self, mut message: RaftMessage) {
        let (last, term) = (self.last_index(), self.node.raft.term);
        match message.kind {
            // Raft panics on a commit index beyond the log. It can only come from a leader that this disk lost entries to.
            Kind::Heartbeat if message.term >= term && message.commit > last => {
                self.dropped += 1;
                message.commit = 0;
            }
            Kind::AppendResponse
                if message.term == term && !message.reject && message.index > last =>
            {
                self.dropped += 1;
                return;
            }
            _ => {}
        }
        if self.node.step(to_raft(message)).is_err() {
            self.dropped += 1;
        }
    }

    fn take_proposal(&mut self, data: Bytes, context: Bytes) {
        // A follower would forward it.
        if !self.is_leader() || self.node.propose(context.into(), data.into()).is_err() {
            self.dropped += 1;
        }
    }

    /// Proposals that wait together share one write.
    fn take_further_proposals(&mut self) {
        for _ in 1..PROPOSALS_PER_WRITE {
            let next = self.queue.pop_front_if(|next| matches!(next, Input::Propose { .. }));
            let Some(Input::Propose { data, context }) = next else { break };
            self.queued_bytes -= data.len() + context.len();
            self.take_proposal(data, context);
        }
    }

    fn take_compaction(&mut self, index: u64, data: Bytes) {
        let applied = self.node.raft.raft_log.applied();
        let store = self.node.store();
        let Some(term) =
            store.term(index).filter(|_| index > store.image().index && index <= applied)
        else {
            return;
        };
        let image =
            LogImage { index, term, voters: self.voters.clone(), learners: Vec::new(), data };
        let hard_state = from_raft_hard_state(&self.node.raft.hard_state());
        let write =
            LogWrite { image: Some(image), hard_state: Some(hard_state), ..LogWrite::default() };
        self.persist(write, true, None);
    }

    fn take_ready(&mut self) {
        let mut ready = self.node.ready();
        self.report_role();
        // Only a leader has these: it may send while it writes, for its own acknowledgement counts only after.
        for message in ready.take_messages() {
            self.send(message);
        }
        let write = write_of(&ready, self.node.store().last_index());
        if write.is_empty() {
            self.finish(ready, write);
        } else {
            let sync = ready.must_sync();
            self.persist(write, sync, Some(ready));
        }
    }

    fn finish(&mut self, mut ready: Ready, write: LogWrite) {
        let image = write.image.clone();
        self.node.mut_store().record(write, 0);
        for message in ready.take_persisted_messages() {
            self.send(message);
        }
        if let Some(image) = image {
            self.outputs.push_back(Output::Restore { image });
        }
        self.apply(ready.take_committed_entries());
        let mut light = self.node.advance(ready);
        if let Some(commit) = light.commit_index() {
            self.node.mut_store().commit_to(commit);
        }
        for message in light.take_messages() {
            self.send(message);
        }
        self.apply(light.take_committed_entries());
        self.node.advance_apply();
        self.report_role();
    }

    fn persist(&mut self, write: LogWrite, sync: bool, ready: Option<Ready>) {
        let number = self.next_number;
        self.next_number += 1;
        self.outputs.push_back(Output::Persist { number, write: write.clone(), sync });
        self.outstanding = Some(Outstanding { number, write, ready });
    }

    fn apply(&mut self, entries: Vec<eraftpb::Entry>) {
        for entry in entries {
            let LogEntry { index, term, data, context, .. } = from_raft_entry(entry);
            self.outputs.push_back(Output::Apply { index, term, data, context });
        }
    }

    fn send(&mut self, message: eraftpb::Message) {
        let to = message.to;
        if message.get_msg_type() == MessageType::MsgSnapshot {
            self.images_sent.push(to);
        }
        if let Some(message) = from_raft(message) {
            self.outputs.push_back(Output::Send { to, bytes: message.encode() });
        }
    }

    fn report_role(&mut self) {
        let role = Role { leader: self.leader(), term: self.term(), is_leader: self.is_leader() };
        if role != self.role {
            self.role = role;
            let Role { leader, term, is_leader } = role;
            self.outputs.push_back(Output::Role { leader, term, is_leader });
        }
    }

    /// Raft draws its election timeouts from the thread's generator; this puts ours in their place before they matter.
    fn pin_timeout(&mut self, campaigned: bool) {
        let raft = &mut self.node.raft;
        let drawn_for = (raft.term, raft.leader_id, raft.state == StateRole::Leader);
        if campaigned || drawn_for != self.timeout.drawn_for {
            self.timeout.draw(drawn_for);
        }
        raft.set_randomized_election_timeout(self.timeout.ticks);
    }
}

impl fmt::Debug for Consensus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consensus")
            .field("id", &self.node.raft.id)
            .field("role", &self.role)
            .field("applied", &self.applied)
            .field("commit", &self.commit_index())
            .field("last", &self.last_index())
            .finish_non_exhaustive()
    }
}

impl ConsensusConfig {
    fn check(&self) {
        let voters = self.voters.len();
        assert!(self.id != 0 && !self.voters.contains(&0), "coordinator ids begin at 1");
        assert!(
            (1..=wire::VOTERS_MAX as usize).contains(&voters),
            "{voters} coordinators; 1 to {} can vote",
            wire::VOTERS_MAX
        );
        assert!(self.heartbeat_ticks >= 1, "a heartbeat takes at least one tick");
        assert!(
            self.election_ticks >= 3 * self.heartbeat_ticks,
            "an election must wait for three heartbeats"
        );
    }

    fn election_ticks_max(&self) -> usize {
        self.election_ticks + self.election_ticks * 2 / 3
    }

    fn raft(&self, applied: u64) -> raft::Config {
        raft::Config {
            id: self.id,
            election_tick: self.election_ticks,
            heartbeat_tick: self.heartbeat_ticks,
            min_election_tick: self.election_ticks,
            max_election_tick: self.election_ticks_max() + 1,
            applied,
            max_size_per_msg: 256 << 10,
            max_inflight_msgs: 32,
            check_quorum: true,
            pre_vote: true,
            max_uncommitted_size: UNCOMMITTED_BYTES_MAX as u64,
            max_committed_size_per_ready: 1 << 20,
            ..raft::Config::default()
        }
    }
}

struct Outstanding {
    number: u64,
    write: LogWrite,
    /// `None` for a compaction or the first image, which the core does not wait for.
    ready: Option<Ready>,
}

enum Input {
    Message(RaftMessage),
    Propose { data: Bytes, context: Bytes },
    Compact { index: u64, data: Bytes },
    Transfer { to: u64 },
    Unreachable { to: u64 },
    Forget { of: u64 },
}

impl Input {
    fn bytes(&self) -> usize {
        match self {
            Self::Message(message) => {
                let image = message.image.as_ref().map_or(0, |image| image.data.len());
                image
                    + message
                        .entries
                        .iter()
                        .map(|entry| entry.data.len() + entry.context.len())
                        .sum::<usize>()
            }
            Self::Propose { data, context } => data.len() + context.len(),
            Self::Compact { data, .. } => data.len(),
            Self::Transfer { .. } | Self::Unreachable { .. } | Self::Forget { .. } => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Role {
    leader: Option<u64>,
    term: Term,
    is_leader: bool,
}

/// Entries kept in memory before an image, so that a coordinator a little behind needs no image.
const TAIL_ENTRIES: u64 = 512;
/// With the entries read from the log at once (512), below the wire's limit for one message.
const PROPOSALS_PER_WRITE: usize = 256;
/// Inputs that wait for a write: several rounds of messages from six others, and a burst of proposals.
const QUEUE_MAX: usize = 1024;
/// Bytes that wait for a write: two images and the proposals.
const QUEUE_BYTES_MAX: usize = 48 << 20;
/// Proposals not committed yet.
const UNCOMMITTED_BYTES_MAX: usize = 8 << 20;
/// Ticks made up for after a slow write. More would let a resumed process depose a healthy leader.
const LATE_TICKS_MAX: u32 = 3;
