//! The memory that a group of chunks needs in a share, and the place of each part.

use s4_codec_gpu::CodedBatch;
use s4_codec_gpu::abi::{COPY_SPAN_BYTES, CopySpan, EncodeChunk, EncodeResult};
use s4_codec_gpu::nvcomp::Shape;
use s4_codec_gpu::{Device, split_scratch};
use s4_format::layout::Planes;
use s4_format::limits::ALIGN;
use s4_format::{LayoutId, Result};

use super::library::{Library, WRITERS, encode_needs};
use crate::TensorPlan;

/// Alignment of the parts: more than anything asks for.
const PART: u64 = 256;

/// One codec's blocks of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) shape: Shape,
    /// Bytes from one block's output to the next.
    pub(super) slot: u64,
    /// Bytes of scratch memory.
    pub(super) scratch: u64,
    /// The longest block that the library was asked about.
    asked: usize,
}

impl Default for Call {
    fn default() -> Self {
        let shape = Shape { blocks: 0, max_block: 0, total: 0 };
        Self { shape, slot: 0, scratch: 0, asked: 0 }
    }
}

impl Call {
    pub(super) fn blocks(&self) -> u64 {
        self.shape.blocks as u64
    }
}

/// The needs of a group, added up chunk by chunk.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) chunks: u64,
    /// Bytes of their planes.
    planes: u64,
    /// Upper bound of the bytes of their frames: those of their values.
    pub(super) frames: u64,
    /// Number of pieces that the values are copied in.
    pub(super) copies: u64,
    pub(super) calls: [Call; WRITERS],
}

/// Sizes of the planes of a chunk of `n` values.
pub(super) fn plane_sizes(layout: LayoutId, width: usize, n: u64) -> Result<Planes> {
    Planes::new(layout, width, usize::try_from(n).unwrap_or(usize::MAX))
}

impl Load {
    /// The load with one more chunk, of `n` values of `width` bytes. What the calls need is
    /// estimated from what each block needed in the last [`Load::asked`].
    ///
    /// # Errors
    /// If values of this width do not have the plan's layout.
    pub(super) fn with(
        mut self,
        library: &Library,
        plan: &TensorPlan,
        (n, width): (u64, usize),
    ) -> Result<Self> {
        self.chunks += 1;
        self.planes += split_scratch(n, width as u64);
        self.frames += (n * width as u64).next_multiple_of(ALIGN as u64);
        self.copies += (n * width as u64).div_ceil(COPY_SPAN_BYTES);
        let planes = plane_sizes(plan.plan.layout, width, n)?;
        for (&size, &coding) in planes.sizes().iter().zip(&plan.planes) {
            let Some(number) = Library::number(coding) else { continue };
            let (block, call) = (library.writer(number).block(), &mut self.calls[number]);
            let (before, more) = (call.blocks(), size.div_ceil(block));
            call.shape.blocks += more;
            // The codec's block, not the longest one of this group: ANS would write other bytes
            // then, and a chunk's bytes must not depend on the other chunks of its group.
            call.shape.max_block = block;
            call.shape.total += size;
            call.scratch += (call.scratch * more as u64).div_ceil(before.max(1));
        }
        Ok(self)
    }

    /// The same, with the needs that the library reports for the calls. `stream` belongs to the
    /// device.
    ///
    /// # Errors
    /// Those of the library.
    pub(super) fn asked(mut self, library: &Library, device: &Device, stream: u64) -> Result<Self> {
        for (number, call) in self.calls.iter_mut().enumerate().filter(|c| c.1.shape.blocks > 0) {
            let (needs, slot) = encode_needs(library.writer(number), device, call.shape, stream)?;
            call.slot = slot as u64;
            call.scratch = needs.scratch as u64;
            call.asked = call.shape.max_block;
        }
        Ok(self)
    }

    /// Whether the estimate is valid: the library was asked about blocks of this length.
    pub(super) fn is_known(&self) -> bool {
        self.calls.iter().all(|c| c.asked >= c.shape.max_block)
    }
}

/// Offsets of the parts in a share's memory. First the uploaded data (chunks, their planes' descriptors, arrays of
/// inputs, sizes and outputs of each call, spans to copy), then the data that is sent back (total and results), then
/// the data that stays: sizes and statuses of each call, values, planes, outputs.
///
/// The first codec's scratch memory, by far the largest part, is reused once that codec is done,
/// for the outputs of the second one and for the frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    pub(super) planes: u64,
    arrays: [u64; WRITERS],
    pub(super) copies: u64,
    pub(super) total: u64,
    pub(super) results: u64,
    sizes: [u64; WRITERS],
    pub(super) values: u64,
    pub(super) split: u64,
    pub(super) slots: [u64; WRITERS],
    pub(super) scratch: [u64; WRITERS],
    pub(super) frames: u64,
    pub(super) end: u64,
    blocks: [u64; WRITERS],
}

