//! Prediction from the parent checkpoint.

use s4_format::{Error, PredictorId, Result};
use s4_planes::Kernels;

use crate::{InputKind, Predict, Predicted, Tensor};

/// Predictor `parent`: values are expected to be the same as in the parent checkpoint.
#[derive(Debug, Clone, Copy, Default)]
pub struct Parent;

impl Predict for Parent {
    fn id(&self) -> PredictorId {
        PredictorId::PARENT
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[InputKind::Parent]
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
            Some(parent) if parent.len() == out.len() => Ok(Predicted::Input(0)),
            Some(parent) => {
                let (own, others) = (out.len(), parent.len());
                Err(Error::corrupt(format!("parent has {others} bytes, expected {own}")))
            }
            None => Err(Error::unsupported("delta without its parent's values")),
        }
    }

    fn is_sparse(&self) -> bool {
        true
    }
}
