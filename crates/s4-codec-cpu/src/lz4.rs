//! LZ4 blocks (docs/codecs/lz4.md).

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use s4_format::{CodecId, Error, Result};

use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, no_param};

/// Codec `lz4`: blocks of 64 KiB, each one LZ4 block without a frame.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lz4;

impl Codec for Lz4 {
    fn id(&self) -> CodecId {
        CodecId::LZ4
    }

    fn bound(&self, len: usize) -> usize {
        blocks::bound(len, BLOCK, get_maximum_output_size)
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let len = blocks::write(src, dst, BLOCK, get_maximum_output_size, |block, dst| {
            compress_into(block, dst).map_err(|e| Error::limit(format!("lz4: {e}")))
        })?;
        Ok(Encoded { len, param: 0 })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        no_param(self.id(), param)?;
        blocks::read(src, dst, |block, dst| match decompress_into(block, dst) {
            Ok(len) if len == dst.len() => Ok(()),
            Ok(len) => Err(Error::corrupt(format!("lz4 block of {len} bytes for {}", dst.len()))),
            Err(e) => Err(Error::corrupt(format!("lz4: {e}"))),
        })
    }
}
