//! The engine's resources on one device, and the division of the memory that it may use.

use std::sync::{Arc, MutexGuard};

use s4_codec_gpu::{Device, DeviceBuffer, Event, GpuError, Pinned, Pool, Result, Stream};
use s4_format::limits::MAX_CHUNK_BYTES;

use crate::DeviceMemory;

/// Groups of chunks in flight at the same time: one whose parents are copied to the device, one
/// being encoded, one being copied to the host, and one being handed on.
pub(super) const SLOTS: usize = 4;
/// Slots that batches of fetched values take turns in: one is copied while the previous one is handed on.
pub(super) const PLAN_SLOTS: usize = 2;
/// The most bytes of values in one group: two chunks for each multiprocessor of a large device. The
/// kernels take nearly as long for fewer. (The default budgets allow 80 MiB.)
const LARGEST_GROUP: u64 = 128 << 20;
/// Larger budgets are used in whole pieces of this size, which a device maps quickly.
const PIECE: u64 = 32 << 20;
/// The least device memory that the engine works in.
const LEAST_DEVICE: u64 = 16 << 20;
/// The most that a session takes in one piece: no work gets faster with more.
const WHOLE: u64 = 3 << 29;
/// A session takes up to half of the free device memory, but no more than this or an eighth of it.
const POLITE: u64 = 256 << 20;
/// Work on few bytes takes at most this many times as much scratch memory, or `POLITE` if that is more.
const SCRATCH_SHARE: u64 = 4;
/// Enough for encoding without a parent and for decoding, where the link is slower than the kernels. More memory takes
/// longer to map, and no copy overlaps the first and the last group, which would be larger. But kernels are faster with
/// larger groups, and those that encode share the device with a training loop. Deltas wait for their kernels.
pub(super) const ENOUGH_TO_ENCODE: u64 = 512 << 20;
pub(super) const ENOUGH_TO_DECODE: u64 = 320 << 20;
/// A slot holds at least the largest frame.
pub(super) const SMALLEST_SLOT: u64 = (MAX_CHUNK_BYTES as u64).next_multiple_of(64 << 10);

/// The task of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    /// Encoding and decoding.
    Code,
    /// Planning, which fetches values and runs no other kernels.
    Plan,
}

/// The work that a session's memory is divided for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Encode,
    Decode,
    Plan,
}

impl Work {
    fn slots(self) -> u64 {
        match self {
            Self::Encode | Self::Decode => SLOTS as u64,
            Self::Plan => PLAN_SLOTS as u64,
        }
    }

    /// Bytes of the kernels' scratch for each byte of a slot's frames: kernels get no faster with more.
    fn scratch(self) -> u64 {
        match self {
            Self::Encode => 4,
            Self::Decode => 6,
            Self::Plan => 0,
        }
    }
}

/// The division of memory; in bytes, all multiples of 256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    work: Work,
    /// Frames of a slot on the device.
    pub(super) frames: u64,
    /// Frames of a slot in its pinned memory, at most `frames`; the rest go elsewhere on the host.
    pub(super) host_frames: u64,
    /// Descriptors and results of a slot, on both sides.
    pub(super) meta: u64,
    /// The kernels' scratch, which the slots share: their kernels run one after the other.
    pub(super) scratch: u64,
}

impl Sizes {
    /// Divides `device` bytes of device memory and `pinned` bytes of pinned memory.
    pub(super) fn cut(work: Work, device: u64, pinned: u64) -> Result<Self> {
        if device < LEAST_DEVICE {
            return Err(GpuError::Budget { what: SCRATCH, needed: LEAST_DEVICE, budget: device });
        }
        let device = if device < PIECE { LEAST_DEVICE } else { device / PIECE * PIECE };
        let slots = work.slots();
        let least = slots * (SMALLEST_SLOT + SMALLEST_SLOT / 16);
        if pinned < least {
            let what = "page-locked host memory";
            return Err(GpuError::Budget { what, needed: least, budget: pinned });
        }
        let host = pinned / slots;
        // Descriptors are in pinned memory, too.
        let descriptors = (host - SMALLEST_SLOT).min(host / 4);
        let most = match work {
            Work::Plan => host,
            _ => (LARGEST_GROUP + LARGEST_GROUP / 16).min(descriptors.saturating_mul(17)),
        };
        // One for each slot, the others for the kernels' scratch.
        let share =
            (device / (slots + work.scratch())).min(most).max(SMALLEST_SLOT + SMALLEST_SLOT / 16);
        let meta = (share / 17).min(descriptors) & !255;
        let frames = (share - meta).min(LARGEST_GROUP) & !255;
        let host_frames = (host - meta).min(frames) & !255;
        let scratch = ((device - slots * (frames + meta)) & !255).min(work.scratch() * frames);
        Ok(Self { work, frames, host_frames, meta, scratch })
    }

