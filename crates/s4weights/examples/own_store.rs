//! A checkpoint store in your own storage: anything that implements `object_store::ObjectStore`.
//!
//! Here that is a store in memory. A program would pass the client that it already has, or a
//! wrapper that counts, caches or refuses requests. (Folders and the usual buckets need no code:
//! [`CheckpointStore::create`] takes a path or a URL.)

use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use s4weights::store::{CheckpointStore, Place, Retention, SaveOptions, StoreOptions};
use s4weights::{DType, TensorSource};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let place = Place::objects(Arc::new(InMemory::new()), Path::from("runs/a"));
    let options = StoreOptions {
        // The last three checkpoints stay listed, and those that they need.
        retention: Some(Retention { keep_last: Some(3), ..Retention::default() }),
        // Restoring reads at most one checkpoint besides a base.
        max_hops: 1,
        ..StoreOptions::default()
    };
    // Creating a store first probes whether the place can do what a store relies on.
    let store = CheckpointStore::create_at(&place, options)?;
    let mut weights: Vec<f32> = (0..20_000).map(|i| (i as f32).sin()).collect();
    for step in 0..6 {
        weights.iter_mut().for_each(|w| *w *= 1.000_01);
        let data = bytes(&weights);
        let tensor = TensorSource::new("w", DType::Float32, &[100, 200], &data);
        let saved = store.save(step, &[tensor], &SaveOptions::default())?;
        let kind = if saved.why_base.is_some() { "a base" } else { "a delta" };
        println!("step {step}: {kind} of {} bytes", saved.report.bytes_out);
    }
    let steps: Vec<u64> = store.list()?.iter().map(|c| c.step()).collect();
    // Step 0 is the base of the others.
    assert_eq!(steps, [0, 3, 4, 5]);
    let newest = store.load(None)?;
    assert!(newest.reader().read("w")? == bytes(&weights));
    println!("listed: steps {steps:?}; step {} came back bit by bit", newest.step());
    Ok(())
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn it_runs() -> Outcome<()> {
    main()
}
