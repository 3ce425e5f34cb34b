//! The values that differences are taken from, on their way to the device.

use s4_codec_gpu::abi::{self, DecodeChunk, Route, SharedTable};
use s4_codec_gpu::{DecodeBatch, GpuError};
use s4_format::limits::ALIGN;
use s4_predict::Tensor;

use super::error::Result;
use super::route::{decode_route, position};
use super::sets::{self, Extra, Rows, SetPlace, TensorSet};
use crate::{Input, InputFrame, InputSize};

/// Whether a frame is a difference from the values decoded before.
fn is_delta(frame: &InputFrame<'_>) -> bool {
    frame.spec.plan.is_delta() && !frame.record.plain
}

const CHUNK: usize = size_of::<DecodeChunk>();
/// Bytes that a frame takes besides itself: descriptor and status.
pub(super) const PER_FRAME: u64 = CHUNK as u64 + 4;
/// Bytes that the chunks of a tensor share: all the tables that contexts need. For more, such as
/// many columns, there may be no room: the CPU then decodes the frame.
pub(super) const PER_TENSOR: u64 = 20 * size_of::<SharedTable>() as u64;

/// A frame to be decoded on the device.
struct Entry {
    job: usize,
    route: Route,
    chunk: DecodeChunk,
    /// Places of its tensor's shared data and of its rows among the extras.
    set: SetPlace,
    rows: Option<u64>,
}

/// The frames of a group's parents, in levels: those that need no input, those that need the first level, and so on.
pub(super) struct Levels<'a> {
    levels: Vec<Vec<Entry>>,
    /// Data that precedes the descriptors.
    extras: Vec<Extra<'a>>,
    /// Bytes of extras, descriptors and statuses, and the most that there is room for.
    used: usize,
    most: usize,
    extra_len: usize,
    /// Places of shared data, by the address of the side data that it is made from. Chunks of a
    /// tensor follow each other.
    known: Vec<(*const s4_format::side::Side, SetPlace)>,
    tensor: usize,
}

/// The places of [`Levels`] in a slot's descriptors.
pub(super) struct LevelPlaces {
    /// First byte, a multiple of 16, and the end of what the device reads.
    pub(super) start: usize,
    pub(super) end: usize,
    /// A status for each frame.
    pub(super) status: usize,
    pub(super) frames: usize,
}

/// The place that a chunk's parent is decoded to.
pub(super) struct Target {
    pub(super) job: usize,
    pub(super) tensor: usize,
    pub(super) chunk: u64,
    /// Address of the values, and of scratch memory.
    pub(super) values: u64,
    pub(super) scratch: u64,
    pub(super) bytes: u64,
}

