//! Shared by the benchmarks: real tensors, states of training runs, a server, and how long to measure.
//!
//! `cargo xtask bench` runs the benchmarks of kernels and writes their table. Every rate counts the raw
//! bytes of the tensor, so that stages can be compared with each other and with the memory copy beside
//! them. (`peers.py` compares whole codecs with those of other projects.) Whole paths are separate programs,
//! run as `cargo run --release -p s4-benches --bin NAME`:
//!
//! | program | measures |
//! |---|---|
//! | `chains` | size of chains of checkpoints and time to restore them, by number of hops |
//! | `deltas` | size and speed of checkpoints stored as the difference from an earlier one |
//! | `planning` | time to plan a tensor, beside the time to encode it |
//! | `ratio` | ratio and speed of each preset |
//! | `upload` | saving to an S3 server, compared with uploading the raw bytes |
//! | `steps` | saving a state step by step into a store, and restoring each |
//! | `peak` | one save or load, for a look at its memory |
//! | `gpu` | the CUDA engine and nvCOMP; `cargo xtask bench --gpu` runs it |
//!
//! Kernels and codecs are deliberately not measured on made-up data. The speed of a kernel may not depend
//! on the values, but that of an entropy coder does. `upload`, `steps` and `peak` need states of any size, so
//! they make them up; those of `upload` and `steps` change as under AdamW ([`adam`]).

pub mod adam;
pub mod memory;
pub mod s3;
pub mod states;

use std::fs;
use std::path::Path;
use std::time::Duration;

use criterion::Criterion;
use s4_planes::{Kernels, Simd, Width};
use safetensors::SafeTensors;

/// A tensor's bytes, and the width of its elements.
#[derive(Debug)]
pub struct Sample {
    /// The dtype, as benchmarks name it.
    pub name: &'static str,
    /// Size of an element.
    pub width: Width,
    /// The elements, little-endian.
    pub data: Vec<u8>,
    /// The same tensor one training step later.
    pub next: Vec<u8>,
}

impl Sample {
    /// A weight matrix of each of the two training runs in `testdata`: bf16 and fp32.
    ///
    /// # Panics
    /// If `testdata` is not as its README says.
    pub fn all() -> [Self; 2] {
        let bf16 = ("gpt34m_bf16", "model.h.4.fc.weight");
        let fp32 = ("gpt98m_fp32", "model.h.5.proj.weight");
        [Self::load("bf16", Width::B2, bf16), Self::load("fp32", Width::B4, fp32)]
    }

    /// Its planes in layout `fields`.
    pub fn planes(&self) -> Planes {
        let n = self.data.len() / self.width.bytes();
        let mut planes = Planes::new(n, self.width);
        let Planes { e, a, b } = &mut planes;
        Kernels::new(Simd::Scalar).split_fields(self.width, &self.data, e, a, b);
        planes
    }

    fn load(name: &'static str, width: Width, (run, tensor): (&str, &str)) -> Self {
        let [data, next] = ["s0", "s1"].map(|step| {
            let file = format!("../testdata/{run}_{step}.safetensors");
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
            let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let tensors = SafeTensors::deserialize(&bytes).expect("testdata is valid");
            tensors.tensor(tensor).expect("testdata has this tensor").data().to_vec()
        });
        Self { name, width, data, next }
    }
}

/// Memory for the planes of layout `fields`.
#[derive(Debug)]
pub struct Planes {
    /// Exponents.
    pub e: Vec<u8>,
    /// The byte below the exponent.
    pub a: Vec<u8>,
    /// The bytes below that.
    pub b: Vec<u8>,
}

impl Planes {
    /// Memory for `n` elements.
    pub fn new(n: usize, width: Width) -> Self {
        Self { e: vec![0; n], a: vec![0; n], b: vec![0; n * (width.bytes() - 2)] }
    }
}

/// Short measurements: there are many, and they are read for factors, not for percents.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_there_and_their_planes_merge_to_them() {
        for sample in Sample::all() {
            assert_eq!(sample.data.len(), sample.next.len());
            let Planes { e, a, b } = sample.planes();
            let mut back = vec![0; sample.data.len()];
            Kernels::new(Simd::detect()).merge_fields(sample.width, &e, &a, &b, &mut back);
            assert!(back == sample.data, "{}", sample.name);
        }
    }
}
