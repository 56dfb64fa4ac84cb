//! A Rust file, read just far enough: what is code and what is comment or text, which crates it names, how long its functions are.
//!
//! Not a parser: macros and conditional code are read as they stand.

use super::arrows::OWNERS;

/// A Rust file.
pub(crate) struct Source {
    name: String,
    /// The text with comments, strings and characters blanked, line by line as it was.
    code: String,
}

impl Source {
    /// Reads the text of a file; `name` is its path from the root.
    pub(crate) fn new(name: &str, text: &str) -> Self {
        Self { name: name.to_string(), code: blank(text) }
    }

    /// Its path from the root.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How many lines it has.
    pub(crate) fn lines(&self) -> usize {
        self.code.lines().count()
    }

    /// One refusal per line that names an outside crate which belongs to another file.
    pub(crate) fn crates_out_of_place(&self) -> Vec<String> {
        let mut refusals = Vec::new();
        for (place, line) in self.code.lines().enumerate() {
            for owner in OWNERS
                .iter()
                .filter(|owner| !owner.allows(&self.name) && names_crate(line, owner.krate))
            {
                let files = owner.files.join(", ");
                refusals.push(format!(
                    "{}:{}: the crate {} belongs to {files}",
                    self.name,
                    place + 1,
                    owner.krate
                ));
            }
        }
        refusals
    }

    /// Whether it says `mod name;`.
    pub(crate) fn declares_module(&self, name: &str) -> bool {
        words(&self.code, name).any(|at| {
            self.code[..at].trim_end().ends_with("mod")
                && self.code[at + name.len()..].trim_start().starts_with(';')
        })
    }

    /// Whether it uses a path that starts with `name`.
    pub(crate) fn uses_path(&self, name: &str) -> bool {
        words(&self.code, name).any(|at| self.code[at + name.len()..].starts_with("::"))
    }

    /// Length and place of each function with a body.
    pub(crate) fn functions(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for at in words(&self.code, "fn") {
            let after = self.code[at + 2..].trim_start();
            let name: String = after.chars().take_while(|c| is_word(*c)).collect();
            let start = self.code.len() - after.len();
            if let (false, Some(end)) = (name.is_empty(), body_end(&self.code, start)) {
                let lines = self.code[at..end].matches('\n').count() + 1;
                let line = self.code[..at].matches('\n').count() + 1;
                found.push((lines, format!("{}:{line} {name}", self.name)));
            }
        }
        found
    }
}

/// Whether a line of code uses the crate: a path that starts with its name, or the name alone in a `use` or `extern crate`.
fn names_crate(line: &str, krate: &str) -> bool {
    words(line, krate).any(|at| {
        let (before, after) = (line[..at].trim_end(), line[at + krate.len()..].trim_start());
        let inner = before.ends_with("::") && !is_root_path(before);
        let path = after.starts_with("::") && !inner && !before.ends_with('.');
        let import = before.ends_with("use") || before.ends_with("extern crate");
        path || (import && (after.starts_with(';') || after.starts_with("as ")))
    })
}

/// Whether the `::` at the end of `before` starts a path, as in `use ::quinn::Endpoint`.
fn is_root_path(before: &str) -> bool {
    !before.trim_end_matches("::").ends_with(is_word)
}

