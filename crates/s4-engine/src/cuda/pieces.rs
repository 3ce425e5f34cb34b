//! Page-locked memory that encoded frames stay in for as long as somebody needs them.
//!
//! Locking a page takes longer than copying to it, so pieces are taken when they are needed and kept for later calls.
//! If the budget does not allow another piece, frames are handed on in the ring of their device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use s4_codec_gpu::{Device, GpuError, Pinned, Result};
use s4_format::limits::MAX_CHUNK_BYTES;

use crate::threads::lock;

/// The most bytes of a piece: about a group of chunks, which takes a millisecond to copy.
const LARGEST_PIECE: u64 = 32 << 20;
/// The least bytes of a piece: it must hold any frame.
const SMALLEST_PIECE: u64 = (MAX_CHUNK_BYTES as u64).next_multiple_of(64 << 10);
/// Number of pieces that a budget has room for, if they can be that small.
const PIECES_IN_BUDGET: u64 = 8;
/// The purpose of memory for copies, in errors.
const COPIES: &str = "page-locked memory for a copy of the tensors";
/// One part in this many of the budget is for frames that outlive their call: the rest is for the next call.
const KEPT: u64 = 2;

/// Page-locked memory for encoded frames, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameMemory {
    /// Bytes taken from the system and not given back, including copies of values ([`super::HostCopies`]).
    pub taken: u64,
    /// The part of it that holds neither frames nor copies.
    pub idle: u64,
    /// Bytes of frames that stay for later calls ([`super::CudaEngine::keep_frames`]).
    pub kept: u64,
    /// The most that may be taken.
    pub budget: u64,
    /// Number of requests to the system for memory so far.
    pub pieces: u64,
}

/// Pieces that hold frames, and idle ones for the next. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Pieces {
    held: Arc<Mutex<Held>>,
    /// Bytes of a piece.
    size: u64,
}

#[derive(Debug)]
struct Held {
    idle: Vec<Arc<Pinned>>,
    /// Memory of freed copies, for the next ones.
    spare: Option<Pinned>,
    memory: FrameMemory,
    /// The device that the last piece was taken for.
    device: Option<Arc<Device>>,
    /// Pieces by address: all that exist, and some that were freed.
    known: BTreeMap<usize, Weak<Pinned>>,
}

impl Pieces {
    pub(super) fn new(budget: u64) -> Self {
        let memory = FrameMemory { budget, ..FrameMemory::default() };
        let size = ((budget / PIECES_IN_BUDGET) & !0xffff).clamp(SMALLEST_PIECE, LARGEST_PIECE);
        let (idle, known) = (vec![], BTreeMap::new());
        let held = Held { idle, spare: None, memory, device: None, known };
        Self { held: Arc::new(Mutex::new(held)), size }
    }

