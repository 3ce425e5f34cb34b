//! The inputs that a group of chunks is predicted from, uploaded before the group.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use s4_codec_gpu::abi;
use s4_codec_gpu::{GpuError, Pinned};
use s4_format::limits::ALIGN;

use super::EncodeQueue;
use super::group::{Check, Decoding, Group, Member, PER_CHECK, Room};
use crate::cuda::error::{CudaError, Of, Result};
use crate::cuda::parent::{self, Levels, Target};
use crate::cuda::worker::Slot;
use crate::engine::each;
use crate::inputs::{
    Input, InputFrame, InputSize, Inputs, decode_frames, missing, missing_moments,
};
use crate::moments::{Cover, Moment};

impl<'a> EncodeQueue<'a> {
    /// Whether a parent of this size can be decoded in one slot; otherwise the CPU decodes it.
    pub(super) fn on_device(&self, size: InputSize, bytes: u64) -> bool {
        let sizes = self.session.sizes;
        let meta = u64::from(size.frames) * (parent::PER_FRAME + parent::PER_TENSOR);
        parent::stored(size, bytes) <= sizes.frames && meta <= sizes.meta / 2
    }

    /// Queues the copies of a group's inputs, or of the frames that they are decoded from, to the
    /// device.
    pub(super) fn upload_inputs(&mut self, group: &mut Group<'a>) -> Result<Option<Decoding>> {
        let start = self.session.frames(group.slot);
        let sizes = self.session.sizes;
        let mut incoming = Incoming {
            bytes: vec![],
            levels: Levels::new(sizes.meta.saturating_sub(group.end()) as usize),
            end: start,
            most: start + sizes.frames,
        };
        let ordinal = self.session.worker.device.ordinal();
        let mut any = false;
        for (number, input) in group.inputs.iter().enumerate() {
            let member = group.members[number];
            let Some(input) = input.as_ref().filter(|_| member.route.is_some()) else { continue };
            any = true;
            if member.is_gone(input) {
                // The kernels will report that it is missing, and the chunk is stored plain.
                continue;
            }
            parent::check(input, ordinal, member.input_bytes())?;
            group.members[number].parent = match input {
                Input::Device(memory) => memory.address(),
                Input::Stored { values, .. } if values.is_fixed() => values.address(),
                // A copy, which is checked.
                Input::Stored { .. } => member.scratch,
                Input::Host(values) => incoming.values(values.clone())?,
                Input::Frames(frames) => {
                    let on_host = !self.on_device(parent::size(frames), member.bytes);
                    match incoming.frames(number, &member, frames, on_host) {
                        Some(address) => address,
                        None => incoming.values(self.decode_frames(&member, frames)?.into())?,
                    }
                }
                // Every input of a group was opened.
                Input::Late => return Err(exceeds_announced()),
            };
        }
        for (number, which, values) in std::mem::take(&mut group.moments) {
            group.members[number].moments[which] = incoming.values(values)?;
        }
        if any { self.upload(group, incoming) } else { Ok(None) }
    }

    /// Copies `incoming` to the device: from page-locked memory directly, and the rest through the slot's.
    fn upload(
        &mut self,
        group: &mut Group<'a>,
        incoming: Incoming<'a>,
    ) -> Result<Option<Decoding>> {
        let start = self.session.frames(group.slot);
        let worker = &self.session.worker;
        let slot = &worker.slots[group.slot];
        let mut sent: Vec<Sent> = vec![];
        let mut pageable = vec![];
        for (address, bytes) in incoming.bytes {
            let to = (address - start) as usize;
            let Some((pinned, from)) = self.host.pieces.find(&bytes) else {
                pageable.push((to, bytes));
                continue;
            };
            let from = Sent { pinned, from, to, len: bytes.len() };
            group.uploads.push(bytes);
            if !sent.last_mut().is_some_and(|last| last.extend(&from)) {
                sent.push(from);
            }
        }
        let send = |sent: &[Sent]| {
            sent.iter().try_for_each(|Sent { pinned, from, to, len }| {
                // SAFETY: the slot's memory on the device is idle, and so is that on the host once it is filled. Frames in
                // other memory do not change, and the group holds them.
                unsafe { worker.up.copy_to_device(pinned, *from, *len, start + *to as u64) }
            })
        };
        send(&sent)?;
        let mut left = &mut pageable[..];
        while !left.is_empty() {
            let (filled, rest) = self.fill(slot, left);
            send(&filled)?;
            if !rest.is_empty() {
                worker.up.synchronize()?;
            }
            left = rest;
        }
        slot.arrived.record(&worker.up)?;
        worker.compute.wait(&slot.arrived)?;
        if group.members.iter().any(|j| j.route.is_none()) {
            // The values of the CPU's chunks go to the pinned memory that the parents are copied from.
            worker.copy.wait(&slot.arrived)?;
        }
        self.describe_parents(group, incoming.levels)
    }

