//! Which preset uses which predictor.

use crate::Preset;

/// The predictors that may be planned. Every reader decodes all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// Rows and columns.
    pub(crate) rank1: bool,
    /// Rows and columns, with a share of the parent.
    pub(crate) blend: bool,
    /// The difference from a parent, taken in the order of values.
    pub(crate) sub: bool,
    /// Such differences with the parent's exponents as contexts.
    pub(crate) contexts: bool,
    /// Such differences with contexts from the optimizer's update.
    pub(crate) update: bool,
    /// Such differences from what the optimizer's step makes of the parent.
    pub(crate) step: bool,
    /// Copies of other tensors, exact or rounded.
    pub(crate) copies: bool,
}

/// The one place that says which preset uses which predictor.
pub(crate) fn allowed(preset: Preset) -> Allowed {
    let all = matches!(preset, Preset::Balanced | Preset::Small);
    Allowed { rank1: all, blend: all, sub: all, contexts: all, update: all, step: all, copies: all }
}

/// Whether tensors may be predicted from rows and columns.
#[cfg(feature = "cuda")]
pub(crate) fn makes_offsets(preset: Preset) -> bool {
    allowed(preset).rank1
}

/// Whether tensors that are copies of others, exact or rounded, are predicted from them. The caller
/// that writes several tensors finds the copies.
pub fn makes_copies(preset: Preset) -> bool {
    allowed(preset).copies
}
