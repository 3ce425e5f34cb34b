//! Errors shaped by what the caller can do about them.

use std::fmt;

/// The place in a checkpoint where something is wrong: filled in from the inside out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// The part that was being read: `footer`, `manifest`, `tensor table`, `chunk table`,
    /// `stream`...
    pub part: Option<&'static str>,
    /// Name of the tensor.
    pub tensor: Option<String>,
    /// Index of the chunk within the tensor.
    pub chunk: Option<u64>,
    /// Index of the stream within the chunk.
    pub stream: Option<usize>,
    /// Byte offset within the part.
    pub offset: Option<u64>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sep = "";
        if let Some(t) = &self.tensor {
            write!(f, "tensor `{t}`")?;
            sep = ", ";
        }
        if let Some(c) = self.chunk {
            write!(f, "{sep}chunk {c}")?;
            sep = ", ";
        }
        if let Some(s) = self.stream {
            write!(f, "{sep}stream {s}")?;
            sep = ", ";
        }
        if let Some(p) = self.part {
            write!(f, "{sep}{p}")?;
            sep = ", ";
        }
        if let Some(o) = self.offset {
            write!(f, "{sep}offset {o}")?;
            sep = ", ";
        }
        if sep.is_empty() { f.write_str("file") } else { Ok(()) }
    }
}

/// Errors in bytes that were read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes contradict themselves or a checksum: read another copy.
    #[error("corrupt data ({location}): {what}")]
    Corrupt {
        /// The error.
        what: String,
        /// Its place.
        location: Box<Location>,
    },
    /// The bytes end too early: the write did not finish, or the copy was cut.
    #[error("truncated data ({location}): {what}")]
    Truncated {
        /// The missing part.
        what: String,
        /// Its place.
        location: Box<Location>,
    },
    /// Well-formed, but this version or this machine cannot read it.
    #[error("unsupported ({location}): {what}")]
    Unsupported {
        /// The unsupported feature, and what would be supported.
        what: String,
        /// Its place.
        location: Box<Location>,
    },
    /// A limit of the format or of the caller would be exceeded.
    #[error("limit exceeded ({location}): {what}")]
    Limit {
        /// The limit.
        what: String,
        /// The place where it would be exceeded.
        location: Box<Location>,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// [`Error::Corrupt`] without a location yet.
    pub fn corrupt(what: impl Into<String>) -> Self {
        Self::Corrupt { what: what.into(), location: Box::default() }
    }
    /// [`Error::Truncated`] without a location yet.
    pub fn truncated(what: impl Into<String>) -> Self {
        Self::Truncated { what: what.into(), location: Box::default() }
    }
    /// [`Error::Unsupported`] without a location yet.
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), location: Box::default() }
    }
    /// [`Error::Limit`] without a location yet.
    pub fn limit(what: impl Into<String>) -> Self {
        Self::Limit { what: what.into(), location: Box::default() }
    }
    /// The place of the error.
    pub fn location(&self) -> &Location {
        match self {
            Self::Corrupt { location, .. }
            | Self::Truncated { location, .. }
            | Self::Unsupported { location, .. }
            | Self::Limit { location, .. } => location,
        }
    }
    fn at(mut self, f: impl FnOnce(&mut Location)) -> Self {
        match &mut self {
            Self::Corrupt { location, .. }
            | Self::Truncated { location, .. }
            | Self::Unsupported { location, .. }
            | Self::Limit { location, .. } => f(location),
        }
        self
    }
    /// Adds the part of the file, unless a more precise one is known.
    #[must_use]
    pub fn in_part(self, part: &'static str) -> Self {
        self.at(|p| p.part = p.part.or(Some(part)))
    }
    /// Adds the offset within the part, unless known.
    #[must_use]
    pub fn at_offset(self, offset: u64) -> Self {
        self.at(|p| p.offset = p.offset.or(Some(offset)))
    }
    /// Adds the index of the stream, unless known.
    #[must_use]
    pub fn in_stream(self, stream: usize) -> Self {
        self.at(|p| p.stream = p.stream.or(Some(stream)))
    }
    /// Adds the index of the chunk, unless known.
    #[must_use]
    pub fn in_chunk(self, chunk: u64) -> Self {
        self.at(|p| p.chunk = p.chunk.or(Some(chunk)))
    }
    /// Adds the name of the tensor, unless known.
    #[must_use]
    pub fn in_tensor(self, name: &str) -> Self {
        self.at(|p| {
            p.tensor.get_or_insert_with(|| name.to_owned());
        })
    }
}
