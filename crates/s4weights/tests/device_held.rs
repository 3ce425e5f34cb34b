//! Frames of device tensors that are written and uploaded straight from the memory that the device
//! sent them to: the same bytes as for host tensors, in memory that is reused.
//!
//! Without a device these tests run on a driver that emulates one; with `S4_REQUIRE_GPU=1` they fail then.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

#[path = "common/emulated.rs"]
mod emulated;
#[path = "common/gpu.rs"]
mod gpu;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use gpu::{Gpu, gpu, memory};
use s4_codec_gpu::DeviceBuffer;
use s4_planes::patterns::{self, Kind};
use s4weights::cuda::{CudaEngine, CudaOptions, FrameMemory};
use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{
    DType, DataObject, Error, ObjectOptions, ObjectSink, Result, Sink, Target, TensorSource,
    WriteOptions, Writer, Written,
};

#[test]
fn all_tests_pass_on_an_emulated_driver() {
    emulated::run_all();
}

const OBJECTS: ObjectOptions = ObjectOptions { bytes: 4 << 20 };
/// Bytes of a piece for less than 17 MiB.
const PIECE: u64 = (2 << 20) + (64 << 10);

struct Tensor {
    name: &'static str,
    dtype: DType,
    data: Vec<u8>,
    group: u8,
}

/// Tensors in two groups that need more than one object of 4 MiB. The kernels leave some of their
/// chunks to the CPU.
fn tensors(step: u8) -> Vec<Tensor> {
    let mut state = 1u32;
    let mut noise = |n: usize| -> Vec<u8> {
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(next).collect()
    };
    let weights = patterns::all(Kind::BF16, 150_000).find(|p| p.0 == "like-weights").unwrap().1;
    let words: Vec<u8> = (0..20_000u64).flat_map(|i| (i * i % 977).to_le_bytes()).collect();
    let mut out = vec![
        Tensor { name: "noise", dtype: DType::Int16, data: noise(2_600_006), group: 0 },
        Tensor { name: "weights", dtype: DType::BFloat16, data: weights, group: 0 },
        Tensor { name: "words", dtype: DType::Int64, data: words, group: 1 },
        Tensor { name: "small", dtype: DType::Int32, data: noise(400), group: 1 },
        Tensor { name: "more", dtype: DType::Int16, data: noise(2_500_004), group: 0 },
    ];
    for t in &mut out {
        t.data.iter_mut().step_by(311).for_each(|b| *b ^= step);
    }
    out
}

fn on_host(tensors: &[Tensor]) -> (Vec<[u64; 1]>, Vec<Option<DeviceBuffer>>) {
    let shapes = tensors.iter().map(|t| [(t.data.len() / t.dtype.size()) as u64]);
    (shapes.collect(), tensors.iter().map(|_| None).collect())
}

fn on_device(gpu: &Gpu, tensors: &[Tensor]) -> (Vec<[u64; 1]>, Vec<Option<DeviceBuffer>>) {
    let uploads = tensors.iter().map(|t| Some(gpu.upload(&t.data)));
    (on_host(tensors).0, uploads.collect())
}

fn sources<'a>(
    tensors: &'a [Tensor],
    (shapes, buffers): &'a (Vec<[u64; 1]>, Vec<Option<DeviceBuffer>>),
) -> Vec<TensorSource<'a>> {
    let places = tensors.iter().zip(shapes).zip(buffers);
    let source = places.map(|((t, shape), buffer)| {
        let source = match buffer {
            Some(buffer) => TensorSource::new(t.name, t.dtype, shape, memory(buffer)),
            None => TensorSource::new(t.name, t.dtype, shape, &t.data[..]),
        };
        source.in_group(t.group)
    });
    source.collect()
}

fn engine(gpu: &Gpu, frames: u64) -> Arc<CudaEngine> {
    let options = CudaOptions { frames, ..CudaOptions::default() };
    Arc::new(CudaEngine::new(gpu.engine.cuda().clone(), options))
}

fn is_back(memory: FrameMemory) -> bool {
    memory.idle == memory.taken
}

/// Keeps objects, up to a number of them.
#[derive(Clone)]
struct Kept {
    objects: Arc<Mutex<BTreeMap<u32, DataObject>>>,
    most: usize,
}

