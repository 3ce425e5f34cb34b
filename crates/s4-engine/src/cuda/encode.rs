//! Encodes chunks of device tensors into frames in pinned memory, group by group.

mod group;
mod homes;
mod inputs;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use rayon::ThreadPool;
use s4_codec_gpu::abi::{self, CopySpan, CrcSpan, EncodeChunk, EncodeResult, status};
use s4_codec_gpu::{EncodeBatch, GpuError, Pinned};
use s4_format::limits::ALIGN;
use s4_format::{CodecId, StreamEntry};
use s4_predict::Tensor;

use group::{Check, Decoding, Group, Member, PER_CHECK, PER_CHUNK, Room, SPAN, TOTAL, result_of};
use homes::OpenPiece;

use super::error::{CudaError, Of, Result};
use super::host::{Counters, Host};
use super::parent::{self, LevelPlaces};
use super::route::{PlanFields, codings, encode_route, largest_coded, position};
use super::sets::{self, Extra, Rows, SetPlace, TensorSet};
use super::worker::{SLOTS, Session, Sizes};
use crate::encode::plain;
use crate::engine::{Chunk, ChunkQueue};
use crate::inputs::missing_moments;
use crate::{
    EncodeJob, EncodedChunk, EncodedFrame, Input, Inputs, Moment, Scratch, TensorPlan, TensorView,
};

/// One device's chunks, in order.
pub(super) struct EncodeQueue<'a> {
    /// Dropped first, so that nothing is still being copied into memory that the other fields hold.
    session: Session<'a>,
    host: &'a Host,
    chunks: ChunkQueue<'a>,
    pool: Option<&'a ThreadPool>,
    /// The most table sets that the parents of a chunk of the current tensor have: their room is already counted.
    parent_sets: u32,
    in_flight: VecDeque<Group<'a>>,
    /// Number of chunks of the first group that were handed on.
    handed: usize,
    free: Vec<usize>,
    scratch: Scratch,
    values: Vec<u8>,
    /// Frames that the host encoded for the chunks that were taken last.
    frames: Vec<Vec<u8>>,
    /// The destination of the next group's frames.
    open: OpenPiece,
    /// Number of groups cut so far.
    groups: u32,
}

impl<'a> EncodeQueue<'a> {
    pub(super) fn new(
        session: Session<'a>,
        host: &'a Host,
        chunks: ChunkQueue<'a>,
        pool: Option<&'a ThreadPool>,
    ) -> Self {
        Self {
            session,
            host,
            chunks,
            pool,
            parent_sets: 0,
            in_flight: VecDeque::new(),
            handed: 0,
            free: (0..SLOTS).rev().collect(),
            scratch: Scratch::default(),
            values: vec![],
            frames: vec![],
            open: OpenPiece::default(),
            groups: 0,
        }
    }

    /// Fills the free slots with work.
    pub(super) fn launch<E: From<CudaError>>(
        &mut self,
        inputs: &'a dyn Inputs<E>,
    ) -> Result<(), E> {
        while let Some(slot) = self.free.pop() {
            let mut group = self.cut(slot, inputs)?;
            if group.members.is_empty() {
                self.free.push(slot);
                return Ok(());
            }
            group.open_inputs(inputs)?;
            self.open_moments(&mut group, inputs)?;
            let decoding = self.upload_inputs(&mut group)?;
            self.start(&group, decoding)?;
            self.in_flight.push_back(group);
        }
        Ok(())
    }

    /// The next chunk that is not in a group yet.
    fn member(&mut self) -> Option<Member> {
        let Chunk { tensor, chunk, first, bytes } = self.chunks.peek()?;
        let (t, plan) = (&self.chunks.tensors[tensor], &self.chunks.plans[tensor]);
        let width = t.dtype.value_width();
        if chunk == 0 {
            self.parent_sets = 0;
        }
        Some(Member {
            tensor,
            chunk,
            // Checked before: it is in a device's memory.
            values: t.values.memory().map_or(0, |m| m.address()) + first,
            bytes,
            fixed: t.values.memory().is_some_and(|m| m.is_fixed()),
            route: encode_route(plan, bytes / width as u64, t.dtype),
            scale: plan.plan.input_scale(),
            own_input: plan_has_own_input(plan),
            moments_count: plan.plan.moments().len(),
            ..Member::default()
        })
    }

