//! Files that a GPU wrote, in `testdata/golden/gpu`: the CPU reads them and writes the same bytes.
//!
//! If there is a device, it must write them again. `S4_WRITE_GOLDEN=<folder>` keeps what it writes,
//! to replace the files after a change of the format.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

#[path = "common/gpu.rs"]
mod gpu;

use std::path::{Path, PathBuf};

use gpu::{gpu, memory};
use s4weights::format::file::Footer;
use s4weights::{DType, Preset, Reader, Source, TensorSource, WriteOptions, Writer, adversarial};

const FILES: [&str; 3] = ["bf16.s4w", "fp32.s4w", "patterns.s4w"];

struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    data: Vec<u8>,
}

impl Tensor {
    fn flat(name: String, dtype: DType, data: Vec<u8>) -> Self {
        let shape = vec![(data.len() / dtype.size()) as u64];
        Self { name, dtype, shape, data }
    }
}

/// The folder of the build or, if the program runs on another machine, below the working folder.
fn testdata() -> PathBuf {
    let built = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    if built.is_dir() { built.into() } else { "testdata".into() }
}

/// What a file holds: slices of training runs, or every pattern of every dtype.
fn contents(file: &str) -> Vec<Tensor> {
    match file {
        "bf16.s4w" => slices("gpt34m_bf16_s1", DType::BFloat16, &["h.4.fc.weight", "wte.weight"]),
        "fp32.s4w" => slices("gpt98m_fp32_s1", DType::Float32, &["h.5.proj.weight"]),
        _ => patterns(),
    }
}

/// The model's tensors in a file, and those in `joined` as one tensor of several chunks.
fn slices(file: &str, dtype: DType, joined: &[&str]) -> Vec<Tensor> {
    let bytes = std::fs::read(testdata().join(file).with_extension("safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut out = vec![];
    let mut all = vec![];
    for part in joined {
        all.extend_from_slice(file.tensor(&format!("model.{part}")).unwrap().data());
    }
    out.push(Tensor::flat(joined.join("+"), dtype, all));
    for name in file.names() {
        let t = file.tensor(name).unwrap();
        let shape = t.shape().iter().map(|d| *d as u64).collect();
        // Biases and norms, and the moments of the optimizer's smallest weights.
        if t.data().len() <= 1 << 16 {
            out.push(Tensor { name: name.into(), dtype, shape, data: t.data().to_vec() });
        }
    }
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

/// Small tensors of every dtype, and larger float tensors whose exponents are coded, some with
/// symbols above 127 in a table of few symbols.
fn patterns() -> Vec<Tensor> {
    let mut out = vec![];
    for &dtype in DType::ALL {
        for (pattern, data) in adversarial(dtype, 97) {
            out.push(Tensor::flat(format!("{dtype} {pattern}"), dtype, data));
        }
    }
    for dtype in [DType::BFloat16, DType::Float16, DType::Float32, DType::Float64] {
        for (pattern, data) in adversarial(dtype, 5000) {
            if ["weights-and-nans", "like-squares", "sparse"].contains(&pattern) {
                out.push(Tensor::flat(format!("{dtype} {pattern}, 5000"), dtype, data));
            }
        }
    }
    out
}

fn golden(file: &str) -> Vec<u8> {
    let path = testdata().join("golden/gpu").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn by_cpu(path: &Path, tensors: &[Tensor]) {
    let sources: Vec<_> =
        tensors.iter().map(|t| TensorSource::new(&t.name, t.dtype, &t.shape, &t.data)).collect();
    let mut writer = Writer::create(path.into(), order_0()).unwrap();
    writer.write(&sources).unwrap();
    writer.finish(Default::default()).unwrap();
}

/// The options that the files were written with: `fast` still writes what every preset wrote then.
fn order_0() -> WriteOptions {
    WriteOptions { preset: Preset::Fast, ..WriteOptions::default() }
}

/// Everything in a file before the manifest, which names the program's version.
fn chunks(file: &[u8]) -> &[u8] {
    let footer = Footer::parse(file, file.len() as u64).unwrap();
    &file[..usize::try_from(footer.offset).unwrap()]
}

#[test]
fn the_cpu_reads_what_a_gpu_wrote() {
    for name in FILES {
        let reader = Reader::open(Source::Bytes(golden(name).into()), Default::default()).unwrap();
        let tensors = contents(name);
        assert_eq!(reader.tensors().count(), tensors.len(), "{name}");
        for t in &tensors {
            assert!(reader.read(&t.name).unwrap() == t.data, "{name}, {}: values differ", t.name);
        }
        reader.verify().unwrap();
    }
}

#[test]
fn the_cpu_writes_the_bytes_that_a_gpu_wrote() {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        let path = dir.path().join(name);
        by_cpu(&path, &contents(name));
        let (cpu, gpu) = (std::fs::read(&path).unwrap(), golden(name));
        assert!(chunks(&cpu) == chunks(&gpu), "{name}: chunks differ");
    }
}

#[test]
fn a_gpu_writes_them_again() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("S4_WRITE_GOLDEN").map(PathBuf::from);
    assert!(kept.is_none() || !gpu.is_slow(), "golden files are a GPU's, not an emulator's");
    let folder = kept.clone().unwrap_or_else(|| dir.path().to_owned());
    std::fs::create_dir_all(&folder).unwrap();
    for name in FILES {
        let (tensors, path) = (contents(name), folder.join(name));
        let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
        let sources = tensors
            .iter()
            .zip(&buffers)
            .map(|(t, b)| TensorSource::new(&t.name, t.dtype, &t.shape, memory(b)));
        let options = gpu.with(order_0());
        let mut writer = Writer::create(path.as_path().into(), options).unwrap();
        writer.write(&sources.collect::<Vec<_>>()).unwrap();
        writer.finish(Default::default()).unwrap();
        let written = std::fs::read(&path).unwrap();
        // On this machine the CPU writes the same file, byte for byte.
        let cpu = dir.path().join("cpu.s4w");
        by_cpu(&cpu, &tensors);
        assert!(std::fs::read(&cpu).unwrap() == written, "{name}: not the CPU's file");
        assert!(kept.is_some() || chunks(&golden(name)) == chunks(&written), "{name} differs");
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.refused == 0, "{chunks:?}");
}
