//! Decodes frames from pinned memory into device memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use s4_codec_gpu::abi::{self, CopySpan, DecodeChunk, status};
use s4_codec_gpu::{DecodeBatch, GpuError, Pinned};
use s4_format::CodecId;
use s4_format::limits::ALIGN;
use s4_predict::Tensor;

use super::error::{CudaError, Of, Result};
use super::host::Host;
use super::job::{Batch, Filled, FrameJob, Frames, check};
use super::nvcomp::Trusted;
use super::route::{decode_route, position};
use super::sets::{self, Extra, Rows, SetPlace, TensorSet};
use super::worker::{SLOTS, Session};
use crate::DeviceMemory;
use crate::Scratch;

/// Decodes the frames that it is given, several groups at a time.
pub struct Decoder<'s, 'a> {
    queues: BTreeMap<u32, DecodeQueue<'s, 'a>>,
}

impl<'s, 'a> Decoder<'s, 'a> {
    pub(super) fn new(
        sessions: Vec<Session<'s>>,
        host: &'s Host,
        trusted: Option<&Trusted>,
    ) -> Self {
        let queue = |s: Session<'s>| {
            (s.worker.device.ordinal(), DecodeQueue::new(s, host, trusted.cloned()))
        };
        Self { queues: sessions.into_iter().map(queue).collect() }
    }

    /// The most bytes of frames in one [`Decoder::push`].
    pub fn room(&self) -> usize {
        let frames = self.queues.values().map(|q| q.session.sizes.host_frames as usize);
        frames.min().unwrap_or(usize::MAX)
    }

    /// Decodes frames into device `ordinal`: `fill` writes them, `len` bytes in total, into pinned
    /// memory. The work is queued when this returns; a later call may return its errors.
    ///
    /// # Errors
    /// `Gpu`: destinations that are not on that device, too many bytes, the driver. `Format`: a damaged
    /// or unsupported chunk. Those of `fill`.
    pub fn push<E: From<CudaError>>(
        &mut self,
        ordinal: u32,
        len: usize,
        jobs: Vec<FrameJob<'a>>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let filled = self.take(Batch { ordinal, len, jobs })?;
        // SAFETY: the slot's previous work is done.
        fill(unsafe { filled.frames.pinned.slice_mut(0, len) })?;
        Ok(self.start(filled)?)
    }

    /// Copies values that need no decoding: `fill` writes them into pinned memory. As with
    /// [`Decoder::push`] the copy is queued when this returns.
    ///
    /// # Errors
    /// As [`Decoder::push`].
    pub fn put<E: From<CudaError>>(
        &mut self,
        to: DeviceMemory,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let len = usize::try_from(to.bytes()).unwrap_or(usize::MAX);
        let filled = self.take(Batch { ordinal: to.ordinal(), len, jobs: vec![] })?;
        // SAFETY: the slot's previous work is done.
        fill(unsafe { filled.frames.pinned.slice_mut(0, len) })?;
        self.queue(to.ordinal())?.send(filled.slot, to, len)?;
        Ok(())
    }

    /// Takes a slot for a batch; its pinned memory must be filled next.
    pub(super) fn take(&mut self, batch: Batch<'a>) -> Result<Filled<'a>> {
        let Batch { ordinal, len, jobs } = batch;
        let room = self.room();
        let queue = self.queue(ordinal)?;
        check(ordinal, len, room, &jobs)?;
        let slot = queue.free_slot()?;
        let pinned = Arc::clone(&queue.session.worker.slots[slot].pinned);
        Ok(Filled { ordinal, slot, len, jobs, frames: Frames { pinned, at: 0 } })
    }

    /// Queues the decoding of a batch.
    pub(super) fn start(&mut self, filled: Filled<'a>) -> Result<()> {
        self.queue(filled.ordinal)?.start(filled)
    }

    fn queue(&mut self, ordinal: u32) -> Result<&mut DecodeQueue<'s, 'a>> {
        self.queues.get_mut(&ordinal).ok_or_else(|| {
            let what = format!("this decoder does not use CUDA device {ordinal}");
            GpuError::Argument(what).into()
        })
    }

    /// Waits for everything that was pushed. Returns the indices of tensors with differences or
    /// copies that the kernels did not decode: their memory is then unspecified, and the caller
    /// must decode them another way, which also finds the error.
    ///
    /// # Errors
    /// As [`Decoder::push`].
    pub fn undone(&mut self) -> Result<Vec<usize>> {
        let mut all = BTreeSet::new();
        for queue in self.queues.values_mut() {
            queue.finish()?;
            all.append(&mut queue.undone);
        }
        Ok(all.into_iter().collect())
    }

    pub(super) fn finish(&mut self) -> Result<()> {
        match self.undone()?.first() {
            None => Ok(()),
            Some(&tensor) => {
                let what = "the device cannot decode these differences";
                Err(s4_format::Error::unsupported(what)).of(tensor)
            }
        }
    }
}

