//! Targets and sources of files: local paths, object stores, streams, memory.

mod file;
#[cfg(target_os = "linux")]
mod mapped;
#[cfg(target_os = "linux")]
mod memory_files;
mod object;
#[cfg(target_os = "linux")]
mod region;
mod tail;
mod temporary;
#[cfg(target_os = "linux")]
mod write_out;

use std::fs::Metadata;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use rayon::ThreadPool;
use s4_store::{Place, PutFiles, Retry, is_url, redact_url};

use crate::error::{Error, Result};

pub use s4_store::StorageOptions;

pub(crate) use file::read_exact_at;
pub(crate) use tail::TailSource;

/// Bytes that one request asks for: of a file or memory, and of an object store, which is slow to answer.
pub(crate) const LOCAL_REQUEST: usize = 1 << 20;
pub(crate) const REMOTE_REQUEST: usize = 8 << 20;

/// A destination to write a file to.
pub enum Target {
    /// A local file: written under a temporary name, synced, renamed.
    Path(PathBuf),
    /// A name for messages, and a local file that is never replaced: if there is one when this one is complete, that is
    /// an [`Error::Io`] of the kind `AlreadyExists`. Pipes and devices are written to all the same.
    New(String, PathBuf),
    /// `file:`, `s3:`, `gs:`, `az:` (`abfs:`), `memory:`, or the `https:` address of a bucket.
    Url(String, StorageOptions),
    /// An object of a store that the caller made.
    Object(Arc<dyn ObjectStore>, ObjectPath),
    /// A stream; written bytes cannot be taken back.
    Stream(Box<dyn Write + Send>),
    /// A sink of the caller's own, and its name for messages.
    Sink(String, Box<dyn Sink>),
}

/// A source to read a file from.
pub enum Source {
    /// A local file.
    Path(PathBuf),
    /// As in [`Target::Url`].
    Url(String, StorageOptions),
    /// An object of a store that the caller made.
    Object(Arc<dyn ObjectStore>, ObjectPath),
    /// Bytes in memory.
    Bytes(Bytes),
    /// A source of the caller's own, and its name for messages.
    ReadAt(String, Box<dyn ReadAt>),
}

/// A target for the bytes of a file: implement it to write anywhere besides a path, URL or
/// stream.
///
/// Bytes come one after the other. Nothing is visible before [`Sink::commit`], and a sink that is
/// dropped before that leaves nothing behind: a save that fails, is cancelled or is given up just
/// drops it.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use s4weights::{Reader, Result, Sink, Source, Target, Writer};
///
/// #[derive(Default)]
/// struct Slot { bytes: Vec<u8>, published: Arc<Mutex<Option<Vec<u8>>>> }
///
/// impl Sink for Slot {
///     fn write(&mut self, bytes: &[u8]) -> Result<()> {
///         self.bytes.extend_from_slice(bytes);
///         Ok(())
///     }
///     fn commit(self: Box<Self>) -> Result<()> {
///         *self.published.lock().unwrap() = Some(self.bytes);
///         Ok(())
///     }
/// }
///
/// let slot = Slot::default();
/// let published = Arc::clone(&slot.published);
/// let target = Target::Sink("slot 3".into(), Box::new(slot));
/// Writer::create(target, Default::default())?.finish(Default::default())?;
/// let bytes = published.lock().unwrap().take().unwrap();
/// Reader::open(Source::Bytes(bytes.into()), Default::default())?;
/// # Ok::<_, s4weights::Error>(())
/// ```
pub trait Sink: Send {
    /// Takes all of `bytes`, which follow those of the previous call.
    ///
    /// # Errors
    /// If they cannot be written, most often [`Error::Io`]. The sink is dropped then.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Makes everything that was written durable, and then visible, atomically.
    ///
    /// # Errors
    /// If it cannot be made visible; nothing is visible then.
    fn commit(self: Box<Self>) -> Result<()>;

    /// Whether a thread other than the caller's may call [`Sink::write`] while the caller goes on, one
    /// call at a time. `true` by default.
    fn may_move(&self) -> bool {
        true
    }
}

/// A source of the bytes of a file: implement it to read from anywhere besides a path, URL or memory.
pub trait ReadAt: Send + Sync {
    /// Bytes of the whole file.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buf` with the bytes from `offset` on. It is called from several threads at once.
    ///
    /// # Errors
    /// If it cannot be read, or the range reaches beyond the end, most often [`Error::Io`].
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// A range of its bytes without a copy, if they are in memory. `None` if they are not, or if
    /// the range reaches beyond the end.
    fn in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        let _ = range;
        None
    }

    /// Bytes that one request should ask for: large where requests are slow. 1 MiB by default.
    fn request_size(&self) -> usize {
        LOCAL_REQUEST
    }
}

