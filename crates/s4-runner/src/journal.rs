//! The journal: one file per record, always replaced as a whole. A change is on the drive when the
//! call that makes it returns.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::folder::{free, is_full, make_folder, sync_folder};
use crate::lock::FolderLock;
use crate::record::Record;

/// The most bytes of a record.
const MAX_RECORD: u64 = 256 << 10;
/// Bytes reserved on the drive for updates to the records of accepted checkpoints when it is full. Without them no
/// checkpoint could become durable, and only that makes room.
const RESERVE: usize = 256 << 10;

/// The folder of the records, locked by this process.
#[derive(Debug)]
pub(crate) struct Journal {
    folder: PathBuf,
    reserve: PathBuf,
    /// A file with the name of the store.
    store: PathBuf,
    known: KnownStore,
    _lock: FolderLock,
}

/// A record that cannot be read; its file was put aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Damaged {
    /// The file's name.
    pub name: String,
    /// What is wrong with it.
    pub why: String,
}

impl Journal {
    /// Opens the journal of a state folder, and reads it. If the process was killed while it
    /// replaced a record, the old record is still there.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process uses it; [`Error::Io`].
    pub(crate) fn open(state_dir: &Path) -> Result<(Self, Vec<Record>, Vec<Damaged>)> {
        make_folder(state_dir, 0o750)?;
        let lock = FolderLock::take(state_dir)?;
        let (folder, reserve) = (state_dir.join("journal"), state_dir.join("reserve"));
        let (store, known) = (state_dir.join("store"), KnownStore(state_dir.join("store-id")));
        let journal = Self { folder, reserve, store, known, _lock: lock };
        make_folder(&journal.folder, 0o700)?;
        sync_folder(state_dir).map_err(|e| Error::io("sync", state_dir, e))?;
        let (records, damaged) = journal.read()?;
        journal.take_reserve();
        Ok((journal, records, damaged))
    }

    fn read(&self) -> Result<(Vec<Record>, Vec<Damaged>)> {
        let (mut records, mut damaged) = (vec![], vec![]);
        let io = |e| Error::io("read", &self.folder, e);
        for entry in fs::read_dir(&self.folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match path.extension().and_then(|e| e.to_str()) {
                Some("json") => match read_record(&path) {
                    Ok(record) => records.push(record),
                    Err(why) => {
                        let aside = path.with_extension("damaged");
                        fs::rename(&path, &aside).map_err(|e| Error::io("rename", &path, e))?;
                        damaged.push(Damaged { name, why });
                    }
                },
                Some("damaged") => {
                    damaged
                        .push(Damaged { name, why: "it was set aside at an earlier start".into() });
                }
                // An incomplete write: the rename did not happen.
                Some("tmp") => fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?,
                _ => {}
            }
        }
        records.sort_by_key(|r| r.seq);
        Ok((records, damaged))
    }

    /// Writes a record.
    ///
    /// # Errors
    /// Any I/O error. The record is then the old one or the new one.
    pub(crate) fn put(&self, record: &Record) -> io::Result<()> {
        let path = self.path(record.id);
        let temporary = path.with_extension("tmp");
        let written = write_synced(&temporary, &serde_json::to_vec(record)?);
        written.and_then(|()| fs::rename(&temporary, &path)).inspect_err(|_| {
            // A partly written file takes up room.
            let _ = fs::remove_file(&temporary);
        })?;
        sync_folder(&self.folder)
    }

    /// Replaces the record of an accepted checkpoint, in the reserved room if the drive is full.
    ///
    /// # Errors
    /// As [`Journal::put`].
    pub(crate) fn put_again(&self, record: &Record) -> io::Result<()> {
        match self.put(record) {
            Err(e) if is_full(&e) => self.with_reserve(|| self.put(record)),
            other => {
                self.take_reserve();
                other
            }
        }
    }

    /// Releases the reserved room for `work`, which frees room but first needs some.
    pub(crate) fn with_reserve<T>(&self, work: impl FnOnce() -> T) -> T {
        // The reserve may already be used up.
        let _ = fs::remove_file(&self.reserve);
        let done = work();
        self.take_reserve();
        done
    }

    /// Reserves the room again, if it is not reserved and the drive has it.
    fn take_reserve(&self) {
        if !self.reserve.exists() && write_synced(&self.reserve, &vec![b'-'; RESERVE]).is_err() {
            // It may not exist.
            let _ = fs::remove_file(&self.reserve);
        }
    }

    /// Whether the journal's folder can be written.
    pub(crate) fn is_writable(&self) -> bool {
        rustix::fs::access(&self.folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
    }

    /// Bytes that are free on the journal's drive.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn free(&self) -> io::Result<u64> {
        free(&self.folder)
    }

