//! `_core.Writer`.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use s4weights::{
    DType, Preset, StorageOptions, Target, TensorSource, WriteOptions, check_storage_options,
};

use crate::arguments::{contents, parse_roles, values};
use crate::device::CudaEngine;
use crate::errors::{to_python, to_value_error};
use crate::object::Sources;
use crate::sink::PySink;
use crate::watch::{Watcher, progress};

/// Name, dtype, shape, address, bytes.
type Tensor = (String, String, Vec<u64>, usize, usize);

/// Writes one file. It cannot be used after `finish`, `abort` or an error.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct Writer {
    // Taken out while a call runs; the last call does not put it back.
    inner: Mutex<Option<s4weights::Writer>>,
    watcher: Watcher,
}

#[pymethods]
impl Writer {
    #[new]
    #[pyo3(signature = (path, url, stream, preset, threads, storage_options, roles=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "a target, options, and what is known of tensors"
    )]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        url: Option<String>,
        stream: Option<Py<PyAny>>,
        preset: &str,
        threads: Option<usize>,
        storage_options: StorageOptions,
        roles: Option<String>,
    ) -> PyResult<Self> {
        let watcher = Watcher::of(url.as_deref());
        if url.is_none() {
            check_storage_options(&storage_options).map_err(|e| to_python(py, e))?;
        }
        let target = match (path, url, stream) {
            (Some(path), None, None) => Target::Path(path),
            (None, Some(url), None) => Target::Url(url, storage_options),
            (None, None, Some(stream)) => {
                Target::Stream(Box::new(PySink::new(stream.into_bound(py))?))
            }
            _ => return Err(PyValueError::new_err("expected exactly one of path, URL and stream")),
        };
        let preset: Preset = preset.parse().map_err(PyValueError::new_err)?;
        let options =
            WriteOptions { preset, threads, progress: Some(progress()), ..Default::default() };
        let roles = parse_roles(roles)?;
        let create = || {
            let mut writer = s4weights::Writer::create(target, options)?;
            roles.map_or(Ok(()), |roles| writer.declare(roles))?;
            Ok(writer)
        };
        let inner = watcher.run(py, None, create)?;
        Ok(Self { inner: Mutex::new(Some(inner)), watcher })
    }

    fn write(
        &self,
        py: Python<'_>,
        tensors: Vec<Tensor>,
        groups: Vec<u8>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let sources = in_groups(tensors.iter().map(source), &groups)?;
        let mut writer = self.take()?;
        writer.expect(sources.iter().map(|s| s.values.bytes()).sum());
        let work = move || writer.write(&sources).map(|()| writer);
        let writer = self.watcher.run(py, progress, work)?;
        self.lock().replace(writer);
        Ok(())
    }

    /// Encodes the values with indices from `first` up to, not including, `end`; those on CUDA devices need an
    /// engine. Their memory is not read after this returns. `ahead`: bytes of encoded device values that may then
    /// still wait in page-locked memory to be written.
    #[pyo3(signature = (engine, sources, first, end, progress, ahead=None))]
    #[expect(clippy::too_many_arguments, reason = "what, which of it, and how")]
    fn write_sources(
        &self,
        py: Python<'_>,
        engine: Option<Py<CudaEngine>>,
        sources: &Sources,
        first: usize,
        end: usize,
        progress: Option<Py<PyAny>>,
        ahead: Option<usize>,
    ) -> PyResult<()> {
        let list = sources.list();
        let some = list.get(first..end).ok_or_else(|| PyIndexError::new_err((first, end)))?;
        let tensors = some.iter().map(|s| s.tensor()).collect::<PyResult<Vec<_>>>()?;
        let mut writer = self.take()?;
        writer.expect(sources.bytes());
        if let Some(engine) = engine {
            writer.set_engine(Arc::clone(&engine.get().0));
            writer.set_ahead(ahead);
        }
        let work = move || writer.write(&tensors).map(|()| writer);
        let writer = self.watcher.run(py, progress, work)?;
        self.lock().replace(writer);
        Ok(())
    }

    /// Makes the file visible. Returns a report on the written data, as JSON.
    fn finish(
        &self,
        py: Python<'_>,
        tree: Option<String>,
        blobs: HashMap<String, PyBackedBytes>,
        metadata: BTreeMap<String, String>,
    ) -> PyResult<String> {
        let contents = contents(tree, blobs, metadata)?;
        let writer = self.take()?;
        let report = self.watcher.run(py, None, move || writer.finish(contents))?;
        serde_json::to_string(&report).map_err(to_value_error)
    }

    /// Removes all written data. Does nothing after `finish`.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.lock().take();
        self.watcher.run(py, None, || {
            drop(writer);
            Ok(())
        })
    }
}

impl Writer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<s4weights::Writer>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> PyResult<s4weights::Writer> {
        self.lock().take().ok_or_else(|| {
            PyRuntimeError::new_err("the writer has finished, has failed or is in use")
        })
    }
}

/// The tensors with their groups; if `groups` is empty, all are in the first group.
pub(crate) fn in_groups<'a>(
    tensors: impl ExactSizeIterator<Item = PyResult<TensorSource<'a>>>,
    groups: &[u8],
) -> PyResult<Vec<TensorSource<'a>>> {
    if !groups.is_empty() && groups.len() != tensors.len() {
        let (groups, tensors) = (groups.len(), tensors.len());
        return Err(PyValueError::new_err(format!("{groups} groups for {tensors} tensors")));
    }
    let groups = groups.iter().copied().chain(std::iter::repeat(0));
    tensors.zip(groups).map(|(tensor, group)| Ok(tensor?.in_group(group))).collect()
}

fn source(tensor: &Tensor) -> PyResult<TensorSource<'_>> {
    let (name, dtype, shape, address, nbytes) = tensor;
    let dtype: DType = dtype.parse().map_err(to_value_error)?;
    Ok(TensorSource::new(name, dtype, shape, values(name, *address, *nbytes)?))
}
