//! The keys of a store's objects, below its prefix.

use object_store::path::Path;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::CheckpointId;

/// Data objects that one rank of a distributed checkpoint may have.
pub const MAX_RANK_OBJECTS: u32 = 1 << 12;

/// How many ranks may store a checkpoint together: its log entry holds a number for each.
pub const MAX_RANKS: u32 = 1 << 13;

/// The number of data objects that each rank of a distributed checkpoint stored; empty if one process stored them
/// all.
///
/// Ranks upload in parallel without agreeing on object numbers, so the numbers of each rank begin
/// at its own multiple of [`MAX_RANK_OBJECTS`]. Manifests list objects in the order of ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parts(Vec<u32>);

impl Parts {
    pub(crate) fn new(counts: Vec<u32>) -> Result<Self> {
        let parts = Self(counts);
        match parts.problem() {
            Some(what) => Err(Error::Limit(what)),
            None => Ok(parts),
        }
    }

    /// Whether one process stored the checkpoint.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of objects of each rank.
    #[must_use]
    pub fn counts(&self) -> &[u32] {
        &self.0
    }

    /// The number of rank `rank`'s first object.
    pub(crate) fn first_of(rank: u32) -> Option<u32> {
        (rank < MAX_RANKS).then(|| rank * MAX_RANK_OBJECTS)
    }

    /// What is wrong with these counts, if anything.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.0.len() > MAX_RANKS as usize {
            return Some(format!("{} ranks, at most {MAX_RANKS} allowed", self.0.len()));
        }
        let many = self.0.iter().find(|n| **n > MAX_RANK_OBJECTS)?;
        Some(format!("{many} objects of one rank, at most {MAX_RANK_OBJECTS} allowed"))
    }

    /// Whether these can be the parts of a checkpoint of `objects` objects.
    pub(crate) fn add_up_to(&self, objects: u64) -> bool {
        self.is_empty() || self.0.iter().map(|n| u64::from(*n)).sum::<u64>() == objects
    }

    /// The number in the key of the object at index `nth` of the manifest.
    pub(crate) fn number(&self, nth: u32) -> Option<u32> {
        let mut left = nth;
        for (rank, count) in (0..).zip(&self.0) {
            if left < *count {
                return Self::first_of(rank)?.checked_add(left);
            }
            left -= count;
        }
        self.is_empty().then_some(nth)
    }

    /// The numbers in the keys of `objects` objects, in manifest order.
    pub(crate) fn numbers(&self, objects: u32) -> impl Iterator<Item = u32> {
        let alone = if self.is_empty() { objects } else { 0 };
        let ranks = (0u32..).zip(&self.0);
        let ranked = ranks.flat_map(|(rank, count)| {
            let first = Self::first_of(rank).unwrap_or_default();
            first..first.saturating_add(*count)
        });
        (0..alone).chain(ranked)
    }
}

/// The keys of one store. Every key is made from ids and numbers, never from text that was read.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    prefix: Path,
}

/// The objects below `ck/<id>/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Data(u32),
    Manifest,
}

impl Layout {
    pub(crate) fn new(prefix: Path) -> Self {
        Self { prefix }
    }

    pub(crate) fn repo(&self) -> Path {
        self.below("repo.json")
    }

    /// The folder of the log.
    pub(crate) fn log(&self) -> Path {
        self.below("log")
    }

    /// Entry `n` of the log: 20 digits, so that names sort as numbers.
    pub(crate) fn entry(&self, n: u64) -> Path {
        self.log().join(format!("{n:020}"))
    }

    /// A copy of the replayed state, which may be old, damaged or absent.
    pub(crate) fn view(&self) -> Path {
        self.below("logck")
    }

    /// The folder of all checkpoints.
    pub(crate) fn checkpoints(&self) -> Path {
        self.below("ck")
    }

    pub(crate) fn checkpoint(&self, id: CheckpointId) -> Path {
        self.checkpoints().join(id.to_string())
    }

