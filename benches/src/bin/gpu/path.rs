//! The engine's whole path: tensors in device memory to frames in host memory, and back.

use std::sync::Arc;
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use s4_codec_gpu::DeviceBuffer;
use s4_engine::cuda::{Batch, CudaEngine, CudaError, Destination, DeviceMemory, FrameJob, Pinned};
use s4_engine::{
    EncodedChunk, Engine, Jobs, NoInputs, Preset, TensorPlan, TensorSpec, TensorValues,
};
use s4_format::ChunkRecord;
use s4_format::limits::ALIGN;
use s4_format::side::Side;

use crate::Tile;
use crate::lab::{Lab, Outcome, PIECE, median};
use crate::report::Group;

/// Bytes that a thread copies into pinned memory at a time.
const PART: usize = 1 << 20;

/// Rounds of each measurement by the clock, after one that is not counted.
pub(crate) const ROUNDS: usize = 3;

/// A chunk's frame.
struct Frame {
    tensor: usize,
    chunk: u64,
    encoded: EncodedChunk,
    /// Where it starts in [`Coded::bytes`].
    at: usize,
}

/// Encoded tensors: consecutive frames, as in a file.
pub(crate) struct Coded {
    frames: Vec<Frame>,
    pub(crate) bytes: Vec<u8>,
    /// Bytes of the frames, of the record that a file has for each, and of side data.
    pub(crate) stored: u64,
    /// The side data of each tensor.
    sides: Vec<Side>,
}

/// One tensor of `bytes` bytes.
pub(crate) fn large(lab: &Lab, tile: &Tile, bytes: u64) -> Outcome<Group> {
    let group = Group::new("device memory to host memory", tile.name, bytes, "pinned copy");
    measure(lab, tile, &[bytes], group)
}

/// Weights and the two moments of their optimizer: three tensors, each of which is a third of `tile`.
pub(crate) fn state(lab: &Lab, tile: &Tile) -> Outcome<Group> {
    let bytes = tile.data.len() as u64;
    let name = "device memory to host memory, weights and moments";
    measure(lab, tile, &[bytes / 3; 3], Group::new(name, tile.name, bytes, "pinned copy"))
}

/// Many tensors of 4 KiB to 64 KiB.
pub(crate) fn small(lab: &Lab, tile: &Tile, count: u64) -> Outcome<Group> {
    let sizes: Vec<u64> = (0..count).map(|i| (4 << 10) * (1 + i * 7 % 16)).collect();
    let name = format!("device memory to host memory, {count} tensors");
    let group = Group::new(&name, tile.name, sizes.iter().sum(), "pinned copies, one a tensor");
    measure(lab, tile, &sizes, group)
}

fn measure(lab: &Lab, tile: &Tile, sizes: &[u64], mut group: Group) -> Outcome<Group> {
    let bytes = sizes.iter().sum();
    let (from, to) = (lab.fill(&tile.data, bytes)?, lab.alloc(bytes)?);
    let shapes: Vec<[u64; 1]> = sizes.iter().map(|s| [s / tile.dtype.size() as u64]).collect();
    let at: Vec<u64> = sizes.iter().scan(0, |at, s| Some(std::mem::replace(at, *at + s))).collect();
    let part = |buffer, i: usize| lab.memory(buffer).part(at[i], sizes[i]);
    let (mut tensors, mut targets) = (vec![], vec![]);
    for (i, shape) in shapes.iter().enumerate() {
        let memory = part(&from, i)?;
        tensors.push(TensorValues::new(tile.dtype, shape, memory));
        targets.push(part(&to, i)?);
    }
    group.ceilings(copies(lab, &from, sizes, true)?, copies(lab, &to, sizes, false)?);
    let engine = CudaEngine::new(lab.cuda.clone(), lab.options);
    let pool = ThreadPoolBuilder::new().build()?;
    let (mut planned, mut encoded, mut decoded, mut pageable) = (vec![], vec![], vec![], vec![]);
    let timed = |times: &mut Vec<f64>, work: &mut dyn FnMut() -> Outcome<()>| {
        let started = Instant::now();
        work()?;
        times.push(started.elapsed().as_secs_f64());
        Outcome::Ok(())
    };
    let mut plans = vec![];
    for _ in 0..=ROUNDS {
        timed(&mut planned, &mut || {
            plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, Some(&pool))?;
            Ok(())
        })?;
        let jobs = Jobs::<CudaError>::new(&tensors, &plans);
        timed(&mut encoded, &mut || Ok(engine.encode(&jobs, |_| Ok(()))?))?;
    }
    let coded = Coded::collect(&engine, &Jobs::new(&tensors, &plans))?;
    let pinned = Arc::new(Pinned::new(&lab.device, coded.bytes.len())?);
    // SAFETY: nothing else uses it.
    unsafe { pinned.slice_mut(0, coded.bytes.len()) }.copy_from_slice(&coded.bytes);
    for _ in 0..=ROUNDS {
        let from = From::Pinned(&pinned);
        timed(&mut decoded, &mut || decode(&engine, &tensors, &plans, &coded, from, &targets))?;
    }
    // Overwrites the decoded values, so that the final check is of the next loop's.
    // SAFETY: the buffer is not used by anything else.
    unsafe { lab.stream.fill(to.address(), 0xee, bytes)? };
    lab.stream.synchronize()?;
    for _ in 0..=ROUNDS {
        let from = From::Pageable(&pool);
        timed(&mut pageable, &mut || decode(&engine, &tensors, &plans, &coded, from, &targets))?;
    }
    if !lab.holds(&to, &tile.data)? || engine.chunks().refused > 0 {
        return Err("decoded values differ, or the kernels refused a chunk".into());
    }
    let ratio = bytes as f64 / coded.stored as f64;
    let scratch = engine.scratch_high_water(0) >> 20;
    // The first round of each is not counted.
    let [planned, encoded, decoded, pageable] =
        [planned, encoded, decoded, pageable].map(|times| median(times[1..].to_vec()));
    let name =
        format!("s4weights, {scratch} MiB of scratch; before it {:.1} ms to plan", 1e3 * planned);
    group.row(&name, Some(encoded), Some(decoded), Some(ratio));
    let name =
        format!("s4weights, frames in pageable memory, {} threads", pool.current_num_threads());
    group.row(&name, None, Some(pageable), Some(ratio));
    eprintln!("{}", group.text());
    Ok(group)
}

