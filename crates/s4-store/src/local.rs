//! Local folders, where they differ from an object store: syncing, leftovers, kind of file system.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::layout::Layout;

/// A store's folder.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    root: PathBuf,
    trust: Trust,
}

/// A file that a killed writer left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leftover {
    pub(crate) path: PathBuf,
    pub(crate) len: u64,
    pub(crate) modified: SystemTime,
}

/// How far a file system can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// On a disk of this machine: what cannot be read is damaged.
    Disk,
    /// Not known to be any of the others.
    Full,
    /// Works as far as is known, but caches may be stale for a while.
    Doubtful(&'static str),
    /// Known to lack guarantees that the store depends on.
    None(&'static str),
}

impl Folder {
    /// Creates the folder and its missing parents, durably.
    pub(crate) fn create(root: &Path) -> Result<Self> {
        let root = std::path::absolute(root).map_err(|e| at("find", root, e))?;
        let mut existing = root.as_path();
        while !existing.exists() {
            match existing.parent() {
                Some(parent) => existing = parent,
                None => break,
            }
        }
        fs::create_dir_all(&root).map_err(|e| at("create", &root, e))?;
        for made in root.ancestors().take_while(|a| *a != existing).chain([existing]) {
            sync(made)?;
        }
        Ok(Self::at(root))
    }

    /// The folder; `None` if there is nothing of this name.
    pub(crate) fn existing(root: &Path) -> Result<Option<Self>> {
        let root = std::path::absolute(root).map_err(|e| at("find", root, e))?;
        match fs::metadata(&root) {
            Ok(meta) if meta.is_dir() => Ok(Some(Self::at(root))),
            Ok(_) => Err(at("open", &root, io::ErrorKind::NotADirectory.into())),
            // But a dangling link is an error: it may lead to a file system that is not mounted.
            Err(e)
                if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(&root).is_err() =>
            {
                Ok(None)
            }
            Err(e) => Err(at("open", &root, e)),
        }
    }

    fn at(root: PathBuf) -> Self {
        let trust = trust_of(&root);
        Self { root, trust }
    }

    /// The same folder, with its file system trusted to this degree.
    #[cfg(test)]
    pub(crate) fn trusted(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the names in a folder of the store durable. Another process may have created one just
    /// now and not synced it yet.
    pub(crate) fn sync_names(&self, folder: &object_store::path::Path) -> Result<()> {
        let path = self.path_of(folder);
        if path.exists() { sync(&path) } else { Ok(()) }
    }

    /// Files named `<object>#<number>`, which `object_store` writes in a local folder before it
    /// links or renames them. A writer that is killed leaves one, and listings do not show it.
    /// Files of others in the same folder are left alone, and need not be readable.
    pub(crate) fn leftovers(&self, layout: &Layout) -> Result<Vec<Leftover>> {
        let single = layout.single_keys();
        let is_own = |name: &str| {
            object_of(name)
                .is_some_and(|object| single.iter().any(|k| k.filename() == Some(object)))
        };
        let (_, mut found) = self.staging_files(&self.root, &is_own)?;
        let mut open: Vec<_> = layout.folders().iter().map(|folder| self.path_of(folder)).collect();
        while let Some(folder) = open.pop() {
            let (folders, files) =
                self.staging_files(&folder, &|name| object_of(name).is_some())?;
            open.extend(folders);
            found.extend(files);
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// The folders in a folder, and the files whose names `wanted` accepts. None if it is not there.
    fn staging_files(
        &self,
        folder: &Path,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(Vec<PathBuf>, Vec<Leftover>)> {
        let (mut folders, mut files) = (vec![], vec![]);
        let entries = match fs::read_dir(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((folders, files)),
            other => other.map_err(|e| at("list", folder, e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| at("list", folder, e))?;
            let path = entry.path();
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                folders.push(path);
            } else if wanted(&entry.file_name().to_string_lossy()) {
                let modified = meta.modified().map_err(|e| at("look up", &path, e))?;
                files.push(Leftover { path, len: meta.len(), modified });
            }
        }
        Ok((folders, files))
    }

    pub(crate) fn remove(&self, leftover: &Leftover) -> Result<()> {
        match fs::remove_file(&leftover.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(at("delete", &leftover.path, e)),
            _ => Ok(()),
        }
    }

    /// When something in a folder of the store was last made or removed.
    pub(crate) fn modified(&self, folder: &object_store::path::Path) -> Option<SystemTime> {
        fs::metadata(self.path_of(folder)).and_then(|meta| meta.modified()).ok()
    }

    /// Removes a folder of the store if it is empty.
    pub(crate) fn remove_if_empty(&self, folder: &object_store::path::Path) {
        // Not empty, or gone: both are fine.
        let _ = fs::remove_dir(self.path_of(folder));
    }

    pub(crate) fn path_of(&self, key: &object_store::path::Path) -> PathBuf {
        key.parts().fold(self.root.clone(), |path, part| path.join(part.as_ref()))
    }

    /// Whether an unreadable file counts as damaged: over a network, the failure may be temporary.
    pub(crate) fn is_on_disk(&self) -> bool {
        self.trust == Trust::Disk
    }

    /// Whether the file system is local, as far as is known: it then answers immediately, and dates files by this
    /// machine's clock. Other file systems may be as slow as a server.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.trust, Trust::Disk | Trust::Full)
    }

    /// Refuses a file system whose guarantees are too weak for writers, unless `allow` says so, and
    /// warns of a doubtful one.
    pub(crate) fn check_writable(&self, allow: bool) -> Result<()> {
        let path = self.root.display();
        match self.trust {
            Trust::Disk | Trust::Full => {}
            Trust::Doubtful(kind) => tracing::warn!(
                "{path} is on {kind}: other machines may see writes late, and a power failure may undo \
                 acknowledged writes"
            ),
            Trust::None(kind) if allow => {
                tracing::warn!("{path} is on {kind}, whose guarantees are too weak for a store");
            }
            Trust::None(kind) => {
                return Err(Error::Refused(format!(
                    "{path} is on {kind}, whose guarantees are too weak for a checkpoint store; \
                     set `allow_network_fs` to use it anyway"
                )));
            }
        }
        Ok(())
    }
}

/// The name of the object that a file named `<object>#<number>` was to become.
fn object_of(name: &str) -> Option<&str> {
    let (object, number) = name.rsplit_once('#')?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(object)
}

#[cfg(unix)]
fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| at("sync", folder, e))
}

#[cfg(not(unix))]
fn sync(folder: &Path) -> Result<()> {
    // Other systems cannot open a folder as a file; their file systems order names by themselves.
    let _ = (folder, File::open);
    Ok(())
}

fn at(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { action, path: path.display().to_string(), source }
}

#[cfg(target_os = "linux")]
fn trust_of(path: &Path) -> Trust {
    match rustix::fs::statfs(path) {
        // The field's type differs between machines; the numbers fit 32 bits.
        Ok(stat) => trust_of_magic(stat.f_type as u32),
        Err(_) => Trust::Full,
    }
}

#[cfg(not(target_os = "linux"))]
fn trust_of(_: &Path) -> Trust {
    Trust::Full
}

#[cfg(any(target_os = "linux", test))]
fn trust_of_magic(magic: u32) -> Trust {
    match magic {
        0x6969 => Trust::Doubtful("NFS"),
        0x6573_5546 => Trust::Doubtful("FUSE"),
        0x0102_1997 => Trust::Doubtful("9p"),
        0x517b | 0xfe53_4d42 | 0xff53_4d42 => Trust::None("SMB"),
        0x5346_414f | 0x6b41_4653 => Trust::None("AFS"),
        // ext4, XFS, Btrfs, ZFS, F2FS, bcachefs, JFS, exFAT, FAT, NTFS, and a container's overlay.
        0xef53 | 0x5846_5342 | 0x9123_683e | 0x2fc1_2fc1 | 0xf2f5_2010 | 0xca45_1a4e
        | 0x3153_464a | 0x2011_bab0 | 0x4d44 | 0x7366_746e | 0x794c_7630 => Trust::Disk,
        _ => Trust::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_staging_files_are_leftovers() {
        let temp = tempfile::tempdir().unwrap();
        let folder = Folder::create(&temp.path().join("a/b")).unwrap();
        assert!(Folder::existing(&temp.path().join("a/c")).unwrap().is_none());
        fs::write(temp.path().join("file"), b"").unwrap();
        assert!(Folder::existing(&temp.path().join("file")).is_err());
        assert!(Folder::existing(&temp.path().join("file/c")).is_err());
        for made in ["log", "ck/x", "exports", "lost+found"] {
            fs::create_dir_all(folder.root().join(made)).unwrap();
        }
        let own = ["ck/x/d-0#1", "log/00001#23", "logck#7"];
        let others =
            ["ck/x/d-0", "log/x#", "log/x#1a", "exports/model#2", "model#2", "lost+found/#12"];
        for name in own.iter().chain(&others) {
            fs::write(folder.root().join(name), b"12").unwrap();
        }
        // Files that are not the store's need not be readable.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let nobody = fs::Permissions::from_mode(0o000);
            fs::set_permissions(folder.root().join("lost+found"), nobody).unwrap();
        }
        let leftovers = || folder.leftovers(&Layout::new(Default::default())).unwrap();
        let found = leftovers();
        let names = found.iter().map(|l| l.path.strip_prefix(folder.root()).unwrap());
        assert!(names.eq(own.iter().map(Path::new)), "{found:?}");
        assert!(found.iter().all(|l| l.len == 2));
        folder.remove(&found[1]).unwrap();
        folder.remove(&found[1]).unwrap();
        assert_eq!(leftovers().len(), 2);
    }

    /// A store may be copied to a file system where none would be created.
    #[tokio::test]
    async fn a_store_on_a_file_system_that_is_too_weak_can_only_be_read() {
        use crate::testing::{quick_options, toy};
        use crate::{Place, Store, StoreOptions, Writers};
        for writers in [Writers::Many, Writers::Single] {
            let temp = tempfile::tempdir().unwrap();
            let place = Place::folder(temp.path());
            let options =
                |allow_network_fs| StoreOptions { writers, allow_network_fs, ..quick_options() };
            let store = Store::create(&place, options(false)).await.unwrap();
            let id = toy::save(&store, 1, None, &[1; 20]).await.unwrap().id();
            let begun = store.begin().await.unwrap().id();
            store.release().await.unwrap();
            for allow in [false, true] {
                let mut store = Store::open(&place, options(allow)).await.unwrap();
                let inner = std::sync::Arc::get_mut(&mut store.inner).unwrap();
                let weak = |folder: Folder| folder.trusted(Trust::None("SMB"));
                inner.folder = inner.folder.take().map(weak);
                assert_eq!(store.list().await.unwrap().len(), 1);
                let done = [
                    store.pin(id).await,
                    store.begin().await.map(drop),
                    store.join(begun, 1).await.map(drop),
                ];
                for done in done {
                    assert!(allow == done.is_ok(), "{done:?}");
                    assert!(allow || matches!(done, Err(Error::Refused(_))), "{done:?}");
                }
                let leases = fs::read_dir(temp.path().join("lease")).map_or(0, Iterator::count);
                assert_eq!(leases, usize::from(allow && writers == Writers::Single));
            }
        }
    }

    #[test]
    fn network_file_systems_are_known() {
        assert_eq!(trust_of_magic(0xef53), Trust::Disk);
        // Lustre: what it cannot read now may be there when its server is.
        assert_eq!(trust_of_magic(0x0bd0_0bd0), Trust::Full);
        assert!(matches!(trust_of_magic(0x6969), Trust::Doubtful(_)));
        assert!(matches!(trust_of_magic(0xff53_4d42), Trust::None(_)));
        let temp = tempfile::tempdir().unwrap();
        let folder = Folder::create(temp.path()).unwrap();
        folder.check_writable(false).unwrap();
        let weak = folder.trusted(Trust::None("SMB"));
        let refused = weak.check_writable(false).unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{refused}");
        weak.check_writable(true).unwrap();
    }
}
