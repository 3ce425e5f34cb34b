//! Memory that one thread reuses from chunk to chunk.

use s4_format::{Error, LayoutId, Result};
use s4_planes::Width;

/// Buffers for the planes of one chunk. They grow to what a chunk needs and stay.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) planes: [Vec<u8>; 4],
    pub(crate) stream: Vec<u8>,
    pub(crate) residuals: Vec<u8>,
    /// Bytes of the second plane of layout `token`.
    pub(crate) token_bits: usize,
}

impl Scratch {
    /// Plane `i` of a chunk that was split. Layout `bytes` keeps all planes in the first buffer.
    pub(crate) fn plane(&self, layout: LayoutId, sizes: &[usize], i: usize) -> &[u8] {
        if layout == LayoutId::BYTES {
            &self.planes[0][i * sizes[i]..(i + 1) * sizes[i]]
        } else {
            &self.planes[i][..sizes[i]]
        }
    }
}

/// The first `len` bytes of a buffer that is made large enough. Their content is unspecified.
pub(crate) fn sized(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// The width of a value. (Every dtype has one.)
pub(crate) fn width_of(bytes: usize) -> Result<Width> {
    Width::from_bytes(bytes).ok_or_else(|| Error::unsupported(format!("values of {bytes} bytes")))
}
