//! Repairs a damaged log.
//!
//! A repair relinks the remaining entries of the log. An unreadable entry is restored from a view or from
//! what later entries prove, or replaced by a `fence`; later entries keep their numbers and operations, and
//! get the new hash of the entry before them. Whatever is overwritten or removed is copied first. Entries that
//! are added at the end are written first, then the others in ascending order: a repair that was interrupted
//! leaves a log whose damage is still visible, and running it again gives the same result.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use chrono::Utc;
use object_store::path::Path;
use s4_format::Digest;
use s4_format::limits::MAX_CHAIN;
use serde::Serialize;

use crate::entry::{Entry, Op};
use crate::error::{Error, LogDamage, Result};
use crate::id::{CheckpointId, WriteId};
use crate::inner::Inner;
use crate::manifest::MAX_OBJECT;
use crate::options::StoreOptions;
use crate::place::Place;
use crate::reconstruct::{
    KnownOps, MOST_IDS, adopt, has_heir, proven_by_rules, proven_retires, reconstruct, replaced,
};
use crate::salvage::{LONGEST_GAP, Salvage, Slot};
use crate::seal;
use crate::state::{Checkpoint, State};
use crate::store::Store;
use crate::view;

/// Something that a repair cannot recover.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// The log entry that held it.
    pub entry: u64,
    /// The checkpoint that is lost, if that is known.
    pub checkpoint: Option<CheckpointId>,
    /// Its training step.
    pub step: Option<u64>,
    /// Why it is lost.
    pub why: String,
}

/// The report of a repair, or of a dry run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RepairReport {
    /// Damage to the log; empty if there is nothing to repair.
    pub damage: Vec<LogDamage>,
    /// The checkpoints that are listed afterwards, from the oldest to the newest.
    pub listed: Vec<Checkpoint>,
    /// What is lost.
    pub losses: Vec<Loss>,
    /// Entries that are rewritten with the same operation.
    pub rewritten: Vec<u64>,
    /// Entries that are restored, from a view or from what later entries prove.
    pub reconstructed: Vec<u64>,
    /// Entry numbers that are taken by a `fence`, which does nothing.
    pub fenced: Vec<u64>,
    /// Entries far after the end of the log, which are removed.
    pub removed: Vec<u64>,
    /// Data that no entry of the log names, with its bytes: perhaps of checkpoints that were lost. A
    /// sweep gives it up when it is older than the grace.
    pub unnamed: BTreeMap<CheckpointId, u64>,
    /// Where everything that is overwritten or removed was copied to.
    pub aside: Option<String>,
}

/// The new entries, and what is removed.
#[derive(Default)]
struct Plan {
    entries: BTreeMap<u64, Bytes>,
    /// The number with which the log ended; further entries are added.
    last: u64,
    /// Entry `last` is not there, and a view ends with it. Then the view counts only as long as no good entry after it
    /// names another hash, so a fence, which is written last, comes before the entries that are added.
    is_open: bool,
    state: State,
    report: RepairReport,
}

impl Store {
    /// Repairs the log of a store, or with `apply` false reports what a repair would do and writes
    /// nothing. **Nothing else may use the store meanwhile**: the repair would lose the saves of
    /// writers and confuse readers.
    ///
    /// Stopped at any point, it can be run again.
    ///
    /// # Errors
    /// As [`Store::open_read_only`]; failures of the place.
    pub async fn repair(place: &Place, options: StoreOptions, apply: bool) -> Result<RepairReport> {
        let store = Self::open_read_only(place, options).await?;
        let inner = &store.inner;
        let survey = inner.survey(view::read_surely(inner).await?).await?;
        let mut plan = if survey.damage.is_empty() {
            Plan { state: survey.state, ..Plan::default() }
        } else {
            inner.plan_repair(&survey).await?
        };
        let listed = plan.state.list().into_iter().cloned();
        plan.report.listed = listed.collect();
        if apply && !plan.report.damage.is_empty() {
            inner.carry_out(&mut plan).await?;
        }
        Ok(plan.report)
    }
}

impl Inner {
    /// The report of what a repair would do, and lose.
    pub(crate) async fn repair_report(&self, survey: &Salvage) -> Result<RepairReport> {
        let mut plan = self.plan_repair(survey).await?;
        plan.report.listed = plan.state.list().into_iter().cloned().collect();
        Ok(plan.report)
    }

