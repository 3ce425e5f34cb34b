//! The values that the planner looks at, at fixed positions.

use std::borrow::Cow;
use std::ops::Range;

use s4_format::DType;

use crate::chunk::chunk_log2;

/// Number of runs of values that the planner looks at.
const PROBES: u64 = 16;
/// Values in each run, at most. Of a smaller tensor, one value in [`SAMPLED`] is sampled.
const PROBE: u64 = 1024;
const SAMPLED: u64 = 4;
/// Tensors of up to this many values are sampled whole.
const WHOLE: u64 = PROBES * PROBE;
/// Sizes differ from run to run if that adds this part to their variation within runs: 8 means one in 8.
const EVEN: u64 = 8;
/// Number of chunks of the parent that the planner looks into, each of which may have to be read
/// and decoded whole: for tensors with fewer chunks than [`MANY_CHUNKS`], and for larger ones. A
/// large buffer of weights and moments differs from place to place.
const PARENT_CHUNKS: [u64; 2] = [4, 8];
pub(super) const MANY_CHUNKS: u64 = 24;

/// The values of a tensor's parent that the planner looks at, as ranges of value indices in
/// ascending order. Fixed for a dtype and a number of values; they lie in a few chunks.
pub fn parent_probes(dtype: DType, values: u64) -> Vec<Range<u64>> {
    if are_same(dtype, values) {
        return sampled_runs(values).filter(|r| !r.is_empty()).collect();
    }
    let (chunk, whole, chunks) = chunks_of(dtype, values);
    // Whole chunks, spread from the first to the last, with some probes in each.
    let at = |i| (whole - 1) * i / (chunks - 1) * chunk;
    let (probes, probe) = (PROBES / chunks, probe(values));
    (0..chunks).flat_map(|i| spread(at(i)..at(i) + chunk, (probes, probe))).collect()
}

/// Whether [`parent_probes`] are the same as [`sampled_runs`], as for a tensor of few chunks.
pub(crate) fn are_same(dtype: DType, values: u64) -> bool {
    let (_, whole, chunks) = chunks_of(dtype, values);
    whole <= chunks
}

/// The values of a chunk, the number of whole chunks, and how many of the parent's are looked into.
fn chunks_of(dtype: DType, values: u64) -> (u64, u64, u64) {
    let chunk = 1 << chunk_log2(dtype);
    let whole = values / chunk;
    (chunk, whole, PARENT_CHUNKS[usize::from(whole >= MANY_CHUNKS)])
}

/// Values in each run of a tensor of `values` values.
pub(super) fn probe(values: u64) -> u64 {
    match values <= WHOLE {
        // Small enough to be looked at whole.
        true => PROBE,
        false => (values / (SAMPLED * PROBES)).min(PROBE),
    }
}

/// The values of a tensor at [`parent_probes`], one run after the other.
pub(crate) fn probed(dtype: DType, data: &[u8]) -> Vec<u8> {
    let width = dtype.value_width();
    gather(data, width, parent_probes(dtype, (data.len() / width) as u64).into_iter())
}

/// Runs of equal length, evenly spaced from the start of a range to its end.
fn spread(within: Range<u64>, (runs, len): (u64, u64)) -> impl Iterator<Item = Range<u64>> {
    let step = if runs == 1 { 0 } else { (within.end - within.start - len) / (runs - 1) };
    (0..runs).map(move |i| {
        let first = within.start + step * i;
        first..first + len
    })
}

/// The runs of values that are looked at, evenly spaced over the tensor; a small one is a single run.
pub(crate) fn sampled_runs(values: u64) -> impl Iterator<Item = Range<u64>> {
    let all = values <= WHOLE;
    spread(0..values, if all { (1, values) } else { (PROBES, probe(values)) })
}

/// The values of some runs, which lie within the tensor, one run after the other.
pub(super) fn gather(
    data: &[u8],
    width: usize,
    runs: impl Iterator<Item = Range<u64>> + Clone,
) -> Vec<u8> {
    let values: u64 = runs.clone().map(|run| run.end - run.start).sum();
    let mut out = Vec::with_capacity(values as usize * width);
    for run in runs {
        out.extend_from_slice(&data[run.start as usize * width..run.end as usize * width]);
    }
    out
}

/// Values at fixed positions.
#[derive(Debug, Clone)]
pub(crate) struct Sample<'a> {
    /// Their indices: runs in ascending order.
    pub(super) runs: Vec<Range<u64>>,
    /// The values, one run after the other.
    pub(super) values: Cow<'a, [u8]>,
}

