//! Copies of values in device memory: what a save in the background encodes while their owner goes on.
//!
//! A copy is queued on the owner's own stream, between what was queued there before and what comes later:
//! no thread waits for it. The memory is the device's, not the framework's, and goes back to the device
//! as soon as it is freed.

use std::sync::{Arc, Mutex, MutexGuard};

use s4_codec_gpu::abi::{COPY_SPAN_BYTES, CopySpan};
use s4_codec_gpu::{Cuda, Device, DeviceBuffer, Event, GpuError, Pinned, Pool, Result, Stream};

use crate::DeviceMemory;

const SPAN: usize = size_of::<CopySpan>();
/// Copies start at multiples of this.
const ALIGN: u64 = 256;
/// Device memory is taken in pieces of this size, or larger ones for larger tensors.
const PIECE: u64 = 256 << 20;
/// The driver copies larger tensors, one by one; a kernel copies all others at once.
const LARGE: u64 = 4 << 20;
/// What the memory is for, in errors.
const WHAT: &str = "a copy of the tensors on the device";

/// Copies device memory within one device.
#[derive(Debug)]
pub struct Stager {
    device: Arc<Device>,
    /// The order in which memory is taken and freed, and in which copies are read.
    stream: Arc<Stream>,
    pool: Arc<Pool>,
    /// Descriptors of the last copy that is done, for the next one.
    spare: Mutex<Option<Pinned>>,
}

/// Copies of device memory, which are freed when this is dropped.
#[derive(Debug)]
pub struct StagedCopies {
    stager: Arc<Stager>,
    /// Freed before the stager.
    pieces: Vec<DeviceBuffer>,
    /// The copies, in the order of what was copied.
    memory: Vec<DeviceMemory>,
    bytes: u64,
    copied: Event,
    /// What the device reads until the copies are done.
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
        let pool = Pool::new(&device, u64::MAX)?;
        Ok(Arc::new(Self { device, stream, pool, spare: Mutex::default() }))
    }

    /// Free and total memory of the device, in bytes, as the driver counts them for all processes.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.device.memory()
    }

    /// Queues copies of memory of this device, such that at least `leave` bytes of the device's memory
    /// stay free. They come after all that was queued on the streams of `from` before, and before all that
    /// is queued there later: this thread does not wait for them.
    ///
    /// What is copied may be freed once [`StagedCopies::wait`] has returned, or earlier in the order of those
    /// streams. The copies may be used at once: their stream, the stager's own, comes after them.
    ///
    /// # Errors
    /// `Budget` if there is no room for them, `OutOfMemory` if it was taken meanwhile, `Argument` for what is
    /// no memory of the device, `Driver`. Nothing stays allocated then.
    pub fn copy(self: &Arc<Self>, from: &[DeviceMemory], leave: u64) -> Result<StagedCopies> {
        for m in from {
            self.check(m)?;
        }
        let plan = Plan::of(from);
        let (free, _) = self.device.memory()?;
        if plan.total().saturating_add(leave) > free {
            let (needed, budget) = (plan.total(), free.saturating_sub(leave));
            return Err(GpuError::Budget { what: WHAT, needed, budget });
        }
        let copied = Event::new(&self.device)?;
        let spans = if plan.spans.is_empty() { None } else { Some(self.descriptors(&plan)?) };
        let take = |bytes: &u64| self.pool.alloc(&self.stream, *bytes, WHAT);
        let mut pieces = Vec::with_capacity(plan.pieces.len());
        for bytes in &plan.pieces {
            match take(bytes) {
                Ok(piece) => pieces.push(piece),
                Err(e) => {
                    drop(pieces);
                    self.give_back();
                    return Err(e);
                }
            }
        }
        let memory = from.iter().zip(&plan.places).map(|(m, &(piece, at))| {
            let address = pieces.get(piece).map_or(0, |p| p.address() + at);
            // SAFETY: a part of the piece, which the result owns, in the order of the stager's stream.
            unsafe { DeviceMemory::new(m.ordinal(), address, m.bytes(), self.stream.address()) }
        });
        let memory = memory.collect::<Vec<_>>();
        let copies = StagedCopies {
            stager: Arc::clone(self),
            pieces,
            memory,
            bytes: plan.total(),
            copied,
            spans,
        };
        self.queue(from, &plan, &copies)?;
        Ok(copies)
    }

    /// A stream that comes after all that was queued on `stream` until now: for memory that is read
    /// later, while its owner goes on queueing work that does not change it.
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

    fn check(&self, m: &DeviceMemory) -> Result<()> {
        if m.ordinal() != self.device.ordinal() {
            let (is, own) = (m.ordinal(), self.device.ordinal());
            return Err(GpuError::Argument(format!("memory of CUDA device {is} on device {own}")));
        }
        self.device.check_pointer(m.address(), m.bytes()).map(drop)
    }

    /// Pinned memory for what the kernel is told.
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
        // Also after an error: memory that copies in flight write to is freed in the order of the own stream.
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
        for (m, to) in from.iter().zip(&copies.memory).filter(|(m, _)| m.bytes() >= LARGE) {
            // SAFETY: the owner's memory, and a place of its own in a piece.
            unsafe { stream.copy_within_device(m.address(), to.address(), m.bytes())? };
        }
        let Some(pinned) = &copies.spans else { return Ok(()) };
        // SAFETY: nothing is in flight on it: it is new, or the copies that it was for are done.
        let list = unsafe { pinned.slice_mut(0, plan.spans.len() * SPAN) };
        for (out, &(tensor, first, len)) in list.chunks_exact_mut(SPAN).zip(&plan.spans) {
            let (from, to) =
                (from[tensor].address() + first, copies.memory[tensor].address() + first);
            out.copy_from_slice(bytemuck::bytes_of(&CopySpan { from, to, len }));
        }
        let (piece, at) = plan.descriptors;
        let at = copies.pieces.get(piece).map_or(0, |p| p.address() + at);
        let count = u32::try_from(plan.spans.len()).unwrap_or(u32::MAX);
        // SAFETY: the descriptors have room of their own after the copies; the spans are parts of the
        // owner's memory and of places of their own.
        unsafe {
            stream.copy_to_device(pinned, 0, plan.spans.len() * SPAN, at)?;
            stream.copy_spans(at, count)
        }
    }

    /// Gives memory that was freed back to the device.
    fn give_back(&self) {
        // An error was reported by what used the memory, or is of a device that is gone.
        let _ = self.stream.synchronize().and_then(|()| self.pool.trim());
    }
}

