//! Saving: as a delta, or as a base.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use s4_format::chunk::ChunkRecord;
use s4_format::limits::{MAX_CHAIN, MAX_OBJECTS};
use s4_format::manifest::Roles;
use s4_store::{
    About, Attempt, Checkpoint, CheckpointId, Conflict, Error as StoreError, MAX_MANIFEST,
    Resolution, Staged, Store,
};
use serde::Serialize;
use tokio::sync::mpsc::channel;
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::interrupt;
use crate::objects::ObjectOptions;
use crate::options::{StagedFn, WriteOptions};
use crate::output::{KeptMemory, ObjectMemory};
use crate::parent::Parent;
use crate::progress::ProgressFn;
use crate::reader::TensorInfo;
use crate::recall::Recall;
use crate::report::Report;
use crate::store::CheckpointStore;
use crate::store::bridge::{Asker, ChannelSink, upload};
use crate::store::cache::{CachingSink, ObjectCache};
use crate::store::history::{ParentValues, SaveHistory};
use crate::store::parents::{ParentCheckpoint, WhyBase, on_devices};
use crate::tensor_source::TensorSource;
use crate::writer::{Contents, MAX_DELTAS, Writer, Written};

/// Bytes of values that take longer to copy than a thread takes to start.
const KEPT_ASIDE: u64 = 1 << 20;

/// The content of a checkpoint besides tensors, and options of the save.
#[derive(Clone, Default)]
pub struct SaveOptions {
    /// The tensors' roles, as for [`Writer::declare`].
    pub roles: Option<Roles>,
    /// The content besides tensors.
    pub contents: Contents,
    /// Finite numbers that retention can choose by.
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    pub tags: BTreeMap<String, String>,
    /// Write a base, whatever the policy says.
    pub base: bool,
    /// Called with the progress, on the calling thread; can cancel the save until it is published.
    pub progress: Option<ProgressFn>,
    /// Called once, on the calling thread, when the values on devices are no longer needed. By then all of
    /// their frames are in memory, waiting to be uploaded. A save that cannot be published after that,
    /// because another writer retired its parent, fails.
    pub staged: Option<StagedFn>,
    /// Whether values in host memory may also change once `staged` was called. It is then called later, when
    /// nothing needs these values any more, and later deltas use the stored frames instead of them.
    pub host_changes: bool,
    /// Bytes of encoded objects that may wait to be uploaded before `staged` is called; `None`: all
    /// of them. With a limit, the call comes later, because encoding waits for uploads.
    pub staging_memory: Option<usize>,
    /// The encoder of tensors in device memory. With it, the stored frames are kept in memory for
    /// later deltas, within [`StoreOptions::parent_memory`]; without it, the values are.
    ///
    /// [`StoreOptions::parent_memory`]: crate::store::StoreOptions::parent_memory
    #[cfg(feature = "cuda")]
    pub engine: Option<Arc<s4_engine::cuda::CudaEngine>>,
}

impl SaveOptions {
    /// Whether later saves are deltas of the values, not of the stored frames: the values may have
    /// changed by then.
    fn keeps_values(&self) -> bool {
        #[cfg(feature = "cuda")]
        let on_devices = self.engine.is_some();
        #[cfg(not(feature = "cuda"))]
        let on_devices = false;
        !on_devices && !self.host_changes
    }

    /// The description of a checkpoint before it is encoded.
    fn about(&self, step: u64) -> About {
        let (metrics, tags) = (self.metrics.clone(), self.tags.clone());
        About { step, metrics, tags, ..About::default() }
    }

    /// Memory for objects that stay, with room for copies of this many bytes; `None`: none stays.
    pub(crate) fn kept_memory(&self, room: Option<usize>) -> KeptMemory {
        KeptMemory {
            room,
            #[cfg(feature = "cuda")]
            engine: self.engine.clone(),
        }
    }
}

/// The result of a save.
#[derive(Debug)]
pub struct Saved {
    /// The checkpoint as the store lists it.
    pub checkpoint: Checkpoint,
    /// Counts and sizes. `bytes_out` leaves out the store's own table of objects.
    pub report: Report,
    /// How long each stage took.
    pub stages: StageSeconds,
    /// Why it is a base; `None` if it is a delta.
    pub why_base: Option<WhyBase>,
    /// The checkpoints that the store's retention retired.
    pub retired: Vec<CheckpointId>,
}

