//! Servers that are not there, say nothing, or are not the ones that they should be.

use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::{Cause, Error, Failure, Place, Retry, StorageOptions, Store, StoreOptions};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Nobody listens there, and nobody is given this port.
const NOBODY: &str = "http://127.0.0.1:1";

/// Where servers listen whose address matters to more than one test: at an address of their own on Linux. No client is
/// given a port of it, and Linux does not remember how fast it was for other tests.
const OWN_ADDRESS: &str = if cfg!(target_os = "linux") { "127.0.0.2:0" } else { "127.0.0.1:0" };

const MISSING: &str = "<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>";

const NOTHING_LISTED: &str =
    "<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>";

fn options(endpoint: &str, more: &[(&str, &str)]) -> StorageOptions {
    let base = [
        ("endpoint_url", endpoint),
        ("key", "AKIDHUSH"),
        ("secret", "hush-secret"),
        ("region", "us-east-1"),
    ];
    base.iter().chain(more).map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn bucket(endpoint: &str, more: &[(&str, &str)]) -> Arc<dyn ObjectStore> {
    let place = Place::open_url("s3://bucket/x", &options(endpoint, more)).unwrap();
    Arc::clone(place.as_objects().unwrap().0)
}

/// Takes one request and answers it with a status and a body.
async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, status: &str, body: &str) {
    answer_by(stream, |_| (status, body)).await;
}

/// Answers as an empty bucket does.
async fn answer_empty(stream: impl AsyncRead + AsyncWrite + Unpin) {
    answer_by(stream, |head| match head.contains("list-type=2") {
        true => ("200 OK", NOTHING_LISTED),
        false => ("404 Not Found", MISSING),
    })
    .await;
}

/// Takes one request and answers it with a status and a body that depend on its head.
async fn answer_by<'a>(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    choose: impl Fn(&str) -> (&'a str, &'a str),
) {
    let mut seen = Vec::new();
    while !seen.windows(4).any(|w| w == b"\r\n\r\n") {
        if stream.read_buf(&mut seen).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let (status, body) = choose(&String::from_utf8_lossy(&seen));
    let len = body.len();
    let text =
        format!("HTTP/1.1 {status}\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}");
    let _ = stream.write_all(text.as_bytes()).await;
    let _ = stream.shutdown().await;
}

async fn serve<F>(each: impl Fn(TcpStream) -> F + Send + 'static) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    serve_at("127.0.0.1:0", each).await
}

/// As [`serve`], at a given address.
async fn serve_at<F>(address: &str, each: impl Fn(TcpStream) -> F + Send + 'static) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(each(stream));
        }
    });
    address.to_string()
}

