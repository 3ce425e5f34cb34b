//! The moments that predictor `step` and contexts `update` are derived from: tensors of the same checkpoint, stored first.

use std::ops::Range;

use s4_format::index::chunk_count;
use s4_format::side::{Side, SideKind};
use s4_format::{ChunkRecord, ContextsId, DType, Error, Plan, Result};

use s4_predict::Step;
use s4_predict::update::{Update, float_bits};

use crate::planner::{MomentSample, allowed};
use crate::{Preset, Values, chunk_log2, copy_once, parent_probes};

/// A moment of a tensor, with as many values as the tensor, and the records of its stored values.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    /// Its index in the tensor table.
    pub tensor: u32,
    /// Type of its elements.
    pub dtype: DType,
    /// Its values. If they changed since they were stored, chunks that need them are stored plain.
    pub values: Values<'a>,
    /// The records of its chunks, which have the length that the engines give them. Planning does not look at them.
    pub records: &'a [ChunkRecord],
}

/// Bytes that reading a tensor together with its moments may take, as a multiple of the tensor's own.
const MOST_READ: usize = 4;

/// Whether a tensor of dtype `weight` may be predicted from moments of these dtypes. All
/// must be floats, and together at most four times the bytes of the tensor.
pub fn may_use_moments(preset: Preset, weight: DType, moments: &[DType]) -> bool {
    let dtypes = || std::iter::once(&weight).chain(moments);
    let bytes: usize = dtypes().map(|d| d.value_width()).sum();
    let floats = dtypes().all(|d| float_bits(*d).is_some());
    allowed(preset).update && floats && bytes <= MOST_READ * weight.value_width()
}

/// The use that a plan makes of its tensor's moments, with the parameters in the tensor's side data.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MomentUse {
    /// The prediction is the optimizer's step.
    Step(Step),
    /// Contexts and signs are derived from them.
    Contexts(Update),
}

impl MomentUse {
    /// Reads side data; `None` if the plan uses no moments.
    ///
    /// # Errors
    /// `Corrupt` if it is not valid, or the plan lists more or fewer moments than it says.
    pub(crate) fn of(plan: &Plan, side: &Side) -> Result<Option<Self>> {
        if !plan.has_moments() {
            return Ok(None);
        }
        let by = match plan.contexts {
            ContextsId::UPDATE => Self::Contexts(Update::parse(side.get(SideKind::CONTEXTS))?),
            _ => Self::Step(Step::parse(side.get(SideKind::STEP))?),
        };
        if plan.moments().len() != 1 + usize::from(by.dtypes().1.is_some()) {
            return Err(Error::corrupt(
                "number of moments in the plan does not match its side data",
            ));
        }
        Ok(Some(by))
    }

    /// The dtype of the first moment, and of the second if there is one.
    pub(crate) fn dtypes(&self) -> (DType, Option<DType>) {
        match self {
            Self::Step(step) => (step.first, step.second),
            Self::Contexts(update) => (update.first, update.second),
        }
    }
}

/// The dtypes of the moments that a tensor's predictions or contexts are derived from, by its side data: of the first,
/// and of the second if there is one. The plan lists as many. `None` if the plan uses no moments.
///
/// # Errors
/// `Corrupt` if the side data does not say, or the plan lists others.
pub fn moment_dtypes(plan: &Plan, side: &Side) -> Result<Option<(DType, Option<DType>)>> {
    Ok(MomentUse::of(plan, side)?.map(|by| by.dtypes()))
}

/// Whole chunks of a moment that cover some of its values, with the checksum of each as it was stored.
pub(crate) struct Cover {
    /// Each chunk's bytes within the tensor.
    pub(crate) parts: Vec<(Range<u64>, u32)>,
    /// The wanted bytes, relative to the start of the first part.
    pub(crate) wanted: Range<usize>,
}

impl Moment<'_> {
    /// The chunks that hold `count` values from index `first` on.
    ///
    /// # Errors
    /// `Corrupt` if the moment has no such values or records.
    pub(crate) fn cover(&self, first: u64, count: u64) -> Result<Cover> {
        let (width, log2) = (self.dtype.value_width() as u64, chunk_log2(self.dtype));
        let bytes = self.values.bytes();
        let all = chunk_count(bytes / width, log2);
        let none = || Error::corrupt("weights and moment differ in number of values");
        let end = first.checked_add(count).filter(|end| *end <= bytes / width).ok_or_else(none)?;
        let part = |chunk: u64| {
            let record = self.records.get(chunk as usize).ok_or_else(none)?;
            let from = (chunk << log2) * width;
            Ok((from..(from + (width << log2)).min(bytes), record.crc_raw))
        };
        let parts = (first >> log2..end.div_ceil(1 << log2).min(all)).map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let start = parts.first().map_or(0, |p| p.0.start);
        // Relative to the first chunk, with both ends cut off.
        let wanted = (first * width - start) as usize..(end * width - start) as usize;
        Ok(Cover { parts, wanted })
    }

    /// Copies `count` values in host memory from index `first` on to `buffer`, and returns where
    /// they lie in it. `None`: they have changed since they were stored, and a reader has only the stored ones.
    ///
    /// # Errors
    /// Those of [`Moment::cover`]; `Unsupported` if the values are in device memory.
    pub(crate) fn read(
        &self,
        (first, count): (u64, u64),
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Range<usize>>> {
        let Values::Host(values) = self.values else { return Err(on_device()) };
        let Cover { parts, wanted } = self.cover(first, count)?;
        buffer.clear();
        for (bytes, crc) in parts {
            // The casts are lossless: the values are in memory.
            if copy_once(&values[bytes.start as usize..bytes.end as usize], buffer) != crc {
                return Ok(None);
            }
        }
        Ok(Some(wanted))
    }

    /// The values at the positions where a tensor of `dtype` is compared with its parent, one run after the other.
    ///
    /// # Errors
    /// `Unsupported` if they are in device memory.
    pub(crate) fn sample(&self, dtype: DType) -> Result<Vec<u8>> {
        let Values::Host(values) = self.values else { return Err(on_device()) };
        let mut out = vec![];
        for run in self.probes(dtype) {
            out.extend_from_slice(&values[run.start as usize..run.end as usize]);
        }
        Ok(out)
    }

    /// The bytes of the moment that are sampled for a tensor of `dtype`.
    pub(crate) fn probes(&self, dtype: DType) -> impl Iterator<Item = Range<u64>> {
        let width = self.dtype.value_width() as u64;
        let runs = parent_probes(dtype, self.values.bytes() / width);
        runs.into_iter().map(move |run| run.start * width..run.end * width)
    }

    /// The sample for the planner; `values` are those at [`Moment::probes`].
    pub(crate) fn with_sample<'b>(&self, values: &'b [u8]) -> MomentSample<'b> {
        MomentSample { tensor: self.tensor, dtype: self.dtype, values }
    }
}

