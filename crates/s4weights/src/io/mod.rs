//! Where files come from and go to: local paths, object stores, streams, memory.

mod file;
#[cfg(target_os = "linux")]
mod mapped;
mod object;
#[cfg(target_os = "linux")]
mod region;

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use rayon::ThreadPool;
use url::Url;

use crate::error::{Error, Result};

pub(crate) use file::read_exact_at;

/// Options of an object store, by `object_store`'s names (`aws_region`, `endpoint`, ...).
pub type StorageOptions = HashMap<String, String>;

/// Where a file is written to.
pub enum Target {
    /// A local file: written under a temporary name, synced, renamed.
    Path(PathBuf),
    /// `file:`, `s3:`, `gs:`, `az:`, `memory:` and what else `object_store` knows.
    Url(String, StorageOptions),
    /// An object of a store that the caller made.
    Object(Arc<dyn ObjectStore>, ObjectPath),
    /// A stream; what is written cannot be taken back.
    Stream(Box<dyn Write + Send>),
}

/// Where a file is read from.
pub enum Source {
    /// A local file.
    Path(PathBuf),
    /// As in [`Target::Url`].
    Url(String, StorageOptions),
    /// An object of a store that the caller made.
    Object(Arc<dyn ObjectStore>, ObjectPath),
    /// Bytes in memory.
    Bytes(bytes::Bytes),
}

/// Takes bytes one after the other; nothing is visible before `commit`, and a sink that is dropped
/// before leaves nothing behind.
pub(crate) trait Sink: Send {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
    /// As `write`, with the threads of a pool where they are faster than one.
    fn write_by(&mut self, pool: &ThreadPool, bytes: &[u8]) -> Result<()> {
        let _ = pool;
        self.write(bytes)
    }
    fn commit(self: Box<Self>) -> Result<()>;
    /// Whether another thread than the caller's may write. Not to a stream of the caller's.
    fn may_move(&self) -> bool {
        true
    }
}

/// Gives ranges of bytes, from any thread.
pub(crate) trait ReadAt: Send + Sync {
    fn len(&self) -> u64;
    /// Fills `buf` from `offset`; a range beyond the end is an error.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Bytes that one request should ask for: large where a request is slow to answer.
    fn request_size(&self) -> usize;
}

/// A URL's scheme, if the text is a URL and not a path (`C:\x` is a path).
fn as_url(text: &str) -> Option<Url> {
    text.contains("://").then(|| Url::parse(text).ok()).flatten()
}

/// Whether a text names an object store or a `file:` URL rather than a path.
pub fn is_url(text: &str) -> bool {
    as_url(text).is_some()
}

impl From<&str> for Target {
    fn from(text: &str) -> Self {
        if is_url(text) { Self::Url(text.into(), HashMap::new()) } else { Self::Path(text.into()) }
    }
}

impl From<&str> for Source {
    fn from(text: &str) -> Self {
        if is_url(text) { Self::Url(text.into(), HashMap::new()) } else { Self::Path(text.into()) }
    }
}

enum Resolved {
    Local(PathBuf),
    Remote(Arc<dyn ObjectStore>, ObjectPath),
}

fn resolve(text: &str, options: &StorageOptions) -> Result<Resolved> {
    let url = as_url(text).ok_or_else(|| Error::Argument(format!("`{text}` is not a URL")))?;
    if url.scheme() == "file" {
        let path = url.to_file_path();
        let path = path.map_err(|()| Error::Argument(format!("`{text}` names no local file")))?;
        return Ok(Resolved::Local(path));
    }
    let (store, path) = object::open_store(&url, options)?;
    Ok(Resolved::Remote(store, path))
}

/// Opens a target: its name for messages, and the sink.
pub(crate) fn open_sink(target: Target) -> Result<(String, Box<dyn Sink>)> {
    Ok(match target {
        Target::Path(path) => {
            (path.display().to_string(), Box::new(file::FileSink::create(&path)?))
        }
        Target::Url(url, options) => match resolve(&url, &options)? {
            Resolved::Local(path) => (url, Box::new(file::FileSink::create(&path)?)),
            Resolved::Remote(store, path) => {
                let sink = object::UploadSink::create(&url, store, path)?;
                (url, Box::new(sink))
            }
        },
        Target::Object(store, path) => {
            let name = path.to_string();
            let sink = object::UploadSink::create(&name, store, path)?;
            (name, Box::new(sink))
        }
        Target::Stream(stream) => ("stream".into(), Box::new(file::StreamSink(stream))),
    })
}

/// Opens a source: its name for messages, and the reader.
pub(crate) fn open_source(source: Source) -> Result<(String, Box<dyn ReadAt>)> {
    Ok(match source {
        Source::Path(path) => {
            (path.display().to_string(), Box::new(file::FileSource::open(&path)?))
        }
        Source::Url(url, options) => match resolve(&url, &options)? {
            Resolved::Local(path) => (url, Box::new(file::FileSource::open(&path)?)),
            Resolved::Remote(store, path) => {
                let source = object::StoreSource::open(&url, store, path)?;
                (url, Box::new(source))
            }
        },
        Source::Object(store, path) => {
            let name = path.to_string();
            let source = object::StoreSource::open(&name, store, path)?;
            (name, Box::new(source))
        }
        Source::Bytes(bytes) => ("bytes".into(), Box::new(file::BytesSource(bytes))),
    })
}

impl From<&std::path::Path> for Target {
    fn from(path: &std::path::Path) -> Self {
        Self::Path(path.into())
    }
}

impl From<&std::path::Path> for Source {
    fn from(path: &std::path::Path) -> Self {
        Self::Path(path.into())
    }
}
