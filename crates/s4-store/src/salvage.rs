//! Recovers what can be proved of a damaged log.
//!
//! Each readable entry carries its own hash, and the next entry names it, too; a view carries the
//! hash of the entry that it ends with. So a bad entry loses only its own content: earlier entries
//! keep their meaning, and later ones are applied as far as the rules of the log allow. A checkpoint
//! that a lost entry retired is listed again, unless a later `abort` proves that it was retired. One
//! that a lost entry published counts as published if a later entry replaced it, so the replacement
//! is listed. No checkpoint counts whose manifest is not there: a sweep may have deleted it after an
//! entry that is lost.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, TryStreamExt};
use s4_format::Digest;

use crate::entry::{Entry, Op};
use crate::error::{Error, LogDamage, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::Part;
use crate::log::Seen;
use crate::reconstruct::{
    KnownOps, MOST_IDS, adopt, has_heir, proven_by_rules, proven_retires, replaced,
};
use crate::state::State;

/// The most unreadable entries in a row that are added to those which a listing shows.
const MOST_BAD: u32 = 4;

/// The most missing numbers between two entries of a log. An entry that is further away is not part of it.
pub(crate) const LONGEST_GAP: u64 = 10_000;

/// What was found at one number of the log.
#[derive(Debug, Clone)]
pub(crate) enum Slot {
    Good(Box<Entry>, Digest),
    Bad(String),
}

/// The log as it is stored.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// All numbers that are taken.
    pub(crate) taken: BTreeSet<u64>,
    /// What was found at the numbers that were read.
    pub(crate) read: BTreeMap<u64, Slot>,
}

impl Slots {
    pub(crate) fn good(&self) -> impl Iterator<Item = &Entry> {
        self.read.values().filter_map(|slot| match slot {
            Slot::Good(entry, _) => Some(&**entry),
            Slot::Bad(_) => None,
        })
    }

    /// Whether a view belongs to this log: it has the entry that the view ends with, or an entry
    /// that was written after that one, or at least nothing that contradicts it.
    fn fits(&self, view: &State) -> bool {
        match (self.read.get(&view.head()), self.read.get(&(view.head() + 1))) {
            (Some(Slot::Good(_, hash)), _) => *hash == view.head_hash,
            (_, Some(Slot::Good(next, _))) => next.prev == view.head_hash,
            _ => true,
        }
    }

    /// Whether the entry is from another log: the entry after it names a different one, and it does not name the
    /// one before it.
    pub(crate) fn is_stray(&self, n: u64) -> bool {
        let good = |n: u64| match self.read.get(&n) {
            Some(Slot::Good(entry, hash)) => Some((entry, hash)),
            _ => None,
        };
        let Some((entry, hash)) = good(n) else { return false };
        good(n.saturating_add(1)).is_some_and(|(next, _)| next.prev != *hash)
            && good(n.saturating_sub(1)).is_none_or(|(_, before)| entry.prev != *before)
    }

    /// Numbers up to `last` that are not taken.
    fn gaps(&self, last: u64) -> Vec<LogDamage> {
        let mut gaps = Vec::new();
        let mut next = 1;
        for n in self.taken.range(..=last).copied().chain([last.saturating_add(1)]) {
            if n > next {
                gaps.push(LogDamage::Missing { first: next, last: n - 1 });
            }
            next = n.saturating_add(1);
        }
        gaps
    }
}

/// The objects of a checkpoint, as a listing shows them.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    /// The size of its manifest, if that is there.
    manifest: Option<u64>,
    /// The bytes of all its objects.
    pub(crate) bytes: u64,
}

/// The outcome of a salvage: the log as it is stored, and the state that it proves.
pub(crate) struct Salvage {
    pub(crate) slots: Slots,
    /// The state that the entries are applied to: that of a view, or the empty one.
    pub(crate) anchor: State,
    /// Entries after the damage that list a checkpoint whose manifest is not there: perhaps they are
    /// not of this log.
    pub(crate) void: BTreeSet<u64>,
    /// The objects below `ck/`, if the log is damaged.
    pub(crate) stored: BTreeMap<CheckpointId, Stored>,
    pub(crate) state: State,
    pub(crate) damage: Vec<LogDamage>,
}

