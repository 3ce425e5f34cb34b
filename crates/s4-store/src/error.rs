//! Errors, shaped by what the caller can do about them.

use std::time::Duration;

use s4_format::Digest;

use crate::cause::Cause;
use crate::failure::Failure;
use crate::holder::Holder;
use crate::id::{CheckpointId, WriteId};
use crate::redact::redact_text;

/// The outcome of a store's operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of a store: what went wrong, and where.
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
    /// The bucket or container does not exist: look for a typo, or create it.
    #[error("{place}: no such bucket or container")]
    NoBucket {
        /// The URL.
        place: String,
    },
    /// There is a store already: open it instead.
    #[error("{place} already holds a checkpoint store")]
    StoreExists {
        /// The URL or folder.
        place: String,
    },
    /// The place cannot hold a store safely: choose another one, or set the option that is named.
    #[error("refused: {0}")]
    Refused(String),
    /// Too many answers were lost to find out what the place can do: try again later.
    #[error(
        "could not determine within {limit:?} whether several writers are safe at {place}: {last}; nothing was \
         changed, try again when the place responds reliably"
    )]
    ProbeDisturbed {
        /// The URL or folder.
        place: String,
        /// The deadline.
        limit: Duration,
        /// What disturbed the last trial.
        last: String,
    },
    /// Another process holds the lease of a store that allows one writer at a time.
    #[error(
        "{place} allows one writer at a time and is in use by {holder}{}: wait for it to end, or stop it; if it \
         is certainly no longer running, remove its lease with `s4w store break-lease`",
        if *.renewed { ", which renews its lease" } else { "" }
    )]
    Locked {
        /// The URL or folder.
        place: String,
        /// Who holds the lease.
        holder: Box<Holder>,
        /// Whether the lease was seen to be renewed: then that process is alive.
        renewed: bool,
    },
    /// This process lost the lease of a store that allows one writer at a time; nothing was changed.
    /// The next attempt asks for the lease again.
    #[error(
        "{place} allows one writer at a time, and this process has lost its lease ({}); nothing was written. The \
         lease expired because the process was suspended or had no network, or somebody removed it",
        lost_to(.holder.as_deref())
    )]
    LeaseLost {
        /// The URL or folder.
        place: String,
        /// Who holds the lease now, if anybody does.
        holder: Option<Box<Holder>>,
    },
    /// Something that this process knows to be in the store is gone; nothing was listed.
    #[error(
        "{place} has changed unexpectedly: {what}; no checkpoint was saved or deleted. Was the folder removed, \
         its file system unmounted, or the bucket emptied? Restore it, or create a new store elsewhere"
    )]
    Gone {
        /// The URL or folder.
        place: String,
        /// What has changed.
        what: String,
        /// Whether another store is in its place: opened anew, that one can be used.
        replaced: bool,
    },
    /// A checkpoint that was acknowledged is not in the log any more, because its server let another
    /// writer overwrite the entry, and it could not be listed again.
    #[error(
        "{place}: acknowledged checkpoint {id} was lost: another writer overwrote its log entry, which the \
         server must not allow ({why}); save it again, and use one writer at a time"
    )]
    SaveLost {
        /// The URL or folder.
        place: String,
        /// The checkpoint.
        id: CheckpointId,
        /// Why it could not be listed again.
        why: String,
    },
    /// A newer version of the library is needed.
    #[error("{key}: {what}")]
    Unsupported {
        /// The object.
        key: String,
        /// What this version does not support.
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
    /// The log has an entry that cannot be relied on. Nothing is written to such a store;
    /// [`crate::Store::open_read_only`] lists what can be proved, [`crate::Store::repair`] repairs it.
    #[error(
        "the log is damaged: {damage}. Nothing can be written to {place} until it is repaired with `s4w store \
         repair`, which first shows what a repair would lose; opened read-only, the store lists the checkpoints \
         that can still be restored"
    )]
    LogDamaged {
        /// The URL or folder.
        place: String,
        /// The first damage that was found.
        damage: LogDamage,
    },
    /// The store was opened read-only.
    #[error("cannot write to {place}: it was opened read-only")]
    ReadOnly {
        /// The URL or folder.
        place: String,
    },
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
        /// Why it should exist: empty, or text that starts with `: `.
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
        /// Why it failed, and what to do next.
        source: Failure,
    },
    /// No try succeeded before the deadline.
    #[error("could not {action} {key} within {limit:?}: {last}")]
    Deadline {
        /// `read`, `write`, `list`...
        action: &'static str,
        /// The object.
        key: String,
        /// The deadline.
        limit: Duration,
        /// The last failure.
        last: Failure,
    },
    /// A caller's function that the store called (a rebase, a check) failed.
    #[error("{0}")]
    Callback(Box<dyn std::error::Error + Send + Sync>),
    /// A local file system's own failure.
    #[error("could not {action} {path}: {source}{}", advice(.source))]
    Io {
        /// `sync`, `read`...
        action: &'static str,
        /// The file or folder.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The text of the error for an object that the disk cannot read.
const UNREADABLE: &str = "the disk cannot read it";

impl Error {
    pub(crate) fn unreadable(key: impl ToString) -> Self {
        Self::corrupt(key, UNREADABLE)
    }

    /// Whether a disk could not read what is stored: another disk may have a copy, and a disk that is attached over a
    /// network may read it later.
    pub fn is_unreadable(&self) -> bool {
        matches!(self, Self::Corrupt { what, .. } if what == UNREADABLE)
    }

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
        Self::Storage { action, key: key.to_string(), source: Failure::new(&source) }
    }

    /// The store's URL or folder, if the message names it.
    #[must_use]
    pub fn place(&self) -> Option<&str> {
        match self {
            Self::NoStore { place }
            | Self::NoBucket { place }
            | Self::StoreExists { place }
            | Self::ProbeDisturbed { place, .. }
            | Self::Locked { place, .. }
            | Self::LeaseLost { place, .. }
            | Self::Gone { place, .. }
            | Self::SaveLost { place, .. }
            | Self::LogDamaged { place, .. }
            | Self::ReadOnly { place } => Some(place),
            _ => None,
        }
    }

    /// The cause of the failed request, if one failed; [`Cause::Replaced`] if another store is there.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::Storage { source, .. } => Some(source.cause()),
            Self::Deadline { last, .. } => Some(last.cause()),
            Self::Io { source, .. } => Some(Cause::of_io(source)),
            Self::Missing { .. } => Some(Cause::NotFound),
            Self::Gone { replaced: true, .. } => Some(Cause::Replaced),
            _ => None,
        }
    }

    /// The system's error number, or the one that corresponds to what the server or the connection
    /// said.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Storage { source, .. } => source.errno(),
            Self::Deadline { last, .. } => last.errno(),
            Self::Io { source, .. } => {
                source.raw_os_error().or_else(|| Cause::of_io(source).errno())
            }
            _ => None,
        }
    }

    /// Whether the log itself is damaged.
    #[must_use]
    pub fn is_log_damage(&self) -> bool {
        matches!(self, Self::LogDamaged { .. })
    }

    /// Whether an object was looked for and is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// Advice to append to the system's own message.
