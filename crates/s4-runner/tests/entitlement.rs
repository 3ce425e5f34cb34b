//! The entitlement: every kind of answer, what the runner makes of it, and what it must not have
//! done by then.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{KeyPair, RSA_PKCS1_SHA256, RSA_PSS_SHA256, RsaEncoding, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use common::Setup;
use common::server::{Reply, Request, Server};
use serde_json::{Value, json};

const PRODUCT: &str = "prod-abc123";

#[test]
fn child() {
    common::be_the_child();
}

/// The outcome of a runner that had to find out whether it may run.
struct Outcome {
    code: Option<i32>,
    /// Its notifications to systemd.
    told: Vec<String>,
    touched_gpu: bool,
    listened: bool,
    made_state: bool,
}

/// Starts a runner, and watches until it has decided.
fn decide(more: &str) -> Outcome {
    let setup = Setup::new(more);
    let socket = setup.path("notify");
    let notify = UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut daemon = setup.spawn("", |command| {
        command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", "400000");
        command.env("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE").env("AWS_SECRET_ACCESS_KEY", "secret");
    });
    let mut told = vec![];
    let mut listened = false;
    let end = Instant::now() + common::LONG;
    let code = loop {
        let mut text = [0; 4096];
        if let Ok(len) = notify.recv(&mut text) {
            told.push(String::from_utf8_lossy(&text[..len]).into_owned());
        }
        listened |= std::net::TcpStream::connect(&setup.http).is_ok();
        if let Some(status) = daemon.child.try_wait().unwrap() {
            break status.code();
        }
        if told.iter().filter(|t| t.contains("WATCHDOG=1")).count() >= 2 {
            daemon.signal("TERM");
            let code = daemon.wait().code();
            while let Ok(len) = notify.recv(&mut text) {
                told.push(String::from_utf8_lossy(&text[..len]).into_owned());
            }
            break code;
        }
        assert!(Instant::now() < end, "it decides nothing");
    };
    let touched_gpu = setup.path("touched").exists();
    let made_state = setup.path("state").exists() || setup.path("s4w.sock").exists();
    Outcome { code, told, touched_gpu, listened, made_state }
}

impl Outcome {
    fn check_refused(&self, code: i32, case: &str) {
        assert_eq!(self.code, Some(code), "{case}");
        assert!(self.told.is_empty(), "{case}: {:?}", self.told);
        assert!(!self.touched_gpu && !self.listened && !self.made_state, "{case}");
    }

    fn check_allowed(&self, case: &str) {
        assert_eq!(self.code, Some(0), "{case}");
        assert!(self.touched_gpu && self.listened && self.made_state, "{case}");
        let words: Vec<&str> = self.told.iter().flat_map(|t| t.lines()).collect();
        let at = |word: &str| words.iter().position(|w| *w == word);
        let order = [at("READY=1"), at("WATCHDOG=1"), at("STOPPING=1")];
        assert!(order.iter().all(Option::is_some) && order.is_sorted(), "{case}: {words:?}");
    }
}

/// Checks all cases in parallel.
fn all<T: Sync>(cases: &[T], check: impl Fn(&T) + Sync) {
    std::thread::scope(|scope| {
        let check = &check;
        cases.iter().for_each(|case| drop(scope.spawn(move || check(case))));
    });
}

struct Signer {
    pair: RsaKeyPair,
    public: PathBuf,
}

/// The signer whose replies count, and another one. Made once, because making keys takes long.
static SIGNER: LazyLock<Signer> = LazyLock::new(|| Signer::new("signer.pub"));
static STRANGER: LazyLock<Signer> = LazyLock::new(|| Signer::new("stranger.pub"));

impl Signer {
    fn new(name: &str) -> Self {
        let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let public: PublicKeyX509Der = pair.public_key().as_der().unwrap();
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let text = STANDARD.encode(public.as_ref());
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n");
        std::fs::write(&path, pem).unwrap();
        Self { pair, public: path }
    }

