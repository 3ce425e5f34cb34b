//! A cache of the objects that a save uploads. The next save reads its parent from it: no copy of the
//! values is needed, and nothing is encoded twice.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use object_store::PutPayload;
use s4_format::Digest;
use s4_store::{CheckpointId, ObjectInfo};

use crate::error::Result;
use crate::io::{LOCAL_REQUEST, Source};
use crate::objects::{DataObject, MemoryObjects, ObjectSink, ObjectSource};
use crate::parallel::lock;
use crate::reader::{ReadOptions, Reader};
use crate::store::bridge::ChannelSink;

/// Objects that stay, by number, with their hashes.
#[derive(Default)]
pub(crate) struct ObjectCache {
    objects: BTreeMap<u32, (Digest, PutPayload)>,
    /// Number of objects in all.
    count: usize,
}

/// Hands objects on, and keeps those that stay.
pub(crate) struct CachingSink {
    sink: ChannelSink,
    cache: Arc<Mutex<ObjectCache>>,
}

impl CachingSink {
    /// A sink, and the cache that it fills.
    pub(crate) fn new(sink: ChannelSink) -> (Self, Arc<Mutex<ObjectCache>>) {
        let cache = Arc::<Mutex<ObjectCache>>::default();
        (Self { sink, cache: Arc::clone(&cache) }, cache)
    }
}

impl ObjectSink for CachingSink {
    fn put(&mut self, object: DataObject) -> Result<()> {
        let mut cache = lock(&self.cache);
        cache.count += 1;
        if object.may_stay {
            cache.objects.insert(object.number, (object.blake3, object.bytes.clone()));
        }
        drop(cache);
        self.sink.put(object)
    }
}

impl ObjectCache {
    /// Takes what was kept.
    pub(crate) fn take(cache: &Mutex<Self>) -> Self {
        std::mem::take(&mut lock(cache))
    }

    /// Whether all objects of the checkpoint are kept.
    pub(crate) fn is_whole(&self) -> bool {
        self.objects.len() == self.count
    }

    /// Opens a checkpoint all of whose objects are kept. `parent` is its parent, if it is a delta.
    /// Returns `None` for a delta without one.
    ///
    /// # Errors
    /// As [`Reader::open_objects`].
    pub(crate) fn open(
        self,
        index: Bytes,
        parent: Option<Arc<Reader>>,
        options: ReadOptions,
    ) -> Result<Option<Arc<Reader>>> {
        let objects = self.objects.into_iter().map(|(number, (_, bytes))| (number, bytes));
        let objects = Box::new(MemoryObjects(objects.collect()));
        let reader = Reader::open_objects(Source::Bytes(index), objects, options)?;
        match (reader.parent_digest(), parent) {
            (None, _) => {}
            (Some(_), Some(parent)) => reader.set_parent(parent)?,
            (Some(_), None) => return Ok(None),
        }
        Ok(Some(Arc::new(reader)))
    }
}

/// Objects of checkpoints that this process keeps in part, by hash: where other processes store
/// other parts of a checkpoint, an object's number is unknown until the parts are merged.
#[derive(Default)]
pub(crate) struct KeptObjects(Mutex<Vec<(CheckpointId, HashMap<Digest, PutPayload>)>>);

impl KeptObjects {
    /// Keeps the stored objects of a checkpoint, and of other checkpoints only those in `chain`.
    pub(crate) fn keep(&self, id: CheckpointId, chain: &[CheckpointId], stored: ObjectCache) {
        let mut kept = lock(&self.0);
        kept.retain(|(of, _)| *of == id || chain.contains(of));
        kept.push((id, stored.objects.into_values().collect()));
    }

    /// The objects of a checkpoint that are kept, by number.
    pub(crate) fn of(&self, id: CheckpointId, infos: &[ObjectInfo]) -> MemoryObjects {
        let kept = lock(&self.0);
        let known = |(n, info): (u32, &ObjectInfo)| {
            let mut parts = kept.iter().filter(|(of, _)| *of == id);
            let object = parts.find_map(|(_, objects)| objects.get(&info.blake3))?;
            Some((n, object.clone()))
        };
        MemoryObjects((0..).zip(infos).filter_map(known).collect())
    }
}

/// The objects of a checkpoint, some of which are in memory.
pub(crate) struct PartlyKept<S> {
    pub(crate) kept: MemoryObjects,
    pub(crate) rest: S,
}

impl<S: ObjectSource> ObjectSource for PartlyKept<S> {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        match self.kept.get_range(number, range.clone()) {
            Ok(bytes) => Ok(bytes),
            Err(_) => self.rest.get_range(number, range),
        }
    }

    fn fill(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<bool> {
        match self.kept.fill(number, offset, buf) {
            Ok(whole) => Ok(whole),
            Err(_) => self.rest.fill(number, offset, buf),
        }
    }

    fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        self.kept.in_memory(number, range.clone()).or_else(|| self.rest.in_memory(number, range))
    }

    fn request_size(&self) -> usize {
        // A rank needs again what it stored itself, which is in memory.
        LOCAL_REQUEST
    }
}
