//! Stops a waiting call: a flag that every thread of the call checks.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use tokio::runtime::Runtime;

use crate::error::{Error, Result};

/// How often a waiting thread looks at the flag.
pub(crate) const POLL: Duration = Duration::from_millis(50);

thread_local! {
    static CURRENT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Lets one thread cancel the calls of another, for example on Ctrl-C. Clones share one flag, which is
/// never cleared.
///
/// A call that is stopped returns [`Error::Cancelled`] within a fraction of a second, even while it
/// waits for a server that never answers. It leaves no partial result: there is no file, and a
/// checkpoint is listed whole or not at all.
///
/// ```
/// use s4weights::Interrupt;
///
/// let interrupt = Interrupt::default();
/// interrupt.stop();
/// let opened = interrupt.watch(|| s4weights::store::CheckpointStore::open(
///     "runs/a", &Default::default(), Default::default(),
/// ));
/// assert!(matches!(opened, Err(s4weights::Error::Cancelled)));
/// ```
#[derive(Clone, Default)]
pub struct Interrupt(Arc<Inner>);

#[derive(Default)]
struct Inner {
    stopped: AtomicBool,
    poll: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

impl Interrupt {
    /// An interrupt that is polled: every waiting thread calls `poll` about every 50 ms, and `false`
    /// cancels the call.
    pub fn polling(poll: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner { stopped: AtomicBool::new(false), poll: Some(Box::new(poll)) }))
    }

    /// Cancels all watched calls, present and future.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether it was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Relaxed)
    }

    fn poll(&self) -> bool {
        if !self.is_stopped() && self.0.poll.as_ref().is_some_and(|poll| !poll()) {
            self.stop();
        }
        self.is_stopped()
    }

    /// Runs `work` on this thread so that it can be stopped, together with the threads that it
    /// starts.
    pub fn watch<T>(&self, work: impl FnOnce() -> T) -> T {
        /// Restores the interrupt that was set before, even if the work panics.
        struct Restore(Option<Interrupt>);
        impl Drop for Restore {
            fn drop(&mut self) {
                adopt(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        work()
    }
}

/// The interrupt of this thread's work, for threads that work for it to adopt.
pub(crate) fn current() -> Option<Interrupt> {
    CURRENT.with_borrow(Clone::clone)
}

/// Makes an interrupt, that of another thread, stop this thread's work, too.
pub(crate) fn adopt(interrupt: Option<Interrupt>) {
    CURRENT.set(interrupt);
}

/// Whether this thread's work must stop.
pub(crate) fn is_stopped() -> bool {
    CURRENT.with_borrow(|i| i.as_ref().is_some_and(Interrupt::is_stopped))
}

/// `Cancelled` if this thread's work must stop.
pub(crate) fn check() -> Result<()> {
    if is_stopped() { Err(Error::Cancelled) } else { Ok(()) }
}

/// Whether this thread, which is waiting, must stop. May call the interrupt's `poll`.
pub(crate) fn is_stopped_now() -> bool {
    // Cloned first: `poll` may itself make calls that are watched.
    current().is_some_and(|interrupt| interrupt.poll())
}

/// Runs a future to its end on a runtime that only this thread uses, unless it is stopped before.
pub(crate) fn block_on<T>(runtime: &Runtime, work: impl Future<Output = T>) -> Result<T> {
    runtime.block_on(async {
        let mut work = std::pin::pin!(work);
        check()?;
        loop {
            if let Ok(done) = tokio::time::timeout(POLL, &mut work).await {
                return Ok(done);
            }
            if is_stopped_now() {
                return Err(Error::Cancelled);
            }
        }
    })
}

/// Locks a mutex that may be held for as long as a call lasts.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(e)) => return Ok(e.into_inner()),
            Err(TryLockError::WouldBlock) if is_stopped_now() => return Err(Error::Cancelled),
            Err(TryLockError::WouldBlock) => std::thread::sleep(POLL / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn threads_of_a_pool_are_stopped_with_the_call_that_made_it() {
        let interrupt = Interrupt::default();
        let pool = interrupt.watch(|| crate::parallel::pool(2)).unwrap().unwrap();
        assert!(!pool.install(is_stopped));
        interrupt.stop();
        assert!(pool.install(is_stopped) && !is_stopped());
        assert!(interrupt.watch(is_stopped));
    }

    #[test]
    fn what_waits_is_stopped() {
        let interrupt = Interrupt::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let held = Mutex::new(());
        let _held = held.lock().unwrap();
        let start = Instant::now();
        let wait = || block_on(&runtime, std::future::pending::<()>());
        std::thread::scope(|s| {
            let waiting = s.spawn(|| interrupt.watch(wait));
            let locking = s.spawn(|| interrupt.watch(|| lock(&held).map(drop)));
            std::thread::sleep(POLL);
            interrupt.stop();
            assert!(matches!(waiting.join().unwrap(), Err(Error::Cancelled)));
            assert!(matches!(locking.join().unwrap(), Err(Error::Cancelled)));
        });
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn who_waits_asks() {
        let asked = Arc::new(AtomicBool::new(false));
        let note = Arc::clone(&asked);
        let interrupt = Interrupt::polling(move || note.swap(true, Ordering::Relaxed));
        let held = Mutex::new(());
        let _held = held.lock().unwrap();
        let outcome = interrupt.watch(|| lock(&held).map(drop));
        assert!(matches!(outcome, Err(Error::Cancelled)));
        assert!(asked.load(Ordering::Relaxed) && interrupt.is_stopped());
    }

    #[test]
    fn a_panic_ends_the_watch() {
        let interrupt = Interrupt::default();
        interrupt.stop();
        let watch = || interrupt.watch(|| -> () { panic!("on purpose") });
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(watch)).is_err());
        assert!(!is_stopped());
    }
}
