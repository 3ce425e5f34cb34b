//! Reads tensors into the memory of CUDA devices.

mod chain;
mod read;