fn tls(name: &str) -> String {
    format!("{}/tests/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Accepts TLS connections, with a certificate that the tests' own CA has signed.
fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from_pem_file(tls("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(tls("server.key")).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

async fn secure_server() -> String {
    let acceptor = acceptor();
    let address = serve(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                answer(stream, "404 Not Found", MISSING).await;
            }
        }
    })
    .await;
    format!("https://{address}")
}

#[tokio::test]
async fn a_certificate_is_checked_against_the_given_authority() {
    let endpoint = secure_server().await;
    let key = Path::from("k");
    let (ours, other) = (tls("ca.pem"), tls("other-ca.pem"));
    for (verify, trusted) in [
        (&[("verify", ours.as_str())][..], true),
        (&[("ca_bundle", ours.as_str())], true),
        (&[("verify", "false")], true),
        (&[("verify", other.as_str())], false),
        (&[("verify", "true")], false),
        (&[], false),
    ] {
        let error = bucket(&endpoint, verify).get(&key).await.unwrap_err();
        let failure = Failure::new(&error);
        let expected = if trusted { Cause::NotFound } else { Cause::Tls };
        assert_eq!(failure.cause(), expected, "{verify:?}: {failure}: {error:?}");
        let text = format!("{failure} {failure:?}");
        assert!(!text.contains("hush"), "{text}");
    }
    // Retrying does not help: after retries it would say that time is up.
    let place = Place::open_url("s3://bucket/x", &options(&endpoint, &[])).unwrap();
    let error = Store::open(&place, StoreOptions::default()).await.unwrap_err();
    assert!(matches!(error, Error::Storage { .. }), "{error:?}");
    assert_eq!(error.cause(), Some(Cause::Tls), "{error}");
    assert!(error.to_string().contains("`verify`"), "{error}");
}

#[tokio::test]
async fn causes_are_told_apart() {
    let status = |status: &'static str, body: &'static str| async move {
        let address = serve(move |stream| answer(stream, status, body)).await;
        format!("http://{address}")
    };
    let cut = serve(|stream| async move { drop(stream) }).await;
    let denied = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>";
    let bucket_gone = "<Error><Code>NoSuchBucket</Code><Message>gone</Message></Error>";
    let busy = "<Error><Code>SlowDown</Code></Error>";
    for (endpoint, cause, advice) in [
        (NOBODY.to_owned(), Cause::Refused, "start the server"),
        ("http://no-such-host.invalid:9000".to_owned(), Cause::Dns, "host name"),
        (format!("http://{cut}"), Cause::Reset, "network"),
        (status("403 Forbidden", denied).await, Cause::Permission, "credentials"),
        (status("404 Not Found", bucket_gone).await, Cause::NoSuchBucket, "create the bucket"),
        (status("503 Slow Down", busy).await, Cause::Throttled, "requests"),
        (status("500 Oops", "").await, Cause::Server, ""),
        (status("400 Bad Request", "").await, Cause::Rejected, ""),
    ] {
        let place = Place::open_url("s3://bucket/x", &options(&endpoint, &[])).unwrap();
        let retry = Retry { attempts: 2, ..Retry::within(Duration::from_secs(120)) };
        let options = StoreOptions { retry, ..StoreOptions::default() };
        let error = Store::open(&place, options).await.unwrap_err();
        let text = format!("{error} {error:?}");
        assert_eq!(error.cause(), Some(cause), "{text}");
        assert!(text.contains(advice) && !text.contains("hush"), "{text}");
    }
}

/// Listing a bucket that does not exist is not the same as an empty listing.
#[tokio::test]
async fn a_bucket_that_is_missing_is_not_empty() {
    let gone = "<Error><Code>NoSuchBucket</Code><Message>gone</Message></Error>";
    let address = serve(move |stream| answer(stream, "404 Not Found", gone)).await;
    let place =
        Place::open_url("s3://bucket/x", &options(&format!("http://{address}"), &[])).unwrap();
    let error = Store::open_or_create(&place, StoreOptions::default()).await.unwrap_err();
    assert_eq!(error.cause(), Some(Cause::NoSuchBucket), "{error}");
}

/// Neither is listing at an address that knows no listings, and waiting does not change that.
#[tokio::test]
async fn a_listing_that_is_not_found_is_an_error_at_once() {
    let address = serve(move |stream| answer(stream, "404 Not Found", MISSING)).await;
    let place =
        Place::open_url("s3://bucket/x", &options(&format!("http://{address}"), &[])).unwrap();
    // After retries it would say that time is up.
    for error in [
        Store::open(&place, StoreOptions::default()).await.unwrap_err(),
        Store::open_or_create(&place, StoreOptions::default()).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Storage { action: "list", .. }), "{error}");
        assert_eq!(error.cause(), Some(Cause::NotFound), "{error}");
    }
}

