//! Tensors in device memory as deltas: the same files as from host tensors, and chains of them read back.
//!
//! Without a device these tests run on a driver that emulates one; with `S4_REQUIRE_GPU=1` they fail then.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

#[path = "device/copies.rs"]
mod copies;
#[path = "common/emulated.rs"]
mod emulated;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "device/updates.rs"]
mod updates;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use gpu::{Gpu, gpu, memory};
use s4_codec_gpu::DeviceBuffer;
use s4_planes::Width;
use s4_planes::patterns::{self, Kind};
use s4weights::store::{CheckpointStore, SaveOptions, Saved, StoreOptions};
use s4weights::{
    DType, DataObject, Error, MemoryParent, ObjectOptions, ObjectSink, ObjectSource, Parent,
    Preset, ReadOptions, Reader, Result, Source, StagedFn, TensorSource, Values, WriteOptions,
    Writer, Written,
};

#[test]
fn all_tests_pass_on_an_emulated_driver() {
    emulated::run_all();
}

#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    data: Vec<u8>,
}

impl Tensor {
    fn new(name: &str, dtype: DType, data: Vec<u8>) -> Self {
        let shape = vec![(data.len() / dtype.size()) as u64];
        Self { name: name.into(), dtype, shape, data }
    }

    fn source(&self) -> TensorSource<'_> {
        let Self { name, dtype, shape, data } = self;
        TensorSource::new(name, *dtype, shape, data)
    }
}

/// Weights, small tensors, ints whose residuals are left to Zstandard, and noise.
fn first(slow: bool) -> Vec<Tensor> {
    let n = if slow { 140_000 } else { 4_000_000 };
    let of = |name, dtype, kind, pattern: &str, n| {
        let data = patterns::all(kind, n).find(|p| p.0 == pattern).unwrap().1;
        Tensor::new(name, dtype, data)
    };
    vec![
        of("w", DType::BFloat16, Kind::BF16, "like-weights", n),
        of("ln", DType::Float32, Kind::F32, "like-weights", 77),
        of("m", DType::Float32, Kind::F32, "like-weights", n / 2),
        of("v", DType::Float32, Kind::F32, "like-squares", 9000),
        of("tiny", DType::BFloat16, Kind::BF16, "like-weights", 4096),
        of("q", DType::Float8E4M3Fn, Kind::F8_E4M3, "like-weights", 70_000),
        Tensor::new(
            "ids",
            DType::Int64,
            (0..9000u64).flat_map(|i| (i * i * 7).to_le_bytes()).collect(),
        ),
        of("noise", DType::UInt8, Kind::int(Width::B1), "random", 9000),
        of("none", DType::Float16, Kind::F16, "like-weights", 0),
    ]
}

/// The tensors a training step later. `v` and `noise` change altogether, the others in a few bits.
fn later(before: &[Tensor], step: u64) -> Vec<Tensor> {
    let change = |t: &Tensor| {
        let mut t = t.clone();
        let width = t.dtype.value_width();
        for (i, value) in t.data.chunks_exact_mut(width).enumerate() {
            let noise = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + step) >> 40;
            match t.name.as_str() {
                "v" | "noise" => {
                    let others = noise.wrapping_mul(0xd134_2543_de82_ef95).to_be_bytes();
                    value.iter_mut().zip(others).for_each(|(b, other)| *b ^= other);
                }
                "ids" | "q" => value[0] ^= u8::from(noise.is_multiple_of(40)),
                // A few units in the last place, up or down: smaller as an ordered difference than as an XOR.
                "m" => {
                    let bits = u32::from_le_bytes(value.try_into().unwrap());
                    let moved = bits.wrapping_add((noise % 61) as u32).wrapping_sub(30);
                    value.copy_from_slice(&moved.to_le_bytes());
                }
                _ => value[0] ^= (noise % 4) as u8,
            }
        }
        t
    };
    before.iter().map(change).collect()
}

fn write_host(path: &Path, tensors: &[Tensor], options: WriteOptions) -> Written {
    let sources: Vec<_> = tensors.iter().map(Tensor::source).collect();
    let mut writer = Writer::create(path.into(), options).unwrap();
    writer.write(&sources).unwrap();
    writer.complete(Default::default()).unwrap()
}

