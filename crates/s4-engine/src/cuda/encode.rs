//! Chunks of device tensors into frames in pinned memory, group by group.

mod bring;
mod group;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use s4_codec_gpu::abi::{self, CopySpan, EncodeChunk, EncodeResult, TableSet, status};
use s4_codec_gpu::{EncodeBatch, GpuError, Pinned};
use s4_format::index::chunk_count;
use s4_format::limits::ALIGN;
use s4_format::{CodecId, StreamEntry};

use bring::Decoding;
use group::{Group, Job, PER_CHUNK, Room, SPAN, TABLES, TOTAL};

use super::Host;
use super::Work;
use super::error::{CudaError, Of, Result};
use super::parent::{self, LevelPlaces, ParentValues};
use super::route::{codings, encode_route, plan_tables, position};
use super::tensor::DeviceTensor;
use super::worker::{SLOTS, Session};
use crate::{EncodeJob, EncodedChunk, Scratch, TensorPlan, TensorView};

/// A chunk of a device tensor, encoded.
#[derive(Debug, Clone, Copy)]
pub struct DeviceFrame<'a> {
    /// Number of the tensor in the caller's list.
    pub tensor: usize,
    /// Number of the chunk within it.
    pub chunk: u64,
    /// Its record's content.
    pub encoded: EncodedChunk,
    /// The frame, as the CPU engine writes it.
    pub bytes: &'a [u8],
}

/// One device's chunks, in order.
pub(super) struct Lane<'a> {
    session: Session<'a>,
    host: &'a Host,
    tensors: &'a [DeviceTensor<'a>],
    plans: &'a [TensorPlan],
    /// Tensors of this device that are not cut yet; the first is cut up to a chunk.
    waiting: VecDeque<usize>,
    chunk: u64,
    /// Sets of tables that the parents of the first tensor have, at most.
    parent_sets: u32,
    under_way: VecDeque<Group>,
    /// Chunks of the first group that were handed on.
    handed: usize,
    free: Vec<usize>,
    scratch: Scratch,
    values: Vec<u8>,
    frame: Vec<u8>,
}

impl<'a> Lane<'a> {
    pub(super) fn new(session: Session<'a>, work: Work<'a>) -> Self {
        Self {
            waiting: work.on(session.worker.device.ordinal()),
            session,
            host: work.host,
            tensors: work.tensors,
            plans: work.plans,
            chunk: 0,
            parent_sets: 0,
            under_way: VecDeque::new(),
            handed: 0,
            free: (0..SLOTS).rev().collect(),
            scratch: Scratch::default(),
            values: vec![],
            frame: vec![],
        }
    }

    /// Fills the free slots with work.
    pub(super) fn launch<E: From<CudaError>>(
        &mut self,
        parents: &dyn ParentValues<E>,
    ) -> Result<(), E> {
        while let Some(slot) = self.free.pop() {
            let mut group = self.cut(slot, parents);
            if group.jobs.is_empty() {
                self.free.push(slot);
                return Ok(());
            }
            let decoding = self.bring(&mut group, parents)?;
            self.start(&group, decoding)?;
            self.under_way.push_back(group);
        }
        Ok(())
    }

    /// The next chunk that is not in a group yet.
    fn job(&mut self) -> Option<Job> {
        loop {
            let tensor = *self.waiting.front()?;
            let (t, plan) = (&self.tensors[tensor], &self.plans[tensor]);
            let width = t.dtype.value_width();
            let chunk = self.chunk;
            if chunk >= chunk_count(t.memory.bytes() / width as u64, plan.chunk_log2) {
                self.waiting.pop_front();
                (self.chunk, self.parent_sets) = (0, 0);
                continue;
            }
            let first = (chunk << plan.chunk_log2) * width as u64;
            let bytes = ((width as u64) << plan.chunk_log2).min(t.memory.bytes() - first);
            let route = encode_route(plan, bytes / width as u64, width);
            let values = t.memory.address() + first;
            let delta = plan.plan.is_delta();
            let (at, copy, scratch, parent, statuses) = Default::default();
            return Some(Job {
                tensor,
                chunk,
                values,
                copy,
                bytes,
                route,
                at,
                scratch,
                delta,
                parent,
                statuses,
            });
        }
    }

