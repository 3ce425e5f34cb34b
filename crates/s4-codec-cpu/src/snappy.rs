//! Snappy blocks (docs/codecs/snappy.md).

use s4_format::{CodecId, Error, Result};
use snap::raw::{Decoder, Encoder, decompress_len, max_compress_len};

use crate::Workspace;
use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, Symbols, no_param};

/// The library's encoder, with tables that take longer to make than a block takes to code.
#[derive(Default)]
struct State(Option<Encoder>);

/// Codec `snappy`: blocks of 64 KiB, each one raw Snappy stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snappy;

impl Codec for Snappy {
    fn id(&self) -> CodecId {
        CodecId::SNAPPY
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        blocks::bound(len, BLOCK, max_compress_len)
    }

    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded> {
        no_param(self.id(), symbols.context.param)?;
        let state = work.state::<State>().0.get_or_insert_with(Encoder::new);
        let len = blocks::write(symbols.bytes, dst, BLOCK, max_compress_len, |block, dst| {
            state.compress(block, dst).map_err(|e| Error::limit(format!("snappy: {e}")))
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
        let mut state = Decoder::new();
        let bad = |e: snap::Error| Error::corrupt(format!("snappy: {e}"));
        blocks::read(src, dst, |block, dst| {
            let says = decompress_len(block).map_err(bad)?;
            if says != dst.len() {
                return Err(Error::corrupt(format!(
                    "snappy block of {says} bytes for {}",
                    dst.len()
                )));
            }
            let len = state.decompress(block, dst).map_err(bad)?;
            if len != dst.len() {
                return Err(Error::corrupt(format!("snappy: {len} of {says} bytes")));
            }
            Ok(())
        })
    }
}
