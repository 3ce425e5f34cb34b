//! The record of one checkpoint on its way to the store.

use std::collections::BTreeMap;
use std::path::PathBuf;

use s4weights::store::{Checkpoint, CheckpointId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::clock::{Moment, Uptime};

/// The tag with the submission's id, which its checkpoint has in both stores.
pub(crate) const SUBMISSION: &str = "s4w.submission";

/// The progress of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It is on the local drive, synced, and in the journal: it was accepted.
    Staged,
    /// Every value is encoded.
    Compressed,
    /// The encoded values were decoded again and compared; it is in the local store.
    Verified,
    /// Its objects are on their way to the store.
    Uploading,
    /// The store lists it.
    Durable,
    /// It is damaged, unusable or lost: it will not become durable.
    Failed,
}

impl State {
    /// All states, in order.
    pub(crate) const ALL: [Self; 6] = [
        Self::Staged,
        Self::Compressed,
        Self::Verified,
        Self::Uploading,
        Self::Durable,
        Self::Failed,
    ];

    /// Its name in messages and metrics.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Compressed => "compressed",
            Self::Verified => "verified",
            Self::Uploading => "uploading",
            Self::Durable => "durable",
            Self::Failed => "failed",
        }
    }

    /// Whether nothing more will happen.
    #[must_use]
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Durable | Self::Failed)
    }

    /// Whether a checkpoint in this state has reached `wanted`, or never will.
    #[must_use]
    pub(crate) fn reaches(self, wanted: Self) -> bool {
        self >= wanted || self.is_final()
    }
}

/// The file or folder in the watched folder that a checkpoint came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Origin {
    /// The file or folder.
    pub path: PathBuf,
    /// Its size in bytes.
    pub len: u64,
    /// When it last changed, in nanoseconds since 1970; for a folder, when its `.metadata` last changed.
    pub mtime_ns: i64,
    /// Its inode number.
    pub inode: u64,
    /// For a folder: a digest of the names, sizes, times and inode numbers of its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<String>,
}

/// One submitted checkpoint, as the journal keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// Version of the record: 1.
    pub v: u32,
    /// Id of the submission.
    pub id: Uuid,
    /// Order of acceptance.
    pub seq: u64,
    /// The training step.
    pub step: u64,
    /// Its progress.
    pub state: State,
    /// Bytes of the staged file.
    pub staged_bytes: u64,
    /// Bytes of the tensors.
    pub raw_bytes: u64,
    /// Bytes as stored.
    pub stored_bytes: u64,
    /// Named numbers by which retention can select.
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    pub tags: BTreeMap<String, String>,
    /// Who submitted it.
    pub uid: u32,
    /// When it was submitted, in milliseconds since 1970.
    pub submitted_ms: i64,
    /// When it was submitted, by a clock that nobody can set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub submitted_at: Option<Uptime>,
    /// When it became durable, in milliseconds since 1970.
    pub durable_ms: Option<i64>,
    /// How long it took to become durable, in milliseconds by the steady clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable_after_ms: Option<u64>,
    /// The file or folder that it came from, in watch mode.
    pub origin: Option<Origin>,
    /// Its checkpoint in the local store.
    pub local: Option<CheckpointId>,
    /// The parent of that checkpoint.
    pub local_parent: Option<CheckpointId>,
    /// Ids of attempts that a killed process may have listed.
    pub attempts: Vec<CheckpointId>,
    /// Its checkpoint in the store.
    pub remote: Option<CheckpointId>,
    /// The last error.
    pub error: Option<String>,
}

/// The error of a checkpoint whose staged file is no longer there.
pub(crate) const FILE_GONE: &str =
    "its file is gone from the staging folder: was the drive replaced?";
/// The error of a checkpoint that the local store no longer has.
pub(crate) const COPY_GONE: &str = "its local copy is gone: was the drive replaced?";

impl Record {
    /// A record for a checkpoint that is submitted now. Its `seq` is not assigned yet.
    #[must_use]
    pub(crate) fn new(id: Uuid, step: u64, now: &Moment) -> Self {
        Self {
            v: 1,
            id,
            seq: 0,
            step,
            state: State::Staged,
            staged_bytes: 0,
            raw_bytes: 0,
            stored_bytes: 0,
            metrics: BTreeMap::new(),
            tags: BTreeMap::new(),
            uid: 0,
            submitted_ms: now.wall_ms,
            submitted_at: now.uptime.clone(),
            durable_ms: None,
            durable_after_ms: None,
            origin: None,
            local: None,
            local_parent: None,
            attempts: vec![],
            remote: None,
            error: None,
        }
    }

    /// Whether none of its data is left on the local drive.
    #[must_use]
    pub(crate) fn is_lost(&self) -> bool {
        let gone = |error: &str| [FILE_GONE, COPY_GONE].contains(&error);
        self.state == State::Failed && self.error.as_deref().is_some_and(gone)
    }

    /// A record for a checkpoint of the local store that must be uploaded. Its `seq` is not assigned yet.
    #[must_use]
    pub(crate) fn of_local(id: Uuid, checkpoint: &Checkpoint) -> Self {
        let about = &checkpoint.about;
        let mut tags = about.tags.clone();
        tags.remove(SUBMISSION);
        Self {
            state: State::Verified,
            raw_bytes: about.raw_len,
            stored_bytes: about.data_len.saturating_add(about.manifest_len),
            metrics: about.metrics.clone(),
            tags,
            uid: rustix::process::getuid().as_raw(),
            local: Some(checkpoint.id()),
            local_parent: about.parent.map(|parent| parent.id),
            ..Self::new(id, checkpoint.step(), &Moment::now())
        }
    }

    /// Bytes of the local drive that it takes up until it is durable or forgotten.
    #[must_use]
    pub(crate) fn held_bytes(&self) -> u64 {
        match self.state {
            State::Staged | State::Compressed => self.staged_bytes,
            State::Verified | State::Uploading => self.stored_bytes,
            State::Failed if self.local.is_none() => self.staged_bytes,
            State::Failed => self.stored_bytes,
            State::Durable => 0,
        }
    }

    /// Whether the staged file is still needed.
    #[must_use]
    pub(crate) fn holds_file(&self) -> bool {
        self.state <= State::Compressed || (self.state == State::Failed && self.local.is_none())
    }
}
