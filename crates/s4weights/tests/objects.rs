//! Checkpoints in several objects.

mod common;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use common::{Owned, mixed};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use s4weights::{
    Contents, DType, DataObject, DeviceMemory, Error, ObjectOptions, ObjectSink, ObjectSource,
    ReadOptions, Reader, Result, Source, TensorSource, WriteOptions, Writer, Written, adversarial,
};
use tokio::runtime::Runtime;

/// Objects of one checkpoint in a store.
#[derive(Clone)]
struct Objects {
    store: Arc<InMemory>,
    runtime: Arc<Runtime>,
    folder: &'static str,
}

impl Objects {
    fn new() -> Self {
        let runtime = Arc::new(Runtime::new().expect("in a test"));
        Self { store: Arc::default(), runtime, folder: "step-0" }
    }

    fn path(&self, number: u32) -> Path {
        Path::from(format!("{}/{number}", self.folder))
    }

    fn get(&self, number: u32) -> Vec<u8> {
        let get = async { self.store.get(&self.path(number)).await?.bytes().await };
        self.runtime.block_on(get).expect("in a test").into()
    }

    fn set(&self, number: u32, bytes: Vec<u8>) {
        let path = self.path(number);
        let put = self.store.put(&path, bytes.into());
        self.runtime.block_on(put).expect("in a test");
    }

    fn remove(&self, number: u32) {
        self.runtime.block_on(self.store.delete(&self.path(number))).expect("in a test");
    }
}

fn failed(action: &'static str, e: object_store::Error) -> Error {
    Error::Io { target: "objects".into(), action, source: e.into() }
}

impl ObjectSink for Objects {
    fn put(&mut self, object: DataObject) -> Result<()> {
        let whole = Bytes::from(object.bytes.clone());
        assert_eq!(object.blake3, s4weights::format::Digest::of(&whole));
        let path = self.path(object.number);
        let put = self.store.put(&path, object.bytes);
        self.runtime.block_on(put).map(drop).map_err(|e| failed("upload", e))
    }
}

impl ObjectSource for Objects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let path = self.path(number);
        let get = self.store.get_range(&path, range);
        self.runtime.block_on(get).map_err(|e| failed("read", e))
    }
}

const SMALL_OBJECTS: ObjectOptions = ObjectOptions { bytes: 4 << 20 };

fn write(objects: &Objects, tensors: &[Owned], options: WriteOptions) -> Result<Written> {
    let sink = Box::new(objects.clone());
    let mut writer = Writer::create_objects("objects", sink, SMALL_OBJECTS, options)?;
    let group = |t: &Owned| u8::from(t.name.starts_with("opt"));
    let sources: Vec<_> = tensors.iter().map(|t| t.source().in_group(group(t))).collect();
    writer.write(&sources)?;
    let blobs = [("extra".to_owned(), vec![1, 2, 3])].into();
    writer.complete(Contents { blobs, ..Contents::default() })
}

fn open(objects: &Objects, index: &Bytes) -> Result<Reader> {
    let source = Source::Bytes(index.clone());
    Reader::open_objects(source, Box::new(objects.clone()), ReadOptions::default())
}

/// 14 MiB of noise in weights, 6 in the optimizer's state, and small tensors of both.
fn state() -> Vec<Owned> {
    let noise = |n| adversarial(DType::UInt8, n).find(|p| p.0 == "random").expect("in a test").1;
    let mut tensors = mixed();
    tensors.push(Owned::new("weight", DType::UInt8, &[14 << 20], noise(14 << 20)));
    tensors.push(Owned::new("opt.m", DType::UInt8, &[6 << 20], noise(6 << 20)));
    tensors.push(Owned::new("opt.step", DType::Float32, &[], vec![0, 0, 0, 64]));
    tensors
}

