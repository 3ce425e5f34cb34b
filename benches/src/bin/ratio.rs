//! Ratio and speed of checkpoints with each preset.
//!
//! `ratio --data DIR [--threads N] [--markdown] [--tensors] [--sizes]` looks for `NAME_sK.safetensors`. It stores
//! step 0 as a base, step 0 as the state of a run in mixed precision with the same values (fp32 only), and each
//! other step as a delta of step 0. Roles are derived from names. Speeds count values, in memory, with N threads
//! (default 1): medians of calls that alternate between the presets. Every file is read back and compared.
//! `--tensors` instead prints the bits per value of each tensor and plane with preset `balanced`; `--sizes` prints
//! the bytes of each file and tensor: file, tensor (empty for the whole file), preset, bytes.

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

const CALLS: usize = 7;
const PRESETS: [Preset; 3] = [Preset::Fast, Preset::Balanced, Preset::Small];

fn main() -> Outcome<()> {
    let (mut data, mut threads, mut markdown) = (None, 1, false);
    let (mut tensors, mut sizes) = (false, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--data" => data = arguments.next().map(PathBuf::from),
            "--threads" => threads = arguments.next().unwrap_or_default().parse()?,
            "--markdown" => markdown = true,
            "--tensors" => tensors = true,
            "--sizes" => sizes = true,
            _ => return Err("usage: ratio --data DIR [--threads N] [--markdown]".into()),
        }
    }
    let data = data.ok_or("usage: ratio --data DIR [--threads N] [--markdown]")?;
    if tensors {
        return cases(&data)?.iter().try_for_each(|case| of_tensors(case, threads));
    }
    if sizes {
        return cases(&data)?.iter().try_for_each(|case| of_files(case, threads));
    }
    let bar = |cells: &[String]| match markdown {
        true => println!("| {} |", cells.join(" | ")),
        false => println!("{}", cells.join("  ")),
    };
    let mut head = vec![format!("{:32}", "GB/s in, out")];
    head.extend(PRESETS.map(|p| format!("{:22}", p.name())));
    bar(&head);
    if markdown {
        bar(&vec!["---".to_owned(); head.len()]);
    }
    for case in cases(&data)? {
        let mut cells = vec![format!("{:32}", case.name)];
        for (preset, row) in PRESETS.iter().zip(measure(&case, threads)?) {
            let more = if *preset == Preset::Fast { "" } else { " " };
            cells.push(format!("{:7.4} {:6.2} {:6.2}{more}", row.ratio, row.wrote, row.read));
        }
        bar(&cells);
    }
    Ok(())
}

struct Case {
    name: String,
    /// Its name without extension.
    file: String,
    parent: Option<State>,
    state: State,
}

fn cases(dir: &Path) -> Outcome<Vec<Case>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let Some((name, step)) = stem.rsplit_once("_s") else { continue };
        let Ok(step) = step.parse::<u64>() else { continue };
        files.push((name.to_owned(), step, path));
    }
    files.sort();
    let mut out = vec![];
    for (name, step, path) in &files {
        let state = State::read(path)?;
        let file = format!("{name}_s{step}");
        if *step == 0 {
            if name.contains("fp32") {
                let (name, file) = (format!("{name} mixed"), format!("{file} mixed"));
                let state = state.in_mixed_precision();
                out.push(Case { name, file, parent: None, state });
            }
            out.push(Case { name: format!("{name} s0"), file, parent: None, state });
        } else if let Some(base) = files.iter().find(|f| f.0 == *name && f.1 == 0) {
            let (name, parent) = (format!("{name} s0 -> s{step}"), Some(State::read(&base.2)?));
            out.push(Case { name, file, parent, state });
        }
    }
    Ok(out)
}

/// Prints the bits that each value takes, tensor by tensor and plane by plane.
fn of_tensors(case: &Case, threads: usize) -> Outcome<()> {
    let (_, reader, ..) = stored(case, Preset::Balanced, threads)?;
    println!("{}", case.name);
    for t in reader.inspect(true)?.tensors {
        let values = t.bytes as f64 / t.dtype.value_width() as f64;
        let Some(stored) = t.stored else { continue };
        let planes = t
            .planes
            .iter()
            .map(|p| format!("{} {} {:.3}", p.plane, p.codecs.join("+"), p.bits_per_value));
        let planes: Vec<_> = planes.collect();
        let bits = 8.0 * stored as f64 / values;
        println!("  {:40} {bits:7.3}  {:28} {}", t.name, t.plan, planes.join(", "));
    }
    Ok(())
}

