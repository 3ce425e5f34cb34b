//! The state that the log means.
//!
//! Every reader and writer replays the same entries by the same rules, so all agree on what is
//! listed. An entry that breaks a rule is void: it keeps its number and changes nothing. Writers
//! check the rules against the whole log before they create the entry that would come next, so
//! nothing void is ever acknowledged; but safety does not rest on their care.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::entry::{Entry, Op, Publish, Reference};
use crate::error::{Conflict, Error, Result};
use crate::id::{CheckpointId, Hash};

/// The most checkpoints that a chain may have.
pub const MAX_CHAIN: usize = 64;

/// A checkpoint that is listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// What its writer said.
    pub about: Publish,
    /// The log entry that published it.
    pub entry: u64,
    /// Its place in time: the entry that published it, or that published what it replaces.
    pub order: u64,
    /// The listed checkpoint that it is a delta of. Another one than `about.parent` where that was
    /// replaced by a full checkpoint with the same content.
    pub base: Option<CheckpointId>,
    /// Whether it may not be retired.
    pub pinned: bool,
    /// The writer's clock when it was published, in milliseconds since 1970.
    pub at_ms: i64,
}

impl Checkpoint {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.about.id
    }

    /// Its training step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.about.step
    }

    /// How many checkpoints were made since its base, itself counted ([`crate::About::since_base`]).
    #[must_use]
    pub fn since_base(&self) -> u32 {
        self.base.map_or(0, |_| self.about.since_base)
    }

    /// The id and the manifest's hash, as a delta against this checkpoint names it.
    #[must_use]
    pub fn reference(&self) -> Reference {
        Reference { id: self.id(), manifest_blake3: self.about.manifest_blake3 }
    }
}

/// An id that can never be listed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dead {
    /// The log entry that ended it.
    pub entry: u64,
    /// How it ended.
    pub how: End,
}

/// How a checkpoint or an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It was listed and then retired.
    Retired,
    /// It was listed; another one with the same content took its place.
    Replaced {
        /// That one.
        by: Reference,
        /// The manifest that it had.
        had: Hash,
    },
    /// It was never listed.
    Aborted,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            Self::Retired => "retired",
            Self::Replaced { .. } => "replaced",
            Self::Aborted => "aborted",
        }
    }
}

/// What the first `head` entries of a log mean.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub(crate) head: u64,
    pub(crate) head_hash: Hash,
    pub(crate) live: BTreeMap<CheckpointId, Checkpoint>,
    pub(crate) dead: BTreeMap<CheckpointId, Dead>,
    /// Entries that broke a rule since this state was last replayed from a view or from nothing.
    pub(crate) void: Vec<(u64, Conflict)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            head: 0,
            head_hash: Hash::of_nothing(),
            live: BTreeMap::new(),
            dead: BTreeMap::new(),
            void: Vec::new(),
        }
    }
}

impl State {
    /// The number of the newest entry; 0 for an empty log.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// All listed checkpoints, from the oldest to the newest.
    #[must_use]
    pub fn list(&self) -> Vec<&Checkpoint> {
        let mut list: Vec<_> = self.live.values().collect();
        list.sort_by_key(|c| (c.order, c.entry));
        list
    }

    /// The newest checkpoint: the last one published, whatever its step, so that a run which went
    /// back to an earlier step resumes where it really was. A replacement is as old as the original.
    #[must_use]
    pub fn latest(&self) -> Option<&Checkpoint> {
        self.live.values().max_by_key(|c| (c.order, c.entry))
    }

    /// The newest checkpoint of a step.
    #[must_use]
    pub fn at_step(&self, step: u64) -> Option<&Checkpoint> {
        let of_step = self.live.values().filter(|c| c.step() == step);
        of_step.max_by_key(|c| (c.order, c.entry))
    }

    /// A listed checkpoint.
    #[must_use]
    pub fn get(&self, id: CheckpointId) -> Option<&Checkpoint> {
        self.live.get(&id)
    }

