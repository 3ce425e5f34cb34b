//! Splitting values into planes and merging them again; XOR and ordered differences.
//!
//! A *plane* holds one field, or one byte of a field, of many elements. The set of planes is
//! the *layout*:
//!
//! | layout | element widths | planes |
//! |---|---|---|
//! | `fields` | 2, 4, 8 | `e`, `a`, `b` of the element rotated left by one bit |
//! | `fields-sign` | 2, 4, 8 | packed signs `s`, then `e`, `a`, `b` of the element without its sign |
//! | `bytes` | 1, 2, 4, 8, 16 | one plane per byte, the most significant first |
//! | `token` | 1, 2, 4, 8 | a symbol per element (size, top bits, sign), then the bits below, packed |
//!
//! Elements are little-endian, whatever the machine. [`Kernels`] holds the choice of vector
//! instructions and has every operation as a method; all sets of instructions give the same bytes,
//! and [`Simd::Scalar`] is the oracle that the others are tested against.
//!
//! Written in vector instructions: `fields` and `bytes` of 2 and 4 bytes for AVX-512, AVX2 and NEON,
//! `fields-sign` of 2 and 4 bytes for AVX-512 and AVX2. XOR and the differences are portable code,
//! compiled for each set. The rest is scalar, and so is `token`, which uses BMI2 where there is AVX2.
//!
//! Deliberately absent: allocation, names of tensors, dtypes (callers pick a layout and a
//! [`Width`]), and errors. The caller must pass correct sizes, which are asserted: a wrong size
//! is a bug, not bad data. The one operation that reads data of unknown origin as more than plain
//! bits, [`Kernels::merge_token`], returns an error instead.

mod kernels;
mod lanewise;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod patterns;
mod scalar;
mod simd;
mod step;
mod token;
mod width;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use simd::{Kernels, Simd};
pub use step::StepFactors;
pub use token::{token_bits, token_bound};
pub use width::{FloatBits, Width};
