//! Fits row and column offsets to a sample of a tensor's values, in integer arithmetic.

use std::ops::Range;

use s4_format::limits::MAX_SIDE as SIDE_DATA;
use s4_format::{Error, Result};
use s4_planes::Width;

use super::{MAX_SIDE, ZEROS, to_offset};

/// The fewest values that a row's or a column's offset is computed from, where there are that many.
const SAMPLES: u64 = 64;
/// Tensors of at most this many values are used in full, not sampled.
const WHOLE: u64 = 1 << 18;
/// With fewer rows or columns than this, offsets do not pay.
const FEW: u64 = 16;
/// A larger tensor must not take more than this many values, or one in `PART`, to compute offsets from: they are copied. One
/// with few columns or rows would take all.
const MOST: u64 = 1 << 24;
const PART: u64 = 8;
/// The most bytes of offsets: the tensor's side data has shared tables, too.
const MOST_BYTES: u64 = SIDE_DATA as u64 - (1 << 20);
/// Rows that are used in full. The other rows show only one part of the columns each, which does
/// not tell how the parts differ.
const WHOLE_ROWS: u64 = 8;
/// Rounds in which rows and columns are adjusted to each other.
const ROUNDS: usize = 4;
/// Fractional bits of means.
pub(super) const FRACTION: u32 = 8;

/// Bits that the sums of offsets are shifted by, so that a unit is 1/512 of an octave, or a value's
/// last place if that is coarser.
pub(super) fn shift_of(width: Width) -> u32 {
    match width {
        Width::B4 => 14,
        Width::B8 => 43,
        _ => 0,
    }
}

/// Rounds a number with [`FRACTION`] fractional bits to an integer.
pub(super) fn rounded(x: i64) -> i64 {
    (x + (1 << (FRACTION - 1))) >> FRACTION
}

/// A tensor as rows and columns, and the values that offsets are computed from: a run of each row,
/// and a few rows in full. Row `r` gives part `r mod parts` of the columns, so that all columns are
/// covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    rows: u64,
    cols: u64,
    /// Columns of a part.
    run: u64,
}

impl Grid {
    /// The rows and columns of a shape: the leading dimensions make up the rows and the others the
    /// columns, cut where the sum of the two numbers is smallest. `None` if offsets cannot pay, or would take too much.
    pub fn of(shape: &[u64]) -> Option<Self> {
        let values = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        let mut rows = 1u64;
        let cuts = shape.iter().map(|d| {
            rows *= d;
            (rows, values.checked_div(rows).unwrap_or(0))
        });
        let (rows, cols) = cuts.min_by_key(|(rows, cols)| rows.saturating_add(*cols))?;
        if rows < FEW || cols < FEW || rows.max(cols) > u64::from(MAX_SIDE) {
            return None;
        }
        let run = match values <= WHOLE {
            true => cols,
            false => SAMPLES.max((SAMPLES * cols).div_ceil(rows)).next_multiple_of(16).min(cols),
        };
        let grid = Self { rows, cols, run };
        let sampled = rows.saturating_mul(run);
        let affordable = sampled <= MOST.max(values / PART) && grid.offset_bytes() <= MOST_BYTES;
        affordable.then_some(grid)
    }

    /// Bytes that the offsets take.
    pub fn offset_bytes(&self) -> u64 {
        2 * (self.rows + self.cols)
    }

    /// The first column of a part.
    fn first(&self, part: u64) -> u64 {
        (part * self.run).min(self.cols - self.run)
    }

    fn parts(&self) -> u64 {
        self.cols.div_ceil(self.run)
    }

    /// Number of rows that are used in full besides the runs: none if the runs are full rows.
    fn whole_rows(&self) -> u64 {
        if self.parts() > 1 { WHOLE_ROWS } else { 0 }
    }

    /// The values that offsets are computed from, as ranges of value indices: one for each row,
    /// then the rows that are used in full, evenly spaced.
    pub fn ranges(self) -> impl Iterator<Item = Range<u64>> + Clone {
        let runs = (0..self.rows).zip((0..self.parts()).cycle()).map(move |(row, part)| {
            let first = row * self.cols + self.first(part);
            first..first + self.run
        });
        let whole = (0..self.whole_rows()).map(move |i| {
            let row = (2 * i + 1) * self.rows / (2 * WHOLE_ROWS);
            row * self.cols..(row + 1) * self.cols
        });
        runs.chain(whole)
    }
}

/// Sums that offsets are computed from.
struct Sums {
    /// For each row, the sum of the magnitudes in its run.
    rows: Vec<i64>,
    /// For each part of the columns, the sum of each column's magnitudes in the rows of that part.
    cols: Vec<Vec<i64>>,
    /// For each part, the number of rows in these sums.
    counts: Vec<i64>,
    /// The excess of each part's average magnitude over that of all columns, with [`FRACTION`]
    /// fractional bits: computed from the rows that are used in full and hold no zero.
    parts: Vec<i64>,
    /// `Some` for rows whose run holds a zero, which are in no column's sum: whether it holds only
    /// zeros.
    zeros: Vec<Option<bool>>,
}

