//! A coordinator's raft log on its disk.
//!
//! One segment holds everything since the newest log image: a first record with the hard state and the entries behind the image,
//! then one record for each write. A new image makes a new segment; the rename of the segment's file is the moment it counts,
//! and older files go only after it. It promises: a synced write survives a power cut; a record is dropped at opening only if
//! it was cut off at the end and nothing synced lies behind it; damage before that is an error and never passes for an end.
//! Any error of [`DurableLog::append`] is final, because after a failed sync nobody knows what the disk holds: the process must
//! end. Calls block; deliberately not here: threads, and what the log means.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crc_fast::CrcAlgorithm;
use rand::TryRngCore;
use rand::rngs::OsRng;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use membership::consensus::{HardState, LogEntry, LogGap, LogImage, LogWrite, RecoveredLog};
use types::Remedy;

/// The log of one coordinator, open for writing. Locked until it is dropped.
#[derive(Debug)]
pub struct DurableLog {
    dir: PathBuf,
    identity: Identity,
    segment: File,
    number: u64,
    next_sequence: u64,
    /// Bytes of the segment, and how many of them are known to survive a power cut.
    length: u64,
    synced: u64,
    /// What the disk holds, to begin the next segment with.
    stored: RecoveredLog,
    failed: bool,
    _lock: File,
}

/// Why a log could not be opened or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DurableLogError {
    /// The file system refused. Final: end the process.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process uses the directory.
    #[error("{} is in use by another process: end it, or give this coordinator a data directory of its own", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The directory is another coordinator's.
    #[error("{} holds the log of coordinator {stored}, not of {given}: use its own data directory", path.display())]
    OtherCoordinator {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        stored: u64,
        /// Who opened it.
        given: u64,
    },
    /// The disk lost or changed what it had confirmed.
    #[error("{} is damaged at byte {offset}: {reason}; this coordinator may have promised what it no longer holds: \
             keep the files for inspection, and replace this coordinator by one with a new id and an empty disk", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// A write that does not fit the log: a bug of the caller. Final.
    #[error("a write does not fit the log: {source}")]
    Gap {
        /// What does not fit.
        #[from]
        source: LogGap,
    },
    /// An earlier write failed.
    #[error("an earlier write of the log failed: end this process")]
    Failed,
}

impl DurableLogError {
    /// What to do next; nothing here gets better by itself.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

impl DurableLog {
    /// Opens coordinator `id`'s log in `dir`, or begins one there, and reads what it holds.
    ///
    /// # Errors
    /// If the directory is in use, is another coordinator's, is damaged, or can't be read and written.
    pub fn open(dir: &Path, id: u64) -> Result<(Self, RecoveredLog), DurableLogError> {
        create_dir(dir)?;
        let lock = lock(dir)?;
        let segments = remove_leftovers(dir)?;
        let identity = match Identity::read(dir)? {
            Some(identity) => identity,
            None => Identity::begin(dir, id, &segments)?,
        };
        if identity.id != id {
            return Err(DurableLogError::OtherCoordinator {
                path: dir.to_owned(),
                stored: identity.id,
                given: id,
            });
        }
        let newest = segments.last().copied().unwrap_or(FIRST_SEGMENT);
        let (content, stored) = read_segment(dir, newest, &identity)?;
        let path = segment_path(dir, newest);
        let segment =
            OpenOptions::new().append(true).open(&path).map_err(io_error("open", &path))?;
        if content.has_torn_end {
            segment.set_len(content.length).map_err(io_error("cut the torn end of", &path))?;
        }
        // What was read may still be in the page cache only; it is built upon from here on.
        segment.sync_all().map_err(io_error("sync", &path))?;
        remove_others(dir, newest)?;
        let log = Self {
            dir: dir.to_owned(),
            identity,
            segment,
            number: newest,
            next_sequence: content.next_sequence,
            length: content.length,
            synced: content.length,
            stored: stored.clone(),
            failed: false,
            _lock: lock,
        };
        Ok((log, stored))
    }

