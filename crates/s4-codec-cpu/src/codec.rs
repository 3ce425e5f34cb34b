//! The codec trait and the registry.

use std::fmt::Debug;

use s4_format::{CodecId, Error, Result};

/// What an encoder may use and a decoder is given besides the stream itself: everything here is
/// known before the stream is decoded.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// Tables that the tensor's streams share, as they stand in its side data; empty if none.
    pub tables: &'a [u8],
    /// One context byte for each symbol of the stream; empty if all have context 0.
    pub symbols: &'a [u8],
}

/// Size and parameter of an encoded stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes written at the start of the destination.
    pub len: usize,
    /// The 8-bit parameter that the stream entry keeps and that `decode` is given again.
    pub param: u8,
}

/// One bitstream. Two codecs with one id decode each other's output.
///
/// Implementations do not allocate in proportion to the input, block, log, or know names; they are
/// sync and hold no state between calls. [`crate::testing::conformance`] checks the contract.
pub trait Codec: Debug + Send + Sync {
    /// The bitstream's id.
    fn id(&self) -> CodecId;

    /// The size that `dst` of [`Codec::encode`] must have for `len` bytes of input. No output is
    /// ever longer. (An engine stores a stream raw when its output is not shorter than its input.)
    fn bound(&self, len: usize) -> usize;

    /// Encodes `src` into the start of `dst`, whose size is at least [`Codec::bound`]; the bytes
    /// after the output may be overwritten.
    ///
    /// # Errors
    /// `Unsupported` if this codec cannot express `src` (a constant codec given other data);
    /// `Limit` if `dst` is smaller than the bound or `src` longer than the bitstream allows.
    fn encode(&self, ctx: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded>;

    /// Decodes `src` into `dst`, filling it exactly. Any `src` is allowed: the result is the data,
    /// or an error and unspecified content of `dst`.
    ///
    /// # Errors
    /// `Corrupt`, `Truncated` or `Unsupported` if `src` is not a stream of `dst.len()` bytes.
    fn decode(&self, param: u8, ctx: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()>;

    /// How many bytes of the stream behind it a stream of `len` symbols can carry along and hardly
    /// grow. Most codecs carry none.
    fn carry_len(&self, len: usize) -> usize {
        let _ = len;
        0
    }

    /// As [`Codec::decode`]; also replaces `carry` by the bytes that the stream carries.
    ///
    /// # Errors
    /// As [`Codec::decode`].
    fn decode_carrying(
        &self,
        param: u8,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        carry: &mut Vec<u8>,
    ) -> Result<()> {
        carry.clear();
        self.decode(param, ctx, src, dst)
    }
}

/// The codecs that an engine may use, by id: a value that is passed in, not a global.
#[derive(Debug, Default)]
pub struct Codecs {
    list: Vec<Box<dyn Codec>>,
}

impl Codecs {
    /// No codecs.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Adds a codec; one with the same id is replaced.
    #[must_use]
    pub fn with(mut self, codec: impl Codec + 'static) -> Self {
        self.list.retain(|c| c.id() != codec.id());
        self.list.push(Box::new(codec));
        self
    }

    /// The codec of a bitstream.
    ///
    /// # Errors
    /// `Unsupported`, naming the bitstream, if it is not registered.
    pub fn get(&self, id: CodecId) -> Result<&dyn Codec> {
        if let Some(codec) = self.list.iter().find(|c| c.id() == id) {
            return Ok(&**codec);
        }
        id.require_open()?;
        Err(Error::unsupported(format!("codec `{id}` is not registered with this engine")))
    }

    /// The ids of the registered codecs.
    pub fn ids(&self) -> impl Iterator<Item = CodecId> + '_ {
        self.list.iter().map(|c| c.id())
    }
}

/// `dst`, if it has at least `bound` bytes.
pub(crate) fn need(dst: &mut [u8], bound: usize) -> Result<&mut [u8]> {
    if dst.len() < bound {
        return Err(Error::limit(format!("{} bytes to encode into, {bound} needed", dst.len())));
    }
    Ok(dst)
}

/// Checks the parameter of a codec that has none.
pub(crate) fn no_param(id: CodecId, param: u8) -> Result<()> {
    if param != 0 {
        return Err(Error::unsupported(format!("codec `{id}` with parameter {param}")));
    }
    Ok(())
}
