//! Blocks of host memory, coded on the device by one call of a codec: copied up, coded, and copied back.
//!
//! Both directions are the same except for what a block's output may be: [`Direction`].

use std::ops::Range;
use std::sync::Arc;

use nvcomp_sys::{Compress, Decompress, Shape, Status};
use s4_codec_cpu::blocks;
use s4_format::{CodecId, Error, Result};

use super::codec::{GpuCodec, Needs};
use crate::device::{Device, Stream};
use crate::error::GpuError;
use crate::memory::{DeviceBuffer, Pool};
use crate::pinned::Pinned;

/// Alignment of everything in a call's memory: more than any codec asks for.
const ALIGN: usize = 256;

/// The work of a call on its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Blocks of planes become coded blocks, of whatever size.
    Encode,
    /// Coded blocks become exactly their parts of the plane.
    Decode,
}

/// Some blocks of one plane or stream.
#[derive(Debug)]
pub(super) struct Item {
    /// The plane or the stream.
    pub(super) data: Vec<u8>,
    /// The range of each block in it, and the bytes that it may become.
    pub(super) blocks: Vec<(Range<usize>, usize)>,
}

impl Item {
    /// Bytes of blocks before coding.
    fn plain(&self, direction: Direction) -> usize {
        let sizes = self.blocks.iter().map(|(stored, room)| match direction {
            Direction::Encode => stored.len(),
            Direction::Decode => *room,
        });
        sizes.sum()
    }
}

/// The memory that a call needs, and its layout: the same offsets on the device and in pinned memory, except for the
/// scratch memory, which is only on the device.
///
/// Four arrays of 8 bytes for each block come first (inputs, their sizes, outputs, capacities), then the data. The
/// results follow: a size of 8 bytes and a status of 4 for each block, and the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parts {
    count: usize,
    data: usize,
    out: usize,
}

impl Parts {
    fn of(items: &[&Item]) -> Self {
        let mut parts = Self { count: 0, data: 0, out: 0 };
        for item in items {
            parts.count += item.blocks.len();
            parts.data += room_of(item.data.len());
            parts.out += item.blocks.iter().map(|b| b.1.next_multiple_of(ALIGN)).sum::<usize>();
        }
        parts
    }

    fn array(&self, number: usize) -> usize {
        8 * self.count * number
    }

    fn data_at(&self) -> usize {
        self.array(4).next_multiple_of(ALIGN)
    }

    fn answers_at(&self) -> usize {
        self.data_at() + self.data
    }

    fn statuses_at(&self) -> usize {
        self.answers_at() + 8 * self.count
    }

    fn out_at(&self) -> usize {
        (self.statuses_at() + 4 * self.count).next_multiple_of(ALIGN)
    }

    fn end(&self) -> usize {
        self.out_at() + self.out
    }
}

/// Room for an item's data. Decoders read a little past the end of a block, which must be memory, too.
fn room_of(data: usize) -> usize {
    (data + ALIGN).next_multiple_of(ALIGN)
}

/// The resources of one call at a time.
#[derive(Debug)]
pub(super) struct Lane {
    device: Arc<Device>,
    pool: Arc<Pool>,
    stream: Arc<Stream>,
    /// Grows to what a call needs and is kept.
    pinned: Option<Pinned>,
}

impl Lane {
    pub(super) fn new(device: &Arc<Device>, pool: &Arc<Pool>) -> Result<Self, GpuError> {
        let stream = Arc::new(Stream::new(device)?);
        Ok(Self { device: Arc::clone(device), pool: Arc::clone(pool), stream, pinned: None })
    }

    /// Device memory that a call would take, in bytes.
    pub(super) fn needs(
        &self,
        codec: &dyn GpuCodec,
        direction: Direction,
        items: &[&Item],
    ) -> Result<usize> {
        let (_, needs) = self.shape(codec, direction, items)?;
        Ok(Parts::of(items).end().next_multiple_of(ALIGN) + needs.scratch)
    }

    fn shape(
        &self,
        codec: &dyn GpuCodec,
        direction: Direction,
        items: &[&Item],
    ) -> Result<(Shape, Needs)> {
        // Not the longest of these blocks: ANS would write other bytes then, and a plane's bytes
        // must not depend on the other planes of the call.
        let mut shape = Shape { blocks: 0, max_block: codec.block(), total: 0 };
        for item in items {
            shape.blocks += item.blocks.len();
            shape.total += item.plain(direction);
        }
        let _current = self.device.enter().map_err(gpu)?;
        let needs = match direction {
            Direction::Encode => codec.encode_needs(shape, self.stream.address())?,
            Direction::Decode => codec.decode_needs(shape, self.stream.address())?,
        };
        // Blocks of a stream start at multiples of this.
        if !needs.fit(blocks::ALIGN) {
            return Err(Error::unsupported(format!("alignments of {:?}", needs.alignments)));
        }
        Ok((shape, needs))
    }

