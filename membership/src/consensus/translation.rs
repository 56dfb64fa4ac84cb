//! Between the raft core's words and ours: its storage on top of [`Log`], its messages, entries and images.

use raft::eraftpb::{self, MessageType};
use raft::{GetEntriesContext, RaftState, Ready, Storage, StorageError};

use types::Term;

use super::wire::{Kind, RaftMessage};
use crate::log::{HardState, Log, LogEntry, LogImage, LogWrite};

/// The log as the core reads it. Nothing here fails but what raft expects to: a compacted range, an image not there yet.
impl Storage for Log {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let HardState { term, vote, commit } = self.hard_state();
        let hard_state = eraftpb::HardState { term: term.0, vote, commit, ..Default::default() };
        let conf_state =
            eraftpb::ConfState { voters: self.image().voters.clone(), ..Default::default() };
        Ok(RaftState { hard_state, conf_state })
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<eraftpb::Entry>> {
        if low < self.first_index() {
            return Err(StorageError::Compacted.into());
        }
        let mut entries: Vec<_> =
            self.range(low, high).take(ENTRIES_READ_MAX).map(to_raft_entry).collect();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let missing = if index < self.first_index() {
            StorageError::Compacted
        } else {
            StorageError::Unavailable
        };
        self.term(index).map(|term| term.0).ok_or(missing.into())
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.first_index())
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last_index())
    }

    fn snapshot(&self, request_index: u64, _to: u64) -> raft::Result<eraftpb::Snapshot> {
        let image = self.image();
        if image.index < request_index {
            return Err(StorageError::SnapshotTemporarilyUnavailable.into());
        }
        Ok(to_raft_image(image.clone()))
    }
}

/// What a `Ready` wants to be durable, over a log that ends at `stored_last`.
pub(super) fn write_of(ready: &Ready, stored_last: u64) -> LogWrite {
    let mut write =
        LogWrite { hard_state: ready.hs().map(from_raft_hard_state), ..LogWrite::default() };
    if !ready.snapshot().is_empty() {
        let image = from_raft_image(ready.snapshot().clone());
        write.truncate_from = Some(image.index + 1);
        write.image = Some(image);
    }
    write.entries = ready.entries().iter().cloned().map(from_raft_entry).collect();
    if let Some(first) =
        write.entries.first().filter(|first| first.index <= stored_last && write.image.is_none())
    {
        write.truncate_from = Some(first.index);
    }
    write
}

pub(super) fn from_raft_hard_state(state: &eraftpb::HardState) -> HardState {
    HardState { term: Term(state.term), vote: state.vote, commit: state.commit }
}

pub(super) fn from_raft_entry(entry: eraftpb::Entry) -> LogEntry {
    // Kinds other than normal are refused from the wire and never proposed.
    LogEntry {
        index: entry.index,
        term: Term(entry.term),
        kind: LogEntry::NORMAL,
        data: entry.data,
        context: entry.context,
    }
}

pub(super) fn to_raft_entry(entry: &LogEntry) -> eraftpb::Entry {
    eraftpb::Entry {
        index: entry.index,
        term: entry.term.0,
        data: entry.data.clone(),
        context: entry.context.clone(),
        ..Default::default()
    }
}

pub(super) fn from_raft_image(mut snapshot: eraftpb::Snapshot) -> LogImage {
    let data = snapshot.take_data();
    let mut metadata = snapshot.take_metadata();
    let mut voters = metadata.take_conf_state().take_voters();
    voters.sort_unstable();
    LogImage {
        index: metadata.index,
        term: Term(metadata.term),
        voters,
        learners: Vec::new(),
        data,
    }
}

pub(super) fn to_raft_image(image: LogImage) -> eraftpb::Snapshot {
    let mut snapshot = eraftpb::Snapshot::default();
    snapshot.set_data(image.data);
    let metadata = snapshot.mut_metadata();
    metadata.index = image.index;
    metadata.term = image.term.0;
    metadata.mut_conf_state().voters = image.voters;
    snapshot
}

/// `None` for the kinds that stay in one process.
pub(super) fn from_raft(mut message: eraftpb::Message) -> Option<RaftMessage> {
    let kind = match message.get_msg_type() {
        MessageType::MsgAppend => Kind::Append,
        MessageType::MsgAppendResponse => Kind::AppendResponse,
        MessageType::MsgRequestVote => Kind::RequestVote,
        MessageType::MsgRequestVoteResponse => Kind::RequestVoteResponse,
        MessageType::MsgSnapshot => Kind::Image,
        MessageType::MsgHeartbeat => Kind::Heartbeat,
        MessageType::MsgHeartbeatResponse => Kind::HeartbeatResponse,
        MessageType::MsgTimeoutNow => Kind::TimeoutNow,
        MessageType::MsgRequestPreVote => Kind::RequestPreVote,
        MessageType::MsgRequestPreVoteResponse => Kind::RequestPreVoteResponse,
        _ => return None,
    };
    let image = (kind == Kind::Image).then(|| from_raft_image(message.take_snapshot()));
    Some(RaftMessage {
        kind,
        to: message.to,
        from: message.from,
        term: message.term,
        log_term: message.log_term,
        index: message.index,
        commit: message.commit,
        commit_term: message.commit_term,
        reject: message.reject,
        reject_hint: message.reject_hint,
        context: message.take_context(),
        entries: message.take_entries().into_iter().map(from_raft_entry).collect(),
        image,
    })
}

pub(super) fn to_raft(message: RaftMessage) -> eraftpb::Message {
    let mut raft = eraftpb::Message {
        to: message.to,
        from: message.from,
        term: message.term,
        log_term: message.log_term,
        index: message.index,
        commit: message.commit,
        commit_term: message.commit_term,
        reject: message.reject,
        reject_hint: message.reject_hint,
        context: message.context,
        ..Default::default()
    };
    raft.set_msg_type(match message.kind {
        Kind::Append => MessageType::MsgAppend,
        Kind::AppendResponse => MessageType::MsgAppendResponse,
        Kind::RequestVote => MessageType::MsgRequestVote,
        Kind::RequestVoteResponse => MessageType::MsgRequestVoteResponse,
        Kind::Image => MessageType::MsgSnapshot,
        Kind::Heartbeat => MessageType::MsgHeartbeat,
        Kind::HeartbeatResponse => MessageType::MsgHeartbeatResponse,
        Kind::TimeoutNow => MessageType::MsgTimeoutNow,
        Kind::RequestPreVote => MessageType::MsgRequestPreVote,
        Kind::RequestPreVoteResponse => MessageType::MsgRequestPreVoteResponse,
    });
    raft.set_entries(message.entries.iter().map(to_raft_entry).collect());
    if let Some(image) = message.image {
        raft.set_snapshot(to_raft_image(image));
    }
    raft
}

/// Entries read at once, so that a message has fewer than the wire's 1024 even with those not written yet.
const ENTRIES_READ_MAX: usize = 512;
