//! Errors, shaped by what the caller can do about them.

use std::time::Duration;

use crate::id::{CheckpointId, Hash, WriteId};

/// The outcome of a store's operation.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, and where.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option, a URL or a name makes no sense: change the call.
    #[error("{0}")]
    Argument(String),
    /// There is no store at this place: create one, or look elsewhere.
    #[error("no checkpoint store at {place}: it has no `repo.json`")]
    NoStore {
        /// The URL or folder.
        place: String,
    },
    /// There is a store already: open it instead.
    #[error("{place} holds a checkpoint store already")]
    StoreExists {
        /// The URL or folder.
        place: String,
    },
    /// The place cannot hold a store safely: choose another one, or the option that is named.
    #[error("refused: {0}")]
    Refused(String),
    /// A newer version of the library is needed.
    #[error("{key}: {what}")]
    Unsupported {
        /// The object.
        key: String,
        /// What this version does not know.
        what: String,
    },
    /// The store does not list this checkpoint.
    #[error("no checkpoint {what}")]
    NoCheckpoint {
        /// The id or step that was asked for.
        what: String,
    },
    /// The state of the store forbids it; nothing was changed. Another writer may have been faster.
    #[error("conflict: {0}")]
    Conflict(#[from] Conflict),
    /// It is unknown whether the change was committed: pass this to `Store::resolve`, which finds out.
    #[error("{0}")]
    CommitUnknown(Box<CommitUnknown>),
    /// Bytes contradict a hash, a size or themselves: restore them from another copy.
    #[error("corrupt data in {key}: {what}")]
    Corrupt {
        /// The object.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// An object that the store needs is not there.
    #[error("{key} is missing{context}")]
    Missing {
        /// The object.
        key: String,
        /// Why it should be there; empty, or starts with `: `.
        context: String,
    },
    /// A limit of the format would be exceeded.
    #[error("limit exceeded: {0}")]
    Limit(String),
    /// The object store or file system failed, after retries where these can help.
    #[error("could not {action} {key}: {source}")]
    Storage {
        /// `read`, `write`, `list`...
        action: &'static str,
        /// The object.
        key: String,
        /// What the store said.
        source: object_store::Error,
    },
    /// Nothing worked until the deadline.
    #[error("could not {action} {key} within {limit:?}: {last}")]
    Deadline {
        /// `read`, `write`, `list`...
        action: &'static str,
        /// The object.
        key: String,
        /// The deadline.
        limit: Duration,
        /// The last failure.
        last: String,
    },
    /// Code of the caller's that the store called (a rebase, a check) failed.
    #[error("{0}")]
    Callback(Box<dyn std::error::Error + Send + Sync>),
    /// A local file system's own failure.
    #[error("could not {action} {path}: {source}")]
    Io {
        /// `sync`, `read`...
        action: &'static str,
        /// The file or folder.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn corrupt(key: impl ToString, what: impl ToString) -> Self {
        Self::Corrupt { key: key.to_string(), what: what.to_string() }
    }

    pub(crate) fn missing(key: impl ToString) -> Self {
        Self::Missing { key: key.to_string(), context: String::new() }
    }

    pub(crate) fn storage(
        action: &'static str,
        key: impl ToString,
        source: object_store::Error,
    ) -> Self {
        Self::Storage { action, key: key.to_string(), source }
    }

    /// Whether an object was looked for and is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// Why the log's rules forbid a change. A log entry that breaks a rule has no effect, whoever wrote
/// it, so these are decided by replaying the log and by nothing else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Conflict {
    /// The checkpoint that a delta was made against is not listed any more.
    #[error("{child} needs checkpoint {parent}, which is {state}")]
    ParentGone {
        /// The checkpoint that was to be published.
        child: CheckpointId,
        /// Its parent.
        parent: CheckpointId,
        /// `retired`, `aborted` or `unknown`.
        state: &'static str,
    },
    /// The parent's manifest is another one than the delta was made against.
    #[error("{child} was made against manifest {wanted} of {parent}, the log has {found}")]
    ParentDiffers {
        /// The checkpoint that was to be published.
        child: CheckpointId,
        /// Its parent.
        parent: CheckpointId,
        /// The manifest's hash that the child names.
        wanted: Hash,
        /// The manifest's hash in the log.
        found: Hash,
    },
    /// The id was published, retired or aborted before: a sweep may have given up on this attempt.
    #[error("checkpoint {id} is {state} already")]
    Spent {
        /// The checkpoint.
        id: CheckpointId,
        /// `published`, `retired` or `aborted`.
        state: &'static str,
    },
    /// Other checkpoints are deltas against it.
    #[error("checkpoint {id} is needed by {by}")]
    Needed {
        /// The checkpoint.
        id: CheckpointId,
        /// One that needs it.
        by: CheckpointId,
    },
    /// It is pinned.
    #[error("checkpoint {0} is pinned")]
    Pinned(CheckpointId),
    /// It is not listed.
    #[error("checkpoint {0} is not listed")]
    NotLive(CheckpointId),
    /// The chain would be too deep.
    #[error("checkpoint {id} would be at depth {depth}, {max} is the most")]
    TooDeep {
        /// The checkpoint that was to be published.
        id: CheckpointId,
        /// Deltas between it and its base, itself counted.
        depth: usize,
        /// The limit.
        max: usize,
    },
    /// A replacement must be a full checkpoint.
    #[error("checkpoint {0} replaces another one and so must not have a parent")]
    ReplacementHasParent(CheckpointId),
}

/// A commit whose outcome could not be read back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is unknown whether log entry {slot} (write id {write_id}) was committed: {cause}; \
     `resolve` finds out"
)]
pub struct CommitUnknown {
    /// The write that may or may not be in the log.
    pub write_id: WriteId,
    /// The only log entry that it can be.
    pub slot: u64,
    /// The checkpoint, if a checkpoint was to be published.
    pub checkpoint: Option<CheckpointId>,
    /// The last failure.
    pub cause: String,
}

impl From<CommitUnknown> for Error {
    fn from(unknown: CommitUnknown) -> Self {
        Self::CommitUnknown(Box::new(unknown))
    }
}
