//! Requests to the object store: retried where that is safe, bounded in memory, time and rate.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::options::Retry;

/// One permit stands for this many bytes, so that a semaphore's 32 bits suffice for any budget.
const UNIT: usize = 1024;

/// The object store with retries and budgets.
pub(crate) struct Io {
    store: Arc<dyn ObjectStore>,
    retry: Retry,
    gate: Arc<Semaphore>,
    units: u32,
    pace: Option<Pace>,
}

impl fmt::Debug for Io {
    /// The object store's own `Debug` may hold credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Io").field("retry", &self.retry).field("pace", &self.pace).finish()
    }
}

impl Io {
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        retry: Retry,
        memory: usize,
        bytes_per_second: Option<u64>,
    ) -> Self {
        let units = u32::try_from((memory / UNIT).max(1)).unwrap_or(u32::MAX >> 3);
        Self {
            store,
            retry,
            gate: Arc::new(Semaphore::new(units as usize)),
            units,
            pace: bytes_per_second.map(|rate| Pace { rate: rate.max(1), free: Mutex::default() }),
        }
    }

    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(crate) fn retry(&self) -> &Retry {
        &self.retry
    }

    /// Waits until `len` more bytes may be held in memory. An object beyond the whole budget waits
    /// until it is alone.
    pub(crate) async fn reserve(&self, len: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(len.div_ceil(UNIT)).unwrap_or(u32::MAX).clamp(1, self.units);
        let permit = Arc::clone(&self.gate).acquire_many_owned(units).await;
        permit.map_err(|e| Error::Refused(e.to_string()))
    }

    /// Writes an object whose key belongs to this writer alone: repeating that changes nothing.
    pub(crate) async fn put(&self, key: &Path, bytes: Bytes) -> Result<()> {
        if let Some(pace) = &self.pace {
            pace.wait(bytes.len()).await;
        }
        let put = || async { self.store.put(key, bytes.clone().into()).await.map(drop) };
        self.retrying("write", key, put).await
    }

    /// One try to create an object. The error tells nothing about whether it was created.
    pub(crate) async fn create_once(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        self.store.put_opts(key, bytes.into(), PutMode::Create.into()).await.map(drop)
    }

    /// One try to write an object.
    pub(crate) async fn put_once(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        self.store.put(key, bytes.into()).await.map(drop)
    }

    /// Reads a whole object of at most `max` bytes.
    pub(crate) async fn get(&self, key: &Path, max: u64) -> Result<Bytes> {
        let get = || async {
            let result = self.store.get(key).await?;
            match result.meta.size {
                size if size > max => Ok(Err(size)),
                size => whole(result, size).await.map(Ok),
            }
        };
        let bytes = self.retrying("read", key, get).await?;
        bytes.map_err(|size| Error::corrupt(key, format!("{size} bytes, {max} are expected")))
    }

    /// Reads a whole object and checks it, twice if need be: bytes may be damaged on their way, and a
    /// second copy tells whether they are damaged where they lie.
    pub(crate) async fn get_checked<T>(
        &self,
        key: &Path,
        max: u64,
        check: impl Fn(&Bytes) -> Result<T>,
    ) -> Result<T> {
        match check(&self.get(key, max).await?) {
            Err(Error::Corrupt { .. }) => check(&self.get(key, max).await?),
            other => other,
        }
    }

    /// Reads a range of an object. The caller has checked it against the object's length.
    pub(crate) async fn get_range(&self, key: &Path, range: Range<u64>) -> Result<Bytes> {
        let len = range.end - range.start;
        if len == 0 {
            return Ok(Bytes::new());
        }
        let get = || async {
            let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
            whole(self.store.get_opts(key, options).await?, len).await
        };
        self.retrying("read", key, get).await
    }

    pub(crate) async fn head(&self, key: &Path) -> Result<ObjectMeta> {
        self.retrying("look up", key, || self.store.head(key)).await
    }

    /// All objects below `prefix`, after `offset` if there is one, in no order.
    pub(crate) async fn list(
        &self,
        prefix: &Path,
        offset: Option<&Path>,
    ) -> Result<Vec<ObjectMeta>> {
        let list = || async {
            match offset {
                Some(offset) => self.store.list_with_offset(Some(prefix), offset),
                None => self.store.list(Some(prefix)),
            }
            .try_collect::<Vec<_>>()
            .await
        };
        match self.retrying("list", prefix, list).await {
            // A local folder that is not there yet holds nothing.
            Err(e) if e.is_missing() => Ok(Vec::new()),
            other => other,
        }
    }

    /// Deletes an object, or finds it gone.
    pub(crate) async fn delete(&self, key: &Path) -> Result<()> {
        match self.retrying("delete", key, || self.store.delete(key)).await {
            Err(e) if e.is_missing() => Ok(()),
            other => other,
        }
    }

    /// Repeats what may be repeated until it works, fails for good, or time is up.
    async fn retrying<T, F>(
        &self,
        action: &'static str,
        key: &Path,
        mut op: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let end = Instant::now() + self.retry.deadline;
        let late = |last: String| Error::Deadline {
            action,
            key: key.to_string(),
            limit: self.retry.deadline,
            last,
        };
        let mut last = String::from("no answer");
        for attempt in 0.. {
            let source = match tokio::time::timeout_at(end, op()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(object_store::Error::NotFound { .. })) => return Err(Error::missing(key)),
                Ok(Err(source)) => source,
                Err(_) => return Err(late(last)),
            };
            if is_permanent(&source) || attempt + 1 >= self.retry.attempts {
                return Err(Error::storage(action, key, source));
            }
            tracing::debug!(%key, attempt, error = %source, "could not {action}, trying again");
            last = source.to_string();
            let pause = self.retry.pause(attempt, jitter(key, attempt));
            if Instant::now() + pause >= end {
                return Err(late(last));
            }
            tokio::time::sleep(pause).await;
        }
        Err(late(last))
    }
}

