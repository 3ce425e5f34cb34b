//! The parent of a checkpoint, as a writer sees it.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use s4_engine::{Expected, TensorView};
use s4_format::{DType, Digest, crc32c};

use crate::buffers::LargeBuffers;
use crate::error::{Error, ParentProblem, Result};
use crate::memory::{Compressed, TensorCodec};
use crate::reader::Reader;

/// A tensor of a parent checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParentTensor<'a> {
    /// Its number in the parent's tensor table.
    pub number: u32,
    /// Type of its elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
}

/// The requested bytes of a tensor's values.
#[derive(Debug)]
pub struct ParentRange<'a> {
    /// Number of the tensor.
    pub tensor: u32,
    /// First byte within the tensor.
    pub first: u64,
    /// Where they go.
    pub to: &'a mut [u8],
}

/// The checkpoint that deltas are computed from: an open [`crate::Reader`], values still in memory
/// ([`MemoryParent`]), or a caller's implementation. It is identified by the hash of its manifest, and must
/// return the values of that checkpoint.
pub trait Parent: Send + Sync {
    /// BLAKE3 of its manifest.
    fn digest(&self) -> Digest;

    /// Checkpoints from it down to its base, both counted: 1 if it is a base.
    fn depth(&self) -> u32;

    /// The tensor of this name, if there is one and its values are available.
    fn find(&self, name: &str) -> Option<ParentTensor<'_>>;

    /// Fills ranges of tensors that [`Parent::find`] gave. Called from many threads at once.
    ///
    /// # Errors
    /// If values cannot be read; [`Error::Parent`] if they are not the checkpoint's.
    fn read(&self, ranges: &mut [ParentRange<'_>]) -> Result<()>;

    /// Borrows `len` bytes of a tensor, from byte `first` on. `None` if the values cannot be used in place, and
    /// must be copied by [`Parent::read`].
    ///
    /// # Errors
    /// As [`Parent::read`].
    fn in_memory(&self, tensor: u32, first: u64, len: usize) -> Result<Option<&[u8]>> {
        let _ = (tensor, first, len);
        Ok(None)
    }

    /// Whether one call for many ranges is much faster than many calls. Such a parent is given the ranges of
    /// many chunks at once, and uses threads of its own.
    fn is_remote(&self) -> bool {
        false
    }

    /// Whether reading a tensor that [`Parent::find`] gave, or what it is a delta of, needs other
    /// tensors of its checkpoint. Contexts are never derived from moments that are deltas of such a
    /// tensor. If this is unknown, the answer is `true`.
    fn needs_others(&self, tensor: u32) -> bool {
        let _ = tensor;
        true
    }

    /// The row and column offsets of a tensor that [`Parent::find`] gave, if it is stored with any. The
    /// tensor is then predicted from both, if that is smaller.
    ///
    /// # Errors
    /// As [`Parent::read`].
    fn expected(&self, tensor: u32) -> Result<Option<Arc<Expected>>> {
        let _ = tensor;
        Ok(None)
    }

    /// The open checkpoint that holds the frames of a tensor that [`Parent::find`] gave, if they
    /// are quick to get: a device decodes them itself. Otherwise it gets the values from
    /// [`Parent::read`].
    fn frames_of(&self, tensor: u32) -> Option<&Reader> {
        let _ = tensor;
        None
    }
}

/// The checksums of a checkpoint's values: enough to check whether values in memory are still those.
/// A [`crate::Writer`] returns one when it is done, and a [`crate::Reader`] on request.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) digest: Digest,
    pub(crate) depth: u32,
    pub(crate) tensors: HashMap<String, SnapshotTensor>,
}

/// A tensor with chunks of its own.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotTensor {
    pub(crate) number: u32,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
    pub(crate) chunk_log2: u8,
    /// The answer of [`Parent::needs_others`].
    pub(crate) needs_others: bool,
    /// The answer of [`Parent::expected`].
    pub(crate) expected: Option<Arc<Expected>>,
    /// CRC-32C of the values of each chunk.
    pub(crate) checksums: Vec<u32>,
}

