//! The output of a writer: chunks, then the index, either after the chunks or separate from them.

use std::collections::VecDeque;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use bytes::Bytes;
use rayon::ThreadPool;
use s4_engine::EncodedFrame;
use s4_format::Digest;
use s4_format::file;
use s4_format::limits::{ALIGN, MAX_OBJECTS};
use s4_format::manifest::Object;

use crate::behind::{Behind, HashedSink};
use crate::buffers::LargeBuffers;
use crate::content::{Content, Part, Parts};
use crate::error::{Error, Result};
use crate::hash::TreeHasher;
use crate::io::OpenSink;
use crate::objects::{DataObject, ObjectOptions, ObjectSink};
use crate::parallel::pool;

/// Most groups of tensors: each may hold a partly filled object in memory.
pub(crate) const MAX_GROUPS: u8 = 4;

/// The zeros between an offset and the next chunk, which starts at a multiple of [`ALIGN`].
fn gap_at(offset: u64) -> &'static [u8] {
    const ZEROS: [u8; ALIGN] = [0; ALIGN];
    &ZEROS[..(offset.next_multiple_of(ALIGN as u64) - offset) as usize]
}

/// One file, or objects and an index. Chunks are put first, then everything else.
pub(crate) struct Output {
    to: To,
    /// Bytes of chunks that are in objects of their own.
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
    memory: ObjectMemory,
    /// Threads that hash together; `None`: the caller's thread hashes.
    hashers: Option<ThreadPool>,
    /// Objects that are complete but not yet handed to the sink, in the order in which they were
    /// closed.
    hashing: VecDeque<Hashing>,
    open: Vec<Open>,
    /// By number; `None` until an object is handed to the sink.
    done: Vec<Option<Object>>,
    index: Vec<u8>,
}

/// Memory for objects.
pub(crate) struct ObjectMemory {
    /// Buffers for bytes that are copied.
    pub(crate) buffers: LargeBuffers,
    /// Objects that may wait for their hashes.
    pub(crate) ahead: usize,
    /// Memory for objects that stay after they are stored.
    pub(crate) kept: KeptMemory,
}

/// Memory for objects that stay for later saves.
#[derive(Default)]
pub(crate) struct KeptMemory {
    /// Bytes left for objects that are copied to memory that is not page-locked; `None`: no object
    /// stays.
    pub(crate) room: Option<usize>,
    /// The engine that keeps objects where they were encoded.
    #[cfg(feature = "cuda")]
    pub(crate) engine: Option<Arc<s4_engine::cuda::CudaEngine>>,
}

/// What happens to an object once it is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stay {
    No,
    /// It stays where it was encoded, if the device engine has room for it.
    #[cfg(feature = "cuda")]
    Here,
    /// A copy of it stays.
    Copied,
}

impl KeptMemory {
    fn claim(&mut self, content: &mut Content) -> Stay {
        let Some(room) = &mut self.room else { return Stay::No };
        #[cfg(feature = "cuda")]
        if let Some(engine) = &self.engine
            && content.hold(|frames| engine.keep_frames(frames))
        {
            return Stay::Here;
        }
        match room.checked_sub(content.len()) {
            Some(left) => {
                *room = left;
                Stay::Copied
            }
            None => Stay::No,
        }
    }
}

/// Yields an object and its hash.
type Hashing = Receiver<(Open, Digest)>;

/// An object that is being filled.
struct Open {
    group: u8,
    number: u32,
    content: Content,
    stay: Stay,
}

impl Open {
    /// Hashes the object: if `in_pool`, with the threads of the pool that this is called in. Copies
    /// it first if a copy is to stay.
    fn hashed(mut self, buffers: &LargeBuffers, in_pool: bool) -> (Self, Digest) {
        if self.stay == Stay::Copied {
            self.content = self.content.copied_whole(buffers);
        }
        let mut hasher = TreeHasher::default();
        self.content.hash(&mut hasher, in_pool);
        let blake3 = Digest(*hasher.finalize().as_bytes());
        (self, blake3)
    }
}

impl Output {
    /// One file.
    pub(crate) fn file(sink: OpenSink) -> Result<Self> {
        let to = To::File { end: End::Caller(HashedSink::new(sink)), offset: 0 };
        let mut out = Self { to, chunk_bytes: 0 };
        out.put(&file::header())?;
        Ok(out)
    }

