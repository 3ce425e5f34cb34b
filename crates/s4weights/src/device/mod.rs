//! Tensors in the memory of CUDA devices: written from there and read to there.

mod chain;
mod parents;
mod read;
mod write;

use s4_engine::cuda::CudaError;

use crate::error::Error;

/// What a call of the CUDA engine ended with.
enum Failure {
    /// The engine's own error, which numbers tensors.
    Engine(CudaError),
    /// One of what it called.
    Own(Error),
}

impl From<CudaError> for Failure {
    fn from(e: CudaError) -> Self {
        Self::Engine(e)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Own(e)
    }
}

impl Failure {
    /// Names the target and, by its number in the engine's call, the tensor.
    fn named<'a>(self, target: &str, name: impl FnOnce(usize) -> Option<&'a str>) -> Error {
        let target = target.to_owned();
        match self {
            Self::Own(e) => e,
            Self::Engine(CudaError::Gpu(source)) => Error::Device { target, source },
            Self::Engine(CudaError::Format { tensor, source }) => {
                let source = match name(tensor) {
                    Some(name) => source.in_tensor(name),
                    None => source,
                };
                Error::Format { target, source }
            }
        }
    }
}