    fn token(&self, algorithm: &str, claims: &Value) -> String {
        let part = |v: &Value| URL_SAFE_NO_PAD.encode(v.to_string());
        let message =
            format!("{}.{}", part(&json!({"alg": algorithm, "typ": "JWT"})), part(claims));
        let how: &'static dyn RsaEncoding = match algorithm {
            "RS256" => &RSA_PKCS1_SHA256,
            _ => &RSA_PSS_SHA256,
        };
        let mut signature = vec![0; self.pair.public_modulus_len()];
        self.pair.sign(how, &SystemRandom::new(), message.as_bytes(), &mut signature).unwrap();
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

/// The longest that a try may take that is answered, on a busy machine as well.
const ANSWERED: u32 = 60;

fn register(server: &Server, key: &Path, try_seconds: u32) -> String {
    format!(
        "[entitlement]\nmode = \"register-usage\"\nproduct_code = \"{PRODUCT}\"\nregion = \"eu-west-1\"\n\
         public_key = {key:?}\nendpoint = \"{}\"\ntry_seconds = {try_seconds}\ntotal_seconds = 200\n",
        server.url
    )
}

fn claims(request: &Request) -> Value {
    let asked: Value = serde_json::from_str(&request.body).unwrap();
    json!({
        "productCode": asked["ProductCode"],
        "publicKeyVersion": asked["PublicKeyVersion"],
        "nonce": asked["Nonce"],
        "iat": 1_700_000_000,
    })
}

/// Decides with a metering service whose reply `change` makes from the claims of a yes.
fn usage(change: impl Fn(&Signer, Value) -> Reply + Send + Sync + 'static) -> (Outcome, Server) {
    usage_within(ANSWERED, change)
}

fn usage_within(
    try_seconds: u32,
    change: impl Fn(&Signer, Value) -> Reply + Send + Sync + 'static,
) -> (Outcome, Server) {
    LazyLock::force(&STRANGER);
    let key = &SIGNER.public;
    let server = Server::start(move |request| change(&SIGNER, claims(request)));
    let outcome = decide(&register(&server, key, try_seconds));
    (outcome, server)
}

fn signed(token: &str) -> Reply {
    Reply::new(200, json!({ "Signature": token }).to_string())
}

#[test]
fn a_signed_yes_lets_it_start_and_is_asked_for_once() {
    let (outcome, server) = usage(|signer, claims| signed(&signer.token("PS256", &claims)));
    outcome.check_allowed("yes");
    let seen = server.seen.lock().unwrap();
    let [request] = seen.as_slice() else { panic!("{} requests", seen.len()) };
    let head = request.head.to_lowercase();
    assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/"));
    assert!(head.contains("x-amz-target: awsmpmeteringservice.registerusage"), "{head}");
    assert!(head.contains("content-type: application/x-amz-json-1.1"), "{head}");
    assert!(head.contains("/eu-west-1/aws-marketplace/aws4_request"), "{head}");
    let asked: Value = serde_json::from_str(&request.body).unwrap();
    assert_eq!(asked["ProductCode"], PRODUCT);
    assert_eq!(asked["Nonce"].as_str().map(str::len), Some(32));
}

#[test]
fn a_key_that_will_be_replaced_still_counts() {
    let (outcome, _) = usage(|signer, claims| {
        let token = signer.token("PS256", &claims);
        let reply = json!({ "Signature": token, "PublicKeyRotationTimestamp": 1.7e9 });
        Reply::new(200, reply.to_string())
    });
    outcome.check_allowed("rotation");
}

#[test]
fn final_exceptions_are_refusals_after_one_try() {
    all(
        &[
            "CustomerNotEntitledException",
            "PlatformNotSupportedException",
            "InvalidProductCodeException",
            "InvalidPublicKeyVersionException",
            "InvalidRegionException",
            "DisabledApiException",
            "AccessDeniedException",
            "NobodyKnowsThisException",
        ],
        |&exception| {
            let body = json!({ "__type": format!("com.amazonaws.x#{exception}"), "message": "no" });
            let (outcome, server) = usage(move |_, _| Reply::new(400, body.to_string()));
            outcome.check_refused(77, exception);
            assert_eq!(server.asked("/"), 1, "{exception}");
        },
    );
}

#[test]
fn what_may_pass_is_tried_again_and_is_no_yes_in_the_end() {
    let throttled = json!({ "__type": "ThrottlingException" }).to_string();
    let internal = json!({ "__type": "InternalServiceErrorException" }).to_string();
    let never = Reply { pause: Duration::from_secs(3600), ..Reply::new(200, "{}") };
    all(
        &[
            ("throttled", ANSWERED, Reply::new(400, throttled)),
            ("internal", ANSWERED, Reply::new(500, internal)),
            ("a proxy's page", ANSWERED, Reply::new(503, "<html>busy</html>")),
            ("no answer", 4, never),
        ],
        |(case, try_seconds, reply)| {
            let reply = reply.clone();
            let (outcome, server) = usage_within(*try_seconds, move |_, _| reply.clone());
            outcome.check_refused(75, case);
            assert_eq!(server.asked("/"), 3, "{case}");
        },
    );
    let nobody = Server { url: "http://127.0.0.1:9".into(), seen: Default::default() };
    let gone = SIGNER.public.with_extension("gone");
    decide(&register(&nobody, &gone, ANSWERED)).check_refused(78, "the key is gone");
    decide(&register(&nobody, &SIGNER.public, ANSWERED)).check_refused(75, "nobody listens");
}

#[test]
fn a_yes_after_a_failure_counts() {
    let tries = std::sync::atomic::AtomicU32::new(0);
    let (outcome, server) = usage(move |signer, claims| {
        match tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => Reply::new(500, ""),
            _ => signed(&signer.token("PS256", &claims)),
        }
    });
    outcome.check_allowed("second try");
    assert_eq!(server.asked("/"), 2);
}

