//! LZ4 blocks (docs/codecs/lz4.md).

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use s4_format::{CodecId, Error, Result};

use crate::blocks::BlockCodec;

/// Codec `lz4`: blocks of 64 KiB, each one LZ4 block without a frame.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lz4;

impl BlockCodec for Lz4 {
    const ID: CodecId = CodecId::LZ4;
    type State = ();

    fn block_bound(len: usize) -> usize {
        get_maximum_output_size(len)
    }

    fn encode_block(&self, block: &[u8], dst: &mut [u8], (): &mut ()) -> Result<usize> {
        compress_into(block, dst).map_err(|e| Error::limit(format!("lz4: {e}")))
    }

    fn decode_block(&self, block: &[u8], dst: &mut [u8], (): &mut ()) -> Result<()> {
        match decompress_into(block, dst) {
            Ok(len) if len == dst.len() => Ok(()),
            Ok(len) => Err(Error::corrupt(format!(
                "lz4 block decodes to {len} bytes, expected {}",
                dst.len()
            ))),
            Err(e) => Err(Error::corrupt(format!("lz4: {e}"))),
        }
    }
}
