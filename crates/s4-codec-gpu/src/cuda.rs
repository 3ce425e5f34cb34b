//! Finds CUDA and its devices.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{result, sys};

use crate::device::{Device, DeviceInfo};
use crate::error::{GpuError, On, Result, words};

/// The oldest driver interface that is supported: that of CUDA 12.0 (drivers r525 and later), which
/// also reads the committed PTX.
const OLDEST_DRIVER: i32 = 12_000;

/// A machine's CUDA driver.
///
/// It is opened at run time; where there is none, [`Cuda::discover`] says so. Clones share the devices that are open.
#[derive(Debug, Clone)]
pub struct Cuda {
    devices: Vec<DeviceInfo>,
    /// The devices in use, by ordinal.
    open: Arc<[Mutex<Weak<Device>>]>,
    driver: i32,
}

impl Cuda {
    /// Opens the driver and lists its devices. No context is made and no memory taken.
    ///
    /// # Errors
    /// `Unavailable`, with the reason: no driver, a driver that is too old, no device. This is an
    /// ordinary answer: work on the CPU then.
    pub fn discover() -> Result<Self> {
        let unavailable = |reason: String| GpuError::Unavailable { reason };
        // SAFETY: opens and closes the driver's library, whose initialisers are the vendor's own.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("the driver's library (libcuda) is not installed".into()));
        }
        result::init()
            .map_err(|e| unavailable(format!("the driver failed to start ({})", words(e))))?;
        let mut driver = 0;
        // SAFETY: `driver` is a place for one `int`.
        let version = unsafe { sys::cuDriverGetVersion(&mut driver) };
        version.result().map_err(|e| unavailable(words(e)))?;
        if driver < OLDEST_DRIVER {
            return Err(unavailable(format!(
                "the driver supports CUDA {}.{}, but at least 12.0 (driver 525) is needed",
                driver / 1000,
                driver % 1000 / 10
            )));
        }
        let count = result::device::get_count().map_err(|e| unavailable(words(e)))?;
        let devices = (0..count).map(info).collect::<Result<Vec<_>>>()?;
        if devices.is_empty() {
            return Err(unavailable("the driver reports no devices".into()));
        }
        let open = devices.iter().map(|_| Mutex::default()).collect();
        Ok(Self { devices, open, driver })
    }

    /// The devices, by ordinal.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Version of CUDA that the driver implements, major and minor.
    pub fn version(&self) -> (u32, u32) {
        ((self.driver / 1000).unsigned_abs(), (self.driver % 1000 / 10).unsigned_abs())
    }

    /// The device whose context is current on the calling thread; the first one if there is none.
    pub fn current(&self) -> u32 {
        if !matches!(result::ctx::get_current(), Ok(Some(_))) {
            return 0;
        }
        let mut device = 0;
        // SAFETY: a place for one handle.
        let found = unsafe { sys::cuCtxGetDevice(&raw mut device) };
        if found != sys::CUresult::CUDA_SUCCESS {
            return 0;
        }
        let is = |d: &&DeviceInfo| {
            i32::try_from(d.ordinal).is_ok_and(|n| result::device::get(n) == Ok(device))
        };
        self.devices.iter().find(is).map_or(0, |d| d.ordinal)
    }

    /// A device, on its primary context, which frameworks use too. Unless it is in use already, this loads the kernels,
    /// which takes seconds where the driver must translate them; others who ask for the device wait meanwhile.
    ///
    /// # Errors
    /// `Argument` if there is no such device; `Driver`.
    pub fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let at = ordinal as usize;
        let (Some(info), Some(open)) = (self.devices.get(at), self.open.get(at)) else {
            let n = self.devices.len();
            return Err(GpuError::Argument(format!("no CUDA device {ordinal}: {n} found")));
        };
        let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.upgrade() {
            return Ok(device);
        }
        let device = Device::open(info.clone())?;
        *open = Arc::downgrade(&device);
        Ok(device)
    }
}

fn info(ordinal: i32) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute as A;
    let number = ordinal.unsigned_abs();
    let action = "read the properties";
    let device = result::device::get(ordinal).on(number, action)?;
    let attribute = |a| {
        // SAFETY: `device` is one that the driver gave.
        let value = unsafe { result::device::get_attribute(device, a) };
        value.on(number, action).map(i32::unsigned_abs)
    };
    Ok(DeviceInfo {
        ordinal: number,
        name: result::device::get_name(device).on(number, action)?,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }.on(number, action)? as u64,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_is_an_ordinary_answer() {
        match Cuda::discover() {
            Ok(cuda) => {
                assert!(!cuda.devices().is_empty() && cuda.version() >= (12, 0));
                let none = cuda.device(u32::MAX).unwrap_err();
                assert!(matches!(none, GpuError::Argument(_)), "{none}");
            }
            Err(e) => {
                assert!(matches!(e, GpuError::Unavailable { .. }), "{e}");
                assert!(e.to_string().starts_with("CUDA is not available: "), "{e}");
            }
        }
    }
}
