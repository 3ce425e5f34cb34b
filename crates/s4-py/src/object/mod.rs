//! Takes apart an object to be saved: its plain values become a tree, and the storages of its tensors are
//! collected.
//!
//! The caller of a background save waits for both, which is why this is native and not Python: one walk over the
//! containers, and as few calls into PyTorch as a tensor needs.

mod dlpack;
mod frozen;
mod names;
mod roles;
mod shape;
mod sources;
mod storages;
mod torch;
mod tree;

pub(crate) use frozen::freeze;
pub(crate) use sources::Sources;
pub(crate) use storages::Storages;
pub(crate) use tree::write_tree;
