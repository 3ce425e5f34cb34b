//! Snappy blocks (docs/codecs/snappy.md).

use s4_format::{CodecId, Error, Result};
use snap::raw::{Decoder, Encoder, decompress_len, max_compress_len};

use crate::blocks::BlockCodec;

/// The library's states. The encoder's has tables that take longer to create than a block takes to
/// code.
#[derive(Default)]
pub(crate) struct States {
    encoder: Option<Encoder>,
    decoder: Decoder,
}

/// Codec `snappy`: blocks of 64 KiB, each one raw Snappy stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snappy;

impl BlockCodec for Snappy {
    const ID: CodecId = CodecId::SNAPPY;
    type State = States;

    fn block_bound(len: usize) -> usize {
        max_compress_len(len)
    }

    fn encode_block(&self, block: &[u8], dst: &mut [u8], states: &mut States) -> Result<usize> {
        let encoder = states.encoder.get_or_insert_with(Encoder::new);
        encoder.compress(block, dst).map_err(|e| Error::limit(format!("snappy: {e}")))
    }

    fn decode_block(&self, block: &[u8], dst: &mut [u8], states: &mut States) -> Result<()> {
        let bad = |e: snap::Error| Error::corrupt(format!("snappy: {e}"));
        let says = decompress_len(block).map_err(bad)?;
        if says != dst.len() {
            let what = format!("snappy block declares {says} bytes, expected {}", dst.len());
            return Err(Error::corrupt(what));
        }
        let len = states.decoder.decompress(block, dst).map_err(bad)?;
        if len != dst.len() {
            return Err(Error::corrupt(format!(
                "snappy block decodes to {len} bytes, expected {says}"
            )));
        }
        Ok(())
    }
}