impl StagedCopies {
    /// The copies, in the order of what was copied.
    pub fn memory(&self) -> &[DeviceMemory] {
        &self.memory
    }

    /// Bytes of device memory that they take.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Blocks the calling thread until the copies are made: from then on any stream may change what was
    /// copied.
    ///
    /// # Errors
    /// `Driver`, also for work that was queued before them and failed.
    pub fn wait(&self) -> Result<()> {
        self.copied.synchronize()
    }

    /// Has what is queued on a stream from now on wait for the copies: it may change what was copied.
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
        let made = self.copied.synchronize().is_ok();
        // In the order of the stager's stream, which comes after the copies.
        self.pieces.clear();
        self.stager.give_back();
        if made {
            let mut spare = lock(&self.stager.spare);
            let larger = |new: &Pinned| spare.as_ref().is_none_or(|old| old.len() < new.len());
            if let Some(spans) = self.spans.take().filter(larger) {
                *spare = Some(spans);
            }
        }
    }
}

fn lock(spare: &Mutex<Option<Pinned>>) -> MutexGuard<'_, Option<Pinned>> {
    spare.lock().unwrap_or_else(|e| e.into_inner())
}

/// Where copies go.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Bytes of each piece.
    pieces: Vec<u64>,
    /// For each tensor its piece, and where it starts there.
    places: Vec<(usize, u64)>,
    /// What the kernel copies: tensor, first byte, bytes.
    spans: Vec<(usize, u64, u64)>,
    /// Piece of the kernel's descriptors, and where they start there.
    descriptors: (usize, u64),
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
        if !plan.spans.is_empty() {
            plan.descriptors = plan.place((plan.spans.len() * SPAN) as u64);
        }
        plan
    }

    /// Finds room in the last piece, or begins the next one.
    fn place(&mut self, bytes: u64) -> (usize, u64) {
        let bytes = bytes.next_multiple_of(ALIGN);
        if self.pieces.last().is_none_or(|last| *last > 0 && last.saturating_add(bytes) > PIECE) {
            self.pieces.push(0);
        }
        let piece = self.pieces.len() - 1;
        let at = self.pieces[piece];
        self.pieces[piece] = at.saturating_add(bytes);
        (piece, at)
    }

    fn total(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
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
        let sizes = [0, 1, 256, 257, LARGE - 1, LARGE, PIECE - 1, 3 * PIECE, 5, PIECE, 0, 7];
        let plan = Plan::of(&memory(&sizes));
        let mut taken: Vec<_> = plan.places.iter().zip(sizes).map(|(&p, len)| (p, len)).collect();
        taken.push((plan.descriptors, (plan.spans.len() * SPAN) as u64));
        for &((piece, at), len) in &taken {
            assert!(at % ALIGN == 0 && at + len <= plan.pieces[piece], "{piece} {at} {len}");
        }
        taken.retain(|t| t.1 > 0);
        taken.sort_unstable();
        for pair in taken.windows(2) {
            let (((a, first), len), ((b, second), _)) = (pair[0], pair[1]);
            assert!(a != b || first + len <= second, "{pair:?}");
        }
        for (tensor, &size) in sizes.iter().enumerate() {
            let own = plan.spans.iter().filter(|s| s.0 == tensor);
            let copied: u64 = own.clone().map(|s| s.2).sum();
            assert_eq!(copied, if size < LARGE { size } else { 0 });
            assert!(own.clone().all(|s| s.2 <= COPY_SPAN_BYTES && s.1 % COPY_SPAN_BYTES == 0));
        }
        assert_eq!(plan.total(), plan.pieces.iter().sum::<u64>());
        assert!(plan.pieces.iter().all(|p| *p > 0));
    }

    #[test]
    fn nothing_takes_no_memory() {
        assert_eq!(Plan::of(&[]), Plan::default());
        let empty = Plan::of(&memory(&[0, 0]));
        assert_eq!((empty.total(), empty.spans.len()), (0, 0));
    }
}
