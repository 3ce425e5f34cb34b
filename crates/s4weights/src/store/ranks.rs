//! One checkpoint, stored by several processes.
//!
//! One process, the coordinator, begins it ([`CheckpointStore::begin_parts`]) and tells the others which
//! attempt they share. Each encodes its own tensors into objects of that attempt
//! ([`CheckpointStore::save_part`]), without communicating with the others. The coordinator receives each
//! one's result, merges the indexes, and lists the checkpoint with one log entry
//! ([`CheckpointStore::publish_parts`]). The result is a checkpoint like any other.

use std::time::Instant;

use bytes::Bytes;
use s4_store::{
    About, Checkpoint, CheckpointId, Error as StoreError, MAX_MANIFEST, MAX_OBJECT,
    MAX_RANK_OBJECTS, ObjectInfo, Reference,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::interrupt;
use crate::objects::{DataObject, ObjectOptions, ObjectSink};
use crate::report::Report;
use crate::store::bridge::Asker;
use crate::store::cache::ObjectCache;
use crate::store::history::ParentValues;
use crate::store::parents::{WhyBase, chain, distance};
use crate::store::save::{MAX_CHUNKS, SaveRequest, StageSeconds, Uploading, check_chunks};
use crate::store::{CheckpointStore, SaveOptions, Saved};
use crate::tensor_source::TensorSource;
use crate::writer::{MAX_DELTAS, Writer, Written};

/// Bytes of values in most chunks.
const CHUNK: u64 = 256 << 10;

/// What a rank must know to store its part of a checkpoint: the coordinator makes one for each rank and
/// sends it, as JSON if necessary. All of them are of the same version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartOf {
    /// The checkpoint that the parts will form.
    pub id: CheckpointId,
    /// The checkpoint that it may be a delta of.
    parent: Option<Reference>,
    /// Its number since the base.
    number: u32,
    /// Why it is a base; `None` if it may be a delta.
    why_base: Option<String>,
    /// How many of the rank's tensors may be deltas or copies: the merged index numbers the plans of all ranks
    /// together.
    deltas: usize,
}

/// The objects and the index that one rank stored.
#[derive(Debug, Clone, Default)]
pub struct RankPart {
    objects: Vec<ObjectInfo>,
    index: Bytes,
    /// Counts and sizes of this part.
    pub report: Report,
}

/// The head of a part as bytes; the index follows it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    id: CheckpointId,
    objects: Vec<ObjectInfo>,
    bytes_in: u64,
    bytes_out: u64,
}

impl RankPart {
    /// A part as bytes, to be sent to the coordinator.
    ///
    /// # Errors
    /// `Argument` if it is too large.
    pub fn to_bytes(&self, of: &PartOf) -> Result<Vec<u8>> {
        let Report { bytes_in, bytes_out, .. } = self.report;
        let head = Head { id: of.id, objects: self.objects.clone(), bytes_in, bytes_out };
        let head = serde_json::to_vec(&head).map_err(|e| Error::Argument(e.to_string()))?;
        let len = u32::try_from(head.len()).map_err(|e| Error::Argument(e.to_string()))?;
        Ok([&len.to_le_bytes()[..], &head, &self.index].concat())
    }

    /// Reads a part from the bytes that [`RankPart::to_bytes`] returned.
    ///
    /// # Errors
    /// `Argument` if they are not a part, or one of another checkpoint.
    pub fn from_bytes(bytes: &Bytes, of: &PartOf) -> Result<Self> {
        let bad = |what: &str| Error::Argument(format!("part of checkpoint {}: {what}", of.id));
        let (len, rest) = bytes.split_first_chunk().ok_or_else(|| bad("it ends too early"))?;
        let len = usize::try_from(u32::from_le_bytes(*len)).map_err(|e| bad(&e.to_string()))?;
        let (head, index) = rest.split_at_checked(len).ok_or_else(|| bad("it ends too early"))?;
        let head: Head = serde_json::from_slice(head).map_err(|e| bad(&e.to_string()))?;
        if head.id != of.id {
            return Err(bad(&format!("it belongs to checkpoint {}", head.id)));
        }
        let Head { objects, bytes_in, bytes_out, .. } = head;
        let report = Report { bytes_in, bytes_out, ..Report::default() };
        Ok(Self { objects, index: bytes.slice_ref(index), report })
    }
}

