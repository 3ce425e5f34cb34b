//! NEON: its loads and stores split elements into vectors of single bytes and join these again, so
//! elements are rotated across vectors, 16 at a time. The form with a plane of signs is left to the
//! scalar kernels.
//!
//! Callers check the sizes; the elements after the last full block go to the scalar kernels.

use std::arch::aarch64::*;

use crate::scalar::{self, PLAIN};

#[inline]
#[target_feature(enable = "neon")]
fn load(src: &[u8; 16]) -> uint8x16_t {
    // SAFETY: 16 bytes are readable; the load needs no alignment.
    unsafe { vld1q_u8(src.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(dst: &mut [u8; 16], v: uint8x16_t) {
    // SAFETY: 16 bytes are writable; the store needs no alignment.
    unsafe { vst1q_u8(dst.as_mut_ptr(), v) }
}

/// Byte 0 of 16 elements, then byte 1.
#[inline]
#[target_feature(enable = "neon")]
fn load2(src: &[u8; 32]) -> [uint8x16_t; 2] {
    // SAFETY: 32 bytes are readable; the load needs no alignment.
    let v = unsafe { vld2q_u8(src.as_ptr()) };
    [v.0, v.1]
}

/// Undoes [`load2`].
#[inline]
#[target_feature(enable = "neon")]
fn store2(dst: &mut [u8; 32], [v0, v1]: [uint8x16_t; 2]) {
    // SAFETY: 32 bytes are writable; the store needs no alignment.
    unsafe { vst2q_u8(dst.as_mut_ptr(), uint8x16x2_t(v0, v1)) }
}

/// Byte 0 of 16 elements, then bytes 1, 2 and 3.
#[inline]
#[target_feature(enable = "neon")]
fn load4(src: &[u8; 64]) -> [uint8x16_t; 4] {
    // SAFETY: 64 bytes are readable; the load needs no alignment.
    let v = unsafe { vld4q_u8(src.as_ptr()) };
    [v.0, v.1, v.2, v.3]
}

/// Undoes [`load4`].
#[inline]
#[target_feature(enable = "neon")]
fn store4(dst: &mut [u8; 64], [v0, v1, v2, v3]: [uint8x16_t; 4]) {
    // SAFETY: 64 bytes are writable; the store needs no alignment.
    unsafe { vst4q_u8(dst.as_mut_ptr(), uint8x16x4_t(v0, v1, v2, v3)) }
}

/// Rotates elements, given as vectors of their bytes, left by one bit; or keeps them.
#[inline]
#[target_feature(enable = "neon")]
fn arrange<const W: usize, const FORM: u8>(v: [uint8x16_t; W]) -> [uint8x16_t; W] {
    let mut rotated = v;
    if FORM != PLAIN {
        for i in 0..W {
            rotated[i] = vsriq_n_u8::<7>(vshlq_n_u8::<1>(v[i]), v[(i + W - 1) % W]);
        }
    }
    rotated
}

/// Undoes [`arrange`].
#[inline]
#[target_feature(enable = "neon")]
fn restore<const W: usize, const FORM: u8>(v: [uint8x16_t; W]) -> [uint8x16_t; W] {
    let mut rotated = v;
    if FORM != PLAIN {
        for i in 0..W {
            rotated[i] = vsliq_n_u8::<7>(vshrq_n_u8::<1>(v[i]), v[(i + 1) % W]);
        }
    }
    rotated
}

/// [`scalar::split`] for 2-byte elements, which have no plane `b`.
#[target_feature(enable = "neon")]
pub(crate) fn split2<const FORM: u8>(src: &[u8], e: &mut [u8], a: &mut [u8]) {
    let (blocks, src) = src.as_chunks();
    let (e_blocks, e) = e.as_chunks_mut();
    let (a_blocks, a) = a.as_chunks_mut();
    for ((block, e), a) in blocks.iter().zip(e_blocks).zip(a_blocks) {
        let v = arrange::<2, FORM>(load2(block));
        store(a, v[0]);
        store(e, v[1]);
    }
    scalar::split::<2, FORM>(src, &mut [], e, a, &mut []);
}

/// [`scalar::merge`] for 2-byte elements, which have no plane `b`.
#[target_feature(enable = "neon")]
pub(crate) fn merge2<const FORM: u8>(e: &[u8], a: &[u8], dst: &mut [u8]) {
    let (blocks, dst) = dst.as_chunks_mut();
    let (e_blocks, e) = e.as_chunks();
    let (a_blocks, a) = a.as_chunks();
    for ((block, e), a) in blocks.iter_mut().zip(e_blocks).zip(a_blocks) {
        store2(block, restore::<2, FORM>([load(a), load(e)]));
    }
    scalar::merge::<2, FORM>(&[], e, a, &[], dst);
}

/// [`scalar::split`] for 4-byte elements.
#[target_feature(enable = "neon")]
pub(crate) fn split4<const FORM: u8>(src: &[u8], e: &mut [u8], a: &mut [u8], b: &mut [u8]) {
    let (blocks, src) = src.as_chunks();
    let (e_blocks, e) = e.as_chunks_mut();
    let (a_blocks, a) = a.as_chunks_mut();
    let (b_blocks, b) = b.as_chunks_mut();
    for (((block, e), a), b) in blocks.iter().zip(e_blocks).zip(a_blocks).zip(b_blocks) {
        let v = arrange::<4, FORM>(load4(block));
        store2(b, [v[0], v[1]]);
        store(a, v[2]);
        store(e, v[3]);
    }
    scalar::split::<4, FORM>(src, &mut [], e, a, b);
}

/// [`scalar::merge`] for 4-byte elements.
#[target_feature(enable = "neon")]
pub(crate) fn merge4<const FORM: u8>(e: &[u8], a: &[u8], b: &[u8], dst: &mut [u8]) {
    let (blocks, dst) = dst.as_chunks_mut();
    let (e_blocks, e) = e.as_chunks();
    let (a_blocks, a) = a.as_chunks();
    let (b_blocks, b) = b.as_chunks();
    for (((block, e), a), b) in blocks.iter_mut().zip(e_blocks).zip(a_blocks).zip(b_blocks) {
        let [b0, b1] = load2(b);
        store4(block, restore::<4, FORM>([b0, b1, load(a), load(e)]));
    }
    scalar::merge::<4, FORM>(&[], e, a, b, dst);
}

/// 4-byte elements to their four bytes, the most significant first.
#[target_feature(enable = "neon")]
pub(crate) fn split_bytes4(src: &[u8], planes: [&mut [u8]; 4]) {
    let (blocks, tail) = src.as_chunks();
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes.map(|p| p.as_chunks_mut());
    let pairs = p0.iter_mut().zip(p1).zip(p2.iter_mut().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter().zip(pairs) {
        let v = load4(block);
        store(p0, v[3]);
        store(p1, v[2]);
        store(p2, v[1]);
        store(p3, v[0]);
    }
    scalar::split_bytes(tail, [t0, t1, t2, t3]);
}

/// Undoes [`split_bytes4`].
#[target_feature(enable = "neon")]
pub(crate) fn merge_bytes4(planes: [&[u8]; 4], dst: &mut [u8]) {
    let (blocks, tail) = dst.as_chunks_mut();
    let [(p0, t0), (p1, t1), (p2, t2), (p3, t3)] = planes.map(|p| p.as_chunks());
    let pairs = p0.iter().zip(p1).zip(p2.iter().zip(p3));
    for (block, ((p0, p1), (p2, p3))) in blocks.iter_mut().zip(pairs) {
        store4(block, [load(p3), load(p2), load(p1), load(p0)]);
    }
    scalar::merge_bytes([t0, t1, t2, t3], tail);
}
