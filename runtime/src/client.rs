//! [`Client`]: what a person's command line asks of the coordinators.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use membership::{CheckpointStatus, ClusterStatus, Cost, Event, JobStatus, MemberStatus};
use membership::{ParticipantEvent, ToCoordinator};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use transport::{CertificateAuthority, Identity, Role, Subject};
use types::{JobId, NodeId};

use crate::agent::tempfile_dir;
use crate::drivers::control::{self, ControlConfig, ControlHandle};
use crate::error::Error;

/// A connection of a person's command line.
#[derive(Debug)]
pub struct Client {
    control: ControlHandle,
    events: mpsc::UnboundedReceiver<ParticipantEvent>,
    deadline: Duration,
    addresses: Vec<SocketAddr>,
}

/// Where a cluster is, and with which identity to speak to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Contact {
    /// Where its coordinators listen.
    pub coordinators: Vec<SocketAddr>,
    /// The identity's file.
    pub identity: PathBuf,
}

impl Contact {
    const FILE: &'static str = "contact.json";

    pub(crate) fn save(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(Self::FILE);
        let text = serde_json::to_string_pretty(self)
            .map_err(|_| Error::Internal("a contact is plain data"))?;
        std::fs::write(&path, text).map_err(|e| Error::Settings(format!("{}: {e}", path.display())))
    }

    /// Every `ripstop run --standalone` of this user on this host that still lives, the newest last; `job` narrows it down.
    #[must_use]
    pub fn find_local(job: Option<&JobId>) -> Vec<LocalRun> {
        let mut found = Vec::new();
        let entries = std::fs::read_dir(tempfile_dir::root()).into_iter().flatten();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some((run, pid)) = name.strip_prefix("run-").and_then(|rest| rest.rsplit_once('-'))
            else {
                continue;
            };
            let is_alive = Path::new("/proc").join(pid).exists();
            if !is_alive || job.is_some_and(|job| job.as_str() != run) {
                continue;
            }
            let path = entry.path().join(Self::FILE);
            let contact: Option<Self> = std::fs::read_to_string(&path)
                .ok()
                .and_then(|text| serde_json::from_str(&text).ok());
            let changed = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
            if let (Some(changed), Some(contact), Ok(job), Ok(pid)) =
                (changed, contact, JobId::new(run), pid.parse())
            {
                found.push((changed, LocalRun { job, pid, contact }));
            }
        }
        found.sort_by_key(|(changed, _)| *changed);
        found.into_iter().map(|(_, run)| run).collect()
    }
}

/// A `ripstop run --standalone` on this host.
#[derive(Clone, Debug)]
pub struct LocalRun {
    /// Its job.
    pub job: JobId,
    /// The launcher's process id.
    pub pid: u32,
    /// How to speak to the coordinator inside it.
    pub contact: Contact,
}

impl Client {
    /// Speaks to a cluster with the identity of a contact.
    ///
    /// # Errors
    /// If the identity can't be read.
    pub fn from_contact(contact: &Contact, deadline: Duration) -> Result<Self, Error> {
        let identity = Identity::load(&contact.identity)
            .map_err(|e| Error::Settings(format!("{}: {e}", contact.identity.display())))?;
        Self::start(contact.coordinators.clone(), Arc::new(identity), deadline)
    }

    /// Speaks to a cluster whose authority is at hand.
    ///
    /// # Errors
    /// If the authority can't be read.
    pub fn from_authority(
        coordinators: Vec<SocketAddr>,
        dir: &Path,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let reason = |e: transport::CertificateError| Error::Settings(e.to_string());
        let authority = CertificateAuthority::load(dir).map_err(reason)?;
        let subject = Subject { role: Role::Operator, job: None, node: NodeId(0) };
        let identity = authority.identity(&subject, Duration::from_secs(3600)).map_err(reason)?;
        Self::start(coordinators, Arc::new(identity), deadline)
    }

    pub(crate) fn start(
        coordinators: Vec<SocketAddr>,
        identity: Arc<Identity>,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let (sender, events) = mpsc::unbounded_channel();
        let config = ControlConfig {
            coordinators: coordinators.clone(),
            identity,
            recovery_target: Duration::from_secs(1),
            join: None,
        };
        let control = control::start(config, move |event| drop(sender.send(event)))?;
        Ok(Self { control, events, deadline, addresses: coordinators })
    }

    /// How things stand.
    ///
    /// # Errors
    /// If no coordinator answers in time, or we are refused.
    pub async fn status(&mut self, job: Option<JobId>) -> Result<ClusterStatus, Error> {
        let sequence = self.control.ask(ToCoordinator::Status { job, sequence: 0 }).await;
        self.answer(|event| match event {
            ParticipantEvent::Status { sequence: at, status } if Some(at) == sequence => {
                Some(*status)
            }
            _ => None,
        })
        .await
    }

