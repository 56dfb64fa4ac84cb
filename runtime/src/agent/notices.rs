//! Notices that this host goes away soon: from a cloud's metadata service, a file, or a command.
//!
//! Whoever tells of them is a [`NoticeSource`]. All are asked every five seconds, as AWS advises, each for itself: one that hangs or fails delays
//! neither the others nor the start. Deliberately not here: what a notice leads to; that is the supervisor's.

mod aws;
mod local;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;

pub use aws::Aws;
pub use local::{CommandSource, FileSource};

/// Somebody who knows when this host goes away.
pub trait NoticeSource: Send {
    /// Its name, for people and metrics.
    fn name(&self) -> &'static str;

    /// Whether it is there at all; asked once, and given a second.
    fn is_there(&mut self) -> Answer<'_, bool>;

    /// What it knows now. It may be asked again after a notice.
    fn poll(&mut self) -> Answer<'_, Option<Notice>>;
}

/// What a source will have said.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, String>> + Send + 'a>>;

/// This host goes away, or may.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Notice {
    /// Who said so.
    pub source: &'static str,
    /// What it said, for people.
    pub detail: String,
    /// When; `None`: it only may, some time.
    pub time_left: Option<Duration>,
}

/// Which sources to ask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoticeSetting {
    /// Nobody.
    None,
    /// AWS, if its metadata service answers.
    Auto,
    /// AWS.
    Aws,
    /// A notice is there as soon as this file is; what is in it may say how much time is left.
    File(std::path::PathBuf),
    /// A notice is there as soon as this shell command ends with 0; what it prints may say how much time is left.
    Command(String),
}

impl FromStr for NoticeSetting {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("command", command)) if !command.trim().is_empty() => {
                Ok(Self::Command(command.to_owned()))
            }
            None if text == "none" => Ok(Self::None),
            None if text == "auto" => Ok(Self::Auto),
            None if text == "aws" => Ok(Self::Aws),
            _ => Err(format!("{text:?}: write auto, none, aws, file:PATH or command:COMMAND")),
        }
    }
}

impl fmt::Display for NoticeSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Auto => f.write_str("auto"),
            Self::Aws => f.write_str("aws"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Command(command) => write!(f, "command:{command}"),
        }
    }
}

/// Asks all of them from now on, on the current tokio runtime; ends with the receiver.
#[must_use]
pub fn watch(settings: &[NoticeSetting]) -> mpsc::Receiver<Notice> {
    let (sender, receiver) = mpsc::channel(16);
    for setting in settings {
        let (source, is_asked_for): (Box<dyn NoticeSource>, bool) = match setting {
            NoticeSetting::None => continue,
            NoticeSetting::Auto => (Box::new(Aws::from_env()), false),
            NoticeSetting::Aws => (Box::new(Aws::from_env()), true),
            NoticeSetting::File(path) => (Box::new(FileSource::new(path.clone())), true),
            NoticeSetting::Command(command) => {
                (Box::new(CommandSource::new(command.clone())), true)
            }
        };
        tokio::spawn(ask(source, is_asked_for, sender.clone()));
    }
    receiver
}

async fn ask(mut source: Box<dyn NoticeSource>, is_asked_for: bool, out: mpsc::Sender<Notice>) {
    let name = source.name();
    let found = tokio::time::timeout(PROBE_DEADLINE, source.is_there()).await;
    let reason = match found {
        Ok(Ok(true)) => None,
        Ok(Ok(false)) => Some("it is not there".to_owned()),
        Ok(Err(reason)) => Some(reason),
        Err(_) => Some(format!("no answer within {PROBE_DEADLINE:?}")),
    };
    match reason {
        None => tracing::info!(source = name, "notices are listened to"),
        // It may come: an instance's network is up later than its agent.
        Some(reason) if is_asked_for => {
            tracing::warn!(source = name, reason, "no notices yet; it is asked again");
        }
        Some(reason) => {
            tracing::debug!(source = name, reason, "no notices");
            return;
        }
    }
    let mut told: Option<Notice> = None;
    let mut failing = false;
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = out.closed() => return,
        }
        let said = tokio::time::timeout(POLL_DEADLINE, source.poll()).await;
        let said = said.unwrap_or_else(|_| Err(format!("no answer within {POLL_DEADLINE:?}")));
        let has_failed = said.is_err();
        match said {
            Ok(Some(notice)) => {
                let is_same = told.as_ref().is_some_and(|former| former.detail == notice.detail);
                if !is_same {
                    told = Some(notice.clone());
                    if out.send(notice).await.is_err() {
                        return;
                    }
                }
            }
            Ok(None) => {}
            Err(reason) if !failing => {
                tracing::warn!(source = name, reason, "a source of notices fails");
            }
            Err(_) => {}
        }
        if failing && !has_failed {
            tracing::info!(source = name, "the source of notices answers again");
        }
        failing = has_failed;
    }
}

/// The time left according to a text: empty, a duration as `90s`, or a time as `2026-12-06T19:00:00Z`.
fn time_left(text: &str, now: SystemTime) -> Result<Option<Duration>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    if let Ok(duration) = crate::settings::parse_duration(text) {
        return Ok(Some(duration));
    }
    match humantime::parse_rfc3339_weak(text) {
        Ok(at) => Ok(Some(at.duration_since(now).unwrap_or_default())),
        Err(_) => Err(format!("{text:?} is no time left: write 90s, or 2026-12-06T19:00:00Z")),
    }
}

/// AWS: "we recommend that you check for these interruption notices every 5 seconds".
const POLL: Duration = Duration::from_secs(5);
const POLL_DEADLINE: Duration = Duration::from_secs(4);
const PROBE_DEADLINE: Duration = Duration::from_secs(1);
/// What AWS gives before it takes a spot instance; also where a notice names no time.
const SPOT_NOTICE: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests;
