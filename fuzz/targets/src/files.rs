//! Whole files and chains of files: sound ones, changed, with checksums, hashes and offsets mended
//! afterwards.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use s4weights::format::Digest;
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::{
    Contents, DType, Error, ReadOptions, Reader, Slice, Source, Target, TensorSource, WriteOptions,
    Writer, adversarial,
};

use crate::edit::{Edit, MAX_EDITS};
use crate::input::Input;
use crate::kit::{Kit, digest};
use crate::memory::bounded;

/// Most bytes of a tensor, and of all tensors together, that are loaded.
const MAX_TENSOR: u64 = 1 << 20;
const MAX_LOADED: u64 = 4 << 20;

/// A sound file with up to 24 changes: opened, inspected, loaded and verified.
pub fn reader(data: &[u8]) {
    let mut input = Input::new(data);
    let bases = bases();
    // The last base is large, so it is chosen rarely.
    let small = bases.len() - 1;
    let which = input.u8();
    let mut kit = bases[if which == 0xff { small } else { usize::from(which) % small }].clone();
    for _ in 0..MAX_EDITS {
        if input.is_empty() {
            break;
        }
        Edit::read(&mut input).apply(&mut kit);
    }
    let file = kit.assemble();
    let len = file.len();
    read_all(file.into(), len, options(None));
}

/// A chain of three files with up to 24 changes; each file names the current hash of the one before
/// it.
pub fn chain(data: &[u8]) {
    let mut input = Input::new(data);
    let chains = chains();
    let small = chains.len() - 1;
    let which = input.u8();
    let mut kits = chains[if which == 0xff { small } else { usize::from(which) % small }].clone();
    for _ in 0..MAX_EDITS {
        if input.is_empty() {
            break;
        }
        let edit = Edit::read(&mut input);
        let level = usize::from(edit.op >> 5) % kits.len();
        edit.apply(&mut kits[level]);
    }
    let mut files: HashMap<Digest, bytes::Bytes> = HashMap::new();
    let mut renamed: HashMap<String, String> = HashMap::new();
    let mut total = 0;
    let mut last = None;
    for mut kit in kits {
        let named = kit.manifest.get("parent").and_then(|p| p.get("manifest")?.as_str());
        let old = named.map(str::to_owned);
        if let Some(new) = old.as_ref().and_then(|old| renamed.get(old)) {
            rename(&mut kit.manifest, old.as_deref().unwrap_or_default(), new);
        }
        let before = kit.origin.clone();
        let file = bytes::Bytes::from(kit.assemble());
        total += file.len();
        let Some(now) = digest(&file) else { return };
        renamed.insert(before, now.to_string());
        files.insert(now, file.clone());
        last = Some(file);
    }
    let Some(file) = last else { return };
    read_all(file, total, options(Some(Arc::new(files))));
}

/// Replaces a text everywhere in a manifest.
fn rename(value: &mut serde_json::Value, old: &str, new: &str) {
    use serde_json::Value;
    match value {
        Value::String(text) if text == old => *text = new.to_owned(),
        Value::Array(list) => list.iter_mut().for_each(|v| rename(v, old, new)),
        Value::Object(map) => map.values_mut().for_each(|v| rename(v, old, new)),
        _ => {}
    }
}

fn options(files: Option<Arc<HashMap<Digest, bytes::Bytes>>>) -> ReadOptions {
    let mut options = ReadOptions { threads: Some(1), ..ReadOptions::default() };
    if let Some(files) = files {
        options.parents = Some(Arc::new(move |digest: &Digest| {
            let file = files
                .get(digest)
                .cloned()
                .ok_or_else(|| Error::Argument(format!("no checkpoint has the hash {digest}")))?;
            let options = self::options(Some(Arc::clone(&files)));
            Ok(Arc::new(Reader::open(Source::Bytes(file), options)?))
        }));
    }
    options
}

/// Does everything that can be done with a file, within 64 MiB plus four times its size and the
/// bytes that are loaded.
fn read_all(file: bytes::Bytes, input: usize, options: ReadOptions) {
    let len = file.len();
    let reader = bounded(input, 0, || Reader::open(Source::Bytes(file), options));
    let Ok(reader) = reader else { return };
    let _ = bounded(input, 0, || reader.inspect(true));
    let _ = reader.tree();
    for name in reader.manifest().blobs.keys() {
        let _ = bounded(input, len, || reader.blob(name).is_ok());
    }
    let total = reader.tensors().fold(0u64, |sum, t| sum.saturating_add(t.bytes));
    let mut left = MAX_LOADED;
    for t in reader.tensors() {
        if t.bytes > MAX_TENSOR || t.bytes > left {
            continue;
        }
        left -= t.bytes;
        let asked = t.bytes as usize;
        let whole = bounded(input, asked, || reader.read(t.name));
        let slice = Slice(t.shape.iter().map(|&d| 0..d).collect());
        let part = bounded(input, asked, || reader.read_slice(t.name, &slice));
        if let (Ok(whole), Ok(part)) = (whole, part) {
            assert!(whole == part, "a slice of everything is something else");
        }
    }
    if total <= MAX_LOADED {
        let verified = bounded(input, total as usize, || reader.verify());
        assert!(verified.is_ok() || verified.is_err_and(|e| !e.to_string().is_empty()));
    }
    let _ = bounded(input, 0, || reader.snapshot().is_ok());
}

/// A stream into memory.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A tensor filled with one of the patterns.
struct Tensor {
    name: &'static str,
    dtype: DType,
    shape: Vec<u64>,
    data: Vec<u8>,
}

