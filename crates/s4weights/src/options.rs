//! Options of writing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use s4_engine::codec::Codecs;
use s4_engine::{Preset, TensorPlan, TensorValues};
use s4_planes::Simd;

use crate::parent::Parent;
use crate::progress::ProgressFn;

/// Called on the calling thread when values on devices are no longer needed.
pub type StagedFn = Arc<dyn Fn() + Send + Sync>;

/// Called with a tensor's role and plan before its values are encoded. It may have planes coded otherwise
/// ([`TensorPlan::code`]). A coding that does not make a plane smaller costs time only: such planes are stored raw.
pub type CodingFn = Arc<dyn Fn(&TensorValues<'_>, &mut TensorPlan) + Send + Sync>;

/// An embedder's own codecs, and the planes that they code.
#[derive(Clone, Default)]
pub struct OwnCodecs {
    /// Codecs besides the project's. Their ids should be 240 or above, which the format never assigns. Only readers that
    /// are given the same codecs can decode what is coded with them.
    pub codecs: Codecs,
    /// Chooses the codings; `None`: the planner alone does, which knows the project's codecs only.
    pub choose: Option<CodingFn>,
}

impl fmt::Debug for OwnCodecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (codecs, chooses) = (&self.codecs, self.choose.is_some());
        f.debug_struct("OwnCodecs").field("codecs", codecs).field("choose", &chooses).finish()
    }
}

/// Longest chain that a writer adds to, in checkpoints, by default.
pub const DEFAULT_MAX_CHAIN: u32 = 16;

/// Options of a [`crate::Writer`].
#[derive(Clone, Default)]
pub struct WriteOptions {
    /// How much effort goes into making tensors smaller.
    pub preset: Preset,
    /// Threads that encode; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
    /// Most bytes of buffers; `None`: 256 MiB.
    pub memory: Option<usize>,
    /// The previous checkpoint: tensors that are smaller as deltas of it are stored so.
    pub parent: Option<Arc<dyn Parent>>,
    /// Most checkpoints of a chain; `None`: [`DEFAULT_MAX_CHAIN`]. Readers allow 64.
    pub max_chain: Option<u32>,
    /// Time limit of a request to an object store, retries included; `None`: 5 minutes, or half a minute until the
    /// server was first reached.
    pub deadline: Option<Duration>,
    /// Called with the progress.
    pub progress: Option<ProgressFn>,
    /// Codecs besides the project's. For tensors in device memory, the engine needs them as well
    /// (`CudaEngine::with_codecs`).
    pub own: OwnCodecs,
    /// The encoder of tensors in device memory.
    #[cfg(feature = "cuda")]
    pub engine: Option<Arc<s4_engine::cuda::CudaEngine>>,
    /// Bytes of frames in the engine's page-locked memory that may wait to be written to a file; `None`: 64 MiB. With
    /// more, values on devices are needed for less time.
    pub ahead: Option<usize>,
    /// Called once by each [`crate::Writer::write`], when it no longer needs the values on devices:
    /// the caller may change them while values in host memory are still being written.
    pub staged: Option<StagedFn>,
}

impl WriteOptions {
    /// Whether tensors in the memory of devices can be encoded.
    pub(crate) fn has_engine(&self) -> bool {
        #[cfg(feature = "cuda")]
        {
            self.engine.is_some()
        }
        #[cfg(not(feature = "cuda"))]
        {
            false
        }
    }
}

impl fmt::Debug for WriteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteOptions")
            .field("preset", &self.preset)
            .field("threads", &self.threads)
            .field("simd", &self.simd)
            .field("memory", &self.memory)
            .field("parent", &self.parent.as_ref().map(|p| p.digest()))
            .field("max_chain", &self.max_chain)
            .finish_non_exhaustive()
    }
}
