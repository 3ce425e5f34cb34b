//! The vector instructions that the kernels use, and what proves that the machine has them.

use std::fmt;
use std::str::FromStr;

/// A set of vector instructions. Every set gives the same bytes; they differ in speed alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Simd {
    /// Plain Rust: the oracle that the others are tested against.
    Scalar,
    /// 128-bit vectors of 64-bit Arm.
    Neon,
    /// 256-bit vectors of x86-64 (AVX2, BMI2, FMA).
    Avx2,
    /// 512-bit vectors of x86-64 (AVX-512 F, BW, VL, VBMI, VBMI2, and VPCLMULQDQ).
    Avx512,
}

impl Simd {
    /// Whether this machine can run the set.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vbmi2")
                    && is_x86_feature_detected!("vpclmulqdq")
                    && Self::Avx2.is_available()
            }
            _ => false,
        }
    }

    /// Every set that this machine can run, the fastest last.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|s| s.is_available())
    }

    /// The fastest set of this machine.
    pub fn detect() -> Self {
        Self::available().last().unwrap_or(Self::Scalar)
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for Simd {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512]
            .into_iter()
            .find(|x| x.to_string() == s)
            .ok_or_else(|| {
                format!("unknown instruction set `{s}`: use scalar, neon, avx2 or avx512")
            })
    }
}

/// Every operation of this crate, with one set of vector instructions.
///
/// ```
/// use s4_planes::{Kernels, Simd, Width};
///
/// let kernels = Kernels::new(Simd::detect());
/// let src = [0x80, 0x3f, 0x40, 0xc0]; // bf16: 1.0, -3.0
/// let (mut e, mut a) = ([0; 2], [0; 2]);
/// kernels.split_fields(Width::B2, &src, &mut e, &mut a, &mut []);
/// assert_eq!(e, [127, 128]); // exponents
/// assert_eq!(a, [0x00, 0x81]); // mantissas, with the sign below
///
/// let mut back = [0; 4];
/// kernels.merge_fields(Width::B2, &e, &a, &[], &mut back);
/// assert_eq!(back, src);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernels {
    /// Available on this machine: the unsafe calls of kernels rest on it.
    simd: Simd,
}

impl Default for Kernels {
    /// The fastest kernels of this machine.
    fn default() -> Self {
        Self::new(Simd::detect())
    }
}

impl Kernels {
    /// Kernels of a set of instructions; the scalar ones if this machine does not have it.
    pub fn new(simd: Simd) -> Self {
        Self { simd: if simd.is_available() { simd } else { Simd::Scalar } }
    }

    /// The set of instructions in use.
    pub fn simd(self) -> Simd {
        self.simd
    }
}
