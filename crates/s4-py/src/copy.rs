//! Copies host memory, on several threads: the caller of a background save waits for this.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::reader::buffers;
use crate::watch::detached;

/// Bytes that a thread copies at a time.
const PART: usize = 8 << 20;

/// Copies host memory on several threads. Each item is a destination address, a source address and a size in
/// bytes. `threads` defaults to the number of cores.
#[pyfunction]
#[pyo3(signature = (items, threads))]
pub(crate) fn copy_memory(
    py: Python<'_>,
    items: Vec<(usize, usize, usize)>,
    threads: Option<usize>,
) -> PyResult<()> {
    let targets: Vec<_> = items.iter().map(|&(to, _, nbytes)| (0, to, nbytes)).collect();
    // SAFETY: The caller, the package's own Python part, passes the addresses of a buffer that it
    // owns, keeps alive during the call and shows to no one else.
    let targets = unsafe { buffers(&targets)? };
    let mut parts = vec![];
    for ((_, to), &(_, from, nbytes)) in targets.into_iter().zip(&items) {
        if nbytes == 0 {
            continue;
        }
        if from == 0 {
            return Err(PyValueError::new_err("a source has no address"));
        }
        let start: *const u8 = std::ptr::with_exposed_provenance(from);
        // SAFETY: The caller passes the address and size of a storage that it keeps alive and does
        // not resize during the call; `u8` has no alignment and no invalid values; the destination
        // buffer is not part of the storage.
        let from = unsafe { std::slice::from_raw_parts(start, nbytes) };
        parts.extend(to.chunks_mut(PART).zip(from.chunks(PART)));
    }
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    let threads = threads.unwrap_or(cores).clamp(1, parts.len().max(1));
    detached(py, || copy_parts(parts, threads))
}

fn copy_parts(parts: Vec<(&mut [u8], &[u8])>, threads: usize) {
    let next = AtomicUsize::new(0);
    let slots: Vec<_> = parts.into_iter().map(|p| std::sync::Mutex::new(Some(p))).collect();
    let work = || {
        while let Some(slot) = slots.get(next.fetch_add(1, Ordering::Relaxed)) {
            let part = slot.lock().unwrap_or_else(|e| e.into_inner()).take();
            if let Some((to, from)) = part {
                to.copy_from_slice(from);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
}
