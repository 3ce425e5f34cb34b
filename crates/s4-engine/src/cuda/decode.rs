//! Frames from pinned memory into device memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;

use s4_codec_gpu::abi::{self, COPY_SPAN_BYTES, CopySpan, DecodeChunk, SharedTable, status};
use s4_codec_gpu::{DecodeBatch, GpuError, Pinned};
use s4_format::ChunkRecord;
use s4_format::layout::MAX_PLANES;
use s4_format::limits::ALIGN;

use super::Host;
use super::error::{CudaError, Of, Result};
use super::nvcomp::{Answers, Trusted};
use super::route::{decode_route, side_tables};
use super::tensor::DeviceMemory;
use super::worker::{SLOTS, Session};
use crate::{Scratch, TensorSpec};

/// Bytes of a decoded chunk that go somewhere.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Where they start in the chunk's values.
    pub from: u64,
    /// Where they go.
    pub to: DeviceMemory,
}

/// A chunk to decode.
#[derive(Debug, Clone)]
pub struct DecodeJob<'a> {
    /// Number of the tensor, for errors.
    pub tensor: usize,
    /// What decoding needs to know of the tensor. Jobs of one number have one spec.
    pub spec: TensorSpec<'a>,
    /// Number of the chunk.
    pub chunk: u64,
    /// Its record.
    pub record: ChunkRecord,
    /// Where its frame starts in the bytes that are pushed with it.
    pub at: usize,
    /// Bytes of its values.
    pub bytes: u64,
    /// Which of them are wanted, and where: all on one device, without overlap.
    pub pieces: Vec<Piece>,
}

/// Decodes what it is given, several groups of frames at a time.
pub struct Decoder<'s, 'a> {
    lanes: BTreeMap<u32, Lane<'s, 'a>>,
}

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn new(
        sessions: Vec<Session<'s>>,
        host: &'s Host,
        trusted: Option<&Trusted>,
    ) -> Self {
        let lane =
            |s: Session<'s>| (s.worker.device.ordinal(), Lane::new(s, host, trusted.cloned()));
        Self { lanes: sessions.into_iter().map(lane).collect() }
    }

    /// Bytes of frames that one [`Decoder::push`] may have.
    pub fn room(&self) -> usize {
        let frames = self.lanes.values().map(|l| l.session.worker.sizes.frames as usize);
        frames.min().unwrap_or(usize::MAX)
    }

    /// Decodes frames into device `ordinal`: `fill` writes them, `len` bytes together, into pinned
    /// memory. The work is under way when this returns; its errors may come from a later call.
    ///
    /// # Errors
    /// `Gpu`: pieces that are not on that device, too many bytes, the driver. `Format`: a chunk that is
    /// damaged or not supported. Those of `fill`.
    pub fn push<E: From<CudaError>>(
        &mut self,
        ordinal: u32,
        len: usize,
        jobs: Vec<DecodeJob<'a>>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let room = self.room();
        let lane = self.lane(ordinal)?;
        check(ordinal, len, room, &jobs)?;
        let slot = lane.free_slot()?;
        // SAFETY: what used the slot is done.
        fill(unsafe { lane.session.worker.slots[slot].pinned.slice_mut(0, len) })?;
        lane.start(slot, len, jobs)?;
        Ok(())
    }

    /// Copies values that need no decoding: `fill` writes them into pinned memory. As with
    /// [`Decoder::push`] the copy is under way when this returns.
    ///
    /// # Errors
    /// As [`Decoder::push`].
    pub fn put<E: From<CudaError>>(
        &mut self,
        to: DeviceMemory,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let len = usize::try_from(to.bytes()).unwrap_or(usize::MAX);
        let room = self.room();
        let lane = self.lane(to.ordinal())?;
        check(to.ordinal(), len, room, &[])?;
        let slot = lane.free_slot()?;
        // SAFETY: what used the slot is done.
        fill(unsafe { lane.session.worker.slots[slot].pinned.slice_mut(0, len) })?;
        lane.send(slot, to, len)?;
        Ok(())
    }

    fn lane(&mut self, ordinal: u32) -> Result<&mut Lane<'s, 'a>> {
        self.lanes.get_mut(&ordinal).ok_or_else(|| {
            let what = format!("values for CUDA device {ordinal}, which is not decoded to");
            GpuError::Argument(what).into()
        })
    }

    pub(super) fn finish(&mut self) -> Result<()> {
        self.lanes.values_mut().try_for_each(Lane::finish)
    }
}

