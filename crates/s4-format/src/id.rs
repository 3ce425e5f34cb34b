//! Ids of bitstreams, layouts, predictors and residuals.
//!
//! An id names the data on disk, never its writer: a CPU, a GPU kernel and a vendor library that
//! write the same bitstream share one id. Ids are append-only.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Whether this version of the project can read something, and if not, how to say so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Implemented: every reader of this version decodes it.
    Open,
    /// A vendor's closed bitstream: readable only with the vendor's library, of the recorded major
    /// version.
    Closed,
}

macro_rules! ids {
    ($(#[$doc:meta])* $name:ident, $what:literal { $( $(#[$vdoc:meta])* $konst:ident = $code:literal, $text:literal, $support:ident; )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u8);
        impl $name {
            $( $(#[$vdoc])* pub const $konst: Self = Self($code); )*
            /// Every id of this kind that the format names, in ascending order.
            pub const ALL: &'static [Self] = &[$(Self($code)),*];
            /// The name in the specification, or `None` for an id it does not know.
            pub fn name(self) -> Option<&'static str> {
                match self.0 { $( $code => Some($text), )* _ => None }
            }
            /// The id with this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $( $text => Some(Self($code)), )* _ => None }
            }
            /// Whether this version reads it; `None` for an id it does not know.
            pub fn support(self) -> Option<Support> {
                match self.0 { $( $code => Some(Support::$support), )* _ => None }
            }
            /// Checks that this version reads the id.
            ///
            /// # Errors
            /// `Unsupported`, naming the id, if it is reserved, closed or unknown.
            pub fn require_open(self) -> Result<Self> {
                match self.support() {
                    Some(Support::Open) => Ok(self),
                    Some(Support::Closed) => Err(Error::unsupported(format!(
                        concat!($what, " `{}` (id {}) is a vendor's closed bitstream, which can only be read \
                                        with the vendor's library and a GPU"),
                        self, self.0))),
                    None => Err(Error::unsupported(format!(
                        concat!($what, " id {} is unknown to this version"), self.0))),
                }
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() { Some(n) => f.write_str(n), None => write!(f, "unknown-{}", self.0) }
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({}, {})"), self.0, self)
            }
        }
    };
}

ids! {
    /// A bitstream that one stream of a chunk can be coded in.
    CodecId, "codec" {
        /// The bytes themselves.
        RAW = 0, "raw", Open;
        /// A unit of 1 to 16 bytes, repeated.
        CONST = 1, "const", Open;
        /// Dense packing of values that need fewer than 8 bits.
        BITS = 2, "bits", Open;
        /// Interleaved static rANS (docs/codecs/rans.md).
        RANS = 3, "rans", Open;
        /// Zstandard frames (RFC 8878).
        ZSTD = 4, "zstd", Open;
        /// GDeflate pages.
        GDEFLATE = 5, "gdeflate", Open;
        /// Deflate (RFC 1951).
        DEFLATE = 6, "deflate", Open;
        /// LZ4 blocks.
        LZ4 = 7, "lz4", Open;
        /// Snappy blocks.
        SNAPPY = 8, "snappy", Open;
        /// nvCOMP's ANS.
        NVCOMP_ANS = 128, "nvcomp-ans", Closed;
        /// nvCOMP's Bitcomp.
        NVCOMP_BITCOMP = 129, "nvcomp-bitcomp", Closed;
        /// nvCOMP's Cascaded.
        NVCOMP_CASCADED = 130, "nvcomp-cascaded", Closed;
    }
}

ids! {
    /// The planes that the values of a tensor are split into.
    LayoutId, "layout" {
        /// One plane: the elements as they are.
        WHOLE = 0, "whole", Open;
        /// One plane for each byte of an element, most significant byte first.
        BYTES = 1, "bytes", Open;
        /// Floats: exponent byte; next byte; the rest with the sign at its low end (rotated left by one).
        FIELDS = 2, "fields", Open;
        /// Floats: packed sign bits; exponent byte; 7 mantissa bits; the rest.
        FIELDS_SIGN = 3, "fields-sign", Open;
        /// Residuals: bit length with sign and top bits as one symbol; the bits below, packed.
        TOKEN = 4, "token", Open;
    }
}

ids! {
    /// The prediction of an element's bits.
    PredictorId, "predictor" {
        /// No prediction.
        NONE = 0, "none", Open;
        /// The same tensor in the parent checkpoint.
        PARENT = 1, "parent", Open;
        /// A tensor of the same checkpoint with equal values.
        SAME = 2, "same", Open;
        /// The rounded copy of a wider float tensor.
        CAST = 3, "cast", Open;
        /// Row and column offsets, added to the bits of the magnitude as an integer.
        RANK1 = 4, "rank1", Open;
        /// Row and column offsets, and a share of the parent's magnitude.
        BLEND = 5, "blend", Open;
        /// The parent's value after the optimizer's step, computed from both moments.
        STEP = 6, "step", Open;
    }
}

ids! {
    /// The form of the difference between an element and its prediction.
    ResidualId, "residual" {
        /// The element itself.
        ID = 0, "id", Open;
        /// The XOR of the bits.
        XOR = 1, "xor", Open;
        /// The difference in the order of values, zigzag-coded.
        SUB = 2, "sub", Open;
        /// The sign, and the zigzag-coded difference of the magnitudes.
        MAGNITUDE = 3, "magnitude", Open;
        /// As `sub`, negated where the first moment is positive.
        DESCENT = 4, "descent", Open;
    }
}

ids! {
    /// The rule that selects, among a stream's tables, the one that a symbol is coded with.
    ContextsId, "contexts" {
        /// All symbols of a stream use one table.
        NONE = 0, "none", Open;
        /// The exponent of the input's value.
        EXPONENT = 1, "exponent", Open;
        /// The size of the optimizer's update, from both moments, relative to the input's value.
        UPDATE = 2, "update", Open;
    }
}

impl Default for ContextsId {
    fn default() -> Self {
        Self::NONE
    }
}

impl ContextsId {
    /// Whether there is one table for all symbols.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_are_unique_and_round_trip() {
        for id in CodecId::ALL {
            assert_eq!(CodecId::from_name(id.name().unwrap()), Some(*id));
        }
        assert!(CodecId::ALL.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(CodecId(77).name(), None);
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        let e = CodecId::NVCOMP_ANS.require_open().unwrap_err().to_string();
        assert!(e.contains("nvcomp-ans") && e.contains("closed"), "{e}");
        assert!(PredictorId(99).require_open().unwrap_err().to_string().contains("99"));
        assert!(ResidualId(9).require_open().unwrap_err().to_string().contains('9'));
        assert!(LayoutId::FIELDS.require_open().is_ok());
    }
}
