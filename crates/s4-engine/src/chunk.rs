//! Chunks of a tensor: their length, their place, and a quick test for repeated bytes.

use s4_format::{DType, Error, Result};

/// Values in each chunk but the last, as a power of two: 256 KiB of values of up to 4 bytes, so that
/// a chunk and its planes stay in a core's cache.
pub fn chunk_log2(dtype: DType) -> u8 {
    match dtype.value_width() {
        1 => 18,
        2 => 17,
        _ => 16,
    }
}

/// Index of a chunk's first value, and its bytes.
pub(crate) fn chunk_bytes(
    data: &[u8],
    width: usize,
    chunk_log2: u8,
    chunk: u64,
) -> Result<(u64, &[u8])> {
    let first = chunk << chunk_log2;
    let start = usize::try_from(first).ok().and_then(|f| f.checked_mul(width));
    let start = start.filter(|&s| s < data.len());
    let start =
        start.ok_or_else(|| Error::limit("the tensor has no such chunk").in_chunk(chunk))?;
    let end = data.len().min(start + (width << chunk_log2));
    Ok((first, &data[start..end]))
}

/// Longest unit of the codec `const`.
const UNIT: usize = 16;
/// Bytes that tell whether `const` is worth a try.
pub(crate) const QUICK: usize = 64 + UNIT;

/// Whether the first `look` bytes repeat a unit that `const` can code. A short look rules out
/// nearly everything else.
pub(crate) fn repeats(bytes: &[u8], look: usize) -> bool {
    (1..=UNIT).any(|u| {
        let head = &bytes[..bytes.len().min(look)];
        head.len() <= u || head[u..] == head[..head.len() - u]
    })
}
