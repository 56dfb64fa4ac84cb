//! How a raft message becomes bytes: a versioned form of our own, with limits, so that no foreign parser sees bytes from the
//! network. All that can be checked without knowing the log is checked here; raft panics on some of it.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use types::Term;

use crate::log::{LogEntry, LogImage};

/// A raft message between two coordinators. The fields mean what raft's mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RaftMessage {
    pub(super) kind: Kind,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) term: u64,
    pub(super) log_term: u64,
    pub(super) index: u64,
    pub(super) commit: u64,
    pub(super) commit_term: u64,
    pub(super) reject: bool,
    pub(super) reject_hint: u64,
    pub(super) context: Bytes,
    pub(super) entries: Vec<LogEntry>,
    pub(super) image: Option<LogImage>,
}

/// The kinds that may come from the network. Raft's others are inputs of its own process, or forwarding, which isn't used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    Append,
    AppendResponse,
    RequestVote,
    RequestVoteResponse,
    Image,
    Heartbeat,
    HeartbeatResponse,
    TimeoutNow,
    RequestPreVote,
    RequestPreVoteResponse,
}

/// The part of fixed size. `entries` and `voters` count what follows, so that a count is checked before anything is allocated.
#[derive(Serialize, Deserialize)]
struct Head {
    kind: Kind,
    to: u64,
    from: u64,
    term: u64,
    log_term: u64,
    index: u64,
    commit: u64,
    commit_term: u64,
    reject: bool,
    reject_hint: u64,
    context: Bytes,
    entries: u32,
    image: Option<ImageHead>,
}

#[derive(Serialize, Deserialize)]
struct ImageHead {
    index: u64,
    term: Term,
    voters: u32,
    data: Bytes,
}

impl RaftMessage {
    /// A message with nothing in it but who, to whom and in which term.
    pub(super) fn bare(kind: Kind, from: u64, to: u64, term: u64) -> Self {
        Self {
            kind,
            to,
            from,
            term,
            log_term: 0,
            index: 0,
            commit: 0,
            commit_term: 0,
            reject: false,
            reject_hint: 0,
            context: Bytes::new(),
            entries: Vec::new(),
            image: None,
        }
    }

    pub(super) fn encode(&self) -> Bytes {
        let image = self.image.as_ref();
        let head = Head {
            kind: self.kind,
            to: self.to,
            from: self.from,
            term: self.term,
            log_term: self.log_term,
            index: self.index,
            commit: self.commit,
            commit_term: self.commit_term,
            reject: self.reject,
            reject_hint: self.reject_hint,
            context: self.context.clone(),
            entries: count(self.entries.len()),
            image: image.map(|image| ImageHead {
                index: image.index,
                term: image.term,
                voters: count(image.voters.len()),
                data: image.data.clone(),
            }),
        };
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&types::encode(&head));
        for entry in &self.entries {
            bytes.extend_from_slice(&types::encode(entry));
        }
        for voter in image.iter().flat_map(|image| &image.voters) {
            bytes.extend_from_slice(&types::encode(voter));
        }
        bytes.into()
    }

    /// The message in `bytes`, checked as far as it can be without the log. The error is the reason.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(format!("{} bytes; allowed are {MESSAGE_BYTES_MAX}", bytes.len()));
        }
        let (&version, bytes) = bytes.split_first().ok_or("no bytes")?;
        if version != VERSION {
            return Err(format!(
                "raft message of version {version}; this coordinator speaks {VERSION}"
            ));
        }
        let (head, mut rest) = take::<Head>(bytes)?;
        if head.entries > ENTRIES_MAX {
            return Err(format!("{} entries; allowed are {ENTRIES_MAX}", head.entries));
        }
        let mut entries = Vec::with_capacity(head.entries as usize);
        for _ in 0..head.entries {
            let entry;
            (entry, rest) = take::<LogEntry>(rest)?;
            entries.push(entry);
        }
        let mut image = None;
        if let Some(ImageHead { index, term, voters: many, data }) = head.image {
            if many > VOTERS_MAX {
                return Err(format!("{many} voters; allowed are {VOTERS_MAX}"));
            }
            let mut voters = Vec::new();
            for _ in 0..many {
                let voter;
                (voter, rest) = take::<u64>(rest)?;
                voters.push(voter);
            }
            image = Some(LogImage { index, term, voters, learners: Vec::new(), data });
        }
        if !rest.is_empty() {
            return Err(format!("{} bytes left over", rest.len()));
        }
        let Head {
            kind,
            to,
            from,
            term,
            log_term,
            index,
            commit,
            commit_term,
            reject,
            reject_hint,
            context,
            ..
        } = head;
        let message = Self {
            kind,
            to,
            from,
            term,
            log_term,
            index,
            commit,
            commit_term,
            reject,
            reject_hint,
            context,
            entries,
            image,
        };
        message.check()?;
        Ok(message)
    }

    fn check(&self) -> Result<(), String> {
        // Term 0 would pass for a message of our own process, and sums of indices must not overflow.
        let numbers =
            [self.term, self.log_term, self.index, self.commit, self.commit_term, self.reject_hint];
        if self.term == 0 || numbers.iter().any(|number| *number > NUMBER_MAX) {
            return Err("term or index out of range".to_owned());
        }
        if self.context.len() > CONTEXT_BYTES_MAX {
            return Err(format!(
                "context of {} bytes; allowed are {CONTEXT_BYTES_MAX}",
                self.context.len()
            ));
        }
        if !self.entries.is_empty() && self.kind != Kind::Append
            || self.image.is_some() != (self.kind == Kind::Image)
        {
            return Err(format!("{:?} with the content of another kind", self.kind));
        }
        // Every log begins with an image, so every entry has one before it. Raft takes term 0 for beyond the log, as a match.
        if self.kind == Kind::Append && self.log_term == 0 {
            return Err("append after an entry of term 0".to_owned());
        }
        let mut last = (self.index, Term(self.log_term));
        for entry in &self.entries {
            if entry.index != last.0 + 1
                || entry.term < last.1
                || entry.term == Term(0)
                || entry.term.0 > self.term
            {
                return Err(format!(
                    "entry {} of term {} does not follow {last:?}",
                    entry.index, entry.term
                ));
            }
            if entry.kind != LogEntry::NORMAL {
                return Err(format!(
                    "entry of kind {}, which this version does not know",
                    entry.kind
                ));
            }
            if entry.data.len() > ENTRY_BYTES_MAX || entry.context.len() > CONTEXT_BYTES_MAX {
                return Err(format!(
                    "entry of {} bytes; allowed are {ENTRY_BYTES_MAX}",
                    entry.data.len()
                ));
            }
            last = (entry.index, entry.term);
        }
        if let Some(image) = &self.image {
            let numbers = 1..=NUMBER_MAX;
            if !numbers.contains(&image.index) || image.term == Term(0) || image.term.0 > self.term
            {
                return Err("log image with an index or term out of range".to_owned());
            }
            if image.data.len() > IMAGE_BYTES_MAX {
                return Err(format!(
                    "log image of {} bytes; allowed are {IMAGE_BYTES_MAX}",
                    image.data.len()
                ));
            }
        }
        Ok(())
    }
}

