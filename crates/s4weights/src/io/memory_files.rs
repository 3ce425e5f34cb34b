//! Objects of a store in a folder of a memory file system.

use std::io;
use std::path::Path;

use object_store::PutPayload;
use s4_store::PutFiles;

use super::file::sync_folder;
use super::mapped::{Mapped, is_memory, write_huge};
use super::temporary::Temporary;

/// Objects of fewer bytes are not worth a mapping.
const LEAST: usize = 8 << 20;

/// Writes large objects through huge pages: the system allocates, and later reads, one of them in
/// place of 512 small ones.
#[derive(Debug)]
pub(crate) struct MemoryFiles;

impl PutFiles for MemoryFiles {
    fn put(&self, path: &Path, parts: &PutPayload) -> io::Result<bool> {
        let len = parts.content_length();
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(false);
        };
        if len < LEAST || !is_memory(folder) {
            return Ok(false);
        }
        let file = Temporary::create(folder, name, None)?;
        // Mapped memory is lost when somebody else truncates the file, so nobody else may be able
        // to open it.
        if !file.is_unnamed() || Mapped::of(file.as_file()).is_none() {
            return Ok(false);
        }
        write_huge(file.as_file(), parts.as_ref(), len)?;
        file.as_file().sync_all()?;
        file.link(path)?;
        sync_folder(folder)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bytes::Bytes;

    use super::*;

    fn payload(parts: &[usize]) -> (PutPayload, Vec<u8>) {
        let byte = |i: usize| (i % 251) as u8;
        let mut all = vec![];
        let parts = parts.iter().map(|&len| {
            let part: Bytes = (all.len()..all.len() + len).map(byte).collect();
            all.extend_from_slice(&part);
            part
        });
        (parts.collect(), all)
    }

    #[test]
    fn large_objects_of_a_memory_file_system_are_written_whole_or_not_at_all() {
        let memory = Path::new("/dev/shm");
        if !is_memory(memory) {
            println!("skipped: /dev/shm is no memory file system");
            return;
        }
        let folder = tempfile::tempdir_in(memory).unwrap();
        let huge = Temporary::create(folder.path(), "x".as_ref(), None).unwrap();
        let has_huge = write_huge(huge.as_file(), &[[1u8; 4096]], 4096).is_ok();
        drop(huge);
        for parts in [&[9 << 20][..], &[5, 8 << 20, 0, (1 << 20) + 77], &[8 << 20], &[1 << 20; 9]] {
            let (payload, all) = payload(parts);
            let path = folder.path().join("0");
            let done = MemoryFiles.put(&path, &payload);
            if !has_huge {
                assert!(done.is_err() && !path.exists());
                continue;
            }
            assert!(done.unwrap());
            assert!(fs::read(&path).unwrap() == all, "{parts:?}");
            // An existing object is not replaced, and nothing is left behind.
            let other = self::payload(&[10 << 20]).0;
            assert_eq!(
                MemoryFiles.put(&path, &other).unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
            assert!(fs::read(&path).unwrap() == all, "{parts:?}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn others_are_left_to_the_store() {
        let (small, large) = (payload(&[LEAST - 1]).0, payload(&[LEAST]).0);
        assert!(!MemoryFiles.put(Path::new("/dev/shm/s4weights-none"), &small).unwrap());
        // `/proc` is no memory file system anywhere.
        assert!(!MemoryFiles.put(Path::new("/proc/0"), &large).unwrap());
        // The store makes the folder.
        let missing = Path::new("/dev/shm/s4weights-no-such-folder/0");
        assert!(!MemoryFiles.put(missing, &large).unwrap_or(false));
        assert!(!missing.exists());
    }
}