/// Checks what the caller says of jobs.
fn check(ordinal: u32, len: usize, room: usize, jobs: &[DecodeJob<'_>]) -> Result<()> {
    if len > room {
        let (what, needed, budget) = ("frames in one push", len as u64, room as u64);
        return Err(GpuError::Budget { what, needed, budget }.into());
    }
    for job in jobs {
        let end = job.at.checked_add(job.record.len as usize);
        if end.is_none_or(|end| end > len) {
            return Err(s4_format::Error::truncated("frame passes the bytes that were read")
                .in_chunk(job.chunk))
            .of(job.tensor);
        }
        let width = job.spec.dtype.value_width() as u64;
        let inside = |p: &Piece| {
            p.from.checked_add(p.to.bytes()).is_some_and(|end| end <= job.bytes)
                && p.to.ordinal() == ordinal
        };
        let whole = job.bytes.is_multiple_of(width) && job.bytes <= abi::MAX_DECODE_BYTES;
        if !whole || !job.pieces.iter().all(inside) {
            let what = format!("pieces of a chunk of {} bytes for device {ordinal}", job.bytes);
            return Err(GpuError::Argument(what).into());
        }
    }
    Ok(())
}

const TABLES: usize = MAX_PLANES * size_of::<SharedTable>();
const CHUNK: usize = size_of::<DecodeChunk>();
const SPAN: usize = size_of::<CopySpan>();

/// Chunks that are decoded by one launch of each kernel.
#[derive(Default)]
struct Batch {
    /// Number of the job, route, descriptor.
    chunks: Vec<(usize, abi::Route, DecodeChunk)>,
    spans: Vec<CopySpan>,
    tables: Vec<[SharedTable; MAX_PLANES]>,
    scratch: u64,
}

impl Batch {
    fn meta(&self) -> usize {
        self.tables.len() * TABLES + self.chunks.len() * (CHUNK + 4) + self.spans.len() * SPAN + 64
    }
}

/// What is under way in a slot.
#[derive(Default)]
pub(super) struct Busy<'a> {
    pub(super) jobs: Vec<DecodeJob<'a>>,
    /// The same as `asked` for chunks with blocks that a library decodes, and what it says of them.
    pub(super) by_library: Vec<(usize, usize)>,
    pub(super) answers: Vec<Answers>,
    /// For each chunk on the device its job, and where its status lies in the meta memory.
    asked: Vec<(usize, usize)>,
    /// Bytes of meta memory in use.
    pub(super) meta: usize,
    /// Address of the tables of a tensor; `None`: it has none.
    tables: HashMap<usize, Option<u64>>,
}

pub(super) struct Lane<'s, 'a> {
    pub(super) session: Session<'s>,
    pub(super) trusted: Option<Trusted>,
    host: &'s Host,
    busy: Vec<Option<Busy<'a>>>,
    next: usize,
    scratch: Scratch,
    bounce: Option<Pinned>,
}

impl<'s, 'a> Lane<'s, 'a> {
    fn new(session: Session<'s>, host: &'s Host, trusted: Option<Trusted>) -> Self {
        let busy = (0..SLOTS).map(|_| None).collect();
        Self { session, trusted, host, busy, next: 0, scratch: Scratch::default(), bounce: None }
    }

    /// A slot that is not in use, once what used it is done and found good.
    fn free_slot(&mut self) -> Result<usize> {
        let slot = self.next;
        self.next = (slot + 1) % SLOTS;
        self.complete(slot)?;
        Ok(slot)
    }