    async fn plan_repair(&self, survey: &Salvage) -> Result<Plan> {
        let mut plan = Plan::default();
        plan.report.damage.clone_from(&survey.damage);
        let (last, removed) = split(&survey.slots.taken, survey.anchor.head());
        plan.last = last;
        let mut known = reconstruct(&survey.anchor);
        // An entry of another log must not take a number whose content the view knows.
        let known_better = |n| n < survey.anchor.head() && survey.slots.is_stray(n);
        let counts = |e: &&Entry| !survey.void.contains(&e.n) && !known_better(e.n);
        let good: Vec<_> = survey.slots.good().filter(counts).collect();
        let now = Utc::now().timestamp_millis();
        let there: BTreeMap<u64, &Op> = good.iter().map(|e| (e.n, &e.op)).collect();
        let lost: BTreeSet<u64> = (1..=last).filter(|n| !there.contains_key(n)).collect();
        plan.is_open = lost.contains(&last) && survey.anchor.head() == last;
        known.retain(|n, _| lost.contains(n));
        adopt(&mut known, &lost, &good, |id| survey.anchor.dead(id).is_some());
        let replaced = replaced(&good);
        let mut ops: KnownOps<'_> = good.iter().map(|e| (e.n, (&e.op, e.at_ms))).collect();
        ops.extend(known.iter().map(|(n, op)| (*n, (op, now))));
        let others = proven_by_rules(&State::default(), &ops, &lost, &replaced);
        known.extend(others);
        let op_at = |n| match there.get(&n) {
            Some(op) => Some((n, *op, false)),
            None => known.get(&n).map(|op| (n, op, true)),
        };
        let proven = proven_retires(&State::default(), (1..=last).filter_map(op_at));
        for (n, mut ids) in proven {
            if let Some(Op::Retire { ids: others, .. }) = known.get(&n) {
                ids.extend(others);
            }
            known.insert(n, Op::Retire { ids, reason: "reconstructed".to_owned() });
        }
        let ours = WriteId::new(self.options.ids.next());
        for n in 1..=last {
            let slot = survey.slots.read.get(&n);
            let was = match slot {
                Some(Slot::Good(entry, hash)) if there.contains_key(&n) => Some((entry, *hash)),
                _ => None,
            };
            let entry = match was {
                Some((entry, hash)) if plan.keep(entry, hash) => continue,
                Some((entry, _)) => (**entry).clone(),
                None => {
                    let op = known.remove(&n).unwrap_or(Op::Fence { against: ours });
                    Entry { v: 1, n, prev: plan.state.head_hash, write_id: ours, at_ms: now, op }
                }
            };
            // Of a checkpoint that the view says has ended, only that it was listed matters.
            let is_over = |id| survey.anchor.dead(id).is_some();
            let has_heir = has_heir(&replaced, &entry)
                || (was.is_none() && entry.op.published().is_some_and(is_over));
            plan.write(self, entry, was.map(|(entry, _)| &**entry), has_heir)?;
        }
        let hollow = self.hollow(&plan.state, &survey.stored).await?;
        plan.retire_hollow(self, &hollow, ours, now)?;
        plan.pins(self, survey, ours, now)?;
        plan.end(self, survey, &good, ours, now)?;
        for n in &removed {
            let good = survey.slots.read.get(n);
            let why = "it lies far beyond the end of the log".to_owned();
            plan.lose(*n, good.and_then(published), why);
        }
        plan.missed(survey);
        plan.report.removed = removed;
        plan.name_unnamed(survey);
        plan.state.settle();
        Ok(plan)
    }