fn write_device(gpu: &Gpu, path: &Path, tensors: &[Tensor], options: WriteOptions) -> Result<()> {
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let source = |(t, b)| {
        let t: &Tensor = t;
        TensorSource::new(&t.name, t.dtype, &t.shape, memory(b))
    };
    let sources: Vec<_> = tensors.iter().zip(&buffers).map(source).collect();
    let mut writer = Writer::create(path.into(), gpu.with(options))?;
    writer.write(&sources)?;
    writer.finish(Default::default()).map(drop)
}

fn against(parent: Arc<dyn Parent>, preset: Preset) -> WriteOptions {
    WriteOptions { parent: Some(parent), preset, ..WriteOptions::default() }
}

/// Files of training steps, each a delta of the one before.
struct Files {
    steps: Vec<Vec<Tensor>>,
    paths: Vec<PathBuf>,
    readers: Vec<Arc<Reader>>,
    dir: tempfile::TempDir,
}

impl Files {
    fn new(slow: bool, steps: usize, preset: Preset) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (steps_wanted, steps) = (steps, vec![first(slow)]);
        let mut files = Self { steps, paths: vec![], readers: vec![], dir };
        for step in 0..steps_wanted {
            if step > 0 {
                files.steps.push(later(&files.steps[step - 1], step as u64));
            }
            let path = files.dir.path().join(format!("{step}.s4w"));
            let options = match files.readers.last() {
                Some(parent) => against(parent.clone(), preset),
                None => WriteOptions { preset, ..WriteOptions::default() },
            };
            write_host(&path, &files.steps[step], options);
            files.readers.push(Arc::new(files.open(&path, step)));
            files.paths.push(path);
        }
        files
    }

    fn open(&self, path: &Path, step: usize) -> Reader {
        let reader = Reader::open(path.into(), ReadOptions::default()).unwrap();
        if step > 0 {
            reader.set_parent(self.readers[step - 1].clone()).unwrap();
        }
        reader
    }
}

/// Objects in memory, read as a near or a far source.
#[derive(Clone, Default)]
struct Objects {
    list: Arc<std::sync::Mutex<Vec<(u32, Bytes)>>>,
    far: bool,
}

impl ObjectSink for Objects {
    fn put(&mut self, object: DataObject) -> Result<()> {
        self.list.lock().unwrap().push((object.number, object.bytes.into()));
        Ok(())
    }
}

impl ObjectSource for Objects {
    fn get_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let list = self.list.lock().unwrap();
        let object = &list.iter().find(|o| o.0 == number).unwrap().1;
        Ok(object.slice(range.start as usize..range.end as usize))
    }

    fn request_size(&self) -> usize {
        if self.far { 8 << 20 } else { 1 << 20 }
    }
}

/// The parent of the last step, in every place where a parent may be.
fn parents(files: &Files) -> Vec<(&'static str, Arc<dyn Parent>)> {
    let last = files.steps.len() - 2;
    let tensors = &files.steps[last];
    let mut out: Vec<(&'static str, Arc<dyn Parent>)> =
        vec![("a file", files.readers[last].clone())];
    let snapshot = Arc::new(files.readers[last].snapshot().unwrap());
    let mut values = MemoryParent::new(snapshot.clone(), 0);
    for t in tensors {
        values.hold(&t.name, t.data.clone().into()).unwrap();
    }
    out.push(("values in memory", Arc::new(values)));
    let some = tensors.iter().find(|t| t.name == "m").unwrap();
    let mut part = MemoryParent::new(snapshot, 0);
    part.hold(&some.name, some.data.clone().into()).unwrap();
    let part = part.with_rest(files.readers[last].clone()).unwrap();
    out.push(("some in memory, some in a file", Arc::new(part)));
    out
}

#[test]
fn a_file_of_differences_on_the_device_is_that_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for (steps, preset) in [(2, Preset::Fast), (2, Preset::Balanced), (4, Preset::Balanced)] {
        let files = Files::new(gpu.is_slow(), steps, preset);
        let expected = std::fs::read(&files.paths[steps - 1]).unwrap();
        let plans = &files.readers[steps - 1].inspect(false).unwrap().tensors;
        let deltas = |residual: &str| {
            let start = format!("parent {residual}");
            plans.iter().filter(|t| t.plan.starts_with(&start)).count()
        };
        // Deltas of each kind that the preset has, and tensors that are not deltas.
        let (xor, sub) = (deltas("xor"), deltas("sub"));
        match preset {
            Preset::Fast => assert!((4..plans.len() - 2).contains(&xor) && sub == 0, "{plans:?}"),
            _ => assert!((4..plans.len() - 2).contains(&xor) && sub > 0, "{plans:?}"),
        }
        let path = files.dir.path().join("device.s4w");
        for (what, parent) in parents(&files) {
            let options = against(parent, preset);
            write_device(&gpu, &path, &files.steps[steps - 1], options).unwrap();
            assert!(std::fs::read(&path).unwrap() == expected, "{what}, {steps} steps, {preset:?}");
        }
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.refused == 0 && chunks.device > 3 * chunks.host, "{chunks:?}");
}

