//! The checkpoint store over real folders and objects in memory.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod closed;
mod damage;
#[path = "../../../s4-engine/tests/cuda/emulated/mod.rs"]
mod emulated;
mod importing;
mod life;
mod racing;
mod ranks;
mod recalling;
mod run;
mod staging;
mod tree;
