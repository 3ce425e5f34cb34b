//! The two stores: the local one, which caches the newest checkpoints and holds those that are not
//! uploaded yet, and the one in which checkpoints become durable.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use s4weights::store::{
    Checkpoint, CheckpointId, CheckpointStore, Retention, Retry, StoreError, StoreOptions,
    SweepOptions,
};
use uuid::Uuid;

use crate::config::Config;
use crate::journal::KnownStore;
use crate::record::{Record, SUBMISSION, State};
use crate::staging::Staging;

/// How long a request to the store is retried before the record shows the error. After that the
/// upload is tried again, forever.
const PATIENCE: Duration = Duration::from_secs(20);

/// Opens the stores when they are first needed, and again after a failure.
pub(crate) struct Stores {
    config: Config,
    staging: Staging,
    local: Mutex<Option<Arc<CheckpointStore>>>,
    remote: Mutex<Option<Arc<CheckpointStore>>>,
    /// The id of the store that checkpoints became durable in, once it was opened, and where it is recorded.
    known: Mutex<Option<Uuid>>,
    record: KnownStore,
}

impl Stores {
    /// Opens nothing yet.
    ///
    /// # Errors
    /// Any error of reading the id of the store that was used before.
    pub(crate) fn new(
        config: Config,
        staging: Staging,
        record: KnownStore,
    ) -> std::io::Result<Self> {
        let known = Mutex::new(record.get()?);
        let (local, remote) = Default::default();
        Ok(Self { config, staging, local, remote, known, record })
    }

    /// The local store.
    ///
    /// # Errors
    /// Errors of opening or creating it.
    pub(crate) fn local(&self) -> s4weights::Result<Arc<CheckpointStore>> {
        let path = self.staging.local();
        open(&self.local, || {
            let storage = Default::default();
            CheckpointStore::open_or_create(&path.to_string_lossy(), &storage, self.options(None))
        })
    }

    /// The store that checkpoints become durable in. It is created only if this runner has never used one. If a
    /// known store is missing, because a file system is not mounted or a bucket was emptied, a new one would take
    /// checkpoints that would not be found later.
    ///
    /// # Errors
    /// Errors of opening or creating it; [`StoreError::Gone`] if there is none, or another one, where a store is known.
    pub(crate) fn remote(&self) -> s4weights::Result<Arc<CheckpointStore>> {
        open(&self.remote, || {
            let (url, storage) = (&self.config.store, &self.config.storage_options);
            let options = self.options(self.config.bandwidth);
            let mut known = self.known.lock().unwrap_or_else(|e| e.into_inner());
            let Some(id) = *known else {
                let store = CheckpointStore::open_or_create(url, storage, options)?;
                let id = store.repo().id;
                *known = Some(id);
                if let Err(e) = self.record.set(id) {
                    let path = self.record.path().display();
                    tracing::warn!(error = %e, "{path}: cannot record the store's id");
                }
                return Ok(store);
            };
            let found = CheckpointStore::open(url, storage, options);
            let is_none = |e: &s4weights::Error| {
                matches!(e, s4weights::Error::Store { source, .. }
                    if matches!(**source, StoreError::NoStore { .. }))
            };
            match found {
                Ok(store) if store.repo().id == id => Ok(store),
                Ok(store) => {
                    Err(self.gone(format!("it is store {} now, not {id}", store.repo().id), true))
                }
                Err(e) if is_none(&e) => Err(self.gone(format!("store {id} is not there"), false)),
                Err(e) => Err(e),
            }
        })
    }

    fn gone(&self, what: String, replaced: bool) -> s4weights::Error {
        let place = self.config.store_name();
        let source = Box::new(StoreError::Gone { place: place.clone(), what, replaced });
        s4weights::Error::Store { target: place, source }
    }

    /// Makes the next use open the store again: it may have been replaced.
    pub(crate) fn reopen(&self) {
        self.remote.lock().unwrap_or_else(|e| e.into_inner()).take();
    }

    fn options(&self, bandwidth: Option<u64>) -> StoreOptions {
        let mut options = StoreOptions {
            preset: self.config.preset().unwrap_or_default(),
            threads: self.config.threads,
            // Parents are read from the local drive, which does as well as memory; the trainer
            // needs the memory.
            parent_memory: 0,
            ..StoreOptions::default()
        };
        options.requests.retry = Retry::within(PATIENCE);
        options.requests.bandwidth = bandwidth;
        options
    }

    /// Applies the retention to the store.
    ///
    /// # Errors
    /// Errors of the store. The next checkpoint tries again.
    pub(crate) fn retain(&self) -> s4weights::Result<()> {
        let Some(last) = self.config.keep_last else { return Ok(()) };
        let policy = Retention { keep_last: Some(last), ..Retention::default() };
        self.remote()?.apply_retention(&policy).map(drop)
    }