    /// The checkpoint whose folder this is, if it is one of ours.
    pub(crate) fn parse_checkpoint(&self, folder: &Path) -> Option<CheckpointId> {
        let id = folder.filename()?.parse().ok()?;
        (self.checkpoint(id) == *folder).then_some(id)
    }

    pub(crate) fn part(&self, id: CheckpointId, part: Part) -> Path {
        match part {
            Part::Data(n) => self.checkpoint(id).join(format!("d-{n}")),
            Part::Manifest => self.checkpoint(id).join("manifest"),
        }
    }

    /// The folder of objects that live for seconds: probes and clock readings.
    pub(crate) fn scratch(&self) -> Path {
        self.below("tmp")
    }

    /// The folder of the leases of a store with one writer at a time.
    pub(crate) fn leases(&self) -> Path {
        self.below("lease")
    }

    /// The folder for a repair's copies of whatever it changes.
    pub(crate) fn repair(&self) -> Path {
        self.below("repair")
    }

    /// The folders of a store. Everything else in the place belongs to others.
    pub(crate) fn folders(&self) -> [Path; 5] {
        [self.checkpoints(), self.log(), self.leases(), self.repair(), self.scratch()]
    }

    /// The keys of a store that are in none of its folders.
    pub(crate) fn single_keys(&self) -> [Path; 2] {
        [self.repo(), self.view()]
    }

    /// The checkpoint and part that a key names, if it is one of ours.
    pub(crate) fn parse_part(&self, key: &Path) -> Option<(CheckpointId, Part)> {
        let mut parts = key.prefix_match(&self.checkpoints())?;
        let id = parts.next()?.as_ref().parse().ok()?;
        let name = parts.next()?;
        if parts.next().is_some() {
            return None;
        }
        let part = match name.as_ref() {
            "manifest" => Part::Manifest,
            data => Part::Data(data.strip_prefix("d-")?.parse().ok()?),
        };
        (self.part(id, part) == *key).then_some((id, part))
    }

    /// The number of the log entry that a key names.
    pub(crate) fn parse_entry(&self, key: &Path) -> Option<u64> {
        let n = key.filename()?.parse().ok()?;
        (self.entry(n) == *key).then_some(n)
    }

    fn below(&self, name: &str) -> Path {
        self.prefix.clone().join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Ids, TimeIds};

    #[test]
    fn objects_of_ranks_have_numbers_of_their_own() {
        let alone = Parts::default();
        assert_eq!(alone.numbers(3).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((alone.number(7), alone.add_up_to(9)), (Some(7), true));
        let parts = Parts::new(vec![2, 0, 1]).unwrap();
        let numbers = [0, 1, 2 * MAX_RANK_OBJECTS];
        assert_eq!(parts.numbers(3).collect::<Vec<_>>(), numbers);
        let each: Vec<_> = (0..3).map(|nth| parts.number(nth).unwrap()).collect();
        assert_eq!(each, numbers);
        assert_eq!(parts.number(3), None);
        assert!(parts.add_up_to(3) && !parts.add_up_to(2));
        assert!(Parts::new(vec![MAX_RANK_OBJECTS + 1]).is_err());
        assert!(Parts::new(vec![0; MAX_RANKS as usize + 1]).is_err());
    }

    #[test]
    fn keys_are_read_as_they_are_written() {
        for prefix in ["", "runs/a b"] {
            let layout = Layout::new(Path::from(prefix));
            let id = CheckpointId::new(TimeIds.next());
            for part in [Part::Data(0), Part::Data(4_000_000_000), Part::Manifest] {
                assert_eq!(layout.parse_part(&layout.part(id, part)), Some((id, part)));
            }
            assert_eq!(layout.parse_entry(&layout.entry(17)), Some(17));
            for odd in ["d-01", "d-", "d-x", "manifest2", "d-1/x"] {
                let key = Path::from(format!("{}/{odd}", layout.checkpoint(id)));
                assert_eq!(layout.parse_part(&key), None, "{odd}");
            }
            let stray = layout.checkpoints().join("notes");
            assert_eq!(layout.parse_part(&stray), None);
        }
    }
}
