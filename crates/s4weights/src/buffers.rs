//! Reusable buffers, most of many megabytes. The system hands out new memory page by page and zeroes each
//! page, which costs at least as much as copying into it.

#![expect(unsafe_code, reason = "advice about memory, and memory that threads fill")]

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;
use s4_engine::Scratch;

use crate::parallel::lock;

/// Smaller buffers are left to the allocator, which reuses them itself.
const LARGE: usize = 1 << 20;

/// Below this many bytes, copying is faster than starting threads.
const PARALLEL_COPY: usize = 1 << 20;

/// Appends parts to a buffer, with the threads of a pool: a single one copies more slowly than a
/// device sends.
pub(crate) fn append(to: &mut Vec<u8>, parts: &[&[u8]], pool: Option<&ThreadPool>) {
    let bytes = parts.iter().map(|p| p.len()).sum();
    let Some(pool) = pool.filter(|_| bytes >= PARALLEL_COPY) else {
        parts.iter().for_each(|p| to.extend_from_slice(p));
        return;
    };
    to.reserve(bytes);
    let mut room = to.spare_capacity_mut();
    let mut copies = Vec::with_capacity(parts.len());
    for &part in parts {
        let (own, rest) = room.split_at_mut(part.len());
        copies.push((own, part));
        room = rest;
    }
    pool.install(|| {
        copies.into_par_iter().for_each(|(to, from)| {
            // SAFETY: both have the same length, and `to` is part of a buffer that is borrowed
            // mutably, so it does not overlap any part.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), from.len())
            };
        });
    });
    // SAFETY: there is room for these bytes, and each was written.
    unsafe { to.set_len(to.len() + bytes) };
}

/// Buffers of one thread that decodes.
#[derive(Default)]
pub(crate) struct Buffers {
    pub(crate) scratch: Scratch,
    pub(crate) span: Vec<u8>,
    pub(crate) chunk: Vec<u8>,
}

impl Buffers {
    /// Memory for a frame, and what decodes it.
    pub(crate) fn frame(&mut self, len: usize) -> (&mut [u8], &mut Scratch) {
        (sized(&mut self.span, len), &mut self.scratch)
    }
}

/// The first `len` bytes of a buffer, which grows if necessary.
pub(crate) fn sized(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// Idle buffers, kept for their next use. On Linux, the system may reclaim their memory after
/// [`LargeBuffers::rest`] if it runs short. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LargeBuffers(Arc<Mutex<Idle>>);

#[derive(Debug)]
struct Idle {
    buffers: Vec<Vec<u8>>,
    /// Bytes of all buffers, in use and idle.
    bytes: usize,
    most: usize,
}

impl LargeBuffers {
    /// Keeps idle buffers as long as all buffers, those in use included, have at most `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Idle { buffers: vec![], bytes: 0, most })))
    }

    /// An empty buffer with room for `capacity` bytes.
    pub(crate) fn take(&self, capacity: usize) -> LargeBuffer {
        if capacity < LARGE {
            return LargeBuffer { bytes: Vec::with_capacity(capacity), room: 0, home: Weak::new() };
        }
        let used = lock(&self.0).take(capacity);
        let room = used.as_ref().map_or(capacity, Vec::capacity);
        let bytes = used.unwrap_or_else(|| {
            let mut fresh = Vec::with_capacity(capacity);
            advise(fresh.spare_capacity_mut(), Advice::HugePages);
            fresh
        });
        LargeBuffer { bytes, room, home: Arc::downgrade(&self.0) }
    }

    /// Lets the system reclaim the memory of idle buffers if it runs short (on Linux).
    pub(crate) fn rest(&self) {
        for buffer in &mut lock(&self.0).buffers {
            advise(buffer.spare_capacity_mut(), Advice::NotNeeded);
        }
    }
}

impl Idle {
    /// The smallest idle buffer that is large enough, and not much larger. If there is none, counts
    /// a new one of that size, for which the oldest idle ones make room.
    fn take(&mut self, capacity: usize) -> Option<Vec<u8>> {
        let fits = capacity..=capacity.saturating_add(capacity / 4);
        let all = self.buffers.iter().enumerate().map(|(i, b)| (b.capacity(), i));
        if let Some((_, i)) = all.filter(|(room, _)| fits.contains(room)).min() {
            return Some(self.buffers.remove(i));
        }
        self.bytes = self.bytes.saturating_add(capacity);
        self.shrink();
        None
    }

