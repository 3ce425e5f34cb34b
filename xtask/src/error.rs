//! The error type of all verbs: a sentence for the person who ran one.

use std::fmt;
use std::path::Path;

/// What went wrong, in words.
#[derive(Debug)]
pub(crate) struct Error(String);

/// A verb's or a step's outcome.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error that says `text`.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// An error of the file system, with the path that the system's own message lacks.
    pub(crate) fn at(path: &Path, error: &std::io::Error) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