    fn device(&self) -> u64 {
        self.work.slots() * (self.frames + self.meta) + self.scratch
    }

    /// The same with at most half of the device memory; `None` if less is not enough.
    fn halved(&self, pinned: u64) -> Option<Self> {
        if self.device() <= LEAST_DEVICE {
            return None;
        }
        let half = self.device().next_multiple_of(PIECE) / 2;
        Self::cut(self.work, half.max(LEAST_DEVICE), pinned).ok()
    }
}

/// One place of the ring.
pub(super) struct Slot {
    /// Frames, then descriptors and results.
    pub(super) pinned: Arc<Pinned>,
    /// The kernels are done, and their answer has arrived.
    pub(super) worked: Event,
    /// The copies are done.
    pub(super) copied: Event,
    /// The data that the kernels need besides the caller's values has arrived.
    pub(super) arrived: Event,
}

/// A device with the streams and the pinned ring that the engine keeps.
pub(super) struct Worker {
    pub(super) device: Arc<Device>,
    pub(super) compute: Arc<Stream>,
    /// For kernels that may run in parallel with those of `compute`, which waits for them.
    pub(super) beside: [Stream; 2],
    pub(super) copy: Arc<Stream>,
    /// Copies to the device while `copy` copies from it: the link carries both directions at the
    /// same time.
    pub(super) up: Arc<Stream>,
    pub(super) pool: Arc<Pool>,
    /// The budgets of device memory and of pinned memory.
    budgets: (u64, u64),
    pub(super) slots: Vec<Slot>,
}

impl Worker {
    pub(super) fn new(task: Task, device: Arc<Device>, budgets: (u64, u64)) -> Result<Self> {
        let (scratch, pinned) = budgets;
        // All that a worker does divides its pinned memory into the same slots.
        let work = if task == Task::Plan { Work::Plan } else { Work::Encode };
        let sizes = Sizes::cut(work, scratch, pinned)?;
        let bytes = usize::try_from(sizes.host_frames + sizes.meta).unwrap_or(usize::MAX);
        let slot = |_| {
            Ok(Slot {
                pinned: Arc::new(Pinned::new(&device, bytes)?),
                worked: Event::new(&device)?,
                copied: Event::new(&device)?,
                arrived: Event::new(&device)?,
            })
        };
        Ok(Self {
            slots: (0..work.slots()).map(slot).collect::<Result<_>>()?,
            compute: Arc::new(Stream::new(&device)?),
            beside: [Stream::new(&device)?, Stream::new(&device)?],
            copy: Arc::new(Stream::new(&device)?),
            up: Arc::new(Stream::new(&device)?),
            pool: Pool::new(&device, scratch),
            budgets,
            device,
        })
    }

    /// The most device memory to take now: a framework may ask for some meanwhile.
    fn most(&self) -> Result<u64> {
        let (free, _) = self.device.memory()?;
        Ok((free / 8).max(POLITE.min(free / 2)))
    }

    /// The division of at most `most` bytes of device memory, or of the least that will do.
    fn sizes(&self, work: Work, most: u64) -> Result<Sizes> {
        let (scratch, pinned) = self.budgets;
        Sizes::cut(work, scratch.min(most.max(LEAST_DEVICE)), pinned)
    }

