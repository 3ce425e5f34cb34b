//! Deletes data that no listed checkpoint needs.
//!
//! The log decides what may go, the object store's own clock decides when. The state may come from a
//! view, but a view alone decides no deletion: the log entry that ended a checkpoint is read first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt};
use object_store::ObjectMeta;
use object_store::path::Path;

use crate::entry::{Entry, Op};
use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::Part;
use crate::state::{Dead, End, State};
use crate::store::Store;
use crate::view;

/// The shortest grace without `exclusive`.
pub const SHORTEST_GRACE: Duration = Duration::from_secs(24 * 3600);

/// Limits of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepOptions {
    /// How long data stays after its checkpoint was retired, so that readers can finish; and how long an
    /// attempt must have been silent before it is given up.
    pub grace: Duration,
    /// The caller knows that nothing else uses the store: any grace is allowed.
    pub exclusive: bool,
    /// Only report what would be done, and write nothing at all; the time is then taken from this
    /// machine's clock.
    pub dry_run: bool,
}

impl Default for SweepOptions {
    fn default() -> Self {
        Self { grace: Duration::from_secs(7 * 24 * 3600), exclusive: false, dry_run: false }
    }
}

/// Why something is deleted, or is not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Its checkpoint was retired longer ago than the grace.
    Retired,
    /// Another checkpoint replaced it longer ago than the grace.
    Replaced,
    /// Its attempt was given up.
    Aborted,
    /// No log entry knows it: its attempt has been silent for longer than the grace and is given up
    /// now. A later sweep deletes it.
    Orphan,
    /// A killed writer or a probe left it behind.
    Leftover,
    /// It may go, but not before the grace is over.
    TooYoung,
}

/// One decision of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swept {
    /// A checkpoint's folder, or an object or file.
    pub what: String,
    /// The checkpoint or attempt, if it is one.
    pub checkpoint: Option<CheckpointId>,
    /// Its bytes.
    pub bytes: u64,
    /// Why it is deleted, or is not yet.
    pub why: Why,
}

/// The report of a sweep, or of a dry run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Deleted.
    pub deleted: Vec<Swept>,
    /// Given up, so that a later sweep deletes it.
    pub aborted: Vec<Swept>,
    /// To be deleted when it is older.
    pub waiting: Vec<Swept>,
    /// Objects and attempts that could not be deleted or given up, with the reason; a later sweep tries again.
    pub failed: Vec<(String, String)>,
    /// Keys in `ck/` that do not belong to a store: never touched. (Folders of listed checkpoints are not
    /// looked into.)
    pub foreign: Vec<String>,
}

impl SweepReport {
    /// Bytes that were deleted, or would be.
    #[must_use]
    pub fn deleted_bytes(&self) -> u64 {
        self.deleted.iter().map(|s| s.bytes).sum()
    }

    pub(crate) fn note(&mut self, swept: Swept, outcome: Result<()>) {
        match outcome {
            Ok(()) => self.deleted.push(swept),
            Err(e) => self.failed.push((swept.what, e.to_string())),
        }
    }
}

/// Up to this many folders are listed one by one; beyond that, one listing covers all of `ck/`.
const FOLDERS: usize = 64;

/// The objects of one checkpoint or attempt that is not listed.
#[derive(Default)]
struct Found {
    bytes: u64,
    newest: DateTime<Utc>,
    keys: Vec<Path>,
}

/// A checkpoint or attempt that is not listed, with the decision about its data.
#[derive(Clone)]
pub(crate) struct Doomed {
    pub(crate) swept: Swept,
    pub(crate) id: CheckpointId,
    pub(crate) keys: Vec<Path>,
    /// The entry that retired it, if it was retired: such a checkpoint could be listed again, so
    /// the log must forbid that before its data is deleted.
    pub(crate) retired: Option<u64>,
}

/// The facts that decisions are based on.
struct Facts {
    state: Arc<State>,
    now: DateTime<Utc>,
    /// The creation time of each log entry that ended something, by the store's clock.
    entry_times: BTreeMap<u64, DateTime<Utc>>,
    /// The content of those entries.
    ends: BTreeMap<u64, Result<Entry>>,
    found: BTreeMap<CheckpointId, Found>,
    /// Ids without objects: in a local folder, an interrupted sweep or a killed writer leaves an empty folder.
    empty: Vec<CheckpointId>,
    scratch: Vec<ObjectMeta>,
}

