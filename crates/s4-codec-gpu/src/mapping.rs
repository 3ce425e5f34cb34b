//! Device memory that is mapped in one piece.

use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use crate::device::{Device, Stream};
use crate::error::{Result, allocation_failed};

/// Less than this is allocated, not mapped in whole pages: a device with little memory left should not lose more.
const LARGE: u64 = 32 << 20;

/// Device memory of its own, outside any pool: any stream may use it immediately.
///
/// Mapping gigabytes takes a fraction of a millisecond, while growing a memory pool takes
/// milliseconds. Giving them back does not wait for other work of the device, as `cuMemFree` would.
#[derive(Debug)]
pub struct DeviceMapping {
    stream: Arc<Stream>,
    address: u64,
    bytes: u64,
    /// `None`: a plain allocation, because it is small or the device cannot map memory.
    mapped: Option<Mapped>,
}

#[derive(Debug)]
struct Mapped {
    handle: sys::CUmemGenericAllocationHandle,
    /// Size in bytes, in whole pages.
    bytes: usize,
}

impl DeviceMapping {
    /// Takes `bytes` bytes of a stream's device. When dropped, they go back once the work queued on
    /// the stream by then is done.
    ///
    /// # Errors
    /// `OutOfMemory`, `Driver`.
    pub fn new(stream: &Arc<Stream>, bytes: u64, what: &'static str) -> Result<Self> {
        let device = stream.device();
        let _current = device.enter()?;
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let taken = if device.maps_memory() && bytes >= LARGE {
            map(device, size).map(|(address, mapped)| (address, Some(mapped)))
        } else {
            // SAFETY: freed in `drop`.
            unsafe { result::malloc_sync(size) }.map(|address| (address, None))
        };
        let failed = |e| allocation_failed(e, device.ordinal(), bytes, what);
        let (address, mapped) = taken.map_err(failed)?;
        Ok(Self { stream: Arc::clone(stream), address, bytes, mapped })
    }

    /// Its address: a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let Ok(_current) = self.stream.device().enter() else { return };
        // SAFETY: the stream is alive. An error means that the device was lost, and its memory with it.
        if unsafe { result::stream::synchronize(self.stream.handle()) }.is_err() {
            return;
        }
        match self.mapped.take() {
            // SAFETY: made in `map`; work that uses it was queued on the stream.
            Some(mapped) => unsafe { unmap(self.address, &mapped) },
            // SAFETY: allocated in `new`; likewise.
            None => drop(unsafe { result::free_sync(self.address) }),
        }
    }
}

/// Maps memory of a device whose context is current.
fn map(device: &Device, bytes: usize) -> Result<(u64, Mapped), DriverError> {
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.handle(),
    };
    let prop = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let access = sys::CUmemAccessDesc {
        location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let granularity = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    let (mut page, mut address, mut handle) = (0, 0, 0);
    // SAFETY: places for a size, an address and a handle; a range is unmapped and freed only if it was
    // mapped and reserved.
    unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut page, &raw const prop, granularity).result()?;
        let too_large = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let bytes = bytes.checked_next_multiple_of(page.max(1)).ok_or(too_large)?;
        sys::cuMemCreate(&raw mut handle, bytes, &raw const prop, 0).result()?;
        let mapped = Mapped { handle, bytes };
        let reserved = sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0).result();
        if let Err(e) = reserved {
            sys::cuMemRelease(handle);
            return Err(e);
        }
        let opened = sys::cuMemMap(address, bytes, 0, handle, 0)
            .result()
            .and_then(|()| sys::cuMemSetAccess(address, bytes, &raw const access, 1).result());
        if let Err(e) = opened {
            unmap(address, &mapped);
            return Err(e);
        }
        Ok((address, mapped))
    }
}

/// Takes a mapping apart; errors leave nothing to do.
///
/// # Safety
/// The range was reserved for the handle, and no work on it is queued any more.
unsafe fn unmap(address: u64, mapped: &Mapped) {
    // SAFETY: the caller's promise.
    unsafe {
        sys::cuMemUnmap(address, mapped.bytes);
        sys::cuMemRelease(mapped.handle);
        sys::cuMemAddressFree(address, mapped.bytes);
    }
}
