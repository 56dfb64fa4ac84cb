//! Which bytes of the state are in which segment.
//!
//! Named tensors become *virtual* safetensors files that nobody need ever write as one object: each is cut at fixed offsets into
//! segments, and the concatenation of a file's segments is a valid safetensors file. Promised: a layout is a pure function of
//! (tensor specs, segment size), so every member derives the same; every byte of every tensor lies in exactly one segment.
//! Within the files, tensors of wide elements come first, then names in order, so each tensor is aligned to its element.
//! A file ends before 4 GiB of data; only a tensor that is larger by itself makes a larger file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use types::{DType, Digest};

use crate::canonical_json::quote;

/// The virtual files of a state and their segments.
// Invariant: files and segments are what `new` makes of (tensors, segment_bytes); there is no other door.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    tensors: Vec<TensorSpec>,
    segment_bytes: u64,
    files: Vec<VirtualFile>,
    segments: Vec<Segment>,
}

impl Layout {
    /// Default size of a segment.
    pub const SEGMENT_BYTES: u64 = 64 << 20;
    /// Smallest segment that may be set.
    pub const SEGMENT_BYTES_MIN: u64 = 4 << 10;
    /// Largest segment that may be set: it is held in memory as a whole.
    pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
    /// Most segments of a checkpoint: 16 TiB in default segments, and a manifest that still fits its limit.
    pub const SEGMENTS_MAX: u64 = 1 << 18;
    /// Most tensors of a state.
    pub const TENSORS_MAX: usize = 1 << 18;
    /// Longest name of a tensor, in bytes.
    pub const NAME_BYTES_MAX: usize = 512;
    /// Most dimensions of a tensor.
    pub const DIMENSIONS_MAX: usize = 32;

    /// Lays out `specs`, in whatever order they come.
    ///
    /// # Errors
    /// If a name is empty, too long, reserved or used twice, or a size is out of bounds.
    pub fn new(specs: Vec<TensorSpec>, segment_bytes: u64) -> Result<Self, LayoutError> {
        Self::with_segments_max(specs, segment_bytes, Self::SEGMENTS_MAX)
    }

