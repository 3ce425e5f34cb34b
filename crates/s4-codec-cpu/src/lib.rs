//! The codec trait, the registry, and every codec whose bitstream is open.
//!
//! A [`Codec`] turns the bytes of one plane of one chunk into a stream and back. Its id names the
//! bitstream, so everything here decodes what other implementations (a GPU kernel, a vendor's
//! library) of the same id wrote. The bitstreams are specified in `docs/codecs`, one page each.
//!
//! Deliberately absent: async, I/O, names of tensors, the choice of a codec, and any state
//! that outlives a call, except in the caller's [`Workspace`]. Decoders take any bytes and return
//! the data or an error; nothing in a stream is used as a size before it is checked against the
//! stream and the destination.

mod bits;
pub mod blocks;
mod codec;
mod constant;
mod deflate;
mod gdeflate;
mod lz4;
/// Interleaved static rANS: the codec, its tables and the estimates that a planner chooses them by.
pub mod rans;
mod raw;
mod snappy;
pub mod testing;
mod workspace;
mod zstd;

pub use bits::Bits;
pub use codec::{Codec, Codecs, Context, Encoded, Symbols};
pub use constant::Const;
pub use deflate::Deflate;
pub use gdeflate::Gdeflate;
pub use lz4::Lz4;
pub use rans::Rans;
pub use raw::Raw;
pub use s4_planes::Simd;
pub use snappy::Snappy;
pub use workspace::Workspace;
pub use zstd::Zstd;

/// Every codec of this crate, running on `simd` (which the machine must have; a set that it lacks
/// is replaced by plain Rust, which gives the same bytes).
///
/// This is the one list of them: engines look streams up by id. The registered values encode with
/// the defaults of each codec: `zstd` at level 3, `deflate` at level 6 and `gdeflate` without
/// matches. Each writes and reads every parameter of its bitstream.
pub fn open_codecs(simd: Simd) -> Codecs {
    Codecs::empty()
        .with(Raw)
        .with(Const)
        .with(Bits::new(simd))
        .with(Rans::new(simd))
        .with(Zstd::default())
        .with(Gdeflate::default())
        .with(Deflate::default())
        .with(Lz4)
        .with(Snappy)
}