impl Places {
    pub(super) fn of(load: &Load) -> Self {
        let mut at = 0u64;
        let mut part = |bytes: u64| {
            let start = at;
            at = (at + bytes).next_multiple_of(PART);
            start
        };
        let [first, second] = load.calls;
        part(load.chunks * size_of::<EncodeChunk>() as u64);
        let planes = part(load.chunks * CodedBatch::PLANES);
        let arrays = [first, second].map(|c| part(3 * 8 * c.blocks()));
        let copies = part(load.copies * size_of::<CopySpan>() as u64);
        let total = part(PART + load.chunks * size_of::<EncodeResult>() as u64);
        let sizes = [first, second].map(|c| part((8 + 4) * c.blocks()));
        let values = part(load.frames);
        let split = part(load.planes);
        let slots = part(first.slot * first.blocks());
        let scratch = part(first.scratch);
        let done = at;
        at = scratch;
        let mut part = |bytes: u64| {
            let start = at;
            at = (at + bytes).next_multiple_of(PART);
            start
        };
        let second_slots = part(second.slot * second.blocks());
        let second_scratch = part(second.scratch);
        let frames = part(load.frames);
        Self {
            planes,
            arrays,
            copies,
            total,
            results: total + PART,
            sizes,
            values,
            split,
            slots: [slots, second_slots],
            scratch: [scratch, second_scratch],
            frames,
            end: done.max(at),
            blocks: [first.blocks(), second.blocks()],
        }
    }

    /// The arrays of a call: addresses of inputs, their sizes, addresses of outputs.
    pub(super) fn inputs(&self, call: usize) -> [u64; 3] {
        [0, 1, 2].map(|i| self.arrays[call] + 8 * self.blocks[call] * i)
    }

    /// A call's answers: sizes of 8 bytes, statuses of 4.
    pub(super) fn answers(&self, call: usize) -> [u64; 2] {
        [self.sizes[call], self.sizes[call] + 8 * self.blocks[call]]
    }

    /// Bytes at the start that the host writes.
    pub(super) fn up(&self) -> u64 {
        self.total
    }

    /// Bytes that the host reads, from `total` on.
    pub(super) fn down(&self) -> u64 {
        self.sizes[0] - self.total
    }

    /// Bytes of both together.
    pub(super) fn meta(&self) -> u64 {
        self.sizes[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(chunks: u64, blocks: [usize; 2]) -> Load {
        let call = |n: usize| Call {
            shape: Shape { blocks: n, max_block: 100, total: 100 * n },
            slot: 208,
            scratch: 1000 * n as u64,
            asked: 100,
        };
        Load {
            chunks,
            planes: 300 * chunks,
            frames: 272 * chunks,
            copies: chunks,
            calls: blocks.map(call),
        }
    }

    #[test]
    fn no_two_parts_that_are_in_use_together_overlap() {
        for chunks in [1, 2, 33] {
            for blocks in [[0, 3], [3, 0], [5, 7], [300, 300]] {
                let (load, p) = (load(chunks, blocks), Places::of(&load(chunks, blocks)));
                let call = |i: usize, at: u64| (at, load.calls[i].blocks());
                let mut parts = vec![(0, 56 * chunks), (p.planes, 320 * chunks)];
                parts.extend([(p.total, 8), (p.results, 96 * chunks), (p.split, load.planes)]);
                parts.extend([(p.copies, 24 * chunks), (p.values, load.frames)]);
                for i in 0..2 {
                    parts.extend(p.inputs(i).map(|at| (at, 8 * load.calls[i].blocks())));
                    let [sizes, statuses] = p.answers(i);
                    parts.extend([(sizes, 8 * call(i, 0).1), (statuses, 4 * call(i, 0).1)]);
                }
                parts.push((p.slots[0], 208 * load.calls[0].blocks()));
                // Either the first codec works, or the second one and the gather do.
                let first = vec![(p.scratch[0], load.calls[0].scratch)];
                let then = vec![
                    (p.slots[1], 208 * load.calls[1].blocks()),
                    (p.scratch[1], load.calls[1].scratch),
                    (p.frames, load.frames),
                ];
                for phase in [first, then] {
                    let mut all = [parts.clone(), phase].concat();
                    all.retain(|part| part.1 > 0);
                    all.sort_unstable();
                    for pair in all.windows(2) {
                        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} {p:?}");
                    }
                    let last = all.last().expect("parts");
                    assert!(last.0 + last.1 <= p.end);
                }
                assert_eq!((p.up(), p.meta()), (p.total, p.total + p.down()));
            }
        }
    }
}
