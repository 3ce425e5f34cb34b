//! One tensor in memory: the codec without a file around it.

use std::sync::Mutex;

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::{
    CpuEngine, DecodeJob, EncodeJob, EncodedChunk, PlanJob, Preset, Scratch, TensorSpec, TensorView,
};
use s4_format::index::chunk_count;
use s4_format::limits::ALIGN;
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType, Plan};
use s4_planes::Simd;

use crate::error::{At, Error, Result};
use crate::parallel::{lock, pool, simd, thread_count};

/// Compresses and decompresses tensors in memory, one after the other, and reuses its scratch
/// memory.
#[derive(Debug)]
pub struct TensorCodec {
    engine: CpuEngine,
    preset: Preset,
    pool: Option<ThreadPool>,
    idle: Mutex<Vec<Scratch>>,
}

/// A compressed tensor in memory.
#[derive(Debug, Clone)]
pub struct Compressed {
    dtype: DType,
    shape: Vec<u64>,
    plan: Plan,
    chunk_log2: u8,
    side: Side,
    /// The record of each chunk, and its bytes.
    chunks: Vec<(ChunkRecord, Vec<u8>)>,
}

/// Options for work on a tensor in memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryOptions {
    /// How much effort goes into making it smaller.
    pub preset: Preset,
    /// Threads; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
}

const TARGET: &str = "memory";

impl TensorCodec {
    /// A codec with its threads.
    ///
    /// # Errors
    /// `Argument` if an option is invalid, `Io` if threads cannot be started.
    pub fn new(options: MemoryOptions) -> Result<Self> {
        if options.preset == Preset::Nvcomp {
            return Err(Error::Argument("preset `nvcomp` is only for files".into()));
        }
        Ok(Self {
            engine: CpuEngine::new(simd(options.simd)?),
            preset: options.preset,
            pool: pool(thread_count(options.threads))?,
            idle: Mutex::default(),
        })
    }

    /// Runs `work` with scratch memory that was used before, if there is any.
    fn with<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let idle = || lock(&self.idle);
        let mut scratch = idle().pop().unwrap_or_default();
        let out = work(&mut scratch);
        idle().push(scratch);
        out
    }

    /// Compresses a tensor: chunks, checksums and all, but no file.
    ///
    /// # Errors
    /// `Format` if the tensor is too large.
    pub fn compress(&self, view: &TensorView<'_>) -> Result<Compressed> {
        let width = view.dtype.value_width();
        let job = PlanJob::new(self.preset, view);
        let plan = self.with(|scratch| self.engine.plan(&job, scratch)).at(TARGET)?;
        let chunks = chunk_count((view.data.len() / width) as u64, plan.chunk_log2);
        let encode = |chunk: u64| {
            self.with(|scratch| {
                // Room for a chunk that does not shrink; memory that is not used is never touched.
                let mut frame = Vec::with_capacity((width << plan.chunk_log2).min(view.data.len()));
                let job = EncodeJob { view, plan: &plan, chunk, inputs: &[] };
                let e = self.engine.encode(&job, scratch, &mut frame);
                e.at(TARGET).map(|e| (e, frame))
            })
        };
        let chunks: Vec<_> = match &self.pool {
            Some(pool) if chunks > 1 => {
                pool.install(|| (0..chunks).into_par_iter().map(encode).collect::<Result<_>>())?
            }
            _ => (0..chunks).map(encode).collect::<Result<_>>()?,
        };
        let shared = chunks.iter().any(|(e, _)| e.shared);
        Ok(Compressed {
            dtype: view.dtype,
            shape: view.shape.to_vec(),
            plan: plan.plan.clone(),
            chunk_log2: plan.chunk_log2,
            side: plan.side_data(shared).at(TARGET)?,
            chunks: chunks.into_iter().map(|(e, frame)| (record(&e), frame)).collect(),
        })
    }

    /// Decompresses into a buffer of the tensor's size.
    ///
    /// # Errors
    /// `Argument` if the buffer has another size.
    pub fn decompress(&self, tensor: &Compressed, dst: &mut [u8]) -> Result<()> {
        let size = tensor.dtype.value_width() << tensor.chunk_log2;
        let elements: u64 = tensor.shape.iter().product();
        if elements * tensor.dtype.size() as u64 != dst.len() as u64 {
            return Err(Error::Argument(format!(
                "buffer of {} bytes does not fit the tensor",
                dst.len()
            )));
        }
        let decode = |(chunk, to): (usize, &mut [u8])| {
            self.with(|scratch| tensor.decode_chunk(&self.engine, chunk, scratch, to))
        };
        match &self.pool {
            Some(pool) if tensor.chunks.len() > 1 => {
                pool.install(|| dst.par_chunks_mut(size).enumerate().try_for_each(decode))
            }
            _ => dst.chunks_mut(size).enumerate().try_for_each(decode),
        }
    }
}

impl TensorCodec {
    /// Decompresses one chunk, into a buffer of its size.
    pub(crate) fn decompress_chunk(
        &self,
        tensor: &Compressed,
        chunk: usize,
        to: &mut [u8],
    ) -> Result<()> {
        self.with(|scratch| tensor.decode_chunk(&self.engine, chunk, scratch, to))
    }
}

impl Compressed {
    fn decode_chunk(
        &self,
        engine: &CpuEngine,
        chunk: usize,
        scratch: &mut Scratch,
        to: &mut [u8],
    ) -> Result<()> {
        let spec = TensorSpec {
            dtype: self.dtype,
            shape: &self.shape,
            plan: &self.plan,
            side: &self.side,
            chunk_log2: self.chunk_log2,
        };
        let (record, frame) = &self.chunks[chunk];
        let chunk = chunk as u64;
        let job = DecodeJob { spec: &spec, chunk, record, frame, inputs: &[] };
        engine.decode(&job, scratch, to).at(TARGET)
    }

    /// CRC-32C of the values of each chunk.
    pub(crate) fn checksums(&self) -> impl Iterator<Item = u32> {
        self.chunks.iter().map(|(record, _)| record.crc_raw)
    }

    /// Bytes of chunks, chunk table and side data.
    pub fn bytes(&self) -> usize {
        let chunk = |(_, frame): &(_, Vec<u8>)| frame.len().next_multiple_of(ALIGN);
        let chunks: usize = self.chunks.iter().map(chunk).sum();
        chunks + self.chunks.len() * ChunkRecord::SIZE + self.side.encoded_len()
    }
}

/// The record of a chunk that has its own memory.
fn record(e: &EncodedChunk) -> ChunkRecord {
    ChunkRecord {
        offset: 0,
        object: 0,
        // A frame is at most a chunk of 2^18 values.
        len: u32::try_from(e.len).unwrap_or(u32::MAX),
        plain: e.plain,
        crc_encoded: e.crc_encoded,
        crc_raw: e.crc_raw,
    }
}
