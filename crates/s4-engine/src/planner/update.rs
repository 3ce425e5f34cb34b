//! How contexts `update` are derived from moments, fitted to a sample.

use s4_codec_cpu::rans::entropy_of;
use s4_format::{DType, Error, Result};
use s4_planes::Width;
use s4_predict::update::{Update, float_bits};

use crate::CpuEngine;
use crate::scratch::width_of;

/// How many values of the sample are looked at, at most.
const LOOKED_AT: usize = 2048;
/// Floors to try besides none, in 128ths of an octave above the median of updates. The older the
/// parent is, the less small moments tell.
const FLOORS: [i32; 4] = [-64, 0, 64, 128];
/// Classes to try as the one that one value in [`FEW`] exceeds.
const TOPS: [i32; 2] = [11, 14];
const FEW: usize = 50;
/// Units in a class.
const CLASS: i32 = 64;

/// A tensor's moment at the positions of its sample.
#[derive(Debug, Clone, Copy)]
pub struct MomentSample<'a> {
    /// Index of the moment in the tensor table.
    pub tensor: u32,
    /// Type of its elements.
    pub dtype: DType,
    /// Its values at [`crate::parent_probes`] of the tensor, one run after the other.
    pub values: &'a [u8],
}

impl CpuEngine {
    /// Negates differences of `dtype` from a parent's values as the moments say. `None` if moments
    /// of these dtypes tell nothing.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    pub(super) fn turn(
        &self,
        dtype: DType,
        moments: &[MomentSample<'_>; 2],
        differences: &mut [u8],
    ) -> Result<Option<Update>> {
        let dtypes = moments.each_ref().map(|m| m.dtype);
        if [dtype, dtypes[0], dtypes[1]].into_iter().any(|dtype| float_bits(dtype).is_none()) {
            return Ok(None);
        }
        let update = Update { floor: i16::MIN, offset: 0, moments: dtypes };
        update.turn(
            self.kernels,
            width_of(dtype.value_width())?,
            differences,
            moments[0].values,
        )?;
        Ok(Some(update))
    }

    /// The best way to derive contexts for differences that were negated as these moments say.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    pub(super) fn fit_update(
        &self,
        update: Update,
        (dtype, parent): (DType, &[u8]),
        moments: &[MomentSample<'_>; 2],
        differences: &[u8],
    ) -> Result<Update> {
        let width = width_of(dtype.value_width())?;
        let bits = [dtype, update.moments[0], update.moments[1]].map(float_bits);
        let mut sizes = [vec![], vec![], vec![]];
        let values = [parent, moments[0].values, moments[1].values];
        for ((sizes, bits), values) in sizes.iter_mut().zip(bits.into_iter().flatten()).zip(values)
        {
            sizes.resize(differences.len() / width.bytes(), 0);
            if values.len() != sizes.len() * bits.width().bytes() {
                return Err(Error::corrupt("a sample of other values than its moments'"));
            }
            self.kernels.float_sizes(bits, values, sizes);
        }
        Ok(cheapest(update, &Looked::at(sizes, width, differences)))
    }
}

/// The values of a sample that are looked at: sizes in 128ths of an octave.
struct Looked {
    updates: Vec<i32>,
    weights: Vec<i32>,
    /// Bits that each difference takes.
    lengths: Vec<u8>,
    /// The most of them.
    longest: usize,
}

impl Looked {
    fn at([weights, first, second]: [Vec<u16>; 3], width: Width, differences: &[u8]) -> Self {
        let step = weights.len().div_ceil(LOOKED_AT).max(1);
        let some = |sizes: Vec<u16>| sizes.into_iter().step_by(step).map(i32::from);
        let updates = some(first).zip(some(second)).map(|(m, v)| m - (v >> 1)).collect();
        let weights = some(weights).map(|w| w & 0x7f80).collect();
        let length = |u: &[u8]| {
            let mut bytes = [0; 8];
            bytes[..u.len()].copy_from_slice(u);
            (u64::BITS - u64::from_le_bytes(bytes).leading_zeros()) as u8
        };
        let lengths = differences.chunks_exact(width.bytes()).step_by(step).map(length);
        let lengths: Vec<_> = lengths.collect();
        let longest = lengths.iter().copied().max().map_or(0, usize::from);
        Self { updates, weights, lengths, longest }
    }
}

/// The floor and offset whose classes tell most about the lengths of the differences.
fn cheapest(update: Update, looked: &Looked) -> Update {
    let Looked { updates, weights, lengths, longest } = looked;
    if updates.is_empty() {
        return update;
    }
    let mut sorted = updates.clone();
    let median = *sorted.select_nth_unstable(updates.len() / 2).1;
    let floors = std::iter::once(i32::from(i16::MIN)).chain(FLOORS.map(|above| median + above));
    let (mut least, mut best) = (u64::MAX, update);
    for floor in floors {
        let over = |(update, weight): (&i32, &i32)| (*update).max(floor) - weight;
        let over: Vec<i32> = updates.iter().zip(weights).map(over).collect();
        sorted.clone_from(&over);
        let high = *sorted.select_nth_unstable(over.len() - 1 - over.len() / FEW).1;
        for top in TOPS {
            // A value that does not fit is beyond any class.
            let short = |x: i32| x.clamp(i16::MIN.into(), i16::MAX.into()) as i16;
            let candidate =
                Update { floor: short(floor), offset: short(top * CLASS - high), ..update };
            // A length is at most 64 bits.
            let mut counts = [[0u16; 65]; 16];
            for (over, length) in over.iter().zip(lengths) {
                let class = (over + i32::from(candidate.offset)) / CLASS;
                counts[class.clamp(0, 15) as usize][usize::from(*length)] += 1;
            }
            let bits = counts.iter().map(|counts| entropy_of(&counts[..=*longest])).sum();
            if bits < least {
                (least, best) = (bits, candidate);
            }
        }
    }
    best
}