    /// Makes one write part of the log; with `sync`, or an image, it survives a power cut when this returns.
    ///
    /// # Errors
    /// Any error is final: end the process. All later calls fail.
    pub fn append(&mut self, write: &LogWrite, sync: bool) -> Result<(), DurableLogError> {
        if self.failed {
            return Err(DurableLogError::Failed);
        }
        // Until it is done it is failed, whatever happens.
        self.failed = true;
        self.stored.record(write)?;
        if write.image.is_some() {
            self.begin_segment()?;
        } else {
            self.append_record(write, sync)?;
        }
        self.failed = false;
        Ok(())
    }

    /// The number drawn at random when this log was begun. With the coordinator's id it names the log: the same id with
    /// another one is a coordinator that lost its disk.
    #[must_use]
    pub fn log_uuid(&self) -> u128 {
        self.identity.uuid
    }

    fn append_record(&mut self, write: &LogWrite, sync: bool) -> Result<(), DurableLogError> {
        let path = segment_path(&self.dir, self.number);
        let record =
            Record { sequence: self.next_sequence, synced: self.synced, write: write.clone() };
        let frame = frame(KIND_WRITE, &types::encode(&record));
        self.segment.write_all(&frame).map_err(io_error("append to", &path))?;
        self.next_sequence += 1;
        self.length += frame.len() as u64;
        if sync {
            self.segment.sync_data().map_err(io_error("sync", &path))?;
            self.synced = self.length;
        }
        Ok(())
    }

    /// Writes the stored image and what is behind it to files of their own, and then lets the old ones go.
    fn begin_segment(&mut self) -> Result<(), DurableLogError> {
        let number = self.number + 1;
        let image = self.stored.image.as_ref().expect("a new segment begins with an image");
        put_whole(
            &self.dir,
            &image_path(&self.dir, number),
            &frame(KIND_IMAGE, &types::encode(image)),
        )?;
        let base = Base::of(&self.identity, number, &self.stored);
        let content = segment_content(&base);
        let path = segment_path(&self.dir, number);
        put_whole(&self.dir, &path, &content)?;
        self.segment =
            OpenOptions::new().append(true).open(&path).map_err(io_error("open", &path))?;
        (self.number, self.next_sequence) = (number, 1);
        (self.length, self.synced) = (content.len() as u64, content.len() as u64);
        remove_others(&self.dir, number)
    }
}

/// Whose log it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    id: u64,
    uuid: u128,
}

/// The first record of a segment.
#[derive(Serialize, Deserialize)]
struct Base {
    identity: Identity,
    number: u64,
    /// Whether the file of the same number holds an image; only the very first segment has none.
    has_image: bool,
    hard_state: HardState,
    entries: Vec<LogEntry>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    sequence: u64,
    /// How much of the segment was synced when this was written: what is damaged before that is no torn end.
    synced: u64,
    /// Has no image.
    write: LogWrite,
}

/// What reading a segment's records came to.
struct Content {
    next_sequence: u64,
    length: u64,
    has_torn_end: bool,
}

impl Identity {
    fn read(dir: &Path) -> Result<Option<Self>, DurableLogError> {
        let path = dir.join(META);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("read", &path)(error)),
        };
        let identity = whole_frame(&bytes, KIND_META).map_err(damaged(&path, 0))?;
        Ok(Some(identity))
    }

    /// Begins an empty log. `meta` comes last: with it there must be a segment, so that a lost one can't pass for a new log.
    fn begin(dir: &Path, id: u64, segments: &[u64]) -> Result<Self, DurableLogError> {
        if segments.iter().any(|number| *number > FIRST_SEGMENT) {
            return Err(damaged(&dir.join(META), 0)("the file is gone".to_owned()));
        }
        let mut uuid = [0; 16];
        OsRng
            .try_fill_bytes(&mut uuid)
            .map_err(|error| io_error("draw a random number for", dir)(io::Error::other(error)))?;
        let identity = Self { id, uuid: u128::from_le_bytes(uuid) };
        let base = Base::of(&identity, FIRST_SEGMENT, &RecoveredLog::default());
        put_whole(dir, &segment_path(dir, FIRST_SEGMENT), &segment_content(&base))?;
        put_whole(dir, &dir.join(META), &frame(KIND_META, &types::encode(&identity)))?;
        Ok(identity)
    }
}