impl Kept {
    fn new(most: usize) -> Self {
        Self { objects: Arc::default(), most }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let objects = self.objects.lock().unwrap();
        objects.values().map(|o| o.bytes.iter().flatten().copied().collect()).collect()
    }

    fn parts(&self) -> usize {
        self.objects.lock().unwrap().values().map(|o| o.bytes.iter().count()).sum()
    }
}

impl ObjectSink for Kept {
    fn put(&mut self, object: DataObject) -> Result<()> {
        let mut objects = self.objects.lock().unwrap();
        if objects.len() == self.most {
            return Err(Error::Argument("full".into()));
        }
        objects.insert(object.number, object);
        Ok(())
    }
}

fn write_objects(
    sources: &[TensorSource<'_>],
    kept: &Kept,
    engine: Option<Arc<CudaEngine>>,
    threads: usize,
) -> Result<Written> {
    let options = WriteOptions { engine, threads: Some(threads), ..WriteOptions::default() };
    let mut writer = Writer::create_objects("kept", Box::new(kept.clone()), OBJECTS, options)?;
    writer.write(sources)?;
    writer.complete(Default::default())
}

#[test]
fn objects_are_the_same_held_or_copied() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(0);
    let (host, device) = (on_host(&tensors), on_device(&gpu, &tensors));
    let expected = Kept::new(usize::MAX);
    let written = write_objects(&sources(&tensors, &host), &expected, None, 2).unwrap();
    assert!(expected.bytes().len() > 2);
    // Nothing is held, some frames are, all are.
    for (budget, threads) in [(0, 2), (PIECE, 1), (2 * PIECE, 3), (1 << 30, 1), (1 << 30, 3)] {
        let (kept, engine) = (Kept::new(usize::MAX), engine(&gpu, budget));
        let again = sources(&tensors, &device);
        let again = write_objects(&again, &kept, Some(Arc::clone(&engine)), threads).unwrap();
        assert_eq!(again.index, written.index, "{budget}");
        assert!(kept.bytes() == expected.bytes(), "{budget}");
        let memory = engine.frame_memory();
        assert!(memory.taken <= budget && (budget == 0 || memory.taken > memory.idle));
        assert!(kept.parts() < 40, "{}: frames that follow each other are one part", kept.parts());
        // Objects stay whole while somebody holds them; then their memory is free.
        let bytes = kept.bytes();
        let objects = std::mem::take(&mut *kept.objects.lock().unwrap());
        drop(kept);
        for (object, bytes) in objects.values().zip(bytes) {
            assert!(object.bytes.iter().flatten().eq(&bytes));
        }
        drop(objects);
        assert!(is_back(engine.frame_memory()), "{:?}", engine.frame_memory());
    }
}

#[test]
fn pieces_come_back_when_a_sink_fails() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(0);
    let device = on_device(&gpu, &tensors);
    let engine = engine(&gpu, 16 << 20);
    for most in [0, 1, usize::MAX, 1] {
        let kept = Kept::new(most);
        let done = write_objects(&sources(&tensors, &device), &kept, Some(Arc::clone(&engine)), 3);
        assert_eq!(done.is_ok(), most == usize::MAX);
        drop((done, kept));
        let memory = engine.frame_memory();
        assert!(memory.taken > 0 && is_back(memory), "{memory:?}");
    }
}

/// A sink that blocks its first write until it is told to go on.
struct Slow {
    go: Receiver<()>,
    started: Arc<AtomicBool>,
    bytes: Vec<u8>,
    whole: Arc<Mutex<Vec<u8>>>,
    most: usize,
}

impl Sink for Slow {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.started.swap(true, Ordering::SeqCst) {
            self.go.recv().unwrap();
        }
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > self.most {
            return Err(Error::Argument("full".into()));
        }
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<()> {
        *self.whole.lock().unwrap() = self.bytes;
        Ok(())
    }
}

