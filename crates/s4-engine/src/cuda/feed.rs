//! Frames on their way to the decoder: straight from pinned memory, or filled in by many threads
//! while earlier batches are queued.

use std::sync::{Arc, Mutex};

use rayon::ThreadPool;
use rayon::prelude::*;
use s4_codec_gpu::Pinned;

use super::decode::Decoder;
use super::error::{CudaError, Result};
use super::job::{Batch, Filled};
use crate::threads::lock;

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
            let what = format!("{} bytes from {at} of {} pinned ones", batch.len, from.len());
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
        let mut before: Option<(usize, Filled<'a>)> = None;
        for (number, batch) in batches.into_iter().enumerate() {
            let len = batch.len;
            let filled = self.take(batch)?;
            let pinned = Arc::clone(&filled.frames.pinned);
            // SAFETY: what used the slot is done, and nothing uses it until it is started.
            let to = unsafe { pinned.slice_mut(0, len) };
            let fill = |at, to: &mut [u8]| fill(number, at, to);
            fill_beside(pool, part, to, fill, || self.begin(before.take(), &mut queued))?;
            before = Some((number, filled));
        }
        self.begin(before, &mut queued)
    }

    fn begin<E: From<CudaError>>(
        &mut self,
        filled: Option<(usize, Filled<'a>)>,
        queued: &mut impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((number, filled)) = filled else { return Ok(()) };
        self.start(filled)?;
        queued(number)
    }
}

/// Fills memory in parts of at most `part` bytes on a pool, while this thread runs `beside`, whose
/// errors take precedence.
fn fill_beside<E: Send>(
    pool: Option<&ThreadPool>,
    part: usize,
    to: &mut [u8],
    fill: impl Fn(usize, &mut [u8]) -> Result<(), E> + Sync,
    beside: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let part = part.max(1);
    let Some(pool) = pool.filter(|_| to.len() > part) else {
        beside()?;
        return to.chunks_mut(part).enumerate().try_for_each(|(i, to)| fill(i * part, to));
    };
    let part = even_part(to.len(), part, pool.current_num_threads());
    let filled = Mutex::new(Ok(()));
    let done = pool.in_place_scope(|s| {
        s.spawn(|_| {
            let parts = to.par_chunks_mut(part).enumerate();
            let done = parts.try_for_each(|(i, to)| fill(i * part, to));
            *lock(&filled) = done;
        });
        beside()
    });
    done.and(filled.into_inner().unwrap_or_else(|e| e.into_inner()))
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
