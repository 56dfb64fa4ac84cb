//! Gets each worker a certificate of its own, through the agent's connection. The worker never sees the join token.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use membership::ToCoordinator;
use tokio::sync::oneshot;
use transport::CsrKey;
use types::{JobId, NodeId};

use super::exit::{Exit, ExitCode, RequeueCode};
use super::supervisor::Slot;
use super::workers::{Prepare, PrepareError, Prepared};
use crate::drivers::control::ControlHandle;

type Answer = Result<(NodeId, Bytes), (u8, String)>;

/// Enrols workers; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Identities {
    control: ControlHandle,
    job: JobId,
    authority: Bytes,
    folder: PathBuf,
    /// Where the agent serves HTTP; its workers take the ports after it.
    http: Option<SocketAddr>,
    /// How long coordinators may be silent where they are needed.
    deadline: Duration,
    state: Arc<Mutex<State>>,
}

/// Answers may come before the asker knows its sequence number: they wait here.
#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<u64, oneshot::Sender<Answer>>,
    early: BTreeMap<u64, Answer>,
}

impl Identities {
    pub(crate) fn new(
        control: ControlHandle,
        job: JobId,
        authority: Bytes,
        folder: &Path,
        (http, deadline): (Option<SocketAddr>, Duration),
    ) -> Self {
        Self {
            control,
            job,
            authority,
            folder: folder.to_path_buf(),
            http,
            deadline,
            state: Arc::default(),
        }
    }

    pub(crate) fn handle_enrolled(&self, sequence: u64, node: NodeId, certificate: Bytes) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.waiting.remove(&sequence) {
            Some(waiting) => drop(waiting.send(Ok((node, certificate)))),
            None => drop(state.early.insert(sequence, Ok((node, certificate)))),
        }
    }

    pub(crate) fn handle_refused(&self, code: u8, reason: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for waiting in std::mem::take(&mut state.waiting).into_values() {
            let _ = waiting.send(Err((code, reason.to_owned())));
        }
    }

    async fn enrol(&self) -> Result<(NodeId, PathBuf), (u8, String)> {
        let (csr, key) = CsrKey::generate().map_err(|e| (1, e.to_string()))?;
        let message = ToCoordinator::EnrollWorker { job: self.job.clone(), csr, sequence: 0 };
        let sequence =
            self.control.ask(message).await.ok_or((1, "too many requests wait".to_owned()))?;
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            match state.early.remove(&sequence) {
                Some(answer) => drop(sender.send(answer)),
                None => drop(state.waiting.insert(sequence, sender)),
            }
        }
        let answer = tokio::time::timeout(self.deadline, receiver).await.map_err(|_| {
            let waited = self.deadline;
            (69, format!("no coordinator gave this worker a certificate within {waited:?}"))
        })?;
        let (node, certificate) = answer.map_err(|_| (1, "the agent ends".to_owned()))??;
        let identity = key
            .into_identity(certificate, self.authority.clone())
            .map_err(|e| (1, e.to_string()))?;
        let path = self.folder.join(format!("worker-{node}.identity"));
        identity.save(&path).map_err(|e| (1, e.to_string()))?;
        Ok((node, path))
    }
}

impl Prepare for Identities {
    async fn prepare(&self, slot: Slot, _attempt: u32) -> Result<Prepared, PrepareError> {
        let (node, path) = self.enrol().await.map_err(|(code, reason)| PrepareError {
            code: ExitCode::of(Exit::Code(i32::from(code)), RequeueCode::default()),
            reason,
        })?;
        let mut environment =
            BTreeMap::from([("RIPSTOP_IDENTITY".to_owned(), path.display().to_string())]);
        let port = self
            .http
            .and_then(|at| at.port().checked_add(1)?.checked_add(u16::try_from(slot.0).ok()?));
        if let Some((at, port)) = self.http.zip(port) {
            environment
                .insert("RIPSTOP_HTTP".to_owned(), SocketAddr::new(at.ip(), port).to_string());
        }
        Ok(Prepared { node, environment })
    }
}