/// An open target.
pub(crate) enum OpenSink {
    File(Box<file::FileSink>),
    Upload(Box<object::UploadSink>),
    Other(Box<dyn Sink>),
}

impl OpenSink {
    /// Tells how many bytes of values follow, at most.
    pub(crate) fn expect(&mut self, values: u64) {
        if let Self::Upload(upload) = self {
            upload.expect(values);
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Upload(upload) => upload.write(bytes),
            Self::Other(sink) => sink.write(bytes),
        }
    }

    /// As `write` of each part, with the threads of a pool where they are faster than one.
    pub(crate) fn write_by(&mut self, pool: &ThreadPool, parts: &[&[u8]]) -> Result<()> {
        match self {
            Self::File(file) => file.write_by(pool, parts),
            Self::Upload(upload) => parts.iter().try_for_each(|part| upload.write(part)),
            Self::Other(sink) => parts.iter().try_for_each(|part| sink.write(part)),
        }
    }

    pub(crate) fn commit(self) -> Result<()> {
        match self {
            Self::File(file) => file.commit(),
            Self::Upload(upload) => upload.commit(),
            Self::Other(sink) => sink.commit(),
        }
    }

    pub(crate) fn may_move(&self) -> bool {
        match self {
            Self::File(file) => file.may_move(),
            Self::Upload(upload) => upload.may_move(),
            Self::Other(sink) => sink.may_move(),
        }
    }
}

impl Target {
    /// Opens it to write a file of any format, with the same guarantees as for a `.s4w` file.
    ///
    /// # Errors
    /// As [`Writer::create`](crate::Writer::create).
    pub fn open(self) -> Result<Box<dyn Sink>> {
        Ok(match open_sink(self, None)?.1 {
            OpenSink::File(file) => file,
            OpenSink::Upload(upload) => upload,
            OpenSink::Other(sink) => sink,
        })
    }