    /// Fills a slot's host memory with bytes for its device memory, each with its offset there.
    /// Returns what to send, and the bytes that did not fit.
    fn fill<'p>(
        &self,
        slot: &Slot,
        bytes: &'p mut [(usize, Bytes)],
    ) -> (Vec<Sent>, &'p mut [(usize, Bytes)]) {
        let room = self.session.sizes.host_frames as usize;
        // SAFETY: all of the slot's frames were handed on, and what was filled before was sent: nothing else uses it.
        let mut free = unsafe { slot.pinned.slice_mut(0, room) };
        let (mut copies, mut sent) = (vec![], Vec::<Sent>::new());
        let mut done = 0;
        for (to, bytes) in bytes.iter_mut() {
            let from = room - free.len();
            let part = bytes.split_to(bytes.len().min(free.len()));
            let len = part.len();
            let (here, behind) = free.split_at_mut(len);
            copies.push((here, part));
            let pad = (len.next_multiple_of(ALIGN) - len).min(behind.len());
            free = &mut behind[pad..];
            let next = Sent { pinned: Arc::clone(&slot.pinned), from, to: *to, len };
            if !sent.last_mut().is_some_and(|last| last.extend(&next)) {
                sent.push(next);
            }
            if !bytes.is_empty() {
                *to += len;
                break;
            }
            done += 1;
        }
        each(self.pool, &mut copies, |(to, bytes)| to.copy_from_slice(bytes));
        (sent, &mut bytes[done..])
    }

    /// Writes the descriptors that decode the parents' frames after those that encode their chunks.
    fn describe_parents(
        &self,
        group: &mut Group<'a>,
        levels: Levels<'a>,
    ) -> Result<Option<Decoding>> {
        if levels.is_empty() {
            return Ok(None);
        }
        let worker = &self.session.worker;
        let places = levels.places(group.end() as usize);
        let answers = places.status + 4 * places.frames;
        if answers as u64 > self.session.sizes.meta {
            return Err(exceeds_announced());
        }
        let (slot, meta) = (&worker.slots[group.slot], self.session.meta(group.slot));
        // SAFETY: all of the slot's frames were handed on: nothing else uses it.
        let to = unsafe { slot.pinned.slice_mut(self.session.pinned_meta(), answers) };
        let (batches, mut jobs) = levels.describe(&places, meta, to);
        // Sorted by job, so that all statuses of a job are together.
        let mut order: Vec<_> = (0..jobs.len()).collect();
        order.sort_by_key(|&i| jobs[i]);
        jobs.sort_unstable();
        group.statuses = order.into_iter().map(|i| places.status + 4 * i).collect();
        for (i, &job) in jobs.iter().enumerate() {
            let (first, count) = &mut group.members[job].statuses;
            *first = if *count == 0 { i } else { *first };
            *count += 1;
        }
        Ok(Some(Decoding { batches, places }))
    }

    /// Decodes a chunk's parent on the CPU.
    fn decode_frames(&mut self, member: &Member, frames: &[InputFrame<'_>]) -> Result<Vec<u8>> {
        let (cpu, bytes) = (&self.host.cpu, member.bytes as usize);
        decode_frames(cpu, frames, member.chunk, bytes, &mut self.scratch).of(member.tensor)
    }

    /// The input of a chunk, copied to the host.
    pub(super) fn input_on_host(
        &mut self,
        member: &Member,
        input: Option<Input<'_>>,
    ) -> Result<Vec<u8>> {
        let input = input.ok_or_else(|| missing(member.tensor, member.chunk))?;
        if member.is_gone(&input) {
            return Ok(vec![]);
        }
        parent::check(&input, self.session.worker.device.ordinal(), member.input_bytes())?;
        match input {
            Input::Host(values) => Ok(values.into()),
            Input::Stored { values: memory, parts } => {
                let mut values = vec![];
                self.copy_to_host(memory.address(), member.input_bytes() as usize, &mut values)?;
                let mut rest = &values[..];
                let stored = parts.iter().all(|(len, crc)| {
                    let (part, behind) = rest.split_at((*len as usize).min(rest.len()));
                    rest = behind;
                    s4_format::crc32c(part) == *crc
                });
                Ok(if stored { values } else { vec![] })
            }
            Input::Device(memory) => {
                let mut values = vec![];
                self.copy_to_host(memory.address(), member.input_bytes() as usize, &mut values)?;
                Ok(values)
            }
            Input::Frames(frames) => self.decode_frames(member, &frames),
            Input::Late => Err(exceeds_announced()),
        }
    }
}

