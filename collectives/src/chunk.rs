//! How a gradient is cut in chunks, the unit of ownership, of folding and of sending.
//!
//! The cut is a function of the gradient's length and one setting, never of the members, so a chunk keeps its name when they change.
//! After the gradient's chunks comes one more, the *report chunk*, which carries the step's scalars instead of elements.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use types::Remedy;

/// The number of a chunk of a step's sum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Chunk(pub u32);

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A flat gradient of f32 cut in chunks, the last one perhaps shorter, and the report chunk after them.
// Invariant: chunk_elements > 0, and data_chunks + 1 fits in u32. Kept by `new`, the only door.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkLayout {
    elements: usize,
    chunk_elements: usize,
    data_chunks: u32,
}

impl ChunkLayout {
    /// Cuts `elements` f32 in chunks of `chunk_bytes`. No elements are allowed: then there is the report chunk alone.
    ///
    /// # Errors
    /// If `chunk_bytes` is no positive multiple of 4, or so small that the chunks can't be numbered.
    pub fn new(elements: usize, chunk_bytes: usize) -> Result<Self, LayoutError> {
        if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(size_of::<f32>()) {
            return Err(LayoutError::ChunkBytes { chunk_bytes });
        }
        let chunk_elements = chunk_bytes / size_of::<f32>();
        let data_chunks =
            u32::try_from(elements.div_ceil(chunk_elements)).ok().filter(|n| *n < u32::MAX);
        let data_chunks = data_chunks.ok_or(LayoutError::TooMany { elements, chunk_bytes })?;
        Ok(Self { elements, chunk_elements, data_chunks })
    }

    /// How many elements the gradient has.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// How many chunks there are, the report chunk among them.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.data_chunks + 1
    }

    /// The elements of a chunk; `None` for the report chunk, and for a number that is not of this layout.
    #[must_use]
    pub fn range(&self, chunk: Chunk) -> Option<Range<usize>> {
        if chunk.0 >= self.data_chunks {
            return None;
        }
        // No overflow: start < elements.
        let start = chunk.0 as usize * self.chunk_elements;
        Some(start..start + self.chunk_elements.min(self.elements - start))
    }

    /// The chunk that carries the step's scalars: the last one.
    #[must_use]
    pub fn report_chunk(&self) -> Chunk {
        Chunk(self.data_chunks)
    }

    /// Whether this is a chunk of the layout, the report chunk included.
    #[must_use]
    pub fn has(&self, chunk: Chunk) -> bool {
        chunk.0 <= self.data_chunks
    }

    /// All chunks in order, the report chunk last.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Chunk> + use<> {
        (0..=self.data_chunks).map(Chunk)
    }
}

/// Why a gradient can't be cut so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The chunk size holds no whole number of f32.
    #[error("chunks of {chunk_bytes} bytes; give a positive multiple of 4")]
    ChunkBytes {
        /// The size asked for.
        chunk_bytes: usize,
    },
    /// More chunks than can be numbered.
    #[error(
        "{elements} elements in chunks of {chunk_bytes} bytes are too many chunks; make the chunks larger"
    )]
    TooMany {
        /// Length of the gradient.
        elements: usize,
        /// The size asked for.
        chunk_bytes: usize,
    },
}

impl LayoutError {
    /// What to do next: the setting must change.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_chunk_is_shorter_and_the_report_chunk_follows() {
        let layout = ChunkLayout::new(10, 16).unwrap();
        assert_eq!(layout.chunks(), 4);
        assert_eq!(layout.range(Chunk(0)), Some(0..4));
        assert_eq!(layout.range(Chunk(2)), Some(8..10));
        assert_eq!(layout.report_chunk(), Chunk(3));
        assert_eq!(layout.range(Chunk(3)), None);
        assert!(layout.has(Chunk(3)) && !layout.has(Chunk(4)));
    }

    #[test]
    fn an_empty_gradient_has_the_report_chunk_alone() {
        let layout = ChunkLayout::new(0, 4).unwrap();
        assert_eq!(layout.iter().collect::<Vec<_>>(), [Chunk(0)]);
        assert_eq!(layout.report_chunk(), Chunk(0));
        assert_eq!(layout.range(Chunk(0)), None);
    }

    #[test]
    fn a_cut_that_cannot_be_numbered_is_refused() {
        for chunk_bytes in [0, 1, 6] {
            assert_eq!(
                ChunkLayout::new(10, chunk_bytes),
                Err(LayoutError::ChunkBytes { chunk_bytes })
            );
        }
        let elements = usize::MAX;
        assert_eq!(
            ChunkLayout::new(elements, 4),
            Err(LayoutError::TooMany { elements, chunk_bytes: 4 })
        );
        assert!(ChunkLayout::new(usize::MAX, usize::MAX - 3).is_ok());
    }

    proptest! {
        #[test]
        fn chunks_tile_the_elements(elements in 0usize..5000, chunk_elements in 1usize..700) {
            let layout = ChunkLayout::new(elements, chunk_elements * 4).unwrap();
            let all: Vec<_> = layout.iter().filter_map(|c| layout.range(c)).flatten().collect();
            prop_assert_eq!(all, (0..elements).collect::<Vec<_>>());
            prop_assert_eq!(layout.iter().count(), layout.chunks() as usize);
            prop_assert_eq!(layout.iter().last(), Some(layout.report_chunk()));
        }
    }
}
