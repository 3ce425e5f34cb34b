//! Names of checkpoints and of writes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Identifies one attempt to store a checkpoint, and the checkpoint once it is published. A UUID of
/// version 7, never used twice: a second attempt at the same step has another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CheckpointId(Uuid);

impl CheckpointId {
    pub(crate) fn new(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// Text that is not a checkpoint's id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a checkpoint id (a UUID in lower case, with hyphens)")]
pub struct InvalidId(String);

impl FromStr for CheckpointId {
    type Err = InvalidId;

    /// Parses the hyphenated lower-case form, the only one that names a folder of a store.
    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let id = Uuid::try_parse(text).ok().map(Self);
        // One id must have one name, or two folders could claim to be one checkpoint.
        id.filter(|id| id.to_string() == text).ok_or_else(|| InvalidId(text.to_owned()))
    }
}

/// Identifies one write of a log entry, so that a writer can tell its own entry from another's
/// after an answer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WriteId(Uuid);

impl WriteId {
    pub(crate) fn new(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// A well-mixed number, for jitter without a random generator.
    pub(crate) fn spread(self) -> u64 {
        let (high, low) = self.0.as_u64_pair();
        (high ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl fmt::Display for WriteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// The source of new ids. The default draws UUIDs of version 7; a simulation passes its own source, so that a seed
/// repeats a run exactly.
pub trait Ids: fmt::Debug + Send + Sync {
    /// An id that was never returned before, here or on any other machine.
    fn next(&self) -> Uuid;
}

/// UUIDs of version 7, by the clock and the system's random numbers.
#[derive(Debug, Default, Clone, Copy)]
pub struct TimeIds;

impl Ids for TimeIds {
    fn next(&self) -> Uuid {
        Uuid::now_v7()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_name() {
        let id = CheckpointId::new(TimeIds.next());
        assert_eq!(id.to_string().parse::<CheckpointId>().unwrap(), id);
        assert!(id.to_string().to_uppercase().parse::<CheckpointId>().is_err());
        assert!(id.to_string().replace('-', "").parse::<CheckpointId>().is_err());
        assert!("".parse::<CheckpointId>().is_err());
    }
}
