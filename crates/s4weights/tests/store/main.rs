//! The checkpoint store over real folders and objects in memory.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod damage;
mod life;
mod run;
mod tree;
