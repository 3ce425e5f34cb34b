//! Why the service ends, and with which exit code.

use std::io;
use std::path::Path;

/// Reasons why the service cannot start, or ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is invalid: change it.
    #[error("configuration: {0}")]
    Config(String),
    /// The entitlement was refused. It is final: asking again would not help.
    #[error("not entitled ({code}): {why}")]
    Denied {
        /// A word for programs, such as `not_entitled` or `bad_signature`.
        code: &'static str,
        /// What was found.
        why: String,
    },
    /// It could not be determined whether the service is entitled. A later try may succeed.
    #[error("entitlement_unreachable: {0}")]
    Unreachable(String),
    /// Another process uses the state folder, the staging folder or the socket.
    #[error("{0}: in use by another runner")]
    Locked(String),
    /// No CUDA device, although one is required.
    #[error("a GPU is required: {0}")]
    NoGpu(String),
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// File, folder or address.
        path: String,
        /// The underlying error.
        source: io::Error,
    },
    /// It ended on request, but something that it had accepted is not durable yet. The journal has it.
    #[error(
        "{count} of the accepted checkpoints are not durable yet: {which}; to resume, start again with the \
         same state folder and staging folder"
    )]
    NotDurable {
        /// How many.
        count: usize,
        /// Their steps and states.
        which: String,
    },
    /// The service could not set itself up: no async runtime, thread or HTTP client.
    #[error("{0}")]
    Internal(String),
}

/// The result type of the service.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The exit code, after `sysexits.h`: 78 for a bad configuration, 77 for a refusal, 75 for what
    /// may work later, 74 for an end that leaves something to upload, 69 for a missing GPU, 71 for an
    /// error of the operating system, 70 for the rest.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) => 78,
            Self::Denied { .. } => 77,
            Self::NotDurable { .. } => 74,
            Self::Unreachable(_) | Self::Locked(_) => 75,
            Self::Io { .. } => 71,
            Self::NoGpu(_) => 69,
            Self::Internal(_) => 70,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.display().to_string(), source }
    }
}
