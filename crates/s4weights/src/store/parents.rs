//! Chooses the parent of the next checkpoint, and finds the parent's values.

use std::borrow::Cow;
use std::sync::Arc;

use s4_delta::Tree;
use s4_delta::policy::{CheckpointSize, Decision, Next, Policy, Reason};
use s4_engine::{Preset, Values};
use s4_store::{Checkpoint, CheckpointId, Reference, State};

use crate::error::{Error, Result};
use crate::memory::{MemoryOptions, TensorCodec};
use crate::options::WriteOptions;
use crate::pack::SMALL;
use crate::parallel::lock;
use crate::parent::{MemoryParent, Parent, Snapshot};
use crate::reader::{ReadOptions, Reader, TensorInfo};
use crate::recall::Recall;
use crate::store::history::{Held, ParentValues, SaveHistory};
use crate::store::{CheckpointStore, StoreOptions};
use crate::tensor_source::TensorSource;

/// Samples may take [`StoreOptions::parent_memory`] divided by this, in addition.
const SAMPLES: usize = 2;

/// Why a checkpoint is a base.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhyBase {
    /// The caller wanted one.
    Asked,
    /// The policy wanted one.
    Policy(Reason),
    /// The values of the previous checkpoint could not be used, for this reason.
    Parent(String),
    /// A checkpoint of several processes was begun as a base, for this reason.
    Begun(String),
    /// No tensor was smaller as a delta.
    NothingGained,
}

impl std::fmt::Display for WhyBase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asked => f.write_str("a base was requested"),
            Self::Policy(reason) => reason.fmt(f),
            Self::Parent(why) => write!(f, "the previous checkpoint cannot be used: {why}"),
            Self::Begun(why) => f.write_str(why),
            Self::NothingGained => f.write_str("no tensor was smaller as a difference"),
        }
    }
}

/// The checkpoint that the next one may be a delta of.
pub(crate) struct ParentCheckpoint {
    pub(crate) reference: Reference,
    /// It and its ancestors.
    pub(crate) chain: Vec<CheckpointId>,
    pub(crate) values: ParentValues,
    /// The next checkpoint's number since the base, and how many checkpoints after the parent it
    /// is.
    pub(crate) number: u32,
    pub(crate) distance: u32,
}

/// A checkpoint, its ancestors, and the others with the same base.
pub(crate) struct Family {
    policy: Policy,
    /// The base last.
    chain: Vec<Checkpoint>,
    /// Sizes along the chain, the base first.
    entries: Vec<CheckpointSize>,
    deltas: Vec<CheckpointSize>,
}

impl Family {
    /// The next checkpoint's number since the base and the chain that starts with its parent, or
    /// why it must be a base. It has `raw` bytes of tensors, `changed` of which have no counterpart
    /// in the parent.
    pub(crate) fn next(
        &self,
        raw: u64,
        changed: u64,
    ) -> std::result::Result<(u32, &[Checkpoint]), Reason> {
        match self.policy.choose(&self.entries, &self.deltas, Next { raw, changed }) {
            Decision::Base(reason) => Err(reason),
            // `self.chain` is in the opposite order.
            Decision::Delta { since_base, parent } => {
                Ok((since_base, &self.chain[self.chain.len() - 1 - parent..]))
            }
        }
    }
}

impl StoreOptions {
    fn tree(&self) -> Tree {
        Tree::new(self.max_chain, self.max_hops)
    }

    /// Bytes of buffers to keep for reuse: those of one save and those of the values that stay in memory.
    pub(crate) fn buffers(&self) -> usize {
        self.requests.upload_memory.saturating_add(self.parent_memory)
    }

    /// Bytes that the values of one checkpoint may take.
    pub(crate) fn share(&self) -> usize {
        self.parent_memory / self.tree().parents().max(1) as usize
    }
}

