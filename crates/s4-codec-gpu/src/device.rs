//! One device: its primary context, streams and events.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::error::{GpuError, On, Result};
use crate::kernels::Kernels;

/// A device, as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its ordinal: the same as the framework's, with the same `CUDA_VISIBLE_DEVICES`.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of device memory.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}

/// A device whose primary context is held, with the kernels loaded into it.
///
/// Frameworks use the primary context too, so their pointers, streams and events belong to it.
#[derive(Debug)]
pub struct Device {
    info: DeviceInfo,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    maps: bool,
    kernels: Option<Kernels>,
}

// SAFETY: contexts, modules and functions are handles that the driver lets every thread use.
unsafe impl Send for Device {}
// SAFETY: as above; the driver synchronises calls itself.
unsafe impl Sync for Device {}

/// While this lives, a device's context is current on this thread. Dropping it restores the
/// previous one, so that a framework finds the thread as it left it.
///
/// Meanwhile the thread may call what a capture of a CUDA graph on another thread forbids all threads by default, such as
/// the allocation of memory: nothing here is part of a capture.
#[derive(Debug)]
pub struct Current<'a> {
    /// The thread's earlier treatment of captures.
    captures: sys::CUstreamCaptureMode,
    /// A context is current for one thread.
    _thread: PhantomData<(*const (), &'a Device)>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        exchange_captures(self.captures);
        // SAFETY: takes off what `Device::enter` put on. An error leaves nothing to be done.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

/// Sets this thread's treatment of captures of CUDA graphs, and returns the earlier one.
fn exchange_captures(mut mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    // SAFETY: reads and writes the mode. It fails only for modes that do not exist.
    let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    mode
}

impl Device {
    pub(crate) fn open(info: DeviceInfo) -> Result<Arc<Self>> {
        let number = info.ordinal;
        let ordinal = i32::try_from(number).unwrap_or(i32::MAX);
        let handle = result::device::get(ordinal).on(number, "open the device")?;
        let has = |attribute| {
            // SAFETY: `handle` is one that the driver gave.
            let value = unsafe { result::device::get_attribute(handle, attribute) };
            Ok::<_, GpuError>(value.on(number, "open the device")? != 0)
        };
        use sys::CUdevice_attribute as A;
        let maps = has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        // SAFETY: as above; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(handle) };
        let context = context.on(number, "retain the primary context")?;
        let mut device = Self { info, handle, context, maps, kernels: None };
        let kernels = {
            let _current = device.enter()?;
            Kernels::load(number, device.info.capability)?
        };
        device.kernels = Some(kernels);
        Ok(Arc::new(device))
    }

    /// Its ordinal, name and size.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its ordinal.
    pub fn ordinal(&self) -> u32 {
        self.info.ordinal
    }

    pub(crate) fn handle(&self) -> sys::CUdevice {
        self.handle
    }

    /// Whether it supports virtual memory that is mapped explicitly.
    pub(crate) fn maps_memory(&self) -> bool {
        self.maps
    }

    pub(crate) fn kernels(&self) -> Result<&Kernels> {
        self.kernels.as_ref().ok_or_else(|| GpuError::Driver {
            device: self.ordinal(),
            action: "find the kernels",
            reason: "not loaded".into(),
        })
    }

    /// Makes this device's context current on the calling thread while the result lives: for calls that do not go
    /// through this crate's streams, such as those of [`GpuCodec`](crate::nvcomp::GpuCodec)s.
    ///
    /// # Errors
    /// `Driver`.
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the context is held as long as `self` lives.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(self.context) };
        pushed.result().on(self.ordinal(), "enter the context")?;
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        Ok(Current { captures: exchange_captures(relaxed), _thread: PhantomData })
    }

    /// Free and total device memory, in bytes, as the driver counts them for all processes.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.enter()?;
        let (free, total) = result::mem_get_info().on(self.ordinal(), "query the free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Checks that `bytes` bytes at `address` are memory of this device. Returns the range around
    /// them that is known to be, too.
    ///
    /// # Errors
    /// `Argument` if they are not: memory of the host or of another device, or too little.
    pub fn check_pointer(&self, address: u64, bytes: u64) -> Result<Range<u64>> {
        if bytes == 0 {
            return Ok(address..address);
        }
        let _current = self.enter()?;
        let bad = |what: &str| {
            let device = self.ordinal();
            Err(GpuError::Argument(format!(
                "{bytes} bytes at {address:#x} {what} CUDA device {device}"
            )))
        };
        let (mut memory, mut ordinal, mut start, mut size) = (0u32, 0i32, 0u64, 0usize);
        use sys::CUpointer_attribute as P;
        let mut asked = [
            P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            P::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut places: [*mut std::ffi::c_void; 4] = [
            (&raw mut memory).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut size).cast(),
        ];
        // SAFETY: one place of the attribute's type for each attribute.
        let known = unsafe {
            sys::cuPointerGetAttributes(4, asked.as_mut_ptr(), places.as_mut_ptr(), address)
        };
        known.result().on(self.ordinal(), "query a pointer")?;
        if memory != sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            return bad("are not in the memory of");
        }
        if ordinal.unsigned_abs() != self.ordinal() {
            return bad("are in the memory of another device, not of");
        }
        // Memory mapped piece by piece reports only the piece: the range may continue after it.
        let end = start.saturating_add(size as u64);
        let own = address..address.saturating_add(bytes);
        if size == 0 {
            return Ok(own);
        }
        if address.checked_add(bytes).is_none_or(|e| e > end) {
            return if self.goes_on(end) {
                Ok(own)
            } else {
                bad("extend past the end of their allocation on")
            };
        }
        Ok(start..end)
    }

    /// Checks ranges, each an address and a number of bytes, as [`Device::check_pointer`]. The
    /// driver is not asked again for a range in the same allocation as the range before.
    ///
    /// # Errors
    /// Those of [`Device::check_pointer`].
    pub fn check_pointers(&self, ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<()> {
        let mut known = 0..0;
        for (address, bytes) in ranges {
            let end = address.saturating_add(bytes);
            if !(known.contains(&address) && end <= known.end) {
                known = self.check_pointer(address, bytes)?;
            }
        }
        Ok(())
    }

    /// Whether device memory follows at an address.
    fn goes_on(&self, address: u64) -> bool {
        let mut memory = 0u32;
        let asked = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: a place of the attribute's type.
        let known = unsafe { sys::cuPointerGetAttribute((&raw mut memory).cast(), asked, address) };
        known == sys::CUresult::CUDA_SUCCESS
            && memory == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let (Some(kernels), Ok(_current)) = (self.kernels.take(), self.enter()) {
            kernels.unload();
        }
        // SAFETY: retained in `open`. An error here (the driver shutting down) leaves nothing to do.
        let _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

/// A queue of work on a device.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: sys::CUstream,
    own: bool,
}

// SAFETY: a stream is a handle that the driver lets every thread use.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of one's own, of the lowest priority: kernels of streams with a higher one go
    /// first. (The framework's streams have the lowest, too, unless configured otherwise.) It
    /// does not wait for the legacy default stream unless [`Stream::wait_for`] says so.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let _current = device.enter()?;
        let range = result::stream::get_priority_range();
        let (least, _) = range.on(device.ordinal(), "read stream priorities")?;
        let kind = result::stream::StreamKind::NonBlocking;
        let handle = result::stream::create_with_priority(kind, least);
        let handle = handle.on(device.ordinal(), "create a stream")?;
        Ok(Self { device: Arc::clone(device), handle, own: true })
    }

    /// A stream of the framework, by its handle (`torch.cuda.current_stream().cuda_stream`; 0 is
    /// the legacy default stream). Dropping this does not destroy it.
    ///
    /// # Safety
    /// The handle is a stream of this device's primary context, and stays one while this value and
    /// what was made from it live.
    pub unsafe fn borrow(device: &Arc<Device>, handle: u64) -> Self {
        Self { device: Arc::clone(device), handle: handle as usize as sys::CUstream, own: false }
    }

    /// The device that the work runs on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Its `CUstream` as a number, for calls that take one, such as those of [`crate::nvcomp::GpuCodec`].
    pub fn address(&self) -> u64 {
        self.handle as u64
    }

    /// Makes what is queued here from now on wait for all work queued on `other` so far.
    ///
    /// # Errors
    /// `Driver`; `Argument` if a CUDA graph is being captured on `other`: its work does not run yet.
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        if other.is_capturing()? {
            let what = "a CUDA graph is being captured on the stream that produces the values";
            return Err(GpuError::Argument(what.into()));
        }
        let event = Event::new(&other.device)?;
        event.record(other)?;
        self.wait(&event)
    }

    fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the handle is alive, and `status` is written.
        let known = unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) };
        known
            .result()
            .on(self.device.ordinal(), "query whether a graph is being captured on a stream")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Makes what is queued here from now on wait for an event.
    ///
    /// # Errors
    /// `Driver`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.device.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive.
        let done = unsafe { result::stream::wait_event(self.handle, event.handle, flags) };
        done.on(self.device.ordinal(), "wait for an event")
    }

    /// Blocks the calling thread until all that was queued is done.
    ///
    /// # Errors
    /// `Driver`, also for a kernel that failed.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: the handle is alive.
        let done = unsafe { result::stream::synchronize(self.handle) };
        done.on(self.device.ordinal(), "wait for the work on a stream")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (true, Ok(_current)) = (self.own, self.device.enter()) {
            // SAFETY: made in `new`; work that is still queued is finished by the driver.
            let _ = unsafe { result::stream::destroy(self.handle) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: sys::CUevent,
}

// SAFETY: an event is a handle that the driver lets every thread use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is not recorded yet. A thread that waits for it sleeps.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        use sys::CUevent_flags as F;
        let (untimed, sleeps) = (F::CU_EVENT_DISABLE_TIMING, F::CU_EVENT_BLOCKING_SYNC);
        Self::with_flags(device, untimed as u32 | sleeps as u32)
    }

    /// An event that can be timed.
    ///
    /// # Errors
    /// `Driver`.
    pub fn timed(device: &Arc<Device>) -> Result<Self> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with_flags(device: &Arc<Device>, flags: u32) -> Result<Self> {
        let _current = device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for one handle.
        let made = unsafe { sys::cuEventCreate(&mut handle, flags) };
        made.result().on(device.ordinal(), "create an event")?;
        Ok(Self { device: Arc::clone(device), handle })
    }

    /// Marks the end of the work queued on a stream so far.
    ///
    /// # Errors
    /// `Driver`.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _current = stream.device.enter()?;
        // SAFETY: both handles are alive.
        let done = unsafe { result::event::record(self.handle, stream.handle) };
        done.on(stream.device.ordinal(), "record an event")
    }

    /// Blocks the calling thread until the work before the event is done.
    ///
    /// # Errors
    /// `Driver`, also for a kernel that failed.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: the handle is alive.
        let done = unsafe { result::event::synchronize(self.handle) };
        done.on(self.device.ordinal(), "wait for the work on a stream")
    }

    /// Whether the work before the event is done. An error only shows when the event is waited for.
    pub fn is_done(&self) -> bool {
        let Ok(_current) = self.device.enter() else { return false };
        // SAFETY: the handle is alive.
        unsafe { result::event::query(self.handle) }.is_ok()
    }

    /// Milliseconds from `start` to this event; both must be timed and done.
    ///
    /// # Errors
    /// `Driver`.
    pub fn since(&self, start: &Self) -> Result<f32> {
        let _current = self.device.enter()?;
        // SAFETY: both handles are alive.
        let ms = unsafe { result::event::elapsed(start.handle, self.handle) };
        ms.on(self.device.ordinal(), "measure the time between events")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made in `with_flags`.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}