    /// Like `new`, but refuses before allocating when there would be more than `segments_max` segments.
    pub(crate) fn with_segments_max(
        mut specs: Vec<TensorSpec>,
        segment_bytes: u64,
        segments_max: u64,
    ) -> Result<Self, LayoutError> {
        if !(Self::SEGMENT_BYTES_MIN..=Self::SEGMENT_BYTES_MAX).contains(&segment_bytes) {
            return Err(LayoutError::SegmentBytes { segment_bytes });
        }
        if specs.len() > Self::TENSORS_MAX {
            return Err(LayoutError::TooManyTensors { tensors: specs.len() });
        }
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        for spec in &specs {
            spec.check()?;
        }
        if let Some(pair) = specs.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(LayoutError::Twice { name: pair[0].name.clone() });
        }
        let files = files(&specs)?;
        let count: u64 = files.iter().map(|f| f.bytes.div_ceil(segment_bytes)).sum();
        if count > segments_max {
            return Err(LayoutError::TooManySegments { segments: count, segments_max });
        }
        let segments = cut(&files, segment_bytes);
        Ok(Self { tensors: specs, segment_bytes, files, segments })
    }

    /// All segments, in order of their index.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The segment with this index.
    #[must_use]
    pub fn segment(&self, index: SegmentIndex) -> Option<&Segment> {
        self.segments.get(index.0 as usize)
    }

    /// The tensors, sorted by name.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The virtual files, in order.
    #[must_use]
    pub fn files(&self) -> &[VirtualFile] {
        &self.files
    }

    /// The size of every segment but the last of a file.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Bytes of all files, headers included.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// The name of the file in which each tensor lies, by the tensor's name.
    #[must_use]
    pub fn placement(&self) -> BTreeMap<&str, &str> {
        let placed = self.files.iter().flat_map(|f| f.tensors.iter().map(move |t| (t, f)));
        placed.map(|(t, f)| (self.tensors[t.tensor].name.as_str(), f.name.as_str())).collect()
    }

    /// Digest of everything that the layout decides.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"ripstop layout 1\0");
        hasher.update(&self.segment_bytes.to_le_bytes());
        for file in &self.files {
            hasher.update(&file.bytes.to_le_bytes());
            hasher.update(&(file.header.len() as u64).to_le_bytes());
            hasher.update(&file.header);
        }
        hasher.finalize().into()
    }

    /// The bytes of one segment, copied out of the state.
    ///
    /// # Errors
    /// If the layout has no such segment, or the state lacks a tensor or has it in another size.
    ///
    /// # Panics
    /// If the parts of a segment don't tile it, which is a bug.
    pub fn fill(&self, index: SegmentIndex, state: &dyn StateBytes) -> Result<Bytes, LayoutError> {
        let segment = self.segment(index).ok_or(LayoutError::NoSegment { index })?;
        let file = &self.files[segment.file];
        let mut out = Vec::with_capacity(segment.bytes as usize);
        out.extend_from_slice(&file.header[file.header_part(segment)]);
        for part in file.parts(segment) {
            let spec = &self.tensors[part.tensor];
            out.extend_from_slice(&spec.bytes_in(state)?[part.range()]);
        }
        assert_eq!(out.len() as u64, segment.bytes, "parts of a segment tile it");
        Ok(out.into())
    }

    /// Hands the bytes of one segment out to the tensors: name, offset in the tensor, bytes. Tensors without elements are not
    /// named.
    ///
    /// # Errors
    /// If the layout has no such segment, or the bytes have another length or another header than the layout's own; then nothing
    /// was handed out.
    pub fn scatter(
        &self,
        index: SegmentIndex,
        bytes: &[u8],
        sink: &mut dyn FnMut(&str, usize, &[u8]),
    ) -> Result<(), LayoutError> {
        let segment = self.segment(index).ok_or(LayoutError::NoSegment { index })?;
        if bytes.len() as u64 != segment.bytes {
            let found = bytes.len() as u64;
            return Err(LayoutError::SegmentLength { index, expected: segment.bytes, found });
        }
        let file = &self.files[segment.file];
        let header = &file.header[file.header_part(segment)];
        let (head, mut rest) = bytes.split_at(header.len());
        if head != header {
            return Err(LayoutError::Header { index });
        }
        for part in file.parts(segment) {
            let (piece, tail) = rest.split_at(part.range().len());
            sink(&self.tensors[part.tensor].name, part.range().start, piece);
            rest = tail;
        }
        Ok(())
    }
}

/// Name, element type and shape of a tensor.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Its name, unique in the state.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Its size; `None` if that is no number of this machine, or beyond 2^56 bytes.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        // Multiplied without the zeros first, so that a zero cannot hide an absurd dimension.
        let nonzero = self
            .shape
            .iter()
            .filter(|&&d| d != 0)
            .try_fold(self.dtype.bytes(), |n, &d| n.checked_mul(d))?;
        let bytes = if self.shape.contains(&0) { 0 } else { nonzero };
        (nonzero <= 1 << 56).then_some(bytes)
    }

    /// Its bytes out of `state`, of the right length.
    pub(crate) fn bytes_in<'a>(
        &self,
        state: &'a dyn StateBytes,
    ) -> Result<Cow<'a, [u8]>, LayoutError> {
        let bytes = state
            .tensor(&self.name)
            .ok_or_else(|| LayoutError::Missing { name: self.name.clone() })?;
        let expected = self.bytes().unwrap_or(usize::MAX);
        if bytes.len() != expected {
            return Err(LayoutError::TensorLength {
                name: self.name.clone(),
                expected,
                found: bytes.len(),
            });
        }
        Ok(bytes)
    }

    pub(crate) fn check(&self) -> Result<(), LayoutError> {
        let name = || self.name.clone();
        if self.name.is_empty() || self.name.len() > Layout::NAME_BYTES_MAX || self.name == METADATA
        {
            return Err(LayoutError::Name { name: name() });
        }
        if self.shape.len() > Layout::DIMENSIONS_MAX || self.bytes().is_none() {
            return Err(LayoutError::Shape { name: name(), shape: self.shape.clone() });
        }
        Ok(())
    }
}

