//! Log entries, as they are stored.

use std::collections::BTreeMap;

use s4_format::Digest;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::id::{CheckpointId, WriteId};
use crate::layout::Parts;
use crate::seal;

/// The newest version of log entries that this library reads.
const NEWEST: u32 = 4;

/// The most bytes of one log entry.
pub(crate) const MAX_ENTRY: u64 = 64 << 10;

/// Most ids in one log entry, which bounds its size.
pub(crate) const MAX_IDS: usize = 500;

/// One entry of the log. Entries are only ever created, never changed and never deleted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Version of the entry's format: 4 for checkpoints with an explicit `order`, else 3 for those that several
    /// ranks stored, else 2 for [`Op::Unretire`], which readers of version 1 must not skip, and 1 for all others.
    pub v: u32,
    /// Its number; the first one is 1.
    pub n: u64,
    /// BLAKE3 of the bytes of entry `n - 1`; for the first entry, of no bytes.
    pub prev: Digest,
    /// Unique to the write, so that a writer recognises its own entry.
    pub write_id: WriteId,
    /// The writer's clock in milliseconds since 1970: for people, never for decisions.
    pub at_ms: i64,
    /// What the entry does.
    pub op: Op,
}

/// The operation of a log entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "nearly every entry is of the largest one")]
pub enum Op {
    /// Lists a checkpoint.
    Publish(Publish),
    /// Takes checkpoints off the list; a sweep deletes their data later.
    Retire {
        /// The checkpoints, each delta before its parent.
        ids: Vec<CheckpointId>,
        /// Why, in words for people.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
    },
    /// Forbids attempts ever to be published, and retired checkpoints ever to be listed again;
    /// their data may be deleted.
    Abort {
        /// The attempts and checkpoints.
        ids: Vec<CheckpointId>,
    },
    /// Lists a retired checkpoint again.
    Unretire {
        /// Its description from when it was published.
        about: Box<Publish>,
        /// Its position in time ([`crate::Checkpoint::order`]).
        order: u64,
        /// Its writer's clock when it was published, in milliseconds since 1970.
        published_ms: i64,
    },
    /// Protects a checkpoint from being retired.
    Pin {
        /// The checkpoint.
        id: CheckpointId,
    },
    /// Removes that protection.
    Unpin {
        /// The checkpoint.
        id: CheckpointId,
    },
    /// Only takes a number, so that a write whose outcome is unknown cannot land on it.
    Fence {
        /// The write whose outcome was unknown, and which was not found in the log.
        against: WriteId,
    },
}

/// A checkpoint as its writer describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    /// The checkpoint.
    pub id: CheckpointId,
    /// The training step.
    pub step: u64,
    /// Its parent; absent for a base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Reference>,
    /// Number of checkpoints that its writer had made since the base, this one included; 0 for a base.
    /// Writers choose parents by it ([`crate::About::since_base`]); no rule of the log looks at it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub since_base: u32,
    /// The checkpoint with the same content that this full one replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<Reference>,
    /// Its position in time, if that is before the entry's own number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u64>,
    /// BLAKE3 of the object `manifest`.
    pub manifest_blake3: Digest,
    /// Bytes of the object `manifest`.
    pub manifest_len: u64,
    /// Number of data objects.
    pub objects: u32,
    /// The number of them that each rank stored.
    #[serde(default, skip_serializing_if = "Parts::is_empty")]
    pub parts: Parts,
    /// Bytes of all data objects.
    pub data_len: u64,
    /// Bytes of the tensors before compression, as the caller says; 0 if it does not.
    #[serde(default)]
    pub raw_len: u64,
    /// Named numbers by which retention can select. Finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, String>,
}

/// A checkpoint, identified by its manifest's hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// The checkpoint.
    pub id: CheckpointId,
    /// BLAKE3 of its object `manifest`.
    pub manifest_blake3: Digest,
}

impl Publish {
    /// What other entries call it.
    pub(crate) fn reference(&self) -> Reference {
        Reference { id: self.id, manifest_blake3: self.manifest_blake3 }
    }

    /// What is wrong with a record that was read, if anything.
    fn problem(&self) -> Option<String> {
        let differ = || "the object counts of its ranks do not add up to the total".to_owned();
        let sum = self.parts.add_up_to(u64::from(self.objects));
        self.parts.problem().or_else(|| (!sum).then(differ))
    }

    /// A description that says nothing but the checkpoint's id and hash, and what it replaces. A repair writes it for
    /// a checkpoint that has ended, if the entry that described it is lost.
    pub(crate) fn bare(checkpoint: Reference, replaces: Option<Reference>) -> Self {
        Self {
            id: checkpoint.id,
            step: 0,
            parent: None,
            since_base: 0,
            replaces,
            order: None,
            manifest_blake3: checkpoint.manifest_blake3,
            manifest_len: 0,
            objects: 0,
            parts: Parts::default(),
            data_len: 0,
            raw_len: 0,
            metrics: BTreeMap::new(),
            tags: BTreeMap::new(),
        }
    }

    /// Whether it is a [bare](Self::bare) one: no manifest has 0 bytes. A checkpoint that is listed by such an entry,
    /// because the later one that ended it is lost, too, counts as one whose manifest is missing.
    pub(crate) fn is_bare(&self) -> bool {
        self.manifest_len == 0
    }

    /// Its position in time, if entry `n` lists it.
    pub(crate) fn position(&self, n: u64) -> u64 {
        self.order.map_or(n, |order| order.min(n))
    }