impl Base {
    fn of(identity: &Identity, number: u64, stored: &RecoveredLog) -> Self {
        Self {
            identity: *identity,
            number,
            has_image: stored.image.is_some(),
            hard_state: stored.hard_state,
            entries: stored.entries.clone(),
        }
    }
}

fn read_segment(
    dir: &Path,
    number: u64,
    identity: &Identity,
) -> Result<(Content, RecoveredLog), DurableLogError> {
    let path = segment_path(dir, number);
    let bytes = fs::read(&path).map_err(io_error("read", &path))?;
    let damaged = |offset: usize| damaged(&path, offset as u64);
    let body = bytes
        .strip_prefix(SEGMENT_MAGIC)
        .ok_or_else(|| damaged(0)("it is no segment of this version".to_owned()))?;
    let start = SEGMENT_MAGIC.len();
    let (kind, payload, base_bytes) =
        next_frame(body).ok_or_else(|| damaged(start)("no first record".to_owned()))?;
    if kind != KIND_BASE {
        return Err(damaged(start)(format!("a record of kind {kind} comes first")));
    }
    let base: Base = decode(payload).map_err(damaged(start))?;
    if base.identity != *identity || base.number != number {
        return Err(damaged(start)("it belongs to another log".to_owned()));
    }
    let image = if base.has_image { Some(read_image(dir, number)?) } else { None };
    let mut stored = RecoveredLog { hard_state: base.hard_state, image, entries: base.entries };
    let (mut offset, mut next_sequence) = (start + base_bytes, 1);
    while let Some((kind, payload, length)) = next_frame(&bytes[offset..]) {
        let record = write_record(kind, payload).map_err(damaged(offset))?;
        if record.sequence != next_sequence {
            return Err(damaged(offset)(format!(
                "record {} where {next_sequence} should be",
                record.sequence
            )));
        }
        stored.record(&record.write).map_err(|gap| damaged(offset)(gap.to_string()))?;
        next_sequence += 1;
        offset += length;
    }
    if let Some(later) = synced_after(&bytes, offset) {
        return Err(damaged(offset)(format!(
            "no valid record, but byte {later} was written when this was synced"
        )));
    }
    stored.check().map_err(|gap| damaged(offset)(gap.to_string()))?;
    let content =
        Content { next_sequence, length: offset as u64, has_torn_end: offset < bytes.len() };
    Ok((content, stored))
}

/// A later record that was written when the bytes after `offset` were synced already, if there is one.
fn synced_after(bytes: &[u8], offset: usize) -> Option<usize> {
    (offset + 1..bytes.len()).find(|later| {
        let record = next_frame(&bytes[*later..])
            .and_then(|(kind, payload, _)| write_record(kind, payload).ok());
        record.is_some_and(|record| record.synced > offset as u64)
    })
}

fn read_image(dir: &Path, number: u64) -> Result<LogImage, DurableLogError> {
    let path = image_path(dir, number);
    let bytes = fs::read(&path).map_err(io_error("read", &path))?;
    whole_frame(&bytes, KIND_IMAGE).map_err(damaged(&path, 0))
}

fn write_record(kind: u8, payload: &[u8]) -> Result<Record, String> {
    if kind != KIND_WRITE {
        return Err(format!("a record of kind {kind}, which this version does not know"));
    }
    decode(payload)
}

fn segment_content(base: &Base) -> Vec<u8> {
    let mut content = SEGMENT_MAGIC.to_vec();
    content.extend_from_slice(&frame(KIND_BASE, &types::encode(base)));
    content
}