/// The body, if it has the length that it should have: a connection that was cut may look like an
/// end.
async fn whole(result: GetResult, len: u64) -> object_store::Result<Bytes> {
    let size = result.meta.size;
    let bytes = result.bytes().await?;
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    let source = format!("{} of {len} bytes arrived; the object has {size}", bytes.len()).into();
    Err(object_store::Error::Generic { store: "short answer", source })
}

fn jitter(key: &Path, attempt: u32) -> u64 {
    let mixed = key.as_ref().bytes().fold(u64::from(attempt) + 1, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Whether trying again is pointless. That something is there already, or not as expected, is no
/// final answer: `object_store` makes this of any 409, which also means "somebody else is at it".
pub(crate) fn is_permanent(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    match error {
        E::Generic { source, .. } => {
            is_final_io(source.as_ref()) || is_final_status(&source.to_string())
        }
        E::JoinError { .. } | E::AlreadyExists { .. } | E::Precondition { .. } => false,
        _ => true,
    }
}

/// A full or read-only disk stays so while a save waits.
fn is_final_io(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind as K;
    let mut at = Some(error);
    while let Some(error) = at {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return matches!(
                io.kind(),
                K::StorageFull
                    | K::QuotaExceeded
                    | K::ReadOnlyFilesystem
                    | K::PermissionDenied
                    | K::FileTooLarge
                    | K::NotADirectory
            );
        }
        at = error.source();
    }
    false
}

/// An answer of 400 to 499 says that the request is wrong, but for those that ask to come again.
/// The text is all that `object_store` passes on; where it changes, we try again in vain.
fn is_final_status(text: &str) -> bool {
    let Some((_, after)) = text.split_once("non-2xx status code: ") else { return false };
    let status = after.get(..3).and_then(|digits| digits.parse::<u16>().ok());
    status.is_some_and(|s| (400..500).contains(&s) && !matches!(s, 408 | 409 | 412 | 425 | 429))
}

/// Spreads uploads over time.
#[derive(Debug)]
struct Pace {
    rate: u64,
    /// When the link is free again.
    free: Mutex<Option<Instant>>,
}

impl Pace {
    async fn wait(&self, len: usize) {
        let now = Instant::now();
        let start = {
            let mut free = self.free.lock().await;
            let start = free.map_or(now, |at| at.max(now));
            *free = Some(start + Duration::from_secs_f64(len as f64 / self.rate as f64));
            start
        };
        tokio::time::sleep_until(start).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    #[test]
    fn answers_that_will_not_change_are_not_asked_for_again() {
        for (status, permanent) in
            [(400, true), (403, true), (405, true), (409, false), (429, false), (503, false)]
        {
            let text = format!("Error: Server returned non-2xx status code: {status} X: body");
            assert_eq!(is_final_status(&text), permanent, "{status}");
        }
        let io = |kind| object_store::Error::Generic {
            store: "x",
            source: Box::new(std::io::Error::from(kind)),
        };
        assert!(is_permanent(&io(std::io::ErrorKind::StorageFull)));
        assert!(!is_permanent(&io(std::io::ErrorKind::TimedOut)));
    }

    #[tokio::test(start_paused = true)]
    async fn uploads_keep_to_the_rate() {
        let io = Io::new(Arc::new(InMemory::new()), Retry::default(), 1 << 20, Some(1000));
        let start = Instant::now();
        for i in 0..4 {
            io.put(&Path::from(format!("{i}")), Bytes::from(vec![0; 500])).await.unwrap();
        }
        assert_eq!(start.elapsed().as_millis() / 10, 150);
    }

    #[tokio::test]
    async fn what_is_larger_than_the_budget_goes_alone() {
        let io = Io::new(Arc::new(InMemory::new()), Retry::default(), 10 * UNIT, None);
        let small = io.reserve(1).await.unwrap();
        let all = io.reserve(1 << 30);
        tokio::pin!(all);
        assert!(futures::poll!(&mut all).is_pending());
        drop(small);
        let all = all.await.unwrap();
        let next = io.reserve(1);
        tokio::pin!(next);
        assert!(futures::poll!(&mut next).is_pending());
        drop(all);
        drop(next.await.unwrap());
    }
}
