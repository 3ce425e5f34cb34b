//! One tensor in memory: the codec without a file around it.

use std::sync::Mutex;

use rayon::prelude::*;
use s4_engine::{CpuEngine, EncodedChunk, Preset, Scratch, TensorSpec, TensorView};
use s4_format::index::chunk_count;
use s4_format::limits::ALIGN;
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType, Plan};
use s4_planes::Simd;

use crate::error::{At, Error, Result};
use crate::options::{simd, thread_count};
use crate::parallel::pool;

/// A compressed tensor in memory.
#[derive(Debug, Clone)]
pub struct Compressed {
    dtype: DType,
    shape: Vec<u64>,
    plan: Plan,
    chunk_log2: u8,
    side: Side,
    records: Vec<ChunkRecord>,
    frames: Vec<u8>,
}

/// How to work on a tensor in memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryOptions {
    /// How much is tried to make it smaller.
    pub preset: Preset,
    /// Threads; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
}

const TARGET: &str = "memory";

impl Compressed {
    /// Compresses a tensor: chunks, checksums and all, but no file.
    ///
    /// # Errors
    /// `Argument` if an option does not fit; `Format` if the tensor is too large.
    pub fn new(view: &TensorView<'_>, options: MemoryOptions) -> Result<Self> {
        let engine = CpuEngine::new(simd(options.simd)?);
        let width = view.dtype.value_width();
        let mut scratch = Scratch::default();
        let plan = engine.plan(options.preset, view, &mut scratch).at(TARGET)?;
        let chunks = chunk_count((view.data.len() / width) as u64, plan.chunk_log2);
        let mut out = Self {
            dtype: view.dtype,
            shape: view.shape.to_vec(),
            plan: plan.plan.clone(),
            chunk_log2: plan.chunk_log2,
            side: Side::default(),
            records: vec![],
            // What comes out of ordinary tensors; it grows if need be.
            frames: Vec::with_capacity(view.data.len() / 10 * 9),
        };
        let mut shared = false;
        let threads = thread_count(options.threads).min(chunks as usize);
        if let Some(pool) = pool(threads)? {
            let scratch = Mutex::new(vec![scratch]);
            let encode = |chunk: u64| {
                let idle = || scratch.lock().unwrap_or_else(|e| e.into_inner());
                let mut own = idle().pop().unwrap_or_default();
                let mut frame = vec![];
                let done = engine.encode_chunk(view, &plan, chunk, &mut own, &mut frame);
                idle().push(own);
                done.map(|e| (e, frame))
            };
            let encoded: Vec<_> =
                pool.install(|| (0..chunks).into_par_iter().map(encode).collect());
            for chunk in encoded {
                let (e, frame) = chunk.at(TARGET)?;
                shared |= e.shared;
                out.push(&e, &frame[..e.len]);
            }
        } else {
            let mut frame = vec![];
            for chunk in 0..chunks {
                let e = engine.encode_chunk(view, &plan, chunk, &mut scratch, &mut frame);
                let e = e.at(TARGET)?;
                shared |= e.shared;
                out.push(&e, &frame[..e.len]);
            }
        }
        out.side = plan.side_data(shared).at(TARGET)?;
        Ok(out)
    }

    fn push(&mut self, e: &EncodedChunk, frame: &[u8]) {
        let at = self.frames.len().next_multiple_of(ALIGN);
        self.frames.resize(at, 0);
        self.frames.extend_from_slice(frame);
        self.records.push(ChunkRecord {
            offset: at as u64,
            object: 0,
            // A frame is at most a chunk of 2^18 values.
            len: u32::try_from(e.len).unwrap_or(u32::MAX),
            plain: e.plain,
            crc_encoded: e.crc_encoded,
            crc_raw: e.crc_raw,
        });
    }

    /// Bytes of chunks, chunk table and side data.
    pub fn bytes(&self) -> usize {
        self.frames.len() + self.records.len() * ChunkRecord::SIZE + self.side.encoded_len()
    }

    /// Decompresses into a buffer of the tensor's size.
    ///
    /// # Errors
    /// `Argument` if the buffer has another size.
    pub fn decompress(&self, options: MemoryOptions, dst: &mut [u8]) -> Result<()> {
        let engine = CpuEngine::new(simd(options.simd)?);
        let size = self.dtype.value_width() << self.chunk_log2;
        if dst.len().div_ceil(size) != self.records.len() {
            return Err(Error::Argument(format!("buffer of {} bytes", dst.len())));
        }
        let spec = TensorSpec {
            dtype: self.dtype,
            shape: &self.shape,
            plan: &self.plan,
            side: &self.side,
            chunk_log2: self.chunk_log2,
        };
        let decode = |scratch: &mut Scratch, chunk: usize, to: &mut [u8]| {
            let record = &self.records[chunk];
            let frame = &self.frames[record.offset as usize..][..record.len as usize];
            engine.decode_chunk(&spec, chunk as u64, record, frame, scratch, to).at(TARGET)
        };
        let threads = thread_count(options.threads).min(self.records.len());
        let Some(pool) = pool(threads)? else {
            let mut scratch = Scratch::default();
            let mut chunks = dst.chunks_mut(size).enumerate();
            return chunks.try_for_each(|(i, to)| decode(&mut scratch, i, to));
        };
        let scratch = Mutex::new(Vec::<Scratch>::new());
        pool.install(|| {
            dst.par_chunks_mut(size).enumerate().try_for_each(|(i, to)| {
                let idle = || scratch.lock().unwrap_or_else(|e| e.into_inner());
                let mut own = idle().pop().unwrap_or_default();
                let done = decode(&mut own, i, to);
                idle().push(own);
                done
            })
        })
    }
}