    async fn carry_out(&self, plan: &mut Plan) -> Result<()> {
        let name = format!(
            "{}-{}",
            Utc::now().format("%Y%m%dT%H%M%SZ"),
            self.options.ids.next().as_hyphenated()
        );
        let aside = self.layout.repair().join(name);
        let report = &mut plan.report;
        report.aside = Some(aside.to_string());
        let changed: BTreeSet<u64> = plan.entries.keys().chain(&report.removed).copied().collect();
        let mut cut = Vec::new();
        for n in &changed {
            let name = format!("{n:020}");
            let to = aside.clone().join("log").join(name);
            cut.extend(self.set_aside(&self.layout.entry(*n), to, MAX_OBJECT as u64).await?);
        }
        let to = aside.clone().join("logck");
        cut.extend(self.set_aside(&self.layout.view(), to, view::MAX_VIEW).await?);
        let damage: Vec<_> = report.damage.iter().map(ToString::to_string).collect();
        let told = serde_json::json!({
            "damage": damage, "losses": report.losses, "rewritten": report.rewritten,
            "reconstructed": report.reconstructed, "fenced": report.fenced,
            "removed": report.removed, "cut": cut,
        });
        let key = aside.join("repair.json");
        self.io.put(&key, seal::seal(key.as_ref(), &told)?.into()).await?;
        self.reached("repair.aside").await;
        // What comes after the end of the log is written first: some of it only the view knows, and once the entry
        // that the view ends with has another hash, a later repair cannot use the view.
        let added = plan.last + 1 + u64::from(plan.is_open);
        for (n, bytes) in plan.entries.range(added..).chain(plan.entries.range(..added)) {
            self.io.put(&self.layout.entry(*n), bytes.clone()).await?;
            self.reached("repair.entry").await;
        }
        for n in report.removed.iter().rev() {
            self.io.delete(&self.layout.entry(*n)).await?;
        }
        self.sync_log()?;
        self.reached("repair.mended").await;
        // Replays the log from its first entry, which also shows whether the log is whole now.
        let state = self.replay().await?;
        view::write(self, &state.into()).await;
        Ok(())
    }

    /// Copies an object, if it is there. Of one that is larger than any of its kind only the first
    /// `max` bytes are copied, so that it does not prevent a repair. Returns the name of such a copy.
    async fn set_aside(&self, from: &Path, to: Path, max: u64) -> Result<Option<String>> {
        let (bytes, is_cut) = match self.io.get(from, max).await {
            Ok(bytes) => (bytes, false),
            Err(Error::Corrupt { .. }) => match self.io.get_range(from, 0..max).await {
                // A link that leads nowhere, or a disk that cannot read it: there is nothing to copy.
                Err(Error::Corrupt { .. } | Error::Missing { .. }) => return Ok(None),
                part => (part?, true),
            },
            Err(e) if e.is_missing() => return Ok(None),
            Err(e) => return Err(e),
        };
        self.io.put(&to, bytes).await?;
        Ok(is_cut.then(|| to.to_string()))
    }
}

impl Plan {
    /// Keeps an entry as it is stored, if it follows the one before.
    fn keep(&mut self, entry: &Entry, hash: Digest) -> bool {
        if entry.prev != self.state.head_hash {
            return false;
        }
        if self.state.check(&entry.op).is_ok() {
            self.state.follow(entry);
        }
        (self.state.head, self.state.head_hash) = (entry.n, hash);
        true
    }

    /// Adds an entry in place of `was`, or of an entry that could not be read.
    fn write(
        &mut self,
        inner: &Inner,
        mut entry: Entry,
        was: Option<&Entry>,
        has_heir: bool,
    ) -> Result<()> {
        let n = entry.n;
        entry.prev = self.state.head_hash;
        let (op, refused) = self.state.salvage(&entry, has_heir);
        for conflict in refused {
            self.lose(n, entry_published(&entry), conflict.to_string());
        }
        entry.op = op.unwrap_or(Op::Fence { against: entry.write_id });
        entry.v = entry.op.version();
        let is_fence = matches!(entry.op, Op::Fence { .. });
        let report = &mut self.report;
        match was {
            None if is_fence => {
                report.fenced.push(n);
                self.lose(n, None, "its content is unknown".into());
            }
            None => report.reconstructed.push(n),
            Some(was) if is_fence && !matches!(was.op, Op::Fence { .. }) => report.fenced.push(n),
            Some(_) => report.rewritten.push(n),
        }
        self.push(inner, &entry)
    }

    fn push(&mut self, inner: &Inner, entry: &Entry) -> Result<()> {
        let bytes = Bytes::from(entry.to_bytes(inner.layout.entry(entry.n).as_ref())?);
        (self.state.head, self.state.head_hash) = (entry.n, Digest::of(&bytes));
        self.entries.insert(entry.n, bytes);
        Ok(())
    }