impl EncodeQueue<'_> {
    /// Copies values of a tensor's moment to `buffer`, from host or device memory. `range` is the first index and the
    /// count. Returns where they lie in it, or `None` if they have changed since they were stored.
    pub(super) fn moment_on_host(
        &self,
        tensor: usize,
        moment: &Moment<'_>,
        range: (u64, u64),
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Range<usize>>> {
        let Some(memory) = moment.values.memory() else {
            return moment.read(range, buffer).of(tensor);
        };
        let Cover { parts, wanted } = moment.cover(range.0, range.1).of(tensor)?;
        let (first, last) = (parts.first().map_or(0, |p| p.0.start), parts.last());
        let end = last.map_or(first, |p| p.0.end);
        // One chunk or two.
        self.copy_to_host(memory.address() + first, (end - first) as usize, buffer)?;
        let of = |r: &Range<u64>| (r.start - first) as usize..(r.end - first) as usize;
        let stored = parts.iter().all(|(r, crc)| s4_format::crc32c(&buffer[of(r)]) == *crc);
        Ok(stored.then_some(wanted))
    }
}

impl<'a> EncodeQueue<'a> {
    /// Adds checks that copy and sum a group's moments in device memory, and reads those in host
    /// memory. Moments there that have changed since they were stored keep address 0.
    pub(super) fn open_moments<E>(
        &self,
        group: &mut Group<'a>,
        inputs: &'a dyn Inputs<E>,
    ) -> Result<()> {
        let mut on_host = vec![];
        for number in 0..group.members.len() {
            let member = group.members[number];
            if !member.has_moments() {
                continue;
            }
            let tensor = member.tensor;
            let moments = inputs.moments(tensor);
            if moments.len() != member.moments_count {
                return Err(missing_moments(tensor, member.chunk).into());
            }
            let range = self.values_of(&member);
            let mut at = member.scratch + member.input_room();
            let first = group.checks.len();
            for (which, moment) in moments.iter().enumerate() {
                let Some(memory) = moment.values.memory() else {
                    on_host.push((number, which, moment, None));
                    continue;
                };
                if memory.ordinal() != self.session.worker.device.ordinal() {
                    let what = format!(
                        "a moment is on device {}, but its weights are not",
                        memory.ordinal()
                    );
                    return Err(GpuError::Argument(what).into());
                }
                let Cover { parts, wanted } = moment.cover(range.0, range.1).of(tensor)?;
                if memory.is_fixed() {
                    let from = parts.first().map_or(0, |part| part.0.start);
                    group.members[number].moments[which] =
                        memory.address() + from + wanted.start as u64;
                    continue;
                }
                group.members[number].moments[which] = at + wanted.start as u64;
                for (bytes, crc) in parts {
                    let (from, len) = (memory.address() + bytes.start, bytes.end - bytes.start);
                    group.checks.push(Check { from, to: at, len, crc });
                    at += len;
                }
                at = at.next_multiple_of(ALIGN as u64);
            }
            if at > member.work() {
                return Err(exceeds_announced());
            }
            group.members[number].checks[1] = (first, group.checks.len() - first);
        }
        each(self.pool, &mut on_host, |(number, _, moment, read)| {
            let mut buffer = vec![];
            let range = self.values_of(&group.members[*number]);
            *read = Some(
                moment
                    .read(range, &mut buffer)
                    .map(|wanted| wanted.map(|wanted| Bytes::from(buffer).slice(wanted))),
            );
        });
        for (number, which, _, read) in on_host {
            let tensor = group.members[number].tensor;
            if let Some(values) = read.transpose().of(tensor)?.flatten() {
                group.moments.push((number, which, values));
            }
        }
        Ok(())
    }

    /// Index of a chunk's first value, and number of its values.
    fn values_of(&self, member: &Member) -> (u64, u64) {
        let (t, plan) = (self.chunks.tensor(member.tensor), self.chunks.plan(member.tensor));
        (member.chunk << plan.chunk_log2, member.bytes / t.dtype.value_width() as u64)
    }

