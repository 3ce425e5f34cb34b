//! The engine's whole path: tensors in device memory to frames in the host's, and back.

use std::time::Instant;

use s4_codec_gpu::{DeviceBuffer, Pinned};
use s4_engine::cuda::{
    CudaEngine, CudaError, CudaOptions, DecodeJob, DeviceMemory, DeviceTensor, Piece,
};
use s4_engine::{EncodedChunk, Preset, TensorPlan, TensorSpec};
use s4_format::ChunkRecord;
use s4_format::side::Side;

use crate::Tile;
use crate::lab::{Lab, Outcome, PIECE, median};
use crate::report::Group;

/// Bytes of frames that are handed to the decoder at a time.
const SPAN: usize = 16 << 20;

/// Measurements of each thing: the clock's.
const ROUNDS: usize = 3;

/// A chunk's frame.
struct Frame {
    tensor: usize,
    chunk: u64,
    encoded: EncodedChunk,
    bytes: Vec<u8>,
}

/// One tensor of `bytes` bytes.
pub(crate) fn large(lab: &Lab, tile: &Tile, bytes: u64) -> Outcome<Group> {
    let group = Group::new("device memory to host memory", tile.name, bytes, "pinned copy");
    measure(lab, tile, &[bytes], group)
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
        tensors.push(DeviceTensor { dtype: tile.dtype, shape, memory });
        targets.push(part(&to, i)?);
    }
    group.ceilings(copies(lab, &from, sizes, true)?, copies(lab, &to, sizes, false)?);
    let engine = CudaEngine::new(lab.cuda.clone(), CudaOptions::default());
    let (mut encoded, mut decoded) = (vec![], vec![]);
    let mut ratio = 0.0;
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let plans = engine.plan(Preset::Fast, &tensors)?;
        let mut stored = 0;
        engine.encode::<CudaError>(&tensors, &plans, |frame| {
            stored += frame.bytes.len() as u64 + 24;
            Ok(())
        })?;
        let took = started.elapsed().as_secs_f64();
        ratio = bytes as f64 / stored as f64;
        let (frames, sides) = collect(&engine, &tensors, &plans)?;
        let started = Instant::now();
        decode(&engine, &tensors, &plans, &sides, &frames, &targets)?;
        if round > 0 {
            encoded.push(took);
            decoded.push(started.elapsed().as_secs_f64());
        }
    }
    if !lab.holds(&to, &tile.data)? || engine.chunks().refused > 0 {
        return Err("decoded values differ, or the kernels refused a chunk".into());
    }
    let scratch = engine.scratch_high_water(0)? >> 20;
    let name = format!("s4weights, plan included; {scratch} MiB of scratch");
    group.row(&name, Some(median(encoded)), Some(median(decoded)), Some(ratio));
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
                // SAFETY: the buffer holds all tensors; what the pinned memory holds is not looked at.
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

fn collect(
    engine: &CudaEngine,
    tensors: &[DeviceTensor<'_>],
    plans: &[TensorPlan],
) -> Outcome<(Vec<Frame>, Vec<Side>)> {
    let mut frames = vec![];
    let mut shared = vec![false; tensors.len()];
    engine.encode::<CudaError>(tensors, plans, |f| {
        shared[f.tensor] |= f.encoded.shared;
        let (tensor, chunk, encoded) = (f.tensor, f.chunk, f.encoded);
        frames.push(Frame { tensor, chunk, encoded, bytes: f.bytes.to_vec() });
        Ok(())
    })?;
    let sides = plans.iter().zip(shared).map(|(p, s)| p.side_data(s));
    Ok((frames, sides.collect::<s4_format::Result<_>>()?))
}

fn decode(
    engine: &CudaEngine,
    tensors: &[DeviceTensor<'_>],
    plans: &[TensorPlan],
    sides: &[Side],
    frames: &[Frame],
    to: &[DeviceMemory],
) -> Outcome<()> {
    let job = |f: &Frame, at: usize| -> Result<DecodeJob<'_>, CudaError> {
        let (t, plan) = (&tensors[f.tensor], &plans[f.tensor]);
        let size = (t.dtype.value_width() as u64) << plan.chunk_log2;
        let bytes = size.min(t.memory.bytes() - f.chunk * size);
        Ok(DecodeJob {
            tensor: f.tensor,
            spec: TensorSpec {
                dtype: t.dtype,
                shape: t.shape,
                plan: &plan.plan,
                side: &sides[f.tensor],
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
            at,
            bytes,
            pieces: vec![Piece { from: 0, to: to[f.tensor].part(f.chunk * size, bytes)? }],
        })
    };
    engine.decode::<CudaError>(to, |decoder| {
        let span = SPAN.min(decoder.room());
        let mut rest = frames;
        while !rest.is_empty() {
            let (mut jobs, mut len) = (vec![], 0);
            for f in rest {
                let next = len + f.bytes.len().next_multiple_of(16);
                if next > span && !jobs.is_empty() {
                    break;
                }
                jobs.push(job(f, len)?);
                len = next;
            }
            let (now, behind) = rest.split_at(jobs.len());
            let places: Vec<usize> = jobs.iter().map(|j| j.at).collect();
            decoder.push(0, len, jobs, |pinned| {
                fill_in(pinned, now, &places);
                Ok::<(), CudaError>(())
            })?;
            rest = behind;
        }
        Ok(())
    })?;
    Ok(())
}

/// Copies frames to their places, on several threads, as a reader's would.
fn fill_in(mut rest: &mut [u8], frames: &[Frame], places: &[usize]) {
    let each = frames.len().div_ceil(8).max(1);
    std::thread::scope(|scope| {
        let mut start = 0;
        for (frames, places) in frames.chunks(each).zip(places.chunks(each)) {
            let last = frames.len() - 1;
            let end = places[last] + frames[last].bytes.len().next_multiple_of(16) - start;
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(end);
            let first = start;
            (start, rest) = (start + end, behind);
            scope.spawn(move || {
                for (frame, at) in frames.iter().zip(places) {
                    let at = at - first;
                    part[at..at + frame.bytes.len()].copy_from_slice(&frame.bytes);
                }
            });
        }
    });
}
