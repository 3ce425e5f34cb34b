//! Values that are hard for every part of this project, for tests and self-tests.

use s4_format::DType;
use s4_planes::Width;
use s4_planes::patterns::{self, Kind};

/// Every adversarial pattern of a dtype, as name and `elements` elements: NaN of many payloads and
/// both signs, infinities, denormals, zeros of both signs, every exponent, constants, alternating,
/// sparse and random values. The same on every machine.
pub fn adversarial(dtype: DType, elements: usize) -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    let kind = match dtype {
        DType::BFloat16 | DType::BComplex32 => Kind::BF16,
        DType::Float16 | DType::Complex32 => Kind::F16,
        DType::Float32 | DType::Complex64 => Kind::F32,
        DType::Float64 | DType::Complex128 => Kind::F64,
        DType::Float8E4M3Fn | DType::Float8E4M3FnUz => Kind::F8_E4M3,
        DType::Float8E5M2 | DType::Float8E5M2FnUz => Kind::F8_E5M2,
        _ => Kind::int(Width::from_bytes(dtype.value_width()).unwrap_or(Width::B1)),
    };
    patterns::all(kind, elements * dtype.size() / dtype.value_width())
}
