//! Copies of device values in page-locked host memory, which a background save encodes while their
//! owner goes on, if the device has no room for all of them.
//!
//! The owner waits for the link, however the values are encoded. So a part for which the device has room is
//! first copied there, which takes next to no time, and goes over the link after the owner has gone on. The
//! host's memory is kept for the next copies, within the budget of encoded frames.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use s4_codec_gpu::{Cuda, Event, GpuError, Pinned, Result, Stream};

use super::pieces::Pieces;
use super::staging::{self, LARGE, StagedCopies, Stagers};
use crate::DeviceMemory;
use crate::threads::lock;

/// Copies start at multiples of this, as on devices. It suits the values of any dtype, and cache lines.
const ALIGN: u64 = staging::ALIGN;
/// Copies of less than this are not worth making on the device first: the link takes a millisecond for so much.
const WORTH: u64 = 64 << 20;

/// The streams and memory that copies are made with.
#[derive(Debug)]
pub(super) struct HostMemory {
    budget: Pieces,
    stagers: Arc<Stagers>,
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
    /// Copies on devices that are on their way to the host, and when they will have arrived.
    on_the_way: Vec<(StagedCopies, Event)>,
    process: u32,
}

impl HostMemory {
    pub(super) fn new(budget: Pieces, stagers: Arc<Stagers>) -> Arc<Self> {
        Arc::new(Self { budget, stagers, streams: Mutex::default() })
    }