    /// Bytes of a piece.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn memory(&self) -> FrameMemory {
        let held = lock(&self.held);
        let spare = held.spare.as_ref().map_or(0, |spare| spare.len() as u64);
        FrameMemory { idle: spare + held.idle.len() as u64 * self.size, ..held.memory }
    }

    /// Sets the budget. Idle memory beyond it goes back to the system immediately, the rest once it is idle.
    pub(super) fn limit(&self, budget: u64) {
        lock(&self.held).memory.budget = budget;
        self.shrink(budget);
    }

    /// Gives back idle memory until no more than `most` bytes are taken.
    pub(super) fn shrink(&self, most: u64) {
        self.drop_spare(most);
        let mut gone = vec![];
        let mut held = lock(&self.held);
        while held.memory.taken > most
            && let Some(piece) = held.idle.pop()
        {
            held.memory.taken -= self.size;
            gone.push(piece);
        }
        // Unlocked first: the driver takes its time to free memory.
        drop(held);
    }

    /// Gives back the spare memory of copies if more than `most` bytes are taken.
    fn drop_spare(&self, most: u64) {
        let spare = {
            let mut held = lock(&self.held);
            if held.memory.taken > most { held.spare.take() } else { None }
        };
        if let Some(spare) = spare {
            self.release(spare);
        }
    }

    /// Page-locked memory of at least `bytes` bytes for copies, within the budget: idle pieces make room for it.
    ///
    /// # Errors
    /// `Budget` if there is no room for it, `OutOfMemory`, `Driver`.
    pub(super) fn take_for_copies(&self, device: &Arc<Device>, bytes: usize) -> Result<Pinned> {
        let spare = lock(&self.held).spare.take();
        match spare {
            Some(spare) if spare.len() >= bytes => return Ok(spare),
            // The old memory is freed before new memory is taken.
            Some(smaller) => self.release(smaller),
            None => {}
        }
        let (bytes, needed) = (bytes.max(1), bytes.max(1) as u64);
        if !self.claim(needed) {
            let budget = lock(&self.held).memory.budget;
            return Err(GpuError::Budget { what: COPIES, needed, budget });
        }
        Pinned::new(device, bytes).inspect_err(|_| lock(&self.held).memory.taken -= needed)
    }

    /// Takes the memory of copies back, for the next ones.
    pub(super) fn give_back(&self, pinned: Pinned) {
        let mut gone = Some(pinned);
        {
            let mut held = lock(&self.held);
            let within = held.memory.taken <= held.memory.budget;
            let larger = |new: &Pinned| held.spare.as_ref().is_none_or(|s| s.len() < new.len());
            if within && gone.as_ref().is_some_and(larger) {
                std::mem::swap(&mut held.spare, &mut gone);
            }
        }
        if let Some(gone) = gone {
            self.release(gone);
        }
    }

    /// Returns claimed memory to the system.
    fn release(&self, pinned: Pinned) {
        let bytes = pinned.len() as u64;
        drop(pinned);
        lock(&self.held).memory.taken -= bytes;
    }

    /// Claims a part of the budget for other page-locked memory.
    fn claim(&self, bytes: u64) -> bool {
        let budget = lock(&self.held).memory.budget;
        let Some(left) = budget.checked_sub(bytes) else { return false };
        self.shrink(left);
        let mut held = lock(&self.held);
        let Some(taken) = held.memory.taken.checked_add(bytes).filter(|t| *t <= budget) else {
            return false;
        };
        held.memory.taken = taken;
        held.memory.pieces += 1;
        true
    }

    /// Takes one more piece, which stays idle, unless the pieces taken so far have room for `bytes`
    /// of frames. Returns whether it did: not beyond the budget, not if the system has no memory,
    /// and not before a piece was needed.
    pub(super) fn grow(&self, bytes: u64) -> bool {
        let device = {
            let held = lock(&self.held);
            // The end of each piece may be too short for its next frame.
            let enough = bytes.saturating_add(held.memory.kept);
            let enough = enough.saturating_add(enough / 16).saturating_add(self.size);
            held.device.clone().filter(|_| held.memory.taken < enough)
        };
        let Some(device) = device else { return false };
        self.lock_pages(&device).map(|new| drop(self.piece(new))).is_some()
    }

    /// The piece that some bytes lie in, and where they start in it.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<(Arc<Pinned>, usize)> {
        let start = bytes.as_ptr() as usize;
        let held = lock(&self.held);
        let (&first, piece) = held.known.range(..=start).next_back()?;
        let (piece, at) = (piece.upgrade()?, start - first);
        (at.checked_add(bytes.len())? <= piece.len()).then_some((piece, at))
    }

    /// Claims memory for frames that outlive their call. Returns the same bytes, which hold the
    /// claim; `None` if that exceeds the part of the budget for such frames.
    pub(super) fn keep(&self, frames: &[Bytes]) -> Option<Vec<Bytes>> {
        let bytes = frames.iter().map(|f| f.len() as u64).sum();
        {
            let mut held = lock(&self.held);
            let kept = held.memory.kept.checked_add(bytes);
            held.memory.kept = kept.filter(|kept| *kept <= held.memory.budget / KEPT)?;
        }
        let (home, process) = (Arc::downgrade(&self.held), std::process::id());
        let claim = Arc::new(Claim { home, bytes, process });
        let kept = |f: &Bytes| KeptFrames { frames: f.clone(), _claim: Arc::clone(&claim) };
        Some(frames.iter().map(|f| Bytes::from_owner(kept(f))).collect())
    }

    /// An empty piece that was taken before, if one is idle.
    pub(super) fn take_idle(&self) -> Option<Piece> {
        let idle = lock(&self.held).idle.pop();
        idle.map(|idle| self.piece(idle))
    }

    /// A new piece; `None` where the budget allows none, or the system has none.
    pub(super) fn take_new(&self, device: &Arc<Device>) -> Option<Piece> {
        self.lock_pages(device).map(|new| self.piece(new))
    }

    fn piece(&self, pinned: Arc<Pinned>) -> Piece {
        Piece { pinned, home: Arc::downgrade(&self.held), process: std::process::id() }
    }

    /// Asks the system for the memory of a piece, within the budget.
    fn lock_pages(&self, device: &Arc<Device>) -> Option<Arc<Pinned>> {
        let budget = lock(&self.held).memory.budget;
        self.drop_spare(budget.checked_sub(self.size)?);
        let mut held = lock(&self.held);
        held.memory.taken.checked_add(self.size).filter(|t| *t <= held.memory.budget)?;
        held.memory.taken += self.size;
        held.memory.pieces += 1;
        held.device = Some(Arc::clone(device));
        // Unlocked first: the driver takes its time to lock pages.
        drop(held);
        let new = Pinned::new(device, usize::try_from(self.size).unwrap_or(usize::MAX));
        let mut held = lock(&self.held);
        let Ok(new) = new.map(Arc::new) else {
            held.memory.taken -= self.size;
            return None;
        };
        held.known.retain(|_, piece| piece.strong_count() > 0);
        held.known.insert(new.address(0) as usize, Arc::downgrade(&new));
        Some(new)
    }
}

