//! The kernels in the vector instructions of x86-64.

pub(crate) mod avx2;
pub(crate) mod avx512;
