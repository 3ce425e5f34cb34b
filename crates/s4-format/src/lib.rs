//! Everything of s4weights that reaches disk, as plain types: dtypes, layouts, ids, plans, chunk
//! frames, the index, the manifest, roles, limits and errors.
//!
//! What is deliberately absent: I/O, compression, `unsafe`, and any decision. Parsers here take
//! byte slices that the caller has read and return typed errors that say where; no length found in
//! a slice is used before it is checked against the slice itself.
#![forbid(unsafe_code)]

mod error;
mod id;

pub use error::{Error, Place, Result};
pub use id::{CodecId, LayoutId, PredictorId, ResidualId, Support};
