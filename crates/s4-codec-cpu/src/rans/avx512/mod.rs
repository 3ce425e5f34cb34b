//! `P = 8` on AVX-512, to encode, and to decode with one table: several segments side by side, the 32 lanes of each in
//! two registers, one with the low and one with the high halves of the states.

pub(super) mod contexts;
mod decode;
mod encode;
pub(super) mod singles;
mod transpose;

pub(super) use decode::Decoder;
pub(super) use encode::Encoder;
