//! Frames to decode, and their places.

use std::sync::Arc;

use s4_codec_gpu::abi::{self, CopySpan};
use s4_codec_gpu::{GpuError, Pinned};
use s4_format::ChunkRecord;

use super::error::{Of, Result};
use crate::DeviceMemory;
use crate::{TensorSpec, moment_dtypes};

/// Where a part of a decoded chunk goes.
#[derive(Debug, Clone, Copy)]
pub struct Destination {
    /// Offset of its bytes in the chunk's values.
    pub from: u64,
    /// The memory that they fill.
    pub to: DeviceMemory,
}

/// A frame to decode.
#[derive(Debug, Clone)]
pub struct FrameJob<'a> {
    /// Index of the tensor, for errors.
    pub tensor: usize,
    /// The properties of the tensor that decoding needs. Jobs with the same index have the same
    /// spec.
    pub spec: TensorSpec<'a>,
    /// Index of the chunk.
    pub chunk: u64,
    /// Its record.
    pub record: ChunkRecord,
    /// Offset of its frame in the bytes that are pushed with it.
    pub at: usize,
    /// Bytes of its values.
    pub bytes: u64,
    /// Where the wanted parts of the values go: all on one device, without overlap.
    /// A difference from a parent has a single destination, for the whole chunk; the parent's values are
    /// already there, or earlier calls put them there.
    pub destinations: Vec<Destination>,
    /// For a copy, the place where the values that it copies already lie; for a rounded copy they have twice its bytes.
    pub input: Option<DeviceMemory>,
    /// For weights predicted from moments, or with contexts from them: the places where all values of both moments
    /// already lie, as many for each as the tensor has; the same memory twice if there is only one moment.
    pub moments: Option<[DeviceMemory; 2]>,
}

impl FrameJob<'_> {
    /// Whether decoding needs values that are not in the frame: they must lie on the device, or the
    /// device does not decode it.
    pub(super) fn has_input(&self) -> bool {
        !self.spec.plan.inputs.is_empty() && !self.record.plain
    }

    /// Whether it is a difference from the parent's values.
    pub(super) fn is_delta(&self) -> bool {
        self.spec.plan.is_delta() && !self.record.plain
    }

    /// Whether the whole chunk goes to a single place.
    pub(super) fn has_one_place(&self) -> bool {
        matches!(&self.destinations[..], [p] if p.to.bytes() == self.bytes)
    }

    /// The spans that copy the wanted parts of the chunk's values, at an address, to their destinations.
    pub(super) fn copies(&self, values: u64) -> impl Iterator<Item = CopySpan> {
        let copies =
            move |p: &Destination| CopySpan::cut(values + p.from, p.to.address(), p.to.bytes());
        self.destinations.iter().flat_map(copies)
    }
}

/// Frames that are decoded together.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The device.
    pub ordinal: u32,
    /// Bytes of the frames, and of what lies between them.
    pub len: usize,
    /// The chunks.
    pub jobs: Vec<FrameJob<'a>>,
}

/// A batch that has a slot, with its frames once it is started.
pub(super) struct Filled<'a> {
    pub(super) ordinal: u32,
    pub(super) slot: usize,
    pub(super) len: usize,
    pub(super) jobs: Vec<FrameJob<'a>>,
    pub(super) frames: Frames,
}

/// The place of a batch's frames.
pub(super) struct Frames {
    pub(super) pinned: Arc<Pinned>,
    pub(super) at: usize,
}

impl Frames {
    /// A chunk's frame.
    pub(super) fn frame(&self, job: &FrameJob<'_>) -> &[u8] {
        // SAFETY: it was written before, and is only read until the work on it is done.
        unsafe { self.pinned.slice(self.at + job.at, job.record.len as usize) }
    }
}

/// Whether the moments of a chunk lie on a device, and have as many values as the chunk.
fn has_moments(job: &FrameJob<'_>, moments: [DeviceMemory; 2], ordinal: u32) -> bool {
    let Ok(Some((first, second))) = moment_dtypes(job.spec.plan, job.spec.side) else {
        return false;
    };
    let values = job.bytes / job.spec.dtype.value_width() as u64;
    moments.iter().zip([first, second.unwrap_or(first)]).all(|(m, dtype)| {
        let bytes = values.checked_mul(dtype.value_width() as u64);
        m.ordinal() == ordinal && bytes == Some(m.bytes())
    })
}

/// Checks the caller's jobs.
pub(super) fn check(ordinal: u32, len: usize, room: usize, jobs: &[FrameJob<'_>]) -> Result<()> {
    if len > room {
        let (what, needed, budget) = ("frames in one push", len as u64, room as u64);
        return Err(GpuError::Budget { what, needed, budget }.into());
    }
    for job in jobs {
        let end = job.at.checked_add(job.record.len as usize);
        if end.is_none_or(|end| end > len) {
            return Err(s4_format::Error::truncated("frame extends past the bytes that were read")
                .in_chunk(job.chunk))
            .of(job.tensor);
        }
        let width = job.spec.dtype.value_width() as u64;
        let inside = |p: &Destination| {
            p.from.checked_add(p.to.bytes()).is_some_and(|end| end <= job.bytes)
                && p.to.ordinal() == ordinal
        };
        let whole = job.bytes.is_multiple_of(width)
            && job.bytes <= abi::MAX_DECODE_BYTES
            && (job.has_one_place() || !job.is_delta());
        let of_input = job.bytes.checked_mul(job.spec.plan.input_scale());
        let input = job.input.is_none_or(|m| m.ordinal() == ordinal && of_input == Some(m.bytes()));
        let moments = job.moments.is_none_or(|m| has_moments(job, m, ordinal));
        if !whole || !input || !moments || !job.destinations.iter().all(inside) {
            let what = format!(
                "invalid destinations, input or moments for a chunk of {} bytes on device {ordinal}",
                job.bytes
            );
            return Err(GpuError::Argument(what).into());
        }
    }
    Ok(())
}
