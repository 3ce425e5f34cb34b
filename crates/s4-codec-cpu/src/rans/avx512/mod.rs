//! `P = 8` with one table on AVX-512: segments in flight side by side, 32 lanes of each in two
//! registers, one of the low and one of the high halves of the states.

mod decode;
mod encode;
pub(super) mod singles;
mod transpose;

pub(super) use decode::Decoder;
pub(super) use encode::Encoder;