/// Median seconds of plain copies of tensors to pinned memory, or back.
fn copies(lab: &Lab, buffer: &DeviceBuffer, sizes: &[u64], to_host: bool) -> Outcome<f64> {
    let pinned = Pinned::new(&lab.device, PIECE)?;
    lab.time(|| {
        let mut at = buffer.address();
        for size in sizes {
            for first in (0..*size).step_by(PIECE) {
                let len = (size - first).min(PIECE as u64) as usize;
                // SAFETY: the buffer holds all tensors; nothing reads what the pinned memory holds.
                unsafe {
                    match to_host {
                        true => lab.stream.copy_to_host(at + first, &pinned, 0, len)?,
                        false => lab.stream.copy_to_device(&pinned, 0, len, at + first)?,
                    }
                }
            }
            at += size;
        }
        Ok(())
    })
}

impl Coded {
    pub(crate) fn collect(engine: &CudaEngine, jobs: &Jobs<'_, CudaError>) -> Outcome<Self> {
        let (mut frames, mut bytes, mut stored) = (vec![], vec![], 0);
        let (tensors, plans) = (jobs.tensors, jobs.plans);
        let mut shared = vec![false; tensors.len()];
        engine.encode(jobs, |encoded| {
            for f in encoded {
                shared[f.tensor] |= f.encoded.shared;
                let (tensor, chunk, encoded) = (f.tensor, f.chunk, f.encoded);
                frames.push(Frame { tensor, chunk, encoded, at: bytes.len() });
                bytes.extend_from_slice(f.bytes);
                bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
                stored += f.bytes.len() as u64 + 24;
            }
            Ok(())
        })?;
        let sides = plans.iter().zip(shared).map(|(p, s)| p.side_data(s));
        let sides = sides.collect::<s4_format::Result<Vec<_>>>()?;
        stored += sides.iter().map(|s| s.encoded_len() as u64).sum::<u64>();
        Ok(Self { frames, bytes, stored, sides })
    }

    /// The frames in batches of at most `room` bytes, each with the offset of its first byte.
    fn batches<'a>(
        &'a self,
        tensors: &'a [TensorValues<'a>],
        plans: &'a [TensorPlan],
        to: &[DeviceMemory],
        room: usize,
    ) -> Result<Vec<(usize, Batch<'a>)>, CudaError> {
        let mut batches: Vec<(usize, Batch<'a>)> = vec![];
        for f in &self.frames {
            let end = f.at + f.encoded.len;
            if batches.last().is_none_or(|(first, _)| end - first > room) {
                batches.push((f.at, Batch { ordinal: 0, len: 0, jobs: vec![] }));
            }
            let Some((first, batch)) = batches.last_mut() else { continue };
            let (t, plan) = (&tensors[f.tensor], &plans[f.tensor]);
            let size = (t.dtype.value_width() as u64) << plan.chunk_log2;
            let bytes = size.min(t.values.bytes() - f.chunk * size);
            batch.len = end - *first;
            batch.jobs.push(FrameJob {
                tensor: f.tensor,
                spec: TensorSpec {
                    dtype: t.dtype,
                    shape: t.shape,
                    plan: &plan.plan,
                    side: &self.sides[f.tensor],
                    chunk_log2: plan.chunk_log2,
                },
                chunk: f.chunk,
                record: ChunkRecord {
                    offset: 0,
                    object: 0,
                    // A chunk has at most 2 MiB.
                    len: f.encoded.len as u32,
                    plain: f.encoded.plain,
                    crc_encoded: f.encoded.crc_encoded,
                    crc_raw: f.encoded.crc_raw,
                },
                at: f.at - *first,
                bytes,
                destinations: vec![Destination {
                    from: 0,
                    to: to[f.tensor].part(f.chunk * size, bytes)?,
                }],
                input: None,
                moments: None,
            });
        }
        Ok(batches)
    }
}

/// Where frames are decoded from.
#[derive(Clone, Copy)]
pub(crate) enum From<'a> {
    Pinned(&'a Arc<Pinned>),
    /// Copied into pinned memory by these threads.
    Pageable(&'a ThreadPool),
}

pub(crate) fn decode(
    engine: &CudaEngine,
    tensors: &[TensorValues<'_>],
    plans: &[TensorPlan],
    coded: &Coded,
    from: From<'_>,
    to: &[DeviceMemory],
) -> Outcome<()> {
    engine.decode::<CudaError>(to, None, |decoder| {
        let batches = coded.batches(tensors, plans, to, decoder.room())?;
        match from {
            From::Pinned(pinned) => batches
                .into_iter()
                .try_for_each(|(at, batch)| decoder.push_pinned(batch, pinned, at)),
            From::Pageable(pool) => {
                let (first, batches): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
                let fill = |batch: usize, at: usize, to: &mut [u8]| {
                    let from = first[batch] + at;
                    to.copy_from_slice(&coded.bytes[from..from + to.len()]);
                    Ok(())
                };
                decoder.push_all(Some(pool), batches, PART, fill, |_| Ok(()))
            }
        }
    })?;
    Ok(())
}