/// Seconds of the stages of a save, one after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StageSeconds {
    /// Until all values are encoded. Uploads run meanwhile.
    pub encode: f64,
    /// From then on until all objects and the index are stored.
    pub upload: f64,
    /// Until the log lists the checkpoint.
    pub publish: f64,
}

/// A checkpoint that is stored and ready to be listed.
pub(crate) struct Ready {
    pub(crate) staged: Staged,
    pub(crate) report: Report,
    pub(crate) stages: StageSeconds,
    pub(crate) why_base: Option<WhyBase>,
    /// The values, for later saves.
    pub(crate) kept: Option<ParentValues>,
}

/// A save in progress.
pub(crate) struct SaveRequest<'a> {
    step: u64,
    tensors: &'a [TensorSource<'a>],
    options: &'a SaveOptions,
    pub(crate) asker: Asker,
    /// How many tensors may be deltas or copies.
    pub(crate) max_deltas: usize,
    /// Whether the caller has been told that it may change its values.
    staged: Arc<AtomicBool>,
}

/// An encoded checkpoint, some of whose objects may still be uploading.
pub(crate) struct Uploading {
    pub(crate) written: Written,
    pub(crate) uploading: JoinHandle<(Attempt, s4_store::Result<()>)>,
    /// The objects that are kept.
    pub(crate) stored: Arc<Mutex<ObjectCache>>,
}

impl<'a> SaveRequest<'a> {
    pub(crate) fn new(
        step: u64,
        tensors: &'a [TensorSource<'a>],
        options: &'a SaveOptions,
    ) -> Self {
        let asker = Asker::new(options.progress.clone());
        let max_deltas = MAX_DELTAS;
        Self { step, tensors, options, asker, max_deltas, staged: Arc::default() }
    }

    /// Whether the caller may change values after it was informed that they are staged.
    fn may_change(&self) -> bool {
        self.options.host_changes || on_devices(self.tensors)
    }
}

