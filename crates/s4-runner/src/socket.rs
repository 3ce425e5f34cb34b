//! The requests of trainers, over a Unix socket whose peer the kernel identifies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Extension, FromRequest, FromRequestParts, Path as UrlPath, Query, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use uuid::Uuid;

use crate::connections::{Connections, LONGEST_WAIT};
use crate::error::{Error, Result};
use crate::http::pause_after;
use crate::queue::Submission;
use crate::record;
use crate::restore::Wanted;
use crate::service::{Refusal, Service};
use crate::status::Shown;

/// Who is at the other end, according to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    uid: u32,
    gid: u32,
}

/// A peer's rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Right {
    Nothing,
    Submit,
    Administer,
}

/// A message: one object, of bounded size and with known members. Anything else is refused with a reason.
struct Message<T>(T);

impl<T, S> FromRequest<S> for Message<T>
where
    Json<T>: FromRequest<S, Rejection = JsonRejection>,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request(
        request: axum::extract::Request,
        state: &S,
    ) -> std::result::Result<Self, Self::Rejection> {
        let (head, body) = request.into_parts();
        let limited = axum::extract::Request::from_parts(head.clone(), body);
        let bytes = Bytes::from_request(limited, state).await;
        let bytes = bytes.map_err(|e| bad(e.status(), &e.body_text()))?;
        // The parser would accept a list of the members' values as the object.
        if bytes.trim_ascii_start().starts_with(b"[") {
            return Err(bad(StatusCode::UNPROCESSABLE_ENTITY, "expected an object, found a list"));
        }
        let request = axum::extract::Request::from_parts(head, bytes.into());
        match Json::<T>::from_request(request, state).await {
            Ok(Json(message)) => Ok(Self(message)),
            Err(e) => Err(bad(e.status(), &e.body_text())),
        }
    }
}

/// Parameters in the query or the path; bad ones are refused in the same way as those of a [`Message`].
struct Asked<E>(E);

macro_rules! asked {
    ($extractor:ident) => {
        impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S>
            for Asked<$extractor<T>>
        {
            type Rejection = Response;

            async fn from_request_parts(
                head: &mut Parts,
                state: &S,
            ) -> std::result::Result<Self, Self::Rejection> {
                let asked = $extractor::from_request_parts(head, state).await;
                asked.map(Self).map_err(|e| bad(e.status(), &e.body_text()))
            }
        }
    };
}
asked!(Query);
asked!(UrlPath);

/// Binds the socket: only this process's user and group may connect. A socket that a killed process
/// left is replaced, and nothing else.
///
/// # Errors
/// [`Error::Io`]; [`Error::Locked`] if another process listens there.
pub(crate) fn bind(path: &Path) -> Result<UnixListener> {
    if let Some(folder) = path.parent() {
        crate::folder::make_folder(folder, 0o750)?;
    }
    match fs::symlink_metadata(path) {
        Ok(about) if about.file_type().is_socket() => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(Error::Locked(path.display().to_string()));
            }
            fs::remove_file(path).map_err(|e| Error::io("remove", path, e))?;
        }
        Ok(_) => {
            let there = std::io::Error::other("the path exists and is not a socket");
            return Err(Error::io("listen on", path, there));
        }
        Err(_) => {}
    }
    // Nobody else can connect between the two calls: the umask already limits the mode.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o117));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.map_err(|e| Error::io("listen on", path, e))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
        .map_err(|e| Error::io("set the mode of", path, e))?;
    Ok(listener)
}

/// The routes.
pub(crate) fn router(service: Arc<Service>) -> Router {
    let submit = middleware::from_fn_with_state(Arc::clone(&service), may_submit);
    let administer = middleware::from_fn_with_state(Arc::clone(&service), may_administer);
    let administered = Router::new()
        .route("/v1/drain", post(drain))
        .route("/v1/forget", post(forget))
        .layer(administer);
    Router::new()
        .route("/v1/staging", get(staging))
        .route("/v1/submissions", post(submit_one))
        .route("/v1/submissions/{id}", get(look))
        .route("/v1/flush", post(flush))
        .route("/v1/restore", post(restore))
        .route("/v1/status", get(status))
        .route("/v1/interruption", get(interruption))
        .merge(administered)
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(submit)
        .with_state(service)
}

/// Serves connections forever.
pub(crate) async fn serve(listener: UnixListener, router: Router) {
    let connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match peer(&stream) {
                Ok(peer) => connections.serve(stream, router.clone().layer(Extension(peer))),
                Err(e) => tracing::warn!(error = %e, "closed a connection from an unknown peer"),
            },
            Err(e) => pause_after(&e).await,
        }
    }
}