#[test]
fn objects_near_and_far_are_parents_too() {
    let Some(gpu) = gpu() else { return };
    let before = first(true);
    let after = later(&before, 1);
    let dir = tempfile::tempdir().unwrap();
    let (host, device) = (dir.path().join("host.s4w"), dir.path().join("device.s4w"));
    for far in [false, true] {
        let objects = Objects { far, ..Objects::default() };
        let options = WriteOptions::default();
        let sink = Box::new(objects.clone());
        let mut writer =
            Writer::create_objects("objects", sink, ObjectOptions::default(), options).unwrap();
        writer.write(&before.iter().map(Tensor::source).collect::<Vec<_>>()).unwrap();
        let written = writer.complete(Default::default()).unwrap();
        let index = Source::Bytes(written.index.unwrap());
        let reader = Reader::open_objects(index, Box::new(objects), ReadOptions::default());
        let parent: Arc<dyn Parent> = Arc::new(reader.unwrap());
        assert_eq!(parent.is_remote(), far);
        assert_eq!(parent.frames_of(0).is_some(), !far);
        write_host(&host, &after, against(parent.clone(), Preset::default()));
        write_device(&gpu, &device, &after, against(parent, Preset::default())).unwrap();
        assert!(std::fs::read(&host).unwrap() == std::fs::read(&device).unwrap(), "far: {far}");
    }
}

#[test]
fn chains_are_read_into_device_memory() {
    let Some(gpu) = gpu() else { return };
    let files = Files::new(gpu.is_slow(), 4, Preset::default());
    let before = gpu.engine.chunks().host;
    for (step, tensors) in files.steps.iter().enumerate() {
        let to: Vec<_> = tensors.iter().map(|t| gpu.upload(&vec![0xee; t.data.len()])).collect();
        // One tensor is requested twice.
        let again = gpu.upload(&vec![0xee; tensors[0].data.len()]);
        let mut requests: Vec<_> = to.iter().map(memory).enumerate().rev().collect();
        requests.push((0, memory(&again)));
        let reader = files.open(&files.paths[step], step);
        reader.read_into_device(&gpu.engine, &requests).unwrap();
        for (t, to) in tensors.iter().zip(&to) {
            assert!(gpu.download(to) == t.data, "{} of step {step}", t.name);
        }
        assert!(gpu.download(&again) == tensors[0].data, "step {step}");
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.refused == 0 && chunks.device > 10 * (chunks.host - before), "{chunks:?}");
}