    fn finish(&mut self) -> Result<()> {
        for i in 0..SLOTS {
            self.complete((self.next + i) % SLOTS)?;
        }
        Ok(())
    }

    /// Queues the copy of a slot's values.
    fn send(&mut self, slot: usize, to: DeviceMemory, len: usize) -> Result<()> {
        let worker = &self.session.worker;
        let place = &worker.slots[slot];
        // SAFETY: the caller's memory, which nothing else uses; the slot stays until it was waited for.
        unsafe { worker.copy.copy_to_device(&place.pinned, 0, len, to.address()) }?;
        place.worked.record(&worker.copy)?;
        self.busy[slot] = Some(Busy::default());
        Ok(())
    }

    /// Queues the decoding of the frames in a slot.
    fn start(&mut self, slot: usize, len: usize, jobs: Vec<DecodeJob<'a>>) -> Result<()> {
        let frames = self.session.frames(slot);
        let worker = &self.session.worker;
        let place = &worker.slots[slot];
        // SAFETY: the slot's memory on both sides was idle; its pinned part is only read from now on.
        unsafe { worker.copy.copy_to_device(&place.pinned, 0, len, frames) }?;
        place.copied.record(&worker.copy)?;
        worker.compute.wait(&place.copied)?;
        let mut busy = Busy { jobs, ..Busy::default() };
        let mut batch = Batch::default();
        let mut here = vec![];
        for number in 0..busy.jobs.len() {
            if !self.add(slot, number, &mut busy, &mut batch)? {
                here.push(number);
            }
        }
        self.flush(slot, &mut busy, &mut batch)?;
        let here = self.decode_blocks(slot, &mut busy, here)?;
        self.session.worker.slots[slot].worked.record(&self.session.worker.compute)?;
        self.host.chunks.host.fetch_add(here.len() as u64, Ordering::Relaxed);
        for number in here {
            self.decode_here(slot, &busy.jobs[number])?;
        }
        self.busy[slot] = Some(busy);
        Ok(())
    }

    /// Adds a job to the batch; `false`: it is the CPU's.
    fn add(
        &mut self,
        slot: usize,
        number: usize,
        busy: &mut Busy<'a>,
        batch: &mut Batch,
    ) -> Result<bool> {
        let job = &busy.jobs[number];
        let frame = self.frame(slot, job);
        let Some((route, mut chunk)) = decode_route(&job.spec, &job.record, frame, job.bytes)
        else {
            return Ok(false);
        };
        let Ok(tables) = side_tables(job.spec.side) else { return Ok(false) };
        let direct = has_one_place(job);
        let width = job.spec.dtype.value_width() as u64;
        let own = abi::decode_scratch(route, chunk.n.into(), width, chunk.frame_len.into());
        let own = if chunk.plain != 0 { 0 } else { own.next_multiple_of(16) };
        let values = if direct { 0 } else { job.bytes.next_multiple_of(16) };
        let spans: u64 = job.pieces.iter().map(|p| p.to.bytes().div_ceil(COPY_SPAN_BYTES)).sum();
        let sizes = self.session.worker.sizes;
        let more = TABLES + CHUNK + 4 + spans as usize * SPAN + 64;
        if !job.at.is_multiple_of(ALIGN)
            || own + values > sizes.scratch
            || more > sizes.meta as usize
        {
            return Ok(false);
        }
        if batch.scratch + own + values > sizes.scratch {
            self.flush(slot, busy, batch)?;
        }
        if busy.meta + batch.meta() + more > sizes.meta as usize {
            self.flush(slot, busy, batch)?;
            self.start_over(slot, busy)?;
        }
        let job = &busy.jobs[number];
        let scratch = self.session.scratch() + batch.scratch;
        chunk.frame = self.session.frames(slot) + job.at as u64;
        chunk.scratch = scratch;
        chunk.values = if direct { job.pieces[0].to.address() } else { scratch + own };
        chunk.tables = match busy.tables.get(&job.tensor) {
            Some(known) => known.unwrap_or(0),
            None => {
                // The sets of a batch lie in front of it.
                let at = self.session.meta(slot) + (busy.meta + batch.tables.len() * TABLES) as u64;
                let at = tables.is_some().then_some(at);
                batch.tables.extend(tables);
                busy.tables.insert(job.tensor, at);
                at.unwrap_or(0)
            }
        };
        if !direct {
            cut_pieces(job, chunk.values, &mut batch.spans);
        }
        batch.scratch += own + values;
        batch.chunks.push((number, route, chunk));
        Ok(true)
    }