    /// Codes the blocks of all items; returns the outcome of each block, item by item.
    ///
    /// # Safety
    /// To decode: an encoder of this bitstream wrote the blocks.
    pub(super) unsafe fn run(
        &mut self,
        codec: &dyn GpuCodec,
        direction: Direction,
        items: &[&Item],
    ) -> Result<Vec<Result<Vec<Vec<u8>>>>> {
        // SAFETY: the caller's.
        let done = unsafe { self.call(codec, direction, items) };
        if done.is_err() {
            // Queued work may still use the lane's memory.
            let _ = self.stream.synchronize();
        }
        done
    }

    /// # Safety
    /// As [`Lane::run`]; the stream must be done before the lane is used again.
    unsafe fn call(
        &mut self,
        codec: &dyn GpuCodec,
        direction: Direction,
        items: &[&Item],
    ) -> Result<Vec<Result<Vec<Vec<u8>>>>> {
        let (shape, Needs { scratch, .. }) = self.shape(codec, direction, items)?;
        let parts = Parts::of(items);
        let scratch_at = parts.end().next_multiple_of(ALIGN);
        let bytes = (scratch_at + scratch.max(1)) as u64;
        let device = self.pool.alloc(&self.stream, bytes, "planes for nvCOMP").map_err(gpu)?;
        let pinned = match self.pinned.take().filter(|p| p.len() >= parts.end()) {
            Some(pinned) => pinned,
            None => {
                let len = parts.end().next_multiple_of(64 << 10);
                Pinned::new(&self.device, len).map_err(gpu)?
            }
        };
        let pinned = self.pinned.insert(pinned);
        let call = Call { stream: &self.stream, pinned, device, parts };
        call.fill(items);
        let at = |offset: usize| call.device.address() + offset as u64;
        let [inputs, input_sizes, outputs, capacities] =
            [0, 1, 2, 3].map(|number| at(parts.array(number)));
        let (output_sizes, statuses) = (at(parts.answers_at()), at(parts.statuses_at()));
        let (scratch, scratch_bytes) = (at(scratch_at), scratch);
        call.up()?;
        {
            let _current = self.device.enter().map_err(gpu)?;
            let stream = self.stream.address();
            match direction {
                Direction::Encode => {
                    let batch = Compress {
                        inputs,
                        input_sizes,
                        outputs,
                        output_sizes,
                        scratch,
                        scratch_bytes,
                        statuses,
                    };
                    // SAFETY: everything is as large and aligned as the batch says, in memory that stays
                    // until the stream is done: `down` waits for it, and `run` does after an error.
                    unsafe { codec.encode(shape, batch, stream) }
                }
                Direction::Decode => {
                    let batch = Decompress {
                        inputs,
                        input_sizes,
                        outputs,
                        output_capacities: capacities,
                        output_sizes,
                        scratch,
                        scratch_bytes,
                        statuses,
                    };
                    // SAFETY: as above; the origin of the blocks is the caller's promise.
                    unsafe { codec.decode(shape, batch, stream) }
                }
            }?;
        }
        call.down()?;
        Ok(call.answers(codec.id(), direction, items))
    }
}

/// The memory of a call.
struct Call<'a> {
    stream: &'a Arc<Stream>,
    pinned: &'a Pinned,
    device: DeviceBuffer,
    parts: Parts,
}