    /// Takes as many chunks as a slot has room for.
    fn cut<E>(&mut self, slot: usize, parents: &dyn ParentValues<E>) -> Group {
        let sizes = self.session.worker.sizes;
        let mut group = Group {
            slot,
            jobs: vec![],
            routes: [0; 4],
            capacity: 0,
            copies: 0,
            tables: vec![],
            statuses: vec![],
            sent: false,
        };
        let mut used = Room { meta: TOTAL + 2 * SPAN + 64, ..Room::default() };
        self.parent_sets = 0;
        while let Some(mut job) = self.job() {
            let new_tables = job.route.is_some()
                && group.tables.last() != Some(&job.tensor)
                && self.plans[job.tensor].shared.iter().any(|tables| !tables.is_empty());
            let (more, sets) = self.room(&job, new_tables, parents);
            let sum = Room {
                frames: used.frames + more.frames,
                parents: used.parents + more.parents,
                scratch: used.scratch + more.scratch,
                meta: used.meta + more.meta,
            };
            let full = sum.frames.max(sum.parents) > sizes.frames
                || sum.scratch > sizes.scratch
                || sum.meta > sizes.meta;
            // A slot has room for any single chunk.
            if full && !group.jobs.is_empty() {
                break;
            }
            job.copy = self.session.scratch() + used.scratch;
            job.scratch = job.copy + job.bytes.next_multiple_of(ALIGN as u64);
            used = sum;
            self.chunk += 1;
            self.parent_sets = self.parent_sets.max(sets);
            if new_tables {
                group.tables.push(job.tensor);
            }
            if let Some(route) = job.route {
                group.routes[route as usize] += 1;
                group.capacity += more.frames;
                // A slot has room for their descriptors.
                group.copies += job.copies() as u32;
            }
            group.jobs.push(job);
        }
        group.place();
        group
    }

    /// The room that a job takes, and how many sets of tables its parent has at most.
    fn room<E>(&self, job: &Job, new_tables: bool, parents: &dyn ParentValues<E>) -> (Room, u32) {
        let frames = job.bytes.next_multiple_of(ALIGN as u64);
        let Some(route) = job.route else { return (Room { frames, ..Room::default() }, 0) };
        let width = self.tensors[job.tensor].dtype.value_width() as u64;
        let scratch = abi::encode_scratch(route, job.bytes / width, width).next_multiple_of(16);
        let meta = PER_CHUNK + job.copies() * SPAN + if new_tables { TABLES } else { 0 };
        let mut room = Room { frames, parents: 0, scratch: frames + scratch, meta };
        let mut sets = 0;
        if job.delta {
            let size = parents.size(job.tensor, job.chunk);
            room.parents = frames;
            room.scratch = 2 * frames + scratch.max(parent::scratch(job.bytes, width));
            if self.on_device(size, job.bytes) {
                room.parents = parent::stored(size, job.bytes);
                sets = size.frames;
                let new = u64::from(sets.saturating_sub(self.parent_sets));
                room.meta += u64::from(sets) * parent::PER_FRAME + new * parent::PER_TENSOR;
            }
        }
        (room, sets)
    }

