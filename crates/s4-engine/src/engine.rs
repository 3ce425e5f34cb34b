//! The interface of the engines: what to encode, what to predict it from, and who does the work.

use std::collections::VecDeque;

use bytes::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;
use s4_format::index::chunk_count;
use s4_format::manifest::TensorRole;
use s4_format::{DType, Error};

use crate::error::TensorError;
use crate::inputs::{Inputs, NoInputs};
use crate::{EncodedChunk, Preset, TensorPlan, Values};

/// Plans and encodes tensors, on the CPU or on devices. All engines make the same bytes.
pub trait Engine {
    /// The engine's own error type.
    type Error: From<TensorError>;

    /// Chooses a plan for each tensor. One that may be predicted from a parent becomes a delta where that
    /// is clearly smaller.
    ///
    /// # Errors
    /// The engine's own; those of `inputs`.
    fn plan<E>(
        &self,
        preset: Preset,
        tensors: &[TensorValues<'_>],
        inputs: &dyn Inputs<E>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, E>
    where
        E: From<Self::Error> + From<TensorError> + Send;

    /// Encodes tensors by their plans. `sink` gets every chunk, in order of tensors and chunks,
    /// several at a time, on the calling thread, while later ones are encoded; an error from it
    /// ends the work with that error.
    ///
    /// # Errors
    /// The engine's own; those of the jobs' inputs and of `sink`.
    fn encode<E>(
        &self,
        jobs: &Jobs<'_, E>,
        sink: impl FnMut(&[EncodedFrame<'_>]) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<Self::Error> + From<TensorError> + Send;
}

/// A tensor, in host or device memory.
#[derive(Debug, Clone, Copy)]
pub struct TensorValues<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements.
    pub values: Values<'a>,
    /// The tensor's role in the optimizer.
    pub role: Option<TensorRole<'a>>,
}

impl<'a> TensorValues<'a> {
    /// A tensor without a role.
    pub fn new(dtype: DType, shape: &'a [u64], values: impl Into<Values<'a>>) -> Self {
        Self { dtype, shape, values: values.into(), role: None }
    }
}

/// Tensors to encode, with everything needed for that.
pub struct Jobs<'a, E> {
    /// The tensors, all in memory that the engine can read.
    pub tensors: &'a [TensorValues<'a>],
    /// The plan of each tensor.
    pub plans: &'a [TensorPlan],
    /// The inputs that the chunks of deltas are predicted from.
    pub inputs: &'a dyn Inputs<E>,
    /// The caller's threads; without a pool, the calling thread does the work.
    pub pool: Option<&'a ThreadPool>,
    /// Chunks that the CPU encodes together while the previous window goes to the sink.
    pub window: usize,
}

impl<'a, E: From<TensorError>> Jobs<'a, E> {
    /// Tensors without inputs to predict from, encoded on the calling thread.
    pub fn new(tensors: &'a [TensorValues<'a>], plans: &'a [TensorPlan]) -> Self {
        Self { tensors, plans, inputs: &NoInputs, pool: None, window: 1 }
    }
}

impl<'a, E> Jobs<'a, E> {
    /// Checks that values fill their shapes, and that each tensor has a plan.
    pub(crate) fn check(&self) -> Result<(), TensorError> {
        if self.plans.len() != self.tensors.len() {
            let what = format!("{} plans for {} tensors", self.plans.len(), self.tensors.len());
            return Err(TensorError { tensor: 0, source: Error::limit(what) });
        }
        self.tensors.iter().enumerate().try_for_each(|(tensor, t)| {
            let filled = fills(t.dtype, t.shape, t.values.bytes());
            filled.map_err(|source| TensorError { tensor, source })
        })
    }

    /// The chunks of some of the tensors, given by index.
    pub(crate) fn queue(&self, tensors: impl Iterator<Item = usize>) -> ChunkQueue<'a> {
        let (waiting, chunk) = (tensors.collect(), 0);
        ChunkQueue { tensors: self.tensors, plans: self.plans, waiting, chunk }
    }
}

/// Checks that a tensor's values fill its shape.
pub(crate) fn fills(dtype: DType, shape: &[u64], bytes: u64) -> s4_format::Result<()> {
    let elements = match shape.contains(&0) {
        true => Some(0),
        false => shape.iter().try_fold(dtype.size() as u64, |n, d| n.checked_mul(*d)),
    };
    match elements == Some(bytes) {
        true => Ok(()),
        false => Err(Error::limit(format!(
            "{bytes} bytes of values do not match shape {shape:?} of {dtype}"
        ))),
    }
}

