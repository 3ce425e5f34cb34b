//! Restoring from the nearest tier: the staged file, the local store, the store.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use s4weights::copy::{CopyOptions, copy};
use s4weights::store::{CheckpointId, CheckpointStore};
use s4weights::{Error, Preset, ReadOptions, Reader, Source, Target, WriteOptions, Writer};
use serde::Serialize;
use uuid::Uuid;

use crate::record::{Record, State};
use crate::service::Service;

/// What is to be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The newest that can be read.
    Newest,
    /// The newest of a step.
    Step(u64),
    /// A submission.
    Submission(Uuid),
}

/// A file that was restored. Whoever fetches it removes it.
#[derive(Debug, Serialize)]
pub(crate) struct Restored {
    /// The file.
    pub path: PathBuf,
    /// Its training step.
    pub step: u64,
    /// Where it came from: `staged`, `local` or `store`.
    pub tier: &'static str,
    /// What was tried before, and why it could not be used.
    pub skipped: Vec<String>,
}

/// A place that may have what is wanted.
enum Place {
    Staged(Uuid),
    Local(CheckpointId),
    Store(CheckpointId),
}

impl Place {
    fn tier(&self) -> &'static str {
        match self {
            Self::Staged(_) => "staged",
            Self::Local(_) => "local",
            Self::Store(_) => "store",
        }
    }
}

impl Service {
    /// Restores a checkpoint into a file of its own; every value is checked on the way. What is damaged is
    /// looked for in the next tier, and where the newest is wanted in the one before.
    ///
    /// # Errors
    /// The last failure, if nothing could be restored; [`Error::NotFound`] if there is nothing.
    pub(crate) fn restore(&self, wanted: Wanted) -> s4weights::Result<Restored> {
        let mut skipped = vec![];
        let mut last = None;
        let mut try_at = |step: u64, place: Place| -> Option<Restored> {
            let started = Instant::now();
            match self.copy_out(&place) {
                Ok(path) => {
                    self.metrics.restored(place.tier(), started.elapsed());
                    let skipped = std::mem::take(&mut skipped);
                    Some(Restored { path, step, tier: place.tier(), skipped })
                }
                Err(e) => {
                    skipped.push(format!("step {step}, {}: {e}", place.tier()));
                    last = Some(e);
                    None
                }
            }
        };
        for record in self.candidates(wanted) {
            for place in self.places(&record) {
                if let Some(done) = try_at(record.step, place) {
                    return Ok(done);
                }
            }
        }
        let listed = match wanted {
            Wanted::Submission(_) => vec![],
            Wanted::Newest | Wanted::Step(_) => self.stores.remote()?.list()?,
        };
        let fits = |step: u64| wanted == Wanted::Newest || wanted == Wanted::Step(step);
        for checkpoint in listed.iter().rev().filter(|c| fits(c.step())) {
            if let Some(done) = try_at(checkpoint.step(), Place::Store(checkpoint.id())) {
                return Ok(done);
            }
        }
        let target = format!("{}: {wanted:?}", self.config.store_name());
        Err(last.unwrap_or(Error::NotFound { target }))
    }

    /// What the journal knows of it, the newest first.
    fn candidates(&self, wanted: Wanted) -> Vec<Record> {
        let mut records = self.queue.list();
        records.reverse();
        records.retain(|r| r.state != State::Failed);
        match wanted {
            Wanted::Newest => {}
            Wanted::Step(step) => records.retain(|r| r.step == step),
            Wanted::Submission(id) => records.retain(|r| r.id == id),
        }
        records
    }

    fn places(&self, record: &Record) -> Vec<Place> {
        let staged = self.staging.has(record.id).then_some(Place::Staged(record.id));
        let local = record.local.filter(|id| self.is_local(*id)).map(Place::Local);
        staged.into_iter().chain(local).chain(record.remote.map(Place::Store)).collect()
    }

    /// Whether the local store has a checkpoint still: it keeps the newest alone.
    fn is_local(&self, id: CheckpointId) -> bool {
        let state = self.stores.local().and_then(|store| store.state());
        state.is_ok_and(|state| state.get(id).is_some())
    }

    fn copy_out(&self, place: &Place) -> s4weights::Result<PathBuf> {
        let (staged, stored);
        let reader: &Reader = match place {
            Place::Staged(id) => {
                let path = self.staging.staged(*id);
                staged = Reader::open(Source::from(path.as_path()), ReadOptions::default())?;
                &staged
            }
            Place::Local(id) => {
                stored = opened(&*self.stores.local()?, *id)?;
                &stored
            }
            Place::Store(id) => {
                stored = opened(&*self.stores.remote()?, *id)?;
                &stored
            }
        };
        let path = self.staging.restored().join(format!("{}.s4w", Uuid::new_v4()));
        let threads = self.config.threads;
        let write = WriteOptions { preset: Preset::Fast, threads, ..WriteOptions::default() };
        let writer = Writer::create(Target::from(path.as_path()), write)?;
        copy(reader, writer, &CopyOptions::default())?;
        let io = |source| Error::Io {
            target: path.display().to_string(),
            action: "set the mode of",
            source,
        };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).map_err(io)?;
        Ok(path)
    }
}

fn opened(store: &CheckpointStore, id: CheckpointId) -> s4weights::Result<Arc<Reader>> {
    Ok(Arc::clone(store.load_id(id, None)?.reader()))
}
