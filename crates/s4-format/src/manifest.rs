//! The manifest: the root of a checkpoint, as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::bounded;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::file::Version;
use crate::id::{CodecId, Support};
use crate::json;
use crate::limits::{
    MAX_CHAIN, MAX_ENTRIES, MAX_MANIFEST, MAX_OBJECTS, MAX_SCALARS, MAX_TENSOR_TABLE, MAX_TENSORS,
    MAX_UPDATES,
};
use crate::plan::Plan;
use crate::wire::are_disjoint;

/// A run of bytes of the object that holds the manifest, and its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// BLAKE3 of the bytes.
    pub blake3: Digest,
}

/// An object that chunks lie in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Object {
    /// Its name among the objects next to the manifest, for people only: readers ask for an object
    /// by its index. Absent for the file that holds the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Bytes that hold chunks, from the object's start.
    pub bytes: u64,
    /// BLAKE3 of those bytes.
    pub blake3: Digest,
}

/// The place of the tensor table, and its number of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorTable {
    /// Its bytes.
    pub section: Section,
    /// Number of records.
    pub count: u32,
}

/// The form in which the object that the caller saved is described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Only by the tensors and their names.
    Tensors,
    /// By `tree`: typed JSON.
    Tree,
    /// By the blob `pickle`: PyTorch's pickle stream without the storages.
    Pickle,
}

/// The role of a tensor in an optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleKind {
    /// The parameter itself.
    Weight,
    /// Its wider copy that the optimizer updates.
    Master,
    /// The first moment.
    ExpAvg,
    /// The second moment.
    ExpAvgSq,
}

/// One row of the role table. A wrong role costs compression ratio, never correctness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Role {
    /// Index of the tensor in the tensor table.
    pub tensor: u32,
    /// Number of the parameter that it belongs to.
    pub parameter: u32,
    /// Its role for that parameter.
    pub kind: RoleKind,
    /// Index of the parameter's group in [`Roles::groups`].
    pub group: u32,
}

/// The role table: rows, and the scalars of the optimizer's groups (lr, betas, eps, step...).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roles {
    /// Rows.
    pub tensors: Vec<Role>,
    /// Scalars of each group.
    #[serde(deserialize_with = "bounded::maps")]
    pub groups: Vec<BTreeMap<String, f64>>,
}

/// The role table's entry for one tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorRole<'a> {
    /// The tensor's row.
    pub row: &'a Role,
    /// The whole table: rows with the same parameter are that parameter's other tensors.
    pub table: &'a Roles,
}

impl<'a> TensorRole<'a> {
    /// The scalars of the parameter's group; `None` if the table has no such group.
    pub fn scalars(&self) -> Option<&'a BTreeMap<String, f64>> {
        self.table.groups.get(self.row.group as usize)
    }
}

/// The checkpoint that deltas are taken against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Hash of its manifest.
    pub manifest: Digest,
    /// Number of checkpoints from the parent down to its base, both counted: 1 if the parent is a
    /// base.
    pub depth: u32,
}

/// A closed bitstream that the checkpoint needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClosedCodec {
    /// The bitstream.
    pub codec: CodecId,
    /// Major version of the vendor's library that wrote it.
    pub library_major: u32,
}

/// The manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format.
    pub format: Version,
    /// Program and version that wrote it.
    pub writer: String,
    /// Preset that it was written with.
    pub preset: String,
    /// Objects that chunks lie in; chunk records refer to them by index.
    pub objects: Vec<Object>,
    /// The tensor table.
    pub tensors: TensorTable,
    /// Plans; tensors refer to them by index.
    pub plans: Vec<Plan>,
    /// The form in which the saved object is described.
    pub form: Form,
    /// The saved object, if `form` is `tree`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<Box<RawValue>>,
    /// Named byte strings.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "bounded::map"
    )]
    pub blobs: BTreeMap<String, Section>,
    /// Free text from the caller.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "bounded::map"
    )]
    pub metadata: BTreeMap<String, String>,
    /// The role of each tensor in the optimizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roles: Option<Roles>,
    /// The checkpoint that deltas are taken against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// Closed bitstreams that are needed to read the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub closed_codecs: Vec<ClosedCodec>,
}

