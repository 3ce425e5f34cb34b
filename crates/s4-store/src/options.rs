//! Options of a store.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::PutPayload;

use crate::id::{Ids, TimeIds};

/// The policy for retrying failed requests: only those that may be repeated, and only after failures that may be
/// temporary (not after a 403, for a bucket that does not exist, or on a full disk).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    /// Maximum number of tries of one request, at least 1. The deadline usually comes first. Within each try, the
    /// client of a cloud store makes a few quick retries of its own.
    pub attempts: u32,
    /// The pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// How long to keep retrying while the server has never been reached, since its address may be wrong.
    /// Capped by `deadline`.
    pub first_contact: Duration,
    /// Time limit of one request, retries included, and of one commit. The body of a request may
    /// take longer if it makes progress: one second more per 64 KiB.
    pub deadline: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 1000,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(10),
            first_contact: Duration::from_secs(30),
            deadline: Duration::from_secs(300),
        }
    }
}

impl Retry {
    /// Retries requests for this long, even if the server has never answered.
    #[must_use]
    pub fn within(deadline: Duration) -> Self {
        Self { first_contact: deadline, deadline, ..Self::default() }
    }

    /// Time limit of the first try, which leaves time for another one if an answer is lost.
    pub(crate) fn first_try(&self) -> Duration {
        self.deadline - Self::second_try(self.deadline)
    }

    /// Minimum time for the second try, even if the first one used up the whole limit (`patience`): its answer may
    /// have been lost, or the machine suspended.
    pub(crate) fn second_try(patience: Duration) -> Duration {
        patience / 4
    }

    /// The pause after try `attempt` (counted from 0): between half and all of the exponential
    /// backoff, as `jitter` chooses.
    pub(crate) fn pause(&self, attempt: u32, jitter: u64) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << attempt.min(20));
        let half = doubled.min(self.longest_pause) / 2;
        half + half.mul_f64((jitter >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// How many processes may write to a new store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Writers {
    /// Any number. Creating the store is refused unless the probe shows that this is safe: the
    /// object store must create an object only if it is absent.
    #[default]
    Many,
    /// One at a time, on any object store. A lease keeps others out: a process that tries to
    /// write while another holds it gets [`crate::Error::Locked`].
    Single,
}

impl std::str::FromStr for Writers {
    type Err = crate::Error;

    /// `many` or `single`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "many" => Ok(Self::Many),
            "single" => Ok(Self::Single),
            other => Err(crate::Error::Argument(format!(
                "unknown value `{other}` for `writers`: use `many` or `single`"
            ))),
        }
    }
}

/// Limits of the probe that runs before a store for several writers is created at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeLimits {
    /// Minimum number of races that must end with clear answers, however long that takes.
    pub least_rounds: u32,
    /// Maximum number of races.
    pub most_rounds: u32,
    /// After this time, `least_rounds` races are enough.
    pub time: Duration,
}

impl Default for ProbeLimits {
    fn default() -> Self {
        Self { least_rounds: 8, most_rounds: 512, time: Duration::from_secs(4) }
    }
}

/// Named places in the code where a test may stop the world. Off by default.
#[async_trait::async_trait]
pub trait CrashPoints: std::fmt::Debug + Send + Sync {
    /// Called at each place. Never returning simulates a crash there: the future is dropped later.
    async fn reached(&self, point: &'static str);
}

/// A custom way to write the objects of a local folder.
pub trait PutFiles: std::fmt::Debug + Send + Sync {
    /// Writes `parts` to a new file, which gets its name `path` only when it is complete and
    /// durable, and never replaces an existing file. The folder usually exists already. Called once
    /// for each object, on a blocking thread and without a deadline. Returns `false` if it wrote no
    /// file: the store then writes the file itself.
    ///
    /// # Errors
    /// Why no file was written. The store then continues as after `false`.
    fn put(&self, path: &Path, parts: &PutPayload) -> io::Result<bool>;
}

/// The default of [`StoreOptions::upload_memory`]: 1 GiB, or an eighth of the machine's memory if that is less. A
/// connection to an object store transfers some 100 MB/s, so a fast network needs many connections.
#[must_use]
pub fn upload_memory() -> usize {
    const MOST: usize = 1 << 30;
    #[cfg(target_os = "linux")]
    {
        let machine = rustix::system::sysinfo();
        // The fields' types differ between machines.
        let bytes = (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit));
        usize::try_from(bytes / 8).map_or(MOST, |share| share.min(MOST))
    }
    #[cfg(not(target_os = "linux"))]
    MOST
}

/// Options of an open store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The policy for retrying failed requests.
    pub retry: Retry,
    /// Maximum bytes of objects in flight, which bounds the memory that a slow link ties up; at most 256 MiB for a
    /// folder. By default [`upload_memory`].
    pub upload_memory: usize,
    /// Maximum number of requests in flight, for reads and look-ups.
    pub concurrency: usize,
    /// Bytes per second of all uploads together; `None`: no limit.
    pub bandwidth: Option<u64>,
    /// How many processes may write to a store that is created. An existing store records this
    /// itself.
    pub writers: Writers,
    /// How thoroughly a place is probed.
    pub probe: ProbeLimits,
    /// Use a local folder even if it is on a file system whose guarantees are known to be too weak.
    pub allow_network_fs: bool,
    /// Writes the objects of a local folder; `None`: a plain `write`.
    pub files: Option<Arc<dyn PutFiles>>,
    /// Source of new ids.
    pub ids: Arc<dyn Ids>,
    /// Places where a test may stop the world.
    pub crash_points: Option<Arc<dyn CrashPoints>>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            retry: Retry::default(),
            upload_memory: upload_memory(),
            concurrency: 16,
            bandwidth: None,
            writers: Writers::default(),
            probe: ProbeLimits::default(),
            allow_network_fs: false,
            files: None,
            ids: Arc::new(TimeIds),
            crash_points: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_have_names() {
        assert_eq!("many".parse::<Writers>().unwrap(), Writers::default());
        assert_eq!("single".parse::<Writers>().unwrap(), Writers::Single);
        let error = "Single".parse::<Writers>().unwrap_err().to_string();
        assert!(error.contains("`many` or `single`"), "{error}");
    }

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