    /// Takes device memory for work on `work` bytes, at most `enough`, and less than the budget if there is no more,
    /// down to the least that the engine can work in.
    fn arena(
        &self,
        work: Work,
        (bytes, enough): (u64, u64),
        what: &'static str,
    ) -> Result<(Sizes, DeviceBuffer)> {
        // A small job gets no faster with more, and mapping takes time.
        let useful = bytes.saturating_mul(SCRATCH_SHARE).max(POLITE).min(enough);
        let mut sizes = self.sizes(work, self.most()?.min(useful))?;
        loop {
            let less = sizes.halved(self.budgets.1);
            match (self.pool.alloc(&self.compute, sizes.device(), what), less) {
                (Ok(arena), _) => return Ok((sizes, arena)),
                (Err(GpuError::OutOfMemory { .. }), Some(less)) => sizes = less,
                (Err(error), _) => return Err(error),
            }
        }
    }
}

const SCRATCH: &str = "scratch memory on the device";

/// A worker in use: it has its device memory, and returns it when dropped.
pub(super) struct Session<'a> {
    pub(super) worker: MutexGuard<'a, Worker>,
    /// The division of its device memory.
    pub(super) sizes: Sizes,
    arena: Option<DeviceBuffer>,
    start: u64,
}

impl<'a> Session<'a> {
    /// Takes the device memory, at most `enough` bytes, and makes all work wait for the streams of `memory`, which must
    /// all be on this device. If little is free, it takes less than the budget.
    ///
    /// # Errors
    /// `OutOfMemory` if there is not even enough for one chunk; `Argument`, `Driver`.
    pub(super) fn new(
        worker: MutexGuard<'a, Worker>,
        memory: impl Iterator<Item = DeviceMemory>,
        work: Work,
        enough: u64,
    ) -> Result<Self> {
        let memory = memory.collect::<Vec<_>>();
        let bytes = memory.iter().map(DeviceMemory::bytes).fold(0, u64::saturating_add);
        let (sizes, arena) = worker.arena(work, (bytes, enough), SCRATCH)?;
        Self::with(worker, sizes, arena, &memory)
    }

    /// As [`Session::new`], with all the device memory that the budget and the free memory allow, in one piece.
    pub(super) fn whole(
        worker: MutexGuard<'a, Worker>,
        memory: impl Iterator<Item = DeviceMemory>,
    ) -> Result<Self> {
        let most = worker.most()?;
        let sizes = worker.sizes(Work::Encode, most)?;
        let bytes = worker.pool.budget().min(WHOLE).min(most) / PIECE * PIECE;
        let arena = worker.pool.alloc(&worker.compute, bytes.max(sizes.device()), SCRATCH)?;
        Self::with(worker, sizes, arena, &memory.collect::<Vec<_>>())
    }

    fn with(
        worker: MutexGuard<'a, Worker>,
        sizes: Sizes,
        arena: DeviceBuffer,
        memory: &[DeviceMemory],
    ) -> Result<Self> {
        let session = Self { start: arena.address(), sizes, arena: Some(arena), worker };
        let Worker { device, compute, copy, .. } = &*session.worker;
        device.check_pointers(memory.iter().map(|m| (m.address(), m.bytes())))?;
        let mut seen = vec![];
        for m in memory {
            if !seen.contains(&m.stream()) {
                seen.push(m.stream());
                // SAFETY: `DeviceMemory` names streams of its device's primary context.
                let theirs = unsafe { Stream::borrow(device, m.stream()) };
                compute.wait_for(&theirs)?;
                copy.wait_for(&theirs)?;
            }
        }
        Ok(session)
    }

    /// Address of the device memory, a multiple of 256.
    pub(super) fn address(&self) -> u64 {
        self.start
    }