#[test]
fn damage_below_a_difference_is_an_error_on_the_device_too() {
    let Some(gpu) = gpu() else { return };
    let files = Files::new(true, 3, Preset::default());
    let mut bytes = std::fs::read(&files.paths[0]).unwrap();
    // A byte in the first chunk of the first tensor.
    bytes[400] ^= 1;
    let bad = files.dir.path().join("bad.s4w");
    std::fs::write(&bad, bytes).unwrap();
    let open = |path: &Path| Reader::open(path.into(), ReadOptions::default()).unwrap();
    let middle = open(&files.paths[1]);
    middle.set_parent(Arc::new(open(&bad))).unwrap();
    let middle = Arc::new(middle);
    let last = open(&files.paths[2]);
    last.set_parent(middle.clone()).unwrap();
    let tensors = &files.steps[2];
    let to: Vec<_> = tensors.iter().map(|t| gpu.upload(&vec![0; t.data.len()])).collect();
    let requests: Vec<_> = to.iter().map(memory).enumerate().collect();
    match last.read_into_device(&gpu.engine, &requests) {
        Err(Error::Format { source, .. }) => {
            assert_eq!(source.location().tensor.as_deref(), Some("w"), "{source}");
            assert_eq!(source.location().chunk, Some(0), "{source}");
        }
        other => panic!("{:?}", other.err()),
    }
    // The other tensors come back.
    last.read_into_device(&gpu.engine, &requests[1..]).unwrap();
    for (t, to) in tensors.iter().zip(&to).skip(1) {
        assert!(gpu.download(to) == t.data, "{}", t.name);
    }
    let path = files.dir.path().join("device.s4w");
    let refused = write_device(&gpu, &path, tensors, against(middle, Preset::default()));
    assert!(matches!(&refused, Err(Error::Format { .. })), "{refused:?}");
    assert!(!path.exists());
}

fn store(dir: &Path, parent_memory: usize) -> CheckpointStore {
    let options = StoreOptions { parent_memory, ..StoreOptions::default() };
    CheckpointStore::open_or_create(dir.to_str().unwrap(), &Default::default(), options).unwrap()
}

/// A callback that gets the tensors' memory.
type Told = Arc<dyn Fn(&[DeviceBuffer]) + Send + Sync>;

/// Saves tensors, most of them on the device. `told` is called when they may change.
fn save_device(
    gpu: &Gpu,
    store: &CheckpointStore,
    step: u64,
    tensors: &[Tensor],
    told: Option<Told>,
) -> Result<Saved> {
    let buffers: Arc<Vec<_>> = Arc::new(tensors.iter().map(|t| gpu.upload(&t.data)).collect());
    let mut sources = vec![];
    for (t, buffer) in tensors.iter().zip(&*buffers) {
        let on_host = ["q", "none"].contains(&t.name.as_str());
        let place = if on_host { Values::Host(&t.data) } else { Values::Device(memory(buffer)) };
        sources.push(TensorSource::new(&t.name, t.dtype, &t.shape, place));
    }
    let calls = Arc::new(AtomicU32::new(0));
    let staged = told.map(|told| -> StagedFn {
        let (calls, buffers) = (calls.clone(), buffers.clone());
        Arc::new(move || {
            calls.fetch_add(1, Ordering::Relaxed);
            told(&buffers);
        })
    });
    let expected = u32::from(staged.is_some());
    let engine = Some(gpu.engine.clone());
    let options = SaveOptions { staged, engine, ..SaveOptions::default() };
    let saved = store.save(step, &sources, &options);
    assert!(saved.is_err() || calls.load(Ordering::Relaxed) == expected, "{calls:?} calls");
    saved
}

