//! Cuts a stream of bytes into lines of bounded length.
//!
//! A line ends at `\n`, `\r\n` or a lone `\r` (progress bars write nothing else). A line that is too long comes in pieces, so
//! nothing is lost and memory is bounded. Bytes that are no UTF-8 become the replacement character.

/// The state between two pieces of a stream.
#[derive(Debug, Default)]
pub struct Lines {
    /// The line so far.
    // Invariant: shorter than `LINE_BYTES_MAX`.
    partial: Vec<u8>,
    /// The last byte was `\r`: a `\n` right after it ends no further line.
    is_after_return: bool,
}

impl Lines {
    /// Takes more bytes and hands each line that is complete to `line`, without its end.
    pub fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        for &byte in bytes {
            match byte {
                b'\n' if self.is_after_return => {}
                b'\n' | b'\r' => {
                    line(&String::from_utf8_lossy(&self.partial));
                    self.partial.clear();
                }
                byte => {
                    self.partial.push(byte);
                    if self.partial.len() == LINE_BYTES_MAX {
                        let rest = self.partial.split_off(whole_characters(&self.partial));
                        line(&String::from_utf8_lossy(&self.partial));
                        self.partial = rest;
                    }
                }
            }
            self.is_after_return = byte == b'\r';
        }
    }

    /// Hands out what the stream ended with, if it did not end with a whole line.
    pub fn finish(&mut self, mut line: impl FnMut(&str)) {
        if !self.partial.is_empty() {
            line(&String::from_utf8_lossy(&self.partial));
            self.partial.clear();
        }
    }
}

/// How many of `bytes` can be cut off without cutting a character in two.
fn whole_characters(bytes: &[u8]) -> usize {
    // A character has at most four bytes, so its first one is among the last three if the end is missing.
    let first = (1..=3.min(bytes.len()))
        .find(|back| bytes[bytes.len() - back] & 0b1100_0000 != 0b1000_0000);
    match first {
        Some(back) if bytes[bytes.len() - back].leading_ones() as usize > back => {
            bytes.len() - back
        }
        _ => bytes.len(),
    }
}

/// The longest line. Longer than any that is meant to be read; a program that prints without end must not fill our memory.
pub const LINE_BYTES_MAX: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for piece in pieces {
            lines.push(piece, |line| found.push(line.to_owned()));
        }
        lines.finish(|line| found.push(line.to_owned()));
        found
    }

    #[test]
    fn lines_end_at_every_usual_end() {
        let table: &[(&[u8], &[&str])] = &[
            (b"", &[]),
            (b"a", &["a"]),
            (b"a\n", &["a"]),
            (b"a\nb", &["a", "b"]),
            (b"a\r\nb\r\n", &["a", "b"]),
            (b"\n\n", &["", ""]),
            (b"10%\r20%\r\n", &["10%", "20%"]),
            (b"\r\r\n\n", &["", "", ""]),
            (b"\xff\xfeok\n", &["\u{fffd}\u{fffd}ok"]),
        ];
        for (bytes, expected) in table {
            assert_eq!(lines([*bytes]), *expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_comes_in_pieces() {
        let long = vec![b'x'; 2 * LINE_BYTES_MAX + 5];
        let lengths: Vec<_> = lines([&long[..]]).iter().map(String::len).collect();
        assert_eq!(lengths, [LINE_BYTES_MAX, LINE_BYTES_MAX, 5]);
    }

    #[test]
    fn a_character_is_never_cut_in_two() {
        for character in ["ä", "€", "🧵"] {
            for shift in 0..4 {
                let text = "x".repeat(shift) + &character.repeat(LINE_BYTES_MAX);
                let found = lines([text.as_bytes()]);
                assert!(found.iter().all(|line| line.len() <= LINE_BYTES_MAX));
                assert!(found.concat() == text, "{character} {shift}");
            }
        }
    }

    #[test]
    fn bytes_that_only_look_like_the_middle_of_a_character_are_cut_somewhere() {
        let bytes = vec![0x80; LINE_BYTES_MAX + 1];
        assert_eq!(lines([&bytes[..]]).len(), 2);
    }

    proptest! {
        #[test]
        fn how_the_stream_is_cut_changes_nothing(
            bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'a'), any::<u8>()], 0..200),
            size in 1..20usize,
        ) {
            prop_assert_eq!(lines(bytes.chunks(size)), lines([&bytes[..]]));
        }
    }
}
