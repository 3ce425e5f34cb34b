//! Contexts from the optimizer's update.
//!
//! AdamW and similar optimizers change a weight by about its first moment over the root of its
//! second. In units of the weight's last place that is `|m| / (sqrt(v) * 2^e)`. The bits of a float
//! below its sign, taken as an integer, are nearly its logarithm, so a difference of such integers
//! tells how large the change will be, and the first moment's sign tells its direction. SGD with momentum and Lion have
//! no second moment: it counts as 0, whose bits are 0, too.
//!
//! # Side data
//! 8 bytes: `floor` and `offset` (`i16` each), the codes of the moments' dtypes (a byte each; 0 if there is no second
//! moment), two zeros. With `mag(x)`, the bits of a value below its sign as 128ths of an octave
//! ([`s4_planes::FloatBits`]), the **class** of a weight `p` of the parent with the moments `m` and `v` is
//!
//! ```text
//! min(15, max(0, (max(mag(m) - (mag(v) >> 1), floor) - (mag(p) & 7f80) + offset) >> 6))
//! ```
//!
//! All planes of layout `bytes` have 16 tables, and the class is the context of every symbol of a value.

use s4_format::side::SideKind;
use s4_format::{DType, Error, LayoutId, Result};
use s4_planes::{FloatBits, Kernels, Width};

use crate::{ContextModel, Known};

/// Classes of updates, and tables of a plane.
const CLASSES: usize = 16;

/// Contexts `update`: see [the module](self).
#[derive(Debug, Clone, Copy, Default)]
pub struct Updates;

/// The parameters that divide updates into classes, and the dtypes of the moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// The smallest size that an update counts as, in 128ths of an octave.
    pub floor: i16,
    /// Added to an update's size before it is divided into classes from 0 on, in 128ths of an
    /// octave.
    pub offset: i16,
    /// Dtype of the first moment.
    pub first: DType,
    /// Dtype of the second moment, if there is one.
    pub second: Option<DType>,
}

/// The code of the dtype of a second moment if there is none.
const NO_MOMENT: u8 = 0;

/// The dtypes of the moments from their codes in side data; `None` if a moment cannot have such a dtype.
pub(crate) fn moments_of([first, second]: [u8; 2]) -> Option<(DType, Option<DType>)> {
    let dtype = |code| DType::from_code(code).ok().filter(|d| float_bits(*d).is_some());
    let second = if second == NO_MOMENT { None } else { Some(dtype(second)?) };
    Some((dtype(first)?, second))
}

/// The codes of the dtypes of the moments.
pub(crate) fn moment_codes(first: DType, second: Option<DType>) -> [u8; 2] {
    [first as u8, second.map_or(NO_MOMENT, |dtype| dtype as u8)]
}

/// The bit fields of a dtype; `None` if weights and moments cannot have this dtype.
pub fn float_bits(dtype: DType) -> Option<FloatBits> {
    match dtype {
        DType::BFloat16 => Some(FloatBits::BFloat16),
        DType::Float16 => Some(FloatBits::Float16),
        DType::Float32 => Some(FloatBits::Float32),
        _ => None,
    }
}

fn bits(dtype: DType) -> Result<FloatBits> {
    let what = || Error::corrupt(format!("contexts `update` do not support dtype {dtype}"));
    float_bits(dtype).ok_or_else(what)
}

impl Update {
    /// Reads side data.
    ///
    /// # Errors
    /// `Corrupt` if `side` is not the side data of these contexts.
    pub fn parse(side: &[u8]) -> Result<Self> {
        let none = || Error::corrupt("invalid side data of contexts `update`");
        let &[a, b, c, d, first, second, 0, 0] = side else { return Err(none()) };
        let (first, second) = moments_of([first, second]).ok_or_else(none)?;
        let (floor, offset) = (i16::from_le_bytes([a, b]), i16::from_le_bytes([c, d]));
        Ok(Self { floor, offset, first, second })
    }

    /// Writes side data.
    pub fn to_bytes(self) -> Vec<u8> {
        let [first, second] = moment_codes(self.first, self.second);
        let mut out = [self.floor.to_le_bytes(), self.offset.to_le_bytes()].concat();
        out.extend([first, second, 0, 0]);
        out
    }

    /// Whether the moments of another have the same dtypes.
    pub fn is_of_moments(&self, other: &Self) -> bool {
        (self.first, self.second) == (other.first, other.second)
    }