const CHUNK: usize = size_of::<DecodeChunk>();
const SPAN: usize = size_of::<CopySpan>();

/// Chunks that are decoded by one launch of each kernel.
#[derive(Default)]
struct Launch<'a> {
    /// Index of the job, route, descriptor.
    chunks: Vec<(usize, abi::Route, DecodeChunk)>,
    spans: Vec<CopySpan>,
    /// Data that precedes the descriptors, and its size in bytes.
    extras: Vec<Extra<'a>>,
    extra_len: usize,
    scratch: u64,
}

impl<'a> Launch<'a> {
    fn meta(&self) -> usize {
        self.extra_len + self.chunks.len() * (CHUNK + 4) + self.spans.len() * SPAN + 64
    }

    /// Adds data that precedes the descriptors; returns where it starts.
    fn add(&mut self, extra: Extra<'a>) -> usize {
        let at = self.extra_len;
        self.extra_len += extra.len();
        self.extras.push(extra);
        at
    }
}

/// The work in flight in a slot.
pub(super) struct Busy<'a> {
    pub(super) jobs: Vec<FrameJob<'a>>,
    pub(super) frames: Frames,
    /// As `asked`, for chunks with blocks that a library decodes, and the library's answers.
    pub(super) by_library: Vec<(usize, usize)>,
    pub(super) answers: Vec<Answers>,
    /// For each chunk on the device, its job and where its status lies in the meta memory.
    asked: Vec<(usize, usize)>,
    /// Bytes of meta memory in use.
    pub(super) meta: usize,
    /// The place of the data that the chunks of a tensor share, by the tensor's index.
    sets: HashMap<usize, SetPlace>,
}

impl<'a> Busy<'a> {
    fn new(frames: Frames, jobs: Vec<FrameJob<'a>>) -> Self {
        let (by_library, answers, asked) = Default::default();
        Self { jobs, frames, by_library, answers, asked, meta: 0, sets: HashMap::new() }
    }
}

/// The library's answers for a call's blocks, once they have arrived.
pub(super) struct Answers {
    pub(super) id: CodecId,
    /// Where sizes and statuses lie in the slot's memory for descriptors.
    pub(super) at: usize,
    pub(super) expected: Vec<u64>,
    pub(super) jobs: Vec<usize>,
}

pub(super) struct DecodeQueue<'s, 'a> {
    pub(super) session: Session<'s>,
    pub(super) trusted: Option<Trusted>,
    /// Whether calls of the library are queued that this crate's kernels do not wait for yet.
    pub(super) blocks_queued: bool,
    host: &'s Host,
    busy: Vec<Option<Busy<'a>>>,
    next: usize,
    scratch: Scratch,
    bounce: Option<Pinned>,
    /// Tensors with differences that must be decoded another way.
    undone: BTreeSet<usize>,
}

