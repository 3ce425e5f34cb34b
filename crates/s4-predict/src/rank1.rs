//! Prediction by rows and columns.
//!
//! The second moments of a matrix's gradient are nearly of rank 1: an element is about a factor of
//! its row times a factor of its column (Shazeer and Stern, "Adafactor", 2018, keep only those). The
//! ordered integer of a float is nearly its logarithm, so in ordered integers the product is a sum:
//!
//! ```text
//! prediction[r][c] = row[r] + col[c]      (wrapping at the element's width)
//! ```
//!
//! [`fit`] takes `row[r]` as the rounded mean of the row and `col[c]` as the rounded mean of what
//! the rows leave in the column. What is predicted is the float whose ordered integer this is.
//!
//! # Side data
//! Little-endian, for a tensor whose elements have `W` bytes:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | `rows`, at least 1 |
//! | 4 | `cols`, at least 1 |
//! | `rows * W` | row offsets, their low `W` bytes |
//! | `cols * W` | column offsets, their low `W` bytes |
//!
//! Only the low `W` bytes of a prediction count, so no more of an offset is kept. The region is
//! row-major: element `i` is in row `i / cols` and column `i % cols`.

use std::ops::{AddAssign, Sub};

use s4_format::side::SideKind;
use s4_format::{Error, PredictorId, Result};
use s4_planes::{Kernels, Width};

use crate::{InputKind, Predict, Predicted, Tensor};

/// Bytes of side data before the offsets.
const HEADER: usize = 8;

/// The most rows and columns: sums of that many differences of 4-byte integers fit in 64 bits.
const MAX_SIDE: u32 = i32::MAX as u32;

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
        Offsets::of(tensor)?.predict_range(kernels, first, out)?;
        Ok(Predicted::Written)
    }
}

/// Row and column offsets, read from side data.
#[derive(Debug, Clone, Copy)]
pub struct Offsets<'a> {
    width: Width,
    /// `rows * width` bytes.
    row_offsets: &'a [u8],
    /// `cols * width` bytes, and not empty.
    col_offsets: &'a [u8],
}

impl<'a> Offsets<'a> {
    /// The offsets of a tensor, which must be those of its shape: all dimensions but the last are rows.
    ///
    /// # Errors
    /// Those of [`Offsets::parse`]; `Corrupt` if they are for another shape, or elements are no values.
    pub fn of(tensor: &Tensor<'a>) -> Result<Self> {
        let bytes = tensor.dtype.value_width();
        let width = Width::from_bytes(bytes)
            .ok_or_else(|| Error::unsupported(format!("values of {bytes} bytes")))?;
        let offsets = Self::parse(width, tensor.side.get(SideKind::RANK1))?;
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let rows = tensor.shape.iter().rev().skip(1).try_fold(1u64, |n, d| n.checked_mul(*d));
        let fits = (Some(offsets.rows() as u64), offsets.cols() as u64) == (rows, cols);
        if !fits || tensor.dtype.size() != bytes {
            return Err(Error::corrupt("rank1 offsets do not have the tensor's shape"));
        }
        Ok(offsets)
    }

    /// Reads the side data of a tensor with elements of `width`; see [the module](self).
    ///
    /// # Errors
    /// `Truncated` if `side` is too short for what its header says, `Corrupt` if it is too long or
    /// a side is 0 or above 2^31 - 1.
    pub fn parse(width: Width, side: &'a [u8]) -> Result<Self> {
        let Some((header, offsets)) = side.split_first_chunk::<HEADER>() else {
            return Err(Error::truncated("side data of rank1 without its header"));
        };
        let [r0, r1, r2, r3, c0, c1, c2, c3] = *header;
        let rows = u32::from_le_bytes([r0, r1, r2, r3]);
        let cols = u32::from_le_bytes([c0, c1, c2, c3]);
        check_sides(rows, cols)?;
        let need = (u64::from(rows) + u64::from(cols)) * width.bytes() as u64;
        let found = offsets.len() as u64;
        if found < need {
            return Err(Error::truncated(format!(
                "offsets of {rows} rows and {cols} columns take {need} bytes, there are {found}"
            )));
        }
        if found > need {
            let what = format!("{} bytes after the column offsets of rank1", found - need);
            return Err(Error::corrupt(what));
        }
        let (row_offsets, col_offsets) = offsets.split_at(rows as usize * width.bytes());
        Ok(Self { width, row_offsets, col_offsets })
    }

