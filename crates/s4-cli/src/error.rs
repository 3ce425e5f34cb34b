//! The errors of commands, and the exit code of each.

use std::io;

use s4weights::ParentProblem;
use s4weights::store::StoreError;

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
    /// Nothing is wrong with the file, but this machine cannot hold it now.
    #[error("{0}")]
    NoMemory(String),
    #[error("{0}")]
    Damaged(String),
    #[error("{0}")]
    Test(String),
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Conflict(String),
    #[cfg(all(unix, feature = "serve"))]
    #[error(transparent)]
    Runner(#[from] s4_runner::Error),
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Library(e) => library_code(e),
            Self::Damaged(_) | Self::Test(_) | Self::Safetensors { .. } => 1,
            Self::Usage(_) => 2,
            Self::Io(_) | Self::NotFound(_) => 3,
            Self::Unsupported(_) => 4,
            Self::Conflict(_) => 5,
            Self::NoMemory(_) => 6,
            #[cfg(all(unix, feature = "serve"))]
            Self::Runner(e) => e.exit_code(),
        }
    }

    /// What went wrong and, if known, what can be done about it.
    pub(crate) fn explain(&self) -> String {
        let Self::Library(s4weights::Error::Store { target, source }) = self else {
            return self.to_string();
        };
        match &**source {
            // These name the place themselves.
            StoreError::NoStore { place } => {
                format!("{source}; create one with `s4w store init {place}`")
            }
            StoreError::StoreExists { .. }
            | StoreError::Locked { .. }
            | StoreError::LeaseLost { .. }
            | StoreError::Gone { .. }
            | StoreError::SaveLost { .. } => source.to_string(),
            StoreError::Argument(what) if what.contains("`exclusive`") => {
                format!("{target}: {source} (--exclusive)")
            }
            StoreError::Conflict(_) => {
                format!(
                    "{target}: {source}; nothing was changed (run `s4w store ls` to see the current checkpoints)"
                )
            }
            _ => self.to_string(),
        }
    }
}

fn library_code(error: &s4weights::Error) -> u8 {
    use s4weights::Error as E;
    use s4weights::format::Error as F;
    match error {
        E::Format { source: F::Unsupported { .. } | F::Limit { .. }, .. } => 4,
        E::Format { .. } => 1,
        E::Argument(_) => 2,
        E::Checkpoint { source, .. } => library_code(source),
        E::Store { source, .. } => store_code(source),
        E::Parent { problem, .. } => parent_code(problem),
        E::Device { .. } => 4,
        _ => 3,
    }
}

fn parent_code(problem: &ParentProblem) -> u8 {
    use ParentProblem as P;
    match problem {
        P::Unreadable(source) => library_code(source),
        P::OtherHash(_) | P::Depth { .. } | P::NoTensor(_) | P::OtherShape { .. } => 1,
        _ => 3,
    }
}

fn store_code(error: &StoreError) -> u8 {
    match error {
        StoreError::Corrupt { .. } | StoreError::Missing { .. } | StoreError::LogDamaged { .. } => {
            1
        }
        StoreError::Argument(_) | StoreError::Limit(_) => 2,
        StoreError::Unsupported { .. } | StoreError::Refused(_) => 4,
        StoreError::StoreExists { .. }
        | StoreError::Conflict(_)
        | StoreError::Locked { .. }
        | StoreError::LeaseLost { .. } => 5,
        _ => 3,
    }
}