    /// What happened from entry `since` of the log on, and where to ask again from.
    ///
    /// # Errors
    /// If no coordinator answers in time, or we are refused.
    pub async fn events(
        &mut self,
        job: Option<JobId>,
        since: u64,
    ) -> Result<(Vec<Event>, u64), Error> {
        let sequence = self.control.ask(ToCoordinator::Events { job, since, sequence: 0 }).await;
        self.answer(|event| match event {
            ParticipantEvent::Events { sequence: at, events, next } if Some(at) == sequence => {
                Some((events, next))
            }
            _ => None,
        })
        .await
    }

    /// Asks that nodes may leave in good order.
    ///
    /// # Errors
    /// If no coordinator answers in time, or we are refused.
    pub async fn drain(
        &mut self,
        job: JobId,
        nodes: Vec<NodeId>,
        reason: String,
    ) -> Result<(), Error> {
        self.order(ToCoordinator::Drain { nodes, job, reason, sequence: 0 }).await
    }

    /// From now on the job has at least `min` and at most `max` members; `None`: as before.
    ///
    /// # Errors
    /// If the bounds can't be, there is no such job, or no coordinator answers in time.
    pub async fn scale(
        &mut self,
        job: JobId,
        min: Option<u32>,
        max: Option<u32>,
    ) -> Result<(), Error> {
        self.order(ToCoordinator::Scale { job, min, max, sequence: 0 }).await
    }

    /// Asks for a checkpoint as soon as one can begin.
    ///
    /// # Errors
    /// If the job has no store or does not run, or no coordinator answers in time.
    pub async fn ask_checkpoint(&mut self, job: JobId) -> Result<(), Error> {
        self.order(ToCoordinator::Checkpoint { job, sequence: 0 }).await
    }

    /// Asks for a checkpoint, and waits until one is committed that holds the state of now or a newer one.
    ///
    /// # Errors
    /// If the job has no store or does not run, or no checkpoint is committed within `limit`.
    pub async fn checkpoint(
        &mut self,
        job: JobId,
        limit: Duration,
    ) -> Result<CheckpointStatus, Error> {
        let until = tokio::time::Instant::now() + limit;
        let mut wanted = None;
        let mut asked_in = None;
        loop {
            let status = self.status(Some(job.clone())).await?;
            // What was asked of a leader died with it.
            if asked_in != Some(status.term) {
                self.ask_checkpoint(job.clone()).await?;
                asked_in = Some(status.term);
            }
            let known = status.jobs.into_iter().next();
            let (step, found) = known.map_or((None, None), |job| (job.step, job.checkpoint));
            let wanted = *wanted.get_or_insert(step.unwrap_or_default());
            if let Some(found) = found.filter(|found| found.step >= wanted) {
                return Ok(found);
            }
            if tokio::time::Instant::now() >= until {
                return Err(Error::Checkpoint {
                    reason: format!(
                        "no checkpoint of step {wanted} or later within {limit:?}: `ripstop events --run-id {job}` shows why"
                    ),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Gives a coordinator that lost its disk its seat again, on the disk that it has now.
    ///
    /// # Errors
    /// If there is no such coordinator, it has not been started anew, or no other answers in time.
    pub async fn replace_coordinator(&mut self, coordinator: u64) -> Result<(), Error> {
        self.order(ToCoordinator::Replace { coordinator, sequence: 0 }).await
    }

    async fn order(&mut self, message: ToCoordinator) -> Result<(), Error> {
        let sequence = self.control.ask(message).await;
        self.answer(|event| match event {
            ParticipantEvent::Noted { sequence: at } if Some(at) == sequence => Some(()),
            _ => None,
        })
        .await
    }

    async fn answer<T>(
        &mut self,
        pick: impl Fn(ParticipantEvent) -> Option<T>,
    ) -> Result<T, Error> {
        let picked = async {
            loop {
                match self.events.recv().await {
                    Some(ParticipantEvent::Refused { code, reason }) => {
                        return Err(Error::Refused { code, reason });
                    }
                    Some(event) => {
                        if let Some(answer) = pick(event) {
                            return Ok(answer);
                        }
                    }
                    None => return Err(Error::Internal("the control thread ended")),
                }
            }
        };
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let unreachable = Error::Unreachable {
            waited_s: self.deadline.as_secs(),
            addresses: addresses.join(","),
        };
        tokio::time::timeout(self.deadline, picked).await.unwrap_or(Err(unreachable))
    }
}

/// Between two looks at how far a checkpoint is.
const POLL: Duration = Duration::from_millis(100);
