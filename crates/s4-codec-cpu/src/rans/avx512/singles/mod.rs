//! AVX-512 with tables in memory, to encode with one table of `P = 12` and to decode any stream:
//! the 32 states of a segment are in two registers, and two segments run side by side.

mod decode;
mod encode;

pub(in crate::rans) use decode::Decoder;
pub(in crate::rans) use encode::Encoder;

use std::arch::x86_64::*;

use super::super::stream::LANES;

/// Lanes of a register.
const WIDTH: usize = 16;
/// Registers of the states of a segment.
const VECTORS: usize = LANES / WIDTH;

#[inline]
#[target_feature(enable = "avx512f")]
fn load(states: &[u32; LANES]) -> [__m512i; VECTORS] {
    let (rows, _) = states.as_chunks::<WIDTH>();
    std::array::from_fn(|v| super::transpose::load(&rows[v]))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: [__m512i; VECTORS], states: &mut [u32; LANES]) {
    for (row, x) in states.as_chunks_mut::<WIDTH>().0.iter_mut().zip(x) {
        // SAFETY: the reference is to 64 writable bytes; the store needs no alignment.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), x) };
    }
}
