//! The local drive: where trainers write, accepted files, and how much room there is.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::folder::{free, make_folder, sync_folder};
use crate::lock::FolderLock;

/// How long files stay that nobody submitted, and (below) restored ones that nobody fetched.
const FORGOTTEN: Duration = Duration::from_secs(24 * 3600);
pub(crate) const UNFETCHED: Duration = Duration::from_secs(3600);

/// The error of opening a link with `O_NOFOLLOW`.
const LINK: i32 = rustix::io::Errno::LOOP.raw_os_error();

/// The folders below the staging folder.
#[derive(Debug, Clone)]
pub(crate) struct Staging {
    root: PathBuf,
    unclaimed: Arc<Mutex<HashMap<PathBuf, Unclaimed>>>,
    /// Keeps other processes out of these folders.
    _lock: Arc<FolderLock>,
}

/// A file that nobody has submitted or fetched yet.
#[derive(Debug, Clone, Copy)]
struct Unclaimed {
    /// Size and time of the last change, which show whether somebody still writes to it.
    mark: (u64, i64, i64),
    /// Since when it has been seen unchanged.
    since: Instant,
}

/// Why a file was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTaken {
    /// It is not there.
    #[error("{0} is not in the folder for incoming checkpoints")]
    Missing(String),
    /// It is something that must not be taken.
    #[error("{name}: {why}")]
    Refused {
        /// The file's name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An I/O error.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl Staging {
    /// Creates the folders. Trainers in the group write to `incoming`, where each may remove only
    /// its own files; everybody in the group can read `restored`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn open(root: &Path) -> Result<Self> {
        make_folder(root, 0o750)?;
        let lock = Arc::new(FolderLock::take(root)?);
        let staging = Self { root: root.to_path_buf(), unclaimed: Arc::default(), _lock: lock };
        for (folder, mode) in
            [(staging.incoming(), 0o3770), (staging.queue(), 0o700), (staging.restored(), 0o2770)]
        {
            make_folder(&folder, mode & 0o777)?;
            set_mode(&folder, mode).map_err(|e| Error::io("set the mode of", &folder, e))?;
        }
        sync_folder(root).map_err(|e| Error::io("sync", root, e))?;
        Ok(staging)
    }

    /// Where trainers write.
    #[must_use]
    pub(crate) fn incoming(&self) -> PathBuf {
        self.root.join("incoming")
    }

    /// Accepted files that are not compressed yet.
    fn queue(&self) -> PathBuf {
        self.root.join("queue")
    }

    /// Restored files, until they are fetched.
    #[must_use]
    pub(crate) fn restored(&self) -> PathBuf {
        self.root.join("restored")
    }

    /// The local store.
    #[must_use]
    pub(crate) fn local(&self) -> PathBuf {
        self.root.join("local")
    }

    /// Removes the local store.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn clear_local(&self) -> io::Result<()> {
        match fs::remove_dir_all(self.local()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// The staged file of a submission.
    #[must_use]
    pub(crate) fn staged(&self, id: Uuid) -> PathBuf {
        self.queue().join(format!("{id}.s4w"))
    }

    /// The file that a trainer writes for a submission.
    #[must_use]
    pub(crate) fn offered(&self, id: Uuid) -> PathBuf {
        self.incoming().join(format!("{id}.s4w"))
    }

    /// The size of the file that a trainer offers, after checking that it is a regular file of this
    /// user with a single name.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub(crate) fn look(&self, id: Uuid, uid: u32) -> std::result::Result<u64, NotTaken> {
        Ok(self.open_offered(id, uid)?.metadata()?.len())
    }

    fn open_offered(&self, id: Uuid, uid: u32) -> std::result::Result<File, NotTaken> {
        let name = format!("{id}.s4w");
        let refused = |why| NotTaken::Refused { name: name.clone(), why };
        // Links are not followed, and a pipe does not block.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.offered(id));
        let file = file.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => NotTaken::Missing(name.clone()),
            _ if e.raw_os_error() == Some(LINK) => refused("symbolic links are not accepted"),
            io::ErrorKind::PermissionDenied => {
                refused("the runner cannot read it: mode 0640 is needed")
            }
            _ => NotTaken::Io(e),
        })?;
        let about = file.metadata()?;
        match about {
            _ if !about.is_file() => Err(refused("not a regular file")),
            _ if about.nlink() != 1 => Err(refused("it has several hard links")),
            _ if about.uid() != uid => Err(refused("it belongs to another user")),
            _ => Ok(file),
        }
    }

    /// Takes a file that a trainer offers: it is synced under its new name when this returns.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub(crate) fn take(&self, id: Uuid, uid: u32) -> std::result::Result<u64, NotTaken> {
        let file = self.open_offered(id, uid)?;
        file.sync_all()?;
        let (from, to) = (self.offered(id), self.staged(id));
        fs::rename(&from, &to)?;
        // Until the rename, the name could have been given to another file; nobody else writes to
        // this folder.
        let (opened, taken) = (file.metadata()?, fs::symlink_metadata(&to)?);
        if (opened.ino(), opened.dev()) != (taken.ino(), taken.dev()) {
            fs::rename(&to, &from)?;
            let why = "it was replaced while the runner took it";
            return Err(NotTaken::Refused { name: format!("{id}.s4w"), why });
        }
        let synced = sync_folder(&self.queue()).and_then(|()| sync_folder(&self.incoming()));
        synced.inspect_err(|_| self.give_back(id))?;
        Ok(opened.len())
    }

    /// Moves a file that could not be accepted back to `incoming`.
    pub(crate) fn give_back(&self, id: Uuid) {
        if let Err(e) = fs::rename(self.staged(id), self.offered(id)) {
            tracing::warn!(%id, error = %e, "cannot move a file that was not accepted back out of the queue");
        }
    }

    /// Removes a staged file.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn remove(&self, id: Uuid) -> io::Result<()> {
        match fs::remove_file(self.staged(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Whether the staged file of a submission is there.
    #[must_use]
    pub(crate) fn has(&self, id: Uuid) -> bool {
        self.staged(id).is_file()
    }

    /// After a crash: gives back the files that were taken but never accepted, and removes those
    /// that their records no longer need.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn recover(
        &self,
        is_known: impl Fn(Uuid) -> bool,
        is_needed: impl Fn(Uuid) -> bool,
    ) -> Result<()> {
        let queue = self.queue();
        let io = |e| Error::io("read", &queue, e);
        for entry in fs::read_dir(&queue).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let id = path.file_stem().and_then(|s| Uuid::parse_str(&s.to_string_lossy()).ok());
            match id {
                Some(id) if !is_known(id) => {
                    tracing::warn!(%id, "giving back a file without a journal record");
                    self.give_back(id);
                }
                Some(id) if !is_needed(id) => {
                    self.remove(id).map_err(|e| Error::io("remove", &path, e))?;
                }
                _ => {}
            }
        }
        sync_folder(&queue).map_err(|e| Error::io("sync", &queue, e))
    }

    /// Removes files that nobody submitted for a day, or fetched for an hour, as seen by this
    /// process: the times of files come from the wall clock, which may have been set.
    pub(crate) fn tidy(&self, now: Instant) {
        let mut unclaimed = self.unclaimed.lock().unwrap_or_else(|e| e.into_inner());
        let before = std::mem::take(&mut *unclaimed);
        for (folder, forgotten) in [(self.incoming(), FORGOTTEN), (self.restored(), UNFETCHED)] {
            let entries = fs::read_dir(&folder).into_iter().flatten().filter_map(|e| e.ok());
            for path in entries.map(|e| e.path()) {
                let Ok(about) = fs::symlink_metadata(&path) else { continue };
                let mark = (about.len(), about.mtime(), about.mtime_nsec());
                let known = before.get(&path).filter(|known| known.mark == mark);
                let since = known.map_or(now, |known| known.since);
                if now.duration_since(since) > forgotten
                    && let Err(e) = fs::remove_file(&path)
                {
                    tracing::debug!(path = %path.display(), error = %e, "not removed");
                }
                unclaimed.insert(path, Unclaimed { mark, since });
            }
        }
    }

    /// Bytes that are free on the drive.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn free(&self) -> io::Result<u64> {
        free(&self.root)
    }
}

