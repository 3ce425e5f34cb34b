//! Stops a command on a signal, so that nothing half-written is left behind.

#[cfg(unix)]
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
#[cfg(unix)]
use std::task::Poll;
use std::time::Duration;

use s4weights::Interrupt;
use tokio::runtime::Builder;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use crate::visible;

/// How long a command may take to stop and to remove what it has half written.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shells add this to a signal's number to make an exit code.
const SIGNALLED: u8 = 128;

/// The signals that end the process: INT, TERM and HUP; elsewhere than on Unix, Ctrl-C.
pub(crate) struct Signals {
    interrupt: Interrupt,
    /// The number of the signal that came; 0: none.
    came: Arc<AtomicU8>,
}

impl Signals {
    /// From now on, the first signal stops what [`Signals::watch`] runs. If that takes too long, or another
    /// signal comes, the process ends.
    pub(crate) fn new() -> io::Result<Self> {
        let (interrupt, came) = (Interrupt::default(), Arc::new(AtomicU8::new(0)));
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let mut incoming = {
            let _context = runtime.enter();
            Incoming::new()?
        };
        let (stop, note) = (interrupt.clone(), Arc::clone(&came));
        std::thread::Builder::new().name("s4w-signals".into()).spawn(move || {
            let number = runtime.block_on(incoming.next());
            note.store(number, Ordering::Relaxed);
            stop.stop();
            // Either way, the command has not stopped.
            let _ = runtime.block_on(async { timeout(PATIENCE, incoming.next()).await });
            visible::tell("interrupted before the cleanup was done");
            std::process::exit(i32::from(SIGNALLED + number));
        })?;
        Ok(Self { interrupt, came })
    }

    /// Runs work that a signal stops.
    pub(crate) fn watch<T>(&self, work: impl FnOnce() -> T) -> T {
        self.interrupt.watch(work)
    }

    /// The exit code of a process that a signal stopped; `None` if none came.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        let number = self.came.load(Ordering::Relaxed);
        (number > 0).then_some(SIGNALLED + number)
    }
}

/// The signals that end the process, as they arrive, each with its number.
#[cfg(unix)]
struct Incoming(Vec<(u8, Signal)>);

#[cfg(unix)]
impl Incoming {
    fn new() -> io::Result<Self> {
        let ignored = ignored();
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let mut signals = vec![];
        for kind in kinds {
            let number = kind.as_raw_value();
            if ignored >> (number - 1) & 1 == 0 {
                signals.push((u8::try_from(number).unwrap_or(0), signal(kind)?));
            }
        }
        Ok(Self(signals))
    }

    /// Waits for the next signal; returns its number.
    async fn next(&mut self) -> u8 {
        poll_fn(|cx| {
            let come = |(number, signal): &mut (u8, Signal)| {
                signal.poll_recv(cx).is_ready().then_some(*number)
            };
            self.0.iter_mut().find_map(come).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// The signals that the process ignores, a bit for each: with `nohup`, HUP must stay without effect.
#[cfg(unix)]
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// The signals that end the process, as they arrive: Ctrl-C alone.
#[cfg(not(unix))]
struct Incoming;

#[cfg(not(unix))]
impl Incoming {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    /// Waits for Ctrl-C; returns the number of INT.
    async fn next(&mut self) -> u8 {
        match tokio::signal::ctrl_c().await {
            Ok(()) => 2,
            Err(_) => std::future::pending().await,
        }
    }
}
