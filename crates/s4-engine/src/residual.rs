//! Predictors on the values of one chunk, in place.

use s4_format::side::{Side, SideKind};
use s4_format::{Error, Plan, PredictorId, Result};
use s4_planes::Kernels;

use crate::TensorView;

/// Replaces values by what is left of them after prediction. `first` is the number of the first one.
pub(crate) fn forward(
    kernels: &Kernels,
    plan: &Plan,
    side: &Side,
    view: &TensorView<'_>,
    first: u64,
    values: &mut [u8],
) -> Result<()> {
    match plan.predictor {
        other => other.require_open().map(drop),
    }
}

/// The inverse of [`forward`].
pub(crate) fn inverse(
    kernels: &Kernels,
    plan: &Plan,
    side: &Side,
    view: &TensorView<'_>,
    first: u64,
    values: &mut [u8],
) -> Result<()> {
    match plan.predictor {
        other => other.require_open().map(drop),
    }
}