#[test]
fn objects_are_bounded_and_groups_lie_apart() {
    let tensors = state();
    let objects = Objects::new();
    let written = write(&objects, &tensors, WriteOptions::default()).unwrap();
    let index = written.index.unwrap();
    let reader = open(&objects, &index).unwrap();
    for t in &tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    assert_eq!(reader.blob("extra").unwrap(), [1, 2, 3]);
    let list = &reader.manifest().objects;
    assert!(list.len() >= 6, "{}", list.len());
    assert!(list.iter().all(|o| o.bytes <= 4 << 20));
    let sum: u64 = list.iter().map(|o| o.bytes).sum();
    assert_eq!(written.report.bytes_out, sum + index.len() as u64);
    assert_eq!(reader.verify().unwrap().hashes, list.len() as u64 + 3);
    assert_eq!(reader.inspect(true).unwrap().file_bytes, written.report.bytes_out);
    // Weights can be read without the optimizer's objects, which are those that its tensors cannot
    // be read without.
    let mut without = 0;
    for number in 0..list.len() as u32 {
        let bytes = objects.get(number);
        objects.remove(number);
        if reader.read("opt.m").is_err() || reader.read("opt.step").is_err() {
            without += 1;
            for t in tensors.iter().filter(|t| !t.name.starts_with("opt")) {
                assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
            }
        } else {
            objects.set(number, bytes);
        }
    }
    assert!((2..=3).contains(&without), "{without} of {} objects", list.len());
}

#[test]
fn the_same_objects_whatever_the_number_of_threads() {
    let tensors = state();
    let all = |threads| {
        let objects = Objects::new();
        let options = WriteOptions { threads: Some(threads), ..WriteOptions::default() };
        let index = write(&objects, &tensors, options).unwrap().index.unwrap();
        let count = open(&objects, &index).unwrap().manifest().objects.len();
        (index, (0..count as u32).map(|n| objects.get(n)).collect::<Vec<_>>())
    };
    let first = all(1);
    assert!(all(2) == first);
    assert!(all(5) == first);
}

#[test]
fn a_difference_in_objects_is_read_through_its_parents() {
    let base = Objects::new();
    let mut tensors = state();
    let mut index = write(&base, &tensors, WriteOptions::default()).unwrap().index.unwrap();
    let mut parent = Arc::new(open(&base, &index).unwrap());
    for folder in ["step-1", "step-2", "step-3"] {
        for t in &mut tensors {
            t.data.iter_mut().step_by(97).for_each(|b| *b ^= 1);
        }
        let objects = Objects { folder, ..base.clone() };
        let options = WriteOptions { parent: Some(Arc::clone(&parent) as _), ..Default::default() };
        let written = write(&objects, &tensors, options).unwrap();
        assert!(written.report.bytes_out < 4 << 20, "{}", written.report.bytes_out);
        index = written.index.unwrap();
        let reader = open(&objects, &index).unwrap();
        assert!(matches!(reader.read("weight"), Err(Error::Parent { .. })));
        reader.set_parent(parent).unwrap();
        for t in &tensors {
            assert!(reader.read(&t.name).unwrap() == t.data, "{folder} {}", t.name);
        }
        reader.verify().unwrap();
        parent = Arc::new(reader);
    }
    // A chunk of the newest checkpoint needs only the same chunk of the base: other objects may be gone.
    #[expect(clippy::single_range_in_vec_init, reason = "a slice of one dimension is one range")]
    let first = s4weights::Slice(vec![0..1000]);
    let objects = parent.manifest().objects.len();
    assert!(objects > 0);
    let reader = open(&Objects { folder: "step-3", ..base.clone() }, &index).unwrap();
    reader.set_parent(Arc::clone(&parent)).unwrap_err();
    for number in 2..4 {
        base.remove(number);
    }
    let w = tensors.iter().find(|t| t.name == "weight").unwrap();
    assert!(parent.read_slice("weight", &first).unwrap() == w.data[..1000]);
    assert!(parent.read("weight").is_err());
}

#[test]
fn damaged_short_and_missing_objects_are_errors() {
    let tensors = state();
    let objects = Objects::new();
    let index = write(&objects, &tensors, WriteOptions::default()).unwrap().index.unwrap();
    let reader = open(&objects, &index).unwrap();
    let clean = objects.get(0);
    let read_all = || tensors.iter().try_for_each(|t| reader.read(&t.name).map(drop));
    for at in [0, 1, clean.len() / 2, clean.len() - 1] {
        let mut bad = clean.clone();
        bad[at] ^= 16;
        objects.set(0, bad);
        let e = read_all().unwrap_err();
        assert!(matches!(&e, Error::Format { .. }) && e.to_string().contains("tensor `"), "{e}");
        assert!(reader.verify().is_err());
    }
    objects.set(0, clean[..clean.len() - 1].to_vec());
    assert!(read_all().is_err() && reader.verify().is_err());
    objects.remove(0);
    assert!(matches!(read_all(), Err(Error::Io { .. })));
    objects.set(0, clean);
    reader.verify().unwrap();
    // The index alone lists the tensors, and reading says that the rest is in objects.
    let alone = Reader::open(Source::Bytes(index.clone()), ReadOptions::default()).unwrap();
    assert_eq!(alone.tensors().len(), tensors.len());
    assert!(alone.read("w").unwrap_err().to_string().contains("objects"));
    for cut in [0, 15, index.len() / 2, index.len() - 1] {
        assert!(open(&objects, &index.slice(..cut)).is_err());
    }
}

