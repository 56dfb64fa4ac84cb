//! `/v1`: jobs as JSON, and orders to them.
//!
//! Reads are open where HTTP listens on loopback, and need the token elsewhere; orders always need it. What can't be done is answered as
//! `application/problem+json` (RFC 9457).

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use types::{Digest, JobId, NodeId};

use crate::client::{Client, JobStatus};
use crate::error::Error;

/// What the handlers need.
#[derive(Clone)]
pub(crate) struct Api {
    client: Arc<Mutex<Client>>,
    /// Of the token; compared in its place, so that time tells nothing of it.
    token: Option<Digest>,
    are_reads_open: bool,
}

impl Api {
    pub(crate) fn new(client: Client, token: Option<&str>, at: SocketAddr) -> Self {
        Self {
            client: Arc::new(Mutex::new(client)),
            token: token.map(|token| Digest::of(token.as_bytes())),
            are_reads_open: at.ip().is_loopback(),
        }
    }

    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/v1/coordinators", get(coordinators))
            .route("/v1/jobs", get(jobs))
            .route("/v1/jobs/{job}", get(job))
            .route("/v1/jobs/{job}/events", get(events))
            .route("/v1/jobs/{job}/drain", post(drain))
            .route("/v1/jobs/{job}/scale", put(scale))
            .route("/v1/jobs/{job}/checkpoint", post(checkpoint))
            .route("/v1/jobs/{job}/stop", post(stop))
            .with_state(self)
    }

    fn may_read(&self, headers: &HeaderMap) -> Result<(), Problem> {
        if self.are_reads_open { Ok(()) } else { self.may_order(headers) }
    }

    fn may_order(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(token) = self.token else {
            return Err(Problem(
                StatusCode::FORBIDDEN,
                "this needs a token, and the coordinator has none: start it with --http-token FILE"
                    .to_owned(),
            ));
        };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer ")).map(str::trim);
        match given {
            Some(given) if Digest::of(given.as_bytes()) == token => Ok(()),
            Some(_) => Err(Problem(StatusCode::UNAUTHORIZED, "this token is wrong".to_owned())),
            None => Err(Problem(
                StatusCode::UNAUTHORIZED,
                "send the header Authorization: Bearer TOKEN, with what is in the coordinator's --http-token FILE".to_owned(),
            )),
        }
    }
}

/// What can't be done, and why.
struct Problem(StatusCode, String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self(status, detail) = self;
        let body = json!({
            "type": "about:blank",
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": detail,
        });
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body.to_string())
            .into_response()
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Refused { code: 64, .. } | Error::Usage(_) => StatusCode::BAD_REQUEST,
            Error::Refused { .. } => StatusCode::FORBIDDEN,
            Error::Unreachable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        Self(StatusCode::BAD_REQUEST, rejection.body_text())
    }
}

type Answer = Result<Json<Value>, Problem>;

async fn coordinators(State(api): State<Api>, headers: HeaderMap) -> Answer {
    api.may_read(&headers)?;
    let status = api.client.lock().await.status(None).await?;
    Ok(Json(json!({"term": status.term, "coordinators": status.coordinators})))
}

async fn jobs(State(api): State<Api>, headers: HeaderMap) -> Answer {
    api.may_read(&headers)?;
    let status = api.client.lock().await.status(None).await?;
    Ok(Json(json!({"jobs": status.jobs})))
}

async fn job(State(api): State<Api>, Path(name): Path<String>, headers: HeaderMap) -> Answer {
    api.may_read(&headers)?;
    Ok(Json(json!(find(&mut *api.client.lock().await, &name).await?)))
}

async fn find(client: &mut Client, name: &str) -> Result<JobStatus, Problem> {
    let missing = || Problem(StatusCode::NOT_FOUND, format!("there is no job {name}"));
    let job = JobId::new(name).map_err(|_| missing())?;
    client.status(Some(job)).await?.jobs.into_iter().next().ok_or_else(missing)
}

#[derive(Deserialize)]
struct Since {
    #[serde(default)]
    since: u64,
}

async fn events(
    State(api): State<Api>,
    Path(name): Path<String>,
    Query(Since { since }): Query<Since>,
    headers: HeaderMap,
) -> Answer {
    api.may_read(&headers)?;
    let mut client = api.client.lock().await;
    let job = find(&mut client, &name).await?.job;
    let (events, next) = client.events(Some(job), since).await?;
    Ok(Json(json!({"events": events, "next": next})))
}

/// Members by number or by host; one of both.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Drain {
    #[serde(default)]
    nodes: Vec<u64>,
    host: Option<String>,
    reason: Option<String>,
}

async fn drain(
    State(api): State<Api>,
    Path(name): Path<String>,
    headers: HeaderMap,
    order: Result<Json<Drain>, JsonRejection>,
) -> Answer {
    api.may_order(&headers)?;
    let Json(order) = order?;
    let mut client = api.client.lock().await;
    let job = find(&mut client, &name).await?;
    let is_meant = |member: &&crate::client::MemberStatus| match &order.host {
        Some(host) => member.host == *host,
        None => order.nodes.contains(&member.node.0),
    };
    let nodes: Vec<NodeId> =
        job.members.iter().filter(is_meant).map(|member| member.node).collect();
    // An empty list would mean all.
    if nodes.is_empty() || (order.host.is_none() && nodes.len() != order.nodes.len()) {
        let detail = "name members that are there, by {\"nodes\": [N, …]} or {\"host\": \"NAME\"}";
        return Err(Problem(StatusCode::BAD_REQUEST, detail.to_owned()));
    }
    let reason = order.reason.unwrap_or_else(|| "asked by HTTP".to_owned());
    client.drain(job.job, nodes.clone(), reason).await?;
    Ok(Json(json!({"draining": nodes})))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scale {
    min: Option<u32>,
    max: Option<u32>,
}

async fn scale(
    State(api): State<Api>,
    Path(name): Path<String>,
    headers: HeaderMap,
    order: Result<Json<Scale>, JsonRejection>,
) -> Answer {
    api.may_order(&headers)?;
    let Json(Scale { min, max }) = order?;
    let mut client = api.client.lock().await;
    let job = find(&mut client, &name).await?.job;
    client.scale(job, min, max).await?;
    let job = find(&mut client, &name).await?;
    Ok(Json(json!({"min_members": job.min_members, "max_members": job.max_members})))
}

async fn checkpoint(
    State(api): State<Api>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<(StatusCode, Json<Value>), Problem> {
    api.may_order(&headers)?;
    let mut client = api.client.lock().await;
    let job = find(&mut client, &name).await?;
    client.ask_checkpoint(job.job).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({"asked_at_step": job.step}))))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stop {
    #[serde(default)]
    lose_state: bool,
}

async fn stop(
    State(api): State<Api>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<(StatusCode, Json<Value>), Problem> {
    api.may_order(&headers)?;
    // Who has nothing to add may send nothing at all.
    let order: Stop = if body.is_empty() {
        Stop::default()
    } else {
        serde_json::from_slice(&body)
            .map_err(|e| Problem(StatusCode::BAD_REQUEST, e.to_string()))?
    };
    let mut client = api.client.lock().await;
    let job = find(&mut client, &name).await?;
    if !job.has_store && !order.lose_state {
        let detail = "the job has no checkpoint store, so its state would be lost: send {\"lose_state\": true} if that is meant";
        return Err(Problem(StatusCode::CONFLICT, detail.to_owned()));
    }
    let stopping = job.members.len();
    client.drain(job.job, Vec::new(), "stopped by HTTP".to_owned()).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({"stopping": stopping}))))
}
