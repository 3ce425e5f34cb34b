//! The CUDA engine beside the CPU engine: the same plans, the same frames, the same values.
//!
//! Without a device these tests say so and pass; with `S4_REQUIRE_GPU=1` they fail then.
//! `emulated/run.sh` runs them on a driver that emulates one.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

mod budget;
mod hostile;
mod roundtrip;
mod support;
