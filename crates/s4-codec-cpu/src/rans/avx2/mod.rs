//! AVX2: the 32 lanes of a segment in four registers. Encoding is for `P = 8`,
//! decoding for any stream.

pub(super) mod contexts;
mod decode;
mod encode;

pub(super) use decode::Decoder;
pub(super) use encode::Encoder;

use super::stream::LANES;

/// Lanes of a register.
const WIDTH: usize = 8;
/// Registers of a segment.
const VECTORS: usize = LANES / WIDTH;