/// Fits the offsets of a tensor to the values at [`Grid::ranges`], one range after the other.
/// Returns side data.
///
/// # Errors
/// `Corrupt` if `values` has another size.
pub fn fit(width: Width, grid: &Grid, values: &[u8]) -> Result<Vec<u8>> {
    let need = u128::from(grid.rows) * u128::from(grid.run)
        + u128::from(grid.whole_rows()) * u128::from(grid.cols);
    let need = need * width.bytes() as u128;
    if values.len() as u128 != need {
        return Err(Error::corrupt(format!(
            "cannot compute offsets from {} bytes of values, expected {need}",
            values.len()
        )));
    }
    let shift = shift_of(width);
    let sums = match width {
        Width::B1 => sums::<1, u32>(grid, values, shift),
        Width::B2 => sums::<2, u32>(grid, values, shift),
        Width::B4 => sums::<4, u32>(grid, values, shift),
        Width::B8 => sums::<8, u64>(grid, values, shift),
    };
    let (rows, cols) = adjust(grid, &sums);
    Ok(side_data(width, shift, &sums, &rows, &cols))
}

/// The bits of a value, in an integer of a width that the processor adds.
trait Bits<const W: usize>: Copy {
    /// The bits of a value below its sign, and the same without the low `shift` bits: at most 31.
    fn magnitude(value: [u8; W], shift: u32) -> (Self, i32);
    fn is_zero(self) -> bool;
}

macro_rules! bits {
    ($($width:literal: $bytes:ty => $bits:ty),*) => {$(
        impl Bits<$width> for $bits {
            #[inline(always)]
            fn magnitude(value: [u8; $width], shift: u32) -> (Self, i32) {
                let bits = <$bits>::from(<$bytes>::from_le_bytes(value) & (<$bytes>::MAX >> 1));
                (bits, (bits >> shift) as i32)
            }

            #[inline(always)]
            fn is_zero(self) -> bool {
                self == 0
            }
        }
    )*};
}

bits!(1: u8 => u32, 2: u16 => u32, 4: u32 => u32, 8: u64 => u64);

/// Writes the magnitudes of `values` to `to`; returns the number of zeros.
fn magnitudes_of<const W: usize, B: Bits<W>>(
    values: &[[u8; W]],
    shift: u32,
    to: &mut [i32],
) -> usize {
    let mut zeros = 0u32;
    for (to, value) in to.iter_mut().zip(values) {
        let (bits, magnitude) = B::magnitude(*value, shift);
        *to = magnitude;
        zeros += u32::from(bits.is_zero());
    }
    zeros as usize
}

/// Computes [`Sums::parts`].
fn part_means<const W: usize, B: Bits<W>>(grid: &Grid, whole: &[[u8; W]], shift: u32) -> Vec<i64> {
    let (parts, run, cols) = (grid.parts(), grid.run as usize, grid.cols as usize);
    let (mut sums, mut all, mut rows) = (vec![0i64; parts as usize], 0i64, 0i64);
    let mut magnitudes = vec![0i32; cols];
    for values in whole.chunks_exact(cols) {
        if magnitudes_of::<W, B>(values, shift, &mut magnitudes) > 0 {
            continue;
        }
        for (part, to) in (0..parts).zip(&mut sums) {
            *to += sum_of(&magnitudes[grid.first(part) as usize..][..run]);
        }
        all += sum_of(&magnitudes);
        rows += 1;
    }
    let all = mean(all, rows * grid.cols as i64);
    sums.into_iter().map(|sum| mean(sum, rows * grid.run as i64) - all).collect()
}

/// This many magnitudes, each below 2^20, can be added in 32 bits.
const NARROW: usize = 1 << 11;

/// The sum of magnitudes.
fn sum_of(magnitudes: &[i32]) -> i64 {
    let narrow = |some: &[i32]| i64::from(some.iter().sum::<i32>());
    magnitudes.chunks(NARROW).map(narrow).sum()
}

/// Sums of columns, to which rows are added: in 32 bits until these might overflow.
struct Columns {
    sums: Vec<i64>,
    narrow: Vec<i32>,
    rows: usize,
}

impl Columns {
    fn new(columns: usize) -> Self {
        Self { sums: vec![0; columns], narrow: vec![0; columns], rows: 0 }
    }

    fn add(&mut self, magnitudes: &[i32]) {
        self.narrow.iter_mut().zip(magnitudes).for_each(|(sum, m)| *sum += m);
        self.rows += 1;
        if self.rows == NARROW {
            self.widen();
        }
    }

    fn widen(&mut self) {
        for (sum, narrow) in self.sums.iter_mut().zip(&mut self.narrow) {
            *sum += i64::from(std::mem::take(narrow));
        }
        self.rows = 0;
    }

    fn done(mut self) -> Vec<i64> {
        self.widen();
        self.sums
    }
}

