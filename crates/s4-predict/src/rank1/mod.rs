//! Prediction by rows and columns.
//!
//! The moments of a matrix's gradient are nearly of rank 1: an element is about a factor of its row
//! times a factor of its column (Shazeer and Stern, "Adafactor", 2018, keep only these factors).
//! The bits of a float below its sign, as an integer, are nearly its logarithm, so there the
//! product is a sum:
//!
//! ```text
//! magnitude[r][c] = base + ((row[r] + col[c]) << shift)      (n bits: all of the value's but the sign)
//! ```
//!
//! Offsets have 16 bits: finer ones would cost more than they save. [`fit()`] makes them from the values of a
//! [`Grid`], a small part of a large tensor.
//!
//! # Side data
//! Little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | `rows`, 1 to 2^31 - 1 |
//! | 4 | `cols`, 1 to 2^31 - 1 |
//! | 8 | `base`, below `2^n` |
//! | 1 | `shift`, below the bits of a value |
//! | 1 | `share`: 0, and of [`Blend`](crate::Blend) 256ths of the parent's magnitude |
//! | 6 | 0 |
//! | `2 * rows` | row offsets, signed; -32768: the row is predicted as zeros |
//! | `2 * cols` | column offsets, signed |
//!
//! Value `i` of the tensor is in row `i / cols` and column `i % cols`.

mod expected;
mod fit;

use s4_format::side::SideKind;
use s4_format::{Error, PredictorId, Result};
use s4_planes::{Kernels, Width};

pub use expected::{Expected, blended};
pub use fit::{Grid, fit};

use crate::{InputKind, Predict, Predicted, Tensor};

/// Bytes of side data before the offsets.
const HEADER: usize = 24;

/// The most rows and columns.
const MAX_SIDE: u32 = i32::MAX as u32;

/// The offset of a row that is predicted as zeros.
const ZEROS: i16 = i16::MIN;

/// Predictor `rank1`: see [the module](self).
#[derive(Debug, Clone, Copy, Default)]
pub struct Rank1;

impl Predict for Rank1 {
    fn id(&self) -> PredictorId {
        PredictorId::RANK1
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[]
    }

    fn predict(
        &self,
        kernels: Kernels,
        tensor: &Tensor<'_>,
        first: u64,
        _: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        Offsets::of(self.id(), tensor)?.predict_range(kernels, first, &[], out)?;
        Ok(Predicted::Written)
    }
}

/// Row and column offsets, read from side data.
#[derive(Debug, Clone, Copy)]
pub struct Offsets<'a> {
    width: Width,
    base: u64,
    shift: u32,
    share: u8,
    /// `2 * rows` bytes.
    row_offsets: &'a [u8],
    /// `2 * cols` bytes, and not empty.
    col_offsets: &'a [u8],
}

impl<'a> Offsets<'a> {
    /// The offsets of a tensor that is predicted by `rank1` or `blend`. They must be for as many
    /// values as the tensor has, and have a share if and only if the predictor is `blend`.
    ///
    /// # Errors
    /// Those of [`Offsets::parse`]; `Corrupt` if the offsets are for another number of values or
    /// the other predictor, or if an element is more than one value; `Unsupported` for another
    /// width.
    pub fn of(predictor: PredictorId, tensor: &Tensor<'a>) -> Result<Self> {
        let bytes = tensor.dtype.value_width();
        let width = Width::from_bytes(bytes)
            .ok_or_else(|| Error::unsupported(format!("values of {bytes} bytes")))?;
        let offsets = Self::parse(width, tensor.side.get(SideKind::OFFSETS))?;
        if (offsets.share != 0) != (predictor == PredictorId::BLEND) {
            let share = offsets.share;
            return Err(Error::corrupt(format!(
                "invalid share {share} for predictor `{predictor}`"
            )));
        }
        let values = tensor.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        if Some(offsets.values()) != values || tensor.dtype.size() != bytes {
            return Err(Error::corrupt("offsets do not match the number of values"));
        }
        Ok(offsets)
    }

    /// Reads the side data of a tensor with values of `width`; see [the module](self).
    ///
    /// # Errors
    /// `Truncated` if `side` is too short for what its header says, `Corrupt` if it is too long or
    /// a number is out of its range.
    pub fn parse(width: Width, side: &'a [u8]) -> Result<Self> {
        let Some((header, offsets)) = side.split_first_chunk::<HEADER>() else {
            return Err(Error::truncated("offsets end within their header"));
        };
        let [r0, r1, r2, r3, c0, c1, c2, c3, base @ .., shift, share, _, _, _, _, _, _] = *header;
        let (rows, cols) =
            (u32::from_le_bytes([r0, r1, r2, r3]), u32::from_le_bytes([c0, c1, c2, c3]));
        check_sides(rows, cols)?;
        let (base, shift) = (u64::from_le_bytes(base), u32::from(shift));
        if shift >= width.bits() || base >> (width.bits() - 1) != 0 || header[18..] != [0; 6] {
            return Err(Error::corrupt(format!(
                "invalid header of offsets (base {base}, shift {shift})"
            )));
        }
        let need = 2 * (u64::from(rows) + u64::from(cols));
        let found = offsets.len() as u64;
        if found < need {
            return Err(Error::truncated(format!(
                "offsets of {rows} rows and {cols} columns need {need} bytes, found {found}"
            )));
        }
        if found > need {
            let what = format!("{} unexpected bytes after the column offsets", found - need);
            return Err(Error::corrupt(what));
        }
        let (row_offsets, col_offsets) = offsets.split_at(2 * rows as usize);
        Ok(Self { width, base, shift, share, row_offsets, col_offsets })
    }

