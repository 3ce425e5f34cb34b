//! The layouts in plain Rust: the oracle that every vector kernel is tested against, and the code
//! that vector kernels use for the elements after the last full vector.
//!
//! `fields`, `fields-sign` and the 2-byte case of `bytes` are one algorithm. The bits of an element
//! are first rearranged so that plane `e` is its top byte, plane `a` the byte below and plane `b`
//! the rest; how they are rearranged is the *form*.

/// The element as it is.
pub(crate) const PLAIN: u8 = 0;
/// Rotated left by one bit: the sign is bit 0, the 8 bits that followed it are the top byte.
pub(crate) const ROTATED: u8 = 1;
/// The sign is dropped and a zero bit put after the 8 bits that followed it: the top byte holds
/// those 8 bits, the byte below the next 7.
pub(crate) const SPREAD: u8 = 2;

/// All bits of a `W`-byte element.
const fn mask<const W: usize>() -> u64 {
    u64::MAX >> (64 - 8 * W)
}

/// The top byte of a `W`-byte element.
const fn top<const W: usize>() -> u64 {
    0xff << (8 * W - 8)
}

fn load<const W: usize>(element: [u8; W]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..W].copy_from_slice(&element);
    u64::from_le_bytes(bytes)
}

fn store<const W: usize>(x: u64) -> [u8; W] {
    let mut element = [0; W];
    element.copy_from_slice(&x.to_le_bytes()[..W]);
    element
}

fn arrange<const W: usize, const FORM: u8>(x: u64) -> u64 {
    match FORM {
        PLAIN => x,
        ROTATED => (x << 1 | x >> (8 * W - 1)) & mask::<W>(),
        _ => (x << 1 & top::<W>()) | (x & mask::<W>() >> 9),
    }
}

fn restore<const W: usize, const FORM: u8>(x: u64) -> u64 {
    match FORM {
        PLAIN => x,
        ROTATED => (x >> 1 | x << (8 * W - 1)) & mask::<W>(),
        _ => (x & top::<W>()) >> 1 | (x & mask::<W>() >> 9),
    }
}

/// Splits `W`-byte elements (2, 4 or 8) into planes. `s` is filled for [`SPREAD`] only, otherwise
/// empty.
pub(crate) fn split<const W: usize, const FORM: u8>(
    src: &[u8],
    s: &mut [u8],
    e: &mut [u8],
    a: &mut [u8],
    b: &mut [u8],
) {
    let (elements, _) = src.as_chunks::<W>();
    if FORM == SPREAD {
        for (byte, group) in s.iter_mut().zip(elements.chunks(8)) {
            *byte = group.iter().rev().fold(0, |bits, el| bits << 1 | el[W - 1] >> 7);
        }
    }
    for ((element, e), a) in elements.iter().zip(e).zip(a) {
        let x = arrange::<W, FORM>(load(*element));
        *e = (x >> (8 * W - 8)) as u8;
        *a = (x >> (8 * W - 16)) as u8;
    }
    if W > 2 {
        for (element, b) in elements.iter().zip(b.chunks_exact_mut(W - 2)) {
            let x = arrange::<W, FORM>(load(*element));
            b.copy_from_slice(&x.to_le_bytes()[..W - 2]);
        }
    }
}

/// Undoes [`split`].
pub(crate) fn merge<const W: usize, const FORM: u8>(
    s: &[u8],
    e: &[u8],
    a: &[u8],
    b: &[u8],
    dst: &mut [u8],
) {
    let (elements, _) = dst.as_chunks_mut::<W>();
    for (i, ((element, e), a)) in elements.iter_mut().zip(e).zip(a).enumerate() {
        let mut low = [0; 8];
        low[..W - 2].copy_from_slice(&b[i * (W - 2)..][..W - 2]);
        let x = u64::from(*e) << (8 * W - 8) | u64::from(*a) << (8 * W - 16);
        *element = store(restore::<W, FORM>(x | u64::from_le_bytes(low)));
    }
    if FORM == SPREAD {
        for (byte, group) in s.iter().zip(elements.chunks_mut(8)) {
            for (i, element) in group.iter_mut().enumerate() {
                element[W - 1] |= (byte >> i) << 7;
            }
        }
    }
}

/// One plane per byte, the most significant first.
pub(crate) fn split_bytes<const W: usize>(src: &[u8], planes: [&mut [u8]; W]) {
    let (elements, _) = src.as_chunks::<W>();
    for (p, plane) in planes.into_iter().enumerate() {
        for (byte, element) in plane.iter_mut().zip(elements) {
            *byte = element[W - 1 - p];
        }
    }
}

/// Undoes [`split_bytes`].
pub(crate) fn merge_bytes<const W: usize>(planes: [&[u8]; W], dst: &mut [u8]) {
    let (elements, _) = dst.as_chunks_mut::<W>();
    for (p, plane) in planes.into_iter().enumerate() {
        for (byte, element) in plane.iter().zip(&mut *elements) {
            element[W - 1 - p] = *byte;
        }
    }
}

/// Splits a sign plane into the signs of `blocks` full blocks, `N` bytes each, and the signs of the
/// elements after them. (The plane's last byte may be partly padding, so its length does not tell
/// `blocks`.)
#[cfg(target_arch = "x86_64")]
pub(crate) fn block_signs<const N: usize>(s: &[u8], blocks: usize) -> (&[[u8; N]], &[u8]) {
    let (full, rest) = s.split_at((blocks * N).min(s.len()));
    (full.as_chunks().0, rest)
}

/// As [`block_signs`], for writing.
#[cfg(target_arch = "x86_64")]
pub(crate) fn block_signs_mut<const N: usize>(
    s: &mut [u8],
    blocks: usize,
) -> (&mut [[u8; N]], &mut [u8]) {
    let (full, rest) = s.split_at_mut((blocks * N).min(s.len()));
    (full.as_chunks_mut().0, rest)
}
