//! Tensors that are copies of others in the same checkpoint: equal ones, as averages of weights are
//! at first, or rounded ones, as a model's weights are of the optimizer's.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

use s4_engine::{
    Input, InputSize, Inputs, TensorError, TensorPlan, TensorValues, Values, chunk_log2, copy_once,
};
use s4_format::dtype::ElementForm;
use s4_format::index::chunk_count;
use s4_format::manifest::RoleKind;
use s4_format::{ChunkRecord, DType, Error, LayoutId, Plan};
use s4_planes::Kernels;

use crate::inputs::Failure;

/// The values that are compared: this many runs, evenly spaced, of this many values each. And how many of these
/// values may differ.
const RUNS: u64 = 16;
const RUN: u64 = 4;
const MAY_DIFFER: usize = 4;
/// Tensors that are equal so far are compared once more, at this many runs. And how many of these values may differ
/// where none compresses well without its original.
const MORE_RUNS: u64 = 256;
const MORE_MAY_DIFFER: usize = (MORE_RUNS * RUN / 16) as usize;
/// Number of tensors with a run in common that are looked at: many begin with the same zeros.
const MOST_ALIKE: usize = 64;
/// Bytes that are compared of a tensor with 2-byte values. A run of these has 8 bytes.
const LOOK_BYTES: usize = (2 * RUNS * RUN) as usize;

/// The values that are compared, in a tensor of `values` values.
fn compared(values: u64) -> impl Iterator<Item = Range<u64>> {
    let step = values.saturating_sub(RUN) / (RUNS - 1);
    (0..RUNS).map(move |i| step * i..(step * i + RUN).min(values))
}

