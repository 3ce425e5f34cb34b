//! Checkpoints in several objects: where the objects go to and come from.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use object_store::PutPayload;
use s4_format::Digest;
use s4_store::MAX_OBJECT;

use crate::error::{Error, Result};
use crate::io::{LOCAL_REQUEST, REMOTE_REQUEST};
use crate::parallel::upload_size;

/// Takes the data objects of a checkpoint, whole, one after the other. Their names and storage are up to
/// the implementor; a reader asks for an object by its number.
///
/// Each call blocks the writer: an implementor that uploads in the background bounds its data in
/// flight, and reports failures at the next call, or to the code that publishes the checkpoint.
/// Objects of a checkpoint that is never finished are garbage.
pub trait ObjectSink: Send {
    /// Takes an object. Numbers start at 0 and come in any order, each once.
    ///
    /// # Errors
    /// If the checkpoint cannot be written.
    fn put(&mut self, object: DataObject) -> Result<()>;
}

/// An object of a checkpoint: chunks of tensors.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DataObject {
    /// Its number: a reader asks for it by this.
    pub number: u32,
    /// The group of its tensors, for sinks that keep groups apart.
    pub group: u8,
    /// Its bytes, in one part or several. A part's memory may be page-locked, which is scarce: to keep an
    /// object after it is stored, copy it.
    pub bytes: PutPayload,
    /// BLAKE3 of the bytes, as the manifest has it.
    pub blake3: Digest,
    /// Whether it should be kept for later saves, as its memory may be.
    pub(crate) may_stay: bool,
}

/// Gives ranges of a checkpoint's data objects, from any thread, several at once.
pub trait ObjectSource: Send + Sync {
    /// Bytes of object `number`. A range that is not all there is an error or fewer bytes, which
    /// the reader refuses.
    ///
    /// # Errors
    /// If the bytes cannot be read.
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes>;

    /// Fills `buf` from an offset of object `number`; returns whether there were as many bytes.
    ///
    /// # Errors
    /// As [`ObjectSource::get_range`].
    fn fill(&self, number: u32, offset: u64, buf: &mut [u8]) -> Result<bool> {
        fill_by_range(self, number, offset, buf)
    }

    /// A range of an object in memory, without a copy; `None` if it is not in memory as one part,
    /// or the object is too short.
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

/// Objects in memory, by number.
#[derive(Default)]
pub(crate) struct MemoryObjects(pub(crate) BTreeMap<u32, PutPayload>);

impl MemoryObjects {
    /// The parts of an object that cover a range, cut to it; `None` if there is no such object, or
    /// it is too short.
    fn parts(&self, number: u32, range: Range<u64>) -> Option<Vec<Bytes>> {
        let object = self.0.get(&number)?;
        let place = |at: u64| usize::try_from(at).ok().filter(|&at| at <= object.content_length());
        let (start, end) = (place(range.start)?, place(range.end)?);
        if start > end {
            return None;
        }
        let (mut at, mut found) = (0, vec![]);
        for part in object.as_ref() {
            let own = |place: usize| place.clamp(at, at + part.len()) - at;
            let (first, last) = (own(start), own(end));
            if first < last {
                found.push(part.slice(first..last));
            }
            at += part.len();
        }
        Some(found)
    }
}

impl ObjectSource for MemoryObjects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let outside =
            || Error::Argument(format!("bytes {range:?} of object {number} are not in memory"));
        let parts = self.parts(number, range.clone()).ok_or_else(outside)?;
        Ok(parts.into_iter().collect::<PutPayload>().into())
    }

    fn in_memory(&self, number: u32, range: Range<u64>) -> Option<Bytes> {
        let mut parts = self.parts(number, range)?;
        match parts.len() {
            0 => Some(Bytes::new()),
            1 => parts.pop(),
            _ => None,
        }
    }

    fn request_size(&self) -> usize {
        LOCAL_REQUEST
    }
}

/// Options for cutting a checkpoint into objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectOptions {
    /// Most bytes of an object: 4 to 64 MiB. 32 MiB by default.
    pub bytes: usize,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self { bytes: 32 << 20 }
    }
}

impl ObjectOptions {
    const LEAST: usize = 4 << 20;
    const ALLOWED: std::ops::RangeInclusive<usize> = Self::LEAST..=MAX_OBJECT;

    /// Smaller objects if `values`, a checkpoint's bytes of values, would not fill one for each connection.
    pub(crate) fn for_connections(self, values: u64) -> Self {
        Self { bytes: upload_size(values, Self::LEAST, self.bytes) }
    }

    pub(crate) fn check(self) -> Result<Self> {
        if Self::ALLOWED.contains(&self.bytes) {
            return Ok(self);
        }
        Err(Error::Argument(format!(
            "object size of {} bytes is not allowed: use 4 to 64 MiB",
            self.bytes
        )))
    }
}
