//! What tensors are predicted from: the values of a parent checkpoint, and of other tensors of the same.

use std::sync::Arc;

use bytes::Bytes;
use s4_format::{ChunkRecord, Digest, Error};
use s4_predict::rank1::Expected;

use crate::{
    Choice, CpuEngine, DecodeJob, DeviceMemory, InputValues, Moment, Scratch, TensorError,
    TensorSpec,
};

/// What some tensors, by number, are or may be predicted from. An engine asks before it begins with a
/// group of chunks, once for all of them.
pub trait Inputs<E>: Sync {
    /// The parent's manifest and the number of the tensor in it that a tensor may be a delta of.
    fn parent(&self, tensor: usize) -> Option<(Digest, u32)> {
        let _ = tensor;
        None
    }

    /// The parents' values at [`crate::parent_probes`], one run after the other, for some tensors; nothing
    /// for one without a parent.
    ///
    /// # Errors
    /// What keeps them from being read.
    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, E> {
        Ok(vec![vec![]; tensors.len()])
    }

    /// What the rows and columns of a tensor's parent say of its values, if these are stored so. Asked for after
    /// [`Inputs::samples`].
    ///
    /// # Errors
    /// What keeps it from being read.
    fn expected(&self, tensor: usize) -> Result<Option<Arc<Expected>>, E> {
        let _ = tensor;
        Ok(None)
    }

    /// The moments of a tensor, first and second, of which the contexts of a difference may be told. They are stored
    /// already.
    fn moments(&self, tensor: usize) -> Option<&[Moment<'_>; 2]> {
        let _ = tensor;
        None
    }

    /// What was chosen for a tensor in an earlier checkpoint.
    fn choice(&self, tensor: usize) -> Option<Choice> {
        let _ = tensor;
        None
    }

    /// Whether [`Inputs::keep_sample`] wants the samples of tensors.
    fn keeps_samples(&self) -> bool {
        false
    }

    /// Takes a tensor's values at [`crate::parent_probes`], one run after the other: a later checkpoint's
    /// [`Inputs::samples`]. Called from many threads at once.
    fn keep_sample(&self, tensor: usize, values: &[u8]) {
        let _ = (tensor, values);
    }

    /// All memory of devices that is given: what is queued on its streams is waited for.
    fn memory(&self) -> Vec<DeviceMemory> {
        vec![]
    }

    /// What [`Inputs::open`] gives of a delta's chunk, at most: known without reading it.
    fn size(&self, tensor: usize, chunk: u64) -> InputSize;

    /// The inputs of a group of deltas' chunks, by numbers of tensors and chunks, one for each.
    ///
    /// # Errors
    /// What keeps them from being read.
    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, E>;

    /// The values of an input that is [`Input::Late`]: where they lie, or in `buffer`. Nothing, of a tensor of the same
    /// checkpoint, if they are no longer what was stored of it: then the chunk is stored as it is.
    ///
    /// # Errors
    /// What keeps them from being read.
    fn read<'b>(
        &'b self,
        tensor: usize,
        chunk: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], E> {
        let _ = (tensor, chunk);
        Ok(buffer)
    }
}

/// How much an [`Input`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InputSize {
    /// Bytes in the memory of the host, each frame rounded up to a multiple of 16. None: they are in the device's.
    pub bytes: u64,
    /// Frames; 0: they are values.
    pub frames: u32,
}

/// The values that a chunk is predicted from, as many as its own: of a rounded copy twice as wide.
#[derive(Debug, Clone)]
pub enum Input<'a> {
    /// In the memory of the chunk's device.
    Device(DeviceMemory),
    /// In the memory of the host. None, of a tensor of the same checkpoint: they are no longer what was stored of it.
    Host(Bytes),
    /// In the memory of the chunk's device, where they may change: they are used if the parts of a copy, one behind the
    /// other, have these bytes and CRC-32C each, as what was stored of them.
    Stored {
        /// The values.
        values: DeviceMemory,
        /// Bytes and checksum of each part.
        parts: Vec<(u64, u32)>,
    },
    /// What they are decoded from: the first frame by itself, each other one as the difference from
    /// what was decoded before.
    Frames(Vec<InputFrame<'a>>),
    /// Read by the thread that needs them, when it needs them ([`Inputs::read`]): then they are in its
    /// cache.
    Late,
}

/// A frame that an input's values are decoded from.
#[derive(Debug, Clone)]
pub struct InputFrame<'a> {
    /// What decoding needs to know of its tensor.
    pub spec: TensorSpec<'a>,
    /// Its record.
    pub record: ChunkRecord,
    /// The frame.
    pub bytes: Bytes,
}

/// For tensors that are all stored by themselves.
#[derive(Debug, Clone, Copy)]
pub struct NoInputs;

impl<E: From<TensorError>> Inputs<E> for NoInputs {
    fn size(&self, _: usize, _: u64) -> InputSize {
        InputSize::default()
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, E> {
        match chunks.first() {
            None => Ok(vec![]),
            Some(&(tensor, chunk)) => Err(missing(tensor, chunk).into()),
        }
    }
}

/// What a delta without its input is.
pub(crate) fn missing(tensor: usize, chunk: u64) -> TensorError {
    let source = Error::unsupported("a delta without the values of its parent").in_chunk(chunk);
    TensorError { tensor, source }
}

/// What a delta with contexts from moments is without these.
pub(crate) fn missing_moments(tensor: usize, chunk: u64) -> TensorError {
    let source = Error::unsupported("contexts `update` without moments").in_chunk(chunk);
    TensorError { tensor, source }
}

/// Decodes frames one on top of the other: the values of chunk `chunk`, of `bytes` bytes.
pub(crate) fn decode_frames(
    cpu: &CpuEngine,
    frames: &[InputFrame<'_>],
    chunk: u64,
    bytes: usize,
    scratch: &mut Scratch,
) -> s4_format::Result<Vec<u8>> {
    if frames.is_empty() {
        return Err(Error::corrupt("a parent without a frame").in_chunk(chunk));
    }
    let mut values = vec![0; bytes];
    for (i, f) in frames.iter().enumerate() {
        let (spec, record, frame) = (&f.spec, &f.record, &f.bytes[..]);
        // All but the first are differences from what was decoded before.
        let inputs: &[InputValues<'_>] = if i == 0 { &[] } else { &[InputValues::Destination] };
        let job = DecodeJob { spec, chunk, record, frame, inputs };
        let decoded = cpu.decode(&job, scratch, &mut values);
        decoded.map_err(|e| e.in_part("parent"))?;
    }
    Ok(values)
}
