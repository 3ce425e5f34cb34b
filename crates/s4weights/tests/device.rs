//! Files of tensors in device memory: the bytes of files of host tensors, read back to either side.
//!
//! Without a device these tests say so and pass; with `S4_REQUIRE_GPU=1` they fail then.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

use std::path::Path;
use std::sync::Arc;

use s4_codec_gpu::{Cuda, Device, DeviceBuffer, Pinned, Pool, Stream};
use s4_planes::patterns::{self, Kind};
use s4weights::cuda::{CudaEngine, CudaOptions, DeviceMemory};
use s4weights::{
    DType, DeviceSource, Error, Preset, ReadOptions, Reader, TensorSource, WriteOptions, Writer,
};

struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    data: Vec<u8>,
}

/// Large tensors of many chunks, small ones that are packed, and empty ones.
fn tensors(slow: bool) -> Vec<Tensor> {
    let large = if slow { 150_000 } else { 5_000_000 };
    let mut out = vec![];
    let kinds = [
        (DType::BFloat16, Kind::BF16),
        (DType::Float32, Kind::F32),
        (DType::Int64, Kind::int(s4_planes::Width::B8)),
    ];
    for (dtype, kind) in kinds {
        for n in [0, 1, 77, 4095, 4096, 9999, large] {
            let pattern = if dtype == DType::Int64 { "runs" } else { "like-weights" };
            let data = patterns::all(kind, n).find(|p| p.0 == pattern).unwrap().1;
            let shape = vec![n as u64];
            out.push(Tensor { name: format!("{dtype}.{n}"), dtype, shape, data });
        }
    }
    out
}

struct Gpu {
    device: Arc<Device>,
    stream: Arc<Stream>,
    pool: Arc<Pool>,
    engine: CudaEngine,
}

fn gpu() -> Option<Gpu> {
    let cuda = match Cuda::discover() {
        Ok(cuda) => cuda,
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "a GPU is required: {e}");
            println!("skipped: no CUDA device");
            return None;
        }
    };
    let device = cuda.device(0).expect("opens");
    let stream = Arc::new(Stream::new(&device).unwrap());
    let pool = Pool::new(&device, 4 << 30).unwrap();
    Some(Gpu { device, stream, pool, engine: CudaEngine::new(cuda, CudaOptions::default()) })
}

impl Gpu {
    fn is_slow(&self) -> bool {
        self.device.info().name == "emulated"
    }

    fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        let buffer = self.pool.alloc(&self.stream, bytes.len() as u64, "a test").unwrap();
        let pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        // SAFETY: memory of this test alone, and the copy is waited for.
        unsafe {
            pinned.slice_mut(0, bytes.len()).copy_from_slice(bytes);
            self.stream.copy_to_device(&pinned, 0, bytes.len(), buffer.address()).unwrap();
        }
        self.stream.synchronize().unwrap();
        buffer
    }

    fn download(&self, buffer: &DeviceBuffer) -> Vec<u8> {
        let len = buffer.bytes() as usize;
        let pinned = Pinned::new(&self.device, len).unwrap();
        // SAFETY: as above.
        unsafe {
            self.stream.copy_to_host(buffer.address(), &pinned, 0, len).unwrap();
            self.stream.synchronize().unwrap();
            pinned.slice(0, len).to_vec()
        }
    }

    fn read(&self, reader: &Reader, tensors: &[Tensor]) -> Result<Vec<Vec<u8>>, Error> {
        let to: Vec<_> = tensors.iter().map(|t| self.upload(&vec![0xee; t.data.len()])).collect();
        // From the last to the first: the order of requests does not matter.
        let requests: Vec<_> = to.iter().map(memory).enumerate().rev().collect();
        reader.read_into_device(&self.engine, &requests)?;
        Ok(to.iter().map(|b| self.download(b)).collect())
    }
}

fn memory(buffer: &DeviceBuffer) -> DeviceMemory {
    // SAFETY: the buffers live longer than the calls they are passed to, and nothing else uses them.
    unsafe { DeviceMemory::new(0, buffer.address(), buffer.bytes(), 0) }
}

fn write_host(path: &Path, tensors: &[Tensor], options: WriteOptions) -> s4weights::Report {
    let sources: Vec<_> = tensors.iter().map(source).collect();
    let mut writer = Writer::create(path.into(), options).unwrap();
    writer.write(&sources).unwrap();
    writer.finish(Default::default()).unwrap()
}

fn source(t: &Tensor) -> TensorSource<'_> {
    TensorSource { name: &t.name, dtype: t.dtype, shape: &t.shape, data: &t.data }
}

