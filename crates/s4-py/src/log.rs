//! Passes what the native crates log on to Python's `logging`.
//!
//! Events may come from any thread, with locks held that Python code could want, so they are queued:
//! a call delivers them whenever it asks Python something, and when it ends. Events between calls are
//! delivered by a thread that is started for them. No event waits for the interpreter.
//!
//! This is a subscriber of its own rather than a layer over a span registry: the crates have no spans,
//! and other libraries' events are not wanted.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// The most events that are queued; further ones are only counted.
const WAITING: usize = 1000;
/// The most bytes of a message: it may contain names of any length from untrusted files.
const LONGEST: usize = 4096;

static QUEUE: Mutex<VecDeque<Record>> = Mutex::new(VecDeque::new());
static LOST: AtomicUsize = AtomicUsize::new(0);
/// The lowest level that is wanted, as Python numbers levels.
static LEVEL: AtomicUsize = AtomicUsize::new(WARNING);
/// Running calls that will deliver queued events.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Whether a thread is delivering events that came between calls.
static FLUSHING: AtomicBool = AtomicBool::new(false);
/// Whether the process is exiting: no thread may attach to the interpreter any more.
static CLOSED: AtomicBool = AtomicBool::new(false);

const WARNING: usize = 30;

struct Record {
    level: usize,
    target: &'static str,
    message: String,
}

/// Takes the events of this project's crates.
struct Bridge;

/// Installs the subscriber, unless the program already has one.
pub(crate) fn install() {
    let _ = tracing::subscriber::set_global_default(Bridge);
}

/// A call into native code: events logged during it are delivered when it ends.
pub(crate) struct Call<'py> {
    py: Python<'py>,
    /// Whether the call flushes from time to time, so that no other thread has to.
    flushes: bool,
}

impl<'py> Call<'py> {
    /// # Errors
    /// The exception that Python raises when it is asked for the level: a signal handler may run.
    pub(crate) fn begin(py: Python<'py>, flushes: bool) -> PyResult<Self> {
        // Cached: looking up the logger takes longer than decoding a small tensor.
        static LOGGER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let logger = LOGGER.get_or_try_init(py, || {
            let get = py.import("logging")?.getattr("getLogger")?;
            get.call1(("s4weights",)).map(Bound::unbind)
        })?;
        let level = logger.call_method0(py, intern!(py, "getEffectiveLevel"))?;
        LEVEL.store(level.extract::<usize>(py).unwrap_or(WARNING), Ordering::Relaxed);
        CALLS.fetch_add(usize::from(flushes), Ordering::Relaxed);
        Ok(Self { py, flushes })
    }

    /// Returns the call's outcome, unless [`flush`] raises: then that, with an earlier error as its context.
    pub(crate) fn end<T>(self, outcome: PyResult<T>) -> PyResult<T> {
        let py = self.py;
        drop(self);
        match flush(py) {
            Ok(()) => outcome,
            Err(raised) => Err(in_context(py, outcome.err(), raised)),
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        CALLS.fetch_sub(usize::from(self.flushes), Ordering::Relaxed);
    }
}

/// Handles signals and delivers queued events. An exception of a logging handler is printed, as `logging`
/// itself does.
///
/// # Errors
/// The exception that a signal handler raised, before or during the delivery, and any that is not an `Exception`.
pub(crate) fn flush(py: Python<'_>) -> PyResult<()> {
    // First: otherwise the handlers of pending signals run in `logging`, which catches what they raise.
    let mut raised = py.check_signals().err();
    let Some(mut queue) = queue() else { return raised.map_or(Ok(()), Err) };
    let records = std::mem::take(&mut *queue);
    // Handlers may call native code, which logs.
    drop(queue);
    let lost = LOST.swap(0, Ordering::Relaxed);
    let more = (lost > 0).then(|| Record {
        level: WARNING,
        target: "s4weights",
        message: format!("{lost} more messages were dropped"),
    });
    // Found before the delivery: a signal handler may put another one in its own place.
    let mut on_signal = None;
    for record in records.into_iter().chain(more) {
        let on_signal = on_signal.get_or_insert_with(|| signal_code(py).unwrap_or_default());
        let Err(e) = send(py, record) else { continue };
        if e.is_instance_of::<PyException>(py) && !passes_through(py, &e, on_signal) {
            e.write_unraisable(py, None);
        } else {
            raised = Some(in_context(py, raised, e));
        }
    }
    raised.map_or(Ok(()), Err)
}

fn send(py: Python<'_>, record: Record) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (logger_of(record.target),))?;
    logger.call_method1("log", (record.level, "%s", record.message)).map(drop)
}

/// The code of the Python functions that handle signals. Runs no Python code, unlike the functions of `signal`.
fn signal_code(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let signal = py.import("_signal")?;
    let mut all = vec![];
    for number in signal.call_method0("valid_signals")?.try_iter()? {
        let handler = signal.call_method1("getsignal", (number?,))?;
        let code = |f: Bound<'_, PyAny>| f.getattr("__code__").map(Bound::unbind);
        // A function or method, a `functools.partial` of one, or an object with `__call__`.
        let found = code(handler.clone())
            .or_else(|_| code(handler.getattr("func")?))
            .or_else(|_| code(handler.getattr("__call__")?));
        all.extend(found.map(|code| code.into_bound(py)));
    }
    Ok(all)
}

/// Whether an exception was raised in a function with one of these codes, or in one that it called.
fn passes_through(py: Python<'_>, raised: &PyErr, codes: &[Bound<'_, PyAny>]) -> bool {
    let mut at = raised.traceback(py).map(Bound::into_any);
    while let Some(entry) = at {
        let code = entry.getattr("tb_frame").and_then(|frame| frame.getattr("f_code"));
        if code.is_ok_and(|code| codes.iter().any(|c| c.is(&code))) {
            return true;
        }
        at = entry.getattr("tb_next").ok().filter(|next| !next.is_none());
    }
    false
}

