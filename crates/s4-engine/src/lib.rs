//! Plans, encodes and decodes tensors into chunks.
//!
//! A [`CpuEngine`] takes one chunk at a time and has no threads: called from many threads it works in
//! parallel, and gives the same bytes for any number of threads. The planner looks at fixed
//! positions of a tensor and compares integer costs, so that the choice too depends on nothing but
//! the data, the preset and the version.
//!
//! What is deliberately absent: where chunks are kept, names of tensors, threads, clocks.

mod closed;
#[cfg(feature = "cuda")]
pub mod cuda;
mod decode;
mod encode;
mod once;
mod planner;
mod residual;
mod scratch;
mod tables;
#[cfg(test)]
mod tests;

use s4_codec_cpu::rans::{Precision, Rans};
use s4_codec_cpu::{Codecs, open_codecs};
use s4_format::DType;
use s4_planes::{Kernels, Simd};

pub use decode::TensorSpec;
pub use encode::EncodedChunk;
pub use planner::{ParentSample, PlaneCoding, TensorPlan, parent_probes};
pub use scratch::Scratch;

/// How much effort goes into making a tensor smaller: the one knob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preset {
    /// Planes, coded order 0: keeps up with the link.
    Fast,
    /// The default. Until predictors are built, the same as `Fast`.
    #[default]
    Balanced,
    /// The smallest. Until predictors are built, the same as `Fast`.
    Small,
    /// Exponents by nvCOMP's ANS, which is closed, everything else by its GDeflate, which is open; on a
    /// GPU, for tools that expect nvCOMP. Never chosen by itself.
    Nvcomp,
}

impl Preset {
    /// The name that files keep.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Balanced => "balanced",
            Self::Small => "small",
            Self::Nvcomp => "nvcomp",
        }
    }
}

impl std::str::FromStr for Preset {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "fast" => Ok(Self::Fast),
            "balanced" => Ok(Self::Balanced),
            "small" => Ok(Self::Small),
            "nvcomp" => Ok(Self::Nvcomp),
            _ => Err(format!(
                "unknown preset `{s}`: use `fast`, `balanced` or `small`, or `nvcomp` with a GPU"
            )),
        }
    }
}

/// Values in each chunk but the last, as a power of two: 256 KiB of values of up to 4 bytes, so that
/// a chunk and its planes stay in a core's cache.
pub fn chunk_log2(dtype: DType) -> u8 {
    match dtype.value_width() {
        1 => 18,
        2 => 17,
        _ => 16,
    }
}

/// A tensor in memory: row-major, little-endian, without gaps.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements.
    pub data: &'a [u8],
}

/// Encodes and decodes on the CPU.
#[derive(Debug)]
pub struct CpuEngine {
    kernels: Kernels,
    codecs: Codecs,
    pairs: Rans,
    singles: Rans,
}

impl CpuEngine {
    /// An engine with every open codec and the given vector instructions.
    pub fn new(simd: Simd) -> Self {
        Self::with_codecs(simd, open_codecs(simd))
    }

    /// An engine that decodes with the given codecs. (Encoding uses the project's own.)
    pub fn with_codecs(simd: Simd, codecs: Codecs) -> Self {
        Self {
            kernels: Kernels::new(simd),
            codecs,
            pairs: Rans::new(Precision::P8, simd),
            singles: Rans::new(Precision::P12, simd),
        }
    }

    fn rans(&self, precision: Precision) -> Rans {
        match precision {
            Precision::P8 => self.pairs,
            Precision::P12 => self.singles,
        }
    }
}