/// Length of the payload, checksum of all but itself, kind, payload.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a write is far below 4 GiB").to_le_bytes();
    let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + payload.len());
    frame.extend_from_slice(&length);
    frame.extend_from_slice(&[0; 4]);
    frame.push(kind);
    frame.extend_from_slice(payload);
    let sum = frame_checksum(length, &frame[8..]);
    frame[4..8].copy_from_slice(&sum);
    frame
}

/// The kind, the payload and the length of the frame that `bytes` begin with, if there is a whole and valid one.
fn next_frame(bytes: &[u8]) -> Option<(u8, &[u8], usize)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let payload_bytes = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let covered = rest.get(..payload_bytes.checked_add(1)?)?;
    if frame_checksum(*length, covered) != *sum {
        return None;
    }
    let (kind, payload) = covered.split_first()?;
    Some((*kind, payload, FRAME_HEAD_BYTES + payload_bytes))
}

/// The content of a file that is one frame.
fn whole_frame<T: serde::de::DeserializeOwned>(bytes: &[u8], wanted: u8) -> Result<T, String> {
    match next_frame(bytes) {
        Some((kind, payload, length)) if kind == wanted && length == bytes.len() => decode(payload),
        _ => Err("checksum or length is wrong".to_owned()),
    }
}

fn frame_checksum(length: [u8; 4], covered: &[u8]) -> [u8; 4] {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&length);
    digest.update(covered);
    u32::try_from(digest.finalize()).expect("a checksum of 32 bits").to_le_bytes()
}

fn decode<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T, String> {
    types::decode(payload).map_err(|error| error.to_string())
}

/// Writes a whole file so that after a power cut it is there entirely or not at all.
fn put_whole(dir: &Path, path: &Path, content: &[u8]) -> Result<(), DurableLogError> {
    let temporary = path.with_extension(TEMPORARY);
    let mut file = File::create(&temporary).map_err(io_error("create", &temporary))?;
    file.write_all(content).map_err(io_error("write", &temporary))?;
    file.sync_all().map_err(io_error("sync", &temporary))?;
    fs::rename(&temporary, path).map_err(io_error("rename to", path))?;
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<(), DurableLogError> {
    File::open(dir).and_then(|file| file.sync_all()).map_err(io_error("sync", dir))
}

fn create_dir(dir: &Path) -> Result<(), DurableLogError> {
    if !dir.is_dir() {
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync_dir(parent.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn lock(dir: &Path) -> Result<File, DurableLogError> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(io_error("open", &path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DurableLogError::Locked { path: dir.to_owned() }),
        Err(errno) => Err(io_error("lock", &path)(errno.into())),
    }
}

/// Removes files that a crash left unfinished; gives the numbers of the segments, ascending.
fn remove_leftovers(dir: &Path) -> Result<Vec<u64>, DurableLogError> {
    let mut segments = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        let path = entry.map_err(io_error("list", dir))?.path();
        if path.extension().is_some_and(|extension| extension == TEMPORARY) {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        } else if let Some(number) = numbered(&path, SEGMENT) {
            segments.push(number);
        }
    }
    segments.sort_unstable();
    Ok(segments)
}

/// Removes all segments and images but those of `newest`, which is durable.
fn remove_others(dir: &Path, newest: u64) -> Result<(), DurableLogError> {
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        let path = entry.map_err(io_error("list", dir))?.path();
        let number = numbered(&path, SEGMENT).or_else(|| numbered(&path, IMAGE));
        if number.is_some_and(|number| number != newest) {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
    }
    Ok(())
}

fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{SEGMENT}{number:020}"))
}

fn image_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{IMAGE}{number:020}"))
}

fn numbered(path: &Path, prefix: &str) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok()
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DurableLogError {
    let path = path.to_owned();
    move |source| DurableLogError::Io { action, path, source }
}

fn damaged(path: &Path, offset: u64) -> impl FnOnce(String) -> DurableLogError {
    let path = path.to_owned();
    move |reason| DurableLogError::Damaged { path, offset, reason }
}

