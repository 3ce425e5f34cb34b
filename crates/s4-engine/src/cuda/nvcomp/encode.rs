//! Chunks of device tensors whose planes the library codes: split, coded and framed on the device.
//!
//! The library's encoders take milliseconds for a block, however few there are, and much scratch memory for each: only
//! many blocks in parallel make them fast. So the engine's whole budget of device memory is divided among streams, each
//! with a group of chunks; all of a group's planes are coded by one call for each codec, and the streams' calls run in
//! parallel.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use s4_codec_gpu::abi::{CopySpan, EncodeChunk, EncodeResult, MAX_PLANES, status};
use s4_codec_gpu::nvcomp::Compress;
use s4_codec_gpu::{CodedBatch, CodedPlane, Event, Stream, split_scratch};
use s4_format::Error;
use s4_format::limits::ALIGN;

use super::layout::{Load, Places, plane_sizes};
use super::library::{Library, WRITERS};
use crate::EncodedFrame;
use crate::cuda::encode::{bad_answer, encoded};
use crate::cuda::error::{Of, Result};
use crate::cuda::host::Host;
use crate::cuda::worker::{SLOTS, SMALLEST_SLOT, Session};
use crate::engine::{Chunk, ChunkQueue};

/// Device memory of a stream: enough for as many values as pinned memory has room for at a time.
const SHARE: u64 = 128 << 20;
/// Number of streams: with fewer, nothing would be coded while frames are copied, and more make nothing faster.
const STREAMS: std::ops::RangeInclusive<u64> = 2..=12;

/// A slot, and an offset in its pinned memory.
type PinnedPlace = (usize, usize);

/// Chunks that are coded together.
struct Group {
    share: usize,
    chunks: Vec<Chunk>,
    load: Load,
}

/// A stream with its share of the device memory.
struct Share {
    stream: Arc<Stream>,
    worked: Event,
}

/// One device's chunks, in order.
pub(in crate::cuda) struct LibraryQueue<'a> {
    session: Session<'a>,
    library: &'a Library,
    host: &'a Host,
    chunks: ChunkQueue<'a>,
    shares: Vec<Share>,
    /// Bytes of each share's device memory, and of its pinned memory for descriptors and results.
    memory: u64,
    meta: u64,
    in_flight: VecDeque<Group>,
    /// The results of the first group's chunks, the places of their frames, and how many of them were handed on.
    results: Vec<EncodeResult>,
    arrived: Vec<PinnedPlace>,
    handed: usize,
}

impl<'a> LibraryQueue<'a> {
    pub(in crate::cuda) fn new(
        session: Session<'a>,
        library: &'a Library,
        host: &'a Host,
        chunks: ChunkQueue<'a>,
    ) -> Result<Self> {
        let worker = &session.worker;
        let count = (session.bytes() / SHARE).clamp(*STREAMS.start(), *STREAMS.end());
        let share = |_| {
            let stream = Arc::new(Stream::new(&worker.device)?);
            // `compute` waits for the caller's streams already, and the memory is allocated in its order.
            stream.wait_for(&worker.compute)?;
            Ok(Share { stream, worked: Event::new(&worker.device)? })
        };
        let shares = (0..count).map(share).collect::<Result<_>>()?;
        Ok(Self {
            memory: (session.bytes() / count) & !255,
            meta: (session.sizes.meta / count.div_ceil(SLOTS as u64)) & !255,
            session,
            library,
            host,
            chunks,
            shares,
            in_flight: VecDeque::new(),
            results: vec![],
            arrived: vec![],
            handed: 0,
        })
    }

    /// Fills every share with work.
    pub(in crate::cuda) fn launch(&mut self) -> Result<()> {
        (0..self.shares.len()).try_for_each(|share| self.launch_on(share))
    }

    fn launch_on(&mut self, share: usize) -> Result<()> {
        let group = self.cut(share)?;
        if !group.chunks.is_empty() {
            self.start(&group)?;
            self.in_flight.push_back(group);
        }
        Ok(())
    }

