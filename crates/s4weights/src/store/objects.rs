//! Reads the data objects of a checkpoint in the store.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use s4_store::Reading;

use crate::error::Result;
use crate::io::{LOCAL_REQUEST, REMOTE_REQUEST, read_exact_at};
use crate::objects::{ObjectSource, fill_by_range};
use crate::parallel::lock;
use crate::store::bridge::Bridge;

/// Files of one checkpoint that are kept open.
const OPEN_FILES: usize = 8;

/// Reads through the store, except that files of a local folder are read directly: that saves a
/// thread and two copies.
pub(crate) struct StoredObjects {
    bridge: Bridge,
    reading: Reading,
    local: bool,
    /// The most recently opened last.
    open: Mutex<Vec<(u32, Arc<File>)>>,
}

impl StoredObjects {
    pub(crate) fn new(bridge: Bridge, reading: Reading, local: bool) -> Self {
        Self { bridge, reading, local, open: Mutex::default() }
    }

    /// The file of an object, if it is one and can be opened.
    fn file(&self, number: u32) -> Option<Arc<File>> {
        let mut open = lock(&self.open);
        if let Some((_, file)) = open.iter().find(|(n, _)| *n == number) {
            return Some(Arc::clone(file));
        }
        let file = Arc::new(File::open(self.reading.local_path(number)?).ok()?);
        if open.len() == OPEN_FILES {
            open.remove(0);
        }
        open.push((number, Arc::clone(&file)));
        Some(file)
    }
}

impl ObjectSource for StoredObjects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let reading = self.reading.clone();
        self.bridge.ask(async move { reading.range(number, range).await })
    }

    fn fill(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<bool> {
        let file = if self.local { self.file(number) } else { None };
        if file.is_some_and(|file| read_exact_at(&file, buf, offset).is_ok()) {
            return Ok(true);
        }
        // Reading through the store reports what is wrong, if anything is.
        fill_by_range(self, number, offset, buf)
    }

    fn request_size(&self) -> usize {
        if self.local { LOCAL_REQUEST } else { REMOTE_REQUEST }
    }
}

/// The objects of a checkpoint for a vendor's decoders. No byte is handed out before the hash of its
/// whole object has matched the manifest's.
///
/// Reading a part of an object costs reading all of it; the last few are kept.
pub(crate) struct HashedObjects {
    bridge: Bridge,
    reading: Reading,
    kept: Mutex<VecDeque<(u32, Kept)>>,
}

/// An object, once a thread has read it; others wait.
type Kept = Arc<Mutex<Option<Bytes>>>;

/// Objects that are kept; an object has at most 64 MiB.
const KEPT: usize = 4;

impl HashedObjects {
    pub(crate) fn new(bridge: Bridge, reading: Reading) -> Self {
        Self { bridge, reading, kept: Mutex::default() }
    }

    fn place(&self, number: u32) -> Kept {
        let mut kept = lock(&self.kept);
        if let Some((_, known)) = kept.iter().find(|k| k.0 == number) {
            return Arc::clone(known);
        }
        if kept.len() == KEPT {
            kept.pop_front();
        }
        let place = Kept::default();
        kept.push_back((number, Arc::clone(&place)));
        place
    }

    fn object(&self, number: u32) -> Result<Bytes> {
        let place = self.place(number);
        let mut object = lock(&place);
        if let Some(known) = &*object {
            return Ok(known.clone());
        }
        let reading = self.reading.clone();
        let bytes = self.bridge.ask(async move { reading.object(number).await })?;
        Ok(object.insert(bytes).clone())
    }
}

impl ObjectSource for HashedObjects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let object = self.object(number)?;
        let len = object.len();
        let at = |place: u64| usize::try_from(place).unwrap_or(len).min(len);
        // The reader notices missing bytes.
        Ok(object.slice(at(range.start)..at(range.end).max(at(range.start))))
    }
}