/// Sets the mode of a folder, whatever the umask. A sandbox may forbid the setgid bit: then the
/// administrator must set it, or trainers of other users cannot hand files over.
fn set_mode(folder: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(folder)?.permissions().mode() & 0o7777 == mode {
        return Ok(());
    }
    match fs::set_permissions(folder, fs::Permissions::from_mode(mode)) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && mode & 0o2000 != 0 => {
            tracing::warn!(folder = %folder.display(), "cannot set the setgid bit: only this user can submit files");
            fs::set_permissions(folder, fs::Permissions::from_mode(mode & !0o2000))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staging() -> (tempfile::TempDir, Staging, u32) {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::open(dir.path()).unwrap();
        (dir, staging, rustix::process::getuid().as_raw())
    }

    #[test]
    fn a_file_is_taken_once() {
        let (_dir, staging, uid) = staging();
        let id = Uuid::new_v4();
        fs::write(staging.offered(id), "abc").unwrap();
        assert_eq!((staging.look(id, uid).unwrap(), staging.take(id, uid).unwrap()), (3, 3));
        assert!(staging.has(id));
        assert!(matches!(staging.take(id, uid), Err(NotTaken::Missing(_))));
    }

    #[test]
    fn nothing_but_a_file_of_the_submitters_own_is_taken() {
        let (dir, staging, uid) = staging();
        let secret = dir.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let why = |id| staging.take(id, uid).unwrap_err().to_string();
        let [link, hard, folder, pipe, other] = [(); 5].map(|()| Uuid::new_v4());
        std::os::unix::fs::symlink(&secret, staging.offered(link)).unwrap();
        fs::hard_link(&secret, staging.offered(hard)).unwrap();
        fs::create_dir(staging.offered(folder)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(staging.offered(pipe)).status();
        assert!(made.unwrap().success());
        fs::write(staging.offered(other), "abc").unwrap();
        assert!(why(link).contains("link"), "{}", why(link));
        assert!(why(hard).contains("several hard links"), "{}", why(hard));
        assert!(why(folder).contains("not a regular file"), "{}", why(folder));
        assert!(why(pipe).contains("not a regular file"), "{}", why(pipe));
        let refused = staging.take(other, uid + 1).unwrap_err().to_string();
        assert!(refused.contains("another user"), "{refused}");
        for id in [link, hard, folder, pipe, other] {
            assert!(!staging.has(id));
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    }

    #[test]
    fn what_a_crash_left_is_given_back_or_removed() {
        let (_dir, staging, uid) = staging();
        let [unknown, needed, done] = [(); 3].map(|()| Uuid::new_v4());
        for id in [unknown, needed, done] {
            fs::write(staging.offered(id), "abc").unwrap();
            staging.take(id, uid).unwrap();
        }
        staging.recover(|id| id != unknown, |id| id == needed).unwrap();
        assert!(staging.has(needed) && !staging.has(done) && !staging.has(unknown));
        // Its trainer submits it again.
        assert_eq!(staging.take(unknown, uid).unwrap(), 3);
    }

    #[test]
    fn only_what_lay_untouched_for_long_is_removed_whatever_the_clock_says() {
        let (_dir, staging, _) = staging();
        let day = Duration::from_secs(24 * 3600);
        let set = |path: &Path, when| {
            File::options().write(true).open(path).unwrap().set_modified(when).unwrap();
        };
        let [ahead, behind, busy] = [(); 3].map(|()| staging.offered(Uuid::new_v4()));
        let restored = staging.restored().join("a.s4w");
        for path in [&ahead, &behind, &busy, &restored] {
            fs::write(path, "abc").unwrap();
        }
        // Written before the clock was set back, and before it was set forward.
        let wall = std::time::SystemTime::now();
        set(&ahead, wall + 30 * day);
        set(&behind, wall - 30 * day);
        let start = Instant::now();
        staging.tidy(start);
        staging.tidy(start + day / 24);
        assert!(restored.exists());
        staging.tidy(start + day / 2);
        assert!(!restored.exists(), "for an hour");
        fs::write(&busy, "abcd").unwrap();
        set(&busy, wall - 30 * day);
        staging.tidy(start + day);
        assert!([&ahead, &behind, &busy].iter().all(|path| path.exists()));
        staging.tidy(start + day + Duration::from_secs(1));
        assert!(busy.exists(), "somebody writes to it");
        assert!([&ahead, &behind].iter().all(|path| !path.exists()));
        staging.tidy(start + 3 * day);
        assert!(!busy.exists());
    }
}
