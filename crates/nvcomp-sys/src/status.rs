//! The library's status codes.

use std::fmt;

/// A status as the library gives it, for a call or for one block. Kept as a plain number, because a
/// later version may add others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Status(pub i32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($code);)*
            /// The meaning of the status, if it is a known one.
            pub fn text(self) -> Option<&'static str> {
                match self.0 { $($code => Some($text),)* _ => None }
            }
        }
    };
}

statuses! {
    /// Success.
    SUCCESS = 0, "success";
    /// An argument is out of range.
    INVALID_VALUE = 10, "invalid value";
    /// The options or the format are not supported.
    NOT_SUPPORTED = 11, "not supported";
    /// The block is not a stream of this format.
    CANNOT_DECOMPRESS = 12, "cannot decompress";
    /// A checksum in the block does not match.
    BAD_CHECKSUM = 13, "bad checksum";
    /// The block holds no checksums.
    CANNOT_VERIFY_CHECKSUMS = 14, "cannot verify checksums";
    /// The output of a block does not fit.
    OUTPUT_BUFFER_TOO_SMALL = 15, "output buffer too small";
    /// A header has the wrong length.
    WRONG_HEADER_LENGTH = 16, "wrong header length";
    /// A pointer is not aligned as the format requires.
    ALIGNMENT = 17, "pointer not aligned";
    /// A block is longer than the format allows.
    CHUNK_SIZE_TOO_LARGE = 18, "block too large";
    /// The block cannot be compressed.
    CANNOT_COMPRESS = 19, "cannot compress";
    /// A block is not a whole number of elements.
    WRONG_INPUT_LENGTH = 20, "wrong input length";
    /// Too many blocks.
    BATCH_SIZE_TOO_LARGE = 21, "too many blocks";
    /// The block needs more parts than were allowed.
    SUB_CHUNK_COUNT_TOO_LARGE = 22, "too many parts of a block";
    /// The block has fewer parts than the format requires.
    SUB_CHUNK_COUNT_TOO_SMALL = 23, "too few parts of a block";
    /// An output is not aligned as the data type requires.
    OUTPUT_ALIGNMENT_TOO_SMALL = 24, "output not aligned";
    /// A CUDA call failed, or there is no device.
    CUDA_ERROR = 1000, "CUDA error";
    /// An internal error of the library.
    INTERNAL = 10_000, "internal error";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} (status {})", self.0),
            None => write!(f, "status {}", self.0),
        }
    }
}
