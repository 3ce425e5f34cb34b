//! Object stores: plain and multipart uploads, ranged reads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutPayload,
};
use s4_store::{Failure, Retrier, Retry, upload_memory};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::{REMOTE_REQUEST, ReadAt, Sink};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::parallel::{request_threads, upload_size};

/// Bytes of a part: larger files are uploaded in parts. 10,000 parts are what S3 allows.
const PART: usize = 32 << 20;
/// Parts of a file that is known to be small have at least this many. S3 asks for 5 MiB.
const LEAST_PART: usize = 8 << 20;
const MAX_PARTS: usize = 10_000;
/// Number of parts that have the size of the first, most often [`PART`] bytes; later ones are larger, since the
/// length of the file is not known before its end. S3, Google and Azure take parts of different sizes. Cloudflare R2
/// needs all but the last of one size: it refuses a file that does not fit into these parts (156 GiB).
const EQUAL_PARTS: usize = 5_000;
/// Sizes double with each so many later parts, up to [`LARGEST_PART`]: 5.2 TiB in all, more than
/// the 5 TiB that an object of S3 may have.
const DOUBLING: usize = 250;
const LARGEST_PART: usize = 40 * PART;

/// Bytes of a part, counted from 0. `first`: bytes of the first one.
fn part_size(first: usize, number: usize) -> usize {
    match number.checked_sub(EQUAL_PARTS) {
        None => first,
        Some(later) => (PART << (1 + later / DOUBLING).min(6)).min(LARGEST_PART),
    }
}

/// Number of parts of a size that may be in flight at once, with this memory. One more is being filled.
fn parts_in_flight(size: usize, memory: usize) -> usize {
    (memory / size).max(1)
}
/// How long aborting an upload may take, and how long if the caller has stopped the work.
const ABORT: Duration = Duration::from_secs(10);
const STOPPED_ABORT: Duration = Duration::from_millis(300);

/// The threads of one file's requests. They end with it, unless one is still looking up a host
/// name.
struct Threads(Option<Runtime>);

impl Threads {
    fn start(target: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(request_threads())
            .thread_name("s4weights-io")
            .enable_all()
            .build();
        Ok(Self(Some(runtime.map_err(|e| Error::io(target, "start threads", e))?)))
    }

    /// Waits for a request, unless the caller's work is stopped.
    fn block_on<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        match &self.0 {
            Some(runtime) => interrupt::block_on(runtime, work),
            None => Err(Error::Cancelled),
        }
    }

    fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        self.0.as_ref().map(|runtime| runtime.spawn(work)).ok_or(Error::Cancelled)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_timeout(Duration::from_millis(100));
        }
    }
}

type Part = JoinHandle<object_store::Result<()>>;

/// Uploads an object: by one request if it is small, else in parts. A multipart upload that is not
/// completed is aborted.
pub(crate) struct UploadSink {
    name: String,
    store: Arc<dyn ObjectStore>,
    path: Path,
    buffer: Vec<u8>,
    upload: Option<Box<dyn MultipartUpload>>,
    /// The object that was there before a multipart upload.
    before: Option<ObjectMeta>,
    parts: usize,
    /// Bytes of the first part.
    part: usize,
    len: u64,
    in_flight: VecDeque<Part>,
    /// Most bytes of parts in flight, unless one part alone is larger.
    memory: usize,
    retrier: Retrier,
    deadline: Duration,
    // Last, so that everything above is dropped while it still runs.
    threads: Threads,
}

