//! Chunks that are encoded together.

use std::sync::Arc;

use bytes::Bytes;
use s4_codec_gpu::DecodeBatch;
use s4_codec_gpu::abi::{self, CopySpan, CrcSpan, EncodeChunk, EncodeResult, Route};
use s4_format::limits::ALIGN;

use crate::Input;
use crate::cuda::parent::LevelPlaces;
use crate::cuda::pieces::Piece;
use crate::cuda::sets::{Extra, SetPlace};
use crate::cuda::worker::Session;

/// A chunk of a group.
#[derive(Clone, Copy, Default)]
pub(super) struct Member {
    pub(super) tensor: usize,
    pub(super) chunk: u64,
    /// Address of its values, and of their copy in scratch memory, which is all that the kernels
    /// read: changes to the values do not reach it. If they are `fixed`, because nobody changes
    /// them, `copy` is `values`.
    pub(super) values: u64,
    pub(super) copy: u64,
    pub(super) bytes: u64,
    pub(super) fixed: bool,
    pub(super) route: Option<Route>,
    /// With a route, its index in the batch; otherwise where its values lie in the slot.
    pub(super) at: usize,
    /// Start of its scratch memory, after the copy. If the chunk has an input, it begins with room
    /// for the input's values, then for copies of its moments.
    pub(super) scratch: u64,
    /// Bytes of input for each byte of its values; 0: it has no input.
    pub(super) scale: u64,
    /// Whether its input is a tensor of the same checkpoint.
    pub(super) own_input: bool,
    /// Address of the input's values (0: they must not be used), and the first index and number of
    /// the statuses of their frames.
    pub(super) parent: u64,
    pub(super) statuses: (usize, usize),
    /// The number of moments that it is predicted from, or has contexts from: 0, 1 or 2.
    pub(super) moments_count: usize,
    /// Bytes that copies of its moments take, and the addresses of the moments' values on the
    /// device; 0: they must not be used.
    pub(super) moments_room: u64,
    pub(super) moments: [u64; 2],
    /// The checks that its input's values must pass, and those for its moments: first index and number.
    pub(super) checks: [(usize, usize); 2],
    /// The data that its tensor's chunks share, and the offsets of its own rows: their places after the descriptors.
    pub(super) set: SetPlace,
    pub(super) rows: Option<u64>,
}

/// The work in flight in one slot.
#[derive(Default)]
pub(super) struct Group<'a> {
    pub(super) slot: usize,
    pub(super) members: Vec<Member>,
    /// The inputs of deltas, kept until their frames are known to be good.
    pub(super) inputs: Vec<Option<Input<'a>>>,
    /// Moments in host memory: the chunk's index in the group, which of the two, and the values.
    pub(super) moments: Vec<(usize, usize, Bytes)>,
    /// Bytes of the caller that are copied to the device from where they lie.
    pub(super) uploads: Vec<Bytes>,
    /// Number of chunks of each route.
    pub(super) routes: [u32; 6],
    /// Upper bound of the frames' bytes. The values of the CPU's chunks follow the frames.
    pub(super) capacity: u64,
    /// The part of `capacity` that is promised (`OpenPiece`).
    pub(super) promised: u64,
    /// Number of pieces that the values are copied in.
    pub(super) copies: u32,
    /// Pieces of inputs that may change: each is copied, and the copy must have a given CRC-32C.
    pub(super) checks: Vec<Check>,
    /// Data that follows the descriptors, and its size in bytes.
    pub(super) extras: Vec<Extra<'a>>,
    pub(super) extra_len: u64,
    /// The places of the statuses of the parents' frames in the meta memory, sorted by job.
    pub(super) statuses: Vec<usize>,
    /// Whether its frames were sent to the host. `homes` has the places of those that may stay
    /// there; the others, which follow on the device, are in the slot.
    pub(super) sent: bool,
    pub(super) homes: Vec<Home>,
}

/// Consecutive frames of a group in a piece.
pub(super) struct Home {
    pub(super) piece: Arc<Piece>,
    /// Their offset in the piece.
    pub(super) at: usize,
    /// Their start and end among the frames on the device.
    pub(super) first: u64,
    pub(super) end: u64,
    /// The bytes that callers get, once all frames have arrived.
    pub(super) bytes: Bytes,
}

/// The batches that decode a group's parents.
pub(super) struct Decoding {
    pub(super) batches: Vec<DecodeBatch>,
    pub(super) places: LevelPlaces,
}

/// A copy of values that is checked against the stored ones.
#[derive(Clone, Copy, Default)]
pub(super) struct Check {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) len: u64,
    pub(super) crc: u32,
}

