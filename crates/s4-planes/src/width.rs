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

/// The bit fields of a float. The bits below the sign of a float are nearly its
/// logarithm. Where 128ths of an octave are precise enough, 15 bits hold it, as in bf16: fp32 is
/// truncated, and fp16 is shifted and moved to the exponent bias of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatBits {
    /// 8 exponent bits, 7 mantissa bits.
    BFloat16,
    /// 5 exponent bits, 10 mantissa bits: `(x >> 3) + (112 << 7)`.
    Float16,
    /// 8 exponent bits, 23 mantissa bits: `x >> 16`.
    Float32,
}

impl FloatBits {
    /// The width of such a float.
    pub fn width(self) -> Width {
        match self {
            Self::BFloat16 | Self::Float16 => Width::B2,
            Self::Float32 => Width::B4,
        }
    }
}
