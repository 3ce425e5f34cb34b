//! Shared by the integration tests.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    reason = "each test uses its own part"
)]

use std::io::Write;
use std::sync::{Arc, Mutex};

use s4weights::{
    Contents, DType, ReadOptions, Reader, Report, Result, Source, Target, TensorSource,
    WriteOptions, Writer, adversarial,
};

/// A tensor that owns its values.
#[derive(Clone)]
pub struct Owned {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

impl Owned {
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[u64], data: Vec<u8>) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), data }
    }

    pub fn source(&self) -> TensorSource<'_> {
        let Self { name, dtype, shape, data } = self;
        TensorSource::new(name, *dtype, shape, data)
    }
}

/// About normally distributed values, a function of `seed`.
pub fn bell(seed: u64) -> f32 {
    let mut x = seed;
    let mut sum = 0.0;
    for _ in 0..4 {
        x = (x.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 31;
        sum += (x >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
    }
    1.7 * sum
}

/// A stream into memory.
#[derive(Clone, Default)]
pub struct Memory(pub Arc<Mutex<Vec<u8>>>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panicked").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn save_to(target: Target, tensors: &[Owned], options: WriteOptions) -> Result<Report> {
    let mut writer = Writer::create(target, options)?;
    let sources: Vec<_> =
        tensors.iter().map(|t| TensorSource::new(&t.name, t.dtype, &t.shape, &t.data)).collect();
    writer.write(&sources)?;
    writer.finish(Contents::default())
}

pub fn save(tensors: &[Owned], options: WriteOptions) -> Vec<u8> {
    let memory = Memory::default();
    let target = Target::Stream(Box::new(memory.clone()));
    save_to(target, tensors, options).expect("saving into memory");
    std::mem::take(&mut *memory.0.lock().expect("nobody panicked"))
}

pub fn open(bytes: Vec<u8>) -> Result<Reader> {
    Reader::open(Source::Bytes(bytes.into()), ReadOptions::default())
}

/// A few tensors of every size class: packed, one chunk, several chunks, empty.
pub fn mixed() -> Vec<Owned> {
    let pattern = |dtype, n, name: &str| {
        adversarial(dtype, n).find(|p| p.0 == name).expect("such a pattern").1
    };
    vec![
        Owned::new(
            "w",
            DType::BFloat16,
            &[300, 500],
            pattern(DType::BFloat16, 150_000, "like-weights"),
        ),
        Owned::new("ln.weight", DType::Float32, &[77], pattern(DType::Float32, 77, "like-weights")),
        Owned::new(
            "v",
            DType::Float32,
            &[200, 401],
            pattern(DType::Float32, 80_200, "like-squares"),
        ),
        Owned::new("ids", DType::Int64, &[5000], pattern(DType::Int64, 5000, "counting")),
        Owned::new("step", DType::Float32, &[], vec![0, 0, 128, 63]),
        Owned::new("none", DType::Float16, &[0, 7], vec![]),
        Owned::new("noise", DType::UInt8, &[9000], pattern(DType::UInt8, 9000, "random")),
        Owned::new("ln.bias", DType::Float32, &[77], pattern(DType::Float32, 77, "nans")),
    ]
}
