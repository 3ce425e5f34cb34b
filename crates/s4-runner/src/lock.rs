//! The lock of a folder, which one process holds at a time.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// A folder locked by this process, until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLock(File);

impl FolderLock {
    /// Locks a folder, by the file `lock` in it.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process has it; [`Error::Io`].
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        let path = folder.join("lock");
        let mut open = OpenOptions::new();
        let file = open.create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = file.map_err(|e| Error::io("open", &path, e))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self(file)),
            Err(Errno::WOULDBLOCK) => Err(Error::Locked(folder.display().to_string())),
            Err(e) => Err(Error::io("lock", &path, e.into())),
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Closing is not enough: a child process that another thread is just starting has a copy of the descriptor
        // until its `exec`, and the lock lasts as long as any copy. If unlocking fails, closing still releases it later.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let first = FolderLock::take(dir.path()).unwrap();
        assert!(matches!(FolderLock::take(dir.path()), Err(Error::Locked(_))));
        let copy = first.0.try_clone().unwrap();
        drop(first);
        FolderLock::take(dir.path()).unwrap();
        drop(copy);
    }

    #[test]
    fn only_a_lock_held_by_another_is_called_that() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("lock")).unwrap();
        assert!(matches!(FolderLock::take(dir.path()), Err(Error::Io { action: "open", .. })));
    }
}
