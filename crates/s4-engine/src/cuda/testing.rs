//! Tensors in host memory, encoded and decoded on a device: copied there, worked on and copied back.
//!
//! For self-tests, which compare a device with the CPU engine; not part of the crate's API. Callers with tensors in
//! device memory use [`Engine::encode`] and [`CudaEngine::decode`], which copy no values.

use std::sync::Arc;

use s4_codec_gpu::{Device, DeviceBuffer, GpuError, Pinned, Pool, Stream};
use s4_format::ChunkRecord;
use s4_format::side::Side;

use super::error::{Of, Result};
use super::{CudaEngine, CudaError, Decoder, Destination, DeviceMemory, FrameJob, Trusted};
use crate::{
    CpuEngine, EncodeJob, EncodedChunk, Engine, Jobs, NoInputs, PlanJob, Preset, Scratch,
    TensorPlan, TensorSpec, TensorValues, TensorView,
};

/// A tensor as an engine encoded it.
#[derive(Debug, Clone)]
pub struct CodedTensor {
    /// The plan.
    pub plan: TensorPlan,
    /// Side data, shared tables included if a chunk uses them.
    pub side: Side,
    /// The record and the frame of each chunk.
    pub chunks: Vec<(EncodedChunk, Vec<u8>)>,
}

impl CodedTensor {
    fn new(plan: TensorPlan, chunks: Vec<(EncodedChunk, Vec<u8>)>) -> s4_format::Result<Self> {
        let side = plan.side_data(chunks.iter().any(|c| c.0.shared))?;
        Ok(Self { plan, side, chunks })
    }

    /// Encodes a tensor on the CPU.
    ///
    /// # Errors
    /// Errors of a codec.
    pub fn by_cpu(
        cpu: &CpuEngine,
        preset: Preset,
        view: &TensorView<'_>,
    ) -> s4_format::Result<Self> {
        let mut scratch = Scratch::default();
        let plan = cpu.plan(&PlanJob::new(preset, view), &mut scratch)?;
        let values = (view.data.len() / view.dtype.value_width()) as u64;
        let chunk = |chunk| {
            let mut frame = vec![];
            let job = EncodeJob { view, plan: &plan, chunk, inputs: &[] };
            let e = cpu.encode(&job, &mut scratch, &mut frame)?;
            Ok((e, frame))
        };
        let count = s4_format::index::chunk_count(values, plan.chunk_log2);
        let chunks = (0..count).map(chunk).collect::<s4_format::Result<_>>()?;
        Self::new(plan, chunks)
    }

    /// Decodes the tensor on the CPU; `view` gives its dtype and shape.
    ///
    /// # Errors
    /// As [`CpuEngine::decode`].
    pub fn decode_by_cpu(
        &self,
        cpu: &CpuEngine,
        view: &TensorView<'_>,
    ) -> s4_format::Result<Vec<u8>> {
        let mut scratch = Scratch::default();
        let mut values = vec![0; view.data.len()];
        let spec = self.spec(view);
        for (i, part) in values.chunks_mut(self.chunk_bytes(view)).enumerate() {
            let (record, frame) = (self.record(i), &self.chunks[i].1);
            let (spec, record, chunk) = (&spec, &record, i as u64);
            let job = crate::DecodeJob { spec, chunk, record, frame, inputs: &[] };
            cpu.decode(&job, &mut scratch, part)?;
        }
        Ok(values)
    }

    fn spec<'a>(&'a self, view: &TensorView<'a>) -> TensorSpec<'a> {
        TensorSpec {
            dtype: view.dtype,
            shape: view.shape,
            plan: &self.plan.plan,
            side: &self.side,
            chunk_log2: self.plan.chunk_log2,
        }
    }

    fn record(&self, chunk: usize) -> ChunkRecord {
        let (e, frame) = &self.chunks[chunk];
        ChunkRecord {
            offset: 0,
            object: 0,
            // A frame is never longer than the chunk's values.
            len: u32::try_from(frame.len()).unwrap_or(u32::MAX),
            plain: e.plain,
            crc_encoded: e.crc_encoded,
            crc_raw: e.crc_raw,
        }
    }

    fn chunk_bytes(&self, view: &TensorView<'_>) -> usize {
        view.dtype.value_width() << self.plan.chunk_log2
    }
}

/// An engine and one of its devices, with a stream and memory for copies.
#[derive(Debug)]
pub struct Copies<'a> {
    engine: &'a CudaEngine,
    device: Arc<Device>,
    stream: Arc<Stream>,
    pool: Arc<Pool>,
}

impl<'a> Copies<'a> {
    /// Opens the device with this ordinal.
    ///
    /// # Errors
    /// `Gpu`.
    pub fn new(engine: &'a CudaEngine, ordinal: u32) -> Result<Self> {
        let device = engine.cuda().device(ordinal)?;
        let stream = Arc::new(Stream::new(&device)?);
        let pool = Pool::new(&device, u64::MAX);
        Ok(Self { engine, device, stream, pool })
    }

    /// Copies bytes to new memory of the device.
    ///
    /// # Errors
    /// `Gpu`.
    pub fn upload(&self, bytes: &[u8]) -> Result<DeviceBuffer> {
        let buffer = self.pool.alloc(&self.stream, bytes.len() as u64, "a copy of a tensor")?;
        self.overwrite(&buffer, bytes)?;
        Ok(buffer)
    }

