//! Splitting values into planes and merging them again.

mod simd;

pub use simd::Simd;
