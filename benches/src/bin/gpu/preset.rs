//! Preset `nvcomp` from device memory to a file in memory, and back.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use s4_engine::Preset;
use s4_engine::cuda::{CudaEngine, CudaOptions};
use s4weights::{
    Contents, DeviceSource, ReadOptions, Reader, Source, Target, WriteOptions, Writer,
};

use crate::Tile;
use crate::lab::{Lab, Outcome, median};
use crate::report::Group;

/// Measurements of each thing, after one that is not counted.
const ROUNDS: usize = 3;

/// A file that is written to memory.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

impl io::Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One tensor of `bytes` bytes, with scratch budgets of some sizes in MiB.
pub(crate) fn measure(lab: &Lab, tile: &Tile, bytes: u64, scratch: &[u64]) -> Outcome<Group> {
    let (from, to) = (lab.fill(&tile.data, bytes)?, lab.alloc(bytes)?);
    let shape = [bytes / tile.dtype.size() as u64];
    let source =
        DeviceSource { name: "t", dtype: tile.dtype, shape: &shape, memory: lab.memory(&from) };
    let mut group = Group::new("preset `nvcomp`, files in memory", tile.name, bytes, "device copy");
    let copy = lab.time(|| {
        // SAFETY: two buffers of `bytes` bytes, used by this stream alone.
        Ok(unsafe { lab.stream.copy_within_device(from.address(), to.address(), bytes) }?)
    })?;
    group.ceilings(copy, copy);
    for mib in scratch {
        let options = CudaOptions { scratch: mib << 20, ..CudaOptions::default() };
        let engine = CudaEngine::new(lab.cuda.clone(), options);
        let (mut saved, mut loaded) = (vec![], vec![]);
        let mut ratio = 0.0;
        for round in 0..=ROUNDS {
            let memory = Memory(Arc::new(Mutex::new(Vec::with_capacity(bytes as usize))));
            let options = WriteOptions { preset: Preset::Nvcomp, ..WriteOptions::default() };
            let started = Instant::now();
            let target = Target::Stream(Box::new(memory.clone()));
            let mut writer = Writer::create(target, options)?;
            writer.write_device(&engine, &[source], &[])?;
            writer.finish(Contents::default())?;
            let saving = started.elapsed().as_secs_f64();
            let file = memory.take();
            ratio = bytes as f64 / file.len() as f64;
            let started = Instant::now();
            let options = ReadOptions { trusted: true, ..ReadOptions::default() };
            let reader = Reader::open(Source::Bytes(file.into()), options)?;
            reader.read_into_device(&engine, &[(0, lab.memory(&to))])?;
            if round > 0 {
                saved.push(saving);
                loaded.push(started.elapsed().as_secs_f64());
            }
        }
        if !lab.holds(&to, &tile.data)? {
            return Err("what preset `nvcomp` gives back differs".into());
        }
        let used = engine.scratch_high_water(0)? >> 20;
        let name = format!("s4weights, {used} of {mib} MiB of scratch");
        group.row(&name, Some(median(saved)), Some(median(loaded)), Some(ratio));
    }
    eprintln!("{}", group.text());
    Ok(group)
}
