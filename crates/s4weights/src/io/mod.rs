//! Where files come from and go to: local paths, object stores, streams, memory.

mod file;
#[cfg(target_os = "linux")]
mod mapped;
mod object;
#[cfg(target_os = "linux")]
mod region;
mod temporary;

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use rayon::ThreadPool;
use s4_store::{Place, Retry, redact_url};

use crate::error::{Error, Result};

pub(crate) use file::read_exact_at;

/// Options of an object store by name, the same as those of a checkpoint store: `object_store`'s names
/// (`aws_region`, `endpoint`, ...), and what other tools call them (`key`, `endpoint_url`, `profile`, ...).
/// What is not understood is an error.
pub type StorageOptions = HashMap<String, String>;

/// Where a file is written to.
pub enum Target {
    /// A local file: written under a temporary name, synced, renamed.
    Path(PathBuf),
    /// `file:`, `s3:`, `gs:`, `az:` (`abfs:`), `memory:`, or the `https:` address of a bucket.
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

/// Whether a text names an object store or a `file:` URL rather than a path (`C:\x` is a path).
pub fn is_url(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    text.split_once("://").is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(fits)
    })
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

/// A URL means the same as for a checkpoint store.
fn resolve(url: &str, options: StorageOptions) -> Result<Resolved> {
    let argument = |what: String| Error::Argument(what);
    if !is_url(url) {
        return Err(argument(format!("`{}` is not a URL", redact_url(url))));
    }
    let place = Place::open_url(url, &options.into_iter().collect());
    let place = place.map_err(|e| argument(e.to_string()))?;
    match (place.as_folder(), place.as_objects()) {
        (Some(path), _) => Ok(Resolved::Local(path.to_owned())),
        (None, Some((store, path))) => Ok(Resolved::Remote(Arc::clone(store), path.clone())),
        (None, None) => Err(argument(format!("{} holds no files", place.name()))),
    }
}

fn retry(deadline: Option<Duration>) -> Retry {
    deadline.map_or_else(Retry::default, Retry::within)
}

/// Opens a target: its name for messages, and the sink. `deadline` is for each request to a server, with
/// its repetitions.
pub(crate) fn open_sink(
    target: Target,
    deadline: Option<Duration>,
) -> Result<(String, Box<dyn Sink>)> {
    let upload = |name: String, store, path| -> Result<(String, Box<dyn Sink>)> {
        let sink = object::UploadSink::create(&name, store, path, retry(deadline))?;
        Ok((name, Box::new(sink)))
    };
    let file = |name: String, path: PathBuf| -> Result<(String, Box<dyn Sink>)> {
        Ok((name, Box::new(file::FileSink::create(&path)?)))
    };
    match target {
        Target::Path(path) => file(path.display().to_string(), path),
        Target::Url(url, options) => match resolve(&url, options)? {
            Resolved::Local(path) => file(redact_url(&url).into_owned(), path),
            Resolved::Remote(store, path) => upload(redact_url(&url).into_owned(), store, path),
        },
        Target::Object(store, path) => upload(path.to_string(), store, path),
        Target::Stream(stream) => Ok(("stream".into(), Box::new(file::StreamSink(stream)))),
    }
}

/// Opens a source: its name for messages, and the reader. `deadline` as of [`open_sink`].
pub(crate) fn open_source(
    source: Source,
    deadline: Option<Duration>,
) -> Result<(String, Box<dyn ReadAt>)> {
    let object = |name: String, store, path| -> Result<(String, Box<dyn ReadAt>)> {
        let source = object::StoreSource::open(&name, store, path, retry(deadline))?;
        Ok((name, Box::new(source)))
    };
    let file = |name: String, path: PathBuf| -> Result<(String, Box<dyn ReadAt>)> {
        Ok((name, Box::new(file::FileSource::open(&path)?)))
    };
    match source {
        Source::Path(path) => file(path.display().to_string(), path),
        Source::Url(url, options) => match resolve(&url, options)? {
            Resolved::Local(path) => file(redact_url(&url).into_owned(), path),
            Resolved::Remote(store, path) => object(redact_url(&url).into_owned(), store, path),
        },
        Source::Object(store, path) => object(path.to_string(), store, path),
        Source::Bytes(bytes) => Ok(("bytes".into(), Box::new(file::BytesSource(bytes)))),
    }
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
