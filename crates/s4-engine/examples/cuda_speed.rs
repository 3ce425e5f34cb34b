//! Times the CUDA engine on tensors like trained weights: device memory to pinned frames and back,
//! beside plain copies of the raw bytes. `cuda_speed [MiB]`.

use std::sync::Arc;
use std::time::Instant;

use s4_codec_gpu::{Cuda, DeviceBuffer, Pinned, Pool, Stream};
use s4_engine::cuda::{
    CudaEngine, CudaError, CudaOptions, DecodeJob, DeviceMemory, DeviceTensor, Piece,
};
use s4_engine::{EncodedChunk, Preset, TensorPlan, TensorSpec};
use s4_format::{ChunkRecord, DType};
use s4_planes::patterns::{self, Kind};

type Outcome<T> = Result<T, CudaError>;

/// Bytes of a pattern, repeated to fill a tensor.
const PART: usize = 32 << 20;

fn main() -> Outcome<()> {
    let mib = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1024u64);
    let cuda = Cuda::discover()?;
    let device = cuda.device(0)?;
    let stream = Arc::new(Stream::new(&device)?);
    println!("{} with CUDA {:?}", device.info().name, cuda.version());
    let pool = Pool::new(&device, u64::MAX)?;
    for (dtype, kind) in [(DType::BFloat16, Kind::BF16), (DType::Float32, Kind::F32)] {
        let Some((_, part)) =
            patterns::all(kind, PART / dtype.size()).find(|p| p.0 == "like-weights")
        else {
            continue;
        };
        let bytes = (mib << 20) / PART as u64 * PART as u64;
        let (from, to) =
            (fill(&stream, &pool, &part, bytes)?, pool.alloc(&stream, bytes, "values")?);
        stream.synchronize()?;
        let engine = CudaEngine::new(cuda.clone(), CudaOptions::default());
        let raw = copy(&device, &stream, &from)?;
        println!("{dtype}, {bytes} bytes; a plain copy to pinned memory: {raw:.4} s");
        for round in 0..3 {
            let shape = [bytes / dtype.size() as u64];
            let tensor = DeviceTensor { dtype, shape: &shape, memory: memory(&from) };
            measure(&engine, tensor, memory(&to), raw, round)?;
        }
        println!("  scratch: {} bytes; {:?}", engine.scratch_high_water(0)?, engine.chunks());
    }
    Ok(())
}

fn memory(buffer: &DeviceBuffer) -> DeviceMemory {
    // SAFETY: the buffer lives until the program ends, and one thing after the other uses it.
    unsafe { DeviceMemory::new(0, buffer.address(), buffer.bytes(), 0) }
}

fn fill(stream: &Arc<Stream>, pool: &Arc<Pool>, part: &[u8], bytes: u64) -> Outcome<DeviceBuffer> {
    let buffer = pool.alloc(stream, bytes, "values")?;
    let pinned = Pinned::new(stream.device(), part.len())?;
    // SAFETY: memory of this program alone; the copies are waited for.
    unsafe {
        pinned.slice_mut(0, part.len()).copy_from_slice(part);
        for at in (0..bytes).step_by(part.len()) {
            stream.copy_to_device(&pinned, 0, part.len(), buffer.address() + at)?;
        }
    }
    stream.synchronize()?;
    Ok(buffer)
}

/// Seconds that copying raw values into pinned memory takes.
fn copy(device: &Arc<s4_codec_gpu::Device>, stream: &Stream, from: &DeviceBuffer) -> Outcome<f64> {
    let pinned = Pinned::new(device, PART)?;
    let started = Instant::now();
    for at in (0..from.bytes()).step_by(PART) {
        // SAFETY: as above.
        unsafe { stream.copy_to_host(from.address() + at, &pinned, 0, PART) }?;
    }
    stream.synchronize()?;
    Ok(started.elapsed().as_secs_f64())
}