    /// The name of the store that the records belong to, if it was recorded.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn store(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(&self.store) {
            Ok(name) => Ok(Some(name)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Records the name of the store.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn set_store(&self, name: &str) -> io::Result<()> {
        if self.store()?.as_deref() == Some(name) {
            return Ok(());
        }
        replace(&self.store, name)
    }

    /// Where the id of that store is recorded.
    pub(crate) fn known_store(&self) -> &KnownStore {
        &self.known
    }

    /// Forgets a record.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn remove(&self, id: Uuid) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn path(&self, id: Uuid) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }
}

/// The file with the id of the store, once that has been opened.
#[derive(Debug, Clone)]
pub(crate) struct KnownStore(PathBuf);

impl KnownStore {
    /// The id, if it was recorded.
    ///
    /// # Errors
    /// Any I/O error; `InvalidData` if the file holds something else.
    pub(crate) fn get(&self) -> io::Result<Option<Uuid>> {
        match fs::read_to_string(&self.0) {
            Ok(id) => Uuid::parse_str(id.trim()).map(Some).map_err(|e| {
                let what =
                    format!("{e}; if the file is removed, any store found there is accepted");
                io::Error::new(io::ErrorKind::InvalidData, what)
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Records the id.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn set(&self, id: Uuid) -> io::Result<()> {
        replace(&self.0, &id.to_string())
    }

    /// Forgets the id.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn forget(&self) -> io::Result<()> {
        match fs::remove_file(&self.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

/// Replaces a small file; afterwards it is on the drive.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    write_synced(&temporary, text.as_bytes())?;
    fs::rename(&temporary, path)?;
    sync_folder(path.parent().unwrap_or(path))
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut open = OpenOptions::new();
    let mut file = open.create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn read_record(path: &Path) -> std::result::Result<Record, String> {
    let mut text = vec![];
    let file = File::open(path).map_err(|e| e.to_string())?;
    file.take(MAX_RECORD + 1).read_to_end(&mut text).map_err(|e| e.to_string())?;
    if text.len() as u64 > MAX_RECORD {
        return Err(format!("more than {MAX_RECORD} bytes"));
    }
    let record: Record = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    match (record.v, stem == record.id.to_string()) {
        (1, true) => Ok(record),
        (1, false) => Err("it belongs to another submission".into()),
        (v, _) => Err(format!("version {v} is not supported, only version 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::record::State;

    fn record(seq: u64) -> Record {
        Record {
            seq,
            staged_bytes: 1,
            metrics: [("loss".to_owned(), 0.1 + 0.2)].into(),
            tags: [("run".to_owned(), "a".to_owned())].into(),
            uid: 1,
            submitted_ms: 5,
            submitted_at: None,
            ..Record::new(Uuid::new_v4(), seq * 10, &Moment::now())
        }
    }

    #[test]
    fn what_was_written_is_read_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, found, _) = Journal::open(dir.path()).unwrap();
        assert!(found.is_empty());
        let (first, mut second) = (record(1), record(2));
        journal.put(&second).unwrap();
        journal.put(&first).unwrap();
        second.state = State::Durable;
        journal.put(&second).unwrap();
        drop(journal);
        let (journal, found, damaged) = Journal::open(dir.path()).unwrap();
        assert_eq!((&found, damaged), (&vec![first.clone(), second], vec![]));
        journal.remove(first.id).unwrap();
        journal.remove(first.id).unwrap();
        drop(journal);
        assert_eq!(Journal::open(dir.path()).unwrap().1.len(), 1);
    }

    #[test]
    fn a_second_process_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _first = Journal::open(dir.path()).unwrap();
        assert!(matches!(Journal::open(dir.path()), Err(Error::Locked(_))));
    }

    #[test]
    fn what_is_no_record_is_put_aside_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, ..) = Journal::open(dir.path()).unwrap();
        let (whole, other) = (record(1), record(2));
        journal.put(&whole).unwrap();
        let text = serde_json::to_string(&other).unwrap();
        let folder = dir.path().join("journal");
        for (name, text) in [
            (Uuid::new_v4().to_string(), text.clone()),
            (other.id.to_string(), text[..text.len() / 2].to_owned()),
            (Uuid::new_v4().to_string(), text.replace("\"v\":1", "\"v\":2")),
            (Uuid::new_v4().to_string(), " ".repeat(MAX_RECORD as usize + 1)),
        ] {
            fs::write(folder.join(format!("{name}.json")), text).unwrap();
        }
        fs::write(folder.join("half.tmp"), "{").unwrap();
        drop(journal);
        let (_, found, damaged) = Journal::open(dir.path()).unwrap();
        assert_eq!(found, [whole]);
        assert_eq!(damaged.len(), 4, "{damaged:?}");
        let kept = fs::read_dir(&folder).unwrap().filter_map(|e| e.ok());
        let kept: Vec<_> = kept.map(|e| e.file_name().into_string().unwrap()).collect();
        assert_eq!(kept.iter().filter(|n| n.ends_with(".damaged")).count(), 4, "{kept:?}");
        assert!(!kept.contains(&"half.tmp".to_owned()));
    }

    #[test]
    fn room_is_kept_and_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, ..) = Journal::open(dir.path()).unwrap();
        let reserve = dir.path().join("reserve");
        assert_eq!(fs::metadata(&reserve).unwrap().len(), RESERVE as u64);
        journal.with_reserve(|| assert!(!reserve.exists()));
        assert!(reserve.exists());
        fs::remove_file(&reserve).unwrap();
        journal.put_again(&record(1)).unwrap();
        assert!(reserve.exists() && journal.free().unwrap() > 0);
    }
}
