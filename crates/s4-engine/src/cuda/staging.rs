//! Copies of values in device memory, which a background save encodes while their owner goes on.
//!
//! A copy is queued on the owner's own stream, between what was queued there before and what comes later:
//! no thread waits for it. The memory is the device's, not the framework's, and goes back to the device
//! as soon as it is freed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use s4_codec_gpu::abi::{COPY_SPAN_BYTES, CopySpan};
use s4_codec_gpu::{Cuda, Device, DeviceMapping, Event, GpuError, Pinned, Result, Stream};

use crate::DeviceMemory;
use crate::threads::lock;

const SPAN: usize = size_of::<CopySpan>();
/// Copies start at multiples of this.
pub(super) const ALIGN: u64 = 256;
/// Devices map memory in pages of this size.
const PAGE: u64 = 2 << 20;
/// The driver copies tensors of at least this size, one by one; a kernel copies all others
/// together.
pub(super) const LARGE: u64 = 16 << 20;
/// The purpose of the memory, in errors.
const WHAT: &str = "a copy of the tensors on the device";

/// Bytes that copies take beyond what each needs: all together are rounded up to whole pages.
pub(super) const ROUNDING: u64 = PAGE + ALIGN;

/// The stagers of devices, each made when it is first used.
#[derive(Debug, Default)]
pub(super) struct Stagers(Mutex<BTreeMap<u32, Arc<Stager>>>);

impl Stagers {
    pub(super) fn get(&self, cuda: &Cuda, ordinal: u32) -> Result<Arc<Stager>> {
        let known = lock(&self.0).get(&ordinal).map(Arc::clone);
        if let Some(stager) = known {
            return Ok(stager);
        }
        let stager = Stager::new(cuda, ordinal)?;
        Ok(Arc::clone(lock(&self.0).entry(ordinal).or_insert(stager)))
    }
}

/// Copies device memory within one device.
#[derive(Debug)]
pub struct Stager {
    device: Arc<Device>,
    /// Orders the taking and freeing of memory, and the reading of copies.
    stream: Arc<Stream>,
    /// Memory for descriptors, from the last copy that is done, for the next one.
    spare: Mutex<Option<Pinned>>,
}

/// Copies of device memory, which are freed when this is dropped.
#[derive(Debug)]
pub struct StagedCopies {
    stager: Arc<Stager>,
    /// The memory that holds them; `None` if they have no bytes. It goes back to the device once
    /// the stager's stream is done.
    memory: Option<DeviceMapping>,
    /// The copies, in the order of their sources.
    copies: Vec<DeviceMemory>,
    copied: Event,
    /// Descriptors that the device reads until the copies are done.
    spans: Option<Pinned>,
}

impl Stager {
    /// A stager on a device.
    ///
    /// # Errors
    /// `Argument` if there is no such device; `Driver`.
    pub fn new(cuda: &Cuda, ordinal: u32) -> Result<Arc<Self>> {
        let device = cuda.device(ordinal)?;
        let stream = Arc::new(Stream::new(&device)?);
        Ok(Arc::new(Self { device, stream, spare: Mutex::default() }))
    }

