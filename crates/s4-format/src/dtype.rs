//! Element types.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// The form of an element's bits, which a planner may exploit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementForm {
    /// Sign, exponent and mantissa fields, as in IEEE 754; 16, 32 or 64 bits.
    Float,
    /// Integers, small floats, packed and unknown elements: bytes.
    Bytes,
}

macro_rules! dtypes {
    ($( $code:literal $name:ident $text:literal, $width:literal x $count:literal, $form:ident; )*) => {
        /// The type of a tensor's elements: every dtype of PyTorch, under PyTorch's names.
        ///
        /// An element is one or two **values** of 1, 2, 4 or 8 bytes (a complex number is two
        /// floats). Elements narrower than a byte are stored in the bytes that PyTorch keeps them in.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DType { $( #[doc = concat!("`", $text, "`")] $name = $code, )* }
        impl DType {
            /// Every dtype, in the order of codes.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
            /// The dtype with this code on disk.
            ///
            /// # Errors
            /// `Unsupported` for a code that this version does not know.
            pub fn from_code(code: u8) -> Result<Self> {
                match code { $( $code => Ok(Self::$name), )*
                    _ => Err(Error::unsupported(format!("dtype code {code} is unknown to this version"))) }
            }
            /// PyTorch's name, without `torch.`.
            pub fn name(self) -> &'static str {
                match self { $( Self::$name => $text, )* }
            }
            /// Bytes of a value: 1, 2, 4 or 8.
            pub fn value_width(self) -> usize {
                match self { $( Self::$name => $width, )* }
            }
            /// Bytes of an element.
            pub fn size(self) -> usize {
                match self { $( Self::$name => $width * $count, )* }
            }
            /// The form of a value.
            pub fn form(self) -> ElementForm {
                match self { $( Self::$name => ElementForm::$form, )* }
            }
        }
    };
}

dtypes! {
    0 Bytes "bytes", 1 x 1, Bytes;
    1 BFloat16 "bfloat16", 2 x 1, Float;
    2 Float16 "float16", 2 x 1, Float;
    3 Float32 "float32", 4 x 1, Float;
    4 Float64 "float64", 8 x 1, Float;
    5 Float8E4M3Fn "float8_e4m3fn", 1 x 1, Bytes;
    6 Float8E5M2 "float8_e5m2", 1 x 1, Bytes;
    7 Float8E4M3FnUz "float8_e4m3fnuz", 1 x 1, Bytes;
    8 Float8E5M2FnUz "float8_e5m2fnuz", 1 x 1, Bytes;
    9 Float8E8M0Fnu "float8_e8m0fnu", 1 x 1, Bytes;
    10 Float4E2M1FnX2 "float4_e2m1fn_x2", 1 x 1, Bytes;
    11 Complex32 "complex32", 2 x 2, Float;
    12 Complex64 "complex64", 4 x 2, Float;
    13 Complex128 "complex128", 8 x 2, Float;
    14 BComplex32 "bcomplex32", 2 x 2, Float;
    20 Bool "bool", 1 x 1, Bytes;
    21 UInt8 "uint8", 1 x 1, Bytes;
    22 Int8 "int8", 1 x 1, Bytes;
    23 UInt16 "uint16", 2 x 1, Bytes;
    24 Int16 "int16", 2 x 1, Bytes;
    25 UInt32 "uint32", 4 x 1, Bytes;
    26 Int32 "int32", 4 x 1, Bytes;
    27 UInt64 "uint64", 8 x 1, Bytes;
    28 Int64 "int64", 8 x 1, Bytes;
    40 QInt8 "qint8", 1 x 1, Bytes;
    41 QUInt8 "quint8", 1 x 1, Bytes;
    42 QInt32 "qint32", 4 x 1, Bytes;
    43 QUInt4x2 "quint4x2", 1 x 1, Bytes;
    44 QUInt2x4 "quint2x4", 1 x 1, Bytes;
    50 Bits1x8 "bits1x8", 1 x 1, Bytes;
    51 Bits2x4 "bits2x4", 1 x 1, Bytes;
    52 Bits4x2 "bits4x2", 1 x 1, Bytes;
    53 Bits8 "bits8", 1 x 1, Bytes;
    54 Bits16 "bits16", 2 x 1, Bytes;
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let name = s.strip_prefix("torch.").unwrap_or(s);
        Self::ALL
            .iter()
            .copied()
            .find(|d| d.name() == name)
            .ok_or_else(|| Error::unsupported(format!("dtype `{s}` is unknown to this version")))
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for &d in DType::ALL {
            assert_eq!(DType::from_code(d as u8).unwrap(), d);
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
            assert_eq!(d.size() % d.value_width(), 0);
        }
        assert!(DType::from_code(255).is_err());
        assert!("float3".parse::<DType>().is_err());
    }
}
