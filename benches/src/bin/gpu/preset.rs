//! Preset `nvcomp` from device memory to a file in memory, and back.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytes::Bytes;
use s4_engine::Preset;
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, DeviceMemory};
use s4_engine::{Engine, Jobs, NoInputs, TensorValues};
use s4_format::DType;
use s4weights::{
    Contents, ReadOptions, Reader, Source, Target, TensorSource, WriteOptions, Writer,
};

use crate::Tile;
use crate::lab::{Lab, Outcome, median};
use crate::report::Group;

/// Rounds of each measurement, after one that is not counted.
const ROUNDS: usize = 3;

/// A file in memory that was touched beforehand: faulting in new pages would take most of the time.
struct Memory {
    bytes: Vec<u8>,
    len: usize,
}

#[derive(Clone)]
struct File(Arc<Mutex<Memory>>);

impl File {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl io::Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut file = self.lock();
        let Memory { bytes: to, len } = &mut *file;
        let end = *len + bytes.len();
        let to = to.get_mut(*len..end).ok_or(io::ErrorKind::StorageFull)?;
        to.copy_from_slice(bytes);
        *len = end;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One tensor of `bytes` bytes, with each of the scratch budgets, in MiB.
pub(crate) fn measure(lab: &Lab, tile: &Tile, bytes: u64, scratch: &[u64]) -> Outcome<Group> {
    let (from, to) = (lab.fill(&tile.data, bytes)?, lab.alloc(bytes)?);
    let shape = [bytes / tile.dtype.size() as u64];
    let mut group = Group::new("preset `nvcomp`", tile.name, bytes, "device copy");
    let copy = lab.time(|| {
        // SAFETY: two buffers of `bytes` bytes, used by this stream alone.
        Ok(unsafe { lab.stream.copy_within_device(from.address(), to.address(), bytes) }?)
    })?;
    group.ceilings(copy, copy);
    let memory = Memory { bytes: vec![1; bytes as usize + (16 << 20)], len: 0 };
    let file = File(Arc::new(Mutex::new(memory)));
    for mib in scratch {
        let options = CudaOptions { scratch: mib << 20, ..CudaOptions::default() };
        let engine = Arc::new(CudaEngine::new(lab.cuda.clone(), options));
        let tensor = TensorValues::new(tile.dtype, &shape, lab.memory(&from));
        let frames = frames(&engine, tensor)?;
        let used = engine.scratch_high_water(0) >> 20;
        let name = format!("frames alone, {used} of {mib} MiB of scratch");
        group.row(&name, Some(frames), None, None);
        let (mut saved, mut loaded) = (vec![], vec![]);
        let mut ratio = 0.0;
        for round in 0..=ROUNDS {
            let started = Instant::now();
            save(&engine, &file, tile.dtype, &shape, lab.memory(&from))?;
            let saving = started.elapsed().as_secs_f64();
            let stored = {
                let file = file.lock();
                Bytes::copy_from_slice(&file.bytes[..file.len])
            };
            ratio = bytes as f64 / stored.len() as f64;
            let started = Instant::now();
            let options = ReadOptions { trusted: true, ..ReadOptions::default() };
            let reader = Reader::open(Source::Bytes(stored), options)?;
            let opened = started.elapsed().as_secs_f64();
            reader.read_into_device(&engine, &[(0, lab.memory(&to))])?;
            if round > 0 {
                saved.push(saving);
                loaded.push(started.elapsed().as_secs_f64());
                eprintln!("opened in {:.1} ms", 1e3 * opened);
            }
        }
        if !lab.holds(&to, &tile.data)? {
            return Err("what preset `nvcomp` gives back differs".into());
        }
        let used = engine.scratch_high_water(0) >> 20;
        let name = format!("files in memory, {used} of {mib} MiB of scratch");
        group.row(&name, Some(median(saved)), Some(median(loaded)), Some(ratio));
    }
    eprintln!("{}", group.text());
    Ok(group)
}

/// Median seconds to encode, with the frames in pinned memory.
fn frames(engine: &CudaEngine, tensor: TensorValues<'_>) -> Outcome<f64> {
    let mut times = vec![];
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let plans = engine.plan::<CudaError>(Preset::Nvcomp, &[tensor], &NoInputs, None)?;
        engine.encode(&Jobs::<CudaError>::new(&[tensor], &plans), |_| Ok(()))?;
        if round > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(median(times))
}

fn save(
    engine: &Arc<CudaEngine>,
    file: &File,
    dtype: DType,
    shape: &[u64],
    memory: DeviceMemory,
) -> Outcome<()> {
    file.lock().len = 0;
    let engine = Some(Arc::clone(engine));
    let options = WriteOptions { preset: Preset::Nvcomp, engine, ..WriteOptions::default() };
    let mut writer = Writer::create(Target::Stream(Box::new(file.clone())), options)?;
    writer.write(&[TensorSource::new("t", dtype, shape, memory)])?;
    writer.finish(Contents::default())?;
    Ok(())
}