    /// How an id ended, if it did.
    #[must_use]
    pub fn dead(&self, id: CheckpointId) -> Option<Dead> {
        self.dead.get(&id).copied()
    }

    /// The checkpoint and what it needs, itself first and its base last.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if it is not listed; [`Error::Corrupt`] if the chain is broken, which
    /// the rules of the log exclude.
    pub fn chain(&self, id: CheckpointId) -> Result<Vec<&Checkpoint>> {
        let first = self.get(id);
        let mut at = first.ok_or_else(|| Error::NoCheckpoint { what: id.to_string() })?;
        let mut chain = vec![at];
        while let Some(base) = at.base {
            let broken = || Error::corrupt("log", format!("the chain of {id} breaks at {base}"));
            at = self.get(base).ok_or_else(broken)?;
            if chain.len() >= MAX_CHAIN {
                return Err(broken());
            }
            chain.push(at);
        }
        Ok(chain)
    }

    /// All checkpoints that are deltas, at any distance, of `ids`.
    #[must_use]
    pub fn descendants(&self, ids: &[CheckpointId]) -> BTreeSet<CheckpointId> {
        let mut found: BTreeSet<_> = ids.iter().copied().collect();
        // A child comes after its base in the log, so one pass in that order finds all; a replaced
        // base is later than its children, which is why passes repeat until nothing is new.
        loop {
            let before = found.len();
            for c in self.live.values() {
                if c.base.is_some_and(|base| found.contains(&base)) {
                    found.insert(c.id());
                }
            }
            if found.len() == before {
                break;
            }
        }
        found.retain(|id| !ids.contains(id));
        found
    }

    /// Applies the next entry, whose object has the hash `hash`. Returns why it is void, if it is.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the entry does not follow this state.
    pub(crate) fn apply(
        &mut self,
        key: &str,
        entry: &Entry,
        hash: Hash,
    ) -> Result<Option<Conflict>> {
        if entry.n != self.head + 1 || entry.prev != self.head_hash {
            return Err(Error::corrupt(
                key,
                format!("it does not follow entry {} with hash {}", self.head, self.head_hash),
            ));
        }
        let verdict = self.check(&entry.op).err();
        if verdict.is_none() {
            self.change(entry);
        }
        self.head = entry.n;
        self.head_hash = hash;
        if let Some(conflict) = &verdict {
            self.void.push((entry.n, conflict.clone()));
        }
        Ok(verdict)
    }

    /// Whether the operation would have its effect as the next entry.
    pub(crate) fn check(&self, op: &Op) -> std::result::Result<(), Conflict> {
        match op {
            Op::Publish(publish) => self.check_publish(publish),
            Op::Retire { ids, .. } => self.check_retire(ids),
            Op::Abort { ids } => ids.iter().try_for_each(|id| self.check_unused(*id)),
            Op::Pin { id } | Op::Unpin { id } => self.check_live(*id),
            Op::Fence { .. } => Ok(()),
        }
    }

    fn check_publish(&self, publish: &Publish) -> std::result::Result<(), Conflict> {
        self.check_unused(publish.id)?;
        if let Some(replaced) = publish.replaces {
            if publish.parent.is_some() {
                return Err(Conflict::ReplacementHasParent(publish.id));
            }
            self.check_live(replaced.id)?;
            self.find_parent(publish.id, replaced)?;
        }
        let Some(parent) = publish.parent else { return Ok(()) };
        let base = self.find_parent(publish.id, parent)?;
        let depth = self.chain(base.id()).map_or(MAX_CHAIN, |chain| chain.len()) + 1;
        if depth > MAX_CHAIN {
            return Err(Conflict::TooDeep { id: publish.id, depth, max: MAX_CHAIN });
        }
        Ok(())
    }

