//! Predicts the bits of values, and selects which of a stream's tables their symbols are coded
//! with.
//!
//! - [`Predict`]: the predicted bits of a range of a tensor's values, from other values and from
//!   side data. [`Parent`] expects the values of the parent checkpoint, [`Rank1`] the sum of a
//!   row's and a column's offset, [`Blend`] that and a share of the parent's values, [`Cast`] the
//!   rounded values of a wider tensor, [`Same`] the values of another tensor, [`Steps`] what an optimizer makes of the
//!   parent's values.
//! - [`Predictors`]: the predictors that an engine uses, by the id that plans name.
//! - [`ContextModel`]: picks a table for each symbol of a plane from what a decoder knows before it
//!   decodes the plane: [`Exponents`] from the exponents of an input, [`Updates`] also from the
//!   moments.
//!
//! A decoder repeats everything here exactly: integer arithmetic, and for [`Steps`] floating-point arithmetic that
//! gives the same bits everywhere. Data that a decoder needs and cannot derive is stored as side data; nothing that was
//! fitted is ever computed again.
//!
//! Deliberately absent: I/O (inputs are slices); the form of the difference from a prediction
//! (`s4-delta`); the choice of a predictor, which the planner makes by estimated cost; and
//! checksums, which the engine checks after prediction is undone.
#![forbid(unsafe_code)]

mod blend;
mod cast;
mod context;
pub mod exponent;
mod parent;
mod predict;
pub mod rank1;
mod same;
pub mod step;
mod tensor;
pub mod update;

pub use blend::Blend;
pub use cast::Cast;
pub use context::{ContextModel, Known, NoContexts};
pub use exponent::Exponents;
pub use parent::Parent;
pub use predict::{InputKind, Predict, Predicted, Predictors};
pub use rank1::Rank1;
pub use same::Same;
pub use step::{Step, Steps};
pub use tensor::Tensor;
pub use update::{Update, Updates};

/// Every predictor of this crate. This is the one list of them.
pub fn predictors() -> Predictors {
    Predictors::none().with(Parent).with(Rank1).with(Blend).with(Cast).with(Same).with(Steps)
}
