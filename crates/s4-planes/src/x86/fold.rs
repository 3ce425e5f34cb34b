//! CRC-32C of values while they are in registers, by folding: V. Gopal et al., "Fast CRC Computation
//! for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.

use std::arch::x86_64::*;

/// The polynomial, reflected: bit 31 is the coefficient of x^0.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// Bytes that are added at a time.
pub(super) const BYTES: usize = 256;

/// x^n modulo the polynomial, reflected, as a factor of a carry-less multiplication (whose product is
/// reflected one bit lower).
const fn power(n: usize) -> i64 {
    let mut x = 1u32 << 31;
    let mut i = 0;
    while i < n {
        x = x >> 1 ^ if x & 1 == 1 { POLYNOMIAL } else { 0 };
        i += 1;
    }
    (x as i64) << 1
}

/// The factors that move each half of 128 bits past the next [`BYTES`] bytes.
const FACTORS: [i64; 2] = [power(8 * BYTES + 32), power(8 * BYTES - 32)];

/// The bytes so far, as a polynomial of [`BYTES`] bytes that has the same remainder.
pub(super) struct Fold {
    sums: [__m512i; 4],
    factors: __m512i,
    /// The checksum of the preceding bytes, until it is added.
    start: __m512i,
}

impl Fold {
    /// Continues from `crc`, the checksum of the preceding bytes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new(crc: u32) -> Self {
        let [low, high] = FACTORS;
        Self {
            sums: [_mm512_setzero_si512(); 4],
            factors: _mm512_set4_epi64(high, low, high, low),
            start: _mm512_zextsi128_si512(_mm_cvtsi32_si128(!crc as i32)),
        }
    }

    /// Adds the next [`BYTES`] bytes.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) fn add(&mut self, bytes: [__m512i; 4]) {
        for (sum, bytes) in self.sums.iter_mut().zip(bytes) {
            let low = _mm512_clmulepi64_epi128::<0x00>(*sum, self.factors);
            let high = _mm512_clmulepi64_epi128::<0x11>(*sum, self.factors);
            *sum = _mm512_ternarylogic_epi64::<0b1001_0110>(low, high, bytes);
        }
        self.sums[0] = _mm512_xor_si512(self.sums[0], self.start);
        self.start = _mm512_setzero_si512();
    }

    /// The checksum of all bytes. At least [`BYTES`] must have been added.
    #[target_feature(enable = "avx512f,sse4.2")]
    pub(super) fn finish(&self) -> u32 {
        let mut crc = 0;
        for sum in self.sums {
            let mut words = [0u64; 8];
            // SAFETY: the reference is to 64 writable bytes; the store needs no alignment.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), sum) };
            crc = words.iter().fold(crc, |crc, word| _mm_crc32_u64(crc, *word));
        }
        !(crc as u32)
    }
}