    /// Adds an entry at the end.
    fn append(&mut self, inner: &Inner, op: Op, ours: WriteId, now: i64) -> Result<()> {
        if self.is_open && self.state.head == self.last {
            self.add(inner, Op::Fence { against: ours }, ours, now)?;
        }
        self.add(inner, op, ours, now)
    }

    fn add(&mut self, inner: &Inner, op: Op, ours: WriteId, now: i64) -> Result<()> {
        let (n, prev) = (self.state.head + 1, self.state.head_hash);
        let entry = Entry { v: op.version(), n, prev, write_id: ours, at_ms: now, op };
        self.state.follow(&entry);
        self.push(inner, &entry)
    }

    /// Takes checkpoints whose manifests are not there off the list, and all deltas of them: a lost
    /// entry may have retired them, and a clean-up would keep them instead of those that restore.
    fn retire_hollow(
        &mut self,
        inner: &Inner,
        hollow: &[CheckpointId],
        ours: WriteId,
        now: i64,
    ) -> Result<()> {
        let deltas = self.state.descendants(hollow);
        let going = deltas.iter().chain(hollow).filter_map(|id| self.state.get(*id));
        let mut going: Vec<_> = going.cloned().collect();
        // A delta goes before what it needs.
        going.sort_by_key(|c| {
            std::cmp::Reverse(self.state.chain(c.id()).map_or(MAX_CHAIN, |c| c.len()))
        });
        for c in &going {
            let why = match hollow.contains(&c.id()) {
                true => "its manifest is missing",
                false => "the manifest of a checkpoint that it needs is missing",
            };
            self.lose(c.entry, Some((c.id(), c.step())), why.to_owned());
            if c.pinned {
                self.append(inner, Op::Unpin { id: c.id() }, ours, now)?;
            }
        }
        for some in going.chunks(MOST_IDS) {
            let ids = some.iter().map(Checkpoint::id).collect();
            let reason = "its manifest is missing".to_owned();
            self.append(inner, Op::Retire { ids, reason }, ours, now)?;
        }
        Ok(())
    }

    /// Adds entries that pin and unpin checkpoints as they were before.
    fn pins(&mut self, inner: &Inner, survey: &Salvage, ours: WriteId, now: i64) -> Result<()> {
        let differs =
            |c: &&Checkpoint| self.state.get(c.id()).is_some_and(|after| after.pinned != c.pinned);
        let ops: Vec<_> =
            survey.state.live.values().filter(differs).map(|c| (c.id(), c.pinned)).collect();
        for (id, pinned) in ops {
            let op = if pinned { Op::Pin { id } } else { Op::Unpin { id } };
            self.append(inner, op, ours, now)?;
        }
        Ok(())
    }

    /// Gives up checkpoints that have ended, but that the log does not know any more, since the entry which listed
    /// them is lost: otherwise the process that saved one, and finds no trace of it, would list it again.
    fn end(
        &mut self,
        inner: &Inner,
        survey: &Salvage,
        good: &[&Entry],
        ours: WriteId,
        now: i64,
    ) -> Result<()> {
        let mut ended: BTreeSet<_> = survey.anchor.dead.keys().copied().collect();
        for entry in good.iter().filter(|e| e.n > survey.anchor.head()) {
            match &entry.op {
                Op::Publish(about) => {
                    ended.remove(&about.id);
                    ended.extend(about.replaces.map(|old| old.id));
                }
                Op::Unretire { about, .. } => drop(ended.remove(&about.id)),
                Op::Retire { ids, .. } => ended.extend(ids),
                _ => {}
            }
        }
        ended.retain(|id| self.state.get(*id).is_none() && self.state.dead(*id).is_none());
        let ended: Vec<_> = ended.into_iter().collect();
        for some in ended.chunks(MOST_IDS) {
            self.append(inner, Op::Abort { ids: some.to_vec() }, ours, now)?;
        }
        Ok(())
    }

