//! GDeflate pages: Deflate whose bits are spread over 32 lanes (docs/codecs/gdeflate.md).

mod code;
mod decode;
mod encode;
mod huffman;
mod lanes;
mod matches;

use s4_format::{CodecId, Result};

use crate::blocks::BlockCodec;

/// Lanes of a page.
const LANES: usize = 32;

/// Codec `gdeflate`: blocks of 64 KiB, each one GDeflate page.
#[derive(Debug, Clone, Copy, Default)]
pub struct Gdeflate {
    matches: bool,
}

impl Gdeflate {
    /// An encoder that codes literals only. On mantissas and exponents matches hardly gain
    /// anything, and literals decode far faster. The default.
    pub fn entropy_only() -> Self {
        Self { matches: false }
    }

    /// An encoder that also looks for matches within a block.
    pub fn with_matches() -> Self {
        Self { matches: true }
    }
}

impl BlockCodec for Gdeflate {
    const ID: CodecId = CodecId::GDEFLATE;
    type State = ();

    /// Coding never takes more bits than storing, and each lane may end with nearly two words
    /// unused.
    fn block_bound(len: usize) -> usize {
        len + 8 * LANES + 8
    }

    fn encode_block(&self, page: &[u8], dst: &mut [u8], (): &mut ()) -> Result<usize> {
        let items = if self.matches { matches::find(page) } else { Vec::new() };
        Ok(encode::page(page, &items, dst))
    }

    fn decode_block(&self, page: &[u8], dst: &mut [u8], (): &mut ()) -> Result<()> {
        decode::page(page, dst)
    }
}
