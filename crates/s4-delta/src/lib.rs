//! Residuals against predicted values, and chains of deltas.
//!
//! - [`Residual`]: the difference from predicted bits, by XOR or in the order of values.
//! - [`chain()`]: a checkpoint and its ancestors, down to the base.
//! - [`Tree`]: which earlier checkpoint becomes the parent, so that chains stay short.
//! - [`policy`]: when the next checkpoint should be a base.
//!
//! Deliberately absent: I/O (parents are slices and closures); the predictors, which are in
//! `s4-predict`, and the choice among them, which the engine makes; roles and names of tensors; and
//! checksums, which the engine checks after prediction is undone.
#![forbid(unsafe_code)]

mod chain;
pub mod policy;
mod residual;
mod tree;

pub use chain::chain;
pub use residual::Residual;
pub use tree::Tree;
