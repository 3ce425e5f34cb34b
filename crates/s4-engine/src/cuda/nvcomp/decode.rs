//! Decodes frames with streams in blocks: the library decodes the blocks into planes in scratch
//! memory, and this crate's kernels go on as if those planes had been stored raw. Batches of frames take
//! turns in two streams, each with half of the scratch memory.
//!
//! Only for checkpoints that the caller trusts. A kernel compares a frame's checksum, and the host
//! waits for its answer before the library gets the frame's blocks, because the host decides how
//! many it gets. The output is compared with its checksum on the device, too.

use std::collections::BTreeMap;
use std::ops::Range;

use s4_codec_cpu::blocks::Blocks;
use s4_codec_gpu::abi::{self, CopySpan, DecodeChunk, DecodeStream, Route};
use s4_codec_gpu::nvcomp::{Decompress, GpuCodec, Shape, Status};
use s4_codec_gpu::{DecodeBatch, Stream};
use s4_format::limits::ALIGN;
use s4_format::{CodecId, Error, ResidualId, StreamEntry};

use super::layout::plane_sizes;
use super::library::{Trusted, decode_scratch};
use crate::cuda::FrameJob;
use crate::cuda::decode::{Answers, Busy, DecodeQueue};
use crate::cuda::error::{Of, Result};
use crate::cuda::route::has_layout;

/// Alignment of the parts of scratch memory, and the bytes after a frame that decoders may read.
const PART: u64 = 256;

/// A stream in blocks.
struct Coded {
    plane: usize,
    size: usize,
    codec: Box<dyn GpuCodec>,
    /// Each block's bytes in the frame, and in the plane.
    blocks: Vec<(Range<usize>, Range<usize>)>,
}

/// A chunk with such streams.
struct Chunk {
    number: usize,
    descriptor: DecodeChunk,
    coded: Vec<Coded>,
    spans: usize,
    /// Bytes of scratch memory: for the planes, for the kernel, and for the values.
    planes: u64,
    own: u64,
    values: u64,
}

/// Blocks of one bitstream, of many chunks.
#[derive(Default)]
struct Call {
    codec: Option<Box<dyn GpuCodec>>,
    /// For each block, address and size of its input and of its output.
    arrays: [Vec<u64>; 4],
    /// The job of each block.
    jobs: Vec<usize>,
}

impl Call {
    fn shape(&self) -> Shape {
        let sizes = &self.arrays[3];
        let max_block = sizes.iter().max().copied().unwrap_or(0) as usize;
        let total = sizes.iter().sum::<u64>() as usize;
        Shape { blocks: self.jobs.len(), max_block, total }
    }
}

/// Bytes of descriptors for each block and for each chunk.
const BLOCK: usize = 4 * 8 + 8 + 4;
const CHUNK: usize = size_of::<DecodeChunk>() + 4;
const SPAN: usize = size_of::<CopySpan>();
/// Bytes for the gaps between the parts of a batch.
const GAPS: usize = 2048;

impl Chunk {
    fn meta(&self) -> usize {
        let blocks: usize = self.coded.iter().map(|c| c.blocks.len()).sum();
        CHUNK + blocks * BLOCK + self.spans * SPAN
    }

    fn scratch(&self) -> u64 {
        self.planes + self.own + self.values
    }
}

