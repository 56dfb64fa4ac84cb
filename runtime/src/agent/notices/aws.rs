//! AWS's instance metadata service, version 2: spot interruptions and rebalance recommendations.
//!
//! Method: Amazon EC2 User Guide, "Spot Instance interruption notices", "Rebalance recommendations" and "Use IMDSv2". A token is put first and
//! renewed when it is refused; 404 means that there is nothing.

use std::time::{Duration, SystemTime};

use reqwest::{Client, Method, Response, StatusCode};
use serde::Deserialize;

use super::{Answer, Notice, NoticeSource, SPOT_NOTICE, time_left};

/// The metadata service of the instance that this runs on.
#[derive(Debug)]
pub struct Aws {
    client: Client,
    base: String,
    token: Option<String>,
}

#[derive(Deserialize)]
struct InstanceAction {
    action: String,
    #[serde(default)]
    time: String,
}

impl Aws {
    /// Where `AWS_EC2_METADATA_SERVICE_ENDPOINT` says, as AWS's own tools read it; else at its fixed address.
    #[must_use]
    pub fn from_env() -> Self {
        let base = std::env::var("AWS_EC2_METADATA_SERVICE_ENDPOINT");
        Self::at(base.as_deref().unwrap_or("http://169.254.169.254"))
    }

    /// At this base URL.
    #[must_use]
    pub fn at(base: &str) -> Self {
        // It is on the link: a proxy would answer for another instance, or not at all.
        let client = Client::builder().no_proxy().build().unwrap_or_default();
        Self { client, base: base.trim_end_matches('/').to_owned(), token: None }
    }

    async fn fetch_token(&mut self) -> Result<String, String> {
        let request = self
            .client
            .request(Method::PUT, format!("{}/latest/api/token", self.base))
            .header("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_TTL_S.to_string())
            .header("Content-Length", "0");
        let answer = request.send().await.map_err(|e| cause(&e))?;
        if !answer.status().is_success() {
            return Err(format!("its token was refused: {}", answer.status()));
        }
        let token = answer.text().await.map_err(|e| cause(&e))?;
        self.token = Some(token.clone());
        Ok(token)
    }

    /// What is at a path; `None`: nothing.
    async fn get(&mut self, path: &str) -> Result<Option<String>, String> {
        let token = match self.token.clone() {
            Some(token) => token,
            None => self.fetch_token().await?,
        };
        let mut answer = self.send(path, &token).await?;
        if answer.status() == StatusCode::UNAUTHORIZED {
            let token = self.fetch_token().await?;
            answer = self.send(path, &token).await?;
        }
        match answer.status() {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => answer.text().await.map(Some).map_err(|e| cause(&e)),
            status => Err(format!("{path}: {status}")),
        }
    }

    async fn send(&self, path: &str, token: &str) -> Result<Response, String> {
        let url = format!("{}/latest/meta-data/{path}", self.base);
        let request = self.client.get(url).header("X-aws-ec2-metadata-token", token);
        request.send().await.map_err(|e| cause(&e))
    }

    async fn look(&mut self) -> Result<Option<Notice>, String> {
        let source = self.name();
        if let Some(text) = self.get("spot/instance-action").await? {
            let InstanceAction { action, time } = serde_json::from_str(&text)
                .map_err(|e| format!("spot/instance-action is {text:?}: {e}"))?;
            // A time that is not understood is no reason to stay.
            let left = time_left(&time, SystemTime::now()).ok().flatten().unwrap_or(SPOT_NOTICE);
            // Hibernation begins with its notice.
            let left = if action == "hibernate" { Duration::ZERO } else { left };
            let detail = format!("spot {action} at {time}");
            return Ok(Some(Notice { source, detail, time_left: Some(left) }));
        }
        let advice = self.get("events/recommendations/rebalance").await?;
        Ok(advice.map(|text| Notice {
            source,
            detail: format!("rebalance recommendation {}", text.trim()),
            time_left: None,
        }))
    }
}

impl NoticeSource for Aws {
    fn name(&self) -> &'static str {
        "aws"
    }

    fn is_there(&mut self) -> Answer<'_, bool> {
        Box::pin(async { self.fetch_token().await.map(|_| true) })
    }

    fn poll(&mut self) -> Answer<'_, Option<Notice>> {
        Box::pin(self.look())
    }
}

/// The innermost reason: the outer ones only repeat the address.
fn cause(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    inner.to_string()
}

/// Six hours, the longest there is.
const TOKEN_TTL_S: u32 = 21_600;