const META: &str = "meta";
const LOCK: &str = "lock";
const SEGMENT: &str = "segment-";
const IMAGE: &str = "image-";
const TEMPORARY: &str = "tmp";
/// Changes with the form of the records.
const SEGMENT_MAGIC: &[u8] = b"ripslog1";
const FIRST_SEGMENT: u64 = 0;
const FRAME_HEAD_BYTES: usize = 4 + 4 + 1;
const KIND_META: u8 = 1;
const KIND_IMAGE: u8 = 2;
const KIND_BASE: u8 = 3;
const KIND_WRITE: u8 = 4;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use tempfile::TempDir;

    use types::Term;

    use super::*;

    fn entry(index: u64, term: u64) -> LogEntry {
        let data = Bytes::from(format!("entry {index} of term {term}"));
        LogEntry {
            index,
            term: Term(term),
            kind: LogEntry::NORMAL,
            data,
            context: Bytes::from_static(b"c"),
        }
    }

    fn image(index: u64, term: u64) -> LogImage {
        LogImage {
            index,
            term: Term(term),
            data: Bytes::from(vec![7; 100]),
            ..LogImage::first(vec![1, 2, 3])
        }
    }

    fn first() -> LogWrite {
        let hard_state = HardState { term: Term(1), vote: 0, commit: 1 };
        LogWrite { image: Some(image(1, 1)), hard_state: Some(hard_state), ..LogWrite::default() }
    }

    fn entries(indices: std::ops::RangeInclusive<u64>, term: u64) -> LogWrite {
        LogWrite {
            entries: indices.map(|index| entry(index, term)).collect(),
            ..LogWrite::default()
        }
    }

    fn hard_state(term: u64, commit: u64) -> LogWrite {
        LogWrite {
            hard_state: Some(HardState { term: Term(term), vote: 2, commit }),
            ..LogWrite::default()
        }
    }

    fn open(dir: &TempDir) -> (DurableLog, RecoveredLog) {
        DurableLog::open(dir.path(), 1).unwrap()
    }

    /// A log of some writes, the newest segment's path, and after each write: bytes, bytes synced, content.
    fn written(
        dir: &TempDir,
        writes: &[(LogWrite, bool)],
    ) -> (PathBuf, Vec<(u64, u64, RecoveredLog)>) {
        let (mut log, _) = open(dir);
        log.append(&first(), true).unwrap();
        let mut states = vec![(log.length, log.synced, log.stored.clone())];
        for (write, sync) in writes {
            log.append(write, *sync).unwrap();
            states.push((log.length, log.synced, log.stored.clone()));
        }
        (segment_path(dir.path(), log.number), states)
    }

    fn some_writes() -> Vec<(LogWrite, bool)> {
        let cut = LogWrite { truncate_from: Some(4), ..entries(4..=5, 2) };
        vec![
            (entries(2..=4, 1), true),
            (hard_state(1, 3), false),
            (cut, true),
            (hard_state(2, 4), false),
            (hard_state(2, 5), false),
        ]
    }

    #[test]
    fn a_restart_keeps_everything() {
        let dir = TempDir::new().unwrap();
        assert_eq!(open(&dir).1, RecoveredLog::default());
        let (_, states) = written(&dir, &some_writes());
        let (log, recovered) = open(&dir);
        assert_eq!(recovered, states.last().unwrap().2);
        assert_eq!(recovered.hard_state.commit, 5);
        assert_eq!(
            recovered.entries.iter().map(|entry| entry.term.0).collect::<Vec<_>>(),
            [1, 1, 2, 2]
        );
        let uuid = log.log_uuid();
        drop(log);
        let (mut log, _) = open(&dir);
        assert_eq!(log.log_uuid(), uuid);
        log.append(&entries(6..=6, 2), true).unwrap();
        drop(log);
        assert_eq!(open(&dir).1.last_index(), 6);
    }

    #[test]
    fn a_torn_end_at_any_byte_leaves_whole_writes_and_all_that_was_synced() {
        let dir = TempDir::new().unwrap();
        let (path, states) = written(&dir, &some_writes());
        let bytes = fs::read(&path).unwrap();
        for cut in usize::try_from(states[0].0).unwrap()..=bytes.len() {
            fs::write(&path, &bytes[..cut]).unwrap();
            let whole = states.iter().rfind(|(length, ..)| *length <= cut as u64).unwrap();
            let (mut log, recovered) = open(&dir);
            assert_eq!(recovered, whole.2, "cut at {cut}");
            // What follows a torn end is whole.
            log.append(&hard_state(9, 1), true).unwrap();
            drop(log);
            assert_eq!(open(&dir).1.hard_state.term, Term(9));
        }
    }

    #[test]
    fn a_changed_bit_before_the_end_is_refused() {
        let dir = TempDir::new().unwrap();
        let (path, states) = written(&dir, &some_writes());
        let bytes = fs::read(&path).unwrap();
        // The write before the last synced one, and all before it: the last synced one says that they were.
        for place in 0..usize::try_from(states[2].0).unwrap() {
            let mut changed = bytes.clone();
            changed[place] ^= 1 << (place % 8);
            fs::write(&path, &changed).unwrap();
            let refused = DurableLog::open(dir.path(), 1);
            assert!(
                matches!(refused, Err(DurableLogError::Damaged { .. })),
                "byte {place}: {refused:?}"
            );
        }
    }

    #[test]
    fn damage_in_what_was_never_synced_is_a_torn_end_even_if_a_later_write_arrived() {
        let dir = TempDir::new().unwrap();
        let (path, states) = written(&dir, &some_writes());
        let mut bytes = fs::read(&path).unwrap();
        let synced = usize::try_from(states[3].0).unwrap();
        bytes[synced + 12] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(open(&dir).1, states[3].2);
    }

    #[test]
    fn an_image_replaces_what_it_covers_and_the_old_files_go() {
        let dir = TempDir::new().unwrap();
        written(&dir, &some_writes());
        let (mut log, _) = open(&dir);
        log.append(&LogWrite { image: Some(image(4, 2)), ..hard_state(3, 5) }, true).unwrap();
        log.append(&entries(6..=7, 3), true).unwrap();
        drop(log);
        let (log, recovered) = open(&dir);
        assert_eq!(recovered.image, Some(image(4, 2)));
        assert_eq!(
            recovered.entries.iter().map(|entry| entry.index).collect::<Vec<_>>(),
            [5, 6, 7]
        );
        assert_eq!(recovered.hard_state.term, Term(3));
        drop(log);
        let names = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(
            names,
            ["image-00000000000000000002", "lock", "meta", "segment-00000000000000000002"]
        );
    }

    #[test]
    fn a_crash_between_the_files_of_a_new_segment_leaves_the_old_or_the_new() {
        let dir = TempDir::new().unwrap();
        let (old, states) = written(&dir, &some_writes());
        let old_image = image_path(dir.path(), 1);
        let (old_bytes, old_image_bytes) = (fs::read(&old).unwrap(), fs::read(&old_image).unwrap());
        let (mut log, before) = open(&dir);
        assert_eq!(before, states.last().unwrap().2);
        log.append(&LogWrite { image: Some(image(5, 2)), ..LogWrite::default() }, true).unwrap();
        let after = log.stored.clone();
        drop(log);
        // The old files were not removed yet.
        fs::write(&old, &old_bytes).unwrap();
        fs::write(&old_image, &old_image_bytes).unwrap();
        assert_eq!(open(&dir).1, after);
        assert!(!old.exists() && !old_image.exists());
        // The new segment was not renamed yet.
        fs::write(&old, &old_bytes).unwrap();
        fs::write(&old_image, &old_image_bytes).unwrap();
        let new = segment_path(dir.path(), 2);
        fs::rename(&new, new.with_extension(TEMPORARY)).unwrap();
        assert_eq!(open(&dir).1, before);
        assert!(!image_path(dir.path(), 2).exists());
    }

    #[test]
    fn a_directory_is_opened_once_and_by_its_own_coordinator() {
        let dir = TempDir::new().unwrap();
        let (log, _) = open(&dir);
        assert!(matches!(DurableLog::open(dir.path(), 1), Err(DurableLogError::Locked { .. })));
        drop(log);
        let other = DurableLog::open(dir.path(), 2);
        assert!(matches!(
            other,
            Err(DurableLogError::OtherCoordinator { stored: 1, given: 2, .. })
        ));
        open(&dir);
    }

    #[test]
    fn lost_files_do_not_pass_for_a_new_log() {
        for lost in [META, "segment-00000000000000000001", "image-00000000000000000001"] {
            let dir = TempDir::new().unwrap();
            written(&dir, &some_writes());
            fs::remove_file(dir.path().join(lost)).unwrap();
            assert!(DurableLog::open(dir.path(), 1).is_err(), "{lost}");
        }
    }

    #[test]
    fn a_failed_write_is_final() {
        let dir = TempDir::new().unwrap();
        let (mut log, _) = open(&dir);
        log.append(&first(), true).unwrap();
        let segment =
            std::mem::replace(&mut log.segment, File::open(dir.path().join(META)).unwrap());
        assert!(matches!(log.append(&entries(2..=2, 1), true), Err(DurableLogError::Io { .. })));
        log.segment = segment;
        assert!(matches!(log.append(&entries(2..=2, 1), true), Err(DurableLogError::Failed)));
        drop(log);
        assert_eq!(open(&dir).1.last_index(), 1);
        let (mut log, _) = open(&dir);
        assert!(matches!(log.append(&entries(5..=5, 1), true), Err(DurableLogError::Gap { .. })));
        assert!(matches!(log.append(&entries(2..=2, 1), true), Err(DurableLogError::Failed)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// A power cut keeps what was synced and any bytes for what was not.
        #[test]
        fn a_power_cut_loses_nothing_synced(
            plan in prop::collection::vec((0..6u64, any::<bool>()), 1..30),
            kept in any::<prop::sample::Index>(),
            noise in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let dir = TempDir::new().unwrap();
            let mut writes = Vec::new();
            let (mut last, mut term) = (1, 1);
            for (what, sync) in plan {
                let write = match what {
                    0 => hard_state(term, 1),
                    1 if last > 3 => {
                        term += 1;
                        last -= 1;
                        LogWrite { truncate_from: Some(last), ..entries(last..=last, term) }
                    }
                    many => {
                        last += many + 1;
                        entries(last - many..=last, term)
                    }
                };
                writes.push((write, sync));
            }
            let (path, states) = written(&dir, &writes);
            let bytes = fs::read(&path).unwrap();
            let synced = usize::try_from(states.last().unwrap().1).unwrap();
            let kept = synced + kept.index(bytes.len() - synced + 1);
            let mut torn = bytes[..kept].to_vec();
            torn.extend_from_slice(&noise);
            fs::write(&path, &torn).unwrap();
            let recovered = open(&dir).1;
            let whole = states.iter().rfind(|(length, ..)| *length <= kept as u64).unwrap();
            // Noise may complete a write by chance of one bit pattern only: the write itself.
            let next = states.iter().find(|(length, ..)| *length > kept as u64);
            prop_assert!(recovered == whole.2 || next.is_some_and(|next| recovered == next.2));
        }

        #[test]
        fn any_bytes_for_a_segment_are_refused_or_read(noise in prop::collection::vec(any::<u8>(), 0..300), cut in any::<prop::sample::Index>()) {
            let dir = TempDir::new().unwrap();
            let (path, _) = written(&dir, &some_writes());
            let bytes = fs::read(&path).unwrap();
            let mut changed = bytes[..cut.index(bytes.len())].to_vec();
            changed.extend_from_slice(&noise);
            fs::write(&path, &changed).unwrap();
            drop(DurableLog::open(dir.path(), 1));
        }
    }
}