/// The part of the budget that kept frames take.
#[derive(Debug)]
struct Claim {
    home: Weak<Mutex<Held>>,
    bytes: u64,
    process: u32,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a forked process, the thread that held the lock does not exist.
        let home = self.home.upgrade().filter(|_| std::process::id() == self.process);
        if let Some(home) = home {
            lock(&home).memory.kept -= self.bytes;
        }
    }
}

/// Frames with their claim on the budget.
struct KeptFrames {
    frames: Bytes,
    _claim: Arc<Claim>,
}

impl AsRef<[u8]> for KeptFrames {
    fn as_ref(&self) -> &[u8] {
        &self.frames
    }
}

/// A piece in use. It goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) pinned: Arc<Pinned>,
    home: Weak<Mutex<Held>>,
    process: u32,
}

impl Drop for Piece {
    fn drop(&mut self) {
        let pinned = Arc::clone(&self.pinned);
        if std::process::id() != self.process {
            // In a forked process, the driver does not know this memory, and the thread that held
            // the lock does not exist.
            std::mem::forget(pinned);
            return;
        }
        let Some(home) = self.home.upgrade() else { return };
        let mut held = lock(&home);
        if held.memory.taken <= held.memory.budget {
            held.idle.push(pinned);
        } else {
            held.memory.taken -= pinned.len() as u64;
        }
    }
}

/// A part of a piece that holds frames, which nobody writes to any more.
#[derive(Debug)]
pub(super) struct Frames {
    piece: Arc<Piece>,
    at: usize,
    len: usize,
}

impl Frames {
    /// # Safety
    /// Nothing writes these bytes from now on, as long as the piece lives.
    pub(super) unsafe fn new(piece: Arc<Piece>, at: usize, len: usize) -> Self {
        Self { piece, at, len }
    }
}

impl AsRef<[u8]> for Frames {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: what `Frames::new` was promised.
        unsafe { self.piece.pinned.slice(self.at, self.len) }
    }
}