/// Where a word stands in the text, not as a part of a longer one.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        !text[..*at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word)
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The end of the body of the function whose signature starts at `start`; `None` if it has none.
fn body_end(code: &str, start: usize) -> Option<usize> {
    let (mut round, mut braces) = (0_i32, 0_i32);
    for (at, c) in code[start..].char_indices() {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            ';' if round == 0 && braces == 0 => return None,
            '{' => braces += 1,
            '}' => {
                braces -= 1;
                if braces == 0 && round == 0 {
                    return Some(start + at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The text with comments, strings and characters replaced by spaces; line breaks stay.
fn blank(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            '\'' => character(rest).unwrap_or(0),
            'r' | 'b' | 'c' if !code.ends_with(is_word) => prefixed_string(rest).unwrap_or(0),
            _ => 0,
        };
        if length == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
            code.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[length..];
        }
    }
    code
}

/// The length of a block comment with those nested in it.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let pair = text.as_bytes().get(at..at + 2);
        match pair {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// The length of a string from its quote on.
fn string(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

/// The length of a character; `None` for a lifetime or a label.
fn character(text: &str) -> Option<usize> {
    let inner = &text[1..];
    let first = inner.chars().next()?;
    if first == '\\' {
        let end = inner.get(2..)?.find('\'')?;
        return Some(end + 4);
    }
    inner[first.len_utf8()..].starts_with('\'').then_some(first.len_utf8() + 2)
}

/// The length of a string or character with a prefix: `r"…"`, `r#"…"#`, `b"…"`, `b'…'`, `br"…"`, `c"…"`; `None` for anything else.
fn prefixed_string(text: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c"].into_iter().find(|prefix| text.starts_with(prefix))?;
    let rest = &text[prefix.len()..];
    if !prefix.ends_with('r') {
        let length = if rest.starts_with('"') { Some(string(rest)) } else { None };
        let length = length.or_else(|| {
            (prefix == "b" && rest.starts_with('\'')).then(|| character(rest)).flatten()
        });
        return length.map(|length| prefix.len() + length);
    }
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let quoted = rest[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = quoted.find(&close).map_or(quoted.len(), |at| at + close.len());
    Some(prefix.len() + hashes + 1 + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        blank(text).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        assert_eq!(code("a // quinn::x\nb"), "a b");
        assert_eq!(code("a /* x /* y */ z */ b"), "a b");
        assert_eq!(code(r#"a "q\"{" b"#), "a b");
        assert_eq!(code("a r#\"q\"{\"# b br\"\\\" c b\"x\" d"), "a b c d");
        assert_eq!(code("a '{' b '\\'' c '\\u{7b}' d b'}' e"), "a b c d e");
        assert_eq!(code("/// \"open\nfn f() {}"), "fn f() {}");
        assert_eq!(blank("\"a\nb\"\n").matches('\n').count(), 2, "lines keep their numbers");
    }

    #[test]
    fn lifetimes_and_names_stay_code() {
        assert_eq!(code("fn f<'a>(x: &'a str) -> 'a {}"), "fn f<'a>(x: &'a str) -> 'a {}");
        assert_eq!(code("'outer: loop { break 'outer; }"), "'outer: loop { break 'outer; }");
        assert_eq!(code("bar(crab, r#type)"), "bar(crab, r#type)");
    }

    #[test]
    fn any_cut_of_a_file_is_read_to_its_end() {
        let text = "fn f() { '\\u{7b}'; b'\\''; /* ä */ r##\"x\"##; \"\\\\\" }";
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            assert_eq!(blank(&text[..end]).chars().count(), text[..end].chars().count());
        }
    }

    #[test]
    fn a_crate_is_named_by_a_path_or_an_import() {
        for line in [
            "use quinn::Endpoint;",
            "let e: quinn::Endpoint;",
            "use ::quinn::Endpoint;",
            "use quinn;",
            "f(quinn::x)",
        ] {
            assert!(names_crate(line, "quinn"), "{line}");
        }
        for line in [
            "use crate::quinn::Endpoint;",
            "let quinn = 1;",
            "use quinn_proto::X;",
            "self.quinn.x()",
            "mod quinn;",
        ] {
            assert!(!names_crate(line, "quinn"), "{line}");
        }
    }

    #[test]
    fn an_outside_crate_may_stand_in_its_own_file_only() {
        let text = "use std::fmt;\nuse quinn::Endpoint;\n";
        assert!(Source::new("transport/src/quic.rs", text).crates_out_of_place().is_empty());
        assert!(Source::new("transport/src/quic/stream.rs", text).crates_out_of_place().is_empty());
        let refusals = Source::new("runtime/src/session.rs", text).crates_out_of_place();
        assert_eq!(refusals.len(), 1);
        assert!(refusals[0].starts_with("runtime/src/session.rs:2:"), "{refusals:?}");
    }

    #[test]
    fn functions_are_measured_from_signature_to_brace() {
        let text = "trait T {\n  fn none(&self, x: [u8; 4]);\n  fn one(&self) {}\n}\nfn three() {\n  let f: fn(u8) = g; { '}'; }\n}\n";
        let functions = Source::new("a.rs", text).functions();
        assert_eq!(functions, [(1, "a.rs:3 one".to_string()), (3, "a.rs:5 three".to_string())]);
    }
}
