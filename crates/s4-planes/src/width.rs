//! Width of an element.

/// Width of an element, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Width {
    /// 1 byte.
    B1 = 1,
    /// 2 bytes.
    B2 = 2,
    /// 4 bytes.
    B4 = 4,
    /// 8 bytes.
    B8 = 8,
}

impl Width {
    /// Every width, in ascending order.
    pub const ALL: [Self; 4] = [Self::B1, Self::B2, Self::B4, Self::B8];

    /// The width of `bytes` bytes, if there is one.
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|w| w.bytes() == bytes)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> usize {
        self as usize
    }

    /// The number of bits.
    pub const fn bits(self) -> u32 {
        self as u32 * 8
    }
}
