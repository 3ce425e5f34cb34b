//! GPU errors, by what the caller can do about them.

use cudarc::driver::{DriverError, sys};

/// Errors of the CUDA handle.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// There is no usable CUDA: work on the CPU.
    #[error("CUDA is not available: {reason}")]
    Unavailable {
        /// Why: no driver, too old a driver, no device.
        reason: String,
    },
    /// The device does not have that much free memory: free some, or lower the budget.
    #[error("CUDA device {device}: out of memory, {bytes} bytes needed for {what}")]
    OutOfMemory {
        /// Ordinal of the device.
        device: u32,
        /// Bytes that were asked for.
        bytes: u64,
        /// The purpose of the memory.
        what: &'static str,
    },
    /// The work does not fit the memory that the caller allows: raise the budget.
    #[error("{needed} bytes needed for {what}, but the budget is {budget}")]
    Budget {
        /// The purpose of the memory.
        what: &'static str,
        /// The least budget that would do, in bytes.
        needed: u64,
        /// The budget, in bytes.
        budget: u64,
    },
    /// The driver refused a call, or an earlier kernel of this process failed.
    #[error("CUDA device {device}: cannot {action}: {reason}")]
    Driver {
        /// Ordinal of the device.
        device: u32,
        /// The action that failed.
        action: &'static str,
        /// The driver's name for the error, and its text.
        reason: String,
    },
    /// An argument is not valid.
    #[error("{0}")]
    Argument(String),
}

/// `Result` with this crate's [`GpuError`].
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

/// The driver's own words for an error.
pub(crate) fn words(e: DriverError) -> String {
    let text = |s: Result<&std::ffi::CStr, DriverError>| {
        s.map_or_else(|_| format!("{:?}", e.0), |s| s.to_string_lossy().into_owned())
    };
    format!("{}: {}", text(e.error_name()), text(e.error_string()))
}

/// The error for a failed allocation.
pub(crate) fn allocation_failed(
    e: DriverError,
    device: u32,
    bytes: u64,
    what: &'static str,
) -> GpuError {
    match e.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => GpuError::OutOfMemory { device, bytes, what },
        _ => GpuError::Driver { device, action: "allocate memory", reason: words(e) },
    }
}

/// Names the device and the action of a driver's error.
pub(crate) trait On<T> {
    fn on(self, device: u32, action: &'static str) -> Result<T>;
}

impl<T> On<T> for Result<T, DriverError> {
    fn on(self, device: u32, action: &'static str) -> Result<T> {
        self.map_err(|e| GpuError::Driver { device, action, reason: words(e) })
    }
}