    /// Reports checkpoints that were listed, and are not any more.
    fn missed(&mut self, survey: &Salvage) {
        for (n, id) in
            survey.void.iter().filter_map(|n| Some((*n, published(survey.slots.read.get(n)?)?)))
        {
            self.report.losses.retain(|loss| loss.entry != n);
            self.lose(n, Some(id), "its manifest is missing".into());
        }
        // An entry without effect is no loss if another entry lists its checkpoint.
        let listed = &self.state;
        self.report.losses.retain(|l| l.checkpoint.is_none_or(|id| listed.get(id).is_none()));
        let told: BTreeSet<_> = self.report.losses.iter().filter_map(|l| l.checkpoint).collect();
        for c in survey.state.list() {
            if self.state.get(c.id()).is_none() && !told.contains(&c.id()) {
                let why = "the entries that listed it cannot be reconstructed".into();
                self.lose(c.entry, Some((c.id(), c.step())), why);
            }
        }
    }

    /// Notes the data of ids that the log does not know.
    fn name_unnamed(&mut self, survey: &Salvage) {
        let is_known = |id| self.state.get(id).is_some() || self.state.dead(id).is_some();
        let unknown = survey.stored.iter().filter(|(id, _)| !is_known(**id));
        self.report.unnamed = unknown.map(|(id, stored)| (*id, stored.bytes)).collect();
    }

    fn lose(&mut self, entry: u64, what: Option<(CheckpointId, u64)>, why: String) {
        let (checkpoint, step) = what.unzip();
        self.report.losses.push(Loss { entry, checkpoint, step, why });
    }
}

fn published(slot: &Slot) -> Option<(CheckpointId, u64)> {
    match slot {
        Slot::Good(entry, _) => entry_published(entry),
        Slot::Bad(_) => None,
    }
}

fn entry_published(entry: &Entry) -> Option<(CheckpointId, u64)> {
    entry.op.listed().map(|about| (about.id, about.step))
}

/// The last number of the log, and the numbers that are too far after it.
fn split(taken: &BTreeSet<u64>, known: u64) -> (u64, Vec<u64>) {
    let mut last = known;
    for n in taken {
        if *n > last.saturating_add(LONGEST_GAP) {
            return (last, taken.range(n..).copied().collect());
        }
        last = last.max(*n);
    }
    (last, Vec::new())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::io::Io;
    use crate::local::Trust;
    use crate::testing::{Fault, FaultStore, OpKind, quick_options, toy};

    /// A bad sector costs what the entry in it said: the store can be read and repaired.
    #[tokio::test]
    async fn an_entry_that_the_disk_cannot_read_is_repaired() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::folder(temp.path());
        let store = Store::create(&place, quick_options()).await.unwrap();
        for step in 1..=3 {
            toy::save(&store, step, None, &[1; 20]).await.unwrap();
        }
        // Too large to be read without a request, and requests fail.
        let entry = temp.path().join("log/00000000000000000002");
        std::fs::File::options().write(true).open(&entry).unwrap().set_len(1 << 20).unwrap();
        let mut store = Store::open_read_only(&place, quick_options()).await.unwrap();
        let there = place.connect(false).unwrap();
        let faults = FaultStore::new(there.store);
        faults.set_plan(|op| {
            let bad = matches!(op.kind, OpKind::Get | OpKind::Head) && op.key.ends_with("02");
            bad.then_some(Fault::Unreadable)
        });
        let inner = std::sync::Arc::get_mut(&mut store.inner).unwrap();
        inner.io = Io::new(std::sync::Arc::new(faults), quick_options().retry, 1 << 20, None)
            .in_folder(there.folder.map(|folder| folder.trusted(Trust::Disk)));

        let known = inner.load().await.unwrap();
        assert_eq!(known.state.list().len(), 2);
        let said = known.damage[0].to_string();
        assert!(known.damage[0].entry() == 2 && said.contains("the disk cannot read it"), "{said}");
        let survey = inner.survey(None).await.unwrap();
        let mut plan = inner.plan_repair(&survey).await.unwrap();
        inner.carry_out(&mut plan).await.unwrap();
        assert_eq!(plan.report.fenced, [2]);
        let store = Store::open(&place, quick_options()).await.unwrap();
        assert_eq!(store.list().await.unwrap().len(), 2);
        toy::save(&store, 4, None, &[1; 20]).await.unwrap();
    }
}