/// Prints the bytes of a case's file with `fast` and `balanced`, and of each of its tensors that is not in a pack.
fn of_files(case: &Case, threads: usize) -> Outcome<()> {
    for preset in [Preset::Fast, Preset::Balanced] {
        let (_, reader, report) = stored(case, preset, threads)?;
        println!("{}\t\t{}\t{}", case.file, preset.name(), report.bytes_out);
        for t in reader.inspect(false)?.tensors {
            let Some(stored) = t.stored else { continue };
            println!("{}\t{}\t{}\t{stored}", case.file, t.name, preset.name());
        }
    }
    Ok(())
}

struct Row {
    ratio: f64,
    wrote: f64,
    read: f64,
}

/// Stores a case with a preset and opens the file. Returns the options and the report of the write, too.
fn stored(
    case: &Case,
    preset: Preset,
    threads: usize,
) -> Outcome<(WriteOptions, Reader, s4weights::Report)> {
    let read = ReadOptions { threads: Some(threads), ..ReadOptions::default() };
    let mut options = WriteOptions { preset, threads: Some(threads), ..WriteOptions::default() };
    let mut parent = None;
    if let Some(state) = &case.parent {
        let (file, written) = write(state, options.clone())?;
        // The parent's values are still in memory, as they are when a training loop saves again.
        let mut memory = MemoryParent::new(Arc::new(written.snapshot), 0);
        for t in state.sources() {
            if let Values::Host(data) = t.values {
                memory.hold(t.name, Bytes::copy_from_slice(data))?;
            }
        }
        options.parent = Some(Arc::new(memory));
        parent = Some(Arc::new(Reader::open(Source::Bytes(file), read.clone())?));
    }
    let (file, written) = write(&case.state, options.clone())?;
    let reader = Reader::open(Source::Bytes(file), read)?;
    if let Some(parent) = parent.filter(|_| reader.parent_digest().is_some()) {
        reader.set_parent(parent)?;
    }
    Ok((options, reader, written.report))
}

fn measure(case: &Case, threads: usize) -> Outcome<Vec<Row>> {
    let mut runs = vec![];
    for preset in PRESETS {
        let (options, reader, report) = stored(case, preset, threads)?;
        runs.push((options, reader, report, vec![], vec![]));
    }
    for _ in 0..CALLS {
        for (options, reader, _, wrote, took) in &mut runs {
            wrote.push(seconds(|| write(&case.state, options.clone()).map(drop))?);
            let sizes: Vec<_> = reader.tensors().map(|t| t.bytes as usize).collect();
            let mut values: Vec<_> = sizes.into_iter().map(|n| vec![0; n]).collect();
            let mut wanted: Vec<_> = values.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
            took.push(seconds(|| Ok(reader.read_into(&mut wanted)?))?);
            if !case.state.equals(reader.tensors().map(|t| t.name), &values) {
                return Err(format!("{}: values came back different", case.name).into());
            }
        }
    }
    let rate = |bytes: u64, mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        bytes as f64 / all[all.len() / 2] / 1e9
    };
    let row = |(_, _, report, wrote, took): (_, _, s4weights::Report, _, _)| Row {
        ratio: report.bytes_in as f64 / report.bytes_out as f64,
        wrote: rate(report.bytes_in, wrote),
        read: rate(report.bytes_in, took),
    };
    Ok(runs.into_iter().map(row).collect())
}

fn seconds(call: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let started = Instant::now();
    call()?;
    Ok(started.elapsed().as_secs_f64())
}

/// Writes a state with its roles; returns the file and the outcome of writing it.
fn write(state: &State, options: WriteOptions) -> Outcome<(Bytes, Written)> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    writer.declare(state.roles())?;
    writer.write(&state.sources())?;
    let written = writer.complete(Contents::default())?;
    let bytes = memory.take();
    Ok((bytes.into(), written))
}
