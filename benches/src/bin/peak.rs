//! Saves or loads a state of a given size, for measuring the memory that this takes.
//! `/usr/bin/time -v peak make 4096` only makes the state; `peak save 4096 URL` also saves it, and then twice
//! changes it a little and saves it again, all in one process; `peak again 4096 URL` saves it as the next
//! process would, which reads back the parent that it takes the difference from; `peak load 4096 URL` reads
//! the newest checkpoint into memory of that size.

use std::time::Instant;

use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{DType, TensorSource};

/// Number of tensors of a state.
const TENSORS: usize = 64;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let usage = "usage: peak make|save|again|load MIB [URL]";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (verb, mib) = arguments.first().zip(arguments.get(1)).ok_or(usage)?;
    let values = mib.parse::<usize>()? * (1 << 20) / 4 / TENSORS;
    let url = arguments.get(2).map(String::as_str);
    let open = || -> Outcome<CheckpointStore> {
        let options = StoreOptions::default();
        Ok(CheckpointStore::open_or_create(url.ok_or(usage)?, &Default::default(), options)?)
    };
    match verb.as_str() {
        "make" => drop(make(values)),
        "save" => {
            let (store, mut state) = (open()?, make(values));
            for step in 0..3 {
                save(&store, &state, step)?;
                move_on(&mut state);
            }
        }
        "again" => {
            let (store, mut state) = (open()?, make(values));
            (0..3).for_each(|_| move_on(&mut state));
            save(&store, &state, 3)?;
        }
        "load" => {
            let start = Instant::now();
            let loaded = open()?.load(None)?;
            let mut state = vec![vec![0; 4 * values]; TENSORS];
            let mut wants: Vec<_> = state.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
            loaded.reader().read_into(&mut wants)?;
            println!("load: {:.2} s", start.elapsed().as_secs_f64());
        }
        _ => return Err(usage.into()),
    }
    Ok(())
}

/// A state with values like those of weights.
fn make(values: usize) -> Vec<Vec<u8>> {
    let tensor = |t: usize| {
        let mut bytes = Vec::with_capacity(4 * values);
        let mut x = t as u64 + 1;
        for _ in 0..values {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let sum = (0..4).map(|i| (x >> (16 * i)) as u16 as f32 / 65_536.0 - 0.5).sum::<f32>();
            bytes.extend_from_slice(&(0.05 * sum).to_le_bytes());
        }
        bytes
    };
    (0..TENSORS).map(tensor).collect()
}

/// Changes the low bits of half of the values.
fn move_on(state: &mut [Vec<u8>]) {
    for value in state.iter_mut().flat_map(|t| t.as_chunks_mut::<8>().0) {
        value[0] = value[0].wrapping_add(37);
    }
}

fn save(store: &CheckpointStore, state: &[Vec<u8>], step: u64) -> Outcome<()> {
    let shape = [state[0].len() as u64 / 4];
    let names: Vec<String> = (0..state.len()).map(|n| format!("t{n}")).collect();
    let sources = names
        .iter()
        .zip(state)
        .map(|(name, data)| TensorSource::new(name, DType::Float32, &shape, data));
    let start = Instant::now();
    let saved = store.save(step, &sources.collect::<Vec<_>>(), &SaveOptions::default())?;
    let kind = if saved.checkpoint.base.is_some() { "delta" } else { "base" };
    let ratio = saved.report.bytes_in as f64 / saved.report.bytes_out as f64;
    println!("{kind}: {:.2} s, ratio {ratio:.3}", start.elapsed().as_secs_f64());
    Ok(())
}
