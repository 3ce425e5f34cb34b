//! How many requests to an object store are in flight at the same time: a connection is slow, a network is not.

mod common;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use common::{Owned, save_to};
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use s4weights::store::{CheckpointStore, Place, SaveOptions, StoreOptions};
use s4weights::{
    Contents, DType, ReadOptions, Reader, Slice, Source, Target, WriteOptions, Writer,
};

/// Requests for fewer bytes than this are not held up: they are for the index.
const LEAST: usize = 60_000;

/// Holds requests up until as many as wanted have come, but not for ever.
#[derive(Debug, Default)]
struct Gate {
    wanted: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Gate {
    async fn pass(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        for _ in 0..60_000 {
            if self.most.load(Ordering::SeqCst) >= self.wanted.load(Ordering::SeqCst) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    /// From now on this many are wanted.
    fn want(&self, requests: usize) {
        self.most.store(0, Ordering::SeqCst);
        self.wanted.store(requests, Ordering::SeqCst);
    }
}

/// An object store whose large requests pass a gate.
#[derive(Debug, Default)]
struct Gated {
    inner: InMemory,
    gate: Arc<Gate>,
    /// Ranges that were read, and their bytes.
    reads: AtomicUsize,
    read: AtomicUsize,
}

impl fmt::Display for Gated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gated")
    }
}

#[derive(Debug)]
struct Parts {
    inner: Box<dyn MultipartUpload>,
    gate: Arc<Gate>,
}

#[async_trait]
impl MultipartUpload for Parts {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (part, gate) = (self.inner.put_part(data), Arc::clone(&self.gate));
        Box::pin(async move {
            gate.pass().await;
            part.await
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

#[async_trait]
impl ObjectStore for Gated {
    async fn put_opts(&self, key: &Path, body: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if body.content_length() >= LEAST {
            self.gate.pass().await;
        }
        self.inner.put_opts(key, body, opts).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.inner.put_multipart_opts(key, opts).await?;
        Ok(Box::new(Parts { inner, gate: Arc::clone(&self.gate) }))
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        if let Some(GetRange::Bounded(range)) = &options.range {
            let bytes = (range.end - range.start) as usize;
            self.reads.fetch_add(1, Ordering::SeqCst);
            self.read.fetch_add(bytes, Ordering::SeqCst);
            if bytes >= LEAST {
                self.gate.pass().await;
            }
        }
        self.inner.get_opts(key, options).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

impl Gated {
    /// Requests for ranges since the last call, and their bytes.
    fn take(&self) -> (usize, usize) {
        (self.reads.swap(0, Ordering::SeqCst), self.read.swap(0, Ordering::SeqCst))
    }
}

/// Bytes that cannot be made smaller.
fn noise(bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    blake3::Hasher::new().finalize_xof().fill(&mut out);
    out
}

#[test]
fn one_thread_has_many_reads_in_flight() {
    let (store, path) = (Arc::new(Gated::default()), Path::from("a.s4w"));
    // Every second tensor is wanted: those between are too large to be read along.
    let all = noise((40 * 600) << 10);
    let tensors: Vec<_> = all
        .chunks(600 << 10)
        .enumerate()
        .map(|(i, data)| {
            let data = if i % 2 == 0 { &data[..64 << 10] } else { data };
            Owned::new(i.to_string(), DType::UInt8, &[data.len() as u64], data.to_vec())
        })
        .collect();
    save_to(Target::Object(store.clone(), path.clone()), &tensors, WriteOptions::default())
        .unwrap();
    let options = ReadOptions { threads: Some(1), ..ReadOptions::default() };
    let reader = Reader::open(Source::Object(store.clone(), path), options).unwrap();
    let mut values: Vec<_> = (0..20).map(|_| vec![0; 64 << 10]).collect();
    let mut wants = vec![];
    for (i, values) in values.iter_mut().enumerate() {
        wants.push((reader.find(&(2 * i).to_string()).unwrap(), values.as_mut_slice()));
    }
    store.gate.want(20);
    reader.read_into(&mut wants).unwrap();
    assert_eq!(store.gate.most.load(Ordering::SeqCst), 20);
    assert!(values.iter().zip(tensors.iter().step_by(2)).all(|(read, t)| *read == t.data));
}

#[test]
fn a_file_has_many_parts_in_flight() {
    let (store, path) = (Arc::new(Gated::default()), Path::from("a.s4w"));
    // A little more than four parts; no test machine has so little memory that four do not fit.
    let tensors = [Owned::new("noise", DType::UInt8, &[130 << 20], noise(130 << 20))];
    store.gate.want(4);
    save_to(Target::Object(store.clone(), path.clone()), &tensors, WriteOptions::default())
        .unwrap();
    assert!(store.gate.most.load(Ordering::SeqCst) >= 4);
    let reader = Reader::open(Source::Object(store, path), ReadOptions::default()).unwrap();
    assert!(reader.read("noise").unwrap() == tensors[0].data);
}

#[test]
fn a_small_file_has_many_parts_in_flight_if_its_size_is_known() {
    let (store, path) = (Arc::new(Gated::default()), Path::from("a.s4w"));
    let tensor = Owned::new("noise", DType::UInt8, &[40 << 20], noise(40 << 20));
    // Four parts of 8 MiB, before the fifth is full.
    store.gate.want(4);
    let target = Target::Object(store.clone(), path.clone());
    let mut writer = Writer::create(target, WriteOptions::default()).unwrap();
    writer.expect(40 << 20);
    writer.write(&[tensor.source()]).unwrap();
    writer.finish(Contents::default()).unwrap();
    assert!(store.gate.most.load(Ordering::SeqCst) >= 4);
    let reader = Reader::open(Source::Object(store, path), ReadOptions::default()).unwrap();
    assert!(reader.read("noise").unwrap() == tensor.data);
}

#[test]
fn a_small_checkpoint_has_many_objects_in_flight() {
    // Seven objects of 4 MiB and an eighth: less than one of the usual size.
    let all = noise(30 << 20);
    let tensor = |(i, data): (usize, &[u8])| {
        Owned::new(i.to_string(), DType::UInt8, &[data.len() as u64], data.to_vec())
    };
    let tensors: Vec<_> = all.chunks(2 << 20).enumerate().map(tensor).collect();
    let sources: Vec<_> = tensors.iter().map(Owned::source).collect();
    let gated = Arc::new(Gated::default());
    let place = Place::objects(gated.clone(), Path::from("run"));
    let store = CheckpointStore::create_at(&place, StoreOptions::default()).unwrap();
    gated.gate.want(7);
    let saved = store.save(0, &sources, &SaveOptions::default()).unwrap();
    assert!(gated.gate.most.load(Ordering::SeqCst) >= 7);
    assert_eq!(saved.checkpoint.about.objects, 8);
    let loaded = store.load(None).unwrap();
    assert!(tensors.iter().all(|t| loaded.reader().read(&t.name).unwrap() == t.data));

    // A folder has no connections.
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::create_at(&Place::folder(folder.path()), StoreOptions::default());
    let saved = store.unwrap().save(0, &sources, &SaveOptions::default()).unwrap();
    assert_eq!(saved.checkpoint.about.objects, 1);
}

#[test]
fn a_column_is_read_as_the_tensor_and_a_header_alone() {
    let (store, path) = (Arc::new(Gated::default()), Path::from("a.s4w"));
    // Every chunk has values of the column, and frames of noise are as long as their values.
    let rows = 8 << 20;
    let tensor = Owned::new("w", DType::UInt8, &[rows, 2], noise(2 * rows as usize));
    let floats = (0..1 << 20).flat_map(|i| (i as f32 * 0.37).sin().to_le_bytes()).collect();
    let floats = Owned::new("f", DType::Float32, &[1 << 20], floats);
    let target = Target::Object(store.clone(), path.clone());
    save_to(target, &[tensor.clone(), floats], WriteOptions::default()).unwrap();
    let options = ReadOptions { threads: Some(2), ..ReadOptions::default() };
    let reader = Reader::open(Source::Object(store.clone(), path), options).unwrap();
    let whole = {
        store.take();
        assert!(reader.read("w").unwrap() == tensor.data);
        store.take()
    };
    let part = reader.read_slice("w", &Slice(vec![1..rows, 0..1])).unwrap();
    assert!(part.iter().eq(tensor.data[2..].iter().step_by(2)));
    let (reads, bytes) = store.take();
    assert!(reads <= whole.0 + 1 && bytes <= whole.1, "{reads} {bytes}, {whole:?}");
    let report = reader.inspect(true).unwrap();
    assert!(report.tensors[1].planes.len() > 1, "{report:?}");
    let (reads, bytes) = store.take();
    assert!(reads <= 20 && bytes < 100_000, "{reads} {bytes}");
}
