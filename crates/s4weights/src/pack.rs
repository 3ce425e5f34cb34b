//! Small tensors that are alike share a chunk.

use s4_format::DType;
use s4_format::dtype::ElementForm;

/// Tensors with fewer values are packed.
pub(crate) const SMALL: u64 = 4096;
/// The properties that the tensors of one pack have in common: a table that suits one suits the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) dtype: DType,
    /// The group of tensors that they belong to.
    pub(crate) group: u8,
    negative: bool,
    /// The largest exponent, in steps of eight.
    magnitude: u8,
}

impl Class {
    /// The class of a tensor: moments and weights of an optimizer differ in sign and size.
    pub(crate) fn of(dtype: DType, data: &[u8], group: u8) -> Self {
        let width = dtype.value_width();
        if dtype.form() != ElementForm::Float {
            return Self { dtype, group, negative: false, magnitude: 0 };
        }
        // The sign and the eight bits below it are at the top of every float.
        let tops =
            data.chunks_exact(width).map(|v| u16::from_le_bytes([v[width - 2], v[width - 1]]));
        let (sign, largest) = tops.fold((0, 0), |(s, m), t| (s | t, m.max(t & 0x7fff)));
        Self { dtype, group, negative: sign >> 15 == 1, magnitude: (largest >> 10) as u8 }
    }
}

/// A pack that is being filled.
#[derive(Debug)]
pub(crate) struct Pack {
    pub(crate) class: Class,
    /// Its number among packs.
    pub(crate) number: u32,
    pub(crate) data: Vec<u8>,
}

impl Pack {
    pub(crate) fn new(class: Class, number: u32) -> Self {
        Self { class, number, data: Vec::new() }
    }

    /// Values so far.
    pub(crate) fn values(&self) -> usize {
        self.data.len() / self.class.dtype.value_width()
    }

    /// Whether `values` more fit: a pack is one chunk.
    pub(crate) fn has_room(&self, values: u64) -> bool {
        self.values() as u64 + values <= 1 << s4_engine::chunk_log2(self.class.dtype)
    }
}
