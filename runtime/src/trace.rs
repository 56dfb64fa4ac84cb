//! [`Trace`]: what a process saw and when, one JSON object a line, times from CLOCK_MONOTONIC.
//!
//! The demo, the benches and the chaos tests read it. Written only when asked for, by a path in the settings; a failing disk ends the
//! trace with one warning and never the process.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use types::NodeId;

use crate::clock;

/// Where a process writes what it saw; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    file: Option<Arc<Mutex<Option<File>>>>,
    node: NodeId,
}

impl Trace {
    /// A trace that appends to `path`.
    ///
    /// # Errors
    /// If the file can't be opened.
    pub(crate) fn open(path: &Path, node: NodeId) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { file: Some(Arc::new(Mutex::new(Some(file)))), node })
    }

    /// Writes one event; `fields` is a JSON object.
    pub(crate) fn event(&self, kind: &str, mut fields: Value) {
        let Some(file) = &self.file else { return };
        let now = clock::now();
        if let Value::Object(map) = &mut fields {
            map.insert("event".into(), json!(kind));
            map.insert("t_ns".into(), json!(now.0));
            map.insert("node".into(), json!(self.node));
        }
        let mut line = fields.to_string();
        line.push('\n');
        let mut guard = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = guard.as_mut()
            && let Err(error) = file.write_all(line.as_bytes())
        {
            tracing::warn!(%error, "the trace ends: it can't be written");
            *guard = None;
        }
    }
}