impl CheckpointStore {
    /// The parent of the next checkpoint, or why it has none.
    pub(crate) fn choose(
        &self,
        history: &mut SaveHistory,
        tensors: &[TensorInfo<'_>],
        on_devices: bool,
    ) -> Result<std::result::Result<ParentCheckpoint, WhyBase>> {
        let raw = tensors.iter().map(|t| t.bytes).sum();
        let family = self.family(history)?;
        let (number, chain) = match family.next(raw, 0) {
            Err(reason) => return Ok(Err(WhyBase::Policy(reason))),
            Ok(next) => next,
        };
        let (reference, values) = match self.values(history, chain, on_devices) {
            Ok(found) => found,
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(e) => return Ok(Err(WhyBase::Parent(e.to_string()))),
        };
        if let Err(reason) = family.next(raw, changed(tensors, &*values.parent())) {
            return Ok(Err(WhyBase::Policy(reason)));
        }
        let distance = distance(number, chain);
        let chain = chain.iter().map(Checkpoint::id).collect();
        Ok(Ok(ParentCheckpoint { reference, chain, values, number, distance }))
    }

    /// The checkpoints that the next one follows.
    pub(crate) fn family(&self, history: &SaveHistory) -> Result<Family> {
        let state = self.state()?;
        let head = self.head(&state, history);
        let chain = head.map_or(Ok(vec![]), |head| chain(&state, head.id()));
        let chain = chain.map_err(|e| self.error(e))?;
        let entries = chain.iter().rev().map(entry).collect();
        let deltas = chain.last().map_or(vec![], |base| newest_deltas(&state, base));
        Ok(Family { policy: Policy::new(self.options.tree()), chain, entries, deltas })
    }

    /// The checkpoint that the next one follows: the one that this handle saved last; before its first save, the
    /// one that it opened last, because a run resumes from there; else the newest.
    fn head<'a>(&self, state: &'a State, history: &SaveHistory) -> Option<&'a Checkpoint> {
        let opened = *lock(&self.opened);
        let own = history.last.or(opened);
        let own = own.and_then(|r| state.get(r.id).filter(|c| c.reference() == r));
        own.or_else(|| state.latest())
    }

    /// The values of the first checkpoint of a chain: from memory, or read back. Values that were
    /// read back are kept if later saves need them again.
    fn values(
        &self,
        history: &mut SaveHistory,
        chain: &[Checkpoint],
        on_devices: bool,
    ) -> Result<(Reference, ParentValues)> {
        let parent = chain.first().ok_or_else(|| Error::Argument("the chain is empty".into()))?;
        let reference = parent.reference();
        if let Some(held) = history.held.iter().find(|h| h.reference == reference) {
            return Ok((reference, held.values.clone()));
        }
        let reader = self.opener.open(chain, &self.reading())?;
        let number = parent.since_base();
        let again = self.options.tree().last_child(number).is_some();
        // Devices decode the frames themselves.
        let again = again && !on_devices;
        let Some(values) = (if again { self.keep_read(&reader)? } else { None }) else {
            return Ok((reference, ParentValues::Frames(reader)));
        };
        let values = ParentValues::Memory(Arc::new(values));
        history.held.push(Held { reference, number, values: values.clone() });
        Ok((reference, values))
    }

    /// The options for reading checkpoints.
    pub(crate) fn reading(&self) -> ReadOptions {
        let (threads, simd) = (self.options.threads, self.options.simd);
        let codecs = self.options.own.codecs.clone();
        ReadOptions { threads, simd, codecs, ..ReadOptions::default() }
    }

    /// The options for writing checkpoints.
    pub(crate) fn writing(&self) -> WriteOptions {
        let StoreOptions { preset, threads, simd, memory, .. } = self.options;
        let (memory, own) = (Some(memory), self.options.own.clone());
        WriteOptions { preset, threads, simd, memory, own, ..WriteOptions::default() }
    }

    /// Bytes of memory for the stored objects of checkpoint `number` since the base. `None` if they
    /// need not stay: because they are not wanted, the values being kept instead, or because no
    /// later checkpoint will be a delta of it.
    pub(crate) fn room_for_stored(&self, wanted: bool, number: u32) -> Option<usize> {
        let is_parent = self.options.tree().last_child(number).is_some();
        Some(self.options.share()).filter(|room| wanted && is_parent && *room > 0)
    }

    /// Begins planning checkpoint `number` since the base. `is_stored`: deltas of it would read
    /// back its stored frames, since its values are not kept.
    pub(crate) fn recall(
        &self,
        parent: Option<(CheckpointId, u32)>,
        number: u32,
        is_stored: bool,
    ) -> Arc<Recall> {
        let tree = self.options.tree();
        self.plans.forget(&tree, number);
        let is_parent = tree.last_child(number).is_some();
        let room = (is_stored && is_parent).then_some(self.options.parent_memory / SAMPLES);
        Arc::new(self.plans.begin(parent, room))
    }

    /// Keeps the samples of checkpoint `number` since the base, and drops those that are no longer
    /// needed.
    pub(crate) fn remember(&self, id: CheckpointId, number: u32, recall: &Recall) {
        let next = if number == 0 { 0 } else { number + 1 };
        self.plans.forget(&self.options.tree(), next);
        self.plans.keep(id, number, recall);
    }

    /// Drops values that no later save can use once checkpoint `number` since the base is saved (0:
    /// a base); returns whether later saves can use this checkpoint's values.
    pub(crate) fn is_parent_later(&self, history: &mut SaveHistory, number: u32) -> bool {
        let tree = self.options.tree();
        let later = |h: &Held| tree.last_child(h.number).is_some_and(|last| last > number);
        history.held.retain(|h| number > 0 && later(h));
        tree.last_child(number).is_some()
    }

    /// Keeps values in host memory, if they fit and still are what was stored. Otherwise later
    /// saves read the stored ones back.
    pub(crate) fn keep_values(
        &self,
        snapshot: Snapshot,
        tensors: &[TensorSource<'_>],
    ) -> Option<ParentValues> {
        let snapshot = Arc::new(snapshot);
        let held = |t: &&TensorSource<'_>| snapshot.tensors.contains_key(t.name);
        let values = tensors.iter().filter(held).filter_map(|t| match t.values {
            Values::Host(data) => Some(Ok((t.name, Cow::Borrowed(data)))),
            Values::Device(_) => None,
        });
        let raw = tensors.iter().filter(held).map(|t| t.values.bytes() as usize).sum();
        match self.keep(&snapshot, raw, values) {
            Ok(Some(values)) => return Some(ParentValues::Memory(Arc::new(values))),
            Ok(None) => tracing::debug!("too large to keep in memory: later saves read it back"),
            Err(e) => {
                tracing::debug!(error = %e, "could not keep it in memory: later saves read it back")
            }
        }
        None
    }

    /// Keeps the values of an open checkpoint, if they fit.
    fn keep_read(&self, reader: &Reader) -> Result<Option<MemoryParent>> {
        let snapshot = Arc::new(reader.snapshot()?);
        let held = || reader.tensors().filter(|t| snapshot.tensors.contains_key(t.name));
        let raw = held().map(|t| usize::try_from(t.bytes).unwrap_or(usize::MAX));
        let raw = raw.fold(0, usize::saturating_add);
        let read = held().map(|t| Ok((t.name, Cow::Owned(reader.read(t.name)?))));
        self.keep(&snapshot, raw, read)
    }

    /// Keeps values, of `raw` bytes in all, within their share of memory.
    fn keep<'a>(
        &self,
        snapshot: &Arc<Snapshot>,
        raw: usize,
        values: impl Iterator<Item = Result<(&'a str, Cow<'a, [u8]>)>>,
    ) -> Result<Option<MemoryParent>> {
        let share = self.options.share();
        let mut parent = MemoryParent::new(Arc::clone(snapshot), share);
        if raw <= share {
            for tensor in values {
                let (name, values) = tensor?;
                match values {
                    Cow::Borrowed(values) => parent.own_copy(name, values, &self.buffers)?,
                    Cow::Owned(values) => parent.own(name, values.into())?,
                }
            }
            return Ok(Some(parent));
        }
        // Values rarely shrink to less than two thirds, and a failed attempt costs time.
        if raw / 3 * 2 > share {
            return Ok(None);
        }
        let (threads, simd) = (self.options.threads, self.options.simd);
        let codec = TensorCodec::new(MemoryOptions { preset: Preset::Fast, threads, simd })?;
        let codec = Arc::new(codec);
        for tensor in values {
            let (name, values) = tensor?;
            if !parent.keep(&codec, name, &values)? {
                return Ok(None);
            }
        }
        Ok(Some(parent))
    }
}

