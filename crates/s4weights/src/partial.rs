//! Reading parts of a tensor that lie apart.

use std::ops::Range;

use crate::error::Result;
use crate::progress::Meter;
use crate::reader::{Reader, Want};
use crate::slice::{ArrayView, Slice};

/// Runs of at least this many bytes are decoded to where they go, at most [`RUNS`] at a time.
const LONG: u64 = 4096;
const RUNS: usize = 1 << 16;
/// Shorter runs that are close together are copied from one range that covers them: at most this many bytes at a
/// time, or one chunk if that is larger.
const COVERED: u64 = 64 << 20;

impl Reader {
    /// Fills `to` with a slice of an array that lies within a tensor's bytes. The tensor must be prepared, and the slice
    /// and the buffer must fit.
    pub(crate) fn fetch_slice(
        &self,
        number: usize,
        view: ArrayView<'_>,
        slice: &Slice,
        to: &mut [u8],
        meter: &mut Meter,
    ) -> Result<()> {
        let ArrayView { offset, item, shape } = view;
        let bytes = |run: Range<u64>| offset + run.start * item..offset + run.end * item;
        let mut runs = slice.runs(shape).map(bytes).peekable();
        let chunk = self.chunk_bytes(self.host(number))?;
        let (mut rest, mut between) = (to, vec![]);
        // All runs are of one length.
        let long = runs.peek().is_some_and(|run| run.end - run.start >= LONG);
        while runs.peek().is_some() {
            if long {
                let mut wants = vec![];
                for run in runs.by_ref().take(RUNS) {
                    let (now, later) = rest.split_at_mut((run.end - run.start) as usize);
                    wants.push(Want { tensor: number, first: run.start, to: now });
                    rest = later;
                }
                self.fetch_checked(wants, &mut |wants| self.fetch_all(wants, meter))?;
                continue;
            }
            let spans = spans(runs.clone(), chunk);
            between.resize(spans.iter().map(|(span, _)| (span.end - span.start) as usize).sum(), 0);
            let (mut wants, mut free) = (vec![], &mut between[..]);
            for (span, _) in &spans {
                let (now, later) = free.split_at_mut((span.end - span.start) as usize);
                wants.push(Want { tensor: number, first: span.start, to: now });
                free = later;
            }
            let mut silent = Meter { callback: None, done: 0, total: 0 };
            self.fetch_checked(wants, &mut |wants| self.fetch_all(wants, &mut silent))?;
            let (mut at, mut copied) = (0, 0);
            for (span, count) in spans {
                for run in runs.by_ref().take(count) {
                    let first = at + (run.start - span.start) as usize;
                    let len = (run.end - run.start) as usize;
                    let (now, later) = rest.split_at_mut(len);
                    now.copy_from_slice(&between[first..first + len]);
                    (rest, copied) = (later, copied + len as u64);
                }
                at += (span.end - span.start) as usize;
            }
            meter.add(copied)?;
        }
        Ok(())
    }

    /// Bytes of values in each chunk of a tensor but the last.
    fn chunk_bytes(&self, host: usize) -> Result<u64> {
        let blocks = self.blocks(&[host])?;
        let spec = self.spec(host, &blocks[&host]);
        Ok((spec.dtype.value_width() as u64) << spec.chunk_log2)
    }
}

/// The ranges to read for the next runs, each with the number of runs in it. A run joins a span only if fewer bytes
/// than a chunk lie between them, so no chunk without a run is read.
fn spans(runs: impl Iterator<Item = Range<u64>>, chunk: u64) -> Vec<(Range<u64>, usize)> {
    let (mut runs, mut spans, mut total) = (runs.peekable(), vec![], 0);
    while (spans.is_empty() || total + chunk <= COVERED)
        && spans.len() < RUNS
        && let Some(first) = runs.next()
    {
        let limit = (first.start / chunk + ((COVERED - total) / chunk).max(1)) * chunk;
        let (mut end, mut count) = (first.end, 1);
        while let Some(run) =
            runs.next_if(|run| run.start.saturating_sub(end) < chunk && run.end <= limit)
        {
            (end, count) = (run.end, count + 1);
        }
        total += end - first.start;
        spans.push((first.start..end, count));
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_leave_out_what_no_run_is_in_and_end_with_chunks() {
        let chunk = 1 << 18;
        let runs = |count: u64, step: u64| (0..count).map(move |i| 10 + i * step..12 + i * step);
        // Close together: one span, up to the end of a chunk.
        let found = spans(runs(1 << 30, 4), chunk);
        assert_eq!(found, [(10..COVERED, (COVERED as usize - 10).div_ceil(4))]);
        // Apart: a span each, as many at a time as there may be.
        let found = spans(runs(5000, 2 * chunk), chunk);
        assert_eq!(found.len(), 5000);
        assert!(found.iter().all(|(span, count)| (span.end - span.start, *count) == (2, 1)));
        assert_eq!(spans(runs(1 << 20, 2 * chunk), chunk).len(), RUNS);
        // Some of each of several blocks.
        let blocks = (0..100)
            .flat_map(|b| runs(10, 1000).map(move |r| r.start + (b << 22)..r.end + (b << 22)));
        let found = spans(blocks, chunk);
        assert_eq!((found.len(), &found[1]), (100, &((1 << 22) + 10..(1 << 22) + 9012, 10)));
        // A run that is longer than what is left of its chunk.
        assert_eq!(
            spans(std::iter::once(chunk - 1..chunk + 7), chunk),
            [(chunk - 1..chunk + 7, 1)]
        );
    }
}