#[test]
fn a_store_keeps_what_a_device_saved_for_the_next_difference() {
    let Some(gpu) = gpu() else { return };
    // The parent in memory, partly in memory, and not in memory, when it is read back.
    for parent_memory in [1 << 30, 400_000, 0] {
        let dir = tempfile::tempdir().unwrap();
        let (host, device) = (dir.path().join("host"), dir.path().join("device"));
        let stores = [store(&host, 1 << 30), store(&device, parent_memory)];
        let mut steps = vec![first(gpu.is_slow())];
        for step in 0..5 {
            if step > 0 {
                steps.push(later(&steps[step - 1], step as u64));
            }
            let tensors = &steps[step];
            let sources: Vec<_> = tensors.iter().map(Tensor::source).collect();
            let a = stores[0].save(step as u64, &sources, &SaveOptions::default()).unwrap();
            let b = save_device(&gpu, &stores[1], step as u64, tensors, None).unwrap();
            assert_eq!(a.checkpoint.base.is_some(), b.checkpoint.base.is_some(), "step {step}");
            assert_eq!(a.why_base, b.why_base);
            let lens = |s: &Saved| (s.checkpoint.about.data_len, s.report.digest.clone());
            assert_eq!(lens(&a), lens(&b), "step {step}: the same bytes");
        }
        assert!(stores[1].list().unwrap().iter().any(|c| c.base.is_some()));
        for (step, tensors) in steps.iter().enumerate() {
            let loaded = stores[1].load(Some(step as u64)).unwrap();
            let to: Vec<_> =
                tensors.iter().map(|t| gpu.upload(&vec![0xee; t.data.len()])).collect();
            let requests: Vec<_> = to.iter().map(memory).enumerate().collect();
            loaded.reader().read_into_device(&gpu.engine, &requests).unwrap();
            for (t, to) in tensors.iter().zip(&to) {
                assert!(gpu.download(to) == t.data, "{} of step {step}", t.name);
                assert!(loaded.reader().read(&t.name).unwrap() == t.data, "{}", t.name);
            }
        }
    }
    let chunks = gpu.engine.chunks();
    assert_eq!(chunks.refused, 0, "{chunks:?}");
}

#[test]
fn tensors_may_change_once_they_are_staged() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path(), 1 << 30);
    let mut tensors = first(gpu.is_slow());
    let stream = gpu.stream.clone();
    let overwrite: Told = Arc::new(move |buffers| {
        for b in buffers.iter().filter(|b| b.bytes() > 0) {
            // SAFETY: only this test uses the memory.
            unsafe { stream.fill(b.address(), 0x55, b.bytes()) }.unwrap();
        }
        stream.synchronize().unwrap();
    });
    for step in 0..3 {
        save_device(&gpu, &store, step, &tensors, Some(overwrite.clone())).unwrap();
        let loaded = store.load(Some(step)).unwrap();
        for t in &tensors {
            assert!(loaded.reader().read(&t.name).unwrap() == t.data, "{} of {step}", t.name);
        }
        tensors = later(&tensors, step + 1);
    }
}

#[test]
fn deltas_are_applied_in_device_memory() {
    let Some(gpu) = gpu() else { return };
    let files = Files::new(gpu.is_slow(), 4, Preset::default());
    let to: Vec<_> = files.steps[0].iter().map(|t| gpu.upload(&t.data)).collect();
    let requests: Vec<_> = to.iter().map(memory).enumerate().collect();
    for (step, tensors) in files.steps.iter().enumerate().skip(1) {
        // No ancestor can be opened.
        let alone = Reader::open(files.paths[step].as_path().into(), ReadOptions::default());
        let left = alone.unwrap().apply_into_device(&gpu.engine, &requests).unwrap();
        let names: Vec<_> = left.iter().map(|&i| tensors[i].name.as_str()).collect();
        // Zstandard is decoded by the host only.
        assert!(names.iter().all(|name| ["ids", "q", "noise"].contains(name)), "{names:?}");
        let rest: Vec<_> = left.into_iter().map(|i| requests[i]).collect();
        let whole = files.open(&files.paths[step], step);
        whole.read_into_device(&gpu.engine, &rest).unwrap();
        for (t, to) in tensors.iter().zip(&to) {
            assert!(gpu.download(to) == t.data, "{} of step {step}", t.name);
        }
    }
    let reader = files.open(&files.paths[3], 3);
    // Memory that does not hold the parent's values is left to be read.
    let left = reader.apply_into_device(&gpu.engine, &requests).unwrap();
    assert!(left.contains(&0) && left.len() > 4, "{left:?}");
    let rest: Vec<_> = left.into_iter().map(|i| requests[i]).collect();
    reader.read_into_device(&gpu.engine, &rest).unwrap();
    for (t, to) in files.steps[3].iter().zip(&to) {
        assert!(gpu.download(to) == t.data, "{}", t.name);
    }
    let twice = [requests[0], (0, memory(&gpu.upload(&files.steps[2][0].data)))];
    let refused = reader.apply_into_device(&gpu.engine, &twice);
    assert!(matches!(refused, Err(Error::Argument(_))), "{refused:?}");
}
