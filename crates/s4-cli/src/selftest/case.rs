//! The tensors that devices are tested with, the faults that are injected, and a stream into memory.

use std::sync::{Arc, Mutex};

use s4weights::{DType, Preset, TensorView, adversarial};

use crate::error::Failure;

/// Elements of a pattern: one, a part of a segment, one segment, and more than one chunk even of
/// the smallest values (not a round number).
const SIZES: [usize; 4] = [1, 255, 4096, (1 << 17) + 1234];

/// Where a bit is flipped in what a device returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// In the first frame that it wrote.
    Frame,
    /// In the first values that it decoded.
    Values,
    /// As `Frame`, where nvCOMP codes the planes.
    LibraryFrame,
    LibraryValues,
}

/// One tensor of the test.
pub(super) struct Case {
    pub(super) name: String,
    dtype: DType,
    shape: [u64; 1],
    pub(super) data: Vec<u8>,
}

impl Case {
    pub(super) fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, data: &self.data }
    }
}

/// Tensors of one dtype: every pattern in every size for the default preset, small ones for the others.
pub(super) fn cases(dtype: DType, preset: Preset) -> Vec<Case> {
    let sizes = if preset == Preset::default() { &SIZES[..] } else { &SIZES[1..3] };
    let mut out = vec![];
    let mut add = |name: String, data: Vec<u8>| {
        let shape = [(data.len() / dtype.size()) as u64];
        out.push(Case { name: format!("{dtype}, {preset:?}, {name}"), dtype, shape, data });
    };
    for &n in sizes {
        for (pattern, data) in adversarial(dtype, n) {
            add(format!("{pattern}, {n} elements"), data);
        }
    }
    add("no elements".into(), vec![]);
    out
}

pub(super) fn differs(name: &str, what: &str) -> Failure {
    Failure::Test(format!("{name}: different from the CPU: {what}"))
}

/// Flips a bit in the middle of the first byte string that is not empty.
pub(super) fn damage<'a>(mut bytes: impl Iterator<Item = &'a mut Vec<u8>>) {
    if let Some(first) = bytes.find(|b| !b.is_empty()) {
        let middle = first.len() / 2;
        first[middle] ^= 0x10;
    }
}

/// A stream into memory that the caller can still reach.
#[derive(Clone, Default)]
pub(super) struct Memory(pub(super) Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
