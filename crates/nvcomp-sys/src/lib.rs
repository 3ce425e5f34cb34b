//! Hand-written bindings to the batched C interface of NVIDIA's nvCOMP 6, opened at run time from the
//! user's own installation (for instance the Python package `nvidia-libnvcomp-cu12` or `-cu13`).
//!
//! [`Search`] says where to look, [`Nvcomp::open`] opens the library and checks its version, and
//! [`Nvcomp::ans`] and its siblings give the functions of one format as an [`Api`]: queries that
//! run on the host, and [`Api::compress`] and [`Api::decompress`], which enqueue work on a CUDA
//! stream. Device addresses and streams are plain `u64`: this crate depends on no CUDA binding.
//!
//! Deliberately absent: the library and its headers, the C++ interfaces, gzip, checksums,
//! and any call that waits for the device. nvCOMP's licence covers only systems with NVIDIA GPUs,
//! so callers should check for a GPU before they open the library.

mod api;
mod error;
mod library;
mod options;
mod status;
mod version;

pub use api::{Alignments, Api, Compress, Decompress, Shape};
pub use error::{Error, Result, Tried};
pub use library::{Nvcomp, Search};
pub use options::{
    AnsCompress, AnsDecompress, Backend, BitcompCompress, CascadedCommon, CascadedCompress,
    CascadedDecompress, DataType, Lz4Compress, Lz4Decompress, NoOptions, PlainDecompress,
    SortingDecompress, WithAlgorithm,
};
pub use status::Status;
pub use version::{ENVIRONMENT, MAJOR, SONAME, Version};
