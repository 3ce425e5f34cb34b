//! Prediction from an equal tensor in the same checkpoint.

use s4_format::{Error, PredictorId, Result};
use s4_planes::Kernels;

use crate::{InputKind, Predict, Predicted, Tensor};

/// Predictor `same`: values are expected to be those of another tensor, which has as many values of
/// the same dtype.
#[derive(Debug, Clone, Copy, Default)]
pub struct Same;

impl Predict for Same {
    fn id(&self) -> PredictorId {
        PredictorId::SAME
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[InputKind::Equal]
    }

    fn predict(
        &self,
        _: Kernels,
        _: &Tensor<'_>,
        _: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        match inputs.first() {
            Some(equal) if equal.len() == out.len() => Ok(Predicted::Input(0)),
            _ => Err(Error::corrupt("copy and original differ in number of values")),
        }
    }

    fn is_sparse(&self) -> bool {
        true
    }
}
