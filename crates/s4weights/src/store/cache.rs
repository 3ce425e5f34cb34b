//! A cache of the objects that a save uploads. The next save reads its parent from it: no copy of the
//! values is needed, and nothing is encoded twice.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::io::{LOCAL_REQUEST, Source};
use crate::objects::{DataObject, ObjectSink, ObjectSource};
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
        lock(&self.cache).add(object.number, &object.bytes);
        self.sink.put(object)
    }
}

impl ObjectCache {
    fn add(&mut self, number: u32, bytes: &Bytes) {
        match self.left.checked_sub(bytes.len()) {
            Some(left) => {
                self.left = left;
                if let Some(objects) = &mut self.objects {
                    objects.insert(number, bytes.clone());
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
        let objects = Box::new(Objects(objects));
        let reader = Reader::open_objects(Source::Bytes(index), objects, options)?;
        match (reader.parent_digest(), parent) {
            (None, _) => {}
            (Some(_), Some(parent)) => reader.set_parent(parent)?,
            (Some(_), None) => return Ok(None),
        }
        Ok(Some(Arc::new(reader)))
    }
}

fn lock(cache: &Mutex<ObjectCache>) -> MutexGuard<'_, ObjectCache> {
    cache.lock().unwrap_or_else(|e| e.into_inner())
}

/// Objects in memory.
struct Objects(BTreeMap<u32, Bytes>);

impl ObjectSource for Objects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let outside = || Error::Argument(format!("bytes {range:?} of object {number} in memory"));
        self.in_memory(number, range.clone()).ok_or_else(outside)
    }

    fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        let object = self.0.get(&number)?;
        let place = |at: u64| usize::try_from(at).ok().filter(|&at| at <= object.len());
        let (start, end) = (place(range.start)?, place(range.end)?);
        (start <= end).then(|| object.slice(start..end))
    }

    fn request_size(&self) -> usize {
        LOCAL_REQUEST
    }
}
