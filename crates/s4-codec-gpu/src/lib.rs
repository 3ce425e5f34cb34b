//! The CUDA handle, the project's kernels, and codecs of GPU libraries.
//!
//! - [`Cuda`] finds the driver and its devices at run time; where there is none it says why. A
//!   [`Device`] is used on its primary context, a framework's [`Stream`]s are borrowed, [`Pool`]s hand
//!   out scratch within a budget, [`Pinned`] memory is the host's end of copies.
//! - `kernels/` holds the CUDA sources and what is compiled from them: machine code for generations
//!   8 and 9 of devices, and `s4.ptx`, which every driver of CUDA 12.0 and later translates for
//!   others. [`abi`] mirrors the interface in `kernels/abi.h`; a [`Stream`] queues the encoding and
//!   decoding of batches of chunks, with the same bytes as the CPU's.
//! - [`nvcomp`] has the codecs of nvCOMP.
//!
//! Everything builds without CUDA. Deliberately absent: plans, tensors, how memory is divided among
//! chunks (`s4-engine`).

pub mod abi;
mod blocks;
mod cuda;
mod device;
mod error;
mod kernels;
mod launch;
mod mapping;
mod memory;
pub mod nvcomp;
mod pinned;

pub use blocks::{CodedBatch, CodedPlane, split_scratch};
pub use cuda::Cuda;
pub use device::{Current, Device, DeviceInfo, Event, Stream};
pub use error::{GpuError, Result};
pub use launch::{DecodeBatch, EncodeBatch};
pub use mapping::DeviceMapping;
pub use memory::{DeviceBuffer, Pool};
pub use pinned::Pinned;