    /// Copies values, after all work queued on their streams before. When this returns, the originals may change.
    /// `room`: bytes of memory that copies may take on each device until they have arrived on the host.
    ///
    /// # Errors
    /// `Budget` if the host has no room for them, `OutOfMemory`, `Argument` for pointers that are not
    /// memory of their device, `Driver`.
    pub(super) fn copy(
        self: &Arc<Self>,
        cuda: &Cuda,
        from: &[DeviceMemory],
        room: &BTreeMap<u32, u64>,
    ) -> Result<HostCopies> {
        let streams = self.streams(cuda, from)?;
        let layout = Layout::of(from, room);
        let device = streams.values().next().map(|stream| stream.device());
        let take = |device| self.budget.take_for_copies(device, to_usize(layout.bytes));
        let pinned = device.map(take).transpose()?;
        let places = from.iter().zip(&layout.places);
        let places = places.map(|(m, &at)| (to_usize(at), to_usize(m.bytes()))).collect();
        let process = std::process::id();
        let home = Arc::clone(self);
        let mut copies = HostCopies { home, pinned, places, on_the_way: vec![], process };
        let done = copies.fill(cuda, from, &layout, &streams);
        if done.is_err() {
            // Nothing may be in flight to memory that goes away.
            for stream in streams.values() {
                let _ = stream.synchronize();
            }
        }
        done.map(|()| copies)
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

/// Where copies lie on the host, and what devices copy within their own memory first.
#[derive(Debug, Default, PartialEq, Eq)]
struct Layout {
    /// The first byte of each copy.
    places: Vec<u64>,
    /// By ordinal.
    staged: BTreeMap<u32, Staged>,
    /// Bytes that everything takes.
    bytes: u64,
}

/// What a device copies within its own memory first.
#[derive(Debug, Default, PartialEq, Eq)]
struct Staged {
    /// Numbers of tensors, and the byte of each where the copy begins: 0, except perhaps for the first tensor.
    parts: Vec<(usize, u64)>,
    /// The first byte on the host, and the number of bytes. They lie there as they do on the device.
    place: (u64, u64),
}

impl Layout {
    fn of(from: &[DeviceMemory], room: &BTreeMap<u32, u64>) -> Self {
        let chosen = |(&ordinal, &room)| (ordinal, Staged::chosen(from, ordinal, room));
        let mut staged: BTreeMap<_, _> = room.iter().map(chosen).collect();
        staged.retain(|_, staged| !staged.parts.is_empty());
        let mut is_staged = vec![false; from.len()];
        for (tensor, _) in staged.values().flat_map(|staged| &staged.parts) {
            is_staged[*tensor] = true;
        }
        let mut layout = Self { places: vec![0; from.len()], ..Self::default() };
        for (tensor, m) in from.iter().enumerate().filter(|(tensor, _)| !is_staged[*tensor]) {
            layout.places[tensor] = layout.place(m.bytes());
        }
        for staged in staged.values_mut() {
            let mut parts = staged.parts.iter();
            if let Some((tensor, first)) = staged.parts.first().filter(|part| part.1 > 0) {
                // The part that is copied first ends where the others begin.
                layout.places[*tensor] = layout.place(*first);
                layout.place(from[*tensor].bytes() - first);
                staged.place.0 = layout.places[*tensor] + first;
                parts.next();
            } else {
                staged.place.0 = layout.bytes;
            }
            for (tensor, _) in parts {
                layout.places[*tensor] = layout.place(from[*tensor].bytes());
            }
            staged.place.1 = layout.bytes - staged.place.0;
        }
        layout.staged = staged;
        layout
    }

    /// Room for `bytes` bytes after the copies placed so far.
    fn place(&mut self, bytes: u64) -> u64 {
        let at = self.bytes;
        self.bytes = at.saturating_add(bytes).next_multiple_of(ALIGN);
        at
    }
}

impl Staged {
    /// The smallest tensors of a device that have room there, and the last part of one more. (The link takes tensors
    /// one by one, while a device copies small ones all at once.)
    fn chosen(from: &[DeviceMemory], ordinal: u32, room: u64) -> Self {
        let is_own = |m: &DeviceMemory| m.ordinal() == ordinal && m.bytes() > 0;
        let own = from.iter().enumerate().filter(|(_, m)| is_own(m));
        let mut own: Vec<_> = own.map(|(tensor, m)| (m.bytes(), tensor)).collect();
        own.sort_unstable();
        let (mut staged, mut left) = (Self::default(), room.saturating_sub(staging::ROUNDING));
        for (bytes, tensor) in own {
            let needed = staging::needed(bytes);
            if needed <= left {
                staged.parts.push((tensor, 0));
                left -= needed;
                continue;
            }
            let first = bytes.saturating_sub(left).next_multiple_of(ALIGN);
            if first + LARGE <= bytes {
                staged.parts.insert(0, (tensor, first));
            }
            break;
        }
        let part = |&(tensor, first): &(usize, u64)| from[tensor].bytes() - first;
        match staged.parts.iter().map(part).sum::<u64>() < WORTH {
            true => Self::default(),
            false => staged,
        }
    }

    /// The memory of the parts.
    fn memory(&self, from: &[DeviceMemory]) -> Result<Vec<DeviceMemory>> {
        let part = |m: &DeviceMemory, first| m.part(first, m.bytes() - first);
        self.parts.iter().map(|&(tensor, first)| part(&from[tensor], first)).collect()
    }
}

impl HostCopies {
    /// Makes the copies, of which some are only on the way when this returns.
    fn fill(
        &mut self,
        cuda: &Cuda,
        from: &[DeviceMemory],
        layout: &Layout,
        streams: &BTreeMap<u32, Arc<Stream>>,
    ) -> Result<()> {
        let Some(pinned) = &self.pinned else { return Ok(()) };
        // For each tensor, the number of bytes that the link takes from the original.
        let mut direct: Vec<u64> = from.iter().map(DeviceMemory::bytes).collect();
        let mut staged = vec![];
        for (ordinal, own) in &layout.staged {
            let memory = own.memory(from)?;
            match self.home.stagers.get(cuda, *ordinal)?.copy(&memory, 0) {
                Ok(copies) => {
                    own.parts.iter().for_each(|&(tensor, first)| direct[tensor] = first);
                    staged.push((ordinal, own.place, copies));
                }
                // Something else took the room meanwhile.
                Err(GpuError::Budget { .. } | GpuError::OutOfMemory { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        for ((m, &bytes), &(at, _)) in from.iter().zip(&direct).zip(&self.places) {
            let Some(stream) = streams.get(&m.ordinal()).filter(|_| bytes > 0) else { continue };
            // SAFETY: the owner's memory, which stays until all copies are made; a place of its own in memory that
            // nobody else uses.
            unsafe { stream.copy_to_host(m.address(), pinned, at, to_usize(bytes))? };
        }
        let left: Vec<_> = streams.values().map(|s| recorded(s)).collect::<Result<_>>()?;
        for (ordinal, (at, bytes), copies) in staged {
            let Some(stream) = streams.get(ordinal) else { continue };
            let arrived = Event::new(stream.device())?;
            // SAFETY: the device's stream; the copies lie there one after the other, in memory that stays until they
            // have arrived, and have a place of their own on the host.
            unsafe {
                copies.hold(stream.address())?;
                stream.copy_to_host(copies.address(), pinned, to_usize(at), to_usize(bytes))?;
            }
            let recorded = arrived.record(stream);
            // Also after an error: they are being read.
            self.on_the_way.push((copies, arrived));
            recorded?;
        }
        left.iter().try_for_each(Event::synchronize)?;
        self.on_the_way.iter().try_for_each(|(copies, _)| copies.wait())
    }

    /// Waits until all copies have arrived, and frees the memory that they took on devices.
    ///
    /// # Errors
    /// `Driver`.
    pub fn wait(&mut self) -> Result<()> {
        let arrived = self.on_the_way.drain(..).map(|(_copies, arrived)| arrived.synchronize());
        // All of them, also after an error.
        arrived.collect::<Vec<_>>().into_iter().collect()
    }

    /// The copies, in the order of their sources, once all have arrived.
    ///
    /// # Errors
    /// Those of [`HostCopies::wait`].
    pub fn values(&mut self) -> Result<impl Iterator<Item = &[u8]>> {
        self.wait()?;
        Ok(self.places.iter().map(|&(at, bytes)| match &self.pinned {
            // SAFETY: nothing writes there once the copies are made.
            Some(pinned) => unsafe { pinned.slice(at, bytes) },
            None => &[],
        }))
    }

    /// The addresses where the copies are, or will be once they have arrived.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        let address = |at| self.pinned.as_ref().map_or(0, |pinned| pinned.address(at));
        self.places.iter().map(move |&(at, _)| address(at))
    }

    /// Bytes of page-locked memory that they take.
    pub fn bytes(&self) -> u64 {
        self.pinned.as_ref().map_or(0, |pinned| pinned.len() as u64)
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // In a forked process, the driver does not know this memory, and the thread that held a
            // lock does not exist.
            std::mem::forget((self.pinned.take(), std::mem::take(&mut self.on_the_way)));
            return;
        }
        let _ = self.wait();
        if let Some(pinned) = self.pinned.take() {
            self.home.budget.give_back(pinned);
        }
    }
}

/// An event after everything queued on a stream so far.
fn recorded(stream: &Stream) -> Result<Event> {
    let event = Event::new(stream.device())?;
    event.record(stream)?;
    Ok(event)
}

/// A number of bytes in memory of a device, or in as much memory of the host.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(sizes: &[u64]) -> Vec<DeviceMemory> {
        let of = |(i, &bytes): (usize, &u64)| {
            // SAFETY: nobody uses it.
            unsafe { DeviceMemory::new(u32::from(i % 3 == 2), (i as u64) << 40, bytes, 0) }
        };
        sizes.iter().enumerate().map(of).collect()
    }

    /// Checks that copies do not overlap, and that those of a device lie on the host as on the device.
    fn check(from: &[DeviceMemory], room: &BTreeMap<u32, u64>) -> Layout {
        let layout = Layout::of(from, room);
        let mut ranges: Vec<_> =
            from.iter().zip(&layout.places).map(|(m, &at)| (at, m.bytes())).collect();
        ranges.retain(|r| r.1 > 0);
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        assert!(ranges.last().is_none_or(|&(at, len)| at + len <= layout.bytes));
        assert!(layout.places.iter().all(|at| at % ALIGN == 0));
        for (ordinal, staged) in &layout.staged {
            let parts = staged.memory(from).unwrap();
            let (places, bytes) = staging::places(&parts);
            assert!(bytes <= room[ordinal], "{bytes} bytes in {}", room[ordinal]);
            for ((&(tensor, first), m), at) in staged.parts.iter().zip(&parts).zip(places) {
                assert_eq!(layout.places[tensor] + first, staged.place.0 + at);
                assert!(at + m.bytes() <= staged.place.1);
            }
        }
        layout
    }

    #[test]
    fn copies_lie_on_the_host_as_on_the_device() {
        let sizes =
            [5, 0, 70 << 20, 200 << 20, 64 << 20, 1 << 20, 257, 3, 90 << 20, (16 << 20) - 1];
        let from = memory(&sizes);
        assert!(check(&from, &BTreeMap::new()).staged.is_empty());
        for mib in [0, 1, 65, 70, 71, 100, 150, 300, 1000] {
            let room = mib << 20;
            for room in [BTreeMap::from([(0, room)]), BTreeMap::from([(0, room), (1, room + 77)])] {
                check(&from, &room);
            }
        }
    }

    #[test]
    fn the_smallest_come_first_and_then_a_part() {
        let from = memory(&[200 << 20, 40 << 20, 0, 30 << 20, 7]);
        let parts = |mib: u64| {
            let layout = check(&from, &BTreeMap::from([(0, mib << 20)]));
            layout.staged.get(&0).map_or(vec![], |staged| staged.parts.clone())
        };
        assert_eq!(parts(60), []);
        assert_eq!(parts(80), [(4, 0), (3, 0), (1, 0)]);
        let split = parts(120);
        assert_eq!(split[1..], [(4, 0), (3, 0), (1, 0)]);
        assert!(split[0].0 == 0 && (152 << 20..=155 << 20).contains(&split[0].1), "{split:?}");
        assert_eq!(parts(300), [(4, 0), (3, 0), (1, 0), (0, 0)]);
    }

    #[test]
    fn nothing_takes_no_memory() {
        assert_eq!(check(&[], &BTreeMap::from([(0, 1 << 30)])), Layout::default());
    }
}
