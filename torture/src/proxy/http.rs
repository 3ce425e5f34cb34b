//! The part of HTTP/1.1 that the proxy needs: reading and writing whole messages.

use std::io::{Error, ErrorKind, Result};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};

/// The most bytes of a head, and of a body.
const MAX_HEAD: usize = 64 << 10;
const MAX_BODY: usize = 256 << 20;
const MAX_HEADERS: usize = 96;

/// Headers that describe the connection and not the message: each hop has its own.
const HOP: [&str; 5] =
    ["connection", "keep-alive", "transfer-encoding", "content-length", "expect"];

type Headers = Vec<(String, Vec<u8>)>;

/// A request with its body.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    headers: Headers,
    body: Vec<u8>,
}

/// An answer with its body.
#[derive(Debug, Clone)]
pub(super) struct Response {
    pub(super) status: u16,
    headers: Headers,
    body: Vec<u8>,
    /// The `content-length` of an answer without a body.
    length: Option<Vec<u8>>,
}

impl Request {
    /// The next request of a connection; `None` at its end.
    pub(super) async fn read(from: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<Self>> {
        let Some(head) = read_head(from).await? else { return Ok(None) };
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        parsed.parse(&head).map_err(|e| bad(&e.to_string()))?;
        let (method, target) = (parsed.method.unwrap_or_default(), parsed.path.unwrap_or_default());
        let (method, target) = (method.to_owned(), target.to_owned());
        let all = owned(parsed.headers);
        let body = match framing(&all)? {
            Framing::Length(len) => read_exact(from, len).await?,
            Framing::Chunked => read_chunks(from).await?,
            Framing::Open => Vec::new(),
        };
        Ok(Some(Self { method, target, headers: end_to_end(all), body }))
    }

    pub(super) fn header(&self, name: &str) -> Option<&[u8]> {
        find(&self.headers, name)
    }

    /// The same request without a header.
    pub(super) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self
    }

    /// The HEAD request for the object that this request writes.
    pub(super) fn head(&self) -> Self {
        let body_is = ["content-", "x-amz-checksum", "if-"];
        let ours = |name: &str| body_is.iter().any(|p| name.to_ascii_lowercase().starts_with(p));
        let headers = self.headers.iter().filter(|(name, _)| !ours(name)).cloned().collect();
        Self { method: "HEAD".into(), target: self.target.clone(), headers, body: Vec::new() }
    }

    /// The bytes to send to a server, on a connection for this request alone.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        write_headers(&mut out, &self.headers);
        out.extend(b"connection: close\r\n");
        if !self.body.is_empty() || matches!(self.method.as_str(), "PUT" | "POST") {
            out.extend(format!("content-length: {}\r\n", self.body.len()).bytes());
        }
        out.extend(b"\r\n");
        out.extend(&self.body);
        out
    }
}

impl Response {
    /// A server's answer to a request of `method`.
    pub(super) async fn read(from: &mut (impl AsyncBufRead + Unpin), method: &str) -> Result<Self> {
        loop {
            let head = read_head(from).await?.ok_or(ErrorKind::UnexpectedEof)?;
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut parsed = httparse::Response::new(&mut headers);
            parsed.parse(&head).map_err(|e| bad(&e.to_string()))?;
            let status = parsed.code.unwrap_or_default();
            let all = owned(parsed.headers);
            if status < 200 {
                continue;
            }
            let empty = method == "HEAD" || matches!(status, 204 | 304);
            let body = match framing(&all)? {
                _ if empty => Vec::new(),
                Framing::Length(len) => read_exact(from, len).await?,
                Framing::Chunked => read_chunks(from).await?,
                Framing::Open => read_rest(from).await?,
            };
            let length = find(&all, "content-length").filter(|_| empty).map(<[u8]>::to_vec);
            return Ok(Self { status, headers: end_to_end(all), body, length });
        }
    }

    /// An error as S3 and Azure word it.
    pub(super) fn error(status: u16, code: &str) -> Self {
        let body = format!("<Error><Code>{code}</Code><Message>injected</Message></Error>");
        let headers = vec![("content-type".to_owned(), b"application/xml".to_vec())];
        Self { status, headers, body: body.into_bytes(), length: None }
    }

    /// The bytes to send to a client. An answer to HEAD has no body whatever its status.
    pub(super) fn to_bytes(&self, method: &str) -> Vec<u8> {
        let mut out = format!("HTTP/1.1 {} injected\r\n", self.status).into_bytes();
        write_headers(&mut out, &self.headers);
        let length = match &self.length {
            Some(length) => String::from_utf8_lossy(length).into_owned(),
            None if self.status == 204 => String::new(),
            None => self.body.len().to_string(),
        };
        if !length.is_empty() {
            out.extend(format!("content-length: {length}\r\n").bytes());
        }
        out.extend(b"\r\n");
        if method != "HEAD" {
            out.extend(&self.body);
        }
        out
    }
}