#[test]
fn a_file_of_device_tensors_is_that_of_host_tensors_and_both_come_back() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(gpu.is_slow());
    let dir = tempfile::tempdir().unwrap();
    let (on_host, on_device) = (dir.path().join("host.s4w"), dir.path().join("device.s4w"));
    let report = write_host(&on_host, &tensors, WriteOptions::default());
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let sources: Vec<_> = tensors
        .iter()
        .zip(&buffers)
        .map(|(t, b)| DeviceSource {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            memory: memory(b),
        })
        .collect();
    let mut writer = Writer::create(on_device.as_path().into(), WriteOptions::default()).unwrap();
    writer.write_device(&gpu.engine, &sources, &[]).unwrap();
    let device_report = writer.finish(Default::default()).unwrap();
    assert_eq!(report.digest, device_report.digest);
    assert!(std::fs::read(&on_host).unwrap() == std::fs::read(&on_device).unwrap());
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.refused == 0, "{chunks:?}");
    let reader = Reader::open(on_device.as_path().into(), Default::default()).unwrap();
    for (t, back) in tensors.iter().zip(gpu.read(&reader, &tensors).unwrap()) {
        assert!(back == t.data, "{}: to the device", t.name);
        assert!(reader.read(&t.name).unwrap() == t.data, "{}: to the host", t.name);
    }
}

#[test]
fn differences_from_a_parent_come_back_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let before = tensors(gpu.is_slow());
    let dir = tempfile::tempdir().unwrap();
    let (base, delta) = (dir.path().join("base.s4w"), dir.path().join("delta.s4w"));
    write_host(&base, &before, WriteOptions::default());
    let mut after = tensors(gpu.is_slow());
    for t in &mut after {
        t.data.iter_mut().step_by(911).for_each(|b| *b ^= 1);
    }
    let parent = Arc::new(Reader::open(base.as_path().into(), Default::default()).unwrap());
    let options = WriteOptions { parent: Some(parent.clone()), ..WriteOptions::default() };
    write_host(&delta, &after, options);
    let reader = Reader::open(delta.as_path().into(), Default::default()).unwrap();
    reader.set_parent(parent).unwrap();
    assert!(reader.parent_digest().is_some(), "nothing is stored as a difference");
    for (t, back) in after.iter().zip(gpu.read(&reader, &after).unwrap()) {
        assert!(back == t.data, "{}", t.name);
    }
}

#[test]
fn damage_is_named_by_tensor_and_chunk() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(gpu.is_slow());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.s4w");
    write_host(&path, &tensors, WriteOptions::default());
    let mut bytes = std::fs::read(&path).unwrap();
    // Chunks of large tensors stand first: packs are closed behind them.
    bytes[400] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let reader = Reader::open(path.as_path().into(), Default::default()).unwrap();
    match gpu.read(&reader, &tensors) {
        Err(Error::Format { source, .. }) => {
            let place = source.place();
            assert_eq!(place.tensor.as_deref(), Some("bfloat16.4096"), "{source}");
            assert_eq!(place.chunk, Some(0), "{source}");
        }
        other => panic!("{:?}", other.err()),
    }
    // Memory that is too short is refused before anything is read.
    let buffer = gpu.upload(&[0; 16]);
    let refused = reader.read_into_device(&gpu.engine, &[(1, memory(&buffer))]);
    assert!(matches!(refused, Err(Error::Argument(_))), "{refused:?}");
}

#[test]
fn preset_nvcomp_takes_device_tensors_and_gives_them_back() {
    let Some(gpu) = gpu() else { return };
    if gpu.is_slow() {
        println!("skipped: nvCOMP needs a device");
        return;
    }
    let tensors = tensors(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nvcomp.s4w");
    let options = WriteOptions { preset: Preset::Nvcomp, ..WriteOptions::default() };
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let sources: Vec<_> = tensors
        .iter()
        .zip(&buffers)
        .map(|(t, b)| DeviceSource {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            memory: memory(b),
        })
        .collect();
    let groups: Vec<u8> = (0..sources.len()).map(|i| (i % 4) as u8).collect();
    let mut writer = match Writer::create(path.as_path().into(), options) {
        Ok(writer) => writer,
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "nvCOMP is required: {e}");
            println!("skipped: {e}");
            return;
        }
    };
    writer.write_device(&gpu.engine, &sources, &groups).unwrap();
    let report = writer.finish(Default::default()).unwrap();
    assert!(report.streams.keys().any(|k| k.contains("nvcomp-ans")), "{:?}", report.streams);
    let open = |trusted| {
        let options = ReadOptions { trusted, ..ReadOptions::default() };
        Reader::open(path.as_path().into(), options).unwrap()
    };
    let back = gpu.read(&open(true), &tensors).unwrap();
    for (t, values) in tensors.iter().zip(&back) {
        assert!(*values == t.data, "{}", t.name);
    }
    let e = gpu.read(&open(false), &tensors).unwrap_err().to_string();
    assert!(e.contains("nvcomp-ans") && e.contains("trusted"), "{e}");
}
