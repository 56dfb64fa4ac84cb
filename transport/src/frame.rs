//! Frames and how they stand on a lane: `u32` length of the head, `u32` length of the body (little endian), head, body.
//!
//! A length of the body with the highest bit set says that the body lies in memory which the peer shares: what stands in its place is where.
//!
//! [`Assembly`] puts a frame together from the bytes of a stream. It checks the lengths before it allocates, allocates only as bytes
//! arrive, and keeps what it has when a reader is dropped in the middle.

use bytes::{Buf, BufMut as _, Bytes, BytesMut};

use crate::shared_memory::Location;

/// One message: a small head that says what it is, and the bulk bytes, if any.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Frame {
    /// What it is: an encoded message, at most [`MAX_HEAD_BYTES`].
    pub head: Bytes,
    /// Bulk bytes, at most [`MAX_BODY_BYTES`].
    pub body: Bytes,
}

impl Frame {
    /// A frame without a body.
    #[must_use]
    pub fn message(head: Bytes) -> Self {
        Self { head, body: Bytes::new() }
    }

    /// Its size on the wire.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        PREFIX_BYTES + self.head.len() + self.body.len()
    }

    /// The bytes before the head of a frame whose body is a [`Location`].
    pub(crate) fn prefix_elsewhere(&self) -> Result<Bytes, FrameError> {
        Lengths { head: self.head.len() as u64, body: self.body.len() as u64 }.check()?;
        let mut prefix = BytesMut::with_capacity(PREFIX_BYTES);
        prefix.put_u32_le(self.head.len() as u32);
        prefix.put_u32_le(ELSEWHERE | Location::BYTES as u32);
        Ok(prefix.freeze())
    }

    /// The bytes before the head.
    pub(crate) fn prefix(&self) -> Result<Bytes, FrameError> {
        let lengths = Lengths { head: self.head.len() as u64, body: self.body.len() as u64 };
        lengths.check()?;
        let mut prefix = BytesMut::with_capacity(PREFIX_BYTES);
        prefix.put_u32_le(self.head.len() as u32);
        prefix.put_u32_le(self.body.len() as u32);
        Ok(prefix.freeze())
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({} + {} bytes)", self.head.len(), self.body.len())
    }
}

/// One of a connection's two ordered streams in each direction. Frames of one lane keep their order; between lanes there is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Small messages; sent before bulk that waits.
    Control,
    /// Chunks.
    Bulk,
}

impl Lane {
    pub(crate) const ALL: [Self; 2] = [Self::Control, Self::Bulk];

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// Puts the frames of one lane together.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    prefix: BytesMut,
    lengths: Option<Lengths>,
    is_elsewhere: bool,
    head: BytesMut,
    body: BytesMut,
}

impl Assembly {
    /// Where the next bytes of the stream go, and at most how many; or the finished frame.
    pub(crate) fn next(&mut self) -> Result<Next<'_>, FrameError> {
        let lengths = match self.lengths {
            Some(lengths) => lengths,
            None if self.prefix.len() < PREFIX_BYTES => {
                self.prefix.reserve(PREFIX_BYTES);
                let limit = PREFIX_BYTES - self.prefix.len();
                return Ok(Next::Read { into: &mut self.prefix, limit });
            }
            None => {
                let (head, body) = (self.prefix.get_u32_le(), self.prefix.get_u32_le());
                self.is_elsewhere = body == ELSEWHERE | Location::BYTES as u32;
                let body = if self.is_elsewhere { body & !ELSEWHERE } else { body };
                let lengths = Lengths { head: head.into(), body: body.into() };
                lengths.check()?;
                *self.lengths.insert(lengths)
            }
        };
        let (head, body) = (lengths.head as usize, lengths.body as usize);
        if self.head.len() < head {
            return Ok(part(&mut self.head, head));
        }
        if self.body.len() < body {
            return Ok(part(&mut self.body, body));
        }
        let done = std::mem::take(self);
        if done.is_elsewhere
            && let Some(location) = Location::decode(&done.body)
        {
            let claimed = Lengths { head: 0, body: location.len };
            claimed.check()?;
            return Ok(Next::Elsewhere { head: done.head.freeze(), location });
        }
        Ok(Next::Done(Frame { head: done.head.freeze(), body: done.body.freeze() }))
    }

    /// True between frames: the stream may end here.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefix.is_empty() && self.lengths.is_none()
    }
}

/// What [`Assembly`] wants.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    /// Bytes, at most `limit`.
    Read { into: &'a mut BytesMut, limit: usize },
    /// Nothing: here is the frame.
    Done(Frame),
    /// Nothing: the body lies in the peer's memory.
    Elsewhere { head: Bytes, location: Location },
}

