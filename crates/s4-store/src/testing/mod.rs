//! Machinery for tests, of this crate and of others: a store that fails on command, stores that lie,
//! a toy encoding with deltas, and the conformance suite for object stores.
//!
//! Nothing here is used outside tests.

mod conformance;
mod fault;
mod liar;
pub mod toy;

pub use conformance::{conformance, create_race};
pub use fault::{Fault, FaultStore, OpInfo, OpKind};
pub use liar::{Liar, Lie};

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use uuid::Uuid;

use crate::id::Ids;
use crate::options::{ProbeLimits, Retry, StoreOptions};

/// Pseudo-random numbers (SplitMix64): the same for the same seed, on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[must_use]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    #[must_use]
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits().checked_rem(end).unwrap_or(0)
    }

    /// True once in `n` times on average.
    #[must_use]
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Ids that repeat with their seed.
#[derive(Debug)]
pub struct SeededIds {
    seed: u64,
    next: AtomicU64,
}

impl SeededIds {
    /// Ids of this seed; different seeds never share one.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, next: AtomicU64::new(0) }
    }
}

impl Ids for SeededIds {
    fn next(&self) -> Uuid {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        // Mixed, so that the order of ids is not the order in which they were drawn.
        let mixed = Random::new(self.seed ^ (n << 32)).bits() & 0xffff_ffff;
        Uuid::from_u64_pair(self.seed << 32 | mixed, n | 0x8000_0000_0000_0000)
    }
}

/// Options for tests: few retries, short pauses.
#[must_use]
pub fn quick_options() -> StoreOptions {
    StoreOptions {
        retry: Retry {
            attempts: 4,
            first_pause: Duration::from_micros(200),
            longest_pause: Duration::from_millis(2),
            first_contact: Duration::from_secs(20),
            deadline: Duration::from_secs(20),
        },
        probe: ProbeLimits { most_rounds: 16, ..ProbeLimits::default() },
        ..StoreOptions::default()
    }
}