    /// The listed checkpoint that stands for `parent`: itself, or what replaced it.
    fn find_parent(
        &self,
        child: CheckpointId,
        parent: Reference,
    ) -> std::result::Result<&Checkpoint, Conflict> {
        let differs = |found| Conflict::ParentDiffers {
            child,
            parent: parent.id,
            wanted: parent.manifest_blake3,
            found,
        };
        let gone = |state| Conflict::ParentGone { child, parent: parent.id, state };
        let mut wanted = parent;
        // A replacement was published later than what it replaces, so this ends.
        loop {
            if let Some(live) = self.live.get(&wanted.id) {
                let found = live.about.manifest_blake3;
                let same = found == wanted.manifest_blake3;
                return if same { Ok(live) } else { Err(differs(found)) };
            }
            match self.dead.get(&wanted.id).map(|d| d.how) {
                Some(End::Replaced { had, .. }) if had != wanted.manifest_blake3 => {
                    return Err(differs(had));
                }
                Some(End::Replaced { by, .. }) => wanted = by,
                Some(end) => return Err(gone(end.word())),
                None => return Err(gone("unknown")),
            }
        }
    }

    fn check_retire(&self, ids: &[CheckpointId]) -> std::result::Result<(), Conflict> {
        let going: BTreeSet<_> = ids.iter().copied().collect();
        for id in ids {
            self.check_live(*id)?;
            if self.live.get(id).is_some_and(|c| c.pinned) {
                return Err(Conflict::Pinned(*id));
            }
        }
        let needs = |c: &&Checkpoint| c.base.is_some_and(|base| going.contains(&base));
        let staying = self.live.values().filter(|c| !going.contains(&c.id()));
        match staying.filter(needs).map(|c| (c.base, c.id())).next() {
            Some((Some(id), by)) => Err(Conflict::Needed { id, by }),
            _ => Ok(()),
        }
    }

    fn check_live(&self, id: CheckpointId) -> std::result::Result<(), Conflict> {
        if self.live.contains_key(&id) { Ok(()) } else { Err(Conflict::NotLive(id)) }
    }

    fn check_unused(&self, id: CheckpointId) -> std::result::Result<(), Conflict> {
        if self.live.contains_key(&id) {
            return Err(Conflict::Spent { id, state: "published" });
        }
        self.dead.get(&id).map_or(Ok(()), |d| Err(Conflict::Spent { id, state: d.how.word() }))
    }

    /// Carries out an operation that was checked.
    fn change(&mut self, entry: &Entry) {
        match &entry.op {
            Op::Publish(publish) => self.publish(entry, publish),
            Op::Retire { ids, .. } => ids.iter().for_each(|id| {
                self.live.remove(id);
                self.dead.insert(*id, Dead { entry: entry.n, how: End::Retired });
            }),
            Op::Abort { ids } => ids.iter().for_each(|id| {
                self.dead.insert(*id, Dead { entry: entry.n, how: End::Aborted });
            }),
            Op::Pin { id } => self.set_pinned(*id, true),
            Op::Unpin { id } => self.set_pinned(*id, false),
            Op::Fence { .. } => {}
        }
    }

    fn publish(&mut self, entry: &Entry, publish: &Publish) {
        let parent = publish.parent.and_then(|p| self.find_parent(publish.id, p).ok());
        let mut new = Checkpoint {
            about: publish.clone(),
            entry: entry.n,
            order: entry.n,
            base: parent.map(Checkpoint::id),
            pinned: false,
            at_ms: entry.at_ms,
        };
        if let Some(old) = publish.replaces.and_then(|r| self.live.remove(&r.id)) {
            new.order = old.order;
            new.pinned = old.pinned;
            let by = new.reference();
            let how = End::Replaced { by, had: old.about.manifest_blake3 };
            self.dead.insert(old.id(), Dead { entry: entry.n, how });
            for child in self.live.values_mut().filter(|c| c.base == Some(old.id())) {
                child.base = Some(new.id());
            }
        }
        self.live.insert(new.id(), new);
    }

    fn set_pinned(&mut self, id: CheckpointId, pinned: bool) {
        if let Some(checkpoint) = self.live.get_mut(&id) {
            checkpoint.pinned = pinned;
        }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
