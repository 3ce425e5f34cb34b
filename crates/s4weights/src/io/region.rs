//! Part of a file in memory.

#![expect(unsafe_code, reason = "memory that is mapped changes with its file")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// Bytes of a huge page if pages have 4 KiB, and the alignment of regions.
pub(super) const HUGE: usize = 2 << 20;

/// Bytes of a file, mapped for writing, at the same offset within a huge page in memory as in the
/// file.
pub(super) struct Region {
    /// All that is reserved in the address space: more than is mapped.
    reserved: *mut libc::c_void,
    reserved_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: plain memory, used through borrows only.
unsafe impl Send for Region {}
// SAFETY: nothing is done with a shared borrow.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of a file from `at` on, a multiple of [`HUGE`].
    ///
    /// # Safety
    /// Nobody but the holder writes or truncates the file while the region lives, and the holder
    /// touches no page that the file does not have: the file system may have no room for it.
    pub(super) unsafe fn map(file: &File, at: u64, len: usize) -> io::Result<Self> {
        let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
        let reserved_len = len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let (none, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping wherever there is room.
        let reserved = unsafe {
            libc::mmap(ptr::null_mut(), reserved_len, none, flags | libc::MAP_NORESERVE, -1, 0)
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = reserved.cast::<u8>().align_offset(HUGE);
        let start = reserved.cast::<u8>().wrapping_add(skip);
        let region = Self { reserved, reserved_len, start, len };
        let (both, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: replaces part of what was reserved just now.
        let mapped = unsafe { libc::mmap(start.cast(), len, both, flags, file.as_raw_fd(), at) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(region)
    }

    /// Its bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped as long as `self` lives, and borrowed from it; whoever called `map` keeps
        // others away from the file.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: reserved in `map`; no borrow is left. It cannot fail for such a range.
        unsafe { libc::munmap(self.reserved, self.reserved_len) };
    }
}

/// Replaces the pages under a block by a huge page; some may not exist yet. Their content is kept.
pub(super) fn collapse(block: &mut [u8]) -> io::Result<()> {
    // SAFETY: it changes no byte that is there, and touches no other memory.
    let done =
        unsafe { libc::madvise(block.as_mut_ptr().cast(), block.len(), libc::MADV_COLLAPSE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
