//! Runs native work for Python: reports its progress, stops it on Ctrl-C or when a progress function
//! raises, and turns a panic into an exception.
//!
//! Only Python's main thread receives signals. Local work runs on the calling thread, which checks for
//! them whenever it reports progress or waits. Where a server may keep the call waiting, the work runs on a
//! separate thread while the main thread checks for signals and calls the progress function. The work of a
//! thread that called [`give_way`] runs on a separate thread, too, at a lower priority: the Python thread,
//! which may hold the GIL, keeps its own.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use s4weights::{Interrupt, Progress, ProgressFn, Result};

use crate::errors::to_python;
use crate::{log, panics};

/// The interval at which Python is asked: attaching to the interpreter may have to wait for other
/// threads.
const INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    // The facade reports progress from the thread that called it. A progress function may itself
    // save or load: the inner call puts the outer one's watch aside.
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    static GIVES_WAY: Cell<bool> = const { Cell::new(false) };
    /// Number of this thread's calls that wait for Python's answer.
    static NESTING: Cell<u32> = const { Cell::new(0) };
}

/// Number of calls into native code that the calling thread is in. A progress function or a signal handler may be
/// called by one, which holds resources such as a device's memory.
#[pyfunction]
pub(crate) fn nesting() -> u32 {
    NESTING.get()
}

/// Added to the nice value of threads that give way.
#[cfg(target_os = "linux")]
const NICER: i32 = 10;

/// Lowers the priority of all native work that this Python thread starts from now on (on Linux), so that a training loop
/// and its data loaders get the processor first.
#[pyfunction]
pub(crate) fn give_way() {
    GIVES_WAY.set(cfg!(target_os = "linux"));
}

/// Lowers the priority of the calling thread and of threads that it starts: on Linux each has its own.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Ok(nice) = rustix::process::getpriority_process(None) {
        // If this fails, the work runs at the usual priority.
        let _ = rustix::process::setpriority_process(None, nice + NICER);
    }
}

/// The progress function to pass to the facade. It uses the watch of the call that runs on this thread.
pub(crate) fn progress() -> ProgressFn {
    Arc::new(report)
}

/// Runs local work detached from the interpreter, under a watch.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    callback: Option<Py<PyAny>>,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    run(py, callback, false, work)
}

/// Runs the calls of one file or store.
#[derive(Clone, Copy)]
pub(crate) struct Watcher {
    /// Whether the file or store is on another machine: work may have to wait for a server.
    is_remote: bool,
}

impl Watcher {
    /// For a URL or path. `None` means bytes, or a stream of the caller's, which no other thread may use.
    pub(crate) fn of(url: Option<&str>) -> Self {
        let local =
            |scheme: &str| ["file", "memory"].iter().any(|s| scheme.eq_ignore_ascii_case(s));
        let scheme =
            url.filter(|url| s4weights::is_url(url)).and_then(|url| url.split("://").next());
        Self { is_remote: scheme.is_some_and(|scheme| !local(scheme.trim_start())) }
    }

    /// As [`watched`].
    pub(crate) fn run<T: Send>(
        self,
        py: Python<'_>,
        callback: Option<Py<PyAny>>,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, callback, self.is_remote && is_main_thread(py)?, work)
    }
}

/// Runs work that needs no watch, detached from the interpreter.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let call = log::Call::begin(py, false)?;
    let outcome = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    call.end(outcome.map_err(|p| panics::to_python(py, &*p)))
}

fn run<T: Send>(
    py: Python<'_>,
    callback: Option<Py<PyAny>>,
    on_thread: bool,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let call = log::Call::begin(py, true)?;
    let mut asker = Asker { callback, raised: None, interrupt: Interrupt::polling(poll) };
    let gives_way = GIVES_WAY.get();
    let work = move || {
        if gives_way {
            lower_priority();
        }
        work()
    };
    let outcome = match on_thread || gives_way {
        true => py.detach(|| run_on_thread(&mut asker, work)),
        false => {
            let (back, outcome) = py.detach(|| run_on_caller(asker, work));
            asker = back;
            outcome
        }
    };
    call.end(match (asker.raised, outcome) {
        (_, Err(panic)) => Err(panics::to_python(py, &*panic)),
        (Some(raised), _) => Err(raised),
        (None, Ok(result)) => result.map_err(|e| to_python(py, e)),
    })
}

/// Asks Python whether to go on.
struct Asker {
    callback: Option<Py<PyAny>>,
    /// The exception that Python raised. Python is not asked again after that.
    raised: Option<PyErr>,
    /// Stops all threads of the call.
    interrupt: Interrupt,
}

