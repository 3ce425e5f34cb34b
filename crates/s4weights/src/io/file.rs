//! Local files, streams and memory.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, IoSlice, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rayon::ThreadPool;

#[cfg(target_os = "linux")]
use super::mapped::Mapped;
use super::temporary::Temporary;
#[cfg(target_os = "linux")]
use super::write_out::WriteOut;
use super::{ReadAt, Sink};
use crate::error::{Error, Result};

/// Writes a local file under a temporary name in the same folder, or without a name; `commit` syncs
/// it, renames it and syncs the folder.
pub(crate) struct FileSink {
    name: String,
    out: Out,
    /// Bytes of small writes, to be written with the next large one.
    small: Vec<u8>,
}

/// Writes of fewer bytes than this are collected.
const SMALL_WRITE: usize = 4 << 10;
/// Most bytes that are collected.
const SMALL_WRITES: usize = 64 << 10;

enum Out {
    Temporary {
        file: Temporary,
        path: PathBuf,
        /// Whether it may replace a file.
        replaces: bool,
        #[cfg(target_os = "linux")]
        way: Way,
    },
    /// A device or a pipe: nothing to rename.
    Direct(File),
}

/// How a file is written.
#[cfg(target_os = "linux")]
enum Way {
    /// Not decided yet: this many more bytes are written plainly first, since a small file is not
    /// worth finding out.
    Undecided(usize),
    /// By one thread: several are no faster, or others could truncate the file.
    Plain(WriteOut),
    /// Through a mapping.
    Mapped(Mapped),
}

#[cfg(target_os = "linux")]
impl Way {
    /// Bytes that are written plainly.
    const SMALL: usize = 8 << 20;

    /// The mapping through which to write the next `bytes` bytes, if not plainly.
    fn mapped(&mut self, file: &Temporary, bytes: usize) -> Option<&mut Mapped> {
        if let Self::Undecided(left) = self {
            let written = Self::SMALL - *left;
            *self = match left.checked_sub(bytes) {
                Some(left) => Self::Undecided(left),
                None => {
                    // Mapped memory is lost when somebody else truncates the file, so nobody else may
                    // be able to open it.
                    let unnamed = file.is_unnamed().then(|| file.as_file());
                    let mapped = unnamed.and_then(Mapped::of);
                    mapped.map_or_else(|| Self::Plain(WriteOut::after(written)), Self::Mapped)
                }
            };
        }
        match self {
            Self::Mapped(mapped) => Some(mapped),
            _ => None,
        }
    }
}

/// Checks that this process may write to a file, by the rules that apply to opening it: ownership counts, and root
/// may write to any file.
fn check_writable(path: &Path, meta: &Metadata) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Access, AtFlags, CWD, accessat};
        use rustix::io::Errno;
        match accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS) {
            Ok(()) => return Ok(()),
            Err(e @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => return Err(e.into()),
            // An old kernel, or one that filters calls.
            Err(_) => {}
        }
    }
    match meta.permissions().readonly() {
        true => Err(io::ErrorKind::PermissionDenied.into()),
        false => Ok(()),
    }
}

/// The path that a file written to `path` will replace, and the metadata of the file that is there, if any. A link
/// stays a link: its target is replaced, or created.
///
/// # Errors
/// If it is a folder, or a file that may not be written to: renaming over it would succeed.
pub(super) fn replaced(path: &Path) -> io::Result<(PathBuf, Option<Metadata>)> {
    // `/dev/stdout` may lead to a pipe, which has no path to be opened by.
    if let Ok(there) = fs::metadata(path)
        && !there.is_file()
        && !there.is_dir()
    {
        return Ok((path.to_owned(), Some(there)));
    }
    let path = behind_links(path);
    let there = match fs::metadata(&path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            file_name(&path)?;
            return Ok((path, None));
        }
        // Fails now rather than when everything is written: because a name is too long, for
        // instance.
        Err(e) => return Err(e),
    };
    if there.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if there.is_file() {
        check_writable(&path, &there)?;
    }
    Ok((path, Some(there)))
}

impl FileSink {
    pub(super) fn create(path: &Path) -> Result<Self> {
        Self::create_as(path.display().to_string(), path, true)
    }

    /// Creates a sink that never replaces a file, not even one that appears before the output is complete.
    pub(super) fn create_new(name: &str, path: &Path) -> Result<Self> {
        Self::create_as(name.to_owned(), path, false)
    }

