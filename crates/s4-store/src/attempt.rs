//! An attempt to store a checkpoint: data objects, then the manifest, then one log entry.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, PutPayload};
use s4_format::Digest;
use tokio::task::JoinSet;

use crate::entry::{MAX_ENTRY, Op, Publish, Reference};
use crate::error::{Conflict, Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::{MAX_RANK_OBJECTS, Part, Parts};
use crate::manifest::{MAX_OBJECT, Manifest, ObjectInfo};
use crate::reading::{Reading, hash};
use crate::state::{Checkpoint, End};
use crate::store::Store;

/// Up to this many objects are looked up one by one; more are listed.
const LOOK_UP: usize = 4;

/// Bytes reserved in a log entry for everything except metrics, tags and the counts of ranks; also enough when a
/// retired checkpoint is listed again.
const ENTRY_FRAME: usize = 2 << 10;

/// Object numbers are below this: far more than a manifest has room for.
const MAX_NUMBER: u32 = 1 << 21;

/// A checkpoint as its writer describes it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct About {
    /// The training step.
    pub step: u64,
    /// Its parent: that checkpoint's [`Checkpoint::reference`].
    pub parent: Option<Reference>,
    /// Number of checkpoints that the writer has made since the base, this one included; 0 for a base. Stored with
    /// the checkpoint, so that a later writer knows its position in the chain even after the checkpoints in between
    /// are deleted.
    pub since_base: u32,
    /// The checkpoint with the same content that this full one replaces.
    pub replaces: Option<Reference>,
    /// Its position in time ([`Checkpoint::order`]), if it is older than checkpoints that are
    /// already listed. The position decides which checkpoint is the newest and what retention
    /// keeps. `None`: this one is the newest.
    pub order: Option<u64>,
    /// Bytes of the tensors before compression.
    pub raw_len: u64,
    /// Named numbers by which retention can select.
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    pub tags: BTreeMap<String, String>,
}

impl About {
    /// Checks that a log entry can hold this, as far as is known before the upload.
    ///
    /// # Errors
    /// [`Error::Argument`] if a metric is not finite; [`Error::Limit`] if metrics and tags are too long.
    pub fn check(&self) -> Result<()> {
        self.check_beside(&Parts::default())
    }

    /// As [`About::check`], for an entry that also holds the counts of the ranks that stored it.
    fn check_beside(&self, parts: &Parts) -> Result<()> {
        if let Some((name, value)) = self.metrics.iter().find(|(_, v)| !v.is_finite()) {
            let what = format!("metric `{name}` is not a finite number: {value}");
            return Err(Error::Argument(what));
        }
        let bytes = json_len(&(&self.metrics, &self.tags))?;
        let ranks = if parts.is_empty() { 0 } else { json_len(parts)? };
        let room = (MAX_ENTRY as usize).saturating_sub(ENTRY_FRAME + ranks);
        if bytes > room {
            let what = format!(
                "metrics and tags take {bytes} bytes, but a log entry has room for {room}: use fewer or shorter ones"
            );
            return Err(Error::Limit(what));
        }
        Ok(())
    }
}

fn json_len(value: &impl serde::Serialize) -> Result<usize> {
    let text = serde_json::to_vec(value).map_err(|e| Error::Argument(e.to_string()))?;
    Ok(text.len())
}

/// A checkpoint being uploaded. Dropping it stops the uploads; a sweep deletes the uploaded
/// objects.
#[derive(Debug)]
pub struct Attempt {
    inner: Arc<Inner>,
    id: CheckpointId,
    /// The number in the key of its object 0: each rank's objects have their own range of numbers.
    first: u32,
    /// How many objects it may have at most.
    most: u32,
    /// Whether nobody else stores objects of it, so that all are deleted if it fails.
    alone: bool,
    uploads: JoinSet<Result<(u32, ObjectInfo)>>,
    objects: Vec<Option<ObjectInfo>>,
    /// The number of them that each rank stored.
    parts: Parts,
    /// Object numbers that are taken.
    taken: BTreeSet<u32>,
    /// The parent, and the running check that everything the checkpoint needs of it is there.
    parent: Option<(Reference, JoinSet<Result<()>>)>,
}

