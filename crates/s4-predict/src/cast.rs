//! Prediction from a wider copy in the same checkpoint.

use s4_format::{DType, Error, PredictorId, Result};
use s4_planes::Kernels;

use crate::{InputKind, Predict, Predicted, Tensor};

/// Predictor `cast`: values are expected to be an fp32 tensor's, rounded to bf16 or fp16.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cast;

impl Predict for Cast {
    fn id(&self) -> PredictorId {
        PredictorId::CAST
    }

    fn inputs(&self) -> &'static [InputKind] {
        &[InputKind::Wider]
    }

    fn predict(
        &self,
        kernels: Kernels,
        tensor: &Tensor<'_>,
        _: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted> {
        let none = || Error::corrupt("rounded copy and original differ in number of values");
        let wide = inputs.first().filter(|i| i.len() == 2 * out.len() && i.len() % 4 == 0);
        let wide = wide.ok_or_else(none)?;
        match tensor.dtype {
            DType::BFloat16 => kernels.to_bf16(wide, out),
            DType::Float16 => kernels.to_fp16(wide, out),
            dtype => return Err(Error::corrupt(format!("rounded copy cannot have dtype {dtype}"))),
        }
        Ok(Predicted::Written)
    }

    fn is_sparse(&self) -> bool {
        true
    }
}
