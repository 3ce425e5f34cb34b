//! Predictors on the values of one chunk.

use s4_delta::{Rank1, Residual};
use s4_format::side::{Side, SideKind};
use s4_format::{Error, Plan, PredictorId, ResidualId, Result};
use s4_planes::Kernels;

use crate::encode::Values;
use crate::once;
use crate::scratch::width_of;
use crate::{TensorSpec, TensorView};

/// Writes what is left of values after prediction into `to`, which is as long. Gives the CRC-32C of the
/// values, which may change meanwhile.
pub(crate) fn forward(
    kernels: Kernels,
    plan: &Plan,
    side: &Side,
    view: &TensorView<'_>,
    values: &Values<'_>,
    to: &mut [u8],
) -> Result<u32> {
    let Values { first, src, parent } = *values;
    match plan.predictor {
        PredictorId::RANK1 => {
            let crc = once::copy_summed(src, to, |_, _| Ok(()))?;
            rank1(side, view)?.forward(kernels, first, to)?;
            Ok(crc)
        }
        PredictorId::PARENT => {
            let width = width_of(view.dtype.value_width())?;
            let (residual, parent) = (residual(plan)?, present(parent)?);
            if parent.len() != src.len() {
                let (own, others) = (src.len(), parent.len());
                let what = format!("a difference of {own} bytes from a parent of {others} bytes");
                return Err(Error::corrupt(what));
            }
            once::copy_summed(src, to, |at, piece| {
                residual.diff(kernels, width, &parent[at..at + piece.len()], piece)
            })
        }
        other => Err(other
            .require_open()
            .err()
            .unwrap_or_else(|| Error::unsupported(format!("encoding with predictor `{other}`")))),
    }
}

/// The inverse of [`forward`] where nothing but the values is needed.
pub(crate) fn inverse(
    kernels: Kernels,
    plan: &Plan,
    side: &Side,
    view: &TensorView<'_>,
    first: u64,
    values: &mut [u8],
) -> Result<()> {
    match plan.predictor {
        PredictorId::RANK1 => rank1(side, view)?.inverse(kernels, first, values),
        other => other.require_open().map(drop),
    }
}

/// The inverse of [`forward`] with a parent, whose values in `values` become those that `residuals`
/// are the differences of. `residuals` is used up.
pub(crate) fn apply(
    kernels: Kernels,
    spec: &TensorSpec<'_>,
    residuals: &mut [u8],
    values: &mut [u8],
) -> Result<()> {
    let width = width_of(spec.dtype.value_width())?;
    match residual(spec.plan)? {
        // It does not matter which of the two is the difference.
        Residual::Xor => Residual::Xor.apply(kernels, width, residuals, values),
        Residual::Sub => {
            Residual::Sub.apply(kernels, width, values, residuals)?;
            values.copy_from_slice(residuals);
            Ok(())
        }
    }
}

/// How a plan writes differences from a parent.
fn residual(plan: &Plan) -> Result<Residual> {
    match plan.residual {
        ResidualId::XOR => Ok(Residual::Xor),
        ResidualId::SUB => Ok(Residual::Sub),
        other => Err(Error::corrupt(format!("residual `{other}` from a parent"))),
    }
}

fn present(parent: Option<&[u8]>) -> Result<&[u8]> {
    parent.ok_or_else(|| Error::unsupported("a delta without the values of its parent"))
}

/// The offsets of a tensor, which must be those of its shape: all dimensions but the last are rows.
fn rank1<'a>(side: &'a Side, view: &TensorView<'_>) -> Result<Rank1<'a>> {
    let width = view.dtype.value_width();
    let offsets = Rank1::parse(width_of(width)?, side.get(SideKind::RANK1))?;
    let cols = view.shape.last().copied().unwrap_or(1);
    let rows = view.shape.iter().rev().skip(1).try_fold(1u64, |n, d| n.checked_mul(*d));
    let fits = (Some(offsets.rows() as u64), offsets.cols() as u64) == (rows, cols);
    if !fits || view.dtype.size() != width {
        return Err(Error::corrupt("rank1 offsets do not have the tensor's shape"));
    }
    Ok(offsets)
}