impl Inner {
    /// The state that can be proved, and what is wrong with the log.
    pub(crate) async fn salvage(&self, view: Option<State>) -> Result<(State, Vec<LogDamage>)> {
        let from = view.as_ref().map_or(0, State::head);
        let slots = self.read_slots(from).await?;
        let salvage = match view {
            Some(view) if slots.fits(&view) => self.weave(slots, view).await?,
            None => self.weave(slots, State::default()).await?,
            Some(_) => self.weave(self.read_slots(0).await?, State::default()).await?,
        };
        Ok((salvage.state, salvage.damage))
    }

    /// As [`Inner::salvage`], with every entry read.
    pub(crate) async fn survey(&self, view: Option<State>) -> Result<Salvage> {
        let slots = self.read_slots(0).await?;
        let anchor = view.filter(|view| slots.fits(view)).unwrap_or_default();
        self.weave(slots, anchor).await
    }

    /// Lists the log, and reads the entries from `from` on.
    pub(crate) async fn read_slots(&self, from: u64) -> Result<Slots> {
        let listed = self.io.list(&self.layout.log(), None).await?;
        let mut taken: BTreeSet<u64> =
            listed.iter().filter_map(|m| self.layout.parse_entry(&m.location)).collect();
        // A listing may be stale, and shows no link that leads nowhere. Something may answer every request with a page
        // of its own, so the search ends after some unreadable entries.
        let mut bad = 0;
        while bad < MOST_BAD {
            let next = taken.last().copied().unwrap_or(0).max(from).saturating_add(1);
            match self.read_slot(next).await {
                Ok(Seen::Empty) => break,
                Ok(Seen::Entry(..)) => bad = 0,
                Err(Error::Corrupt { .. }) => bad += 1,
                Err(e) => return Err(e),
            }
            if !taken.insert(next) {
                break;
            }
        }
        // A stale listing may miss some between others, too.
        let mut wanted: Vec<u64> = taken.range(from..).copied().collect();
        let mut next = from.max(1);
        for n in taken.range(next..) {
            if n - next <= LONGEST_GAP {
                wanted.extend(next..*n);
            }
            next = n.saturating_add(1);
        }
        wanted.sort_unstable();
        let read = |n| async move {
            match self.read_entry(n).await {
                Ok((entry, hash)) => Ok(Some((n, Slot::Good(Box::new(entry), hash)))),
                Err(Error::Corrupt { what, .. }) => Ok(Some((n, Slot::Bad(what)))),
                Err(Error::Missing { .. }) => Ok(None),
                Err(e) => Err(e),
            }
        };
        let reads = futures::stream::iter(wanted).map(read).buffered(self.concurrency());
        let read: BTreeMap<u64, Slot> =
            reads.try_filter_map(|slot| async move { Ok(slot) }).try_collect().await?;
        taken.extend(read.keys());
        Ok(Slots { taken, read })
    }

    async fn weave(&self, slots: Slots, anchor: State) -> Result<Salvage> {
        let (mut void, mut stored) = (BTreeSet::new(), BTreeMap::new());
        let (mut state, mut damage) = weave(&anchor, &slots, &void);
        if let Some(first) = damage.iter().map(LogDamage::entry).min() {
            stored = self.stored().await?;
            // Of two entries that do not fit, the earlier one may be the one that is not this log's.
            let hollow = self.hollow(&state, &stored).await?;
            let entries = hollow.iter().filter_map(|id| Some(state.get(*id)?.entry));
            void = entries.filter(|n| *n > anchor.head() && n + 1 >= first).collect();
            if !void.is_empty() {
                (state, damage) = weave(&anchor, &slots, &void);
            }
            let hollow = self.hollow(&state, &stored).await?;
            state.drop_hollow(&hollow);
        }
        Ok(Salvage { slots, anchor, void, stored, state, damage })
    }

    async fn stored(&self) -> Result<BTreeMap<CheckpointId, Stored>> {
        let mut all: BTreeMap<CheckpointId, Stored> = BTreeMap::new();
        for meta in self.io.list(&self.layout.checkpoints(), None).await? {
            let Some((id, part)) = self.layout.parse_part(&meta.location) else { continue };
            let stored = all.entry(id).or_default();
            stored.bytes += meta.size;
            if part == Part::Manifest {
                stored.manifest = Some(meta.size);
            }
        }
        Ok(all)
    }