impl Asker {
    fn ask(&mut self, progress: Option<Progress>) -> bool {
        if self.raised.is_some() {
            return false;
        }
        NESTING.set(NESTING.get() + 1);
        // `None` if the interpreter is shutting down: nobody is left to stop the work.
        let outcome = Python::try_attach(|py| {
            log::flush(py)?;
            match (&self.callback, progress) {
                // 0 tells of no progress, but lets the function stop work that waits for a server.
                (Some(callback), p) => callback.call1(py, (p.map_or(0, |p| p.done),)).map(drop),
                (None, _) => Ok(()),
            }
        });
        NESTING.set(NESTING.get() - 1);
        if let Some(Err(raised)) = outcome {
            self.raised = Some(raised);
            self.interrupt.stop();
        }
        self.raised.is_none()
    }
}

/// A question to the calling thread, and where to send the answer.
type Question = (Progress, SyncSender<bool>);

/// The state of one call into native code, on the thread that does the work.
struct Watch {
    asked: Instant,
    has_callback: bool,
    stopped: bool,
    ask: Ask,
}

/// The thread that asks Python.
enum Ask {
    /// This thread.
    Direct(Box<Asker>),
    /// The calling thread.
    Forwarded(Sender<Question>),
}

impl Watch {
    fn new(has_callback: bool, ask: Ask) -> Self {
        Self { asked: Instant::now(), has_callback, stopped: false, ask }
    }

    fn is_due(&mut self, progress: Progress) -> bool {
        let last = self.has_callback && progress.done == progress.total;
        if !(last || self.asked.elapsed() >= INTERVAL) {
            return false;
        }
        self.asked = Instant::now();
        true
    }
}

/// Whether to go on.
fn report(progress: Progress) -> bool {
    // Taken out while Python runs, which may call native work on this very thread.
    let Some(mut watch) = WATCH.take() else { return true };
    if !watch.stopped && watch.is_due(progress) {
        let goes_on = match &mut watch.ask {
            Ask::Direct(asker) => asker.ask(Some(progress)),
            // The main thread checks for signals.
            Ask::Forwarded(_) if !watch.has_callback => true,
            Ask::Forwarded(questions) => {
                let (answer, answered) = sync_channel(1);
                let asked = questions.send((progress, answer)).is_ok();
                !asked || answered.recv().unwrap_or(true)
            }
        };
        watch.stopped = !goes_on;
    }
    let goes_on = !watch.stopped;
    WATCH.set(Some(watch));
    goes_on
}

/// Whether to go on waiting.
fn poll() -> bool {
    let Some(mut watch) = WATCH.take() else { return true };
    if let (false, Ask::Direct(asker)) = (watch.stopped, &mut watch.ask) {
        watch.stopped = !asker.ask(None);
    }
    let goes_on = !watch.stopped;
    WATCH.set(Some(watch));
    goes_on
}

/// Runs the work on this thread.
fn run_on_caller<T>(
    asker: Asker,
    work: impl FnOnce() -> Result<T>,
) -> (Asker, thread::Result<Result<T>>) {
    let interrupt = asker.interrupt.clone();
    let watch = Watch::new(asker.callback.is_some(), Ask::Direct(Box::new(asker)));
    let outer = WATCH.replace(Some(watch));
    let outcome = catch_unwind(AssertUnwindSafe(|| interrupt.watch(work)));
    let back = match WATCH.replace(outer).map(|w| w.ask) {
        Some(Ask::Direct(asker)) => *asker,
        _ => Asker { callback: None, raised: None, interrupt },
    };
    (back, outcome)
}

/// Runs the work on another thread while this one asks Python.
fn run_on_thread<T: Send>(
    asker: &mut Asker,
    work: impl FnOnce() -> Result<T> + Send,
) -> thread::Result<Result<T>> {
    let (questions, asked) = channel::<Question>();
    let has_callback = asker.callback.is_some();
    let interrupt = asker.interrupt.clone();
    let job = move || {
        WATCH.set(Some(Watch::new(has_callback, Ask::Forwarded(questions))));
        let outcome = catch_unwind(AssertUnwindSafe(|| interrupt.watch(work)));
        // This closes the channel, which tells the other thread that this one is done.
        WATCH.set(None);
        outcome
    };
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("s4weights-call".into());
        let worker = match worker.spawn_scoped(scope, job) {
            Ok(worker) => worker,
            Err(e) => {
                let e =
                    s4weights::Error::Io { target: "threads".into(), action: "start", source: e };
                return Ok(Err(e));
            }
        };
        loop {
            match asked.recv_timeout(INTERVAL) {
                Ok((progress, answer)) => {
                    // Cannot fail: the worker waits for the answer.
                    let _ = answer.send(asker.ask(Some(progress)));
                }
                Err(RecvTimeoutError::Timeout) => {
                    asker.ask(None);
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        worker.join().and_then(|outcome| outcome)
    })
}

/// Whether signals are handled on this thread.
fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    main.eq(threading.call_method0("get_ident")?)
}
