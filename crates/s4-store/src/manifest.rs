//! The object `manifest`: a table of the data objects, then bytes of the caller's, which are opaque
//! here.
//!
//! `S4CKPT`, a byte 0, a byte with the version; 4 bytes: length of the table, little-endian; the
//! table as JSON; the caller's bytes up to the end. The log names its hash.

use bytes::{BufMut, Bytes, BytesMut};
use s4_format::Digest;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::CheckpointId;
use crate::layout::Parts;

const MAGIC: [u8; 8] = *b"S4CKPT\0\x01";

/// The most bytes of one data object.
pub const MAX_OBJECT: usize = 64 << 20;

/// The most bytes of a manifest, the table included.
pub const MAX_MANIFEST: u64 = 256 << 20;

/// One data object of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectInfo {
    /// Its length in bytes.
    pub len: u64,
    /// BLAKE3 of its bytes.
    pub blake3: Digest,
    /// Its content, in the caller's words: `weights`, `optimizer`...
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
}

/// The content of the object `manifest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The data objects; the first is number 0.
    pub objects: Vec<ObjectInfo>,
    /// The number of them that each rank stored.
    pub parts: Parts,
    /// The caller's bytes.
    pub blob: Bytes,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table<'a> {
    id: CheckpointId,
    #[serde(borrow)]
    objects: std::borrow::Cow<'a, [ObjectInfo]>,
    #[serde(default, skip_serializing_if = "Parts::is_empty")]
    parts: Parts,
    blob_len: u64,
}

impl Manifest {
    /// Bytes of all data objects.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.objects.iter().map(|o| o.len).fold(0, u64::saturating_add)
    }

    pub(crate) fn to_bytes(&self, id: CheckpointId) -> Result<Bytes> {
        let objects = std::borrow::Cow::Borrowed(&self.objects[..]);
        let (parts, blob_len) = (self.parts.clone(), self.blob.len() as u64);
        let table = Table { id, objects, parts, blob_len };
        let table = serde_json::to_vec(&table).map_err(|e| Error::Argument(e.to_string()))?;
        let total = (MAGIC.len() + 4 + table.len()) as u64 + self.blob.len() as u64;
        if total > MAX_MANIFEST {
            return Err(Error::Limit(format!(
                "manifest has {total} bytes, at most {MAX_MANIFEST} allowed"
            )));
        }
        let len = u32::try_from(table.len()).map_err(|e| Error::Limit(e.to_string()))?;
        let mut out = BytesMut::with_capacity(usize::try_from(total).unwrap_or(0));
        out.put_slice(&MAGIC);
        out.put_u32_le(len);
        out.put_slice(&table);
        out.put_slice(&self.blob);
        Ok(out.freeze())
    }

    pub(crate) fn parse(key: &str, id: CheckpointId, bytes: &Bytes) -> Result<Self> {
        let bad = |what: &str| Error::corrupt(key, what);
        let after = bytes.strip_prefix(&MAGIC).ok_or_else(|| bad("it is not a manifest"))?;
        let (len, after) = after.split_first_chunk().ok_or_else(|| bad("it ends too early"))?;
        let len = usize::try_from(u32::from_le_bytes(*len)).map_err(|e| bad(&e.to_string()))?;
        let (table, blob) = after.split_at_checked(len).ok_or_else(|| bad("it ends too early"))?;
        let table: Table<'_> = serde_json::from_slice(table).map_err(|e| Error::corrupt(key, e))?;
        if table.id != id {
            return Err(bad(&format!("it belongs to checkpoint {}", table.id)));
        }
        if table.blob_len != blob.len() as u64 {
            return Err(bad("its length does not match its table"));
        }
        if table.objects.iter().any(|o| o.len > MAX_OBJECT as u64) {
            return Err(bad("an object exceeds the size limit"));
        }
        if let Some(what) = table.parts.problem() {
            return Err(bad(&what));
        }
        if !table.parts.add_up_to(table.objects.len() as u64) {
            return Err(bad("the object counts of its ranks do not add up to the objects listed"));
        }
        let (objects, parts) = (table.objects.into_owned(), table.parts);
        Ok(Self { objects, parts, blob: bytes.slice_ref(blob) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Ids, TimeIds};

    #[test]
    fn is_read_as_it_was_written_and_every_cut_is_an_error() {
        let id = CheckpointId::new(TimeIds.next());
        let object =
            |kind: &str| ObjectInfo { len: 7, blake3: Digest::of(b"x"), kind: kind.into() };
        let manifest = Manifest {
            objects: vec![object("weights"), object("\u{e4}\"")],
            parts: Parts::new(vec![1, 0, 1]).unwrap(),
            blob: Bytes::from_static(b"anything"),
        };
        let bytes = manifest.to_bytes(id).unwrap();
        assert_eq!(Manifest::parse("k", id, &bytes).unwrap(), manifest);
        assert_eq!(manifest.data_len(), 14);
        for end in 0..bytes.len() {
            assert!(Manifest::parse("k", id, &bytes.slice(..end)).is_err(), "{end}");
        }
        let wrong = Manifest { parts: Parts::new(vec![1, 2]).unwrap(), ..manifest };
        assert!(Manifest::parse("k", id, &wrong.to_bytes(id).unwrap()).is_err());
        let other = CheckpointId::new(TimeIds.next());
        assert!(Manifest::parse("k", other, &bytes).is_err());
        let mut longer = BytesMut::from(&bytes[..]);
        longer.put_u8(0);
        assert!(Manifest::parse("k", id, &longer.freeze()).is_err());
    }

    #[test]
    fn a_length_beyond_the_end_is_not_believed() {
        let id = CheckpointId::new(TimeIds.next());
        let mut bytes = BytesMut::from(&MAGIC[..]);
        bytes.put_u32_le(u32::MAX);
        bytes.put_slice(b"{}");
        assert!(Manifest::parse("k", id, &bytes.freeze()).is_err());
    }
}