impl Snapshot {
    /// BLAKE3 of the checkpoint's manifest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Checkpoints from it down to its base, both counted.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Names of the tensors that deltas can be computed from: all except small ones, in any order.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}

impl SnapshotTensor {
    fn chunk_bytes(&self) -> usize {
        self.dtype.value_width() << self.chunk_log2
    }
}

/// A parent whose values are still in memory, raw or compressed. Every whole chunk that is read from it
/// is compared with the checkpoint's checksum first, so values that have changed since are an error and
/// never a wrong delta.
pub struct MemoryParent {
    snapshot: Arc<Snapshot>,
    budget: usize,
    used: usize,
    /// By number of the tensor, with its name.
    held: HashMap<u32, (String, Held)>,
    rest: Option<Arc<dyn Parent>>,
}

enum Held {
    /// The caller's memory, which may change.
    Theirs(Bytes),
    /// Memory that never changes.
    Own(Bytes),
    Compressed(Arc<TensorCodec>, Compressed),
}

impl MemoryParent {
    /// A parent without values yet. `budget`: bytes that compressed values may take.
    pub fn new(snapshot: Arc<Snapshot>, budget: usize) -> Self {
        Self { snapshot, budget, used: 0, held: HashMap::new(), rest: None }
    }

    /// Values that are not in memory are read from `rest`: the same checkpoint, opened.
    ///
    /// # Errors
    /// [`Error::Parent`] if it is another checkpoint.
    pub fn with_rest(mut self, rest: Arc<dyn Parent>) -> Result<Self> {
        if rest.digest() != self.snapshot.digest {
            return Err(self.problem(None, ParentProblem::OtherHash(rest.digest())));
        }
        self.rest = Some(rest);
        Ok(self)
    }

    /// Holds a tensor's values as they are: `bytes` owns, or keeps alive, the caller's memory. They
    /// are compared with the checkpoint's checksums when they are used. A tensor that cannot have
    /// deltas (small, or not of the checkpoint) is ignored.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are not as many bytes as the tensor has.
    pub fn hold(&mut self, name: &str, values: Bytes) -> Result<()> {
        self.insert(name, values, Held::Theirs)
    }

    /// As [`MemoryParent::hold`], for bytes that no longer change: deltas are computed from them in place,
    /// without a copy of each part.
    ///
    /// # Errors
    /// As [`MemoryParent::hold`].
    pub fn own(&mut self, name: &str, values: Bytes) -> Result<()> {
        self.insert(name, values, Held::Own)
    }

    /// As [`MemoryParent::own`], for a copy of values that may change meanwhile.
    ///
    /// # Errors
    /// As [`MemoryParent::hold`]; [`Error::Parent`] if the copied values are not the checkpoint's.
    pub(crate) fn own_copy(
        &mut self,
        name: &str,
        values: &[u8],
        buffers: &LargeBuffers,
    ) -> Result<()> {
        let snapshot = Arc::clone(&self.snapshot);
        let Some(tensor) = snapshot.tensors.get(name) else { return Ok(()) };
        let mut copy = buffers.take(values.len());
        // Chunk by chunk, so that each is still in a cache when it is compared.
        for (chunk, values) in values.chunks(tensor.chunk_bytes()).enumerate() {
            let start = copy.len();
            copy.extend_from_slice(values);
            // The copy is compared: the compiler must not read the values a second time instead.
            self.check(name, tensor, chunk, &black_box(&mut *copy)[start..])?;
        }
        self.own(name, copy.into())
    }

    fn insert(&mut self, name: &str, values: Bytes, held: fn(Bytes) -> Held) -> Result<()> {
        let Some(tensor) = self.snapshot.tensors.get(name) else { return Ok(()) };
        if values.len() as u64 != tensor.bytes {
            let what =
                format!("tensor `{name}`: got {} bytes, expected {}", values.len(), tensor.bytes);
            return Err(Error::Argument(what));
        }
        self.held.insert(tensor.number, (name.to_owned(), held(values)));
        Ok(())
    }