    /// Takes as many chunks as a share has room for. The library is asked what it needs when blocks
    /// become longer, and once at the end.
    fn cut(&mut self, share: usize) -> Result<Group> {
        let mut taken: Vec<(Chunk, Load)> = vec![];
        while let Some(chunk) = self.chunks.peek() {
            let load = taken.last().map_or(Load::default(), |t| t.1);
            let plan = &self.chunks.plans[chunk.tensor];
            let load = load.with(self.library, plan, self.values_of(&chunk));
            let load = load.and_then(|l| if l.is_known() { Ok(l) } else { self.asked(share, l) });
            let load = load.map_err(|e| e.in_chunk(chunk.chunk)).of(chunk.tensor)?;
            if !self.fits(&load) && !taken.is_empty() {
                break;
            }
            self.chunks.advance();
            taken.push((chunk, load));
        }
        while let Some((chunk, load)) = taken.last().copied() {
            let named = |e: Error| e.in_chunk(chunk.chunk);
            let load = self.asked(share, load).map_err(named).of(chunk.tensor)?;
            if self.fits(&load) {
                return Ok(Group { share, chunks: taken.into_iter().map(|t| t.0).collect(), load });
            }
            if taken.len() == 1 {
                let what = format!(
                    "a chunk needs {} bytes of device memory, but the budget has only {} for it",
                    Places::of(&load).end,
                    self.memory
                );
                return Err(named(Error::limit(what))).of(chunk.tensor);
            }
            taken.pop();
            self.chunks.put_back(&chunk);
        }
        Ok(Group { share, chunks: vec![], load: Load::default() })
    }

    fn asked(&self, share: usize, load: Load) -> s4_format::Result<Load> {
        let stream = self.shares[share].stream.address();
        load.asked(self.library, &self.session.worker.device, stream)
    }

    fn fits(&self, load: &Load) -> bool {
        let places = Places::of(load);
        places.end <= self.memory
            && places.meta() <= self.meta
            && load.frames <= self.pinned_frames()
    }

    /// Bytes of frames that fit in the slots, however long each is: at the end of each slot except the last, less than
    /// the largest frame is left over.
    fn pinned_frames(&self) -> u64 {
        let (slots, room) = (SLOTS as u64, self.session.sizes.host_frames);
        slots * room - (slots - 1) * room.min(SMALLEST_SLOT)
    }

    /// Number of values in a chunk, and bytes of each.
    fn values_of(&self, chunk: &Chunk) -> (u64, usize) {
        let width = self.chunks.tensors[chunk.tensor].dtype.value_width();
        (chunk.bytes / width as u64, width)
    }

    /// Address of a share's device memory.
    fn address(&self, share: usize) -> u64 {
        self.session.address() + share as u64 * self.memory
    }

    /// The pinned memory of a share's descriptors and results: a slot, and the offset in it.
    fn pinned(&self, share: usize) -> (usize, usize) {
        (share % SLOTS, self.session.pinned_meta() + share / SLOTS * self.meta as usize)
    }

    /// Queues a group's work.
    fn start(&self, group: &Group) -> Result<()> {
        let worker = &self.session.worker;
        let Share { stream, worked } = &self.shares[group.share];
        let (base, places) = (self.address(group.share), Places::of(&group.load));
        let (slot, at) = self.pinned(group.share);
        let pinned = &worker.slots[slot].pinned;
        let (up, down) = (places.up() as usize, places.down() as usize);
        // SAFETY: the group that used it was handed on.
        self.describe(group, &places, unsafe { pinned.slice_mut(at, up) })?;
        let batch = CodedBatch {
            chunks: base,
            results: base + places.results,
            planes: base + places.planes,
            total: base + places.total,
            frames: base + places.frames,
            capacity: group.load.frames,
            // Bounded by the memory for descriptors.
            count: group.chunks.len() as u32,
        };
        // SAFETY: all parts are the share's, as large as `Load` added up, and used in the order of its
        // stream, except the caller's values, whose memory stays. Pinned memory as above. Descriptors of
        // copies are bounded by the memory for them.
        unsafe {
            stream.copy_to_device(pinned, at, up, base)?;
            // Everything else is made from this copy, which later changes of the values do not reach.
            stream.copy_spans(base + places.copies, group.load.copies as u32)?;
            stream.split_planes(&batch)?;
            for number in 0..WRITERS {
                self.code(group, &places, number)?;
            }
            stream.frame_planes(&batch)?;
            stream.copy_to_host(base + places.total, pinned, at + up, down)?;
        }
        Ok(worked.record(stream)?)
    }

