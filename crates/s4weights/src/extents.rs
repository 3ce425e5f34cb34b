//! Checks that no byte of a checkpoint's objects belongs to two chunks.
//!
//! A chunk table has 24 bytes per chunk. If several chunks could share bytes, a small file could
//! claim any number of values, all to be decoded.

use std::collections::BTreeMap;

use s4_format::limits::ALIGN;
use s4_format::{ChunkRecord, Error, Result};

/// Runs of bytes that hold chunks: object and first byte, and the end.
#[derive(Debug, Default)]
pub(crate) struct Extents(BTreeMap<(u32, u64), u64>);

impl Extents {
    /// Adds the chunks of a tensor.
    ///
    /// # Errors
    /// `Corrupt` if one overlaps another, of this tensor or of one that was added before.
    pub(crate) fn add(&mut self, records: &[ChunkRecord]) -> Result<()> {
        let key = |r: &ChunkRecord| (r.object, r.offset);
        let mut order: Vec<u32> = vec![];
        if !records.is_sorted_by_key(key) {
            // A table has at most 2^30 chunks.
            order = (0..records.len() as u32).collect();
            order.sort_unstable_by_key(|&i| key(&records[i as usize]));
        }
        let mut run: Option<(u32, u64, u64)> = None;
        for i in 0..records.len() {
            let number = order.get(i).map_or(i, |&number| number as usize);
            let r = &records[number];
            if r.len == 0 {
                continue;
            }
            let overlaps = || {
                let e = Error::corrupt("chunk overlaps another chunk");
                e.in_part("chunk table").in_chunk(number as u64)
            };
            let end = r.offset.saturating_add(r.len.into());
            run = Some(match run {
                Some((object, _, last)) if object == r.object && r.offset < last => {
                    return Err(overlaps());
                }
                Some((object, first, last)) if object == r.object && r.offset == padded(last) => {
                    (object, first, end)
                }
                before => {
                    before.map_or(Some(()), |run| self.insert(run)).ok_or_else(overlaps)?;
                    (r.object, r.offset, end)
                }
            });
            // The extended run must not overlap chunks of other tensors.
            if run.is_some_and(|run| !self.is_free(run)) {
                return Err(overlaps());
            }
        }
        if let Some(run) = run {
            self.insert(run);
        }
        Ok(())
    }

    fn is_free(&self, (object, first, end): (u32, u64, u64)) -> bool {
        let before = self.0.range(..(object, end)).next_back();
        before.is_none_or(|(&(other, _), &last)| other != object || last <= first)
    }

    /// Adds a run, joined with adjacent ones; `None` if it overlaps another.
    fn insert(&mut self, (object, mut first, mut end): (u32, u64, u64)) -> Option<()> {
        if !self.is_free((object, first, end)) {
            return None;
        }
        let before = self.0.range(..(object, first)).next_back().map(|(k, v)| (*k, *v));
        if let Some(((other, start), last)) = before
            && other == object
            && padded(last) == first
        {
            first = start;
        }
        if let Some(last) = self.0.remove(&(object, padded(end))) {
            end = last;
        }
        self.0.insert((object, first), end);
        Some(())
    }
}

/// The start of a chunk that directly follows.
fn padded(end: u64) -> u64 {
    end.checked_next_multiple_of(ALIGN as u64).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(object: u32, offset: u64, len: u32) -> ChunkRecord {
        ChunkRecord { offset, object, len, plain: false, crc_encoded: 0, crc_raw: 0 }
    }

    #[test]
    fn chunks_side_by_side_are_one_run() {
        let mut extents = Extents::default();
        extents.add(&[chunk(0, 16, 5), chunk(0, 32, 16)]).unwrap();
        extents.add(&[chunk(0, 96, 4)]).unwrap();
        extents.add(&[chunk(1, 16, 40), chunk(0, 48, 48)]).unwrap();
        extents.add(&[chunk(0, 20, 0)]).unwrap();
        assert_eq!(extents.0, BTreeMap::from([((0, 16), 100), ((1, 16), 56)]));
        // Only a chunk that starts right behind the padding follows.
        extents.add(&[chunk(1, 57, 1)]).unwrap();
        assert_eq!(extents.0.len(), 3);
    }

    #[test]
    fn every_overlap_is_found() {
        let first = [chunk(0, 16, 100), chunk(0, 200, 100), chunk(1, 0, 50)];
        for (bad, number) in [
            (vec![chunk(0, 16, 100)], 0),
            (vec![chunk(0, 0, 17)], 0),
            (vec![chunk(0, 115, 1)], 0),
            (vec![chunk(0, 0, 1000)], 0),
            (vec![chunk(0, 120, 80), chunk(0, 299, 9)], 1),
            (vec![chunk(2, 0, 9), chunk(2, 8, 9)], 1),
            (vec![chunk(2, 8, 9), chunk(2, 0, 9)], 0),
            (vec![chunk(2, 0, 16), chunk(2, 16, 16), chunk(2, 31, 1)], 2),
            (vec![chunk(0, 128, 64), chunk(0, 192, 9)], 1),
        ] {
            let mut extents = Extents::default();
            extents.add(&first).unwrap();
            let e = extents.add(&bad).unwrap_err();
            assert_eq!(e.location().chunk, Some(number), "{bad:?}");
            assert!(matches!(e, Error::Corrupt { .. }));
        }
        let mut extents = Extents::default();
        extents.add(&first).unwrap();
        extents.add(&[chunk(0, 116, 84), chunk(0, 300, 9), chunk(0, 0, 16)]).unwrap();
    }
}