impl<'a> DecodeQueue<'_, 'a> {
    /// Makes this crate's kernels wait for all queued calls of the library, which use the same scratch memory.
    pub(in crate::cuda) fn wait_for_blocks(&mut self) -> Result<()> {
        let worker = &self.session.worker;
        if std::mem::take(&mut self.blocks_queued) {
            worker.beside.iter().try_for_each(|stream| worker.compute.wait_for(stream))?;
        }
        Ok(())
    }

    /// Records the event of the end of a slot's queued work.
    pub(in crate::cuda) fn record_worked(&self, slot: usize, busy: &Busy<'a>) -> Result<()> {
        let worker = &self.session.worker;
        // A stream for the library's calls waits for `compute` first, so it ends last.
        let last = if busy.by_library.is_empty() { &*worker.compute } else { self.stream_of(slot) };
        Ok(worker.slots[slot].worked.record(last)?)
    }

    /// Queues the jobs that the library can decode; returns the others.
    pub(in crate::cuda) fn decode_blocks(
        &mut self,
        slot: usize,
        busy: &mut Busy<'a>,
        numbers: Vec<usize>,
    ) -> Result<Vec<usize>> {
        let Some(trusted) = self.trusted.clone() else { return Ok(numbers) };
        let (mut others, mut found) = (vec![], vec![]);
        let scratch_of_stream = self.scratch_of(slot).1;
        let room = (self.session.sizes.meta as usize).saturating_sub(GAPS);
        for number in numbers {
            let job = &busy.jobs[number];
            let chunk = self.chunk_in_blocks(&trusted, slot, number, job, busy.frames.frame(job));
            match chunk.filter(|c| c.scratch() <= scratch_of_stream / 2 && c.meta() <= room) {
                Some(chunk) => found.push(chunk),
                None => others.push(number),
            }
        }
        let most = scratch_of_stream - self.reserve(slot, &found);
        let sound = self.check(slot, busy, &found)?;
        let (mut batch, mut scratch, mut meta) = (vec![], 0, 0);
        for (chunk, sound) in found.into_iter().zip(sound) {
            if !sound {
                // The CPU will report the error.
                others.push(chunk.number);
                continue;
            }
            if scratch + chunk.scratch() > most || meta + chunk.meta() + busy.meta > room {
                // The next batch follows in the same stream, and may use the same scratch memory.
                self.queue_blocks(slot, busy, std::mem::take(&mut batch))?;
                (scratch, meta) = (0, 0);
            }
            if chunk.meta() + busy.meta > room {
                self.start_over(slot, busy)?;
            }
            scratch += chunk.scratch();
            meta += chunk.meta();
            batch.push(chunk);
        }
        self.queue_blocks(slot, busy, batch)?;
        Ok(others)
    }

    /// The stream for a slot's calls of the library. Slots take turns in two streams, since a call takes a millisecond or
    /// two, however few blocks it has, and leaves most of the device idle.
    fn stream_of(&self, slot: usize) -> &Stream {
        let streams = &self.session.worker.beside;
        &streams[slot % streams.len()]
    }

    /// Address and size of that stream's part of the scratch memory.
    fn scratch_of(&self, slot: usize) -> (u64, u64) {
        let parts = self.session.worker.beside.len() as u64;
        let bytes = self.session.sizes.scratch / parts / PART * PART;
        (self.session.scratch() + slot as u64 % parts * bytes, bytes)
    }

    /// Bytes of scratch memory that the library may need to decode these chunks or some of them, at most half of the
    /// stream's part.
    fn reserve(&self, slot: usize, chunks: &[Chunk]) -> u64 {
        let mut calls = BTreeMap::new();
        for coded in chunks.iter().flat_map(|chunk| &chunk.coded) {
            let none = Shape { blocks: 0, max_block: coded.codec.block(), total: 0 };
            let key = (coded.codec.id().0, coded.codec.param());
            let (_, shape) = calls.entry(key).or_insert((&*coded.codec, none));
            shape.blocks += coded.blocks.len();
            shape.total += coded.size;
        }
        let (device, stream) = (&self.session.worker.device, self.stream_of(slot).address());
        let needed = |(codec, shape): (&dyn GpuCodec, Shape)| {
            // A call that cannot be made is reported when it is made.
            decode_scratch(codec, device, shape, stream).map_or(0, |bytes| bytes as u64 + PART)
        };
        let most = calls.into_values().map(needed).max().unwrap_or(0);
        most.min(self.scratch_of(slot).1 / 2)
    }

    /// Whether the checksums of frames match.
    fn check(&mut self, slot: usize, busy: &mut Busy<'a>, chunks: &[Chunk]) -> Result<Vec<bool>> {
        let mut sound = Vec::with_capacity(chunks.len());
        let mut rest = chunks;
        while !rest.is_empty() {
            let room = (self.session.sizes.meta as usize).saturating_sub(GAPS);
            if busy.meta + CHUNK > room {
                self.start_over(slot, busy)?;
            }
            // A slot has room for any single chunk.
            let fit = (room.saturating_sub(busy.meta) / CHUNK).max(1);
            let (now, later) = rest.split_at(fit.min(rest.len()));
            sound.extend(self.check_some(slot, busy.meta, now)?);
            rest = later;
        }
        Ok(sound)
    }

    /// The same for chunks whose descriptors fit in the memory from `at` on, which is free again afterwards.
    fn check_some(&self, slot: usize, at: usize, chunks: &[Chunk]) -> Result<Vec<bool>> {
        let worker = &self.session.worker;
        let (pinned, base) = (&worker.slots[slot].pinned, self.session.pinned_meta());
        let mut meta = Meta { start: at, bytes: vec![] };
        let chunks_at = meta.put(chunks.iter().flat_map(|c| bytemuck::bytes_of(&c.descriptor)));
        let status_at = meta.end();
        let fetch_at = (status_at + 4 * chunks.len()).next_multiple_of(16);
        self.write_meta(slot, &meta, fetch_at);
        let on_device = self.session.meta(slot);
        let status = on_device + status_at as u64;
        // SAFETY: this part of the slot was not used since it was free; frames were copied by the same
        // stream, which is waited for.
        unsafe {
            worker.copy.copy_spans(pinned.address(base + fetch_at), 1)?;
            let chunks_at = on_device + chunks_at as u64;
            worker.copy.check_frames(chunks_at, status, chunks.len() as u32)?;
            worker.copy.copy_to_host(status, pinned, base + status_at, 4 * chunks.len())?;
        }
        worker.copy.synchronize()?;
        // SAFETY: the copy was waited for.
        let (found, _) =
            unsafe { pinned.slice(base + status_at, 4 * chunks.len()) }.as_chunks::<4>();
        Ok(found.iter().map(|s| u32::from_le_bytes(*s) == abi::status::OK).collect())
    }

    /// Writes the data that a kernel will fetch and, at `fetch_at`, the span that it fetches it
    /// with.
    fn write_meta(&self, slot: usize, meta: &Meta, fetch_at: usize) {
        let pinned = &self.session.worker.slots[slot].pinned;
        let base = self.session.pinned_meta();
        let fetch = CopySpan {
            from: pinned.address(base + meta.start),
            to: self.session.meta(slot) + meta.start as u64,
            len: meta.bytes.len() as u64,
        };
        // SAFETY: this part of the slot was not used since it was free.
        unsafe {
            pinned.slice_mut(base + meta.start, meta.bytes.len()).copy_from_slice(&meta.bytes);
            let to = pinned.slice_mut(base + fetch_at, SPAN);
            to.copy_from_slice(bytemuck::bytes_of(&fetch));
        }
    }

    /// A chunk that the library can decode, if its frame is sound.
    fn chunk_in_blocks(
        &self,
        trusted: &Trusted,
        slot: usize,
        number: usize,
        job: &FrameJob<'_>,
        frame: &[u8],
    ) -> Option<Chunk> {
        let (plan, width) = (job.spec.plan, job.spec.dtype.value_width());
        let n = job.bytes / width as u64;
        let direct = plan.is_direct() && plan.residual == ResidualId::ID;
        let aligned = job.at.is_multiple_of(ALIGN) && job.bytes <= abi::MAX_DECODE_BYTES && n > 0;
        if !direct || !aligned || job.record.plain || !has_layout(plan.layout) {
            return None;
        }
        let planes = plane_sizes(plan.layout, width, n).ok()?;
        let streams = StreamEntry::parse_chunk(frame, planes.sizes().len()).ok()?;
        let mut d: DecodeChunk = bytemuck::Zeroable::zeroed();
        d.frame = self.session.frames(slot) + job.at as u64;
        (d.frame_len, d.n, d.width) = (job.record.len, n as u32, width as u8);
        (d.layout, d.residual) = (plan.layout.0, plan.residual.0);
        (d.crc_encoded, d.crc_raw) = (job.record.crc_encoded, job.record.crc_raw);
        d.planes = planes.sizes().len() as u8;
        let mut coded = vec![];
        let start = frame.as_ptr() as usize;
        for (plane, (entry, bytes)) in streams.items().iter().enumerate() {
            let (at, size) = (bytes.as_ptr() as usize - start, planes.sizes()[plane]);
            let (codec, param) = (entry.codec, entry.param);
            d.streams[plane] = DecodeStream {
                offset: at as u32,
                len: entry.len,
                codec: codec.0,
                param,
                reserved: 0,
            };
            if matches!(codec, CodecId::RAW | CodecId::CONST | CodecId::BITS) {
                continue;
            }
            let codec = trusted.library.reader(&trusted.closed, codec, param)?;
            let blocks = Blocks::parse(bytes, size, codec.block()).ok()?;
            if !size.is_multiple_of(codec.unit()) {
                return None;
            }
            let blocks = blocks.iter().map(|b| (at + b.stored.start..at + b.stored.end, b.plane));
            coded.push(Coded { plane, size, codec, blocks: blocks.collect() });
        }
        let own = abi::decode_scratch(Route::Composed, n, width as u64, d.frame_len.into());
        Some(Chunk {
            number,
            descriptor: d,
            spans: job.copies(0).count(),
            planes: coded.iter().map(|c| (c.size as u64).next_multiple_of(PART)).sum(),
            coded,
            own: own.next_multiple_of(PART),
            values: if job.has_one_place() { 0 } else { job.bytes.next_multiple_of(PART) },
        })
    }

    /// Queues the work of a batch.
    fn queue_blocks(&mut self, slot: usize, busy: &mut Busy<'a>, batch: Vec<Chunk>) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut calls = BTreeMap::new();
        let (mut chunks, mut spans) = (vec![], vec![]);
        let (mut scratch, _) = self.scratch_of(slot);
        for chunk in batch {
            let number = chunk.number;
            let (d, end) = place(&busy.jobs[number], chunk, scratch, &mut calls);
            if !busy.jobs[number].has_one_place() {
                spans.extend(busy.jobs[number].copies(d.values));
            }
            scratch = end;
            chunks.push((number, d));
        }
        let mut meta = Meta { start: busy.meta, bytes: vec![] };
        let chunks_at = meta.put(chunks.iter().flat_map(|c| bytemuck::bytes_of(&c.1)));
        let spans_at = meta.put(spans.iter().flat_map(bytemuck::bytes_of));
        let arrays = |call: &Call| {
            call.arrays.each_ref().map(|a| bytemuck::cast_slice::<u64, u8>(a).to_vec())
        };
        let arrays: Vec<[usize; 4]> =
            calls.values().map(|c| arrays(c).map(|a| meta.put(a.iter()))).collect();
        let up = meta.end();
        // Results lie after the uploaded data.
        let status_at = up;
        let mut at = up + (4 * chunks.len()).next_multiple_of(16);
        let mut answers = vec![];
        for (&(id, _), call) in &calls {
            let (expected, jobs) = (call.arrays[3].clone(), call.jobs.clone());
            answers.push(Answers { id: CodecId(id), at, expected, jobs });
            at += (12 * call.jobs.len()).next_multiple_of(16);
        }
        let fetch_at = at;
        let worker = &self.session.worker;
        let (pinned, base) = (&worker.slots[slot].pinned, self.session.pinned_meta());
        let on_device = self.session.meta(slot);
        self.write_meta(slot, &meta, fetch_at);
        let work = DecodeBatch {
            chunks: on_device + chunks_at as u64,
            status: on_device + status_at as u64,
            routes: [0, 0, chunks.len() as u32, 0, 0],
        };
        let stream = self.stream_of(slot);
        // Launches of this crate's kernels use all the scratch memory.
        stream.wait_for(&worker.compute)?;
        // SAFETY: descriptors, arrays, answers and this part of the scratch memory are the session's, used in the
        // order of one stream; blocks lie within frames whose checksums match, of a checkpoint that the
        // caller trusts; the values are the caller's, who promised that nothing else uses them.
        unsafe {
            stream.copy_spans(pinned.address(base + fetch_at), 1)?;
            stream.fill(work.status, 0, 4 * chunks.len() as u64)?;
            for ((call, arrays), answers) in calls.values().zip(&arrays).zip(&answers) {
                let arrays = arrays.map(|at| on_device + at as u64);
                let tensor = busy.jobs[call.jobs[0]].tensor;
                let answers = on_device + answers.at as u64;
                self.decode_call(slot, tensor, call, arrays, (answers, scratch))?;
            }
            stream.decode_checked(&work)?;
            stream.copy_spans(on_device + spans_at as u64, spans.len() as u32)?;
            let (from, len) = (on_device + status_at as u64, fetch_at - status_at);
            stream.copy_to_host(from, pinned, base + status_at, len)?;
        }
        self.blocks_queued = true;
        let statuses = chunks.iter().enumerate().map(|(i, c)| (c.0, status_at + 4 * i));
        busy.by_library.extend(statuses);
        busy.answers.extend(answers);
        busy.meta = (fetch_at + SPAN).next_multiple_of(16);
        Ok(())
    }

    /// Queues one call of the library, with scratch memory from an address on. `tensor` is that of the
    /// first block.
    ///
    /// # Safety
    /// As [`GpuCodec::decode`], for what the arrays on the device name when the stream gets there.
    unsafe fn decode_call(
        &self,
        slot: usize,
        tensor: usize,
        call: &Call,
        [inputs, input_sizes, outputs, output_capacities]: [u64; 4],
        (answers, scratch): (u64, u64),
    ) -> Result<()> {
        let Some(codec) = &call.codec else { return Ok(()) };
        let worker = &self.session.worker;
        let (shape, stream) = (call.shape(), self.stream_of(slot).address());
        let needed = decode_scratch(&**codec, &worker.device, shape, stream).of(tensor)?;
        let scratch = scratch.next_multiple_of(PART);
        let (start, bytes) = self.scratch_of(slot);
        if scratch + needed as u64 > start + bytes {
            let what = format!(
                "{needed} bytes of scratch memory needed for codec `{}`, more than reserved",
                codec.id()
            );
            return Err(Error::limit(what)).of(tensor);
        }
        let batch = Decompress {
            inputs,
            input_sizes,
            outputs,
            output_capacities,
            output_sizes: answers,
            scratch,
            scratch_bytes: needed,
            statuses: answers + 8 * shape.blocks as u64,
        };
        let _current = worker.device.enter()?;
        // SAFETY: the caller's; the scratch memory was checked, and the device is current.
        unsafe { codec.decode(shape, batch, stream) }.map_err(Error::from).of(tensor)
    }

    /// Checks the answers of the library and the kernels for chunks whose work is done.
    pub(in crate::cuda) fn check_block_statuses(
        &self,
        slot: usize,
        busy: &mut Busy<'a>,
    ) -> Result<()> {
        let base = self.session.pinned_meta();
        let pinned = &self.session.worker.slots[slot].pinned;
        // SAFETY: the copy that wrote it is done.
        let read = |at: usize, len: usize| unsafe { pinned.slice(base + at, len) };
        for Answers { id, at, expected, jobs } in std::mem::take(&mut busy.answers) {
            let count = jobs.len();
            let (sizes, _) = read(at, 8 * count).as_chunks::<8>();
            let (statuses, _) = read(at + 8 * count, 4 * count).as_chunks::<4>();
            for (block, number) in jobs.into_iter().enumerate() {
                let status = Status(i32::from_ne_bytes(statuses[block]));
                let (size, expected) = (u64::from_ne_bytes(sizes[block]), expected[block]);
                let what = if status != Status::SUCCESS {
                    format!("nvCOMP failed on codec `{id}`: {status}")
                } else if size != expected {
                    format!("nvCOMP decoded {size} bytes with codec `{id}`, expected {expected}")
                } else {
                    continue;
                };
                let job = &busy.jobs[number];
                return Err(Error::corrupt(what).in_chunk(job.chunk)).of(job.tensor);
            }
        }
        for (number, at) in std::mem::take(&mut busy.by_library) {
            let found = u32::from_le_bytes(read(at, 4).try_into().unwrap_or_default());
            if found != abi::status::OK {
                let job = &busy.jobs[number];
                let what = "checksum mismatch in the decoded values";
                return Err(Error::corrupt(what).in_chunk(job.chunk)).of(job.tensor);
            }
            self.count_device();
        }
        Ok(())
    }
}

