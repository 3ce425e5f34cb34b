//! What a saved object is made of: its plain values as a tree, and the storages of its tensors.
//!
//! A save in the background keeps its caller waiting until both are known, so that this is done here
//! and not in Python: one walk over the containers, and no more questions to PyTorch than a tensor takes.

mod dlpack;
mod frozen;
mod names;
mod roles;
mod sources;
mod storages;
mod torch;
mod tree;

pub(crate) use frozen::freeze;
pub(crate) use sources::Sources;
pub(crate) use storages::Storages;
pub(crate) use tree::write_tree;
