//! A runner in a process of its own, and what its clients do.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses a part of it")]

pub(crate) mod line;
pub(crate) mod server;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use s4_runner::{Config, Hooks};
use s4weights::store::CheckpointStore;
use s4weights::{DType, Target, TensorSource, WriteOptions, Writer};
use serde_json::{Value, json};
use uuid::Uuid;

/// In the child: the configuration file, and at which visit of which place to die, such as `verified:2`; or for how
/// many milliseconds to pause at every place, such as `*:300`.
const CONFIG: &str = "S4W_TEST_CONFIG";
const CRASH: &str = "S4W_TEST_CRASH";
/// In the child: a file that is created when the GPU is touched.
const TOUCHED: &str = "S4W_TEST_TOUCHED";

/// Longer than anything takes that succeeds, on a busy machine as well.
pub(crate) const LONG: Duration = Duration::from_secs(240);

/// Called by the test `child` of each file: runs the runner if this process was started for that.
pub(crate) fn be_the_child() {
    let Some(path) = std::env::var_os(CONFIG) else { return };
    let crash = std::env::var(CRASH).unwrap_or_default();
    let (place, number) = crash.split_once(':').unwrap_or(("", "0"));
    let (place, number): (String, u32) = (place.to_owned(), number.parse().unwrap());
    let visits = AtomicU32::new(0);
    let touched = std::env::var_os(TOUCHED);
    let hooks = Hooks {
        reached: Arc::new(move |at| {
            if place == "*" {
                std::thread::sleep(Duration::from_millis(number.into()));
            }
            if at == place && visits.fetch_add(1, Ordering::Relaxed) + 1 == number {
                std::process::abort();
            }
        }),
        gpu: Arc::new(move || {
            if let Some(path) = &touched {
                std::fs::write(path, "touched").unwrap();
            }
            Err("this is a test".into())
        }),
        ..Hooks::default()
    };
    let outcome = Config::read(Path::new(&path)).and_then(|config| s4_runner::run(config, hooks));
    let code = match outcome {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("runner: {e}");
            e.exit_code()
        }
    };
    std::process::exit(code.into());
}

/// Folders of a runner, and how it is configured.
pub(crate) struct Setup {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) http: String,
    pub(crate) more: String,
}

/// A port that nobody listens on, below the range that the system hands out to clients. A client
/// that keeps retrying a port of that range may one day get it as its own, and connect to itself.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 15_000 + (std::process::id() % 15_000) as u16;
    let mut ports = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed) % 2_000);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

impl Default for Setup {
    fn default() -> Self {
        Self::new("")
    }
}

impl Setup {
    /// `more` holds more lines of the configuration.
    pub(crate) fn new(more: &str) -> Self {
        let http = format!("127.0.0.1:{}", free_port());
        Self { dir: tempfile::tempdir().unwrap(), http, more: more.to_owned() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.path("store")
    }

    pub(crate) fn open_store(&self) -> CheckpointStore {
        let path = self.store();
        CheckpointStore::open(&path.to_string_lossy(), &Default::default(), Default::default())
            .unwrap()
    }

    fn command(&self, crash: &str) -> Command {
        let mut text = self.more.clone();
        for (name, value) in [
            ("store", self.store()),
            ("state_dir", self.path("state")),
            ("socket", self.path("s4w.sock")),
            ("http", self.http.clone().into()),
        ] {
            if !self.more.contains(&format!("{name} =")) {
                text = format!("{name} = {:?}\n{text}", value.to_str().unwrap());
            }
        }
        let config = self.path("config.toml");
        std::fs::write(&config, format!("min_free_bytes = 0\nthreads = 1\n{text}")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture", "--test-threads", "1"]);
        command.env(CONFIG, config).env(CRASH, crash).env(TOUCHED, self.path("touched"));
        command.stdout(Stdio::null());
        command
    }

    /// Starts a runner, and waits until it listens.
    pub(crate) fn start(&self) -> Daemon<'_> {
        self.start_with("", |_| {})
    }

    /// As `start`, but the runner dies when it reaches a place for the nth time, such as `verified:2`.
    pub(crate) fn start_with(&self, crash: &str, change: impl FnOnce(&mut Command)) -> Daemon<'_> {
        let mut daemon = self.spawn(crash, change);
        let end = Instant::now() + LONG;
        while daemon.try_get("/livez").is_none() {
            assert!(Instant::now() < end, "the runner does not listen");
            if let Some(status) = daemon.child.try_wait().unwrap() {
                // Work from its journal may have brought it to that place already.
                assert!(!crash.is_empty(), "the runner ended: {status}");
                return daemon;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    /// Starts a runner, and waits for nothing.
    pub(crate) fn spawn(&self, crash: &str, change: impl FnOnce(&mut Command)) -> Daemon<'_> {
        let mut command = self.command(crash);
        change(&mut command);
        Daemon { setup: self, child: command.spawn().unwrap() }
    }

    /// Where a trainer writes.
    pub(crate) fn offered(&self, id: Uuid) -> PathBuf {
        self.path("state/staging/incoming").join(format!("{id}.s4w"))
    }

    /// Sends a request to the socket.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> std::io::Result<Answer> {
        let mut stream = UnixStream::connect(self.path("s4w.sock"))?;
        stream.set_read_timeout(Some(LONG))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        send(&mut stream, method, path, body.as_bytes())
    }

    /// Submits a file that was written; returns the answer.
    pub(crate) fn submit(&self, id: Uuid, step: u64) -> Answer {
        self.ask("POST", "/v1/submissions", Some(&json!({ "id": id, "step": step }))).unwrap()
    }

    /// Writes a checkpoint and submits it.
    pub(crate) fn save(&self, step: u64) -> Uuid {
        let id = Uuid::new_v4();
        write_checkpoint(&self.offered(id), step);
        let answer = self.submit(id, step);
        assert_eq!(answer.status, 200, "{}", answer.text);
        id
    }

    /// Waits until a submission has reached a state.
    pub(crate) fn wait(&self, id: Uuid, state: &str) -> Value {
        let (limit, end) = (Duration::from_secs(20), Instant::now() + LONG);
        let path = format!("/v1/submissions/{id}?state={state}&timeout_ms={}", limit.as_millis());
        loop {
            let began = Instant::now();
            let answer = self.ask("GET", &path, None).unwrap();
            assert_eq!(answer.status, 200, "{}", answer.text);
            if began.elapsed() < limit || Instant::now() > end {
                return answer.json();
            }
        }
    }

    /// Checks that the store has each step exactly once, with its values.
    pub(crate) fn check_store(&self, steps: &[u64]) {
        let store = self.open_store();
        let mut listed: Vec<u64> = store.list().unwrap().iter().map(|c| c.step()).collect();
        listed.sort_unstable();
        let mut wanted = steps.to_vec();
        wanted.sort_unstable();
        assert_eq!(listed, wanted);
        for &step in steps {
            let loaded = store.load(Some(step)).unwrap();
            assert_eq!(loaded.reader().read("w").unwrap(), values(step), "step {step}");
        }
    }
}

/// A running runner.
pub(crate) struct Daemon<'a> {
    setup: &'a Setup,
    pub(crate) child: Child,
}

