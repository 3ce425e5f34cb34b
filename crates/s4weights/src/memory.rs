//! One tensor in memory: the codec without a file around it.

use std::sync::Mutex;

use rayon::ThreadPool;
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

/// Compresses and decompresses tensors in memory, one after the other, in memory that it keeps.
#[derive(Debug)]
pub struct TensorCodec {
    engine: CpuEngine,
    preset: Preset,
    pool: Option<ThreadPool>,
    idle: Mutex<Vec<Buffers>>,
}

#[derive(Debug, Default)]
struct Buffers {
    scratch: Scratch,
    frame: Vec<u8>,
}

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

impl TensorCodec {
    /// A codec with its threads.
    ///
    /// # Errors
    /// `Argument` if an option does not fit, `Io` if threads cannot be started.
    pub fn new(options: MemoryOptions) -> Result<Self> {
        Ok(Self {
            engine: CpuEngine::new(simd(options.simd)?),
            preset: options.preset,
            pool: pool(thread_count(options.threads))?,
            idle: Mutex::default(),
        })
    }

    /// Runs `work` with buffers that were used before, if there are any.
    fn with<T>(&self, work: impl FnOnce(&mut Buffers) -> T) -> T {
        let idle = || self.idle.lock().unwrap_or_else(|e| e.into_inner());
        let mut buffers = idle().pop().unwrap_or_default();
        let out = work(&mut buffers);
        idle().push(buffers);
        out
    }

    /// Compresses a tensor: chunks, checksums and all, but no file.
    ///
    /// # Errors
    /// `Format` if the tensor is too large.
    pub fn compress(&self, view: &TensorView<'_>) -> Result<Compressed> {
        let width = view.dtype.value_width();
        let plan = self.with(|b| self.engine.plan(self.preset, view, &mut b.scratch)).at(TARGET)?;
        let chunks = chunk_count((view.data.len() / width) as u64, plan.chunk_log2);
        let mut out = Compressed {
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
        let encode = |scratch: &mut Scratch, chunk, frame: &mut Vec<u8>| {
            self.engine.encode_chunk(view, &plan, chunk, scratch, frame)
        };
        match &self.pool {
            Some(pool) if chunks > 1 => {
                let one = |chunk: u64| {
                    self.with(|b| {
                        let mut frame = std::mem::take(&mut b.frame);
                        frame.clear();
                        Ok((encode(&mut b.scratch, chunk, &mut frame)?, frame))
                    })
                };
                let all: Vec<_> = pool.install(|| (0..chunks).into_par_iter().map(one).collect());
                for chunk in all {
                    let (e, frame) = chunk.at(TARGET)?;
                    shared |= e.shared;
                    out.align();
                    out.frames.extend_from_slice(&frame);
                    out.record(&e);
                    self.with(|b| b.frame = frame);
                }
            }
            _ => self.with(|b| {
                (0..chunks).try_for_each(|chunk| {
                    out.align();
                    let e = encode(&mut b.scratch, chunk, &mut out.frames).at(TARGET)?;
                    shared |= e.shared;
                    out.record(&e);
                    Ok(())
                })
            })?,
        }
        out.side = plan.side_data(shared).at(TARGET)?;
        Ok(out)
    }

    /// Decompresses into a buffer of the tensor's size.
    ///
    /// # Errors
    /// `Argument` if the buffer has another size.
    pub fn decompress(&self, tensor: &Compressed, dst: &mut [u8]) -> Result<()> {
        let size = tensor.dtype.value_width() << tensor.chunk_log2;
        let elements: u64 = tensor.shape.iter().product();
        if elements * tensor.dtype.size() as u64 != dst.len() as u64 {
            return Err(Error::Argument(format!("buffer of {} bytes", dst.len())));
        }
        let decode = |(chunk, to): (usize, &mut [u8])| {
            self.with(|b| tensor.decode_chunk(&self.engine, chunk, &mut b.scratch, to))
        };
        match &self.pool {
            Some(pool) if tensor.records.len() > 1 => {
                pool.install(|| dst.par_chunks_mut(size).enumerate().try_for_each(decode))
            }
            _ => dst.chunks_mut(size).enumerate().try_for_each(decode),
        }
    }
}

impl Compressed {
    fn align(&mut self) {
        self.frames.resize(self.frames.len().next_multiple_of(ALIGN), 0);
    }

    /// Adds the record of the chunk that was appended last.
    fn record(&mut self, e: &EncodedChunk) {
        self.records.push(ChunkRecord {
            offset: (self.frames.len() - e.len) as u64,
            object: 0,
            // A frame is at most a chunk of 2^18 values.
            len: u32::try_from(e.len).unwrap_or(u32::MAX),
            plain: e.plain,
            crc_encoded: e.crc_encoded,
            crc_raw: e.crc_raw,
        });
    }

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
        let record = &self.records[chunk];
        let frame = &self.frames[record.offset as usize..][..record.len as usize];
        engine.decode_chunk(&spec, chunk as u64, record, frame, scratch, to).at(TARGET)
    }

    /// Bytes of chunks, chunk table and side data.
    pub fn bytes(&self) -> usize {
        self.frames.len() + self.records.len() * ChunkRecord::SIZE + self.side.encoded_len()
    }
}
