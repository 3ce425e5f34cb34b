//! Values in the memory of the host or of a device.

/// The values of a tensor: row-major, little-endian, without gaps.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// In the memory of the host.
    Host(&'a [u8]),
    /// In the memory of a device, which only an engine for devices reads.
    Device(DeviceMemory),
}

impl Values<'_> {
    /// Bytes of the values.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(data) => data.len() as u64,
            Self::Device(memory) => memory.bytes(),
        }
    }

    /// The device memory that they are in.
    pub fn memory(&self) -> Option<DeviceMemory> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => Some(*memory),
        }
    }
}

impl<'a> From<&'a [u8]> for Values<'a> {
    fn from(data: &'a [u8]) -> Self {
        Self::Host(data)
    }
}

impl<'a> From<&'a Vec<u8>> for Values<'a> {
    fn from(data: &'a Vec<u8>) -> Self {
        Self::Host(data)
    }
}

impl From<DeviceMemory> for Values<'_> {
    fn from(memory: DeviceMemory) -> Self {
        Self::Device(memory)
    }
}

/// Bytes in the memory of a device, and the stream that the framework works on them with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    ordinal: u32,
    stream: u64,
    address: u64,
    bytes: u64,
    fixed: bool,
}

impl DeviceMemory {
    /// `bytes` bytes at `address` of device `ordinal`. Work queued on `stream` before the bytes are
    /// used is waited for. `stream` is the handle of a stream
    /// (`torch.cuda.current_stream().cuda_stream`), or 0 for the legacy default stream.
    ///
    /// # Safety
    /// - They are memory of that device, and `stream` is a stream of its primary context, as long
    ///   as this value or a copy of it is in use.
    /// - While a call works on them nothing else writes them, and, if the call writes them, nothing
    ///   else reads them either. (A call that encodes them stays sound if they change meanwhile,
    ///   and stores each value as it was at some time during the call: every byte is read once.)
    pub unsafe fn new(ordinal: u32, address: u64, bytes: u64, stream: u64) -> Self {
        Self { ordinal, stream, address, bytes, fixed: false }
    }

    /// The same bytes, which nobody changes: a call that encodes them reads them in place instead
    /// of copying them first.
    ///
    /// # Safety
    /// Nothing writes them while this value or a copy of it is in use.
    #[must_use]
    pub unsafe fn fixed(self) -> Self {
        Self { fixed: true, ..self }
    }

    /// Whether [`DeviceMemory::fixed`] promised that nobody changes them.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// `len` of the bytes, from `first` on.
    ///
    /// # Errors
    /// `Argument` if that is beyond the end.
    #[cfg(feature = "cuda")]
    pub fn part(&self, first: u64, len: u64) -> s4_codec_gpu::Result<Self> {
        if first.checked_add(len).is_none_or(|end| end > self.bytes) {
            let bytes = self.bytes;
            return Err(s4_codec_gpu::GpuError::Argument(format!(
                "{len} bytes at {first} are outside {bytes} bytes of device memory"
            )));
        }
        Ok(Self { address: self.address + first, bytes: len, ..*self })
    }

    /// Ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The framework's stream.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
