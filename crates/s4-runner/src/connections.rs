//! Connections, with limits on number, size and time for every client. A connection beyond the limit replaces the
//! oldest one, so that nobody can lock others out by holding connections open.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// The most connections open at the same time, per listener.
const MAX_CONNECTIONS: usize = 128;
/// The most bytes of a request's head.
const MAX_HEAD: usize = 32 << 10;
/// The most bytes of a request's body.
pub(crate) const MAX_BODY: usize = 32 << 10;
/// How long the head of a request may take, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(15);
/// The longest time that a request may wait for something.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The longest life of a connection, busy or not; clients open a new one.
const LONGEST: Duration = Duration::from_secs(300);

/// The open connections of a listener.
#[derive(Clone, Default)]
pub(crate) struct Connections {
    /// The oldest first.
    open: Arc<Mutex<VecDeque<AbortHandle>>>,
}

impl Connections {
    /// Serves a connection in the background.
    pub(crate) fn serve<S>(&self, stream: S, router: Router)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let router = router.layer(DefaultBodyLimit::max(MAX_BODY));
        let task = tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD);
            let service = TowerToHyperService::new(router);
            let serving = http.serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(e)) = timeout(LONGEST, serving).await {
                tracing::debug!(error = %e, "a connection failed");
            }
        });
        let mut open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        open.retain(|task| !task.is_finished());
        open.push_back(task.abort_handle());
        if open.len() > MAX_CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            tracing::debug!("closing the oldest of {MAX_CONNECTIONS} connections for a new one");
            oldest.abort();
        }
    }
}
