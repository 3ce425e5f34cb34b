//! Hashes and writes on background threads while the caller's thread fills the next buffer.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rayon::ThreadPool;

use crate::buffers::LargeBuffers;
use crate::content::{Content, Part};
use crate::error::{Error, Result};
use crate::hash::TreeHasher;
use crate::interrupt;
use crate::io::OpenSink;
use crate::parallel::pool;

/// Bytes that are hashed and written together: enough for several threads. Pieces end at multiples
/// of it, so that no two of them share a page of the file.
const PIECE: usize = 16 << 20;
/// Maximum number of pieces that are hashed and written together.
const MAX_TOGETHER: usize = 4;
/// Most pieces with copied bytes in flight, besides the one that is being filled.
const IN_FLIGHT: usize = 2;
/// With more threads, memory bandwidth is the limit.
const HELPERS: usize = 16;

/// A sink, and the hash of what was written to it.
pub(crate) struct HashedSink {
    pub(crate) sink: OpenSink,
    pub(crate) hasher: TreeHasher,
}

impl HashedSink {
    /// For a sink that nothing was written to yet.
    pub(crate) fn new(sink: OpenSink) -> Self {
        Self { sink, hasher: TreeHasher::default() }
    }

    /// Hashes and writes pieces, with the threads of a pool.
    fn put(&mut self, pieces: &[Content], helpers: Option<&ThreadPool>) -> Result<()> {
        let Self { sink, hasher } = self;
        let slices: Vec<_> = pieces.iter().flat_map(Content::slices).collect();
        let Some(pool) = helpers else {
            return slices.into_iter().try_for_each(|slice| {
                hasher.update(slice);
                sink.write(slice)
            });
        };
        pool.in_place_scope(|s| {
            s.spawn(|_| hasher.update_in_pool(&slices));
            sink.write_by(pool, &slices)
        })
    }
}

/// Pieces that are not written yet: how many have a buffer, and how many bytes are referenced in place.
#[derive(Clone, Copy, Default)]
struct InFlight {
    buffers: usize,
    held: usize,
}

impl InFlight {
    fn of(piece: &Content) -> Self {
        let copied = piece.copied();
        Self { buffers: usize::from(copied > 0), held: piece.len() - copied }
    }
}

/// A sink that runs on a background thread, which ends with it.
pub(crate) struct Behind {
    piece: Content,
    buffers: LargeBuffers,
    /// Bytes until the piece is full.
    room: usize,
    /// Maximum bytes that are held in place until they are written.
    ahead: usize,
    in_flight: InFlight,
    /// `None` once there are no more pieces.
    full: Option<Sender<Content>>,
    done: Receiver<InFlight>,
    thread: Option<JoinHandle<Result<HashedSink>>>,
}

impl Behind {
    /// Most bytes of buffers that one uses.
    pub(crate) const BUFFERS: usize = (IN_FLIGHT + 1) * PIECE;

    /// Starts the thread, and `threads` or fewer that help it. The sink has `written` bytes already. `ahead`: bytes
    /// that may be referenced in place instead of copied.
    pub(crate) fn start(
        mut back: HashedSink,
        written: u64,
        threads: usize,
        ahead: usize,
    ) -> Result<Self> {
        let helpers = pool(threads.min(HELPERS))?;
        let (full, full_pieces) = channel::<Content>();
        let (tell, done) = channel();
        let interrupt = interrupt::current();
        let work = move || {
            interrupt::adopt(interrupt);
            while let Ok(piece) = full_pieces.recv() {
                // Takes all pieces that have arrived, so that the threads wait for each other only
                // once.
                let mut together = vec![piece];
                together.extend(full_pieces.try_iter().take(MAX_TOGETHER - 1));
                back.put(&together, helpers.as_ref())?;
                let written: Vec<_> = together.iter().map(InFlight::of).collect();
                // Frees their memory before reporting them as written.
                drop(together);
                // The receiver may have been dropped; the pieces that were sent before are written anyway.
                for piece in written {
                    let _ = tell.send(piece);
                }
            }
            Ok(back)
        };
        let thread = std::thread::Builder::new().name("s4weights-write".into()).spawn(work);
        let thread = thread.map_err(|e| Error::io("threads", "start", e))?;
        let room = PIECE - (written % PIECE as u64) as usize;
        Ok(Self {
            piece: Content::default(),
            buffers: LargeBuffers::new(Self::BUFFERS),
            room,
            ahead,
            in_flight: InFlight::default(),
            full: Some(full),
            done,
            thread: Some(thread),
        })
    }

    /// Takes bytes to be hashed and written, part after part, with the threads of a pool. [`Behind::finish`]
    /// reports what fails.
    pub(crate) fn put(&mut self, parts: Vec<Part<'_>>, pool: Option<&ThreadPool>) -> Result<()> {
        let mut fit = Vec::with_capacity(parts.len());
        for mut part in parts {
            while part.len() > 0 {
                let (now, later) = part.clone().split_at(part.len().min(self.room));
                part = later;
                self.room -= now.len();
                fit.push(now);
                if self.room == 0 {
                    self.fill(&mut fit, pool);
                    self.send()?;
                    self.room = PIECE;
                }
            }
        }
        self.fill(&mut fit, pool);
        Ok(())
    }