impl UploadSink {
    pub(super) fn create(
        name: &str,
        store: Arc<dyn ObjectStore>,
        path: Path,
        retry: Retry,
    ) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            store,
            path,
            buffer: Vec::new(),
            upload: None,
            before: None,
            parts: 0,
            part: PART,
            len: 0,
            in_flight: VecDeque::new(),
            memory: upload_memory(),
            deadline: retry.deadline,
            retrier: Retrier::new(retry),
            threads: Threads::start(name)?,
        })
    }

    /// Tells how many bytes of values follow, at most: if there are few, parts are small enough to take as many
    /// connections as those of a large file.
    pub(super) fn expect(&mut self, values: u64) {
        let part = upload_size(values, LEAST_PART, PART);
        if self.parts == 0 && self.buffer.len() <= part {
            self.part = part;
        }
    }

    fn part_size(&self) -> usize {
        part_size(self.part, self.parts)
    }

    fn fail(&self, e: s4_store::Error) -> Error {
        Error::remote(&self.name, "upload", e)
    }

    fn wait_for(&mut self, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            let Some(part) = self.in_flight.pop_front() else { break };
            let done = self.threads.block_on(part)?;
            let done =
                done.map_err(|e| Error::io(&self.name, "upload", std::io::Error::other(e)))?;
            done.map_err(|e| Error::store(&self.name, "upload", e))?;
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        self.before = self.look()?;
        let options = || PutMultipartOptions::default().with_retry_policy(self.retrier.for_parts());
        let start = || self.store.put_multipart_opts(&self.path, options());
        let started = self.retrier.run("begin to upload", self.path.as_ref(), 0, start);
        self.upload = Some(self.threads.block_on(started)?.map_err(|e| self.fail(e))?);
        Ok(())
    }

    /// The object that is there now.
    fn look(&self) -> Result<Option<ObjectMeta>> {
        let head = || self.store.head(&self.path);
        match self.threads.block_on(self.retrier.run("look up", self.path.as_ref(), 0, head))? {
            Ok(meta) => Ok(Some(meta)),
            Err(e) if e.is_missing() => Ok(None),
            Err(e) => Err(self.fail(e)),
        }
    }

    fn send_part(&mut self) -> Result<()> {
        if self.parts == MAX_PARTS {
            return Err(Error::Argument(format!(
                "{}: the file is too large: it needs more than {MAX_PARTS} parts",
                self.name
            )));
        }
        self.wait_for(parts_in_flight(self.part_size(), self.memory) - 1)?;
        if self.upload.is_none() {
            self.begin()?;
        }
        let payload = PutPayload::from(Bytes::from(std::mem::take(&mut self.buffer)));
        if let Some(upload) = &mut self.upload {
            let part = upload.put_part(payload);
            self.in_flight.push_back(self.threads.spawn(part)?);
            self.parts += 1;
        }
        Ok(())
    }

    /// Combines the parts into an object. The request cannot be repeated; if its answer is lost, the object that is
    /// there afterwards tells whether it succeeded.
    fn complete(&mut self, mut upload: Box<dyn MultipartUpload>) -> Result<()> {
        let deadline = self.deadline;
        let done = self
            .threads
            .block_on(async { tokio::time::timeout(deadline, upload.complete()).await });
        // Unless the object turns out to be there, the parts must be removed.
        self.upload = Some(upload);
        let failed = |e| Error::store(&self.name, "complete the upload", e);
        let error = match done? {
            Ok(Ok(_)) => None,
            Ok(Err(e)) if Failure::new(&e).cause().is_permanent() => Some(failed(e)),
            Ok(Err(e)) => (!self.arrived()?).then(|| failed(e)),
            Err(e) => (!self.arrived()?).then(|| {
                let late = std::io::Error::new(std::io::ErrorKind::TimedOut, e);
                Error::io(&self.name, "complete the upload", late)
            }),
        };
        if let Some(error) = error {
            return Err(error);
        }
        self.upload = None;
        Ok(())
    }

    /// Whether the object is there, in place of what was there before.
    fn arrived(&self) -> Result<bool> {
        let same = |a: &ObjectMeta, b: &ObjectMeta| {
            a.e_tag == b.e_tag && a.last_modified == b.last_modified && a.version == b.version
        };
        let now = self.look()?;
        Ok(now.is_some_and(|now| {
            now.size == self.len && !self.before.as_ref().is_some_and(|old| same(old, &now))
        }))
    }
}