/// A chunk, encoded.
#[derive(Debug, Clone, Copy)]
pub struct EncodedFrame<'a> {
    /// Index of the tensor in the caller's list.
    pub tensor: usize,
    /// Index of the chunk within it.
    pub chunk: u64,
    /// The content of its record.
    pub encoded: EncodedChunk,
    /// The frame.
    pub bytes: &'a [u8],
    /// The memory that `bytes` are part of, for callers that need them after the call. Zeros follow them there, up to
    /// a multiple of [`ALIGN`](s4_format::limits::ALIGN) from its start. `None`: they must be copied.
    pub held: Option<&'a Bytes>,
}

impl<'a> EncodedFrame<'a> {
    /// The memory that can be kept, and where the frame starts in it.
    pub fn place(&self) -> Option<(&'a Bytes, usize)> {
        let held = self.held?;
        Some((held, self.bytes.as_ptr().addr().checked_sub(held.as_ptr().addr())?))
    }
}

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    pub(crate) tensor: usize,
    pub(crate) chunk: u64,
    /// Offset of its values in those of the tensor, in bytes.
    #[cfg(feature = "cuda")]
    pub(crate) first: u64,
    /// Bytes of its values.
    pub(crate) bytes: u64,
}

/// Chunks of tensors that are not in a group yet, in order.
pub(crate) struct ChunkQueue<'a> {
    pub(crate) tensors: &'a [TensorValues<'a>],
    pub(crate) plans: &'a [TensorPlan],
    /// Tensors by index; `chunk` is the next chunk of the first one.
    waiting: VecDeque<usize>,
    chunk: u64,
}

#[cfg(feature = "cuda")]
impl<'a> ChunkQueue<'a> {
    pub(crate) fn tensor(&self, number: usize) -> &'a TensorValues<'a> {
        &self.tensors[number]
    }

    pub(crate) fn plan(&self, number: usize) -> &'a TensorPlan {
        &self.plans[number]
    }

    /// Upper bound of the bytes left: all values of every tensor that still has chunks, taken ones included.
    pub(crate) fn most_left(&self) -> u64 {
        self.waiting.iter().map(|&tensor| self.tensors[tensor].values.bytes()).sum()
    }
}

impl ChunkQueue<'_> {
    /// The next chunk, which stays in the queue.
    pub(crate) fn peek(&mut self) -> Option<Chunk> {
        loop {
            let tensor = *self.waiting.front()?;
            let (t, chunk_log2) = (&self.tensors[tensor], self.plans[tensor].chunk_log2);
            let (width, all) = (t.dtype.value_width() as u64, t.values.bytes());
            if self.chunk >= chunk_count(all / width, chunk_log2) {
                self.waiting.pop_front();
                self.chunk = 0;
                continue;
            }
            let first = (self.chunk << chunk_log2) * width;
            let bytes = (width << chunk_log2).min(all - first);
            return Some(Chunk {
                tensor,
                chunk: self.chunk,
                #[cfg(feature = "cuda")]
                first,
                bytes,
            });
        }
    }

    /// Takes the chunk that [`Self::peek`] returned.
    pub(crate) fn advance(&mut self) {
        self.chunk += 1;
    }

    /// Puts the chunk that was taken last back at the front.
    #[cfg(feature = "cuda")]
    pub(crate) fn put_back(&mut self, chunk: &Chunk) {
        if self.waiting.front() != Some(&chunk.tensor) {
            self.waiting.push_front(chunk.tensor);
        }
        self.chunk = chunk.chunk;
    }

    /// Takes up to `count` chunks.
    pub(crate) fn take(&mut self, count: usize) -> Vec<Chunk> {
        let mut out = vec![];
        while let Some(chunk) = self.peek().filter(|_| out.len() < count) {
            self.advance();
            out.push(chunk);
        }
        out
    }
}

impl Chunk {
    /// Its key in a list of inputs.
    pub(crate) fn name(&self) -> (usize, u64) {
        (self.tensor, self.chunk)
    }
}

/// Runs `work` on every item of a list, on the threads of the pool if there is one.
pub(crate) fn each<T: Send>(
    pool: Option<&ThreadPool>,
    list: &mut [T],
    work: impl Fn(&mut T) + Sync + Send,
) {
    match pool {
        Some(pool) if list.len() > 1 => pool.install(|| list.par_iter_mut().for_each(work)),
        _ => list.iter_mut().for_each(work),
    }
}