    /// Queues a group's work.
    fn start(&mut self, group: &Group, decoding: Option<Decoding>) -> Result<()> {
        let worker = &self.session.worker;
        let slot = &worker.slots[group.slot];
        let (frames, meta) = (self.session.frames(group.slot), self.session.meta(group.slot));
        let pinned = self.session.pinned_meta();
        let (_, copies, results) = group.places();
        // SAFETY: all of the slot's frames were handed on: nothing else uses it.
        let to = unsafe { slot.pinned.slice_mut(pinned, worker.sizes.meta as usize) };
        self.describe(group, meta, to);
        // A kernel writes the answer straight into pinned memory: the device's copy engine would
        // bring it only after the frames of the group before.
        let answer = CopySpan {
            from: meta + results,
            to: slot.pinned.address(pinned + results as usize),
            len: TOTAL + u64::from(group.count()) * size_of::<EncodeResult>() as u64,
        };
        // As that: what became of the parents.
        let mut answers = [answer, bytemuck::Zeroable::zeroed()];
        if let Some(Decoding { places, .. }) = &decoding {
            answers[1] = CopySpan {
                from: meta + places.status as u64,
                to: slot.pinned.address(pinned + places.status),
                len: 4 * places.frames as u64,
            };
        }
        to[(results - 2 * SPAN) as usize..results as usize]
            .copy_from_slice(bytemuck::cast_slice(&answers));
        // The kernels write a part of this, and all of it is answered.
        let head = (results + TOTAL) as usize;
        to[results as usize..head].fill(0);
        let batch = EncodeBatch {
            chunks: meta,
            results: meta + results + TOTAL,
            total: meta + results,
            frames,
            capacity: group.capacity,
            routes: group.routes,
        };
        // SAFETY: descriptors, tables, results, frames and scratch, with the copies of the values, are
        // parts of the session's memory of the sizes that `cut` added up, used in the order of one
        // stream; the values are the caller's, whose memory stays. The slot's pinned memory is idle, as above. Parents
        // lie where frames go to, and are read before the first of these is written.
        unsafe {
            if group.count() > 0 {
                worker.compute.copy_to_device(&slot.pinned, pinned, head, meta)?;
                worker.compute.copy_spans(meta + copies, group.copies)?;
                if let Some(Decoding { batches, places }) = &decoding {
                    let LevelPlaces { start, end, .. } = *places;
                    let (at, to) = (pinned + start, meta + start as u64);
                    worker.compute.copy_to_device(&slot.pinned, at, end - start, to)?;
                    for level in batches {
                        worker.compute.decode(level)?;
                    }
                }
                worker.compute.encode(&batch)?;
                let count = 1 + u32::from(decoding.is_some());
                worker.compute.copy_spans(meta + results - 2 * SPAN, count)?;
            }
            slot.worked.record(&worker.compute)?;
            for job in group.jobs.iter().filter(|j| j.route.is_none()) {
                let len = job.bytes as usize;
                worker.copy.copy_to_host(job.values, &slot.pinned, job.at, len)?;
            }
        }
        Ok(())
    }

    /// Writes descriptors and tables as they lie in the slot's meta memory, at `meta` on the device.
    fn describe(&self, group: &Group, meta: u64, to: &mut [u8]) {
        let (tables_at, mut copies_at, _) = group.places();
        for job in &group.jobs {
            if job.route.is_none() {
                continue;
            }
            let (t, plan) = (&self.tensors[job.tensor], &self.plans[job.tensor]);
            let width = t.dtype.value_width();
            let n = job.bytes / width as u64;
            let set = group.tables.iter().position(|&t| t == job.tensor);
            let (first, cols) = position(t.dtype, t.shape, plan.chunk_log2, job.chunk);
            let chunk = EncodeChunk {
                values: job.copy,
                inputs: abi::parent_input(job.parent),
                first,
                cols,
                tables: TableSet::one_each(set.map_or(0, |i| meta + tables_at + i as u64 * TABLES)),
                // Parents were decoded in the same memory, behind their values.
                scratch: job.scratch
                    + if job.delta { job.bytes.next_multiple_of(ALIGN as u64) } else { 0 },
                // At most 2^18 values of 1 to 8 bytes.
                n: n as u32,
                width: width as u8,
                layout: plan.plan.layout.0,
                residual: plan.plan.residual.0,
                coding: codings(plan),
                ..bytemuck::Zeroable::zeroed()
            };
            let at = job.at * size_of::<EncodeChunk>();
            to[at..at + size_of::<EncodeChunk>()].copy_from_slice(bytemuck::bytes_of(&chunk));
            for first in (0..job.bytes).step_by(abi::COPY_SPAN_BYTES as usize) {
                let len = abi::COPY_SPAN_BYTES.min(job.bytes - first);
                let span = CopySpan { from: job.values + first, to: job.copy + first, len };
                to[copies_at as usize..][..SPAN as usize]
                    .copy_from_slice(bytemuck::bytes_of(&span));
                copies_at += SPAN;
            }
        }
        for (i, &tensor) in group.tables.iter().enumerate() {
            if let Some(set) = plan_tables(&self.plans[tensor]) {
                let at = (tables_at + i as u64 * TABLES) as usize;
                to[at..at + TABLES as usize].copy_from_slice(bytemuck::cast_slice(&set));
            }
        }
    }