    /// Counts the checkpoints of the local store that no record marks as durable.
    ///
    /// # Errors
    /// Errors of opening the local store.
    pub(crate) fn not_durable(&self, records: &[Record]) -> s4weights::Result<usize> {
        if !self.staging.local().exists() {
            return Ok(0);
        }
        let state = self.local()?.state()?;
        Ok(state.list().into_iter().filter(|c| !is_durable(c, records)).count())
    }

    /// Removes the local store, and forgets which store was used: the next one is another.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn clear(&self) -> std::io::Result<()> {
        self.local.lock().unwrap_or_else(|e| e.into_inner()).take();
        self.staging.clear_local()?;
        *self.known.lock().unwrap_or_else(|e| e.into_inner()) = None;
        self.record.forget()
    }

    /// Whether the local store has a checkpoint: it keeps only the newest.
    pub(crate) fn has_local(&self, id: Option<CheckpointId>) -> bool {
        let Some(id) = id else { return false };
        let state = self.local().and_then(|store| store.state());
        state.is_ok_and(|state| state.get(id).is_some())
    }

    /// Retires a checkpoint of the local store, so that no later start adopts it again. A parent of
    /// others stays.
    pub(crate) fn forget_local(&self, id: Option<CheckpointId>) {
        let Some(id) = id else { return };
        if let Err(e) = self.local().and_then(|local| local.retire(&[id], "forgotten")) {
            tracing::debug!(error = %e, checkpoint = %id, "not retired from the local store");
        }
    }

    /// Deletes the checkpoints that the local store need not keep: every durable one except the newest and the
    /// ancestors of those that stay.
    ///
    /// # Errors
    /// Errors of the local store.
    pub(crate) fn tidy_local(&self, records: &[Record], tidy: Tidy) -> s4weights::Result<()> {
        let local = self.local()?;
        if tidy != Tidy::Usual {
            // A sweep needs no log entry, for which there may be no room.
            sweep(&local)?;
        }
        let state = local.state()?;
        let keep = if tidy == Tidy::Full { 0 } else { self.config.keep_local.max(1) };
        let listed = state.list();
        let cut = listed.len().saturating_sub(keep);
        let mut gone: Vec<CheckpointId> = vec![];
        // Newest first, so that ancestors of a checkpoint that stays are kept.
        for id in listed[..cut].iter().rev().filter(|c| is_durable(c, records)).map(|c| c.id()) {
            let free = state.descendants(&[id]).iter().all(|d| *d == id || gone.contains(d));
            if free {
                gone.push(id);
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        local.retire(&gone, "durable elsewhere")?;
        sweep(&local)
    }
}

/// Whether a record says that a checkpoint of the local store is durable. One without a record may exist nowhere else.
fn is_durable(checkpoint: &Checkpoint, records: &[Record]) -> bool {
    let own = checkpoint.about.tags.get(SUBMISSION);
    let of = records.iter().find(|r| own == Some(&r.id.to_string()));
    of.is_some_and(|r| r.state == State::Durable)
}

/// How thoroughly the local store is tidied up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tidy {
    /// After each checkpoint.
    Usual,
    /// Also delete what a killed process left there.
    Start,
    /// There is no room: delete everything durable, and everything that was not completed.
    Full,
}

/// No other writer is active here, and a reader that loses a checkpoint finds it in the other store.
fn sweep(local: &CheckpointStore) -> s4weights::Result<()> {
    let options = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
    local.sweep(&options).map(drop)
}

fn open(
    slot: &Mutex<Option<Arc<CheckpointStore>>>,
    open: impl FnOnce() -> s4weights::Result<CheckpointStore>,
) -> s4weights::Result<Arc<CheckpointStore>> {
    let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(store) = &*slot {
        return Ok(Arc::clone(store));
    }
    Ok(Arc::clone(slot.insert(Arc::new(open()?))))
}

/// The listed checkpoint of a submission.
///
/// # Errors
/// Errors of reading the log.
pub(crate) fn find(store: &CheckpointStore, id: Uuid) -> s4weights::Result<Option<Checkpoint>> {
    let id = id.to_string();
    newest(store, |c| c.about.tags.get(SUBMISSION) == Some(&id))
}

/// The listed checkpoint of a submission, of this runner or of another one, or the one that has this id itself.
///
/// # Errors
/// Errors of reading the log.
pub(crate) fn find_any(store: &CheckpointStore, id: Uuid) -> s4weights::Result<Option<Checkpoint>> {
    let id = id.to_string();
    newest(store, |c| c.about.tags.get(SUBMISSION) == Some(&id) || c.id().to_string() == id)
}

fn newest(
    store: &CheckpointStore,
    is_it: impl Fn(&Checkpoint) -> bool,
) -> s4weights::Result<Option<Checkpoint>> {
    let state = store.state()?;
    Ok(state.list().into_iter().rev().find(|c| is_it(c)).cloned())
}