    /// Data that a chunk needs after the descriptors: the data that its tensor's chunks share, if
    /// `shared`, and the offsets of its rows.
    fn extras(
        &self,
        member: &Member,
        shared: bool,
    ) -> Result<(Option<TensorSet<'a>>, Option<Rows<'a>>)> {
        let (t, plan) = (self.chunks.tensor(member.tensor), self.chunks.plan(member.tensor));
        let set = if shared { Some(TensorSet::of_plan(plan, t).of(member.tensor)?) } else { None };
        let tensor = Tensor { dtype: t.dtype, shape: t.shape, side: &plan.side };
        let n = member.bytes / t.dtype.value_width() as u64;
        let first = member.chunk << plan.chunk_log2;
        let rows = Rows::of(&plan.plan, &tensor, (first, n)).of(member.tensor)?;
        Ok((set, rows))
    }

    /// The most bytes of frames in the next group. The first groups are small, so that the link soon has something to
    /// carry. Frames beyond the slot's host memory must be sure of a place in pieces before they are encoded.
    fn most_frames(&mut self) -> u64 {
        let Sizes { frames, host_frames, .. } = self.session.sizes;
        let most = (host_frames << self.groups.min(16)).min(frames).min(self.chunks.most_left());
        let device = &self.session.worker.device;
        let roomy = most > host_frames && self.open.has_room(most, &self.host.pieces, device);
        if roomy { most } else { host_frames }
    }