    fn create_as(name: String, path: &Path, replaces: bool) -> Result<Self> {
        let fail = |action, e| Error::io(&name, action, e);
        let (path, existing) = replaced(path).map_err(|e| fail("create", e))?;
        if !replaces && existing.as_ref().is_some_and(Metadata::is_file) {
            return Err(fail("create", io::ErrorKind::AlreadyExists.into()));
        }
        if existing.as_ref().is_some_and(|m| !m.is_file()) {
            let file = File::options().write(true).open(&path).map_err(|e| fail("create", e))?;
            return Ok(Self { out: Out::Direct(file), name, small: vec![] });
        }
        let file = file_name(&path)
            .and_then(|name| Temporary::create(folder(&path), name, existing.as_ref()));
        let file = file.map_err(|e| fail("create", e))?;
        let out = Out::Temporary {
            #[cfg(target_os = "linux")]
            way: Way::Undecided(Way::SMALL),
            file,
            path,
            replaces,
        };
        Ok(Self { out, name, small: vec![] })
    }

    /// Writes what was collected, and then `bytes`.
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let len = self.small.len() + bytes.len();
        let wrote = match &mut self.out {
            #[cfg(target_os = "linux")]
            Out::Temporary { file, way, .. } => match way.mapped(file, len) {
                Some(mapped) => {
                    let file = file.as_file_mut();
                    mapped.append(file, &self.small).and_then(|()| mapped.append(file, bytes))
                }
                None => write_both(file.as_file_mut(), &self.small, bytes).map(|()| {
                    if let Way::Plain(write_out) = way {
                        write_out.wrote(file.as_file(), len);
                    }
                }),
            },
            #[cfg(not(target_os = "linux"))]
            Out::Temporary { file, .. } => write_both(file.as_file_mut(), &self.small, bytes),
            Out::Direct(file) => write_both(file, &self.small, bytes),
        };
        self.small.clear();
        wrote.map_err(|e| Error::io(&self.name, "write", e))
    }

    /// As `write` of each part, with the threads of a pool where they are faster than one.
    #[cfg(target_os = "linux")]
    pub(super) fn write_by(&mut self, pool: &ThreadPool, parts: &[&[u8]]) -> Result<()> {
        self.send(&[])?;
        let len = parts.iter().map(|part| part.len()).sum();
        if let Out::Temporary { file, way, .. } = &mut self.out
            && let Some(by) = way.mapped(file, usize::MAX).filter(|m| m.suits(pool, len))
        {
            let fail = |e| Error::io(&self.name, "write", e);
            by.end(file.as_file_mut()).map_err(fail)?;
            if by.write(file.as_file_mut(), pool, parts).map_err(fail)? {
                return Ok(());
            }
            *way = Way::Plain(WriteOut::default());
        }
        parts.iter().try_for_each(|part| self.write(part))
    }

    /// As `write`: several threads are no faster.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn write_by(&mut self, _: &ThreadPool, parts: &[&[u8]]) -> Result<()> {
        parts.iter().try_for_each(|part| self.write(part))
    }
}

/// The path that a chain of links ends at, whether there is a file or not: the one that opening
/// `path` would open.
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

fn file_name(path: &Path) -> io::Result<&OsStr> {
    path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no file name"))
}

pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

impl Sink for FileSink {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() < SMALL_WRITE && self.small.len() + bytes.len() <= SMALL_WRITES {
            self.small.extend_from_slice(bytes);
            return Ok(());
        }
        self.send(bytes)
    }

    fn commit(mut self: Box<Self>) -> Result<()> {
        self.send(&[])?;
        let fail = |action, e| Error::io(&self.name, action, e);
        match self.out {
            Out::Direct(file) => match file.sync_all() {
                // Pipes and devices cannot be synced.
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
                other => other.map_err(|e| fail("sync", e)),
            },
            #[cfg(target_os = "linux")]
            Out::Temporary { mut file, path, replaces, way } => {
                match way {
                    Way::Mapped(mut mapped) => {
                        mapped.end(file.as_file_mut()).map_err(|e| fail("write", e))?;
                    }
                    // A sync writes the rest.
                    Way::Plain(write_out) => drop(write_out),
                    Way::Undecided(_) => {}
                }
                commit(file, &path, replaces, fail)
            }
            #[cfg(not(target_os = "linux"))]
            Out::Temporary { file, path, replaces } => commit(file, &path, replaces, fail),
        }
    }
}