/// A checkpoint that is stored and checked, but not listed.
#[derive(Debug)]
pub struct Staged {
    inner: Arc<Inner>,
    publish: Publish,
    manifest: Manifest,
}

impl Store {
    /// Begins to store a checkpoint.
    ///
    /// # Errors
    /// [`Error::Refused`] if this process must not write here; [`Error::Locked`] if another one does, and
    /// only one may; [`Error::Gone`] if the store was removed.
    pub async fn begin(&self) -> Result<Attempt> {
        self.inner.ensure_writer().await?;
        self.inner.check_there().await?;
        let id = CheckpointId::new(self.inner.options.ids.next());
        Ok(Attempt { alone: true, ..self.attempt(id, 0, MAX_NUMBER) })
    }

    /// Begins rank `rank`'s part of a checkpoint that several processes store together: `id` is the
    /// id of an [`Attempt`] that one of them began. Ranks upload in parallel. Each ends with
    /// [`Attempt::finish_part`], and one of them lists the checkpoint with [`Store::gather`]; in a
    /// store with one writer at a time, that one is the writer.
    ///
    /// # Errors
    /// [`Error::Limit`] for a rank beyond [`MAX_RANKS`](crate::MAX_RANKS); [`Error::Conflict`] if, as far as this
    /// process knows, the checkpoint was listed already; [`Error::Gone`] if the store was removed.
    pub async fn join(&self, id: CheckpointId, rank: u32) -> Result<Attempt> {
        let first = Parts::first_of(rank).ok_or_else(|| {
            Error::Limit(format!(
                "rank {rank} is too large: at most {} ranks allowed",
                crate::MAX_RANKS
            ))
        })?;
        self.inner.check_writable().await?;
        self.inner.check_there().await?;
        self.inner.check_never_listed(id).await?;
        Ok(self.attempt(id, first, MAX_RANK_OBJECTS))
    }

    /// The attempt `id` with all its parts: the result of each rank's [`Attempt::finish_part`], in the order of
    /// ranks. Nothing can be added to it; stage and publish it.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::Locked`] as [`Store::begin`]; [`Error::Conflict`] as [`Store::join`];
    /// [`Error::Limit`] for too many ranks or objects.
    pub async fn gather(&self, id: CheckpointId, parts: Vec<Vec<ObjectInfo>>) -> Result<Attempt> {
        self.inner.ensure_writer().await?;
        self.inner.check_there().await?;
        self.inner.check_never_listed(id).await?;
        let count = |part: &Vec<ObjectInfo>| u32::try_from(part.len()).unwrap_or(u32::MAX);
        let counts = Parts::new(parts.iter().map(count).collect())?;
        let objects = parts.into_iter().flatten().map(Some).collect();
        Ok(Attempt { objects, parts: counts, ..self.attempt(id, 0, 0) })
    }

    fn attempt(&self, id: CheckpointId, first: u32, most: u32) -> Attempt {
        Attempt {
            inner: Arc::clone(&self.inner),
            id,
            first,
            most,
            alone: false,
            uploads: JoinSet::new(),
            objects: Vec::new(),
            parts: Parts::default(),
            taken: BTreeSet::new(),
            parent: None,
        }
    }
}