    /// Listed checkpoints whose manifest is not there. A listing may be stale, so those that it
    /// misses are looked up.
    pub(crate) async fn hollow(
        &self,
        state: &State,
        stored: &BTreeMap<CheckpointId, Stored>,
    ) -> Result<Vec<CheckpointId>> {
        let listed = state.live.values().map(|c| (c.id(), c.about.manifest_len));
        let is_there = |id, len| stored.get(&id).is_some_and(|s| s.manifest == Some(len));
        let wanted: Vec<_> = listed.filter(|(id, len)| !is_there(*id, *len)).collect();
        let look = |(id, len): (CheckpointId, u64)| async move {
            match self.io.head(&self.layout.part(id, Part::Manifest)).await {
                Ok(meta) => Ok((meta.size != len).then_some(id)),
                Err(Error::Missing { .. }) => Ok(Some(id)),
                Err(e) => Err(e),
            }
        };
        let looks = futures::stream::iter(wanted).map(look).buffered(self.concurrency());
        looks.try_filter_map(|id| async move { Ok(id) }).try_collect().await
    }
}

/// Applies what can be read of the log after `anchor`, without the entries in `void`.
fn weave(anchor: &State, slots: &Slots, void: &BTreeSet<u64>) -> (State, Vec<LogDamage>) {
    let mut state = anchor.clone();
    let mut damage = slots.gaps(slots.taken.last().copied().unwrap_or(0).max(anchor.head()));
    let counts = |n: u64| n > anchor.head() && !void.contains(&n);
    let good: Vec<&Entry> = slots.good().filter(|e| counts(e.n)).collect();
    let replaced = replaced(&good);
    let lost = lost_numbers(anchor, &good);
    let mut proven = proven_publishes(anchor, &good, &lost);
    let mut ops: KnownOps<'_> = good.iter().map(|e| (e.n, (&e.op, e.at_ms))).collect();
    ops.extend(proven.iter().map(|(n, op)| (*n, (op, 0))));
    let others = proven_by_rules(anchor, &ops, &lost, &replaced);
    ops.extend(others.iter().map(|(n, op)| (*n, (op, 0))));
    let retires = proven_retires(anchor, ops.into_iter().map(|(n, (op, _))| (n, op, false)));
    proven.extend(others);
    let retire = |(n, ids)| (n, Op::Retire { ids, reason: String::new() });
    proven.extend(retires.into_iter().map(retire));
    // The hash that the next entry must name, if it is known.
    let mut link = None;
    let mut at = 0;
    for (n, slot) in &slots.read {
        if *n != at + 1 {
            link = None;
        }
        if *n == 1 {
            link = Some(Digest::of(&[]));
        } else if *n == anchor.head() + 1 {
            link = Some(anchor.head_hash);
        }
        at = *n;
        match slot {
            Slot::Bad(what) => {
                damage.push(LogDamage::Unreadable { entry: *n, what: what.clone() });
                link = None;
            }
            Slot::Good(entry, hash) => {
                if link.is_some_and(|link| link != entry.prev) {
                    damage.push(LogDamage::Unlinked { entry: *n });
                }
                link = Some(*hash);
                if *n > anchor.head() {
                    state.head = *n;
                    state.head_hash = *hash;
                    while let Some(first) = proven.first_entry().filter(|e| e.key() < n) {
                        let (at, op) = first.remove_entry();
                        state.salvage(&Entry::of_lost(at, op, 0), false);
                    }
                    if !void.contains(n) {
                        // An entry that breaks a rule has no effect, as always.
                        state.salvage(entry, has_heir(&replaced, entry));
                    }
                }
            }
        }
    }
    state.settle();
    damage.sort_by_key(LogDamage::entry);
    (state, damage)
}

/// The numbers after `anchor` and before an entry that no entry has; only the last ones of a gap, which may be of any
/// length.
fn lost_numbers(anchor: &State, good: &[&Entry]) -> BTreeSet<u64> {
    let (mut lost, mut next) = (BTreeSet::new(), anchor.head() + 1);
    for entry in good {
        lost.extend((next..entry.n).rev().take(MOST_IDS));
        next = entry.n.saturating_add(1);
    }
    lost
}

/// Publications that lost entries after `anchor` must have held, by the number that takes them.
fn proven_publishes(anchor: &State, good: &[&Entry], lost: &BTreeSet<u64>) -> BTreeMap<u64, Op> {
    let mut proven = BTreeMap::new();
    adopt(&mut proven, lost, good, |_| false);
    // What the anchor knows needs no stand-in.
    let unknown = |id: CheckpointId| anchor.get(id).is_none() && anchor.dead(id).is_none();
    proven.retain(|_, op| op.published().is_none_or(unknown));
    proven
}
