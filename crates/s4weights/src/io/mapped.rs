//! Writing a file of a memory file system with several threads.
//!
//! A file takes `write` from one thread at a time, and on tmpfs one thread is slow: it takes a page,
//! fills it, takes the next. Here the pages are reserved first, which is quick, and filled by many
//! threads through a mapping. Not side by side: while pages of a file are reserved, the kernel lets
//! page faults on it wait for each other.

#![expect(unsafe_code, reason = "memory that is mapped changes with its file")]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};

use memmap2::{MmapMut, MmapOptions};
use rayon::ThreadPool;
use rayon::prelude::*;
use rustix::fs::{FallocateFlags, fallocate, fstatfs};
use rustix::io::Errno;

/// `TMPFS_MAGIC` of Linux.
const TMPFS: u64 = 0x0102_1994;
/// Fewer threads are no faster than one that writes.
const LEAST_THREADS: usize = 6;
/// Fewer bytes are not worth a mapping.
const LEAST_BYTES: usize = 1 << 20;
/// Bytes that a thread fills at a time.
const PART: usize = 256 << 10;
/// At least the size of a page; a mapping starts at a multiple of it.
const PAGE: u64 = 64 << 10;

/// How a file is written: each call maps the bytes that it appends.
pub(super) struct Mapped {
    least_threads: usize,
    /// What the last call filled: taken down while the next one reserves.
    filled: Option<MmapMut>,
}

impl Mapped {
    /// For a new file that nobody else writes or cuts. `None`: its file system is none where this is
    /// known to be right and fast.
    pub(super) fn of(file: &File) -> Option<Self> {
        let kind = fstatfs(file).ok()?.f_type;
        (u64::try_from(kind) == Ok(TMPFS))
            .then_some(Self { least_threads: LEAST_THREADS, filled: None })
    }

    /// Whether so many bytes are written faster by these threads than by one.
    pub(super) fn suits(&self, pool: &ThreadPool, bytes: usize) -> bool {
        pool.current_num_threads() >= self.least_threads && bytes >= LEAST_BYTES
    }

    /// Appends bytes where the file's cursor is, at its end, and moves the cursor behind them.
    /// `false`: this file cannot be written so, and the cursor is where it was.
    ///
    /// # Errors
    /// As of `write`: no room, a file that is too long.
    pub(super) fn write(
        &mut self,
        file: &mut File,
        pool: &ThreadPool,
        bytes: &[u8],
    ) -> io::Result<bool> {
        let last = self.filled.take();
        let at = file.stream_position()?;
        let reserved = pool.in_place_scope(|s| {
            s.spawn(move |_| drop(last));
            reserve(file, at, bytes.len() as u64)
        })?;
        let start = at / PAGE * PAGE;
        let skip = (at - start) as usize;
        let mut options = MmapOptions::new();
        options.offset(start).len(skip + bytes.len());
        // SAFETY: the file is a temporary one of this process, made for this writer: nobody else
        // writes or cuts it. All of its pages in the mapping are reserved: filling them needs no
        // room in the file system.
        let mapping = reserved.then(|| unsafe { options.map_mut(&*file) });
        let Some(Ok(mut mapping)) = mapping else { return Ok(false) };
        let to = &mut mapping[skip..];
        pool.install(|| {
            let parts = to.par_chunks_mut(PART).zip(bytes.par_chunks(PART));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
        });
        self.filled = Some(mapping);
        file.seek(SeekFrom::Start(at + bytes.len() as u64))?;
        Ok(true)
    }
}

/// Takes pages for a range of a file; `false`: the file system cannot. They are in the file then,
/// as zeros.
fn reserve(file: &File, at: u64, len: u64) -> io::Result<bool> {
    loop {
        match fallocate(file, FallocateFlags::empty(), at, len) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    /// A file in memory, which is one of tmpfs, and how two threads write it.
    fn file() -> (File, Mapped, ThreadPool) {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("s4weights-test", flags).unwrap());
        let mut mapped = Mapped::of(&file).unwrap();
        mapped.least_threads = 2;
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
        let (mut file, mut mapped, pool) = file();
        let bytes: Vec<u8> = (0..9 << 20).map(|i: u32| (i % 251) as u8).collect();
        let mut expected = vec![];
        for len in [5, 1 << 20, 3 << 20, (1 << 20) + 77, 4096, (2 << 20) + 1] {
            let part = &bytes[expected.len() % 1000..][..len];
            if mapped.suits(&pool, len) {
                assert!(mapped.write(&mut file, &pool, part).unwrap());
            } else {
                file.write_all(part).unwrap();
            }
            expected.extend_from_slice(part);
            assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
        }
        assert!(content(&mut file) == expected);
    }

    #[test]
    fn one_thread_and_few_bytes_are_left_to_plain_writes() {
        let (file, mut mapped, pool) = file();
        assert!(mapped.suits(&pool, LEAST_BYTES) && !mapped.suits(&pool, LEAST_BYTES - 1));
        mapped.least_threads = Mapped::of(&file).unwrap().least_threads;
        assert!(!mapped.suits(&pool, LEAST_BYTES));
    }

    #[test]
    fn pages_that_cannot_be_had_are_an_error() {
        let (mut file, mut mapped, pool) = file();
        assert!(mapped.write(&mut file, &pool, &vec![1; 2 << 20]).unwrap());
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let refused = mapped.write(&mut file, &pool, &vec![2; 2 << 20]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(content(&mut file) == vec![1; 2 << 20]);
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_left_to_plain_writes() {
        let (mut file, mut mapped, pool) = file();
        // Memory that may be written before: the kernel lets no shared mapping be made any more.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        let wrote = mapped.write(&mut file, &pool, &vec![2; 2 << 20]);
        assert!(matches!(wrote, Ok(false)) || wrote.is_err());
        assert_eq!(file.stream_position().unwrap(), 0);
    }
}
