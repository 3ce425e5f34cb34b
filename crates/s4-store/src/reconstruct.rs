//! Reconstructs the content of log entries, as far as a view shows it.
//!
//! A view names the entry that listed each checkpoint, with everything that the entry said about
//! it, and the entry that ended each unlisted one.

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::{Entry, Op, Publish, Reference};
use crate::id::CheckpointId;
use crate::state::{Checkpoint, End, State};

/// No more checkpoints are added to an operation, so that its entry does not become too large.
pub(crate) const MOST_IDS: usize = 700;

/// Operations that lead to `state`, by entry number, to take the place of entries that are lost.
pub(crate) fn reconstruct(state: &State) -> BTreeMap<u64, Op> {
    let mut ops = BTreeMap::new();
    let (mut retired, mut aborted) = (BTreeMap::new(), BTreeMap::new());
    let mut replacements = BTreeSet::new();
    for (id, dead) in &state.dead {
        match dead.how {
            End::Retired => push(&mut retired, dead.entry, *id),
            End::Aborted => push(&mut aborted, dead.entry, *id),
            End::Replaced { by, .. } => {
                replacements.insert(by.id);
            }
        }
    }
    let reason = String::from("reconstructed");
    let retire = |(n, ids)| (n, Op::Retire { ids, reason: reason.clone() });
    ops.extend(retired.into_iter().map(retire));
    ops.extend(aborted.into_iter().map(|(n, ids)| (n, Op::Abort { ids })));
    for (id, dead) in &state.dead {
        let End::Replaced { by, had } = dead.how else { continue };
        let old = Reference { id: *id, manifest_blake3: had };
        let Some(newest) = state.get(state.stands_for(*id)) else {
            // The newest one has ended, too. But without this entry, the replaced one would be listed again.
            ops.insert(dead.entry, bare(by, Some(old)));
            continue;
        };
        if !replacements.contains(id) {
            ops.insert(newest.order, bare(old, None));
        }
        if let Some(End::Replaced { had: next, .. }) = state.dead(by.id).map(|d| d.how) {
            ops.insert(dead.entry, bare(Reference { id: by.id, manifest_blake3: next }, Some(old)));
        }
    }
    for checkpoint in state.live.values() {
        let op = listing(state, checkpoint);
        if matches!(op, Op::Unretire { .. }) {
            // The place in time of a replacement is that of the first one that it stands for.
            let about = &checkpoint.about;
            let replaced = about.replaces.and_then(|old| state.dead(old.id));
            let published = replaced.map_or(checkpoint.order, |dead| dead.entry);
            ops.insert(published, Op::Publish(about.clone()));
        }
        ops.insert(checkpoint.entry, op);
    }
    ops
}

/// The checkpoints that entries replace. A replacement is created only while the old checkpoint is
/// listed, so it proves that an earlier entry listed that one, and with which hash.
pub(crate) fn replaced(good: &[&Entry]) -> BTreeSet<CheckpointId> {
    let old = |entry: &&Entry| match &entry.op {
        Op::Publish(about) => about.replaces.map(|old| old.id),
        _ => None,
    };
    good.iter().filter_map(old).collect()
}

/// Whether a later entry replaces what this one lists.
pub(crate) fn has_heir(replaced: &BTreeSet<CheckpointId>, entry: &Entry) -> bool {
    entry.op.listed().is_some_and(|about| replaced.contains(&about.id))
}

/// Adds a [bare](Publish::is_bare) stand-in for each checkpoint that has ended (which `is_over` says, or a
/// replacement proves) but that an entry names as its parent or as replaced, and that no entry publishes. It
/// gets an earlier one of the `lost` numbers; if it was pinned before, one before that, so that what replaced it is
/// pinned, too.
pub(crate) fn adopt(
    ops: &mut BTreeMap<u64, Op>,
    lost: &BTreeSet<u64>,
    good: &[&Entry],
    is_over: impl Fn(CheckpointId) -> bool,
) {
    let replaced = replaced(good);
    let op_of = |entry: &&Entry| entry.op.published();
    let mut there: BTreeSet<_> = good.iter().filter_map(op_of).collect();
    there.extend(lost.iter().filter_map(|n| ops.get(n)?.published()));
    let mut pins = BTreeMap::new();
    for entry in good {
        if let Op::Pin { id } = entry.op {
            pins.entry(id).or_insert(entry.n);
        }
    }
    for entry in good {
        let Op::Publish(about) = &entry.op else { continue };
        for named in about.parent.iter().chain(&about.replaces) {
            let ended = replaced.contains(&named.id) || is_over(named.id);
            if !ended || !there.insert(named.id) {
                continue;
            }
            let free = |before: u64| lost.range(..before).rev().find(|n| !ops.contains_key(*n));
            let pinned = pins.get(&named.id).copied().filter(|pin| *pin < entry.n);
            if let Some(free) = pinned.and_then(free).or_else(|| free(entry.n)) {
                ops.insert(*free, bare(*named, None));
            }
        }
    }
}