    /// Adds the room that a chunk's moments take, and returns that of their copies; `None`: they do
    /// not have its values.
    pub(super) fn room_of_moments(
        &self,
        member: &Member,
        moments: &[Moment<'_>],
        room: &mut Room,
    ) -> Option<u64> {
        if moments.len() != member.moments_count {
            return None;
        }
        let (first, count) = self.values_of(member);
        let mut copies = 0;
        for moment in moments {
            let cover = moment.cover(first, count).ok()?;
            if moment.values.memory().is_none() {
                room.parents += (cover.wanted.len() as u64).next_multiple_of(ALIGN as u64);
                continue;
            }
            if moment.values.memory().is_some_and(|m| m.is_fixed()) {
                continue;
            }
            let pieces = cover.parts.iter().map(|(bytes, _)| bytes.end - bytes.start);
            copies += pieces.sum::<u64>().next_multiple_of(ALIGN as u64);
            room.meta += cover.parts.len() as u64 * PER_CHECK;
        }
        room.scratch += copies;
        Some(copies)
    }
}

impl<'a> Group<'a> {
    /// Opens the inputs of its chunks.
    pub(super) fn open_inputs<E: From<CudaError>>(
        &mut self,
        inputs: &'a dyn Inputs<E>,
    ) -> Result<(), E> {
        let all = 0..self.members.len();
        let with_input: Vec<_> = all.filter(|&i| self.members[i].scale > 0).collect();
        if with_input.is_empty() {
            return Ok(());
        }
        let name = |&i: &usize| (self.members[i].tensor, self.members[i].chunk);
        let names: Vec<_> = with_input.iter().map(name).collect();
        let opened = inputs.open(&names)?;
        if opened.len() != names.len() {
            let what = format!("got {} inputs for {} chunks", opened.len(), names.len());
            return Err(CudaError::from(GpuError::Argument(what)).into());
        }
        self.inputs.resize_with(self.members.len(), || None);
        for ((number, (tensor, chunk)), input) in with_input.into_iter().zip(names).zip(opened) {
            self.add_checks(number, &input)?;
            self.inputs[number] = Some(match input {
                Input::Late => {
                    let mut buffer = vec![];
                    Input::Host(Bytes::copy_from_slice(inputs.read(tensor, chunk, &mut buffer)?))
                }
                other => other,
            });
        }
        Ok(())
    }

    /// Adds checks that copy and sum the values of an input that may change.
    fn add_checks(&mut self, number: usize, input: &Input<'_>) -> Result<()> {
        let member = &mut self.members[number];
        let Input::Stored { values, parts } = input else { return Ok(()) };
        if member.route.is_none() {
            return Ok(());
        }
        let bytes = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.0));
        let most = member.input_bytes().div_ceil(abi::COPY_SPAN_BYTES);
        if bytes != Some(member.input_bytes()) || parts.len() as u64 > most {
            return Err(exceeds_announced());
        }
        if values.is_fixed() {
            return Ok(());
        }
        member.checks[0] = (self.checks.len(), parts.len());
        let mut at = 0;
        for &(len, crc) in parts {
            let (from, to) = (values.address() + at, member.scratch + at);
            self.checks.push(Check { from, to, len, crc });
            at += len;
        }
        Ok(())
    }
}

/// Bytes that one copy takes to a slot's memory on the device: where from, and where to.
struct Sent {
    pinned: Arc<Pinned>,
    from: usize,
    to: usize,
    len: usize,
}

impl Sent {
    /// Extends the copy by `next` if that follows with the same gap on both sides, which is padding.
    fn extend(&mut self, next: &Self) -> bool {
        let (end, gap) = (self.to + self.len, next.to - self.to);
        let follows = Arc::ptr_eq(&self.pinned, &next.pinned)
            && next.from.checked_sub(self.from) == Some(gap)
            && next.to - end < ALIGN;
        if follows {
            self.len = gap + next.len;
        }
        follows
    }
}

/// Data on its way to a slot's memory on the device.
struct Incoming<'a> {
    /// Bytes with their addresses, in ascending order.
    bytes: Vec<(u64, Bytes)>,
    levels: Levels<'a>,
    end: u64,
    most: u64,
}

impl<'a> Incoming<'a> {
    /// Adds values; returns their address.
    fn values(&mut self, values: Bytes) -> Result<u64> {
        let at = self.end;
        self.end = after(at, values.len())
            .filter(|&end| end <= self.most)
            .ok_or_else(exceeds_announced)?;
        self.bytes.push((at, values));
        Ok(at)
    }

    /// Adds frames; returns the address of the values that they become. `None`: the CPU must decode
    /// them, either because of `on_host` or because they do not fit.
    fn frames(
        &mut self,
        number: usize,
        member: &Member,
        frames: &[InputFrame<'a>],
        on_host: bool,
    ) -> Option<u64> {
        let mut end = self.end;
        let mut at = vec![];
        for f in frames {
            at.push(end);
            end = after(end, f.bytes.len()).unwrap_or(u64::MAX);
        }
        let target = Target {
            job: number,
            tensor: member.tensor,
            chunk: member.chunk,
            values: member.scratch,
            scratch: member.work(),
            bytes: member.bytes,
        };
        if on_host || end > self.most || !self.levels.add(&target, frames, &at) {
            return None;
        }
        self.end = end;
        self.bytes.extend(at.into_iter().zip(frames.iter().map(|f| f.bytes.clone())));
        Some(target.values)
    }
}

/// Address of the next bytes after `len` bytes at `at`.
fn after(at: u64, len: usize) -> Option<u64> {
    at.checked_add(len as u64)?.checked_next_multiple_of(ALIGN as u64)
}

fn exceeds_announced() -> CudaError {
    GpuError::Argument("more parent chunks than announced".into()).into()
}