/// Makes a reply that is no yes.
type Answer = fn(&Signer, Value) -> Reply;

#[test]
fn replies_that_are_not_signed_for_this_request_are_refusals() {
    let cases: [(&str, Answer); 12] = [
        ("nothing", |_, _| Reply::new(200, "")),
        ("no JSON", |_, _| Reply::new(200, "<html>")),
        ("unsigned", |_, _| Reply::new(200, "{}")),
        ("an empty signature", |_, _| signed("")),
        ("no token", |_, _| signed("yes")),
        ("another key", |_, c| signed(&STRANGER.token("PS256", &c))),
        ("another algorithm", |s, c| signed(&s.token("RS256", &c))),
        ("no algorithm", |_, c| {
            let part = |v: Value| URL_SAFE_NO_PAD.encode(v.to_string());
            signed(&format!("{}.{}.", part(json!({"alg": "none"})), part(c)))
        }),
        ("changed claims", |s, mut c| {
            let token = s.token("PS256", &json!({ "productCode": "other" }));
            let mut parts: Vec<&str> = token.split('.').collect();
            c["iat"] = 5.into();
            let own = URL_SAFE_NO_PAD.encode(c.to_string());
            parts[1] = &own;
            signed(&parts.join("."))
        }),
        ("another nonce", |s, mut c| {
            c["nonce"] = "0".repeat(32).into();
            signed(&s.token("PS256", &c))
        }),
        ("another product", |s, mut c| {
            c["productCode"] = "prod-other".into();
            signed(&s.token("PS256", &c))
        }),
        ("an expired token", |s, mut c| {
            c["exp"] = 1_600_000_000.into();
            signed(&s.token("PS256", &c))
        }),
    ];
    all(&cases, |&(case, answer)| {
        let (outcome, server) = usage(answer);
        outcome.check_refused(77, case);
        assert_eq!(server.asked("/"), 1, "{case}");
    });
}

