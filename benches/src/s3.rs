//! As much of an S3 server as a store needs, in this process. It accepts any signature, and keeps only
//! the size of data objects.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{HeaderName, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;

/// Objects larger than this are data, of which only the size is kept.
const KEPT: usize = 1 << 20;

/// The size of each object and, if it is small, its content.
type Objects = BTreeMap<String, (usize, Option<Bytes>)>;

/// A running server, which stops when it is dropped.
#[derive(Debug)]
pub struct Server {
    objects: Arc<Mutex<Objects>>,
    port: u16,
    _runtime: Runtime,
}

impl Server {
    /// Starts a server on a free port of the loopback interface.
    ///
    /// # Errors
    /// If the system refuses it threads or a port.
    pub fn start() -> std::io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let port = listener.local_addr()?.port();
        let objects = Arc::<Mutex<Objects>>::default();
        let all = Arc::clone(&objects);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let all = Arc::clone(&all);
                let serve = service_fn(move |request| answer(Arc::clone(&all), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), serve));
            }
        });
        Ok(Self { objects, port, _runtime: runtime })
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Forgets the objects below `raw/`.
    pub fn forget(&self) {
        lock(&self.objects).retain(|key, _| !key.starts_with("raw/"));
    }
}

fn lock(objects: &Mutex<Objects>) -> MutexGuard<'_, Objects> {
    objects.lock().unwrap_or_else(|e| e.into_inner())
}

async fn answer(
    objects: Arc<Mutex<Objects>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, mut body) = request.into_parts();
    let mut parts: Vec<Bytes> = vec![];
    let mut len = 0;
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            len += data.len();
            if len <= KEPT {
                parts.push(data);
            }
        }
    }
    // `/bucket/key`.
    let key = head.uri.path().trim_start_matches('/').split_once('/').unwrap_or_default().1;
    let query = head.uri.query().unwrap_or_default();
    let mut all = lock(&objects);
    let reply = match head.method {
        Method::PUT if head.headers.contains_key(IF_NONE_MATCH) && all.contains_key(key) => {
            status(StatusCode::PRECONDITION_FAILED)
        }
        Method::PUT => {
            let content = (len <= KEPT).then(|| parts.concat().into());
            all.insert(key.to_owned(), (len, content));
            with(&[("etag", "\"1\"")], Bytes::new())
        }
        Method::DELETE => {
            all.remove(key);
            status(StatusCode::NO_CONTENT)
        }
        // A bulk delete, which is ignored: only probes delete, and the objects they leave do no harm.
        Method::POST => with(&[], "<DeleteResult></DeleteResult>".into()),
        _ if query.contains("list-type=2") => with(&[], list(&all, query).into()),
        _ => object(&all, key, head.headers.get("range").and_then(|r| r.to_str().ok())),
    };
    Ok(reply)
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
    let pairs = || query.split('&').filter_map(|p| p.split_once('='));
    let of = |name: &str| pairs().find(|p| p.0 == name).map_or(String::new(), |p| plain(p.1));
    let (prefix, after) = (of("prefix"), of("start-after"));
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
