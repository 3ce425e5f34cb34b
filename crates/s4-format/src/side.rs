//! Side data of a tensor: the data that its chunks need besides themselves.
//!
//! Side data precedes the chunk table in the tensor's block. It consists of sections: a kind, a
//! length and that many bytes, padded with zeros to a multiple of 8.

use crate::error::{Error, Result};
use crate::limits::MAX_SIDE;
use crate::offsets;
use crate::wire::{Cursor, fit};

/// The kind of a section's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideKind(pub u32);

impl SideKind {
    /// rANS tables that all chunks of the tensor may use.
    pub const TABLES: Self = Self(1);
    /// Offsets as wide as values. Never written, and refused.
    pub const WIDE_OFFSETS: Self = Self(2);
    /// Positions and values that a predictor does not cover. Reserved.
    pub const EXCEPTIONS: Self = Self(3);
    /// A share of the parent's residual. Never written, and refused.
    pub const ALPHA: Self = Self(4);
    /// rANS tables, one set for each run of chunks. Reserved.
    pub const GROUP_TABLES: Self = Self(5);
    /// Row and column offsets of the predictors `rank1` and `blend`.
    pub const OFFSETS: Self = Self(6);
    /// Parameters of contexts `exponent` or `update`.
    pub const CONTEXTS: Self = Self(7);
    /// [`SideKind::OFFSETS`] packed into few bits. Only on disk: readers turn it into that kind.
    pub const PACKED_OFFSETS: Self = Self(8);
    /// Parameters of predictor `step`.
    pub const STEP: Self = Self(9);

    /// The kinds that this version reads.
    const OPEN: [Self; 4] = [Self::TABLES, Self::OFFSETS, Self::CONTEXTS, Self::STEP];
}

/// The side data of one tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Side {
    sections: Vec<(u32, Vec<u8>)>,
}

impl Side {
    /// Adds a section.
    ///
    /// # Errors
    /// `Limit` if the side data grows past [`MAX_SIDE`].
    pub fn push(&mut self, kind: SideKind, bytes: Vec<u8>) -> Result<()> {
        self.sections.push((kind.0, bytes));
        if self.encoded_len() > MAX_SIDE {
            return Err(Error::limit(format!(
                "{} bytes of side data, at most {MAX_SIDE} allowed",
                self.encoded_len()
            )));
        }
        Ok(())
    }

    /// The bytes of a section; empty if there is none.
    pub fn get(&self, kind: SideKind) -> &[u8] {
        self.sections.iter().find(|s| s.0 == kind.0).map_or(&[], |s| &s.1)
    }

    /// Bytes of the sections on disk, if offsets are not packed.
    pub fn encoded_len(&self) -> usize {
        self.sections.iter().map(|s| 8 + s.1.len().next_multiple_of(8)).sum()
    }

    /// Appends the sections, with offsets packed where that takes fewer bytes.
    ///
    /// # Errors
    /// `Limit` if a section does not fit its length field.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        for (kind, bytes) in &self.sections {
            let packed = (*kind == SideKind::OFFSETS.0).then(|| offsets::pack(bytes)).flatten();
            let (kind, bytes) = match &packed {
                Some(packed) => (&SideKind::PACKED_OFFSETS.0, packed),
                None => (kind, bytes),
            };
            out.extend(kind.to_le_bytes());
            out.extend(fit::<u32>(bytes.len(), "side data section")?.to_le_bytes());
            out.extend(bytes);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        Ok(())
    }

    /// Reads sections that fill `bytes` exactly. `bytes` starts where the output of [`Side::write`]
    /// does.
    ///
    /// # Errors
    /// `Truncated`, `Corrupt` (the same kind twice), `Unsupported` (a kind that is not
    /// implemented), `Limit` (too many offsets).
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut c = Cursor::new(bytes);
        let mut side = Self::default();
        while c.rest() > 0 {
            let kind = c.u32()?;
            let len = c.u32()? as usize;
            let data = c.take(len)?;
            c.take(len.next_multiple_of(8) - len)?;
            let (kind, data) = match SideKind(kind) {
                SideKind::PACKED_OFFSETS => (SideKind::OFFSETS.0, offsets::unpack(data)?),
                _ => (kind, data.to_vec()),
            };
            if side.sections.iter().any(|s| s.0 == kind) {
                return Err(Error::corrupt(format!("side data section {kind} appears twice")));
            }
            if !SideKind::OPEN.contains(&SideKind(kind)) {
                return Err(Error::unsupported(format!("side data section of kind {kind}")));
            }
            side.sections.push((kind, data));
        }
        Ok(side)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_packed_on_disk_alone() {
        let mut offsets = vec![0; 24 + 2 * 100];
        offsets[0] = 60;
        offsets[4] = 40;
        let mut side = Side::default();
        side.push(SideKind::OFFSETS, offsets).unwrap();
        let mut bytes = vec![];
        side.write(&mut bytes).unwrap();
        assert_eq!(bytes[0], 8);
        assert!(bytes.len() < side.encoded_len() / 2);
        assert_eq!(Side::parse(&bytes).unwrap(), side);
        // Offsets once in each form are the same kind twice.
        let mut raw = vec![6, 0, 0, 0, 8, 0, 0, 0];
        raw.extend([0; 8]);
        assert!(matches!(Side::parse(&[bytes, raw].concat()), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn sections_round_trip_and_hostile_ones_are_refused() {
        let mut side = Side::default();
        side.push(SideKind::TABLES, vec![1, 2, 3]).unwrap();
        side.push(SideKind::OFFSETS, vec![9; 8]).unwrap();
        let mut bytes = vec![];
        side.write(&mut bytes).unwrap();
        assert_eq!(bytes.len(), side.encoded_len());
        let back = Side::parse(&bytes).unwrap();
        assert_eq!(back, side);
        assert_eq!(back.get(SideKind::TABLES), [1, 2, 3]);
        assert!(back.get(SideKind::ALPHA).is_empty());
        for cut in 1..bytes.len() {
            assert!(Side::parse(&bytes[..cut]).is_err() || cut == 16, "cut {cut}");
        }
        bytes[0] = 4;
        assert!(matches!(Side::parse(&bytes), Err(Error::Unsupported { .. })));
        bytes[0] = 2;
        assert!(matches!(Side::parse(&bytes), Err(Error::Unsupported { .. })));
        bytes[0] = 6;
        assert!(matches!(Side::parse(&bytes), Err(Error::Corrupt { .. })));
        bytes[4..8].fill(0xff);
        assert!(matches!(Side::parse(&bytes), Err(Error::Truncated { .. })));
    }
}