impl<'a> Levels<'a> {
    /// No frames yet. Extras, descriptors and statuses may take `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        let (levels, extras, known) = Default::default();
        // Their start is rounded up to a multiple of 16.
        Self { levels, extras, used: ALIGN, most, extra_len: 0, known, tensor: 0 }
    }

    /// Adds the frames of a chunk, each at its given address; `false` if the CPU must decode them:
    /// then none is added.
    pub(super) fn add(&mut self, to: &Target, frames: &[InputFrame<'a>], at: &[u64]) -> bool {
        if self.tensor != to.tensor {
            self.known.clear();
            self.tensor = to.tensor;
        }
        let mut entries = vec![];
        for (level, (f, &address)) in frames.iter().zip(at).enumerate() {
            let routed = decode_route(&f.spec, &f.record, &f.bytes, to.bytes);
            // Callers give no moments for a parent.
            let by_moments = |chunk: &DecodeChunk| chunk.plain == 0 && f.spec.plan.has_moments();
            let Some((route, mut chunk)) = routed.filter(|r| !by_moments(&r.1)) else {
                return false;
            };
            let Some((set, rows)) = self.extras_of(f, &chunk, to.chunk) else { return false };
            // Only the first one is not a delta, and scratch memory only suffices for frames that
            // are not larger than their values.
            if is_delta(f) != (level > 0) || f.bytes.len() as u64 > to.bytes {
                return false;
            }
            chunk.frame = address;
            chunk.values = to.values;
            chunk.inputs = abi::parent_input(if is_delta(f) { to.values } else { 0 });
            self.used += CHUNK + 4;
            if self.used > self.most {
                return false;
            }
            (chunk.first, chunk.cols) =
                position(f.spec.dtype, f.spec.shape, f.spec.chunk_log2, to.chunk);
            chunk.scratch = to.scratch;
            entries.push(Entry { job: to.job, route, chunk, set, rows });
        }
        for (level, entry) in entries.into_iter().enumerate() {
            if self.levels.len() == level {
                self.levels.push(vec![]);
            }
            self.levels[level].push(entry);
        }
        true
    }

    /// Adds the data that a frame needs besides its descriptor; `None`: there is no room, or it is not sound.
    fn extras_of(
        &mut self,
        frame: &InputFrame<'a>,
        chunk: &DecodeChunk,
        number: u64,
    ) -> Option<(SetPlace, Option<u64>)> {
        let spec = &frame.spec;
        let side = std::ptr::from_ref(spec.side);
        let known = self.known.iter().find(|k| k.0 == side).map(|k| k.1);
        let place = match known {
            Some(place) => place,
            None => {
                let set = TensorSet::of_spec(spec).ok()?;
                let place = set.place(self.extra_len as u64);
                self.push(Extra::Set(set))?;
                self.known.push((side, place));
                place
            }
        };
        let tensor = Tensor { dtype: spec.dtype, shape: spec.shape, side: spec.side };
        let (first, _) = position(spec.dtype, spec.shape, spec.chunk_log2, number);
        let rows = match chunk.plain {
            0 => Rows::of(spec.plan, &tensor, (first, chunk.n.into())).ok()?,
            _ => None,
        };
        let rows = match rows {
            Some(rows) => Some(self.push(Extra::Rows(rows))?),
            None => None,
        };
        Some((place, rows))
    }

    /// Adds data that precedes the descriptors; returns where it starts, if there is room.
    fn push(&mut self, extra: Extra<'a>) -> Option<u64> {
        let (at, len) = (self.extra_len, extra.len());
        if self.used + len > self.most {
            return None;
        }
        self.used += len;
        self.extra_len += len;
        self.extras.push(extra);
        Some(at as u64)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.levels.is_empty()
    }

    /// The places of all parts if the first starts at `start`.
    pub(super) fn places(&self, start: usize) -> LevelPlaces {
        let frames = self.levels.iter().map(Vec::len).sum::<usize>();
        let start = start.next_multiple_of(16);
        let end = start + self.extra_len + frames * CHUNK;
        LevelPlaces { start, end, status: end, frames }
    }

    /// Writes descriptors and tables into a slot's meta memory, which lies at `meta` on the device. Returns the
    /// batches to decode, one after the other, and for each status the index of its job.
    pub(super) fn describe(
        mut self,
        places: &LevelPlaces,
        meta: u64,
        to: &mut [u8],
    ) -> (Vec<DecodeBatch>, Vec<usize>) {
        let extras = meta + places.start as u64;
        let mut at = places.start + sets::write_all(&self.extras, &mut to[places.start..]);
        let (mut batches, mut jobs) = (vec![], vec![]);
        for level in &mut self.levels {
            level.sort_by_key(|e| e.route);
            let mut routes = [0; 5];
            let status = meta + (places.status + 4 * jobs.len()) as u64;
            let chunks = meta + at as u64;
            for entry in level {
                let set = entry.set.moved_by(extras);
                let rows = entry.rows.map_or(0, |at| extras + at);
                let values = entry.chunk.inputs[abi::PARENT];
                entry.chunk.inputs = sets::inputs(values, rows, &set, [0; 2]);
                entry.chunk.tables = set.tables();
                to[at..at + CHUNK].copy_from_slice(bytemuck::bytes_of(&entry.chunk));
                at += CHUNK;
                routes[entry.route as usize] += 1;
                jobs.push(entry.job);
            }
            batches.push(DecodeBatch { chunks, status, routes });
        }
        (batches, jobs)
    }
}

/// Checks the input that a caller gave for a chunk, and its length.
pub(super) fn check(parent: &Input<'_>, ordinal: u32, bytes: u64) -> Result<()> {
    let found = match parent {
        Input::Device(m) | Input::Stored { values: m, .. } if m.ordinal() != ordinal => {
            let what = format!(
                "the parent is on device {}, but the chunk is on device {ordinal}",
                m.ordinal()
            );
            return Err(GpuError::Argument(what).into());
        }
        Input::Device(m) | Input::Stored { values: m, .. } => m.bytes(),
        Input::Host(values) => values.len() as u64,
        Input::Frames(_) => bytes,
        Input::Late => 0,
    };
    if found == bytes {
        return Ok(());
    }
    let what = format!("parent has {found} bytes, expected {bytes}");
    Err(GpuError::Argument(what).into())
}

/// The size of some frames as an input.
pub(super) fn size(frames: &[InputFrame<'_>]) -> InputSize {
    let each = frames.iter().map(|f| (f.bytes.len() as u64).next_multiple_of(ALIGN as u64));
    InputSize { bytes: each.sum(), frames: u32::try_from(frames.len()).unwrap_or(u32::MAX) }
}

/// Bytes that a chunk's parent takes in a slot: its frames, or its values if they are more.
pub(super) fn stored(size: InputSize, bytes: u64) -> u64 {
    size.bytes.max(bytes).checked_next_multiple_of(ALIGN as u64).unwrap_or(u64::MAX)
}

/// Scratch memory for decoding a chunk's frames, which use it one after the other.
pub(super) fn scratch(bytes: u64, width: u64) -> u64 {
    abi::decode_scratch(Route::Predicted, bytes / width, width, bytes).next_multiple_of(16)
}