fn on_device() -> Error {
    Error::unsupported("the CPU cannot read moments in device memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use s4_format::crc32c;

    #[test]
    fn moments_are_used_where_reading_takes_at_most_four_times_the_bytes() {
        let fits = |weight, first, second| may_use_moments(Preset::Small, weight, &[first, second]);
        let (b, h, f) = (DType::BFloat16, DType::Float16, DType::Float32);
        for moments in [[b, b], [h, b], [b, f], [f, f]] {
            assert!(fits(f, moments[0], moments[1]), "{moments:?}");
            let (first, second) = (moments[0], moments[1]);
            assert_eq!(fits(b, first, second), moments != [f, f], "{moments:?}");
            assert_eq!(fits(h, second, first), moments != [f, f], "{moments:?}");
        }
        for other in [DType::Float64, DType::UInt16, DType::Complex64, DType::Float8E4M3Fn] {
            assert!(!fits(other, b, b) && !fits(f, other, f) && !fits(f, f, other), "{other}");
        }
        assert!(may_use_moments(Preset::Balanced, f, &[f, f]));
        assert!(!may_use_moments(Preset::Fast, f, &[f, f]));
        assert!(may_use_moments(Preset::Small, b, &[f]) && !may_use_moments(Preset::Fast, b, &[f]));
    }

    #[test]
    fn plans_list_the_moments_that_side_data_says() {
        use s4_format::{Digest, LayoutId};
        use s4_planes::StepFactors;
        let factors = StepFactors { keep: 1.0, rate: 0.1, epsilon: 1.0 };
        let (first, f16) = (DType::Float32, Some(DType::Float16));
        for (listed, second, fits) in
            [(1, None, true), (2, f16, true), (2, None, false), (1, f16, false), (0, None, false)]
        {
            let step = Step { factors, first, second };
            let mut side = Side::default();
            side.push(SideKind::STEP, step.to_bytes()).unwrap();
            let plan = Plan::step(LayoutId::BYTES, Digest::of(b"parent"), 3, &[4, 5][..listed]);
            let found = moment_dtypes(&plan, &side);
            match fits {
                true => assert_eq!(found, Ok(Some((first, second)))),
                false => assert!(matches!(found, Err(Error::Corrupt { .. })), "{listed}"),
            }
        }
    }

    #[test]
    fn parts_of_chunks_are_read_if_the_chunks_are_what_was_stored() {
        // Two chunks of bf16 and a bit.
        let n = (2u64 << 17) + 5;
        let mut values: Vec<u8> = (0..2 * n).map(|i| (i * 7 + i / 251) as u8).collect();
        let record = |chunk: &[u8]| ChunkRecord {
            offset: 0,
            object: 0,
            len: 0,
            plain: false,
            crc_encoded: 0,
            crc_raw: crc32c(chunk),
        };
        let records: Vec<_> = values.chunks(2 << 17).map(record).collect();
        let check = |values: &[u8], first: u64, count: u64| {
            let dtype = DType::BFloat16;
            let moment =
                Moment { tensor: 3, dtype, values: Values::Host(values), records: &records };
            let mut buffer = vec![1; 7];
            let read = moment.read((first, count), &mut buffer)?;
            Ok::<_, Error>(read.map(|wanted| buffer[wanted].to_vec()))
        };
        for (first, count) in [(0, 1 << 16), (1 << 16, 1 << 16), (1 << 17, 1 << 17), (2 << 17, 5)] {
            let wanted = &values[2 * first as usize..2 * (first + count) as usize];
            assert!(check(&values, first, count) == Ok(Some(wanted.to_vec())), "{first} {count}");
        }
        assert!(matches!(check(&values, 2 << 17, 6), Err(Error::Corrupt { .. })));
        assert!(matches!(check(&values, u64::MAX, 2), Err(Error::Corrupt { .. })));
        values[5] ^= 1;
        // A chunk that changed is refused even if the wanted part did not.
        assert!(check(&values, 1 << 16, 1 << 16) == Ok(None));
        assert!(matches!(check(&values, 1 << 17, 1 << 17), Ok(Some(_))));
    }
}
