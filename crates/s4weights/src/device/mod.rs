//! Tensors in the memory of CUDA devices: read to there.

mod chain;
mod read;
