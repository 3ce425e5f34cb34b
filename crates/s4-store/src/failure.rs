//! A failed request, described from the messages of object stores, HTTP clients and operating systems.

use std::error::Error as StdError;
use std::{fmt, io};

use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};

use crate::cause::Cause;
use crate::redact::{redact_text, redact_url};

/// The beginning of `object_store`'s message about an unsuccessful answer. The message is all that it
/// passes on, since the error's type is private. If the wording changes, the variant of the error
/// is still right.
const STATUS: &str = "Server returned non-2xx status code: ";
const IN_BODY: &str = "Server returned error response: ";
const REDIRECT: &str = "Received redirect without LOCATION";

/// Hosts that give out credentials to machines in a cloud. A request to one of them means that there are no other
/// credentials.
const METADATA: [&str; 2] = ["169.254.169.254", "metadata.google.internal"];

/// A request that failed: why, and what was said, without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    cause: Cause,
    detail: String,
    errno: Option<i32>,
}

impl Failure {
    /// The failure behind an object store's error.
    #[must_use]
    pub fn new(error: &StoreError) -> Self {
        let answer = Answer::of(error);
        let detail = answer.detail(error);
        Self { cause: answer.cause, detail, errno: answer.errno.or_else(|| answer.cause.errno()) }
    }

    /// The failure of a request that got no answer in time.
    pub(crate) fn silent() -> Self {
        let cause = Cause::Timeout;
        Self { cause, detail: String::new(), errno: cause.errno() }
    }

