//! Zstandard frames (docs/codecs/zstd.md).

use s4_format::{CodecId, Error, Result};
use zstd::zstd_safe;

use crate::codec::{Codec, Context, Encoded, need, no_param};

/// Codec `zstd`: the stream is one Zstandard frame (RFC 8878) with its content size.
#[derive(Debug, Clone, Copy)]
pub struct Zstd {
    level: i32,
}

impl Zstd {
    /// An encoder at a level of the zstd library (its range of levels limits it).
    pub fn new(level: i32) -> Self {
        Self { level: level.clamp(zstd_safe::min_c_level(), zstd_safe::max_c_level()) }
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
        zstd_safe::compress_bound(len)
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let dst = need(dst, self.bound(src.len()))?;
        let len = zstd_safe::compress(dst, src, self.level)
            .map_err(|code| Error::limit(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
        Ok(Encoded { len, param: 0 })
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        no_param(self.id(), param)?;
        check_frame(src, dst.len())?;
        let len = zstd_safe::decompress(dst, src)
            .map_err(|code| Error::corrupt(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
        if len != dst.len() {
            return Err(Error::corrupt(format!("zstd frame of {len} bytes for {}", dst.len())));
        }
        Ok(())
    }
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