impl Manifest {
    /// Reads a manifest whose hash has been verified. `end` is its offset in its object: every
    /// section must lie before it.
    ///
    /// # Errors
    /// `Unsupported` for another version, a plan that this version does not implement, or a closed
    /// bitstream; `Corrupt` for anything that is not a manifest or contradicts itself.
    pub fn parse(json: &[u8], end: u64) -> Result<Self> {
        let manifest = Self::parse_closed(json, end)?;
        manifest.require_closed(&[])?;
        Ok(manifest)
    }

    /// As [`Self::parse`], but also accepts checkpoints that need closed bitstreams: to inspect
    /// one, or to read it if [`Self::require_closed`] says that it can be read.
    ///
    /// # Errors
    /// As [`Self::parse`], except that closed bitstreams are no error.
    pub fn parse_closed(json: &[u8], end: u64) -> Result<Self> {
        Self::parse_inner(json, end).map_err(|e| e.in_part("manifest"))
    }

    /// Checks that this machine can read every closed bitstream that the checkpoint needs.
    /// `readable` lists those that it can read, each with the version of its library.
    ///
    /// # Errors
    /// `Unsupported`, naming the bitstream, the library version that it needs, and what to do.
    pub fn require_closed(&self, readable: &[ClosedCodec]) -> Result<()> {
        let Some(missing) = self.closed_codecs.iter().find(|c| !readable.contains(c)) else {
            return Ok(());
        };
        let ClosedCodec { codec, library_major } = missing;
        let other = readable.iter().find(|c| c.codec == *codec);
        let here = other.map_or_else(String::new, |c| format!(" (installed: {})", c.library_major));
        let error = Error::unsupported(format!(
            "the checkpoint uses closed codec `{codec}`, which can only be read on a GPU with version \
             {library_major} of its vendor's library{here}: transcode it to open codecs on such a machine"
        ));
        Err(error.in_part("manifest"))
    }

    fn parse_inner(json: &[u8], end: u64) -> Result<Self> {
        #[derive(Deserialize)]
        struct Head {
            format: Version,
        }
        let bad = |e: serde_json::Error| Error::corrupt(e.to_string());
        serde_json::from_slice::<Head>(json).map_err(bad)?.format.require_readable()?;
        let m: Self = serde_json::from_slice(json).map_err(bad)?;
        if let Some(tree) = &m.tree {
            json::check(tree.get().as_bytes()).map_err(|e| bad(e).in_part("tree"))?;
        }
        for s in m.blobs.values().chain([&m.tensors.section]) {
            if s.offset.checked_add(s.bytes).is_none_or(|e| e > end) {
                return Err(Error::corrupt("section extends past the start of the manifest"));
            }
        }
        // The sums do not overflow: all sections end at `end` or before, as checked above.
        let sections = [&m.tensors.section].into_iter().chain(m.blobs.values());
        if !are_disjoint(sections.map(|s| s.offset..s.offset + s.bytes)) {
            return Err(Error::corrupt("two sections overlap"));
        }
        if m.tensors.count as usize > MAX_TENSORS || m.tensors.section.bytes > MAX_TENSOR_TABLE {
            return Err(Error::limit(format!(
                "tensor table of {} tensors is too large",
                m.tensors.count
            )));
        }
        if m.objects.len() > MAX_OBJECTS {
            return Err(Error::limit(format!(
                "{} objects, at most {MAX_OBJECTS} allowed",
                m.objects.len()
            )));
        }
        let own = |o: &&Object| o.name.is_none();
        if m.objects.iter().filter(own).count() > 1
            || m.objects.iter().find(own).is_some_and(|o| o.bytes > end)
        {
            return Err(Error::corrupt(
                "more than one unnamed object, or one that extends past the start of the manifest",
            ));
        }
        for (at, c) in m.closed_codecs.iter().enumerate() {
            let twice = m.closed_codecs[..at].iter().any(|before| before.codec == c.codec);
            match c.codec.support() {
                Some(Support::Closed) if twice => {
                    return Err(Error::corrupt(format!(
                        "closed codec `{}` is listed twice",
                        c.codec
                    )));
                }
                Some(Support::Closed) => {}
                Some(_) => {
                    return Err(Error::corrupt(format!(
                        "codec `{}` is listed as a closed codec, but is not one",
                        c.codec
                    )));
                }
                None => {
                    c.codec.require_open()?;
                }
            }
        }
        m.plans.iter().try_for_each(Plan::require_open)?;
        m.check_parent()?;
        if (m.form == Form::Tree) != m.tree.is_some() {
            return Err(Error::corrupt("`tree` and `form` contradict each other"));
        }
        if m.form == Form::Pickle && !m.blobs.contains_key("pickle") {
            return Err(Error::corrupt("blob `pickle` is missing"));
        }
        Ok(m)
    }

