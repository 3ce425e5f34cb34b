//! AVX-512 with VBMI: bytes are moved by two-register permutes, 128 bytes of elements at a time.
//!
//! Callers check the sizes; the elements after the last full block go to the scalar kernels.

use std::arch::x86_64::*;

use s4_format::crc32c_append;

use super::fold::{self, Fold};
use crate::scalar::{self, PLAIN, ROTATED, SPREAD};

/// Bytes of elements in a block.
const BLOCK: usize = 128;

/// For a permute of a pair of vectors `x`, `y`: byte `i` of the result is byte `table[i]` of `x`,
/// then (from 64) of `y`.
type Table = [u8; 64];

/// Splits elements of `width` bytes into `planes` planes: byte `first` of 64 / `planes` elements,
/// then the byte below it of the same elements, and so on.
const fn gather(width: usize, first: usize, planes: usize) -> Table {
    let per_plane = 64 / planes;
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = ((i % per_plane) * width + first - i / per_plane) as u8;
        i += 1;
    }
    table
}

/// The low two bytes of each 4-byte element.
const fn low_halves() -> Table {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (i / 2 * 4 + i % 2) as u8;
        i += 1;
    }
    table
}

/// Elements `at..at + 32` of 2 bytes, from the plane of low bytes and the plane of high bytes.
const fn zip2(at: usize) -> Table {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (i % 2 * 64 + at + i / 2) as u8;
        i += 1;
    }
    table
}

/// Elements `at..at + 16` of 4 bytes. The second vector has 32 top bytes and 32 bytes of the next
/// plane; the first has the low bytes, either as 32 pairs or as two planes as well.
const fn zip4(at: usize, pairs: bool) -> Table {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 16 {
        let element = at + i;
        table[4 * i] = if pairs { 2 * element } else { 32 + element } as u8;
        table[4 * i + 1] = if pairs { 2 * element + 1 } else { element } as u8;
        table[4 * i + 2] = (64 + 32 + element) as u8;
        table[4 * i + 3] = (64 + element) as u8;
        i += 1;
    }
    table
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(src: &[u8]) -> __m512i {
    assert!(src.len() >= 64);
    // SAFETY: 64 bytes are readable; the load needs no alignment.
    unsafe { _mm512_loadu_si512(src.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(dst: &mut [u8], v: __m512i) {
    assert!(dst.len() >= 64);
    // SAFETY: 64 bytes are writable; the store needs no alignment.
    unsafe { _mm512_storeu_si512(dst.as_mut_ptr().cast(), v) }
}

/// Two halves from two places.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves(lo: &[u8; 32], hi: &[u8; 32]) -> __m512i {
    // SAFETY: both references have 32 readable bytes; the loads need no alignment.
    let (lo, hi) =
        unsafe { (_mm256_loadu_si256(lo.as_ptr().cast()), _mm256_loadu_si256(hi.as_ptr().cast())) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lo), hi)
}

/// Undoes [`load_halves`].
#[inline]
#[target_feature(enable = "avx512f")]
fn store_halves(v: __m512i, lo: &mut [u8; 32], hi: &mut [u8; 32]) {
    let (low, high) = (_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v));
    // SAFETY: both references have 32 writable bytes; the stores need no alignment.
    unsafe {
        _mm256_storeu_si256(lo.as_mut_ptr().cast(), low);
        _mm256_storeu_si256(hi.as_mut_ptr().cast(), high);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
fn arrange2<const FORM: u8>(v: __m512i) -> __m512i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm512_shldi_epi16::<1>(v, v),
        _ => pick(_mm512_set1_epi16(0xff00_u16 as i16), _mm512_slli_epi16::<1>(v), {
            _mm512_and_si512(v, _mm512_set1_epi16(0x007f))
        }),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
fn restore2<const FORM: u8>(v: __m512i) -> __m512i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm512_shldi_epi16::<15>(v, v),
        _ => pick(_mm512_set1_epi16(0x7f80), _mm512_srli_epi16::<1>(v), {
            _mm512_and_si512(v, _mm512_set1_epi16(0x007f))
        }),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn arrange4<const FORM: u8>(v: __m512i) -> __m512i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm512_rol_epi32::<1>(v),
        _ => pick(_mm512_set1_epi32(0xff00_0000_u32 as i32), _mm512_slli_epi32::<1>(v), {
            _mm512_and_si512(v, _mm512_set1_epi32(0x007f_ffff))
        }),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn restore4<const FORM: u8>(v: __m512i) -> __m512i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm512_ror_epi32::<1>(v),
        _ => pick(_mm512_set1_epi32(0x7f80_0000), _mm512_srli_epi32::<1>(v), {
            _mm512_and_si512(v, _mm512_set1_epi32(0x007f_ffff))
        }),
    }
}

/// Bit by bit: `x` where `mask` is set, `y` elsewhere.
#[inline]
#[target_feature(enable = "avx512f")]
fn pick(mask: __m512i, x: __m512i, y: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0b1100_1010>(mask, x, y)
}

/// [`scalar::split`] for 2-byte elements, which have no plane `b`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub(crate) fn split2<const FORM: u8>(src: &[u8], s: &mut [u8], e: &mut [u8], a: &mut [u8]) {
    const HIGH: Table = gather(2, 1, 1);
    const LOW: Table = gather(2, 0, 1);
    let (high, low) = (load(&HIGH), load(&LOW));
    let (blocks, src) = src.as_chunks::<BLOCK>();
    let (s_blocks, s) = scalar::block_signs_mut::<8>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks_mut::<64>();
    let (a_blocks, a) = a.as_chunks_mut::<64>();
    for (i, ((block, e), a)) in blocks.iter().zip(e_blocks).zip(a_blocks).enumerate() {
        let (x, y) = (load(block), load(&block[64..]));
        if FORM == SPREAD {
            let signs = u64::from(_mm512_movepi16_mask(y)) << 32;
            s_blocks[i] = (signs | u64::from(_mm512_movepi16_mask(x))).to_le_bytes();
        }
        let (x, y) = (arrange2::<FORM>(x), arrange2::<FORM>(y));
        store(e, _mm512_permutex2var_epi8(x, high, y));
        store(a, _mm512_permutex2var_epi8(x, low, y));
    }
    scalar::split::<2, FORM>(src, s, e, a, &mut []);
}

