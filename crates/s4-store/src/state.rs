//! The state that the log defines.
//!
//! Every reader and writer replays the same entries by the same rules, so all agree on what is
//! listed. An entry that breaks a rule is void: it keeps its number and changes nothing. Writers
//! check the rules against the whole log before they create the entry that would come next, so
//! nothing void is ever acknowledged; but safety does not depend on that.

use std::collections::{BTreeMap, BTreeSet};

use s4_format::Digest;
use s4_format::limits::MAX_CHAIN;
use serde::{Deserialize, Serialize};

use crate::entry::{Entry, Op, Publish, Reference};
use crate::error::{Conflict, Error, Result};
use crate::id::CheckpointId;
use crate::lineage::Lineage;

/// A checkpoint that is listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The checkpoint as its writer described it.
    pub about: Publish,
    /// The log entry that published it.
    pub entry: u64,
    /// Its position in time: the number of the entry that published it, or an earlier one if that
    /// entry says so. A replacement has the position of the original.
    pub order: u64,
    /// The listed checkpoint that it is a delta of. Differs from `about.parent` if the parent was
    /// replaced by a full checkpoint with the same content.
    pub base: Option<CheckpointId>,
    /// Whether it is protected from being retired.
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

    /// Number of checkpoints made since its base, this one included
    /// ([`crate::About::since_base`]).
    #[must_use]
    pub fn since_base(&self) -> u32 {
        self.base.map_or(0, |_| self.about.since_base)
    }

    /// The id and the manifest's hash, by which a delta names this checkpoint.
    #[must_use]
    pub fn reference(&self) -> Reference {
        Reference { id: self.id(), manifest_blake3: self.about.manifest_blake3 }
    }
}

/// How an id ended. It is not listed, and can be listed again only while it is [`End::Retired`].
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
    /// It was listed and then retired. It can be listed again until a sweep gives it up.
    Retired,
    /// It was listed; another one with the same content replaced it.
    Replaced {
        /// The replacement.
        by: Reference,
        /// The hash of its own manifest.
        had: Digest,
    },
    /// It was never listed, or a sweep is about to delete it: it can never be listed again.
    Aborted,
}

impl End {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Retired => "retired",
            Self::Replaced { .. } => "replaced",
            Self::Aborted => "aborted",
        }
    }
}

/// The state that the first `head` entries of a log define.
#[derive(Debug, Clone)]
pub struct State {
    pub(crate) head: u64,
    pub(crate) head_hash: Digest,
    pub(crate) live: BTreeMap<CheckpointId, Checkpoint>,
    pub(crate) dead: BTreeMap<CheckpointId, Dead>,
    /// Entries that broke a rule, of those replayed since the state was loaded from a view or from
    /// nothing.
    pub(crate) void: Vec<(u64, Conflict)>,
    lineage: Lineage,
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        // The lineage follows from the rest.
        (self.head, self.head_hash) == (other.head, other.head_hash)
            && (&self.live, &self.dead, &self.void) == (&other.live, &other.dead, &other.void)
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            head: 0,
            head_hash: Digest::of(&[]),
            live: BTreeMap::new(),
            dead: BTreeMap::new(),
            void: Vec::new(),
            lineage: Lineage::default(),
        }
    }
}