impl Attempt {
    /// The id that the checkpoint will have.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.id
    }

    /// Uploads an object of at most [`MAX_OBJECT`] bytes in the background and returns its number.
    /// Waits while uploads use up their memory budget.
    ///
    /// # Errors
    /// [`Error::Limit`] if it is too large; the failure of an earlier upload.
    pub async fn put(&mut self, kind: &str, bytes: Bytes) -> Result<u32> {
        let n = u32::try_from(self.objects.len()).map_err(|e| Error::Limit(e.to_string()))?;
        self.put_as(n, kind, bytes).await?;
        Ok(n)
    }

    /// As [`Attempt::put`], with the object's number given: the numbers of a checkpoint may come in
    /// any order, each once, and in the end none may be missing.
    ///
    /// # Errors
    /// As [`Attempt::put`]; [`Error::Argument`] if the number is taken; [`Error::Limit`] if it is too large.
    pub async fn put_as(&mut self, n: u32, kind: &str, bytes: Bytes) -> Result<()> {
        self.upload(n, kind, bytes.into(), None).await
    }

    /// As [`Attempt::put_as`], for bytes in one or several parts, whose hash the caller knows. If
    /// the hash is wrong, the object can never be read.
    ///
    /// # Errors
    /// As [`Attempt::put_as`].
    pub async fn put_hashed(
        &mut self,
        n: u32,
        kind: &str,
        bytes: impl Into<PutPayload>,
        blake3: Digest,
    ) -> Result<()> {
        self.upload(n, kind, bytes.into(), Some(blake3)).await
    }

    async fn upload(
        &mut self,
        n: u32,
        kind: &str,
        bytes: PutPayload,
        known: Option<Digest>,
    ) -> Result<()> {
        let len = bytes.content_length();
        if len > MAX_OBJECT {
            return Err(Error::Limit(format!(
                "object has {len} bytes, at most {MAX_OBJECT} allowed"
            )));
        }
        if self.most == 0 {
            let what = format!(
                "checkpoint {}: cannot add an object after its parts were gathered",
                self.id
            );
            return Err(Error::Argument(what));
        }
        if n >= self.most {
            let whose = if self.alone { "a checkpoint" } else { "one rank" };
            return Err(Error::Limit(format!("more than {} objects for {whose}", self.most)));
        }
        if !self.taken.insert(n) {
            return Err(Error::Argument(format!("object number {n} is already in use")));
        }
        while let Some(done) = self.uploads.try_join_next() {
            self.note(done)?;
        }
        let permit = self.inner.io.reserve(len).await?;
        let (inner, id, kind) = (Arc::clone(&self.inner), self.id, kind.to_owned());
        let number = self.first + n;
        let count = self.objects.len().max(n as usize + 1);
        self.objects.resize(count, None);
        self.uploads.spawn(async move {
            let _permit = permit;
            let key = inner.layout.part(id, Part::Data(number));
            let blake3 = match known {
                Some(hash) => hash,
                // The payload is in one part here, so this copies nothing.
                None => hash(bytes.clone().into()).await,
            };
            inner.io.put_parts(&key, bytes).await?;
            Ok((n, ObjectInfo { len: len as u64, blake3, kind }))
        });
        Ok(())
    }

    fn note(
        &mut self,
        done: std::result::Result<Result<(u32, ObjectInfo)>, tokio::task::JoinError>,
    ) -> Result<()> {
        let (n, info) = done.map_err(|e| Error::Callback(Box::new(e)))??;
        if let Some(slot) = usize::try_from(n).ok().and_then(|n| self.objects.get_mut(n)) {
            *slot = Some(info);
        }
        Ok(())
    }

    /// Starts to check, during the uploads, that every object that a delta of `parent` needs is
    /// there. [`Attempt::stage`] starts the check if this was not called, and waits for its result.
    /// Must be called within a tokio runtime.
    pub fn expect_parent(&mut self, parent: Reference) {
        if self.parent.as_ref().is_some_and(|(begun, _)| *begun == parent) {
            return;
        }
        let (inner, id) = (Arc::clone(&self.inner), self.id);
        let mut task = JoinSet::new();
        task.spawn(async move { inner.check_parent(id, parent).await });
        self.parent = Some((parent, task));
    }

    /// Waits for all uploads, writes the manifest, and checks that every object is there, including those of the
    /// checkpoint's ancestors. If that fails, the uploaded objects are deleted, unless the place does not answer or
    /// several ranks uploaded them.
    ///
    /// # Errors
    /// The failure of an upload; those of [`About::check`]; [`Error::Missing`] or [`Error::Corrupt`] if an
    /// object of the parent's chain is missing or has another size.
    pub async fn stage(mut self, blob: Bytes, about: About) -> Result<Staged> {
        match self.complete(blob, about).await {
            Ok((publish, manifest)) => Ok(Staged { inner: self.inner, publish, manifest }),
            Err(error) => {
                // Only a staged checkpoint can be listed. This one was not staged, so its objects need not wait for
                // a sweep. Parts of several ranks may have been listed before; their coordinator knows.
                if self.alone && !matches!(error, Error::Deadline { .. }) {
                    let left = self.abort().await.err();
                    if let Some(e) = left {
                        tracing::debug!(
                            error = %e,
                            "could not abort the attempt: a sweep will delete the uploaded objects"
                        );
                    }
                }
                Err(error)
            }
        }
    }

    /// Waits for the uploads and stores the manifest. Returns the content of the log entry, and the manifest.
    async fn complete(&mut self, blob: Bytes, about: About) -> Result<(Publish, Manifest)> {
        about.check_beside(&self.parts)?;
        if let Some(parent) = about.parent {
            self.expect_parent(parent);
        }
        let objects = self.uploaded().await?;
        self.inner.reached("attempt.data").await;
        let manifest = Manifest { objects, parts: self.parts.clone(), blob };
        let bytes = manifest.to_bytes(self.id)?;
        let publish = Publish {
            id: self.id,
            step: about.step,
            parent: about.parent,
            since_base: about.since_base,
            replaces: about.replaces,
            order: about.order,
            manifest_blake3: hash(bytes.clone()).await,
            manifest_len: bytes.len() as u64,
            objects: u32::try_from(manifest.objects.len()).unwrap_or(u32::MAX),
            parts: manifest.parts.clone(),
            data_len: manifest.data_len(),
            raw_len: about.raw_len,
            metrics: about.metrics,
            tags: about.tags,
        };
        self.inner.io.put(&self.inner.layout.part(self.id, Part::Manifest), bytes).await?;
        self.inner.reached("attempt.manifest").await;
        self.inner.check_sizes(&publish, &manifest).await?;
        if let Some((_, task)) = self.parent.as_mut().filter(|_| publish.parent.is_some()) {
            while let Some(done) = task.join_next().await {
                done.map_err(|e| Error::Callback(Box::new(e)))??;
            }
        }
        Ok((publish, manifest))
    }

    /// Waits for the uploads of a rank's part and returns its objects, for [`Store::gather`].
    ///
    /// # Errors
    /// The failure of an upload.
    pub async fn finish_part(mut self) -> Result<Vec<ObjectInfo>> {
        self.uploaded().await
    }

    /// Waits for all uploads.
    async fn uploaded(&mut self) -> Result<Vec<ObjectInfo>> {
        while let Some(done) = self.uploads.join_next().await {
            self.note(done)?;
        }
        let objects: Option<Vec<_>> = std::mem::take(&mut self.objects).into_iter().collect();
        objects.ok_or_else(|| {
            Error::Argument(format!(
                "an object of checkpoint {} is missing or could not be uploaded",
                self.id
            ))
        })
    }

    /// [`Attempt::stage`], then [`Staged::publish`].
    ///
    /// # Errors
    /// As those two.
    pub async fn publish(self, blob: Bytes, about: About) -> Result<Checkpoint> {
        self.stage(blob, about).await?.publish().await
    }

    /// Stops the uploads and deletes the uploaded objects. A sweep later deletes the objects of
    /// requests still in flight.
    ///
    /// # Errors
    /// If objects cannot be deleted.
    pub async fn abort(mut self) -> Result<()> {
        self.uploads.shutdown().await;
        self.inner.delete_checkpoint(self.id).await.map(drop)
    }
}

