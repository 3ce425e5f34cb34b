//! A cache of the objects that a save uploads. The next save reads its parent from it: no copy of the
//! values is needed, and nothing is encoded twice.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use object_store::PutPayload;
use s4_format::Digest;
use s4_store::{CheckpointId, ObjectInfo};

use crate::error::Result;
use crate::io::{LOCAL_REQUEST, Source};
use crate::objects::{DataObject, MemoryObjects, ObjectSink, ObjectSource};
use crate::options::ReadOptions;
use crate::reader::Reader;
use crate::store::bridge::ChannelSink;

/// Objects by number, as long as they fit.
pub(crate) struct ObjectCache {
    objects: Option<BTreeMap<u32, Bytes>>,
    /// Bytes that more of them may take.
    left: usize,
}

/// Hands objects on, and keeps them.
pub(crate) struct CachingSink {
    sink: ChannelSink,
    cache: Arc<Mutex<ObjectCache>>,
}

impl CachingSink {
    /// A sink, and what it keeps: at most `budget` bytes, or nothing.
    pub(crate) fn new(sink: ChannelSink, budget: usize) -> (Self, Arc<Mutex<ObjectCache>>) {
        let objects = (budget > 0).then(BTreeMap::new);
        let cache = Arc::new(Mutex::new(ObjectCache { objects, left: budget }));
        (Self { sink, cache: Arc::clone(&cache) }, cache)
    }
}

impl ObjectSink for CachingSink {
    fn put(&mut self, object: DataObject) -> Result<()> {
        lock(&self.cache).add(object.number, object.bytes.clone());
        self.sink.put(object)
    }
}

impl ObjectCache {
    fn add(&mut self, number: u32, bytes: PutPayload) {
        match self.left.checked_sub(bytes.content_length()) {
            Some(left) => {
                self.left = left;
                if let Some(objects) = &mut self.objects {
                    // Objects that are kept come in one part.
                    objects.insert(number, bytes.into());
                }
            }
            // A part of them is of no use.
            None => (self.objects, self.left) = (None, 0),
        }
    }

    /// Opens what was kept; `None` if it did not fit. `parent` is the checkpoint that
    /// it is a difference from, if it is one.
    ///
    /// # Errors
    /// As [`Reader::open_objects`].
    pub(crate) fn open(
        cache: &Mutex<Self>,
        index: Bytes,
        parent: Option<Arc<Reader>>,
        options: ReadOptions,
    ) -> Result<Option<Arc<Reader>>> {
        let Some(objects) = lock(cache).objects.take() else { return Ok(None) };
        let objects = Box::new(MemoryObjects(objects));
        let reader = Reader::open_objects(Source::Bytes(index), objects, options)?;
        match (reader.parent_digest(), parent) {
            (None, _) => {}
            (Some(_), Some(parent)) => reader.set_parent(parent)?,
            (Some(_), None) => return Ok(None),
        }
        Ok(Some(Arc::new(reader)))
    }
}

fn lock<T>(cache: &Mutex<T>) -> MutexGuard<'_, T> {
    cache.lock().unwrap_or_else(|e| e.into_inner())
}

/// Objects that this process stored of checkpoints of several processes, by their hash: the number of one in
/// the checkpoint is not known until all parts are put together.
#[derive(Default)]
pub(crate) struct KeptObjects(Mutex<Vec<(CheckpointId, HashMap<Digest, Bytes>)>>);

impl KeptObjects {
    /// Keeps what was stored as a part of a checkpoint, and of the others only what belongs to `chain`.
    pub(crate) fn keep(
        &self,
        id: CheckpointId,
        chain: &[CheckpointId],
        stored: &Mutex<ObjectCache>,
        infos: &[ObjectInfo],
    ) {
        let objects = lock(stored).objects.take().unwrap_or_default();
        let by_hash = objects.into_iter().filter_map(|(number, bytes)| {
            Some((infos.get(usize::try_from(number).ok()?)?.blake3, bytes))
        });
        let mut kept = lock(&self.0);
        kept.retain(|(of, _)| *of == id || chain.contains(of));
        kept.push((id, by_hash.collect()));
    }

    /// The objects of a checkpoint that are kept, by number.
    pub(crate) fn of(&self, id: CheckpointId, infos: &[ObjectInfo]) -> BTreeMap<u32, Bytes> {
        let kept = lock(&self.0);
        let known = |(n, info): (u32, &ObjectInfo)| {
            let mut parts = kept.iter().filter(|(of, _)| *of == id);
            let object = parts.find_map(|(_, objects)| objects.get(&info.blake3))?;
            Some((n, object.clone()))
        };
        (0..).zip(infos).filter_map(known).collect()
    }
}

/// The objects of a checkpoint, some of which are in memory.
pub(crate) struct PartlyKept<S> {
    pub(crate) kept: MemoryObjects,
    pub(crate) rest: S,
}

impl<S: ObjectSource> ObjectSource for PartlyKept<S> {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        match self.kept.in_memory(number, range.clone()) {
            Some(bytes) => Ok(bytes),
            None => self.rest.get_range(number, range),
        }
    }

    fn fill(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<bool> {
        let end = offset.saturating_add(buf.len() as u64);
        match self.kept.in_memory(number, offset..end) {
            Some(bytes) => {
                buf.copy_from_slice(&bytes);
                Ok(true)
            }
            None => self.rest.fill(number, offset, buf),
        }
    }

    fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        self.kept.in_memory(number, range)
    }

    fn request_size(&self) -> usize {
        // What a rank needs again is what it stored.
        LOCAL_REQUEST
    }
}
