//! Real servers on this machine, which `cargo xtask test` starts and names in the environment:
//! `S4_TEST_S3=name=http://127.0.0.1:port,...`, `S4_TEST_AZURE=http://127.0.0.1:port/account`, and
//! `S4_TEST_S3_RACING=http://127.0.0.1:port` for one whose creates race.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::integration;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use s4_store::testing::{conformance, create_race, quick_options, toy};
use s4_store::{
    CheckOptions, Error, Mode, Place, ProbeLimits, StorageOptions, Store, StoreOptions, Writers,
};
use uuid::Uuid;

/// Options for servers that a busy machine may keep from answering for a while.
fn patient_options() -> StoreOptions {
    let mut options = quick_options();
    options.retry.first_contact = Duration::from_secs(120);
    options.retry.deadline = Duration::from_secs(120);
    options
}

/// The bucket and container that exist on the servers.
const BUCKET: &str = "s4test";
/// The account and key that every Azure emulator knows; no secret.
const AZURE_ACCOUNT: &str = "devstoreaccount1";
const AZURE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

fn map(pairs: &[(&str, &str)]) -> StorageOptions {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn s3_servers() -> Vec<(String, String)> {
    let Ok(list) = std::env::var("S4_TEST_S3") else {
        eprintln!("SKIPPED: S4_TEST_S3 names no servers; `cargo xtask test` starts them");
        return Vec::new();
    };
    let pairs = list.split(',').map(|pair| pair.split_once('=').expect("name=url"));
    pairs.map(|(name, url)| (name.to_owned(), url.to_owned())).collect()
}

fn s3_options(endpoint: &str) -> StorageOptions {
    map(&[
        ("key", "test"),
        ("secret", "test"),
        ("endpoint_url", endpoint),
        ("region", "us-east-1"),
        ("checksum", "sha256"),
    ])
}

/// Every server, named as users would, with a prefix of its own.
fn places() -> Vec<(String, Place)> {
    let unique = Uuid::now_v7();
    let mut places = Vec::new();
    for (name, endpoint) in s3_servers() {
        let url = format!("s3://{BUCKET}/{unique}");
        places.push((name, Place::open_url(&url, &s3_options(&endpoint)).unwrap()));
    }
    match std::env::var("S4_TEST_AZURE") {
        Ok(endpoint) => {
            let options = map(&[
                ("account_name", AZURE_ACCOUNT),
                ("account_key", AZURE_KEY),
                ("endpoint", &endpoint),
            ]);
            let place = Place::open_url(&format!("az://{BUCKET}/{unique}"), &options).unwrap();
            places.push(("azurite".into(), place));
        }
        Err(_) => eprintln!("SKIPPED: S4_TEST_AZURE names no server; `cargo xtask test` starts it"),
    }
    places
}

fn objects(place: &Place) -> (Arc<dyn ObjectStore>, Path) {
    let (store, prefix) = place.as_objects().unwrap();
    (Arc::clone(store), prefix.clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_conform() {
    for (name, place) in places() {
        let (store, prefix) = objects(&place);
        conformance(store, prefix).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        println!("{name} conforms");
    }
}

/// The default behaviour of a store on Amazon's servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_conform_with_bodies_that_are_checked_and_not_signed() {
    for (name, endpoint) in s3_servers() {
        let mut options = s3_options(&endpoint);
        options.extend(map(&[("checksum", "crc64nvme"), ("unsigned_payload", "true")]));
        let url = format!("s3://{BUCKET}/{}", Uuid::now_v7());
        let (store, prefix) = objects(&Place::open_url(&url, &options).unwrap());
        conformance(store, prefix).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        println!("{name} conforms");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_pass_object_stores_own_suite() {
    for (name, place) in places() {
        let (store, prefix) = objects(&place);
        let below = |what: &str| PrefixStore::new(Arc::clone(&store), prefix.clone().join(what));
        integration::put_opts(&below("put"), true).await;
        integration::get_nonexistent_object(&below("get"), None).await.unwrap_err();
        integration::list_with_delimiter(&below("delimiter")).await;
        if name != "azurite" {
            // Azurite ignores the offset, which the store does not mind.
            integration::list_with_offset_exclusivity(&below("offset")).await;
        }
        integration::list_uses_directories_correctly(&below("directories")).await;
        println!("{name} passes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_writer_wins_every_race() {
    let rounds = std::env::var("S4_TEST_RACE_ROUNDS").ok().and_then(|n| n.parse().ok());
    let rounds = rounds.unwrap_or(20);
    let temp = tempfile::tempdir().unwrap();
    let folder = object_store::local::LocalFileSystem::new_with_prefix(temp.path()).unwrap();
    let local: Arc<dyn ObjectStore> = Arc::new(folder);
    let mut stores = vec![("folder".to_owned(), local, Path::default())];
    for (name, place) in places() {
        let (store, prefix) = objects(&place);
        stores.push((name, store, prefix));
    }
    for (name, store, prefix) in stores {
        let won = create_race(&store, &prefix.join("race"), rounds, 16).await;
        assert_eq!(won, Ok(rounds), "{name}");
        println!("{name}: one winner in each of {rounds} races of 16");
    }
}

/// A server that refuses a second create, but not a simultaneous one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_creates_race_is_found_out() {
    let Ok(endpoint) = std::env::var("S4_TEST_S3_RACING") else {
        eprintln!("SKIPPED: S4_TEST_S3_RACING names no server; `cargo xtask test` starts it");
        return;
    };
    let url = format!("s3://{BUCKET}/{}", Uuid::now_v7());
    let place = Place::open_url(&url, &s3_options(&endpoint)).unwrap();
    // As many races as usual, however slow the machine is.
    let probe = ProbeLimits { time: Duration::from_secs(60), ..ProbeLimits::default() };
    let thorough = StoreOptions { probe, ..patient_options() };
    for _ in 0..20 {
        let refused = Store::create(&place, thorough.clone()).await;
        assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    }
    let single = StoreOptions { writers: Writers::Single, ..patient_options() };
    let store = Store::create(&place, single).await.unwrap();
    let found = store.probe_again().await.unwrap();
    assert!(found.refuses_second && !found.survives_races, "{found:?}");
    println!("race {} had a wrong end", found.rounds);
    assert_eq!(store.repo().mode, Mode::Single);
    toy::save(&store, 0, None, &[0; 20]).await.unwrap();
    store.release().await.unwrap();
}

#[derive(Debug, Clone, Copy)]
enum HttpFault {
    /// The server carries out the request, the answer is lost.
    LostAnswer,
    /// The server carries out the request, a gateway answers 503.
    Gateway503,
    /// The server says 409 and does nothing.
    Conflict409,
    /// The connection breaks before the server sees the request.
    Reset,
}

/// Makes the PUT that comes after `left` others fail, below the client's own retries.
#[derive(Debug, Clone)]
struct Wire {
    fault: HttpFault,
    left: Arc<AtomicU32>,
    puts: Arc<AtomicU32>,
}

#[derive(Debug)]
struct FaultyService {
    inner: HttpClient,
    wire: Wire,
}

impl HttpConnector for Wire {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(FaultyService { inner, wire: self.clone() }))
    }
}

#[async_trait::async_trait]
impl HttpService for FaultyService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if request.method() != http::Method::PUT {
            return self.inner.execute(request).await;
        }
        self.wire.puts.fetch_add(1, Ordering::SeqCst);
        if self.wire.left.fetch_sub(1, Ordering::SeqCst) != 0 {
            return self.inner.execute(request).await;
        }
        let broken =
            || HttpError::new(HttpErrorKind::Interrupted, std::io::Error::other("injected"));
        let with = |answer: HttpResponse, status, body: &str| {
            let mut parts = answer.into_parts().0;
            parts.status = status;
            parts.headers.remove(http::header::CONTENT_LENGTH);
            HttpResponse::from_parts(parts, body.to_owned().into())
        };
        match self.wire.fault {
            HttpFault::Reset => Err(broken()),
            HttpFault::LostAnswer => self.inner.execute(request).await.and(Err(broken())),
            HttpFault::Gateway503 => {
                let answer = self.inner.execute(request).await?;
                Ok(with(answer, http::StatusCode::SERVICE_UNAVAILABLE, "try again"))
            }
            HttpFault::Conflict409 => {
                let mut look = request;
                *look.method_mut() = http::Method::HEAD;
                let answer = self.inner.execute(look).await?;
                let body = "<Error><Code>ConditionalRequestConflict</Code></Error>";
                Ok(with(answer, http::StatusCode::CONFLICT, body))
            }
        }
    }
}

/// Every PUT of a publish fails once, in every way that a network can fail: the save succeeds, and
/// is listed once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_on_the_wire_below_the_clients_retries() {
    for (name, endpoint) in s3_servers() {
        for fault in
            [HttpFault::LostAnswer, HttpFault::Gateway503, HttpFault::Conflict409, HttpFault::Reset]
        {
            let left = Arc::new(AtomicU32::new(u32::MAX));
            let wire = Wire { fault, left: Arc::clone(&left), puts: Arc::default() };
            let client = AmazonS3Builder::new()
                .with_endpoint(&endpoint)
                .with_allow_http(true)
                .with_bucket_name(BUCKET)
                .with_access_key_id("test")
                .with_secret_access_key("test")
                .with_region("us-east-1")
                .with_http_connector(wire.clone())
                .with_retry(RetryConfig { max_retries: 3, ..RetryConfig::default() })
                .build()
                .unwrap();
            let prefix = Path::from(format!("wire-{}", Uuid::now_v7()));
            let client: Arc<dyn ObjectStore> = Arc::new(client);
            for nth in [0, 1, 2, 5, 9] {
                // An answer that is lost during the probe proves nothing.
                left.store(nth, Ordering::SeqCst);
                let place =
                    Place::objects(Arc::clone(&client), prefix.clone().join(nth.to_string()));
                let store = Store::create(&place, patient_options()).await.unwrap();
                assert_eq!(store.repo().mode, Mode::Many, "{name}, {fault:?}, PUT {nth}");
            }
            let place = Place::objects(client, prefix);
            let store = Store::create(&place, patient_options()).await.unwrap();
            assert_eq!(store.repo().mode, Mode::Many);
            let before = wire.puts.load(Ordering::SeqCst);
            let mut saved = vec![toy::save(&store, 0, None, &[0; 20]).await.unwrap()];
            let puts = wire.puts.load(Ordering::SeqCst) - before;
            assert_eq!(puts, 4, "two data objects, manifest, log entry");
            for nth in 0..puts {
                left.store(nth, Ordering::SeqCst);
                let what = format!("{name}, {fault:?}, PUT {nth}");
                let parent = saved.last().unwrap().reference();
                let one = toy::save(&store, nth.into(), Some((parent, &[0; 20])), &[0; 20]).await;
                saved.push(one.unwrap_or_else(|e| panic!("{what}: {e}")));
                assert!(left.load(Ordering::SeqCst) > u32::MAX / 2, "{what} was never sent");
            }
            let reader = Store::open(&place, patient_options()).await.unwrap();
            let listed: Vec<_> = reader.list().await.unwrap().iter().map(|c| c.id()).collect();
            assert_eq!(listed, saved.iter().map(|c| c.id()).collect::<Vec<_>>(), "{name}");
            let all = CheckOptions { read_data: true, ..CheckOptions::default() };
            assert!(reader.check(&all, None).await.unwrap().is_clean());
        }
    }
}