/// Takes this many objects, and then no more.
struct Full(u32);

impl ObjectSink for Full {
    fn put(&mut self, _: DataObject) -> Result<()> {
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        self.0 = self.0.checked_sub(1).ok_or(Error::Io {
            target: "objects".into(),
            action: "upload",
            source: full,
        })?;
        Ok(())
    }
}

#[test]
fn what_a_sink_refuses_and_what_does_not_fit_is_an_error() {
    let t = state().into_iter().find(|t| t.name == "weight").unwrap();
    let source = t.source();
    for room in 0..4 {
        let sink = Box::new(Full(room));
        let options = WriteOptions::default();
        let mut writer = Writer::create_objects("full", sink, SMALL_OBJECTS, options).unwrap();
        let done = writer.write(&[source]).and_then(|()| writer.complete(Contents::default()));
        let e = done.err().map(|e| e.to_string());
        assert!(e.clone().is_some_and(|e| e.contains("upload")), "{room}: {e:?}");
    }
    for bytes in [0, (4 << 20) - 1, (64 << 20) + 1, usize::MAX] {
        let objects = ObjectOptions { bytes };
        let options = WriteOptions::default();
        let made = Writer::create_objects("x", Box::new(Full(9)), objects, options);
        assert!(matches!(made.err(), Some(Error::Argument(_))), "{bytes}");
    }
    let create = || {
        let options = WriteOptions::default();
        Writer::create_objects("x", Box::new(Full(9)), ObjectOptions::default(), options).unwrap()
    };
    assert!(matches!(create().write(&[source.in_group(4)]), Err(Error::Argument(_))));
    // The writer has no engine to read device memory. SAFETY: the memory is never accessed.
    let memory = unsafe { DeviceMemory::new(0, 0, source.values.bytes(), 0) };
    let on_device = TensorSource { values: memory.into(), ..source };
    assert!(matches!(create().write(&[on_device]), Err(Error::Argument(_))));
    // An index that nobody takes is an error, not lost silently. An empty checkpoint has an index, too.
    assert!(matches!(create().finish(Contents::default()), Err(Error::Argument(_))));
    let nothing = create().complete(Contents::default()).unwrap();
    let index = nothing.index.unwrap();
    assert_eq!(open(&Objects::new(), &index).unwrap().tensors().len(), 0);
}

#[test]
fn a_checkpoint_in_memory_is_compared_with_its_hashes() {
    let (tensors, objects) = (state(), Objects::new());
    let index = write(&objects, &tensors, WriteOptions::default()).unwrap().index.unwrap();
    let count = open(&objects, &index).unwrap().manifest().objects.len() as u32;
    let stored: Vec<Bytes> = (0..count).map(|n| objects.get(n).into()).collect();
    let open = |objects| Reader::open_in_memory(index.clone(), objects, ReadOptions::default());
    let reader = open(stored.clone()).unwrap();
    for t in &tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    let refused = |change: &dyn Fn(&mut Vec<Bytes>)| {
        let mut bad = stored.clone();
        change(&mut bad);
        let e = open(bad).err().unwrap();
        assert!(matches!(e, Error::Format { .. }), "{e}");
    };
    refused(&|list| drop(list.pop()));
    refused(&|list| list.push(Bytes::new()));
    refused(&|list| list.swap(0, 1));
    refused(&|list| list[2] = list[2].slice(1..));
    refused(&|list| {
        let mut bytes = list[1].to_vec();
        bytes[7] ^= 1;
        list[1] = bytes.into();
    });
}
