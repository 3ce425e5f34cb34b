//! `P = 8` with one table on AVX-512: several segments side by side, the 32 lanes of each in two
//! registers, one with the low and one with the high halves of the states.

mod decode;
mod encode;
pub(super) mod singles;
mod transpose;

pub(super) use decode::Decoder;
pub(super) use encode::Encoder;