/// [`scalar::merge`] for 2-byte elements, which have no plane `b`. If SUM is set, returns the
/// checksum of the preceding bytes, `crc`, continued with `dst`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,vpclmulqdq")]
pub(crate) fn merge2<const FORM: u8, const SUM: bool>(
    s: &[u8],
    e: &[u8],
    a: &[u8],
    dst: &mut [u8],
    crc: u32,
) -> u32 {
    const FIRST: Table = zip2(0);
    const SECOND: Table = zip2(32);
    let (first, second) = (load(&FIRST), load(&SECOND));
    let sign = _mm512_set1_epi16(i16::MIN);
    let (e_blocks, e) = e.as_chunks::<64>();
    let (a_blocks, a) = a.as_chunks::<64>();
    let (s_blocks, s) = scalar::block_signs::<8>(s, e_blocks.len());
    let block = |i: usize| {
        let (e, a) = (load(&e_blocks[i]), load(&a_blocks[i]));
        let mut x = restore2::<FORM>(_mm512_permutex2var_epi8(a, first, e));
        let mut y = restore2::<FORM>(_mm512_permutex2var_epi8(a, second, e));
        if FORM == SPREAD {
            let signs = u64::from_le_bytes(s_blocks[i]);
            x = _mm512_or_si512(x, _mm512_maskz_mov_epi16(signs as u32, sign));
            y = _mm512_or_si512(y, _mm512_maskz_mov_epi16((signs >> 32) as u32, sign));
        }
        [x, y]
    };
    let (crc, rest) = merge_blocks::<SUM>(block, dst, crc);
    scalar::merge::<2, FORM>(s, e, a, &[], rest);
    if SUM { crc32c_append(crc, rest) } else { crc }
}

/// Writes the blocks that `block` gives by index, and returns what is left of `dst`. If SUM is set,
/// the returned checksum continues `crc` with these blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,vpclmulqdq")]
fn merge_blocks<const SUM: bool>(
    block: impl Fn(usize) -> [__m512i; 2],
    dst: &mut [u8],
    mut crc: u32,
) -> (u32, &mut [u8]) {
    let (blocks, rest) = dst.as_chunks_mut::<BLOCK>();
    let (pairs, last) = blocks.as_chunks_mut::<{ fold::BYTES / BLOCK }>();
    let mut fold = Fold::new(crc);
    for (i, [to, next_to]) in pairs.iter_mut().enumerate() {
        let ([x, y], [z, w]) = (block(2 * i), block(2 * i + 1));
        store(to, x);
        store(&mut to[64..], y);
        store(next_to, z);
        store(&mut next_to[64..], w);
        if SUM {
            fold.add([x, y, z, w]);
        }
    }
    if SUM && !pairs.is_empty() {
        crc = fold.finish();
    }
    for to in last {
        let [x, y] = block(2 * pairs.len());
        store(to, x);
        store(&mut to[64..], y);
        if SUM {
            crc = crc32c_append(crc, to);
        }
    }
    (crc, rest)
}

