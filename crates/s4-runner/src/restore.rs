//! Restoring from the nearest tier: the staged file, the local store, the store.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use s4weights::copy::{CopyOptions, copy};
use s4weights::store::{CheckpointId, CheckpointStore};
use s4weights::{Error, Preset, ReadOptions, Reader, Source, Target, WriteOptions, Writer};
use serde::Serialize;
use tokio::sync::watch;
use uuid::Uuid;

use crate::record::{Record, State};
use crate::service::Service;
use crate::staging::UNFETCHED;

/// What to restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The newest that can be read.
    Newest,
    /// The newest of a step.
    Step(u64),
    /// A submission.
    Submission(Uuid),
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Newest => f.write_str("any checkpoint"),
            Self::Step(step) => write!(f, "step {step}"),
            Self::Submission(id) => write!(f, "submission {id}"),
        }
    }
}

/// A restored file. The client that fetches it removes it.
#[derive(Debug, Serialize)]
pub(crate) struct Restored {
    /// The file.
    pub path: PathBuf,
    /// Its training step.
    pub step: u64,
    /// Where it came from: `staged`, `local` or `store`.
    pub tier: &'static str,
    /// What could not be used, such as a damaged copy, and why.
    pub skipped: Vec<String>,
}

/// A place that may have the wanted checkpoint.
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

/// At most this many restores run at once: each reads and writes a whole checkpoint.
const MAX_RUNNING: usize = 4;
/// For how long after the last request an outcome can be asked for: as long as its file is kept.
const KEPT: Duration = UNFETCHED;

/// What came of a restore; all who wait for it share it.
pub(crate) type Outcome = Arc<s4weights::Result<Restored>>;

/// Restores that run, or ended recently, by the id that the client made. A restore may take longer
/// than a request or a connection may: the client asks for the same id again.
#[derive(Default)]
pub(crate) struct Restores(Mutex<HashMap<Uuid, Job>>);

struct Job {
    outcome: watch::Receiver<Option<Outcome>>,
    /// When a client last asked for it: it may have run for longer than outcomes are kept.
    asked: Instant,
}

impl Job {
    fn is_running(&self) -> bool {
        self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok()
    }
}

impl Service {
    /// The restore of this id, which begins now if there is none. `None` if too many run already.
    pub(crate) fn begin_restore(
        self: &Arc<Self>,
        id: Uuid,
        wanted: Wanted,
    ) -> Option<watch::Receiver<Option<Outcome>>> {
        let mut jobs = self.restores.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(job) = jobs.get_mut(&id) {
            job.asked = Instant::now();
            return Some(job.outcome.clone());
        }
        jobs.retain(|_, job| job.is_running() || job.asked.elapsed() < KEPT);
        if jobs.values().filter(|job| job.is_running()).count() >= MAX_RUNNING {
            return None;
        }
        let (done, outcome) = watch::channel(None);
        let service = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            done.send_replace(Some(Arc::new(service.restore(wanted))));
        });
        jobs.insert(id, Job { outcome: outcome.clone(), asked: Instant::now() });
        Some(outcome)
    }

    /// Restores a checkpoint into a new file; every value is checked on the way. If a copy is
    /// damaged, the next tier is tried and then, if the newest is wanted, the checkpoint before it.
    ///
    /// # Errors
    /// The last failure, if nothing could be restored; [`Error::NotFound`] if there is nothing.
    fn restore(&self, wanted: Wanted) -> s4weights::Result<Restored> {
        self.check_room()?;
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
        let (candidates, no_list) = self.candidates(wanted);
        for (step, place) in candidates {
            if let Some(mut done) = try_at(step, place) {
                done.skipped.extend(no_list.map(|e| format!("the store's list: {e}")));
                return Ok(done);
            }
        }
        let target = format!("{}: {wanted}", self.config.store_name());
        // If the store does not answer, it may well have the checkpoint, so its error is returned.
        Err(last.or(no_list).unwrap_or(Error::NotFound { target }))
    }

    /// The places that may have the wanted checkpoint, newest first: checkpoints that are not
    /// durable yet, then those that the store lists, of which the local drive may have copies. What
    /// other runners saved there counts; what was retired there does not. If the store does not
    /// answer, its error is returned and the journal alone is used.
    fn candidates(&self, wanted: Wanted) -> (Vec<(u64, Place)>, Option<Error>) {
        let fits = |step: u64| wanted == Wanted::Newest || wanted == Wanted::Step(step);
        let mut records = self.queue.list();
        records.reverse();
        records.retain(|r| match wanted {
            Wanted::Submission(id) => r.id == id,
            _ => r.state != State::Failed && fits(r.step),
        });
        let of = |record: &Record| -> Vec<(u64, Place)> {
            self.places(record).into_iter().map(|place| (record.step, place)).collect()
        };
        let listed = match wanted {
            Wanted::Submission(_) => return (records.iter().flat_map(of).collect(), None),
            _ => self.stores.remote().and_then(|store| store.list()),
        };
        let listed = match listed {
            Ok(listed) => listed,
            Err(e) => return (records.iter().flat_map(of).collect(), Some(e)),
        };
        let (durable, pending): (Vec<_>, Vec<_>) =
            records.iter().partition(|r| r.state == State::Durable);
        let mut out: Vec<_> = pending.into_iter().flat_map(of).collect();
        for checkpoint in listed.iter().rev().filter(|c| fits(c.step())) {
            match durable.iter().find(|r| r.remote == Some(checkpoint.id())) {
                Some(record) => out.extend(of(record)),
                None => out.push((checkpoint.step(), Place::Store(checkpoint.id()))),
            }
        }
        (out, None)
    }

    /// Restored files must not fill the drive.
    fn check_room(&self) -> s4weights::Result<()> {
        let target = self.staging.restored().display().to_string();
        let action = "check the free space of";
        let free = self.staging.free();
        let free = free.map_err(|source| Error::Io { target: target.clone(), action, source })?;
        if free > self.config.min_free_bytes {
            return Ok(());
        }
        self.staging.tidy(Instant::now());
        let source = std::io::ErrorKind::StorageFull.into();
        Err(Error::Io { target, action: "restore to", source })
    }

    fn places(&self, record: &Record) -> Vec<Place> {
        let staged = self.staging.has(record.id).then_some(Place::Staged(record.id));
        let local = record.local.filter(|id| self.is_local(*id)).map(Place::Local);
        staged.into_iter().chain(local).chain(record.remote.map(Place::Store)).collect()
    }

    /// Whether the local store still has a checkpoint: it keeps only the newest.
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
