//! Opening checkpoints to read them, and what to do about damaged ones.

use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use s4_store::{Checkpoint, CheckpointId, Error as StoreError, State};

use crate::error::{Error, ParentProblem, Result};
use crate::parallel::lock;
use crate::progress::ProgressFn;
use crate::reader::{ReadOptions, Reader};
use crate::store::CheckpointStore;
use crate::store::parents::chain;

/// An open checkpoint of a store. It stays readable for as long as its data is there: at least for
/// the grace of a sweep after it was retired.
pub struct Loaded {
    checkpoint: Checkpoint,
    reader: Arc<Reader>,
}

/// A checkpoint as bytes, to be moved elsewhere; [`Reader::open_in_memory`] opens it.
#[derive(Debug, Clone)]
pub struct StoredBytes {
    /// Its index.
    pub index: Bytes,
    /// Its objects, in the order of their numbers.
    pub objects: Vec<Bytes>,
}

/// A checkpoint that could not be used, and why.
#[derive(Debug)]
pub struct Skipped {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The fault of the checkpoint, or of one that it needs.
    pub error: Error,
}

impl Loaded {
    /// The checkpoint as the store lists it.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Its training step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.checkpoint.step()
    }

    /// Reads its tensors, and its ancestors as needed.
    #[must_use]
    pub fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }
}

/// Whether an error means that stored data is damaged or gone, so that another checkpoint may do.
#[must_use]
pub fn is_damage(error: &Error) -> bool {
    match error {
        Error::Checkpoint { source, .. } => is_damage(source),
        Error::Format { .. } => true,
        Error::Parent { problem, .. } => match problem {
            ParentProblem::Unreadable(source) => is_damage(source),
            ParentProblem::Missing => false,
            _ => true,
        },
        Error::Store { source, .. } => {
            matches!(**source, StoreError::Corrupt { .. } | StoreError::Missing { .. })
        }
        _ => false,
    }
}

/// Whether an error means that a disk of this machine could not read what is stored.
#[must_use]
pub fn is_unreadable(error: &Error) -> bool {
    match error {
        Error::Checkpoint { source, .. } => is_unreadable(source),
        Error::Parent { problem: ParentProblem::Unreadable(source), .. } => is_unreadable(source),
        Error::Store { source, .. } => source.is_unreadable(),
        _ => false,
    }
}

impl CheckpointStore {
    /// Opens the newest checkpoint of a step; `None`: the newest of all. Only the manifests of its
    /// chain are read, in parallel.
    ///
    /// # Errors
    /// [`Error::Store`] if there is none or the log cannot be read; [`Error::Checkpoint`] if it, or
    /// what it needs, is damaged.
    pub fn load(&self, step: Option<u64>) -> Result<Loaded> {
        let state = self.state()?;
        let found = match step {
            Some(step) => state.at_step(step),
            None => state.latest(),
        };
        let what = || match step {
            Some(step) => format!("of step {step}"),
            None => "found: the store is empty".to_owned(),
        };
        let found = found.ok_or_else(|| self.error(StoreError::NoCheckpoint { what: what() }))?;
        self.load_from(&state, found.id(), None)
    }

    /// Opens a checkpoint. `progress` is called as values are read from it. One that this handle
    /// already knows is opened without reading the log, unless it, or an ancestor, turns out to be
    /// damaged or gone.
    ///
    /// # Errors
    /// As [`CheckpointStore::load`].
    pub fn load_id(&self, id: CheckpointId, progress: Option<ProgressFn>) -> Result<Loaded> {
        let store = self.opener.store.clone();
        let known = self.opener.bridge.wait(async move { store.known().await })?;
        if known.get(id).is_some() {
            match self.load_from(&known, id, progress.clone()) {
                Err(e) if is_damage(&e) => {}
                other => return other,
            }
        }
        let state = self.state()?;
        self.load_from(&state, id, progress)
    }

    /// Opens a checkpoint without its ancestors: tensors that are not deltas can be read, and the
    /// others applied ([`Reader::apply_into`]).
    ///
    /// # Errors
    /// As [`CheckpointStore::load`].
    pub fn load_alone(
        &self,
        id: CheckpointId,
        progress: Option<ProgressFn>,
    ) -> Result<Arc<Reader>> {
        let options = ReadOptions { progress, ..self.reading() };
        self.opener.open(&[self.listed(id)?], &options)
    }

    /// The bytes of a checkpoint as they are stored, each object compared with its hash.
    ///
    /// # Errors
    /// As [`CheckpointStore::load`].
    pub fn stored_bytes(&self, id: CheckpointId) -> Result<StoredBytes> {
        let (store, checkpoint) = (self.opener.store.clone(), self.listed(id)?);
        self.opener.bridge.ask(async move {
            let reading = store.read_manifest(&checkpoint).await?;
            let objects = reading.objects().try_collect().await?;
            Ok(StoredBytes { index: reading.manifest().blob.clone(), objects })
        })
    }

    /// A listed checkpoint.
    fn listed(&self, id: CheckpointId) -> Result<Checkpoint> {
        let store = self.opener.store.clone();
        let known = self.opener.bridge.wait(async move { store.known().await })?;
        if let Some(found) = known.get(id) {
            return Ok(found.clone());
        }
        let missing = || self.error(StoreError::NoCheckpoint { what: id.to_string() });
        self.state()?.get(id).cloned().ok_or_else(missing)
    }

    /// Opens a checkpoint of a state.
    fn load_from(
        &self,
        state: &State,
        id: CheckpointId,
        progress: Option<ProgressFn>,
    ) -> Result<Loaded> {
        let chain = chain(state, id).map_err(|e| self.error(e))?;
        let options = ReadOptions { progress, ..self.reading() };
        let reader = self.opener.open(&chain, &options)?;
        let missing = || self.error(StoreError::NoCheckpoint { what: id.to_string() });
        let checkpoint = chain.into_iter().next().ok_or_else(missing)?;
        *lock(&self.opened) = Some(checkpoint.reference());
        Ok(Loaded { checkpoint, reader })
    }

    /// Reads the newest checkpoint with `read`; if it is damaged, the one before, and so on. Returns
    /// the result, and the newer checkpoints that were damaged.
    ///
    /// # Errors
    /// That of the newest checkpoint, if all are damaged; any other error of `read` immediately.
    pub fn load_usable<T>(
        &self,
        mut read: impl FnMut(&Loaded) -> Result<T>,
    ) -> Result<(T, Vec<Skipped>)> {
        let state = self.state()?;
        let mut skipped: Vec<Skipped> = vec![];
        for checkpoint in state.list().into_iter().rev() {
            let done = self.load_id(checkpoint.id(), None).and_then(|loaded| read(&loaded));
            match done {
                Ok(done) => return Ok((done, skipped)),
                Err(error) if is_damage(&error) => {
                    tracing::warn!(
                        step = checkpoint.step(), %error,
                        "the checkpoint cannot be restored: trying the one before"
                    );
                    skipped.push(Skipped { checkpoint: checkpoint.clone(), error });
                }
                Err(error) => return Err(error),
            }
        }
        let empty = StoreError::NoCheckpoint { what: "found: the store is empty".into() };
        Err(skipped.into_iter().next().map_or_else(|| self.error(empty), |first| first.error))
    }
}
