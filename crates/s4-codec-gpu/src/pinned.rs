//! Page-locked memory of the host.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::device::Device;
use crate::error::{Result, allocation_failed};

/// Page-locked memory of the host, which every device can reach at the full speed of its link.
///
/// It is cached memory: the processor reads it as fast as any other.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
    /// The process's own pages, which the driver locked; `None`: memory that the driver allocated.
    #[cfg(target_os = "linux")]
    pages: Option<pages::Pages>,
}

// SAFETY: plain memory; its user ensures that no device accesses it at the same time.
unsafe impl Send for Pinned {}
// SAFETY: as above: reading and writing it is `unsafe`.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates page-locked memory, zeroed.
    ///
    /// # Errors
    /// `OutOfMemory`, `Driver`.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let _current = device.enter()?;
        let bytes = bytes.max(1);
        #[cfg(target_os = "linux")]
        if let Some(pages) = pages::Pages::new(bytes) {
            let start = pages.start();
            return Ok(Self { device: Arc::clone(device), start, bytes, pages: Some(pages) });
        }
        // Not write-combined: the processor reads what arrives here.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed in `drop`.
        let start = unsafe { result::malloc_host(bytes, flags) };
        let start = start.map_err(|e| {
            allocation_failed(e, device.ordinal(), bytes as u64, "page-locked host memory")
        })?;
        // SAFETY: `bytes` bytes were allocated there.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Self {
            device: Arc::clone(device),
            start: start.cast(),
            bytes,
            #[cfg(target_os = "linux")]
            pages: None,
        })
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Address of byte `at`, for kernels too: with unified addressing one address serves both sides.
    ///
    /// # Panics
    /// If it is outside the memory.
    pub fn address(&self, at: usize) -> u64 {
        assert!(at <= self.bytes, "address outside pinned memory");
        self.start as u64 + at as u64
    }

    /// Never true: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// `len` bytes from `at` on.
    ///
    /// # Safety
    /// No device and no other thread writes them while the slice lives.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub unsafe fn slice(&self, at: usize, len: usize) -> &[u8] {
        assert!(at <= self.bytes && len <= self.bytes - at, "range outside pinned memory");
        // SAFETY: within the allocation, which is initialised; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }

    /// `len` bytes from `at` on, for writing.
    ///
    /// # Safety
    /// No device and no other thread uses them while the slice lives.
    ///
    /// # Panics
    /// If they are not within the memory.
    #[expect(
        clippy::mut_from_ref,
        reason = "parts are lent out side by side; the caller keeps apart"
    )]
    pub unsafe fn slice_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at <= self.bytes && len <= self.bytes - at, "range outside pinned memory");
        // SAFETY: within the allocation, which is initialised; the caller keeps others away.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if let Some(pages) = self.pages.take() {
            pages.free(&self.device);
            return;
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated in `new`. The driver waits for copies that are in flight.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// Pages of the process that the driver locks. The driver allocates and locks memory of its own at 1.6 GB/s. These
/// pages are mapped, in large pages if the system has them, and locked at 5 to 9 GB/s (one H100, driver of CUDA 13).
#[cfg(target_os = "linux")]
mod pages {
    use std::ffi::c_void;
    use std::thread;

    use cudarc::driver::sys;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use crate::device::Device;

    /// Bytes of a large page. The driver allocates anything smaller.
    const LARGE: usize = 2 << 20;
    /// Bytes that a thread zeroes in the time that it takes to start some threads.
    const THREAD_BYTES: usize = 16 << 20;
    const MOST_THREADS: usize = 8;

    /// Some mapped memory, and the locked pages within it.
    #[derive(Debug)]
    pub(super) struct Pages {
        mapping: *mut c_void,
        mapped: usize,
        start: *mut u8,
    }

    impl Pages {
        /// Locks pages for `bytes` bytes, zeroed, on the device whose context is current. `None` if
        /// the system or the driver refuses.
        pub(super) fn new(bytes: usize) -> Option<Self> {
            if bytes < LARGE {
                return None;
            }
            let len = bytes.checked_next_multiple_of(LARGE)?;
            let mapped = len.checked_add(LARGE)?;
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping, wherever the system likes.
            let mapping =
                unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, flags) }.ok()?;
            // SAFETY: `len` bytes from there on are within the mapping.
            let start = unsafe { mapping.byte_add(mapping.align_offset(LARGE)) }.cast::<u8>();
            let pages = Self { mapping, mapped, start };
            // A fork has no use for them, and would make the system copy what a device writes to.
            // SAFETY: within the mapping, which nobody uses yet.
            let own = unsafe { madvise(start.cast(), len, Advice::LinuxDontFork) };
            if own.is_ok() {
                pages.fill(len);
                if pages.lock(len) {
                    return Some(pages);
                }
            }
            pages.unmap();
            None
        }

        pub(super) fn start(&self) -> *mut u8 {
            self.start
        }

        /// Makes the system provide the pages, large ones if it has any, on several threads: zeroing them is most of
        /// the work. Pages that it does not provide here it provides, or refuses, when they are locked.
        fn fill(&self, len: usize) {
            let threads = (len / THREAD_BYTES).clamp(1, MOST_THREADS);
            let part = len.div_ceil(threads).next_multiple_of(LARGE);
            let start = self.start as usize;
            let give = move |at: usize| {
                let (from, len) = ((start + at) as *mut c_void, part.min(len - at));
                // SAFETY: within the mapping, which nobody uses yet.
                let _ = unsafe { madvise(from, len, Advice::LinuxHugepage) };
                // SAFETY: as above.
                let _ = unsafe { madvise(from, len, Advice::LinuxPopulateWrite) };
            };
            thread::scope(|s| {
                for at in (part..len).step_by(part) {
                    let other = thread::Builder::new().spawn_scoped(s, move || give(at));
                    other.map_or_else(|_| give(at), drop);
                }
                give(0);
            });
        }

        /// Locks the pages, if devices see them at the processor's addresses.
        fn lock(&self, len: usize) -> bool {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: mapped memory, which stays until it is unlocked.
            let locked = unsafe { sys::cuMemHostRegister_v2(self.start.cast(), len, flags) };
            if locked.result().is_err() {
                return false;
            }
            let mut there = 0;
            // SAFETY: locked memory.
            let found =
                unsafe { sys::cuMemHostGetDevicePointer_v2(&mut there, self.start.cast(), 0) };
            let same = found.result().is_ok() && there == self.start as u64;
            if !same {
                self.unlock();
            }
            same
        }

        fn unlock(&self) {
            // SAFETY: locked in `lock`.
            let _ = unsafe { sys::cuMemHostUnregister(self.start.cast()) };
        }

        fn unmap(self) {
            // SAFETY: mapped in `new`; nobody uses it any more.
            let _ = unsafe { munmap(self.mapping, self.mapped) };
        }

        /// Unlocks and unmaps the pages, once copies that are in flight are done.
        pub(super) fn free(self, device: &Device) {
            // Without a context they cannot be unlocked: they stay.
            let Ok(_current) = device.enter() else { return };
            self.unlock();
            self.unmap();
        }
    }
}