    /// Number of checkpoints from this one down to its base, both counted: 1 if it has no parent.
    pub fn depth(&self) -> u32 {
        self.parent.map_or(1, |p| p.depth.saturating_add(1))
    }

    /// Checks that every prediction from another checkpoint is from the parent, and that the chain
    /// is not too long.
    fn check_parent(&self) -> Result<()> {
        if self.parent.is_some_and(|p| p.depth == 0) {
            return Err(Error::corrupt("parent has depth 0"));
        }
        if self.depth() as usize > MAX_CHAIN {
            let what =
                format!("chain has {} checkpoints, at most {MAX_CHAIN} allowed", self.depth());
            return Err(Error::limit(what));
        }
        if self.depth() > MAX_UPDATES && self.plans.iter().any(|p| p.has_moments()) {
            let what = format!(
                "values are predicted from moments at depth {}, at most {MAX_UPDATES} allowed",
                self.depth()
            );
            return Err(Error::limit(what));
        }
        let mut others = self.plans.iter().flat_map(|p| &p.inputs).filter_map(|i| i.manifest);
        match others.find(|o| self.parent.is_none_or(|p| p.manifest != *o)) {
            Some(other) => Err(Error::corrupt(format!(
                "a plan predicts from checkpoint {other}, which is not the parent"
            ))),
            None => Ok(()),
        }
    }