    /// Free and total memory of the device, in bytes, as the driver counts them for all processes.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.device.memory()
    }

    /// Queues copies of memory of this device that leave at least `leave` bytes of the device's
    /// memory free. They run after everything queued on the streams of `from` before, and before
    /// everything queued there later; this thread does not wait for them.
    ///
    /// The originals may be freed once [`StagedCopies::wait`] has returned, or earlier in the order of those streams.
    /// The copies may be used immediately: their stream, the stager's own, waits for them.
    ///
    /// # Errors
    /// `Budget` if there is no room for them, `OutOfMemory` if it was taken meanwhile, `Argument`
    /// for pointers that are not memory of the device, `Driver`. Nothing stays allocated then.
    pub fn copy(self: &Arc<Self>, from: &[DeviceMemory], leave: u64) -> Result<StagedCopies> {
        self.check(from)?;
        let plan = Plan::of(from);
        let (free, _) = self.device.memory()?;
        if plan.bytes.saturating_add(leave) > free {
            let (needed, budget) = (plan.bytes, free.saturating_sub(leave));
            return Err(GpuError::Budget { what: WHAT, needed, budget });
        }
        let copied = Event::new(&self.device)?;
        let spans = if plan.spans.is_empty() { None } else { Some(self.descriptors(&plan)?) };
        let memory = match plan.bytes {
            0 => None,
            bytes => Some(DeviceMapping::new(&self.stream, bytes, WHAT)?),
        };
        let start = memory.as_ref().map_or(0, DeviceMapping::address);
        let copies = from.iter().zip(&plan.places).map(|(m, at)| {
            // SAFETY: a part of the memory, which the result owns, in the order of the stager's stream: nobody else has
            // its address, and nothing is written there once the copies are made.
            unsafe {
                let stream = self.stream.address();
                DeviceMemory::new(m.ordinal(), start + at, m.bytes(), stream).fixed()
            }
        });
        let copies = copies.collect();
        let copies = StagedCopies { stager: Arc::clone(self), memory, copies, copied, spans };
        self.queue(from, &plan, &copies)?;
        Ok(copies)
    }

    /// A stream that waits for everything queued on `stream` so far: for memory that is read later,
    /// while its owner goes on queueing work that does not change it.
    ///
    /// # Safety
    /// `stream` is one of the device's primary context.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn after(&self, stream: u64) -> Result<u64> {
        // SAFETY: the caller's promise.
        let theirs = unsafe { Stream::borrow(&self.device, stream) };
        self.stream.wait_for(&theirs)?;
        Ok(self.stream.address())
    }

    fn check(&self, memory: &[DeviceMemory]) -> Result<()> {
        let own = self.device.ordinal();
        if let Some(m) = memory.iter().find(|m| m.ordinal() != own) {
            let is = m.ordinal();
            return Err(GpuError::Argument(format!(
                "memory is on CUDA device {is}, expected device {own}"
            )));
        }
        self.device.check_pointers(memory.iter().map(|m| (m.address(), m.bytes())))
    }

    /// Pinned memory for the kernel's descriptors.
    fn descriptors(&self, plan: &Plan) -> Result<Pinned> {
        let bytes = plan.spans.len() * SPAN;
        let spare = lock(&self.spare).take().filter(|p| p.len() >= bytes);
        spare.map_or_else(|| Pinned::new(&self.device, bytes.next_power_of_two()), Ok)
    }

    /// Queues the copies, each on the stream that its source is used on.
    fn queue(&self, from: &[DeviceMemory], plan: &Plan, copies: &StagedCopies) -> Result<()> {
        let mut handles: Vec<u64> = from.iter().map(DeviceMemory::stream).collect();
        handles.dedup();
        handles.sort_unstable();
        handles.dedup();
        // SAFETY: `DeviceMemory` names streams of its device's primary context.
        let borrow = |&h: &u64| unsafe { Stream::borrow(&self.device, h) };
        let theirs: Vec<_> = handles.iter().map(borrow).collect();
        let Some((first, others)) = theirs.split_first() else { return Ok(()) };
        first.wait_for(&self.stream)?;
        others.iter().try_for_each(|s| first.wait_for(s))?;
        let queued = self.queue_on(first, from, plan, copies);
        // Also after an error: memory that copies in flight write to is freed in the order of the stager's stream.
        let recorded = copies.copied.record(first).and_then(|()| self.stream.wait(&copies.copied));
        if recorded.is_err() {
            let _ = first.synchronize();
        }
        others.iter().try_for_each(|s| s.wait(&copies.copied))?;
        queued.and(recorded)
    }

    fn queue_on(
        &self,
        stream: &Stream,
        from: &[DeviceMemory],
        plan: &Plan,
        copies: &StagedCopies,
    ) -> Result<()> {
        for (m, to) in from.iter().zip(&copies.copies).filter(|(m, _)| m.bytes() >= LARGE) {
            // SAFETY: the owner's memory, and a place of its own in the copies'.
            unsafe { stream.copy_within_device(m.address(), to.address(), m.bytes())? };
        }
        let Some(pinned) = &copies.spans else { return Ok(()) };
        // SAFETY: nothing is in flight on it: it is new, or the copies that it was for are done.
        let list = unsafe { pinned.slice_mut(0, plan.spans.len() * SPAN) };
        for (out, &(tensor, first, len)) in list.chunks_exact_mut(SPAN).zip(&plan.spans) {
            let (from, to) =
                (from[tensor].address() + first, copies.copies[tensor].address() + first);
            out.copy_from_slice(bytemuck::bytes_of(&CopySpan { from, to, len }));
        }
        let start = copies.memory.as_ref().map_or(0, DeviceMapping::address);
        let at = start + plan.descriptors;
        let count = u32::try_from(plan.spans.len()).unwrap_or(u32::MAX);
        // SAFETY: the descriptors have room of their own after the copies; the spans are parts of the
        // owner's memory and of places of their own.
        unsafe {
            stream.copy_to_device(pinned, 0, plan.spans.len() * SPAN, at)?;
            stream.copy_spans(at, count)
        }
    }
}

impl StagedCopies {
    /// The copies, in the order of their sources.
    pub fn memory(&self) -> &[DeviceMemory] {
        &self.copies
    }

