//! Prediction from rows, columns and the parent checkpoint.

use s4_format::{Error, PredictorId, Result};
use s4_planes::Kernels;

use crate::rank1::Offsets;
use crate::{InputKind, Predict, Predicted, Tensor};

/// Predictor `blend`: a magnitude is expected to be a share of the parent's plus its row and column
/// offsets.
///
/// An optimizer's second moment decays: some steps later, a part of it is still the parent's, and
/// the rest follows its rows and columns. The side data is that of [`Rank1`](crate::Rank1), with a
/// share.
#[derive(Debug, Clone, Copy, Default)]
pub struct Blend;

impl Predict for Blend {
    fn id(&self) -> PredictorId {
        PredictorId::BLEND
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[InputKind::Parent]
    }

    fn predict(
        &self,
        kernels: Kernels,
        tensor: &Tensor<'_>,
        first: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        let none = || Error::unsupported("delta without its parent's values");
        let parent = inputs.first().ok_or_else(none)?;
        Offsets::of(self.id(), tensor)?.predict_range(kernels, first, parent, out)?;
        Ok(Predicted::Written)
    }
}