impl Staged {
    /// The checkpoint's id.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.publish.id
    }

    /// The reference by which a delta names it as its parent; valid only once it is published.
    #[must_use]
    pub fn reference(&self) -> Reference {
        Reference { id: self.publish.id, manifest_blake3: self.publish.manifest_blake3 }
    }

    /// Reads its objects, to check them before publishing.
    #[must_use]
    pub fn reading(&self) -> Reading {
        Reading::new(Arc::clone(&self.inner), self.publish.id, self.manifest.clone())
    }

    /// Lists the checkpoint, atomically.
    ///
    /// # Errors
    /// [`Error::Conflict`] if its parent was retired meanwhile, or a sweep gave up on this attempt;
    /// [`Error::CommitUnknown`] if it is unknown whether the checkpoint is listed. Dropping the future leaves that
    /// unknown, too: list the store to find out.
    pub async fn publish(self) -> Result<Checkpoint> {
        let op = Op::Publish(self.publish);
        let id = op.published();
        let entry = match self.inner.append(|_| Ok(Some(op.clone()))).await {
            Err(e @ Error::Limit(_)) => {
                // Its entry was never written, and cannot be.
                if let Some(id) = id {
                    let _ = self.inner.delete_checkpoint(id).await;
                }
                return Err(e);
            }
            other => other?,
        };
        let known = self.inner.known.lock().await;
        let listed = id.and_then(|id| known.state.get(id)).cloned();
        // Another writer may have retired it since, and this process may already have read that.
        listed
            .or_else(|| entry.and_then(just_published))
            .ok_or_else(|| Error::NoCheckpoint { what: "was published".to_owned() })
    }
}

