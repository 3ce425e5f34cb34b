//! What can go wrong, by what the caller can do about it.

use std::io;

/// Errors of saving and loading.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes that were read are damaged, cut, too new or too large.
    #[error("{target}: {source}")]
    Format {
        /// File or URL.
        target: String,
        /// What is wrong, and where in the file.
        source: s4_format::Error,
    },
    /// There is nothing at this path or URL.
    #[error("{target}: not found")]
    NotFound {
        /// File or URL.
        target: String,
    },
    /// There is no tensor or blob of this name in the file.
    #[error("{target}: no {what} `{name}`")]
    NoEntry {
        /// File or URL.
        target: String,
        /// `tensor` or `blob`.
        what: &'static str,
        /// The name that was asked for.
        name: String,
    },
    /// The file system or the object store refused.
    #[error("{target}: cannot {action}: {source}")]
    Io {
        /// File or URL.
        target: String,
        /// What was tried.
        action: &'static str,
        /// Its reason.
        source: io::Error,
    },
    /// An argument does not fit.
    #[error("{0}")]
    Argument(String),
    /// The caller's progress function asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io(target: &str, action: &'static str, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::NotFound && action == "open" {
            return Self::NotFound { target: target.to_owned() };
        }
        Self::Io { target: target.to_owned(), action, source }
    }

    pub(crate) fn store(target: &str, action: &'static str, e: object_store::Error) -> Self {
        let kind = match &e {
            object_store::Error::NotFound { .. } if action == "open" => {
                return Self::NotFound { target: target.to_owned() };
            }
            object_store::Error::NotFound { .. } => io::ErrorKind::NotFound,
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
            object_store::Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
            object_store::Error::NotSupported { .. }
            | object_store::Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::Other,
        };
        Self::Io { target: target.to_owned(), action, source: io::Error::new(kind, e) }
    }
}

/// Names the target of a format error.
pub(crate) trait At<T> {
    fn at(self, target: &str) -> Result<T>;
}

impl<T> At<T> for s4_format::Result<T> {
    fn at(self, target: &str) -> Result<T> {
        self.map_err(|source| Error::Format { target: target.to_owned(), source })
    }
}
