//! Tensors of the host that change as soon as a save says that it no longer needs them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use s4weights::store::{SaveOptions, StoreOptions};
use s4weights::{DType, TensorSource, adversarial};

use crate::run::{memory, open, options};

/// A tensor that its owner changes while others hold a view of it.
struct Changing {
    name: &'static str,
    dtype: DType,
    shape: [u64; 1],
    words: Vec<AtomicU64>,
}

impl Changing {
    fn all() -> Vec<Self> {
        let of = |(name, dtype, n): (&'static str, DType, usize)| {
            let data = adversarial(dtype, n).find(|(p, _)| *p == "like-weights").unwrap().1;
            let word = |w: &[u8]| AtomicU64::new(u64::from_le_bytes(w.try_into().unwrap()));
            let words = data.chunks_exact(8).map(word).collect();
            Self { name, dtype, shape: [n as u64], words }
        };
        [
            ("w", DType::BFloat16, 300_000),
            ("m", DType::Float32, 100_000),
            ("b", DType::Float32, 100),
        ]
        .map(of)
        .into()
    }

    fn source(&self) -> TensorSource<'_> {
        // SAFETY: this many bytes are readable. They change meanwhile, which is what is tested: a
        // save may assume nothing about bytes that it reads again.
        let data = unsafe {
            std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), 8 * self.words.len())
        };
        TensorSource::new(self.name, self.dtype, &self.shape, data)
    }

    fn values(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    fn set(&self, values: &[u8]) {
        for (word, bytes) in self.words.iter().zip(values.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
        }
    }

    fn step(&self) {
        for word in self.words.iter().step_by(40) {
            word.fetch_xor(1, Ordering::Relaxed);
        }
    }

    fn spoil(&self) {
        self.words.iter().for_each(|w| w.store(0x1357_9bdf_0246_8ace, Ordering::Relaxed));
    }
}

/// The parent in memory, partly in memory, and not at all; all objects staged at once, and one at a time.
#[test]
fn what_is_stored_and_kept_are_the_values_before_staged() {
    for (parent_memory, staging_memory) in [(1 << 30, None), (400_000, Some(0)), (0, Some(8 << 20))]
    {
        let options = StoreOptions { parent_memory, object_bytes: 4 << 20, ..options() };
        let store = open(&memory(), options);
        let tensors = Arc::new(Changing::all());
        let mut steps = vec![];
        for step in 0..4 {
            let before: Vec<_> = tensors.iter().map(Changing::values).collect();
            let calls = Arc::new(AtomicU64::new(0));
            let (count, spoilt) = (Arc::clone(&calls), Arc::clone(&tensors));
            let staged = move || {
                count.fetch_add(1, Ordering::Relaxed);
                spoilt.iter().for_each(Changing::spoil);
            };
            let with = SaveOptions {
                staged: Some(Arc::new(staged)),
                host_changes: true,
                staging_memory,
                ..SaveOptions::default()
            };
            let sources: Vec<_> = tensors.iter().map(Changing::source).collect();
            let saved = store.save(step, &sources, &with).unwrap();
            assert_eq!(calls.load(Ordering::Relaxed), 1);
            assert_eq!(saved.checkpoint.base.is_some(), step > 0, "{:?}", saved.why_base);
            tensors.iter().zip(&before).for_each(|(t, values)| t.set(values));
            tensors.iter().for_each(Changing::step);
            steps.push(before);
        }
        for (step, before) in steps.iter().enumerate() {
            let loaded = store.load(Some(step as u64)).unwrap();
            for (t, values) in tensors.iter().zip(before) {
                assert!(loaded.reader().read(t.name).unwrap() == *values, "{} of {step}", t.name);
            }
        }
    }
}

#[test]
fn without_that_promise_the_host_is_told_at_once_and_stays_as_it_is() {
    let store = open(&memory(), options());
    let tensors = Changing::all();
    let sources: Vec<_> = tensors.iter().map(Changing::source).collect();
    for step in 0..3 {
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let staged = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let with = SaveOptions { staged: Some(Arc::new(staged)), ..SaveOptions::default() };
        store.save(step, &sources, &with).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        tensors.iter().for_each(Changing::step);
    }
}
