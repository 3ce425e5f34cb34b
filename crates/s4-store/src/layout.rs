//! Where everything lies below a store's prefix.

use object_store::path::Path;

use crate::id::CheckpointId;

/// The keys of one store. Every key is made from ids and numbers, never from text that was read.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    prefix: Path,
}

/// What lies below `ck/<id>/`.
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

    /// Where a repair of the log copies what it changes.
    pub(crate) fn repair(&self) -> Path {
        self.below("repair")
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