impl CheckpointStore {
    /// Begins a checkpoint of several processes, which has about `raw` bytes of tensors in all;
    /// `tensors`: about how many each rank has. Returns what to send to each rank, in the same order.
    /// Its parent is chosen as for a save ([`CheckpointStore::save`]); a tensor becomes a delta if the
    /// parent has one of the same name, type and shape. A checkpoint can have only some 65,000 deltas:
    /// if there are more tensors, each rank gets a share in proportion to its own. `base`: write a
    /// base, whatever the policy says.
    ///
    /// # Errors
    /// As [`CheckpointStore::save`].
    pub fn begin_parts(&self, raw: u64, tensors: &[usize], base: bool) -> Result<Vec<PartOf>> {
        // Only a warning: some of the tensors may be stored as smaller ones, or as one.
        if raw > MAX_CHUNKS * CHUNK {
            tracing::warn!(
                store = self.name(),
                bytes = raw,
                "the checkpoint may be too large: with more than {MAX_CHUNKS} chunks ({} bytes), it cannot be \
                 listed, because its manifest is limited to {MAX_MANIFEST} bytes",
                MAX_CHUNKS * CHUNK
            );
        }
        let of = self.begin_part(raw, base)?;
        let shares = shares(MAX_DELTAS, tensors).into_iter();
        Ok(shares.map(|deltas| PartOf { deltas, ..of.clone() }).collect())
    }

    fn begin_part(&self, raw: u64, base: bool) -> Result<PartOf> {
        let deltas = MAX_DELTAS;
        let store = self.opener.store.clone();
        let id = self.opener.bridge.ask(async move { Ok(store.begin().await?.id()) })?;
        let as_base = |why: WhyBase| {
            let why_base = Some(why.to_string());
            PartOf { id, parent: None, number: 0, why_base, deltas }
        };
        if base {
            return Ok(as_base(WhyBase::Asked));
        }
        let history = interrupt::lock(&self.history)?;
        let family = self.family(&history)?;
        Ok(match family.next(raw, 0) {
            Err(reason) => as_base(WhyBase::Policy(reason)),
            Ok((number, chain)) => {
                let parent = chain.first().map(Checkpoint::reference);
                PartOf { id, parent, number, why_base: None, deltas }
            }
        })
    }

