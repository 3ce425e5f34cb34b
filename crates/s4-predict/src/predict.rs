//! The trait of predictors, and the registry.

use std::fmt::Debug;

use s4_format::{Error, PredictorId, Result};
use s4_planes::Kernels;

use crate::{ContextModel, NoContexts, Tensor};

/// A tensor that a predictor needs besides the one that it predicts. The plan names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// The same tensor in the parent checkpoint.
    Parent,
    /// Another tensor of the same checkpoint, of the same dtype.
    Equal,
    /// Another tensor of the same checkpoint, with 4-byte values for a tensor of 2-byte values.
    Wider,
    /// A moment of the tensor, in the same checkpoint. The tensor's side data names its dtype.
    Moment,
}

impl InputKind {
    /// Bytes of the input for each byte of the tensor; `None` if its dtype tells.
    pub fn scale(self) -> Option<usize> {
        match self {
            Self::Parent | Self::Equal => Some(1),
            Self::Wider => Some(2),
            Self::Moment => None,
        }
    }
}

/// The place of predicted bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Predicted {
    /// They are the bits of the input with this index; nothing was written.
    Input(usize),
    /// They were written to the output.
    Written,
}

/// A predictor: gives the expected bits of values.
///
/// An engine predicts a chunk piece by piece, so that values, predictions and residuals stay in a
/// core's nearest cache. Two predictors with the same id must predict the same bits.
pub trait Predict: Debug + Send + Sync {
    /// The id that plans name.
    fn id(&self) -> PredictorId;

    /// The tensors that it needs, in the order of the plan's inputs. A plan of `step` may lack the last one.
    fn inputs(&self) -> &'static [InputKind];

    /// Predicts the values of `tensor` from index `first` on, as many as `out` has room for (its
    /// bytes are a multiple of a value's width). `inputs` holds the same values of each input,
    /// [`InputKind::scale`] times as long as `out`, or of its dtype. A prediction that equals an input is not
    /// copied: the input's index is returned instead.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` if side data, shape and range do not fit each other.
    fn predict(
        &self,
        kernels: Kernels,
        tensor: &Tensor<'_>,
        first: u64,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<Predicted>;

    /// Whether the prediction is usually nearly right, so that planes of residuals are sparse:
    /// nearly all symbols are the same, and others are rare.
    fn is_sparse(&self) -> bool {
        false
    }

    /// The model that assigns tables to the symbols of the residuals' planes.
    fn contexts(&self) -> &dyn ContextModel {
        &NoContexts
    }
}

/// The predictors that an engine may use, by id: a value that is passed in, not a global.
#[derive(Debug, Default)]
pub struct Predictors {
    list: Vec<Box<dyn Predict>>,
}

impl Predictors {
    /// No predictors: every tensor is stored without prediction.
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a predictor; one with the same id is replaced.
    #[must_use]
    pub fn with(mut self, predictor: impl Predict + 'static) -> Self {
        self.list.retain(|p| p.id() != predictor.id());
        self.list.push(Box::new(predictor));
        self
    }

    /// The predictor of an id; `None` for [`PredictorId::NONE`], which predicts nothing.
    ///
    /// # Errors
    /// `Unsupported`, naming the predictor, if it is not registered.
    pub fn get(&self, id: PredictorId) -> Result<Option<&dyn Predict>> {
        if id == PredictorId::NONE {
            return Ok(None);
        }
        if let Some(predictor) = self.list.iter().find(|p| p.id() == id) {
            return Ok(Some(&**predictor));
        }
        id.require_open()?;
        Err(Error::unsupported(format!("predictor `{id}` is not registered with this engine")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predictors;

    #[test]
    fn every_open_predictor_is_found_by_its_id() {
        for &id in PredictorId::ALL {
            match predictors().get(id) {
                Ok(found) => assert!(found.map_or(id == PredictorId::NONE, |p| p.id() == id)),
                Err(error) => assert_eq!(Err(error), id.require_open()),
            }
        }
        let error = Predictors::none().get(PredictorId::PARENT).unwrap_err();
        assert!(error.to_string().contains("parent"), "{error}");
    }
}
