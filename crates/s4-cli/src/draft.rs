//! A file that is written and read under another name before it takes its own.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use s4weights::{Error, Source, Target, redact_url};
use tempfile::TempDir;

use crate::error::{Failure, Result};
use crate::files::folder;

/// The longest name that common file systems allow is 255 bytes; the rest is for what makes it unique.
const LONGEST_STEM: usize = 200;

/// A file in its own folder, next to the file that it will become. Both are removed if it is dropped before that.
///
/// Only this user may enter the folder: anyone else who may write next to the other file could replace a file there
/// with a link.
pub(crate) struct Draft {
    /// The name of the other file, as the user gave it.
    target: String,
    /// The path of the other file.
    to: PathBuf,
    /// The metadata of the file that was there before, if any.
    old: Option<Metadata>,
    /// Whether it may replace a file.
    replaces: bool,
    path: PathBuf,
    folder: TempDir,
}

impl Draft {
    /// Makes the folder for a local file, or returns `None` for an object of a store. `replaces`: whether it may take
    /// the place of a file.
    ///
    /// # Errors
    /// If there can be no such file: for a pipe or a device, or in a folder that cannot be written to.
    pub(crate) fn of(target: &str, replaces: bool) -> Result<Option<Self>> {
        let Some((to, old)) = Target::from(target).local_file()? else { return Ok(None) };
        let target = redact_url(target).into_owned();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            return Err(Failure::Unsupported(format!(
                "{target}: the output cannot be a pipe or a device, because it is read back after writing"
            )));
        }
        let fail =
            |e| Failure::Library(Error::Io { target: target.clone(), action: "create", source: e });
        let folder = create(&to).map_err(fail)?;
        let path = folder.path().join("draft.s4w");
        Ok(Some(Self { target, to, old, replaces, path, folder }))
    }

    /// Where to write it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The error, which is about the file that this would have become.
    pub(crate) fn about_target(&self, mut error: Failure) -> Failure {
        if let Failure::Library(Error::Io { target, .. } | Error::Format { target, .. }) =
            &mut error
            && *target == self.path.display().to_string()
        {
            target.clone_from(&self.target);
        }
        error
    }

    /// Opens the written file. From here on this very file is used, whatever happens to its name.
    pub(crate) fn open(&self) -> Result<File> {
        let open = || {
            // A link, a pipe or a folder is not what was written, and opening a pipe would wait.
            if !fs::symlink_metadata(&self.path)?.is_file() {
                return Err(replaced());
            }
            let file = File::open(&self.path)?;
            self.check_name(&file)?;
            Ok(file)
        };
        Ok(open().map_err(|e| self.fail("open", e))?)
    }

    /// Reads what was written.
    pub(crate) fn source(&self, written: &File) -> Result<Source> {
        #[cfg(unix)]
        {
            let held = || {
                let (file, len) = (written.try_clone()?, written.metadata()?.len());
                Ok(Held { name: self.target.clone(), file, len })
            };
            let held = held().map_err(|e| self.fail("open", e))?;
            Ok(Source::ReadAt(self.target.clone(), Box::new(held)))
        }
        #[cfg(not(unix))]
        {
            let _ = written;
            Ok(Source::from(self.path()))
        }
    }

    /// Puts what was written in the place of the other file, durably.
    pub(crate) fn publish(self, written: File) -> Result<()> {
        let rename = || {
            self.take_over(&written)?;
            self.check_name(&written)?;
            // Elsewhere, an open file may not be renamed.
            drop(written);
            match self.replaces {
                true => fs::rename(&self.path, &self.to)?,
                false => Target::rename_new(&self.path, &self.to)?,
            }
            Target::sync_name(&self.to)
        };
        let renamed = rename().map_err(|e| self.fail("rename", e));
        // Empty, or with what was not renamed.
        drop(self.folder);
        Ok(renamed?)
    }

    /// Gives it the permissions and, where the system allows it, the owner of the file that it replaces, if any.
    #[cfg(unix)]
    fn take_over(&self, written: &File) -> io::Result<()> {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
        let Some(old) = &self.old else { return Ok(()) };
        // Only root may give files away, but anyone may choose one of their own groups.
        if fchown(written, Some(old.uid()), Some(old.gid())).is_err() {
            let _ = fchown(written, None, Some(old.gid()));
        }
        written.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))
    }

    #[cfg(not(unix))]
    fn take_over(&self, _: &File) -> io::Result<()> {
        // The file is open for reading only, which does not suffice elsewhere.
        let Some(old) = &self.old else { return Ok(()) };
        fs::set_permissions(&self.path, old.permissions())
    }

    /// Fails if the name is not that of this file any more.
    #[cfg(unix)]
    fn check_name(&self, written: &File) -> io::Result<()> {
        use std::os::unix::fs::MetadataExt;
        let identity = |found: Metadata| (found.dev(), found.ino());
        match identity(fs::symlink_metadata(&self.path)?) == identity(written.metadata()?) {
            true => Ok(()),
            false => Err(replaced()),
        }
    }

    #[cfg(not(unix))]
    fn check_name(&self, _: &File) -> io::Result<()> {
        Ok(())
    }

    fn fail(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { target: self.target.clone(), action, source }
    }
}

