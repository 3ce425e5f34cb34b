//! GDeflate pages: Deflate whose bits are spread over 32 lanes (docs/codecs/gdeflate.md).

mod code;
mod decode;
mod encode;
mod huffman;
mod lanes;
mod matches;

use s4_format::{CodecId, Result};

use crate::Workspace;
use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, Symbols, no_param};

/// Lanes of a page.
const LANES: usize = 32;

/// Codec `gdeflate`: blocks of 64 KiB, each one GDeflate page.
#[derive(Debug, Clone, Copy, Default)]
pub struct Gdeflate {
    matches: bool,
}

impl Gdeflate {
    /// An encoder that codes literals only: all that mantissas and exponents have to give, and by
    /// far the faster to decode. The default.
    pub fn entropy_only() -> Self {
        Self { matches: false }
    }

    /// An encoder that also looks for matches within a block.
    pub fn with_matches() -> Self {
        Self { matches: true }
    }
}

/// The longest page of `len` bytes: nothing is coded in more bits than it takes to store it, and
/// each lane may end with nearly two words unused.
fn page_bound(len: usize) -> usize {
    len + 8 * LANES + 8
}

impl Codec for Gdeflate {
    fn id(&self) -> CodecId {
        CodecId::GDEFLATE
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        blocks::bound(len, BLOCK, page_bound)
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        no_param(self.id(), symbols.context.param)?;
        let len = blocks::write(symbols.bytes, dst, BLOCK, page_bound, |page, dst| {
            let items = if self.matches { matches::find(page) } else { Vec::new() };
            Ok(encode::page(page, &items, dst))
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
        blocks::read(src, dst, decode::page)
    }
}
