//! Small tensors of one dtype share a chunk.

use s4_format::DType;

/// Tensors with fewer values are packed.
pub(crate) const SMALL: u64 = 4096;
/// Values of a pack: one chunk.
const PACK: usize = 1 << s4_engine::CHUNK_LOG2;

/// A pack that is being filled.
#[derive(Debug)]
pub(crate) struct Pack {
    pub(crate) dtype: DType,
    /// Its number among packs.
    pub(crate) number: u32,
    pub(crate) data: Vec<u8>,
}

impl Pack {
    pub(crate) fn new(dtype: DType, number: u32) -> Self {
        Self { dtype, number, data: Vec::new() }
    }

    /// Values so far.
    pub(crate) fn values(&self) -> usize {
        self.data.len() / self.dtype.value_width()
    }

    /// Whether so many more values fit.
    pub(crate) fn has_room(&self, values: u64) -> bool {
        self.values() as u64 + values <= PACK as u64
    }
}
