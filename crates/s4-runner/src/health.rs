//! Signs of life of the threads, the state of the store, and interruptions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::Serialize;
use uuid::Uuid;

use crate::clock::now_ms;

/// How long a thread may go without a sign of life. Each gives one every few MiB.
const STALL: Duration = Duration::from_secs(60);

/// The store is asked if it has not answered for this long.
const ASK: Duration = Duration::from_secs(60);

/// Threads that must keep making progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thread {
    /// Compresses and verifies.
    Compress,
    /// Uploads.
    Upload,
}

/// The state of the store, as far as it is known.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct StoreHealth {
    /// Whether the last request succeeded; `None`: there was none yet.
    pub reachable: Option<bool>,
    /// When it last answered, in milliseconds since 1970.
    pub answered_ms: Option<i64>,
    /// Why the last request failed.
    pub error: Option<String>,
}

/// A notice that the machine, or the job, is about to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Interruption {
    /// Where it came from: `spot`, `rebalance`, `usr1` or `term`.
    pub source: &'static str,
    /// When it was noticed, in milliseconds since 1970.
    pub noticed_ms: i64,
    /// What the notice said, such as `terminate at 2026-01-01T00:00:00Z`.
    pub detail: String,
}

/// Shared by all parts of the service.
#[derive(Debug)]
pub(crate) struct Health {
    started: Instant,
    beats: [AtomicU64; 2],
    entitled: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    store: StoreHealth,
    asked: Option<Instant>,
    /// Why the last checkpoint could not be compressed, with its submission's id.
    uncompressed: Option<(Uuid, String)>,
    interruption: Option<Interruption>,
    /// Why the watched folder could not be read completely.
    unwatched: Option<String>,
}

impl Default for Health {
    fn default() -> Self {
        let (beats, inner) = (Default::default(), Mutex::default());
        Self { started: Instant::now(), beats, entitled: AtomicBool::new(false), inner }
    }
}

impl Health {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn since_start(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// A sign of life.
    pub(crate) fn beat(&self, thread: Thread) {
        self.beats[thread as usize].store(self.since_start(), Ordering::Relaxed);
    }

    /// The threads that gave no sign of life for too long.
    #[must_use]
    pub(crate) fn stalled(&self) -> Vec<Thread> {
        self.stalled_for(STALL)
    }

    fn stalled_for(&self, limit: Duration) -> Vec<Thread> {
        let now = self.since_start();
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let silent = |t: &Thread| {
            now.saturating_sub(self.beats[*t as usize].load(Ordering::Relaxed)) > limit
        };
        [Thread::Compress, Thread::Upload].into_iter().filter(silent).collect()
    }

    /// How long the service has been running.
    #[must_use]
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The service may run.
    pub(crate) fn set_entitled(&self) {
        self.entitled.store(true, Ordering::Relaxed);
    }

    /// Whether the service may run.
    #[must_use]
    pub(crate) fn is_entitled(&self) -> bool {
        self.entitled.load(Ordering::Relaxed)
    }

    /// The store answered.
    pub(crate) fn store_answered(&self) {
        let mut inner = self.lock();
        inner.asked = Some(Instant::now());
        inner.store =
            StoreHealth { reachable: Some(true), answered_ms: Some(now_ms()), error: None };
    }

    /// The store refused, or did not answer.
    pub(crate) fn store_failed(&self, why: &str) {
        let mut inner = self.lock();
        // Ask it again soon.
        inner.asked = None;
        inner.store.reachable = Some(false);
        inner.store.error = Some(why.to_owned());
    }

    /// A checkpoint was compressed, or could not be.
    pub(crate) fn compressed(&self, id: Uuid, problem: Option<String>) {
        self.lock().uncompressed = problem.map(|problem| (id, problem));
    }

    /// A checkpoint is forgotten, together with its problem.
    pub(crate) fn forget(&self, id: Uuid) {
        let uncompressed = &mut self.lock().uncompressed;
        uncompressed.take_if(|(of, _)| *of == id);
    }

    /// Why the last checkpoint could not be compressed.
    #[must_use]
    pub(crate) fn uncompressed(&self) -> Option<String> {
        self.lock().uncompressed.as_ref().map(|(_, problem)| problem.clone())
    }

    /// The watched folder was read, or could not be read completely.
    pub(crate) fn watched(&self, problem: Option<String>) {
        self.lock().unwatched = problem;
    }

    /// Why the watched folder could not be read completely.
    #[must_use]
    pub(crate) fn unwatched(&self) -> Option<String> {
        self.lock().unwatched.clone()
    }

    /// Whether the store answered lately.
    #[must_use]
    pub(crate) fn store_is_known(&self) -> bool {
        self.lock().asked.is_some_and(|at| at.elapsed() < ASK)
    }

    /// The state of the store, as far as it is known.
    #[must_use]
    pub(crate) fn store(&self) -> StoreHealth {
        self.lock().store.clone()
    }

    /// Records an interruption. The first one is kept, unless it was a mere hint.
    pub(crate) fn interrupted(&self, source: &'static str, detail: &str) {
        let detail = detail.to_owned();
        let new = Interruption { source, noticed_ms: now_ms(), detail };
        let mut inner = self.lock();
        let replaced = inner.interruption.as_ref().is_none_or(|old| old.source == "rebalance");
        if replaced {
            inner.interruption = Some(new);
        }
    }

    /// The interruption, if there is one.
    #[must_use]
    pub(crate) fn interruption(&self) -> Option<Interruption> {
        self.lock().interruption.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_silent_is_found() {
        let health = Health::default();
        let limit = Duration::from_millis(50);
        assert!(health.stalled_for(limit).is_empty());
        std::thread::sleep(limit * 2);
        health.beat(Thread::Compress);
        assert_eq!(health.stalled_for(limit), [Thread::Upload]);
        health.beat(Thread::Upload);
        assert!(health.stalled_for(limit).is_empty());
    }

    #[test]
    fn a_store_that_failed_is_asked_again() {
        let health = Health::default();
        assert!(!health.store_is_known());
        health.store_answered();
        assert!(health.store_is_known());
        health.store_failed("gone");
        assert!(!health.store_is_known());
        let store = health.store();
        assert_eq!((store.reachable, store.error.as_deref()), (Some(false), Some("gone")));
        assert!(store.answered_ms.is_some());
    }
}