impl Call<'_> {
    /// Writes arrays and data into pinned memory.
    fn fill(&self, items: &[&Item]) {
        let parts = &self.parts;
        let base = self.device.address();
        // SAFETY: this call's alone, and no work on it is in flight.
        let bytes = unsafe { self.pinned.slice_mut(0, parts.answers_at()) };
        let (mut at, mut to, mut number) = (parts.data_at(), parts.out_at(), 0);
        for item in items {
            bytes[at..at + item.data.len()].copy_from_slice(&item.data);
            for (stored, room) in &item.blocks {
                let fields = [at + stored.start, stored.len(), to, *room];
                let offsets = [base, 0, base, 0];
                for (array, (field, offset)) in fields.into_iter().zip(offsets).enumerate() {
                    let field = (field as u64 + offset).to_ne_bytes();
                    bytes[parts.array(array) + 8 * number..][..8].copy_from_slice(&field);
                }
                to += room.next_multiple_of(ALIGN);
                number += 1;
            }
            at += room_of(item.data.len());
        }
    }

    /// Copies arrays and data to the device. The library does not write every byte that it counts as output: without
    /// this, streams would keep whatever was in that memory.
    fn up(&self) -> Result<()> {
        let (len, out) = (self.parts.answers_at(), self.parts.out_at());
        let address = self.device.address();
        // SAFETY: device memory of this size, and pinned memory that is this call's alone.
        unsafe {
            self.stream.copy_to_device(self.pinned, 0, len, address).map_err(gpu)?;
            self.stream.fill(address + out as u64, 0, self.parts.out as u64).map_err(gpu)
        }
    }

    /// Copies answers and outputs back, and waits.
    fn down(&self) -> Result<()> {
        let at = self.parts.answers_at();
        let from = self.device.address() + at as u64;
        // SAFETY: as above.
        unsafe { self.stream.copy_to_host(from, self.pinned, at, self.parts.end() - at) }
            .map_err(gpu)?;
        self.stream.synchronize().map_err(gpu)
    }

    fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: the copies were waited for.
        unsafe { self.pinned.slice(at, len) }
    }

    /// The outcome of each block; an item has an error unless all its blocks succeeded.
    fn answers(
        &self,
        id: CodecId,
        direction: Direction,
        items: &[&Item],
    ) -> Vec<Result<Vec<Vec<u8>>>> {
        let parts = &self.parts;
        let (sizes, _) = self.bytes(parts.answers_at(), 8 * parts.count).as_chunks::<8>();
        let (statuses, _) = self.bytes(parts.statuses_at(), 4 * parts.count).as_chunks::<4>();
        let (mut at, mut next) = (parts.out_at(), 0);
        let each = items.iter().map(|item| {
            let first = next;
            let blocks = item.blocks.iter().map(|(_, room)| {
                let from = at;
                at += room.next_multiple_of(ALIGN);
                let (size, status) = (u64::from_ne_bytes(sizes[next]), statuses[next]);
                next += 1;
                let status = Status(i32::from_ne_bytes(status));
                let len = check(id, direction, next - 1 - first, status, size, *room)?;
                Ok(self.bytes(from, len).to_vec())
            });
            // All blocks are gone through even after an error, so that the next item's are found.
            blocks.collect::<Vec<Result<_>>>().into_iter().collect()
        });
        each.collect()
    }
}

/// The size of the output of block `number` of an item, which has room for `room` bytes.
fn check(
    id: CodecId,
    direction: Direction,
    number: usize,
    status: Status,
    size: u64,
    room: usize,
) -> Result<usize> {
    if status != Status::SUCCESS {
        return Err(Error::corrupt(format!(
            "nvCOMP failed on block {number} of codec `{id}`: {status}"
        )));
    }
    match (direction, usize::try_from(size)) {
        (Direction::Encode, Ok(size)) if size > 0 && size <= room => Ok(size),
        (Direction::Encode, _) => Err(Error::unsupported(format!(
            "nvCOMP returned a block of {size} bytes for codec `{id}`"
        ))),
        (Direction::Decode, Ok(size)) if size == room => Ok(size),
        (Direction::Decode, _) => {
            Err(Error::corrupt(format!("block {number} decodes to {size} bytes, expected {room}")))
        }
    }
}

/// A GPU error as a codec's error.
pub(super) fn gpu(error: GpuError) -> Error {
    match error {
        GpuError::Budget { .. } | GpuError::OutOfMemory { .. } => Error::limit(error.to_string()),
        _ => Error::unsupported(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_call_lie_side_by_side() {
        for count in [1, 2, 31, 500] {
            for len in [1, 255, 256, 10_000] {
                let item = || Item { data: vec![0; len], blocks: vec![(0..len, 2 * len); count] };
                let items = [item(), item()];
                let p = Parts::of(&items.iter().collect::<Vec<_>>());
                assert_eq!(p.count, 2 * count);
                assert!(p.data_at() >= 64 * count && p.data_at().is_multiple_of(ALIGN));
                assert!(p.answers_at() > p.data_at() + 2 * (len + ALIGN) - 1);
                assert_eq!(p.statuses_at(), p.answers_at() + 16 * count);
                assert!(p.out_at() >= p.statuses_at() + 8 * count);
                assert!(p.out_at().is_multiple_of(ALIGN));
                assert!(p.end() >= p.out_at() + 4 * len * count);
            }
        }
    }

    #[test]
    fn what_the_library_says_of_a_block_is_checked() {
        use Direction::{Decode, Encode};
        let of = |direction, status, size| {
            check(CodecId::LZ4, direction, 3, Status(status), size, 10).map_err(|e| e.to_string())
        };
        assert_eq!(
            (of(Encode, 0, 1), of(Encode, 0, 10), of(Decode, 0, 10)),
            (Ok(1), Ok(10), Ok(10))
        );
        for (direction, size) in [(Encode, 0), (Encode, 11), (Encode, u64::MAX), (Decode, 9)] {
            assert!(of(direction, 0, size).is_err(), "{direction:?} {size}");
        }
        let text = of(Decode, 12, 10).unwrap_err();
        assert!(text.contains("block 3") && text.contains("cannot decompress"), "{text}");
    }
}
