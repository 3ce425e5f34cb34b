//! Little-endian reading and writing of fixed-size fields, and checks of the ranges that they
//! describe.

use std::ops::Range;

use crate::error::{Error, Result};

/// Reads fields one after the other; every read is checked against the end.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|&e| e <= self.bytes.len());
        let end = end.ok_or_else(|| {
            Error::truncated(format!("{len} bytes expected, {} left", self.bytes.len() - self.at))
                .at_offset(self.at as u64)
        })?;
        let out = &self.bytes[self.at..end];
        self.at = end;
        Ok(out)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }
}

/// Checks that a number fits its field.
pub(crate) fn fit<T: TryFrom<usize>>(value: usize, what: &'static str) -> Result<T> {
    T::try_from(value).map_err(|_| Error::limit(format!("{what} {value} does not fit its field")))
}

/// Whether no two ranges overlap.
pub(crate) fn are_disjoint(ranges: impl Iterator<Item = Range<u64>> + Clone) -> bool {
    // This project's writers put ranges in order, so sorting is rarely needed.
    follow_each_other(ranges.clone()) || {
        let mut sorted: Vec<_> = ranges.collect();
        sorted.sort_unstable_by_key(|r| r.start);
        follow_each_other(sorted.into_iter())
    }
}

/// Whether each range that is not empty starts where the one before it ended, or later.
fn follow_each_other(ranges: impl Iterator<Item = Range<u64>>) -> bool {
    let mut end = 0;
    ranges.filter(|r| !r.is_empty()).all(|r| {
        let apart = r.start >= end;
        end = r.end;
        apart
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disjoint_ranges_may_be_in_any_order() {
        let disjoint = |ranges: &[[u64; 2]]| are_disjoint(ranges.iter().map(|[a, b]| *a..*b));
        assert!(disjoint(&[]) && disjoint(&[[3, 4], [0, 3], [9, 9], [4, 9]]));
        assert!(disjoint(&[[0, 10], [5, 5]]), "nothing is no part of anything");
        assert!(!disjoint(&[[0, 10], [5, 5], [9, 11]]));
        assert!(!disjoint(&[[5, 6], [0, 10]]));
    }
}
