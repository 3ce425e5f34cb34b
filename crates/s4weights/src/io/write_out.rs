//! Writing a file's pages to the disk while more of the file is still to come.
//!
//! Linux keeps what is written in memory, and starts writing it to the disk only after seconds, or when
//! much of the memory is full of it. So a file that is synced at its end would first be filled while the
//! disk is idle, and then be written while the processor is.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::parallel::lock;

/// Bytes that are passed to the disk together: few enough to stop soon even if the disk is slow.
const STEP: u64 = 8 << 20;
/// Shorter files are synced as fast without a thread of their own.
const LEAST: u64 = 2 * STEP;

/// Passes the pages of a file that is written from start to end to the disk, until it is dropped. A
/// thread of its own does that, because the system makes it wait while the disk has enough to do.
#[derive(Default)]
pub(super) struct WriteOut {
    /// Bytes that the file has.
    filled: u64,
    running: Option<Running>,
}

struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes that the file has.
    filled: u64,
    stop: bool,
}

impl WriteOut {
    /// For a file that has this many bytes.
    pub(super) fn after(bytes: usize) -> Self {
        Self { filled: bytes as u64, running: None }
    }

    /// The file has this many bytes more.
    pub(super) fn wrote(&mut self, file: &File, bytes: usize) {
        self.filled += bytes as u64;
        if self.running.is_none() && self.filled >= LEAST {
            // Without the thread, the sync at the end takes longer.
            let started = file
                .try_clone()
                .and_then(|file| Running::start(move |at| start_writing(&file, at)));
            self.running = started.ok();
        }
        if let Some(running) = &self.running {
            running.shared.change(|state| state.filled = self.filled);
        }
    }
}

impl Running {
    /// Starts a thread that calls `step` with where each step starts, once the file has all its bytes, until
    /// that fails.
    fn start(mut step: impl FnMut(u64) -> io::Result<()> + Send + 'static) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let work = move || {
            let mut at = 0;
            while own.wait_for(at + STEP) && step(at).is_ok() {
                at += STEP;
            }
        };
        let thread = std::thread::Builder::new().name("s4weights-disk".into()).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.change(|state| state.stop = true);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        self.changed.notify_one();
    }

    /// Waits until the file has this many bytes; `false` if the thread should end.
    fn wait_for(&self, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        while !state.stop && state.filled < bytes {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stop
    }
}

/// Starts writing the pages of one step to the disk. What fails there is reported by the next sync, too.
fn start_writing(file: &File, at: u64) -> io::Result<()> {
    let offset = |n: u64| libc::off64_t::try_from(n).map_err(io::Error::other);
    let (at, len) = (offset(at)?, offset(STEP)?);
    let flags = libc::SYNC_FILE_RANGE_WRITE;
    #[expect(unsafe_code, reason = "no library wraps this call")]
    // SAFETY: it is passed numbers only, and the file is open.
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), at, len, flags) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A thread, and the steps that it begins. Each ends when it may, as the function says.
    fn running(
        mut end: impl FnMut() -> io::Result<()> + Send + 'static,
    ) -> (Running, Receiver<u64>) {
        let (sender, steps) = channel();
        let step = move |at| {
            sender.send(at).unwrap();
            end()
        };
        (Running::start(step).unwrap(), steps)
    }

    #[test]
    fn whole_steps_are_passed_on_once_the_file_has_them() {
        let (running, steps) = running(|| Ok(()));
        for (filled, expected) in [
            (STEP - 1, vec![]),
            (STEP, vec![0]),
            (3 * STEP + 5, vec![STEP, 2 * STEP]),
            (4 * STEP - 1, vec![]),
            (4 * STEP + 1, vec![3 * STEP]),
        ] {
            running.shared.change(|state| state.filled = filled);
            for at in expected {
                assert_eq!(steps.recv().unwrap(), at, "{filled}");
            }
        }
        drop(running);
        assert!(steps.recv().is_err());
    }

    #[test]
    fn it_stops_after_the_step_that_has_begun() {
        let (go_on, wait) = channel();
        let (running, steps) = running(move || wait.recv().map_err(io::Error::other));
        running.shared.change(|state| state.filled = 100 * STEP);
        assert_eq!(steps.recv().unwrap(), 0);
        running.shared.change(|state| state.stop = true);
        go_on.send(()).unwrap();
        drop(running);
        assert!(steps.recv().is_err());
    }

    #[test]
    fn it_ends_where_the_system_cannot_do_it() {
        let (running, steps) = running(|| Err(io::ErrorKind::Unsupported.into()));
        running.shared.change(|state| state.filled = 3 * STEP);
        assert_eq!(steps.iter().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn the_system_takes_the_pages_of_any_file() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * STEP).unwrap();
        start_writing(&file, 0).unwrap();
        start_writing(&file, 2 * STEP).unwrap();
        assert!(start_writing(&file, u64::MAX).is_err());
        let mut write_out = WriteOut::after(5);
        write_out.wrote(&file, LEAST as usize - 6);
        assert!(write_out.running.is_none());
        write_out.wrote(&file, 1);
        assert!(write_out.running.is_some());
    }
}