/// Retirements that lost entries must have held, by the number that takes them: an `abort` of a listed
/// checkpoint has an effect only if that was retired before. `ops` are the known operations after
/// `state` in order, each with whether it may be added to; numbers that are not among them are lost.
///
/// Of several such numbers the last one before the `abort` is taken: by then nothing needed the
/// checkpoint any more, whichever retired it.
pub(crate) fn proven_retires<'a>(
    state: &State,
    ops: impl Iterator<Item = (u64, &'a Op, bool)>,
) -> BTreeMap<u64, Vec<CheckpointId>> {
    let mut proven: BTreeMap<u64, Vec<CheckpointId>> = BTreeMap::new();
    // The number since which each checkpoint has been listed.
    let mut listed: BTreeMap<_, _> = state.live.keys().map(|id| (*id, state.head)).collect();
    let (mut before, mut free) = (state.head, 0);
    for (n, op, is_open) in ops {
        if n > before + 1 {
            free = n - 1;
        }
        before = n;
        match op {
            Op::Publish(about) => {
                listed.insert(about.id, n);
                about.replaces.map(|old| listed.remove(&old.id));
            }
            Op::Unretire { about, .. } => {
                listed.insert(about.id, n);
            }
            Op::Retire { ids, .. } => {
                for id in ids {
                    listed.remove(id);
                }
                if is_open && ids.len() < MOST_IDS {
                    free = n;
                }
            }
            Op::Abort { ids } => {
                for id in ids.iter().filter(|id| listed.get(*id).is_some_and(|since| *since < free))
                {
                    let retired = proven.entry(free).or_default();
                    if retired.len() < MOST_IDS {
                        retired.push(*id);
                    }
                }
                for id in ids {
                    listed.remove(id);
                }
            }
            Op::Pin { .. } | Op::Unpin { .. } | Op::Fence { .. } => {}
        }
    }
    proven
}

/// Publishes a checkpoint of which nothing more is known, or matters.
fn bare(checkpoint: Reference, replaces: Option<Reference>) -> Op {
    Op::Publish(Publish::bare(checkpoint, replaces))
}

/// The known operations of a log, by number, each with its writer's clock.
pub(crate) type KnownOps<'a> = BTreeMap<u64, (&'a Op, i64)>;

/// Operations `unretire` and `unpin` that lost entries must have held, by the number that takes them: a checkpoint
/// becomes a parent, is replaced or is pinned only while it is listed, and is retired only while it is not pinned.
/// `ops` are the known operations after `state`, `lost` the numbers that may be used.
pub(crate) fn proven_by_rules(
    state: &State,
    ops: &KnownOps<'_>,
    lost: &BTreeSet<u64>,
    replaced: &BTreeSet<CheckpointId>,
) -> BTreeMap<u64, Op> {
    let mut proven = BTreeMap::new();
    // One may need another one before it, since what a checkpoint is a delta of is listed, too.
    while let Some((n, op)) = next_proven(state, ops, lost, replaced, &proven) {
        proven.insert(n, op);
    }
    proven
}

fn next_proven(
    state: &State,
    ops: &KnownOps<'_>,
    lost: &BTreeSet<u64>,
    replaced: &BTreeSet<CheckpointId>,
    proven: &BTreeMap<u64, Op>,
) -> Option<(u64, Op)> {
    let mut state = state.clone();
    let mut all = ops.clone();
    all.extend(proven.iter().map(|(n, op)| (*n, (op, 0))));
    // The last free number after one entry and before another.
    let free = |after: u64, before: u64| {
        lost.range(after..before).rev().find(|n| !all.contains_key(n)).copied()
    };
    // How each checkpoint was listed last, and the entry that pinned it.
    let (mut before, mut pins) = (state.live.clone(), BTreeMap::new());
    for (n, (op, at_ms)) in &all {
        let (named, is_replaced) = match op {
            Op::Publish(Publish { replaces: Some(old), .. }) => (Some(old.id), true),
            Op::Publish(about) => (about.parent.map(|p| state.stands_for(p.id)), false),
            Op::Unretire { about, .. } => (about.parent.map(|p| state.stands_for(p.id)), false),
            Op::Pin { id } => (Some(*id), false),
            _ => (None, false),
        };
        let retired = named.and_then(|id| state.dead(id)).filter(|d| d.how == End::Retired);
        let was = named.and_then(|id| before.get(&id));
        if let (Some(retired), Some(was)) = (retired, was)
            && (is_replaced || !was.about.is_bare())
            && let Some(free) = free(retired.entry, *n)
        {
            let (about, order, published_ms) = (was.about.clone(), was.order, was.at_ms);
            return Some((free, Op::Unretire { about: Box::new(about), order, published_ms }));
        }
        if let Op::Retire { ids, .. } = op {
            for id in ids.iter().filter(|id| state.get(**id).is_some_and(|c| c.pinned)) {
                if let Some(free) = free(pins.get(id).copied().unwrap_or(state.head), *n) {
                    return Some((free, Op::Unpin { id: *id }));
                }
            }
        }
        let entry = Entry::of_lost(*n, (*op).clone(), *at_ms);
        state.salvage(&entry, has_heir(replaced, &entry));
        let listed = entry.op.listed().and_then(|about| state.get(about.id));
        before.extend(listed.map(|c| (c.id(), c.clone())));
        if let Op::Pin { id } = op {
            pins.insert(*id, *n);
        }
    }
    None
}

fn push(all: &mut BTreeMap<u64, Vec<CheckpointId>>, entry: u64, id: CheckpointId) {
    all.entry(entry).or_default().push(id);
}

/// The operation that listed a checkpoint: `publish`, unless its position in time is before its
/// entry and it replaced nothing; then `unretire`.
fn listing(state: &State, checkpoint: &Checkpoint) -> Op {
    let about = checkpoint.about.clone();
    let replaced = about
        .replaces
        .is_some_and(|old| state.dead(old.id).is_some_and(|dead| dead.entry == checkpoint.entry));
    if checkpoint.order == about.position(checkpoint.entry) || replaced {
        return Op::Publish(about);
    }
    let (order, published_ms) = (checkpoint.order, checkpoint.at_ms);
    Op::Unretire { about: Box::new(about), order, published_ms }
}
