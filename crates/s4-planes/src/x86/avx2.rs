//! AVX2: bytes are moved by packs and unpacks, 32 elements at a time. Packs and unpacks work within
//! each half of a vector, which [`in_order`] makes up for.
//!
//! Callers check the sizes; the elements after the last full block go to the scalar kernels.

use std::arch::x86_64::*;

use crate::scalar::{self, PLAIN, ROTATED, SPREAD};

#[inline]
#[target_feature(enable = "avx2")]
fn load(src: &[u8]) -> __m256i {
    assert!(src.len() >= 32);
    // SAFETY: 32 bytes are readable; the load needs no alignment.
    unsafe { _mm256_loadu_si256(src.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(dst: &mut [u8], v: __m256i) {
    assert!(dst.len() >= 32);
    // SAFETY: 32 bytes are writable; the store needs no alignment.
    unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), v) }
}

/// Exchanges the middle quarters: sorts the result of a pack, prepares the operands of an unpack.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(v: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0b11_01_10_00>(v)
}

/// The high bytes and the low bytes of 32 16-bit values.
#[inline]
#[target_feature(enable = "avx2")]
fn unzip8(x: __m256i, y: __m256i) -> (__m256i, __m256i) {
    let mask = _mm256_set1_epi16(0x00ff);
    let high = _mm256_packus_epi16(_mm256_srli_epi16::<8>(x), _mm256_srli_epi16::<8>(y));
    let low = _mm256_packus_epi16(_mm256_and_si256(x, mask), _mm256_and_si256(y, mask));
    (in_order(high), in_order(low))
}

/// Undoes [`unzip8`].
#[inline]
#[target_feature(enable = "avx2")]
fn zip8(high: __m256i, low: __m256i) -> (__m256i, __m256i) {
    let (high, low) = (in_order(high), in_order(low));
    (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high))
}

/// The high halves and the low halves of 16 32-bit values.
#[inline]
#[target_feature(enable = "avx2")]
fn unzip16(x: __m256i, y: __m256i) -> (__m256i, __m256i) {
    let mask = _mm256_set1_epi32(0x0000_ffff);
    let high = _mm256_packus_epi32(_mm256_srli_epi32::<16>(x), _mm256_srli_epi32::<16>(y));
    let low = _mm256_packus_epi32(_mm256_and_si256(x, mask), _mm256_and_si256(y, mask));
    (in_order(high), in_order(low))
}

/// Undoes [`unzip16`].
#[inline]
#[target_feature(enable = "avx2")]
fn zip16(high: __m256i, low: __m256i) -> (__m256i, __m256i) {
    let (high, low) = (in_order(high), in_order(low));
    (_mm256_unpacklo_epi16(low, high), _mm256_unpackhi_epi16(low, high))
}

/// Bit by bit: `x` where `mask` is set, `y` elsewhere.
#[inline]
#[target_feature(enable = "avx2")]
fn pick(mask: __m256i, x: __m256i, y: __m256i) -> __m256i {
    _mm256_or_si256(_mm256_and_si256(mask, x), _mm256_andnot_si256(mask, y))
}

#[inline]
#[target_feature(enable = "avx2")]
fn arrange2<const FORM: u8>(v: __m256i) -> __m256i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm256_or_si256(_mm256_slli_epi16::<1>(v), _mm256_srli_epi16::<15>(v)),
        _ => pick(_mm256_set1_epi16(0x007f), v, {
            _mm256_and_si256(_mm256_slli_epi16::<1>(v), _mm256_set1_epi16(0xff00_u16 as i16))
        }),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn restore2<const FORM: u8>(v: __m256i) -> __m256i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm256_or_si256(_mm256_srli_epi16::<1>(v), _mm256_slli_epi16::<15>(v)),
        _ => pick(_mm256_set1_epi16(0x007f), v, {
            _mm256_and_si256(_mm256_srli_epi16::<1>(v), _mm256_set1_epi16(0x7f80))
        }),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn arrange4<const FORM: u8>(v: __m256i) -> __m256i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm256_or_si256(_mm256_slli_epi32::<1>(v), _mm256_srli_epi32::<31>(v)),
        _ => pick(_mm256_set1_epi32(0x007f_ffff), v, {
            let top = _mm256_set1_epi32(0xff00_0000_u32 as i32);
            _mm256_and_si256(_mm256_slli_epi32::<1>(v), top)
        }),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn restore4<const FORM: u8>(v: __m256i) -> __m256i {
    match FORM {
        PLAIN => v,
        ROTATED => _mm256_or_si256(_mm256_srli_epi32::<1>(v), _mm256_slli_epi32::<31>(v)),
        _ => pick(_mm256_set1_epi32(0x007f_ffff), v, {
            _mm256_and_si256(_mm256_srli_epi32::<1>(v), _mm256_set1_epi32(0x7f80_0000))
        }),
    }
}

