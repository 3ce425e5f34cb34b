//! Hashes and writes on background threads while the caller's thread fills the next buffer.

use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use rayon::ThreadPool;

use crate::buffers::append;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::io::OpenSink;
use crate::parallel::pool;

/// Bytes that are hashed and written together: enough for several threads. Pieces end at multiples
/// of it, so that no two of them share a page of the file.
const PIECE: usize = 16 << 20;
/// Pieces in flight besides the one that is being filled.
const IN_FLIGHT: usize = 2;
/// With more threads, memory bandwidth is the limit.
const HELPERS: usize = 16;

/// The sink and the hash of what it was given, once the threads have ended.
pub(crate) struct HashedSink {
    pub(crate) sink: OpenSink,
    pub(crate) hasher: Box<blake3::Hasher>,
}

/// A sink that runs on a thread of its own, which ends with it.
pub(crate) struct Behind {
    piece: Vec<u8>,
    /// Bytes until the piece is full.
    room: usize,
    /// `None` once no more will come.
    full: Option<SyncSender<Vec<u8>>>,
    empty: Receiver<Vec<u8>>,
    thread: Option<JoinHandle<Result<HashedSink>>>,
}

impl Behind {
    /// Bytes of buffers that one may have.
    pub(crate) const BUFFERS: usize = (IN_FLIGHT + 1) * PIECE;

    /// Starts the thread, and `threads` or fewer that help it. The sink has `written` bytes already.
    pub(crate) fn start(mut back: HashedSink, written: u64, threads: usize) -> Result<Self> {
        let helpers = pool(threads.min(HELPERS))?;
        let (full, pieces) = sync_channel::<Vec<u8>>(IN_FLIGHT - 1);
        let (done, empty) = channel();
        let interrupt = interrupt::current();
        let work = move || {
            interrupt::adopt(interrupt);
            for mut piece in pieces {
                let HashedSink { sink, hasher } = &mut back;
                match &helpers {
                    None => {
                        hasher.update(&piece);
                        sink.write(&piece)?;
                    }
                    Some(pool) => pool.in_place_scope(|s| {
                        s.spawn(|_| {
                            hasher.update_rayon(&piece);
                        });
                        sink.write_by(pool, &piece)
                    })?,
                }
                piece.clear();
                // The other side may have ended; what it sent is written all the same.
                let _ = done.send(piece);
            }
            Ok(back)
        };
        let thread = std::thread::Builder::new().name("s4weights-write".into()).spawn(work);
        let thread = thread.map_err(|e| Error::io("threads", "start", e))?;
        let room = PIECE - (written % PIECE as u64) as usize;
        Ok(Self { piece: vec![], room, full: Some(full), empty, thread: Some(thread) })
    }

    /// Takes bytes to be hashed and written, part after part, with the threads of a pool. [`Behind::finish`]
    /// reports what fails.
    pub(crate) fn put(&mut self, parts: &[&[u8]], pool: Option<&ThreadPool>) -> Result<()> {
        let mut fit = Vec::with_capacity(parts.len());
        for mut part in parts.iter().copied() {
            while !part.is_empty() {
                let (now, later) = part.split_at(part.len().min(self.room));
                fit.push(now);
                part = later;
                self.room -= now.len();
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

    fn fill(&mut self, parts: &mut Vec<&[u8]>, pool: Option<&ThreadPool>) {
        if self.piece.capacity() == 0 {
            self.piece.reserve_exact(PIECE);
        }
        append(&mut self.piece, parts, pool);
        parts.clear();
    }

    fn send(&mut self) -> Result<()> {
        let next = self.empty.try_recv().unwrap_or_default();
        let piece = std::mem::replace(&mut self.piece, next);
        let sent = self.full.as_ref().is_some_and(|full| full.send(piece).is_ok());
        if sent { Ok(()) } else { Err(Error::io("threads", "write on", stopped())) }
    }

    /// Writes what was taken; gives the sink back.
    ///
    /// # Errors
    /// Those of the sink.
    pub(crate) fn finish(mut self) -> Result<HashedSink> {
        let sent = if self.piece.is_empty() { Ok(()) } else { self.send() };
        self.full = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Ok(back))) => sent.map(|()| back),
            Some(Ok(Err(e))) => Err(e),
            _ => Err(Error::io("threads", "write on", stopped())),
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

    fn run(
        parts: &[&[u8]],
        limit: usize,
        threads: usize,
        written: u64,
    ) -> (Result<blake3::Hash>, Vec<u8>) {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let sink = OpenSink::Other(Box::new(Kept { bytes: Arc::clone(&bytes), limit }));
        let back = HashedSink { sink, hasher: Box::default() };
        let mut behind = Behind::start(back, written, threads).unwrap();
        let helpers = pool(threads).unwrap();
        let put = behind.put(parts, helpers.as_ref()).and_then(|()| behind.put(&[], None));
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
            for parts in [vec![], vec![&whole[..5]], vec![first, &[], rest]] {
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
            let (hash, kept) = run(&[&whole], 2 * PIECE, threads, 0);
            assert_eq!(hash.unwrap_err().to_string(), "kept: cannot write: full");
            assert_eq!(kept.len(), 2 * PIECE);
        }
    }
}
