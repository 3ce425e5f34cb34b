//! What chains of checkpoints cost: bytes, and the time to restore each checkpoint.
//!
//! `chains --data DIR` looks for `NAME_s0.safetensors`, `NAME_s1.safetensors` and so on, the successive
//! states of one run, and saves them into a store once for each limit of hops. `--threads N`: saves and
//! restores with N threads (default 1); `--all`: prints a line for each checkpoint.

use std::path::{Path, PathBuf};
use std::time::Instant;

use s4_benches::states::{Outcome, State};
use s4weights::store::{Checkpoint, CheckpointStore, SaveOptions, StorageOptions, StoreOptions};

const USAGE: &str = "usage: chains --data DIR [--threads N] [--all]";
/// How often each checkpoint is restored; the fastest restore counts.
const CALLS: usize = 7;

fn main() -> Outcome<()> {
    let (mut data, mut threads, mut all) = (None, 1, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--data" => data = arguments.next().map(PathBuf::from),
            "--threads" => threads = arguments.next().ok_or(USAGE)?.parse()?,
            "--all" => all = true,
            _ => return Err(USAGE.into()),
        }
    }
    println!("{threads} thread(s); restore: times that of the base, in GB/s of values");
    println!(
        "{:16} {:>6} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}",
        "", "hops", "ratio", "of base", "save", "base", "eighth", "worst"
    );
    for (name, files) in runs(&data.ok_or(USAGE)?)? {
        for hops in [1, 2, 3, 63] {
            measure(&name, &files, hops, threads, all)?;
        }
    }
    Ok(())
}

/// The names of the runs in a folder, each with the files of its states in order.
fn runs(dir: &Path) -> Outcome<Vec<(String, Vec<PathBuf>)>> {
    let mut out = vec![];
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let Some(name) = stem.strip_suffix("_s0") else { continue };
        let file = |n: usize| dir.join(format!("{name}_s{n}.safetensors"));
        let files: Vec<_> = (0..).map(file).take_while(|p| p.exists()).collect();
        if files.len() > 1 {
            out.push((name.to_owned(), files));
        }
    }
    out.sort();
    Ok(out)
}

fn measure(name: &str, files: &[PathBuf], hops: u32, threads: usize, all: bool) -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    let options = StoreOptions {
        threads: Some(threads),
        max_chain: u32::try_from(files.len())?,
        max_hops: hops,
        ..StoreOptions::default()
    };
    let url = folder.path().to_string_lossy();
    let store = CheckpointStore::create(&url, &StorageOptions::new(), options)?;
    let (mut raw, mut seconds) = (0.0, 0.0);
    for (step, file) in (0..).zip(files) {
        let state = State::read(file)?;
        let sources = state.sources();
        let start = Instant::now();
        let saved = store.save(step, &sources, &SaveOptions::default())?;
        seconds += start.elapsed().as_secs_f64();
        raw += saved.report.bytes_in as f64;
    }
    let list = store.list()?;
    let bytes = |c: &Checkpoint| (c.about.data_len + c.about.manifest_len) as f64;
    let stored: f64 = list.iter().map(bytes).sum();
    let times = times(&store, &list, files)?;
    let worst = times[1..].iter().copied().fold(0.0, f64::max);
    println!(
        "{name:16} {hops:6} {:8.4} {:8.3} {:8.2} {:9.2} {:8.2} {:8.2}",
        raw / stored,
        stored / bytes(&list[0]) / list.len() as f64,
        raw / seconds / 1e9,
        list[0].about.raw_len as f64 / times[0] / 1e9,
        times.get(8).map_or(f64::NAN, |t| t / times[0]),
        worst / times[0],
    );
    for (n, (checkpoint, time)) in list.iter().zip(&times).enumerate().filter(|_| all) {
        let of = checkpoint.base.and_then(|b| list.iter().position(|c| c.id() == b));
        let of = of.map_or("base".into(), |of| format!("of {of}"));
        let size = bytes(checkpoint) / bytes(&list[0]);
        println!("  {n:4} {of:>6}: size {size:.3}, restore {:.2}", time / times[0]);
    }
    Ok(())
}

/// Seconds to restore each checkpoint. The checkpoints take turns, so that other load on the machine
/// affects all of them alike.
fn times(store: &CheckpointStore, list: &[Checkpoint], files: &[PathBuf]) -> Outcome<Vec<f64>> {
    let mut best = vec![f64::INFINITY; list.len()];
    let mut values: Vec<Vec<u8>> = vec![];
    for call in 0..CALLS {
        for (n, checkpoint) in list.iter().enumerate() {
            let start = Instant::now();
            let loaded = store.load_id(checkpoint.id(), None)?;
            let reader = loaded.reader();
            // Only the first restore pays for allocating this memory.
            values.resize_with(reader.tensors().len(), Vec::new);
            for (info, values) in reader.tensors().zip(&mut values) {
                values.resize(usize::try_from(info.bytes)?, 0);
            }
            let mut wants: Vec<_> = values.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
            reader.read_into(&mut wants)?;
            best[n] = best[n].min(start.elapsed().as_secs_f64());
            if call == 0
                && !State::read(&files[n])?.equals(reader.tensors().map(|t| t.name), &values)
            {
                return Err(format!("{}: restored values differ", files[n].display()).into());
            }
        }
    }
    Ok(best)
}
