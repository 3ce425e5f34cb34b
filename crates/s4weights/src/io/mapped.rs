//! Writing a file of a memory file system through a mapping.
//!
//! The kernel serialises `write` calls on a file, and on tmpfs each call is slow: it allocates and fills one
//! page at a time. Here several threads, or one, allocate huge pages and fill them through a mapping. Without
//! huge pages (`MADV_COLLAPSE` needs Linux 6.1), several threads reserve pages with `fallocate` first, and
//! one writes. In any case only pages that the file already has are touched, so a full file system is an
//! error and not a signal.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::ThreadPool;
use rayon::prelude::*;
use rustix::fs::{FallocateFlags, fallocate, fstatfs, ftruncate, statfs};
use rustix::io::Errno;

use super::region::{HUGE, Region, collapse};

/// `TMPFS_MAGIC` of Linux.
const TMPFS: u64 = 0x0102_1994;
/// Fewer threads are no faster than one that writes: with huge pages, and without.
const LEAST_THREADS: [usize; 2] = [2, 6];
/// Fewer bytes are not worth a mapping.
const LEAST_BYTES: usize = 1 << 20;
/// The least and the most bytes that one thread maps at a time; between these, half of what it
/// wrote so far. Mapping less would be slow: each time, the kernel first empties a list of every
/// processor, which takes as long as writing some megabytes if all are busy. Mapping more would
/// waste what is given back at the end.
const WINDOW: (u64, u64) = (8 << 20, 64 << 20);

/// Writes a file: many threads map the bytes that they append, one maps block after block.
pub(super) struct Mapped {
    least_threads: [usize; 2],
    /// Whether huge pages have been available so far.
    huge: AtomicBool,
    /// The region at the end of the file that one thread fills, and its offset in the file.
    window: Option<(Region, u64)>,
    /// Bytes that one thread has appended so far.
    appended: u64,
}

impl Mapped {
    /// For a new file that nobody else can open, and therefore neither write nor truncate. `None` on file
    /// systems where this is not known to be safe and fast.
    pub(super) fn of(file: &File) -> Option<Self> {
        let kind = fstatfs(file).ok()?.f_type;
        let huge = AtomicBool::new(has_huge_pages());
        let new = Self { least_threads: LEAST_THREADS, huge, window: None, appended: 0 };
        (u64::try_from(kind) == Ok(TMPFS)).then_some(new)
    }

    /// Whether these threads write `bytes` bytes faster than a single one.
    pub(super) fn suits(&self, pool: &ThreadPool, bytes: usize) -> bool {
        let [huge, small] = self.least_threads;
        let least = if self.huge.load(Ordering::Relaxed) { huge } else { small };
        pool.current_num_threads() >= least && bytes >= LEAST_BYTES
    }

    /// Appends bytes where the file's cursor is, and moves the cursor after them. The file may
    /// extend beyond the cursor until [`Mapped::end`].
    ///
    /// # Errors
    /// As of `write`.
    pub(super) fn append(&mut self, file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
        let mut at = file.stream_position()?;
        self.appended += bytes.len() as u64;
        while !bytes.is_empty() {
            if at.is_multiple_of(HUGE as u64) && self.room(at).is_none_or(|room| room.is_empty()) {
                self.window = self.next_window(file, at)?;
            }
            let to_huge = HUGE - (at % HUGE as u64) as usize;
            let len = match self.room(at) {
                Some(room) => {
                    let len = bytes.len().min(room.len());
                    room[..len].copy_from_slice(&bytes[..len]);
                    file.seek(SeekFrom::Current(len as i64))?;
                    len
                }
                None => {
                    let len = bytes.len().min(to_huge);
                    file.write_all(&bytes[..len])?;
                    len
                }
            };
            (at, bytes) = (at + len as u64, &bytes[len..]);
        }
        Ok(())
    }

    /// The mapped part of the file from `at` on, if there is one.
    fn room(&mut self, at: u64) -> Option<&mut [u8]> {
        let (region, start) = self.window.as_mut()?;
        region.bytes().get_mut(usize::try_from(at - *start).ok()?..)
    }

    /// Extends the file by huge pages; `None` if there are none. A plain write then reports what is
    /// wrong, if anything is.
    fn next_window(&mut self, file: &File, at: u64) -> io::Result<Option<(Region, u64)>> {
        // Unmaps the full window first.
        self.window = None;
        if !self.huge.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let len = (self.appended / 2).clamp(WINDOW.0, WINDOW.1) / HUGE as u64 * HUGE as u64;
        let found = huge_pages(file, at, len as usize).ok();
        if found.is_none() {
            self.huge.store(false, Ordering::Relaxed);
            ftruncate(file, at)?;
        }
        Ok(found.map(|region| (region, at)))
    }

