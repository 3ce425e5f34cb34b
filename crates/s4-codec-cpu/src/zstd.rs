//! Zstandard frames (docs/codecs/zstd.md).

use s4_format::{CodecId, Error, Result};
use zstd::zstd_safe;

use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, need};

/// The parameter of a stream that is one frame.
const ONE_FRAME: u8 = 0;

/// Codec `zstd`: the stream is one Zstandard frame (RFC 8878) with its content size, or blocks of
/// 64 KiB, each one frame. Decoders read both.
#[derive(Debug, Clone, Copy)]
pub struct Zstd {
    level: i32,
    param: u8,
}

impl Zstd {
    /// The parameter of a stream of blocks, each one frame. (0 is that of a single frame.)
    pub const IN_BLOCKS: u8 = 1;

    /// An encoder at a level of the zstd library (its range of levels limits it).
    pub fn new(level: i32) -> Self {
        let level = level.clamp(zstd_safe::min_c_level(), zstd_safe::max_c_level());
        Self { level, param: ONE_FRAME }
    }

    /// The same encoder, writing blocks: what a GPU reads and writes side by side.
    #[must_use]
    pub fn in_blocks(self) -> Self {
        Self { param: Self::IN_BLOCKS, ..self }
    }
}

impl Default for Zstd {
    fn default() -> Self {
        Self::new(zstd_safe::CLEVEL_DEFAULT)
    }
}

impl Codec for Zstd {
    fn id(&self) -> CodecId {
        CodecId::ZSTD
    }

    fn bound(&self, len: usize) -> usize {
        match self.param {
            ONE_FRAME => zstd_safe::compress_bound(len),
            _ => blocks::bound(len, BLOCK, zstd_safe::compress_bound),
        }
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let dst = need(dst, self.bound(src.len()))?;
        let frame = |src: &[u8], dst: &mut [u8]| {
            zstd_safe::compress(dst, src, self.level)
                .map_err(|code| Error::limit(format!("zstd: {}", zstd_safe::get_error_name(code))))
        };
        let len = match self.param {
            ONE_FRAME => frame(src, dst)?,
            _ => blocks::write(src, dst, BLOCK, zstd_safe::compress_bound, frame)?,
        };
        Ok(Encoded { len, param: self.param })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        match param {
            ONE_FRAME => decode_frame(src, dst),
            Self::IN_BLOCKS => blocks::read(src, dst, decode_frame),
            _ => Err(Error::unsupported(format!("codec `zstd` with parameter {param}"))),
        }
    }
}

fn decode_frame(src: &[u8], dst: &mut [u8]) -> Result<()> {
    check_frame(src, dst.len())?;
    let len = zstd_safe::decompress(dst, src)
        .map_err(|code| Error::corrupt(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
    if len != dst.len() {
        return Err(Error::corrupt(format!("zstd frame of {len} bytes for {}", dst.len())));
    }
    Ok(())
}

/// Checks that `src` is one whole frame and nothing else, of `len` bytes if it says its size.
fn check_frame(src: &[u8], len: usize) -> Result<()> {
    match zstd_safe::get_frame_content_size(src) {
        Ok(Some(size)) if size != len as u64 => {
            return Err(Error::corrupt(format!("zstd frame of {size} bytes for {len}")));
        }
        Ok(_) => {}
        Err(_) => return Err(Error::corrupt("no zstd frame")),
    }
    let frame = zstd_safe::find_frame_compressed_size(src)
        .map_err(|code| Error::truncated(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
    if frame != src.len() {
        return Err(Error::corrupt(format!("{} bytes after the zstd frame", src.len() - frame)));
    }
    Ok(())
}
