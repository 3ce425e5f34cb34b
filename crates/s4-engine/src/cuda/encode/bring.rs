//! The parent's values of a group of deltas, uploaded before the group.

use bytes::Bytes;
use s4_codec_gpu::abi::status;
use s4_codec_gpu::{DecodeBatch, GpuError};
use s4_format::limits::ALIGN;

use super::{Group, Job, Lane};
use crate::cuda::error::{CudaError, Of, Result};
use crate::cuda::parent::{
    self, LevelPlaces, Levels, ParentChunk, ParentFrame, ParentSize, ParentValues, Target,
};

/// What decodes a group's parents.
pub(super) struct Decoding {
    pub(super) batches: Vec<DecodeBatch>,
    pub(super) places: LevelPlaces,
}

impl Lane<'_> {
    /// Whether a parent of this size can be decoded in one slot; else the CPU does.
    pub(super) fn on_device(&self, size: ParentSize, bytes: u64) -> bool {
        let sizes = self.session.worker.sizes;
        let meta = u64::from(size.frames) * (parent::PER_FRAME + parent::PER_TENSOR);
        parent::stored(size, bytes) <= sizes.frames && meta <= sizes.meta / 2
    }

    /// Has what a group's parents are made of copied to the device.
    pub(super) fn bring<E: From<CudaError>>(
        &mut self,
        group: &mut Group,
        parents: &dyn ParentValues<E>,
    ) -> Result<Option<Decoding>, E> {
        let wanted: Vec<_> = (0..group.jobs.len())
            .filter(|&i| group.jobs[i].delta && group.jobs[i].route.is_some())
            .collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let name = |&i: &usize| (group.jobs[i].tensor, group.jobs[i].chunk);
        let chunks = parents.get(&wanted.iter().map(name).collect::<Vec<_>>())?;
        if chunks.len() != wanted.len() {
            let what = format!("{} parents for {} chunks", chunks.len(), wanted.len());
            return Err(CudaError::from(GpuError::Argument(what)).into());
        }
        let incoming = self.place(group, wanted.into_iter().zip(chunks))?;
        Ok(self.upload(group, incoming, |parts| parents.copy(parts))?)
    }

    /// Gives each parent its place.
    fn place<'p>(
        &mut self,
        group: &mut Group,
        parents: impl Iterator<Item = (usize, ParentChunk<'p>)>,
    ) -> Result<Incoming> {
        let start = self.session.frames(group.slot);
        let mut incoming = Incoming {
            bytes: vec![],
            levels: Levels::default(),
            end: start,
            most: start + self.session.worker.sizes.frames,
        };
        let ordinal = self.session.worker.device.ordinal();
        for (number, parent) in parents {
            let job = group.jobs[number];
            parent::check(&parent, ordinal, job.bytes)?;
            group.jobs[number].parent = match parent {
                ParentChunk::Device(memory) => memory.address(),
                ParentChunk::Host(values) => incoming.values(values)?,
                ParentChunk::Frames(frames) => {
                    let said = parent::size(&frames);
                    let here = !self.on_device(said, job.bytes);
                    match incoming.frames(number, &job, &frames, here) {
                        Some(address) => address,
                        None => incoming.values(self.decode_frames(&job, &frames)?.into())?,
                    }
                }
            };
        }
        Ok(incoming)
    }

    /// Copies what was placed to the device.
    fn upload(
        &mut self,
        group: &mut Group,
        incoming: Incoming,
        copy: impl FnOnce(Vec<(&mut [u8], Bytes)>),
    ) -> Result<Option<Decoding>> {
        let start = self.session.frames(group.slot);
        let worker = &self.session.worker;
        let slot = &worker.slots[group.slot];
        let len = (incoming.end - start) as usize;
        // SAFETY: all of the slot's frames were handed on: nothing else uses it.
        let mut rest = unsafe { slot.pinned.slice_mut(0, len) };
        let mut parts = Vec::with_capacity(incoming.bytes.len());
        let mut at = start;
        for (address, bytes) in incoming.bytes {
            // They lie in the order in which they were placed.
            let (to, behind) =
                rest.split_at_mut((address - at) as usize).1.split_at_mut(bytes.len());
            at = address + bytes.len() as u64;
            rest = behind;
            parts.push((to, bytes));
        }
        copy(parts);
        // SAFETY: as above; the slot's memory on the device is idle, too.
        unsafe { worker.up.copy_to_device(&slot.pinned, 0, len, start) }?;
        slot.arrived.record(&worker.up)?;
        worker.compute.wait(&slot.arrived)?;
        if group.jobs.iter().any(|j| j.route.is_none()) {
            // Their values go where the parents are now.
            worker.copy.wait(&slot.arrived)?;
        }
        self.describe_parents(group, incoming.levels)
    }

    /// Writes what decodes the parents' frames behind what encodes their chunks.
    fn describe_parents(&self, group: &mut Group, levels: Levels) -> Result<Option<Decoding>> {
        if levels.is_empty() {
            return Ok(None);
        }
        let worker = &self.session.worker;
        let places = levels.places(group.end() as usize);
        let answers = places.status + 4 * places.frames;
        if answers as u64 > worker.sizes.meta {
            return Err(more_than_said());
        }
        let (slot, meta) = (&worker.slots[group.slot], self.session.meta(group.slot));
        // SAFETY: all of the slot's frames were handed on: nothing else uses it.
        let to = unsafe { slot.pinned.slice_mut(self.session.pinned_meta(), answers) };
        let (batches, mut jobs) = levels.describe(&places, meta, to);
        // Statuses by job: those of one are wanted together.
        let mut order: Vec<_> = (0..jobs.len()).collect();
        order.sort_by_key(|&i| jobs[i]);
        jobs.sort_unstable();
        group.statuses = order.into_iter().map(|i| places.status + 4 * i).collect();
        for (i, &job) in jobs.iter().enumerate() {
            let (first, count) = &mut group.jobs[job].statuses;
            *first = if *count == 0 { i } else { *first };
            *count += 1;
        }
        Ok(Some(Decoding { batches, places }))
    }

    /// Decodes a chunk's parent on the CPU.
    fn decode_frames(&mut self, job: &Job, frames: &[ParentFrame<'_>]) -> Result<Vec<u8>> {
        let (cpu, bytes) = (&self.host.cpu, job.bytes as usize);
        parent::decode_frames(cpu, frames, job.chunk, bytes, &mut self.scratch).of(job.tensor)
    }

    /// The parent's values of a chunk, copied to the host.
    pub(super) fn parent_here<E: From<CudaError>>(
        &mut self,
        job: &Job,
        parents: &dyn ParentValues<E>,
    ) -> Result<Vec<u8>, E> {
        let found = parents.get(&[(job.tensor, job.chunk)])?.into_iter().next();
        let found = found.ok_or_else(|| {
            let what = format!("no parent for chunk {} of tensor {}", job.chunk, job.tensor);
            CudaError::from(GpuError::Argument(what))
        })?;
        parent::check(&found, self.session.worker.device.ordinal(), job.bytes)?;
        match found {
            ParentChunk::Host(values) => Ok(values.into()),
            ParentChunk::Device(memory) => {
                let mut values = vec![];
                self.copy_here(memory.address(), job.bytes as usize, &mut values)?;
                Ok(values)
            }
            ParentChunk::Frames(frames) => Ok(self.decode_frames(job, &frames)?),
        }
    }

    /// Whether the frames of a chunk's parent were decoded well, if there are any.
    pub(super) fn parent_is_sound(&self, group: &Group, job: &Job) -> bool {
        let (first, count) = job.statuses;
        let pinned = &self.session.worker.slots[group.slot].pinned;
        group.statuses[first..first + count].iter().all(|at| {
            // SAFETY: the copy that wrote it is done.
            let found = unsafe { pinned.slice(self.session.pinned_meta() + at, 4) };
            u32::from_le_bytes(found.try_into().unwrap_or_default()) == status::OK
        })
    }
}