fn advice(error: &std::io::Error) -> String {
    Cause::of_io(error).advice().map(|advice| format!("; {advice}")).unwrap_or_default()
}

fn lost_to(holder: Option<&Holder>) -> String {
    holder.map_or("the lease is gone".to_owned(), |holder| format!("it is now held by {holder}"))
}

/// Something that is wrong with the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogDamage {
    /// Entries are missing, and there are later ones.
    #[error("{}", missing_entries(*.first, *.last))]
    Missing {
        /// The first that is missing.
        first: u64,
        /// The last one.
        last: u64,
    },
    /// An entry cannot be read.
    #[error("entry {entry} is unreadable ({what})")]
    Unreadable {
        /// The entry.
        entry: u64,
        /// What is wrong with it.
        what: String,
    },
    /// An entry names a predecessor other than the one that is stored now.
    #[error(
        "entry {entry} does not follow the entry before it: one of the two does not belong to this log"
    )]
    Unlinked {
        /// The later of the two entries.
        entry: u64,
    },
}

impl LogDamage {
    /// The first entry that the damage concerns.
    #[must_use]
    pub fn entry(&self) -> u64 {
        match self {
            Self::Missing { first: entry, .. }
            | Self::Unreadable { entry, .. }
            | Self::Unlinked { entry } => *entry,
        }
    }
}

fn missing_entries(first: u64, last: u64) -> String {
    match first == last {
        true => format!("entry {first} is missing, although there were later ones"),
        false => format!("entries {first} to {last} are missing, although there were later ones"),
    }
}

/// Why the log's rules forbid a change. A log entry that breaks a rule has no effect, whoever wrote
/// it, so conflicts are decided by replaying the log alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Conflict {
    /// The checkpoint that a delta was made against is not listed any more.
    #[error("checkpoint {child} needs checkpoint {parent}, which is {state}")]
    ParentGone {
        /// The checkpoint that was to be published.
        child: CheckpointId,
        /// Its parent.
        parent: CheckpointId,
        /// `retired`, `aborted` or `unknown`.
        state: &'static str,
    },
    /// The parent's manifest is not the one that the delta was made against.
    #[error(
        "checkpoint {child} was saved against manifest {wanted} of {parent}, but the log has {found}"
    )]
    ParentDiffers {
        /// The checkpoint that was to be published.
        child: CheckpointId,
        /// Its parent.
        parent: CheckpointId,
        /// The manifest's hash that the child names.
        wanted: Digest,
        /// The manifest's hash in the log.
        found: Digest,
    },
    /// The id was published, retired or aborted before: a sweep may have given up on this attempt.
    #[error("checkpoint {id} is already {state}")]
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
    /// It is not a retired checkpoint whose data is all there, so it cannot be listed again.
    #[error("checkpoint {id} cannot be listed again: it is {state}")]
    NotRetired {
        /// The checkpoint.
        id: CheckpointId,
        /// Its state: `listed`, `replaced`, `given up` (a sweep deletes it), `unknown`; or that it is
        /// retired, but the log entry that described it was lost.
        state: &'static str,
    },
    /// The chain would be too deep.
    #[error("checkpoint {id} would be at depth {depth}, at most {max} allowed")]
    TooDeep {
        /// The checkpoint that was to be published.
        id: CheckpointId,
        /// Number of checkpoints that its chain would have, itself and its base included.
        depth: usize,
        /// The limit.
        max: usize,
    },
    /// A replacement must be a full checkpoint.
    #[error("checkpoint {0} replaces another one and must not have a parent")]
    ReplacementHasParent(CheckpointId),
}

/// A commit whose outcome could not be read back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is unknown whether log entry {slot} (write id {write_id}) was committed: {}; call `resolve` to find \
     out", redact_text(.cause)
)]
pub struct CommitUnknown {
    /// The write that may or may not be in the log.
    pub write_id: WriteId,
    /// The number of the only log entry that the write can be.
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
