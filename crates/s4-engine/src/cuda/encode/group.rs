//! Chunks that are encoded together.

use bytes::Bytes;
use s4_codec_gpu::abi::{self, CopySpan, CrcSpan, EncodeChunk, EncodeResult, Route};
use s4_format::limits::ALIGN;

use super::homes::Home;
use crate::Input;
use crate::cuda::sets::{Extra, SetPlace};

/// A chunk of a group.
#[derive(Clone, Copy, Default)]
pub(super) struct Member {
    pub(super) tensor: usize,
    pub(super) chunk: u64,
    /// Address and bytes of its values, and where they are copied to, in scratch memory: whoever changes
    /// them meanwhile does not change the copy, which is all that the kernels look at. Of values that nobody changes the
    /// copy is the values themselves.
    pub(super) values: u64,
    pub(super) copy: u64,
    pub(super) bytes: u64,
    pub(super) fixed: bool,
    pub(super) route: Option<Route>,
    /// With a route its place in the batch, else where its values lie in the slot.
    pub(super) at: usize,
    /// Where its scratch memory starts, behind the copy. That of a chunk with an input has room for the input's
    /// values first, then for copies of its moments.
    pub(super) scratch: u64,
    /// Bytes of the input's values for each of its own; 0: it has none.
    pub(super) scale: u64,
    /// Whether its input is of the same checkpoint.
    pub(super) own_input: bool,
    /// The address of the input's values; 0: they are not to be used. And which statuses say how they came there.
    pub(super) parent: u64,
    pub(super) statuses: (usize, usize),
    /// Bytes that copies of its moments take, and the addresses of these, or of what the host has of them; 0: they are
    /// not to be used.
    pub(super) moments_room: u64,
    pub(super) moments: [u64; 2],
    /// Which of the group's checks its input's values must pass, and which its moments'.
    pub(super) checks: [(usize, usize); 2],
    /// Where what its tensor's chunks share, and the offsets of its own rows, lie behind the descriptors.
    pub(super) set: SetPlace,
    pub(super) rows: Option<u64>,
}

/// The work in flight in one slot.
#[derive(Default)]
pub(super) struct Group<'a> {
    pub(super) slot: usize,
    pub(super) members: Vec<Member>,
    /// What deltas are predicted from, until their frames are known to be good.
    pub(super) inputs: Vec<Option<Input<'a>>>,
    /// Moments that the host has: the chunk's number in the group, which of the two, and the values.
    pub(super) moments: Vec<(usize, usize, Bytes)>,
    /// What is copied to the device from where the caller has it.
    pub(super) uploads: Vec<Bytes>,
    /// Chunks of each route.
    pub(super) routes: [u32; 6],
    /// Bytes of frames at most; the values of the CPU's chunks follow.
    pub(super) capacity: u64,
    /// What is promised of that (`OpenPiece`).
    pub(super) promised: u64,
    /// Pieces that the values are copied in, and inputs that may change.
    pub(super) copies: u32,
    /// Pieces of such inputs: where the copy is, its bytes, and their CRC-32C.
    pub(super) checks: Vec<Check>,
    /// What lies behind the descriptors, and its bytes.
    pub(super) extras: Vec<Extra<'a>>,
    pub(super) extra_len: u64,
    /// Where the statuses of the parents' frames lie in the meta memory, by job.
    pub(super) statuses: Vec<usize>,
    /// Whether its frames were sent to the host, and where those are that may stay there. The others, which
    /// follow on the device, are in the slot.
    pub(super) sent: bool,
    pub(super) homes: Vec<Home>,
}

/// A copy of values that must be what was stored of them.
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
    /// What parents are made of, which lies where frames go to.
    pub(super) parents: u64,
    pub(super) scratch: u64,
    pub(super) meta: u64,
}

pub(super) const PER_CHUNK: u64 = (size_of::<EncodeChunk>() + size_of::<EncodeResult>()) as u64;
/// Bytes before the results: how many bytes of frames there are.
pub(super) const TOTAL: u64 = 16;
pub(super) const SPAN: u64 = size_of::<CopySpan>() as u64;
/// What a piece of an input that may change takes: two spans, and its checksum.
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

    /// Bytes of its input's values.
    pub(super) fn input_bytes(&self) -> u64 {
        self.scale * self.bytes
    }

    /// Whether the values of its input, of the same checkpoint, are no longer what was stored of it.
    pub(super) fn is_gone(&self, input: &Input<'_>) -> bool {
        self.own_input && matches!(input, Input::Host(values) if values.is_empty())
    }

    /// Room for them.
    pub(super) fn input_room(&self) -> u64 {
        self.input_bytes().next_multiple_of(ALIGN as u64)
    }

    /// Where the kernels' own scratch memory starts.
    pub(super) fn work(&self) -> u64 {
        self.scratch + self.input_room() + self.moments_room
    }
}

impl<'a> Group<'a> {
    /// Adds what lies behind the descriptors.
    pub(super) fn add(&mut self, extra: Extra<'a>) {
        self.extra_len += extra.len() as u64;
        self.extras.push(extra);
    }

    pub(super) fn count(&self) -> u32 {
        self.routes.iter().sum()
    }

    /// Where extras, the pieces of the copies and results start in the slot's meta memory: behind the
    /// descriptors. In front of the results are what is checked, and the spans of the answers. What decodes parents
    /// follows.
    pub(super) fn places(&self) -> (u64, u64, u64) {
        let extras = u64::from(self.count()) * size_of::<EncodeChunk>() as u64;
        let extras = extras.next_multiple_of(ALIGN as u64);
        let copies = extras + self.extra_len;
        let checks = self.checks.len() as u64 * (SPAN + CRC_SPAN);
        let results = copies + (u64::from(self.copies) + 2) * SPAN + checks;
        (extras, copies, results.next_multiple_of(16))
    }

    /// Where what is checked starts: behind the copies of the values those of inputs, then what to sum.
    pub(super) fn checks_at(&self) -> (u64, u64) {
        let copies = self.places().1 + u64::from(self.copies) * SPAN;
        (copies, copies + self.checks.len() as u64 * SPAN)
    }

    /// Where the checksums are that were found: behind the results.
    pub(super) fn sums_at(&self) -> u64 {
        self.places().2 + TOTAL + u64::from(self.count()) * size_of::<EncodeResult>() as u64
    }

    /// The end of the results and checksums.
    pub(super) fn end(&self) -> u64 {
        self.sums_at() + 4 * self.checks.len() as u64
    }

    /// Gives each chunk its place: in the batch, which is sorted by route, or behind the frames.
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
