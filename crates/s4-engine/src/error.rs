//! The error of the engine that works on the CPU.

use s4_format::Error;

/// An error in a tensor's data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor {tensor}: {source}")]
pub struct TensorError {
    /// Index of the tensor in the caller's list.
    pub tensor: usize,
    /// The error; it names the chunk and the stream.
    pub source: Error,
}