/// Computes [`Sums`]. 64 bits hold a sum of 2^31 magnitudes, more than any row or column has.
fn sums<const W: usize, B: Bits<W>>(grid: &Grid, values: &[u8], shift: u32) -> Sums {
    let (parts, run) = (grid.parts() as usize, grid.run as usize);
    let mut out = Sums {
        rows: Vec::with_capacity(grid.rows as usize),
        cols: vec![],
        counts: vec![0; parts],
        parts: vec![0; parts],
        zeros: Vec::with_capacity(grid.rows as usize),
    };
    let values = values.as_chunks::<W>().0;
    let (runs, whole) = values.split_at(run * grid.rows as usize);
    out.parts = part_means::<W, B>(grid, whole, shift);
    let mut cols: Vec<_> = (0..parts).map(|_| Columns::new(run)).collect();
    let mut magnitudes = vec![0i32; run];
    for (row, values) in runs.chunks_exact(run).enumerate() {
        let zeros = magnitudes_of::<W, B>(values, shift, &mut magnitudes);
        out.rows.push(sum_of(&magnitudes));
        out.zeros.push((zeros > 0).then_some(zeros == run));
        if zeros == 0 {
            let part = row % parts;
            out.counts[part] += 1;
            cols[part].add(&magnitudes);
        }
    }
    out.cols = cols.into_iter().map(Columns::done).collect();
    out
}

/// `a / b`, rounded to the nearest, with [`FRACTION`] fractional bits; 0 if `b` is 0.
fn mean(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    // There is nearly always room for the extra bits, and 128-bit divisions are slow.
    match a.checked_mul(1 << FRACTION).and_then(|a| a.checked_add(b / 2)) {
        Some(a) => a.div_euclid(b),
        None => ((i128::from(a) << FRACTION) + i128::from(b / 2)).div_euclid(b.into()) as i64,
    }
}

/// The offsets of rows and columns, with [`FRACTION`] fractional bits: their means, less the mean
/// offset of the columns or rows that they cross.
fn adjust(grid: &Grid, sums: &Sums) -> (Vec<i64>, Vec<i64>) {
    let (parts, run) = (grid.parts() as usize, grid.run as usize);
    let mut cols = vec![0i64; grid.cols as usize];
    let mut rows = vec![0i64; grid.rows as usize];
    let firsts: Vec<usize> = (0..parts).map(|p| grid.first(p as u64) as usize).collect();
    for (first, mean) in firsts.iter().zip(&sums.parts) {
        cols[*first..first + run].fill(*mean);
    }
    // The means themselves do not change from round to round.
    let of_rows: Vec<i64> = sums.rows.iter().map(|sum| mean(*sum, grid.run as i64)).collect();
    let of_cols = sums.cols.iter().zip(&sums.counts);
    let of_cols: Vec<Vec<i64>> =
        of_cols.map(|(sums, n)| sums.iter().map(|sum| mean(*sum, *n)).collect()).collect();
    for _ in 0..ROUNDS {
        let of_part = |first: &usize| cols[*first..first + run].iter().sum::<i64>();
        let of_part: Vec<i64> = firsts.iter().map(|f| of_part(f) / grid.run as i64).collect();
        let mut row_sums = vec![0i128; parts];
        let known = rows.iter_mut().zip(&of_rows).zip(&sums.zeros);
        for (((row, mean), zeros), part) in known.zip((0..parts).cycle()) {
            *row = mean - of_part[part];
            if zeros.is_none() {
                row_sums[part] += i128::from(*row);
            }
        }
        for (part, &first) in firsts.iter().enumerate() {
            let count = sums.counts[part];
            let rows = if count == 0 { 0 } else { (row_sums[part] / i128::from(count)) as i64 };
            for (col, mean) in cols[first..first + run].iter_mut().zip(&of_cols[part]) {
                *col = mean - rows;
            }
        }
        // If every row of a part holds a zero, nothing is known about its columns: their offsets
        // are 0.
    }
    (rows, cols)
}

fn side_data(width: Width, shift: u32, sums: &Sums, rows: &[i64], cols: &[i64]) -> Vec<u8> {
    let known = || rows.iter().zip(&sums.zeros).filter(|(_, z)| z.is_none()).map(|(r, _)| *r);
    let (count, sum) = known().fold((0i64, 0i128), |(n, s), r| (n + 1, s + i128::from(r)));
    let center = if count == 0 { 0 } else { rounded((sum / i128::from(count)) as i64) };
    let most = (u64::MAX >> (65 - width.bits())) >> shift;
    let center = center.clamp(0, most as i64);
    let row = |(row, zeros): (&i64, &Option<bool>)| match zeros {
        Some(true) => ZEROS,
        _ => to_offset(rounded(*row) - center),
    };
    super::side_data(
        ((center as u64) << shift, shift, 0),
        rows.iter().zip(&sums.zeros).map(row),
        cols.iter().map(|col| to_offset(rounded(*col))),
    )
}