fn peer(stream: &UnixStream) -> std::io::Result<Peer> {
    let credentials = stream.peer_cred()?;
    Ok(Peer { uid: credentials.uid(), gid: credentials.gid() })
}

fn right(peer: Peer, own: u32, uids: &[u32], gids: &[u32]) -> Right {
    if peer.uid == 0 || peer.uid == own {
        Right::Administer
    } else if uids.contains(&peer.uid) || gids.contains(&peer.gid) {
        Right::Submit
    } else {
        Right::Nothing
    }
}

async fn require(
    service: &Service,
    least: Right,
    request: axum::extract::Request,
    next: Next,
) -> Response {
    let config = &service.config;
    let own = rustix::process::geteuid().as_raw();
    let peer = request.extensions().get::<Peer>().copied();
    let has =
        peer.map_or(Right::Nothing, |p| right(p, own, &config.allow_uids, &config.allow_gids));
    if has >= least {
        return next.run(request).await;
    }
    let uid = peer.map_or_else(String::new, |p| format!(" {}", p.uid));
    service.metrics.refused("forbidden");
    let why = format!(
        "permission denied for user{uid}: `allow_uids` and `allow_gids` set who may submit"
    );
    answer(StatusCode::FORBIDDEN, "forbidden", &why)
}

async fn may_submit(
    State(service): State<Arc<Service>>,
    request: axum::extract::Request,
    next: Next,
) -> Response {
    require(&service, Right::Submit, request, next).await
}

async fn may_administer(
    State(service): State<Arc<Service>>,
    request: axum::extract::Request,
    next: Next,
) -> Response {
    require(&service, Right::Administer, request, next).await
}

fn bad(code: StatusCode, message: &str) -> Response {
    answer(code, "bad_request", message)
}

async fn no_such_path(uri: Uri) -> Response {
    answer(StatusCode::NOT_FOUND, "unknown", &format!("no such path: {}", uri.path()))
}

async fn no_such_method(method: Method, uri: Uri) -> Response {
    let why = format!("{method} is not allowed for {}", uri.path());
    answer(StatusCode::METHOD_NOT_ALLOWED, "bad_request", &why)
}

fn answer(code: StatusCode, kind: &str, message: &str) -> Response {
    (code, Json(json!({ "error": kind, "message": message }))).into_response()
}

fn refuse(refusal: &Refusal) -> Response {
    let code = match refusal.kind() {
        "bad_request" | "refused" => StatusCode::BAD_REQUEST,
        "missing" => StatusCode::NOT_FOUND,
        "conflict" => StatusCode::CONFLICT,
        "full" => StatusCode::INSUFFICIENT_STORAGE,
        "draining" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    answer(code, refusal.kind(), &refusal.to_string())
}

/// Runs blocking work on another thread.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> std::result::Result<T, Response> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| failed())
}

