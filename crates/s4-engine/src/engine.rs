//! The door to the engines: what is to be encoded, what it is predicted from, and who does it.

use std::collections::VecDeque;

use bytes::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;
use s4_format::index::chunk_count;
use s4_format::manifest::TensorRole;
use s4_format::{DType, Error};

use crate::inputs::{Inputs, NoInputs};
use crate::{EncodedChunk, Preset, TensorPlan, Values};

/// What plans and encodes tensors: on the CPU, or on devices. All engines make the same bytes.
pub trait Engine {
    /// What goes wrong in the engine itself.
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

    /// Encodes tensors by their plans. `sink` gets every chunk, in order of tensors and chunks, some at a
    /// time, on the calling thread, while later ones are encoded; when it returns an error the work ends with
    /// that error.
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

/// A tensor, wherever its values are.
#[derive(Debug, Clone, Copy)]
pub struct TensorValues<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// The elements.
    pub values: Values<'a>,
    /// What it is to the optimizer.
    pub role: Option<TensorRole<'a>>,
}

impl<'a> TensorValues<'a> {
    /// A tensor without a role.
    pub fn new(dtype: DType, shape: &'a [u64], values: impl Into<Values<'a>>) -> Self {
        Self { dtype, shape, values: values.into(), role: None }
    }
}

/// What is wrong with a tensor's data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor number {tensor}: {source}")]
pub struct TensorError {
    /// Number of the tensor in the caller's list.
    pub tensor: usize,
    /// What is wrong; it names the chunk and the stream.
    pub source: Error,
}

/// Tensors to be encoded, and what with.
pub struct Jobs<'a, E> {
    /// The tensors: all where the engine can read them.
    pub tensors: &'a [TensorValues<'a>],
    /// The plan of each.
    pub plans: &'a [TensorPlan],
    /// What the chunks of deltas are predicted from.
    pub inputs: &'a dyn Inputs<E>,
    /// Threads of the caller's; without any its own thread does the work.
    pub pool: Option<&'a ThreadPool>,
    /// Chunks that the CPU encodes together, while those before are handed to the sink.
    pub window: usize,
}

impl<'a, E: From<TensorError>> Jobs<'a, E> {
    /// Tensors that are predicted from nothing, without threads.
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
        for (tensor, t) in self.tensors.iter().enumerate() {
            let elements = t.shape.iter().try_fold(t.dtype.size() as u64, |n, d| n.checked_mul(*d));
            if elements != Some(t.values.bytes()) {
                let (bytes, shape, dtype) = (t.values.bytes(), t.shape, t.dtype);
                let what = format!("{bytes} bytes of values for shape {shape:?} of {dtype}");
                return Err(TensorError { tensor, source: Error::limit(what) });
            }
        }
        Ok(())
    }

    /// The chunks of some of the tensors, by number.
    pub(crate) fn queue(&self, tensors: impl Iterator<Item = usize>) -> ChunkQueue<'a> {
        let (waiting, chunk) = (tensors.collect(), 0);
        ChunkQueue { tensors: self.tensors, plans: self.plans, waiting, chunk }
    }
}

/// A chunk, encoded.
#[derive(Debug, Clone, Copy)]
pub struct EncodedFrame<'a> {
    /// Number of the tensor in the caller's list.
    pub tensor: usize,
    /// Number of the chunk within it.
    pub chunk: u64,
    /// Its record's content.
    pub encoded: EncodedChunk,
    /// The frame.
    pub bytes: &'a [u8],
    /// Memory that `bytes` are a part of, for whoever wants them longer than the call: zeros follow them there,
    /// up to a multiple of [`ALIGN`](s4_format::limits::ALIGN) from its start. `None`: they have to be copied.
    pub held: Option<&'a Bytes>,
}

impl<'a> EncodedFrame<'a> {
    /// What can be held on to, and where the frame starts in it.
    pub fn place(&self) -> Option<(&'a Bytes, usize)> {
        let held = self.held?;
        Some((held, self.bytes.as_ptr().addr().checked_sub(held.as_ptr().addr())?))
    }
}

/// A chunk that is to be encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    pub(crate) tensor: usize,
    pub(crate) chunk: u64,
    /// Where its values start in those of the tensor.
    #[cfg(feature = "cuda")]
    pub(crate) first: u64,
    /// Bytes of its values.
    pub(crate) bytes: u64,
}

/// Chunks of tensors that are in no group yet, in order.
pub(crate) struct ChunkQueue<'a> {
    pub(crate) tensors: &'a [TensorValues<'a>],
    pub(crate) plans: &'a [TensorPlan],
    /// Tensors by number; chunks of the first one were taken already.
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

    /// Bytes of values of chunks that were not taken yet, and of those of the same tensors that were.
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

    /// Takes the chunk that was looked at.
    pub(crate) fn advance(&mut self) {
        self.chunk += 1;
    }

    /// Pushes the chunk that was taken last back to the front.
    #[cfg(feature = "cuda")]
    pub(crate) fn put_back(&mut self, chunk: &Chunk) {
        if self.waiting.front() != Some(&chunk.tensor) {
            self.waiting.push_front(chunk.tensor);
        }
        self.chunk = chunk.chunk;
    }

    /// Takes as many chunks, or all that there are.
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
    /// Names it in a list of inputs.
    pub(crate) fn name(&self) -> (usize, u64) {
        (self.tensor, self.chunk)
    }
}

/// Runs `work` on all of a list, on the threads of a pool if there is one.
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
