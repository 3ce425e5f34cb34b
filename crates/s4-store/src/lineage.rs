//! Indexes of a state: which checkpoint is a delta of which, and what replaced which.
//!
//! Each rule of the log is checked with a few look-ups here, so replaying a log takes time in
//! proportion to its length, whatever its entries say.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::CheckpointId;
use crate::state::{Checkpoint, Dead, End};

/// A checkpoint and its successive replacements are a family. It is named by its first member, and
/// a delta of any member is a delta of the newest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lineage {
    /// The family of each checkpoint that replaced another one.
    family: BTreeMap<CheckpointId, CheckpointId>,
    /// The newest member of each family that has more than one.
    newest: BTreeMap<CheckpointId, CheckpointId>,
    /// Listed deltas of each family.
    children: BTreeMap<CheckpointId, BTreeSet<CheckpointId>>,
    /// Families with a new member since the `base` fields of their deltas were last brought up to
    /// date.
    moved: BTreeSet<CheckpointId>,
}

impl Lineage {
    /// The indexes of a state that was stored, or what is wrong with it.
    pub(crate) fn of(
        live: &BTreeMap<CheckpointId, Checkpoint>,
        dead: &BTreeMap<CheckpointId, Dead>,
    ) -> Result<Self, &'static str> {
        let mut lineage = Self::default();
        let mut heirs = BTreeMap::new();
        for (id, dead) in dead {
            if let End::Replaced { by, .. } = dead.how {
                heirs.insert(*id, by.id);
            }
        }
        let mut replacements = BTreeSet::new();
        if !heirs.values().all(|by| replacements.insert(*by)) {
            return Err("one checkpoint replaces two others");
        }
        let mut seen = 0;
        for first in heirs.keys().filter(|id| !replacements.contains(*id)) {
            let mut last = first;
            while let Some(by) = heirs.get(last) {
                lineage.replaced(*last, *by);
                (last, seen) = (by, seen + 1);
            }
        }
        if seen != heirs.len() {
            return Err("checkpoints replace each other in a cycle");
        }
        lineage.moved.clear();
        for checkpoint in live.values() {
            lineage.listed(checkpoint);
        }
        Ok(lineage)
    }

    fn family(&self, id: CheckpointId) -> CheckpointId {
        self.family.get(&id).copied().unwrap_or(id)
    }

    /// The newest replacement of `id`, or `id` itself if it has none.
    pub(crate) fn newest(&self, id: CheckpointId) -> CheckpointId {
        self.newest.get(&self.family(id)).copied().unwrap_or(id)
    }

    pub(crate) fn listed(&mut self, checkpoint: &Checkpoint) {
        if let Some(base) = checkpoint.base {
            self.children.entry(self.family(base)).or_default().insert(checkpoint.id());
        }
    }

    pub(crate) fn unlisted(&mut self, checkpoint: &Checkpoint) {
        let Some(family) = checkpoint.base.map(|base| self.family(base)) else { return };
        if let Some(children) = self.children.get_mut(&family) {
            children.remove(&checkpoint.id());
            if children.is_empty() {
                self.children.remove(&family);
            }
        }
    }

    pub(crate) fn replaced(&mut self, old: CheckpointId, new: CheckpointId) {
        let family = self.family(old);
        self.family.insert(new, family);
        self.newest.insert(family, new);
        self.moved.insert(family);
    }

    /// Listed deltas of a checkpoint.
    pub(crate) fn children(&self, id: CheckpointId) -> impl Iterator<Item = CheckpointId> + '_ {
        self.children.get(&self.family(id)).into_iter().flatten().copied()
    }

    /// Updates the `base` of deltas whose base was replaced. Done once for many entries, since a
    /// checkpoint may have many deltas and be replaced many times.
    pub(crate) fn settle(&mut self, live: &mut BTreeMap<CheckpointId, Checkpoint>) {
        for family in std::mem::take(&mut self.moved) {
            let Some(newest) = self.newest.get(&family) else { continue };
            for child in self.children.get(&family).into_iter().flatten() {
                if let Some(child) = live.get_mut(child) {
                    child.base = Some(*newest);
                }
            }
        }
    }
}
