//! The codec trait, the registry and every open codec.

mod codec;

pub use codec::{Codec, Codecs, Context, Encoded};
