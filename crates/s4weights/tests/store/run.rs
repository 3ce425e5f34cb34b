//! An imitation of a training run: values that move a little at every step.

use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use s4weights::store::{CheckpointStore, Place, SaveOptions, Saved, StoreOptions};
use s4weights::{Contents, DType, Result, TensorSource};

/// Names, types and values of a state.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct State(pub(crate) Vec<(String, DType, Vec<u64>, Vec<u8>)>);

impl State {
    /// Weights, moments and small tensors, as training leaves them.
    pub(crate) fn new(values: u64) -> Self {
        let noise = |i: u64, seed: u64| {
            let x = (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((x >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 0.2
        };
        let floats = |seed: u64, n: u64| -> Vec<u8> {
            (0..n).flat_map(|i| noise(i, seed).to_le_bytes()).collect()
        };
        Self(vec![
            ("model.w".into(), DType::Float32, vec![values], floats(1, values)),
            ("model.half".into(), DType::BFloat16, vec![values, 2], floats(2, values)),
            ("model.bias".into(), DType::Float32, vec![7], floats(3, 7)),
            ("optimizer.m".into(), DType::Float32, vec![values], floats(4, values)),
            ("optimizer.step".into(), DType::Int64, vec![], 0i64.to_le_bytes().to_vec()),
        ])
    }

    /// One step: low bits change everywhere.
    pub(crate) fn step(&mut self, step: u64) {
        for (n, (_, _, _, data)) in self.0.iter_mut().enumerate() {
            for (i, value) in data.chunks_mut(4).enumerate() {
                let x = (i as u64 + step * 77 + n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                value[0] ^= (x >> 59) as u8;
            }
        }
    }

    pub(crate) fn sources(&self) -> Vec<TensorSource<'_>> {
        let list = self.0.iter().map(|(name, dtype, shape, data)| {
            let group = u8::from(name.starts_with("optimizer"));
            TensorSource::new(name, *dtype, shape, data).in_group(group)
        });
        list.collect()
    }

    pub(crate) fn save(&self, store: &CheckpointStore, step: u64) -> Result<Saved> {
        self.save_with(store, step, SaveOptions::default())
    }

    pub(crate) fn save_with(
        &self,
        store: &CheckpointStore,
        step: u64,
        mut options: SaveOptions,
    ) -> Result<Saved> {
        let metadata = [("step".to_owned(), step.to_string())].into();
        options.contents = Contents { metadata, ..Contents::default() };
        store.save(step, &self.sources(), &options)
    }

    /// Loads a step from a store, as a state.
    pub(crate) fn load(store: &CheckpointStore, step: Option<u64>) -> Result<Self> {
        let loaded = store.load(step)?;
        let reader = loaded.reader();
        let read = reader
            .tensors()
            .map(|t| Ok((t.name.to_owned(), t.dtype, t.shape.to_vec(), reader.read(t.name)?)));
        Ok(Self(read.collect::<Result<_>>()?))
    }
}

pub(crate) fn options() -> StoreOptions {
    StoreOptions { threads: Some(2), ..StoreOptions::default() }
}

/// A new place in memory.
pub(crate) fn memory() -> Place {
    Place::objects(Arc::new(InMemory::new()), Path::from("runs/a"))
}

pub(crate) fn open(place: &Place, options: StoreOptions) -> CheckpointStore {
    CheckpointStore::open_or_create_at(place, options).unwrap()
}
