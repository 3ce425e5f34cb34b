//! Everything of s4weights that reaches disk, as plain types: dtypes, layouts, ids, plans, chunk
//! frames, the index, the manifest, roles, limits and errors.
//!
//! Deliberately absent: I/O, compression, `unsafe`, and any decision. Parsers here take byte slices
//! that the caller has read and return typed errors that name the place; no length found in a slice
//! is used before it is checked against the slice itself. `docs/format.md` is the specification;
//! this crate is its types.
#![forbid(unsafe_code)]

mod bounded;
pub mod chunk;
mod digest;
pub mod dtype;
mod error;
pub mod file;
mod id;
pub mod index;
pub mod json;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod offsets;
pub mod plan;
pub mod side;
mod wire;

pub use chunk::{ChunkRecord, StreamEntry, StreamList};
pub use digest::{Digest, crc32c, crc32c_append};
pub use dtype::DType;
pub use error::{Error, Location, Result};
pub use file::Version;
pub use id::{CodecId, ContextsId, LayoutId, PredictorId, ResidualId, Support};
pub use index::{Tensor, TensorKind};
pub use manifest::Manifest;
pub use plan::Plan;