    /// Waits for what was queued, so that the slot's memory for descriptors is free again.
    pub(super) fn start_over(&mut self, slot: usize, busy: &mut Busy<'a>) -> Result<()> {
        self.session.worker.compute.synchronize()?;
        self.judge(slot, busy)?;
        (busy.meta, busy.tables) = Default::default();
        Ok(())
    }

    /// Counts a chunk that the device decoded.
    pub(super) fn count_device(&self) {
        self.host.chunks.device.fetch_add(1, Ordering::Relaxed);
    }

    /// Queues a batch and forgets it.
    fn flush(&mut self, slot: usize, busy: &mut Busy<'a>, batch: &mut Batch) -> Result<()> {
        let mut batch = std::mem::take(batch);
        if batch.chunks.is_empty() {
            return Ok(());
        }
        batch.chunks.sort_by_key(|c| c.1);
        let worker = &self.session.worker;
        let pinned = &worker.slots[slot].pinned;
        let (base, start) = (self.session.pinned_meta(), busy.meta);
        let meta = self.session.meta(slot);
        // SAFETY: this part of the slot was not used since it was free.
        let to = unsafe { pinned.slice_mut(base + start, batch.meta()) };
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        batch.tables.iter().for_each(|set| put(bytemuck::cast_slice(set)));
        batch.chunks.iter().for_each(|(_, _, chunk)| put(bytemuck::bytes_of(chunk)));
        batch.spans.iter().for_each(|span| put(bytemuck::bytes_of(span)));
        let chunks = start + batch.tables.len() * TABLES;
        let spans = chunks + batch.chunks.len() * CHUNK;
        let answers = spans + batch.spans.len() * SPAN;
        let mut routes = [0; 3];
        batch.chunks.iter().for_each(|c| routes[c.1 as usize] += 1);
        let work =
            DecodeBatch { chunks: meta + chunks as u64, status: meta + answers as u64, routes };
        // At most what fits the slot's memory for descriptors.
        let count = u32::try_from(batch.spans.len()).unwrap_or(u32::MAX);
        // A kernel fetches the descriptors from pinned memory: the device's copy engine would bring
        // them only after the frames of the group behind.
        let fetch = CopySpan {
            from: pinned.address(base + start),
            to: meta + start as u64,
            len: (answers - start) as u64,
        };
        let fetch_at = (answers + 4 * batch.chunks.len()).next_multiple_of(8);
        to[fetch_at - start..fetch_at - start + SPAN].copy_from_slice(bytemuck::bytes_of(&fetch));
        // SAFETY: descriptors, tables, status and scratch are parts of the session's memory, used in
        // the order of one stream; streams lie within their frames, as `decode_route` found; the
        // values are the caller's, who promised that nothing else uses them, or scratch.
        unsafe {
            worker.compute.copy_spans(pinned.address(base + fetch_at), 1)?;
            worker.compute.decode(&work)?;
            worker.compute.copy_spans(meta + spans as u64, count)?;
            let len = batch.chunks.len() * 4;
            worker.compute.copy_to_host(work.status, pinned, base + answers, len)?;
        }
        let asked = batch.chunks.iter().enumerate().map(|(i, c)| (c.0, answers + 4 * i));
        busy.asked.extend(asked);
        busy.meta = (fetch_at + SPAN).next_multiple_of(16);
        Ok(())
    }

