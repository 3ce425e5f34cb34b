//! The parent's share in a blend, fitted to a sample.

use s4_format::side::Side;
use s4_format::{DType, Plan, Result};
use s4_predict::Tensor;
use s4_predict::rank1::{self, Expected, Offsets};

use super::layout::Candidate;
use super::{ParentSample, Sample, TensorFacts};
use crate::scratch::width_of;
use crate::{CpuEngine, Scratch};

/// Shares of the parent that are tried, in 256ths.
const SHARES: [u8; 12] = [16, 32, 48, 64, 96, 128, 160, 192, 208, 224, 240, 255];
/// The most values of the sample that are examined.
const LOOKED_AT: usize = 4096;

/// The prediction that the rows and columns of a stored tensor make for its values, if it is stored
/// with them. `parent`: the same for its parent, if the plan predicts from one.
///
/// # Errors
/// `Corrupt` or `Truncated` if its side data does not belong to it.
pub fn expected_of(
    plan: &Plan,
    (dtype, shape, side): (DType, &[u64], &Side),
    parent: Option<&Expected>,
) -> Result<Option<Expected>> {
    if !plan.has_offsets() {
        return Ok(None);
    }
    let offsets = Offsets::of(plan.predictor, &Tensor { dtype, shape, side })?;
    Ok(Expected::of(&offsets, parent))
}

impl CpuEngine {
    /// The sample's cost if its row and column offsets and a share of the parent predict it, and
    /// the side data for that. `None`: the parent is not stored with as many rows and columns.
    pub(super) fn blend(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        parent: &ParentSample<'_>,
        offsets: &[u8],
        scratch: &mut Scratch,
    ) -> Result<Option<(Option<Candidate>, Vec<u8>)>> {
        let width = width_of(about.width())?;
        let own = Offsets::parse(width, offsets)?;
        let Some((own_expected, expected)) = Expected::of(&own, None).zip(parent.expected) else {
            return Ok(None);
        };
        if !expected.fits(&own) {
            return Ok(None);
        }
        let left = |values: &[u8], expected: &Expected| left_of(about, sample, values, expected);
        let share = cheapest(&left(&sample.values, &own_expected), &left(parent.values, expected));
        let Some(side) = rank1::blended(&own, expected, share) else { return Ok(None) };
        let best = self.by_offsets(about, sample, &side, parent.values, scratch)?;
        Ok(Some((best, side)))
    }
}

/// The excess of the magnitudes of some of the sample's values over the expected ones.
fn left_of(
    about: &TensorFacts<'_>,
    sample: &Sample<'_>,
    values: &[u8],
    expected: &Expected,
) -> Vec<i64> {
    let width = about.width();
    let numbers = sample.runs.iter().flat_map(Clone::clone);
    let step = (values.len() / width).div_ceil(LOOKED_AT).max(1);
    let magnitude = |value: &[u8]| {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(value);
        (u64::from_le_bytes(bytes) & (u64::MAX >> (65 - 8 * width))) as i64
    };
    let each = values.chunks_exact(width).zip(numbers).step_by(step);
    each.map(|(value, number)| magnitude(value).wrapping_sub(expected.at(number))).collect()
}

/// The share of the parent's excess that leaves the least of the values' excess.
fn cheapest(values: &[i64], parents: &[i64]) -> u8 {
    let bits = |share: u8| -> u64 {
        let left = |(x, p): (&i64, &i64)| {
            // Computed as in the prediction; no product wraps.
            let of_parent = i64::from(share) * (p >> 8) + ((i64::from(share) * (p & 0xff)) >> 8);
            u64::from(u64::BITS - x.wrapping_sub(of_parent).unsigned_abs().leading_zeros())
        };
        values.iter().zip(parents).map(left).sum()
    };
    SHARES.into_iter().min_by_key(|share| bits(*share)).unwrap_or(SHARES[0])
}
