//! Checkpoints that several processes store together: functions on a `_core.Store`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use s4weights::store::{PartOf, RankPart, SaveOptions};

use crate::arguments::{PlacedTensor, contents, placed};
use crate::device::CudaEngine;
use crate::errors::to_value_error;
use crate::store::{Store, saved_json, staged_callback};
use crate::watch::progress;
use crate::writer::in_groups;

/// Begins a checkpoint that several processes store together. `raw`: approximate size of its tensors in bytes;
/// `tensors`: approximate number of tensors of each rank. Returns the `part_of` of each rank, as JSON.
#[pyfunction]
pub(crate) fn begin_parts(
    py: Python<'_>,
    store: &Store,
    raw: u64,
    tensors: Vec<usize>,
    base: bool,
) -> PyResult<Vec<String>> {
    let of = store.watcher.run(py, None, || store.inner.begin_parts(raw, &tensors, base))?;
    of.iter().map(serde_json::to_string).collect::<Result<_, _>>().map_err(to_value_error)
}

/// Stores a rank's tensors. Returns the part, for the coordinator, and its bytes before and after compression.
/// `staged`, `host_changes` and `staging_memory` are as for `Store.save`.
#[pyfunction]
#[pyo3(signature = (
    store, part_of, rank, tensors, *, groups, callback, engine, staged, host_changes, staging_memory
))]
#[expect(clippy::too_many_arguments, reason = "keywords")]
pub(crate) fn save_part<'py>(
    py: Python<'py>,
    store: &Store,
    part_of: &str,
    rank: u32,
    tensors: Vec<PlacedTensor>,
    groups: Vec<u8>,
    callback: Option<Py<PyAny>>,
    engine: Option<Py<CudaEngine>>,
    staged: Option<Py<PyAny>>,
    host_changes: bool,
    staging_memory: Option<usize>,
) -> PyResult<(Bound<'py, PyBytes>, u64, u64)> {
    let of: PartOf = serde_json::from_str(part_of).map_err(to_value_error)?;
    let sources = in_groups(tensors.iter().map(placed), &groups)?;
    let (bytes, report) = store.watcher.run(py, callback, || {
        let engine = engine.map(|e| Arc::clone(&e.get().0));
        let options = SaveOptions {
            progress: Some(progress()),
            engine,
            staged: staged.map(staged_callback),
            host_changes,
            staging_memory,
            ..SaveOptions::default()
        };
        let part = store.inner.save_part(&of, rank, &sources, &options)?;
        Ok((part.to_bytes(&of)?, part.report))
    })?;
    Ok((PyBytes::new(py, &bytes), report.bytes_in, report.bytes_out))
}

/// Lists a checkpoint whose parts are stored. `parts`: the results of `save_part`, in the order of ranks. Returns
/// the entry and the report, as JSON.
#[pyfunction]
#[pyo3(signature = (store, part_of, step, parts, *, blobs, metadata, metrics, tags))]
#[expect(clippy::too_many_arguments, reason = "keywords")]
pub(crate) fn publish_parts(
    py: Python<'_>,
    store: &Store,
    part_of: &str,
    step: u64,
    parts: Vec<Option<PyBackedBytes>>,
    blobs: HashMap<String, PyBackedBytes>,
    metadata: BTreeMap<String, String>,
    metrics: BTreeMap<String, f64>,
    tags: BTreeMap<String, String>,
) -> PyResult<String> {
    let of: PartOf = serde_json::from_str(part_of).map_err(to_value_error)?;
    let contents = contents(None, blobs, metadata)?;
    let parts: Vec<_> =
        parts.iter().map(|p| p.as_ref().map(|p| Bytes::copy_from_slice(p))).collect();
    let saved = store.watcher.run(py, None, || {
        let part = |p: &Option<Bytes>| p.as_ref().map(|p| RankPart::from_bytes(p, &of)).transpose();
        let parts = parts.iter().map(part).collect::<s4weights::Result<Vec<_>>>()?;
        let progress = Some(progress());
        let options = SaveOptions { contents, metrics, tags, progress, ..SaveOptions::default() };
        store.inner.publish_parts(&of, step, parts, &options)
    })?;
    Ok(saved_json(&saved))
}

/// Abandons a checkpoint and deletes the parts stored so far.
#[pyfunction]
pub(crate) fn give_up_parts(py: Python<'_>, store: &Store, part_of: &str) -> PyResult<()> {
    let of: PartOf = serde_json::from_str(part_of).map_err(to_value_error)?;
    store.watcher.run(py, None, || {
        store.inner.give_up_parts(&of);
        Ok(())
    })
}