/// The answer after a panic, which is a bug.
fn failed() -> Response {
    answer(StatusCode::INTERNAL_SERVER_ERROR, "internal", "internal error")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Submit {
    id: Uuid,
    step: u64,
    #[serde(default)]
    metrics: BTreeMap<String, f64>,
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

async fn submit_one(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Peer>,
    Message(Submit { id, step, metrics, tags }): Message<Submit>,
) -> std::result::Result<Response, Response> {
    let (uid, origin, replaces) = (peer.uid, None, None);
    let submission = Submission { id, step, metrics, tags, uid, origin, replaces };
    let done = aside(move || service.submit(submission)).await?;
    done.map(|record| Json(Shown::from(&record)).into_response()).map_err(|e| refuse(&e))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Look {
    state: Option<record::State>,
    #[serde(default)]
    timeout_ms: u64,
}

fn wait(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds).min(LONGEST_WAIT)
}

async fn look(
    State(service): State<Arc<Service>>,
    Asked(UrlPath(id)): Asked<UrlPath<Uuid>>,
    Asked(Query(Look { state, timeout_ms })): Asked<Query<Look>>,
) -> Response {
    let wanted = state.unwrap_or(record::State::Staged);
    match service.wait(id, wanted, wait(timeout_ms)).await {
        Some(record) => Json(Shown::from(&record)).into_response(),
        None => answer(StatusCode::NOT_FOUND, "unknown", &format!("no submission {id}")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Within {
    #[serde(default)]
    timeout_ms: u64,
}

async fn flush(
    State(service): State<Arc<Service>>,
    Message(Within { timeout_ms }): Message<Within>,
) -> Response {
    Json(json!({ "open": service.flush(wait(timeout_ms)).await })).into_response()
}

async fn drain(
    State(service): State<Arc<Service>>,
    Message(Within { timeout_ms }): Message<Within>,
) -> Response {
    Json(json!({ "open": service.drain(wait(timeout_ms)).await })).into_response()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Forget {
    id: Uuid,
}

async fn forget(
    State(service): State<Arc<Service>>,
    Message(Forget { id }): Message<Forget>,
) -> std::result::Result<Response, Response> {
    match aside(move || service.forget(id)).await? {
        Ok(true) => Ok(Json(json!({ "forgotten": id })).into_response()),
        Ok(false) => {
            let why = format!("no failed submission {id}");
            Err(answer(StatusCode::NOT_FOUND, "unknown", &why))
        }
        Err(e) => Err(answer(StatusCode::INTERNAL_SERVER_ERROR, "disk", &e.to_string())),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Restore {
    step: Option<u64>,
    id: Option<Uuid>,
    /// Names the restore: repeating it waits for the same one.
    request: Option<Uuid>,
    timeout_ms: Option<u64>,
}

async fn restore(
    State(service): State<Arc<Service>>,
    Message(Restore { step, id, request, timeout_ms }): Message<Restore>,
) -> std::result::Result<Response, Response> {
    let wanted = match (step, id) {
        (None, None) => Wanted::Newest,
        (Some(step), None) => Wanted::Step(step),
        (None, Some(id)) => Wanted::Submission(id),
        (Some(_), Some(_)) => {
            return Err(bad(StatusCode::BAD_REQUEST, "give `step` or `id`, not both"));
        }
    };
    let request = request.unwrap_or_else(Uuid::new_v4);
    let Some(mut outcome) = service.begin_restore(request, wanted) else {
        return Err(answer(
            StatusCode::SERVICE_UNAVAILABLE,
            "busy",
            "too many restores are running",
        ));
    };
    // Without a limit the connection's own applies.
    let time = timeout_ms.map_or(Duration::MAX, wait);
    let done = match tokio::time::timeout(time, outcome.wait_for(Option::is_some)).await {
        Ok(Ok(done)) => done.clone(),
        Ok(Err(_)) => return Err(failed()),
        Err(_) => None,
    };
    let Some(done) = done else {
        return Ok((StatusCode::ACCEPTED, Json(json!({ "running": request }))).into_response());
    };
    match &*done {
        Ok(restored) => Ok(Json(restored).into_response()),
        Err(e @ s4weights::Error::NotFound { .. }) => {
            Err(answer(StatusCode::NOT_FOUND, "not_found", &e.to_string()))
        }
        Err(e) => Err(answer(StatusCode::BAD_GATEWAY, "not_restored", &e.to_string())),
    }
}

async fn staging(State(service): State<Arc<Service>>) -> std::result::Result<Response, Response> {
    match aside(move || service.room()).await? {
        Ok(room) => Ok(Json(room).into_response()),
        Err(e) => Err(answer(StatusCode::INTERNAL_SERVER_ERROR, "disk", &e.to_string())),
    }
}

async fn status(State(service): State<Arc<Service>>) -> std::result::Result<Response, Response> {
    Ok(Json(aside(move || service.status()).await?).into_response())
}

/// Waits for an interruption, for at most a minute.
async fn interruption(
    State(service): State<Arc<Service>>,
    Asked(Query(Within { timeout_ms })): Asked<Query<Within>>,
) -> Response {
    let end = tokio::time::Instant::now() + wait(timeout_ms);
    let mut changed = service.queue.watch();
    while service.health.interruption().is_none() {
        match tokio::time::timeout_at(end, changed.changed()).await {
            Ok(Ok(())) => {}
            _ => break,
        }
    }
    Json(json!({ "interruption": service.health.interruption() })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_who_are_named_have_rights() {
        let of = |uid, gid| right(Peer { uid, gid }, 500, &[1000], &[77]);
        assert_eq!(of(0, 0), Right::Administer);
        assert_eq!(of(500, 500), Right::Administer);
        assert_eq!(of(1000, 1), Right::Submit);
        assert_eq!(of(1001, 77), Right::Submit);
        assert_eq!(of(1001, 1000), Right::Nothing);
        assert_eq!(of(77, 500), Right::Nothing);
    }
}
