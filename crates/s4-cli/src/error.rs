//! What a command can fail with, and the exit code of each.

use std::io;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Library(#[from] s4weights::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{file}: not a safetensors file: {source}")]
    Safetensors { file: String, source: safetensors::SafeTensorError },
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    Test(String),
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn exit_code(&self) -> u8 {
        use s4weights::Error as E;
        use s4weights::format::Error as F;
        match self {
            Self::Library(E::Format { source: F::Unsupported { .. }, .. })
            | Self::Unsupported(_) => 4,
            Self::Library(E::Format { .. }) | Self::Test(_) | Self::Safetensors { .. } => 1,
            Self::Library(E::Argument(_)) => 2,
            Self::Library(_) | Self::Io(_) => 3,
        }
    }
}
