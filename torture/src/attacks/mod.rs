//! The attacks, and what they share.

pub(crate) mod creation;
pub(crate) mod kills;
pub(crate) mod liars;
pub(crate) mod storm;
pub(crate) mod vanish;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::Outcome;
use crate::api::{Protocol, Server, Target};
use crate::children::Process;
use crate::journal::Evidence;
use crate::judge::{Verdict, judge};
use crate::roles::Args;

/// Time for a process to end after it was asked to.
const FAREWELL: Duration = Duration::from_secs(90);

/// The scope of an attack, and its time limit.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Kills, operations, creations or tries.
    pub(crate) rounds: usize,
    /// When to stop, finished or not.
    pub(crate) end: Instant,
    /// Servers that keep their promises.
    pub(crate) servers: Vec<Server>,
    /// The address of one that speaks S3's protocol, checks whether an object exists, and then writes it.
    pub(crate) racing: Option<String>,
    folder: tempfile::TempDir,
    scenes: AtomicUsize,
}

/// How an attack went.
pub(crate) struct Report {
    pub(crate) line: String,
    pub(crate) violations: Vec<String>,
}

impl Report {
    pub(crate) fn of(what: &str, verdict: Verdict) -> Self {
        Self { line: format!("{what}: {verdict}"), violations: verdict.violations }
    }
}

/// A store under attack, with a folder for the journals of the processes that use it.
pub(crate) struct Scene {
    pub(crate) target: Target,
    pub(crate) folder: PathBuf,
    seed: u64,
    next: u64,
    seconds: u64,
}

impl Plan {
    /// A plan with the servers that the environment names, as for the store's own tests:
    /// `S4_TEST_S3=name=http://127.0.0.1:port,...`, `S4_TEST_AZURE=http://127.0.0.1:port/account` and
    /// `S4_TEST_S3_RACING=http://127.0.0.1:port`.
    pub(crate) fn new(seed: u64, rounds: usize, end: Instant) -> Outcome<Self> {
        let list = std::env::var("S4_TEST_S3").unwrap_or_default();
        let s3 = list.split(',').filter_map(|pair| pair.split_once('='));
        let azure = std::env::var("S4_TEST_AZURE").unwrap_or_default();
        // Without the account, which belongs to each request's path.
        let azure = azure.rsplit_once('/').map(|(address, _)| ("azurite", address));
        let server = |protocol, (name, address): (&str, &str)| Server {
            name: name.to_owned(),
            protocol,
            address: address.to_owned(),
        };
        let servers: Vec<_> = s3
            .map(|s| server(Protocol::S3, s))
            .chain(azure.map(|s| server(Protocol::Azure, s)))
            .collect();
        if servers.is_empty() {
            println!("no servers are named: folders only; `cargo xtask torture` starts some");
        }
        let racing = std::env::var("S4_TEST_S3_RACING").ok();
        let folder = tempfile::Builder::new().prefix("s4-torture-").tempdir()?;
        Ok(Self { seed, rounds, end, servers, racing, folder, scenes: AtomicUsize::new(0) })
    }

    pub(crate) fn goes_on(&self) -> bool {
        Instant::now() < self.end
    }

    /// A place for a new store: in a folder, or on a server.
    pub(crate) fn scene(&self, server: Option<&Server>) -> Outcome<Scene> {
        let number = self.scenes.fetch_add(1, Ordering::SeqCst);
        let folder = self.folder.path().join(format!("{number}"));
        std::fs::create_dir(&folder)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let target = match server {
            None => {
                let url = folder.join("store").to_string_lossy().into_owned();
                Target { url, endpoint: None }
            }
            Some(server) => server.target(&format!("torture-{now:x}-{number}")),
        };
        let seconds = self.end.saturating_duration_since(Instant::now()).as_secs() + 60;
        Ok(Scene { target, folder, seed: self.seed ^ ((number as u64) << 32), next: 1, seconds })
    }

    /// Keeps the journals of all scenes, and prints where.
    pub(crate) fn keep(&self) -> Outcome<()> {
        let kept = std::env::temp_dir().join(format!("s4-torture-{}", self.seed));
        copy(self.folder.path(), &kept)?;
        println!("journals are kept in {}", kept.display());
        Ok(())
    }
}

/// Copies a folder without the stores in it.
fn copy(from: &Path, to: &Path) -> Outcome<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)?.flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() && path.file_name().is_some_and(|n| n != "store") {
            copy(&path, &to)?;
        } else if path.is_file() {
            std::fs::copy(&path, &to)?;
        }
    }
    Ok(())
}

impl Scene {
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Starts a process that uses the store at `target`, which may be a proxy's address.
    pub(crate) fn start(&mut self, role: &str, target: &Target) -> Outcome<Process> {
        let number = self.next;
        self.next += 1;
        let (seed, folder, target) = (self.seed, self.folder.clone(), target.clone());
        Process::start(role, &Args { target, seed, number, folder, seconds: self.seconds })
    }

    pub(crate) fn evidence(&self) -> Outcome<Evidence> {
        Ok(Evidence::read(&self.folder)?)
    }

    /// Asks all processes to end, and kills those that do not.
    pub(crate) fn finish(&self, processes: &mut [Process]) -> Outcome<()> {
        std::fs::write(self.folder.join("stop"), "")?;
        let end = Instant::now() + FAREWELL;
        for process in processes {
            process.go_on()?;
            if !process.wait(end.saturating_duration_since(Instant::now())) {
                process.kill()?;
            }
        }
        Ok(())
    }

    /// Judges the store by its journals.
    pub(crate) fn judge(&self) -> Outcome<Verdict> {
        Ok(judge(&self.target, self.seed, &self.evidence()?))
    }
}

/// Runs `work` on all of `items` in parallel and gathers the reports.
pub(crate) fn side_by_side<T: Sync>(
    items: &[T],
    work: impl Fn(&T) -> Outcome<Vec<Report>> + Sync,
) -> Outcome<Vec<Report>> {
    let work = &work;
    std::thread::scope(|s| {
        let running: Vec<_> = items.iter().map(|item| s.spawn(move || work(item))).collect();
        let mut all = vec![];
        for running in running {
            all.extend(running.join().map_err(|_| "an attack panicked")??);
        }
        Ok(all)
    })
}
