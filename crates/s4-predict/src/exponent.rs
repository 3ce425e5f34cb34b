//! Contexts from the exponents of an input's values.
//!
//! Weights change by about the same amount, whatever their size. By how many units in the last
//! place a weight changes therefore depends on its exponent, which is usually that of the value it
//! is predicted from.
//!
//! # Side data
//! 8 bytes: `top`, `shift` (at most 7), six zeros. The **class** of a value `p` of `W` bytes is
//!
//! ```text
//! min(7, max(0, top - (p >> (8W - 9)) mod 256) >> shift)
//! ```
//!
//! | plane | tables | context |
//! |---|---|---|
//! | of exponents: 0 of `fields`, 1 of `fields-sign` | 8 | the class of the input's value |
//! | the next one: 1 of `fields`, 2 of `fields-sign` | 10 | the same where the exponent's byte is 0; 8 where it is 1, 9 where it is more |
//! | others | 1 | 0 |

use s4_format::side::SideKind;
use s4_format::{DType, Error, LayoutId, Result};
use s4_planes::Width;

use crate::{ContextModel, Known};

/// Classes of exponents.
const CLASSES: u8 = 8;
/// Contexts of the next plane where the exponent's symbol is 1, and where it is more.
const NEXT: (u8, u8) = (CLASSES, CLASSES + 1);

/// Contexts `exponent`: see [the module](self).
#[derive(Debug, Clone, Copy, Default)]
pub struct Exponents;

/// The index of the plane of exponents.
fn exponents(layout: LayoutId) -> Option<usize> {
    match layout {
        LayoutId::FIELDS => Some(0),
        LayoutId::FIELDS_SIGN => Some(1),
        _ => None,
    }
}

impl ContextModel for Exponents {
    fn tables(&self, layout: LayoutId, plane: usize) -> usize {
        match exponents(layout) {
            Some(e) if plane == e => usize::from(CLASSES),
            Some(e) if plane == e + 1 => usize::from(NEXT.1) + 1,
            _ => 1,
        }
    }

    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()> {
        let (top, shift) = parse(known.tensor.side.get(SideKind::CONTEXTS))?;
        let bytes = known.tensor.dtype.value_width();
        let width = Width::from_bytes(bytes)
            .ok_or_else(|| Error::unsupported(format!("values of {bytes} bytes")))?;
        let none = || Error::corrupt("contexts and input differ in number of values");
        let input = known.inputs.first().filter(|i| i.len() == out.len() * bytes);
        let with = (top, shift, CLASSES - 1);
        known.kernels.classes(width, with, input.ok_or_else(none)?, out);
        let plane = known.planes.len();
        if let Some(e) = exponents(known.layout).filter(|e| *e + 1 == plane) {
            let plane = known.planes.get(e).filter(|p| p.len() == out.len()).ok_or_else(none)?;
            known.kernels.replace_classes(plane, NEXT, out);
        }
        Ok(())
    }
}

/// Reads side data: `top` and `shift`.
///
/// # Errors
/// `Corrupt` if `side` is not the side data of these contexts.
pub fn parse(side: &[u8]) -> Result<(u8, u32)> {
    match side {
        [top, shift @ 0..8, 0, 0, 0, 0, 0, 0] => Ok((*top, u32::from(*shift))),
        _ => Err(Error::corrupt("invalid side data of contexts `exponent`")),
    }
}

/// Side data for inputs whose values are like `sample`: `top` is the largest exponent that more
/// than one in 256 values have or exceed.
pub fn side_data(dtype: DType, sample: &[u8]) -> Vec<u8> {
    let width = dtype.value_width();
    let mut counts = [0u64; 256];
    for value in sample.chunks_exact(width) {
        let below = if width > 1 { value[width - 2] } else { 0 };
        counts[usize::from(value[width - 1] << 1 | below >> 7)] += 1;
    }
    let (mut above, few) = (0, (sample.len() / width) as u64 / 256);
    let top = (0..=255u8).rev().find(|e| {
        above += counts[usize::from(*e)];
        above > few
    });
    // In binary16, the low 3 of these 8 bits are mantissa.
    let shift = if dtype == DType::Float16 { 3 } else { 0 };
    vec![top.unwrap_or(0), shift, 0, 0, 0, 0, 0, 0]
}