/// The signs of 32 16-bit values, packed.
#[inline]
#[target_feature(enable = "avx2")]
fn signs2(x: __m256i, y: __m256i) -> [u8; 4] {
    _mm256_movemask_epi8(in_order(_mm256_packs_epi16(x, y))).to_le_bytes()
}

/// Sets the signs of 16 16-bit values, whose sign bits are clear.
#[inline]
#[target_feature(enable = "avx2")]
fn signed2(v: __m256i, signs: [u8; 2]) -> __m256i {
    let bit = _mm256_setr_epi16(
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768,
    );
    let all = _mm256_and_si256(_mm256_set1_epi16(i16::from_le_bytes(signs)), bit);
    let set = _mm256_cmpeq_epi16(all, bit);
    _mm256_or_si256(v, _mm256_slli_epi16::<15>(set))
}

/// Sets the signs of 8 32-bit values, whose sign bits are clear.
#[inline]
#[target_feature(enable = "avx2")]
fn signed4(v: __m256i, signs: u8) -> __m256i {
    let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let all = _mm256_and_si256(_mm256_set1_epi32(i32::from(signs)), bit);
    let set = _mm256_cmpeq_epi32(all, bit);
    _mm256_or_si256(v, _mm256_slli_epi32::<31>(set))
}

/// Four vectors of 4-byte elements.
#[inline]
#[target_feature(enable = "avx2")]
fn load4(block: &[u8; 128]) -> [__m256i; 4] {
    [load(block), load(&block[32..]), load(&block[64..]), load(&block[96..])]
}

/// Undoes [`load4`].
#[inline]
#[target_feature(enable = "avx2")]
fn store4(block: &mut [u8; 128], v: [__m256i; 4]) {
    store(block, v[0]);
    store(&mut block[32..], v[1]);
    store(&mut block[64..], v[2]);
    store(&mut block[96..], v[3]);
}

/// [`scalar::split`] for 2-byte elements, which have no plane `b`.
#[target_feature(enable = "avx2")]
pub(crate) fn split2<const FORM: u8>(src: &[u8], s: &mut [u8], e: &mut [u8], a: &mut [u8]) {
    let (blocks, src) = src.as_chunks::<64>();
    let (s_blocks, s) = scalar::block_signs_mut::<4>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks_mut::<32>();
    let (a_blocks, a) = a.as_chunks_mut::<32>();
    for (i, ((block, e), a)) in blocks.iter().zip(e_blocks).zip(a_blocks).enumerate() {
        let (x, y) = (load(block), load(&block[32..]));
        if FORM == SPREAD {
            s_blocks[i] = signs2(x, y);
        }
        let (high, low) = unzip8(arrange2::<FORM>(x), arrange2::<FORM>(y));
        store(e, high);
        store(a, low);
    }
    scalar::split::<2, FORM>(src, s, e, a, &mut []);
}

/// [`scalar::merge`] for 2-byte elements, which have no plane `b`.
#[target_feature(enable = "avx2")]
pub(crate) fn merge2<const FORM: u8>(s: &[u8], e: &[u8], a: &[u8], dst: &mut [u8]) {
    let (blocks, dst) = dst.as_chunks_mut::<64>();
    let (s_blocks, s) = scalar::block_signs::<4>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks::<32>();
    let (a_blocks, a) = a.as_chunks::<32>();
    for (i, ((block, e), a)) in blocks.iter_mut().zip(e_blocks).zip(a_blocks).enumerate() {
        let (x, y) = zip8(load(e), load(a));
        let (mut x, mut y) = (restore2::<FORM>(x), restore2::<FORM>(y));
        if FORM == SPREAD {
            let [s0, s1, s2, s3] = s_blocks[i];
            x = signed2(x, [s0, s1]);
            y = signed2(y, [s2, s3]);
        }
        store(block, x);
        store(&mut block[32..], y);
    }
    scalar::merge::<2, FORM>(s, e, a, &[], dst);
}

