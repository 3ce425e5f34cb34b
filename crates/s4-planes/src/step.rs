//! The step of an optimizer, computed so that every machine gets the same bits.
//!
//! IEEE 754 defines the results of `+`, `-`, `*`, `/` and square root in single precision, and nothing here is fused
//! or reordered. Processors differ in one respect: some programs have numbers below 2^-126 replaced by zeros, for their
//! whole process. So every number below 2^-125 is replaced by zero here, before and after each operation.

use crate::lanewise::{fp16, vectorized};
use crate::{FloatBits, Kernels};

/// Values that are computed at a time.
const BLOCK: usize = 512;
/// The bits of 2^-125.
const SMALLEST: u32 = 0x0100_0000;

/// The constants of an optimizer's step. All are finite, and 0 or at least 2^-125 in size; `epsilon` has no sign.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFactors {
    /// Factor of the weights: 1 less the decay.
    pub keep: f32,
    /// Factor of the updates.
    pub rate: f32,
    /// Added to the roots of second moments.
    pub epsilon: f32,
}

impl StepFactors {
    /// Whether the constants may be used.
    pub fn are_valid(&self) -> bool {
        let fits = |x: f32| x.is_finite() && (x == 0.0 || x.abs().to_bits() >= SMALLEST);
        [self.keep, self.rate, self.epsilon].into_iter().all(fits)
            && self.epsilon.is_sign_positive()
    }

    /// The bits of a weight after a step, from those of all three; its own bits if that is not finite.
    #[inline(always)]
    fn stepped(&self, weight: u32, first: u32, second: u32) -> u32 {
        // No closures: one that is not inlined would keep the loop from becoming vector instructions.
        let (kept, first) = (flushed(f32::from_bits(weight)), flushed(f32::from_bits(first)));
        let root = flushed(f32::from_bits(second)).sqrt();
        let quotient = flushed(first / (root + self.epsilon));
        let after = flushed(flushed(kept * self.keep) - flushed(quotient * self.rate)).to_bits();
        if after & 0x7f80_0000 == 0x7f80_0000 { weight } else { after }
    }
}

/// A float, or +0 if it is below 2^-125 in size.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    // Compared as bits, which no processor flushes.
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff < SMALLEST { 0 } else { bits })
}

/// The bits of an fp16 value as fp32.
#[inline(always)]
fn widened(x: u16) -> u32 {
    let (sign, size) = (u32::from(x & 0x8000) << 16, u32::from(x & 0x7fff));
    // A subnormal number is so many times 2^-24, which is exact.
    let tiny = (size as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let normal = (size << 13) + 0x3800_0000;
    sign | match size {
        0x7c00.. => normal + 0x3800_0000,
        0x0400.. => normal,
        _ => tiny,
    }
}

/// The bits of floats as fp32, as many as `values` holds.
#[inline(always)]
fn widen(bits: FloatBits, values: &[u8], out: &mut [u32]) {
    let two = values.as_chunks().0.iter().map(|x| u16::from_le_bytes(*x));
    match bits {
        FloatBits::BFloat16 => {
            out.iter_mut().zip(two).for_each(|(to, x)| *to = u32::from(x) << 16);
        }
        FloatBits::Float16 => out.iter_mut().zip(two).for_each(|(to, x)| *to = widened(x)),
        FloatBits::Float32 => {
            for (to, x) in out.iter_mut().zip(values.as_chunks().0) {
                *to = u32::from_le_bytes(*x);
            }
        }
    }
}

/// The reverse of [`widen`], rounded to the nearest, ties to even.
#[inline(always)]
fn narrow(bits: FloatBits, values: &[u32], out: &mut [u8]) {
    match bits {
        FloatBits::BFloat16 => {
            for (to, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *to = ((x.wrapping_add(0x7fff + (x >> 16 & 1)) >> 16) as u16).to_le_bytes();
            }
        }
        FloatBits::Float16 => {
            for (to, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *to = fp16(*x).to_le_bytes();
            }
        }
        FloatBits::Float32 => {
            for (to, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *to = x.to_le_bytes();
            }
        }
    }
}

vectorized! {
    /// Weights after a step: see [`Kernels::optimizer_step`].
    fn stepped(factors: StepFactors, values: [(FloatBits, &[u8]); 3], out: &mut [u8]) {
        // Where there are no second moments, they stay zeros.
        let mut blocks = [[0u32; BLOCK]; 3];
        let (bits, width) = (values[0].0, values[0].0.width().bytes());
        for (i, out) in out.chunks_mut(BLOCK * width).enumerate() {
            let (first, count) = (i * BLOCK, out.len() / width);
            for (block, (bits, values)) in blocks.iter_mut().zip(values) {
                let width = bits.width().bytes();
                if !values.is_empty() {
                    widen(bits, &values[first * width..(first + count) * width], block);
                }
            }
            let [weights, firsts, seconds] = &mut blocks;
            for ((w, m), v) in weights.iter_mut().zip(&*firsts).zip(&*seconds) {
                *w = factors.stepped(*w, *m, *v);
            }
            narrow(bits, weights, out);
        }
    }

    /// Floats as fp32: see [`Kernels::to_floats`].
    fn floats(bits: FloatBits, values: &[u8], out: &mut [f32]) {
        let mut block = [0u32; BLOCK];
        let width = bits.width().bytes();
        for (values, out) in values.chunks(BLOCK * width).zip(out.chunks_mut(BLOCK)) {
            widen(bits, values, &mut block);
            out.iter_mut().zip(&block).for_each(|(to, x)| *to = f32::from_bits(*x));
        }
    }
}
