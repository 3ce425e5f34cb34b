//! Files of tensors in device memory: the same bytes as from host tensors, read back to either side.
//!
//! Without a device these tests say so and pass; with `S4_REQUIRE_GPU=1` they fail then.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

#[path = "common/gpu.rs"]
mod gpu;

use std::path::Path;
use std::sync::Arc;

use gpu::{Gpu, gpu, memory};
use s4_codec_gpu::DeviceBuffer;
use s4_planes::patterns::{self, Kind};
use s4weights::{
    DType, Error, Preset, ReadOptions, Reader, TensorSource, Values, WriteOptions, Writer,
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

fn read_on(gpu: &Gpu, reader: &Reader, tensors: &[Tensor]) -> Result<Vec<Vec<u8>>, Error> {
    let to: Vec<_> = tensors.iter().map(|t| gpu.upload(&vec![0xee; t.data.len()])).collect();
    // From the last to the first: the order of requests does not matter.
    let requests: Vec<_> = to.iter().map(memory).enumerate().rev().collect();
    reader.read_into_device(&gpu.engine, &requests)?;
    Ok(to.iter().map(|b| gpu.download(b)).collect())
}

fn write_host(path: &Path, tensors: &[Tensor], options: WriteOptions) -> s4weights::Report {
    let sources: Vec<_> = tensors.iter().map(source).collect();
    let mut writer = Writer::create(path.into(), options).unwrap();
    writer.write(&sources).unwrap();
    writer.finish(Default::default()).unwrap()
}

fn source(t: &Tensor) -> TensorSource<'_> {
    TensorSource::new(&t.name, t.dtype, &t.shape, &t.data)
}

fn on_device_sources<'a>(tensors: &'a [Tensor], buffers: &[DeviceBuffer]) -> Vec<TensorSource<'a>> {
    let source = |(t, b): (&'a Tensor, &DeviceBuffer)| {
        let (name, shape) = (t.name.as_str(), t.shape.as_slice());
        TensorSource::new(name, t.dtype, shape, memory(b))
    };
    tensors.iter().zip(buffers).map(source).collect()
}

#[test]
fn a_file_of_device_tensors_is_that_of_host_tensors_and_both_come_back() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(gpu.is_slow());
    let dir = tempfile::tempdir().unwrap();
    let (on_host, on_device) = (dir.path().join("host.s4w"), dir.path().join("device.s4w"));
    let report = write_host(&on_host, &tensors, WriteOptions::default());
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let sources = on_device_sources(&tensors, &buffers);
    let options = gpu.with(WriteOptions::default());
    let mut writer = Writer::create(on_device.as_path().into(), options).unwrap();
    writer.write(&sources).unwrap();
    let device_report = writer.finish(Default::default()).unwrap();
    assert_eq!(report.digest, device_report.digest);
    assert!(std::fs::read(&on_host).unwrap() == std::fs::read(&on_device).unwrap());
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.refused == 0, "{chunks:?}");
    let reader = Reader::open(on_device.as_path().into(), Default::default()).unwrap();
    for (t, back) in tensors.iter().zip(read_on(&gpu, &reader, &tensors).unwrap()) {
        assert!(back == t.data, "{}: to the device", t.name);
        assert!(reader.read(&t.name).unwrap() == t.data, "{}: to the host", t.name);
    }
}

#[test]
fn tensors_of_host_and_device_lie_in_one_file_as_those_of_the_host() {
    let Some(gpu) = gpu() else { return };
    let tensors = tensors(gpu.is_slow());
    let dir = tempfile::tempdir().unwrap();
    let (on_host, mixed) = (dir.path().join("host.s4w"), dir.path().join("mixed.s4w"));
    write_host(&on_host, &tensors, WriteOptions::default());
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    // Every third tensor stays on the host, among them small and large, first and last ones.
    for first in 0..3 {
        let place = |i: usize| match i % 3 == first {
            true => Values::Host(&tensors[i].data),
            false => Values::Device(memory(&buffers[i])),
        };
        let sources: Vec<_> = (tensors.iter().enumerate())
            .map(|(i, t)| TensorSource::new(&t.name, t.dtype, &t.shape, place(i)))
            .collect();
        let options = gpu.with(WriteOptions::default());
        let mut writer = Writer::create(mixed.as_path().into(), options).unwrap();
        writer.write(&sources).unwrap();
        writer.finish(Default::default()).unwrap();
        assert!(std::fs::read(&on_host).unwrap() == std::fs::read(&mixed).unwrap(), "{first}");
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
    for (t, back) in after.iter().zip(read_on(&gpu, &reader, &after).unwrap()) {
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
    // Chunks of large tensors come first; packs are written after them.
    bytes[400] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let reader = Reader::open(path.as_path().into(), Default::default()).unwrap();
    match read_on(&gpu, &reader, &tensors) {
        Err(Error::Format { source, .. }) => {
            let place = source.location();
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
        assert!(!gpu::is_required(), "a GPU is required, not an emulated one");
        println!("skipped: nvCOMP needs a device");
        return;
    }
    let tensors = tensors(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nvcomp.s4w");
    let options = WriteOptions { preset: Preset::Nvcomp, ..WriteOptions::default() };
    let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let sources = on_device_sources(&tensors, &buffers);
    let sources = sources.into_iter().zip((0..4).cycle());
    let sources: Vec<_> = sources.map(|(t, group)| t.in_group(group)).collect();
    let mut writer = match Writer::create(path.as_path().into(), options) {
        Ok(writer) => writer,
        Err(e) => {
            assert!(!gpu::is_required(), "nvCOMP is required: {e}");
            println!("skipped: {e}");
            return;
        }
    };
    writer.set_engine(gpu.engine.clone());
    writer.write(&sources).unwrap();
    let report = writer.finish(Default::default()).unwrap();
    assert!(report.streams.keys().any(|k| k.contains("nvcomp-ans")), "{:?}", report.streams);
    let open = |trusted| {
        let options = ReadOptions { trusted, ..ReadOptions::default() };
        Reader::open(path.as_path().into(), options).unwrap()
    };
    let back = read_on(&gpu, &open(true), &tensors).unwrap();
    for (t, values) in tensors.iter().zip(&back) {
        assert!(*values == t.data, "{}", t.name);
    }
    let e = read_on(&gpu, &open(false), &tensors).unwrap_err().to_string();
    assert!(e.contains("nvcomp-ans") && e.contains("trusted"), "{e}");
}
