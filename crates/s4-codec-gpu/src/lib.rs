//! GPU codecs and kernels.
pub mod abi;
mod cuda;
mod device;
mod error;
mod kernels;
mod memory;
pub use cuda::{Cuda, DeviceInfo};
pub use device::{Device, Event, Stream};
pub use error::{GpuError, Result};
pub use kernels::{DecodeBatch, EncodeBatch};
pub use memory::{DeviceBuffer, Pinned, Pool};