impl CheckpointStore {
    /// Saves a checkpoint: it is listed whole, or not at all. It follows the one that this handle saved
    /// last, or opened last if it has saved none, or else the newest one, and is stored as a delta of that
    /// one or of a checkpoint further down its chain ([`StoreOptions::max_hops`]). It becomes a base when the
    /// policy asks for one, or when the parent's values are not available.
    ///
    /// [`StoreOptions::max_hops`]: crate::store::StoreOptions::max_hops
    ///
    /// # Errors
    /// [`Error::Argument`] for tensors or numbers that cannot be saved, [`Error::Store`] if the
    /// store refuses or fails, or if there are more chunks than a manifest has room for;
    /// [`Error::Cancelled`]. Nothing is listed then, except perhaps after
    /// [`s4_store::CommitUnknown`], when the outcome of the commit could not be read back either.
    pub fn save(
        &self,
        step: u64,
        tensors: &[TensorSource<'_>],
        options: &SaveOptions,
    ) -> Result<Saved> {
        check_chunks(tensors).map_err(|e| self.error(e))?;
        options.about(step).check().map_err(|e| self.error(e))?;
        // One save at a time from one handle: each may be the next one's parent.
        let mut history = interrupt::lock(&self.history)?;
        let request = SaveRequest::new(step, tensors, options);
        let saved = self.save_next(&request, &mut history);
        self.buffers.rest();
        drop(history);
        let mut saved = saved?;
        saved.retired = self.retain(&saved.checkpoint)?;
        Ok(saved)
    }

    /// Saves as a delta if possible, else as a base.
    fn save_next(&self, request: &SaveRequest<'_>, history: &mut SaveHistory) -> Result<Saved> {
        let chosen = match request.options.base {
            true => Err(WhyBase::Asked),
            false => self.choose(history, &infos(request.tensors), on_devices(request.tensors))?,
        };
        let (mut before, mut why_base) = match chosen {
            Ok(before) => (Some(before), None),
            Err(why) => {
                if matches!(why, WhyBase::Parent(_)) {
                    tracing::warn!(step = request.step, "saving as a base: {why}");
                }
                (None, Some(why))
            }
        };
        loop {
            let parent = before.take();
            let had_parent = parent.is_some();
            let outcome = self.stage(request, history, parent, why_base.clone()).and_then(
                |(ready, recall)| {
                    let (saved, kept) = self.publish(ready)?;
                    let checkpoint = &saved.checkpoint;
                    self.remember(checkpoint.id(), checkpoint.since_base(), &recall);
                    Ok((saved, kept))
                },
            );
            match outcome {
                Ok((saved, kept)) => {
                    history.saved(&saved.checkpoint, kept);
                    return Ok(saved);
                }
                // The caller's values may have changed since, so they cannot be encoded again.
                Err(e) if request.staged.load(Ordering::Relaxed) && request.may_change() => {
                    return Err(e);
                }
                Err(e) if had_parent && is_parent_failure(&e) => {
                    tracing::warn!(
                        store = self.name(), step = request.step, error = %e,
                        "the previous checkpoint cannot be used: saving as a base. `s4w store verify` \
                         shows what is damaged"
                    );
                    why_base = Some(WhyBase::Parent(e.to_string()));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Encodes and uploads at the same time, and meanwhile copies what is kept for later saves.
    fn stage(
        &self,
        request: &SaveRequest<'_>,
        history: &mut SaveHistory,
        before: Option<ParentCheckpoint>,
        why_base: Option<WhyBase>,
    ) -> Result<(Ready, Arc<Recall>)> {
        let SaveRequest { step, tensors, options, asker, .. } = request;
        let bridge = &self.opener.bridge;
        let store = self.opener.store.clone();
        let reference = before.as_ref().map(|b| b.reference);
        let attempt = bridge.ask(async move {
            let mut attempt = store.begin().await?;
            // Publishing must fail if the parent was retired by then: the delta would be unreadable.
            if let Some(parent) = reference {
                attempt.expect_parent(parent);
            }
            Ok(attempt)
        })?;
        let id = attempt.id();
        let parent = before.as_ref().map(|b| (b.reference, b.number));
        let known = before.as_ref().map(|b| (b.reference.id, b.distance));
        let reader = before.as_ref().and_then(|b| b.values.reader());
        let number = parent.map_or(0, |(_, number)| number);
        let chain = before.as_ref().map_or_else(Vec::new, |b| b.chain.clone());
        let room = self.room_for_stored(!options.keeps_values(), number);
        let kept = options.kept_memory(room);
        let values = before.map(|b| b.values.parent());
        let started = Instant::now();
        let bytes: u64 = tensors.iter().map(|t| t.values.bytes()).sum();
        // Values in memory need no samples.
        let in_memory = options.keeps_values() && bytes <= self.options.share() as u64;
        let recall = self.recall(known, number, !in_memory);
        let Uploading { written, uploading, stored } =
            self.encode_into(attempt, request, (values, &recall), kept, self.objects_for(bytes))?;
        let encode = started.elapsed().as_secs_f64();
        let Written { report, snapshot, index } = written;
        let delta = snapshot.depth() > 1;
        let parent = parent.filter(|_| delta);
        let number = parent.map_or(0, |(_, number)| number);
        let about = About {
            parent: parent.map(|(reference, _)| reference),
            since_base: number,
            raw_len: report.bytes_in,
            ..options.about(*step)
        };
        let index = index.unwrap_or_default();
        let blob = index.clone();
        let staging = async move {
            let (attempt, done) = uploading.await.map_err(|e| StoreError::Callback(Box::new(e)))?;
            match done {
                Ok(()) => attempt.stage(blob, about).await,
                Err(e) => {
                    // A sweep deletes what stays behind.
                    let _ = attempt.abort().await;
                    Err(e)
                }
            }
        };
        let again = self.is_parent_later(history, number);
        let keeps = again && options.keeps_values();
        let (staged, kept) = if keeps && bytes >= KEPT_ASIDE {
            std::thread::scope(|s| {
                let keeping = s.spawn(move || self.keep_values(snapshot, tensors));
                let staged = bridge.wait_asking(asker, staging);
                (staged, keeping.join().ok().flatten())
            })
        } else {
            let kept = if keeps { self.keep_values(snapshot, tensors) } else { None };
            (bridge.wait_asking(asker, staging), kept)
        };
        let staged = match staged {
            Ok(staged) => staged.map_err(|e| bridge.error(e))?,
            Err(e) => {
                self.give_up(id);
                return Err(e);
            }
        };
        let why_base = why_base.or_else(|| (!delta).then_some(WhyBase::NothingGained));
        let stored = ObjectCache::take(&stored);
        let kept = match kept {
            None if again && stored.is_whole() => {
                stored.open(index, reader, self.reading())?.map(ParentValues::Frames)
            }
            // The other objects are quick to read from a local store.
            None if again && self.opener.local => {
                self.opener.kept.keep(id, &chain, stored);
                None
            }
            kept => kept,
        };
        let upload = started.elapsed().as_secs_f64() - encode;
        let stages = StageSeconds { encode, upload, publish: 0.0 };
        Ok((Ready { staged, report, stages, why_base, kept }, recall))
    }

    /// Encodes tensors and hands their objects to an attempt, which goes on uploading. `kept`: memory for
    /// objects that stay.
    pub(crate) fn encode_into(
        &self,
        mut attempt: Attempt,
        request: &SaveRequest<'_>,
        parent: (Option<Arc<dyn Parent>>, &Arc<Recall>),
        kept: KeptMemory,
        objects: ObjectOptions,
    ) -> Result<Uploading> {
        let SaveRequest { options, asker, .. } = request;
        let bridge = &self.opener.bridge;
        // A caller that waits for `staged` does not wait for the network.
        let within = |memory: usize| memory.checked_div(objects.bytes).unwrap_or(1);
        let waiting = match options.staged {
            Some(_) => options.staging_memory.map_or(MAX_OBJECTS, within).clamp(1, MAX_OBJECTS),
            None => 1,
        };
        // Half may wait for their hashes, and half for their uploads.
        let ahead = (waiting / 2).max(1);
        let (sender, receiver) = channel((waiting - waiting / 2).max(1));
        let uploading = bridge.spawn(async move {
            let done = upload(&mut attempt, receiver).await;
            (attempt, done)
        })?;
        let sink = ChannelSink { bridge: bridge.clone(), asker: asker.clone(), sender };
        let (sink, stored) = CachingSink::new(sink);
        let memory = ObjectMemory { buffers: self.buffers.clone(), ahead, kept };
        match self.encode(request, sink, parent, (objects, memory)) {
            Ok(written) => Ok(Uploading { written, uploading, stored }),
            Err(e) => {
                // If an upload failed, that is why the writer could not go on.
                let end = async move { end_of(uploading.await).await };
                Err(match bridge.wait_to_finish(end) {
                    Ok(Some(failed)) => bridge.error(failed),
                    _ => e,
                })
            }
        }
    }

    /// Deletes what a cancelled attempt left; if that fails, a sweep does it.
    pub(crate) fn give_up(&self, id: CheckpointId) {
        let store = self.opener.store.clone();
        let abort = self.opener.bridge.wait_to_finish(async move { store.abort(id).await });
        let problem = match abort {
            Ok(Ok(())) => return,
            Ok(Err(e)) => e.to_string(),
            Err(e) => e.to_string(),
        };
        tracing::warn!(
            checkpoint = %id, error = problem,
            "could not abort the attempt: uploaded objects remain until a sweep"
        );
    }

    fn encode(
        &self,
        request: &SaveRequest<'_>,
        sink: CachingSink,
        (parent, recall): (Option<Arc<dyn Parent>>, &Arc<Recall>),
        (objects, memory): (ObjectOptions, ObjectMemory),
    ) -> Result<Written> {
        let SaveRequest { tensors, options, asker, staged, .. } = request;
        let staged = options.staged.clone().map(|tell| -> StagedFn {
            let told = Arc::clone(staged);
            Arc::new(move || {
                if !told.swap(true, Ordering::Relaxed) {
                    tell();
                }
            })
        });
        let write = WriteOptions {
            parent,
            staged: staged.clone().filter(|_| !options.host_changes),
            #[cfg(feature = "cuda")]
            engine: options.engine.clone(),
            // The policy decides how long chains get; this is only the limit of readers.
            max_chain: Some(MAX_CHAIN as u32),
            progress: asker.callback(),
            ..self.writing()
        };
        let target = self.opener.bridge.target();
        let mut writer = Writer::create_objects_in(target, Box::new(sink), objects, write, memory)?;
        writer.recall = Some(Arc::clone(recall));
        writer.max_deltas = request.max_deltas;
        if let Some(roles) = &options.roles {
            writer.declare(roles.clone())?;
        }
        writer.write(tensors)?;
        if let Some(staged) = staged {
            staged();
        }
        writer.complete(options.contents.clone())
    }

    /// Lists the checkpoint.
    pub(crate) fn publish(&self, ready: Ready) -> Result<(Saved, Option<ParentValues>)> {
        let Ready { staged, report, mut stages, why_base, kept } = ready;
        let started = Instant::now();
        let checkpoint = self.list_staged(staged)?;
        stages.publish = started.elapsed().as_secs_f64();
        Ok((Saved { checkpoint, report, stages, why_base, retired: vec![] }, kept))
    }

    /// Lists a staged checkpoint. When the call is stopped meanwhile, it is listed whole or not at all.
    pub(crate) fn list_staged(&self, staged: Staged) -> Result<Checkpoint> {
        let id = staged.id();
        let store = self.opener.store.clone();
        let listed = self.opener.bridge.wait_to_finish(async move {
            match staged.publish().await {
                Err(StoreError::CommitUnknown(unknown)) => match store.resolve(&unknown).await? {
                    Resolution::Committed(_) => committed(&store, id).await,
                    Resolution::Lost => Err(StoreError::CommitUnknown(unknown)),
                },
                other => other,
            }
        });
        listed?.map_err(|e| self.error(e)).inspect_err(|e| {
            if matches!(e, Error::Store { source, .. } if matches!(**source, StoreError::Conflict(_)))
            {
                self.give_up(id);
            }
        })
    }

    /// Applies the retention. The checkpoint is safe by now, so a failure is logged and does not fail the
    /// save.
    pub(crate) fn retain(&self, saved: &Checkpoint) -> Result<Vec<CheckpointId>> {
        let Some(policy) = self.options.retention.clone() else { return Ok(vec![]) };
        let store = self.opener.store.clone();
        let retired = self.opener.bridge.ask(async move { store.apply_retention(&policy).await });
        Ok(retired.unwrap_or_else(|e| {
            tracing::warn!(step = saved.step(), error = %e, "retention failed; the next save tries again");
            vec![]
        }))
    }
}

/// Ends an upload whose writer failed, and removes its objects if possible. Returns the upload's
/// own failure.
pub(crate) async fn end_of(
    joined: std::result::Result<(Attempt, s4_store::Result<()>), tokio::task::JoinError>,
) -> Option<StoreError> {
    match joined {
        Ok((attempt, done)) => {
            let _ = attempt.abort().await;
            done.err()
        }
        Err(e) => Some(StoreError::Callback(Box::new(e))),
    }
}

async fn committed(store: &Store, id: CheckpointId) -> s4_store::Result<Checkpoint> {
    let state = store.state().await?;
    state.get(id).cloned().ok_or_else(|| StoreError::NoCheckpoint { what: id.to_string() })
}

/// The most chunks that a manifest has room for.
pub(crate) const MAX_CHUNKS: u64 = MAX_MANIFEST / ChunkRecord::SIZE as u64;

/// Fails if the records of the tensors' chunks alone exceed the limit of a manifest: otherwise that
/// would be noticed only after everything is uploaded.
pub(crate) fn check_chunks(tensors: &[TensorSource<'_>]) -> s4_store::Result<()> {
    let full = |t: &TensorSource<'_>| {
        let values = t.values.bytes() / t.dtype.value_width() as u64;
        values >> s4_engine::chunk_log2(t.dtype)
    };
    let chunks: u64 = tensors.iter().map(full).sum();
    if chunks <= MAX_CHUNKS {
        return Ok(());
    }
    let raw: u64 = tensors.iter().map(|t| t.values.bytes()).sum();
    Err(StoreError::Limit(format!(
        "{raw} bytes of tensors need at least {chunks} chunks; a checkpoint can have at most {MAX_CHUNKS}, \
         because its manifest is limited to {MAX_MANIFEST} bytes"
    )))
}

/// Whether an error is about the parent, so that saving a base would avoid it.
pub(crate) fn is_parent_failure(e: &Error) -> bool {
    match e {
        Error::Parent { .. } | Error::Checkpoint { .. } | Error::Format { .. } => true,
        Error::Store { source, .. } => matches!(
            **source,
            StoreError::Conflict(
                Conflict::ParentGone { .. }
                    | Conflict::ParentDiffers { .. }
                    | Conflict::TooDeep { .. }
            ) | StoreError::Missing { .. }
                | StoreError::Corrupt { .. }
        ),
        _ => false,
    }
}

/// The facts about tensors that the policy needs.
fn infos<'a>(tensors: &[TensorSource<'a>]) -> Vec<TensorInfo<'a>> {
    let info = |t: &TensorSource<'a>| TensorInfo {
        name: t.name,
        dtype: t.dtype,
        shape: t.shape,
        bytes: t.values.bytes(),
    };
    tensors.iter().map(info).collect()
}
