//! `testdata/golden/expected.json`: what every golden file holds, for other readers than this one.
//!
//! `S4_WRITE_VECTORS=<folder>` keeps the computed file.

use std::path::Path;
use std::sync::Arc;

use s4weights::format::Digest;
use s4weights::store::{CheckpointStore, Place, StoreOptions};
use s4weights::{ReadOptions, Reader, Source};
use serde_json::{Value, json};

use crate::golden_cpu::kept;
use crate::repository;

/// Name, dtype, shape and the BLAKE3 of the little-endian values of every tensor, in the order of the
/// tensor table; and the hash of the manifest.
fn facts(reader: &Reader) -> Value {
    let tensors = reader.tensors().map(|t| {
        let values = Digest::of(&reader.read(t.name).unwrap()).to_string();
        json!({ "name": t.name, "dtype": t.dtype.name(), "shape": t.shape, "blake3": values })
    });
    let manifest = reader.manifest();
    json!({
        "manifest_blake3": reader.digest().to_string(),
        "depth": manifest.depth(),
        "objects": manifest.objects.len(),
        "form": manifest.form,
        "tree_blake3": reader.tree().map(|t| Digest::of(t.as_bytes()).to_string()),
        "metadata": manifest.metadata,
        "tensors": tensors.collect::<Vec<_>>(),
    })
}

fn open(path: &Path, parent: Option<&Arc<Reader>>) -> Arc<Reader> {
    let reader = Reader::open(Source::from(path), ReadOptions::default()).unwrap();
    if let Some(parent) = parent {
        reader.set_parent(Arc::clone(parent)).unwrap();
    }
    reader.verify().unwrap();
    Arc::new(reader)
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Every listed checkpoint of a store, from the oldest to the newest.
fn store_facts(folder: &Path) -> Value {
    // Opens a copy, because opening a store may refresh its view.
    let dir = tempfile::tempdir().unwrap();
    copy_folder(folder, dir.path());
    let place = Place::folder(dir.path());
    let store = CheckpointStore::open_at(&place, StoreOptions::default()).unwrap();
    let checkpoints = store.list().unwrap().into_iter().map(|c| {
        let loaded = store.load_id(c.id(), None).unwrap();
        loaded.reader().verify().unwrap();
        let mut out = facts(loaded.reader());
        out["id"] = json!(c.id());
        out["step"] = json!(c.step());
        out["base"] = json!(c.base);
        out["pinned"] = json!(c.pinned);
        out
    });
    json!(checkpoints.collect::<Vec<_>>())
}

#[test]
fn golden_files_hold_what_is_written_down() {
    let root = kept().unwrap_or_else(|| repository("testdata")).join("golden");
    // Files that a GPU wrote are never made here.
    let gpu = repository("testdata/golden/gpu");
    let mut files = serde_json::Map::new();
    for name in ["bf16.s4w", "fp32.s4w", "patterns.s4w"] {
        files.insert(format!("gpu/{name}"), facts(&open(&gpu.join(name), None)));
    }
    if kept().is_some() && !root.join("store/repo.json").exists() {
        // The other tests are still making the chain and the store.
        return;
    }
    let packed = ["packed/predicted", "packed/blended", "packed/updated"];
    let others =
        ["chain", "predicted", "updated", "told", "stepped", "momentum", "blended", "same"];
    for folder in others.into_iter().chain(packed) {
        let [base, delta] = ["base", "delta"].map(|name| format!("{folder}/{name}.s4w"));
        let parent = open(&root.join(&base), None);
        let mut of_delta = facts(&open(&root.join(&delta), Some(&parent)));
        of_delta["parent"] = json!(base);
        files.insert(base, facts(&parent));
        files.insert(delta, of_delta);
    }
    let found = json!({ "files": files, "store": store_facts(&root.join("store")) });
    let path = root.join("expected.json");
    if kept().is_some() {
        std::fs::write(&path, lines(&found)).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    assert!(written == found, "{} says something else", path.display());
}

/// JSON with one line per tensor.
fn lines(value: &Value) -> String {
    serde_json::to_string(value).unwrap().replace("{\"blake3\"", "\n{\"blake3\"") + "\n"
}
