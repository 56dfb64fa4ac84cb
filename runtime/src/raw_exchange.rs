//! The measuring stick of `ripstop bench allreduce`: the bytes of a sum between as many peers, over the endpoints that members use, with
//! nobody who folds or reads them.
//!
//! Peers find each other through a folder: each writes its address, and waits for those of the others.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use transport::{
    CertificateAuthority, Connection, Endpoint, Expect, Frame, Identity, Lane, Role, Subject,
};
use types::{JobId, NodeId};

use crate::credentials;
use crate::error::Error;
use crate::settings::{CHUNK_BYTES_DEFAULT, RECOVERY_TARGET_DEFAULT};

/// Writes an identity for each of `members` peers into the folder.
///
/// # Errors
/// If the folder can't be written.
pub fn prepare(folder: &Path, members: u32) -> Result<(), Error> {
    let failed = |e: transport::CertificateError| Error::Settings(e.to_string());
    let authority = CertificateAuthority::create().map_err(failed)?;
    for index in 0..members {
        let identity = authority.identity(&subject(index)?, VALID).map_err(failed)?;
        identity.save(&identity_path(folder, index)).map_err(failed)?;
    }
    Ok(())
}

/// One peer, linked with all others.
#[derive(Debug)]
pub struct RawExchange {
    endpoint: Endpoint,
    links: Vec<Connection>,
    chunk: Bytes,
}

impl RawExchange {
    /// Links this peer with all others. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the others don't come in time.
    pub async fn connect(folder: &Path, index: u32, members: u32) -> Result<Self, Error> {
        let failed = |reason: String| Error::Transport { context: "the raw exchange", reason };
        let identity = Identity::load(&identity_path(folder, index))
            .map_err(|e| Error::Settings(e.to_string()))?;
        let config = credentials::endpoint_config(RECOVERY_TARGET_DEFAULT)?;
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let endpoint = Endpoint::bind(address, Arc::new(identity), &config)
            .map_err(|e| failed(e.to_string()))?;
        let own = address_path(folder, index);
        let draft = own.with_extension("draft");
        std::fs::write(&draft, endpoint.local_addr().to_string())
            .and_then(|()| std::fs::rename(&draft, &own))
            .map_err(|e| failed(format!("{}: {e}", own.display())))?;
        let mut links = Vec::new();
        for other in index + 1..members {
            let at = wait_for_address(&address_path(folder, other)).await?;
            let expect = Expect::role(Role::Worker);
            let link = endpoint.connect(at, &expect, DEADLINE).await;
            links.push(link.map_err(|e| failed(e.to_string()))?);
        }
        for _ in 0..index {
            let accepted = tokio::time::timeout(DEADLINE, endpoint.accept()).await;
            let link = accepted.ok().flatten();
            links.push(link.ok_or_else(|| failed("a peer did not come".to_owned()))?);
        }
        Ok(Self { endpoint, links, chunk: Bytes::from(vec![0x5a; CHUNK_BYTES_DEFAULT]) })
    }

    /// Sends `bytes` to each peer and takes as many from each.
    ///
    /// # Errors
    /// If a link breaks.
    pub async fn round(&self, bytes: u64) -> Result<(), Error> {
        let mut tasks = tokio::task::JoinSet::new();
        for link in &self.links {
            let (sending, chunk) = (link.clone(), self.chunk.clone());
            tasks.spawn(async move {
                let mut left = bytes;
                while left > 0 {
                    let part = left.min(chunk.len() as u64);
                    let frame = Frame { head: Bytes::new(), body: chunk.slice(..part as usize) };
                    sending.send(Lane::Bulk, frame).await?;
                    left -= part;
                }
                Ok(())
            });
            let (receiving, frames) = (link.clone(), bytes.div_ceil(self.chunk.len() as u64));
            tasks.spawn(async move { receiving.discard(Lane::Bulk, bytes, frames).await });
        }
        while let Some(done) = tasks.join_next().await {
            let failed = |reason| Error::Transport { context: "the raw exchange", reason };
            let done = done.map_err(|e| failed(e.to_string()))?;
            done.map_err(|e: transport::ConnectionError| failed(e.to_string()))?;
        }
        Ok(())
    }

    /// UDP payload sent so far.
    #[must_use]
    pub fn sent_wire_bytes(&self) -> u64 {
        self.endpoint.sent_wire_bytes()
    }

    /// Delivers what was sent, and ends.
    pub async fn close(&self) {
        for link in &self.links {
            let _ = link.finish(DEADLINE).await;
        }
        self.endpoint.close(0, "done");
        self.endpoint.wait_idle(DEADLINE).await;
    }
}

async fn wait_for_address(path: &Path) -> Result<SocketAddr, Error> {
    let began = crate::clock::now();
    loop {
        let found = std::fs::read_to_string(path).ok().and_then(|text| text.parse().ok());
        if let Some(address) = found {
            return Ok(address);
        }
        if crate::clock::now().since(began) > DEADLINE {
            let reason = format!("no peer wrote {}", path.display());
            return Err(Error::Transport { context: "the raw exchange", reason });
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn subject(index: u32) -> Result<Subject, Error> {
    let job = JobId::new("bench").map_err(Error::Settings)?;
    Ok(Subject { role: Role::Worker, job: Some(job), node: NodeId(u64::from(index)) })
}

fn identity_path(folder: &Path, index: u32) -> PathBuf {
    folder.join(format!("identity-{index}.pem"))
}

fn address_path(folder: &Path, index: u32) -> PathBuf {
    folder.join(format!("address-{index}"))
}

const VALID: Duration = Duration::from_secs(24 * 3600);
const DEADLINE: Duration = Duration::from_secs(30);
