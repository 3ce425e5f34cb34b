//! Threads for one call: made when it starts, gone when it ends, so that nothing outlives a fork.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};
use crate::interrupt;

/// As many of `threads` threads as there is work for, at least one.
pub(crate) fn worth(threads: usize, work: u64) -> usize {
    threads.min(usize::try_from(work).unwrap_or(usize::MAX)).max(1)
}

/// A pool of `threads` threads; `None` for one, since the caller's own thread does the work. An
/// interrupt of the caller stops them, too.
pub(crate) fn pool(threads: usize) -> Result<Option<ThreadPool>> {
    if threads <= 1 {
        return Ok(None);
    }
    let interrupt = interrupt::current();
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("s4weights-{i}"))
        .start_handler(move |_| interrupt::adopt(interrupt.clone()))
        .build()
        .map_err(|e| Error::io("threads", "start", std::io::Error::other(e)))?;
    Ok(Some(pool))
}

/// Locks a mutex. What it guards is consistent even if a thread that held the lock panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
