//! Deleting what nothing needs any more.
//!
//! The log decides what may go, the object store's own clock decides when. The log is replayed from
//! its first entry: a hint never decides a deletion.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use object_store::ObjectMeta;

use crate::entry::Op;
use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::layout::Part;
use crate::state::{End, State};
use crate::store::{Inner, MAX_IDS, Store};
use crate::view;

/// The shortest grace without `exclusive`.
pub const SHORTEST_GRACE: Duration = Duration::from_secs(24 * 3600);

/// What a sweep may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepOptions {
    /// How long data stays after its checkpoint was retired, so that whoever began to read it can
    /// finish; and how long an attempt must have been silent before it is given up.
    pub grace: Duration,
    /// The caller knows that nothing else uses the store: any grace is allowed.
    pub exclusive: bool,
    /// Only say what would be done.
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
    /// Another checkpoint took its place longer ago than the grace.
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

/// One thing that a sweep decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swept {
    /// A checkpoint's folder, or an object or file.
    pub what: String,
    /// The checkpoint or attempt, if it is one.
    pub checkpoint: Option<CheckpointId>,
    /// Its bytes.
    pub bytes: u64,
    /// Why.
    pub why: Why,
}

/// What a sweep did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Deleted.
    pub deleted: Vec<Swept>,
    /// Given up, so that a later sweep deletes it.
    pub aborted: Vec<Swept>,
    /// To be deleted when it is older.
    pub waiting: Vec<Swept>,
    /// What could not be deleted, and why; a later sweep tries again.
    pub failed: Vec<(String, String)>,
    /// Keys below `ck/` that are none of ours: never touched.
    pub foreign: Vec<String>,
}

impl SweepReport {
    /// Bytes that were deleted, or would be.
    #[must_use]
    pub fn deleted_bytes(&self) -> u64 {
        self.deleted.iter().map(|s| s.bytes).sum()
    }

    fn note(&mut self, swept: Swept, outcome: Result<()>) {
        match outcome {
            Ok(()) => self.deleted.push(swept),
            Err(e) => self.failed.push((swept.what, e.to_string())),
        }
    }
}

/// The objects of one checkpoint or attempt.
#[derive(Default)]
struct Found {
    bytes: u64,
    newest: DateTime<Utc>,
}

/// What the decisions rest on.
struct Facts {
    state: State,
    now: DateTime<Utc>,
    /// When each log entry was created, by the store's clock.
    entry_times: BTreeMap<u64, DateTime<Utc>>,
    found: BTreeMap<CheckpointId, Found>,
}

impl Store {
    /// Deletes the data of checkpoints that were retired, and of attempts that were given up; gives
    /// up attempts that have been silent for long. Safe beside writers and readers, and to repeat.
    ///
    /// # Errors
    /// [`Error::Argument`] if the grace is too short; if the log or listings cannot be read. What
    /// cannot be deleted is in the report.
    pub async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        let inner = &self.inner;
        if options.grace < SHORTEST_GRACE && !options.exclusive {
            return Err(Error::Argument(format!(
                "a grace of {:?} is shorter than {SHORTEST_GRACE:?}: readers and writers that are at \
                 work could be hurt; `exclusive` says that there are none",
                options.grace
            )));
        }
        if !options.dry_run {
            inner.ensure_writer().await?;
        }
        let mut report = SweepReport::default();
        let facts = inner.facts(&mut report).await?;
        let (mut dead, mut orphans) = (Vec::new(), Vec::new());
        for (id, found) in &facts.found {
            let Some(swept) = inner.judge(&facts, options, *id, found) else { continue };
            match swept.why {
                Why::TooYoung => report.waiting.push(swept),
                Why::Orphan => orphans.push(swept),
                _ => dead.push(swept),
            }
        }
        if options.dry_run {
            report.deleted = dead;
            report.aborted = orphans;
        } else {
            // What the log says must be on disk before anything is deleted for it.
            inner.sync_log()?;
            for swept in dead {
                inner.delete(swept, &mut report).await;
            }
            inner.reached("sweep.judged").await;
            inner.abort_orphans(orphans, &mut report).await?;
        }
        inner.sweep_scratch(&facts, options, &mut report).await?;
        inner.sweep_leftovers(&facts, options, &mut report)?;
        if !options.dry_run {
            view::write(inner, &facts.state.into()).await;
        }
        Ok(report)
    }
}

