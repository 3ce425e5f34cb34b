//! Errors of GPU codecs.

use s4_format::CodecId;

/// Errors before any block was coded. The outcome of each block is in its status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The library is missing, unfit, or refused a call.
    #[error(transparent)]
    Library(#[from] nvcomp_sys::Error),
    /// The library does not write or read this bitstream.
    #[error("nvCOMP has no codec `{codec}` with parameter {param}")]
    NoCodec {
        /// The bitstream.
        codec: CodecId,
        /// The parameter of the stream's entry.
        param: u8,
    },
    /// A batch that the codec does not take.
    #[error("codec `{codec}`: blocks of up to {max_block} bytes, at most {limit} allowed")]
    Block {
        /// The bitstream.
        codec: CodecId,
        /// The longest block of the batch.
        max_block: usize,
        /// The longest block of the bitstream.
        limit: usize,
    },
    /// Less scratch memory than the batch needs.
    #[error("codec `{codec}`: {given} bytes of scratch memory, {needed} needed")]
    Scratch {
        /// The bitstream.
        codec: CodecId,
        /// Bytes that the caller gave.
        given: usize,
        /// Bytes that the library asks for.
        needed: usize,
    },
}

/// `Result` with this module's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for s4_format::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Library(_) | Error::NoCodec { .. } => Self::unsupported(error.to_string()),
            Error::Block { .. } | Error::Scratch { .. } => Self::limit(error.to_string()),
        }
    }
}