    /// Queues one codec's blocks.
    ///
    /// # Safety
    /// The group's descriptors are on the share's device memory when the stream gets there.
    unsafe fn code(&self, group: &Group, places: &Places, number: usize) -> Result<()> {
        let (base, call) = (self.address(group.share), &group.load.calls[number]);
        let [inputs, input_sizes, outputs] = places.inputs(number).map(|at| base + at);
        let [output_sizes, statuses] = places.answers(number).map(|at| base + at);
        let batch = Compress {
            inputs,
            input_sizes,
            outputs,
            output_sizes,
            scratch: base + places.scratch[number],
            scratch_bytes: call.scratch as usize,
            statuses,
        };
        let stream = &self.shares[group.share].stream;
        // The library does not write every byte that it counts as output: without this, files would
        // keep whatever was in that memory.
        // SAFETY: the slots are the share's.
        unsafe { stream.fill(base + places.slots[number], 0, call.slot * call.blocks()) }?;
        let _current = self.session.worker.device.enter()?;
        let (codec, stream) = (self.library.writer(number), stream.address());
        // SAFETY: the caller's: what the arrays name is the share's, each block's output as large as the
        // codec asks for; the device is current.
        let queued = unsafe { codec.encode(call.shape, batch, stream) };
        queued.map_err(Error::from).of(group.chunks[0].tensor)
    }

    /// Writes the data to upload.
    fn describe(&self, group: &Group, places: &Places, to: &mut [u8]) -> Result<()> {
        let mut next = [0u64; WRITERS];
        let base = self.address(group.share);
        let (mut scratch, mut values, mut span) =
            (base + places.split, base + places.values, places.copies);
        for (i, chunk) in group.chunks.iter().enumerate() {
            let (plan, bytes) = (&self.chunks.plans[chunk.tensor].plan, chunk.bytes);
            let (n, width) = self.values_of(chunk);
            // Checked before: it is in a device's memory.
            let memory = self.chunks.tensors[chunk.tensor].values.memory();
            let address = memory.map_or(0, |m| m.address()) + chunk.first;
            for copy in CopySpan::cut(address, values, bytes) {
                put(to, span, bytemuck::bytes_of(&copy));
                span += size_of::<CopySpan>() as u64;
            }
            let descriptor = EncodeChunk {
                values,
                scratch,
                // The kernels refuse numbers that are out of range.
                n: n as u32,
                width: width as u8,
                layout: plan.layout.0,
                residual: plan.residual.0,
                ..bytemuck::Zeroable::zeroed()
            };
            put(to, (i * size_of::<EncodeChunk>()) as u64, bytemuck::bytes_of(&descriptor));
            let coded = self.describe_planes(group, places, (chunk, scratch), &mut next, to)?;
            put(to, places.planes + i as u64 * CodedBatch::PLANES, bytemuck::cast_slice(&coded));
            scratch += split_scratch(n, width as u64);
            values += bytes.next_multiple_of(ALIGN as u64);
        }
        Ok(())
    }

