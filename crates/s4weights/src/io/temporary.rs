//! Files that become visible only when they are complete.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;
#[cfg(target_os = "linux")]
use std::path::PathBuf;

use tempfile::{NamedTempFile, TempPath};

/// The longest name that common file systems allow is 255 bytes; the rest is for what makes it unique.
const LONGEST_STEM: usize = 200;

/// A file that gets its final name when it is complete, and is gone if it is dropped before.
pub(super) enum Temporary {
    Named(NamedTempFile),
    /// Without a name until it is complete, so that nobody else can open it.
    #[cfg(target_os = "linux")]
    Unnamed {
        file: File,
        folder: PathBuf,
        prefix: String,
    },
}

impl Temporary {
    /// Makes one for a file of this name in this folder. It has the permissions of the file that it
    /// replaces, or else those of any new file.
    pub(super) fn create(folder: &Path, name: &OsStr, old: Option<&Metadata>) -> io::Result<Self> {
        let prefix = format!(".{}.", stem(name));
        #[cfg(target_os = "linux")]
        if let Some(file) = unnamed(folder) {
            take_over(&file, old)?;
            return Ok(Self::Unnamed { file, folder: folder.to_owned(), prefix });
        }
        let file = builder(&prefix).make_in(folder, create_new)?;
        take_over(file.as_file(), old)?;
        Ok(Self::Named(file))
    }

    pub(super) fn as_file(&self) -> &File {
        match self {
            Self::Named(file) => file.as_file(),
            #[cfg(target_os = "linux")]
            Self::Unnamed { file, .. } => file,
        }
    }

    pub(super) fn as_file_mut(&mut self) -> &mut File {
        match self {
            Self::Named(file) => file.as_file_mut(),
            #[cfg(target_os = "linux")]
            Self::Unnamed { file, .. } => file,
        }
    }

    /// Whether no other process can open it by a name.
    #[cfg(target_os = "linux")]
    pub(super) fn is_unnamed(&self) -> bool {
        !matches!(self, Self::Named(_))
    }

    /// Gives a file without a name this one, which must not exist yet.
    #[cfg(target_os = "linux")]
    pub(super) fn link(&self, path: &Path) -> io::Result<()> {
        link(self.as_file(), path)
    }

    /// Renames it to `path`, which is in its folder, in place of any file there.
    pub(super) fn publish(self, path: &Path) -> io::Result<()> {
        let named = match self {
            Self::Named(file) => file,
            #[cfg(target_os = "linux")]
            Self::Unnamed { file, folder, prefix } => {
                // A unique name first: linking never replaces a file, but renaming does.
                let link = |path: &Path| link(&file, path);
                let named = builder(&prefix).make_in(&folder, link)?;
                return named.persist(path).map_err(|e| e.error);
            }
        };
        named.persist(path).map(drop).map_err(|e| e.error)
    }

    /// As `publish`, but fails with `AlreadyExists` if there is a file.
    pub(super) fn publish_new(self, path: &Path) -> io::Result<()> {
        match self {
            Self::Named(file) => persist_new(file.into_temp_path(), path),
            #[cfg(target_os = "linux")]
            Self::Unnamed { file, folder, prefix } => match link(&file, path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    let named =
                        builder(&prefix).make_in(&folder, |path: &Path| link(&file, path))?;
                    persist_new(named.into_temp_path(), path)
                }
                other => other,
            },
        }
    }
}

/// Renames a file to `path`; fails with `AlreadyExists` if there is a file.
pub(super) fn persist_new(file: TempPath, path: &Path) -> io::Result<()> {
    let Err(failed) = file.persist_noclobber(path) else { return Ok(()) };
    // A file system that supports neither way may fail with any error. Where they are supported, renaming will fail
    // again.
    let is_free = || fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    match failed.error.kind() != io::ErrorKind::AlreadyExists && is_free() {
        true => failed.path.persist(path).map_err(|e| e.error),
        false => Err(failed.error),
    }
}

/// Creates a file that must not exist yet. (Those that `tempfile` creates fail with errors that hide the system's number.)
fn create_new(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).open(path)
}

fn builder(prefix: &str) -> tempfile::Builder<'_, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix).suffix(".tmp");
    builder
}

/// As much of a name as a temporary name has room for.
fn stem(name: &OsStr) -> String {
    let name = name.to_string_lossy();
    let mut end = name.len().min(LONGEST_STEM);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

/// Takes over owner and permissions of the file that is replaced, since overwriting it in place
/// would change neither.
#[cfg(unix)]
fn take_over(file: &File, old: Option<&Metadata>) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let Some(old) = old else { return Ok(()) };
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        // Only root may change the owner, but anyone may choose among their own groups.
        let owner = (new.uid() != old.uid()).then_some(old.uid());
        if fchown(file, owner, Some(old.gid())).is_err() {
            let _ = fchown(file, None, Some(old.gid()));
        }
    }
    file.set_permissions(fs::Permissions::from_mode(old.permissions().mode() & 0o777))
}

#[cfg(not(unix))]
fn take_over(_: &File, _: Option<&Metadata>) -> io::Result<()> {
    Ok(())
}

/// A file without a name in a folder of a memory file system, where files are written through a mapping.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags, open};
    if !super::mapped::is_memory(folder) {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(open(folder, flags, Mode::from_raw_mode(0o666)).ok()?);
    // Without `/proc` it could never be given a name.
    fs::metadata(descriptor(&file)).is_ok().then_some(file)
}

#[cfg(target_os = "linux")]
fn descriptor(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, descriptor(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_between_letters() {
        assert_eq!(stem(OsStr::new("a.s4w")), "a.s4w");
        assert_eq!(stem(OsStr::new(&"x".repeat(255))).len(), LONGEST_STEM);
        assert_eq!(stem(OsStr::new(&"\u{20ac}".repeat(85))).len(), 198);
    }
}
