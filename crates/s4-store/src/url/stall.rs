//! Detects that a server has gone silent.
//!
//! A limit on the whole request cannot do that: an object takes minutes over a slow line, a lookup
//! takes none. So the limit is on the time without any data in either direction.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body::{Body, Frame, SizeHint};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, PutPayload};
use tokio::time::{Instant, Sleep, sleep, timeout_at};

/// How long a request may make no progress.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// How long a server may take to put together an object of many parts.
const WORK: Duration = Duration::from_secs(300);
/// The longest pause before completing a multipart upload is tried again: after about two minutes
/// it is given up.
const LONGEST: Duration = Duration::from_secs(60);
/// A body is handed over in pieces of this size, so that its progress is seen.
const PIECE: usize = 256 << 10;
/// The longest time between two checks whether a body moves.
const LOOK: Duration = Duration::from_secs(1);
/// Most bytes of a handed-over body that the system may still hold, and the slowest line, in bytes
/// per second, that takes them.
const HELD: usize = 4 << 20;
const SLOWEST: usize = 64 << 10;

/// Makes the usual client, except that it gives up a request that makes no progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct StallConnector(pub(super) Duration);

impl HttpConnector for StallConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Watched { inner, stall: self.0 }))
    }
}

#[derive(Debug)]
struct Watched {
    inner: HttpClient,
    stall: Duration,
}

#[async_trait::async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if !completes(&request) {
            return self.once(request).await;
        }
        // The client forgets the parts once it has asked, so no caller above can ask again. Asking
        // again is safe: the upload is completed once, and the answer after that is 404. The caller
        // bounds the time.
        let mut pause = Duration::from_millis(200);
        loop {
            let passes = match self.once(request.clone()).await {
                Ok(answer) if !answer.status().is_server_error() => return Ok(answer),
                Err(e) if e.kind() == HttpErrorKind::Decode => return Err(e),
                other => other,
            };
            if pause > LONGEST {
                return passes;
            }
            sleep(pause).await;
            pause *= 2;
        }
    }
}

/// Whether a request completes a multipart upload.
fn completes(request: &HttpRequest) -> bool {
    // The first form is Amazon's and Google's, the second is Azure's.
    let named = |part: &str| match *request.method() {
        Method::POST => part.starts_with("uploadId="),
        Method::PUT => part == "comp=blocklist",
        _ => false,
    };
    request.uri().query().is_some_and(|query| query.split('&').any(named))
}

impl Watched {
    async fn once(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let least = if completes(&request) { WORK.max(self.stall) } else { self.stall };
        let (parts, body) = request.into_parts();
        let mut upload = Upload::new(body.content_length(), least);
        let body = if upload.len > PIECE { upload.mark(body).await? } else { body };
        let mut call = std::pin::pin!(self.inner.execute(HttpRequest::from_parts(parts, body)));
        loop {
            match timeout_at(upload.next_look(), &mut call).await {
                Ok(answer) => return Ok(answer?.map(|body| Moving::wrap(body, self.stall))),
                Err(_) if upload.may_go_on() => {}
                Err(_) => return Err(stalled(least)),
            }
        }
    }
}

/// The body of a request, and how far it is written to the connection.
///
/// The client takes a body as a list of buffers, which it keeps to the end, so no buffer is dropped
/// when it is written. But from when the client takes a buffer out of the list until it is written,
/// it holds a second reference to the buffer, which can be seen. Slices of a larger buffer always
/// share it, so each piece ends with one byte, its mark, in a buffer of its own.
struct Upload {
    len: usize,
    least: Duration,
    /// Pieces, each followed by its mark.
    pieces: PutPayload,
    /// The index of the mark that has been taken out and is not yet written, if there is one.
    at: Option<usize>,
    /// Whether a mark has ever been seen on its way.
    visible: bool,
    moved: Instant,
}

impl Upload {
    fn new(len: usize, least: Duration) -> Self {
        let pieces = PutPayload::default();
        Self { len, least, pieces, at: None, visible: false, moved: Instant::now() }
    }

    /// The same body in marked pieces.
    async fn mark(&mut self, mut body: HttpRequestBody) -> Result<HttpRequestBody, HttpError> {
        if body.as_bytes().is_some() {
            // Its length is not in the headers yet: it must stay in one piece.
            return Ok(body);
        }
        let mut pieces = Vec::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let Ok(mut bytes) = frame?.into_data() else { continue };
            while !bytes.is_empty() {
                let mut piece = bytes.split_to(bytes.len().min(PIECE));
                let mark = piece.split_off(piece.len() - 1);
                pieces.extend([piece, Bytes::from(mark.to_vec())]);
            }
        }
        self.pieces = pieces.into_iter().collect();
        Ok(self.pieces.clone().into())
    }

    /// When to check for progress again.
    fn next_look(&self) -> Instant {
        let end = self.moved + self.patience();
        match self.pieces.content_length() {
            0 => end,
            _ => end.min(Instant::now() + (self.least / 8).min(LOOK)),
        }
    }

    fn may_go_on(&mut self) -> bool {
        let at = self.pieces.iter().skip(1).step_by(2).position(|mark| !mark.is_unique());
        if at != self.at {
            (self.at, self.visible, self.moved) = (at, true, Instant::now());
        }
        self.moved.elapsed() < self.patience()
    }

    /// How long a request may show no progress.
    fn patience(&self) -> Duration {
        let unseen = match self.at {
            Some(_) => 0,
            // Everything is handed over; the system may still hold a part.
            None if self.visible => self.len.min(HELD),
            // It was written between two checks, or the client copies what it takes.
            None => self.len,
        };
        self.least + Duration::from_secs((unseen / SLOWEST) as u64)
    }
}

/// The body of an answer, which must make progress.
struct Moving {
    body: HttpResponseBody,
    stall: Duration,
    timer: Pin<Box<Sleep>>,
}

impl Moving {
    fn wrap(body: HttpResponseBody, stall: Duration) -> HttpResponseBody {
        HttpResponseBody::new(Self { body, stall, timer: Box::pin(sleep(stall)) })
    }
}

impl Body for Moving {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            let next = Instant::now() + self.stall;
            self.timer.as_mut().reset(next);
            return Poll::Ready(frame);
        }
        match self.timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err(stalled(self.stall)))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn stalled(limit: Duration) -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, Stalled(limit))
}

#[derive(Debug)]
struct Stalled(Duration);

impl fmt::Display for Stalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server was silent for {:?}", self.0)
    }
}

impl std::error::Error for Stalled {}
