//! The tensors of a step: a pure function of seed and step, so anyone can tell whether a checkpoint
//! was restored correctly.

use s4weights::{DType, TensorSource};

/// Values of each large tensor. Together a step has about 160 kB.
const VALUES: u64 = 16_384;

/// One tensor of a step.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its type.
    pub(crate) dtype: DType,
    /// Its shape; empty for a scalar.
    pub(crate) shape: Vec<u64>,
    /// Its values, little-endian.
    pub(crate) data: Vec<u8>,
}

/// All tensors of a step. Steps of one seed differ in the low bits of every value, so that a delta
/// pays whichever step is the parent.
pub(crate) fn at(seed: u64, step: u64) -> Vec<Tensor> {
    let tensor = |name, dtype, shape, data| Tensor { name, dtype, shape, data };
    vec![
        tensor("model.weight", DType::BFloat16, vec![VALUES / 64, 64], halves(seed, step)),
        tensor("model.bias", DType::Float32, vec![7], floats(seed ^ 1, step, 7)),
        tensor("optimizer.m", DType::Float32, vec![VALUES], floats(seed ^ 2, step, VALUES)),
        tensor("optimizer.v", DType::Float32, vec![VALUES / 2], floats(seed ^ 3, step, VALUES / 2)),
        tensor("optimizer.step", DType::Int64, vec![], step.to_le_bytes().to_vec()),
    ]
}

/// The tensors in the form that a save takes.
pub(crate) fn sources(tensors: &[Tensor]) -> Vec<TensorSource<'_>> {
    let list = tensors.iter();
    list.map(|Tensor { name, dtype, shape, data }| TensorSource::new(name, *dtype, shape, data))
        .collect()
}

fn floats(seed: u64, step: u64, len: u64) -> Vec<u8> {
    let value = |i| (start(seed, i).to_bits() ^ (mix(i, step, seed) >> 59) as u32).to_le_bytes();
    (0..len).flat_map(value).collect()
}

fn halves(seed: u64, step: u64) -> Vec<u8> {
    let top = |i| (start(seed, i).to_bits() >> 16) as u16;
    let value = |i| (top(i) ^ (mix(i, step, seed) >> 62) as u16).to_le_bytes();
    (0..VALUES).flat_map(value).collect()
}

/// The value that all steps share except for its low bits: within 0.1 of zero.
fn start(seed: u64, i: u64) -> f32 {
    ((mix(i, 0, !seed) >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 0.2
}

/// Scatters three numbers over 64 bits.
fn mix(a: u64, b: u64, c: u64) -> u64 {
    let x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ c.rotate_left(32);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::at;

    #[test]
    fn every_step_has_values_of_its_own_in_every_tensor() {
        let (one, other, again) = (at(7, 1), at(7, 2), at(7, 1));
        assert!(one == again);
        assert!(one.iter().zip(&other).all(|(a, b)| a.data != b.data && a.name == b.name));
        assert!(one.iter().zip(&at(8, 1)).take(4).all(|(a, b)| a.data != b.data));
    }
}
