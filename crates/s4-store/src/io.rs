//! Requests to the object store: retried where that is safe, bounded in memory, time and rate.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::cause::is_unreadable;
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::local::Folder;
use crate::manifest::MAX_OBJECT;
use crate::options::{PutFiles, Retry};
use crate::retry::{Progress, Retrier};

pub(crate) use crate::retry::is_permanent;

/// One permit represents this many bytes, so that a semaphore's 32 bits suffice for any budget.
const UNIT: usize = 1024;

/// Most bytes of a file that is read directly: handing the read to another thread would take
/// longer.
const SMALL_FILE: u64 = 256 << 10;

/// The object store with retries and budgets.
pub(crate) struct Io {
    store: Arc<dyn ObjectStore>,
    retrier: Retrier,
    gate: Arc<Semaphore>,
    units: u32,
    pace: Option<Pace>,
    /// The folder, if the objects are files in one.
    folder: Option<Folder>,
    /// Writes these files, if the object store does not.
    files: Option<Arc<dyn PutFiles>>,
}

impl fmt::Debug for Io {
    /// The object store's own `Debug` may hold credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Io").field("retry", self.retrier.retry()).field("pace", &self.pace).finish()
    }
}

impl Io {
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        retry: Retry,
        memory: usize,
        bytes_per_second: Option<u64>,
    ) -> Self {
        let units = u32::try_from((memory / UNIT).max(1)).unwrap_or(u32::MAX >> 3);
        Self {
            store,
            retrier: Retrier::new(retry),
            gate: Arc::new(Semaphore::new(units as usize)),
            units,
            pace: bytes_per_second.map(|rate| Pace { rate: rate.max(1), free: Mutex::default() }),
            folder: None,
            files: None,
        }
    }

    /// The same, for objects that are files in a folder.
    pub(crate) fn in_folder(self, folder: Option<Folder>) -> Self {
        Self { folder, ..self }
    }

    /// The same, with files written by `files`, if that is given.
    pub(crate) fn with_files(self, files: Option<Arc<dyn PutFiles>>) -> Self {
        Self { files, ..self }
    }

    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(crate) fn retry(&self) -> &Retry {
        self.retrier.retry()
    }

    /// Whether trying again is pointless.
    pub(crate) fn is_permanent(&self, error: &object_store::Error) -> bool {
        self.retrier.is_permanent(error)
    }

    /// Waits until `len` more bytes may be held in memory. An object that is larger than the whole
    /// budget waits until it is alone.
    pub(crate) async fn reserve(&self, len: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(len.div_ceil(UNIT)).unwrap_or(u32::MAX).clamp(1, self.units);
        let permit = Arc::clone(&self.gate).acquire_many_owned(units).await;
        permit.map_err(|e| Error::Refused(e.to_string()))
    }

    /// Writes an object whose key belongs to this writer alone, so that repeating the write changes
    /// nothing.
    pub(crate) async fn put(&self, key: &Path, bytes: Bytes) -> Result<()> {
        self.put_parts(key, bytes.into()).await
    }

    /// As [`Io::put`], for an object in parts.
    pub(crate) async fn put_parts(&self, key: &Path, parts: PutPayload) -> Result<()> {
        let len = parts.content_length();
        if let Some(pace) = &self.pace {
            pace.wait(len).await;
        }
        if self.put_file(key, &parts).await {
            return Ok(());
        }
        let put = || async { self.store.put(key, parts.clone()).await.map(drop) };
        self.retrier.run("write", key.as_ref(), len as u64, put).await
    }

    /// Tries to write the object by [`PutFiles`]; returns whether that worked. If not, the object
    /// store tries, and its error says what is wrong.
    async fn put_file(&self, key: &Path, parts: &PutPayload) -> bool {
        let Some((files, folder)) = self.files.clone().zip(self.folder.as_ref()) else {
            return false;
        };
        let (path, parts) = (folder.path_of(key), parts.clone());
        let put = tokio::task::spawn_blocking(move || files.put(&path, &parts));
        matches!(put.await, Ok(Ok(true)))
    }

    /// One try to create an object. The error does not say whether it was created.
    pub(crate) async fn create_once(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        self.store.put_opts(key, bytes.into(), PutMode::Create.into()).await.map(drop)
    }

    /// One try to write an object.
    pub(crate) async fn put_once(&self, key: &Path, bytes: Bytes) -> object_store::Result<()> {
        self.store.put(key, bytes.into()).await.map(drop)
    }

    /// Reads a whole object of at most `max` bytes.
    pub(crate) async fn get(&self, key: &Path, max: u64) -> Result<Bytes> {
        let most = max.min(SMALL_FILE);
        let quick = self.in_files(std::slice::from_ref(key), move |path| read_file(path, most));
        match quick.await.pop().flatten() {
            Some(done) => done,
            None => self.request(key, max).await,
        }
    }

    /// As [`Io::get`], for several objects in parallel.
    pub(crate) async fn get_each(&self, keys: Vec<Path>, max: u64) -> Vec<Result<Bytes>> {
        let quick = self.in_files(&keys, move |path| read_file(path, max)).await;
        let get = |(key, quick): (Path, Option<Result<Bytes>>)| async move {
            match quick {
                Some(done) => done,
                None => self.request(&key, max).await,
            }
        };
        futures::future::join_all(keys.into_iter().zip(quick).map(get)).await
    }

    /// The sizes of several objects in bytes, looked up in parallel, `most` at a time.
    pub(crate) async fn size_each(&self, keys: Vec<Path>, most: usize) -> Vec<Result<u64>> {
        let quick = self.in_files(&keys, file_len).await;
        let size = |(key, quick): (Path, Option<Result<u64>>)| async move {
            match quick {
                Some(done) => done,
                None => self.head(&key).await.map(|meta| meta.size),
            }
        };
        futures::stream::iter(keys.into_iter().zip(quick)).map(size).buffered(most).collect().await
    }

    /// Calls `look` on the objects' files, if objects are files: on this thread if the file system is local, else
    /// in a single task on another thread. For small local files that hand-over would take longer than reading.
    /// `None` for a key: make a request, which reports the error, if there is one.
    async fn in_files<T: Send + 'static>(
        &self,
        keys: &[Path],
        look: impl Fn(&std::path::Path) -> io::Result<T> + Send + 'static,
    ) -> Vec<Option<Result<T>>> {
        let nothing = || -> Vec<Option<Result<T>>> { keys.iter().map(|_| None).collect() };
        let Some(folder) = &self.folder else { return nothing() };
        let paths: Vec<_> = keys.iter().map(|key| folder.path_of(key)).collect();
        let all = move || paths.iter().map(|path| look(path)).collect::<Vec<_>>();
        let found = if folder.is_local() {
            all()
        } else {
            let deadline = self.retry().deadline;
            let looking = tokio::time::timeout(deadline, tokio::task::spawn_blocking(all));
            let Ok(Ok(found)) = looking.await else { return nothing() };
            found
        };
        let told = |(found, key): (io::Result<T>, &Path)| match found {
            Ok(found) => Some(Ok(found)),
            // A dangling link: listings do not show it, and nothing can be created in its place. If it counted as a
            // missing object, readers would take it for the end of the log, and writers would retry forever.
            Err(e) if e.kind() == io::ErrorKind::NotFound && folder.path_of(key).is_symlink() => {
                let what = "dangling link: is a file system not mounted?";
                Some(Err(Error::corrupt(key, what)))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Some(Err(Error::missing(key))),
            Err(_) => None,
        };
        found.into_iter().zip(keys).map(told).collect()
    }

    /// Makes a read request, with retries. An object that a local disk fails to read twice counts as damaged:
    /// further retries would not help.
    async fn read<T, F>(
        &self,
        action: &'static str,
        key: &Path,
        bytes: u64,
        mut request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let on_disk = self.folder.as_ref().is_some_and(Folder::is_on_disk);
        let is_bad = |e: &_| on_disk && Failure::new(e).errno().is_some_and(is_unreadable);
        let again = &AtomicBool::new(false);
        let request = || {
            let trying = request();
            async move {
                match trying.await {
                    Err(e) if is_bad(&e) && again.swap(true, Ordering::Relaxed) => {
                        Ok(Err(Error::unreadable(key)))
                    }
                    other => other.map(Ok),
                }
            }
        };
        self.retrier.run(action, key.as_ref(), bytes, request).await?
    }

    async fn request(&self, key: &Path, max: u64) -> Result<Bytes> {
        let get = || async {
            let result = self.store.get(key).await?;
            match result.meta.size {
                size if size > max => Ok(Err(size)),
                size => whole(result, size).await.map(Ok),
            }
        };
        let bytes = self.read("read", key, max.min(MAX_OBJECT as u64), get).await?;
        bytes.map_err(|size| {
            Error::corrupt(key, format!("object has {size} bytes, expected at most {max}"))
        })
    }

    /// Reads a whole object and checks it, a second time if the check fails: the bytes may have been damaged in
    /// transit, and a second read shows whether the stored ones are.
    pub(crate) async fn get_checked<T>(
        &self,
        key: &Path,
        max: u64,
        check: impl Fn(&Bytes) -> Result<T>,
    ) -> Result<T> {
        match check(&self.get(key, max).await?) {
            Err(Error::Corrupt { .. }) => check(&self.get(key, max).await?),
            other => other,
        }
    }

    /// Reads a range of an object. The caller has checked it against the length that the object should
    /// have; if it is shorter, that is [`Error::Corrupt`].
    pub(crate) async fn get_range(&self, key: &Path, range: Range<u64>) -> Result<Bytes> {
        let len = range.end - range.start;
        if len == 0 {
            return Ok(Bytes::new());
        }
        let get = || async {
            let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
            let result = self.store.get_opts(key, options).await?;
            match result.meta.size {
                size if size < range.end => Ok(Err(size)),
                _ => whole(result, len).await.map(Ok),
            }
        };
        let size = match self.read("read", key, len, get).await {
            Ok(Ok(bytes)) => return Ok(bytes),
            Ok(Err(size)) => size,
            // Stores refuse a range that begins beyond the end, each with an error of its own.
            Err(e @ (Error::Storage { .. } | Error::Deadline { .. })) => {
                match self.store.head(key).await {
                    Ok(meta) if meta.size < range.end => meta.size,
                    _ => return Err(e),
                }
            }
            Err(e) => return Err(e),
        };
        let what = format!(
            "object has {size} bytes, but bytes {} to {} are needed",
            range.start, range.end
        );
        Err(Error::corrupt(key, what))
    }

    pub(crate) async fn head(&self, key: &Path) -> Result<ObjectMeta> {
        self.read("look up", key, 0, || self.store.head(key)).await
    }

    /// All objects below `prefix`, after `offset` if there is one, in no particular order. A local
    /// folder that does not exist counts as empty; a server that does not know the place is an
    /// error.
    pub(crate) async fn list(
        &self,
        prefix: &Path,
        offset: Option<&Path>,
    ) -> Result<Vec<ObjectMeta>> {
        // A listing of millions of objects takes many minutes, page by page.
        let progress = Progress::default();
        let list = || async {
            match offset {
                Some(offset) => self.store.list_with_offset(Some(prefix), offset),
                None => self.store.list(Some(prefix)),
            }
            .inspect_ok(|_| progress.made())
            .try_collect::<Vec<_>>()
            .await
        };
        self.retrier.run_while_moving("list", prefix.as_ref(), 0, &progress, list).await
    }

    /// Deletes an object; it need not exist.
    pub(crate) async fn delete(&self, key: &Path) -> Result<()> {
        match self.retrier.run("delete", key.as_ref(), 0, || self.store.delete(key)).await {
            Err(e) if e.is_missing() => Ok(()),
            other => other,
        }
    }

    /// Makes a request that transfers little, with retries.
    pub(crate) async fn retrying<T, F>(
        &self,
        action: &'static str,
        key: &Path,
        request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.retrier.run(action, key.as_ref(), 0, request).await
    }
}