fn just_published(entry: crate::entry::Entry) -> Option<Checkpoint> {
    let Op::Publish(about) = entry.op else { return None };
    let base = about.parent.map(|p| p.id);
    Some(Checkpoint {
        about,
        entry: entry.n,
        order: entry.n,
        base,
        pinned: false,
        at_ms: entry.at_ms,
    })
}

impl Inner {
    /// Refuses to store objects of a checkpoint that was listed: they would take the place of its own. One that
    /// was aborted has none that are needed, and the log refuses to list it.
    async fn check_never_listed(&self, id: CheckpointId) -> Result<()> {
        let known = self.known.lock().await;
        let state = match known.state.dead(id).map(|dead| dead.how) {
            None if known.state.get(id).is_some() => "published",
            Some(how @ (End::Retired | End::Replaced { .. })) => how.word(),
            None | Some(End::Aborted) => return Ok(()),
        };
        Err(Conflict::Spent { id, state }.into())
    }

    /// Compares the stored objects' sizes with what was uploaded.
    async fn check_sizes(&self, publish: &Publish, manifest: &Manifest) -> Result<()> {
        let mut wanted: BTreeMap<_, _> = (publish.numbers())
            .zip(&manifest.objects)
            .map(|(n, o)| (self.layout.part(publish.id, Part::Data(n)), o.len))
            .collect();
        wanted.insert(self.layout.part(publish.id, Part::Manifest), publish.manifest_len);
        if wanted.len() > LOOK_UP {
            // A listing may be stale: an object that it misses or shows with another size is looked up.
            for meta in self.io.list(&self.layout.checkpoint(publish.id), None).await? {
                if wanted.get(&meta.location) == Some(&meta.size) {
                    wanted.remove(&meta.location);
                }
            }
        }
        let sizes = self.io.size_each(wanted.keys().cloned().collect(), self.concurrency()).await;
        for ((key, len), size) in wanted.into_iter().zip(sizes) {
            match size? {
                size if size == len => {}
                size => {
                    let what = format!("object has {size} bytes, but {len} bytes were uploaded");
                    return Err(Error::corrupt(key, what));
                }
            }
        }
        Ok(())
    }

