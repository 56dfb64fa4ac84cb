//! Notices for everybody else: a file that appears, a command that ends with 0.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::SystemTime;

use tokio::process::Command;

use super::{Answer, Notice, NoticeSource, SPOT_NOTICE, time_left};

/// A notice is there as soon as a file is.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
}

impl FileSource {
    /// This file.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

impl NoticeSource for FileSource {
    fn name(&self) -> &'static str {
        "file"
    }

    fn is_there(&mut self) -> Answer<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    fn poll(&mut self) -> Answer<'_, Option<Notice>> {
        Box::pin(async {
            let path = self.path.display();
            match tokio::fs::read_to_string(&self.path).await {
                Ok(text) => notice("file", format!("{path} is there"), &text).map(Some),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(format!("{path}: {e}")),
            }
        })
    }
}

/// A notice is there as soon as a shell command ends with 0.
#[derive(Debug)]
pub struct CommandSource {
    command: String,
}

impl CommandSource {
    /// This command, run by `sh -c`.
    #[must_use]
    pub fn new(command: String) -> Self {
        Self { command }
    }
}

impl NoticeSource for CommandSource {
    fn name(&self) -> &'static str {
        "command"
    }

    fn is_there(&mut self) -> Answer<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    fn poll(&mut self) -> Answer<'_, Option<Notice>> {
        Box::pin(async {
            let command = Command::new("sh")
                .args(["-c", &self.command])
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .kill_on_drop(true)
                .output();
            let output = command.await.map_err(|e| format!("sh can't be started: {e}"))?;
            if !output.status.success() {
                return match output.status.code() {
                    // The shell did not find it, or must not run it: that would never tell of anything.
                    Some(code @ (126 | 127)) => {
                        Err(format!("{:?} ended with {code}", self.command))
                    }
                    _ => Ok(None),
                };
            }
            let said = String::from_utf8_lossy(&output.stdout);
            notice("command", format!("{:?} ended with 0", self.command), &said).map(Some)
        })
    }
}

fn notice(source: &'static str, detail: String, text: &str) -> Result<Notice, String> {
    let left = time_left(text.lines().next().unwrap_or_default(), SystemTime::now());
    // Whoever tells of an end in words that we don't know tells of an end.
    let left = left.unwrap_or_else(|reason| {
        tracing::warn!(source, reason, "taken for {SPOT_NOTICE:?}");
        None
    });
    Ok(Notice { source, detail, time_left: Some(left.unwrap_or(SPOT_NOTICE)) })
}
