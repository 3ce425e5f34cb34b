//! A state of any size that changes as under AdamW, for benchmarks that `testdata` is too small for.

use s4weights::{DType, TensorSource};

/// Weights, and the first and second moments of an optimizer.
#[derive(Debug)]
pub struct State([Vec<f32>; 3]);

impl State {
    /// Roughly normally distributed weights, and moments of zero, with `values` values each.
    pub fn new(values: usize) -> Self {
        let weights = (0..values).map(|i| 0.05 * bell(i as u64)).collect();
        Self([weights, vec![0.0; values], vec![0.0; values]])
    }

    /// Takes one training step, with gradients that depend on the step number.
    pub fn step(&mut self, step: u64) {
        let [weights, first, second] = &mut self.0;
        for (i, w) in weights.iter_mut().enumerate() {
            let g = 0.01 * bell((i as u64) ^ (step + 1).wrapping_mul(0x517c_c1b7_2722_0a95));
            first[i] = 0.9 * first[i] + 0.1 * g;
            second[i] = 0.999 * second[i] + 0.001 * g * g;
            *w -= 3e-4 * first[i] / (second[i].sqrt() + 1e-8);
        }
    }

    /// Copies of the three tensors, little-endian.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        self.0.iter().map(|t| t.iter().flat_map(|v| v.to_le_bytes()).collect()).collect()
    }
}

/// The tensors to save, from the result of [`State::bytes`].
pub fn sources<'a>(bytes: &'a [Vec<u8>], shape: &'a [u64]) -> Vec<TensorSource<'a>> {
    let named = ["w", "m", "v"].iter().zip(bytes);
    named.map(|(name, data)| TensorSource::new(name, DType::Float32, shape, data)).collect()
}

/// A pseudorandom value, roughly normally distributed.
fn bell(seed: u64) -> f32 {
    let mut x = seed;
    let mut sum = 0.0;
    for _ in 0..4 {
        x = (x.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 31;
        sum += (x >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
    }
    1.7 * sum
}