    /// Keeps a tensor's values compressed, if the budget allows; returns whether it did.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are not as many bytes as the tensor has, [`Error::Parent`] if
    /// they are not the checkpoint's.
    pub fn keep(&mut self, codec: &Arc<TensorCodec>, name: &str, values: &[u8]) -> Result<bool> {
        let snapshot = Arc::clone(&self.snapshot);
        let Some(tensor) = snapshot.tensors.get(name) else { return Ok(false) };
        if values.len() as u64 != tensor.bytes {
            let what =
                format!("tensor `{name}`: got {} bytes, expected {}", values.len(), tensor.bytes);
            return Err(Error::Argument(what));
        }
        let foreign = tensor.chunk_log2 != s4_engine::chunk_log2(tensor.dtype);
        if self.used >= self.budget || foreign {
            return Ok(false);
        }
        let view = TensorView { dtype: tensor.dtype, shape: &tensor.shape, data: values };
        let compressed = codec.compress(&view)?;
        // Compares what was compressed, even if the values have changed meanwhile.
        let pairs = compressed.checksums().zip(&tensor.checksums);
        if let Some((chunk, _)) = (0..).zip(pairs).find(|(_, (kept, stored))| kept != *stored) {
            return Err(self.problem(Some(name), ParentProblem::Changed { chunk }));
        }
        if compressed.bytes() > self.budget - self.used {
            return Ok(false);
        }
        self.used += compressed.bytes();
        let held = Held::Compressed(Arc::clone(codec), compressed);
        self.held.insert(tensor.number, (name.to_owned(), held));
        Ok(true)
    }

    /// Bytes that compressed values take.
    pub fn used(&self) -> usize {
        self.used
    }

    fn check(
        &self,
        name: &str,
        tensor: &SnapshotTensor,
        chunk: usize,
        values: &[u8],
    ) -> Result<()> {
        if tensor.checksums.get(chunk) == Some(&crc32c(values)) {
            return Ok(());
        }
        Err(self.problem(Some(name), ParentProblem::Changed { chunk: chunk as u64 }))
    }

    fn problem(&self, tensor: Option<&str>, problem: ParentProblem) -> Error {
        Error::Parent {
            target: "memory".into(),
            tensor: tensor.map(str::to_owned),
            parent: self.snapshot.digest,
            problem,
        }
    }

    /// What is known of a held tensor, and the offset of its byte `first`, after checking that it
    /// has `len` bytes from there on.
    fn place(
        &self,
        tensor: u32,
        name: &str,
        first: u64,
        len: usize,
    ) -> Result<(&SnapshotTensor, usize)> {
        let Some(known) = self.snapshot.tensors.get(name) else {
            return Err(self.problem(Some(name), ParentProblem::NoTensor(tensor)));
        };
        // Fits in `usize`: the values are in memory.
        let bytes = known.bytes as usize;
        let first = usize::try_from(first).ok();
        let first = first.filter(|f| f.checked_add(len).is_some_and(|end| end <= bytes));
        let outside = || Error::Argument(format!("tensor `{name}`: range extends past its end"));
        Ok((known, first.ok_or_else(outside)?))
    }

    /// Compares values from byte `first` on with the checkpoint's checksums. Chunks that are not
    /// read as a whole are not compared: such reads only serve to estimate whether a delta would
    /// pay.
    fn compare(
        &self,
        name: &str,
        tensor: &SnapshotTensor,
        first: usize,
        values: &[u8],
    ) -> Result<()> {
        let (size, end) = (tensor.chunk_bytes(), first + values.len());
        for chunk in first.div_ceil(size)..end.div_ceil(size) {
            let from = chunk * size;
            let to = (from + size).min(tensor.bytes as usize);
            if to <= end {
                self.check(name, tensor, chunk, &values[from - first..to - first])?;
            }
        }
        Ok(())
    }

