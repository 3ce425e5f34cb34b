//! The two threads that move checkpoints forward: one compresses and verifies, one uploads.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use s4weights::store::{
    Checkpoint, CheckpointId, CheckpointStore, ImportOptions, ListingFn, ReplicateOptions,
    StoreError, is_damage, is_unreadable,
};
use s4weights::{Cause, Error, Interrupt, Progress, ProgressFn, ReadOptions, Reader, Source};

use crate::clock::now_ms;
use crate::health::{Health, Thread};
use crate::metrics::Metrics;
use crate::queue::{SharedQueue, Work};
use crate::record::{COPY_GONE, Record, SUBMISSION, State};
use crate::staging::Staging;
use crate::stores::{Stores, Tidy, find};

/// Called with the name of each place where a test may stop the process.
pub type CrashHook = Arc<dyn Fn(&'static str) + Send + Sync>;

/// State shared by the threads.
#[derive(Clone)]
pub(crate) struct Worker {
    /// The records.
    pub queue: SharedQueue,
    /// The local drive.
    pub staging: Staging,
    /// The stores.
    pub stores: Arc<Stores>,
    /// Signs of life.
    pub health: Arc<Health>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Interrupts whatever waits.
    pub interrupt: Interrupt,
    /// Called at each named place.
    pub reached: CrashHook,
    /// Threads that decode.
    pub threads: Option<usize>,
}

impl Worker {
    /// Compresses until the service ends.
    pub(crate) fn compress_all(&self) {
        self.interrupt.watch(|| {
            if let Err(e) = self.adopt() {
                tracing::warn!(error = %e, "cannot search the local store");
            }
            self.tidy(Tidy::Start);
            loop {
                self.health.beat(Thread::Compress);
                let record = match self.queue.next_staged() {
                    Work::Record(record) => record,
                    Work::Idle => {
                        self.staging.tidy(Instant::now());
                        continue;
                    }
                    Work::Stop => return,
                };
                let done = self.compress(&record);
                self.health.compressed(record.id, done.as_ref().err().map(Error::to_string));
                if let Err(e) = done {
                    self.failed(&record, State::Staged, &e);
                    if e.cause() == Some(Cause::DiskFull) {
                        self.queue.with_reserve(|| self.tidy(Tidy::Full));
                    }
                }
            }
        });
    }

    /// Uploads until the service ends.
    pub(crate) fn upload_all(&self) {
        self.interrupt.watch(|| {
            self.look_at_store();
            loop {
                self.health.beat(Thread::Upload);
                let record = match self.queue.next_verified() {
                    Work::Record(record) => record,
                    Work::Idle => {
                        self.look_at_store();
                        continue;
                    }
                    Work::Stop => return,
                };
                match self.upload(&record) {
                    Ok(()) => self.health.store_answered(),
                    // Another checkpoint goes first.
                    Err(Error::Cancelled) => self.queue.show(record.id, State::Verified),
                    Err(e) if is_damage(&e) && self.is_damaged_here(&record) => {
                        self.health.store_answered();
                        self.metrics.verify_failures.inc();
                        self.give_up(&record, &format!("its local copy is damaged: {e}"));
                    }
                    Err(e) => {
                        self.health.store_failed(&e.to_string());
                        self.stores.reopen();
                        self.failed(&record, State::Verified, &e);
                    }
                }
            }
        });
    }

    /// Asks the store for its state, unless it answered lately.
    fn look_at_store(&self) {
        if self.health.store_is_known() {
            return;
        }
        match self.stores.remote().and_then(|store| store.state().map(drop)) {
            Ok(()) => self.health.store_answered(),
            Err(Error::Cancelled) => {}
            Err(e) => {
                self.metrics.error(kind(&e));
                self.health.store_failed(&e.to_string());
                self.stores.reopen();
            }
        }
    }

    /// Handles the failure of a record: a fault of the staged file is final, everything else is tried again.
    fn failed(&self, record: &Record, before: State, e: &Error) {
        if matches!(e, Error::Cancelled) {
            return;
        }
        let why = e.to_string();
        let (id, step) = (record.id, record.step);
        self.metrics.error(kind(e));
        if before == State::Staged && self.is_of_staged_file(record, e) {
            tracing::error!(%id, step, error = why, "this checkpoint cannot be stored");
            self.metrics.verify_failures.inc();
            let done = self.queue.update(id, |r| {
                r.state = State::Failed;
                r.error = Some(why.clone());
            });
            if done.is_ok() {
                return;
            }
        }
        tracing::warn!(%id, step, error = why, "will be retried");
        self.queue.pause(id, before, &why);
    }

    /// Whether the staged file itself is at fault: damaged, of another version, or a delta whose
    /// parent is not here.
    fn is_of_staged_file(&self, record: &Record, e: &Error) -> bool {
        let staged = self.staging.staged(record.id);
        match e {
            Error::Format { target, .. } | Error::Parent { target, .. } => {
                *target == staged.to_string_lossy()
            }
            _ => false,
        }
    }

    /// Whether the checkpoint in the local store is damaged.
    fn is_damaged_here(&self, record: &Record) -> bool {
        let Some(own) = record.local else { return false };
        // Reading a large checkpoint takes longer than a thread may be silent.
        let health = Arc::clone(&self.health);
        let beats: ProgressFn = Arc::new(move |_| {
            health.beat(Thread::Upload);
            true
        });
        let read = self.stores.local().and_then(|local| local.load_id(own, Some(beats)));
        let read = read.and_then(|loaded| loaded.reader().verify());
        // A volume that is attached over a network may be there again later.
        read.is_err_and(|e| is_damage(&e) && !is_unreadable(&e))
    }

    /// Adopts checkpoints of the local store that have no record: the journal was lost, or a record
    /// was damaged. Also resumes those that were given up because their local copy was missing, if
    /// it is there again.
    fn adopt(&self) -> s4weights::Result<()> {
        let local = self.stores.local()?;
        let state = local.state()?;
        let records = self.queue.list();
        let own = |c: &Checkpoint| uuid::Uuid::parse_str(c.about.tags.get(SUBMISSION)?).ok();
        let listed: Vec<_> = state.list().into_iter().filter_map(|c| Some((own(c)?, c))).collect();
        let known = |id| records.iter().find(|r| r.id == id);
        let mut last = 0;
        for (i, &(id, checkpoint)) in listed.iter().enumerate() {
            let (step, local) = (checkpoint.step(), Some(checkpoint.id()));
            let Some(r) = known(id) else {
                tracing::warn!(%id, step, "adopting a checkpoint without a journal record");
                let later =
                    listed[i..].iter().filter_map(|(id, _)| known(*id)).map(|r| r.seq).min();
                let done = self.queue.adopt(Record::of_local(id, checkpoint), last, later);
                let target = format!("submission {id}");
                let io = |source| Error::Io { target, action: "write the journal of", source };
                last = done.map_err(io)?;
                continue;
            };
            last = last.max(r.seq);
            if r.is_lost() && r.local == local {
                tracing::warn!(%id, step, "its local copy is back");
                self.update(id, |r| (r.state, r.error) = (State::Verified, None))?;
            }
        }
        Ok(())
    }

    /// Imports a staged file into the local store.
    fn compress(&self, record: &Record) -> s4weights::Result<()> {
        let id = record.id;
        let local = self.stores.local()?;
        let found = find(&local, id)?;
        let checkpoint = match found {
            // A process was killed after it imported the file and before it recorded that.
            Some(checkpoint) => checkpoint,
            None => {
                let started = Instant::now();
                let path = self.staging.staged(id);
                let options = ReadOptions { threads: self.threads, ..ReadOptions::default() };
                let reader = Reader::open(Source::from(path.as_path()), options)?;
                let (queue, raw) = (Arc::clone(&self.queue), raw_bytes(&reader));
                let health = Arc::clone(&self.health);
                let progress: ProgressFn = Arc::new(move |p: Progress| {
                    health.beat(Thread::Compress);
                    if p.done >= raw {
                        queue.show(id, State::Compressed);
                    }
                    true
                });
                let mut tags = record.tags.clone();
                tags.insert(SUBMISSION.into(), id.to_string());
                let options = ImportOptions {
                    metrics: record.metrics.clone(),
                    tags,
                    before: self.oldest_after(record, &local, |r| r.local)?,
                    progress: Some(progress),
                    ..ImportOptions::default()
                };
                let done = local.import(&reader, record.step, &options)?.checkpoint;
                // Counted before the record changes, so that a client that sees the new state also sees the
                // metrics.
                self.metrics.compressed(done.about.raw_len, done.about.data_len, started.elapsed());
                done
            }
        };
        (self.reached)("compressed");
        let about = &checkpoint.about;
        self.update(id, |r| {
            r.state = State::Verified;
            r.local = Some(checkpoint.id());
            r.local_parent = about.parent.map(|p| p.id);
            r.raw_bytes = about.raw_len;
            r.stored_bytes = about.data_len.saturating_add(about.manifest_len);
            r.error = None;
        })?;
        (self.reached)("verified");
        self.staging.remove(id).map_err(|e| at(record, "remove its staged file", e))?;
        self.tidy(Tidy::Usual);
        Ok(())
    }

    /// Deletes data that is no longer needed from the local store, the staging folder and the queue. Nothing else
    /// writes to the local store meanwhile.
    fn tidy(&self, how: Tidy) {
        let records = self.queue.list();
        if let Err(e) = self.stores.tidy_local(&records, how) {
            tracing::warn!(error = %e, "cannot clean up the local store");
        }
        self.staging.tidy(Instant::now());
        let listed: Vec<CheckpointId> = match self.stores.local().and_then(|l| l.list()) {
            Ok(list) => list.iter().map(|c| c.id()).collect(),
            Err(_) => return,
        };
        self.queue.forget(|r| {
            r.local.is_some_and(|id| listed.contains(&id))
                || r.origin.as_ref().is_some_and(|o| o.path.exists())
        });
    }

    /// Copies a checkpoint of the local store to the store.
    fn upload(&self, record: &Record) -> s4weights::Result<()> {
        let id = record.id;
        self.queue.show(id, State::Uploading);
        let remote = self.stores.remote()?;
        // A killed process may have listed it.
        for attempt in &record.attempts {
            if remote.settle(*attempt)? {
                return self.durable(record, *attempt);
            }
        }
        if !record.attempts.is_empty() {
            self.update(id, |r| r.attempts.clear())?;
        }
        // If the journal was lost, so were the attempts: look for the submission's tag.
        if let Some(known) = find(&remote, id)? {
            return self.durable(record, known.id());
        }
        let local = self.stores.local()?;
        let known = local.state()?;
        let own = record.local.filter(|own| known.get(*own).is_some());
        let Some(own) = own else {
            self.metrics.error("lost");
            self.give_up(record, COPY_GONE);
            return Ok(());
        };
        let started = Instant::now();
        let listing: ListingFn = {
            let worker = self.clone();
            Arc::new(move |attempt| {
                (worker.reached)("uploaded");
                worker.update(id, |r| r.attempts.push(attempt))?;
                (worker.reached)("attempt");
                Ok(())
            })
        };
        let progress = Some(self.upload_progress(record));
        let before = self.oldest_after(record, &remote, |r| r.remote)?;
        let parent = record.local_parent.and_then(|parent| self.copy_of(parent));
        let copy = match (record.local_parent, parent) {
            (Some(_), None) => None,
            (_, parent) => {
                let (progress, listing) = (progress.clone(), Some(listing.clone()));
                let options = ReplicateOptions { parent, before, progress, listing };
                match remote.replicate(&local, own, &options) {
                    Err(e) if is_parent_failure(&e) => None,
                    other => Some(other?.id()),
                }
            }
        };
        let copy = match copy {
            Some(copy) => copy,
            // Its parent cannot be used: this checkpoint is stored as a base.
            None => {
                let loaded = local.load_id(own, None)?;
                let about = &loaded.checkpoint().about;
                let (metrics, tags) = (about.metrics.clone(), about.tags.clone());
                let listing = Some(listing);
                let options =
                    ImportOptions { metrics, tags, base: true, before, progress, listing };
                remote.import(loaded.reader(), record.step, &options)?.checkpoint.id()
            }
        };
        (self.reached)("listed");
        self.metrics.uploaded(started.elapsed());
        self.durable(record, copy)
    }

    /// Marks a checkpoint as failed: it will not become durable.
    fn give_up(&self, record: &Record, why: &str) {
        tracing::error!(id = %record.id, step = record.step, why);
        let fail = |r: &mut Record| (r.state, r.error) = (State::Failed, Some(why.to_owned()));
        if let Err(e) = self.update(record.id, fail) {
            tracing::warn!(error = %e, "cannot record the failure: retrying");
            self.queue.pause(record.id, State::Verified, why);
        }
    }

    fn upload_progress(&self, record: &Record) -> ProgressFn {
        let (queue, health, seq) = (Arc::clone(&self.queue), Arc::clone(&self.health), record.seq);
        Arc::new(move |_| {
            health.beat(Thread::Upload);
            !queue.should_yield(seq)
        })
    }

    /// The oldest of the checkpoints that were submitted later but are listed already, because the newest went
    /// first or this one had to be tried again. This one is listed before it, because a trainer that resumes wants
    /// the checkpoint that it submitted last.
    fn oldest_after(
        &self,
        record: &Record,
        store: &CheckpointStore,
        listed: impl Fn(&Record) -> Option<CheckpointId>,
    ) -> s4weights::Result<Option<CheckpointId>> {
        let records = self.queue.list();
        let later: Vec<_> =
            records.iter().filter(|r| r.seq > record.seq).filter_map(listed).collect();
        if later.is_empty() {
            return Ok(None);
        }
        let state = store.state()?;
        let oldest =
            later.iter().filter_map(|id| state.get(*id)).min_by_key(|c| (c.order, c.entry));
        Ok(oldest.map(|c| c.id()))
    }

    /// The store's copy of a checkpoint of the local store.
    fn copy_of(&self, local: CheckpointId) -> Option<CheckpointId> {
        let records = self.queue.list();
        records.iter().find(|r| r.local == Some(local)).and_then(|r| r.remote)
    }

    fn durable(&self, record: &Record, copy: CheckpointId) -> s4weights::Result<()> {
        let now = now_ms();
        let age = self.queue.age(record.seq, Instant::now());
        let after = age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        let new = self.update(record.id, |r| {
            r.state = State::Durable;
            r.remote = Some(copy);
            r.durable_ms = Some(now);
            r.durable_after_ms = after;
            r.error = None;
        })?;
        (self.reached)("durable");
        tracing::info!(id = %new.id, step = new.step, checkpoint = %copy, "durable");
        if let Err(e) = self.stores.retain() {
            tracing::warn!(error = %e, "retention failed; will be retried after the next checkpoint");
        }
        Ok(())
    }

    fn update(
        &self,
        id: uuid::Uuid,
        change: impl FnOnce(&mut Record),
    ) -> s4weights::Result<Record> {
        let target = format!("submission {id}");
        let done = self.queue.update(id, change);
        done.map_err(|source| Error::Io { target, action: "write the journal of", source })
    }
}

fn raw_bytes(reader: &Reader) -> u64 {
    reader.tensors().map(|t| t.bytes).fold(0, u64::saturating_add)
}

fn at(record: &Record, action: &'static str, source: io::Error) -> Error {
    Error::Io { target: format!("submission {}", record.id), action, source }
}

/// Whether an upload failed because of the checkpoint's parent.
fn is_parent_failure(e: &Error) -> bool {
    match e {
        Error::Argument(_) => true,
        Error::Store { source, .. } => matches!(
            **source,
            StoreError::NoCheckpoint { .. } | StoreError::Conflict(_) | StoreError::Missing { .. }
        ),
        _ => false,
    }
}

/// A word for the kind of a failure: the label of a metric.
pub(crate) fn kind(e: &Error) -> &'static str {
    match e {
        e if is_damage(e) => "damage",
        e => match e.cause() {
            Some(Cause::Permission | Cause::NoCredentials) => "permission",
            Some(Cause::DiskFull) => "full",
            Some(Cause::NoSuchBucket | Cause::NotFound) => "missing",
            Some(Cause::Replaced) | None => "other",
            Some(_) => "network",
        },
    }
}

/// Whether all numbers are finite: others cannot be stored.
pub(crate) fn finite(metrics: &BTreeMap<String, f64>) -> bool {
    metrics.values().all(|value| value.is_finite())
}
