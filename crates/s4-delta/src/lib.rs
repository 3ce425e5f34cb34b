//! Differences from what values were expected to be, and chains of checkpoints that are differences.
//!
//! - [`Residual`]: the difference from predicted bits, by XOR or in the order of values.
//! - [`chain()`]: the checkpoints that one is a difference from, down to its base.
//! - [`Tree`]: which earlier checkpoint one is a difference from, so that chains stay short.
//! - [`policy`]: when the next checkpoint should be a base.
//!
//! What is deliberately absent: I/O (parents are slices and closures); the predictors, which are in
//! `s4-predict`, and the choice among them, which is the engine's; roles and names of tensors; and
//! checksums, which the engine checks after prediction is undone.
#![forbid(unsafe_code)]

mod chain;
pub mod policy;
mod residual;
mod tree;

pub use chain::chain;
pub use residual::Residual;
pub use tree::Tree;