    /// Takes as many chunks as a slot has room for.
    fn cut<E>(&mut self, slot: usize, inputs: &dyn Inputs<E>) -> Result<Group<'a>> {
        let sizes = self.session.sizes;
        let most = self.most_frames();
        // Whether any chunk's values go to the slot's host memory.
        let mut to_host = false;
        let mut group = Group { slot, ..Group::default() };
        let mut used = Room { meta: TOTAL + 2 * SPAN + 64, ..Room::default() };
        self.parent_sets = 0;
        // The last tensor, and the place of the data that its chunks share.
        let mut known: Option<(usize, SetPlace)> = None;
        while let Some(mut member) = self.member() {
            let (mut set, mut rows) = (None, None);
            if member.route.is_some() {
                let is_new = known.is_none_or(|k| k.0 != member.tensor);
                (set, rows) = self.extras(&member, is_new)?;
            }
            let extra_len =
                set.as_ref().map_or(0, |set| set.place(0).len) + rows.as_ref().map_or(0, Rows::len);
            if extra_len as u64 > sizes.meta / 2 {
                (member.route, set, rows) = (None, None, None);
            }
            let (mut more, mut sets) = self.room(&mut member, extra_len as u64, inputs);
            let moments = member.has_moments();
            let fits = more.frames.max(more.parents) <= sizes.frames
                && more.scratch <= sizes.scratch
                && used.meta + more.meta <= sizes.meta;
            if moments && !fits && group.members.is_empty() {
                // Its moments' chunks are cut unusually and do not fit a slot: the CPU encodes it.
                member.route = None;
                (more, sets) = self.room(&mut member, 0, inputs);
            }
            if member.route.is_none() {
                (set, rows) = (None, None);
            }
            to_host |= member.route.is_none();
            let sum = Room {
                frames: used.frames + more.frames,
                parents: used.parents + more.parents,
                scratch: used.scratch + more.scratch,
                meta: used.meta + more.meta,
            };
            let full = sum.frames > if to_host { sizes.host_frames } else { most }
                || sum.parents > sizes.frames
                || sum.scratch > sizes.scratch
                || sum.meta > sizes.meta;
            // A slot has room for any single chunk.
            if full && !group.members.is_empty() {
                break;
            }
            let start = self.session.scratch() + used.scratch;
            member.copy = if member.fixed { member.values } else { start };
            member.scratch = start + member.copy_room();
            used = sum;
            self.chunks.advance();
            self.parent_sets = self.parent_sets.max(sets);
            if let Some(set) = set {
                known = Some((member.tensor, set.place(group.extra_len)));
                group.add(Extra::Set(set));
            }
            member.rows = rows.as_ref().map(|_| group.extra_len);
            if let Some(rows) = rows {
                group.add(Extra::Rows(rows));
            }
            member.set = known.map(|k| k.1).unwrap_or_default();
            if let Some(route) = member.route {
                group.routes[route as usize] += 1;
                group.capacity += more.frames;
                // A slot has room for their descriptors.
                group.copies += member.copies() as u32;
            }
            group.members.push(member);
        }
        group.place();
        group.promised = group.capacity;
        self.open.promise(group.promised);
        self.groups += 1;
        Ok(group)
    }

    /// The room that a member takes, and the most table sets that its parent has. It loses its
    /// route if its moments do not have its values.
    fn room<E>(&self, member: &mut Member, extra_len: u64, inputs: &dyn Inputs<E>) -> (Room, u32) {
        let frames = member.bytes.next_multiple_of(ALIGN as u64);
        let Some(route) = member.route else { return (Room { frames, ..Room::default() }, 0) };
        let plan = self.chunks.plan(member.tensor);
        let width = self.chunks.tensors[member.tensor].dtype.value_width();
        let n = member.bytes / width as u64;
        let Ok(coded) = largest_coded(plan, n, width) else {
            member.route = None;
            return (Room { frames, ..Room::default() }, 0);
        };
        let (width, contexts) = (width as u64, !plan.plan.contexts.is_none());
        let scratch = abi::encode_scratch(route, n, width, coded, contexts).next_multiple_of(16);
        let meta = PER_CHUNK + member.copies() * SPAN + extra_len;
        let copy = member.copy_room();
        let mut room = Room { frames, parents: 0, scratch: copy + scratch, meta };
        let mut sets = 0;
        if member.scale > 0 {
            let size = inputs.size(member.tensor, member.chunk);
            let own = plan_has_own_input(plan);
            room.parents = if own && size.bytes == 0 { 0 } else { member.input_room() };
            // A parent is decoded where the planes will be.
            let decoding = if own { 0 } else { parent::scratch(member.bytes, width) };
            room.scratch = copy + member.input_room() + scratch.max(decoding);
            if own {
                room.meta += member.input_bytes().div_ceil(abi::COPY_SPAN_BYTES) * PER_CHECK;
            } else if self.on_device(size, member.bytes) {
                room.parents = parent::stored(size, member.bytes);
                sets = size.frames;
                let new = u64::from(sets.saturating_sub(self.parent_sets));
                room.meta += u64::from(sets) * parent::PER_FRAME + new * parent::PER_TENSOR;
            }
        }
        if member.has_moments() {
            let moments = inputs.moments(member.tensor);
            let Some(copies) = self.room_of_moments(member, moments, &mut room) else {
                member.route = None;
                return (Room { frames, ..Room::default() }, 0);
            };
            member.moments_room = copies;
        }
        (room, sets)
    }

    /// Queues a group's work.
    fn start(&mut self, group: &Group<'_>, decoding: Option<Decoding>) -> Result<()> {
        let worker = &self.session.worker;
        let slot = &worker.slots[group.slot];
        let (frames, meta) = (self.session.frames(group.slot), self.session.meta(group.slot));
        let pinned = self.session.pinned_meta();
        let (_, copies, results) = group.places();
        // SAFETY: all of the slot's frames were handed on: nothing else uses it.
        let to = unsafe { slot.pinned.slice_mut(pinned, self.session.sizes.meta as usize) };
        self.describe(group, meta, to)?;
        // A kernel writes the answer straight into pinned memory: the copy engine would deliver it
        // only after the previous group's frames.
        let answer = CopySpan {
            from: meta + results,
            to: slot.pinned.address(pinned + results as usize),
            len: group.end() - results,
        };
        // Likewise the statuses of the parents' frames.
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
        // The kernels write only a part of this, but all of it is sent back.
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
        // SAFETY: descriptors, tables, results, frames and scratch, with the copies of the values, are parts of the
        // session's memory of the sizes that `cut` added up, used in the order of one stream; the values are the
        // caller's, whose memory stays. The slot's pinned memory is idle, as above. Parents lie where frames will go,
        // and are read before the first frame is written.
        unsafe {
            if group.count() > 0 {
                worker.compute.copy_to_device(&slot.pinned, pinned, head, meta)?;
                // At most one for each piece of a chunk.
                let checks = group.checks.len() as u32;
                worker.compute.copy_spans(meta + copies, group.copies + checks)?;
                let (sums, found) = (group.checks_at().1, group.sums_at());
                worker.compute.crc_spans(meta + sums, checks, meta + found)?;
                if let Some(Decoding { batches, places }) = &decoding {
                    let LevelPlaces { start, end, .. } = *places;
                    let (at, to) = (pinned + start, meta + start as u64);
                    worker.compute.copy_to_device(&slot.pinned, at, end - start, to)?;
                    for level in batches {
                        worker.compute.decode(level, &worker.beside)?;
                    }
                }
                worker.compute.encode(&batch, &worker.beside)?;
                let count = 1 + u32::from(decoding.is_some());
                worker.compute.copy_spans(meta + results - 2 * SPAN, count)?;
            }
            slot.worked.record(&worker.compute)?;
            for member in group.members.iter().filter(|j| j.route.is_none()) {
                let len = member.bytes as usize;
                worker.copy.copy_to_host(member.values, &slot.pinned, member.at, len)?;
            }
        }
        Ok(())
    }

    /// Writes descriptors and extras as they lie in the slot's meta memory, at `meta` on the device.
    fn describe(&self, group: &Group<'_>, meta: u64, to: &mut [u8]) -> Result<()> {
        let (extras_at, mut copies_at, _) = group.places();
        let extras = meta + extras_at;
        for member in &group.members {
            if member.route.is_none() {
                continue;
            }
            let (t, plan) =
                (&self.chunks.tensors[member.tensor], &self.chunks.plans[member.tensor]);
            let width = t.dtype.value_width();
            let n = member.bytes / width as u64;
            let set = member.set.moved_by(extras);
            let rows = member.rows.map_or(0, |at| extras + at);
            let (first, cols) = position(t.dtype, t.shape, plan.chunk_log2, member.chunk);
            let fields = PlanFields::of(&plan.plan, t.dtype, &plan.side).of(member.tensor)?;
            let chunk = EncodeChunk {
                values: member.copy,
                inputs: sets::inputs(member.parent, rows, &set, member.moments),
                first,
                cols,
                tables: set.tables(),
                prediction: fields.prediction,
                contexts: fields.contexts,
                class: fields.class,
                sparse: fields.sparse.into(),
                // The values that it is predicted from may lie in front.
                scratch: member.work(),
                // At most 2^18 values of 1 to 8 bytes.
                n: n as u32,
                width: width as u8,
                layout: plan.plan.layout.0,
                residual: plan.plan.residual.0,
                coding: codings(plan),
                ..bytemuck::Zeroable::zeroed()
            };
            let at = member.at * size_of::<EncodeChunk>();
            to[at..at + size_of::<EncodeChunk>()].copy_from_slice(bytemuck::bytes_of(&chunk));
            let copied = if member.fixed { 0 } else { member.bytes };
            for span in CopySpan::cut(member.values, member.copy, copied) {
                to[copies_at as usize..][..SPAN as usize]
                    .copy_from_slice(bytemuck::bytes_of(&span));
                copies_at += SPAN;
            }
        }
        sets::write_all(&group.extras, &mut to[extras_at as usize..]);
        let (copies, sums) = group.checks_at();
        let [mut copies, mut sums] = [copies, sums].map(|at| at as usize);
        let mut put = |at: &mut usize, bytes: &[u8]| {
            to[*at..*at + bytes.len()].copy_from_slice(bytes);
            *at += bytes.len();
        };
        for &Check { from, to, len, .. } in &group.checks {
            put(&mut copies, bytemuck::bytes_of(&CopySpan { from, to, len }));
            put(&mut sums, bytemuck::bytes_of(&CrcSpan { data: to, len }));
        }
        Ok(())
    }

    /// Sends the frames of the group at index `number` to the host, once they are encoded.
    fn send(&mut self, number: usize) -> Result<()> {
        let worker = &self.session.worker;
        let Some(group) = self.in_flight.get_mut(number).filter(|g| !g.sent) else {
            return Ok(());
        };
        let slot = &worker.slots[group.slot];
        slot.worked.synchronize()?;
        if group.count() > 0 {
            let at = self.session.pinned_meta() + group.places().2 as usize;
            // SAFETY: the copy that wrote it is done.
            let total = unsafe { slot.pinned.slice(at, 8) };
            let total = u64::from_le_bytes(total.try_into().unwrap_or_default());
            // A frame that does not fit was not written, and its status says so.
            let total = total.min(group.capacity);
            let ends = group.ends(&self.session, total);
            let copied = self.open.place(group, &ends, &self.host.pieces, &worker.device);
            let frames = self.session.frames(group.slot);
            for home in &group.homes {
                let (pinned, len) = (&home.piece.pinned, (home.end - home.first) as usize);
                // SAFETY: the kernels are done with the frames; this part of the piece was not used before.
                unsafe { worker.copy.copy_to_host(frames + home.first, pinned, home.at, len) }?;
            }
            let rest = total.saturating_sub(copied) as usize;
            if rest > 0 && total > self.session.sizes.host_frames {
                return Err(bad_answer(worker.device.ordinal()).into());
            }
            // SAFETY: the kernels are done with the frames; the slot's pinned memory is idle.
            unsafe {
                worker.copy.copy_to_host(frames + copied, &slot.pinned, copied as usize, rest)
            }?;
        }
        slot.copied.record(&worker.copy)?;
        group.sent = true;
        // The inputs of chunks that the CPU must encode are still needed; the others are dropped.
        for i in 0..group.members.len() {
            let member = &group.members[i];
            if member.scale > 0 && member.route.is_some() && is_sound(&self.session, group, member)
            {
                group.inputs[i] = None;
            }
        }
        Ok(())
    }

    /// Ensures that the next chunks of this device's tensors are ready; returns their tensor and
    /// chunk indices, none after the last one.
    pub(super) fn ready<E: From<CudaError>>(
        &mut self,
        inputs: &'a dyn Inputs<E>,
    ) -> Result<Vec<(usize, u64)>, E> {
        if self.in_flight.front().is_some_and(|g| self.handed == g.members.len()) {
            if let Some(done) = self.in_flight.pop_front() {
                self.free.push(done.slot);
            }
            self.handed = 0;
        }
        if self.handed == 0 {
            // Sent before the next group is prepared, which may have to read parents.
            let slots = &self.session.worker.slots;
            if self.in_flight.get(1).is_some_and(|group| slots[group.slot].worked.is_done()) {
                self.send(1)?;
            }
            self.launch(inputs)?;
            // The next group is sent while this one is handed on.
            self.send(0)?;
            self.send(1)?;
            if let Some(group) = self.in_flight.front() {
                let copied = self.session.worker.slots[group.slot].copied.synchronize();
                copied.map_err(CudaError::from)?;
            }
            if let Some(group) = self.in_flight.front_mut() {
                group.seal(&self.session);
            }
        }
        let left = self.in_flight.front().map_or(&[][..], |group| &group.members[self.handed..]);
        Ok(left.iter().map(|m| (m.tensor, m.chunk)).collect())
    }

    /// The next `count` of the chunks that are ready.
    pub(super) fn take<E>(
        &mut self,
        count: usize,
        inputs: &dyn Inputs<E>,
    ) -> Result<Vec<EncodedFrame<'_>>> {
        let done = self.handed..self.handed + count;
        self.handed = done.end;
        self.frames.clear();
        let mut found = Vec::with_capacity(count);
        for number in done {
            let Some(group) = self.in_flight.front_mut() else { break };
            let member = group.members[number];
            let input = group.inputs.get_mut(number).and_then(Option::take);
            let (place, encoded) = match self.locate(&member)? {
                Some((offset, len, encoded)) => (Some((offset, len)), encoded),
                None => {
                    let (mut frame, moments) = (vec![], inputs.moments(member.tensor));
                    let encoded = self.encode_on_host(&member, input, moments, &mut frame)?;
                    self.frames.push(frame);
                    (None, encoded)
                }
            };
            found.push((member, place, encoded));
        }
        let Some(group) = self.in_flight.front() else { return Ok(vec![]) };
        let mut own = self.frames.iter();
        let frame = |(member, place, encoded): (Member, Option<(usize, usize)>, _)| {
            let held = place.and_then(|place| group.held(place));
            let bytes = match (place, held) {
                (Some((_, len)), Some((held, at))) => &held[at..at + len],
                // SAFETY: the copy that wrote it is done; the slot is free only after a later call.
                (Some((offset, len)), None) => unsafe {
                    self.session.worker.slots[group.slot].pinned.slice(offset, len)
                },
                (None, _) => own.next().map_or(&[][..], Vec::as_slice),
            };
            let held = held.map(|h| h.0);
            EncodedFrame { tensor: member.tensor, chunk: member.chunk, encoded, bytes, held }
        };
        Ok(found.into_iter().map(frame).collect())
    }

    /// The place of a chunk's frame in the first group's slot; `None`: it has none, and its values
    /// were copied to `self.values`.
    fn locate(&mut self, member: &Member) -> Result<Option<(usize, usize, EncodedChunk)>> {
        let Some(group) = self.in_flight.front() else { return Ok(None) };
        let worker = &self.session.worker;
        if member.route.is_none() {
            self.host.chunks.host.fetch_add(1, Ordering::Relaxed);
            let pinned = &worker.slots[group.slot].pinned;
            self.values.clear();
            // SAFETY: the copy that wrote it is done.
            let values = unsafe { pinned.slice(member.at, member.bytes as usize) };
            self.values.extend_from_slice(values);
            return Ok(None);
        }
        if !is_sound(&self.session, group, member) {
            // Values that changed are the caller's doing, not a refusal by the kernels.
            let own = plan_has_own_input(self.chunks.plan(member.tensor));
            let changed = own || has_changed(&self.session, group, member);
            let Counters { host, refused, .. } = &self.host.chunks;
            if changed { host } else { refused }.fetch_add(1, Ordering::Relaxed);
            return self.fetch(member).map(|()| None);
        }
        let result = result_of(&self.session, group, member);
        let end = result.offset.checked_add(result.len.into());
        if end.is_none_or(|end| end > self.session.sizes.frames) {
            return Err(bad_answer(worker.device.ordinal()).into());
        }
        self.host.chunks.device.fetch_add(1, Ordering::Relaxed);
        Ok(Some((result.offset as usize, result.len as usize, encoded(&result))))
    }

    /// Copies the values of a chunk that the kernels refused to the host.
    fn fetch(&mut self, member: &Member) -> Result<()> {
        let mut values = std::mem::take(&mut self.values);
        let done = self.copy_to_host(member.values, member.bytes as usize, &mut values);
        self.values = values;
        done
    }

    /// Copies `len` bytes at an address to the host.
    fn copy_to_host(&self, from: u64, len: usize, to: &mut Vec<u8>) -> Result<()> {
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

    /// Encodes a chunk whose values are in `self.values`, and appends its frame.
    fn encode_on_host(
        &mut self,
        member: &Member,
        input: Option<Input<'_>>,
        moments: &[Moment<'_>],
        frame: &mut Vec<u8>,
    ) -> Result<EncodedChunk> {
        let values = if member.scale > 0 { Some(self.input_on_host(member, input)?) } else { None };
        let &Member { tensor, chunk, .. } = member;
        let (t, plan) = (&self.chunks.tensors[tensor], &self.chunks.plans[tensor]);
        let view = TensorView { dtype: t.dtype, shape: t.shape, data: &self.values };
        let values = values.as_deref();
        let mut given = values.as_slice().to_vec();
        let mut gone = plan_has_own_input(plan) && values.is_some_and(<[u8]>::is_empty);
        let mut read = [vec![], vec![]];
        if plan.plan.has_moments() {
            if moments.len() != plan.plan.moments().len() {
                return Err(missing_moments(tensor, chunk).into());
            }
            let count = (self.values.len() / t.dtype.value_width()) as u64;
            let range = (chunk << plan.chunk_log2, count);
            for (moment, buffer) in moments.iter().zip(&mut read) {
                match self.moment_on_host(tensor, moment, range, buffer)? {
                    Some(wanted) => given.push(&buffer[wanted]),
                    None => gone = true,
                }
            }
        }
        let job = EncodeJob { view: &view, plan, chunk, inputs: &given };
        let encoded = if gone {
            // An input has changed since it was stored.
            Ok(plain(&self.values, frame))
        } else {
            let own = (chunk << plan.chunk_log2, &self.values[..]);
            self.host.cpu.encode_values(&job, own, &mut self.scratch, frame)
        };
        encoded.map_err(|e| e.in_chunk(chunk)).of(tensor)
    }
}

/// Whether a plan predicts from a tensor of the same checkpoint.
fn plan_has_own_input(plan: &TensorPlan) -> bool {
    plan.plan.own_input().is_some()
}

/// Whether the kernels encoded a chunk and, if it has an input, decoded the input's frames or found
/// that its values are the stored ones.
fn is_sound(session: &Session<'_>, group: &Group<'_>, member: &Member) -> bool {
    let (first, count) = member.statuses;
    let pinned = &session.worker.slots[group.slot].pinned;
    let decoded = group.statuses[first..first + count].iter().all(|at| {
        // SAFETY: the copy that wrote it is done.
        let found = unsafe { pinned.slice(session.pinned_meta() + at, 4) };
        u32::from_le_bytes(found.try_into().unwrap_or_default()) == status::OK
    });
    let changed = has_changed(session, group, member);
    decoded && !changed && u32::from(result_of(session, group, member).status) == status::OK
}

/// Whether values of the same checkpoint that a chunk is predicted from have changed since they were stored.
fn has_changed(session: &Session<'_>, group: &Group<'_>, member: &Member) -> bool {
    let pinned = &session.worker.slots[group.slot].pinned;
    let found = session.pinned_meta() + group.sums_at() as usize;
    let mut checks = member.checks.iter().flat_map(|(first, count)| *first..first + count);
    let stored = checks.all(|i| {
        // SAFETY: the copy that wrote it is done.
        let sum = unsafe { pinned.slice(found + 4 * i, 4) };
        u32::from_le_bytes(sum.try_into().unwrap_or_default()) == group.checks[i].crc
    });
    let unknown = member.has_moments() && member.moments[..member.moments_count].contains(&0);
    !stored || unknown
}

pub(super) fn encoded(r: &EncodeResult) -> EncodedChunk {
    EncodedChunk {
        len: r.len as usize,
        plain: r.plain != 0,
        crc_encoded: r.crc_encoded,
        crc_raw: r.crc_raw,
        // The kernels keep the flag of a chunk whose streams they dropped because they were not shorter.
        shared: r.shared != 0 && r.plain == 0,
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
        reason: "the kernels' result refers to bytes outside their memory".into(),
    }
}
