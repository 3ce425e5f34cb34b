//! Object stores: plain and multipart uploads, ranged reads.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use url::Url;

use super::{ReadAt, Sink, StorageOptions};
use crate::error::{Error, Result};

/// Bytes of a part: larger files are uploaded in parts. 10,000 parts are what S3 allows.
const PART: usize = 32 << 20;
const MAX_PARTS: usize = 10_000;
/// Parts under way at once: with the one being filled, what an upload holds in memory.
const IN_FLIGHT: usize = 3;

/// The store behind `memory:`, shared by the whole process: a URL can name nothing narrower.
static MEMORY: OnceLock<Arc<InMemory>> = OnceLock::new();

pub(super) fn open_store(
    url: &Url,
    options: &StorageOptions,
) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let target = url.as_str();
    if url.scheme() == "memory" {
        let text = format!("{}{}", url.host_str().unwrap_or_default(), url.path());
        let path = Path::parse(text.trim_matches('/'));
        let path = path.map_err(|e| Error::Argument(format!("{target}: {e}")))?;
        return Ok((Arc::clone(MEMORY.get_or_init(Arc::default)) as _, path));
    }
    // As cloud tools do, the environment is read first and the caller's options win.
    let environment = std::env::vars()
        .filter(|(k, _)| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|p| k.starts_with(p)))
        .map(|(k, v)| (k.to_ascii_lowercase(), v));
    let all = environment.chain(options.iter().map(|(k, v)| (k.to_ascii_lowercase(), v.clone())));
    let (store, path) =
        object_store::parse_url_opts(url, all).map_err(|e| Error::store(target, "open", e))?;
    Ok((Arc::from(store), path))
}

fn runtime(target: &str) -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("s4weights-io")
        .enable_all()
        .build()
        .map_err(|e| Error::io(target, "start input and output for", e))
}

type Part = JoinHandle<object_store::Result<()>>;

/// Uploads an object: by one request if it is small, else in parts. A multipart upload that is not
/// completed is aborted.
pub(super) struct UploadSink {
    name: String,
    store: Arc<dyn ObjectStore>,
    path: Path,
    buffer: Vec<u8>,
    upload: Option<Box<dyn MultipartUpload>>,
    parts: usize,
    in_flight: VecDeque<Part>,
    // Last, so that everything above is dropped while it still runs.
    runtime: Runtime,
}

impl UploadSink {
    pub(super) fn create(name: &str, store: Arc<dyn ObjectStore>, path: Path) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            store,
            path,
            buffer: Vec::new(),
            upload: None,
            parts: 0,
            in_flight: VecDeque::new(),
            runtime: runtime(name)?,
        })
    }

    fn fail(&self, e: object_store::Error) -> Error {
        Error::store(&self.name, "upload", e)
    }

    fn wait_for(&mut self, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            let Some(part) = self.in_flight.pop_front() else { break };
            let done = self.runtime.block_on(part);
            let done =
                done.map_err(|e| Error::io(&self.name, "upload", std::io::Error::other(e)))?;
            done.map_err(|e| self.fail(e))?;
        }
        Ok(())
    }

    fn send_part(&mut self) -> Result<()> {
        if self.parts == MAX_PARTS {
            return Err(Error::Argument(format!(
                "{}: more than {MAX_PARTS} parts of {PART} bytes",
                self.name
            )));
        }
        self.wait_for(IN_FLIGHT - 1)?;
        if self.upload.is_none() {
            let started = self.runtime.block_on(self.store.put_multipart(&self.path));
            self.upload = Some(started.map_err(|e| self.fail(e))?);
        }
        let payload = PutPayload::from(Bytes::from(std::mem::take(&mut self.buffer)));
        if let Some(upload) = &mut self.upload {
            let part = upload.put_part(payload);
            self.in_flight.push_back(self.runtime.spawn(part));
            self.parts += 1;
        }
        Ok(())
    }
}

impl Sink for UploadSink {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.buffer.capacity() == 0 {
                self.buffer.reserve_exact(PART);
            }
            let (now, later) = bytes.split_at(bytes.len().min(PART - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            // A full buffer waits for the next byte: it may be the whole object.
            if self.buffer.len() == PART && !bytes.is_empty() {
                self.send_part()?;
            }
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        if self.upload.is_none() {
            let payload = PutPayload::from(Bytes::from(std::mem::take(&mut self.buffer)));
            let put = self.runtime.block_on(self.store.put(&self.path, payload));
            return put.map(drop).map_err(|e| self.fail(e));
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        self.wait_for(0)?;
        if let Some(mut upload) = self.upload.take()
            && let Err(e) = self.runtime.block_on(upload.complete())
        {
            self.upload = Some(upload);
            return Err(self.fail(e));
        }
        Ok(())
    }
}

impl Drop for UploadSink {
    fn drop(&mut self) {
        for part in self.in_flight.drain(..) {
            part.abort();
        }
        if let Some(mut upload) = self.upload.take()
            && let Err(e) = self.runtime.block_on(upload.abort())
        {
            tracing::warn!(target = %self.name, error = %e, "multipart upload not aborted");
        }
    }
}

/// Reads ranges of an object.
pub(super) struct StoreSource {
    name: String,
    store: Arc<dyn ObjectStore>,
    path: Path,
    len: u64,
    runtime: Runtime,
}

impl StoreSource {
    pub(super) fn open(name: &str, store: Arc<dyn ObjectStore>, path: Path) -> Result<Self> {
        let runtime = runtime(name)?;
        let head =
            runtime.block_on(store.head(&path)).map_err(|e| Error::store(name, "open", e))?;
        Ok(Self { name: name.to_owned(), store, path, len: head.size, runtime })
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
        let got = self.runtime.block_on(self.store.get_range(&self.path, range));
        let got = got.map_err(|e| Error::store(&self.name, "read", e))?;
        if got.len() != buf.len() {
            let eof = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(Error::io(&self.name, "read", eof));
        }
        buf.copy_from_slice(&got);
        Ok(())
    }

    fn request_size(&self) -> usize {
        8 << 20
    }
}