#[test]
fn settings_that_make_no_sense_are_refused_before_anybody_is_asked() {
    let server = Server::start(|_| Reply::new(200, "{}"));
    let good = register(&server, &SIGNER.public, ANSWERED);
    let key = format!("public_key = {:?}\n", SIGNER.public);
    all(
        &[
            ("unknown mode", good.replace("register-usage", "trust-me")),
            ("no product", good.replace(PRODUCT, "")),
            ("bad product", good.replace(PRODUCT, "a b")),
            ("no key", good.replace(&key, "")),
            ("a secret for a key", format!("{good}algorithm = \"HS256\"\n")),
            ("no algorithm", format!("{good}algorithm = \"none\"\n")),
            ("unknown member", format!("{good}surprise = 1\n")),
            ("no certificate", good.replace("register-usage", "instance-identity")),
        ],
        |(case, more)| decide(more).check_refused(78, case),
    );
    assert_eq!(server.asked("/"), 0);
}

/// The metadata of an instance: the signature, the document, and the instance's id.
fn instance(signature: &str, document: &str, id: &str) -> Server {
    let (signature, document, id) = (signature.to_owned(), document.to_owned(), id.to_owned());
    Server::start(move |request| {
        let token = request.head.to_lowercase().contains("x-aws-ec2-metadata-token: t0ken");
        match (request.method.as_str(), request.path.as_str()) {
            ("PUT", "/latest/api/token") => Reply::new(200, "t0ken"),
            _ if !token => Reply::new(401, ""),
            (_, "/latest/dynamic/instance-identity/document") => Reply::new(200, document.clone()),
            (_, "/latest/dynamic/instance-identity/rsa2048") => Reply::new(200, signature.clone()),
            (_, "/latest/meta-data/instance-id") => Reply::new(200, id.clone()),
            _ => Reply::new(404, ""),
        }
    })
}

fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/entitlement").join(name);
    std::fs::read_to_string(path).unwrap()
}

fn identity(server: &Server, product: &str) -> String {
    let certificate =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/entitlement/certificate.pem");
    format!(
        "imds = \"{}\"\n[entitlement]\nmode = \"instance-identity\"\nproduct_code = \"{product}\"\n\
         certificate = {certificate:?}\ntry_seconds = {ANSWERED}\ntotal_seconds = 200\n",
        server.url
    )
}

const INSTANCE: &str = "i-0123456789abcdef0";

#[test]
fn an_instance_of_the_product_may_start() {
    for signature in ["rsa2048.txt", "rsa2048-plain.txt"] {
        let server = instance(&fixture(signature), &fixture("document.json"), INSTANCE);
        decide(&identity(&server, PRODUCT)).check_allowed(signature);
    }
}

#[test]
fn any_other_instance_may_not() {
    let (good, document) = (fixture("rsa2048.txt"), fixture("document.json"));
    let other = document.replace("abc123", "abc124");
    let cut = good[..good.len() / 2].to_owned();
    let deep = STANDARD.encode([0x30, 0x80].repeat(5000));
    let old = fixture("rsa2048-sha1.txt");
    let stranger = fixture("rsa2048-other.txt");
    all(
        &[
            ("another product", &good, &document, INSTANCE, "prod-other"),
            ("another instance", &good, &document, "i-1", PRODUCT),
            ("another document", &good, &other, INSTANCE, "prod-abc124"),
            ("another signer", &stranger, &document, INSTANCE, PRODUCT),
            ("an old digest", &old, &document, INSTANCE, PRODUCT),
            ("half a signature", &cut, &document, INSTANCE, PRODUCT),
            ("no base64", &"!!".to_owned(), &document, INSTANCE, PRODUCT),
            ("no signature", &String::new(), &document, INSTANCE, PRODUCT),
            ("a nest", &deep, &document, INSTANCE, PRODUCT),
        ],
        |&(case, signature, document, id, product)| {
            let server = instance(signature, document, id);
            decide(&identity(&server, product)).check_refused(77, case);
        },
    );
    // A machine that is not AWS's, and one whose metadata service fails.
    let none = Server::start(|_| Reply::new(404, ""));
    decide(&identity(&none, PRODUCT)).check_refused(77, "no metadata");
    let broken = Server::start(|_| Reply::new(500, ""));
    decide(&identity(&broken, PRODUCT)).check_refused(75, "broken metadata");
}

#[test]
fn without_an_entitlement_everybody_may_start() {
    decide("").check_allowed("off");
}
