//! What can go wrong while a device encodes or decodes.

use s4_codec_gpu::GpuError;

/// Errors of the CUDA engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The device or its driver: also budgets that are too small, and pointers that are none.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A tensor's data: which chunk and stream stands in the source.
    #[error("tensor number {tensor}: {source}")]
    Format {
        /// Number of the tensor in the caller's list.
        tensor: usize,
        /// What is wrong.
        source: s4_format::Error,
    },
}

impl CudaError {
    /// The same error where the tensors stand behind `before` others.
    pub(super) fn behind(self, before: usize) -> Self {
        match self {
            Self::Format { tensor, source } => Self::Format { tensor: tensor + before, source },
            other => other,
        }
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
