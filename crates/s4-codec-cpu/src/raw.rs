//! The bytes themselves (docs/codecs/raw.md).

use s4_format::{CodecId, Error, Result};

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols, need, no_param};

/// Codec `raw`: the stream is the data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Codec for Raw {
    fn id(&self) -> CodecId {
        CodecId::RAW
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        len
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        no_param(self.id(), symbols.context.param)?;
        let src = symbols.bytes;
        need(dst, src.len())?[..src.len()].copy_from_slice(src);
        Ok(Encoded::of(src.len()))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        no_param(self.id(), ctx.param)?;
        if src.len() < dst.len() {
            return Err(Error::truncated(format!(
                "{} raw bytes, expected {}",
                src.len(),
                dst.len()
            )));
        }
        if src.len() > dst.len() {
            return Err(Error::corrupt(format!("{} raw bytes, expected {}", src.len(), dst.len())));
        }
        dst.copy_from_slice(src);
        Ok(())
    }
}