    /// The manifest's bytes.
    ///
    /// # Errors
    /// `Corrupt` if a number of the role table is not finite, which JSON cannot express; `Limit` if
    /// there are more entries or bytes than readers accept.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let scalars = self.roles.iter().flat_map(|r| &r.groups).map(|g| 1 + g.len());
        for (what, count, most) in [
            ("metadata entries", self.metadata.len(), MAX_ENTRIES),
            ("blobs", self.blobs.len(), MAX_ENTRIES),
            ("role groups and scalars", scalars.sum(), MAX_SCALARS),
        ] {
            if count > most {
                return Err(Error::limit(format!("{count} {what}, at most {most} allowed")));
            }
        }
        let json =
            serde_json::to_vec(self).map_err(|e| Error::corrupt(format!("manifest: {e}")))?;
        if json.len() as u64 > MAX_MANIFEST {
            let what = format!(
                "manifest has {} bytes, at most {MAX_MANIFEST} allowed: use less metadata, fewer roles or a \
                 smaller tree",
                json.len()
            );
            return Err(Error::limit(what));
        }
        Ok(json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{LayoutId, PredictorId};

    fn sample() -> Manifest {
        let section = Section { offset: 16, bytes: 10, blake3: Digest::of(b"") };
        Manifest {
            format: Version::CURRENT,
            writer: "test".into(),
            preset: "fast".into(),
            objects: vec![Object { name: None, bytes: 16, blake3: Digest::of(b"") }],
            tensors: TensorTable { section, count: 0 },
            plans: vec![Plan::direct(LayoutId::FIELDS)],
            form: Form::Tree,
            tree: Some(RawValue::from_string("{\"a\":1}".into()).unwrap()),
            blobs: BTreeMap::new(),
            metadata: BTreeMap::from([("k".into(), "v".into())]),
            roles: Some(Roles {
                tensors: vec![Role { tensor: 0, parameter: 0, kind: RoleKind::ExpAvgSq, group: 0 }],
                groups: vec![BTreeMap::from([("lr".into(), 3e-4)])],
            }),
            parent: None,
            closed_codecs: vec![],
        }
    }

    fn refused(change: impl FnOnce(&mut Manifest)) -> Error {
        let mut m = sample();
        change(&mut m);
        Manifest::parse(&m.to_json().unwrap(), 26).unwrap_err()
    }

    #[test]
    fn manifests_round_trip() {
        let m = Manifest::parse(&sample().to_json().unwrap(), 26).unwrap();
        assert_eq!(m.tree.unwrap().get(), "{\"a\":1}");
        assert_eq!(m.roles, sample().roles);
    }

    #[test]
    fn maps_are_bounded_and_have_no_entry_twice() {
        let json = |old: &str, new: &str| {
            let json = String::from_utf8(sample().to_json().unwrap()).unwrap();
            assert!(json.contains(old), "{json}");
            Manifest::parse(json.replace(old, new).as_bytes(), 26)
        };
        let e = json("\"k\":\"v\"", "\"k\":\"v\",\"k\":\"w\"").unwrap_err().to_string();
        assert!(e.contains("duplicate key `k`"), "{e}");
        let e = json("\"lr\":", "\"lr\":1,\"lr\":").unwrap_err().to_string();
        assert!(e.contains("duplicate key `lr`"), "{e}");
        let groups = "{},".repeat(MAX_SCALARS);
        let e = json("[{\"lr\"", &format!("[{groups}{{\"lr\"")).unwrap_err().to_string();
        assert!(e.contains("too many entries"), "{e}");
        let inputs =
            format!("\"inputs\":[{}{{\"tensor\":0}}],\"layout\"", "{\"tensor\":0},".repeat(16));
        let e = json("\"layout\"", &inputs).unwrap_err().to_string();
        assert!(e.contains("too many entries"), "{e}");
        let mut m = sample();
        m.metadata = (0..=MAX_ENTRIES).map(|i| (i.to_string(), String::new())).collect();
        assert!(matches!(m.to_json(), Err(Error::Limit { .. })));
        m.metadata.pop_first();
        Manifest::parse(&m.to_json().unwrap(), 26).unwrap();
    }

    #[test]
    fn closed_bitstreams_need_their_library() {
        let closed = |library_major| ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major };
        let mut m = sample();
        m.closed_codecs = vec![closed(6)];
        let m = Manifest::parse_closed(&m.to_json().unwrap(), 26).unwrap();
        m.require_closed(&[closed(6)]).unwrap();
        for (readable, part) in [(vec![], "version 6"), (vec![closed(7)], "(installed: 7)")] {
            let e = m.require_closed(&readable).unwrap_err();
            assert!(matches!(e, Error::Unsupported { .. }));
            assert!(e.to_string().contains("nvcomp-ans") && e.to_string().contains(part), "{e}");
        }
    }

