//! Values that a thread changes while they are saved, as training does if it continues meanwhile.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use s4weights::{DType, TensorSource, adversarial};

/// A tensor each of whose values is that of one of two versions.
pub(crate) struct Racing {
    pub(crate) name: &'static str,
    dtype: DType,
    shape: [u64; 1],
    memory: Vec<AtomicU64>,
    versions: [Vec<u8>; 2],
}

/// Tensors of every layout and every way of storing a chunk: coded, constant, plain, packed.
pub(crate) fn tensors() -> Vec<Racing> {
    use DType::{BFloat16, Float16, Float32, Float64, Int32, Int64, UInt8};
    [
        ("weights", BFloat16, 300_000, ["like-weights", "like-squares"]),
        ("moments", Float32, 200_000, ["like-squares", "like-weights"]),
        ("halves", Float16, 150_000, ["like-weights", "every-exponent"]),
        ("doubles", Float64, 70_000, ["like-weights", "nans"]),
        ("zeros", Float32, 70_000, ["zeros", "like-squares"]),
        ("counts", Int64, 70_000, ["counting", "sparse"]),
        ("words", Int32, 70_000, ["runs", "two-values"]),
        ("noise", UInt8, 300_000, ["random", "zeros"]),
        ("small", Float32, 1_000, ["like-weights", "zeros"]),
    ]
    .map(|(name, dtype, n, patterns)| Racing::new(name, dtype, n, patterns))
    .into_iter()
    .chain(copies())
    .collect()
}

/// Masters of an optimizer, an average that equals them, and the model's rounded copies. A few
/// values of each change, independently of the others.
fn copies() -> [Racing; 3] {
    let n = 150_000;
    let before = adversarial(DType::Float32, n).find(|p| p.0 == "like-weights").unwrap().1;
    let mut after = before.clone();
    after.as_chunks_mut::<4>().0.iter_mut().skip(100).step_by(997).for_each(|x| x[2] ^= 0x40);
    let versions = [before, after];
    let round = |x: &[u8; 4]| {
        let x = u32::from_le_bytes(*x);
        (((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16).to_le_bytes()
    };
    let copies = versions.each_ref().map(|v| v.as_chunks().0.iter().flat_map(round).collect());
    let [masters, copies] = [versions, copies];
    [
        Racing::of("masters", DType::Float32, n, masters.clone()),
        Racing::of("averages", DType::Float32, n, masters),
        Racing::of("copies", DType::BFloat16, n, copies),
    ]
}

impl Racing {
    fn new(name: &'static str, dtype: DType, n: usize, patterns: [&str; 2]) -> Self {
        let versions =
            patterns.map(|p| adversarial(dtype, n).find(|(name, _)| *name == p).unwrap().1);
        Self::of(name, dtype, n, versions)
    }

    fn of(name: &'static str, dtype: DType, n: usize, versions: [Vec<u8>; 2]) -> Self {
        let memory = words(&versions[0]).map(AtomicU64::new).collect();
        Self { name, dtype, shape: [n as u64], memory, versions }
    }

    pub(crate) fn data(&self) -> &[u8] {
        // SAFETY: this many bytes are readable. They change meanwhile, which is what is tested: a
        // save may assume nothing about bytes that it reads again.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().cast::<u8>(), self.versions[0].len())
        }
    }

    pub(crate) fn source(&self) -> TensorSource<'_> {
        TensorSource::new(self.name, self.dtype, &self.shape, self.data())
    }

    /// Whether each value was there at some time.
    pub(crate) fn had(&self, values: &[u8]) -> bool {
        let width = self.dtype.value_width();
        let [a, b] = self.versions.each_ref().map(|v| v.chunks_exact(width));
        values.len() == self.versions[0].len()
            && values.chunks_exact(width).zip(a.zip(b)).all(|(v, (a, b))| v == a || v == b)
    }
}

/// Changes values until it is told to stop.
pub(crate) fn churn(tensors: &[Racing], stop: &AtomicBool) {
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize % below
    };
    while !stop.load(Ordering::Relaxed) {
        let t = &tensors[random(tensors.len())];
        let (first, version) = (random(t.memory.len()), &t.versions[random(2)]);
        let run = t.memory.iter().zip(words(version)).skip(first).take(1 + random(10_000));
        run.for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let word = |w: &[u8]| {
        let mut out = [0; 8];
        out[..w.len()].copy_from_slice(w);
        u64::from_le_bytes(out)
    };
    bytes.chunks(8).map(word)
}