/// Where the bytes of tensors come from: little-endian, row-major.
pub trait StateBytes {
    /// The bytes of a tensor, or `None` if there is no such tensor.
    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>>;
}

impl StateBytes for BTreeMap<String, Vec<u8>> {
    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.get(name).map(|bytes| Cow::Borrowed(bytes.as_slice()))
    }
}

/// A segment's place in the layout, counted over all files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SegmentIndex(pub u32);

impl fmt::Display for SegmentIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A piece of a virtual file: one object of the store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its place among all segments.
    pub index: SegmentIndex,
    /// The place of its file in [`Layout::files`].
    pub file: usize,
    /// Where it starts in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A safetensors file that exists as segments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VirtualFile {
    name: String,
    header: Vec<u8>,
    bytes: u64,
    tensors: Vec<Placed>,
}

impl VirtualFile {
    /// Its file name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its length, header included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The part of the header that lies in `segment`.
    fn header_part(&self, segment: &Segment) -> Range<usize> {
        let end = self.header.len() as u64;
        segment.offset.min(end) as usize..(segment.offset + segment.bytes).min(end) as usize
    }

    /// The parts of tensors that lie in `segment`, in order.
    fn parts(&self, segment: &Segment) -> impl Iterator<Item = Part> {
        let (start, end) = (segment.offset, segment.offset + segment.bytes);
        let first = self.tensors.partition_point(|t| t.offset + t.bytes <= start);
        self.tensors[first..]
            .iter()
            .take_while(move |t| t.offset < end)
            .filter(|t| t.bytes > 0)
            .map(move |t| Part {
                tensor: t.tensor,
                start: (start.max(t.offset) - t.offset) as usize,
                end: (end.min(t.offset + t.bytes) - t.offset) as usize,
            })
    }
}

/// Specs that can't be laid out, or bytes that don't fit a layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The segment size is out of bounds.
    #[error(
        "segments of {segment_bytes} bytes; allowed are {} to {}",
        Layout::SEGMENT_BYTES_MIN,
        Layout::SEGMENT_BYTES_MAX
    )]
    SegmentBytes {
        /// The size that was asked for.
        segment_bytes: u64,
    },
    /// A state has no such piece.
    #[error("the state has no piece {piece}")]
    NoPiece {
        /// The number that was asked for.
        piece: u32,
    },
    /// Too many tensors.
    #[error(
        "a state of {tensors} tensors; at most {} are allowed: store small ones together",
        Layout::TENSORS_MAX
    )]
    TooManyTensors {
        /// How many there are.
        tensors: usize,
    },
    /// Too many segments.
    #[error("{segments} segments, at most {segments_max} are allowed: use larger segments")]
    TooManySegments {
        /// How many it would take.
        segments: u64,
        /// How many may be.
        segments_max: u64,
    },
    /// The header of a file is longer than safetensors readers take.
    #[error(
        "a safetensors header of {bytes} bytes, readers take at most {HEADER_BYTES_MAX}: store small tensors together"
    )]
    HeaderBytes {
        /// How long it would be.
        bytes: u64,
    },
    /// Two tensors have one name.
    #[error("tensor {name:?} is there twice; names must be unique")]
    Twice {
        /// The name.
        name: String,
    },
    /// A name that can't be used.
    #[error(
        "tensor name {name:?} must have 1 to {} bytes and not be \"{METADATA}\"",
        Layout::NAME_BYTES_MAX
    )]
    Name {
        /// The name.
        name: String,
    },
    /// A shape that can't be used.
    #[error(
        "tensor {name:?} has shape {shape:?}; at most {} dimensions and 2^56 bytes are allowed",
        Layout::DIMENSIONS_MAX
    )]
    Shape {
        /// The tensor's name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The state lacks a tensor.
    #[error("the state has no tensor {name:?}; it must have the tensors that were registered")]
    Missing {
        /// The tensor's name.
        name: String,
    },
    /// A tensor of the state has another size than its spec.
    #[error(
        "tensor {name:?} has {found} bytes, its shape says {expected}; shapes must stay as registered"
    )]
    TensorLength {
        /// The tensor's name.
        name: String,
        /// What its spec says.
        expected: usize,
        /// What the state has.
        found: usize,
    },
    /// There is no such segment.
    #[error("the layout has no segment {index}")]
    NoSegment {
        /// The index.
        index: SegmentIndex,
    },
    /// A segment has the wrong length.
    #[error("segment {index} has {found} bytes, the layout says {expected}")]
    SegmentLength {
        /// The segment.
        index: SegmentIndex,
        /// What the layout says.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// A segment's header bytes are not the layout's.
    #[error(
        "segment {index} carries another safetensors header than the layout's: it belongs to another model"
    )]
    Header {
        /// The segment.
        index: SegmentIndex,
    },
    /// The extra state can't be stored.
    #[error(transparent)]
    Json(#[from] crate::JsonError),
}

