//! The codec trait and the registry.

use std::fmt::Debug;
use std::sync::Arc;

use s4_format::{CodecId, Error, Result};

use crate::Workspace;

/// Facts about a stream that are known before its first symbol is decoded: an encoder may use them,
/// and a decoder gets them in addition to the stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// The 8-bit parameter in the stream's entry, which selects a form of the codec's bitstream.
    pub param: u8,
    /// Tables that the tensor's streams share, as stored in its side data; empty if none.
    pub tables: &'a [u8],
    /// One context byte for each symbol of the stream, the index of its table; empty if all are 0.
    pub contexts: &'a [u8],
}

impl Context<'_> {
    /// A context with a parameter, and neither tables nor contexts.
    pub fn of(param: u8) -> Self {
        Self { param, ..Self::default() }
    }
}

/// The symbols to encode as one stream, and what an encoder may do with them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Symbols<'a> {
    /// The symbols.
    pub bytes: &'a [u8],
    /// The context that the decoder will get as well.
    pub context: Context<'a>,
    /// Whether the stream may hold its own tables although the context has some, where that makes
    /// it smaller.
    pub own_tables: bool,
    /// The stream after this one. A codec whose streams have room to spare may carry the end of
    /// that stream, which then need not be stored.
    pub behind: &'a [u8],
    /// Whether nearly all symbols are expected to be the same, as with small differences. Then a
    /// sample says little, and the fixed costs of a stream matter.
    pub sparse: bool,
}

impl<'a> Symbols<'a> {
    /// Symbols of a stream on its own.
    pub fn new(bytes: &'a [u8], context: Context<'a>) -> Self {
        Self { bytes, context, ..Self::default() }
    }
}

/// The result of an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Bytes at the start of the destination.
    pub len: usize,
    /// Bytes at the end of [`Symbols::behind`] that the stream carries.
    pub carried: usize,
    /// Whether the stream refers to the tables of its context.
    pub shared: bool,
}

impl Encoded {
    /// A stream of `len` bytes that carries nothing and refers to no shared tables.
    pub fn of(len: usize) -> Self {
        Self { len, carried: 0, shared: false }
    }
}

/// One bitstream. Two codecs with the same id decode each other's output.
///
/// The codec, a parameter, tables, contexts and the carried bytes determine the form of a stream,
/// and nothing else does: the effort of an encoder (a level, vector instructions) is up to the
/// value that implements this trait. Implementations do not allocate in proportion to the input,
/// wait, log, or know names; they are sync, and keep state between calls only in the [`Workspace`].
/// [`crate::testing::conformance`] checks the contract.
pub trait Codec: Debug + Send + Sync {
    /// The bitstream's id.
    fn id(&self) -> CodecId;

    /// The size that `dst` of [`Codec::encode`] must have for `len` symbols. No output is ever
    /// longer. (An engine stores a stream raw when its output is not shorter than its input.)
    fn bound(&self, param: u8, len: usize) -> usize;

    /// Encodes symbols into the start of `dst`, whose size is at least [`Codec::bound`]; the bytes
    /// after the output may be overwritten.
    ///
    /// # Errors
    /// `Unsupported` if this codec cannot express the symbols (a constant codec given other data), or
    /// does not write streams of this parameter; `Limit` if `dst` is smaller than the bound or there
    /// are more symbols than the bitstream allows.
    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded>;

    /// Decodes `src` into `dst`, filling it exactly. Any `src` is allowed: the result is the data,
    /// or an error and unspecified content of `dst`.
    ///
    /// # Errors
    /// `Corrupt`, `Truncated` or `Unsupported` if `src` is not a stream of `dst.len()` bytes.
    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<()>;

    /// As [`Codec::decode`]; also replaces `carry` by the bytes that the stream carries.
    ///
    /// # Errors
    /// As [`Codec::decode`].
    fn decode_carrying(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        carry: &mut Vec<u8>,
        work: &mut Workspace,
    ) -> Result<()> {
        carry.clear();
        self.decode(ctx, src, dst, work)
    }
}

/// The format assigns no id from here on.
const PRIVATE: u8 = 240;

/// The codecs that an engine may use, by id: a value that is passed in, not a global.
#[derive(Debug, Clone, Default)]
pub struct Codecs {
    list: Vec<(CodecId, Arc<dyn Codec>)>,
}

impl Codecs {
    /// No codecs.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Adds a codec; one with the same id is replaced.
    #[must_use]
    pub fn with(mut self, codec: impl Codec + 'static) -> Self {
        self.list.retain(|(id, _)| *id != codec.id());
        self.list.push((codec.id(), Arc::new(codec)));
        self
    }

    /// Adds all codecs of `others`; those with the same ids are replaced.
    #[must_use]
    pub fn with_all(mut self, others: &Self) -> Self {
        self.list.retain(|(id, _)| others.ids().all(|other| other != *id));
        self.list.extend(others.list.iter().cloned());
        self
    }

    /// The codec of a bitstream.
    ///
    /// # Errors
    /// `Unsupported`, naming the bitstream, if it is not registered.
    pub fn get(&self, id: CodecId) -> Result<&dyn Codec> {
        if let Some((_, codec)) = self.list.iter().find(|c| c.0 == id) {
            return Ok(&**codec);
        }
        if id.0 >= PRIVATE {
            return Err(Error::unsupported(format!(
                "codec {} is private to the program that wrote this: pass that program's codecs to the reader",
                id.0
            )));
        }
        id.require_open()?;
        Err(Error::unsupported(format!("codec `{id}` is not registered with this engine")))
    }

    /// The ids of the registered codecs.
    pub fn ids(&self) -> impl Iterator<Item = CodecId> + '_ {
        self.list.iter().map(|c| c.0)
    }
}

/// `dst`, if it has at least `bound` bytes.
pub(crate) fn need(dst: &mut [u8], bound: usize) -> Result<&mut [u8]> {
    if dst.len() < bound {
        return Err(Error::limit(format!("output buffer has {} bytes, {bound} needed", dst.len())));
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