/// A server that takes connections and says nothing is found out, whatever is asked of it.
#[tokio::test]
async fn a_silent_server_is_found_out() {
    let quiet = || tokio::time::sleep(Duration::from_secs(600));
    // Linux buffers megabytes of an upload to an address that was fast in other tests: the upload is then waited for
    // as on a slow line.
    let plain = serve_at(OWN_ADDRESS, move |stream| async move {
        quiet().await;
        drop(stream);
    });
    let acceptor = acceptor();
    let secure = serve_at(OWN_ADDRESS, move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let stream = acceptor.accept(stream).await;
            quiet().await;
            drop(stream);
        }
    });
    let options = [("read_timeout", "0.3"), ("verify", "false")];
    for endpoint in [format!("http://{}", plain.await), format!("https://{}", secure.await)] {
        let client = bucket(&endpoint, &options);
        // In time in one of some tries: a busy machine may stall.
        let mut took = vec![];
        while took.len() < 3 && took.last().is_none_or(|last| *last >= Duration::from_secs(20)) {
            let start = Instant::now();
            let read = client.get(&Path::from("k")).await.unwrap_err();
            assert_eq!(Failure::new(&read).cause(), Cause::Timeout, "{read}");
            let large = bytes::Bytes::from(vec![7; 24 << 20]);
            let wrote = client.put(&Path::from("k"), large.into()).await.unwrap_err();
            assert_eq!(Failure::new(&wrote).cause(), Cause::Timeout, "{wrote}");
            took.push(start.elapsed());
        }
        let last = took.last().unwrap();
        assert!(*last < Duration::from_secs(20), "{endpoint}: {took:?}");
    }
}

/// Takes an upload of 24 MiB at 8 MiB a second.
async fn take_slowly(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let (mut seen, mut head) = (vec![], None);
    loop {
        tokio::time::sleep(Duration::from_millis(30)).await;
        let end = seen.len() + (256 << 10);
        while seen.len() < end && head.is_none_or(|head| seen.len() - head < 24 << 20) {
            let mut some = vec![0; end - seen.len()];
            let n = stream.read(&mut some).await.unwrap_or(0);
            if n == 0 {
                return;
            }
            seen.extend_from_slice(&some[..n]);
            head = head.or_else(|| seen.windows(4).position(|w| w == b"\r\n\r\n").map(|i| i + 4));
        }
        if head.is_some_and(|head| seen.len() - head >= 24 << 20) {
            break;
        }
    }
    let end = "HTTP/1.1 200 OK\r\netag: \"x\"\r\ncontent-length: 0\r\n\r\n";
    let _ = stream.write_all(end.as_bytes()).await;
    let _ = stream.flush().await;
}

/// A slow upload takes longer in all than the limit on silence, but is never silent.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_line_is_no_silence() {
    let plain = serve(take_slowly);
    let acceptor = acceptor();
    let secure = serve(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                take_slowly(stream).await;
            }
        }
    });
    let options = [("read_timeout", "1"), ("verify", "false")];
    for endpoint in [format!("http://{}", plain.await), format!("https://{}", secure.await)] {
        let client = bucket(&endpoint, &options);
        let large = bytes::Bytes::from(vec![7; 24 << 20]);
        // It succeeds in one of some tries: if the machine stalls for a second, that is silence.
        let mut failed = vec![];
        while failed.len() < 6 {
            let start = Instant::now();
            match client.put(&Path::from("k"), large.clone().into()).await {
                Ok(_) => {
                    let took = start.elapsed();
                    assert!(took > Duration::from_secs(2), "{endpoint}: {took:?}");
                    break;
                }
                Err(e) => failed.push(e),
            }
        }
        assert!(failed.len() < 6, "{endpoint}: {failed:?}");
    }
}

/// The server is away for longer than a dozen quick retries take.
#[tokio::test]
async fn an_outage_of_some_seconds_fails_nothing() {
    // Nobody else binds it meanwhile.
    let listener = TcpListener::bind(OWN_ADDRESS).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(11)).await;
        let listener = TcpListener::bind(address).await.unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer_empty(stream));
        }
    });
    let place =
        Place::open_url("s3://bucket/x", &options(&format!("http://{address}"), &[])).unwrap();
    let retry = Retry::within(Duration::from_secs(120));
    let options = StoreOptions { retry, ..StoreOptions::default() };
    let error = Store::open(&place, options).await.unwrap_err();
    assert!(matches!(error, Error::NoStore { .. }), "{error}");
}