impl Inner {
    async fn facts(&self, report: &mut SweepReport) -> Result<Facts> {
        // The data is listed before the log is read: an attempt that is published in between is then
        // known, not an orphan. (If it were taken for one, the log would refuse to abort it.)
        let mut found: BTreeMap<CheckpointId, Found> = BTreeMap::new();
        for meta in self.io.list(&self.layout.checkpoints(), None).await? {
            match self.layout.parse_part(&meta.location) {
                Some((id, Part::Data(_) | Part::Manifest)) => {
                    let found = found.entry(id).or_default();
                    found.bytes += meta.size;
                    found.newest = found.newest.max(meta.last_modified);
                }
                None => report.foreign.push(meta.location.to_string()),
            }
        }
        let now = self.store_time().await?;
        let state = self.replay().await?;
        let entries = self.io.list(&self.layout.log(), None).await?;
        let time = |meta: ObjectMeta| {
            self.layout.parse_entry(&meta.location).map(|n| (n, meta.last_modified))
        };
        let entry_times = entries.into_iter().filter_map(time).collect();
        Ok(Facts { state, now, entry_times, found })
    }

    /// The object store's clock: it stamps what it stores, so only it can tell how old that is.
    async fn store_time(&self) -> Result<DateTime<Utc>> {
        let name = format!("clock-{}", self.options.ids.next().as_hyphenated());
        let key = self.layout.scratch().join(name);
        self.io.put(&key, Bytes::from_static(b"now")).await?;
        // From a listing, as the times that it is compared with: a look-up may round to seconds.
        let listed = self.io.list(&self.layout.scratch(), None).await?;
        let now = match listed.into_iter().find(|meta| meta.location == key) {
            Some(meta) => meta.last_modified,
            None => self.io.head(&key).await?.last_modified,
        };
        self.io.delete(&key).await?;
        Ok(now)
    }

    /// What to do with the objects of `id`; nothing if it is listed.
    fn judge(
        &self,
        facts: &Facts,
        options: &SweepOptions,
        id: CheckpointId,
        found: &Found,
    ) -> Option<Swept> {
        if facts.state.get(id).is_some() {
            return None;
        }
        let (why, since) = match facts.state.dead(id) {
            // Nobody reads what was never listed: it need not wait once the log has given it up.
            Some(dead) if dead.how == End::Aborted => (Why::Aborted, None),
            Some(dead) => {
                let retired = matches!(dead.how, End::Retired);
                let why = if retired { Why::Retired } else { Why::Replaced };
                // An entry that a stale listing does not show counts as new.
                let ended = facts.entry_times.get(&dead.entry).copied().unwrap_or(facts.now);
                (why, Some(ended))
            }
            None => (Why::Orphan, Some(found.newest)),
        };
        let young = since.is_some_and(|since| !is_older(facts.now, since, options.grace));
        let why = if young { Why::TooYoung } else { why };
        let what = self.layout.checkpoint(id).to_string();
        Some(Swept { what, checkpoint: Some(id), bytes: found.bytes, why })
    }

    async fn delete(&self, swept: Swept, report: &mut SweepReport) {
        let Some(id) = swept.checkpoint else { return };
        report.note(swept, self.delete_checkpoint(id).await.map(drop));
    }

    /// Gives up attempts, as the log stands when the entry is created: what was published in the
    /// meantime stays.
    async fn abort_orphans(&self, orphans: Vec<Swept>, report: &mut SweepReport) -> Result<()> {
        for batch in orphans.chunks(MAX_IDS) {
            let build = |state: &State| {
                let unknown =
                    |id: &CheckpointId| state.get(*id).is_none() && state.dead(*id).is_none();
                let ids: Vec<_> =
                    batch.iter().filter_map(|s| s.checkpoint).filter(unknown).collect();
                Ok((!ids.is_empty()).then_some(Op::Abort { ids }))
            };
            let Some(entry) = self.append(build).await? else { continue };
            if let Op::Abort { ids } = entry.op {
                let done = |s: &&Swept| s.checkpoint.is_some_and(|id| ids.contains(&id));
                report.aborted.extend(batch.iter().filter(done).cloned());
            }
        }
        Ok(())
    }

    /// Objects of probes that did not come to their end.
    async fn sweep_scratch(
        &self,
        facts: &Facts,
        options: &SweepOptions,
        report: &mut SweepReport,
    ) -> Result<()> {
        for meta in self.io.list(&self.layout.scratch(), None).await? {
            if !is_older(facts.now, meta.last_modified, options.grace) {
                continue;
            }
            let what = meta.location.to_string();
            let swept = Swept { what, checkpoint: None, bytes: meta.size, why: Why::Leftover };
            let removed =
                if options.dry_run { Ok(()) } else { self.io.delete(&meta.location).await };
            report.note(swept, removed);
        }
        Ok(())
    }

    /// Files of killed writers in a local folder, which object stores do not list.
    fn sweep_leftovers(
        &self,
        facts: &Facts,
        options: &SweepOptions,
        report: &mut SweepReport,
    ) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        for leftover in folder.leftovers()? {
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

/// Whether `then` is at least `grace` before `now`.
fn is_older(now: DateTime<Utc>, then: DateTime<Utc>, grace: Duration) -> bool {
    let age = now.signed_duration_since(then);
    age.to_std().is_ok_and(|age| age >= grace)
}