/// The values that are compared once more. They are scattered: evenly spaced runs may all lie near a matrix's
/// diagonal, where masks of several kinds agree.
fn compared_again(values: u64) -> impl Iterator<Item = Range<u64>> {
    // The golden ratio, as a part of 2^64.
    let part = |i: u64| u128::from(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let places = u128::from(values.saturating_sub(RUN) + 1);
    (1..=MORE_RUNS).map(move |i| {
        let first = ((part(i) * places) >> 64) as u64;
        first..(first + RUN).min(values)
    })
}

/// Tensors to look at, and which bytes of each.
pub(crate) type Looks = Vec<(usize, Vec<Range<u64>>)>;

/// The bytes of tensors that lie in ranges of values.
fn looks_at<R: Iterator<Item = Range<u64>>>(
    tensors: &[TensorValues<'_>],
    mut numbers: Vec<usize>,
    ranges: impl Fn(u64) -> R,
) -> Looks {
    numbers.sort_unstable();
    numbers.dedup();
    let look = |i: usize| {
        let width = tensors[i].dtype.value_width() as u64;
        let values = ranges(tensors[i].values.bytes() / width);
        (i, values.map(|r| r.start * width..r.end * width).collect())
    };
    numbers.into_iter().map(look).collect()
}

/// The tensors that may be copies or have copies, by index in the list.
pub(crate) struct Candidates {
    /// By number of values: the float32 tensors, and the 2-byte ones.
    by_values: HashMap<u64, [Vec<usize>; 2]>,
    /// By dtype and number of values, if several tensors share both.
    alike: HashMap<(DType, u64), Vec<usize>>,
}

impl Candidates {
    pub(crate) fn of(tensors: &[TensorValues<'_>]) -> Self {
        let mut by_values: HashMap<u64, [Vec<usize>; 2]> = HashMap::new();
        let mut alike: HashMap<_, Vec<usize>> = HashMap::new();
        for (i, t) in tensors.iter().enumerate() {
            let values = t.values.bytes() / t.dtype.value_width() as u64;
            if values >= RUNS * RUN {
                alike.entry((t.dtype, values)).or_default().push(i);
            }
            let narrow = match t.dtype {
                DType::Float32 => 0,
                DType::BFloat16 | DType::Float16 => 1,
                _ => continue,
            };
            by_values.entry(values).or_default()[narrow].push(i);
        }
        by_values.retain(|values, [wide, narrow]| {
            *values >= RUNS * RUN && !wide.is_empty() && !narrow.is_empty()
        });
        alike.retain(|_, list| list.len() > 1);
        Self { by_values, alike }
    }

    /// The candidates, in ascending order, and the bytes of each that are compared.
    pub(crate) fn looks(&self, tensors: &[TensorValues<'_>]) -> Looks {
        let lists = self.by_values.values().flatten().chain(self.alike.values());
        looks_at(tensors, lists.flatten().copied().collect(), compared)
    }

    /// For each tensor, the index of the one that it is a copy of, if the compared bytes say so
    /// (`looks`, by index; empty for tensors that are not candidates). The original is never a copy
    /// itself. Among equal tensors it is the first, as `equal` says ([`Equal::firsts`]). Among several that a tensor may be rounded
    /// from, the weights that the optimizer keeps for it come first, then one of the same shape,
    /// then the one whose name has the longest ending in common.
    pub(crate) fn copies(
        &self,
        tensors: &[TensorValues<'_>],
        names: &[&str],
        looks: &[Vec<u8>],
        equal: &[Option<usize>],
    ) -> Vec<Option<usize>> {
        let mut out = vec![None; tensors.len()];
        let is_master = |w: usize| tensors[w].role.filter(|r| r.row.kind == RoleKind::Master);
        for [wide, narrow] in self.by_values.values() {
            let masters: HashMap<_, _> = (0..)
                .zip(wide)
                .filter_map(|(place, &w)| Some((is_master(w)?.row.parameter, place)))
                .collect();
            for dtype in [DType::BFloat16, DType::Float16] {
                let narrow = narrow.iter().copied().filter(|&i| tensors[i].dtype == dtype);
                let narrow: Vec<_> = narrow.filter(|&i| varies(&looks[i], 2)).collect();
                if narrow.is_empty() {
                    continue;
                }
                let rounded = Rounded::of(wide, dtype, looks);
                for i in narrow {
                    let t = &tensors[i];
                    let own = t.role.map(|r| r.row.parameter);
                    let master = own.and_then(|own| masters.get(&own)).copied();
                    out[i] = rounded.alike(&looks[i], master).into_iter().min_by_key(|&w| {
                        let master = is_master(w).is_some_and(|r| Some(r.row.parameter) == own);
                        let alike = common_end(names[i], names[w]);
                        (!master, tensors[w].shape != t.shape, Reverse(alike), w)
                    });
                }
            }
        }
        // The original of a rounded copy may in turn equal an earlier tensor.
        let first = |wide: usize| equal[wide].unwrap_or(wide);
        let original = |i: usize| match out[i] {
            Some(wide) => Some(first(wide)),
            None => equal[i].filter(|first| out[*first].is_none()),
        };
        (0..out.len()).map(original).collect()
    }

    /// The tensors whose compared bytes equal those of others. Those whose compared values are all the same are left
    /// out.
    pub(crate) fn equal(&self, looks: &[Vec<u8>]) -> Equal {
        let mut out = vec![];
        for (&(dtype, _), list) in &self.alike {
            let mut list = list.clone();
            list.sort_unstable_by_key(|&i| (&looks[i][..], i));
            for run in list.chunk_by(|a, b| looks[*a] == looks[*b]) {
                if run.len() > 1 && varies(&looks[run[0]], dtype.value_width()) {
                    out.push((dtype, run.to_vec()));
                }
            }
        }
        Equal(out)
    }
}

/// Tensors of one dtype and as many values that are equal so far, in ascending order.
pub(crate) struct Equal(Vec<(DType, Vec<usize>)>);

impl Equal {
    /// The bytes of each that are compared once more.
    pub(crate) fn looks(&self, tensors: &[TensorValues<'_>]) -> Looks {
        let numbers = self.0.iter().flat_map(|(_, list)| list).copied().collect();
        looks_at(tensors, numbers, compared_again)
    }

    /// For each of `tensors` tensors, the first one that it equals, if `looks` agree. Many floats may differ, since the
    /// copy is still smaller; masks and the like compress well by themselves, so only few of theirs may.
    pub(crate) fn firsts(&self, tensors: usize, looks: &[Vec<u8>]) -> Vec<Option<usize>> {
        let mut out = vec![None; tensors];
        for (dtype, list) in &self.0 {
            let most =
                if dtype.form() == ElementForm::Float { MORE_MAY_DIFFER } else { MAY_DIFFER };
            let mut firsts: Vec<usize> = vec![];
            for &i in list {
                let equal = |first: &&usize| {
                    differing(&looks[**first], &looks[i], dtype.value_width(), most) <= most
                };
                match firsts.iter().take(MOST_ALIKE).find(equal) {
                    Some(&first) => out[i] = Some(first),
                    None => firsts.push(i),
                }
            }
        }
        out
    }
}

/// Number of values of `width` bytes that differ, but no more than one above `most`.
fn differing(a: &[u8], b: &[u8], width: usize, most: usize) -> usize {
    let pairs = a.chunks_exact(width).zip(b.chunks_exact(width));
    pairs.filter(|(a, b)| a != b).take(most + 1).count()
}

/// Whether values are not all the same.
fn varies(values: &[u8], width: usize) -> bool {
    values.chunks_exact(width).any(|x| x != &values[..width])
}

/// The compared values of wider tensors, rounded to a narrower dtype.
struct Rounded<'a> {
    wide: &'a [usize],
    /// The rounded values of all, one tensor after the other.
    values: Vec<u8>,
    /// Some runs of each tensor ([`searched`]), with its position in `wide`, in ascending order.
    runs: Vec<(Run, u32)>,
}

/// A run of narrow values: their bits, and which run it is.
type Run = (u64, u8);

impl<'a> Rounded<'a> {
    fn of(wide: &'a [usize], dtype: DType, looks: &[Vec<u8>]) -> Self {
        let all = wide.iter().map(|&w| &looks[w][..]).collect::<Vec<_>>().concat();
        let mut values = vec![0; all.len() / 2];
        match dtype {
            DType::BFloat16 => Kernels::default().to_bf16(&all, &mut values),
            _ => Kernels::default().to_fp16(&all, &mut values),
        }
        // A tensor table has at most 2^22 records.
        let places = (0u32..).zip(values.chunks_exact(LOOK_BYTES));
        let mut runs: Vec<_> =
            places.flat_map(|(place, look)| searched(look).map(move |run| (run, place))).collect();
        runs.sort_unstable();
        Self { wide, values, runs }
    }

    /// The wider tensors that values may be a rounded copy of: among [`MOST_ALIKE`] with the same run, and the one at
    /// `master`.
    fn alike(&self, own: &[u8], master: Option<usize>) -> Vec<usize> {
        let mut places: Vec<_> = master.into_iter().collect();
        for run in searched(own) {
            let first = self.runs.partition_point(|(other, _)| *other < run);
            let found = self.runs[first..].iter().take_while(|(other, _)| *other == run);
            let found = found.take(MOST_ALIKE);
            places.extend(found.map(|(_, place)| *place as usize));
        }
        places.sort_unstable();
        places.dedup();
        let differ = |place: usize| {
            let rounded = &self.values[place * LOOK_BYTES..][..LOOK_BYTES];
            differing(own, rounded, 2, MAY_DIFFER)
        };
        places.retain(|&place| differ(place) <= MAY_DIFFER);
        places.into_iter().map(|place| self.wide[place]).collect()
    }
}

/// The runs of narrow values by which originals are searched: first those whose values are not all the same, since
/// many tensors have zeros in the same places. There is one more run than values may differ. A differing value
/// changes at most one run, so a copy has at least one run in common with its original.
fn searched(look: &[u8]) -> impl Iterator<Item = Run> {
    let runs = (0u8..).zip(look.as_chunks().0).map(|(i, run)| (u64::from_le_bytes(*run), i));
    let is_uniform = |(run, _): &Run| *run == (*run & 0xffff) * 0x1_0001_0001_0001;
    let varied = runs.clone().filter(move |run| !is_uniform(run));
    varied.chain(runs.filter(is_uniform)).take(MAY_DIFFER + 1)
}

/// The number of bytes that the ends of two names have in common.
fn common_end(a: &str, b: &str) -> usize {
    a.bytes().rev().zip(b.bytes().rev()).take_while(|(a, b)| a == b).count()
}

/// The plan of a copy of tensor `tensor`, which has dtype `of`.
pub(crate) fn plan(dtype: DType, of: DType, tensor: u32) -> TensorPlan {
    let (layout, planes) = match dtype.value_width() {
        width if dtype.form() == ElementForm::Float => (LayoutId::FIELDS, width),
        1 => (LayoutId::WHOLE, 1),
        width => (LayoutId::BYTES, width),
    };
    // Planes of zeros are stored as such, in any coding; a value that differs is rare.
    let planes = vec![s4_engine::PlaneCoding::RANS8; planes];
    let plan = if dtype == of { Plan::same(layout, tensor) } else { Plan::cast(layout, tensor) };
    TensorPlan::new(plan, planes, chunk_log2(dtype))
}

/// The original of a copy: the values, and the records of their chunks as stored.
pub(crate) struct Original<'a> {
    pub(crate) values: Values<'a>,
    pub(crate) dtype: DType,
    pub(crate) records: &'a [ChunkRecord],
}

/// The inputs of copies, by index: values in host memory, or on the copy's device.
pub(crate) struct Originals<'a> {
    pub(crate) tensors: &'a [TensorValues<'a>],
    pub(crate) originals: Vec<Original<'a>>,
}

impl Originals<'_> {
    /// The chunks of the original that a chunk is predicted from: first byte, number of bytes, and
    /// stored checksum of each.
    fn parts(&self, tensor: usize, chunk: u64) -> Result<Vec<(u64, u64, u32)>, Failure> {
        let (own, original) = (self.tensors[tensor].dtype, &self.originals[tensor]);
        let (width, log2) = (original.dtype.value_width() as u64, chunk_log2(original.dtype));
        let (size, bytes) = (width << log2, original.values.bytes());
        // A chunk of a narrower tensor spans whole chunks of a wider one.
        let each = 1u64 << (chunk_log2(own) - log2);
        let all = chunk_count(bytes / width, log2);
        let part = |number: u64| {
            let record = original.records.get(number as usize).ok_or_else(|| {
                let source = Error::corrupt("input has no record").in_chunk(chunk);
                Failure::from(TensorError { tensor, source })
            })?;
            let first = number * size;
            Ok((first, size.min(bytes - first), record.crc_raw))
        };
        (chunk * each..((chunk + 1) * each).min(all)).map(part).collect()
    }
}

impl Inputs<Failure> for Originals<'_> {
    #[cfg(feature = "cuda")]
    fn memory(&self) -> Vec<s4_engine::DeviceMemory> {
        self.originals.iter().filter_map(|o| o.values.memory()).collect()
    }

    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        let parts = match self.originals[tensor].values {
            Values::Host(_) => self.parts(tensor, chunk).unwrap_or_default(),
            Values::Device(_) => vec![],
        };
        InputSize { bytes: parts.iter().map(|p| p.1).sum(), frames: 0 }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, Failure> {
        let input = |place: &(usize, u64)| match self.originals[place.0].values {
            Values::Host(_) => Ok(Input::Late),
            #[cfg(feature = "cuda")]
            Values::Device(memory) => {
                let &(tensor, chunk) = place;
                let parts = self.parts(tensor, chunk)?;
                let first = parts.first().map_or(0, |p| p.0);
                let bytes = parts.iter().map(|p| p.1).sum();
                let values = memory.part(first, bytes).map_err(Failure::Device)?;
                let parts = parts.into_iter().map(|p| (p.1, p.2)).collect();
                Ok(Input::Stored { values, parts })
            }
            #[cfg(not(feature = "cuda"))]
            Values::Device(_) => Ok(Input::Late),
        };
        chunks.iter().map(input).collect()
    }

    /// The values that a chunk is predicted from, copied once. Empty if they are no longer those
    /// that were stored, which are all that a reader has.
    fn read<'b>(
        &'b self,
        tensor: usize,
        chunk: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], Failure> {
        buffer.clear();
        let Values::Host(values) = self.originals[tensor].values else { return Ok(&[]) };
        for (first, len, crc) in self.parts(tensor, chunk)? {
            // Fits in `usize`: the values are in memory.
            let part = &values[first as usize..(first + len) as usize];
            if copy_once(part, buffer) != crc {
                return Ok(&[]);
            }
        }
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many values as are compared, so that all are.
    const VALUES: usize = (RUNS * RUN) as usize;

    fn wide(number: usize) -> Vec<u8> {
        let value = |i| ((number * VALUES + i) as f32 * 0.37).sin();
        (0..VALUES).flat_map(|i| value(i).to_le_bytes()).collect()
    }

    fn rounded(number: usize, changed: &[usize]) -> Vec<u8> {
        let mut out = vec![0; 2 * VALUES];
        Kernels::default().to_bf16(&wide(number), &mut out);
        changed.iter().for_each(|i| out[2 * i] ^= 1);
        out
    }

    #[test]
    fn copies_are_found_among_many_though_some_values_differ() {
        let spread = [0, 5, 10, 63];
        let cases = [
            (7, vec![], true),
            (0, vec![0, 1, 2, 3], true),
            // One in each of four of the runs that are searched.
            (31, vec![0, 4, 8, 12], true),
            (20, spread.to_vec(), true),
            (20, [&spread[..], &[17]].concat(), false),
            (3, vec![0, 4, 8, 12, 16], false),
        ];
        let mut data: Vec<_> = (0..40).map(wide).collect();
        data.extend(cases.iter().map(|(number, changed, _)| rounded(*number, changed)));
        let shape = [VALUES as u64];
        let dtype = |i| if i < 40 { DType::Float32 } else { DType::BFloat16 };
        let tensors: Vec<_> = data
            .iter()
            .enumerate()
            .map(|(i, d)| TensorValues::new(dtype(i), &shape, &d[..]))
            .collect();
        let candidates = Candidates::of(&tensors);
        assert_eq!(candidates.looks(&tensors).len(), tensors.len());
        let none = vec![None; tensors.len()];
        let found = candidates.copies(&tensors, &vec![""; tensors.len()], &data, &none);
        assert!(found[..40].iter().all(Option::is_none));
        for ((number, changed, is_copy), found) in cases.iter().zip(&found[40..]) {
            assert_eq!(*found, is_copy.then_some(*number), "{changed:?}");
        }
    }

    #[test]
    fn tensors_that_differ_elsewhere_are_not_equal() {
        for (dtype, most) in [(DType::Float32, MORE_MAY_DIFFER), (DType::Bool, MAY_DIFFER)] {
            let width = dtype.value_width();
            let look = |differ: usize| {
                let value = |i| if i < differ { vec![1; width] } else { vec![0; width] };
                (0..(MORE_RUNS * RUN) as usize).flat_map(value).collect::<Vec<u8>>()
            };
            // The last one equals the third, which does not equal the first.
            let looks = [0, most, most + 1, 0, 2 * most + 1].map(look);
            let found = Equal(vec![(dtype, (0..5).collect())]).firsts(5, &looks);
            assert_eq!(found, [None, Some(0), None, Some(0), Some(2)], "{dtype}");
        }
    }

    #[test]
    fn what_is_compared_again_is_scattered_over_the_tensor() {
        for values in [RUNS * RUN, 4096, 1 << 24] {
            let mut places: Vec<_> = compared_again(values).collect();
            assert!(places.iter().all(|r| r.end - r.start == RUN && r.end <= values));
            places.sort_unstable_by_key(|r| r.start);
            let gap = |pair: &[Range<u64>]| pair[1].start - pair[0].start;
            assert!(places.windows(2).map(gap).max() <= Some(values / 64), "{values}");
        }
    }

    #[test]
    fn originals_are_found_though_all_tensors_begin_alike() {
        let count = 5 * MOST_ALIKE;
        let begin = |mut values: Vec<u8>, bytes| {
            values[..bytes].fill(0);
            values
        };
        let shape = [VALUES as u64];
        // The first runs are the same in all; then all runs but four; then all values.
        for (zeros, found) in [(4, count), (44, count), (48, count), (VALUES, 0)] {
            let mut data: Vec<_> = (0..count).map(|i| begin(wide(i), 4 * zeros)).collect();
            data.extend((0..count).map(|i| begin(rounded(i, &[]), 2 * zeros)));
            let dtype = |i| if i < count { DType::Float32 } else { DType::BFloat16 };
            let values = |(i, d)| TensorValues::new(dtype(i), &shape, d);
            let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let tensors: Vec<_> = data.iter().copied().enumerate().map(values).collect();
            let looks: Vec<_> = data.iter().map(|d| d.to_vec()).collect();
            let candidates = Candidates::of(&tensors);
            let none = vec![None; 2 * count];
            let out = candidates.copies(&tensors, &vec![""; 2 * count], &looks, &none);
            let right = (0..count).filter(|i| out[count + i] == Some(*i)).count();
            assert_eq!(right, found, "{zeros}");
            let rounded = Rounded::of(&candidates.by_values[&shape[0]][0], DType::BFloat16, &looks);
            let alike = rounded.alike(&looks[2 * count - 1], Some(count - 1));
            assert!(alike.contains(&(count - 1)), "the master is always looked at");
            assert!(alike.len() <= (MAY_DIFFER + 1) * MOST_ALIKE + 1);
        }
    }
}