    /// The width of a value.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The number that sums of offsets are added to.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bits that sums of offsets are shifted by.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// The share of the parent's magnitudes that is added, in 256ths; 0 if there is no parent.
    pub fn share(&self) -> u8 {
        self.share
    }

    /// The offsets of the rows, 2 bytes each.
    pub fn row_offsets(&self) -> &'a [u8] {
        self.row_offsets
    }

    /// The offsets of the columns, 2 bytes each.
    pub fn col_offsets(&self) -> &'a [u8] {
        self.col_offsets
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.col_offsets.len() / 2
    }

    /// The number of values.
    pub fn values(&self) -> u64 {
        (self.row_offsets.len() / 2) as u64 * self.cols() as u64
    }

    /// Writes the predicted bits of whole values, from index `start` on; their sign bits are 0.
    /// `parent` holds the same values of the parent, if the offsets have a share.
    ///
    /// # Errors
    /// `Corrupt` if there are not that many values, `out` is not a whole number of values, or
    /// `parent` has another size. `out` is untouched then.
    pub fn predict_range(
        &self,
        kernels: Kernels,
        start: u64,
        mut parent: &[u8],
        mut out: &mut [u8],
    ) -> Result<()> {
        if self.share != 0 && parent.len() != out.len() {
            let (own, others) = (out.len(), parent.len());
            return Err(Error::corrupt(format!("parent has {others} bytes, expected {own}")));
        }
        self.check_range(start, out.len())?;
        let (bytes, cols) = (self.width.bytes(), self.cols() as u64);
        // Both are within the offsets, as the range is within the values.
        let (mut row, mut col) = ((start / cols) as usize, (start % cols) as usize);
        while !out.is_empty() {
            let offsets = &self.col_offsets[2 * col..];
            let n = (offsets.len() / 2).min(out.len() / bytes);
            let (part, rest) = out.split_at_mut(n * bytes);
            let row_offset =
                i16::from_le_bytes([self.row_offsets[2 * row], self.row_offsets[2 * row + 1]]);
            if row_offset == ZEROS {
                part.fill(0);
            } else {
                let with = (self.base, row_offset, self.shift);
                kernels.sums(self.width, with, &offsets[..2 * n], part);
            }
            if self.share != 0 {
                let (before, later) = parent.split_at(part.len());
                if row_offset != ZEROS {
                    kernels.add_shares(self.width, self.share, part, before);
                }
                parent = later;
            }
            out = rest;
            (row, col) = (row + 1, 0);
        }
        Ok(())
    }

    fn check_range(&self, start: u64, len: usize) -> Result<()> {
        if !len.is_multiple_of(self.width.bytes()) {
            let what =
                format!("{len} bytes are not a multiple of the value size {}", self.width.bytes());
            return Err(Error::corrupt(what));
        }
        let n = (len / self.width.bytes()) as u64;
        if start.checked_add(n).is_none_or(|end| end > self.values()) {
            let what = format!(
                "range of {n} values at {start} exceeds the {} values of the offsets",
                self.values()
            );
            return Err(Error::corrupt(what));
        }
        Ok(())
    }
}

/// Builds side data. The numbers of rows and columns are those of a [`Grid`], so they fit their
/// fields.
fn side_data(
    (base, shift, share): (u64, u32, u8),
    rows: impl ExactSizeIterator<Item = i16>,
    cols: impl ExactSizeIterator<Item = i16>,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + 2 * (rows.len() + cols.len()));
    out.extend((rows.len() as u32).to_le_bytes());
    out.extend((cols.len() as u32).to_le_bytes());
    out.extend(base.to_le_bytes());
    out.extend([shift as u8, share, 0, 0, 0, 0, 0, 0]);
    rows.for_each(|offset| out.extend(offset.to_le_bytes()));
    cols.for_each(|offset| out.extend(offset.to_le_bytes()));
    out
}

/// The nearest offset that can be written, other than [`ZEROS`].
fn to_offset(offset: i64) -> i16 {
    offset.clamp(i64::from(ZEROS) + 1, i16::MAX.into()) as i16
}

fn check_sides(rows: u32, cols: u32) -> Result<()> {
    let allowed = 1..=MAX_SIDE;
    if !allowed.contains(&rows) || !allowed.contains(&cols) {
        return Err(Error::corrupt(format!(
            "offsets of {rows} rows and {cols} columns, 1 to {MAX_SIDE} of each allowed"
        )));
    }
    Ok(())
}
