//! GDeflate pages: Deflate whose bits are spread over 32 lanes (docs/codecs/gdeflate.md).

mod code;
mod decode;
mod encode;
mod huffman;
mod lanes;
mod matches;

use s4_format::{CodecId, Result};

use self::lanes::LANES;
use crate::blocks::BlockCodec;

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

#[cfg(test)]
mod tests {
    use s4_format::Error;

    use super::*;

    /// A page of Deflate blocks with fixed codes that hold nothing.
    fn empty_blocks(count: usize) -> Vec<u8> {
        let mut dst = vec![0; 2 * count + 256];
        let mut lanes = lanes::LaneWriter::new(&mut dst);
        for number in 1..=count {
            lanes.put(u32::from(number == count) | 1 << 1, 3);
            // The codeword of symbol 256.
            lanes.put(0, 7);
        }
        let len = lanes.finish();
        dst.truncate(len);
        dst
    }

    #[test]
    fn a_page_has_a_bounded_number_of_blocks() {
        assert_eq!(decode::page(&empty_blocks(decode::MOST_BLOCKS), &mut []), Ok(()));
        let more = decode::page(&empty_blocks(decode::MOST_BLOCKS + 1), &mut []);
        assert!(matches!(more, Err(Error::Limit { .. })), "{more:?}");
    }
}
