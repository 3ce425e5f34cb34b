//! How a store behaves: values that are passed in.

use std::sync::Arc;
use std::time::Duration;

use crate::id::{Ids, TimeIds};

/// When failed requests are repeated. Only requests that may be repeated are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    /// Tries of one request, at least 1. The client of a cloud store has retries of its own below.
    pub attempts: u32,
    /// The pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// Time for one request with all its repetitions, and for one commit.
    pub deadline: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(10),
            deadline: Duration::from_secs(300),
        }
    }
}

impl Retry {
    /// The pause after try number `attempt` (from 0): between half and all of the doubled pause.
    pub(crate) fn pause(&self, attempt: u32, jitter: u64) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << attempt.min(20));
        let half = doubled.min(self.longest_pause) / 2;
        half + half.mul_f64((jitter >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// What to do where the object store cannot create an object only if it is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Writers {
    /// Store checkpoints all the same, but mark the store: only one process at a time may write, and
    /// every writer says so loudly.
    #[default]
    ManyIfPossible,
    /// Refuse to create a store there.
    Many,
}

/// Named places in the code where a test may stop the world. Off by default.
#[async_trait::async_trait]
pub trait CrashPoints: std::fmt::Debug + Send + Sync {
    /// Called at each place. What never returns is a crash there: the future is dropped later.
    async fn reached(&self, point: &'static str);
}

/// Options of an open store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Repetition of failed requests.
    pub retry: Retry,
    /// Bytes of objects that may be on their way at once; what a slow link may hold in memory.
    pub upload_memory: usize,
    /// Requests on their way at once, for reading and looking up.
    pub concurrency: usize,
    /// Bytes per second that uploads may use together; `None` for all there is.
    pub bandwidth: Option<u64>,
    /// What to do where only one writer is safe.
    pub writers: Writers,
    /// Use a local folder even if it lies on a file system whose guarantees are known to be too weak.
    pub allow_network_fs: bool,
    /// Where ids come from.
    pub ids: Arc<dyn Ids>,
    /// Places where a test may stop the world.
    pub crash_points: Option<Arc<dyn CrashPoints>>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            retry: Retry::default(),
            upload_memory: 256 << 20,
            concurrency: 16,
            bandwidth: None,
            writers: Writers::default(),
            allow_network_fs: false,
            ids: Arc::new(TimeIds),
            crash_points: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_stay_bounded() {
        let retry = Retry::default();
        for attempt in 0..40 {
            let (low, high) = (retry.pause(attempt, 0), retry.pause(attempt, u64::MAX));
            assert!(low <= high && high <= retry.longest_pause, "{attempt}: {low:?} {high:?}");
            assert!(low >= retry.first_pause / 2);
        }
        assert_eq!(retry.pause(3, 0), retry.first_pause * 4);
    }
}
