//! Deletion by a sweep: the log first gives up checkpoints that could be listed again, manifests go
//! before data, and a full disk does not keep a sweep from making room.

use std::collections::BTreeSet;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use object_store::path::Path;

use crate::cause::Cause;
use crate::entry::MAX_IDS;
use crate::entry::Op;
use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::Part;
use crate::local::Folder;
use crate::state::{End, State};
use crate::sweep::{Doomed, SweepReport, Swept};

impl Inner {
    /// Deletes the doomed objects.
    pub(crate) async fn remove(
        &self,
        dead: Vec<Doomed>,
        exclusive: bool,
        report: &mut SweepReport,
    ) -> Result<()> {
        let (mut retired, ended): (Vec<_>, Vec<_>) =
            dead.into_iter().partition(|d| d.retired.is_some());
        // Delete what needs no log entry first: on a full disk, that makes room for one.
        self.delete(ended, report).await;
        let mut batch = MAX_IDS;
        while !retired.is_empty() {
            let mut some: Vec<_> = retired.drain(..batch.min(retired.len())).collect();
            match self.give_up(&some).await {
                Ok(given_up) => {
                    // What was listed again in the meantime stays.
                    some.retain(|d| given_up.contains(&d.id));
                    self.delete(some, report).await;
                    batch = (batch * 8).min(MAX_IDS);
                }
                Err(e) if is_full(&e) && batch > 1 => {
                    tracing::warn!(error = %e, "no room for a log entry: making room");
                    // The view is only a hint, and the largest one.
                    self.io.delete(&self.layout.view()).await?;
                    self.known.lock().await.viewed = 0;
                    batch = 1;
                    retired.splice(0..0, some);
                }
                // With `exclusive`, nobody else could list them again.
                Err(e) if is_full(&e) && exclusive => self.delete(some, report).await,
                Err(e) if is_full(&e) => {
                    let why =
                        format!("{e}: no room even for a log entry; `exclusive` does not need one");
                    let all = some.into_iter().chain(retired.drain(..));
                    report.failed.extend(all.map(|d| (d.swept.what, why.clone())));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Records in the log that these retired checkpoints can never be listed again. Returns those
    /// for which the log now says so.
    async fn give_up(&self, doomed: &[Doomed]) -> Result<BTreeSet<CheckpointId>> {
        let build = |state: &State| {
            // A checkpoint that was listed again and retired again has a new grace.
            let still = |d: &&Doomed| {
                let dead = state.dead(d.id).filter(|dead| dead.how == End::Retired);
                dead.is_some_and(|dead| Some(dead.entry) == d.retired)
            };
            let ids: Vec<_> = doomed.iter().filter(still).map(|d| d.id).collect();
            Ok((!ids.is_empty()).then_some(Op::Abort { ids }))
        };
        self.append(build).await?;
        self.sync_log()?;
        self.reached("sweep.given_up").await;
        let known = self.known.lock().await;
        let is_given_up =
            |id: &CheckpointId| known.state.dead(*id).is_some_and(|d| d.how == End::Aborted);
        Ok(doomed.iter().map(|d| d.id).filter(is_given_up).collect())
    }

    /// Deletes objects, manifests first: if the log loses the entry that ended a checkpoint, the missing
    /// manifest is what shows that a sweep, even one that was interrupted, has begun to delete it.
    async fn delete(&self, doomed: Vec<Doomed>, report: &mut SweepReport) {
        if doomed.is_empty() {
            return;
        }
        let manifests: BTreeSet<_> =
            doomed.iter().map(|d| self.layout.part(d.id, Part::Manifest)).collect();
        let keys = doomed.iter().flat_map(|d| d.keys.iter().cloned());
        let (first, data): (Vec<_>, Vec<_>) = keys.partition(|key| manifests.contains(key));
        let mut failed = self.io.delete_all(first, self.concurrency()).await;
        self.reached("delete.begun").await;
        let id_of = |key: &Path| self.layout.parse_part(key).map(|(id, _)| id);
        let stay: BTreeSet<_> = failed.iter().filter_map(|(key, _)| id_of(key)).collect();
        let data = data.into_iter().filter(|key| id_of(key).is_none_or(|id| !stay.contains(&id)));
        failed.extend(self.io.delete_all(data.collect(), self.concurrency()).await);
        for d in doomed {
            let of = |(key, _): &&(Path, Error)| id_of(key) == Some(d.id);
            match failed.iter().find(of) {
                Some((_, e)) => report.failed.push((d.swept.what, e.to_string())),
                None => {
                    if let Some(local) = &self.folder {
                        local.remove_if_empty(&self.layout.checkpoint(d.id));
                    }
                    report.deleted.push(d.swept);
                }
            }
        }
    }

    /// Gives up those attempts that the log still does not know when the entry is created: one that
    /// was published in the meantime stays.
    pub(crate) async fn abort_orphans(
        &self,
        orphans: Vec<Swept>,
        report: &mut SweepReport,
    ) -> Result<()> {
        for batch in orphans.chunks(MAX_IDS) {
            let build = |state: &State| {
                let unknown =
                    |id: &CheckpointId| state.get(*id).is_none() && state.dead(*id).is_none();
                let ids: Vec<_> =
                    batch.iter().filter_map(|s| s.checkpoint).filter(unknown).collect();
                Ok((!ids.is_empty()).then_some(Op::Abort { ids }))
            };
            match self.append(build).await {
                Ok(Some(entry)) => {
                    let Op::Abort { ids } = entry.op else { continue };
                    let done = |s: &&Swept| s.checkpoint.is_some_and(|id| ids.contains(&id));
                    report.aborted.extend(batch.iter().filter(done).cloned());
                }
                Ok(None) => {}
                Err(e) if is_full(&e) => {
                    let why = e.to_string();
                    report.failed.extend(batch.iter().map(|s| (s.what.clone(), why.clone())));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The time now, by the clock that dates the objects. `seen` is the newest date of an object. A date
    /// in the future, of a time when a clock was ahead, must not make anything else look old.
    pub(crate) async fn clock(&self, dry_run: bool, seen: DateTime<Utc>) -> Result<DateTime<Utc>> {
        // For a disk of this machine, that is this machine's clock.
        if dry_run || self.folder.as_ref().is_some_and(Folder::is_local) {
            return Ok(Utc::now());
        }
        match self.store_time().await {
            Err(e) if is_full(&e) => {
                tracing::warn!(error = %e, "could not get the time: using the time of the newest object");
                // At most this machine's time: nothing is deleted that is too young by its clock.
                Ok(seen.min(Utc::now()))
            }
            other => other,
        }
    }

    /// The object store's clock. It dates what is stored, so only this clock can tell how old an
    /// object is.
    async fn store_time(&self) -> Result<DateTime<Utc>> {
        let name = format!("clock-{}", self.options.ids.next().as_hyphenated());
        let key = self.layout.scratch().join(name);
        self.io.put(&key, Bytes::from_static(b"now")).await?;
        // Taken from a listing, like the times that it is compared with: a look-up may round to
        // seconds.
        let listed = self.io.list(&self.layout.scratch(), None).await?;
        let now = match listed.into_iter().find(|meta| meta.location == key) {
            Some(meta) => meta.last_modified,
            None => self.io.head(&key).await?.last_modified,
        };
        self.io.delete(&key).await?;
        Ok(now)
    }
}

/// Whether there is no room left, or none for this user.
fn is_full(error: &Error) -> bool {
    error.cause() == Some(Cause::DiskFull)
}