    /// Takes back a buffer that is counted with `room` bytes.
    fn put(&mut self, buffer: Vec<u8>, room: usize) {
        self.bytes = self.bytes.saturating_sub(room).saturating_add(buffer.capacity());
        self.buffers.push(buffer);
        self.shrink();
    }

    /// Frees the oldest until the rest fits the budget, or none is idle.
    fn shrink(&mut self) {
        let mut gone = 0;
        for buffer in &self.buffers {
            if self.bytes <= self.most {
                break;
            }
            self.bytes = self.bytes.saturating_sub(buffer.capacity());
            gone += 1;
        }
        self.buffers.drain(..gone);
    }
}

/// A buffer that returns to its [`LargeBuffers`] when it is dropped, also as [`Bytes`].
#[derive(Debug)]
pub(crate) struct LargeBuffer {
    bytes: Vec<u8>,
    /// Bytes that it is counted with: it may have grown since.
    room: usize,
    home: Weak<Mutex<Idle>>,
}

impl Drop for LargeBuffer {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        lock(&home).put(bytes, self.room);
    }
}

impl Deref for LargeBuffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for LargeBuffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for LargeBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl From<LargeBuffer> for Bytes {
    fn from(buffer: LargeBuffer) -> Self {
        Self::from_owner(buffer)
    }
}

#[derive(Clone, Copy)]
enum Advice {
    /// The memory should have huge pages.
    HugePages,
    /// The content is not needed: the memory may be reclaimed until it is written again.
    NotNeeded,
}

/// Failure is ignored: the advice only affects speed and memory use.
#[cfg(target_os = "linux")]
fn advise(room: &mut [MaybeUninit<u8>], advice: Advice) {
    /// The size of a page, or a multiple of it.
    const PAGE: usize = 64 << 10;
    let skip = room.as_ptr().align_offset(PAGE);
    let Some(whole) = room.get_mut(skip..) else { return };
    let len = whole.len() / PAGE * PAGE;
    let advice = match advice {
        Advice::HugePages => libc::MADV_HUGEPAGE,
        Advice::NotNeeded => libc::MADV_FREE,
    };
    // SAFETY: whole pages of a buffer that is borrowed mutably; they hold nothing, so that their
    // bytes may become zeros.
    unsafe { libc::madvise(whole.as_mut_ptr().cast(), len, advice) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &mut [MaybeUninit<u8>], _: Advice) {}

/// Asks for large pages under buffers that are about to be written for the first time. Allocators
/// place buffers one behind the other, so that they share pages. Buffers that lie close together
/// are therefore treated as one range, also because the system keeps a record of each range.
#[cfg(target_os = "linux")]
pub(crate) fn expect_writes<'a>(buffers: impl Iterator<Item = &'a mut [u8]>) {
    /// The most that an allocator keeps between two buffers.
    const GAP: usize = 2 * PAGE;
    /// The smallest page anywhere.
    const PAGE: usize = 4 << 10;
    /// Fewer bytes hold no large page.
    const LEAST: usize = 2 << 20;
    let mut spans: Vec<_> = buffers.map(|b| (b.as_ptr().addr(), b.len())).collect();
    spans.sort_unstable();
    let joined = spans.chunk_by(|(at, len), next| next.0.saturating_sub(at + len) <= GAP);
    for (first, last) in joined.filter_map(|run| Some((run.first()?, run.last()?))) {
        // Rounded outwards: the pages at the ends also hold the allocator's own bytes, which may be
        // treated alike.
        let start = first.0 / PAGE * PAGE;
        let len = (last.0 + last.1).next_multiple_of(PAGE) - start;
        if len >= LEAST {
            let start = std::ptr::without_provenance_mut(start);
            // SAFETY: this advice changes no byte of memory, whoever owns it.
            unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        }
    }
}