/// A checkpoint and its ancestors, the base last.
pub(crate) fn chain(state: &State, id: CheckpointId) -> s4_store::Result<Vec<Checkpoint>> {
    Ok(state.chain(id)?.into_iter().cloned().collect())
}

/// How many checkpoints after its parent, the first of `chain`, checkpoint `number` since the base
/// comes.
pub(crate) fn distance(number: u32, chain: &[Checkpoint]) -> u32 {
    number.saturating_sub(chain.first().map_or(0, Checkpoint::since_base))
}

/// Whether any tensor is in the memory of a device.
pub(crate) fn on_devices(tensors: &[TensorSource<'_>]) -> bool {
    tensors.iter().any(|t| t.values.memory().is_some())
}

/// Bytes of tensors that have no counterpart in the parent, except for small ones, which share
/// chunks and are never deltas.
fn changed(tensors: &[TensorInfo<'_>], parent: &dyn Parent) -> u64 {
    let is_new = |t: &&TensorInfo<'_>| {
        let large = t.bytes / t.dtype.value_width() as u64 >= SMALL;
        let there = parent.find(t.name);
        large && there.is_none_or(|p| p.dtype != t.dtype || p.shape != t.shape)
    };
    tensors.iter().filter(is_new).map(|t| t.bytes).sum()
}

fn entry(c: &Checkpoint) -> CheckpointSize {
    CheckpointSize {
        since_base: c.since_base(),
        stored: c.about.data_len.saturating_add(c.about.manifest_len),
        raw: c.about.raw_len,
    }
}

/// Deltas that share a base, from the oldest to the newest.
fn newest_deltas(state: &State, base: &Checkpoint) -> Vec<CheckpointSize> {
    let family = state.descendants(&[base.id()]);
    state.list().into_iter().filter(|c| family.contains(&c.id())).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use crate::options::WriteOptions;
    use crate::store::{ImportOptions, Place};
    use crate::{DType, Source, Target, Writer};

    #[test]
    fn importing_releases_values_that_no_later_save_can_use() {
        let place = Place::objects(Arc::new(InMemory::new()), "runs/a".into());
        let options = StoreOptions { max_chain: 16, max_hops: 15, ..StoreOptions::default() };
        let store = CheckpointStore::open_or_create_at(&place, options).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut values: Vec<u8> =
            (0..20_000u32).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        for step in 0..5 {
            values[step as usize] ^= 1;
            let path = folder.path().join(step.to_string());
            let target = Target::from(path.as_path());
            let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
            writer
                .write(&[TensorSource::new("w", DType::Float32, &[20_000], &values[..])])
                .unwrap();
            writer.finish(Default::default()).unwrap();
            let reader = Reader::open(Source::from(path.as_path()), Default::default()).unwrap();
            let saved = store.import(&reader, step, &ImportOptions::default()).unwrap();
            assert_eq!(saved.checkpoint.since_base(), step as u32);
            // In a chain each checkpoint is a delta of the last one only.
            assert!(lock(&store.history).held.is_empty(), "step {step}");
        }
    }
}
