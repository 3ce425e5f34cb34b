//! Converts between the order of steps and the order of symbols.
//!
//! The kernels work on two segments, `a` and `b`, at a time. A step's register holds the symbols of
//! 32 lanes of both, interleaved: byte `2l` is lane `l` of `a`, byte `2l + 1` lane `l` of `b`. In
//! memory a lane's 8 symbols of a block are adjacent.

use std::arch::x86_64::*;

use super::super::stream::{BLOCK, RUN};

/// Registers of a block of symbols.
const ROWS: usize = BLOCK / 64;

/// An index of elements of `size` bytes for a permutation of two registers: element `i` of the
/// result is element `from + i / 2 * step` of the first register if `i` is even, of the second one
/// if it is odd.
const fn zip(size: usize, from: usize, step: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 / size {
        index[i * size] = (from + i / 2 * step + i % 2 * (64 / size)) as u8;
        i += 1;
    }
    index
}

/// Bytes of one of two interleaved segments.
static ZIP_SEGMENT: [[u8; 64]; 2] = [zip(1, 0, 2), zip(1, 1, 2)];
/// The first and the second half of the words.
static ZIP_WORDS: [[u8; 64]; 2] = [zip(2, 0, 1), zip(2, 16, 1)];
/// The first and the second half of the double words.
static ZIP_DWORDS: [[u8; 64]; 2] = [zip(4, 0, 1), zip(4, 8, 1)];

/// An index of elements of `size` bytes for a permutation of two registers: every second element,
/// from `from` on.
const fn unzip(size: usize, from: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut i = 0;
    while i < 64 / size {
        index[i * size] = (from + 2 * i) as u8;
        i += 1;
    }
    index
}

/// Even and odd words.
static UNZIP_WORDS: [[u8; 64]; 2] = [unzip(2, 0), unzip(2, 1)];
/// Even and odd double words.
static UNZIP_DWORDS: [[u8; 64]; 2] = [unzip(4, 0), unzip(4, 1)];

/// A block's symbols of one segment, `a` (0) or `b` (1), in memory order.
///
/// Three rounds of pairing: steps 0 and 1 of each lane, steps 0 to 3, steps 0 to 7.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub(super) fn to_symbols(steps: &[__m512i; RUN], segment: usize) -> [__m512i; ROWS] {
    let bytes = load(&ZIP_SEGMENT[segment]);
    let s01 = _mm512_permutex2var_epi8(steps[0], bytes, steps[1]);
    let s23 = _mm512_permutex2var_epi8(steps[2], bytes, steps[3]);
    let s45 = _mm512_permutex2var_epi8(steps[4], bytes, steps[5]);
    let s67 = _mm512_permutex2var_epi8(steps[6], bytes, steps[7]);
    let [low, high] = [load(&ZIP_WORDS[0]), load(&ZIP_WORDS[1])];
    let low0 = _mm512_permutex2var_epi16(s01, low, s23);
    let high0 = _mm512_permutex2var_epi16(s01, high, s23);
    let low4 = _mm512_permutex2var_epi16(s45, low, s67);
    let high4 = _mm512_permutex2var_epi16(s45, high, s67);
    let [low, high] = [load(&ZIP_DWORDS[0]), load(&ZIP_DWORDS[1])];
    [
        _mm512_permutex2var_epi32(low0, low, low4),
        _mm512_permutex2var_epi32(low0, high, low4),
        _mm512_permutex2var_epi32(high0, low, high4),
        _mm512_permutex2var_epi32(high0, high, high4),
    ]
}

/// The rows of a block of one segment as four registers: the words of register `k` are the
/// symbols of steps `2k` and `2k + 1`, lane by lane. The inverse of [`to_symbols`] without its
/// first round.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn to_steps(rows: &[__m512i; ROWS]) -> [__m512i; RUN / 2] {
    let [even, odd] = [load(&UNZIP_DWORDS[0]), load(&UNZIP_DWORDS[1])];
    let low0 = _mm512_permutex2var_epi32(rows[0], even, rows[1]);
    let low4 = _mm512_permutex2var_epi32(rows[0], odd, rows[1]);
    let high0 = _mm512_permutex2var_epi32(rows[2], even, rows[3]);
    let high4 = _mm512_permutex2var_epi32(rows[2], odd, rows[3]);
    let [even, odd] = [load(&UNZIP_WORDS[0]), load(&UNZIP_WORDS[1])];
    [
        _mm512_permutex2var_epi16(low0, even, high0),
        _mm512_permutex2var_epi16(low0, odd, high0),
        _mm512_permutex2var_epi16(low4, even, high4),
        _mm512_permutex2var_epi16(low4, odd, high4),
    ]
}

/// Interleaves the double words of the first (0) or the second (1) halves of two registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn zip_dwords(a: __m512i, b: __m512i, half: usize) -> __m512i {
    _mm512_permutex2var_epi32(a, load(&ZIP_DWORDS[half]), b)
}

/// The even and the odd double words of two registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn unzip_dwords(a: __m512i, b: __m512i) -> [__m512i; 2] {
    // Not by `map`, into which closures with target features are not inlined.
    let even = _mm512_permutex2var_epi32(a, load(&UNZIP_DWORDS[0]), b);
    [even, _mm512_permutex2var_epi32(a, load(&UNZIP_DWORDS[1]), b)]
}

/// 64 bytes as a register.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load<T: Copy, const N: usize>(bytes: &[T; N]) -> __m512i {
    const { assert!(size_of::<[T; N]>() == 64) };
    // SAFETY: the reference is to 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
