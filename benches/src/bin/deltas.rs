//! Sizes and speeds of checkpoints stored as differences from another one.
//!
//! `deltas --data DIR` looks for `NAME_s0.safetensors` and, beside it, `NAME_sK.safetensors` for any
//! K, and stores each step K alone and as the difference from step 0. `--threads N`: number of threads
//! (default 1). `--preset P`: the preset (default `fast`). Fails if a tensor or a whole checkpoint is
//! larger as a difference.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use s4_benches::memory::Memory;
use s4_benches::states::{Outcome, State};
use s4weights::{
    Contents, MemoryParent, Preset, ReadOptions, Reader, Source, Target, Values, WriteOptions,
    Writer, Written,
};

const CALLS: usize = 9;
const USAGE: &str = "usage: deltas --data DIR [--threads N] [--preset fast|balanced|small]";

fn main() -> Outcome<()> {
    let (mut data, mut threads, mut preset) = (None, 1, Preset::Fast);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), arguments.next()) {
            ("--data", Some(dir)) => data = Some(PathBuf::from(dir)),
            ("--threads", Some(n)) => threads = n.parse()?,
            ("--preset", Some(name)) => preset = name.parse()?,
            _ => return Err(USAGE.into()),
        }
    }
    let data = data.ok_or(USAGE)?;
    println!("GB/s of values, {threads} thread(s), preset {}", preset.name());
    println!("{:28} {:>8} {:>8} {:>8} {:>8}", "", "direct", "delta", "in", "out");
    for (name, step, base, file) in pairs(&data)? {
        measure(&format!("{name} s0 -> s{step}"), &base, &file, (threads, preset))?;
    }
    Ok(())
}

/// For each step after 0: name of the run, step, file of step 0 and file of the step.
fn pairs(dir: &Path) -> Outcome<Vec<(String, u64, PathBuf, PathBuf)>> {
    let mut out = vec![];
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let Some((name, step)) = stem.rsplit_once("_s") else { continue };
        let Ok(step) = step.parse::<u64>() else { continue };
        let base = dir.join(format!("{name}_s0.safetensors"));
        if step > 0 && base.exists() {
            out.push((name.to_owned(), step, base, path.clone()));
        }
    }
    out.sort();
    Ok(out)
}

fn measure(
    name: &str,
    base: &Path,
    file: &Path,
    (threads, preset): (usize, Preset),
) -> Outcome<()> {
    let (base, file) = (State::read(base)?, State::read(file)?);
    let options = WriteOptions { preset, threads: Some(threads), ..WriteOptions::default() };
    let (parent_file, parent) = write(&base, options.clone())?;
    let (direct_file, direct) = write(&file, options.clone())?;
    let direct = direct.report;
    // The parent's values are still in memory, as they are when a training loop saves again.
    let mut memory = MemoryParent::new(Arc::new(parent.snapshot), 0);
    for t in base.sources() {
        if let Values::Host(data) = t.values {
            memory.hold(t.name, Bytes::copy_from_slice(data))?;
        }
    }
    let options = WriteOptions { parent: Some(Arc::new(memory)), ..options };
    let (delta_file, delta) = write(&file, options.clone())?;
    let wrote = fastest(|| write(&file, options.clone()).map(drop))?;
    let read = ReadOptions { threads: Some(threads), ..ReadOptions::default() };
    let direct_file = Reader::open(Source::Bytes(direct_file), read.clone())?;
    let parent = Arc::new(Reader::open(Source::Bytes(parent_file), read.clone())?);
    let reader = Reader::open(Source::Bytes(delta_file), read)?;
    if reader.parent_digest().is_some() {
        reader.set_parent(parent)?;
    }
    if delta.report.bytes_out > direct.bytes_out {
        return Err(format!("{name}: {:?}, directly {direct:?}", delta.report).into());
    }
    let (mut deltas, mut tensors) = (0, 0);
    for (t, alone) in reader.inspect(false)?.tensors.iter().zip(direct_file.inspect(false)?.tensors)
    {
        tensors += 1;
        deltas += usize::from(t.plan != alone.plan);
        if t.stored > alone.stored {
            return Err(format!(
                "{name}: {} takes {:?}, directly {:?}",
                t.name, t.stored, alone.stored
            )
            .into());
        }
    }
    let sizes: Vec<_> = reader.tensors().map(|t| t.bytes as usize).collect();
    let mut values: Vec<_> = sizes.into_iter().map(|n| vec![0; n]).collect();
    let mut wanted: Vec<_> = values.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
    let took = fastest(|| Ok(reader.read_into(&mut wanted)?))?;
    if !file.equals(reader.tensors().map(|t| t.name), &values) {
        return Err(format!("{name}: values came back different").into());
    }
    let bytes = delta.report.bytes_in as f64;
    println!(
        "{name:28} {:8.4} {:8.4} {:8.2} {:8.2}   {deltas} of {tensors} tensors, none larger",
        bytes / direct.bytes_out as f64,
        bytes / delta.report.bytes_out as f64,
        bytes / wrote / 1e9,
        bytes / took / 1e9,
    );
    Ok(())
}

/// Seconds of the fastest of a few calls.
fn fastest(mut call: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..CALLS {
        let started = Instant::now();
        call()?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Writes a state; returns the file and the outcome of writing it.
fn write(state: &State, options: WriteOptions) -> Outcome<(Bytes, Written)> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    writer.declare(state.roles())?;
    writer.write(&state.sources())?;
    let written = writer.complete(Contents::default())?;
    let bytes = memory.take();
    Ok((bytes.into(), written))
}
