//! Errors, grouped by what the caller can do about them.

use std::io;
use std::time::Duration;

use s4_format::{DType, Digest};
use s4_store::{Cause, Failure};

/// Errors of saving and loading.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes that were read are damaged, truncated, too new or too large.
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
    #[error("{target}: cannot {action}: {source}{}", advice(.source))]
    Io {
        /// File or URL.
        target: String,
        /// The action that failed.
        action: &'static str,
        /// Its reason.
        source: io::Error,
    },
    /// A delta cannot be read or written because of its parent.
    #[error("{target}{}: parent checkpoint {parent}: {problem}", of_tensor(tensor.as_deref()))]
    Parent {
        /// File or URL of the checkpoint whose parent it is.
        target: String,
        /// Name of the tensor, if it is about one.
        tensor: Option<String>,
        /// Hash of the parent's manifest.
        parent: Digest,
        /// What is wrong with the parent.
        problem: ParentProblem,
    },
    /// A CUDA device or its driver failed: no memory left, a budget that is too small, a failed
    /// call.
    #[cfg(feature = "cuda")]
    #[error("{target}: {source}")]
    Device {
        /// File or URL.
        target: String,
        /// What the device or its driver reported.
        source: s4_engine::cuda::GpuError,
    },
    /// A checkpoint store refused or failed.
    #[error("{}", about(target, source))]
    Store {
        /// Folder or URL of the store.
        target: String,
        /// The store's error.
        source: Box<s4_store::Error>,
    },
    /// Something is wrong with one checkpoint of a store.
    #[error("{target}: step {step} (checkpoint {id}): {source}")]
    Checkpoint {
        /// Folder or URL of the store.
        target: String,
        /// The checkpoint's training step.
        step: u64,
        /// The checkpoint.
        id: s4_store::CheckpointId,
        /// What is wrong, naming the tensor or the object.
        source: Box<Error>,
    },
    /// An argument is invalid.
    #[error("{0}")]
    Argument(String),
    /// The caller's progress function asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether bytes were read that contradict their checksums or themselves.
    pub(crate) fn is_mismatch(&self) -> bool {
        match self {
            Self::Format { source: s4_format::Error::Corrupt { .. }, .. } => true,
            Self::Checkpoint { source, .. } => source.is_mismatch(),
            Self::Parent { problem: ParentProblem::Unreadable(source), .. } => source.is_mismatch(),
            _ => false,
        }
    }
}

/// Faults of a parent checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ParentProblem {
    /// Its values are needed, and the caller did not supply it.
    #[error("its values are needed, but it is not available")]
    Missing,
    /// It was looked for and could not be opened.
    #[error("it cannot be opened: {0}")]
    Unreadable(#[source] Box<Error>),
    /// Another checkpoint was given.
    #[error("another checkpoint was given, with manifest hash {0}")]
    OtherHash(Digest),
    /// The length of its chain contradicts what its descendant says.
    #[error("its chain has {found} checkpoints, expected {expected}")]
    Depth {
        /// As its descendant says.
        expected: u32,
        /// As it says itself.
        found: u32,
    },
    /// A chain may not become longer.
    #[error("its chain already has {depth} checkpoints, at most {max} allowed")]
    TooDeep {
        /// Checkpoints of its chain.
        depth: u32,
        /// Most checkpoints of a chain.
        max: u32,
    },
    /// It has no tensor of this number.
    #[error("it has no tensor {0}")]
    NoTensor(u32),
    /// The tensor is of another type or shape there.
    #[error("its tensor has dtype {dtype} and shape {shape:?}")]
    OtherShape {
        /// Its type there.
        dtype: DType,
        /// Its shape there.
        shape: Vec<u64>,
    },
    /// Values kept in memory differ from the checkpoint's.
    #[error("the values kept in memory differ from the checkpoint (chunk {chunk})")]
    Changed {
        /// Number of the first chunk that differs.
        chunk: u64,
    },
}

fn of_tensor(name: Option<&str>) -> String {
    name.map(|n| format!(", tensor `{n}`")).unwrap_or_default()
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
        if matches!(e, object_store::Error::NotFound { .. }) && action == "open" {
            return Self::NotFound { target: target.to_owned() };
        }
        let failure = Failure::new(&e);
        Self::remote(
            target,
            action,
            s4_store::Error::Storage { action, key: String::new(), source: failure },
        )
    }

    /// The error of a failed request to an object store.
    pub(crate) fn remote(target: &str, action: &'static str, e: s4_store::Error) -> Self {
        let kind = match e.cause() {
            Some(Cause::NotFound) if action == "open" => {
                return Self::NotFound { target: target.to_owned() };
            }
            Some(Cause::NotFound) => io::ErrorKind::NotFound,
            Some(Cause::Permission | Cause::NoCredentials) => io::ErrorKind::PermissionDenied,
            Some(Cause::Conflict) => io::ErrorKind::AlreadyExists,
            Some(Cause::Unsupported) => io::ErrorKind::Unsupported,
            Some(Cause::Refused) => io::ErrorKind::ConnectionRefused,
            Some(Cause::Reset) => io::ErrorKind::ConnectionReset,
            Some(Cause::Timeout) => io::ErrorKind::TimedOut,
            Some(Cause::DiskFull) => io::ErrorKind::StorageFull,
            Some(Cause::ReadOnly) => io::ErrorKind::ReadOnlyFilesystem,
            _ => io::ErrorKind::Other,
        };
        let source = match e {
            s4_store::Error::Storage { source, .. } => io::Error::new(kind, source),
            s4_store::Error::Deadline { limit, last, .. } => {
                io::Error::new(kind, Late { limit, last })
            }
            other => io::Error::new(kind, other),
        };
        Self::Io { target: target.to_owned(), action, source }
    }

    /// The cause, if a file system, a server or the connection to it failed.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::NotFound { .. } => Some(Cause::NotFound),
            Self::Io { source, .. } => {
                Some(failure(source).map_or_else(|| Cause::of_io(source), Failure::cause))
            }
            Self::Store { source, .. } => source.cause(),
            Self::Checkpoint { source, .. } => source.cause(),
            _ => None,
        }
    }

    /// The system's error number, or the one that best matches the failure of a server or a
    /// connection.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => match failure(source) {
                Some(failure) => failure.errno(),
                None => source.raw_os_error().or_else(|| Cause::of_io(source).errno()),
            },
            Self::NotFound { .. } => Cause::NotFound.errno(),
            Self::Store { source, .. } => source.errno(),
            Self::Checkpoint { source, .. } => source.errno(),
            _ => None,
        }
    }
}

/// A store's message, with the store's name in front unless it contains the name.
fn about(target: &str, said: &s4_store::Error) -> String {
    match said.place() {
        Some(place) if place == target => said.to_string(),
        _ => format!("{target}: {said}"),
    }
}

/// A request that failed despite retries.
#[derive(Debug, thiserror::Error)]
#[error("no success within {limit:?}: {last}")]
struct Late {
    limit: Duration,
    last: Failure,
}

/// The failure of a server, or of the connection to it, if that is the cause.
fn failure(error: &io::Error) -> Option<&Failure> {
    let inner = error.get_ref()?;
    inner.downcast_ref().or_else(|| inner.downcast_ref::<Late>().map(|late| &late.last))
}

/// Advice to append to a system's own message.
fn advice(error: &io::Error) -> String {
    let advice = error.raw_os_error().and_then(|_| Cause::of_io(error).advice());
    advice.map(|advice| format!("; {advice}")).unwrap_or_default()
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
