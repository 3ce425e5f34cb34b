//! Copies of values of devices in page-locked memory of the host: what a save in the background encodes there while their
//! owner goes on, where the device has no room for copies.
//!
//! A copy takes as long as the link does, whatever is encoded how. The memory is kept for the next copies, within the budget
//! that encoded frames have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use s4_codec_gpu::{Cuda, Device, GpuError, Pinned, Result, Stream};

use super::pieces::Pieces;
use crate::DeviceMemory;

/// Copies start at multiples of this: that of the values of any dtype, and of a cache line.
const ALIGN: usize = 64;
/// What the memory is for, in errors.
const WHAT: &str = "page-locked memory for a copy of the tensors";

/// What copies are made with.
#[derive(Debug)]
pub(super) struct HostMemory {
    budget: Pieces,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Of each device one stream.
    streams: BTreeMap<u32, Arc<Stream>>,
    /// Of copies that are not needed any more.
    spare: Option<Pinned>,
}

/// Copies of values of devices, in the memory of the host. Dropped, their memory is kept for the next ones.
#[derive(Debug)]
pub struct HostCopies {
    home: Arc<HostMemory>,
    /// Absent once it was given back.
    pinned: Option<Pinned>,
    /// First byte and bytes of each.
    places: Vec<(usize, usize)>,
    process: u32,
}

impl HostMemory {
    pub(super) fn new(budget: Pieces) -> Arc<Self> {
        Arc::new(Self { budget, kept: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        // What it keeps is whole also where a thread ended early.
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Bytes of memory that no copy needs.
    pub(super) fn idle(&self) -> u64 {
        self.lock().spare.as_ref().map_or(0, |spare| spare.len() as u64)
    }

    /// Gives memory that no copy needs back to the system.
    pub(super) fn trim(&self) {
        let spare = self.lock().spare.take();
        self.drop_pinned(spare);
    }

    fn drop_pinned(&self, pinned: Option<Pinned>) {
        if let Some(pinned) = pinned {
            let bytes = pinned.len() as u64;
            drop(pinned);
            self.budget.release(bytes);
        }
    }

    /// Copies values, in the order of all that was queued on their streams before. The copies are made when this returns.
    ///
    /// # Errors
    /// `Budget` if there is no room for them, `OutOfMemory`, `Argument` for what is no memory of its device, `Driver`.
    pub(super) fn copy(self: &Arc<Self>, cuda: &Cuda, from: &[DeviceMemory]) -> Result<HostCopies> {
        let (mut places, mut end) = (Vec::with_capacity(from.len()), 0usize);
        for m in from {
            // It is memory of a device.
            let bytes = usize::try_from(m.bytes()).unwrap_or(usize::MAX);
            places.push((end, bytes));
            end = end.saturating_add(bytes).next_multiple_of(ALIGN);
        }
        let streams = self.streams(cuda, from)?;
        let device = streams.values().next().map(|stream| stream.device());
        let pinned = device.map(|device| self.take(device, end)).transpose()?;
        let process = std::process::id();
        let copies = HostCopies { home: Arc::clone(self), pinned, places, process };
        let done = copies.fill(from, &streams);
        // Also after an error: nothing may be in flight to memory that goes away.
        let arrived = streams.values().map(|s| s.synchronize()).collect::<Vec<_>>();
        done.and(arrived.into_iter().collect::<Result<()>>())?;
        Ok(copies)
    }

    /// A stream for each device, behind what was queued on the streams of its memory.
    fn streams(&self, cuda: &Cuda, from: &[DeviceMemory]) -> Result<BTreeMap<u32, Arc<Stream>>> {
        let ordinals: BTreeSet<_> = from.iter().map(DeviceMemory::ordinal).collect();
        let streams = ordinals.into_iter().map(|o| Ok((o, self.stream(cuda, o)?)));
        let out = streams.collect::<Result<BTreeMap<_, _>>>()?;
        for (ordinal, stream) in &out {
            let (device, mut seen) = (stream.device(), vec![]);
            let own = || from.iter().filter(|m| m.ordinal() == *ordinal);
            device.check_pointers(own().map(|m| (m.address(), m.bytes())))?;
            for m in own() {
                if !seen.contains(&m.stream()) {
                    seen.push(m.stream());
                    // SAFETY: `DeviceMemory` names streams of its device's primary context.
                    stream.wait_for(&unsafe { Stream::borrow(device, m.stream()) })?;
                }
            }
        }
        Ok(out)
    }

    /// The stream of a device. To open a device takes milliseconds.
    fn stream(&self, cuda: &Cuda, ordinal: u32) -> Result<Arc<Stream>> {
        let mut kept = self.lock();
        if let Some(stream) = kept.streams.get(&ordinal) {
            return Ok(Arc::clone(stream));
        }
        let stream = Arc::new(Stream::new(&cuda.device(ordinal)?)?);
        kept.streams.insert(ordinal, Arc::clone(&stream));
        Ok(stream)
    }

    /// Memory of at least so many bytes.
    fn take(&self, device: &Arc<Device>, bytes: usize) -> Result<Pinned> {
        let spare = self.lock().spare.take();
        match spare {
            Some(spare) if spare.len() >= bytes => return Ok(spare),
            // The old one goes before the new one comes.
            smaller => self.drop_pinned(smaller),
        }
        let bytes = bytes.max(1);
        if !self.budget.claim(bytes as u64) {
            let budget = self.budget.memory().budget;
            return Err(GpuError::Budget { what: WHAT, needed: bytes as u64, budget });
        }
        Pinned::new(device, bytes).inspect_err(|_| self.budget.release(bytes as u64))
    }
}

impl HostCopies {
    /// Queues the copies.
    fn fill(&self, from: &[DeviceMemory], streams: &BTreeMap<u32, Arc<Stream>>) -> Result<()> {
        let Some(pinned) = &self.pinned else { return Ok(()) };
        for (m, &(at, bytes)) in from.iter().zip(&self.places) {
            let Some(stream) = streams.get(&m.ordinal()).filter(|_| bytes > 0) else { continue };
            // SAFETY: the owner's memory, which stays until all copies are made; a place of its own in memory that
            // nobody else uses.
            unsafe { stream.copy_to_host(m.address(), pinned, at, bytes)? };
        }
        Ok(())
    }

    /// The copies, in the order of what was copied.
    pub fn values(&self) -> impl Iterator<Item = &[u8]> {
        self.places.iter().map(|&(at, bytes)| match &self.pinned {
            // SAFETY: nothing writes there once the copies are made.
            Some(pinned) => unsafe { pinned.slice(at, bytes) },
            None => &[],
        })
    }

    /// Bytes of page-locked memory that they take.
    pub fn bytes(&self) -> u64 {
        self.pinned.as_ref().map_or(0, |pinned| pinned.len() as u64)
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        let pinned = self.pinned.take();
        if std::process::id() != self.process {
            // A fork's copy: the driver knows nothing of it, and who held a lock is not here.
            std::mem::forget(pinned);
            return;
        }
        let within = self.home.budget.memory();
        let mut gone = pinned;
        if within.taken <= within.budget {
            let mut kept = self.home.lock();
            let larger = |new: &Pinned| kept.spare.as_ref().is_none_or(|s| s.len() < new.len());
            if gone.as_ref().is_some_and(larger) {
                std::mem::swap(&mut kept.spare, &mut gone);
            }
        }
        self.home.drop_pinned(gone);
    }
}
