//! Replicates a checkpoint from one store to another, object by object.

use std::sync::{Arc, OnceLock};

use futures::{StreamExt, stream};
use s4_store::{About, Checkpoint, CheckpointId, Conflict, End, Error as StoreError, Reference};

use crate::error::{Error, Result};
use crate::interrupt;
use crate::progress::{Progress, ProgressFn};
use crate::report::Report;
use crate::store::CheckpointStore;
use crate::store::bridge::Asker;
use crate::store::import::ListingFn;
use crate::store::save::{Ready, StageSeconds};

/// Options for replicating a checkpoint.
#[derive(Clone, Default)]
pub struct ReplicateOptions {
    /// For a delta: the checkpoint of this store that is the copy of its parent.
    pub parent: Option<CheckpointId>,
    /// As [`ImportOptions::before`].
    ///
    /// [`ImportOptions::before`]: crate::store::ImportOptions::before
    pub before: Option<CheckpointId>,
    /// Called with the bytes that were read; can cancel until the copy is listed.
    pub progress: Option<ProgressFn>,
    /// Called before the copy is listed.
    pub listing: Option<ListingFn>,
}

impl CheckpointStore {
    /// Copies a checkpoint from another store, with its step, metrics and tags. No value is decoded: each
    /// object is compared with its hash, and stored as it is. The copy has an id of its own.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is a delta, and `parent` is not a copy of its parent;
    /// [`Error::Checkpoint`] if it is damaged; [`Error::Store`] if either store fails; the error of
    /// `listing`; [`Error::Cancelled`]. Nothing is listed then.
    pub fn replicate(
        &self,
        from: &Self,
        id: CheckpointId,
        options: &ReplicateOptions,
    ) -> Result<Checkpoint> {
        // As with saves, one at a time from one handle.
        let _history = interrupt::lock(&self.history)?;
        let state = from.state()?;
        let missing = || from.error(StoreError::NoCheckpoint { what: id.to_string() });
        let original = state.get(id).cloned().ok_or_else(missing)?;
        let parent = self.counterpart(from, &original, options.parent)?;
        let order = self.position_before(options.before)?;
        let asker = Asker::new(options.progress.clone());
        let tell = asker.callback();
        let total = original.about.data_len;
        let (store, source, about) =
            (self.opener.store.clone(), from.opener.store.clone(), original.clone());
        let begun = Arc::new(OnceLock::new());
        let attempted = Arc::clone(&begun);
        let copying = async move {
            let reading = source.read_manifest(&about).await?;
            let mut attempt = store.begin().await?;
            let _ = attempted.set(attempt.id());
            if let Some(parent) = parent {
                attempt.expect_parent(parent);
            }
            let mut done = 0;
            let infos = stream::iter((0..).zip(&reading.manifest().objects));
            let mut read = std::pin::pin!(reading.objects().zip(infos));
            while let Some((bytes, (n, object))) = read.next().await {
                let bytes = bytes?;
                attempt.put_hashed(n, &object.kind, bytes, object.blake3).await?;
                done += object.len;
                if tell.as_ref().is_some_and(|tell| !tell(Progress { done, total })) {
                    return Err(StoreError::Callback(Box::new(Error::Cancelled)));
                }
            }
            let about = About {
                step: about.step(),
                parent,
                since_base: about.since_base(),
                replaces: None,
                order,
                raw_len: about.about.raw_len,
                metrics: about.about.metrics,
                tags: about.about.tags,
            };
            attempt.stage(reading.manifest().blob.clone(), about).await
        };
        let done = self.opener.bridge.wait_asking(&asker, copying);
        let staged = done.and_then(|staged| staged.map_err(|e| self.error(e)));
        let staged = staged.inspect_err(|_| {
            // Otherwise the objects copied so far would stay until a sweep, and each retry would add more.
            begun.get().into_iter().for_each(|id| self.give_up(*id));
        })?;
        if let Some(listing) = &options.listing
            && let Err(e) = listing(staged.id())
        {
            let id = staged.id();
            drop(staged);
            self.give_up(id);
            return Err(e);
        }
        let (report, stages) = (Report::default(), StageSeconds::default());
        let ready = Ready { staged, report, stages, why_base: None, kept: None };
        Ok(self.publish(ready)?.0.checkpoint)
    }

    /// The parent of a copy, if that is a delta, after checking that it holds the values that the
    /// delta needs.
    fn counterpart(
        &self,
        from: &Self,
        original: &Checkpoint,
        parent: Option<CheckpointId>,
    ) -> Result<Option<Reference>> {
        let delta = from.opener.open(std::slice::from_ref(original), &from.reading());
        let Some(needed) = delta?.parent_digest() else { return Ok(None) };
        let step = original.step();
        let none = || {
            Error::Argument(format!(
                "{}: step {step} is a delta, but no copy of its parent was named",
                self.name()
            ))
        };
        let id = parent.ok_or_else(none)?;
        let state = self.state()?;
        let gone = || self.error(StoreError::NoCheckpoint { what: id.to_string() });
        let there = state.get(id).cloned().ok_or_else(gone)?;
        let reader = self.opener.open(std::slice::from_ref(&there), &self.reading())?;
        match reader.digest() == needed {
            true => Ok(Some(there.reference())),
            false => Err(Error::Argument(format!(
                "{}: checkpoint {id} is not a copy of the parent of step {step}",
                self.name()
            ))),
        }
    }

    /// Settles an attempt whose process ended: returns whether it was listed (it may be retired by now). If
    /// not, it never will be, even if its requests are still in flight.
    ///
    /// # Errors
    /// [`Error::Store`] if the log cannot be read or written.
    pub fn settle(&self, id: CheckpointId) -> Result<bool> {
        loop {
            let state: Arc<_> = self.state()?;
            match (state.get(id), state.dead(id).map(|dead| dead.how)) {
                (Some(_), _) | (_, Some(End::Retired | End::Replaced { .. })) => return Ok(true),
                (None, Some(End::Aborted)) => return Ok(false),
                (None, None) => {}
            }
            let store = self.opener.store.clone();
            match self.opener.bridge.wait_to_finish(async move { store.abort(id).await })? {
                Ok(()) => return Ok(false),
                // It was listed meanwhile.
                Err(StoreError::Conflict(Conflict::Spent { .. })) => {}
                Err(e) => return Err(self.error(e)),
            }
        }
    }
}
