//! Saves a state that moves as training moves it, step by step, into a store, and measures saving,
//! and restoring at every depth of the chain.
//!
//! `store URL MIB [OPTION=VALUE...]`: a folder or URL, the size of the state, storage options.

use std::time::Instant;

use s4weights::store::{CheckpointStore, SaveOptions, StorageOptions, StoreOptions};
use s4weights::{DType, TensorSource};

type Failure = Box<dyn std::error::Error>;

/// Weights, first and second moments of an optimizer.
struct State([Vec<f32>; 3]);

impl State {
    fn new(values: usize) -> Self {
        let weights = (0..values).map(|i| 0.05 * bell(i as u64)).collect();
        Self([weights, vec![0.0; values], vec![0.0; values]])
    }

    fn step(&mut self, step: u64) {
        let [weights, first, second] = &mut self.0;
        for (i, w) in weights.iter_mut().enumerate() {
            let g = 0.01 * bell((i as u64) ^ (step + 1).wrapping_mul(0x517c_c1b7_2722_0a95));
            first[i] = 0.9 * first[i] + 0.1 * g;
            second[i] = 0.999 * second[i] + 0.001 * g * g;
            *w -= 3e-4 * first[i] / (second[i].sqrt() + 1e-8);
        }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        self.0.iter().map(|t| t.iter().flat_map(|v| v.to_le_bytes()).collect()).collect()
    }
}

/// About a normal distribution.
fn bell(seed: u64) -> f32 {
    let mut x = seed;
    let mut sum = 0.0;
    for _ in 0..4 {
        x = (x.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 31;
        sum += (x >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
    }
    1.7 * sum
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, mib, rest @ ..] = arguments.as_slice() else {
        return Err("usage: store URL MIB [OPTION=VALUE...]".into());
    };
    let pairs = rest.iter().filter_map(|o| o.split_once('='));
    let storage: StorageOptions = pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    let options = StoreOptions { max_chain: 16, ..StoreOptions::default() };
    let store = CheckpointStore::open_or_create(url, &storage, options)?;
    let values = mib.parse::<usize>()? * (1 << 20) / 12;
    let mut state = State::new(values);
    for step in 0..20 {
        state.step(step);
    }
    for step in 20..36u64 {
        state.step(step);
        let bytes = state.bytes();
        let shape = [values as u64];
        let sources: Vec<_> = ["w", "m", "v"]
            .iter()
            .zip(&bytes)
            .map(|(name, data)| TensorSource { name, dtype: DType::Float32, shape: &shape, data })
            .collect();
        let start = Instant::now();
        let saved = store.save(
            step,
            &sources,
            &SaveOptions { groups: &[0, 1, 1], ..Default::default() },
        )?;
        let seconds = start.elapsed().as_secs_f64();
        let raw = saved.report.bytes_in as f64;
        let restore = restore(&store, &bytes)?;
        println!(
            "step {step}: depth {:2}, ratio {:.3}, save {seconds:.3} s ({:.2} GB/s), restore {restore:.3} s",
            step - 19,
            raw / saved.report.bytes_out as f64,
            raw / seconds / 1e9,
        );
    }
    Ok(())
}

/// Restores the newest checkpoint thrice; the shortest time.
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
