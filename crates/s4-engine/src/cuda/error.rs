//! Errors of encoding and decoding on a device.

use s4_codec_gpu::GpuError;

use crate::TensorError;

/// Errors of the CUDA engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The device or its driver, including budgets that are too small and invalid pointers.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A tensor's data. The source names the chunk and the stream.
    #[error("tensor {tensor}: {source}")]
    Format {
        /// Index of the tensor in the caller's list.
        tensor: usize,
        /// The error.
        source: s4_format::Error,
    },
}

impl From<TensorError> for CudaError {
    fn from(TensorError { tensor, source }: TensorError) -> Self {
        Self::Format { tensor, source }
    }
}

/// `Result` with [`CudaError`].
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Names the tensor of an error.
pub(super) trait Of<T> {
    fn of(self, tensor: usize) -> Result<T>;
}

impl<T> Of<T> for s4_format::Result<T> {
    fn of(self, tensor: usize) -> Result<T> {
        self.map_err(|source| CudaError::Format { tensor, source })
    }
}