/// [`scalar::split`] for 4-byte elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub(crate) fn split4<const FORM: u8>(
    src: &[u8],
    s: &mut [u8],
    e: &mut [u8],
    a: &mut [u8],
    b: &mut [u8],
) {
    const HIGH: Table = gather(4, 3, 2);
    const LOW: Table = low_halves();
    let (high, low) = (load(&HIGH), load(&LOW));
    let sign = _mm512_set1_epi32(i32::MIN);
    let (blocks, src) = src.as_chunks::<BLOCK>();
    let (s_blocks, s) = scalar::block_signs_mut::<4>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks_mut::<32>();
    let (a_blocks, a) = a.as_chunks_mut::<32>();
    let (b_blocks, b) = b.as_chunks_mut::<64>();
    let planes = e_blocks.iter_mut().zip(a_blocks).zip(b_blocks);
    for (i, (block, ((e, a), b))) in blocks.iter().zip(planes).enumerate() {
        let (x, y) = (load(block), load(&block[64..]));
        if FORM == SPREAD {
            let signs = u32::from(_mm512_test_epi32_mask(y, sign)) << 16;
            s_blocks[i] = (signs | u32::from(_mm512_test_epi32_mask(x, sign))).to_le_bytes();
        }
        let (x, y) = (arrange4::<FORM>(x), arrange4::<FORM>(y));
        store_halves(_mm512_permutex2var_epi8(x, high, y), e, a);
        store(b, _mm512_permutex2var_epi8(x, low, y));
    }
    scalar::split::<4, FORM>(src, s, e, a, b);
}

/// [`scalar::merge`] for 4-byte elements. The checksum is as for [`merge2`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,vpclmulqdq")]
pub(crate) fn merge4<const FORM: u8, const SUM: bool>(
    s: &[u8],
    e: &[u8],
    a: &[u8],
    b: &[u8],
    dst: &mut [u8],
    crc: u32,
) -> u32 {
    const FIRST: Table = zip4(0, true);
    const SECOND: Table = zip4(16, true);
    let (first, second) = (load(&FIRST), load(&SECOND));
    let sign = _mm512_set1_epi32(i32::MIN);
    let (e_blocks, e) = e.as_chunks::<32>();
    let (a_blocks, a) = a.as_chunks::<32>();
    let (b_blocks, b) = b.as_chunks::<64>();
    let (s_blocks, s) = scalar::block_signs::<4>(s, e_blocks.len());
    let block = |i: usize| {
        let (high, low) = (load_halves(&e_blocks[i], &a_blocks[i]), load(&b_blocks[i]));
        let mut x = restore4::<FORM>(_mm512_permutex2var_epi8(low, first, high));
        let mut y = restore4::<FORM>(_mm512_permutex2var_epi8(low, second, high));
        if FORM == SPREAD {
            let signs = u32::from_le_bytes(s_blocks[i]);
            x = _mm512_mask_or_epi32(x, signs as u16, x, sign);
            y = _mm512_mask_or_epi32(y, (signs >> 16) as u16, y, sign);
        }
        [x, y]
    };
    let (crc, rest) = merge_blocks::<SUM>(block, dst, crc);
    scalar::merge::<4, FORM>(s, e, a, b, rest);
    if SUM { crc32c_append(crc, rest) } else { crc }
}

/// 4-byte elements to their four bytes, the most significant first.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub(crate) fn split_bytes4(src: &[u8], planes: [&mut [u8]; 4]) {
    const HIGH: Table = gather(4, 3, 2);
    const LOW: Table = gather(4, 1, 2);
    let (high, low) = (load(&HIGH), load(&LOW));
    let (blocks, tail) = src.as_chunks::<BLOCK>();
    let planes = planes.map(|p| p.as_chunks_mut::<32>());
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes;
    let pairs = p0.iter_mut().zip(p1).zip(p2.iter_mut().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter().zip(pairs) {
        let (x, y) = (load(block), load(&block[64..]));
        store_halves(_mm512_permutex2var_epi8(x, high, y), p0, p1);
        store_halves(_mm512_permutex2var_epi8(x, low, y), p2, p3);
    }
    scalar::split_bytes(tail, [t0, t1, t2, t3]);
}

/// Undoes [`split_bytes4`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
pub(crate) fn merge_bytes4(planes: [&[u8]; 4], dst: &mut [u8]) {
    const FIRST: Table = zip4(0, false);
    const SECOND: Table = zip4(16, false);
    let (first, second) = (load(&FIRST), load(&SECOND));
    let (blocks, tail) = dst.as_chunks_mut::<BLOCK>();
    let planes = planes.map(|p| p.as_chunks::<32>());
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes;
    let pairs = p0.iter().zip(p1).zip(p2.iter().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter_mut().zip(pairs) {
        let (high, low) = (load_halves(p0, p1), load_halves(p2, p3));
        store(block, _mm512_permutex2var_epi8(low, first, high));
        store(&mut block[64..], _mm512_permutex2var_epi8(low, second, high));
    }
    scalar::merge_bytes([t0, t1, t2, t3], tail);
}
