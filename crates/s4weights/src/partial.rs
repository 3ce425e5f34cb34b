//! Reading parts of a tensor that lie apart.

use std::ops::Range;

use crate::error::Result;
use crate::fetch::Want;
use crate::options::Meter;
use crate::reader::Reader;
use crate::slice::{Slice, View};

/// Runs of at least this many bytes are decoded to where they go, [`RUNS`] at a time.
const LONG: u64 = 4096;
const RUNS: usize = 1 << 16;
/// Shorter ones are copied from all that lies between the first and the last: so many bytes at a time, or one chunk if that
/// is larger.
const COVERED: u64 = 64 << 20;

impl Reader {
    /// Fills `to` with a slice of an array that lies within a tensor's bytes. The tensor must be prepared, and the slice
    /// and the buffer must fit.
    pub(crate) fn fetch_slice(
        &self,
        number: usize,
        view: View<'_>,
        slice: &Slice,
        to: &mut [u8],
        meter: &mut Meter,
    ) -> Result<()> {
        let View { offset, item, shape } = view;
        let bytes = |run: Range<u64>| offset + run.start * item..offset + run.end * item;
        let mut runs = slice.runs(shape).map(bytes).peekable();
        let chunk = self.chunk_bytes(self.host(number))?;
        let (mut rest, mut between) = (to, vec![]);
        // All runs are of one length.
        let is_long = runs.peek().is_some_and(|run| run.end - run.start >= LONG);
        while let Some(first) = runs.peek().cloned() {
            if is_long {
                let mut wants = vec![];
                for run in runs.by_ref().take(RUNS) {
                    let (now, later) = rest.split_at_mut((run.end - run.start) as usize);
                    wants.push(Want { tensor: number, first: run.start, to: now });
                    rest = later;
                }
                self.fetch_checked(wants, &mut |wants| self.fetch_all(wants, meter))?;
                continue;
            }
            // As long as the next one is in the same chunk or in the next, nothing is decoded that is not needed.
            let limit = (first.start / chunk + (COVERED / chunk).max(1)) * chunk;
            let (mut end, mut count) = (first.end, 1);
            for run in runs.clone().skip(1) {
                if run.start - end >= chunk || run.end > limit {
                    break;
                }
                (end, count) = (run.end, count + 1);
            }
            between.resize((end - first.start) as usize, 0);
            let wants = vec![Want { tensor: number, first: first.start, to: &mut between }];
            let mut silent = Meter { callback: None, done: 0, total: 0 };
            self.fetch_checked(wants, &mut |wants| self.fetch_all(wants, &mut silent))?;
            let mut copied = 0;
            for run in runs.by_ref().take(count) {
                let from = (run.start - first.start) as usize..(run.end - first.start) as usize;
                let (now, later) = rest.split_at_mut(from.len());
                copied += from.len() as u64;
                now.copy_from_slice(&between[from]);
                rest = later;
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
