//! Zstandard frames (docs/codecs/zstd.md).

use s4_format::{CodecId, Error, Result};
use zstd::zstd_safe::{self, CCtx, DCtx};

use crate::Workspace;
use crate::blocks::{self, BLOCK};
use crate::codec::{Codec, Context, Encoded, Symbols, need};

/// The parameter of a stream that is one frame.
const ONE_FRAME: u8 = 0;

/// Codec `zstd`: the stream is one Zstandard frame (RFC 8878) with its content size, or blocks of
/// 64 KiB, each one frame, which a GPU reads and writes in parallel. The parameter says which.
#[derive(Debug, Clone, Copy)]
pub struct Zstd {
    level: i32,
}

impl Zstd {
    /// The parameter of a stream of blocks, each one frame. (0 is that of a single frame.)
    pub const IN_BLOCKS: u8 = 1;

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

/// The library's contexts, which are made on first use.
#[derive(Default)]
struct Contexts {
    encode: Option<CCtx<'static>>,
    decode: Option<DCtx<'static>>,
}

impl Codec for Zstd {
    fn id(&self) -> CodecId {
        CodecId::ZSTD
    }

    fn bound(&self, param: u8, len: usize) -> usize {
        match param {
            ONE_FRAME => zstd_safe::compress_bound(len),
            _ => blocks::bound(len, BLOCK, zstd_safe::compress_bound),
        }
    }

    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded> {
        let (src, param) = (symbols.bytes, symbols.context.param);
        let dst = need(dst, self.bound(param, src.len()))?;
        let made = &mut work.state::<Contexts>().encode;
        let context = match made {
            Some(context) => context,
            None => made.insert(CCtx::try_create().ok_or_else(no_memory)?),
        };
        let mut frame = |src: &[u8], dst: &mut [u8]| {
            context
                .compress(dst, src, self.level)
                .map_err(|code| Error::limit(format!("zstd: {}", zstd_safe::get_error_name(code))))
        };
        let len = match param {
            ONE_FRAME => frame(src, dst)?,
            Self::IN_BLOCKS => blocks::write(src, dst, BLOCK, zstd_safe::compress_bound, frame)?,
            _ => return Err(other_param(param)),
        };
        Ok(Encoded::of(len))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<()> {
        let made = &mut work.state::<Contexts>().decode;
        let context = match made {
            Some(context) => context,
            None => made.insert(DCtx::try_create().ok_or_else(no_memory)?),
        };
        let mut frame = |src: &[u8], dst: &mut [u8]| decode_frame(context, src, dst);
        match ctx.param {
            ONE_FRAME => frame(src, dst),
            Self::IN_BLOCKS => blocks::read(src, dst, frame),
            param => Err(other_param(param)),
        }
    }
}

fn other_param(param: u8) -> Error {
    Error::unsupported(format!("codec `zstd` with parameter {param}"))
}

fn no_memory() -> Error {
    Error::limit("zstd: no memory for a context")
}

fn decode_frame(context: &mut DCtx<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
    check_frame(src, dst.len())?;
    let len = context
        .decompress(dst, src)
        .map_err(|code| Error::corrupt(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
    if len != dst.len() {
        return Err(Error::corrupt(format!(
            "zstd frame decodes to {len} bytes, expected {}",
            dst.len()
        )));
    }
    Ok(())
}

/// Checks that `src` is one whole frame and nothing else, of `len` bytes if it says its size.
fn check_frame(src: &[u8], len: usize) -> Result<()> {
    match zstd_safe::get_frame_content_size(src) {
        Ok(Some(size)) if size != len as u64 => {
            return Err(Error::corrupt(format!(
                "zstd frame declares {size} bytes, expected {len}"
            )));
        }
        Ok(_) => {}
        Err(_) => return Err(Error::corrupt("not a zstd frame")),
    }
    let frame = zstd_safe::find_frame_compressed_size(src)
        .map_err(|code| Error::truncated(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
    if frame != src.len() {
        return Err(Error::corrupt(format!(
            "{} unexpected bytes after the zstd frame",
            src.len() - frame
        )));
    }
    Ok(())
}
