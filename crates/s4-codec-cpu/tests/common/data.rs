//! Planes of real tensors, for the tests of block codecs.

use std::path::PathBuf;

/// Folder of the test data: `S4_TESTDATA` if it is set, otherwise that of the source tree.
pub(crate) fn folder() -> PathBuf {
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    std::env::var_os("S4_TESTDATA").map_or_else(own, PathBuf::from)
}

/// The values of the file's tensors, one after the other.
pub(crate) fn values(file: &str) -> Vec<u8> {
    let bytes = std::fs::read(folder().join(file)).expect("test data");
    let header = u64::from_le_bytes(*bytes.first_chunk().expect("a header")) as usize;
    bytes[8 + header..].to_vec()
}

/// Byte `nth` of every value of `width` bytes.
pub(crate) fn plane(values: &[u8], width: usize, nth: usize) -> Vec<u8> {
    values.chunks_exact(width).map(|value| value[nth]).collect()
}

/// Exponent and mantissa planes of both dtypes, named, at most `len` bytes of each.
pub(crate) fn planes(len: usize) -> Vec<(&'static str, Vec<u8>)> {
    let bf16 = values("gpt34m_bf16_s0.safetensors");
    let fp32 = values("gpt98m_fp32_s0.safetensors");
    let mut planes = vec![
        ("bf16 high", plane(&bf16, 2, 1)),
        ("bf16 low", plane(&bf16, 2, 0)),
        ("fp32 high", plane(&fp32, 4, 3)),
        ("fp32 next", plane(&fp32, 4, 2)),
        ("fp32 low", plane(&fp32, 4, 0)),
        ("bf16 whole", bf16),
    ];
    planes.iter_mut().for_each(|(_, plane)| plane.truncate(len));
    planes
}