impl Store {
    /// Deletes the data of checkpoints that were retired, and of attempts that were given up; gives
    /// up attempts that have been silent for long. Safe while writers and readers are active, and
    /// safe to repeat.
    ///
    /// # Errors
    /// [`Error::Argument`] if the grace is too short; [`Error::ReadOnly`] unless it is a dry run; if
    /// the log or listings cannot be read. What cannot be deleted is in the report.
    pub async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        let inner = &self.inner;
        if options.grace < SHORTEST_GRACE && !options.exclusive {
            return Err(Error::Argument(format!(
                "a grace period of {:?} is shorter than {SHORTEST_GRACE:?} and could break active readers and \
                 writers; set `exclusive` if there are none",
                options.grace
            )));
        }
        if !options.dry_run {
            inner.ensure_writer().await?;
        }
        // A store that no longer exists has nothing to delete, but that must not look like success.
        inner.check_known().await?;
        let mut report = SweepReport::default();
        let facts = inner.facts(options, &mut report).await?;
        let (mut dead, mut orphans) = (Vec::new(), Vec::new());
        for (id, found) in &facts.found {
            match inner.judge(&facts, options, *id, found) {
                Ok(doomed) => match doomed.swept.why {
                    Why::TooYoung => report.waiting.push(doomed.swept),
                    Why::Orphan => orphans.push(doomed.swept),
                    _ => dead.push(doomed),
                },
                Err(e) => {
                    report.failed.push((inner.layout.checkpoint(*id).to_string(), e.to_string()));
                }
            }
        }
        inner.sweep_scratch(&facts, options, &mut report).await;
        inner.sweep_leftovers(&facts, options, &mut report)?;
        if options.dry_run {
            // In the order in which they would be deleted.
            dead.sort_by_key(|d| d.retired.is_some());
            report.deleted.extend(dead.into_iter().map(|d| d.swept));
            report.aborted = orphans;
            return Ok(report);
        }
        // The log entries must be on disk before anything is deleted because of them.
        inner.sync_log()?;
        inner.remove(dead, options.exclusive, &mut report).await?;
        inner.reached("sweep.judged").await;
        inner.abort_orphans(orphans, &mut report).await?;
        if let Some(folder) = &inner.folder {
            facts.empty.iter().for_each(|id| folder.remove_if_empty(&inner.layout.checkpoint(*id)));
        }
        let mut known = inner.known.lock().await;
        if known.viewed < known.state.head() {
            view::write(inner, &known.state).await;
            known.viewed = known.state.head();
        }
        Ok(report)
    }
}

