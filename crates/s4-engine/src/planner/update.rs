//! The parameters that derive contexts `update` from moments, fitted to a sample.

use s4_codec_cpu::rans::entropy_of;
use s4_format::{DType, Error, Result};
use s4_planes::Width;
use s4_predict::update::{Update, float_bits};

use crate::CpuEngine;
use crate::scratch::width_of;

/// The most values of the sample that are examined.
const LOOKED_AT: usize = 2048;
/// Floors to try besides none, in 128ths of an octave above the median of updates. The older the
/// parent is, the less small moments tell.
const FLOORS: [i32; 4] = [-64, 0, 64, 128];
/// Candidates for the class that one value in [`FEW`] exceeds.
const TOPS: [i32; 2] = [11, 14];
const FEW: usize = 50;
/// Units in a class.
const CLASS: i32 = 64;

/// The parameters that a tensor's contexts share with those of similar tensors, whose updates have other sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// The floor, above the median of updates; `None`: there is none.
    floor: Option<i32>,
    /// One of [`TOPS`].
    top: i32,
}

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
    /// Negates differences of `dtype` from a parent's values as the moments say. `None` if there are no moments, or those
    /// of these dtypes tell nothing.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    pub(super) fn turn(
        &self,
        dtype: DType,
        moments: &[MomentSample<'_>],
        differences: &mut [u8],
    ) -> Result<Option<Update>> {
        let Some((first, others)) = moments.split_first() else { return Ok(None) };
        let mut dtypes = std::iter::once(dtype).chain(moments.iter().map(|m| m.dtype));
        if dtypes.any(|dtype| float_bits(dtype).is_none()) {
            return Ok(None);
        }
        let second = others.first().map(|m| m.dtype);
        let update = Update { floor: i16::MIN, offset: 0, first: first.dtype, second };
        update.turn(self.kernels, width_of(dtype.value_width())?, differences, first.values)?;
        Ok(Some(update))
    }

    /// The best way to derive contexts for differences that were negated as these moments say, among all or of the
    /// given shape.
    ///
    /// # Errors
    /// `Corrupt` if the numbers of values differ.
    pub(super) fn fit_update(
        &self,
        update: Update,
        (dtype, parent): (DType, &[u8]),
        moments: &[MomentSample<'_>],
        differences: &[u8],
        shape: Option<Shape>,
    ) -> Result<(Update, Shape)> {
        let width = width_of(dtype.value_width())?;
        // Without a second moment, its sizes remain zeros.
        let mut sizes = [(); 3].map(|()| vec![0; differences.len() / width.bytes()]);
        let given = std::iter::once((dtype, parent));
        let given = given.chain(moments.iter().map(|m| (m.dtype, m.values)));
        for (sizes, (dtype, values)) in sizes.iter_mut().zip(given) {
            let Some(bits) = float_bits(dtype) else { continue };
            if values.len() != sizes.len() * bits.width().bytes() {
                return Err(Error::corrupt("sample and moments differ in number of values"));
            }
            self.kernels.float_sizes(bits, values, sizes);
        }
        let looked = Looked::at(sizes, width, differences);
        Ok(match shape {
            Some(shape) => (looked.of_shape(update, shape), shape),
            None => cheapest(update, &looked),
        })
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

impl Looked {
    fn median(&self) -> i32 {
        nth(&mut self.updates.clone(), self.updates.len() / 2)
    }

    /// The distance of each update above its weight if none is below a floor, and the distance that one in [`FEW`]
    /// exceeds.
    fn above_weights(&self, floor: i32) -> (Vec<i32>, i32) {
        let over = |(update, weight): (&i32, &i32)| (*update).max(floor) - weight;
        let over: Vec<i32> = self.updates.iter().zip(&self.weights).map(over).collect();
        let high = nth(&mut over.clone(), over.len().saturating_sub(1 + over.len() / FEW));
        (over, high)
    }

    /// Contexts of a shape.
    fn of_shape(&self, update: Update, Shape { floor, top }: Shape) -> Update {
        let floor = floor_of(floor, self.median());
        update_of(update, floor, top, self.above_weights(floor).1)
    }
}

/// The number at a position of a sorted list; 0 beyond its end.
fn nth(numbers: &mut [i32], position: usize) -> i32 {
    if position < numbers.len() { *numbers.select_nth_unstable(position).1 } else { 0 }
}

/// A floor so far above the median.
fn floor_of(above: Option<i32>, median: i32) -> i32 {
    above.map_or(i16::MIN.into(), |above| median + above)
}

fn update_of(update: Update, floor: i32, top: i32, high: i32) -> Update {
    // A value that does not fit is beyond any class.
    let short = |x: i32| x.clamp(i16::MIN.into(), i16::MAX.into()) as i16;
    Update { floor: short(floor), offset: short(top * CLASS - high), ..update }
}

/// The floor and offset whose classes tell most about the lengths of the differences.
fn cheapest(update: Update, looked: &Looked) -> (Update, Shape) {
    let Looked { lengths, longest, .. } = looked;
    let median = looked.median();
    let (mut least, mut best) = (u64::MAX, (update, Shape { floor: None, top: TOPS[0] }));
    for above in std::iter::once(None).chain(FLOORS.map(Some)) {
        let floor = floor_of(above, median);
        let (over, high) = looked.above_weights(floor);
        for top in TOPS {
            let candidate = update_of(update, floor, top, high);
            // A length is at most 64 bits.
            let mut counts = [[0u16; 65]; 16];
            for (over, length) in over.iter().zip(lengths) {
                let class = (over + i32::from(candidate.offset)) / CLASS;
                counts[class.clamp(0, 15) as usize][usize::from(*length)] += 1;
            }
            let bits = counts.iter().map(|counts| entropy_of(&counts[..=*longest])).sum();
            if bits < least {
                (least, best) = (bits, (candidate, Shape { floor: above, top }));
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use s4_format::DType;

    use super::*;

    #[test]
    fn a_shape_fits_tensors_whose_updates_have_other_sizes() {
        let noise = |i: i32| ((i.wrapping_mul(0x2c1b_3c6d) >> 9) & 0x1ff) - 0x100;
        let looked = |size: i32| {
            let updates: Vec<_> = (0..2000).map(|i| size + noise(i)).collect();
            let weights: Vec<_> = (0..2000).map(|i| noise(i + 5000) & !0x7f).collect();
            let over = updates.iter().zip(&weights).map(|(u, w)| (u - w - size + 600) / 64);
            let lengths: Vec<_> = over.map(|bits| bits.clamp(0, 30) as u8).collect();
            Looked { updates, weights, lengths, longest: 30 }
        };
        let (first, second) = (DType::Float32, Some(DType::Float32));
        let any = Update { floor: i16::MIN, offset: 0, first, second };
        let (found, shape) = cheapest(any, &looked(-900));
        assert_eq!(looked(-900).of_shape(any, shape), found);
        let larger = looked(-400).of_shape(any, shape);
        assert_eq!(larger.offset, found.offset - 500);
        assert_eq!(cheapest(any, &looked(-400)), (larger, shape));
    }
}
