//! HTTP for machines: `/metrics`, `/livez`, `/readyz`; at coordinators also jobs and orders to them (see [`jobs`]).

pub(crate) mod jobs;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;

use crate::error::Error;
use crate::metrics::Metrics;

/// Serves until the runtime ends; answers the address that it took.
///
/// # Errors
/// If the address is taken or not ours.
pub(crate) async fn serve(
    at: SocketAddr,
    metrics: Metrics,
    ready: Arc<AtomicBool>,
    api: Option<jobs::Api>,
) -> Result<SocketAddr, Error> {
    let listener = tokio::net::TcpListener::bind(at)
        .await
        .map_err(|e| Error::Settings(format!("--http {at}: {e}")))?;
    let bound = listener.local_addr().map_err(|e| Error::Settings(format!("--http {at}: {e}")))?;
    let readiness = move || async move {
        if ready.load(Ordering::Relaxed) {
            (StatusCode::OK, "ready\n")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
        }
    };
    let exposition =
        move || async move { ([("content-type", "text/plain; version=0.0.4")], metrics.text()) };
    let router = Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(readiness))
        .route("/metrics", get(exposition))
        .merge(api.map(jobs::Api::router).unwrap_or_default());
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::warn!(%error, "http ended");
        }
    });
    Ok(bound)
}