/// An exception as one that was raised while `earlier` was handled.
fn in_context(py: Python<'_>, earlier: Option<PyErr>, raised: PyErr) -> PyErr {
    // A signal handler may raise the same object twice.
    if let Some(earlier) = earlier.filter(|e| !e.value(py).is(raised.value(py))) {
        raised.set_context(py, Some(earlier));
    }
    raised
}

/// Called before the interpreter exits: delivers queued events, and starts no more threads.
#[pyfunction]
pub(crate) fn close_log(py: Python<'_>) -> PyResult<()> {
    CLOSED.store(true, Ordering::SeqCst);
    py.detach(|| {
        while FLUSHING.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    });
    flush(py)
}

/// Called in the child after a fork, where the parent's threads and calls do not exist: drops log records
/// that are the parent's to deliver.
#[pyfunction]
pub(crate) fn reset_log() {
    CALLS.store(0, Ordering::Relaxed);
    FLUSHING.store(false, Ordering::Relaxed);
    if let Some(mut queue) = queue() {
        queue.clear();
    }
}

/// The queue; `None` if it stays locked, which in a forked child may be forever.
fn queue() -> Option<MutexGuard<'static, VecDeque<Record>>> {
    for _ in 0..1000 {
        match QUEUE.try_lock() {
            Ok(queue) => return Some(queue),
            Err(TryLockError::Poisoned(e)) => return Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => thread::yield_now(),
        }
    }
    None
}

/// `s4weights.store.save` for `s4weights::store::save`, and `s4weights.store` for `s4_store`.
fn logger_of(target: &str) -> String {
    let (name, path) = target.split_once("::").unwrap_or((target, ""));
    let mut logger = match name.strip_prefix("s4_") {
        Some(part) => format!("s4weights.{}", part.replace('_', "-")),
        None => "s4weights".to_owned(),
    };
    for part in path.split("::").filter(|p| !p.is_empty()) {
        logger.push('.');
        logger.push_str(part);
    }
    logger
}

fn number_of(level: &Level) -> usize {
    match *level {
        Level::ERROR => 40,
        Level::WARN => WARNING,
        Level::INFO => 20,
        _ => 10,
    }
}

fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.is_event()
        && (metadata.target().starts_with("s4_") || metadata.target().starts_with("s4weights"))
        && *metadata.level() != Level::TRACE
}

/// Starts a thread that delivers queued events, if no running call will.
fn flush_soon() {
    if CALLS.load(Ordering::Relaxed) > 0 || FLUSHING.swap(true, Ordering::SeqCst) {
        return;
    }
    let work = || {
        if !CLOSED.load(Ordering::SeqCst) {
            Python::try_attach(|py| flush(py).unwrap_or_else(|e| e.write_unraisable(py, None)));
        }
        FLUSHING.store(false, Ordering::SeqCst);
    };
    let thread = thread::Builder::new().name("s4weights-log".into());
    if thread.spawn(work).is_err() {
        FLUSHING.store(false, Ordering::SeqCst);
    }
}

impl Subscriber for Bridge {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if is_ours(metadata) { Interest::sometimes() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_ours(metadata) && number_of(metadata.level()) >= LEVEL.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let record = Record {
            level: number_of(event.metadata().level()),
            target: event.metadata().target(),
            message: text.finish(),
        };
        match queue() {
            Some(mut queue) if queue.len() < WAITING => queue.push_back(record),
            _ => {
                LOST.fetch_add(1, Ordering::Relaxed);
            }
        }
        flush_soon();
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// An event as text: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn finish(mut self) -> String {
        if !self.fields.is_empty() {
            let _ = write!(self.message, " ({})", self.fields);
        }
        if self.message.len() > LONGEST {
            let end = (0..=LONGEST).rev().find(|&i| self.message.is_char_boundary(i));
            self.message.truncate(end.unwrap_or(0));
            self.message.push_str(" [cut]");
        }
        self.message
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => {
                let comma = if self.fields.is_empty() { "" } else { ", " };
                write!(self.fields, "{comma}{name}: {value:?}")
            }
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
