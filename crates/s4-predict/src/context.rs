//! The choice among a stream's tables for each symbol.

use std::fmt::Debug;

use s4_format::{LayoutId, Result};
use s4_planes::Kernels;

use crate::Tensor;

/// The data that a decoder has before it decodes a plane of a chunk.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The kernels to compute with.
    pub kernels: Kernels,
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// Index of the chunk's first value in the tensor.
    pub first: u64,
    /// The layout of the planes.
    pub layout: LayoutId,
    /// The planes before this one, in full, of the values or residuals.
    pub planes: &'a [&'a [u8]],
    /// For each input of the predictor, its values at the chunk's positions.
    pub inputs: &'a [&'a [u8]],
}

/// Gives each symbol of a plane the index of the table that it is coded with.
///
/// The more the symbols of one context are alike, the fewer bits they take; each further table
/// costs its own bytes. Encoder and decoder make the same calls and must get the same answers.
pub trait ContextModel: Debug + Send + Sync {
    /// Number of tables of a plane, 1 to [`s4_format::limits::MAX_TABLES`]. Where it is 1,
    /// [`ContextModel::contexts`] is not called.
    fn tables(&self, layout: LayoutId, plane: usize) -> usize;

    /// Writes the index of the table of each symbol of plane `known.planes.len()` to `out`, which
    /// is as long as the plane. Each index is below [`ContextModel::tables`].
    ///
    /// # Errors
    /// `Corrupt` if the parts of `known` do not fit each other.
    fn contexts(&self, known: &Known<'_>, out: &mut [u8]) -> Result<()>;

    /// Whether contexts depend on the planes before. If not, all planes with several tables have
    /// the same length and the same contexts, which are then asked for only once.
    fn depends_on_planes(&self) -> bool {
        true
    }
}

/// One table for every plane, as all predictors of this crate have.
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
