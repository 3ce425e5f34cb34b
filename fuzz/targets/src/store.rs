//! Stores whose log, view, manifests and `repo.json` hold arbitrary content, with sound seals and
//! hashes.

use std::sync::Arc;

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::quick_options;
use s4_store::{About, CheckOptions, Digest, Place, Reference, Store};
use serde_json::{Map, Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::input::Input;
use crate::memory::bounded_async;

/// Most entries of a log.
const MAX_ENTRIES: usize = 96;

const REPO: &str = "00000000-0000-7000-8000-00000000ffff";

/// A log of up to 96 operations, some of which break rules, is replayed; then writers go on.
pub fn store_log(data: &[u8]) {
    let mut input = Input::new(data);
    let mut log = Log::default();
    while !input.is_empty() && log.entries.len() < MAX_ENTRIES {
        let op = log.op(&mut input);
        log.push(op);
    }
    run(async {
        let objects = log.objects(repo()).await;
        exercise(&objects, data.len()).await;
    });
}

/// One document of a store, with arbitrary bytes as its JSON under a sound seal: `repo.json`, a log
/// entry, the view or a manifest; or a view of arbitrary checkpoints.
pub fn store_views(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.below(5);
    let mut log = Log::default();
    let few = input.below(6);
    for _ in 0..few {
        let op = log.op(&mut Input::new(&input.array::<8>()));
        log.push(op);
    }
    let manifest = if kind == 3 { input.clone().rest().to_vec() } else { vec![] };
    if kind == 3 {
        log.push(json!({"publish": publish(9, Value::Null, &manifest)}));
    }
    let view = if kind == 4 { log.view(&mut input) } else { Value::Null };
    let raw = input.rest();
    if kind == 1 {
        log.entries.push(seal(raw));
    }
    run(async {
        let repo = if kind == 0 { seal(raw) } else { repo() };
        let objects = log.objects(repo).await;
        let view = match kind {
            2 => Some(seal(raw)),
            4 => Some(seal(view.to_string().as_bytes())),
            _ => None,
        };
        if let Some(view) = view {
            put(&objects, "logck", view).await;
        }
        if kind == 3 {
            put(&objects, &format!("ck/{}/manifest", id(9)), manifest.into()).await;
        }
        exercise(&objects, data.len()).await;
    });
}

/// Opens the store and does what readers, checkers and writers do.
async fn exercise(objects: &Arc<InMemory>, len: usize) {
    let place = Place::objects(Arc::clone(objects) as Arc<dyn ObjectStore>, Path::default());
    let input = len + 4096 * MAX_ENTRIES;
    let Ok(store) = bounded_async(input, Store::open(&place, quick_options())).await else {
        return;
    };
    let Ok(state) = store.state().await else { return };
    let list: Vec<_> = state.list().into_iter().cloned().collect();
    assert!(list.is_sorted_by_key(|c| (c.order, c.entry)));
    assert_eq!(state.latest().map(|c| c.id()), list.last().map(|c| c.id()));
    for c in &list {
        if let Ok(chain) = state.chain(c.id()) {
            assert!(chain.len() <= s4_store::MAX_CHAIN);
        }
        let _ = state.descendants(&[c.id()]);
        let _ = state.at_step(c.step());
        if let Ok(reading) = bounded_async(input, store.read(c.id())).await {
            for n in 0..reading.object_count().min(3) {
                let _ = reading.object(n).await;
            }
        }
    }
    let _ = store.log(1).await;
    let check = CheckOptions { read_data: true, ..CheckOptions::default() };
    let _ = bounded_async(input, store.check(&check, None)).await;
    // Writers: deltas of ids that may have been named, then retiring and pinning.
    for k in 0..4 {
        let parent = Reference { id: parse(id(k)), manifest_blake3: Digest::of(&[k]) };
        let about = About { step: 7, parent: Some(parent), ..About::default() };
        let Ok(attempt) = store.begin().await else { break };
        let _ = attempt.publish(Bytes::from_static(b"x"), about).await;
    }
    let ids: Vec<_> = list.iter().map(|c| c.id()).collect();
    if let Some(first) = ids.first() {
        let _ = store.pin(*first).await;
        let _ = store.unpin(*first).await;
    }
    let _ = store.retire(&ids, "all").await;
    // A second handle sees what the first one knows.
    let Ok(again) = Store::open(&place, quick_options()).await else { return };
    if let (Ok(one), Ok(other)) = (store.state().await, again.state().await) {
        assert_eq!(one.head(), other.head());
        assert_eq!(one.list(), other.list(), "two handles disagree");
    }
}

fn run(work: impl Future<Output = ()>) {
    thread_local! {
        static RUNTIME: Runtime = runtime();
    }
    RUNTIME.with(|runtime| runtime.block_on(work));
}

fn runtime() -> Runtime {
    match Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime,
        Err(e) => panic!("a runtime: {e}"),
    }
}

