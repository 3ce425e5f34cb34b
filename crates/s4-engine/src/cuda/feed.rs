//! Frames on their way to the decoder: straight from pinned memory, or filled in by many threads
//! while earlier batches are queued.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};

use rayon::{ScopeFifo, ThreadPool, Yield};
use s4_codec_gpu::Pinned;

use super::decode::Decoder;
use super::error::{CudaError, Result};
use super::job::{Batch, Filled};

/// Parts start at multiples of a cache line.
const LINE: usize = 64;

impl<'a> Decoder<'_, 'a> {
    /// As [`Decoder::push`], for frames that already lie in pinned memory, from byte `at` on, and
    /// go to the device from there. Nobody may write there until the decoder is done.
    ///
    /// # Errors
    /// As [`Decoder::push`]; `Argument` if the batch is not within the memory.
    pub fn push_pinned(&mut self, batch: Batch<'a>, from: &Arc<Pinned>, at: usize) -> Result<()> {
        if at.checked_add(batch.len).is_none_or(|end| end > from.len()) {
            let what =
                format!("{} bytes at {at} are outside the {} pinned bytes", batch.len, from.len());
            return Err(s4_codec_gpu::GpuError::Argument(what).into());
        }
        let mut filled = self.take(batch)?;
        filled.frames.pinned = Arc::clone(from);
        filled.frames.at = at;
        self.start(filled)
    }

    /// As [`Decoder::push`], for many batches, whose frames the threads of a pool fill in while
    /// earlier batches are queued and decoded. `fill` gets the index of a batch, the offset of a
    /// part of its frames, and the part, of at most `part` bytes. `queued` is called on this
    /// thread, in order, once a batch is queued. Without a pool this thread fills.
    ///
    /// # Errors
    /// As [`Decoder::push`]; those of `queued`.
    pub fn push_all<E: From<CudaError> + Send>(
        &mut self,
        pool: Option<&ThreadPool>,
        batches: impl IntoIterator<Item = Batch<'a>>,
        part: usize,
        fill: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
        mut queued: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let part = part.max(1);
        let Some(pool) = pool else {
            let mut numbered = batches.into_iter().enumerate();
            return numbered.try_for_each(|n| self.fill_here(n, part, &fill, &mut queued));
        };
        let failed = AtomicBool::new(false);
        pool.in_place_scope_fifo(|scope| {
            let mut before: Option<Filling<'a, E>> = None;
            let mut push = |decoder: &mut Self, (number, batch): (usize, Batch<'a>)| {
                if before.is_none() && batch.len <= part {
                    return decoder.fill_here((number, batch), part, &fill, &mut queued);
                }
                let filled = (number, decoder.take(batch)?);
                // Before the last batch is full: threads that wait for each other at the end of each batch, and wake
                // up for the next one, are slower than the link.
                let filling = Filling::spawn(scope, pool, filled, part, &fill, &failed);
                match before.replace(filling) {
                    Some(last) => decoder.begin(pool, last, &mut queued),
                    None => Ok(()),
                }
            };
            let pushed = batches.into_iter().enumerate().try_for_each(|n| push(self, n));
            let pushed = match before {
                Some(last) if pushed.is_ok() => self.begin(pool, last, &mut queued),
                _ => pushed,
            };
            failed.store(pushed.is_err(), Ordering::Relaxed);
            pushed
        })
    }

    /// Fills a batch on this thread.
    fn fill_here<E: From<CudaError>>(
        &mut self,
        (number, batch): (usize, Batch<'a>),
        part: usize,
        fill: &impl Fn(usize, usize, &mut [u8]) -> Result<(), E>,
        queued: &mut impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let Batch { ordinal, len, jobs } = batch;
        self.push(ordinal, len, jobs, |to| {
            to.chunks_mut(part).enumerate().try_for_each(|(i, to)| fill(number, i * part, to))
        })?;
        queued(number)
    }

    /// Waits until a batch is filled, and queues it.
    fn begin<E: From<CudaError>>(
        &mut self,
        pool: &ThreadPool,
        filling: Filling<'a, E>,
        queued: &mut impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        if !wait(pool, filling.parts, &filling.done)? {
            // A thread panicked, and the scope passes that on when it ends.
            return Ok(());
        }
        self.start(filling.filled)?;
        queued(filling.number)
    }
}

/// A batch that threads are filling.
struct Filling<'a, E> {
    number: usize,
    filled: Filled<'a>,
    parts: usize,
    /// The outcome of each part.
    done: Receiver<Result<(), E>>,
}

impl<'a, E: Send> Filling<'a, E> {
    /// Has a pool fill a batch, in parts of at most `part` bytes, until `failed`.
    fn spawn<'s, F>(
        scope: &ScopeFifo<'s>,
        pool: &ThreadPool,
        (number, filled): (usize, Filled<'a>),
        part: usize,
        fill: &'s F,
        failed: &'s AtomicBool,
    ) -> Self
    where
        F: Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
        E: 's,
    {
        let part = even_part(filled.len, part, pool.current_num_threads());
        let (sender, done) = mpsc::channel();
        let mut parts = 0;
        for at in (0..filled.len).step_by(part) {
            let (sender, pinned) = (sender.clone(), Arc::clone(&filled.frames.pinned));
            let len = part.min(filled.len - at);
            scope.spawn_fifo(move |_| {
                if failed.load(Ordering::Relaxed) {
                    return;
                }
                // SAFETY: what used the slot is done, nothing uses it until it is started, and no other part overlaps.
                let to = unsafe { pinned.slice_mut(at, len) };
                // Nobody asks any more if another part failed.
                let _ = sender.send(fill(number, at, to));
            });
            parts += 1;
        }
        Self { number, filled, parts, done }
    }
}

/// Waits until all parts are filled; false if a thread ended without reporting the outcome of its part.
fn wait<E>(pool: &ThreadPool, parts: usize, done: &Receiver<Result<(), E>>) -> Result<bool, E> {
    for _ in 0..parts {
        let part = loop {
            match done.try_recv() {
                Ok(part) => break part,
                Err(TryRecvError::Disconnected) => return Ok(false),
                Err(TryRecvError::Empty) => {}
            }
            // A thread of the pool itself must go on working, or nobody might.
            match pool.yield_now() {
                Some(Yield::Executed) => {}
                Some(Yield::Idle) => std::thread::yield_now(),
                None => match done.recv() {
                    Ok(part) => break part,
                    Err(_) => return Ok(false),
                },
            }
        };
        part?;
    }
    Ok(true)
}

/// Size of the parts, at most `part` bytes, that gives all threads the same number of parts: with 17 parts, 15 of 16
/// threads would wait for the last one. If there are fewer parts than threads, parts stay as large as possible.
fn even_part(len: usize, part: usize, threads: usize) -> usize {
    let parts = len.div_ceil(part);
    if parts <= threads {
        return part;
    }
    len.div_ceil(parts.next_multiple_of(threads)).next_multiple_of(LINE).min(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_as_many_parts() {
        let mib = 1 << 20;
        assert_eq!(even_part(17 * mib, mib, 16), (17 * mib).div_ceil(32).next_multiple_of(64));
        assert_eq!(even_part(16 * mib, mib, 16), mib);
        // Large requests to a server are not cut.
        assert_eq!(even_part(17 * mib, 8 * mib, 16), 8 * mib);
        for (len, part, threads) in [(100, 7, 3), (1 << 20, 5000, 4), (65, 64, 1), (1000, 1, 2)] {
            let cut = even_part(len, part, threads);
            assert!((1..=part).contains(&cut), "{len} {part} {threads}: {cut}");
        }
    }
}
