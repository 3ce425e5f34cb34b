//! What the bits of a tensor are expected to be, and what is left when that is taken away.
//!
//! - [`Residual`]: the difference from a parent's bits, by XOR or in the order of values.
//! - [`rank1`]: a prediction from within the tensor, by an offset per row and one per column.
//! - [`chain()`]: the checkpoints that one is a difference from, down to its base.
//! - [`Tree`]: which earlier checkpoint one is a difference from, so that chains stay short.
//! - [`policy`]: when the next checkpoint should be a base.
//!
//! Everything here is exact integer arithmetic. What a decoder needs and cannot know is in the side
//! data, which is stored; nothing fitted is ever computed again.
//!
//! What is deliberately absent: I/O (parents are slices and closures); the choice of a predictor,
//! which is the engine's, by what each would cost; roles and names of tensors; checksums, which the
//! engine checks after prediction is undone; and the predictors that need the optimizer's state.
#![forbid(unsafe_code)]

mod chain;
pub mod policy;
pub mod rank1;
mod residual;
mod tree;

pub use chain::chain;
pub use rank1::Rank1;
pub use residual::Residual;
pub use tree::Tree;