fn tensor(name: &'static str, dtype: DType, shape: &[u64], pattern: &str) -> Tensor {
    let elements = shape.iter().product::<u64>() as usize;
    let found = adversarial(dtype, elements).find(|p| p.0 == pattern);
    let data = found.map_or_else(|| vec![0; elements * dtype.size()], |p| p.1);
    Tensor { name, dtype, shape: shape.to_vec(), data }
}

fn save(
    tensors: &[Tensor],
    contents: Contents,
    roles: Option<Roles>,
    parent: Option<&Arc<Reader>>,
) -> Vec<u8> {
    let memory = Memory::default();
    let parent = parent.map(|p| Arc::clone(p) as Arc<dyn s4weights::Parent>);
    let options = WriteOptions { threads: Some(1), parent, ..WriteOptions::default() };
    let written = || -> s4weights::Result<()> {
        let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
        roles.map_or(Ok(()), |roles| writer.declare(roles))?;
        for t in tensors {
            let Tensor { name, dtype, shape, data } = t;
            writer.write(&[TensorSource::new(name, *dtype, shape, data)])?;
        }
        writer.finish(contents).map(drop)
    };
    assert!(written().is_ok(), "a file to start from");
    std::mem::take(&mut *memory.0.lock().unwrap_or_else(|e| e.into_inner()))
}

fn kit(file: &[u8]) -> Kit {
    let kit = Kit::parse(file);
    let Some(kit) = kit else { panic!("a sound file cannot be taken apart") };
    // The pieces can be put together to a sound file again.
    let again = Reader::open(Source::Bytes(kit.clone().assemble().into()), options(None));
    assert!(again.is_ok(), "{:?}", again.err());
    kit
}

/// The files to be changed: with packed and large tensors, every layout and form.
fn bases() -> &'static [Kit] {
    static BASES: OnceLock<Vec<Kit>> = OnceLock::new();
    BASES.get_or_init(|| {
        let first = [
            tensor("w", DType::BFloat16, &[50, 100], "like-weights"),
            tensor("a", DType::Float32, &[77], "like-weights"),
            tensor("b", DType::Float32, &[3, 5], "nans"),
            tensor("step", DType::Int64, &[], "counting"),
            tensor("none", DType::Float16, &[0, 7], "zeros"),
        ];
        let second = [
            tensor("v", DType::Float32, &[10, 500], "like-squares"),
            tensor("noise", DType::UInt8, &[5000], "random"),
            tensor("bits", DType::Int32, &[4097], "sparse"),
            tensor("c", DType::Complex64, &[2500], "like-weights"),
        ];
        let large = [
            tensor("zeros", DType::Float64, &[2, 40_000], "zeros"),
            tensor("runs", DType::UInt8, &[270_000], "runs"),
        ];
        let role = |tensor, kind| Role { tensor, parameter: 0, kind, group: 0 };
        let contents = Contents {
            tree: serde_json::value::RawValue::from_string("{\"w\":{\"t\":0},\"l\":[1]}".into())
                .ok(),
            blobs: BTreeMap::from([("extra".into(), vec![7; 100]), ("x".into(), vec![])]),
            metadata: BTreeMap::from([("k".into(), "v".into())]),
        };
        let roles = Roles {
            tensors: vec![role(0, RoleKind::Weight), role(1, RoleKind::ExpAvgSq)],
            groups: vec![BTreeMap::from([("lr".into(), 1e-3)])],
        };
        let pickle = Contents {
            blobs: BTreeMap::from([("pickle".into(), b"\x80\x04N.".to_vec())]),
            ..Contents::default()
        };
        [
            save(&first, contents, Some(roles), None),
            save(&second, pickle, None, None),
            save(&[], Contents::default(), None, None),
            save(&large, Contents::default(), None, None),
        ]
        .iter()
        .map(|file| kit(file))
        .collect()
    })
}

/// Chains of three: each tensor changes a little from file to file.
fn chains() -> &'static [Vec<Kit>] {
    static CHAINS: OnceLock<Vec<Vec<Kit>>> = OnceLock::new();
    CHAINS.get_or_init(|| {
        let weights = |dtype, shape: &[u64]| {
            vec![
                tensor("w", dtype, shape, "like-weights"),
                tensor("v", DType::Float32, &[4500], "like-squares"),
                tensor("small", DType::Float32, &[9], "like-weights"),
            ]
        };
        let large = vec![
            tensor("w", DType::Float32, &[70_000], "zeros"),
            tensor("v", DType::Float64, &[66_000], "two-values"),
        ];
        [weights(DType::BFloat16, &[5000]), weights(DType::Float32, &[70, 70]), large]
            .into_iter()
            .map(chain_of)
            .collect()
    })
}

fn chain_of(mut tensors: Vec<Tensor>) -> Vec<Kit> {
    let mut kits: Vec<Kit> = vec![];
    let mut parents: HashMap<Digest, bytes::Bytes> = HashMap::new();
    let mut parent = None;
    for step in 1..4u8 {
        let file = save(&tensors, Contents::default(), None, parent.as_ref());
        kits.push(kit(&file));
        let bytes = bytes::Bytes::from(file);
        parents.extend(digest(&bytes).map(|d| (d, bytes.clone())));
        let options = options(Some(Arc::new(parents.clone())));
        parent = Reader::open(Source::Bytes(bytes), options).ok().map(Arc::new);
        for t in &mut tensors {
            t.data
                .iter_mut()
                .step_by(37 * usize::from(step))
                .for_each(|b| *b = b.wrapping_add(step));
        }
    }
    kits
}

/// The manifests of all these files.
pub(crate) fn manifests() -> Vec<String> {
    let chained = chains().iter().flatten();
    bases().iter().chain(chained).map(|kit| kit.manifest.to_string()).collect()
}