    /// The local path that it names, without accessing it: a path as it is, or that of a `file:` URL. `None` if it
    /// is not a local file.
    ///
    /// # Errors
    /// [`Error::Argument`] for a `file:` URL that names no path.
    pub fn local_path(&self) -> Result<Option<PathBuf>> {
        match self {
            Self::Path(path) | Self::New(_, path) => Ok(Some(path.clone())),
            Self::Url(url, options) if is_file_url(url) => match resolve(url, options)? {
                Resolved::Local(path) => Ok(Some(path)),
                Resolved::Remote(..) => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Renames a complete file to `to`, which is in the same file system, unless there is a file of that name. On a
    /// file system that supports neither `RENAME_NOREPLACE` nor hard links, it checks just before it renames.
    ///
    /// # Errors
    /// The kind is `AlreadyExists` if there is such a file; `from` may be gone then.
    pub fn rename_new(from: &Path, to: &Path) -> std::io::Result<()> {
        temporary::persist_new(tempfile::TempPath::try_from_path(from)?, to)
    }

    /// Makes the name of a file that was renamed to `path` as durable as [`Target::open`] does.
    ///
    /// # Errors
    /// If its folder cannot be synced. One that may not be listed is left to the system.
    pub fn sync_name(path: &Path) -> std::io::Result<()> {
        file::sync_folder(file::folder(path))
    }

    /// The local path that it leads to, with links followed, and the metadata of the file there, if any. `None` if
    /// it is not a local file.
    ///
    /// # Errors
    /// As for [`Target::open`]: if it is a folder, say, or a file that may not be written to.
    pub fn local_file(&self) -> Result<Option<(PathBuf, Option<Metadata>)>> {
        let Some(path) = self.local_path()? else { return Ok(None) };
        let found = file::replaced(&path);
        found.map(Some).map_err(|e| Error::io(&path.display().to_string(), "create", e))
    }
}

impl From<&str> for Target {
    fn from(text: &str) -> Self {
        match is_url(text) {
            true => Self::Url(text.into(), StorageOptions::new()),
            false => Self::Path(text.into()),
        }
    }
}

impl From<&str> for Source {
    fn from(text: &str) -> Self {
        match is_url(text) {
            true => Self::Url(text.into(), StorageOptions::new()),
            false => Self::Path(text.into()),
        }
    }
}

/// Whether a URL is one of a local file.
fn is_file_url(url: &str) -> bool {
    let scheme = url.trim_start().split_once(':').map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("file"))
}

enum Resolved {
    Local(PathBuf),
    Remote(Arc<dyn ObjectStore>, ObjectPath),
}

/// Checks the names of object-store options for paths, streams and bytes, which ignore the options;
/// the same check as for a checkpoint store in a folder.
///
/// # Errors
/// `Argument` for a name that means nothing anywhere.
pub fn check_storage_options(options: &StorageOptions) -> Result<()> {
    s4_store::check_options(options).map_err(|e| Error::Argument(e.to_string()))
}

/// The folder or object store that a URL and options name: the same for a file and for a checkpoint
/// store.
pub(crate) fn open_place(url: &str, options: &StorageOptions) -> Result<Place> {
    Place::open_url(url, options).map_err(|e| match e {
        s4_store::Error::Argument(what) => Error::Argument(what),
        other => Error::Store { target: redact_url(url).into_owned(), source: Box::new(other) },
    })
}

fn resolve(url: &str, options: &StorageOptions) -> Result<Resolved> {
    if !is_url(url) {
        return Err(Error::Argument(format!("`{}` is not a URL", redact_url(url))));
    }
    let place = open_place(url, options)?;
    match (place.as_folder(), place.as_objects()) {
        (Some(path), _) => Ok(Resolved::Local(path.to_owned())),
        (None, Some((store, path))) => Ok(Resolved::Remote(Arc::clone(store), path.clone())),
        (None, None) => Err(Error::Argument(format!("{} cannot hold files", place.name()))),
    }
}

/// How a store writes the objects of a local folder, if not by a plain `write`.
pub(crate) fn put_files() -> Option<Arc<dyn PutFiles>> {
    #[cfg(target_os = "linux")]
    return Some(Arc::new(memory_files::MemoryFiles));
    #[cfg(not(target_os = "linux"))]
    None
}

fn retry(deadline: Option<Duration>) -> Retry {
    deadline.map_or_else(Retry::default, Retry::within)
}

/// Opens a target: its name for messages, and the sink. `deadline` is for each request to a server,
/// with its retries.
pub(crate) fn open_sink(target: Target, deadline: Option<Duration>) -> Result<(String, OpenSink)> {
    let upload = |name: String, store, path| -> Result<(String, OpenSink)> {
        let sink = object::UploadSink::create(&name, store, path, retry(deadline))?;
        Ok((name, OpenSink::Upload(Box::new(sink))))
    };
    let file = |name: String, path: PathBuf| -> Result<(String, OpenSink)> {
        Ok((name, OpenSink::File(Box::new(file::FileSink::create(&path)?))))
    };
    match target {
        Target::Path(path) => file(path.display().to_string(), path),
        Target::New(name, path) => {
            let sink = file::FileSink::create_new(&name, &path)?;
            Ok((name, OpenSink::File(Box::new(sink))))
        }
        Target::Url(url, options) => match resolve(&url, &options)? {
            Resolved::Local(path) => file(redact_url(&url).into_owned(), path),
            Resolved::Remote(store, path) => upload(redact_url(&url).into_owned(), store, path),
        },
        Target::Object(store, path) => upload(path.to_string(), store, path),
        Target::Stream(stream) => {
            Ok(("stream".into(), OpenSink::Other(Box::new(file::StreamSink(stream)))))
        }
        Target::Sink(name, sink) => Ok((name, OpenSink::Other(sink))),
    }
}

/// Opens a source: its name for messages, and the reader. `deadline` as for [`open_sink`].
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
        Source::Url(url, options) => match resolve(&url, &options)? {
            Resolved::Local(path) => file(redact_url(&url).into_owned(), path),
            Resolved::Remote(store, path) => object(redact_url(&url).into_owned(), store, path),
        },
        Source::Object(store, path) => object(path.to_string(), store, path),
        Source::Bytes(bytes) => Ok(("bytes".into(), Box::new(file::BytesSource(bytes)))),
        Source::ReadAt(name, source) => Ok((name, source)),
    }
}

impl From<&Path> for Target {
    fn from(path: &Path) -> Self {
        Self::Path(path.into())
    }
}

impl From<&Path> for Source {
    fn from(path: &Path) -> Self {
        Self::Path(path.into())
    }
}