    /// Adds the blocks of a chunk, whose planes are split to an address, to the arrays of their calls.
    fn describe_planes(
        &self,
        group: &Group,
        places: &Places,
        (chunk, mut plane): (&Chunk, u64),
        next: &mut [u64; WRITERS],
        to: &mut [u8],
    ) -> Result<[CodedPlane; MAX_PLANES]> {
        let plan = &self.chunks.plans[chunk.tensor];
        let (n, width) = self.values_of(chunk);
        let mut coded: [CodedPlane; MAX_PLANES] = bytemuck::Zeroable::zeroed();
        let sizes = plane_sizes(plan.plan.layout, width, n).of(chunk.tensor)?;
        for (i, &size) in sizes.sizes().iter().enumerate() {
            if let Some(number) = plan.planes.get(i).and_then(|c| Library::number(*c)) {
                coded[i] = self.coded(group, places, number, (next[number], size));
                let (block, slot) = (self.library.writer(number).block(), u64::from(coded[i].slot));
                for (k, at) in (0..size).step_by(block).enumerate() {
                    let output = coded[i].slots + k as u64 * slot;
                    let fields = [plane + at as u64, block.min(size - at) as u64, output];
                    for (array, field) in places.inputs(number).into_iter().zip(fields) {
                        put(to, array + 8 * next[number], &field.to_ne_bytes());
                    }
                    next[number] += 1;
                }
            }
            plane += size.next_multiple_of(ALIGN) as u64;
        }
        Ok(coded)
    }

    /// The descriptor of a plane of `size` bytes; `first` is the index of its first block in its
    /// call.
    fn coded(
        &self,
        group: &Group,
        places: &Places,
        number: usize,
        (first, size): (u64, usize),
    ) -> CodedPlane {
        let (codec, call) = (self.library.writer(number), &group.load.calls[number]);
        let base = self.address(group.share);
        let [sizes, statuses] = places.answers(number);
        CodedPlane {
            slots: base + places.slots[number] + first * call.slot,
            sizes: base + sizes + 8 * first,
            statuses: base + statuses + 4 * first,
            // A block has at most 2^18 bytes.
            slot: call.slot as u32,
            blocks: size.div_ceil(codec.block()) as u32,
            codec: codec.id().0,
            param: codec.param(),
            reserved: [0; 6],
        }
    }

    /// Copies the first group's frames to the host, and gives its share new work.
    fn fetch(&mut self) -> Result<()> {
        let Some(group) = self.in_flight.front() else { return Ok(()) };
        let (share, places) = (group.share, Places::of(&group.load));
        let Share { stream, worked } = &self.shares[share];
        worked.synchronize()?;
        let results = self.results_of(group, &places);
        for (chunk, result) in group.chunks.iter().zip(&results) {
            let end = result.offset.checked_add(result.len.into());
            match u32::from(result.status) {
                status::OK => {}
                status::CORRUPT => {
                    let what = "nvCOMP could not encode a block";
                    return Err(Error::unsupported(what).in_chunk(chunk.chunk)).of(chunk.tensor);
                }
                _ => {
                    let what = {
                        let (n, width) = self.values_of(chunk);
                        format!("the device cannot encode {n} values of {width} bytes")
                    };
                    return Err(Error::limit(what).in_chunk(chunk.chunk)).of(chunk.tensor);
                }
            }
            if end.is_none_or(|end| end > group.load.frames) {
                return Err(bad_answer(self.ordinal()).into());
            }
        }
        let frames = self.address(share) + places.frames;
        let (arrived, parts) = distribute(&results, self.session.sizes.host_frames)
            .ok_or_else(|| bad_answer(self.ordinal()))?;
        for (slot, part) in self.session.worker.slots.iter().zip(parts) {
            let (from, len) = (frames + part.start, (part.end - part.start) as usize);
            // SAFETY: the kernels are done with the frames, of which this is a part; the frames that were
            // in the slot were handed on.
            unsafe { stream.copy_to_host(from, &slot.pinned, 0, len)? };
        }
        stream.synchronize()?;
        (self.results, self.arrived) = (results, arrived);
        self.launch_on(share)
    }

    fn ordinal(&self) -> u32 {
        self.session.worker.device.ordinal()
    }

