//! Copies of device values in page-locked host memory, which a background save encodes while their
//! owner goes on, if the device has no room for copies.
//!
//! A copy takes as long as the link needs, however the values are encoded. The memory is kept for
//! the next copies, within the budget of encoded frames.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use s4_codec_gpu::{Cuda, Pinned, Result, Stream};

use super::pieces::Pieces;
use crate::DeviceMemory;
use crate::threads::lock;

/// Copies start at multiples of this, which suits the values of any dtype and is a cache line.
const ALIGN: usize = 64;
/// The streams and memory that copies are made with.
#[derive(Debug)]
pub(super) struct HostMemory {
    budget: Pieces,
    /// One for each device.
    streams: Mutex<BTreeMap<u32, Arc<Stream>>>,
}

/// Copies of device values in host memory. When dropped, their memory is kept for the next ones.
#[derive(Debug)]
pub struct HostCopies {
    home: Arc<HostMemory>,
    /// `None` once it was given back.
    pinned: Option<Pinned>,
    /// First byte and number of bytes of each.
    places: Vec<(usize, usize)>,
    process: u32,
}

impl HostMemory {
    pub(super) fn new(budget: Pieces) -> Arc<Self> {
        Arc::new(Self { budget, streams: Mutex::default() })
    }

    /// Copies values, after all work queued on their streams before. The copies are complete when this returns.
    ///
    /// # Errors
    /// `Budget` if there is no room for them, `OutOfMemory`, `Argument` for pointers that are not
    /// memory of their device, `Driver`.
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
        let pinned = device.map(|device| self.budget.take_for_copies(device, end)).transpose()?;
        let process = std::process::id();
        let copies = HostCopies { home: Arc::clone(self), pinned, places, process };
        let done = copies.fill(from, &streams);
        // Also after an error: nothing may be in flight to memory that goes away.
        let arrived = streams.values().map(|s| s.synchronize()).collect::<Vec<_>>();
        done.and(arrived.into_iter().collect::<Result<()>>())?;
        Ok(copies)
    }

    /// For each device, a stream that waits for what was queued on the streams of its memory.
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

    /// The stream of a device, which is kept, and the device with it.
    fn stream(&self, cuda: &Cuda, ordinal: u32) -> Result<Arc<Stream>> {
        let known = lock(&self.streams).get(&ordinal).map(Arc::clone);
        if let Some(stream) = known {
            return Ok(stream);
        }
        let stream = Arc::new(Stream::new(&cuda.device(ordinal)?)?);
        Ok(Arc::clone(lock(&self.streams).entry(ordinal).or_insert(stream)))
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

    /// The copies, in the order of their sources.
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
            // In a forked process, the driver does not know this memory, and the thread that held a
            // lock does not exist.
            std::mem::forget(pinned);
            return;
        }
        if let Some(pinned) = pinned {
            self.home.budget.give_back(pinned);
        }
    }
}