    #[test]
    fn what_is_not_built_or_contradictory_is_refused() {
        let unsupported = |e: &Error| matches!(e, Error::Unsupported { .. });
        assert!(unsupported(&refused(|m| m.format.minor = 77)));
        let e = refused(|m| m.plans[0].predictor = PredictorId(99));
        assert!(unsupported(&e) && e.to_string().contains("predictor id 99"), "{e}");
        let e = refused(|m| {
            m.closed_codecs = vec![ClosedCodec { codec: CodecId::NVCOMP_ANS, library_major: 6 }];
        });
        assert!(unsupported(&e) && e.to_string().contains("nvcomp-ans"), "{e}");
        let listed = |codecs: &[CodecId]| {
            let closed = |codec: &CodecId| ClosedCodec { codec: *codec, library_major: 6 };
            refused(|m| m.closed_codecs = codecs.iter().map(closed).collect())
        };
        let e = listed(&[CodecId(200)]);
        assert!(unsupported(&e) && e.to_string().contains("200"), "{e}");
        for wrong in [vec![CodecId::ZSTD], vec![CodecId::NVCOMP_ANS; 2]] {
            assert!(matches!(listed(&wrong), Error::Corrupt { .. }));
        }
        refused(|m| m.tree = None);
        refused(|m| m.form = Form::Pickle);
        refused(|m| m.objects[0].bytes = 27);
        refused(|m| m.objects.push(m.objects[0].clone()));
        refused(|m| m.tensors.section.bytes = u64::MAX);
        refused(|m| m.tensors.section.offset = u64::MAX);
        let e = refused(|m| {
            m.blobs.insert("a".into(), m.tensors.section);
        });
        assert!(e.to_string().contains("overlap"), "{e}");
    }

    #[test]
    fn a_name_occurs_once() {
        let json = String::from_utf8(sample().to_json().unwrap()).unwrap();
        for (once, twice) in [
            (r#""metadata":{"k":"v"}"#, r#""metadata":{"k":"v","k":"w"}"#),
            (r#""preset":"fast""#, r#""preset":"fast","preset":"small""#),
        ] {
            assert!(json.contains(once));
            let e = Manifest::parse(json.replace(once, twice).as_bytes(), 26).unwrap_err();
            assert!(matches!(e, Error::Corrupt { .. }), "{e}");
        }
    }

    #[test]
    fn the_tree_is_as_strict_as_the_rest() {
        let with = |tree: &str| {
            let mut m = sample();
            m.tree = Some(RawValue::from_string(tree.into()).unwrap());
            Manifest::parse(&m.to_json().unwrap(), 26)
        };
        with(r#"{"root":{"dict":[["a",{"tensor":0}],["a",{"tensor":0}]]}}"#).unwrap();
        for tree in [
            r#"{"root":{"tensor":0,"tensor":1}}"#,
            r#"{"root":[{"dict":[]},{"int":"0x1","\u0069nt":"0x2"}]}"#,
            r#"{"root":"\ud800"}"#,
            r#"{"root":{"dict":[["\udfff",1]]}}"#,
        ] {
            let e = with(tree).unwrap_err();
            assert!(matches!(e, Error::Corrupt { .. }), "{e}");
            assert!(e.to_string().contains("tree"), "{e}");
        }
    }

    #[test]
    fn deltas_are_from_the_one_parent_and_chains_are_bounded() {
        let manifest = Digest::of(b"parent");
        let with = |parent: Option<Parent>, input: Digest| {
            let mut m = sample();
            m.parent = parent;
            m.plans.push(Plan::delta(LayoutId::FIELDS, input, 0));
            Manifest::parse(&m.to_json().unwrap(), 26)
        };
        let parent = |depth| Some(Parent { manifest, depth });
        assert_eq!(with(parent(1), manifest).unwrap().depth(), 2);
        assert_eq!(with(parent(63), manifest).unwrap().depth(), 64);
        let e = with(parent(1), Digest::of(b"other")).unwrap_err();
        assert!(e.to_string().contains(&Digest::of(b"other").to_string()), "{e}");
        assert!(matches!(with(None, manifest), Err(Error::Corrupt { .. })));
        assert!(matches!(with(parent(0), manifest), Err(Error::Corrupt { .. })));
        for depth in [64, u32::MAX] {
            assert!(matches!(with(parent(depth), manifest), Err(Error::Limit { .. })));
        }
    }
}
