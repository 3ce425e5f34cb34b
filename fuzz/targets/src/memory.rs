//! Counts what a target allocates, and bounds it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// What reading may take besides four times its input and the bytes that were asked for.
const ALLOWANCE: usize = 64 << 20;

/// The system's allocator, with counting. A program that runs targets makes it its global
/// allocator; in a program that does not, nothing is bounded.
#[derive(Debug)]
pub struct Counting;

fn add(bytes: usize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        add(new_size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

/// Runs `work` on `input` bytes, with `asked` bytes of values asked for.
///
/// # Panics
/// If more was allocated at any time than 64 MiB, four times the input, and what was asked for.
pub(crate) fn bounded<T>(input: usize, asked: usize, work: impl FnOnce() -> T) -> T {
    let watch = Watch::start(input, asked);
    let out = work();
    watch.stop();
    out
}

/// As [`bounded`], for asynchronous work.
pub(crate) async fn bounded_async<T>(input: usize, work: impl Future<Output = T>) -> T {
    let watch = Watch::start(input, 0);
    let out = work.await;
    watch.stop();
    out
}

/// A period during which allocations are counted. One at a time: the counts are of the whole
/// process.
struct Watch {
    before: usize,
    input: usize,
    asked: usize,
    _one: MutexGuard<'static, ()>,
}

impl Watch {
    fn start(input: usize, asked: usize) -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(|e| e.into_inner());
        let before = NOW.load(Relaxed);
        PEAK.store(before, Relaxed);
        Self { before, input, asked, _one: one }
    }

    fn stop(self) {
        let Self { before, input, asked, .. } = self;
        let taken = PEAK.load(Relaxed).saturating_sub(before);
        let allowed = ALLOWANCE + 4 * input + asked;
        assert!(
            taken <= allowed,
            "{taken} bytes were allocated for {input} of input and {asked} asked for; {allowed} are \
             allowed"
        );
    }
}
