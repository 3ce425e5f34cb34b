//! A unit of 1 to 16 bytes, repeated (docs/codecs/const.md).

use s4_format::{CodecId, Error, Result};

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols, need, no_param};

/// The longest unit, in bytes.
const MAX_UNIT: usize = 16;

/// Codec `const`: the stream is the shortest unit whose repetition gives the data; the last
/// repetition may be cut.
#[derive(Debug, Clone, Copy, Default)]
pub struct Const;

/// Length of the shortest unit of at most [`MAX_UNIT`] bytes that repeats to `data`, which is not
/// empty. Data that does not repeat is nearly always refused after its first few bytes.
fn unit_len(data: &[u8]) -> Option<usize> {
    (1..=MAX_UNIT.min(data.len())).find(|&unit| data[unit..] == data[..data.len() - unit])
}

impl Codec for Const {
    fn id(&self) -> CodecId {
        CodecId::CONST
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        len.min(MAX_UNIT)
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        no_param(self.id(), symbols.context.param)?;
        let src = symbols.bytes;
        let dst = need(dst, self.bound(0, src.len()))?;
        if src.is_empty() {
            return Ok(Encoded::of(0));
        }
        let unit = unit_len(src).ok_or_else(|| {
            Error::unsupported("data that is not a repeated unit of 1 to 16 bytes")
        })?;
        dst[..unit].copy_from_slice(&src[..unit]);
        Ok(Encoded::of(unit))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        no_param(self.id(), ctx.param)?;
        match (src.len(), dst.len()) {
            (0, 0) => return Ok(()),
            (0, _) => return Err(Error::truncated("the repeated unit is missing")),
            (unit, len) if unit > MAX_UNIT || unit > len => {
                return Err(Error::corrupt(format!(
                    "invalid repeated unit of {unit} bytes for {len} bytes of data"
                )));
            }
            _ => {}
        }
        dst[..src.len()].copy_from_slice(src);
        // The bytes written so far are appended to themselves, which doubles them each time.
        let mut done = src.len();
        while done < dst.len() {
            let more = done.min(dst.len() - done);
            dst.copy_within(..more, done);
            done += more;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_unit_is_found() {
        assert_eq!(unit_len(b"a"), Some(1));
        assert_eq!(unit_len(b"aaaa"), Some(1));
        assert_eq!(unit_len(b"abcabcab"), Some(3));
        assert_eq!(unit_len(b"0123456789abcdef0123456789abcdef01"), Some(16));
        assert_eq!(unit_len(b"0123456789abcdefg0123456789abcdefg"), None);
        assert_eq!(unit_len(b"aaaaaaaaaaaaaaaaaaaab"), None);
    }
}
