//! Plans, encodes and decodes tensors into chunks.
//!
//! An [`Engine`] plans and encodes tensors: the [`CpuEngine`] those in host memory, on threads that its caller gives
//! it, the CUDA engine those in device memory. Both give the same bytes, for any number of threads. The planner samples
//! fixed positions of a tensor and compares integer costs, so the plan too depends only on the data, the preset, the
//! version and, if one is given, the [`Choice`] that was made for the tensor before.
//!
//! Deliberately absent: the storage of chunks, names of tensors, threads, clocks.

mod chunk;
mod closed;
#[cfg(feature = "cuda")]
pub mod cuda;
mod decode;
mod encode;
mod engine;
mod error;
mod inputs;
mod moments;
mod once;
mod plan;
mod planes;
mod planner;
mod predict;
mod scratch;
mod tables;
#[cfg(test)]
mod tests;
mod threads;
mod values;

use s4_codec_cpu::{Codecs, open_codecs};
use s4_format::DType;
use s4_planes::{Kernels, Simd};
use s4_predict::{Predictors, predictors};
use threads::ScratchPool;

pub use chunk::chunk_log2;
pub use decode::{DecodeJob, TensorSpec};
pub use encode::{EncodeJob, EncodedChunk};
pub use engine::{EncodedFrame, Engine, Jobs, TensorValues};
pub use error::TensorError;
pub use inputs::{Input, InputFrame, InputSize, Inputs, NoInputs};
pub use moments::{Moment, may_use_moments, moment_dtypes};
pub use plan::{PlaneCoding, TensorPlan};
pub use planner::{
    Choice, MomentSample, ParentSample, PlanJob, expected_of, makes_copies, parent_probes,
};
pub use predict::InputValues;
pub use s4_codec_cpu as codec;
pub use s4_predict::rank1::Expected;
pub use scratch::Scratch;
pub use values::{DeviceMemory, Values};

/// The effort put into making a tensor smaller: the only setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preset {
    /// Planes, with order-0 entropy coding: keeps up with the link.
    Fast,
    /// The default: predictions from rows and columns, from the parent and from moments where they save enough.
    #[default]
    Balanced,
    /// The smallest: today the same as [`Preset::Balanced`].
    Small,
    /// Exponents by nvCOMP's ANS, which is closed, everything else by its GDeflate, which is open;
    /// on a GPU, for tools that expect nvCOMP. Never chosen automatically.
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

/// Appends a copy of `src`, whose bytes may change meanwhile, to `to`, reading each byte once.
/// Returns the copy's CRC-32C.
pub fn copy_once(src: &[u8], to: &mut Vec<u8>) -> u32 {
    once::append_summed(src, to)
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
    predictors: Predictors,
    idle: ScratchPool,
}

impl CpuEngine {
    /// An engine with every open codec and the given vector instructions.
    pub fn new(simd: Simd) -> Self {
        Self::with_codecs(simd, open_codecs(simd))
    }

    /// An engine that encodes and decodes with the given codecs. They must include `const` and the
    /// codecs of every plan that it will encode.
    pub fn with_codecs(simd: Simd, codecs: Codecs) -> Self {
        Self {
            kernels: Kernels::new(simd),
            codecs,
            predictors: predictors(),
            idle: ScratchPool::default(),
        }
    }

    /// The engine with further codecs; those with the same ids are replaced.
    #[must_use]
    pub fn and_codecs(self, codecs: &Codecs) -> Self {
        Self { codecs: self.codecs.with_all(codecs), ..self }
    }

    /// The engine with the given predictors instead of the project's own.
    #[must_use]
    pub fn with_predictors(self, predictors: Predictors) -> Self {
        Self { predictors, ..self }
    }
}