enum Framing {
    Length(usize),
    Chunked,
    Open,
}

fn framing(headers: &Headers) -> Result<Framing> {
    if find(headers, "transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case(b"chunked")) {
        return Ok(Framing::Chunked);
    }
    let Some(value) = find(headers, "content-length") else { return Ok(Framing::Open) };
    let len = std::str::from_utf8(value).ok().and_then(|v| v.trim().parse().ok());
    match len {
        Some(len) if len <= MAX_BODY => Ok(Framing::Length(len)),
        _ => Err(bad("a length that is none, or too large")),
    }
}

fn owned(headers: &[httparse::Header<'_>]) -> Headers {
    headers.iter().map(|h| (h.name.to_owned(), h.value.to_vec())).collect()
}

fn end_to_end(headers: Headers) -> Headers {
    let hop = |name: &str| HOP.iter().any(|h| h.eq_ignore_ascii_case(name));
    headers.into_iter().filter(|(name, _)| !hop(name)).collect()
}

fn find<'a>(headers: &'a Headers, name: &str) -> Option<&'a [u8]> {
    let found = headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value.as_slice())
}

fn write_headers(out: &mut Vec<u8>, headers: &Headers) {
    for (name, value) in headers {
        out.extend(name.bytes());
        out.extend(b": ");
        out.extend(value);
        out.extend(b"\r\n");
    }
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// Everything up to the empty line; `None` if the connection ends before the first byte.
async fn read_head(from: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    loop {
        let before = head.len();
        let read = from.take((MAX_HEAD - before) as u64).read_until(b'\n', &mut head).await?;
        match &head[before..] {
            _ if read == 0 && before == 0 => return Ok(None),
            b"\r\n" | b"\n" if before == 0 => head.clear(),
            b"\r\n" | b"\n" => return Ok(Some(head)),
            line if !line.ends_with(b"\n") => return Err(ErrorKind::UnexpectedEof.into()),
            _ => {}
        }
    }
}

async fn read_exact(from: &mut (impl AsyncRead + Unpin), len: usize) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    let read = from.take(len as u64).read_to_end(&mut body).await?;
    if read == len { Ok(body) } else { Err(ErrorKind::UnexpectedEof.into()) }
}

async fn read_rest(from: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    from.take(MAX_BODY as u64).read_to_end(&mut body).await?;
    Ok(body)
}

async fn read_chunks(from: &mut (impl AsyncBufRead + Unpin)) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        from.take(MAX_HEAD as u64).read_line(&mut line).await?;
        let size = line.trim().split(';').next().unwrap_or_default();
        let size = usize::from_str_radix(size, 16).map_err(|_| bad("a chunk without a size"))?;
        if body.len().saturating_add(size) > MAX_BODY {
            return Err(bad("too many chunks"));
        }
        body.extend(read_exact(from, size).await?);
        let mut end = String::new();
        // After the last chunk there may be trailers, which end with an empty line.
        while from.take(MAX_HEAD as u64).read_line(&mut end).await? > 2 && size == 0 {
            end.clear();
        }
        if size == 0 {
            return Ok(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Request, Response};

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn requests_on_one_connection_are_told_apart() {
        let text = b"PUT /b/k HTTP/1.1\r\nIf-None-Match: *\r\nContent-Length: 3\r\n\r\nabc\
                     GET /b/k HTTP/1.1\r\nhost: x\r\n\r\n";
        let mut from = &text[..];
        let put = block_on(Request::read(&mut from)).unwrap().unwrap();
        assert_eq!((put.method.as_str(), put.header("if-none-match")), ("PUT", Some(&b"*"[..])));
        let sent = String::from_utf8(put.clone().without("if-none-match").to_bytes()).unwrap();
        assert!(sent.ends_with("content-length: 3\r\n\r\nabc") && !sent.contains("If-None"));
        assert!(String::from_utf8(put.head().to_bytes()).unwrap().starts_with("HEAD /b/k"));
        let get = block_on(Request::read(&mut from)).unwrap().unwrap();
        assert_eq!(get.method, "GET");
        assert!(block_on(Request::read(&mut from)).unwrap().is_none());
    }

    #[test]
    fn answers_of_every_framing_are_read_whole() {
        let cases: [(&[u8], &str, &str); 4] = [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabX", "GET", "ab"),
            (b"HTTP/1.0 200 OK\r\n\r\nabc", "GET", "abc"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", "GET", "abc"),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "HEAD", ""),
        ];
        for (text, method, body) in cases {
            let answer = block_on(Response::read(&mut &text[..], method)).unwrap();
            assert_eq!(answer.body, body.as_bytes());
            let again = String::from_utf8(answer.to_bytes(method)).unwrap();
            let length = if method == "HEAD" { 9 } else { body.len() };
            assert!(again.contains(&format!("content-length: {length}\r\n")), "{again}");
        }
        let cut = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab";
        assert!(block_on(Response::read(&mut &cut[..], "GET")).is_err());
    }
}
