//! Imports the content of a file as a checkpoint of the store.

use std::collections::BTreeMap;
use std::sync::Arc;

use s4_format::limits::MAX_CHAIN;
use s4_format::manifest::RoleKind;
use s4_store::{About, Attempt, CheckpointId, Staged};
use tokio::sync::mpsc::channel;
use tokio::task::JoinHandle;

use crate::copy::{self, Copied, CopyOptions};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::options::WriteOptions;
use crate::progress::ProgressFn;
use crate::reader::{ReadOptions, Reader};
use crate::store::CheckpointStore;
use crate::store::bridge::{Asker, ChannelSink, upload};
use crate::store::parents::{ParentCheckpoint, WhyBase, chain};
use crate::store::save::{Ready, Saved, StageSeconds, end_of, is_parent_failure};
use crate::writer::Writer;

/// Called with the id under which a checkpoint is about to be listed, after all of it is stored and
/// compared. An error keeps it from being listed.
pub type ListingFn = Arc<dyn Fn(CheckpointId) -> Result<()> + Send + Sync>;

/// Options for importing a checkpoint.
#[derive(Clone, Default)]
pub struct ImportOptions {
    /// Finite numbers that retention can choose by.
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    pub tags: BTreeMap<String, String>,
    /// Write a base, whatever the policy says.
    pub base: bool,
    /// A listed checkpoint that counts as newer than the imported one, though it was listed first.
    /// Ignored if it is not listed (any more).
    pub before: Option<CheckpointId>,
    /// Called with the progress; can cancel the import until it is listed.
    pub progress: Option<ProgressFn>,
    /// Called before the checkpoint is listed.
    pub listing: Option<ListingFn>,
}

/// The part of an import that runs on the store's threads.
type Upload = JoinHandle<(Attempt, s4_store::Result<()>)>;

impl CheckpointStore {
    /// Saves what a file holds, as [`CheckpointStore::save`] does with tensors: as a delta of an
    /// earlier checkpoint if that is smaller. What was stored is read back and compared, value by
    /// value, before it is listed. Only a few tensors are in memory at a time. The retention is not
    /// applied.
    ///
    /// # Errors
    /// As [`CheckpointStore::save`], those of reading the file, and those of `listing`.
    pub fn import(&self, from: &Reader, step: u64, options: &ImportOptions) -> Result<Saved> {
        let mut history = interrupt::lock(&self.history)?;
        let chosen = match options.base {
            true => Err(WhyBase::Asked),
            false => self.choose(&mut history, &from.tensors().collect::<Vec<_>>(), false)?,
        };
        let (mut before, mut why_base) = match chosen {
            Ok(before) => (Some(before), None),
            Err(why) => (None, Some(why)),
        };
        loop {
            let parent = before.take();
            let outcome = self
                .copy_in(from, step, options, parent.as_ref(), why_base.clone())
                .and_then(|ready| self.publish(ready));
            match outcome {
                Ok((saved, _)) => {
                    self.is_parent_later(&mut history, saved.checkpoint.since_base());
                    history.saved(&saved.checkpoint, None);
                    return Ok(saved);
                }
                Err(e) if parent.is_some() && is_parent_failure(&e) => {
                    tracing::warn!(
                        store = self.name(), step, error = %e,
                        "the parent cannot be used: importing as a base"
                    );
                    why_base = Some(WhyBase::Parent(e.to_string()));
                }
                Err(e) => return Err(e),
            }
        }
    }

    fn copy_in(
        &self,
        from: &Reader,
        step: u64,
        options: &ImportOptions,
        before: Option<&ParentCheckpoint>,
        why_base: Option<WhyBase>,
    ) -> Result<Ready> {
        let asker = Asker::new(options.progress.clone());
        let bridge = &self.opener.bridge;
        let reference = before.map(|b| b.reference);
        let (id, sink, uploading) = self.begin_upload(&asker, reference)?;
        let parent = before.map(|b| b.values.parent());
        let write = WriteOptions {
            parent,
            max_chain: Some(MAX_CHAIN as u32),
            progress: asker.callback(),
            ..self.writing()
        };
        let objects = self.objects_for(from.tensors().map(|t| t.bytes).sum());
        let target = bridge.target();
        let groups = groups(from);
        let how = CopyOptions { groups: &groups, hash: true, ..CopyOptions::default() };
        let copied = Writer::create_objects(target, Box::new(sink), objects, write)
            .and_then(|writer| copy::copy(from, writer, &how));
        let Copied { written, digests } = match copied {
            Ok(copied) => copied,
            Err(e) => {
                // If an upload failed, that is why the writer could not go on.
                let end = async move { end_of(uploading.await).await };
                return Err(match bridge.wait_to_finish(end) {
                    Ok(Some(failed)) => bridge.error(failed),
                    _ => e,
                });
            }
        };
        let before = before.filter(|_| written.snapshot.depth() > 1);
        let about = About {
            step,
            parent: before.map(|b| b.reference),
            since_base: before.map_or(0, |b| b.number),
            replaces: None,
            order: self.position_before(options.before)?,
            raw_len: written.report.bytes_in,
            metrics: options.metrics.clone(),
            tags: options.tags.clone(),
        };
        let index = written.index.unwrap_or_default();
        let staged = self.end_upload(&asker, id, uploading, index, about)?;
        let checked = self
            .compare(from, digests.as_deref(), &staged, step, before, &asker)
            .and_then(|()| options.listing.as_ref().map_or(Ok(()), |tell| tell(id)));
        if let Err(e) = checked {
            drop(staged);
            self.give_up(id);
            return Err(e);
        }
        let why_base = why_base.or_else(|| before.is_none().then_some(WhyBase::NothingGained));
        let (report, stages) = (written.report, StageSeconds::default());
        Ok(Ready { staged, report, stages, why_base, kept: None })
    }