/// A tensor's place in its file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Placed {
    tensor: usize,
    offset: u64,
    bytes: u64,
}

/// A part of a tensor.
struct Part {
    tensor: usize,
    start: usize,
    end: usize,
}

impl Part {
    fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// Most data in one file, unless a single tensor has more; readers of many kinds take files of this size.
const FILE_BYTES: u64 = 4 << 30;
/// Headers are padded so that data starts at a page.
const HEADER_ALIGN: u64 = 4 << 10;
/// The limit of safetensors' own reader.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The name that safetensors keeps for itself.
const METADATA: &str = "__metadata__";

fn files(specs: &[TensorSpec]) -> Result<Vec<VirtualFile>, LayoutError> {
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(specs[i].dtype.bytes())); // stable: names stay in order
    let mut groups: Vec<Vec<Placed>> = vec![Vec::new()];
    let mut at = 0u64;
    for tensor in order {
        let bytes = specs[tensor].bytes().unwrap_or(0) as u64;
        if at > 0 && at + bytes > FILE_BYTES {
            groups.push(Vec::new());
            at = 0;
        }
        groups.last_mut().expect("starts with one").push(Placed { tensor, offset: at, bytes });
        at += bytes;
    }
    let count = groups.len();
    groups
        .into_iter()
        .enumerate()
        .map(|(place, placed)| file(specs, placed, place + 1, count))
        .collect()
}

fn file(
    specs: &[TensorSpec],
    mut tensors: Vec<Placed>,
    number: usize,
    count: usize,
) -> Result<VirtualFile, LayoutError> {
    let mut header = vec![0; 8];
    // "pt" is what readers of transformers ask for: plain row-major tensors.
    header.extend_from_slice(b"{\"__metadata__\":{\"format\":\"pt\"}");
    for placed in &tensors {
        let spec = &specs[placed.tensor];
        header.push(b',');
        quote(&spec.name, &mut header);
        let shape: Vec<String> = spec.shape.iter().map(ToString::to_string).collect();
        let (dtype, shape, end) =
            (spec.dtype.name(), shape.join(","), placed.offset + placed.bytes);
        let entry = format!(
            ":{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{},{end}]}}",
            placed.offset
        );
        header.extend_from_slice(entry.as_bytes());
    }
    header.push(b'}');
    let header_bytes = (header.len() as u64).next_multiple_of(HEADER_ALIGN);
    if header_bytes - 8 > HEADER_BYTES_MAX {
        return Err(LayoutError::HeaderBytes { bytes: header_bytes });
    }
    header.resize(header_bytes as usize, b' ');
    header[..8].copy_from_slice(&(header_bytes - 8).to_le_bytes());
    for placed in &mut tensors {
        placed.offset += header_bytes;
    }
    let bytes = tensors.last().map_or(header_bytes, |t| t.offset + t.bytes);
    Ok(VirtualFile {
        name: format!("state-{number:05}-of-{count:05}.safetensors"),
        header,
        bytes,
        tensors,
    })
}

fn cut(files: &[VirtualFile], segment_bytes: u64) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (file, virtual_file) in files.iter().enumerate() {
        let mut offset = 0;
        while offset < virtual_file.bytes {
            let bytes = segment_bytes.min(virtual_file.bytes - offset);
            let index = u32::try_from(segments.len()).expect("at most 2^18 segments");
            segments.push(Segment { index: SegmentIndex(index), file, offset, bytes });
            offset += bytes;
        }
    }
    segments
}

#[cfg(test)]
mod tests;
