//! What the fuzz targets do with their input.
//!
//! A target is a function of bytes that panics if something is wrong: a decoder that panics, takes
//! more memory than its input allows, or gives other values than another decoder of the same bytes.
//! The programs in `fuzz/fuzz_targets` hand the targets to libFuzzer; the test `replay` runs the
//! kept inputs (`fuzz/seeds`, `fuzz/regressions`) through the same functions without it.
//!
//! Targets that read whole files or stores take a list of changes to a sound one, and mend every
//! checksum, hash and offset afterwards: they test what parsers do with wrong content, not whether
//! a checksum notices.

mod chunk;
mod codecs;
mod edit;
mod files;
#[cfg(target_os = "linux")]
mod gpu;
mod input;
mod kit;
pub mod memory;
mod parsers;
mod planes;
mod rans;
mod safetensors;
pub mod seeds;
mod store;

pub use chunk::chunk;
pub use codecs::{bits, deflate, gdeflate, lz4, snappy, stored, zstd};
pub use files::{chain, reader};
#[cfg(target_os = "linux")]
pub use gpu::{gpu, prepare as prepare_gpu};
pub use parsers::{index, manifest};
pub use planes::planes;
pub use rans::{rans, rans_encode};
pub use safetensors::safetensors;
pub use store::{store_log, store_views};

/// A target: its name, which is that of its program and of its folders of inputs, and what it does.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: &[Target] = &[
    ("bits", bits),
    ("chain", chain),
    ("chunk", chunk),
    ("deflate", deflate),
    ("gdeflate", gdeflate),
    #[cfg(target_os = "linux")]
    ("gpu", gpu),
    ("index", index),
    ("lz4", lz4),
    ("manifest", manifest),
    ("planes", planes),
    ("rans", rans),
    ("rans_encode", rans_encode),
    ("reader", reader),
    ("safetensors", safetensors),
    ("snappy", snappy),
    ("store_log", store_log),
    ("store_views", store_views),
    ("stored", stored),
    ("zstd", zstd),
];
