//! The bytes themselves (docs/codecs/raw.md).

use s4_format::{CodecId, Error, Result};

use crate::codec::{Codec, Context, Encoded, need, no_param};

/// Codec `raw`: the stream is the data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Codec for Raw {
    fn id(&self) -> CodecId {
        CodecId::RAW
    }

    fn bound(&self, len: usize) -> usize {
        len
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        need(dst, src.len())?[..src.len()].copy_from_slice(src);
        Ok(Encoded { len: src.len(), param: 0 })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        no_param(self.id(), param)?;
        if src.len() < dst.len() {
            return Err(Error::truncated(format!("{} of {} raw bytes", src.len(), dst.len())));
        }
        if src.len() > dst.len() {
            return Err(Error::corrupt(format!("{} raw bytes for {}", src.len(), dst.len())));
        }
        dst.copy_from_slice(src);
        Ok(())
    }
}