/// Does nothing: the advice would only affect speed.
#[cfg(not(target_os = "linux"))]
pub(crate) fn expect_writes<'a>(_: impl Iterator<Item = &'a mut [u8]>) {}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{LARGE, LargeBuffers, PARALLEL_COPY, append, expect_writes, lock};
    use crate::parallel::pool;

    fn idle(buffers: &LargeBuffers) -> (usize, usize) {
        let idle = lock(&buffers.0);
        (idle.buffers.len(), idle.bytes)
    }

    #[test]
    fn buffers_have_the_room_and_the_bytes_that_were_asked_for() {
        let buffers = LargeBuffers::new(8 << 20);
        // The second time, reused buffers hold other bytes.
        for salt in [0, 7] {
            for len in [0, 1, 4096, 100_000, 5 << 20] {
                let bytes: Vec<u8> = (0..len).map(|i| i as u8 ^ salt).collect();
                let mut buffer = buffers.take(len);
                assert!(buffer.is_empty() && buffer.capacity() >= len);
                buffer.extend_from_slice(&bytes);
                assert!(**buffer == bytes, "{len}");
            }
        }
    }

    #[test]
    fn parts_are_appended_in_order_by_any_number_of_threads() {
        let whole: Vec<u8> = (0..3 * PARALLEL_COPY + 77).map(|i| (i % 251) as u8).collect();
        let (first, rest) = whole.split_at(1000);
        let (middle, last) = rest.split_at(PARALLEL_COPY - 1);
        for threads in [1, 3] {
            let pool = pool(threads).unwrap();
            for parts in [&[][..], &[first], &[first, &[], middle, last]] {
                let mut to = vec![9; 5];
                append(&mut to, parts, pool.as_ref());
                append(&mut to, &[&[7]], pool.as_ref());
                assert!(to == [&[9; 5], &parts.concat()[..], &[7]].concat(), "{threads}");
            }
        }
    }

    #[test]
    fn large_buffers_are_used_again_once_nobody_holds_them() {
        let buffers = LargeBuffers::new(8 << 20);
        let mut first = buffers.take(4 << 20);
        first.push(1);
        let at = first.as_ptr();
        let bytes: Bytes = first.into();
        let part = bytes.slice(..1);
        drop(bytes);
        assert_eq!(idle(&buffers).0, 0, "a part of it is held");
        drop(part);
        assert_eq!(idle(&buffers), (1, 4 << 20));
        assert!(buffers.take(2 << 20).as_ptr() != at, "too large for that");
        buffers.rest();
        let again = buffers.take(7 << 19);
        assert!(again.as_ptr() == at && again.is_empty());
    }

    #[test]
    fn no_more_are_kept_than_was_said() {
        let buffers = LargeBuffers::new(2 * LARGE);
        let three = [(); 3].map(|()| buffers.take(LARGE));
        drop(three);
        drop(buffers.take(LARGE - 1));
        assert_eq!(idle(&buffers), (2, 2 * LARGE));
        let mut one = buffers.take(LARGE);
        assert_eq!(idle(&buffers), (1, 2 * LARGE));
        // A buffer that grew counts with its new size, and idle ones make room for another size.
        one.reserve_exact(2 * LARGE);
        drop(one);
        assert_eq!(idle(&buffers), (1, 2 * LARGE));
        drop([buffers.take(LARGE), buffers.take(LARGE)]);
        let one = buffers.take(2 * LARGE);
        assert_eq!(idle(&buffers), (0, 2 * LARGE));
        // A buffer that outlives its stock is freed.
        drop(buffers);
        drop(one);
    }

    /// Whether the system was asked for large pages at an address.
    #[cfg(target_os = "linux")]
    fn wants_large_pages(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut here = false;
        maps.lines().any(|line| {
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some((start, end)) = first.split_once('-') {
                let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                here = (number(start)..number(end)).contains(&address);
            }
            here && first == "VmFlags:" && rest.split_whitespace().any(|flag| flag == "hg")
        })
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn large_pages_are_asked_for_under_new_memory_only() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").is_dir() {
            println!("skipped: this system has no such pages");
            return;
        }
        // The allocator may return memory that another test has freed, for which large pages were requested. What is
        // not new is held until the system is asked for more.
        let (mut used, mut small) = (vec![], vec![7u8; 1 << 20]);
        let (mut new, middle) = loop {
            let memory = vec![7u8; 40 << 20];
            let middle = memory.as_ptr().addr() + (4 << 20);
            if !wants_large_pages(middle) {
                break (memory, middle);
            }
            used.push(memory);
            assert!(used.len() < 20, "large pages are asked for under all memory");
        };
        expect_writes([&mut small[..], &mut []].into_iter());
        // Parts that lie close together are one.
        let parts = new.chunks_mut(100_000);
        expect_writes(parts.map(|part| &mut part[64..]).rev());
        assert!(wants_large_pages(middle));
        assert!(new.iter().all(|b| *b == 7) && small.iter().all(|b| *b == 7));
    }
}
