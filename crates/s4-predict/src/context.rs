//! Which of a stream's tables each symbol is coded with.

use std::fmt::Debug;

use s4_format::{LayoutId, Result};
use s4_planes::Kernels;

use crate::Tensor;

/// What a decoder knows before it decodes a plane of a chunk.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// What computes on many values at once.
    pub kernels: Kernels,
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// Number of the chunk's first value.
    pub first: u64,
    /// The layout of the planes.
    pub layout: LayoutId,
    /// The planes before this one: whole, as values or residuals were split into them.
    pub planes: &'a [&'a [u8]],
    /// The values of each input of the predictor that are at the same places as the chunk's.
    pub inputs: &'a [&'a [u8]],
}

/// Gives each symbol of a plane the number of the table that it is coded with.
///
/// The more the symbols of one context are alike, the fewer bits they take; each further table costs
/// its own bytes. Encoder and decoder ask the same question and must get the same answer.
pub trait ContextModel: Debug + Send + Sync {
    /// Number of tables of a plane, 1 to [`s4_format::limits::MAX_TABLES`]. Where it is 1, nothing is
    /// asked.
    fn tables(&self, layout: LayoutId, plane: usize) -> usize;

    /// Writes the number of the table of each symbol of plane `known.planes.len()` to `out`, which is as
    /// long as the plane. Each is below [`ContextModel::tables`].
    ///
    /// # Errors
    /// `Corrupt` if what is known does not fit.
    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()>;

    /// Whether the planes before a plane matter. Otherwise all planes with several tables are as long, have the same
    /// contexts, and these are asked for once.
    fn depends_on_planes(&self) -> bool {
        true
    }
}

/// One table for every plane: what all predictors of this crate have.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoContexts;

impl ContextModel for NoContexts {
    fn tables(&self, _: LayoutId, _: usize) -> usize {
        1
    }

    fn contexts(&self, _: &Known<'_>, out: &mut [u8]) -> Result<()> {
        out.fill(0);
        Ok(())
    }
}
