//! Deflate in blocks (docs/codecs/deflate.md).

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use s4_format::{CodecId, Error, Result};

use crate::blocks::BlockCodec;

/// Codec `deflate`: blocks of 64 KiB, each one stream of RFC 1951.
#[derive(Debug, Clone, Copy)]
pub struct Deflate {
    level: u32,
}

impl Deflate {
    /// An encoder at a level of 0 to 9; higher ones are taken as 9.
    pub fn new(level: u32) -> Self {
        Self { level: level.min(9) }
    }
}

impl Default for Deflate {
    fn default() -> Self {
        Self::new(6)
    }
}

/// The library's states, which take longer to create than a block takes to code.
#[derive(Default)]
pub(crate) struct States {
    /// The compressor, with its level.
    compress: Option<(u32, Compress)>,
    decompress: Option<Decompress>,
}

impl States {
    fn compress(&mut self, level: u32) -> &mut Compress {
        let made = self.compress.take().filter(|made| made.0 == level);
        let new = || (level, Compress::new(Compression::new(level), false));
        &mut self.compress.insert(made.unwrap_or_else(new)).1
    }

    fn decompress(&mut self) -> &mut Decompress {
        self.decompress.get_or_insert_with(|| Decompress::new(false))
    }
}

impl BlockCodec for Deflate {
    const ID: CodecId = CodecId::DEFLATE;
    type State = States;

    /// Stored bytes, and room for what the library may write beyond them.
    fn block_bound(len: usize) -> usize {
        128 + len + len / 8
    }

    fn encode_block(&self, block: &[u8], dst: &mut [u8], states: &mut States) -> Result<usize> {
        let state = states.compress(self.level);
        state.reset();
        match state.compress(block, dst, FlushCompress::Finish) {
            Ok(Status::StreamEnd) => Ok(state.total_out() as usize),
            other => Err(Error::limit(format!("deflate: {other:?}"))),
        }
    }

    fn decode_block(&self, block: &[u8], dst: &mut [u8], states: &mut States) -> Result<()> {
        // Any number of empty Deflate blocks may precede the last one, and each takes time.
        if block.len() > Self::block_bound(dst.len()) {
            return Err(Error::limit(format!(
                "deflate block of {} bytes is too long for {} bytes of data",
                block.len(),
                dst.len()
            )));
        }
        let state = states.decompress();
        state.reset(false);
        let status = state
            .decompress(block, dst, FlushDecompress::Finish)
            .map_err(|e| Error::corrupt(format!("deflate: {e}")))?;
        let (used, written) = (state.total_in() as usize, state.total_out() as usize);
        if status != Status::StreamEnd || written != dst.len() {
            return Err(Error::corrupt(format!(
                "deflate block does not decode to {} bytes",
                dst.len()
            )));
        }
        if used != block.len() {
            let behind = block.len() - used;
            return Err(Error::corrupt(format!(
                "{behind} unexpected bytes after the deflate block"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_little_more_than_empty_ones_are_refused() {
        let decode = |empty: usize| {
            // Stored Deflate blocks of 0 bytes, then the last one, of a byte.
            let mut block = [0, 0, 0, 0xff, 0xff].repeat(empty);
            block.extend([1, 1, 0, 0xfe, 0xff, 7]);
            let mut dst = [0];
            let done = Deflate::default().decode_block(&block, &mut dst, &mut States::default());
            done.map(|()| dst[0])
        };
        assert_eq!(decode(20), Ok(7));
        let more = decode(30);
        assert!(matches!(more, Err(Error::Limit { .. })), "{more:?}");
    }
}
