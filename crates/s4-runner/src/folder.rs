//! Folders of the local drive: how they are made and synced, and how much room is left.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use crate::error::{Error, Result};

/// Creates a folder, unless it exists.
pub(crate) fn make_folder(path: &Path, mode: u32) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|e| Error::io("create", path, e))
}

/// Syncs a folder, so that the names in it survive a power cut.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Bytes that are free on a folder's drive; 0 if no more files can be created.
pub(crate) fn free(folder: &Path) -> io::Result<u64> {
    let about = rustix::fs::statvfs(folder)?;
    // Some file systems do not count files.
    let no_files = about.f_files > 0 && about.f_favail == 0;
    Ok(if no_files { 0 } else { about.f_bavail.saturating_mul(about.f_frsize) })
}

/// Whether there is no room left, or none for this user.
pub(crate) fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
