//! Snappy blocks (docs/codecs/snappy.md).

use s4_format::{CodecId, Error, Result};
use snap::raw::{Decoder, Encoder, decompress_len, max_compress_len};

use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, no_param};

/// Codec `snappy`: blocks of 64 KiB, each one raw Snappy stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snappy;

impl Codec for Snappy {
    fn id(&self) -> CodecId {
        CodecId::SNAPPY
    }

    fn bound(&self, len: usize) -> usize {
        blocks::bound(len, BLOCK, max_compress_len)
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let mut state = Encoder::new();
        let len = blocks::write(src, dst, BLOCK, max_compress_len, |block, dst| {
            state.compress(block, dst).map_err(|e| Error::limit(format!("snappy: {e}")))
        })?;
        Ok(Encoded { len, param: 0 })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        no_param(self.id(), param)?;
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