fn replaced() -> io::Error {
    io::Error::other("another program replaced the temporary file; nothing was changed")
}

/// Creates a folder next to `path` that only this user may use.
fn create(path: &Path) -> io::Result<TempDir> {
    let prefix = format!(".{}.", stem(path));
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o700));
    }
    builder.tempdir_in(folder(path))
}

/// A file that is read through its descriptor.
#[cfg(unix)]
struct Held {
    /// For messages.
    name: String,
    file: File,
    len: u64,
}

#[cfg(unix)]
impl s4weights::ReadAt for Held {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> s4weights::Result<()> {
        use std::os::unix::fs::FileExt;
        let read = self.file.read_exact_at(buf, offset);
        read.map_err(|source| Error::Io { target: self.name.clone(), action: "read", source })
    }
}

/// As much of a name as a temporary name has room for.
fn stem(path: &Path) -> String {
    let mut bytes = 0;
    let mut fits = |c: &char| {
        bytes += c.len_utf8();
        bytes <= LONGEST_STEM
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.chars().take_while(|c| fits(c)).collect()
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::files;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("there").permissions().mode() & 0o777
    }

    #[test]
    fn what_was_not_written_here_is_neither_changed_nor_published() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name| dir.path().join(name);
        for name in ["other", "out"] {
            fs::write(path(name), name).unwrap();
        }
        fs::set_permissions(path("other"), PermissionsExt::from_mode(0o600)).unwrap();
        fs::set_permissions(path("out"), PermissionsExt::from_mode(0o666)).unwrap();
        let draft = || Draft::of(path("out").to_str().unwrap(), true).unwrap().unwrap();
        for is_link in [true, false] {
            let swap = |draft: &Draft| {
                fs::remove_file(draft.path()).unwrap();
                match is_link {
                    true => symlink(path("other"), draft.path()).unwrap(),
                    false => fs::hard_link(path("other"), draft.path()).unwrap(),
                }
            };
            let late = draft();
            assert_eq!(mode(late.folder.path()), 0o700);
            fs::write(late.path(), "new").unwrap();
            let written = late.open().unwrap();
            swap(&late);
            let error = late.publish(written).unwrap_err();
            assert_eq!(error.exit_code(), 3);
            let said = error.to_string();
            assert!(said.contains("out: ") && said.contains("another program"), "{said}");
            assert_eq!(
                (fs::read(path("out")).unwrap(), mode(&path("out"))),
                (b"out".into(), 0o666)
            );
            assert_eq!(mode(&path("other")), 0o600);
        }
        let early = draft();
        symlink(path("other"), early.path()).unwrap();
        assert!(early.open().unwrap_err().to_string().contains("another program"));
        drop(early);
        let sound = draft();
        fs::write(sound.path(), "new").unwrap();
        let written = sound.open().unwrap();
        sound.publish(written).unwrap();
        assert_eq!((fs::read(path("out")).unwrap(), mode(&path("out"))), (b"new".into(), 0o666));
        // No folder is left.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_appears_meanwhile_is_replaced_only_if_that_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        for (replaces, there, left) in
            [(false, false, "new"), (false, true, "mine"), (true, true, "new")]
        {
            let _ = fs::remove_file(&out);
            let draft = Draft::of(out.to_str().unwrap(), replaces).unwrap().unwrap();
            fs::write(draft.path(), "new").unwrap();
            let written = draft.open().unwrap();
            if there {
                fs::write(&out, "mine").unwrap();
            }
            let published = draft.publish(written);
            let published =
                published.map_err(|e| files::unless_taken(e, out.to_str().unwrap(), replaces));
            match published {
                Ok(()) => assert!(replaces || !there),
                Err(e) => {
                    assert!(!replaces && there && e.exit_code() == 5, "{e}");
                    assert!(e.to_string().contains("out exists already; --force"), "{e}");
                }
            }
            assert_eq!(fs::read_to_string(&out).unwrap(), left);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }
}