    /// The address of the first copy. The others follow, in order, each at a multiple of [`ALIGN`].
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMapping::address)
    }

    /// Bytes of device memory that they take.
    pub fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMapping::bytes)
    }

    /// Blocks the calling thread until the copies are made: from then on any stream may change the
    /// originals.
    ///
    /// # Errors
    /// `Driver`, also for work that was queued before them and failed.
    pub fn wait(&self) -> Result<()> {
        self.copied.synchronize()
    }

    /// Makes work queued on a stream from now on wait for the copies, so that it may change the originals.
    ///
    /// # Safety
    /// `stream` is one of the device's primary context.
    ///
    /// # Errors
    /// `Driver`.
    pub unsafe fn hold(&self, stream: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        let theirs = unsafe { Stream::borrow(&self.stager.device, stream) };
        theirs.wait(&self.copied)
    }
}

impl Drop for StagedCopies {
    fn drop(&mut self) {
        // The stager's stream, in whose order the memory is freed, comes after the copies.
        if self.copied.synchronize().is_ok() {
            let mut spare = lock(&self.stager.spare);
            let larger = |new: &Pinned| spare.as_ref().is_none_or(|old| old.len() < new.len());
            if let Some(spans) = self.spans.take().filter(larger) {
                *spare = Some(spans);
            }
        }
    }
}

/// The most bytes of a device that a copy of `bytes` bytes needs, besides [`ROUNDING`] for all.
pub(super) fn needed(bytes: u64) -> u64 {
    let spans = if bytes < LARGE { bytes.div_ceil(COPY_SPAN_BYTES) } else { 0 };
    bytes.next_multiple_of(ALIGN) + spans * SPAN as u64
}

/// The place of each copy after the first one, and the bytes that all take.
#[cfg(test)]
pub(super) fn places(from: &[DeviceMemory]) -> (Vec<u64>, u64) {
    let plan = Plan::of(from);
    (plan.places, plan.bytes)
}

/// The places of the copies.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// The start of each tensor's copy.
    places: Vec<u64>,
    /// The spans that the kernel copies: tensor, first byte, bytes.
    spans: Vec<(usize, u64, u64)>,
    /// Start of the kernel's descriptors.
    descriptors: u64,
    /// Bytes that everything takes.
    bytes: u64,
}

impl Plan {
    fn of(from: &[DeviceMemory]) -> Self {
        let mut plan = Self::default();
        for (tensor, m) in from.iter().enumerate() {
            let place = plan.place(m.bytes());
            plan.places.push(place);
            let mut first = 0;
            while m.bytes() < LARGE && first < m.bytes() {
                let len = COPY_SPAN_BYTES.min(m.bytes() - first);
                plan.spans.push((tensor, first, len));
                first += len;
            }
        }
        plan.descriptors = plan.place((plan.spans.len() * SPAN) as u64);
        plan.bytes = plan.bytes.next_multiple_of(PAGE);
        plan
    }

    /// Room for `bytes` bytes after the parts placed so far.
    fn place(&mut self, bytes: u64) -> u64 {
        let at = self.bytes;
        self.bytes = at.saturating_add(bytes).next_multiple_of(ALIGN);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(sizes: &[u64]) -> Vec<DeviceMemory> {
        // SAFETY: nobody uses it.
        sizes.iter().map(|&bytes| unsafe { DeviceMemory::new(0, 1 << 40, bytes, 0) }).collect()
    }

    #[test]
    fn every_tensor_and_the_descriptors_have_room_of_their_own() {
        let sizes = [0, 1, 256, 257, LARGE - 1, LARGE, 3 * LARGE, 5, 0, 7];
        let plan = Plan::of(&memory(&sizes));
        let mut taken: Vec<_> = plan.places.iter().copied().zip(sizes).collect();
        taken.push((plan.descriptors, (plan.spans.len() * SPAN) as u64));
        taken.retain(|t| t.1 > 0);
        taken.sort_unstable();
        for pair in taken.windows(2) {
            let ((first, len), (second, _)) = (pair[0], pair[1]);
            assert!(first % ALIGN == 0 && first + len <= second, "{pair:?}");
        }
        let (first, len) = taken[taken.len() - 1];
        assert_eq!(plan.bytes, (first + len).next_multiple_of(PAGE));
        for (tensor, &size) in sizes.iter().enumerate() {
            let own = plan.spans.iter().filter(|s| s.0 == tensor);
            let copied: u64 = own.clone().map(|s| s.2).sum();
            assert_eq!(copied, if size < LARGE { size } else { 0 });
            assert!(own.clone().all(|s| s.2 <= COPY_SPAN_BYTES && s.1 % COPY_SPAN_BYTES == 0));
        }
    }

    #[test]
    fn nothing_takes_no_memory() {
        assert_eq!(Plan::of(&[]), Plan::default());
        let empty = Plan::of(&memory(&[0, 0]));
        assert_eq!((empty.bytes, empty.spans.len()), (0, 0));
    }
}