    /// Stores the part of rank `rank`. Of `options`, only what describes the tensors and how they
    /// are staged applies; everything else is up to the coordinator. Each rank may call this once,
    /// even if it has no tensors. Objects are kept in memory, within a share of
    /// [`StoreOptions::parent_memory`], for later deltas of them.
    ///
    /// [`StoreOptions::parent_memory`]: crate::store::StoreOptions::parent_memory
    ///
    /// # Errors
    /// As [`CheckpointStore::save`], and [`Error::Store`] or [`Error::Checkpoint`] if the parent
    /// cannot be read: then no rank's part can be used, and the coordinator must begin another
    /// checkpoint. `Limit` if the rank has more tensors than its part may hold.
    pub fn save_part(
        &self,
        of: &PartOf,
        rank: u32,
        tensors: &[TensorSource<'_>],
        options: &SaveOptions,
    ) -> Result<RankPart> {
        check_chunks(tensors).map_err(|e| self.error(e))?;
        let raw = tensors.iter().map(|t| t.values.bytes()).sum();
        // Many processes take enough connections together.
        let bytes = object_bytes(raw, self.options.object_bytes);
        let objects = ObjectOptions { bytes };
        let chain = match of.parent {
            None => vec![],
            Some(parent) => chain(&*self.state()?, parent.id).map_err(|e| self.error(e))?,
        };
        let parent = match chain.is_empty() {
            true => None,
            false => {
                let reader = self.opener.open(&chain, &self.reading())?;
                Some(ParentValues::Frames(reader).parent())
            }
        };
        let (store, id) = (self.opener.store.clone(), of.id);
        let attempt = self.opener.bridge.ask(async move { store.join(id, rank).await })?;
        let mut request = SaveRequest::new(0, tensors, options);
        request.max_deltas = of.deltas;
        let kept = options.kept_memory(self.room_for_stored(true, of.number));
        let known = of.parent.map(|parent| (parent.id, distance(of.number, &chain)));
        let recall = self.recall(known, of.number, true);
        let Uploading { written, uploading, stored } =
            self.encode_into(attempt, &request, (parent, &recall), kept, objects)?;
        let finishing = async move {
            let (attempt, done) = uploading.await.map_err(|e| StoreError::Callback(Box::new(e)))?;
            done?;
            attempt.finish_part().await
        };
        let objects = self.opener.bridge.wait_asking(&request.asker, finishing);
        self.buffers.rest();
        let Written { report, index, .. } = written;
        let index = index.unwrap_or_default();
        let objects = objects?.map_err(|e| self.error(e))?;
        self.remember(id, of.number, &recall);
        // So that a delta of this checkpoint need not read it back.
        let needed: Vec<_> = chain.iter().map(Checkpoint::id).collect();
        self.opener.kept.keep(id, &needed, ObjectCache::take(&stored));
        Ok(RankPart { objects, index, report })
    }

    /// Lists a checkpoint whose parts are stored. `parts` has what each rank returned, in the order
    /// of ranks; `None` for a rank without a part. `options` says what the checkpoint holds besides
    /// tensors.
    ///
    /// # Errors
    /// As [`CheckpointStore::save`]; `Argument` if two parts have a tensor of the same name. Nothing is
    /// listed then.
    pub fn publish_parts(
        &self,
        of: &PartOf,
        step: u64,
        parts: Vec<Option<RankPart>>,
        options: &SaveOptions,
    ) -> Result<Saved> {
        let mut history = interrupt::lock(&self.history)?;
        let saved = self.merge(of, step, parts, options);
        let mut saved = saved.inspect_err(|_| self.give_up(of.id))?;
        self.is_parent_later(&mut history, saved.checkpoint.since_base());
        history.saved(&saved.checkpoint, None);
        drop(history);
        saved.retired = self.retain(&saved.checkpoint)?;
        Ok(saved)
    }

    /// Gives up a checkpoint of several processes: it can never be listed, and its objects are deleted.
    pub fn give_up_parts(&self, of: &PartOf) {
        self.give_up(of.id);
    }

    fn merge(
        &self,
        of: &PartOf,
        step: u64,
        parts: Vec<Option<RankPart>>,
        options: &SaveOptions,
    ) -> Result<Saved> {
        let bridge = &self.opener.bridge;
        let sizes = ObjectOptions { bytes: self.options.object_bytes };
        let writing = self.writing();
        let mut index =
            Writer::create_objects(bridge.target(), Box::new(NoObjects), sizes, writing)?;
        let mut objects = vec![];
        for (rank, part) in parts.into_iter().enumerate() {
            let RankPart { objects: stored, index: own, .. } = part.unwrap_or_default();
            let known = index.adopted.objects.len();
            if !own.is_empty() {
                index.adopt(own)?;
            }
            let named = index.adopted.objects[known..].iter().map(|o| (o.bytes, o.blake3));
            if !named.eq(stored.iter().map(|o| (o.len, o.blake3))) {
                let what = format!(
                    "the index of rank {rank} does not match the objects that the rank stored"
                );
                return Err(Error::Argument(what));
            }
            objects.push(stored);
        }
        let Written { report, snapshot, index } = index.complete(options.contents.clone())?;
        let delta = snapshot.depth() > 1;
        let about = About {
            step,
            parent: of.parent.filter(|_| delta),
            since_base: if delta { of.number } else { 0 },
            replaces: None,
            order: None,
            raw_len: report.bytes_in,
            metrics: options.metrics.clone(),
            tags: options.tags.clone(),
        };
        let (store, id) = (self.opener.store.clone(), of.id);
        let asker = Asker::new(options.progress.clone());
        let staging = async move {
            let attempt = store.gather(id, objects).await?;
            attempt.stage(index.unwrap_or_default(), about).await
        };
        let staged = bridge.wait_asking(&asker, staging)?.map_err(|e| self.error(e))?;
        let started = Instant::now();
        let checkpoint = self.list_staged(staged)?;
        let publish = started.elapsed().as_secs_f64();
        let stages = StageSeconds { publish, ..StageSeconds::default() };
        let begun = of.why_base.clone().map(WhyBase::Begun);
        let why_base = begun.or((!delta).then_some(WhyBase::NothingGained));
        Ok(Saved { checkpoint, report, stages, why_base, retired: vec![] })
    }
}

/// The size of the objects of a rank with `raw` bytes of tensors: larger than `usual` if it might have more
/// of them than a rank may have. How much smaller its tensors become is known only when they are stored.
fn object_bytes(raw: u64, usual: usize) -> usize {
    // Not every object is full.
    const FULL: u64 = MAX_RANK_OBJECTS as u64 * 63 / 64;
    let needed = usize::try_from(raw.div_ceil(FULL)).unwrap_or(usize::MAX);
    needed.min(MAX_OBJECT).max(usual)
}

/// Divides `all` among ranks in proportion to their tensors.
fn shares(all: usize, tensors: &[usize]) -> Vec<usize> {
    let total = tensors.iter().map(|&n| n as u128).sum::<u128>().max(1);
    let share = |&n: &usize| usize::try_from(all as u128 * n as u128 / total).unwrap_or(all);
    tensors.iter().map(share).collect()
}

/// The sink of a writer that merges indexes and has no objects of its own.
struct NoObjects;

impl ObjectSink for NoObjects {
    fn put(&mut self, object: DataObject) -> Result<()> {
        Err(Error::Argument(format!(
            "cannot store object {}: only an index is written",
            object.number
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_part_has_larger_objects_and_not_too_many() {
        const USUAL: usize = 32 << 20;
        let size = |gib: u64| object_bytes(gib << 30, USUAL);
        assert_eq!([size(0), size(120)], [USUAL; 2]);
        for gib in [128, 200, 250] {
            let bytes = size(gib);
            assert!(bytes > USUAL && bytes <= MAX_OBJECT, "{gib}: {bytes}");
            assert!((gib << 30).div_ceil(bytes as u64) < u64::from(MAX_RANK_OBJECTS), "{gib}");
        }
        // They may become small enough.
        assert_eq!([size(256), size(u64::MAX >> 30)], [MAX_OBJECT; 2]);
    }

    #[test]
    fn ranks_together_have_no_more_deltas_than_one_process() {
        assert_eq!(shares(MAX_DELTAS, &[33_500, 33_500]), [32_500, 32_500]);
        assert_eq!(shares(MAX_DELTAS, &[7]), [MAX_DELTAS]);
        assert_eq!(shares(MAX_DELTAS, &[0, 0]), [0, 0]);
        // A checkpoint with few enough tensors can store all of them as deltas.
        let tensors = [64_000, 0, 1, 999];
        let shares = shares(MAX_DELTAS, &tensors);
        assert!(shares.iter().zip(tensors).all(|(&share, n)| share >= n), "{shares:?}");
        assert!(shares.iter().sum::<usize>() <= MAX_DELTAS);
        assert!(super::shares(MAX_DELTAS, &[usize::MAX, 5]).iter().sum::<usize>() <= MAX_DELTAS);
    }
}
