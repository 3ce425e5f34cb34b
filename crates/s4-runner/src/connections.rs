//! Connections: bounded in number, in size and in time, whoever is at the other end. One too many takes the place of the
//! oldest, so that nobody keeps others out by holding on to them.

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

/// Connections at once, of each listener.
const MOST: usize = 128;
/// Bytes of a request's head.
const MAX_HEAD: usize = 32 << 10;
/// Bytes of a request's body.
pub(crate) const MAX_BODY: usize = 32 << 10;
/// How long the head of a request may take, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(15);
/// The longest time that a request may wait for something.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The longest time of a connection, whatever it does: clients make a new one.
const LONGEST: Duration = Duration::from_secs(300);

/// Limits of what a listener may do.
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
                tracing::debug!(error = %e, "a connection broke");
            }
        });
        let mut open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        open.retain(|task| !task.is_finished());
        open.push_back(task.abort_handle());
        if open.len() > MOST
            && let Some(oldest) = open.pop_front()
        {
            tracing::debug!("the oldest of {MOST} connections is closed for a new one");
            oldest.abort();
        }
    }
}