impl<'a> Sample<'a> {
    /// The sample of `data`, whose values have `width` bytes: a copy, since the values may change.
    pub(crate) fn of(data: &[u8], width: usize, runs: Vec<Range<u64>>) -> Self {
        let values = gather(data, width, runs.iter().cloned()).into();
        Self { runs, values }
    }

    /// A sample whose values were fetched already: as many as the runs have.
    #[cfg(feature = "cuda")]
    pub(crate) fn fetched(runs: Vec<Range<u64>>, values: &'a [u8]) -> Self {
        Self { runs, values: values.into() }
    }
}

/// Whether each run of `run` values has values of both signs.
pub(super) fn signs_change(sample: &[u8], width: usize, run: u64) -> bool {
    sample.chunks(run as usize * width).all(|run| have_both_signs(run, width))
}

/// Whether the sizes of floats differ from run to run (of `run` values each), or all signs are equal.
pub(super) fn is_uneven(sample: &[u8], width: usize, run: u64) -> bool {
    if !have_both_signs(sample, width) {
        return !sample.is_empty();
    }
    // The number of values times the sum of their squared distances from the mean.
    let spread = |(n, sum, squares): (u64, u64, u64)| n * squares - sum * sum;
    let (mut all, mut within) = ((0, 0, 0), 0);
    for run in sample.chunks(run as usize * width) {
        let sums = sums_of_exponents(run, width);
        within += spread(sums) / sums.0.max(1);
        all = (all.0 + sums.0, all.1 + sums.1, all.2 + sums.2);
    }
    let all = spread(all) / all.0.max(1);
    all > within + within / EVEN
}

// The functions below compile to vector instructions: the width is known and each value is read as one number.

fn have_both_signs(values: &[u8], width: usize) -> bool {
    // `any` ORs all values, `all` ANDs them.
    macro_rules! top {
        ($number:ty) => {{
            let values = values.as_chunks::<{ size_of::<$number>() }>().0.iter();
            let values = values.map(|v| <$number>::from_le_bytes(*v));
            let (any, all) = values.fold((0, <$number>::MAX), |(any, all), v| (any | v, all & v));
            (any & !all) >> (<$number>::BITS - 1) == 1
        }};
    }
    match width {
        2 => top!(u16),
        4 => top!(u32),
        8 => top!(u64),
        _ => top!(u8),
    }
}

/// The number of values in a run, and the sums of their exponents and of the squared exponents.
fn sums_of_exponents(run: &[u8], width: usize) -> (u64, u64, u64) {
    // The 8 bits below the sign. The sum of PROBE squares fits.
    const { assert!(PROBE * 255 * 255 < i32::MAX as u64) };
    macro_rules! sums {
        ($number:ty, $shift:expr) => {{
            let values = run.as_chunks::<{ size_of::<$number>() }>().0.iter();
            let exponents =
                values.map(|v| (<$number>::from_le_bytes(*v) << 1 >> $shift) as i16 & 0xff);
            exponents.fold((0i32, 0i32), |(sum, squares), e| {
                let e = i32::from(e);
                (sum + e, squares + e * e)
            })
        }};
    }
    let (sum, squares) = match width {
        2 => sums!(u16, 8),
        4 => sums!(u32, 24),
        8 => sums!(u64, 56),
        _ => sums!(u8, 0),
    };
    ((run.len() / width) as u64, sum as u64, squares as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_and_exponents_are_those_of_each_value() {
        let next = |x: &u64| Some(x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
        let bytes: Vec<u8> =
            std::iter::successors(Some(1), next).take(5000).map(|x| (x >> 56) as u8).collect();
        for width in [1usize, 2, 4, 8] {
            for (values, set) in [(1, 0), (7, 0x80), (PROBE as usize, 0), (600, 0x80)] {
                let mut run = bytes[..values.min(5000 / width) * width].to_vec();
                if set != 0 {
                    run.chunks_mut(width).for_each(|v| v[width - 1] |= set);
                }
                let tops: Vec<u8> = run.chunks(width).map(|v| v[width - 1]).collect();
                let both = tops.iter().any(|t| *t >= 0x80) && tops.iter().any(|t| *t < 0x80);
                assert_eq!(have_both_signs(&run, width), both, "{width}, {values}");
                let exponent = |v: &[u8]| {
                    let low = if width > 1 { v[width - 2] } else { 0 };
                    u64::from(v[width - 1] << 1 | low >> 7)
                };
                let exponents: Vec<_> = run.chunks(width).map(exponent).collect();
                let squares = exponents.iter().map(|e| e * e).sum();
                let sums = (exponents.len() as u64, exponents.iter().sum(), squares);
                assert_eq!(sums_of_exponents(&run, width), sums, "{width}, {values}");
            }
        }
    }
}
