//! Certificates and keys as text files, readable by the usual tools; secrets are written for their owner only.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::token::random_bytes;

/// One block of a PEM file.
pub(crate) fn encode(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    for line in text.as_bytes().chunks(64) {
        out.push_str(std::str::from_utf8(line).expect("base64 is ASCII"));
        out.push('\n');
    }
    out.push_str(&format!("-----END {label}-----\n"));
    out
}

/// The contents of all blocks called `label`, in their order. Text between blocks is skipped.
pub(crate) fn decode(label: &str, text: &str) -> Result<Vec<Vec<u8>>, String> {
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let mut rest = text;
    let mut found = Vec::new();
    while let Some(start) = rest.find(&begin) {
        let body = &rest[start + begin.len()..];
        let stop = body.find(&end).ok_or_else(|| format!("the {label} block has no end"))?;
        let packed: String = body[..stop].chars().filter(|c| !c.is_ascii_whitespace()).collect();
        found.push(STANDARD.decode(packed).map_err(|_| format!("the {label} block is no base64"))?);
        rest = &body[stop + end.len()..];
    }
    Ok(found)
}

/// The one block called `label`.
pub(crate) fn decode_one(label: &str, text: &str) -> Result<Vec<u8>, String> {
    let mut found = decode(label, text)?;
    match (found.pop(), found.is_empty()) {
        (Some(der), true) => Ok(der),
        (None, _) => Err(format!("there is no {label} block")),
        (Some(_), false) => Err(format!("there are several {label} blocks")),
    }
}

/// Makes a directory, and those above it, for their owner only. One that exists is left as it is.
pub(crate) fn create_private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes a new file, readable and writable by its owner only, and makes it durable. Refuses to overwrite.
pub(crate) fn create_private_file(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Replaces a file by one that only its owner may read: readers see the old text or the new, never a part.
pub(crate) fn replace_private_file(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut draft = name.to_os_string();
    draft.push(format!(".{:016x}.new", u64::from_le_bytes(random_bytes())));
    let draft = path.with_file_name(draft);
    create_private_file(&draft, text).and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&draft);
    })
}
