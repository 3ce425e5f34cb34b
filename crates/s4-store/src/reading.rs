//! Reading a checkpoint's data objects.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use object_store::path::Path;
use s4_format::Digest;
use tokio::task::JoinSet;

use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::io::too_short;
use crate::layout::Part;
use crate::manifest::{Manifest, ObjectInfo};

/// From this many bytes on, hashing moves off the threads that wait for the network.
const HASH_ASIDE: usize = 1 << 20;

/// The most bytes that [`Reading::objects`] reads ahead: four objects of the usual size.
const AHEAD: u64 = 128 << 20;

/// A checkpoint's manifest, and access to its objects.
#[derive(Debug, Clone)]
pub struct Reading {
    inner: Arc<Inner>,
    id: CheckpointId,
    manifest: Arc<Manifest>,
}

impl Reading {
    pub(crate) fn new(inner: Arc<Inner>, id: CheckpointId, manifest: Manifest) -> Self {
        Self { inner, id, manifest: Arc::new(manifest) }
    }

    /// The checkpoint.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.id
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The number of data objects.
    #[must_use]
    pub fn object_count(&self) -> u32 {
        u32::try_from(self.manifest.objects.len()).unwrap_or(u32::MAX)
    }

    /// A whole object, its length and hash checked.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no object `n`; [`Error::Corrupt`] or [`Error::Missing`] if it
    /// is damaged.
    pub async fn object(&self, n: u32) -> Result<Bytes> {
        let (key, info) = self.find(n)?;
        let mut again = true;
        loop {
            let bytes = self.inner.io.get(&key, info.len).await?;
            let len = bytes.len() as u64;
            if len != info.len {
                let what = format!("object has {len} bytes, but the manifest says {}", info.len);
                return Err(Error::corrupt(key, what));
            }
            if hash(bytes.clone()).await == info.blake3 {
                return Ok(bytes);
            }
            // Bytes may be damaged in transit: a second read shows whether the stored ones are.
            if !std::mem::take(&mut again) {
                return Err(Error::corrupt(key, "its hash does not match the manifest"));
            }
        }
    }

    /// All objects in order, each as by [`Reading::object`]. Several are read at the same time: up to 128 MiB, or one if
    /// that is larger. Must be called within a tokio runtime.
    pub fn objects(&self) -> impl Stream<Item = Result<Bytes>> + Send + '_ {
        let largest = self.manifest.objects.iter().map(|o| o.len).max().unwrap_or(0).max(1);
        let at_once = usize::try_from(AHEAD / largest).unwrap_or(usize::MAX);
        let at_once = at_once.clamp(1, self.inner.concurrency());
        let read = move |n| {
            // In a separate task, which continues while the caller processes the previous object.
            let (reading, mut task) = (self.clone(), JoinSet::new());
            task.spawn(async move { reading.object(n).await });
            async move {
                match task.join_next().await {
                    Some(done) => done.map_err(|e| Error::Callback(Box::new(e)))?,
                    None => Err(Error::Argument(format!("no object {n}"))),
                }
            }
        };
        futures::stream::iter(0..self.object_count()).map(read).buffered(at_once)
    }

    /// A range of an object's bytes, of which only the length is checked; the caller has checksums.
    ///
    /// # Errors
    /// [`Error::Argument`] if the object has no such range; [`Error::Missing`] if the object no longer exists.
    pub async fn range(&self, n: u32, range: Range<u64>) -> Result<Bytes> {
        let (key, info) = self.find(n)?;
        if range.start > range.end || range.end > info.len {
            let what = format!("{key} has {} bytes, but range {range:?} was requested", info.len);
            return Err(Error::Argument(what));
        }
        if let Some(path) = self.local_path(n) {
            let found = tokio::task::spawn_blocking(move || std::fs::metadata(path)).await;
            // Any other problem shows when the file is read.
            let size = found.ok().and_then(|found| found.ok()).map(|m| m.len());
            if let Some(size) = size.filter(|&size| size < range.end) {
                return Err(too_short(&key, size, range.end));
            }
        }
        let end = range.end;
        match self.inner.io.get_range(&key, range).await {
            // Servers refuse a range that begins after the end of an object.
            Err(e @ Error::Storage { .. }) => match self.inner.io.head(&key).await {
                Ok(meta) if meta.size < end => Err(too_short(&key, meta.size, end)),
                _ => Err(e),
            },
            other => other,
        }
    }

    /// The file that holds an object, if objects are files in a local folder: for reading many
    /// small ranges without any check. The file need not exist.
    #[must_use]
    pub fn local_path(&self, n: u32) -> Option<PathBuf> {
        let (key, _) = self.find(n).ok()?;
        Some(self.inner.folder.as_ref()?.path_of(&key))
    }

    /// The key of the object at index `n` of the manifest.
    pub(crate) fn key(&self, n: u32) -> Option<Path> {
        let number = self.manifest.parts.number(n)?;
        Some(self.inner.layout.part(self.id, Part::Data(number)))
    }

    fn find(&self, n: u32) -> Result<(Path, &ObjectInfo)> {
        let info = usize::try_from(n).ok().and_then(|n| self.manifest.objects.get(n));
        let unlisted = || Error::Argument(format!("checkpoint {} has no object {n}", self.id));
        Ok((self.key(n).ok_or_else(unlisted)?, info.ok_or_else(unlisted)?))
    }
}

/// BLAKE3 of the bytes, on another thread if there are many.
pub(crate) async fn hash(bytes: Bytes) -> Digest {
    if bytes.len() < HASH_ASIDE {
        return Digest::of(&bytes);
    }
    let copy = bytes.clone();
    match tokio::task::spawn_blocking(move || Digest::of(&copy)).await {
        Ok(hash) => hash,
        // The runtime is shutting down.
        Err(_) => Digest::of(&bytes),
    }
}
