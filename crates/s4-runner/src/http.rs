//! The page on TCP, which anybody may read. Nothing here changes anything.

use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use crate::connections::Connections;
use crate::service::Service;
use crate::status::Status;

const PAGE: &str = include_str!("page.html");

/// Nothing may be loaded from elsewhere, and no other page may frame this one.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// The routes.
pub(crate) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/livez", get(alive))
        .route("/readyz", get(ready))
        .route("/healthz", get(health))
        .route("/metrics", get(metrics))
        .route("/version", get(async || concat!(env!("CARGO_PKG_VERSION"), "\n")))
        .route("/v1/status", get(status))
        .with_state(service)
}

/// Serves connections forever.
pub(crate) async fn serve(listener: TcpListener, router: Router) {
    let connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.serve(stream, router.clone()),
            Err(e) => pause_after(&e).await,
        }
    }
}

/// Waits after a failed accept: the cause, such as a lack of file descriptors, may be temporary.
pub(crate) async fn pause_after(e: &std::io::Error) {
    tracing::warn!(error = %e, "could not accept a connection");
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
}

fn guarded(code: StatusCode, kind: &'static str, text: String) -> Response {
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
    ];
    (code, headers, text).into_response()
}

/// Builds the status on a thread that may block, because it looks at the drive.
async fn now(service: Arc<Service>) -> Option<Status> {
    tokio::task::spawn_blocking(move || service.status()).await.ok()
}

fn failed() -> Response {
    guarded(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "failed\n".into())
}

/// Answers with a failure if a thread is stuck, which a new process would fix.
async fn alive(State(service): State<Arc<Service>>) -> Response {
    let good = service.health.stalled().is_empty();
    let text = if good { "ok\n" } else { "a thread has stalled\n" };
    guarded(code(good), "text/plain", text.to_owned())
}

async fn page() -> Response {
    guarded(StatusCode::OK, "text/html; charset=utf-8", PAGE.to_owned())
}

async fn status(State(service): State<Arc<Service>>) -> Response {
    let text = now(service).await.and_then(|status| serde_json::to_string(&status).ok());
    text.map_or_else(failed, |text| guarded(StatusCode::OK, "application/json", text))
}

fn code(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn ready(State(service): State<Arc<Service>>, RawQuery(query): RawQuery) -> Response {
    let Some(status) = now(service).await else { return failed() };
    let mut text = if status.ready { "ready\n".to_owned() } else { "not ready\n".to_owned() };
    if query.is_some_and(|q| q.split('&').any(|word| word == "verbose")) {
        status.not_ready.iter().for_each(|why| text.extend([why.as_str(), "\n"]));
    }
    guarded(code(status.ready), "text/plain; charset=utf-8", text)
}

async fn health(State(service): State<Arc<Service>>) -> Response {
    let Some(status) = now(Arc::clone(&service)).await else { return failed() };
    let healthy = status.is_healthy(&service.health);
    let about = serde_json::json!({
        "healthy": healthy,
        "ready": status.ready,
        "not_ready": status.not_ready,
        "failed": status.states["failed"],
        "damaged_records": status.damaged_records,
    });
    guarded(code(healthy), "application/json", about.to_string())
}

async fn metrics(State(service): State<Arc<Service>>) -> Response {
    let metrics = Arc::clone(&service.metrics);
    let Some(status) = now(service).await else { return failed() };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    guarded(StatusCode::OK, kind, metrics.text(&status))
}