    /// The width of an element.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.row_offsets.len() / self.width.bytes()
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.col_offsets.len() / self.width.bytes()
    }

    /// The number of elements of the region.
    pub fn elements(&self) -> u64 {
        self.rows() as u64 * self.cols() as u64
    }

    /// The prediction of an element as an ordered integer, in the low `width` bytes; `None`
    /// outside of the region.
    pub fn predict(&self, row: usize, col: usize) -> Option<u64> {
        let at = |offsets: &[u8], i: usize| (i < offsets.len()).then(|| self.offset(offsets, i));
        let bytes = self.width.bytes();
        let row = at(self.row_offsets, row.checked_mul(bytes)?)?;
        let col = at(self.col_offsets, col.checked_mul(bytes)?)?;
        Some(row.wrapping_add(col) as u64 & u64::MAX >> (64 - self.width.bits()))
    }

    /// Writes the predicted bits of whole elements of the region, from element `start` on.
    ///
    /// # Errors
    /// `Corrupt` if the range is not within the region, or `out` not whole elements. `out` is
    /// untouched then.
    pub fn predict_range(&self, kernels: Kernels, start: u64, mut out: &mut [u8]) -> Result<()> {
        self.check_range(start, out.len())?;
        let bytes = self.width.bytes();
        let cols = self.cols() as u64;
        // Both are within the offsets, as the range is within the region.
        let (mut row, mut col) = ((start / cols) as usize, (start % cols) as usize);
        // A difference of zero from a prediction is the prediction.
        out.fill(0);
        while !out.is_empty() {
            let offsets = &self.col_offsets[col * bytes..];
            let (part, rest) = out.split_at_mut(offsets.len().min(out.len()));
            let row_offset = self.offset(self.row_offsets, row * bytes);
            kernels.add_offsets(self.width, part, row_offset, &offsets[..part.len()]);
            out = rest;
            (row, col) = (row + 1, 0);
        }
        Ok(())
    }

    fn check_range(&self, start: u64, len: usize) -> Result<()> {
        if !len.is_multiple_of(self.width.bytes()) {
            let what = format!("{len} bytes are not elements of {}", self.width.bytes());
            return Err(Error::corrupt(what));
        }
        let n = (len / self.width.bytes()) as u64;
        if start.checked_add(n).is_none_or(|end| end > self.elements()) {
            let all = self.elements();
            let what = format!("{n} elements from {start} on, of a rank1 region of {all}");
            return Err(Error::corrupt(what));
        }
        Ok(())
    }

    /// The offset that starts at byte `at`, sign-extended.
    fn offset(&self, offsets: &[u8], at: usize) -> i64 {
        sign_extended(&offsets[at..][..self.width.bytes()])
    }
}

/// Fits the offsets to a region of `rows * cols` floats, given as bits, and returns the side data.
///
/// # Errors
/// `Corrupt` if a side is 0 or above 2^31 - 1, or `data` is not `rows * cols` elements.
pub fn fit(width: Width, rows: u32, cols: u32, data: &[u8]) -> Result<Vec<u8>> {
    check_sides(rows, cols)?;
    let need = u128::from(rows) * u128::from(cols) * width.bytes() as u128;
    if data.len() as u128 != need {
        let len = data.len();
        let what = format!("{len} bytes for {rows} rows and {cols} columns of {width:?}");
        return Err(Error::corrupt(what));
    }
    let mut side = Vec::with_capacity(HEADER + (rows as usize + cols as usize) * width.bytes());
    side.extend_from_slice(&rows.to_le_bytes());
    side.extend_from_slice(&cols.to_le_bytes());
    match width {
        Width::B1 => fit_offsets::<1, i64>(cols, data, &mut side),
        Width::B2 => fit_offsets::<2, i64>(cols, data, &mut side),
        Width::B4 => fit_offsets::<4, i64>(cols, data, &mut side),
        _ => fit_offsets::<8, i128>(cols, data, &mut side),
    }
    Ok(side)
}

/// A sum of differences of ordered integers.
trait Sum: Copy + Default + AddAssign + From<i64> + Sub<Output = Self> {
    /// This sum divided by `n > 0`, rounded to the nearest integer, halves up.
    fn mean(self, n: u32) -> Self;
    /// The low 64 bits.
    fn low(self) -> i64;
}

macro_rules! sum {
    ($int:ty) => {
        impl Sum for $int {
            fn mean(self, n: u32) -> Self {
                let n = Self::from(n);
                let (quotient, rest) = (self.div_euclid(n), self.rem_euclid(n));
                quotient + Self::from(rest * 2 >= n)
            }
            fn low(self) -> i64 {
                self as i64
            }
        }
    };
}

sum!(i64);
sum!(i128);

/// Appends the row offsets, then the column offsets.
fn fit_offsets<const W: usize, S: Sum>(cols: u32, data: &[u8], side: &mut Vec<u8>) {
    let (elements, _) = data.as_chunks::<W>();
    let mut col_sums = vec![S::default(); cols as usize];
    let mut rows = 0;
    for row in elements.chunks_exact(cols as usize) {
        let mut sum = S::default();
        for element in row {
            sum += S::from(ordered(element));
        }
        let mean = sum.mean(cols);
        for (col_sum, element) in col_sums.iter_mut().zip(row) {
            *col_sum += S::from(ordered(element)) - mean;
        }
        side.extend_from_slice(&mean.low().to_le_bytes()[..W]);
        rows += 1;
    }
    for sum in col_sums {
        side.extend_from_slice(&sum.mean(rows).low().to_le_bytes()[..W]);
    }
}

/// The ordered integer of one element: the definition in [`Kernels::to_ordered`].
fn ordered(bits: &[u8]) -> i64 {
    let x = sign_extended(bits);
    let magnitude = i64::MAX >> (64 - 8 * bits.len());
    x ^ (x >> 63 & magnitude)
}

/// A little-endian two's complement integer of 1 to 8 bytes.
fn sign_extended(bytes: &[u8]) -> i64 {
    let mut all = [0; 8];
    all[8 - bytes.len()..].copy_from_slice(bytes);
    i64::from_le_bytes(all) >> (64 - 8 * bytes.len())
}

fn check_sides(rows: u32, cols: u32) -> Result<()> {
    let allowed = 1..=MAX_SIDE;
    if !allowed.contains(&rows) || !allowed.contains(&cols) {
        return Err(Error::corrupt(format!("a rank1 region of {rows} rows and {cols} columns")));
    }
    Ok(())
}