impl Sink for UploadSink {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            let part = self.part_size();
            if self.buffer.capacity() == 0 {
                self.buffer.reserve_exact(part);
            }
            let (now, later) = bytes.split_at(bytes.len().min(part - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            // A full buffer waits for the next byte: it may be the whole object.
            if self.buffer.len() == part && !bytes.is_empty() {
                self.send_part()?;
            }
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        if self.upload.is_none() {
            let payload = PutPayload::from(Bytes::from(std::mem::take(&mut self.buffer)));
            let put = || async { self.store.put(&self.path, payload.clone()).await.map(drop) };
            let put = self.retrier.run("upload", self.path.as_ref(), self.len, put);
            return self.threads.block_on(put)?.map_err(|e| self.fail(e));
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        self.wait_for(0)?;
        match self.upload.take() {
            Some(upload) => self.complete(upload),
            None => Ok(()),
        }
    }
}

impl Drop for UploadSink {
    fn drop(&mut self) {
        for part in self.in_flight.drain(..) {
            part.abort();
        }
        let Some(mut upload) = self.upload.take() else { return };
        // A caller that stopped the save does not wait for a server that may never answer.
        let stopped = interrupt::is_stopped();
        let most = if stopped { STOPPED_ABORT } else { ABORT };
        let abort = async { tokio::time::timeout(most, upload.abort()).await };
        let done = match &self.threads.0 {
            Some(runtime) if stopped => Ok(runtime.block_on(abort)),
            _ => self.threads.block_on(abort),
        };
        let why = match done {
            Ok(Ok(Ok(()))) => return,
            Ok(Ok(Err(e))) => Failure::new(&e).to_string(),
            Ok(Err(_)) => format!("no response within {most:?}"),
            Err(e) => e.to_string(),
        };
        tracing::warn!("{}: could not abort the multipart upload: {why}", self.name);
    }
}

/// Reads ranges of an object.
pub(super) struct StoreSource {
    name: String,
    store: Arc<dyn ObjectStore>,
    path: Path,
    len: u64,
    retrier: Retrier,
    threads: Threads,
}

impl StoreSource {
    pub(super) fn open(
        name: &str,
        store: Arc<dyn ObjectStore>,
        path: Path,
        retry: Retry,
    ) -> Result<Self> {
        let (threads, retrier) = (Threads::start(name)?, Retrier::new(retry));
        let head = retrier.run("look up", path.as_ref(), 0, || store.head(&path));
        let head = threads.block_on(head)?.map_err(|e| Error::remote(name, "open", e))?;
        Ok(Self { name: name.to_owned(), store, path, len: head.size, retrier, threads })
    }
}

impl ReadAt for StoreSource {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = offset..offset.saturating_add(buf.len() as u64);
        let get = || self.store.get_range(&self.path, range.clone());
        let get = self.retrier.run("read", self.path.as_ref(), buf.len() as u64, get);
        let got = self.threads.block_on(get)?;
        let got = got.map_err(|e| Error::remote(&self.name, "read", e))?;
        if got.len() != buf.len() {
            let eof = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(Error::io(&self.name, "read", eof));
        }
        buf.copy_from_slice(&got);
        Ok(())
    }

    fn request_size(&self) -> usize {
        REMOTE_REQUEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_reach_the_largest_object_within_bounded_memory() {
        let sizes: Vec<usize> = (0..MAX_PARTS).map(|i| part_size(PART, i)).collect();
        assert!(sizes.iter().map(|&size| size as u64).sum::<u64>() >= 5 << 40);
        assert!(sizes.is_sorted() && sizes[..EQUAL_PARTS].iter().all(|&size| size == PART));
        assert_eq!(sizes[EQUAL_PARTS..][..2 * DOUBLING].iter().max(), Some(&(4 * PART)));
        for size in sizes {
            // S3 takes parts of up to 5 GiB.
            assert!(size as u64 <= 5 << 30);
            assert!((1 + parts_in_flight(size, 1 << 30)) * size <= 2 * LARGEST_PART, "{size}");
        }
        let in_flight = [PART, 2 * PART, LARGEST_PART].map(|size| parts_in_flight(size, 16 * PART));
        assert_eq!(in_flight, [16, 8, 1]);
        // A file that turns out not to be small still fits.
        let small = (0..MAX_PARTS).map(|i| part_size(LEAST_PART, i) as u64).sum::<u64>();
        assert!(small > 5 << 40, "{small}");
    }
}