impl<'s, 'a> DecodeQueue<'s, 'a> {
    fn new(session: Session<'s>, host: &'s Host, trusted: Option<Trusted>) -> Self {
        let busy = (0..SLOTS).map(|_| None).collect();
        let (blocks_queued, scratch, bounce, undone) = Default::default();
        Self { session, trusted, blocks_queued, host, busy, next: 0, scratch, bounce, undone }
    }

    /// The next slot, once its previous work is done and found good.
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
        let frames = Frames { pinned: Arc::clone(&place.pinned), at: 0 };
        self.busy[slot] = Some(Busy::new(frames, vec![]));
        Ok(())
    }

    /// Queues the decoding of frames.
    fn start(&mut self, filled: Filled<'a>) -> Result<()> {
        let Filled { slot, len, jobs, frames, .. } = filled;
        let to = self.session.frames(slot);
        let worker = &self.session.worker;
        let place = &worker.slots[slot];
        // SAFETY: the slot's memory on both sides was idle, and what holds the frames stays until
        // they are decoded; it is only read from now on.
        unsafe { worker.copy.copy_to_device(&frames.pinned, frames.at, len, to) }?;
        place.copied.record(&worker.copy)?;
        worker.compute.wait(&place.copied)?;
        let mut busy = Busy::new(frames, jobs);
        let mut launch = Launch::default();
        let mut on_host = vec![];
        for number in 0..busy.jobs.len() {
            if self.add(slot, number, &mut busy, &mut launch)? {
                continue;
            }
            match &busy.jobs[number] {
                job if job.has_input() => drop(self.undone.insert(job.tensor)),
                _ => on_host.push(number),
            }
        }
        self.flush(slot, &mut busy, &mut launch)?;
        let on_host = self.decode_blocks(slot, &mut busy, on_host)?;
        self.record_worked(slot, &busy)?;
        self.host.chunks.host.fetch_add(on_host.len() as u64, Ordering::Relaxed);
        for number in on_host {
            self.decode_on_host(&busy.frames, &busy.jobs[number])?;
        }
        self.busy[slot] = Some(busy);
        Ok(())
    }

    /// Adds a job to the launch; `false`: the kernels cannot decode it.
    fn add(
        &mut self,
        slot: usize,
        number: usize,
        busy: &mut Busy<'a>,
        launch: &mut Launch<'a>,
    ) -> Result<bool> {
        let job = &busy.jobs[number];
        let frame = busy.frames.frame(job);
        let Some((route, mut chunk)) = decode_route(&job.spec, &job.record, frame, job.bytes)
        else {
            return Ok(false);
        };
        let by_moments = chunk.plain == 0 && job.spec.plan.has_moments();
        if by_moments && job.moments.is_none() {
            return Ok(false);
        }
        let mut set = None;
        let set_len = match busy.sets.get(&job.tensor) {
            Some(known) => known.len,
            None => {
                let Ok(parsed) = TensorSet::of_spec(&job.spec) else { return Ok(false) };
                set.insert(parsed).place(0).len
            }
        };
        let (tensor, spec) = (job.tensor, job.spec);
        let (first, cols) = position(spec.dtype, spec.shape, spec.chunk_log2, job.chunk);
        let about = Tensor { dtype: spec.dtype, shape: spec.shape, side: spec.side };
        // A plain chunk is predicted from nothing.
        let rows = match chunk.plain {
            0 => Rows::of(spec.plan, &about, (first, chunk.n.into())),
            _ => Ok(None),
        };
        let Ok(rows) = rows else { return Ok(false) };
        let direct = job.has_one_place();
        let width = job.spec.dtype.value_width() as u64;
        let own = abi::decode_scratch(route, chunk.n.into(), width, chunk.frame_len.into());
        let own = if chunk.plain != 0 { 0 } else { own.next_multiple_of(16) };
        let values = if direct { 0 } else { job.bytes.next_multiple_of(16) };
        let spans = job.copies(0).count();
        let sizes = self.session.sizes;
        let extra = set_len + rows.as_ref().map_or(0, Rows::len);
        let more = extra + CHUNK + 4 + spans * SPAN + 64;
        if !job.at.is_multiple_of(ALIGN)
            || own + values > sizes.scratch
            || more > sizes.meta as usize
        {
            return Ok(false);
        }
        if launch.scratch + own + values > sizes.scratch {
            self.flush(slot, busy, launch)?;
        }
        if busy.meta + launch.meta() + more > sizes.meta as usize {
            self.flush(slot, busy, launch)?;
            self.start_over(slot, busy)?;
        }
        let job = &busy.jobs[number];
        let scratch = self.session.scratch() + launch.scratch;
        chunk.frame = self.session.frames(slot) + job.at as u64;
        chunk.scratch = scratch;
        chunk.values = if direct { job.destinations[0].to.address() } else { scratch + own };
        // The extras of a launch precede it.
        let extras = self.session.meta(slot) + busy.meta as u64;
        let place = match busy.sets.get(&tensor) {
            Some(known) => *known,
            None => {
                let set = match set {
                    Some(parsed) => parsed,
                    // `start_over` has just forgotten it.
                    None => TensorSet::of_spec(&spec).of(tensor)?,
                };
                let place = set.place(extras + launch.extra_len as u64);
                launch.add(Extra::Set(set));
                busy.sets.insert(tensor, place);
                place
            }
        };
        let rows = rows.map_or(0, |rows| extras + launch.add(Extra::Rows(rows)) as u64);
        let parent = match &job.input {
            _ if job.is_delta() => chunk.values,
            Some(input) if job.has_input() => input.address(),
            _ => 0,
        };
        let moments = job.moments.map_or([0; 2], |both| both.map(|m| m.address()));
        chunk.inputs = sets::inputs(parent, rows, &place, moments);
        (chunk.first, chunk.cols) = (first, cols);
        chunk.tables = place.tables();
        if !direct {
            launch.spans.extend(job.copies(chunk.values));
        }
        launch.scratch += own + values;
        launch.chunks.push((number, route, chunk));
        Ok(true)
    }

    /// Waits for queued work, so that the slot's memory for descriptors is free again.
    pub(super) fn start_over(&mut self, slot: usize, busy: &mut Busy<'a>) -> Result<()> {
        self.wait_for_blocks()?;
        self.session.worker.compute.synchronize()?;
        self.check_statuses(slot, busy)?;
        (busy.meta, busy.sets) = Default::default();
        Ok(())
    }

    /// Counts a chunk that the device decoded.
    pub(super) fn count_device(&self) {
        self.host.chunks.device.fetch_add(1, Ordering::Relaxed);
    }

    /// Queues a launch and empties it.
    fn flush(&mut self, slot: usize, busy: &mut Busy<'a>, launch: &mut Launch<'a>) -> Result<()> {
        let mut launch = std::mem::take(launch);
        if launch.chunks.is_empty() {
            return Ok(());
        }
        launch.chunks.sort_by_key(|c| c.1);
        self.wait_for_blocks()?;
        let worker = &self.session.worker;
        let pinned = &worker.slots[slot].pinned;
        let (base, start) = (self.session.pinned_meta(), busy.meta);
        let meta = self.session.meta(slot);
        // SAFETY: this part of the slot was not used since it was free.
        let to = unsafe { pinned.slice_mut(base + start, launch.meta()) };
        let mut at = sets::write_all(&launch.extras, to);
        let mut put = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        launch.chunks.iter().for_each(|(_, _, chunk)| put(bytemuck::bytes_of(chunk)));
        launch.spans.iter().for_each(|span| put(bytemuck::bytes_of(span)));
        let chunks = start + launch.extra_len;
        let spans = chunks + launch.chunks.len() * CHUNK;
        let answers = spans + launch.spans.len() * SPAN;
        let mut routes = [0; 5];
        launch.chunks.iter().for_each(|c| routes[c.1 as usize] += 1);
        let work =
            DecodeBatch { chunks: meta + chunks as u64, status: meta + answers as u64, routes };
        // At most what fits the slot's memory for descriptors.
        let count = u32::try_from(launch.spans.len()).unwrap_or(u32::MAX);
        // A kernel fetches the descriptors from pinned memory: the copy engine would deliver them
        // only after the next group's frames.
        let fetch = CopySpan {
            from: pinned.address(base + start),
            to: meta + start as u64,
            len: (answers - start) as u64,
        };
        let fetch_at = (answers + 4 * launch.chunks.len()).next_multiple_of(8);
        to[fetch_at - start..fetch_at - start + SPAN].copy_from_slice(bytemuck::bytes_of(&fetch));
        // SAFETY: descriptors, tables, status and scratch are parts of the session's memory, used in
        // the order of one stream; streams lie within their frames, as `decode_route` found; the
        // values are the caller's, who promised that nothing else uses them, or scratch.
        unsafe {
            worker.compute.copy_spans(pinned.address(base + fetch_at), 1)?;
            worker.compute.decode(&work, &worker.beside)?;
            worker.compute.copy_spans(meta + spans as u64, count)?;
            let len = launch.chunks.len() * 4;
            worker.compute.copy_to_host(work.status, pinned, base + answers, len)?;
        }
        let asked = launch.chunks.iter().enumerate().map(|(i, c)| (c.0, answers + 4 * i));
        busy.asked.extend(asked);
        busy.meta = (fetch_at + SPAN).next_multiple_of(16);
        Ok(())
    }

    /// Waits for a slot's work and checks its outcome.
    fn complete(&mut self, slot: usize) -> Result<()> {
        let Some(mut busy) = self.busy[slot].take() else { return Ok(()) };
        self.session.worker.slots[slot].worked.synchronize()?;
        self.check_statuses(slot, &mut busy)
    }

    /// Checks the statuses of chunks whose work is done.
    fn check_statuses(&mut self, slot: usize, busy: &mut Busy<'a>) -> Result<()> {
        self.check_block_statuses(slot, busy)?;
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
            let job = &busy.jobs[number];
            if job.has_input() {
                // The values that it is a difference from may be overwritten.
                self.undone.insert(job.tensor);
                continue;
            }
            // The CPU reports the error, or can do what the kernels cannot.
            self.decode_on_host(&busy.frames, job)?;
            if matches!(found, status::FRAME_CHECKSUM | status::VALUE_CHECKSUM) {
                let what = "checksum mismatch on the device, but not on the CPU";
                return Err(s4_format::Error::corrupt(what).in_chunk(job.chunk)).of(job.tensor);
            }
        }
        Ok(())
    }

    /// Decodes a chunk on the CPU and copies the wanted parts.
    fn decode_on_host(&mut self, frames: &Frames, job: &FrameJob<'_>) -> Result<()> {
        if self.bounce.is_none() {
            let most = abi::MAX_DECODE_BYTES as usize;
            self.bounce = Some(Pinned::new(&self.session.worker.device, most)?);
        }
        let Some(bounce) = &self.bounce else { return Ok(()) };
        // SAFETY: the copies from it were waited for.
        let values = unsafe { bounce.slice_mut(0, job.bytes as usize) };
        let worker = &self.session.worker;
        let frame = frames.frame(job);
        let (spec, chunk, record) = (&job.spec, job.chunk, &job.record);
        let chunk = crate::DecodeJob { spec, chunk, record, frame, inputs: &[] };
        self.host.cpu.decode(&chunk, &mut self.scratch, values).of(job.tensor)?;
        for part in &job.destinations {
            let (from, to, len) = (part.from as usize, part.to, part.to.bytes() as usize);
            // SAFETY: the caller's memory, which nothing else uses; `bounce` stays until the copy
            // is done, below.
            unsafe { worker.copy.copy_to_device(bounce, from, len, to.address()) }?;
        }
        Ok(worker.copy.synchronize()?)
    }
}
