//! Reading values that may change meanwhile: each byte once.
//!
//! The memory of a tensor is its owner's, and training may go on while it is saved. Everything that
//! a chunk becomes, its planes as well as its checksums, is therefore made from one copy, piece by
//! piece: the chunk always decodes, and each value is one that it had at some time.
//!
//! A slice whose bytes change breaks a promise to Rust, whoever changes them. [`copy`] and [`append_summed`] are the
//! only places that read such bytes. They hide source and copy from the optimizer, which can then neither read the
//! source again in place of the copy nor assume that two reads are equal.

use std::hint::black_box;

use s4_format::{Result, crc32c_append};

/// Bytes of a piece: few enough for a core's fastest cache together with what is made of them. A
/// multiple of eight values of every width.
pub(crate) const PIECE: usize = 8 << 10;

/// Copies `src` to `to`, which is as long, reading each byte once.
pub(crate) fn copy(src: &[u8], to: &mut [u8]) {
    to.copy_from_slice(black_box(src));
    black_box(to);
}

/// Copies `src` to `to`, which is as long, piece by piece. Each piece is passed to `each`, with its
/// offset, once it is in the checksum. Returns the CRC-32C of the copy.
pub(crate) fn copy_summed(
    src: &[u8],
    to: &mut [u8],
    mut each: impl FnMut(usize, &mut [u8]) -> Result<()>,
) -> Result<u32> {
    let mut crc = 0;
    for (i, (src, to)) in src.chunks(PIECE).zip(to.chunks_mut(PIECE)).enumerate() {
        copy(src, to);
        crc = crc32c_append(crc, to);
        each(i * PIECE, to)?;
    }
    Ok(crc)
}

/// Appends a copy of `src` to `to`, reading each byte once. Returns its CRC-32C.
pub(crate) fn append_summed(src: &[u8], to: &mut Vec<u8>) -> u32 {
    to.reserve(src.len());
    src.chunks(PIECE).fold(0, |crc, src| {
        let start = to.len();
        to.extend_from_slice(black_box(src));
        crc32c_append(crc, &black_box(&mut *to)[start..])
    })
}

#[cfg(test)]
mod tests {
    use s4_format::crc32c;

    use super::*;

    #[test]
    fn pieces_are_copied_and_summed_in_order() {
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7] {
            let src: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
            let (mut to, mut places) = (vec![0; len], vec![]);
            let crc = copy_summed(&src, &mut to, |at, piece| {
                assert_eq!(piece, &src[at..at + piece.len()]);
                places.push(at);
                piece.fill(0xff);
                Ok(())
            });
            assert_eq!(crc.unwrap(), crc32c(&src), "{len}");
            assert!(to.iter().all(|b| *b == 0xff));
            assert_eq!(places, (0..len).step_by(PIECE).collect::<Vec<_>>());
            let mut to = vec![9];
            assert_eq!(append_summed(&src, &mut to), crc32c(&src));
            assert_eq!(to[1..], src);
        }
    }
}
