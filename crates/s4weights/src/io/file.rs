//! Local files, streams and memory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rayon::ThreadPool;

#[cfg(target_os = "linux")]
use super::mapped::Mapped;
use super::temporary::Temporary;
use super::{ReadAt, Sink};
use crate::error::{Error, Result};

/// Writes a local file under a temporary name in the same folder, or none; `commit` syncs it, renames it
/// and syncs the folder.
pub(crate) struct FileSink {
    name: String,
    out: Out,
}

enum Out {
    Temporary {
        file: Temporary,
        path: PathBuf,
        /// `None`: one thread writes as fast as several, or others could cut the file.
        #[cfg(target_os = "linux")]
        mapped: Option<Mapped>,
    },
    /// A device or a pipe: nothing to rename.
    Direct(File),
}

impl FileSink {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |action, e| Error::io(&name, action, e);
        // A link stays a link: its target is replaced, or made.
        let path = behind_links(path);
        let existing = match fs::metadata(&path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            // Better now than when everything is written: a name that is too long, for instance.
            Err(e) => return Err(fail("create", e)),
        };
        if existing.as_ref().is_some_and(fs::Metadata::is_dir) {
            return Err(fail("create", io::Error::from(io::ErrorKind::IsADirectory)));
        }
        if existing.as_ref().is_some_and(|m| !m.is_file()) {
            let file = File::options().write(true).open(&path).map_err(|e| fail("create", e))?;
            return Ok(Self { out: Out::Direct(file), name });
        }
        // Refuse now what renaming over the file would silently get around.
        if existing.as_ref().is_some_and(|m| m.permissions().readonly()) {
            return Err(fail("create", io::Error::from(io::ErrorKind::PermissionDenied)));
        }
        let file_name = path.file_name().ok_or_else(|| {
            fail("create", io::Error::new(io::ErrorKind::InvalidInput, "no file name"))
        })?;
        let file = Temporary::create(folder(&path), file_name, existing.as_ref());
        let file = file.map_err(|e| fail("create", e))?;
        let out = Out::Temporary {
            // Memory that is mapped goes when somebody else cuts the file: nobody may find it.
            #[cfg(target_os = "linux")]
            mapped: file.is_unnamed().then(|| Mapped::of(file.as_file())).flatten(),
            file,
            path,
        };
        Ok(Self { out, name })
    }

    /// As `write`, with the threads of a pool where they are faster than one.
    #[cfg(target_os = "linux")]
    pub(super) fn write_by(&mut self, pool: &ThreadPool, bytes: &[u8]) -> Result<()> {
        if let Out::Temporary { file, mapped, .. } = &mut self.out
            && let Some(by) = mapped.as_ref().filter(|m| m.suits(pool, bytes.len()))
        {
            let wrote = by.write(file.as_file_mut(), pool, bytes);
            if wrote.map_err(|e| Error::io(&self.name, "write", e))? {
                return Ok(());
            }
            *mapped = None;
        }
        self.write(bytes)
    }

    /// As `write`: several threads are no faster.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn write_by(&mut self, _: &ThreadPool, bytes: &[u8]) -> Result<()> {
        self.write(bytes)
    }
}

/// The path that a chain of links ends at, whether there is a file or not: what opening it would open.
fn behind_links(path: &Path) -> PathBuf {
    if let Ok(real) = fs::canonicalize(path) {
        return real;
    }
    let mut path = path.to_owned();
    // As many as Linux follows.
    for _ in 0..40 {
        let Ok(target) = fs::read_link(&path) else { break };
        path = folder(&path).join(target);
    }
    path
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

impl Sink for FileSink {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let file = match &mut self.out {
            Out::Temporary { file, .. } => file.as_file_mut(),
            Out::Direct(file) => file,
        };
        file.write_all(bytes).map_err(|e| Error::io(&self.name, "write", e))
    }

    fn commit(self: Box<Self>) -> Result<()> {
        let fail = |action, e| Error::io(&self.name, action, e);
        match self.out {
            Out::Direct(file) => match file.sync_all() {
                // Pipes and devices cannot be synced.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
                other => other.map_err(|e| fail("sync", e)),
            },
            Out::Temporary { file, path, .. } => {
                file.as_file().sync_all().map_err(|e| fail("sync", e))?;
                file.publish(&path).map_err(|e| fail("rename", e))?;
                sync_folder(folder(&path)).map_err(|e| fail("sync the folder of", e))
            }
        }
    }
}

#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Writes to a stream of the caller's.
pub(super) struct StreamSink(pub(super) Box<dyn Write + Send>);

impl Sink for StreamSink {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes).map_err(|e| Error::io("stream", "write", e))
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        self.0.flush().map_err(|e| Error::io("stream", "flush", e))
    }

    fn may_move(&self) -> bool {
        false
    }
}

/// Reads a local file.
pub(super) struct FileSource {
    name: String,
    file: File,
    len: u64,
}

impl FileSource {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let open = || {
            let file = File::open(path)?;
            let meta = file.metadata()?;
            if meta.is_dir() {
                return Err(io::Error::from(io::ErrorKind::IsADirectory));
            }
            Ok((file, meta.len()))
        };
        let (file, len) = open().map_err(|e| Error::io(&name, "open", e))?;
        Ok(Self { name, file, len })
    }
}

impl ReadAt for FileSource {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        read_exact_at(&self.file, buf, offset).map_err(|e| Error::io(&self.name, "read", e))
    }
}

#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buf, offset)
}

#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, buf, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buf = &mut buf[n..];
        offset += n as u64;
    }
    Ok(())
}

/// Reads bytes in memory.
pub(super) struct BytesSource(pub(super) bytes::Bytes);

impl ReadAt for BytesSource {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset).ok();
        let range = start.and_then(|s| self.0.get(s..s.checked_add(buf.len())?));
        match range {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => {
                let eof = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(Error::io("bytes", "read", eof));
            }
        }
        Ok(())
    }
}