    /// The numbers in the keys of its data objects.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.parts.numbers(self.objects)
    }
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl Op {
    /// The version of an entry with this operation.
    pub(crate) fn version(&self) -> u32 {
        match (self.about(), self) {
            (Some(about), _) if about.order.is_some() => 4,
            (Some(about), _) if !about.parts.is_empty() => 3,
            (_, Self::Unretire { .. }) => 2,
            _ => 1,
        }
    }

    /// The checkpoint that this lists.
    fn about(&self) -> Option<&Publish> {
        match self {
            Self::Publish(about) => Some(about),
            Self::Unretire { about, .. } => Some(about),
            _ => None,
        }
    }

    /// The description of the checkpoint that this would list.
    pub(crate) fn listed(&self) -> Option<&Publish> {
        match self {
            Self::Publish(about) => Some(about),
            Self::Unretire { about, .. } => Some(about),
            _ => None,
        }
    }

    /// The checkpoint that this would publish.
    pub(crate) fn published(&self) -> Option<CheckpointId> {
        match self {
            Self::Publish(publish) => Some(publish.id),
            _ => None,
        }
    }
}

impl Entry {
    /// An entry whose object was lost, as far as it is known.
    pub(crate) fn of_lost(n: u64, op: Op, at_ms: i64) -> Self {
        let write_id = WriteId::new(uuid::Uuid::nil());
        Self { v: op.version(), n, prev: Digest::of(&[]), write_id, at_ms, op }
    }

    /// The bytes of the object.
    pub(crate) fn to_bytes(&self, key: &str) -> Result<Vec<u8>> {
        let bytes = seal::seal(key, self)?;
        if bytes.len() as u64 > MAX_ENTRY {
            return Err(Error::Limit(format!(
                "log entry has {} bytes, at most {MAX_ENTRY} allowed: use fewer or shorter metrics and tags",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    /// Parses the object of entry `n`.
    pub(crate) fn parse(key: &str, n: u64, bytes: &[u8]) -> Result<Self> {
        let body = seal::unseal(bytes)
            .ok_or_else(|| Error::corrupt(key, "the log entry's seal does not match"))?;
        // The version first: a later one may have fields and operations that this one cannot parse.
        let value: Value = serde_json::from_slice(body).map_err(|e| Error::corrupt(key, e))?;
        let version = value.get("v").and_then(Value::as_u64);
        if !version.is_some_and(|v| (1..=u64::from(NEWEST)).contains(&v)) {
            let version = value.get("v").unwrap_or(&Value::Null);
            return Err(Error::Unsupported {
                key: key.to_owned(),
                what: format!(
                    "log entry has version {version}, but this library reads versions 1 to {NEWEST}"
                ),
            });
        }
        let entry: Self = seal::parse(key, body)?;
        if entry.v != entry.op.version() {
            return Err(Error::corrupt(key, format!("version {} has no such operation", entry.v)));
        }
        if let Some(what) = entry.op.about().and_then(Publish::problem) {
            return Err(Error::corrupt(key, what));
        }
        if entry.n != n {
            return Err(Error::corrupt(key, format!("it claims to be entry {}", entry.n)));
        }
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Ids, TimeIds};

    fn sealed(body: &str) -> Vec<u8> {
        let value: Box<serde_json::value::RawValue> = serde_json::from_str(body).unwrap();
        seal::seal("k", &value).unwrap()
    }

    #[test]
    fn a_member_stands_once_also_in_maps() {
        let publish = Publish {
            id: CheckpointId::new(TimeIds.next()),
            step: 7,
            parent: None,
            since_base: 0,
            replaces: None,
            order: None,
            manifest_blake3: Digest::of(b"m"),
            manifest_len: 1,
            objects: 1,
            parts: Parts::default(),
            data_len: 1,
            raw_len: 1,
            metrics: [("loss".to_owned(), 0.5)].into(),
            tags: [("run".to_owned(), "a".to_owned())].into(),
        };
        let entry = Entry {
            v: 1,
            n: 1,
            prev: Digest::of(&[]),
            write_id: WriteId::new(TimeIds.next()),
            at_ms: 0,
            op: Op::Publish(publish),
        };
        let body = serde_json::to_string(&entry).unwrap();
        assert_eq!(Entry::parse("k", 1, &sealed(&body)).unwrap(), entry);
        for (once, twice) in [
            ("\"v\":1", "\"v\":1,\"v\":1"),
            ("\"step\":7", "\"step\":7,\"step\":7"),
            ("\"loss\":0.5", "\"loss\":0.5,\"loss\":0.25"),
            ("\"run\":\"a\"", "\"run\":\"a\",\"r\\u0075n\":\"b\""),
        ] {
            assert!(body.contains(once));
            let e = Entry::parse("k", 1, &sealed(&body.replace(once, twice))).unwrap_err();
            assert!(
                matches!(&e, Error::Corrupt { .. }) && e.to_string().contains("duplicate key"),
                "{e}"
            );
        }
    }

    #[test]
    fn metrics_are_kept_to_the_last_bit() {
        let metrics: BTreeMap<_, _> =
            (1..500).map(|i| (i.to_string(), 0.1 / f64::from(i))).collect();
        let json = serde_json::to_string(&metrics).unwrap();
        assert_eq!(serde_json::from_str::<BTreeMap<String, f64>>(&json).unwrap(), metrics);
    }

    #[test]
    fn a_newer_version_is_refused_by_name_whatever_it_holds() {
        for body in [r#"{"v":5,"op":{"dance":{}}}"#, r#"{"v":0}"#, "{}", "[1]"] {
            let e = Entry::parse("k", 1, &sealed(body)).unwrap_err();
            assert!(matches!(e, Error::Unsupported { .. }), "{e}");
        }
    }
}
