//! The restores that run or ended recently, which clients wait for.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;
use uuid::Uuid;

use crate::staging::UNFETCHED;

/// Maximum number of restores at the same time: each reads and writes a whole checkpoint.
const MAX_RUNNING: usize = 4;
/// For how long after the last request an outcome can be asked for: as long as its file is kept.
const KEPT: Duration = UNFETCHED;

/// A restored file. The client that fetches it removes it.
#[derive(Debug, Serialize)]
pub(crate) struct Restored {
    /// The file.
    pub path: PathBuf,
    /// Its training step.
    pub step: u64,
    /// Where it came from: `staged`, `local` or `store`.
    pub tier: &'static str,
    /// Copies that could not be used, such as damaged ones, and why.
    pub skipped: Vec<String>,
}

/// The result of a restore, shared by all who wait for it.
pub(crate) type Outcome = Arc<s4weights::Result<Restored>>;

/// Restores that run, or ended recently, by the id that the client made. A restore may take longer
/// than a request or a connection may: the client asks for the same id again.
#[derive(Default)]
pub(crate) struct Restores(Mutex<HashMap<Uuid, Job>>);

struct Job {
    outcome: watch::Receiver<Option<Outcome>>,
    /// When a client last asked for it: it may have run for longer than outcomes are kept.
    asked: Instant,
}

impl Job {
    fn is_running(&self) -> bool {
        self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok()
    }
}

impl Restores {
    /// The restore of this id; if there is none, `restore` begins now. `None` if too many run already.
    pub(crate) fn begin(
        &self,
        id: Uuid,
        restore: impl FnOnce() -> s4weights::Result<Restored> + Send + 'static,
    ) -> Option<watch::Receiver<Option<Outcome>>> {
        let mut jobs = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(job) = jobs.get_mut(&id) {
            job.asked = Instant::now();
            return Some(job.outcome.clone());
        }
        jobs.retain(|_, job| job.is_running() || job.asked.elapsed() < KEPT);
        if jobs.values().filter(|job| job.is_running()).count() >= MAX_RUNNING {
            return None;
        }
        let (done, outcome) = watch::channel(None);
        tokio::task::spawn_blocking(move || {
            done.send_replace(Some(Arc::new(restore())));
        });
        jobs.insert(id, Job { outcome: outcome.clone(), asked: Instant::now() });
        Some(outcome)
    }
}
