//! Saves a state that changes as in training into a store, step by step, and restores it at every depth
//! of the chain: time and size of each save, time of each restore.
//!
//! `steps URL MIB [OPTION=VALUE...]`: a folder or URL, the size of the state, storage options.

use std::time::Instant;

use s4_benches::adam::{State, sources};
use s4weights::store::{CheckpointStore, SaveOptions, StorageOptions, StoreOptions};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, mib, rest @ ..] = arguments.as_slice() else {
        return Err("usage: steps URL MIB [OPTION=VALUE...]".into());
    };
    let pairs = rest.iter().filter_map(|o| o.split_once('='));
    let storage: StorageOptions = pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    let store = CheckpointStore::open_or_create(url, &storage, StoreOptions::default())?;
    let values = mib.parse::<usize>()? * (1 << 20) / 12;
    let mut state = State::new(values);
    for step in 0..20 {
        state.step(step);
    }
    for step in 20..36u64 {
        state.step(step);
        let bytes = state.bytes();
        let shape = [values as u64];
        let sources = sources(&bytes, &shape).into_iter().zip([0, 1, 1]);
        let sources: Vec<_> = sources.map(|(t, group)| t.in_group(group)).collect();
        let start = Instant::now();
        let saved = store.save(step, &sources, &SaveOptions::default())?;
        let seconds = start.elapsed().as_secs_f64();
        let raw = saved.report.bytes_in as f64;
        let restore = restore(&store, &bytes)?;
        println!(
            "step {step}: {:2} since its base, ratio {:.3}, save {seconds:.3} s ({:.2} GB/s), restore {restore:.3} s",
            saved.checkpoint.since_base(),
            raw / saved.report.bytes_out as f64,
            raw / seconds / 1e9,
        );
    }
    Ok(())
}

/// Restores the newest checkpoint three times; returns the seconds of the fastest.
fn restore(store: &CheckpointStore, expected: &[Vec<u8>]) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    let mut out: Vec<Vec<u8>> = expected.iter().map(|t| vec![1; t.len()]).collect();
    for _ in 0..3 {
        let start = Instant::now();
        let loaded = store.load(None)?;
        let mut wants: Vec<_> = out.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
        loaded.reader().read_into(&mut wants)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    if out == expected { Ok(best) } else { Err("restored values differ".into()) }
}
