//! What predictors and context models are told of a tensor.

use s4_format::DType;
use s4_format::side::Side;

/// The properties of the tensor whose values a predictor predicts.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension, in elements.
    pub shape: &'a [u64],
    /// Side data, as it is stored.
    pub side: &'a Side,
}
