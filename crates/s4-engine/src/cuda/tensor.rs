//! Tensors in device memory.

use s4_codec_gpu::{GpuError, Result};
use s4_format::DType;

/// Bytes in the memory of a device, and the stream that the framework works on them with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    ordinal: u32,
    stream: u64,
    address: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// `bytes` bytes at `address` of device `ordinal`. What was queued on `stream` before they are
    /// used here is waited for: the handle of a stream (`torch.cuda.current_stream().cuda_stream`), 0
    /// for the legacy default stream.
    ///
    /// # Safety
    /// - They are memory of that device, and `stream` a stream of its primary context, as long as this
    ///   value or a copy of it is in use.
    /// - While a call works on them nothing else writes them, and, if the call writes them, nothing
    ///   else reads them either. (What a call that encodes them makes of values that change meanwhile is
    ///   sound, and each is what it was at some time: every byte is read once.)
    pub unsafe fn new(ordinal: u32, address: u64, bytes: u64, stream: u64) -> Self {
        Self { ordinal, stream, address, bytes }
    }

    /// `len` of the bytes, from `first` on.
    ///
    /// # Errors
    /// `Argument` if there are not as many.
    pub fn part(&self, first: u64, len: u64) -> Result<Self> {
        if first.checked_add(len).is_none_or(|end| end > self.bytes) {
            let bytes = self.bytes;
            return Err(GpuError::Argument(format!(
                "bytes {first} to {first} + {len} of {bytes} bytes of device memory"
            )));
        }
        Ok(Self { address: self.address + first, bytes: len, ..*self })
    }

    /// Number of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The framework's stream.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Where they start.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A tensor in device memory: row-major, little-endian, without gaps.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements.
    pub memory: DeviceMemory,
}