impl State {
    /// A state as it was stored, if the rules of the log can lead to it.
    pub(crate) fn stored(
        (head, head_hash): (u64, Digest),
        listed: Vec<Checkpoint>,
        ended: Vec<(CheckpointId, Dead)>,
    ) -> std::result::Result<Self, &'static str> {
        let (ids, ends) = (listed.len(), ended.len());
        let live: BTreeMap<_, _> = listed.into_iter().map(|c| (c.id(), c)).collect();
        let dead: BTreeMap<_, _> = ended.into_iter().collect();
        if live.len() != ids || dead.len() != ends || live.keys().any(|id| dead.contains_key(id)) {
            return Err("a checkpoint appears twice");
        }
        let entries = live.values().flat_map(|c| [c.entry, c.order]);
        if entries.chain(dead.values().map(|d| d.entry)).any(|entry| entry > head) {
            return Err("it refers to entries after its last one");
        }
        let lineage = Lineage::of(&live, &dead)?;
        let state = Self { head, head_hash, live, dead, void: Vec::new(), lineage };
        if state.live.keys().any(|id| state.chain(*id).is_err()) {
            return Err("a chain is broken");
        }
        Ok(state)
    }

    /// The number of the newest entry; 0 for an empty log.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The number of the next entry, and the hash that it must name.
    pub(crate) fn next(&self) -> (u64, Digest) {
        (self.head + 1, self.head_hash)
    }

    /// All listed checkpoints, from the oldest to the newest.
    #[must_use]
    pub fn list(&self) -> Vec<&Checkpoint> {
        let mut list: Vec<_> = self.live.values().collect();
        list.sort_by_key(|c| (c.order, c.entry));
        list
    }

    /// The newest checkpoint: the last one published, whatever its step, so that a run which went
    /// back to an earlier step resumes where it was. A replacement is as old as the original.
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

    /// The checkpoint and its ancestors, itself first and its base last.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if it is not listed; [`Error::Corrupt`] if the chain is broken, which
    /// the rules of the log exclude.
    pub fn chain(&self, id: CheckpointId) -> Result<Vec<&Checkpoint>> {
        let first = self.get(id);
        let mut at = first.ok_or_else(|| Error::NoCheckpoint { what: id.to_string() })?;
        let mut chain = vec![at];
        while let Some(base) = self.base_of(at) {
            let broken = || Error::corrupt("log", format!("the chain of {id} breaks at {base}"));
            at = self.get(base).ok_or_else(broken)?;
            if chain.len() >= MAX_CHAIN {
                return Err(broken());
            }
            chain.push(at);
        }
        Ok(chain)
    }

    /// The listed checkpoint that this one is a delta of; correct even before [`State::settle`].
    fn base_of(&self, checkpoint: &Checkpoint) -> Option<CheckpointId> {
        checkpoint.base.map(|base| self.lineage.newest(base))
    }

    /// All checkpoints that are deltas, at any distance, of `ids`.
    #[must_use]
    pub fn descendants(&self, ids: &[CheckpointId]) -> BTreeSet<CheckpointId> {
        let mut found = BTreeSet::new();
        let mut open = ids.to_vec();
        while let Some(id) = open.pop() {
            open.extend(self.lineage.children(id).filter(|child| found.insert(*child)));
        }
        for id in ids {
            found.remove(id);
        }
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
        hash: Digest,
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

    /// Brings [`Checkpoint::base`] of all checkpoints up to date. Must be called after entries were
    /// applied, once for one or many, before anyone sees the state.
    pub(crate) fn settle(&mut self) {
        self.lineage.settle(&mut self.live);
    }

    /// Applies an entry of a log that is damaged before it: the entry need not follow this state,
    /// and of the checkpoints that it retires or gives up, only those are that can be. A checkpoint that
    /// a later entry replaces (`has_heir`) is listed until then even if what it needs is lost. Returns
    /// the operation that took effect, if any did, and what did not.
    pub(crate) fn salvage(&mut self, entry: &Entry, has_heir: bool) -> (Option<Op>, Vec<Conflict>) {
        let mut entry = entry.clone();
        let mut refused = Vec::new();
        let none_left = match &mut entry.op {
            Op::Retire { ids, .. } => {
                ids.retain(|id| self.live.contains_key(id));
                // Leaving one out may make another one needed.
                while let Err(conflict) = self.check_retire(ids) {
                    let (Conflict::Pinned(bad) | Conflict::Needed { id: bad, .. }) = conflict
                    else {
                        break;
                    };
                    ids.retain(|id| *id != bad);
                    refused.push(conflict);
                }
                ids.is_empty()
            }
            Op::Abort { ids } => {
                ids.retain(|id| self.check_abort(*id).map_err(|e| refused.push(e)).is_ok());
                ids.is_empty()
            }
            _ => false,
        };
        if none_left && !refused.is_empty() {
            return (None, refused);
        }
        let mut verdict = self.check(&entry.op);
        if verdict.is_err() && has_heir {
            // What it was a delta of is not known any more, so it must never be listed as it is.
            match &mut entry.op {
                Op::Publish(about) => *about = Publish::bare(about.reference(), None),
                Op::Unretire { about, .. } => **about = Publish::bare(about.reference(), None),
                _ => {}
            }
            verdict = self.check(&entry.op);
        }
        if let Err(conflict) = verdict {
            refused.push(conflict);
            return (None, refused);
        }
        self.change(&entry);
        (Some(entry.op), refused)
    }

    /// Takes checkpoints that cannot be restored off the list, and all deltas of them.
    pub(crate) fn drop_hollow(&mut self, hollow: &[CheckpointId]) {
        let deltas = self.descendants(hollow);
        for id in deltas.iter().chain(hollow) {
            self.remove(*id);
        }
    }

    /// Carries out an entry that was checked already; its number need not be the next one.
    pub(crate) fn follow(&mut self, entry: &Entry) {
        self.change(entry);
        self.head = entry.n;
    }

    /// The last of a checkpoint's successive replacements; itself if there is none.
    pub(crate) fn stands_for(&self, id: CheckpointId) -> CheckpointId {
        self.lineage.newest(id)
    }

    /// Whether the operation would be valid as the next entry.
    pub(crate) fn check(&self, op: &Op) -> std::result::Result<(), Conflict> {
        match op {
            Op::Publish(publish) => self.check_publish(publish),
            Op::Retire { ids, .. } => self.check_retire(ids),
            Op::Abort { ids } => ids.iter().try_for_each(|id| self.check_abort(*id)),
            Op::Unretire { about, .. } => self.check_unretire(about),
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
        self.check_parent(publish)
    }

    fn check_parent(&self, publish: &Publish) -> std::result::Result<(), Conflict> {
        let Some(parent) = publish.parent else { return Ok(()) };
        let base = self.find_parent(publish.id, parent)?;
        let depth = self.chain(base.id()).map_or(MAX_CHAIN, |chain| chain.len()) + 1;
        if depth > MAX_CHAIN {
            return Err(Conflict::TooDeep { id: publish.id, depth, max: MAX_CHAIN });
        }
        Ok(())
    }

    /// The listed checkpoint that `parent` resolves to: itself, or what replaced it.
    pub(crate) fn find_parent(
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
        let had = match self.dead.get(&parent.id).map(|d| d.how) {
            Some(End::Replaced { had, .. }) => Some(had),
            Some(end) => return Err(gone(end.word())),
            None => self.live.get(&parent.id).map(|c| c.about.manifest_blake3),
        };
        match had {
            None => return Err(gone("unknown")),
            Some(had) if had != parent.manifest_blake3 => return Err(differs(had)),
            Some(_) => {}
        }
        let newest = self.lineage.newest(parent.id);
        let state = || self.dead.get(&newest).map_or("unknown", |d| d.how.word());
        self.live.get(&newest).ok_or_else(|| gone(state()))
    }

    fn check_retire(&self, ids: &[CheckpointId]) -> std::result::Result<(), Conflict> {
        let going: BTreeSet<_> = ids.iter().copied().collect();
        for id in ids {
            self.check_live(*id)?;
            if self.live.get(id).is_some_and(|c| c.pinned) {
                return Err(Conflict::Pinned(*id));
            }
        }
        for id in ids {
            if let Some(by) = self.lineage.children(*id).find(|child| !going.contains(child)) {
                return Err(Conflict::Needed { id: *id, by });
            }
        }
        Ok(())
    }

    /// A retired checkpoint may be given up as well: then it can never be listed again.
    fn check_abort(&self, id: CheckpointId) -> std::result::Result<(), Conflict> {
        match self.dead.get(&id).map(|d| d.how) {
            Some(End::Retired) => Ok(()),
            _ => self.check_unused(id),
        }
    }

    fn check_unretire(&self, about: &Publish) -> std::result::Result<(), Conflict> {
        let refuse = |state| Err(Conflict::NotRetired { id: about.id, state });
        match self.dead.get(&about.id).map(|d| d.how) {
            Some(End::Retired) => self.check_parent(about),
            Some(End::Aborted) => refuse("given up"),
            Some(end) => refuse(end.word()),
            None if self.live.contains_key(&about.id) => refuse("listed"),
            None => refuse("unknown"),
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
            Op::Unretire { about, order, published_ms } => {
                let mut back = self.listing(entry, about);
                (back.order, back.at_ms) = (*order, *published_ms);
                self.unretire(back);
            }
            Op::Retire { ids, .. } => ids.iter().for_each(|id| {
                self.remove(*id);
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
        let mut new = self.listing(entry, publish);
        if let Some(old) = publish.replaces.and_then(|r| self.remove(r.id)) {
            new.order = old.order;
            new.pinned = old.pinned;
            let by = new.reference();
            let how = End::Replaced { by, had: old.about.manifest_blake3 };
            self.dead.insert(old.id(), Dead { entry: entry.n, how });
            self.lineage.replaced(old.id(), new.id());
        }
        self.insert(new);
    }

    fn unretire(&mut self, mut back: Checkpoint) {
        if let Some(dead) = self.dead.remove(&back.id()) {
            // It was published before it was retired, whatever the entry says.
            back.order = back.order.min(dead.entry);
        }
        self.insert(back);
    }

    fn listing(&self, entry: &Entry, about: &Publish) -> Checkpoint {
        let parent = about.parent.and_then(|p| self.find_parent(about.id, p).ok());
        Checkpoint {
            about: about.clone(),
            entry: entry.n,
            order: about.position(entry.n),
            base: parent.map(Checkpoint::id),
            pinned: false,
            at_ms: entry.at_ms,
        }
    }

    fn insert(&mut self, checkpoint: Checkpoint) {
        self.lineage.listed(&checkpoint);
        self.live.insert(checkpoint.id(), checkpoint);
    }

    fn remove(&mut self, id: CheckpointId) -> Option<Checkpoint> {
        let checkpoint = self.live.remove(&id)?;
        self.lineage.unlisted(&checkpoint);
        Some(checkpoint)
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