    /// Truncates the file at its cursor, after [`Mapped::append`].
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn end(&mut self, file: &mut File) -> io::Result<()> {
        match self.window.take() {
            Some(_) => {
                let end = file.stream_position()?;
                Ok(ftruncate(&*file, end)?)
            }
            None => Ok(()),
        }
    }

    /// Appends parts where the file's cursor is, at its end, and moves the cursor after them.
    /// `false`: this file cannot be written this way, and the cursor has not moved.
    ///
    /// # Errors
    /// As of `write`: no room, a file that is too long.
    pub(super) fn write(
        &self,
        file: &mut File,
        pool: &ThreadPool,
        parts: &[&[u8]],
    ) -> io::Result<bool> {
        let mut len = 0;
        let mut starts = Vec::with_capacity(parts.len());
        for part in parts {
            starts.push((len, *part));
            len += part.len();
        }
        let at = file.stream_position()?;
        let skip = (at % HUGE as u64) as usize;
        let start = at - skip as u64;
        let end = at + len as u64;
        ftruncate(&*file, end)?;
        #[expect(unsafe_code, reason = "memory that is mapped changes with its file")]
        // SAFETY: the file was made for this writer and has no name, so nobody else writes or
        // truncates it. `fill` only touches blocks whose pages `secure` has allocated.
        let region = unsafe { Region::map(file, start, skip + len) };
        let Ok(mut region) = region else { return Ok(false) };
        let fill = |(i, block): (usize, &mut [u8])| {
            let first = if i == 0 { skip } else { 0 };
            self.secure(file, start + (i * HUGE) as u64, first, block)?;
            copy_from(&starts, i * HUGE + first - skip, &mut block[first..]);
            io::Result::Ok(())
        };
        let blocks = region.bytes().par_chunks_mut(HUGE).enumerate();
        match pool.install(|| blocks.try_for_each(fill)) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => return Ok(false),
            done => done?,
        }
        file.seek(SeekFrom::Start(end))?;
        Ok(true)
    }

    /// Ensures that the file has the pages of a block, which starts at `at`, from its byte
    /// `first` on; those before it are written.
    fn secure(&self, file: &File, at: u64, first: usize, block: &mut [u8]) -> io::Result<()> {
        if block.len() == HUGE && self.huge.load(Ordering::Relaxed) {
            // A huge page can only replace a range that has at least one page.
            file.write_all_at(&[0], at + first as u64)?;
            match collapse(block) {
                Ok(()) => return Ok(()),
                // Some pages are in use elsewhere right now.
                Err(e) if [Some(libc::EAGAIN), Some(libc::EBUSY)].contains(&e.raw_os_error()) => {}
                Err(_) => self.huge.store(false, Ordering::Relaxed),
            }
        }
        let len = (block.len() - first) as u64;
        loop {
            match fallocate(file, FallocateFlags::empty(), at + first as u64, len) {
                Err(Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }
}

/// Fills `to` with the bytes that follow the first `from` bytes of parts, each given with where it
/// starts.
fn copy_from(parts: &[(usize, &[u8])], from: usize, mut to: &mut [u8]) {
    let first = parts.partition_point(|(start, part)| start + part.len() <= from);
    for (start, part) in &parts[first..] {
        let part = &part[from.saturating_sub(*start)..];
        let (now, later) = to.split_at_mut(part.len().min(to.len()));
        now.copy_from_slice(&part[..now.len()]);
        to = later;
    }
}

/// Appends huge pages to a file, which has `at` bytes, and maps them.
fn huge_pages(file: &File, at: u64, len: usize) -> io::Result<Region> {
    ftruncate(file, at + len as u64)?;
    #[expect(unsafe_code, reason = "memory that is mapped changes with its file")]
    // SAFETY: as in `Mapped::write`; the region is used only once the file has the pages.
    let mut region = unsafe { Region::map(file, at, len)? };
    // A huge page can only replace a range that has at least one page.
    (0..len).step_by(HUGE).try_for_each(|i| file.write_all_at(&[0], at + i as u64))?;
    collapse(region.bytes())?;
    Ok(region)
}

/// Fills a new file, which [`Mapped::of`] has accepted, with parts of `len` bytes together, through
/// huge pages alone.
///
/// # Errors
/// As of `write`, and if there are no huge pages.
pub(super) fn write_huge(file: &File, parts: &[impl AsRef<[u8]>], len: usize) -> io::Result<()> {
    if !has_huge_pages() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut region = huge_pages(file, 0, len.next_multiple_of(HUGE))?;
    let mut to = region.bytes();
    for part in parts.iter().map(AsRef::as_ref) {
        let (now, later) = to.split_at_mut(part.len());
        now.copy_from_slice(part);
        to = later;
    }
    drop(region);
    Ok(ftruncate(file, len as u64)?)
}

/// Whether a folder is in a memory file system.
pub(super) fn is_memory(folder: &std::path::Path) -> bool {
    statfs(folder).is_ok_and(|stat| u64::try_from(stat.f_type) == Ok(TMPFS))
}

/// Whether the kernel's huge pages have the size of a block. With another size, `MADV_COLLAPSE` of
/// a block could do nothing and report success.
fn has_huge_pages() -> bool {
    let size = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    size.is_ok_and(|size| size.trim().parse() == Ok(HUGE))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    /// A file in memory, which is on tmpfs, and how two threads write it.
    fn file() -> (File, Mapped, ThreadPool) {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("s4weights-test", flags).unwrap());
        let mut mapped = Mapped::of(&file).unwrap();
        mapped.least_threads = [2, 2];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        (file, mapped, pool)
    }

    fn content(file: &mut File) -> Vec<u8> {
        let mut found = vec![];
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut found).unwrap();
        found
    }

    #[test]
    fn all_is_written_in_order_between_plain_writes() {
        let bytes: Vec<u8> = (0..9 << 20).map(|i: u32| (i % 251) as u8).collect();
        for huge in [true, false] {
            let (mut file, mapped, pool) = file();
            mapped.huge.store(huge, Ordering::Relaxed);
            let mut expected = vec![];
            for len in [5, 1 << 20, 7 << 20, (1 << 20) + 77, 4096, (4 << 20) + 1] {
                let part = &bytes[expected.len() % 1000..][..len];
                if mapped.suits(&pool, len) {
                    let (first, rest) = part.split_at(len / 3);
                    assert!(mapped.write(&mut file, &pool, &[first, &[], rest]).unwrap());
                } else {
                    file.write_all(part).unwrap();
                }
                expected.extend_from_slice(part);
                assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
            }
            assert!(content(&mut file) == expected, "{huge}");
        }
    }

    #[test]
    fn one_thread_and_few_bytes_are_left_to_plain_writes() {
        let (file, _, pool) = file();
        let mapped = Mapped::of(&file).unwrap();
        mapped.huge.store(true, Ordering::Relaxed);
        assert!(mapped.suits(&pool, LEAST_BYTES) && !mapped.suits(&pool, LEAST_BYTES - 1));
        // Two threads that take small pages are slower than one that writes.
        mapped.huge.store(false, Ordering::Relaxed);
        assert!(!mapped.suits(&pool, LEAST_BYTES));
    }

    #[test]
    fn one_thread_fills_huge_pages_in_order() {
        let bytes: Vec<u8> = (0..9 << 20).map(|i: u32| (i % 251) as u8).collect();
        for huge in [true, false] {
            let (mut file, mut mapped, pool) = file();
            mapped.huge.store(huge, Ordering::Relaxed);
            let mut expected = vec![];
            for len in [5, HUGE - 5, 100, 3 << 20, 0, HUGE, 7, (4 << 20) + 1, 8 << 20, 8 << 20] {
                let part = &bytes[expected.len() % 1000..][..len];
                mapped.append(&mut file, part).unwrap();
                expected.extend_from_slice(part);
            }
            mapped.end(&mut file).unwrap();
            assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
            let part = &bytes[..3 << 20];
            assert!(mapped.write(&mut file, &pool, &[part]).unwrap());
            expected.extend_from_slice(part);
            mapped.append(&mut file, part).unwrap();
            expected.extend_from_slice(part);
            mapped.end(&mut file).unwrap();
            assert!(content(&mut file) == expected, "{huge}");
        }
    }

    #[test]
    fn one_thread_writes_where_it_gets_no_huge_page() {
        let (mut file, mut mapped, _) = file();
        mapped.append(&mut file, &vec![1; 3 << 20]).unwrap();
        mapped.end(&mut file).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let refused = mapped.append(&mut file, &vec![2; 2 << 20]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        let (mut file, mut mapped, _) = self::file();
        // This seal forbids new writable mappings.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        let refused = mapped.append(&mut file, &vec![2; 2 << 20]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn pages_that_cannot_be_had_are_an_error() {
        let (mut file, mapped, pool) = file();
        assert!(mapped.write(&mut file, &pool, &[&vec![1; 2 << 20]]).unwrap());
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let refused = mapped.write(&mut file, &pool, &[&vec![2; 2 << 20]]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(content(&mut file) == vec![1; 2 << 20]);
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_left_to_plain_writes() {
        let (mut file, mapped, pool) = file();
        // This seal forbids new writable mappings.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        assert!(!mapped.write(&mut file, &pool, &[&vec![2; 2 << 20]]).unwrap());
        assert_eq!(file.stream_position().unwrap(), 0);
    }
}
