//! Threads for one call: made when it starts, gone when it ends, so that nothing outlives a fork. Also how many there
//! are, and their vector instructions.

use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

use rayon::{ThreadPool, ThreadPoolBuilder};
use s4_planes::Simd;

use crate::error::{Error, Result};
use crate::interrupt;

/// The number of threads: as requested, or the cores of the machine.
pub(crate) fn thread_count(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into)).max(1)
}

/// The vector instructions: as requested, or the best of the machine.
pub(crate) fn simd(asked: Option<Simd>) -> Result<Simd> {
    match asked {
        None => Ok(Simd::detect()),
        Some(s) if s.is_available() => Ok(s),
        Some(s) => Err(Error::Argument(format!("this machine does not support {s} instructions"))),
    }
}

/// As many of `threads` threads as there is work for, at least one.
pub(crate) fn worth(threads: usize, work: u64) -> usize {
    threads.min(usize::try_from(work).unwrap_or(usize::MAX)).max(1)
}

/// Connections that it takes to use a fast network: each transfers some 100 MB/s.
pub(crate) const CONNECTIONS: usize = 32;

/// The size of the pieces, at most `most` bytes, in which `values` bytes are uploaded over that many connections. They
/// are no smaller than `least`.
pub(crate) fn upload_size(values: u64, least: usize, most: usize) -> usize {
    let share = usize::try_from(values / CONNECTIONS as u64).unwrap_or(usize::MAX);
    share.max(least).min(most)
}

/// Threads that the requests of a file or a store run on. Most of the time they wait, but they encrypt and sign
/// what is uploaded.
pub(crate) fn request_threads() -> usize {
    (thread_count(None) / 4).clamp(2, 8)
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

/// Threads that plan, encode and close tensors.
pub(crate) struct Pools {
    pub(crate) host: Option<ThreadPool>,
    pub(crate) devices: Option<ThreadPool>,
}

impl Pools {
    /// Those for tensors on devices, or on the host; `None`: the caller's thread does all of it.
    pub(crate) fn of(&self, on_device: bool) -> Option<&ThreadPool> {
        if on_device { self.devices.as_ref() } else { self.host.as_ref() }
    }
}

/// Starts a thread. An interrupt of the caller stops it, too.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let interrupt = interrupt::current();
    scope.spawn(move || {
        interrupt::adopt(interrupt);
        work()
    })
}

/// Waits for a thread and returns its result. Panics if the thread did.
pub(crate) fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Locks a mutex. What it guards is consistent even if a thread that held the lock panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
