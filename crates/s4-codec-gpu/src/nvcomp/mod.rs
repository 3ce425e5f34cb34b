//! The trait [`GpuCodec`], and its implementations over NVIDIA's nvCOMP.
//!
//! A codec works on **blocks** (docs/codecs/blocks.md): the caller cuts planes, provides arrays of device addresses
//! and sizes, scratch memory and a stream, and afterwards lays the coded blocks out after a size table. `zstd`,
//! `gdeflate`, `deflate`, `lz4` and `snappy` are the bitstreams that the CPU codecs of the same ids read and write.
//! ANS, Bitcomp and Cascaded are closed: only a library of the same major version reads them, on a GPU, and a
//! manifest must list them ([`GpuCodec::closed`]).
//!
//! **Trust.** nvCOMP's decoders are not safe on bytes that its encoders did not write: they may
//! access any memory of the device. Only blocks of a checkpoint that is known by its hash, or that
//! the caller said to trust, may be decoded; checksums are no proof of origin.
//!
//! [`HostEncoder`] and [`HostDecoder`] code planes that lie in host memory, as the CPU's codecs do.
//!
//! Deliberately absent from [`GpuCodec`]: allocation, waiting, CUDA handles (addresses and streams
//! are `u64`), and the choice of a codec.

mod batch;
mod batched;
mod codec;
mod error;
mod host;

pub use batched::{
    AnsMode, Batched, ans, bitcomp, cascaded, deflate, gdeflate, lz4, reader, snappy, zstd,
};
pub use codec::{GpuCodec, Needs};
pub use error::{Error, Result};
pub use host::{Host, HostDecoder, HostEncoder, HostError, open};
pub use nvcomp_sys::{Alignments, Compress, DataType, Decompress, Nvcomp, Search, Shape, Status};