/// Gives a chunk its addresses, with scratch memory from `scratch` on, and adds its blocks to the
/// calls. Returns its descriptor, and where its scratch memory ends.
fn place(
    job: &FrameJob<'_>,
    chunk: Chunk,
    scratch: u64,
    calls: &mut BTreeMap<(u8, u8), Call>,
) -> (DecodeChunk, u64) {
    let mut d = chunk.descriptor;
    d.scratch = scratch;
    d.values = match &job.destinations[..] {
        [only] if job.has_one_place() => only.to.address(),
        _ => scratch + chunk.own,
    };
    let mut plane = scratch + chunk.own + chunk.values;
    for coded in chunk.coded {
        let call = calls.entry((coded.codec.id().0, coded.codec.param())).or_default();
        for (stored, to) in coded.blocks {
            let fields = [
                d.frame + stored.start as u64,
                stored.len() as u64,
                plane + to.start as u64,
                to.len() as u64,
            ];
            call.arrays.iter_mut().zip(fields).for_each(|(array, field)| array.push(field));
            call.jobs.push(chunk.number);
        }
        call.codec = Some(coded.codec);
        // Scratch memory lies after all frames, and a session has less than 4 GiB of both.
        let offset = u32::try_from(plane - d.frame).unwrap_or(u32::MAX);
        let (len, codec) = (coded.size as u32, CodecId::RAW.0);
        d.streams[coded.plane] = DecodeStream { offset, len, codec, param: 0, reserved: 0 };
        plane += (coded.size as u64).next_multiple_of(PART);
    }
    (d, plane)
}

/// Data to upload, which lies from `start` on.
struct Meta {
    start: usize,
    bytes: Vec<u8>,
}

impl Meta {
    /// Appends a part; returns where it lies.
    fn put<'b>(&mut self, part: impl Iterator<Item = &'b u8>) -> usize {
        let at = self.end();
        self.bytes.resize(at - self.start, 0);
        self.bytes.extend(part);
        at
    }

    fn end(&self) -> usize {
        (self.start + self.bytes.len()).next_multiple_of(16)
    }
}