    /// Sends a group's frames to the host, once they are there.
    fn send(&mut self, number: usize) -> Result<()> {
        let worker = &self.session.worker;
        let Some(group) = self.under_way.get_mut(number).filter(|g| !g.sent) else {
            return Ok(());
        };
        let slot = &worker.slots[group.slot];
        slot.worked.synchronize()?;
        if group.count() > 0 {
            let at = self.session.pinned_meta() + group.places().2 as usize;
            // SAFETY: the copy that wrote it is done.
            let total = unsafe { slot.pinned.slice(at, 8) };
            let total = u64::from_le_bytes(total.try_into().unwrap_or_default());
            // What does not fit was not written, and says so in its status.
            let total = total.min(group.capacity) as usize;
            let frames = self.session.frames(group.slot);
            // SAFETY: the kernels are done with the frames; the slot's pinned memory is idle.
            unsafe { worker.copy.copy_to_host(frames, &slot.pinned, 0, total) }?;
        }
        slot.copied.record(&worker.copy)?;
        group.sent = true;
        Ok(())
    }

    /// The next chunk of this device's tensors; `None` after the last one.
    pub(super) fn next<E: From<CudaError>>(
        &mut self,
        parents: &dyn ParentValues<E>,
    ) -> Result<Option<DeviceFrame<'_>>, E> {
        if self.under_way.front().is_some_and(|g| self.handed == g.jobs.len()) {
            if let Some(done) = self.under_way.pop_front() {
                self.free.push(done.slot);
            }
            self.handed = 0;
        }
        if self.handed == 0 {
            self.launch(parents)?;
            // The group behind it is sent while this one is handed on.
            self.send(0)?;
            self.send(1)?;
            if let Some(group) = self.under_way.front() {
                let copied = self.session.worker.slots[group.slot].copied.synchronize();
                copied.map_err(CudaError::from)?;
            }
        }
        let Some(group) = self.under_way.front() else { return Ok(None) };
        let job = group.jobs[self.handed];
        let (slot, results) = (group.slot, group.places().2 + TOTAL);
        let sound = self.parent_is_sound(group, &job);
        self.handed += 1;
        match self.look(&job, slot, results, sound)? {
            Some((offset, len, encoded)) => {
                // SAFETY: the copy that wrote it is done; the slot is free only after the next call.
                let bytes = unsafe { self.session.worker.slots[slot].pinned.slice(offset, len) };
                Ok(Some(DeviceFrame { tensor: job.tensor, chunk: job.chunk, encoded, bytes }))
            }
            None => self.encode_here(&job, parents).map(Some),
        }
    }

    /// Where a chunk's frame lies in its slot; `None`: there is none, and its values are in
    /// `self.values`.
    fn look(
        &mut self,
        job: &Job,
        slot: usize,
        results: u64,
        sound: bool,
    ) -> Result<Option<(usize, usize, EncodedChunk)>> {
        let worker = &self.session.worker;
        let pinned = &worker.slots[slot].pinned;
        if job.route.is_none() {
            self.host.chunks.host.fetch_add(1, Ordering::Relaxed);
            self.values.clear();
            // SAFETY: the copy that wrote it is done.
            self.values.extend_from_slice(unsafe { pinned.slice(job.at, job.bytes as usize) });
            return Ok(None);
        }
        let size = size_of::<EncodeResult>();
        let at = self.session.pinned_meta() + results as usize + job.at * size;
        // SAFETY: as above.
        let result: EncodeResult = bytemuck::pod_read_unaligned(unsafe { pinned.slice(at, size) });
        if u32::from(result.status) != status::OK || !sound {
            self.host.chunks.refused.fetch_add(1, Ordering::Relaxed);
            return self.fetch(job).map(|()| None);
        }
        let end = result.offset.checked_add(result.len.into());
        if end.is_none_or(|end| end > worker.sizes.frames) {
            return Err(bad_answer(worker.device.ordinal()).into());
        }
        self.host.chunks.device.fetch_add(1, Ordering::Relaxed);
        Ok(Some((result.offset as usize, result.len as usize, encoded(&result))))
    }

    /// Copies a chunk's values to the host: the kernels would not have it.
    fn fetch(&mut self, job: &Job) -> Result<()> {
        let mut values = std::mem::take(&mut self.values);
        let done = self.copy_here(job.values, job.bytes as usize, &mut values);
        self.values = values;
        done
    }

    /// Copies `len` bytes at an address to the host.
    fn copy_here(&self, from: u64, len: usize, to: &mut Vec<u8>) -> Result<()> {
        let worker = &self.session.worker;
        let pinned = Pinned::new(&worker.device, len)?;
        // SAFETY: the caller's values, which stay; memory of our own, used after the copy is done.
        unsafe {
            worker.copy.copy_to_host(from, &pinned, 0, len)?;
            worker.copy.synchronize()?;
            to.clear();
            to.extend_from_slice(pinned.slice(0, len));
        }
        Ok(())
    }

    /// Encodes a chunk whose values are in `self.values`.
    fn encode_here<E: From<CudaError>>(
        &mut self,
        job: &Job,
        parents: &dyn ParentValues<E>,
    ) -> Result<DeviceFrame<'_>, E> {
        let parent = if job.delta { Some(self.parent_here(job, parents)?) } else { None };
        let (t, plan) = (&self.tensors[job.tensor], &self.plans[job.tensor]);
        // A chunk depends on its own values, and its parent's, only.
        let view = TensorView { dtype: t.dtype, shape: t.shape, data: &self.values };
        self.frame.clear();
        let inputs = parent.as_deref();
        let chunk = EncodeJob { view: &view, plan, chunk: 0, inputs: inputs.as_slice() };
        let encoded = self.host.cpu.encode(&chunk, &mut self.scratch, &mut self.frame);
        let encoded = encoded.map_err(|e| e.in_chunk(job.chunk)).of(job.tensor)?;
        Ok(DeviceFrame { tensor: job.tensor, chunk: job.chunk, encoded, bytes: &self.frame })
    }
}

pub(super) fn encoded(r: &EncodeResult) -> EncodedChunk {
    EncodedChunk {
        len: r.len as usize,
        plain: r.plain != 0,
        crc_encoded: r.crc_encoded,
        crc_raw: r.crc_raw,
        shared: r.shared != 0,
        streams: r.stream.map(|s| StreamEntry {
            codec: CodecId(s.codec),
            param: s.param,
            len: s.len,
        }),
    }
}

pub(super) fn bad_answer(device: u32) -> GpuError {
    GpuError::Driver {
        device,
        action: "encode",
        reason: "the kernels' answer names bytes outside their memory".into(),
    }
}