impl Inner {
    async fn facts(&self, options: &SweepOptions, report: &mut SweepReport) -> Result<Facts> {
        // The data is listed before the log is read: an attempt that is published in between is then
        // known, not an orphan. (If it were taken for one, the log would refuse to abort it.)
        let level = self.io.list_level(&self.layout.checkpoints()).await?;
        report.foreign.extend(level.objects.iter().map(|m| m.location.to_string()));
        let mut ids = BTreeSet::new();
        for folder in level.common_prefixes {
            match self.layout.parse_checkpoint(&folder) {
                Some(id) => {
                    ids.insert(id);
                }
                None => report.foreign.push(folder.to_string()),
            }
        }
        let state = {
            let mut known = self.known.lock().await;
            self.refresh(&mut known).await?;
            // What the process does not know, it must not write into the view either.
            self.check_ends_here(&known).await?;
            Arc::clone(&known.state)
        };
        ids.retain(|id| state.get(*id).is_none());
        let all = self.find_objects(&ids, report).await?;
        let (empty, found): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(_, found)| found.keys.is_empty());
        let scratch = self.io.list(&self.layout.scratch(), None).await?;
        let ended: BTreeSet<u64> =
            ids.iter().filter_map(|id| Some(state.dead(*id)?.entry)).collect();
        let read = |n| async move { (n, self.read_entry(n).await.map(|(entry, _)| entry)) };
        let reads = futures::stream::iter(ended.clone()).map(read).buffered(self.concurrency());
        let ends = reads.collect().await;
        let entry_times = match ended.first() {
            None => BTreeMap::new(),
            Some(first) => {
                let offset = (*first > 1).then(|| self.layout.entry(first - 1));
                let entries = self.io.list(&self.layout.log(), offset.as_ref()).await?;
                let time = |meta: ObjectMeta| {
                    let n = self.layout.parse_entry(&meta.location)?;
                    Some((n, meta.last_modified))
                };
                entries.into_iter().filter_map(time).collect()
            }
        };
        let times = entry_times.values().chain(found.values().map(|f: &Found| &f.newest));
        let seen = times.copied().chain(scratch.iter().map(|m| m.last_modified)).max();
        let nothing = ids.is_empty() && scratch.is_empty() && self.folder.is_none();
        let now = match seen {
            _ if nothing => Utc::now(),
            seen => self.clock(options.dry_run, seen.unwrap_or_default()).await?,
        };
        // A writer may be about to use the folder that it has just made.
        let is_over = |id: &CheckpointId| {
            let made = self.folder.as_ref().and_then(|f| f.modified(&self.layout.checkpoint(*id)));
            let old = made.is_some_and(|made| is_older(now, made.into(), options.grace));
            state.dead(*id).is_some() || old
        };
        let empty = empty.into_keys().filter(is_over).collect();
        Ok(Facts { state, now, entry_times, ends, found, empty, scratch })
    }

    /// The objects of each of these ids.
    async fn find_objects(
        &self,
        ids: &BTreeSet<CheckpointId>,
        report: &mut SweepReport,
    ) -> Result<BTreeMap<CheckpointId, Found>> {
        let folders = match ids.len() {
            0 => return Ok(BTreeMap::new()),
            1..=FOLDERS => ids.iter().map(|id| self.layout.checkpoint(*id)).collect(),
            _ => vec![self.layout.checkpoints()],
        };
        let list = |folder: Path| async move { self.io.list(&folder, None).await };
        let lists = futures::stream::iter(folders).map(list).buffered(self.concurrency());
        let metas: Vec<ObjectMeta> = lists.try_concat().await?;
        let mut all: BTreeMap<CheckpointId, Found> =
            ids.iter().map(|id| (*id, Found::default())).collect();
        for meta in metas {
            match self.layout.parse_part(&meta.location) {
                Some((id, Part::Data(_) | Part::Manifest)) => {
                    let Some(found) = all.get_mut(&id) else { continue };
                    found.bytes += meta.size;
                    found.newest = found.newest.max(meta.last_modified);
                    found.keys.push(meta.location);
                }
                None => report.foreign.push(meta.location.to_string()),
            }
        }
        Ok(all)
    }

    /// Decides what to do with the objects of `id`, which is not listed.
    fn judge(
        &self,
        facts: &Facts,
        options: &SweepOptions,
        id: CheckpointId,
        found: &Found,
    ) -> Result<Doomed> {
        let dead = facts.state.dead(id);
        let (why, since) = match dead {
            Some(dead) => {
                self.check_end(facts, id, dead)?;
                // An entry that a stale listing does not show counts as new.
                let ended = facts.entry_times.get(&dead.entry).copied().unwrap_or(facts.now);
                match dead.how {
                    // It was never listed, or its grace is over: once given up, it need not wait.
                    End::Aborted => (Why::Aborted, None),
                    End::Retired => (Why::Retired, Some(ended)),
                    End::Replaced { .. } => (Why::Replaced, Some(ended)),
                }
            }
            None => (Why::Orphan, Some(found.newest)),
        };
        let young = since.is_some_and(|since| !is_older(facts.now, since, options.grace));
        let why = if young { Why::TooYoung } else { why };
        let what = self.layout.checkpoint(id).to_string();
        let swept = Swept { what, checkpoint: Some(id), bytes: found.bytes, why };
        let retired = dead.filter(|d| d.how == End::Retired).map(|d| d.entry);
        Ok(Doomed { swept, id, keys: found.keys.clone(), retired })
    }

    /// Checks that the log entry which ended a checkpoint really says so, since the state may come
    /// from a view.
    fn check_end(&self, facts: &Facts, id: CheckpointId, dead: Dead) -> Result<()> {
        let named = |entry: &Entry| match (&entry.op, dead.how) {
            (Op::Retire { ids, .. }, End::Retired) | (Op::Abort { ids }, End::Aborted) => {
                ids.contains(&id)
            }
            (Op::Publish(p), End::Replaced { .. }) => p.replaces.is_some_and(|r| r.id == id),
            _ => false,
        };
        let not = |what: &dyn std::fmt::Display| {
            let why = format!("it should state why checkpoint {id} is not listed: {what}");
            Err(Error::corrupt(self.layout.entry(dead.entry), why))
        };
        match facts.ends.get(&dead.entry) {
            Some(Ok(entry)) if named(entry) => Ok(()),
            Some(Err(e)) => not(e),
            _ => not(&"it does not mention the checkpoint"),
        }
    }

    /// Deletes what unfinished probes left in the scratch folder, if it is older than the grace.
    async fn sweep_scratch(&self, facts: &Facts, options: &SweepOptions, report: &mut SweepReport) {
        for meta in &facts.scratch {
            if !is_older(facts.now, meta.last_modified, options.grace) {
                continue;
            }
            let what = meta.location.to_string();
            let swept = Swept { what, checkpoint: None, bytes: meta.size, why: Why::Leftover };
            let removed =
                if options.dry_run { Ok(()) } else { self.io.delete(&meta.location).await };
            report.note(swept, removed);
        }
    }

    /// Deletes files that killed writers left in a local folder, where listings do not show them.
    fn sweep_leftovers(
        &self,
        facts: &Facts,
        options: &SweepOptions,
        report: &mut SweepReport,
    ) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        for leftover in folder.leftovers(&self.layout)? {
            if !is_older(facts.now, leftover.modified.into(), options.grace) {
                continue;
            }
            let what = leftover.path.display().to_string();
            let swept = Swept { what, checkpoint: None, bytes: leftover.len, why: Why::Leftover };
            let removed = if options.dry_run { Ok(()) } else { folder.remove(&leftover) };
            report.note(swept, removed);
        }
        Ok(())
    }
}

/// Whether `then` is at least `grace` before `now`. A grace of zero is over whatever the clocks
/// say: they may have been set back since `then`.
fn is_older(now: DateTime<Utc>, then: DateTime<Utc>, grace: Duration) -> bool {
    if grace.is_zero() {
        return true;
    }
    let age = now.signed_duration_since(then);
    age.to_std().is_ok_and(|age| age >= grace)
}