async fn put(objects: &Arc<InMemory>, key: &str, bytes: Bytes) {
    let put = objects.put(&Path::from(key), bytes.into()).await;
    assert!(put.is_ok());
}

/// `{...}` with its hash on the line below.
fn seal(body: &[u8]) -> Bytes {
    let tail = format!("\n\"blake3:{}\"\n", Digest::of(body));
    [body, tail.as_bytes()].concat().into()
}

fn repo() -> Bytes {
    let probe =
        json!({"refuses_second": true, "survives_races": true, "rounds": 10, "bad_rounds": 0});
    let repo = json!({
        "format": 1, "min_reader": 1, "id": REPO, "mode": "many", "probe": probe,
        "probed_at": InMemory::new().to_string(), "created_ms": 0, "created_by": "fuzz",
    });
    seal(repo.to_string().as_bytes())
}

/// The id of a small number.
fn id(k: u8) -> String {
    format!("00000000-0000-7000-8000-0000000000{k:02x}")
}

fn parse<T: std::str::FromStr>(text: String) -> T
where
    T::Err: std::fmt::Debug,
{
    match text.parse() {
        Ok(value) => value,
        Err(e) => panic!("{text}: {e:?}"),
    }
}

fn publish(k: u8, parent: Value, manifest: &[u8]) -> Value {
    let mut out = json!({
        "id": id(k), "step": k, "manifest_blake3": Digest::of(manifest).to_string(),
        "manifest_len": manifest.len(), "objects": 0, "data_len": 0,
    });
    if !parent.is_null() {
        out["parent"] = parent;
    }
    out
}

/// The entries of a log, each naming the one before it.
#[derive(Default)]
struct Log {
    entries: Vec<Bytes>,
}

impl Log {
    fn push(&mut self, op: Value) {
        let prev = Digest::of(self.entries.last().map_or(&[][..], |b| b));
        let n = self.entries.len() + 1;
        let v = if op["publish"]["order"].is_null() { 1 } else { 4 };
        let entry = json!({
            "v": v, "n": n, "prev": prev.to_string(), "write_id": id((n % 256) as u8), "at_ms": n,
            "op": op,
        });
        self.entries.push(seal(entry.to_string().as_bytes()));
    }

    /// A reference to a checkpoint, with the hash that it has or another one.
    fn reference(input: &mut Input<'_>) -> Value {
        let [k, wrong] = input.array();
        let k = k % 16;
        let hash = if wrong % 8 == 7 { Digest::of(&[k, wrong]) } else { Digest::of(&[k]) };
        json!({"id": id(k), "manifest_blake3": hash.to_string()})
    }

