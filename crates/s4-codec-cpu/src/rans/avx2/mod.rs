//! AVX2: the 32 lanes of a segment in four registers, for any stream.

use std::arch::x86_64::*;

use super::stream::LANES;

/// Repeats a block with a constant for an index. The compiler does not unroll loops of this size, and keeps their
/// vectors in memory, which costs up to a seventh of the speed.
macro_rules! unrolled {
    ($index:ident in [$($value:literal)*] $body:block) => {
        $({
            const $index: usize = $value;
            $body
        })*
    };
}

pub(super) mod contexts;
mod decode;
mod encode;

pub(super) use decode::Decoder;
pub(super) use encode::Encoder;

/// Lanes of a register.
const WIDTH: usize = 8;
/// Registers of a segment.
const VECTORS: usize = LANES / WIDTH;

/// The states of a segment.
#[inline]
#[target_feature(enable = "avx2")]
fn load(states: &[u32; LANES]) -> [__m256i; VECTORS] {
    let (rows, _) = states.as_chunks::<WIDTH>();
    // SAFETY: each row has 32 readable bytes.
    let row = |i: usize| unsafe { _mm256_loadu_si256(rows[i].as_ptr().cast()) };
    [row(0), row(1), row(2), row(3)]
}

/// Puts the states of a segment back.
#[inline]
#[target_feature(enable = "avx2")]
fn store(x: [__m256i; VECTORS], states: &mut [u32; LANES]) {
    for (row, x) in states.as_chunks_mut::<WIDTH>().0.iter_mut().zip(x) {
        // SAFETY: each row has 32 writable bytes.
        unsafe { _mm256_storeu_si256(row.as_mut_ptr().cast(), x) };
    }
}
