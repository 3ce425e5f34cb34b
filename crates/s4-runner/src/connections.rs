//! Connections: bounded in number, in size and in time, whoever is at the other end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

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

/// Limits of what a listener may do.
#[derive(Clone)]
pub(crate) struct Connections(Arc<Semaphore>);

impl Default for Connections {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

impl Connections {
    /// Serves a connection in the background. One too many is closed.
    pub(crate) fn serve<S>(&self, stream: S, router: Router)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(permit) = Arc::clone(&self.0).try_acquire_owned() else { return };
        let router = router.layer(DefaultBodyLimit::max(MAX_BODY));
        tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD);
            let service = TowerToHyperService::new(router);
            let serving = http.serve_connection(TokioIo::new(stream), service);
            if let Err(e) = serving.await {
                tracing::debug!(error = %e, "a connection broke");
            }
            drop(permit);
        });
    }
}