/// What goes to a slot's memory on the device.
struct Incoming {
    /// Each with its address, in ascending order.
    bytes: Vec<(u64, Bytes)>,
    levels: Levels,
    end: u64,
    most: u64,
}

impl Incoming {
    /// Adds values; gives their address.
    fn values(&mut self, values: Bytes) -> Result<u64> {
        let at = self.end;
        self.end =
            after(at, values.len()).filter(|&end| end <= self.most).ok_or_else(more_than_said)?;
        self.bytes.push((at, values));
        Ok(at)
    }

    /// Adds frames; gives the address of the values that they become. `None`: the CPU is to decode
    /// them, for one because the caller wants that.
    fn frames(
        &mut self,
        number: usize,
        job: &Job,
        frames: &[ParentFrame<'_>],
        here: bool,
    ) -> Option<u64> {
        let mut end = self.end;
        let mut at = vec![];
        for f in frames {
            at.push(end);
            end = after(end, f.bytes.len()).unwrap_or(u64::MAX);
        }
        let target = Target {
            job: number,
            tensor: job.tensor,
            chunk: job.chunk,
            values: job.scratch,
            scratch: job.scratch + job.bytes.next_multiple_of(ALIGN as u64),
            bytes: job.bytes,
        };
        if here || end > self.most || !self.levels.add(&target, frames, &at) {
            return None;
        }
        self.end = end;
        self.bytes.extend(at.into_iter().zip(frames.iter().map(|f| f.bytes.clone())));
        Some(target.values)
    }
}

/// Where the next bytes start behind `len` bytes.
fn after(at: u64, len: usize) -> Option<u64> {
    at.checked_add(len as u64)?.checked_next_multiple_of(ALIGN as u64)
}

fn more_than_said() -> CudaError {
    GpuError::Argument("more parents of chunks than were announced".into()).into()
}
