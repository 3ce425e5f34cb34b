//! Saves, loads and inspects lossless compressed checkpoints.
//!
//! A [`Writer`] takes named tensors and writes one `.s4w` file, front to back, to a path, an object
//! store or a stream; a [`Reader`] restores all of them, some of them, or slices. It builds on
//! `s4-format` (the file format) and `s4-engine` (planning, encoding and decoding).
//!
//! ```
//! use s4weights::{DType, Reader, Source, TensorSource, Writer, WriteOptions};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! let path = dir.path().join("model.s4w");
//! let weights: Vec<u8> = (0..4096u32).flat_map(|i| (i as f32).sqrt().to_le_bytes()).collect();
//!
//! let mut writer = Writer::create(path.as_path().into(), WriteOptions::default())?;
//! writer.write(&[TensorSource::new("w", DType::Float32, &[64, 64], &weights)])?;
//! let report = writer.finish(Default::default())?;
//! assert!(report.bytes_out < report.bytes_in);
//!
//! let reader = Reader::open(path.as_path().into(), Default::default())?;
//! assert_eq!(reader.read("w")?, weights);
//! # Ok(()) }
//! ```
//!
//! A checkpoint may be stored as a delta of an earlier one ([`Parent`]), and in several objects instead
//! of one file ([`ObjectSink`], [`ObjectSource`]). Callers may supply their own targets and sources of
//! files ([`Sink`], [`ReadAt`]).
//!
//! [`Writer::declare`] tells the planner the tensors' roles before any of them is planned.
//!
//! [`copy`] copies whole checkpoints, and compares them.
//!
//! [`store::CheckpointStore`] keeps many checkpoints in a folder or a bucket.
//!
//! Deliberately absent: Python objects, which only the wheel knows.
// Exceptions: mapped files (`io/region.rs`, `io/mapped.rs`) and uninitialized buffers
// (`buffers.rs`).
#![deny(unsafe_code)]

mod adopt;
mod adopted;
mod adversarial;
mod alike;
mod ancestors;
mod apply;
mod batch;
mod behind;
mod buffers;
mod close;
mod content;
mod copies;
pub mod copy;
#[cfg(feature = "cuda")]
mod device;
mod error;
mod extents;
mod fetch;
mod hash;
mod inputs;
mod interrupt;
mod io;
mod large;
mod levels;
mod memory;
mod mixed;
mod objects;
mod options;
mod output;
mod pack;
mod parallel;
mod parent;
mod partial;
mod pipeline;
mod planning;
mod progress;
mod reader;
mod recall;
mod report;
mod roles;
mod slice;
mod spans;
pub mod store;
mod tensor_source;
mod verify;
mod write;
mod writer;

pub use adversarial::adversarial;
pub use error::{Error, ParentProblem, Result};
pub use interrupt::Interrupt;
pub use io::{ReadAt, Sink, Source, StorageOptions, Target, check_storage_options};
pub use memory::{Compressed, MemoryOptions, TensorCodec};
pub use objects::{DataObject, ObjectOptions, ObjectSink, ObjectSource};
pub use options::{CodingFn, DEFAULT_MAX_CHAIN, OwnCodecs, StagedFn, WriteOptions};
pub use parent::{MemoryParent, Parent, ParentRange, ParentTensor, Snapshot};
pub use progress::{Progress, ProgressFn};
pub use reader::{ParentResolver, ReadOptions, Reader, TensorInfo};
pub use report::{Inspection, PlaneReport, Report, StreamTotal, TensorReport, Verification};
#[cfg(feature = "cuda")]
pub use s4_engine::cuda;
pub use s4_engine::{
    CpuEngine, DeviceMemory, PlaneCoding, Preset, TensorPlan, TensorValues, TensorView, Values,
    codec,
};
pub use s4_format::{self as format, DType, Manifest};
pub use s4_planes::Simd;
pub use s4_store::{Cause, check_url, is_url, redact_url};
pub use slice::{ArrayView, Slice};
pub use tensor_source::TensorSource;
pub use writer::{Contents, Writer, Written};
