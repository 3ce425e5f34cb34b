//! Tensors in device memory.

use s4_format::DType;

use crate::DeviceMemory;

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