    /// Decompresses a range, chunk by chunk, and compares it with the checkpoint's checksums.
    fn decompress(
        &self,
        range: &mut ParentRange<'_>,
        name: &str,
        codec: &TensorCodec,
        tensor: &Compressed,
    ) -> Result<()> {
        let (known, mut at) = self.place(range.tensor, name, range.first, range.to.len())?;
        let (size, bytes) = (known.chunk_bytes(), known.bytes as usize);
        let mut rest = &mut *range.to;
        let mut whole = vec![];
        while !rest.is_empty() {
            let (chunk, from) = (at / size, at % size);
            let len = size.min(bytes - chunk * size);
            let (now, later) = rest.split_at_mut(rest.len().min(len - from));
            if now.len() == len {
                codec.decompress_chunk(tensor, chunk, now)?;
            } else {
                whole.resize(len, 0);
                codec.decompress_chunk(tensor, chunk, &mut whole)?;
                now.copy_from_slice(&whole[from..from + now.len()]);
            }
            at += now.len();
            rest = later;
        }
        self.compare(name, known, at - range.to.len(), range.to)
    }
}

impl Parent for MemoryParent {
    fn digest(&self) -> Digest {
        self.snapshot.digest
    }

    fn depth(&self) -> u32 {
        self.snapshot.depth
    }

    fn find(&self, name: &str) -> Option<ParentTensor<'_>> {
        let held = self.snapshot.tensors.get(name).filter(|t| self.held.contains_key(&t.number));
        let known =
            held.map(|t| ParentTensor { number: t.number, dtype: t.dtype, shape: &t.shape });
        known.or_else(|| self.rest.as_ref()?.find(name))
    }

    fn read(&self, ranges: &mut [ParentRange<'_>]) -> Result<()> {
        let mut others = vec![];
        for range in ranges {
            match self.held.get(&range.tensor) {
                Some((name, Held::Theirs(values) | Held::Own(values))) => {
                    let len = range.to.len();
                    let (tensor, first) = self.place(range.tensor, name, range.first, len)?;
                    // Compares what is used, even if the caller's memory changes meanwhile.
                    range.to.copy_from_slice(&values[first..first + len]);
                    self.compare(name, tensor, first, range.to)?;
                }
                Some((name, Held::Compressed(codec, tensor))) => {
                    self.decompress(range, name, codec, tensor)?;
                }
                None => others.push(ParentRange {
                    tensor: range.tensor,
                    first: range.first,
                    to: &mut *range.to,
                }),
            }
        }
        match (&self.rest, others.first()) {
            (_, None) => Ok(()),
            (Some(rest), _) => rest.read(&mut others),
            (None, Some(range)) => Err(self.problem(None, ParentProblem::NoTensor(range.tensor))),
        }
    }

    fn in_memory(&self, tensor: u32, first: u64, len: usize) -> Result<Option<&[u8]>> {
        match self.held.get(&tensor) {
            Some((name, Held::Own(values))) => {
                let (tensor, first) = self.place(tensor, name, first, len)?;
                let values = &values[first..first + len];
                self.compare(name, tensor, first, values)?;
                Ok(Some(values))
            }
            _ => Ok(None),
        }
    }

    fn needs_others(&self, tensor: u32) -> bool {
        // `rest` is the same checkpoint.
        match (self.held.get(&tensor), &self.rest) {
            (Some((name, _)), _) => self.snapshot.tensors.get(name).is_none_or(|t| t.needs_others),
            (None, Some(rest)) => rest.needs_others(tensor),
            (None, None) => true,
        }
    }

    fn expected(&self, tensor: u32) -> Result<Option<Arc<Expected>>> {
        match (self.held.get(&tensor), &self.rest) {
            (Some((name, _)), _) => {
                Ok(self.snapshot.tensors.get(name).and_then(|t| t.expected.clone()))
            }
            (None, Some(rest)) => rest.expected(tensor),
            (None, None) => Ok(None),
        }
    }

    fn is_remote(&self) -> bool {
        self.rest.as_ref().is_some_and(|r| r.is_remote())
    }

    fn frames_of(&self, tensor: u32) -> Option<&Reader> {
        let rest = self.rest.as_ref().filter(|_| !self.held.contains_key(&tensor));
        rest.and_then(|r| r.frames_of(tensor))
    }
}