#[test]
fn values_are_needed_no_more_before_anything_is_written() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(0);
    let (host, device) = (on_host(&tensors), on_device(&gpu, &tensors));
    let mut files = vec![];
    for (places, most) in [(&host, usize::MAX), (&device, usize::MAX), (&device, 1 << 20)] {
        let engine = engine(&gpu, 1 << 30);
        let (tell, go) = channel();
        let (started, whole) = <(Arc<AtomicBool>, Arc<Mutex<Vec<u8>>>)>::default();
        let sink = Slow { go, started: started.clone(), bytes: vec![], whole: whole.clone(), most };
        // The header of the file comes first.
        tell.send(()).unwrap();
        let on_device = places.1[0].is_some();
        let options = WriteOptions {
            engine: Some(Arc::clone(&engine)),
            threads: Some(2),
            ahead: Some(usize::MAX),
            ..WriteOptions::default()
        };
        let mut writer =
            Writer::create(Target::Sink("slow".into(), Box::new(sink)), options).unwrap();
        if on_device {
            started.store(false, Ordering::SeqCst);
        }
        writer.write(&sources(&tensors, places)).unwrap();
        let held = engine.frame_memory();
        assert_eq!(held.taken > held.idle, on_device, "{held:?}");
        tell.send(()).unwrap();
        let done = writer.finish(Default::default());
        assert_eq!(done.is_ok(), most == usize::MAX, "{done:?}");
        assert!(is_back(engine.frame_memory()), "{:?}", engine.frame_memory());
        files.push(std::mem::take(&mut *whole.lock().unwrap()));
    }
    assert!(!files[0].is_empty() && files[0] == files[1]);
}

#[test]
fn saves_to_a_store_use_the_same_memory_again() {
    let Some(gpu) = gpu() else { return };
    // Parents in memory, some of them in memory, and all read back.
    let mut digests = vec![];
    for (parent_memory, budget) in [
        (1 << 30, 0),
        (1 << 30, 3 * PIECE),
        (1 << 30, 1 << 30),
        (9 << 20, 0),
        // Less than any object takes, but a share for each parent.
        (64, 16 * PIECE),
        (0, 0),
        (0, 3 * PIECE),
        (0, 1 << 30),
    ] {
        let engine = engine(&gpu, budget);
        let dir = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            parent_memory,
            object_bytes: 4 << 20,
            threads: Some(2),
            ..StoreOptions::default()
        };
        let url = dir.path().to_str().unwrap();
        let store = CheckpointStore::create(url, &Default::default(), options).unwrap();
        let (mut pieces, mut kept) = (vec![], vec![]);
        for step in 0..6u8 {
            let tensors = tensors(step);
            let device = on_device(&gpu, &tensors);
            let staged = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&staged);
            let with = SaveOptions {
                engine: Some(Arc::clone(&engine)),
                staged: Some(Arc::new(move || {
                    count.fetch_add(1, Ordering::SeqCst);
                })),
                ..SaveOptions::default()
            };
            let sources = sources(&tensors, &device);
            let saved = store.save(step.into(), &sources, &with).unwrap();
            assert_eq!(saved.checkpoint.base.is_some(), step > 0, "{:?}", saved.why_base);
            assert_eq!(staged.load(Ordering::SeqCst), 1);
            let memory = engine.frame_memory();
            assert!(memory.taken <= budget && memory.kept <= budget / 2, "{step}: {memory:?}");
            assert!(is_back(memory) || memory.kept > 0, "step {step}: {memory:?}");
            pieces.push(memory.pieces);
            kept.push(memory.kept);
            // The same bytes, whatever was kept.
            digests.push(saved.checkpoint.about.data_len);
            assert_eq!(digests.last(), digests.get(usize::from(step)), "{parent_memory} {budget}");
        }
        // With a small budget, how much is free depends on how fast objects are stored.
        if budget != 3 * PIECE {
            let any = kept.iter().any(|bytes| *bytes > 0);
            assert_eq!(any, parent_memory > 0 && budget > 0, "{parent_memory} {budget} {kept:?}");
        }
        assert_eq!(pieces[4], pieces[5], "{pieces:?}");
        for step in 0..6u8 {
            let loaded = store.load(Some(step.into())).unwrap();
            for t in &tensors(step) {
                assert!(loaded.reader().read(t.name).unwrap() == t.data, "{} {step}", t.name);
            }
        }
        drop(store);
        let memory = engine.frame_memory();
        assert!(is_back(memory) && memory.kept == 0, "{memory:?}");
    }
}
