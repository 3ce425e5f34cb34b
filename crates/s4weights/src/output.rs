//! Where a writer's bytes go: chunks, then the index, after them or apart from them.

use bytes::Bytes;
use rayon::ThreadPool;
use s4_format::Digest;
use s4_format::file;
use s4_format::limits::{ALIGN, MAX_OBJECTS};
use s4_format::manifest::Object;

use crate::behind::{Behind, HashedSink};
use crate::buffers::{LargeBuffer, LargeBuffers};
use crate::error::{Error, Result};
use crate::io::OpenSink;
use crate::objects::{DataObject, ObjectOptions, ObjectSink};
use crate::parallel::pool;

/// Most groups of tensors: each may hold a partly filled object in memory.
pub(crate) const MAX_GROUPS: u8 = 4;

/// One file, or objects and an index. Chunks are put first, then everything else.
pub(crate) struct Output {
    to: To,
    /// Bytes of chunks that went to objects of their own.
    chunk_bytes: u64,
}

enum To {
    File { end: End, offset: u64 },
    Objects(Objects),
}

/// The thread that hashes and writes a file.
enum End {
    Caller(HashedSink),
    Background(Behind),
    /// Writing failed, and the file was removed.
    Failed,
}

impl End {
    fn into_sink(self) -> Result<HashedSink> {
        match self {
            Self::Caller(hashed) => Ok(hashed),
            Self::Background(behind) => behind.finish(),
            Self::Failed => Err(failed()),
        }
    }
}

fn failed() -> Error {
    Error::Argument("cannot finish a file after a failed write".into())
}

struct Objects {
    sink: Box<dyn ObjectSink>,
    options: ObjectOptions,
    /// Threads that hash together; `None`: the caller's own.
    hashers: Option<ThreadPool>,
    buffers: LargeBuffers,
    open: Vec<Open>,
    /// By number; absent while an object is open.
    done: Vec<Option<Object>>,
    index: Vec<u8>,
}

/// An object that is being filled.
struct Open {
    group: u8,
    number: u32,
    bytes: LargeBuffer,
}

impl Output {
    /// One file.
    pub(crate) fn file(sink: OpenSink) -> Result<Self> {
        let to =
            To::File { end: End::Caller(HashedSink { sink, hasher: Box::default() }), offset: 0 };
        let mut out = Self { to, chunk_bytes: 0 };
        out.put(&file::header())?;
        Ok(out)
    }

    /// Objects in `buffers`, hashed by `threads` threads, and an index that [`Output::commit`] returns.
    pub(crate) fn objects(
        sink: Box<dyn ObjectSink>,
        options: ObjectOptions,
        buffers: LargeBuffers,
        threads: usize,
    ) -> Result<Self> {
        let index = file::header().to_vec();
        let (options, hashers) = (options.check()?, pool(threads)?);
        let (open, done) = (vec![], vec![]);
        let to = To::Objects(Objects { sink, options, hashers, buffers, open, done, index });
        Ok(Self { to, chunk_bytes: 0 })
    }

    /// Writes a chunk: the number of its object, and its offset there. In objects, chunks of one
    /// group only lie together.
    pub(crate) fn chunk(&mut self, group: u8, bytes: &[u8]) -> Result<(u32, u64)> {
        match &mut self.to {
            To::Objects(objects) => objects.chunk(group, bytes),
            To::File { .. } => {
                self.align()?;
                let at = self.offset();
                self.put(bytes)?;
                Ok((0, at))
            }
        }
    }