    /// Checks that all checkpoints of a parent's chain are there. What the log says about the
    /// parent is checked before the commit, not here.
    async fn check_parent(&self, child: CheckpointId, parent: Reference) -> Result<()> {
        let chain: Vec<Publish> = {
            let known = self.known.lock().await;
            let Ok(base) = known.state.find_parent(child, parent) else { return Ok(()) };
            known.state.chain(base.id())?.into_iter().map(|c| c.about.clone()).collect()
        };
        let check = |publish: Publish| async move { self.check_whole(&publish).await };
        let checks = futures::stream::iter(chain).map(check);
        checks.buffer_unordered(self.concurrency()).try_collect::<()>().await
    }

    /// Checks that the objects of a listed checkpoint are there, in the number and with the total
    /// size that the log says.
    pub(crate) async fn check_whole(&self, publish: &Publish) -> Result<()> {
        let of = || format!(": it belongs to checkpoint {} (step {})", publish.id, publish.step);
        let folder = self.layout.checkpoint(publish.id);
        if publish.objects > MAX_NUMBER {
            return Err(Error::corrupt(
                folder,
                format!("{} objects, at most {MAX_NUMBER} allowed", publish.objects),
            ));
        }
        let parts = || publish.numbers().map(Part::Data).chain([Part::Manifest]);
        let mut found: BTreeMap<Part, u64> = BTreeMap::new();
        if publish.objects as usize >= LOOK_UP {
            for meta in self.io.list(&folder, None).await? {
                if let Some((_, part)) = self.layout.parse_part(&meta.location) {
                    found.insert(part, meta.size);
                }
            }
        }
        // A listing may be stale: what it does not show is looked up.
        let missing: Vec<_> = parts().filter(|part| !found.contains_key(part)).collect();
        let keys = missing.iter().map(|&part| self.layout.part(publish.id, part)).collect();
        let sizes = self.io.size_each(keys, self.concurrency()).await;
        for (part, size) in missing.into_iter().zip(sizes) {
            let size = size.map_err(|e| match e {
                Error::Missing { key, .. } => Error::Missing { key, context: of() },
                other => other,
            })?;
            found.insert(part, size);
        }
        let sum = |data: bool| -> u64 {
            let parts = parts().filter(|part| data == matches!(part, Part::Data(_)));
            parts.filter_map(|part| found.get(&part)).fold(0, |sum, len| sum.saturating_add(*len))
        };
        if sum(false) == publish.manifest_len && sum(true) == publish.data_len {
            return Ok(());
        }
        let what = format!("the size of its objects differs from the log{}", of());
        Err(Error::corrupt(folder, what))
    }

    /// Deletes all objects of a checkpoint, the manifest last. Returns how many bytes they had.
    pub(crate) async fn delete_checkpoint(&self, id: CheckpointId) -> Result<u64> {
        let folder = self.layout.checkpoint(id);
        let mut found = self.io.list(&folder, None).await?;
        let manifest = self.layout.part(id, Part::Manifest);
        let last = found.iter().position(|m| m.location == manifest).map(|i| found.swap_remove(i));
        let bytes = found.iter().chain(&last).map(|m| m.size).sum();
        let delete = |meta: ObjectMeta| async move { self.io.delete(&meta.location).await };
        let deletes = futures::stream::iter(found).map(delete);
        deletes.buffer_unordered(self.concurrency()).try_collect::<()>().await?;
        self.reached("delete.begun").await;
        if let Some(meta) = last {
            self.io.delete(&meta.location).await?;
        }
        if let Some(local) = &self.folder {
            local.remove_if_empty(&folder);
        }
        Ok(bytes)
    }
}

/// A delta names its parent by both: the id and the manifest's hash.
impl From<(CheckpointId, Digest)> for Reference {
    fn from((id, manifest_blake3): (CheckpointId, Digest)) -> Self {
        Self { id, manifest_blake3 }
    }
}