/// [`scalar::split`] for 4-byte elements.
#[target_feature(enable = "avx2")]
pub(crate) fn split4<const FORM: u8>(
    src: &[u8],
    s: &mut [u8],
    e: &mut [u8],
    a: &mut [u8],
    b: &mut [u8],
) {
    let (blocks, src) = src.as_chunks::<128>();
    let (s_blocks, s) = scalar::block_signs_mut::<4>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks_mut::<32>();
    let (a_blocks, a) = a.as_chunks_mut::<32>();
    let (b_blocks, b) = b.as_chunks_mut::<64>();
    let planes = e_blocks.iter_mut().zip(a_blocks).zip(b_blocks);
    for (i, (block, ((e, a), b))) in blocks.iter().zip(planes).enumerate() {
        let mut v = load4(block);
        if FORM == SPREAD {
            for (byte, v) in s_blocks[i].iter_mut().zip(v) {
                *byte = _mm256_movemask_ps(_mm256_castsi256_ps(v)) as u8;
            }
        }
        for v in &mut v {
            *v = arrange4::<FORM>(*v);
        }
        let (high0, low0) = unzip16(v[0], v[1]);
        let (high1, low1) = unzip16(v[2], v[3]);
        let (top, next) = unzip8(high0, high1);
        store(e, top);
        store(a, next);
        store(b, low0);
        store(&mut b[32..], low1);
    }
    scalar::split::<4, FORM>(src, s, e, a, b);
}

/// [`scalar::merge`] for 4-byte elements.
#[target_feature(enable = "avx2")]
pub(crate) fn merge4<const FORM: u8>(s: &[u8], e: &[u8], a: &[u8], b: &[u8], dst: &mut [u8]) {
    let (blocks, dst) = dst.as_chunks_mut::<128>();
    let (s_blocks, s) = scalar::block_signs::<4>(s, blocks.len());
    let (e_blocks, e) = e.as_chunks::<32>();
    let (a_blocks, a) = a.as_chunks::<32>();
    let (b_blocks, b) = b.as_chunks::<64>();
    let planes = e_blocks.iter().zip(a_blocks).zip(b_blocks);
    for (i, (block, ((e, a), b))) in blocks.iter_mut().zip(planes).enumerate() {
        let (high0, high1) = zip8(load(e), load(a));
        let (v0, v1) = zip16(high0, load(b));
        let (v2, v3) = zip16(high1, load(&b[32..]));
        let mut v = [v0, v1, v2, v3];
        for v in &mut v {
            *v = restore4::<FORM>(*v);
        }
        if FORM == SPREAD {
            for (v, signs) in v.iter_mut().zip(s_blocks[i]) {
                *v = signed4(*v, signs);
            }
        }
        store4(block, v);
    }
    scalar::merge::<4, FORM>(s, e, a, b, dst);
}

/// 4-byte elements to their four bytes, the most significant first.
#[target_feature(enable = "avx2")]
pub(crate) fn split_bytes4(src: &[u8], planes: [&mut [u8]; 4]) {
    let (blocks, tail) = src.as_chunks::<128>();
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes.map(|p| p.as_chunks_mut::<32>());
    let pairs = p0.iter_mut().zip(p1).zip(p2.iter_mut().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter().zip(pairs) {
        let v = load4(block);
        let (high0, low0) = unzip16(v[0], v[1]);
        let (high1, low1) = unzip16(v[2], v[3]);
        let (high, low) = (unzip8(high0, high1), unzip8(low0, low1));
        store(p0, high.0);
        store(p1, high.1);
        store(p2, low.0);
        store(p3, low.1);
    }
    scalar::split_bytes(tail, [t0, t1, t2, t3]);
}

/// Undoes [`split_bytes4`].
#[target_feature(enable = "avx2")]
pub(crate) fn merge_bytes4(planes: [&[u8]; 4], dst: &mut [u8]) {
    let (blocks, tail) = dst.as_chunks_mut::<128>();
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes.map(|p| p.as_chunks::<32>());
    let pairs = p0.iter().zip(p1).zip(p2.iter().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter_mut().zip(pairs) {
        let (high0, high1) = zip8(load(p0), load(p1));
        let (low0, low1) = zip8(load(p2), load(p3));
        let (v0, v1) = zip16(high0, low0);
        let (v2, v3) = zip16(high1, low1);
        store4(block, [v0, v1, v2, v3]);
    }
    scalar::merge_bytes([t0, t1, t2, t3], tail);
}
