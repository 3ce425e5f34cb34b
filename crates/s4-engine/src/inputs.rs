//! The inputs of predictions: values of a parent checkpoint, and of other tensors of the same checkpoint.

use std::sync::Arc;

use bytes::Bytes;
use s4_format::{ChunkRecord, Digest, Error};
use s4_predict::rank1::Expected;

use crate::{
    Choice, CpuEngine, DecodeJob, DeviceMemory, InputValues, Moment, Scratch, TensorError,
    TensorSpec,
};

/// The inputs that tensors, given by index, are or may be predicted from. Before it starts with a
/// group of chunks, an engine asks once for all of them.
pub trait Inputs<E>: Sync {
    /// The parent's manifest, and the index in it of the tensor that this one may be a delta of.
    fn parent(&self, tensor: usize) -> Option<(Digest, u32)> {
        let _ = tensor;
        None
    }

    /// For each tensor, its parent's values at [`crate::parent_probes`], one run after the other;
    /// empty for a tensor without a parent.
    ///
    /// # Errors
    /// Any failure to read them.
    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, E> {
        Ok(vec![vec![]; tensors.len()])
    }

    /// The prediction that the rows and columns of a tensor's parent make for its values, if the
    /// parent is stored with them. Called after [`Inputs::samples`].
    ///
    /// # Errors
    /// Any failure to read it.
    fn expected(&self, tensor: usize) -> Result<Option<Arc<Expected>>, E> {
        let _ = tensor;
        Ok(None)
    }

    /// The first moment of a tensor, and the second if there is one, from which a difference may be predicted. They are
    /// planned before the tensor is, and stored before it is encoded. Empty if there are none.
    fn moments(&self, tensor: usize) -> &[Moment<'_>] {
        let _ = tensor;
        &[]
    }

    /// The choice made for a tensor in an earlier checkpoint.
    fn choice(&self, tensor: usize) -> Option<Choice> {
        let _ = tensor;
        None
    }

    /// Whether [`Inputs::keep_sample`] wants the samples of tensors.
    fn keeps_samples(&self) -> bool {
        false
    }

    /// Takes a tensor's values at [`crate::parent_probes`], one run after the other: a later checkpoint's
    /// [`Inputs::samples`]. Called from many threads in parallel.
    fn keep_sample(&self, tensor: usize, values: &[u8]) {
        let _ = (tensor, values);
    }

    /// All device memory among the inputs: work queued on its streams is waited for.
    fn memory(&self) -> Vec<DeviceMemory> {
        vec![]
    }

    /// Upper bound of what [`Inputs::open`] gives for a delta's chunk, known without reading it.
    fn size(&self, tensor: usize, chunk: u64) -> InputSize;

    /// The inputs of a group of deltas' chunks, given by tensor and chunk index: one for each.
    ///
    /// # Errors
    /// Any failure to read them.
    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, E>;

    /// The values of an [`Input::Late`]: where they lie, or in `buffer`. Empty if they belong to a tensor of the same
    /// checkpoint and have changed since they were stored: the chunk is then stored plain.
    ///
    /// # Errors
    /// Any failure to read them.
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

/// The size of an [`Input`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InputSize {
    /// Bytes in host memory, each frame rounded up to a multiple of 16; 0 if the input is in device memory.
    pub bytes: u64,
    /// Number of frames; 0 if the input is values.
    pub frames: u32,
}

/// The values that a chunk is predicted from, as many as its own. For a rounded copy they are twice as wide.
#[derive(Debug, Clone)]
pub enum Input<'a> {
    /// In the memory of the chunk's device.
    Device(DeviceMemory),
    /// In host memory. Empty if they belong to a tensor of the same checkpoint and have changed
    /// since they were stored.
    Host(Bytes),
    /// In the memory of the chunk's device, where they may change. They are used only if a copy,
    /// taken as consecutive parts, has the bytes and CRC-32C of each part that were stored.
    Stored {
        /// The values.
        values: DeviceMemory,
        /// Bytes and checksum of each part.
        parts: Vec<(u64, u32)>,
    },
    /// Frames to decode them from: the first one on its own, each later one as a difference from
    /// the values decoded before.
    Frames(Vec<InputFrame<'a>>),
    /// Read through [`Inputs::read`] by the thread that needs them, when it needs them: they are
    /// then in its cache.
    Late,
}

/// A frame that an input's values are decoded from.
#[derive(Debug, Clone)]
pub struct InputFrame<'a> {
    /// The properties of its tensor.
    pub spec: TensorSpec<'a>,
    /// Its record.
    pub record: ChunkRecord,
    /// The frame.
    pub bytes: Bytes,
}

/// For tensors that are all stored without inputs.
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

/// The error for a delta whose input is missing.
pub(crate) fn missing(tensor: usize, chunk: u64) -> TensorError {
    let source = Error::unsupported("delta without its parent's values").in_chunk(chunk);
    TensorError { tensor, source }
}

/// The error for a delta whose moments are missing.
pub(crate) fn missing_moments(tensor: usize, chunk: u64) -> TensorError {
    let source =
        Error::unsupported("delta without the moments that it is predicted from").in_chunk(chunk);
    TensorError { tensor, source }
}

/// Decodes frames on top of each other into the values of chunk `chunk`, of `bytes` bytes.
pub(crate) fn decode_frames(
    cpu: &CpuEngine,
    frames: &[InputFrame<'_>],
    chunk: u64,
    bytes: usize,
    scratch: &mut Scratch,
) -> s4_format::Result<Vec<u8>> {
    if frames.is_empty() {
        return Err(Error::corrupt("parent has no frame").in_chunk(chunk));
    }
    let mut values = vec![0; bytes];
    for (i, f) in frames.iter().enumerate() {
        let (spec, record, frame) = (&f.spec, &f.record, &f.bytes[..]);
        // All but the first are differences from the values decoded before.
        let inputs: &[InputValues<'_>] = if i == 0 { &[] } else { &[InputValues::Destination] };
        let job = DecodeJob { spec, chunk, record, frame, inputs };
        let decoded = cpu.decode(&job, scratch, &mut values);
        decoded.map_err(|e| e.in_part("parent"))?;
    }
    Ok(values)
}