/// A whole file of at most `max` bytes.
fn read_file(path: &std::path::Path, max: u64) -> io::Result<Bytes> {
    let mut file = File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > max {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(meta.len()).unwrap_or(0));
    file.read_to_end(&mut bytes)?;
    match bytes.len() as u64 == meta.len() {
        true => Ok(bytes.into()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn file_len(path: &std::path::Path) -> io::Result<u64> {
    let meta = fs::metadata(path)?;
    if meta.is_file() { Ok(meta.len()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// The error for an object that is shorter than it must be.
pub(crate) fn too_short(key: &Path, size: u64, needed: u64) -> Error {
    Error::corrupt(key, format!("object has {size} bytes, expected at least {needed}"))
}

/// The body, if it has the length that it should have: a broken connection may look like the end of
/// the body.
async fn whole(result: GetResult, len: u64) -> object_store::Result<Bytes> {
    let size = result.meta.size;
    let bytes = result.bytes().await?;
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    let source = format!("received {} of {len} bytes; the object has {size}", bytes.len()).into();
    Err(object_store::Error::Generic { store: "short answer", source })
}

/// Spreads uploads over time.
#[derive(Debug)]
struct Pace {
    rate: u64,
    /// The time at which the link is free again.
    free: Mutex<Option<Instant>>,
}

impl Pace {
    async fn wait(&self, len: usize) {
        let now = Instant::now();
        let start = {
            let mut free = self.free.lock().await;
            let start = free.map_or(now, |at| at.max(now));
            *free = Some(start + Duration::from_secs_f64(len as f64 / self.rate as f64));
            start
        };
        tokio::time::sleep_until(start).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    /// Writes files of five bytes or more unless they exist already, and fails for four bytes.
    #[derive(Debug, Default)]
    struct Long(std::sync::Mutex<Vec<usize>>);

    impl PutFiles for Long {
        fn put(&self, path: &std::path::Path, parts: &PutPayload) -> io::Result<bool> {
            let len = parts.content_length();
            self.0.lock().unwrap().push(len);
            if len < 5 || path.exists() {
                return if len == 4 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(false) };
            }
            fs::write(path, parts.iter().flatten().copied().collect::<Vec<_>>())?;
            Ok(true)
        }
    }

    #[tokio::test]
    async fn files_are_written_as_told_or_by_the_object_store() {
        let folder = tempfile::tempdir().unwrap();
        let there = crate::Place::folder(folder.path()).connect(true).unwrap();
        let files = Arc::new(Long::default());
        let io = || Io::new(Arc::clone(&there.store), Retry::default(), 1 << 20, None);
        let told = io().in_folder(there.folder.clone()).with_files(Some(files.clone()));
        let key = Path::from("data/0");
        // The first write creates the folder; the later ones replace the file.
        for parts in [["ab", "c"], ["ab", "cd"], ["abc", "de"], ["xyz", "uvw"]] {
            let payload: PutPayload = parts.iter().map(|p| Bytes::from(*p)).collect();
            told.put_parts(&key, payload).await.unwrap();
            assert_eq!(told.get(&key, 10).await.unwrap(), parts.concat());
        }
        // Without a folder, objects are not files.
        io().with_files(Some(files.clone())).put(&key, Bytes::from("abcdef")).await.unwrap();
        assert_eq!(*files.0.lock().unwrap(), [3, 4, 5, 6]);
        // A new file is written by `PutFiles`, not by the object store.
        fs::remove_file(folder.path().join("data/0")).unwrap();
        told.put(&key, Bytes::from("abcdef")).await.unwrap();
        assert_eq!(fs::read(folder.path().join("data/0")).unwrap(), b"abcdef");
    }

    #[tokio::test(start_paused = true)]
    async fn uploads_keep_to_the_rate() {
        let io = Io::new(Arc::new(InMemory::new()), Retry::default(), 1 << 20, Some(1000));
        let start = Instant::now();
        for i in 0..4 {
            io.put(&Path::from(format!("{i}")), Bytes::from(vec![0; 500])).await.unwrap();
        }
        assert_eq!(start.elapsed().as_millis() / 10, 150);
    }

    #[tokio::test]
    async fn what_is_larger_than_the_budget_goes_alone() {
        let io = Io::new(Arc::new(InMemory::new()), Retry::default(), 10 * UNIT, None);
        let small = io.reserve(1).await.unwrap();
        let all = io.reserve(1 << 30);
        tokio::pin!(all);
        assert!(futures::poll!(&mut all).is_pending());
        drop(small);
        let all = all.await.unwrap();
        let next = io.reserve(1);
        tokio::pin!(next);
        assert!(futures::poll!(&mut next).is_pending());
        drop(all);
        drop(next.await.unwrap());
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn what_a_disk_cannot_read_is_damaged_and_over_a_network_it_may_pass() {
        use crate::local::Trust;
        use crate::testing::{Fault, FaultStore, quick_options};
        let temp = tempfile::tempdir().unwrap();
        let there = crate::Place::folder(temp.path()).connect(true).unwrap();
        let faults = FaultStore::new(there.store);
        let key = Path::from("data/0");
        // Too large to be read without a request.
        let len = SMALL_FILE + 1;
        faults.put(&key, vec![7; len as usize].into()).await.unwrap();
        let cases = [
            (Trust::Disk, u64::MAX, true),
            (Trust::Disk, 1, false),
            (Trust::Full, 3, false),
            (Trust::Doubtful("NFS"), 3, false),
        ];
        for (trust, failures, damaged) in cases {
            let store: Arc<dyn ObjectStore> = Arc::new(faults.clone());
            let io = Io::new(store, quick_options().retry, 1 << 20, None)
                .in_folder(there.folder.clone().map(|folder| folder.trusted(trust)));
            let fail =
                || faults.set_plan(move |op| (op.number < failures).then_some(Fault::Unreadable));
            fail();
            let whole = io.get(&key, len).await.map(|bytes| bytes.len());
            fail();
            let range = io.get_range(&key, 5..9).await.map(|bytes| bytes.len());
            fail();
            let size = io.head(&key).await.map(|meta| meta.size as usize);
            for (read, len) in [(whole, len as usize), (range, 4), (size, len as usize)] {
                match read {
                    Ok(found) => assert!(!damaged && found == len, "{trust:?}"),
                    Err(Error::Corrupt { what, .. }) => {
                        assert!(damaged && what == "the disk cannot read it", "{trust:?}: {what}");
                    }
                    Err(e) => panic!("{trust:?}: {e}"),
                }
            }
        }
    }
}
