//! Checkpoints in several objects: where the objects go to and come from.

use std::ops::Range;

use bytes::Bytes;
use s4_format::Digest;
use s4_store::MAX_OBJECT;

use crate::error::{Error, Result};
use crate::io::REMOTE_REQUEST;

/// Takes the data objects of a checkpoint, whole, one after the other. Their names and storage are up to
/// the implementor; a reader asks for an object by its number.
///
/// The writer is blocked as long as a call lasts: an implementor that uploads in the background
/// bounds how much it has in flight, and reports what failed at the next call, or to whoever
/// publishes the checkpoint. What was put for a checkpoint that is never finished is garbage.
pub trait ObjectSink: Send {
    /// Takes an object. Numbers start at 0 and come in any order, each once.
    ///
    /// # Errors
    /// What keeps the checkpoint from being written.
    fn put(&mut self, object: DataObject) -> Result<()>;
}

/// An object of a checkpoint: chunks of tensors.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DataObject {
    /// Its number: a reader asks for it by this.
    pub number: u32,
    /// The group that its tensors are of, for those who keep groups apart.
    pub group: u8,
    /// What it holds.
    pub bytes: Bytes,
    /// BLAKE3 of the bytes, as the manifest has it.
    pub blake3: Digest,
}

/// Gives ranges of a checkpoint's data objects, from any thread, several at once.
pub trait ObjectSource: Send + Sync {
    /// Bytes of object `number`. A range that is not all there is an error or fewer bytes, which
    /// the reader refuses.
    ///
    /// # Errors
    /// What keeps the bytes from being read.
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes>;

    /// Fills `buf` from an offset of object `number`; returns whether there were as many bytes.
    ///
    /// # Errors
    /// As [`ObjectSource::get_range`].
    fn fill(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<bool> {
        fill_by_range(self, number, offset, buf)
    }

    /// A range of an object that is in memory, as a part of it; `None` if it is not, or not so much.
    fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        let _ = (number, range);
        None
    }

    /// Bytes that one request should ask for: many where answers are slow.
    fn request_size(&self) -> usize {
        REMOTE_REQUEST
    }
}

/// [`ObjectSource::fill`] for sources that have no faster way.
pub(crate) fn fill_by_range(
    from: &(impl ObjectSource + ?Sized),
    number: u32,
    offset: u64,
    buf: &mut [u8],
) -> Result<bool> {
    let bytes = from.get_range(number, offset..offset.saturating_add(buf.len() as u64))?;
    let enough = bytes.len() == buf.len();
    if enough {
        buf.copy_from_slice(&bytes);
    }
    Ok(enough)
}

/// How a checkpoint is cut into objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectOptions {
    /// Most bytes of an object: 4 to 64 MiB. 32 MiB unless told.
    pub bytes: usize,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self { bytes: 32 << 20 }
    }
}

impl ObjectOptions {
    const ALLOWED: std::ops::RangeInclusive<usize> = 4 << 20..=MAX_OBJECT;

    pub(crate) fn check(self) -> Result<Self> {
        if Self::ALLOWED.contains(&self.bytes) {
            return Ok(self);
        }
        Err(Error::Argument(format!("objects of {} bytes: 4 to 64 MiB are allowed", self.bytes)))
    }
}