    /// The kernels' results for a group that is done.
    fn results_of(&self, group: &Group, places: &Places) -> Vec<EncodeResult> {
        let size = size_of::<EncodeResult>();
        let (slot, at) = self.pinned(group.share);
        let at = at + places.results as usize;
        // SAFETY: the copy that wrote it is done.
        let bytes =
            unsafe { self.session.worker.slots[slot].pinned.slice(at, group.chunks.len() * size) };
        bytes.chunks_exact(size).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Ensures that the next chunks of this device's tensors are ready; returns their tensor and
    /// chunk indices, none after the last one.
    pub(in crate::cuda) fn ready(&mut self) -> Result<Vec<(usize, u64)>> {
        if self.in_flight.front().is_some_and(|g| self.handed == g.chunks.len()) {
            self.in_flight.pop_front();
            self.handed = 0;
        }
        if self.handed == 0 {
            self.fetch()?;
        }
        let left = self.in_flight.front().map_or(&[][..], |group| &group.chunks[self.handed..]);
        Ok(left.iter().map(Chunk::name).collect())
    }

    /// The next `count` of the chunks that are ready.
    pub(in crate::cuda) fn take(&mut self, count: usize) -> Vec<EncodedFrame<'_>> {
        let Some(group) = self.in_flight.front() else { return vec![] };
        let done = self.handed..self.handed + count;
        self.handed = done.end;
        self.host.chunks.device.fetch_add(count as u64, Ordering::Relaxed);
        let frame = |number: usize| {
            let (chunk, result) = (&group.chunks[number], &self.results[number]);
            let (slot, at) = self.arrived[number];
            // SAFETY: the copy that wrote it is done; the next one is made by a later call.
            let bytes =
                unsafe { self.session.worker.slots[slot].pinned.slice(at, result.len as usize) };
            let encoded = encoded(result);
            EncodedFrame { tensor: chunk.tensor, chunk: chunk.chunk, encoded, bytes, held: None }
        };
        done.map(frame).collect()
    }
}

impl Drop for LibraryQueue<'_> {
    fn drop(&mut self) {
        // The session's memory is about to be freed. An error was reported before, or the device was lost.
        for share in &self.shares {
            let _ = share.stream.synchronize();
        }
    }
}

/// Distributes frames, which lie one after the other, among slots of `room` bytes each. Returns the place of each
/// frame, and the part of the frames that each slot gets; `None` if that is impossible.
fn distribute(results: &[EncodeResult], room: u64) -> Option<(Vec<PinnedPlace>, Vec<Range<u64>>)> {
    let (mut places, mut parts) = (Vec::with_capacity(results.len()), Vec::<Range<u64>>::new());
    for result in results {
        let frame = result.offset..result.offset.checked_add(result.len.into())?;
        let before = parts.last().map_or(0, |part| part.end);
        if frame.start < before || frame.end - frame.start > room {
            return None;
        }
        match parts.last_mut() {
            Some(part) if frame.end - part.start <= room => part.end = frame.end,
            _ => parts.push(frame.clone()),
        }
        let part = parts.last()?;
        places.push((parts.len() - 1, (frame.start - part.start) as usize));
    }
    (parts.len() <= SLOTS).then_some((places, parts))
}

fn put(to: &mut [u8], at: u64, bytes: &[u8]) {
    let at = at as usize;
    to[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(lens: &[u32]) -> Vec<EncodeResult> {
        let mut offset = 0;
        let result = |&len| {
            let at = offset;
            offset = (at + u64::from(len)).next_multiple_of(16);
            EncodeResult { offset: at, len, ..bytemuck::Zeroable::zeroed() }
        };
        lens.iter().map(result).collect()
    }

    #[test]
    fn frames_are_distributed_among_the_slots_in_order() {
        let (places, parts) = distribute(&frames(&[100, 100, 20, 250, 6]), 256).unwrap();
        assert_eq!(places, [(0, 0), (0, 112), (0, 224), (1, 0), (2, 0)]);
        assert_eq!(parts, [0..244, 256..506, 512..518]);
        assert_eq!(distribute(&[], 256), Some((vec![], vec![])));
    }

    #[test]
    fn frames_that_do_not_fit_or_overlap_are_refused() {
        assert_eq!(distribute(&frames(&[257]), 256), None);
        assert!(distribute(&frames(&[200; SLOTS]), 256).is_some());
        assert_eq!(distribute(&frames(&[200; SLOTS + 1]), 256), None);
        let mut overlapping = frames(&[100, 100]);
        overlapping[1].offset = 99;
        assert_eq!(distribute(&overlapping, 256), None);
        overlapping[1].offset = u64::MAX;
        assert_eq!(distribute(&overlapping, 256), None);
    }
}