fn measure(
    engine: &CudaEngine,
    tensor: DeviceTensor<'_>,
    to: DeviceMemory,
    raw: f64,
    round: u32,
) -> Outcome<()> {
    let started = Instant::now();
    let plans = engine.plan(Preset::Fast, &[tensor])?;
    let planned = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let mut stored = 0;
    engine.encode::<CudaError>(&[tensor], &plans, |frame| {
        stored += frame.bytes.len() as u64;
        Ok(())
    })?;
    let encoded = started.elapsed().as_secs_f64();
    let mut frames = vec![];
    engine.encode::<CudaError>(&[tensor], &plans, |frame| {
        frames.push((frame.encoded, frame.bytes.to_vec()));
        Ok(())
    })?;
    let started = Instant::now();
    decode(engine, tensor, &plans[0], &frames, to)?;
    let decoded = started.elapsed().as_secs_f64();
    let ratio = tensor.memory.bytes() as f64 / stored as f64;
    println!(
        "  round {round}: ratio {ratio:.4}; plan {planned:.4} s, encode {encoded:.4} s ({:.3} of the \
         copy), decode from host {decoded:.4} s ({:.3} of it)",
        encoded / raw,
        decoded / raw
    );
    Ok(())
}

/// Decodes frames, groups of 16 MiB of them at a time.
fn decode(
    engine: &CudaEngine,
    tensor: DeviceTensor<'_>,
    plan: &TensorPlan,
    frames: &[(EncodedChunk, Vec<u8>)],
    to: DeviceMemory,
) -> Outcome<()> {
    let shared = frames.iter().any(|f| f.0.shared);
    let side = plan.side_data(shared).map_err(|source| CudaError::Format { tensor: 0, source })?;
    let spec = TensorSpec {
        dtype: tensor.dtype,
        shape: tensor.shape,
        plan: &plan.plan,
        side: &side,
        chunk_log2: plan.chunk_log2,
    };
    let size = (tensor.dtype.value_width() as u64) << plan.chunk_log2;
    engine.decode::<CudaError>(&[to], |decoder| {
        for (group, frames) in frames.chunks(64).enumerate() {
            let (mut jobs, mut len) = (vec![], 0);
            for (i, (e, frame)) in frames.iter().enumerate() {
                let chunk = (group * 64 + i) as u64;
                let bytes = size.min(to.bytes() - chunk * size);
                jobs.push(DecodeJob {
                    tensor: 0,
                    spec,
                    chunk,
                    record: ChunkRecord {
                        offset: 0,
                        object: 0,
                        len: e.len as u32,
                        plain: e.plain,
                        crc_encoded: e.crc_encoded,
                        crc_raw: e.crc_raw,
                    },
                    at: len,
                    bytes,
                    pieces: vec![Piece { from: 0, to: to.part(chunk * size, bytes)? }],
                });
                len += frame.len().next_multiple_of(16);
            }
            let places: Vec<usize> = jobs.iter().map(|j| j.at).collect();
            decoder.push(0, len, jobs, |pinned| {
                fill_in(pinned, frames, &places);
                Ok::<(), CudaError>(())
            })?;
        }
        Ok(())
    })
}

/// Copies frames to their places, on several threads, as a reader's would.
fn fill_in(mut rest: &mut [u8], frames: &[(EncodedChunk, Vec<u8>)], places: &[usize]) {
    const EACH: usize = 8;
    std::thread::scope(|scope| {
        let mut start = 0;
        for (frames, places) in frames.chunks(EACH).zip(places.chunks(EACH)) {
            let end = places[places.len() - 1] + frames[frames.len() - 1].1.len();
            let end = end.next_multiple_of(16) - start;
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(end);
            let first = start;
            (start, rest) = (start + end, behind);
            scope.spawn(move || {
                for ((_, frame), at) in frames.iter().zip(places) {
                    part[at - first..at - first + frame.len()].copy_from_slice(frame);
                }
            });
        }
    });
}