    /// Waits for a slot's work and looks at what became of it.
    fn complete(&mut self, slot: usize) -> Result<()> {
        let Some(mut busy) = self.busy[slot].take() else { return Ok(()) };
        self.session.worker.slots[slot].worked.synchronize()?;
        self.judge(slot, &mut busy)
    }

    /// Looks at the status of chunks whose work is done.
    fn judge(&mut self, slot: usize, busy: &mut Busy<'a>) -> Result<()> {
        self.judge_blocks(slot, busy)?;
        for (number, at) in std::mem::take(&mut busy.asked) {
            let worker = &self.session.worker;
            let at = self.session.pinned_meta() + at;
            // SAFETY: the copy that wrote it is done.
            let found = unsafe { worker.slots[slot].pinned.slice(at, 4) };
            let found = u32::from_le_bytes(found.try_into().unwrap_or_default());
            let chunks = &self.host.chunks;
            if found == status::OK {
                chunks.device.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            chunks.refused.fetch_add(1, Ordering::Relaxed);
            // The CPU says what is wrong, or can do what the kernels cannot.
            let job = &busy.jobs[number];
            self.decode_here(slot, job)?;
            if matches!(found, status::FRAME_CHECKSUM | status::VALUE_CHECKSUM) {
                let what = "the device found a wrong checksum where the CPU found a right one";
                return Err(s4_format::Error::corrupt(what).in_chunk(job.chunk)).of(job.tensor);
            }
        }
        Ok(())
    }

    /// Decodes a chunk on the CPU and copies its pieces.
    fn decode_here(&mut self, slot: usize, job: &DecodeJob<'_>) -> Result<()> {
        if self.bounce.is_none() {
            let most = abi::MAX_DECODE_BYTES as usize;
            self.bounce = Some(Pinned::new(&self.session.worker.device, most)?);
        }
        let Some(bounce) = &self.bounce else { return Ok(()) };
        // SAFETY: the copies from it were waited for.
        let values = unsafe { bounce.slice_mut(0, job.bytes as usize) };
        let worker = &self.session.worker;
        // SAFETY: the frame was written before, and is only read.
        let frame = unsafe { worker.slots[slot].pinned.slice(job.at, job.record.len as usize) };
        let (spec, record) = (&job.spec, &job.record);
        self.host
            .cpu
            .decode_chunk(spec, job.chunk, record, frame, &mut self.scratch, values)
            .of(job.tensor)?;
        for piece in &job.pieces {
            let (from, to, len) = (piece.from as usize, piece.to, piece.to.bytes() as usize);
            // SAFETY: the caller's memory, which nothing else uses; `bounce` stays until the copy
            // is done, below.
            unsafe { worker.copy.copy_to_device(bounce, from, len, to.address()) }?;
        }
        Ok(worker.copy.synchronize()?)
    }

    pub(super) fn frame(&self, slot: usize, job: &DecodeJob<'_>) -> &[u8] {
        let pinned = &self.session.worker.slots[slot].pinned;
        // SAFETY: it was written before, and is only read.
        unsafe { pinned.slice(job.at, job.record.len as usize) }
    }
}

/// Whether a chunk goes to one place as a whole.
pub(super) fn has_one_place(job: &DecodeJob<'_>) -> bool {
    matches!(&job.pieces[..], [p] if p.to.bytes() == job.bytes)
}

/// The spans that bring a chunk's pieces from its values to their places.
pub(super) fn cut_pieces(job: &DecodeJob<'_>, values: u64, spans: &mut Vec<CopySpan>) {
    job.pieces.iter().for_each(|p| cut(values + p.from, p.to, spans));
}

/// Spans of `COPY_SPAN_BYTES` at most from `from` to a piece's place.
fn cut(from: u64, to: DeviceMemory, spans: &mut Vec<CopySpan>) {
    let mut done = 0;
    while done < to.bytes() {
        let len = COPY_SPAN_BYTES.min(to.bytes() - done);
        spans.push(CopySpan { from: from + done, to: to.address() + done, len });
        done += len;
    }
}