    /// Why the request failed.
    #[must_use]
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// The message of the server or the system; may be empty.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The system's error number, or its equivalent.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

impl fmt::Display for Failure {
    /// Cause, detail, advice.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.cause, self.detail.is_empty()) {
            (Cause::Other, false) => f.write_str(&self.detail)?,
            (cause, false) => write!(f, "{cause} ({})", self.detail)?,
            (cause, true) => write!(f, "{cause}")?,
        }
        match self.cause.advice() {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

impl StdError for Failure {}

/// Details extracted from an error and its sources.
pub(crate) struct Answer {
    pub(crate) cause: Cause,
    errno: Option<i32>,
    /// `403 Forbidden: AccessDenied: ...`
    status: Option<String>,
    remote: bool,
    /// The text of the innermost error.
    root: String,
}

impl Answer {
    pub(crate) fn of(error: &StoreError) -> Self {
        let mut found = Self {
            cause: Cause::Other,
            errno: None,
            status: None,
            remote: false,
            root: String::new(),
        };
        let (mut status, mut dns, mut http, mut io) = (None, false, None, None);
        let mut at: Option<&(dyn StdError + 'static)> = Some(error);
        while let Some(error) = at {
            let text = error.to_string();
            if let Some((cause, line)) = of_words(&text) {
                found.remote = true;
                found.status = Some(line);
                status = Some(cause);
            }
            dns |= text.starts_with("dns error") || text.contains("failed to lookup address");
            if let Some(error) = error.downcast_ref::<HttpError>() {
                found.remote = true;
                http = Some(error.kind());
            }
            if let Some(error) = error.downcast_ref::<io::Error>() {
                found.errno = error.raw_os_error().or(found.errno);
                // Wrappers have a kind of their own, so the innermost error with a known kind is
                // right.
                let known = Cause::of_io(error);
                io = if known == Cause::Other { io } else { Some(known) };
            }
            found.root = text;
            at = error.source();
        }
        let tls = http == Some(HttpErrorKind::Connect) && is_tls(&found.root);
        let secret_service = || METADATA.iter().any(|host| error.to_string().contains(host));
        found.cause = match (of_variant(error), status) {
            (_, Some(cause)) => cause,
            (Some(cause), _) => cause,
            _ if http.is_some() && secret_service() => Cause::NoCredentials,
            _ if dns => Cause::Dns,
            _ if tls => Cause::Tls,
            _ => io.or(http.map(of_http)).unwrap_or(Cause::Other),
        };
        found
    }

    /// Whether trying again is pointless. A server that answers 404, to a listing for example,
    /// keeps doing so, while a folder can come back.
    pub(crate) fn is_permanent(&self) -> bool {
        self.cause.is_permanent() || (self.status.is_some() && self.cause == Cause::NotFound)
    }

    /// One line: the server and what it or the connection said, or a file system's own message.
    fn detail(&self, error: &StoreError) -> String {
        let all = error.to_string();
        let line = match &self.status {
            Some(status) => status.as_str(),
            None if self.remote => &self.root,
            None => &all,
        };
        let line = match endpoint(&all).filter(|_| self.remote) {
            Some(endpoint) => format!("{endpoint}: {line}"),
            None => line.to_owned(),
        };
        redact_text(&cut(&line)).into_owned()
    }
}

/// Cause and short text, if this is `object_store`'s message about an answer.
fn of_words(text: &str) -> Option<(Cause, String)> {
    if text.starts_with(REDIRECT) {
        return Some((Cause::Region, "a redirect to another region".into()));
    }
    if let Some(body) = text.strip_prefix(IN_BODY) {
        return Some((Cause::of_status(200, body), short(body)));
    }
    let after = text.strip_prefix(STATUS)?;
    let status = after.get(..3)?.parse::<u16>().ok()?;
    let (head, body) = after.split_once(": ").unwrap_or((after, ""));
    let body = short(body);
    let line = if body.is_empty() { head.to_owned() } else { format!("{head}: {body}") };
    Some((Cause::of_status(status, after), line))
}

/// Code and message of an XML body; other bodies as they are.
fn short(body: &str) -> String {
    let of = |tag: &str| {
        let (_, after) = body.split_once(&format!("<{tag}>"))?;
        Some(after.split_once("</")?.0.trim())
    };
    match (of("Code"), of("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(only), None) | (None, Some(only)) => only.to_owned(),
        (None, None) => body.trim().to_owned(),
    }
}

/// The first line, of a bounded length.
fn cut(text: &str) -> String {
    const MOST: usize = 400;
    let line = text.lines().next().unwrap_or_default();
    let mut out: String = line.chars().take(MOST).collect();
    if out.len() < line.len() {
        out.push_str("...");
    }
    out
}

/// Scheme, host and port of the first HTTP address in a text.
fn endpoint(text: &str) -> Option<String> {
    let start = text.find("http://").or_else(|| text.find("https://"))?;
    let word = text[start..].split(|c: char| c.is_whitespace() || c == '"').next()?;
    let url = redact_url(word);
    let (scheme, rest) = url.split_once("://")?;
    Some(format!("{scheme}://{}", rest.split('/').next()?))
}

/// Whether a connection's error text means that TLS fails permanently. A connection that ends in the middle of a
/// handshake is merely broken, and does not count.
fn is_tls(text: &str) -> bool {
    ["certificate", "received fatal alert", "corrupt message", "peer is incompatible", "peer sent"]
        .iter()
        .any(|words| text.contains(words))
}

fn of_http(kind: HttpErrorKind) -> Cause {
    match kind {
        HttpErrorKind::Connect => Cause::Unreachable,
        HttpErrorKind::Timeout => Cause::Timeout,
        HttpErrorKind::Request | HttpErrorKind::Interrupted => Cause::Reset,
        _ => Cause::Other,
    }
}

/// The cause, derived from the error's variant alone.
fn of_variant(error: &StoreError) -> Option<Cause> {
    Some(match error {
        StoreError::NotFound { .. } => Cause::NotFound,
        StoreError::AlreadyExists { .. }
        | StoreError::Precondition { .. }
        | StoreError::NotModified { .. } => Cause::Conflict,
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            Cause::Permission
        }
        StoreError::NotSupported { .. }
        | StoreError::NotImplemented { .. }
        | StoreError::UnknownConfigurationKey { .. } => Cause::Unsupported,
        StoreError::InvalidPath { .. } => Cause::Rejected,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(kind: HttpErrorKind, source: io::Error) -> StoreError {
        let source = Box::new(HttpError::new(kind, source));
        StoreError::Generic { store: "S3", source }
    }

    fn of_io(kind: io::ErrorKind) -> StoreError {
        StoreError::Generic { store: "x", source: Box::new(io::Error::from(kind)) }
    }

    #[test]
    fn systems_and_connections_are_told_apart() {
        use io::ErrorKind as K;
        for (kind, cause, permanent) in [
            (K::ConnectionRefused, Cause::Refused, false),
            (K::ConnectionReset, Cause::Reset, false),
            (K::TimedOut, Cause::Timeout, false),
            (K::StorageFull, Cause::DiskFull, true),
            (K::QuotaExceeded, Cause::DiskFull, true),
            (K::ReadOnlyFilesystem, Cause::ReadOnly, true),
            (K::PermissionDenied, Cause::Permission, true),
            (K::NotADirectory, Cause::NotADirectory, true),
            (K::InvalidFilename, Cause::NameTooLong, true),
            (K::NotFound, Cause::NotFound, false),
            (K::Other, Cause::Other, false),
        ] {
            let failure = Failure::new(&of_io(kind));
            assert_eq!((failure.cause(), cause.is_permanent()), (cause, permanent), "{kind:?}");
        }
        let refused = http(HttpErrorKind::Connect, io::ErrorKind::ConnectionRefused.into());
        assert_eq!(Cause::of(&refused), Cause::Refused);
        let unknown = io::Error::other("failed to lookup address information: Name not known");
        assert_eq!(Cause::of(&http(HttpErrorKind::Connect, unknown)), Cause::Dns);
        let untrusted =
            io::Error::new(io::ErrorKind::InvalidData, "invalid peer certificate: UnknownIssuer");
        let untrusted = Failure::new(&http(HttpErrorKind::Connect, untrusted));
        assert_eq!(untrusted.cause(), Cause::Tls);
        assert!(untrusted.to_string().contains("UnknownIssuer"), "{untrusted}");
        assert!(untrusted.to_string().contains("`verify`"), "{untrusted}");
        let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "tls handshake eof");
        assert_eq!(Cause::of(&http(HttpErrorKind::Connect, cut)), Cause::Reset);
    }

    /// Errors as `object_store` builds them; its own type is private.
    #[derive(Debug)]
    struct Words(&'static str, Option<Box<Words>>);

    impl fmt::Display for Words {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl StdError for Words {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            self.1.as_ref().map(|e| e as _)
        }
    }

    fn answer(inner: &'static str) -> StoreError {
        let outer =
            "Error performing PUT http://u:hush@127.0.0.1:9000/b/k?X-Amz-Signature=hush in 1ms";
        let source = Box::new(Words(outer, Some(Box::new(Words(inner, None)))));
        StoreError::Generic { store: "S3", source }
    }

    #[test]
    fn answers_are_told_apart_by_status_and_code() {
        for (words, cause, permanent) in [
            ("400 Bad Request: x", Cause::Rejected, true),
            ("400 Bad Request: <Code>ExpiredToken</Code>", Cause::Permission, true),
            ("400 Bad Request: <Code>RequestTimeout</Code>", Cause::Timeout, false),
            ("400 Bad Request: <Code>BadDigest</Code>", Cause::Reset, false),
            ("400 Bad Request: <Code>XAmzContentSHA256Mismatch</Code>", Cause::Reset, false),
            ("400 Bad Request: <Code>XAmzContentChecksumMismatch</Code>", Cause::Reset, false),
            ("401 Unauthorized: ", Cause::Permission, true),
            ("403 Forbidden: <Code>AccessDenied</Code>", Cause::Permission, true),
            ("404 Not Found: <Code>NoSuchBucket</Code>", Cause::NoSuchBucket, true),
            ("404 Not Found: <Code>ContainerNotFound</Code>", Cause::NoSuchBucket, true),
            ("404 Not Found: <Code>NoSuchKey</Code>", Cause::NotFound, false),
            ("405 Method Not Allowed: ", Cause::Rejected, true),
            ("409 Conflict: ", Cause::Conflict, false),
            ("429 Too Many Requests: ", Cause::Throttled, false),
            ("500 Internal Server Error: ", Cause::Server, false),
            ("503 Service Unavailable: <Code>SlowDown</Code>", Cause::Throttled, false),
            ("503 Service Unavailable: ", Cause::Server, false),
        ] {
            let words: &'static str = format!("{STATUS}{words}").leak();
            let failure = Failure::new(&answer(words));
            assert_eq!((failure.cause(), cause.is_permanent()), (cause, permanent), "{words}");
            let text = format!("{failure} {failure:?}");
            assert!(text.contains("http://127.0.0.1:9000"), "{text}");
            assert!(!text.contains("hush") && !text.contains("Signature"), "{text}");
        }
        // A key or a body that quotes such words is not a status.
        let quoted = answer("odd: Server returned non-2xx status code: 403 Forbidden");
        assert_eq!(Cause::of(&quoted), Cause::Other);
        let slow = answer("Server returned error response: <Code>SlowDown</Code>");
        assert_eq!(Cause::of(&slow), Cause::Throttled);
        assert_eq!(Cause::of(&answer("Received redirect without LOCATION, this")), Cause::Region);
    }

    #[test]
    fn a_body_is_cut_to_what_it_says() {
        let body = "403 Forbidden: <?xml?><Error><Code>SignatureDoesNotMatch</Code><Message>no \
                    match</Message><SignatureProvided>hush</SignatureProvided></Error>";
        let words: &'static str = format!("{STATUS}{body}").leak();
        let text = Failure::new(&answer(words)).to_string();
        assert!(text.contains("SignatureDoesNotMatch: no match"), "{text}");
        assert!(!text.contains("hush"), "{text}");
        let long: &'static str = format!("{STATUS}500 X: {}", "y".repeat(10_000)).leak();
        assert!(Failure::new(&answer(long)).to_string().len() < 600);
    }
}