    fn op(&self, input: &mut Input<'_>) -> Value {
        let (kind, k) = (input.u8(), input.u8() % 16);
        let ids = |input: &mut Input<'_>, n: usize| -> Vec<_> {
            (0..n).map(|_| id(input.u8() % 16)).collect()
        };
        match kind % 12 {
            0..=5 => {
                let parent = if kind % 12 > 0 { Self::reference(input) } else { Value::Null };
                // Its manifest's hash is the hash of its number, so that references fit.
                let mut publish = publish(k, parent, &[k]);
                if kind & 0x10 != 0 {
                    publish["replaces"] = Self::reference(input);
                }
                if kind & 0x30 == 0x30 {
                    publish.as_object_mut().map(|p| p.remove("parent"));
                }
                if kind & 0x40 != 0 {
                    publish["since_base"] = input.u8().into();
                    publish["metrics"] = json!({"loss": f64::from(input.u8()) / 3.0});
                }
                if kind & 0x80 != 0 {
                    publish["step"] = input.u32().into();
                }
                if kind & 0xc0 == 0xc0 {
                    publish["order"] = (input.u8() % 16).into();
                }
                json!({"publish": publish})
            }
            6 | 7 => {
                let n = 1 + input.below(3);
                let mut list = ids(input, n);
                list.push(id(k));
                json!({"retire": {"ids": list, "reason": "r"}})
            }
            8 => {
                let n = input.below(3);
                json!({"abort": {"ids": ids(input, n)}})
            }
            9 => json!({"pin": {"id": id(k)}}),
            10 => json!({"unpin": {"id": id(k)}}),
            _ => json!({"fence": {"against": id(k)}}),
        }
    }

    /// A view of this log's end, with arbitrary checkpoints.
    fn view(&self, input: &mut Input<'_>) -> Value {
        let (mut live, mut dead) = (vec![], vec![]);
        for _ in 0..input.below(12) {
            let [kind, k, other] = input.array();
            let (k, other) = (k % 16, other % 16);
            let reference =
                |k: u8| json!({"id": id(k), "manifest_blake3": Digest::of(&[k]).to_string()});
            if kind % 2 == 0 {
                let parent = if kind & 2 == 2 { reference(other) } else { Value::Null };
                let base = if kind & 4 == 4 { json!(id(other)) } else { Value::Null };
                live.push(json!({
                    "about": publish(k, parent, &[k]), "entry": kind, "order": kind >> 3,
                    "base": base, "pinned": kind & 8 == 8, "at_ms": 0,
                }));
            } else {
                let had = Digest::of(&[k]).to_string();
                let how = match kind >> 1 & 3 {
                    0 => json!("retired"),
                    1 => json!("aborted"),
                    _ => json!({"replaced": {"by": reference(other), "had": had}}),
                };
                dead.push(json!([id(k), {"entry": kind, "how": how}]));
            }
        }
        let head = self.entries.len();
        let hash = Digest::of(self.entries.last().map_or(&[][..], |b| b)).to_string();
        let fields = [
            ("v", json!(1)),
            ("repo", json!(REPO)),
            ("head", json!(head)),
            ("head_hash", json!(hash)),
            ("live", Value::Array(live)),
            ("dead", Value::Array(dead)),
        ];
        Value::Object(fields.map(|(k, v)| (k.to_owned(), v)).into_iter().collect::<Map<_, _>>())
    }

    /// An object store that holds the log and this `repo.json`.
    async fn objects(&self, repo: Bytes) -> Arc<InMemory> {
        let objects = Arc::new(InMemory::new());
        put(&objects, "repo.json", repo).await;
        for (n, entry) in (1u64..).zip(&self.entries) {
            put(&objects, &format!("log/{n:020}"), entry.clone()).await;
        }
        objects
    }
}

/// Documents of a store, each with the number by which [`store_views`] knows its kind.
pub(crate) fn documents() -> Vec<(u8, String)> {
    let mut log = Log::default();
    log.push(json!({"publish": publish(1, Value::Null, &[1])}));
    let text = |sealed: &Bytes| {
        let lines = String::from_utf8_lossy(sealed);
        lines.lines().next().unwrap_or_default().to_owned()
    };
    let view = log.view(&mut Input::new(&[3, 0, 1, 2, 5, 2, 1, 4, 3, 1]));
    let table = json!({"id": id(9), "objects": [{"len": 1, "blake3": Digest::of(b"x").to_string()}], "blob_len": 2});
    let table = table.to_string();
    let len = (table.len() as u32).to_le_bytes();
    let manifest = [&b"S4CKPT\0\x01"[..], &len, table.as_bytes(), b"ab"].concat();
    vec![
        (0, text(&repo())),
        (1, log.entries.first().map(text).unwrap_or_default()),
        (2, view.to_string()),
        (3, String::from_utf8_lossy(&manifest).into_owned()),
    ]
}