impl Daemon<'_> {
    pub(crate) fn try_get(&self, path: &str) -> Option<Answer> {
        let mut stream = TcpStream::connect(&self.setup.http).ok()?;
        stream.set_read_timeout(Some(LONG)).unwrap();
        send(&mut stream, "GET", path, b"").ok()
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.try_get(path).unwrap()
    }

    /// Waits until the daemon says that it is ready: it may have to contact the store first.
    pub(crate) fn wait_until_ready(&self) {
        let end = Instant::now() + LONG;
        while self.get("/readyz").status != 200 {
            assert!(Instant::now() < end, "{}", self.get("/readyz?verbose").text);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the daemon has read the signal that told it to end: another one sent before that may count as the
    /// same.
    pub(crate) fn wait_until_draining(&self) {
        let end = Instant::now() + LONG;
        while self.get("/v1/status").json()["mode"] != "draining" {
            assert!(Instant::now() < end, "{}", self.get("/v1/status").text);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Waits until it ends, for whatever reason.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + LONG;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the runner does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it as systemd does, which takes both codes for success; returns whether everything is durable.
    pub(crate) fn stop(mut self) -> bool {
        self.signal("TERM");
        let status = self.wait();
        assert!(matches!(status.code(), Some(0 | 74)), "{status}");
        status.success()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }
}

pub(crate) fn send(
    stream: &mut (impl Read + Write),
    method: &str,
    path: &str,
    body: &[u8],
) -> std::io::Result<Answer> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: runner\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    // A server that refuses a request need not read its body.
    let _ = stream.write_all(body);
    let mut bytes = vec![];
    let read = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let cut = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        read?;
        return Err(cut());
    };
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or_else(cut)?;
    Ok(Answer { status, head: head.to_lowercase(), text: body.to_owned() })
}

/// The values of a step, which are similar from one step to the next.
pub(crate) fn values(step: u64) -> Vec<u8> {
    let value = |i: u64| {
        let x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let low = (i.wrapping_add(step).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 61) as u32;
        f32::from_bits((x as f32 / 1e8 - 0.08).to_bits() ^ low)
    };
    (0..20_000).flat_map(|i| value(i).to_le_bytes()).collect()
}

pub(crate) fn write_checkpoint(path: &Path, step: u64) {
    let values = values(step);
    let options = WriteOptions { threads: Some(1), ..WriteOptions::default() };
    let mut writer = Writer::create(Target::from(path), options).unwrap();
    writer.write(&[TensorSource::new("w", DType::Float32, &[20_000], &values)]).unwrap();
    writer.finish(Default::default()).unwrap();
}