    /// The position in time right before a listed checkpoint.
    pub(crate) fn position_before(&self, newer: Option<CheckpointId>) -> Result<Option<u64>> {
        let Some(newer) = newer else { return Ok(None) };
        Ok(self.state()?.get(newer).map(|newer| newer.order.saturating_sub(1)))
    }

    /// Begins an attempt; returns its id, the sink for its objects, and the task that uploads them.
    fn begin_upload(
        &self,
        asker: &Asker,
        parent: Option<s4_store::Reference>,
    ) -> Result<(CheckpointId, ChannelSink, Upload)> {
        let bridge = self.opener.bridge.clone();
        let store = self.opener.store.clone();
        let mut attempt = bridge.ask(async move {
            let mut attempt = store.begin().await?;
            if let Some(parent) = parent {
                attempt.expect_parent(parent);
            }
            Ok(attempt)
        })?;
        let id = attempt.id();
        let (sender, receiver) = channel(1);
        let uploading = bridge.spawn(async move {
            let done = upload(&mut attempt, receiver).await;
            (attempt, done)
        })?;
        Ok((id, ChannelSink { bridge, asker: asker.clone(), sender }, uploading))
    }

    /// Waits for the uploads, and stores the table of objects and the index.
    pub(crate) fn end_upload(
        &self,
        asker: &Asker,
        id: CheckpointId,
        uploading: Upload,
        index: bytes::Bytes,
        about: About,
    ) -> Result<Staged> {
        let staging = async move {
            let (attempt, done) =
                uploading.await.map_err(|e| s4_store::Error::Callback(Box::new(e)))?;
            match done {
                Ok(()) => attempt.stage(index, about).await,
                Err(e) => {
                    // A sweep deletes what remains.
                    let _ = attempt.abort().await;
                    Err(e)
                }
            }
        };
        match self.opener.bridge.wait_asking(asker, staging) {
            Ok(staged) => staged.map_err(|e| self.error(e)),
            Err(e) => {
                self.give_up(id);
                Err(e)
            }
        }
    }

    /// Reads back what was stored, and compares it with its source.
    fn compare(
        &self,
        from: &Reader,
        digests: Option<&[s4_format::Digest]>,
        staged: &Staged,
        step: u64,
        before: Option<&ParentCheckpoint>,
        asker: &Asker,
    ) -> Result<()> {
        let reading = ReadOptions { progress: asker.callback(), ..self.reading() };
        let stored = self.opener.open_reading(step, staged.id(), &staged.reading(), &reading)?;
        if let Some(before) = before {
            let state = self.state()?;
            let below = chain(&state, before.reference.id).map_err(|e| self.error(e))?;
            stored.set_parent(self.opener.open(&below, &reading)?)?;
        }
        let Some(difference) = copy::compare_content(from, digests, &stored)? else {
            return Ok(());
        };
        let what = format!("{difference} differs from the imported checkpoint");
        Err(Error::Format { target: stored.name, source: s4_format::Error::corrupt(what) })
    }
}

/// The group of each tensor, from its role, since a file keeps no groups.
fn groups(from: &Reader) -> Vec<u8> {
    let mut groups = vec![0; from.tensors().count()];
    for row in from.manifest().roles.iter().flat_map(|roles| &roles.tensors) {
        let group = groups.get_mut(row.tensor as usize).filter(|_| row.kind != RoleKind::Weight);
        if let Some(group) = group {
            *group = 1;
        }
    }
    groups
}