    /// Copies bytes to memory of the device, as many as it has.
    ///
    /// # Errors
    /// `Gpu`; `Argument` if the sizes differ.
    pub fn overwrite(&self, buffer: &DeviceBuffer, bytes: &[u8]) -> Result<()> {
        if buffer.bytes() != bytes.len() as u64 {
            let what = format!("{} bytes for a buffer of {}", bytes.len(), buffer.bytes());
            return Err(GpuError::Argument(what).into());
        }
        let pinned = Pinned::new(&self.device, bytes.len())?;
        // SAFETY: memory that the caller and this type alone know; the copy is waited for.
        unsafe {
            pinned.slice_mut(0, bytes.len()).copy_from_slice(bytes);
            self.stream.copy_to_device(&pinned, 0, bytes.len(), buffer.address())?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// Copies the bytes of memory of the device to the host.
    ///
    /// # Errors
    /// `Gpu`.
    pub fn download(&self, buffer: &DeviceBuffer) -> Result<Vec<u8>> {
        let len = usize::try_from(buffer.bytes()).unwrap_or(usize::MAX);
        let pinned = Pinned::new(&self.device, len)?;
        // SAFETY: as above.
        unsafe {
            self.stream.copy_to_host(buffer.address(), &pinned, 0, len)?;
            self.stream.synchronize()?;
            Ok(pinned.slice(0, len).to_vec())
        }
    }

    /// The memory, for a call of the engine that the buffer outlives.
    pub fn memory(&self, buffer: &DeviceBuffer) -> DeviceMemory {
        // SAFETY: the buffers outlive the engine's call that they are made for, and are used by
        // nothing else meanwhile; what was queued before was waited for.
        unsafe { DeviceMemory::new(self.device.ordinal(), buffer.address(), buffer.bytes(), 0) }
    }

    /// Copies tensors to the device and encodes them there.
    ///
    /// # Errors
    /// As [`Engine::plan`] and [`Engine::encode`].
    pub fn encode(&self, preset: Preset, tensors: &[TensorView<'_>]) -> Result<Vec<CodedTensor>> {
        let uploads = tensors.iter().map(|t| self.upload(t.data));
        let uploads = uploads.collect::<Result<Vec<_>>>()?;
        let pairs = tensors.iter().zip(&uploads);
        let on_device: Vec<_> =
            pairs.map(|(t, b)| TensorValues::new(t.dtype, t.shape, self.memory(b))).collect();
        let plans = self.engine.plan::<CudaError>(preset, &on_device, &NoInputs, None)?;
        let mut chunks: Vec<Vec<_>> = tensors.iter().map(|_| vec![]).collect();
        self.engine.encode(&Jobs::<CudaError>::new(&on_device, &plans), |frames| {
            for frame in frames {
                chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
            }
            Ok(())
        })?;
        let coded = plans.into_iter().zip(chunks).enumerate();
        coded.map(|(i, (plan, chunks))| CodedTensor::new(plan, chunks).of(i)).collect()
    }

    /// Decodes tensors on the device and copies their values back. The views give dtypes and shapes,
    /// `trusted` is what [`CudaEngine::decode`] takes.
    ///
    /// # Errors
    /// As [`CudaEngine::decode`]; `Argument` if the lists differ in length, or a tensor does not
    /// have the number of chunks that its size requires.
    pub fn decode(
        &self,
        trusted: Option<&Trusted>,
        tensors: &[TensorView<'_>],
        coded: &[CodedTensor],
    ) -> Result<Vec<Vec<u8>>> {
        let sizes = |(t, c): (&TensorView<'_>, &CodedTensor)| {
            t.data.len().div_ceil(c.chunk_bytes(t)) == c.chunks.len()
        };
        if tensors.len() != coded.len() || !tensors.iter().zip(coded).all(sizes) {
            let what = "encoded tensors that are not those of the views";
            return Err(GpuError::Argument(what.into()).into());
        }
        let ordinal = self.device.ordinal();
        // Not zeros, so that values that were not written show.
        let buffers = tensors.iter().map(|t| self.upload(&vec![0xee; t.data.len()]));
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let memory: Vec<_> = buffers.iter().map(|b| self.memory(b)).collect();
        self.engine.decode::<CudaError>(&memory, trusted, |decoder| {
            let mut span = Span::default();
            for (number, (t, c)) in tensors.iter().zip(coded).enumerate() {
                for chunk in 0..c.chunks.len() {
                    if span.bytes.len() + c.chunks[chunk].1.len() + 16 > decoder.room() {
                        std::mem::take(&mut span).push(decoder, ordinal)?;
                    }
                    span.add((number, t, c), chunk, memory[number])?;
                }
            }
            span.push(decoder, ordinal)
        })?;
        buffers.iter().map(|b| self.download(b)).collect()
    }
}

/// Consecutive frames, as they are in a file.
#[derive(Default)]
struct Span<'a> {
    bytes: Vec<u8>,
    jobs: Vec<FrameJob<'a>>,
}

impl<'a> Span<'a> {
    fn add(
        &mut self,
        (number, view, coded): (usize, &TensorView<'a>, &'a CodedTensor),
        chunk: usize,
        to: DeviceMemory,
    ) -> Result<()> {
        let size = coded.chunk_bytes(view);
        let bytes = size.min(view.data.len() - chunk * size) as u64;
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        self.jobs.push(FrameJob {
            tensor: number,
            spec: coded.spec(view),
            chunk: chunk as u64,
            record: coded.record(chunk),
            at: self.bytes.len(),
            bytes,
            destinations: vec![Destination { from: 0, to: to.part((chunk * size) as u64, bytes)? }],
            input: None,
            moments: None,
        });
        self.bytes.extend_from_slice(&coded.chunks[chunk].1);
        Ok(())
    }

    fn push(self, decoder: &mut Decoder<'_, 'a>, ordinal: u32) -> Result<()> {
        decoder.push(ordinal, self.bytes.len(), self.jobs, |to| {
            to.copy_from_slice(&self.bytes);
            Ok(())
        })
    }
}