/// A frame over the limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{part} of {bytes} bytes, allowed are {limit}")]
pub(crate) struct FrameError {
    pub(crate) part: &'static str,
    pub(crate) bytes: u64,
    pub(crate) limit: u64,
}

#[derive(Clone, Copy, Debug)]
struct Lengths {
    head: u64,
    body: u64,
}

impl Lengths {
    fn check(self) -> Result<(), FrameError> {
        let within = |part, bytes, limit: usize| {
            let limit = limit as u64;
            if bytes <= limit { Ok(()) } else { Err(FrameError { part, bytes, limit }) }
        };
        within("frame head", self.head, MAX_HEAD_BYTES)?;
        within("frame body", self.body, MAX_BODY_BYTES)
    }
}

/// Makes room for more of a part: up to [`FIRST_BYTES`] at once, then as much again as has arrived.
fn part(into: &mut BytesMut, wanted: usize) -> Next<'_> {
    let limit = wanted - into.len();
    if into.len() == into.capacity() {
        into.reserve(limit.min(into.len().max(FIRST_BYTES)));
    }
    let room = into.capacity() - into.len();
    Next::Read { limit: limit.min(room), into }
}

/// Longest head. Heads are messages; the largest is a world of some thousand members.
pub const MAX_HEAD_BYTES: usize = 1 << 20;

/// Longest body. Chunks have 1 MiB by default; a segment of a checkpoint has 64 MiB.
pub const MAX_BODY_BYTES: usize = 64 << 20;

pub(crate) const PREFIX_BYTES: usize = 8;

/// In the length of a body: it lies in the sender's memory. No body is so long.
const ELSEWHERE: u32 = 1 << 31;

/// Reserved for a part before its bytes arrive: one default chunk, so that the usual body is never moved.
const FIRST_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `bytes` in pieces of `piece`; gives the frames and what was reserved for the last, unfinished one.
    fn assemble(mut bytes: &[u8], piece: usize) -> Result<(Vec<Frame>, usize), FrameError> {
        let (mut assembly, mut frames) = (Assembly::default(), Vec::new());
        loop {
            match assembly.next()? {
                Next::Done(frame) => frames.push(frame),
                Next::Elsewhere { .. } => {}
                Next::Read { .. } if bytes.is_empty() => break,
                Next::Read { into, limit } => {
                    assert!(limit > 0);
                    let (now, later) = bytes.split_at(piece.min(limit).min(bytes.len()));
                    into.put_slice(now);
                    bytes = later;
                }
            }
        }
        Ok((frames, assembly.head.capacity() + assembly.body.capacity()))
    }

    fn wire(frames: &[Frame]) -> Vec<u8> {
        frames
            .iter()
            .flat_map(|frame| {
                [frame.prefix().unwrap(), frame.head.clone(), frame.body.clone()].concat()
            })
            .collect()
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            parts in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..50), prop::collection::vec(any::<u8>(), 0..300)), 0..8),
            piece in 1_usize..400,
        ) {
            let frames: Vec<_> = parts.into_iter().map(|(head, body)| Frame { head: head.into(), body: body.into() }).collect();
            prop_assert_eq!(assemble(&wire(&frames), piece).unwrap().0, frames);
        }

        #[test]
        fn any_bytes_are_taken_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
            if let Ok((_, reserved)) = assemble(&bytes, piece) {
                prop_assert!(reserved <= 2 * FIRST_BYTES);
            }
        }
    }

    #[test]
    fn a_claimed_length_over_the_limit_is_refused_before_anything_is_reserved() {
        let claim = |head: u32, body: u32| [head.to_le_bytes(), body.to_le_bytes()].concat();
        let error = assemble(&claim(0, u32::MAX), 8).unwrap_err();
        assert_eq!(error.to_string(), "frame body of 4294967295 bytes, allowed are 67108864");
        assert!(assemble(&claim(MAX_HEAD_BYTES as u32 + 1, 0), 8).is_err());
        let (frames, reserved) = assemble(&claim(0, MAX_BODY_BYTES as u32), 8).unwrap();
        assert!(frames.is_empty());
        assert!(reserved <= FIRST_BYTES, "{reserved} bytes for none that came");
    }

    #[test]
    fn a_large_body_grows_with_what_arrives() {
        let body = Bytes::from(vec![7; 5 << 20]);
        let bytes = wire(&[Frame { head: Bytes::new(), body: body.clone() }]);
        let (frames, reserved) = assemble(&bytes[..2 << 20], 1 << 16).unwrap();
        assert!(frames.is_empty() && reserved <= 4 << 20, "{reserved}");
        assert_eq!(assemble(&bytes, 1 << 16).unwrap().0[0].body, body);
    }
}