/// Room that a group takes, in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Room {
    pub(super) frames: u64,
    /// The data that parents are decoded from, which lies where frames will go.
    pub(super) parents: u64,
    pub(super) scratch: u64,
    pub(super) meta: u64,
}

pub(super) const PER_CHUNK: u64 = (size_of::<EncodeChunk>() + size_of::<EncodeResult>()) as u64;
/// Bytes before the results, for the total bytes of frames.
pub(super) const TOTAL: u64 = 16;
pub(super) const SPAN: u64 = size_of::<CopySpan>() as u64;
/// Meta memory for a piece of an input that may change: two spans, and its checksum.
pub(super) const PER_CHECK: u64 = SPAN + CRC_SPAN + 4;
pub(super) const CRC_SPAN: u64 = size_of::<CrcSpan>() as u64;

impl Member {
    /// Pieces that the values are copied in.
    pub(super) fn copies(&self) -> u64 {
        self.copy_room().div_ceil(abi::COPY_SPAN_BYTES)
    }

    /// Room for the copy.
    pub(super) fn copy_room(&self) -> u64 {
        if self.fixed { 0 } else { self.bytes.next_multiple_of(ALIGN as u64) }
    }

    /// Whether the kernels need its moments.
    pub(super) fn has_moments(&self) -> bool {
        self.moments_count > 0 && self.route.is_some()
    }

    /// Bytes of its input's values.
    pub(super) fn input_bytes(&self) -> u64 {
        self.scale * self.bytes
    }

    /// Whether its input, a tensor of the same checkpoint, has changed since it was stored.
    pub(super) fn is_gone(&self, input: &Input<'_>) -> bool {
        self.own_input && matches!(input, Input::Host(values) if values.is_empty())
    }

    /// Room for its input's values.
    pub(super) fn input_room(&self) -> u64 {
        self.input_bytes().next_multiple_of(ALIGN as u64)
    }

    /// Start of the kernels' own scratch memory.
    pub(super) fn work(&self) -> u64 {
        self.scratch + self.input_room() + self.moments_room
    }
}

impl<'a> Group<'a> {
    /// Adds data that lies after the descriptors.
    pub(super) fn add(&mut self, extra: Extra<'a>) {
        self.extra_len += extra.len() as u64;
        self.extras.push(extra);
    }

    pub(super) fn count(&self) -> u32 {
        self.routes.iter().sum()
    }

    /// Offsets of extras, of the spans of copies, and of results in the slot's meta memory, after
    /// the descriptors. The checks and the spans of the answers lie just before the results; the
    /// data for decoding parents follows them.
    pub(super) fn places(&self) -> (u64, u64, u64) {
        let extras = u64::from(self.count()) * size_of::<EncodeChunk>() as u64;
        let extras = extras.next_multiple_of(ALIGN as u64);
        let copies = extras + self.extra_len;
        let checks = self.checks.len() as u64 * (SPAN + CRC_SPAN);
        let results = copies + (u64::from(self.copies) + 2) * SPAN + checks;
        (extras, copies, results.next_multiple_of(16))
    }

    /// Offsets of the checks: the spans that copy inputs, after those of the values, and the spans to sum.
    pub(super) fn checks_at(&self) -> (u64, u64) {
        let copies = self.places().1 + u64::from(self.copies) * SPAN;
        (copies, copies + self.checks.len() as u64 * SPAN)
    }

    /// Offset of the checksums that were found, which follow the results.
    pub(super) fn sums_at(&self) -> u64 {
        self.places().2 + TOTAL + u64::from(self.count()) * size_of::<EncodeResult>() as u64
    }

    /// The end of the results and checksums.
    pub(super) fn end(&self) -> u64 {
        self.sums_at() + 4 * self.checks.len() as u64
    }

    /// Gives each chunk its place: in the batch, which is sorted by route, or after the frames.
    pub(super) fn place(&mut self) {
        let mut next = [0; 6];
        for route in 1..next.len() {
            next[route] = next[route - 1] + self.routes[route - 1];
        }
        let mut behind = self.capacity;
        for member in &mut self.members {
            match member.route {
                Some(route) => {
                    member.at = next[route as usize] as usize;
                    next[route as usize] += 1;
                }
                None => {
                    member.at = behind as usize;
                    behind += member.bytes.next_multiple_of(ALIGN as u64);
                }
            }
        }
    }
}

/// The kernels' result for a chunk.
pub(super) fn result_of(session: &Session<'_>, group: &Group<'_>, member: &Member) -> EncodeResult {
    let size = size_of::<EncodeResult>();
    let results = (group.places().2 + TOTAL) as usize;
    let at = session.pinned_meta() + results + member.at * size;
    // SAFETY: the copy that wrote it is done.
    bytemuck::pod_read_unaligned(unsafe { session.worker.slots[group.slot].pinned.slice(at, size) })
}
