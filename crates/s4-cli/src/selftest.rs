//! Proves that every dtype comes back bit by bit, on this machine.

mod case;
mod gpu;
mod library;
mod steps;

use s4weights::{
    Contents, DType, Preset, ReadOptions, Reader, Simd, Source, Target, TensorSource, WriteOptions,
    Writer, adversarial,
};

use self::case::Memory;
use crate::error::{Failure, Result};

/// Elements of a pattern: more than one chunk even of the smallest values, and not a round number.
const VALUES: usize = (1 << 17) + 1234;

/// Compares the CUDA devices with the processor, as `s4w selftest --require-gpu` does.
pub(crate) fn gpu(fault: bool, simd: Option<Simd>) -> Result<String> {
    gpu::run(fault, simd)
}

/// Runs all round trips; returns a summary, or fails with the first difference.
pub(crate) fn run(fault: bool, threads: Option<usize>, simd: Option<Simd>) -> Result<String> {
    let sets: Vec<Simd> = simd.map_or_else(|| Simd::available().collect(), |s| vec![s]);
    let mut cases = 0;
    for &dtype in DType::ALL {
        for (pattern, data) in inputs(dtype) {
            let mut first: Option<Vec<u8>> = None;
            for &set in &sets {
                let file = save(dtype, &data, threads, set)?;
                if *first.get_or_insert_with(|| file.clone()) != file {
                    return Err(Failure::Test(format!(
                        "{dtype}, {pattern}: {set} writes different bytes than {}",
                        sets[0]
                    )));
                }
                check(dtype, pattern, &data, file, set, fault)?;
                cases += 1;
            }
        }
    }
    let sets: Vec<String> = sets.iter().map(Simd::to_string).collect();
    Ok(format!(
        "selftest passed: {cases} round trips of {} dtypes, {}",
        DType::ALL.len(),
        sets.join(", ")
    ))
}

fn inputs(dtype: DType) -> Vec<(&'static str, Vec<u8>)> {
    let mut all: Vec<_> = adversarial(dtype, VALUES).collect();
    all.push(("one element", vec![0x80; dtype.size()]));
    all.push(("empty", vec![]));
    all
}

fn save(dtype: DType, data: &[u8], threads: Option<usize>, simd: Simd) -> Result<Vec<u8>> {
    let memory = Memory::default();
    let options = WriteOptions {
        preset: Preset::Balanced,
        threads,
        simd: Some(simd),
        ..WriteOptions::default()
    };
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    let shape = [(data.len() / dtype.size()) as u64];
    writer.write(&[TensorSource::new("t", dtype, &shape, data)])?;
    writer.finish(Contents::default())?;
    Ok(std::mem::take(&mut *memory.0.lock().unwrap_or_else(|e| e.into_inner())))
}

fn check(
    dtype: DType,
    pattern: &str,
    data: &[u8],
    mut file: Vec<u8>,
    simd: Simd,
    fault: bool,
) -> Result<()> {
    if fault {
        // The first byte after the header belongs to the first chunk.
        if let Some(byte) = file.get_mut(17).filter(|_| !data.is_empty()) {
            *byte ^= 0x10;
        }
    }
    let bytes = Source::Bytes(file.into());
    let reader = Reader::open(bytes, ReadOptions { simd: Some(simd), ..ReadOptions::default() })?;
    if reader.read("t")? != data {
        return Err(Failure::Test(format!("{dtype}, {pattern}, {simd}: values differ")));
    }
    Ok(())
}