    fn fill(&mut self, parts: &mut Vec<Part<'_>>, pool: Option<&ThreadPool>) {
        self.piece.append(parts, (&self.buffers, PIECE), pool);
        parts.clear();
    }

    fn send(&mut self) -> Result<()> {
        let piece = std::mem::take(&mut self.piece);
        let own = InFlight::of(&piece);
        while self.in_flight.buffers + own.buffers > IN_FLIGHT
            || self.in_flight.held > 0 && self.in_flight.held + own.held > self.ahead
        {
            let written = self.done.recv();
            self.landed(written.map_err(|_| Error::io("threads", "continue writing", stopped()))?);
        }
        while let Ok(written) = self.done.try_recv() {
            self.landed(written);
        }
        self.in_flight.buffers += own.buffers;
        self.in_flight.held += own.held;
        let sent = self.full.as_ref().is_some_and(|full| full.send(piece).is_ok());
        if sent { Ok(()) } else { Err(Error::io("threads", "continue writing", stopped())) }
    }

    fn landed(&mut self, written: InFlight) {
        self.in_flight.buffers -= written.buffers;
        self.in_flight.held -= written.held;
    }

    /// Writes the rest; returns the sink.
    ///
    /// # Errors
    /// Those of the sink.
    pub(crate) fn finish(mut self) -> Result<HashedSink> {
        let sent = if self.piece.len() == 0 { Ok(()) } else { self.send() };
        self.full = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Ok(back))) => sent.map(|()| back),
            Some(Ok(Err(e))) => Err(e),
            _ => Err(Error::io("threads", "continue writing", stopped())),
        }
    }
}

fn stopped() -> std::io::Error {
    std::io::Error::other("the writing thread has stopped")
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.full = None;
        // Dropping the sink removes what it wrote; the caller waits for that.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;

    use super::*;
    use crate::io::Sink;

    struct Kept {
        bytes: Arc<Mutex<Vec<u8>>>,
        limit: usize,
    }

    impl Sink for Kept {
        fn write(&mut self, bytes: &[u8]) -> Result<()> {
            let mut kept = self.bytes.lock().unwrap();
            if kept.len() + bytes.len() > self.limit {
                return Err(Error::io("kept", "write", std::io::Error::other("full")));
            }
            kept.extend_from_slice(bytes);
            Ok(())
        }

        fn commit(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    /// Parts that are held and parts that are copied, alternating.
    fn mixed<'a>(parts: &[&'a [u8]]) -> Vec<Part<'a>> {
        let part = |(i, part): (usize, &&'a [u8])| match i % 2 {
            0 => Part::Held(Bytes::copy_from_slice(part)),
            _ => Part::Copied(part),
        };
        parts.iter().enumerate().map(part).collect()
    }

    fn run(
        parts: &[&[u8]],
        limit: usize,
        threads: usize,
        written: u64,
    ) -> (Result<blake3::Hash>, Vec<u8>) {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let sink = OpenSink::Other(Box::new(Kept { bytes: Arc::clone(&bytes), limit }));
        let back = HashedSink::new(sink);
        let mut behind = Behind::start(back, written, threads, PIECE).unwrap();
        let helpers = pool(threads).unwrap();
        let put =
            behind.put(mixed(parts), helpers.as_ref()).and_then(|()| behind.put(vec![], None));
        let done = behind.finish().map(|back| back.hasher.finalize());
        assert!(put.is_ok() || done.is_err());
        let kept = bytes.lock().unwrap().clone();
        (done, kept)
    }

    #[test]
    fn all_is_hashed_and_written_in_order() {
        let whole: Vec<u8> = (0..3 * PIECE + 77).map(|i| (i % 251) as u8).collect();
        for threads in [1, 3] {
            let (first, rest) = whole.split_at(1000);
            let halves = whole.split_at(PIECE + 5);
            for parts in
                [vec![], vec![&whole[..5]], vec![first, &[], rest], vec![&[], halves.0, halves.1]]
            {
                let all = parts.concat();
                for written in [0, 77, 3 * PIECE as u64 - 1] {
                    let (hash, kept) = run(&parts, usize::MAX, threads, written);
                    assert!(kept == all);
                    assert_eq!(hash.unwrap(), blake3::hash(&all));
                }
            }
        }
    }

    #[test]
    fn an_error_of_the_sink_is_told() {
        let whole = vec![1; 6 * PIECE];
        for threads in [1, 3] {
            for parts in [vec![&whole[..]], vec![&[], &whole]] {
                let (hash, kept) = run(&parts, 2 * PIECE, threads, 0);
                assert_eq!(hash.unwrap_err().to_string(), "kept: cannot write: full");
                assert_eq!(kept.len(), 2 * PIECE);
            }
        }
    }
}