    /// Hashes and writes a file on background threads from now on, if its sink may move between threads, so
    /// that the calling thread can do other work.
    pub(crate) fn write_behind(&mut self, threads: usize) -> Result<()> {
        if let To::File { end, offset } = &mut self.to {
            *end = match std::mem::replace(end, End::Failed) {
                End::Caller(hashed) if hashed.sink.may_move() => {
                    End::Background(Behind::start(hashed, *offset, threads)?)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Whether background threads hash and write.
    pub(crate) fn is_behind(&self) -> bool {
        matches!(self.to, To::File { end: End::Background(_), .. })
    }

    /// Waits for the background threads, and writes on the calling thread from now on.
    pub(crate) fn write_here(&mut self) -> Result<()> {
        if let To::File { end, .. } = &mut self.to {
            *end = End::Caller(std::mem::replace(end, End::Failed).into_sink()?);
        }
        Ok(())
    }

    /// Ends the chunks; gives the objects that hold them.
    pub(crate) fn end_chunks(&mut self) -> Result<Vec<Object>> {
        self.align()?;
        self.write_here()?;
        match &mut self.to {
            To::File { end: End::Caller(hashed), offset } => {
                let blake3 = Digest(*hashed.hasher.finalize().as_bytes());
                Ok(vec![Object { name: None, bytes: *offset, blake3 }])
            }
            To::File { .. } => Err(failed()),
            To::Objects(objects) => {
                let list = objects.close_all()?;
                self.chunk_bytes = list.iter().map(|o| o.bytes).sum();
                Ok(list)
            }
        }
    }

    /// Writes part of the index.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.to {
            To::File { end, offset } => {
                match end {
                    End::Caller(HashedSink { sink, hasher }) => {
                        hasher.update(bytes);
                        sink.write(bytes)?;
                    }
                    End::Background(behind) => behind.put(bytes)?,
                    End::Failed => return Err(failed()),
                }
                *offset += bytes.len() as u64;
            }
            To::Objects(objects) => objects.index.extend_from_slice(bytes),
        }
        Ok(())
    }

    /// Where the next part of the index starts, in the file that holds it.
    pub(crate) fn offset(&self) -> u64 {
        match &self.to {
            To::File { offset, .. } => *offset,
            To::Objects(objects) => objects.index.len() as u64,
        }
    }

    /// Bytes of everything.
    pub(crate) fn bytes(&self) -> u64 {
        self.chunk_bytes + self.offset()
    }

    /// Makes a file visible; gives the index of objects.
    pub(crate) fn commit(self) -> Result<Option<Bytes>> {
        match self.to {
            To::File { end, .. } => end.into_sink()?.sink.commit().map(|()| None),
            To::Objects(objects) => Ok(Some(objects.index.into())),
        }
    }

    fn align(&mut self) -> Result<()> {
        let gap = self.offset().next_multiple_of(ALIGN as u64) - self.offset();
        self.put(&[0; ALIGN][..gap as usize])
    }
}

impl Objects {
    fn chunk(&mut self, group: u8, bytes: &[u8]) -> Result<(u32, u64)> {
        if let Some(i) = self.open.iter().position(|o| o.group == group) {
            let open = &mut self.open[i];
            let at = open.bytes.len().next_multiple_of(ALIGN);
            if at + bytes.len() <= self.options.bytes {
                open.bytes.resize(at, 0);
                open.bytes.extend_from_slice(bytes);
                return Ok((open.number, at as u64));
            }
            let full = self.open.swap_remove(i);
            self.close(full)?;
        }
        let number = self.done.len();
        if number == MAX_OBJECTS || group >= MAX_GROUPS {
            let what = format!("object {number} of group {group}: more than are allowed");
            return Err(Error::Argument(what));
        }
        self.done.push(None);
        let number = number as u32;
        let mut open = Open { group, number, bytes: self.buffers.take(self.options.bytes) };
        open.bytes.extend_from_slice(bytes);
        self.open.push(open);
        Ok((number, 0))
    }

    fn close(&mut self, open: Open) -> Result<()> {
        let Open { group, number, bytes } = open;
        let mut hasher = blake3::Hasher::new();
        match &self.hashers {
            None => hasher.update(&bytes),
            Some(pool) => pool.install(|| hasher.update_rayon(&bytes)),
        };
        let blake3 = Digest(*hasher.finalize().as_bytes());
        let (name, len) = (Some(number.to_string()), bytes.len() as u64);
        self.done[number as usize] = Some(Object { name, bytes: len, blake3 });
        self.sink.put(DataObject { number, group, bytes: bytes.into(), blake3 })
    }

    fn close_all(&mut self) -> Result<Vec<Object>> {
        let mut open = std::mem::take(&mut self.open);
        open.sort_unstable_by_key(|o| o.number);
        open.into_iter().try_for_each(|o| self.close(o))?;
        Ok(std::mem::take(&mut self.done).into_iter().flatten().collect())
    }
}
