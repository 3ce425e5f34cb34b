//! LZ4 blocks (docs/codecs/lz4.md).

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use s4_format::{CodecId, Error, Result};

use crate::Workspace;
use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, Symbols, no_param};

/// Codec `lz4`: blocks of 64 KiB, each one LZ4 block without a frame.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lz4;

impl Codec for Lz4 {
    fn id(&self) -> CodecId {
        CodecId::LZ4
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        blocks::bound(len, BLOCK, get_maximum_output_size)
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        no_param(self.id(), symbols.context.param)?;
        let len =
            blocks::write(symbols.bytes, dst, BLOCK, get_maximum_output_size, |block, dst| {
                compress_into(block, dst).map_err(|e| Error::limit(format!("lz4: {e}")))
            })?;
        Ok(Encoded::of(len))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        no_param(self.id(), ctx.param)?;
        blocks::read(src, dst, |block, dst| match decompress_into(block, dst) {
            Ok(len) if len == dst.len() => Ok(()),
            Ok(len) => Err(Error::corrupt(format!("lz4 block of {len} bytes for {}", dst.len()))),
            Err(e) => Err(Error::corrupt(format!("lz4: {e}"))),
        })
    }
}