/// Writes both, by one call if the system takes them.
fn write_both(file: &mut File, first: &[u8], second: &[u8]) -> io::Result<()> {
    if first.is_empty() || second.is_empty() {
        return file.write_all(first).and_then(|()| file.write_all(second));
    }
    let wrote = loop {
        match file.write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => break done?,
        }
    };
    match wrote.checked_sub(first.len()) {
        Some(more) => file.write_all(second.get(more..).unwrap_or_default()),
        None => file.write_all(&first[wrote..]).and_then(|()| file.write_all(second)),
    }
}

/// Publishes a complete file at its path, durably.
fn commit(
    file: Temporary,
    path: &Path,
    replaces: bool,
    fail: impl Fn(&'static str, io::Error) -> Error,
) -> Result<()> {
    file.as_file().sync_all().map_err(|e| fail("sync", e))?;
    let published = if replaces { file.publish(path) } else { file.publish_new(path) };
    published.map_err(|e| fail("rename", e))?;
    sync_folder(folder(path)).map_err(|e| fail("sync the folder", e))
}

/// Makes the names in a folder durable, if the folder can be opened. One that may be written to but not listed
/// cannot be opened; that is not an error, since the file is complete and has its name.
#[cfg(unix)]
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        opened => opened?.sync_all(),
    }
}

#[cfg(not(unix))]
pub(super) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Writes to a caller's stream.
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
pub(super) struct BytesSource(pub(super) Bytes);

impl ReadAt for BytesSource {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        match self.in_memory(offset..offset.saturating_add(buf.len() as u64)) {
            Some(bytes) => buf.copy_from_slice(&bytes),
            None => {
                let eof = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(Error::io("bytes", "read", eof));
            }
        }
        Ok(())
    }

    fn in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        let (start, end) = (usize::try_from(range.start).ok()?, usize::try_from(range.end).ok()?);
        (start <= end && end <= self.0.len()).then(|| self.0.slice(start..end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_all_sizes_arrive_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        let mut sizes =
            vec![0, 1, 16, SMALL_WRITE - 1, SMALL_WRITE, 5, 200_000, 7, SMALL_WRITE + 1];
        sizes.extend([1000; 200]);
        let mut sink = Box::new(FileSink::create(&path).unwrap());
        let mut expected = vec![];
        for len in sizes {
            let part = &bytes[expected.len() % 1000..][..len];
            sink.write(part).unwrap();
            expected.extend_from_slice(part);
        }
        assert!(!path.exists());
        sink.commit().unwrap();
        assert!(fs::read(&path).unwrap() == expected);
    }

    #[test]
    fn a_new_file_replaces_none() {
        let folder = tempfile::tempdir().unwrap();
        // A memory file system has files without a name.
        let memory = tempfile::tempdir_in("/dev/shm").ok();
        for folder in [Some(folder), memory].into_iter().flatten() {
            let path = folder.path().join("file");
            let new = || FileSink::create_new("it", &path).map(Box::new);
            let mut sinks = [new().unwrap(), new().unwrap()];
            for (sink, bytes) in sinks.iter_mut().zip([b"one", b"two"]) {
                sink.write(bytes).unwrap();
            }
            let [one, two] = sinks;
            one.commit().unwrap();
            for refused in [two.commit(), new().map(drop)] {
                let refused = refused.unwrap_err();
                assert!(
                    matches!(&refused, Error::Io { target, source, .. }
                        if target == "it" && source.kind() == io::ErrorKind::AlreadyExists),
                    "{refused}"
                );
            }
            assert_eq!(fs::read(&path).unwrap(), b"one");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_without_a_path_is_written_to() {
        use std::os::fd::AsRawFd;
        let (mut reader, writer) = io::pipe().unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", writer.as_raw_fd()));
        let link = tempfile::tempdir().unwrap();
        let link = link.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for path in [path, link] {
            let mut sink = Box::new(FileSink::create(&path).unwrap());
            sink.write(b"four").unwrap();
            sink.commit().unwrap();
            let mut read = [0; 4];
            io::Read::read_exact(&mut reader, &mut read).unwrap();
            assert_eq!(&read, b"four");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_is_replaced_by_whoever_may_write_to_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
        // Root may, as when it opens the file.
        let allowed = File::options().write(true).open(&path).is_ok();
        match FileSink::create(&path) {
            Ok(sink) => {
                assert!(allowed);
                Box::new(sink).commit().unwrap();
                assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o444);
            }
            Err(e) => assert!(!allowed, "{e}"),
        }
    }
}
