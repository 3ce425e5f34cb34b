//! Tables that the chunks of a tensor share, as its side data stores them.

use s4_format::layout::MAX_PLANES;
use s4_format::{Error, Result};

/// For each plane, the bytes of its shared tables; empty if it has none.
///
/// On disk: a `u32` length for each of eight planes, then the tables of each plane in order, as
/// `docs/codecs/rans.md` writes them.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedTables<'a> {
    planes: [&'a [u8]; MAX_PLANES],
}

impl<'a> SharedTables<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut out = Self::default();
        if bytes.is_empty() {
            return Ok(out);
        }
        let bad = || Error::corrupt("shared tables do not fill their section").in_part("side data");
        let (lens, mut rest) = bytes.split_at_checked(4 * MAX_PLANES).ok_or_else(bad)?;
        for (plane, len) in out.planes.iter_mut().zip(lens.chunks_exact(4)) {
            let len = u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize;
            (*plane, rest) = rest.split_at_checked(len).ok_or_else(bad)?;
        }
        if rest.is_empty() { Ok(out) } else { Err(bad()) }
    }

    pub(crate) fn plane(&self, i: usize) -> &'a [u8] {
        self.planes.get(i).copied().unwrap_or(&[])
    }

    /// The section that holds the given tables of each plane.
    pub(crate) fn to_bytes(tables: &[Vec<u8>]) -> Vec<u8> {
        let mut section = vec![];
        for i in 0..MAX_PLANES {
            let len = tables.get(i).map_or(0, Vec::len);
            // At most 16 tables of 256 entries.
            section.extend(u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
        }
        tables.iter().take(MAX_PLANES).for_each(|plane| section.extend(plane));
        section
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_that_do_not_fit_are_refused() {
        let mut bytes = vec![0; 32];
        bytes[4] = 3;
        bytes.extend([7, 8, 9]);
        let t = SharedTables::parse(&bytes).unwrap();
        assert_eq!((t.plane(0), t.plane(1)), (&[][..], &[7, 8, 9][..]));
        for cut in 1..bytes.len() {
            assert!(SharedTables::parse(&bytes[..cut]).is_err());
        }
        bytes[8..12].fill(0xff);
        assert!(SharedTables::parse(&bytes).is_err());
    }
}