    /// Bytes of the device memory.
    pub(super) fn bytes(&self) -> u64 {
        self.arena.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    /// Address of a slot's frames.
    pub(super) fn frames(&self, slot: usize) -> u64 {
        let Sizes { frames, meta, .. } = self.sizes;
        self.start + slot as u64 * (frames + meta)
    }

    /// Address of a slot's descriptors and results.
    pub(super) fn meta(&self, slot: usize) -> u64 {
        self.frames(slot) + self.sizes.frames
    }

    /// Address of the kernels' scratch.
    pub(super) fn scratch(&self) -> u64 {
        self.frames(self.worker.slots.len())
    }

    /// Offset of a slot's descriptors and results in its pinned memory.
    pub(super) fn pinned_meta(&self) -> usize {
        // A part of what was allocated.
        self.sizes.host_frames as usize
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let Worker { compute, beside, copy, up, .. } = &*self.worker;
        // No work may be in flight on memory that is about to be freed. An error was reported
        // before, or the device was lost.
        for stream in [&**compute, &beside[0], &beside[1], &**copy, &**up] {
            let _ = stream.synchronize();
        }
        self.arena = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_cut_within_both_budgets() {
        for device in [16 << 20, 32 << 20, 100 << 20, 256 << 20, 4 << 30, u64::MAX] {
            for pinned in [9 << 20, 96 << 20, 1 << 30, u64::MAX] {
                let s = Sizes::cut(Work::Encode, device, pinned).unwrap();
                let taken = s.device();
                let taken = if taken < PIECE { taken } else { taken.next_multiple_of(PIECE) };
                assert!(taken <= device, "{device} {s:?}");
                assert!(SLOTS as u64 * (s.host_frames + s.meta) <= pinned, "{pinned} {s:?}");
                assert!(s.host_frames >= MAX_CHUNK_BYTES as u64, "{s:?}");
                assert!(s.frames >= s.host_frames && s.scratch >= 3 * s.frames, "{s:?}");
                assert!(s.frames <= LARGEST_GROUP && s.meta >= s.frames / 32);
            }
        }
        // The slots' pinned memory is the same for all that a worker does.
        for device in [16 << 20, 100 << 20, 768 << 20] {
            let [one, other] =
                [Work::Encode, Work::Decode].map(|w| Sizes::cut(w, device, 80 << 20).unwrap());
            let slot = |s: Sizes| s.host_frames + s.meta;
            assert!(slot(other) <= slot(one), "{one:?} {other:?}");
            assert!(other.scratch >= one.scratch && other.device() <= device);
        }
        let planning = Sizes::cut(Work::Plan, 32 << 20, 24 << 20).unwrap();
        assert!(planning.device() <= 32 << 20 && planning.scratch == 0);
        assert!(planning.frames >= 11 << 20 && 2 * (planning.frames + planning.meta) <= 24 << 20);
        assert_eq!(planning.frames, planning.host_frames);
        // With ample device memory all multiprocessors are kept busy, without more pinned memory.
        let large = Sizes::cut(Work::Encode, 544 << 20, 72 << 20).unwrap();
        assert!(large.frames >= 60 << 20 && large.host_frames >= 14 << 20, "{large:?}");
        let small = Sizes::cut(Work::Encode, 8 << 20, 96 << 20).unwrap_err();
        assert!(matches!(small, GpuError::Budget { budget: 8_388_608, .. }), "{small}");
        let small = Sizes::cut(Work::Encode, 256 << 20, 1 << 20);
        assert!(matches!(small, Err(GpuError::Budget { .. })));
    }

    #[test]
    fn memory_is_halved_until_there_is_just_enough() {
        for (device, pinned) in [(256 << 20, 96 << 20), (1 << 30, 9 << 20), (100 << 20, 96 << 20)] {
            let mut sizes = Sizes::cut(Work::Encode, device, pinned).unwrap();
            let slot = sizes.host_frames + sizes.meta;
            let mut steps = 0;
            while let Some(less) = sizes.halved(pinned) {
                assert!(less.device() < sizes.device(), "{less:?} of {sizes:?}");
                // The slots of the pinned memory stay as they are.
                assert!(less.host_frames + less.meta <= slot, "{less:?}");
                (sizes, steps) = (less, steps + 1);
            }
            assert!(sizes.device() <= LEAST_DEVICE && steps > 0, "{sizes:?}");
        }
    }
}