    /// Objects, hashed by `threads` threads, and an index that [`Output::commit`] returns.
    pub(crate) fn objects(
        sink: Box<dyn ObjectSink>,
        options: ObjectOptions,
        memory: ObjectMemory,
        threads: usize,
    ) -> Result<Self> {
        let index = file::header().to_vec();
        let (options, hashers) = (options.check()?, pool(threads)?);
        let (open, done, hashing) = (vec![], vec![], VecDeque::new());
        let objects = Objects { sink, options, memory, hashers, hashing, open, done, index };
        let to = To::Objects(objects);
        Ok(Self { to, chunk_bytes: 0 })
    }

    /// Writes chunks, with the threads of a pool; returns the number of each chunk's object, and
    /// its offset there. `groups` holds the group of each tensor: an object has chunks of one group
    /// only.
    pub(crate) fn chunks(
        &mut self,
        frames: &[EncodedFrame<'_>],
        groups: &[u8],
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<(u32, u64)>> {
        let mut at = self.offset();
        if let To::Objects(objects) = &mut self.to {
            return objects.chunks(frames, groups, pool);
        }
        let (mut parts, mut places) = (Parts::default(), Vec::with_capacity(frames.len()));
        for frame in frames {
            let gap = gap_at(at);
            places.push((0, at + gap.len() as u64));
            at += (gap.len() + frame.bytes.len()) as u64;
            parts.add(gap, frame);
        }
        self.put_all(parts.finish(), pool)?;
        Ok(places)
    }

    /// From now on, hashes and writes a file on background threads, if its sink may move between
    /// threads, so that the calling thread can do other work. `ahead` limits the bytes that wait to
    /// be written without having been copied.
    pub(crate) fn write_behind(&mut self, threads: usize, ahead: usize) -> Result<()> {
        if let To::File { end, offset } = &mut self.to {
            *end = match std::mem::replace(end, End::Failed) {
                End::Caller(hashed) if hashed.sink.may_move() => {
                    End::Background(Behind::start(hashed, *offset, threads, ahead)?)
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

    /// Ends the chunks; returns the objects that hold them.
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
        self.put_all(vec![Part::Copied(bytes)], None)
    }

    fn put_all(&mut self, parts: Vec<Part<'_>>, pool: Option<&ThreadPool>) -> Result<()> {
        match &mut self.to {
            To::File { end, offset } => {
                *offset += parts.iter().map(|p| p.len() as u64).sum::<u64>();
                match end {
                    End::Caller(HashedSink { sink, hasher }) => {
                        for part in &parts {
                            hasher.update(part.bytes());
                            sink.write(part.bytes())?;
                        }
                    }
                    End::Background(behind) => behind.put(parts, pool)?,
                    End::Failed => return Err(failed()),
                }
            }
            To::Objects(objects) => {
                parts.iter().for_each(|p| objects.index.extend_from_slice(p.bytes()));
            }
        }
        Ok(())
    }

    /// Tells how many bytes of values follow, at most.
    pub(crate) fn expect(&mut self, values: u64) {
        if let To::File { end: End::Caller(hashed), .. } = &mut self.to {
            hashed.sink.expect(values);
        }
    }

    /// The offset of the next part of the index, in the file that holds it.
    pub(crate) fn offset(&self) -> u64 {
        match &self.to {
            To::File { offset, .. } => *offset,
            To::Objects(objects) => objects.index.len() as u64,
        }
    }

    /// Bytes of chunks and index together.
    pub(crate) fn bytes(&self) -> u64 {
        self.chunk_bytes + self.offset()
    }

    /// Makes a file visible, or returns the index of objects.
    pub(crate) fn commit(self) -> Result<Option<Bytes>> {
        match self.to {
            To::File { end, .. } => end.into_sink()?.sink.commit().map(|()| None),
            To::Objects(mut objects) => Ok(Some(std::mem::take(&mut objects.index).into())),
        }
    }

    fn align(&mut self) -> Result<()> {
        self.put(gap_at(self.offset()))
    }
}

impl Drop for Objects {
    /// Waits for hashing threads, so that after an error the memory of objects is free by the time
    /// the caller sees the error.
    fn drop(&mut self) {
        self.hashing.drain(..).for_each(|hashing| drop(hashing.recv()));
    }
}

impl Objects {
    fn chunks(
        &mut self,
        mut frames: &[EncodedFrame<'_>],
        groups: &[u8],
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<(u32, u64)>> {
        // So that uploads begin as early as possible.
        self.hand_on_hashed(usize::MAX)?;
        let group_of = |frame: &EncodedFrame<'_>| groups.get(frame.tensor).copied().unwrap_or(0);
        let mut places = Vec::with_capacity(frames.len());
        while let Some(group) = frames.first().map(group_of) {
            let i = self.open_of(group)?;
            let Open { number, content, .. } = &mut self.open[i];
            let (mut at, mut parts, mut count) = (content.len(), Parts::default(), 0);
            for frame in frames.iter().take_while(|f| group_of(f) == group) {
                let gap = gap_at(at as u64);
                // An object holds at least one chunk, however large.
                if at > 0 && at + gap.len() + frame.bytes.len() > self.options.bytes {
                    break;
                }
                at += gap.len();
                places.push((*number, at as u64));
                at += frame.bytes.len();
                parts.add(gap, frame);
                count += 1;
            }
            content.append(&parts.finish(), (&self.memory.buffers, self.options.bytes), pool);
            frames = &frames[count..];
            if count == 0 {
                let full = self.open.swap_remove(i);
                self.close(full)?;
            }
        }
        Ok(places)
    }

    /// The position in `open` of the object that is being filled with chunks of a group.
    fn open_of(&mut self, group: u8) -> Result<usize> {
        if let Some(i) = self.open.iter().position(|o| o.group == group) {
            return Ok(i);
        }
        let number = self.done.len();
        if number == MAX_OBJECTS || group >= MAX_GROUPS {
            let what = format!("object {number} of group {group}: too many objects or groups");
            return Err(Error::Argument(what));
        }
        self.done.push(None);
        let (number, content) = (number as u32, Content::default());
        self.open.push(Open { group, number, content, stay: Stay::No });
        Ok(self.open.len() - 1)
    }

    /// Starts hashing an object, and hands on earlier ones until at most `ahead` are pending: the
    /// next object is filled without waiting for the hash.
    fn close(&mut self, mut open: Open) -> Result<()> {
        open.stay = self.memory.kept.claim(&mut open.content);
        let buffers = self.memory.buffers.clone();
        let Some(pool) = &self.hashers else {
            let (open, blake3) = open.hashed(&buffers, false);
            return self.hand_on(open, blake3);
        };
        let (sender, receiver) = sync_channel(1);
        // The receiver may have been dropped: the writer may have failed meanwhile.
        pool.spawn(move || drop(sender.send(open.hashed(&buffers, true))));
        self.hashing.push_back(receiver);
        self.hand_on_hashed(self.memory.ahead)
    }

    /// Hands hashed objects to the sink; waits for hashes while more than `ahead` objects are
    /// pending.
    fn hand_on_hashed(&mut self, ahead: usize) -> Result<()> {
        let stopped = |e| Error::io("threads", "continue hashing", std::io::Error::other(e));
        while let Some(first) = self.hashing.front() {
            let (open, blake3) = match first.try_recv() {
                Ok(hashed) => hashed,
                Err(TryRecvError::Empty) if self.hashing.len() <= ahead => break,
                Err(_) => first.recv().map_err(stopped)?,
            };
            self.hashing.pop_front();
            self.hand_on(open, blake3)?;
        }
        Ok(())
    }

    fn hand_on(&mut self, open: Open, blake3: Digest) -> Result<()> {
        let Open { group, number, content, stay } = open;
        let (name, len) = (Some(number.to_string()), content.len() as u64);
        self.done[number as usize] = Some(Object { name, bytes: len, blake3 });
        let (bytes, may_stay) = (content.into(), stay != Stay::No);
        self.sink.put(DataObject { number, group, bytes, blake3, may_stay })
    }

    fn close_all(&mut self) -> Result<Vec<Object>> {
        let mut open = std::mem::take(&mut self.open);
        open.sort_unstable_by_key(|o| o.number);
        open.into_iter().try_for_each(|o| self.close(o))?;
        self.hand_on_hashed(0)?;
        Ok(std::mem::take(&mut self.done).into_iter().flatten().collect())
    }
}
