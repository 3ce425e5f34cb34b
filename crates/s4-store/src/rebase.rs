//! Replaces a delta by a base with the same content, so that its former parent can go.

use std::error::Error as StdError;

use bytes::Bytes;
use futures::TryStreamExt;

use crate::attempt::{About, Attempt, Staged};
use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::state::Checkpoint;
use crate::store::Store;

/// An error of the caller's code.
pub type CallbackError = Box<dyn StdError + Send + Sync>;

/// The part of a rebase that understands the content of a checkpoint.
#[async_trait::async_trait]
pub trait Rebaser: Send {
    /// Puts the full content of the first checkpoint of `chain` into `attempt` and returns the new
    /// manifest's bytes. The rest of the chain is its ancestors, with the base last.
    async fn write(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        attempt: &mut Attempt,
    ) -> std::result::Result<Bytes, CallbackError>;

    /// Restores what was stored and compares it with the original, before anyone can see it.
    async fn verify(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        staged: &Staged,
    ) -> std::result::Result<(), CallbackError>;
}

impl Store {
    /// Writes a full checkpoint with the content of `id`, verifies it and replaces the old one by it: one
    /// log entry lists the new one, with the same step, metrics, tags, pin and position in time, takes the
    /// old one off the list, and makes deltas of the old one deltas of the new.
    ///
    /// # Errors
    /// [`Error::Callback`] with the rebaser's own; [`Error::Conflict`] if the checkpoint was retired
    /// or rebased meanwhile. In both cases nothing has changed.
    pub async fn rebase(&self, id: CheckpointId, rebaser: &mut dyn Rebaser) -> Result<Checkpoint> {
        let state = self.state().await?;
        let chain: Vec<_> = state.chain(id)?.into_iter().cloned().collect();
        let Some(old) = chain.first() else {
            return Err(Error::NoCheckpoint { what: id.to_string() });
        };
        let about = About {
            step: old.about.step,
            parent: None,
            since_base: 0,
            replaces: Some(old.reference()),
            order: None,
            raw_len: old.about.raw_len,
            metrics: old.about.metrics.clone(),
            tags: old.about.tags.clone(),
        };
        let mut attempt = self.begin().await?;
        let new = attempt.id();
        match self.stage_rebase(rebaser, &chain, &mut attempt).await {
            Ok(blob) => {
                let staged = attempt.stage(blob, about).await?;
                if let Err(error) = self.verify_rebase(rebaser, &chain, &staged).await {
                    // Nothing is in the log yet, so only this process knows of the data.
                    let _ = self.inner.delete_checkpoint(new).await;
                    return Err(error);
                }
                self.inner.reached("rebase.verified").await;
                staged.publish().await
            }
            Err(error) => {
                let _ = attempt.abort().await;
                Err(Error::Callback(error))
            }
        }
    }

    async fn stage_rebase(
        &self,
        rebaser: &mut dyn Rebaser,
        chain: &[Checkpoint],
        attempt: &mut Attempt,
    ) -> std::result::Result<Bytes, CallbackError> {
        rebaser.write(self, chain, attempt).await
    }

    /// Reads every object back, then lets the caller verify the content.
    async fn verify_rebase(
        &self,
        rebaser: &mut dyn Rebaser,
        chain: &[Checkpoint],
        staged: &Staged,
    ) -> Result<()> {
        let reading = staged.reading();
        reading.objects().try_for_each(|_| std::future::ready(Ok(()))).await?;
        rebaser.verify(self, chain, staged).await.map_err(Error::Callback)
    }
}
