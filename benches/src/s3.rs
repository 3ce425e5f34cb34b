//! As much of an S3 server as files and stores need, in this process. It accepts any signature.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{HeaderName, IF_NONE_MATCH};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;
use tokio::time::Instant;

/// Objects larger than this are data, of which only the size is kept, unless the server is distant.
const KEPT: usize = 1 << 20;

/// How long requests take to a server that is not in this process.
#[derive(Debug, Clone, Copy)]
pub struct Distance {
    /// Until the first byte of an answer.
    pub latency: Duration,
    /// Bytes a second, each way, of one connection.
    pub rate: f64,
}

/// What the server has.
#[derive(Debug, Default)]
struct Contents {
    distance: Option<Distance>,
    /// The size of each object and, if it is kept, its content.
    objects: Objects,
    /// The parts of objects that are not complete, by key and number.
    parts: BTreeMap<(String, u32), Bytes>,
}

type Objects = BTreeMap<String, (usize, Option<Bytes>)>;

/// A running server, which stops when it is dropped.
#[derive(Debug)]
pub struct Server {
    contents: Arc<Mutex<Contents>>,
    port: u16,
    _runtime: Runtime,
}

impl Server {
    /// Starts a server on a free port of the loopback interface.
    ///
    /// # Errors
    /// If the system refuses it threads or a port.
    pub fn start() -> std::io::Result<Self> {
        Self::serve(None)
    }

    /// The same, at a distance. It keeps the data.
    ///
    /// # Errors
    /// As of [`Server::start`].
    pub fn start_at(distance: Distance) -> std::io::Result<Self> {
        Self::serve(Some(distance))
    }

    fn serve(distance: Option<Distance>) -> std::io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let port = listener.local_addr()?.port();
        let contents = Arc::new(Mutex::new(Contents { distance, ..Contents::default() }));
        let all = Arc::clone(&contents);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let all = Arc::clone(&all);
                let serve = service_fn(move |request| answer(Arc::clone(&all), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), serve));
            }
        });
        Ok(Self { contents, port, _runtime: runtime })
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Forgets the objects below `raw/`.
    pub fn forget(&self) {
        lock(&self.contents).objects.retain(|key, _| !key.starts_with("raw/"));
    }
}

fn lock(contents: &Mutex<Contents>) -> MutexGuard<'_, Contents> {
    contents.lock().unwrap_or_else(|e| e.into_inner())
}

async fn answer(
    contents: Arc<Mutex<Contents>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let start = Instant::now();
    let distance = lock(&contents).distance;
    let kept = if distance.is_some() { usize::MAX } else { KEPT };
    let (head, mut body) = request.into_parts();
    let mut parts: Vec<Bytes> = vec![];
    let mut len = 0;
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            len += data.len();
            if len <= kept {
                parts.push(data);
            }
        }
    }
    let content = (len <= kept).then(|| parts.concat().into());
    let reply = lock(&contents).reply(&head, len, content);
    if let Some(Distance { latency, rate }) = distance {
        let answer = match head.method {
            Method::HEAD => 0,
            _ => reply.body().size_hint().exact().unwrap_or(0),
        };
        let bytes = len as u64 + answer;
        let takes = latency + Duration::from_secs_f64(bytes as f64 / rate);
        tokio::time::sleep_until(start + takes).await;
    }
    Ok(reply)
}

impl Contents {
    fn reply(&mut self, head: &Parts, len: usize, content: Option<Bytes>) -> Response<Full<Bytes>> {
        // `/bucket/key`.
        let key = head.uri.path().trim_start_matches('/').split_once('/').unwrap_or_default().1;
        let query = head.uri.query().unwrap_or_default();
        let all = &mut self.objects;
        match head.method {
            Method::PUT if head.headers.contains_key(IF_NONE_MATCH) && all.contains_key(key) => {
                status(StatusCode::PRECONDITION_FAILED)
            }
            Method::PUT => {
                match argument(query, "partNumber").parse() {
                    Ok(n) => drop(self.parts.insert((key.into(), n), content.unwrap_or_default())),
                    Err(_) => drop(all.insert(key.to_owned(), (len, content))),
                }
                with(&[("etag", "\"1\"")], Bytes::new())
            }
            Method::DELETE => {
                all.remove(key);
                status(StatusCode::NO_CONTENT)
            }
            Method::POST if query.starts_with("uploads") => with(&[], upload("Initiate").into()),
            Method::POST if !argument(query, "uploadId").is_empty() => {
                let (own, others) =
                    std::mem::take(&mut self.parts).into_iter().partition(|p| p.0.0 == key);
                self.parts = others;
                let whole = BTreeMap::into_values(own).collect::<Vec<_>>().concat();
                all.insert(key.to_owned(), (whole.len(), Some(whole.into())));
                with(&[], upload("Complete").into())
            }
            // A bulk delete, which is ignored: only probes delete, and the objects they leave do no harm.
            Method::POST => with(&[], "<DeleteResult></DeleteResult>".into()),
            _ if query.contains("list-type=2") => with(&[], list(all, query).into()),
            _ => object(all, key, head.headers.get("range").and_then(|r| r.to_str().ok())),
        }
    }
}

/// The answer when a multipart upload begins or ends.
fn upload(what: &str) -> String {
    format!(
        "<{what}MultipartUploadResult><UploadId>1</UploadId><ETag>1</ETag></{what}MultipartUploadResult>"
    )
}

fn object(all: &Objects, key: &str, range: Option<&str>) -> Response<Full<Bytes>> {
    let Some((len, content)) = all.get(key) else { return status(StatusCode::NOT_FOUND) };
    let content = content.clone().unwrap_or_else(|| vec![0; *len].into());
    let date = [("etag", "\"1\""), ("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")];
    let asked = range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
    let Some((first, last)) = asked else { return with(&date, content) };
    let first = first.parse().unwrap_or(0).min(*len);
    let end = last.parse().map_or(*len, |last: usize| (last + 1).min(*len)).max(first);
    let which = format!("bytes {first}-{}/{len}", end.saturating_sub(1));
    let mut reply = with(&[date[0], date[1], ("content-range", &which)], content.slice(first..end));
    *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
    reply
}

fn list(all: &Objects, query: &str) -> String {
    let (prefix, after) = (argument(query, "prefix"), argument(query, "start-after"));
    let mut xml = "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned();
    for (key, (len, _)) in all.iter().filter(|(k, _)| k.starts_with(&prefix) && **k > after) {
        // Writing into a string cannot fail.
        let _ = write!(
            xml,
            "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
             <ETag>\"1\"</ETag><Size>{len}</Size></Contents>"
        );
    }
    xml + "</ListBucketResult>"
}

/// An argument of a query; empty if it is not there.
fn argument(query: &str, name: &str) -> String {
    let mut pairs = query.split('&').filter_map(|p| p.split_once('='));
    pairs.find(|p| p.0 == name).map_or(String::new(), |p| plain(p.1))
}

/// Unescapes a value of a query. Keys of stores contain no other characters that are escaped.
fn plain(value: &str) -> String {
    value.replace("%2F", "/").replace("%2D", "-")
}

fn status(status: StatusCode) -> Response<Full<Bytes>> {
    let mut reply = Response::new(Full::default());
    *reply.status_mut() = status;
    reply
}

fn with(headers: &[(&'static str, &str)], body: Bytes) -> Response<Full<Bytes>> {
    let mut reply = Response::new(Full::new(body));
    for (name, value) in headers {
        if let Ok(value) = value.parse() {
            reply.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    reply
}
