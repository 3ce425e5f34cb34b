//! Lets Python follow native work and stop it: by Ctrl-C, or by what a progress function raises.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use s4weights::{Progress, ProgressFn};

use crate::errors::to_python;

/// How often Python is asked: attaching to the interpreter may have to wait for other threads.
const INTERVAL: Duration = Duration::from_millis(50);

/// One call into native work.
struct Watch {
    callback: Option<Py<PyAny>>,
    asked: Instant,
    raised: Option<PyErr>,
}

thread_local! {
    // The facade reports progress from the thread that called it. A progress function may itself
    // save or load: the inner call puts the outer one's watch aside.
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// What the facade is to call: finds the watch of the call that is under way on this thread.
pub(crate) fn progress() -> ProgressFn {
    Arc::new(ask)
}

/// Runs work detached from the interpreter, under a watch.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    callback: Option<Py<PyAny>>,
    work: impl FnOnce() -> s4weights::Result<T> + Send,
) -> PyResult<T> {
    let watch = Watch { callback, asked: Instant::now(), raised: None };
    let outer = WATCH.replace(Some(watch));
    let result = py.detach(work);
    let watch = WATCH.replace(outer);
    match (watch.and_then(|w| w.raised), result) {
        (Some(raised), _) => Err(raised),
        (None, result) => result.map_err(|e| to_python(py, e)),
    }
}

/// Whether to go on.
fn ask(progress: Progress) -> bool {
    if !WATCH.with_borrow_mut(|w| w.as_mut().is_some_and(|w| w.is_due(progress))) {
        return true;
    }
    // Without an interpreter, which is shutting down then, nobody wants to stop the work.
    let outcome = Python::try_attach(|py| {
        let callback = WATCH.with_borrow(|w| Some(w.as_ref()?.callback.as_ref()?.clone_ref(py)));
        py.check_signals()?;
        callback.map_or(Ok(()), |c| c.call1(py, (progress.done,)).map(drop))
    });
    let Some(Err(raised)) = outcome else { return true };
    WATCH.with_borrow_mut(|w| {
        if let Some(w) = w {
            w.raised = Some(raised);
        }
    });
    false
}

impl Watch {
    fn is_due(&mut self, progress: Progress) -> bool {
        let last = self.callback.is_some() && progress.done == progress.total;
        if self.raised.is_some() || !(last || self.asked.elapsed() >= INTERVAL) {
            return false;
        }
        self.asked = Instant::now();
        true
    }
}
