//! Compares the CUDA engine with the CPU engine: the same plans, the same frames, the same values.
//!
//! Without a device these tests say so and pass, and then run on a driver that emulates one
//! (`emulated/driver.cpp`); with `S4_REQUIRE_GPU=1` they fail.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

mod budget;
mod copies;
mod delta;
mod emulated;
mod feed;
mod held;
mod hostile;
mod library;
mod pinned;
mod predicted;
mod racing;
mod roundtrip;
mod staging;
mod support;
mod updates;

#[test]
fn all_tests_pass_on_an_emulated_driver() {
    emulated::run(&["--test-threads=1", "--nocapture"]);
}
