//! What an engine's devices share: the CPU engine, counters and memory for frames.

use std::sync::atomic::AtomicU64;

use super::pieces::Pieces;
use crate::CpuEngine;

/// Counts chunks while an engine works.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) device: AtomicU64,
    pub(super) host: AtomicU64,
    pub(super) refused: AtomicU64,
}

/// The CPU engine, and what all devices share.
pub(super) struct Host {
    pub(super) cpu: CpuEngine,
    pub(super) chunks: Counters,
    pub(super) pieces: Pieces,
}
