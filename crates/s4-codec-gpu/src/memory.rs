//! Scratch memory on the device within a budget, and copies between it and the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result;

use crate::device::{Device, Stream};
use crate::error::{GpuError, On, Result};
use crate::mapping::DeviceMapping;
use crate::pinned::Pinned;

/// Scratch memory of one device, within a hard budget.
///
/// It uses memory outside the framework's allocator and caches none: a buffer goes back to the device when
/// it is dropped.
#[derive(Debug)]
pub struct Pool {
    device: Arc<Device>,
    budget: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Pool {
    /// A pool that never hands out more than `budget` bytes at the same time.
    pub fn new(device: &Arc<Device>, budget: u64) -> Arc<Self> {
        let (used, peak) = Default::default();
        Arc::new(Self { device: Arc::clone(device), budget, used, peak })
    }

    /// The most bytes that may be handed out at the same time.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes handed out now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The most bytes that were handed out at the same time.
    pub fn high_water(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Takes device memory that work on any stream may use from now on.
    ///
    /// # Errors
    /// `Budget`, `OutOfMemory`, `Driver`; `Argument` for a stream of another device.
    pub fn alloc(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        bytes: u64,
        what: &'static str,
    ) -> Result<DeviceBuffer> {
        if stream.device().ordinal() != self.device.ordinal() {
            let (own, other) = (self.device.ordinal(), stream.device().ordinal());
            let what =
                format!("memory is on CUDA device {own}, but the stream is on device {other}");
            return Err(GpuError::Argument(what));
        }
        let take = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.budget);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let before = before.map_err(|used| GpuError::Budget {
            what,
            needed: used.saturating_add(bytes),
            budget: self.budget,
        })?;
        let memory = DeviceMapping::new(stream, bytes, what);
        let memory = memory.inspect_err(|_| {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
        Ok(DeviceBuffer { memory, pool: Arc::clone(self) })
    }
}

/// Device memory of a [`Pool`], which goes back once the work queued on its stream is done.
#[derive(Debug)]
pub struct DeviceBuffer {
    memory: DeviceMapping,
    pool: Arc<Pool>,
}

impl DeviceBuffer {
    /// Its address: a multiple of 256.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.pool.used.fetch_sub(self.memory.bytes(), Ordering::Relaxed);
    }
}

impl Stream {
    /// Queues a copy of `len` bytes of device memory into pinned memory.
    ///
    /// # Safety
    /// `from` is that much device memory that stays allocated until the copy is done, and nobody
    /// else uses the pinned bytes until then.
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Panics
    /// If the pinned range is outside its memory.
    pub unsafe fn copy_to_host(&self, from: u64, to: &Pinned, at: usize, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        // SAFETY: the caller's promise.
        let done = unsafe { result::memcpy_dtoh_async(to.slice_mut(at, len), from, self.handle()) };
        done.on(self.device().ordinal(), "copy to the host")
    }

    /// Queues a copy of `len` bytes of pinned memory into device memory.
    ///
    /// # Safety
    /// As [`Stream::copy_to_host`]; nobody writes the pinned bytes until the copy is done.
    ///
    /// # Errors
    /// `Driver`.
    ///
    /// # Panics
    /// If the pinned range is outside its memory.
    pub unsafe fn copy_to_device(
        &self,
        from: &Pinned,
        at: usize,
        len: usize,
        to: u64,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        // SAFETY: the caller's promise.
        let done = unsafe { result::memcpy_htod_async(to, from.slice(at, len), self.handle()) };
        done.on(self.device().ordinal(), "copy to the device")
    }

    /// Queues a copy from device memory to device memory of the same device.
    ///
    /// # Safety
    /// Both are that much device memory that stays allocated until the copy is done, and do not
    /// overlap.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn copy_within_device(&self, from: u64, to: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the caller's promise.
        let done = unsafe { result::memcpy_dtod_async(to, from, len, self.handle()) };
        done.on(self.device().ordinal(), "copy on the device")
    }

    /// Queues filling device memory with a byte.
    ///
    /// # Safety
    /// `to` is that much device memory that stays allocated until it is done.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn fill(&self, to: u64, byte: u8, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the caller's promise.
        let done = unsafe { result::memset_d8_async(to, byte, len, self.handle()) };
        done.on(self.device().ordinal(), "fill device memory")
    }
}