fn take<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), String> {
    postcard::take_from_bytes(bytes).map_err(|error| error.to_string())
}

fn count(length: usize) -> u32 {
    u32::try_from(length).expect("limits are far below")
}

/// Grows with each change of the form.
const VERSION: u8 = 1;
/// Most entries in one message.
pub(super) const ENTRIES_MAX: u32 = 1024;
/// Largest entry.
pub(super) const ENTRY_BYTES_MAX: usize = 1 << 20;
/// Largest log image.
pub(super) const IMAGE_BYTES_MAX: usize = 16 << 20;
/// Largest context of an entry or a message.
pub(super) const CONTEXT_BYTES_MAX: usize = 64;
/// Most coordinators.
pub(super) const VOTERS_MAX: u32 = 7;
/// Largest message: an image and its head.
const MESSAGE_BYTES_MAX: usize = IMAGE_BYTES_MAX + (1 << 16);
/// Largest term or index: out of reach in practice, and far from an overflow.
const NUMBER_MAX: u64 = 1 << 48;

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: Kind) -> RaftMessage {
        RaftMessage {
            kind,
            to: 2,
            from: 1,
            term: 3,
            log_term: 2,
            index: 7,
            commit: 6,
            commit_term: 0,
            reject: false,
            reject_hint: 0,
            context: Bytes::new(),
            entries: Vec::new(),
            image: None,
        }
    }

    fn append() -> RaftMessage {
        let entry = |index, term| LogEntry {
            index,
            term: Term(term),
            kind: LogEntry::NORMAL,
            data: Bytes::from_static(b"data"),
            context: Bytes::from_static(b"c"),
        };
        RaftMessage { entries: vec![entry(8, 2), entry(9, 3)], ..message(Kind::Append) }
    }

    #[test]
    fn a_message_keeps_its_form() {
        let append = append();
        let bytes = append.encode();
        // Golden bytes: change VERSION with them.
        assert_eq!(bytes[..], *b"\x01\x00\x02\x01\x03\x02\x07\x06\x00\x00\x00\x00\x02\x00\x08\x02\x00\x04data\x01c\x09\x03\x00\x04data\x01c");
        assert_eq!(RaftMessage::decode(&bytes), Ok(append));
        let image = LogImage {
            index: 9,
            data: Bytes::from_static(b"state"),
            ..LogImage::first(vec![1, 2, 3])
        };
        let image = RaftMessage { image: Some(image), ..message(Kind::Image) };
        assert_eq!(RaftMessage::decode(&image.encode()), Ok(image));
    }

    #[test]
    fn what_raft_would_choke_on_is_refused() {
        let heartbeat = message(Kind::Heartbeat);
        let cases = [
            RaftMessage { term: 0, ..heartbeat.clone() },
            RaftMessage { index: u64::MAX, ..heartbeat.clone() },
            RaftMessage { context: vec![0; 65].into(), ..heartbeat.clone() },
            RaftMessage { entries: append().entries, ..heartbeat },
            RaftMessage { index: 6, ..append() },
            RaftMessage { term: 2, ..append() },
            RaftMessage { log_term: 0, ..append() },
            message(Kind::Image),
            RaftMessage { image: Some(LogImage::first((1..=9).collect())), ..message(Kind::Image) },
            RaftMessage {
                image: Some(LogImage { index: 0, ..LogImage::first(vec![1]) }),
                ..message(Kind::Image)
            },
        ];
        for case in cases {
            assert!(RaftMessage::decode(&case.encode()).is_err(), "{case:?}");
        }
        let mut kind = append();
        kind.entries[0].kind = 1;
        assert!(RaftMessage::decode(&kind.encode()).is_err());
        let mut many = append();
        many.entries = (8..=8 + u64::from(ENTRIES_MAX))
            .map(|index| LogEntry { index, ..many.entries[1].clone() })
            .collect();
        assert!(RaftMessage::decode(&many.encode()).is_err());
        assert!(RaftMessage::decode(&[9, 0, 0]).is_err());
        assert!(RaftMessage::decode(&[]).is_err());
    }
}