    /// Writes the class of each of the parent's values, which are of `dtype`, from the moments. Without a second moment,
    /// the last values are empty.
    ///
    /// # Errors
    /// `Corrupt` if the dtype has no such contexts, or the numbers of values differ.
    pub fn classes(
        &self,
        kernels: Kernels,
        dtype: DType,
        [weights, first, second]: [&[u8]; 3],
        out: &mut [u8],
    ) -> Result<()> {
        // Without a second moment, any type will do.
        let second_bits = bits(self.second.unwrap_or(self.first))?;
        let values = [(bits(dtype)?, weights), (bits(self.first)?, first), (second_bits, second)];
        let counts = [out.len(), out.len(), if self.second.is_some() { out.len() } else { 0 }];
        let mut all = values.iter().zip(counts);
        if !all.all(|((bits, values), count)| values.len() == count * bits.width().bytes()) {
            return Err(Error::corrupt("contexts and inputs differ in number of values"));
        }
        kernels.update_classes(values, (self.floor, self.offset), out);
        Ok(())
    }

    /// Negates differences of values of `width` where the first moment is positive, in place.
    ///
    /// # Errors
    /// As [`Update::classes`].
    pub fn turn(
        &self,
        kernels: Kernels,
        width: Width,
        differences: &mut [u8],
        first: &[u8],
    ) -> Result<()> {
        let other = bits(self.first)?.width();
        if differences.len() / width.bytes() != first.len() / other.bytes() {
            return Err(Error::corrupt("differences and inputs differ in number of values"));
        }
        kernels.negate_where_positive(width, differences, (other, first));
        Ok(())
    }
}

impl ContextModel for Updates {
    fn tables(&self, layout: LayoutId, _: usize) -> usize {
        if layout == LayoutId::BYTES { CLASSES } else { 1 }
    }

    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()> {
        let update = Update::parse(known.tensor.side.get(SideKind::CONTEXTS))?;
        let values = match (known.inputs, update.second) {
            (&[weights, first], None) => [weights, first, &[]],
            (&[weights, first, second], Some(_)) => [weights, first, second],
            _ => return Err(Error::corrupt("wrong number of inputs for contexts `update`")),
        };
        update.classes(known.kernels, known.tensor.dtype, values, out)
    }

    fn depends_on_planes(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn side_data_is_read_back_and_anything_else_refused() {
        for first in [DType::BFloat16, DType::Float16, DType::Float32] {
            for second in [None, Some(DType::BFloat16), Some(DType::Float32)] {
                let update = Update { floor: -300, offset: 12345, first, second };
                assert_eq!(Update::parse(&update.to_bytes()), Ok(update));
            }
        }
        let good = [0xd4, 0xfe, 0x39, 0x30, 3, 1, 0, 0];
        assert!(Update::parse(&good).is_ok());
        for (at, byte) in [(4, 4), (4, 0), (4, 200), (5, 4), (5, 11), (6, 1), (7, 1)] {
            let mut bad = good;
            bad[at] = byte;
            assert!(matches!(Update::parse(&bad), Err(Error::Corrupt { .. })), "{at} {byte}");
        }
        assert!(Update::parse(&good[..7]).is_err() && Update::parse(&[]).is_err());
        assert!(Update::parse(&[&good[..], &[0; 8]].concat()).is_err());
    }

    #[test]
    fn inputs_of_other_sizes_or_dtypes_are_refused() {
        let (first, second) = (DType::Float32, Some(DType::BFloat16));
        let update = Update { floor: 0, offset: 0, first, second };
        let (kernels, bytes) = (Kernels::default(), [0u8; 40]);
        let mut out = [0; 10];
        let mut by = |update: Update, dtype, sizes: [usize; 3]| {
            update.classes(kernels, dtype, sizes.map(|n| &bytes[..n]), &mut out)
        };
        let single = Update { second: None, ..update };
        assert_eq!(by(single, DType::BFloat16, [20, 40, 0]), Ok(()));
        assert!(by(single, DType::BFloat16, [20, 40, 20]).is_err());
        assert!(by(update, DType::BFloat16, [20, 40, 0]).is_err());
        let mut classes = |dtype, sizes| by(update, dtype, sizes);
        assert_eq!(classes(DType::BFloat16, [20, 40, 20]), Ok(()));
        assert_eq!(classes(DType::Float32, [40, 40, 20]), Ok(()));
        for (dtype, sizes) in [
            (DType::BFloat16, [20, 20, 20]),
            (DType::BFloat16, [20, 40, 18]),
            (DType::Float32, [20, 40, 20]),
            (DType::Float64, [40, 40, 20]),
        ] {
            assert!(matches!(classes(dtype, sizes), Err(Error::Corrupt { .. })), "{sizes:?}");
        }
        let mut differences = [0; 20];
        assert!(update.turn(kernels, Width::B2, &mut differences, &bytes).is_ok());
        assert!(update.turn(kernels, Width::B2, &mut differences, &bytes[..20]).is_err());
    }
}
