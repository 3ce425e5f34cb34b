//! Memory that one thread reuses from chunk to chunk.

use s4_codec_cpu::Workspace;
use s4_format::layout::MAX_PLANES;
use s4_format::{Error, LayoutId, Result};
use s4_planes::Width;

use crate::planner::Counted;

/// Buffers for the planes of one chunk, and memory that codecs reuse. They grow to what a chunk
/// needs and are kept.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) planes: [Vec<u8>; 4],
    /// Encoded streams. `coded` holds their lengths; `None`: the stream is the plane itself.
    pub(crate) streams: Vec<Vec<u8>>,
    pub(crate) coded: [Option<usize>; MAX_PLANES],
    /// A stream whose end the previous one carried, put together again.
    pub(crate) joined: Vec<u8>,
    /// The bytes that the stream decoded last carried, and in `tail` those that the one before it
    /// carried.
    pub(crate) carry: Vec<u8>,
    pub(crate) tail: Vec<u8>,
    /// The end of a raw plane whose start lies in the frame.
    pub(crate) split: Vec<u8>,
    pub(crate) residuals: Vec<u8>,
    /// Predicted values that are not just those of an input.
    pub(crate) predicted: Vec<u8>,
    /// The table of each symbol of a plane.
    pub(crate) contexts: Vec<u8>,
    /// Values that are about to be split.
    pub(crate) piece: Vec<u8>,
    /// State that codecs keep from stream to stream.
    pub(crate) work: Workspace,
    /// Bytes of the second plane of layout `token`.
    pub(crate) token_bits: usize,
    /// The planner's counts.
    pub(crate) counted: Counted,
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

    /// Stream `i` of a chunk whose planes are coded.
    pub(crate) fn stream(&self, layout: LayoutId, sizes: &[usize], i: usize) -> &[u8] {
        match self.coded[i] {
            Some(len) => &self.streams[i][..len],
            None => self.plane(layout, sizes, i),
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
