//! Memory: stream-ordered scratch on the device within a budget, and pinned memory of the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{DriverError, result, sys};

use crate::device::{Device, Stream};
use crate::error::{GpuError, On, Result, allocation_failed};

/// What a memory pool takes from the device at a time. Less than that is allocated by itself, so that no more is
/// taken from a device that has little left.
pub const POOL_PIECE: u64 = 32 << 20;

/// Scratch memory of one device, within a hard budget.
///
/// It comes from a pool of its own, so that nothing is kept from, or taken from, what the framework
/// allocates, and goes back to the device with [`Pool::trim`] or when the pool is dropped.
#[derive(Debug)]
pub struct Pool {
    device: Arc<Device>,
    /// `None` where the device has no memory pools: plain allocations then.
    handle: Option<sys::CUmemoryPool>,
    budget: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

// SAFETY: a pool is a handle that the driver lets every thread use.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool that never hands out more than `budget` bytes at once.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Arc<Device>, budget: u64) -> Result<Arc<Self>> {
        let _current = device.enter()?;
        let handle = if device.has_pools() {
            Some(own_pool(device, budget).on(device.ordinal(), "make a memory pool")?)
        } else {
            None
        };
        let (used, peak) = Default::default();
        Ok(Arc::new(Self { device: Arc::clone(device), handle, budget, used, peak }))
    }

    /// The most bytes that are handed out at once.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes handed out now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The most bytes of device memory that the pool held at once: the driver's own count, which
    /// includes what it rounds up, or without memory pools what was handed out.
    ///
    /// # Errors
    /// `Driver`.
    pub fn high_water(&self) -> Result<u64> {
        let handed_out = self.peak.load(Ordering::Relaxed);
        let Some(pool) = self.handle else { return Ok(handed_out) };
        let _current = self.device.enter()?;
        let mut bytes = 0u64;
        let asked = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        // SAFETY: the attribute is a `cuuint64_t`.
        let got = unsafe { result::mem_pool::get_attribute(pool, asked, (&raw mut bytes).cast()) };
        got.on(self.device.ordinal(), "read a pool's high-water mark")?;
        Ok(bytes.max(handed_out))
    }

    /// Allocates memory that work queued on `stream` from now on may use.
    ///
    /// # Errors
    /// `Budget`, `OutOfMemory`, `Driver`.
    pub fn alloc(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        bytes: u64,
        what: &'static str,
    ) -> Result<DeviceBuffer> {
        let take = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.budget);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let before = before.map_err(|used| GpuError::Budget {
            what,
            needed: used.saturating_add(bytes),
            budget: self.budget,
        })?;
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
        let pooled = bytes >= POOL_PIECE;
        let address = self.take(stream, bytes, pooled).map_err(|e| {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            allocation_failed(e, self.device.ordinal(), bytes, what)
        })?;
        let (pool, stream) = (Arc::clone(self), Arc::clone(stream));
        Ok(DeviceBuffer { pool, stream, address, bytes, pooled })
    }

    fn take(&self, stream: &Stream, bytes: u64, pooled: bool) -> Result<u64, DriverError> {
        let bytes = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let Ok(_current) = self.device.enter() else {
            return Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT));
        };
        match self.handle.filter(|_| pooled) {
            // SAFETY: pool and stream are alive.
            Some(pool) => unsafe { result::mem_pool::alloc_async(pool, bytes, stream.handle()) },
            // SAFETY: freed by the buffer.
            None => unsafe { result::malloc_sync(bytes) },
        }
    }

    /// Gives memory that is not in use back to the device.
    ///
    /// # Errors
    /// `Driver`.
    pub fn trim(&self) -> Result<()> {
        let Some(pool) = self.handle else { return Ok(()) };
        let _current = self.device.enter()?;
        // SAFETY: the pool is alive.
        let done = unsafe { result::mem_pool::trim_to(pool, 0) };
        done.on(self.device.ordinal(), "give memory back")
    }
}

fn own_pool(device: &Device, budget: u64) -> Result<sys::CUmemoryPool, DriverError> {
    let props = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: device.handle(),
        },
        win32SecurityAttributes: std::ptr::null_mut(),
        reserved: [0; 64],
    };
    // SAFETY: `props` describes memory of a device that the driver gave.
    let pool = unsafe { result::mem_pool::create(&props) }?;
    // Else every synchronisation would give all of it back, only to be asked for it again.
    let mut keep = budget;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a `cuuint64_t`.
    unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut keep).cast()) }?;
    Ok(pool)
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let (Some(pool), Ok(_current)) = (self.handle, self.device.enter()) {
            // SAFETY: made in `own_pool`; every buffer holds the pool, so none is left.
            let _ = unsafe { result::mem_pool::destroy(pool) };
        }
    }
}

/// Device memory of a [`Pool`]; freed in the order of its stream.
#[derive(Debug)]
pub struct DeviceBuffer {
    pool: Arc<Pool>,
    stream: Arc<Stream>,
    address: u64,
    bytes: u64,
    /// Whether it is of the pool, if there is one.
    pooled: bool,
}

impl DeviceBuffer {
    /// Where it starts: a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.pool.device.enter() {
            let stream = self.stream.handle();
            // SAFETY: allocated in `take`; work that uses it was queued on `stream` before.
            let _ = unsafe {
                match self.pool.handle.filter(|_| self.pooled) {
                    Some(_) => result::free_async(self.address, stream),
                    None => result::stream::synchronize(stream)
                        .and_then(|()| result::free_sync(self.address)),
                }
            };
        }
        self.pool.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Page-locked memory of the host, which every device can reach at the full speed of its link.
///
/// It is cached memory: the processor reads it as fast as any other.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; who uses it sees to it that no device does at the same time.
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
        // Not write-combined: the processor reads what arrives here.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed in `drop`.
        let start = unsafe { result::malloc_host(bytes, flags) };
        let start = start.map_err(|e| {
            allocation_failed(e, device.ordinal(), bytes as u64, "page-locked host memory")
        })?;
        // SAFETY: `bytes` bytes were allocated there.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Self { device: Arc::clone(device), start: start.cast(), bytes })
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where byte `at` is, for kernels too: with unified addressing one address serves both sides.
    ///
    /// # Panics
    /// If it is outside the memory.
    pub fn address(&self, at: usize) -> u64 {
        assert!(at <= self.bytes, "address outside pinned memory");
        self.start as u64 + at as u64
    }

    /// Never: it has at least a byte.
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

    /// `len` bytes from `at` on, to be written.
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
        if let Ok(_current) = self.device.enter() {
            // SAFETY: allocated in `new`. The driver waits for copies that are in flight.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
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
