//! Opens a checkpoint with all its ancestors.

use std::sync::Arc;

use s4_store::{Checkpoint, CheckpointId, Reading, Store};

use crate::error::{Error, Result};
use crate::io::Source;
use crate::objects::ObjectSource;
use crate::reader::{ReadOptions, Reader};
use crate::store::bridge::Bridge;
use crate::store::cache::{KeptObjects, PartlyKept};
use crate::store::objects::{HashedObjects, StoredObjects};

/// Everything that opening checkpoints needs, and keeps alive; cheap to clone.
#[derive(Clone)]
pub(crate) struct Opener {
    pub(crate) bridge: Bridge,
    pub(crate) store: Store,
    pub(crate) local: bool,
    /// Objects of checkpoints that this process keeps in part.
    pub(crate) kept: Arc<KeptObjects>,
}

impl Opener {
    /// Adds the checkpoint to an error about it.
    pub(crate) fn about(&self, checkpoint: &Checkpoint, source: Error) -> Error {
        match source {
            Error::Checkpoint { .. } | Error::Cancelled => source,
            source => Error::Checkpoint {
                target: self.bridge.target().to_owned(),
                step: checkpoint.step(),
                id: checkpoint.id(),
                source: Box::new(source),
            },
        }
    }

    /// Opens the first checkpoint of a chain, which has its base last: all manifests are read in
    /// parallel.
    pub(crate) fn open(&self, chain: &[Checkpoint], options: &ReadOptions) -> Result<Arc<Reader>> {
        let readings = chain.iter().map(|checkpoint| {
            let (store, checkpoint) = (self.store.clone(), checkpoint.clone());
            async move { store.read_manifest(&checkpoint).await }
        });
        let readings = futures::future::join_all(readings.collect::<Vec<_>>());
        let readings = self.bridge.wait(readings)?;
        let mut parent: Option<(Arc<Reader>, &Checkpoint)> = None;
        for (checkpoint, reading) in chain.iter().zip(readings).rev() {
            let reading = reading.map_err(|e| self.about(checkpoint, self.bridge.error(e)))?;
            let reader = self.open_one(checkpoint, reading, options);
            let reader = reader.map_err(|e| self.about(checkpoint, e))?;
            if let Some((above, base)) = parent {
                adopt(&reader, checkpoint, above, base).map_err(|e| self.about(checkpoint, e))?;
            }
            parent = Some((Arc::new(reader), checkpoint));
        }
        let nothing = || Error::Argument(format!("{}: the chain is empty", self.bridge.target()));
        parent.map(|(reader, _)| reader).ok_or_else(nothing)
    }

    /// Opens one checkpoint, without looking for its parent. Closed codecs are decoded: in a
    /// checkpoint that uses any, every object is compared with its hash before it is used.
    pub(crate) fn open_one(
        &self,
        checkpoint: &Checkpoint,
        reading: Reading,
        options: &ReadOptions,
    ) -> Result<Reader> {
        self.open_reading(checkpoint.step(), checkpoint.id(), &reading, options)
    }

    /// As [`Opener::open_one`], for a checkpoint that may not be listed yet.
    pub(crate) fn open_reading(
        &self,
        step: u64,
        id: CheckpointId,
        reading: &Reading,
        options: &ReadOptions,
    ) -> Result<Reader> {
        let index = || Source::Bytes(reading.manifest().blob.clone());
        let bridge = || self.bridge.clone();
        let stored = StoredObjects::new(bridge(), reading.clone(), self.local);
        let kept = self.kept.of(id, &reading.manifest().objects);
        let objects: Box<dyn ObjectSource> = match kept.0.is_empty() {
            true => Box::new(stored),
            false => Box::new(PartlyKept { kept, rest: stored }),
        };
        let mut reader = Reader::open_objects(index(), objects, options.clone())?;
        if !reader.manifest().closed_codecs.is_empty() {
            // The log has the manifest's hash, and the manifest that of every object. As both are
            // compared first, a vendor's decoders see only what a writer of this store wrote.
            let objects = Box::new(HashedObjects::new(bridge(), reading.clone()));
            let options = ReadOptions { trusted: true, ..options.clone() };
            reader = Reader::open_objects(index(), objects, options)?;
        }
        let target = self.bridge.target();
        reader.name = format!("{target}: step {step} (checkpoint {id})");
        Ok(reader)
    }
}

/// Gives a checkpoint its parent. If a base took the original parent's place, the log says that it holds the same
/// values, which is what the delta needs; every chunk's checksum is still compared.
fn adopt(child: &Reader, about: &Checkpoint, parent: Arc<Reader>, base: &Checkpoint) -> Result<()> {
    let Some(expected) = child.manifest().parent else { return Ok(()) };
    if about.about.parent.is_some_and(|p| p.id != base.id()) {
        // It is set once: all children of a replaced checkpoint were made against the same one.
        let _ = parent.stands_for.set(expected);
    }
    child.set_parent(parent)
}
