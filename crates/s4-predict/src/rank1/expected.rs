//! The values that a tensor's and its parents' offsets predict, and the offsets of a blend of both.
//!
//! Offsets are means, and the mean of a difference is the difference of the means. So the offsets
//! of `x - share * parent` follow from those of `x` and of the parent, and none of the parent's
//! values is needed.

use s4_planes::Width;

use super::fit::{FRACTION, rounded, shift_of};
use super::{Offsets, ZEROS, side_data, to_offset};

/// The base and the row and column offsets that predict a tensor's values. They add up the tensor's
/// own and the shares of its parents', in units of `2^shift` with 8 fractional bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    width: Width,
    base: i32,
    rows: Vec<i32>,
    cols: Vec<i32>,
}

/// `x`, clamped to the range of `i32`.
fn narrow(x: i64) -> i32 {
    x.clamp(i32::MIN.into(), i32::MAX.into()) as i32
}

/// `share` 256ths of `of`, rounded down.
fn part(share: u8, of: i32) -> i64 {
    (i64::from(share) * i64::from(of)) >> 8
}

/// The offsets in `bytes`, 2 bytes each.
fn each(bytes: &[u8]) -> impl ExactSizeIterator<Item = i16> {
    bytes.as_chunks().0.iter().map(|offset| i16::from_le_bytes(*offset))
}

impl Expected {
    /// The expected values of a tensor that is stored with `offsets`. `parent` is the same for its
    /// parent, and is ignored if `offsets` have no share of it. `None` if `offsets` are of another
    /// kind than [`super::fit()`] makes, or do not fit the parent.
    pub fn of(offsets: &Offsets<'_>, parent: Option<&Self>) -> Option<Self> {
        let width = offsets.width();
        let share = offsets.share();
        let parent = parent.filter(|_| share != 0);
        let fits = parent.is_none_or(|parent| parent.fits(offsets));
        if offsets.shift() != shift_of(width) || parent.is_none() != (share == 0) || !fits {
            return None;
        }
        let own = |offset: i64| offset << FRACTION;
        let shared = |of: i32| part(share, of);
        // The shifted base is below 2^20: for 8-byte values, the base is below 2^63 and the shift
        // is 43.
        let base = own((offsets.base() >> offsets.shift()) as i64);
        let base = narrow(base + parent.map_or(0, |p| shared(p.base)));
        let parents = |i: usize, of: fn(&Self) -> &[i32]| parent.map_or(0, |p| shared(of(p)[i]));
        let row = |(i, offset): (usize, i16)| match offset {
            // Such a row is predicted as zeros: this cancels the base, if not the columns' offsets.
            ZEROS => -base,
            offset => narrow(own(offset.into()) + parents(i, |p| &p.rows)),
        };
        let col = |(i, offset): (usize, i16)| narrow(own(offset.into()) + parents(i, |p| &p.cols));
        let rows = each(offsets.row_offsets()).enumerate().map(row).collect();
        let cols = each(offsets.col_offsets()).enumerate().map(col).collect();
        Some(Self { width, base, rows, cols })
    }

    /// Whether `offsets` are for the same numbers of rows and columns, and values of the same
    /// width.
    pub fn fits(&self, offsets: &Offsets<'_>) -> bool {
        let sides = (self.rows.len() as u64, self.cols.len());
        self.width == offsets.width()
            && sides == (offsets.values() / offsets.cols() as u64, offsets.cols())
            && offsets.shift() == shift_of(self.width)
    }

    /// The expected magnitude of the value at index `i`.
    ///
    /// # Panics
    /// If there is no such value.
    pub fn at(&self, i: u64) -> i64 {
        let cols = self.cols.len() as u64;
        let sum = [self.base, self.rows[(i / cols) as usize], self.cols[(i % cols) as usize]];
        rounded(sum.map(i64::from).iter().sum()) << shift_of(self.width)
    }
}

/// The side data of a tensor that is predicted from its rows, its columns and `share` 256ths of its
/// parent, from 1 to 255. `own` are its offsets without a parent. `None` if they do not fit the
/// parent.
pub fn blended(own: &Offsets<'_>, parent: &Expected, share: u8) -> Option<Vec<u8>> {
    if share == 0 || own.share() != 0 || !parent.fits(own) {
        return None;
    }
    let (shift, most) = (own.shift(), u64::MAX >> (65 - own.width().bits()));
    let left = |offset: i64, of: i32| rounded((offset << FRACTION) - part(share, of));
    let exact = left((own.base() >> shift) as i64, parent.base);
    let base = exact.clamp(0, (most >> shift) as i64);
    let row = |(offset, of): (i16, &i32)| match offset {
        ZEROS => ZEROS,
        offset => to_offset(left(offset.into(), *of) + exact - base),
    };
    let col = |(offset, of): (i16, &i32)| to_offset(left(offset.into(), *of));
    Some(side_data(
        ((base as u64) << shift, shift, share),
        each(own.row_offsets()).zip(&parent.rows).map(row),
        each(own.col_offsets()).zip(&parent.cols).map(col),
    ))
}
