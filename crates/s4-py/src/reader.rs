//! `_core.Reader`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use s4weights::format::manifest::Form;
use s4weights::{ArrayView, ReadOptions, Slice, Source, StorageOptions, check_storage_options};

use crate::arguments::{self, DeviceRequest};
use crate::device::CudaEngine;
use crate::errors::to_python;
use crate::watch::{Watcher, progress};

/// Tensor index, address, bytes.
type Request = (usize, usize, usize);

/// Name, dtype, shape, bytes.
type TensorInfo<'a, 'py> = (&'a str, &'static str, Bound<'py, PyTuple>, u64);

/// Reads one file. Calls may come from several threads at the same time.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct Reader {
    inner: Arc<s4weights::Reader>,
    watcher: Watcher,
}

impl Reader {
    /// Wraps the reader of a checkpoint that a store has opened.
    pub(crate) fn of(inner: Arc<s4weights::Reader>, watcher: Watcher) -> Self {
        Self { inner, watcher }
    }
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (path, url, data, threads, storage_options, trusted=false, start=0, end=None))]
    #[expect(clippy::too_many_arguments, reason = "Python's side names them")]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        url: Option<String>,
        data: Option<PyBackedBytes>,
        threads: Option<usize>,
        storage_options: StorageOptions,
        trusted: bool,
        start: usize,
        end: Option<usize>,
    ) -> PyResult<Self> {
        let watcher = Watcher::of(url.as_deref());
        if url.is_none() {
            check_storage_options(&storage_options).map_err(|e| to_python(py, e))?;
        }
        let source = match (path, url, data) {
            (Some(path), None, None) => Source::Path(path),
            (None, Some(url), None) => Source::Url(url, storage_options),
            (None, None, Some(data)) => {
                let data = Bytes::from_owner(data);
                let end = end.unwrap_or(data.len());
                if start > end || end > data.len() {
                    return Err(PyValueError::new_err("start and end are out of range"));
                }
                Source::Bytes(data.slice(start..end))
            }
            _ => return Err(PyValueError::new_err("expected exactly one of path, URL and bytes")),
        };
        let options =
            ReadOptions { threads, progress: Some(progress()), trusted, ..Default::default() };
        let open = || s4weights::Reader::open(source, options);
        let inner = watcher.run(py, None, open)?;
        Ok(Self { inner: Arc::new(inner), watcher })
    }

    /// Opens a checkpoint of a store from what `Store.stored_bytes` returned.
    #[staticmethod]
    fn in_memory(
        py: Python<'_>,
        index: PyBackedBytes,
        objects: Vec<PyBackedBytes>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let watcher = Watcher::of(None);
        let objects = objects.into_iter().map(Bytes::from_owner).collect();
        let options = ReadOptions { threads, progress: Some(progress()), ..Default::default() };
        let open = || s4weights::Reader::open_in_memory(Bytes::from_owner(index), objects, options);
        let inner = watcher.run(py, None, open)?;
        Ok(Self { inner: Arc::new(inner), watcher })
    }

    /// Sets the parent.
    fn set_parent(&self, py: Python<'_>, parent: PyRef<'_, Self>) -> PyResult<()> {
        self.inner.set_parent(Arc::clone(&parent.inner)).map_err(|e| to_python(py, e))
    }

    /// The hash that identifies the checkpoint, and that of its parent, in hexadecimal.
    fn digests(&self) -> (String, Option<String>) {
        let parent = self.inner.parent_digest().map(|d| d.to_string());
        (self.inner.digest().to_string(), parent)
    }

    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<TensorInfo<'_, 'py>>> {
        let tensors = self.inner.tensors();
        tensors.map(|t| Ok((t.name, t.dtype.name(), PyTuple::new(py, t.shape)?, t.bytes))).collect()
    }

    fn form(&self) -> &'static str {
        match self.inner.manifest().form {
            Form::Tensors => "tensors",
            Form::Tree => "tree",
            Form::Pickle => "pickle",
        }
    }

    fn tree(&self) -> Option<&str> {
        self.inner.tree()
    }

    fn blob<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let blob = self.watcher.run(py, None, || self.inner.blob(name))?;
        Ok(PyBytes::new(py, &blob))
    }

    /// Decodes tensors into memory. `new`: the memory was not used before, so large pages are worth asking for.
    #[pyo3(signature = (requests, progress, new=false))]
    fn read_into(
        &self,
        py: Python<'_>,
        requests: Vec<Request>,
        progress: Option<Py<PyAny>>,
        new: bool,
    ) -> PyResult<()> {
        // SAFETY: The caller, the package's own Python part, passes the addresses and sizes of
        // storages that it keeps alive during the call. It has just made them and shows them to no
        // one else, or its user gave them to be overwritten.
        let mut buffers = unsafe { buffers(&requests)? };
        self.watcher.run(py, progress, move || match new {
            true => self.inner.read_into_new(&mut buffers),
            false => self.inner.read_into(&mut buffers),
        })
    }

    /// The tensors that are best read by one call; `None`: all.
    fn read_together(&self) -> Option<Vec<usize>> {
        self.inner.read_together()
    }

    /// Decodes part of an array that lies within a tensor, and only the chunks that it needs. `array`: its first
    /// byte, bytes per element and shape; `part`: start and end in each dimension; `memory`: address and bytes of
    /// the destination.
    fn read_view(
        &self,
        py: Python<'_>,
        number: usize,
        array: (u64, u64, Vec<u64>),
        part: Vec<(u64, u64)>,
        memory: (usize, usize),
    ) -> PyResult<()> {
        let (offset, item, shape) = array;
        // SAFETY: as in `read_into`.
        let mut buffers = unsafe { buffers(&[(number, memory.0, memory.1)])? };
        let slice = Slice(part.into_iter().map(|(start, end)| start..end).collect());
        let view = ArrayView { offset, item, shape: &shape };
        let Some((_, to)) = buffers.pop() else { return Ok(()) };
        self.watcher.run(py, None, move || self.inner.read_view(number, view, &slice, to))
    }

    /// The metadata stored in the file.
    fn metadata(&self) -> BTreeMap<String, String> {
        self.inner.manifest().metadata.clone()
    }

    /// As `read_into`, into device memory. All values are in place when this returns.
    fn read_into_device(
        &self,
        py: Python<'_>,
        engine: Py<CudaEngine>,
        requests: Vec<DeviceRequest>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let requests = arguments::requests(&requests)?;
        let engine = engine.get();
        self.watcher.run(py, progress, || self.inner.read_into_device(&engine.0, &requests))
    }

    /// As `read_into`, but into memory that holds the parent's values: decoding uses them.
    fn apply_into(
        &self,
        py: Python<'_>,
        requests: Vec<Request>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        // SAFETY: The caller, the package's own Python part, passes the addresses and sizes of
        // storages that it keeps alive during the call; its user was told that they change.
        let mut buffers = unsafe { buffers(&requests)? };
        self.watcher.run(py, progress, move || self.inner.apply_into(&mut buffers))
    }

    /// As `apply_into`, for device memory. Returns the positions of the requests that could not be applied: their
    /// memory holds unspecified values and must be filled by reading.
    fn apply_into_device(
        &self,
        py: Python<'_>,
        engine: Py<CudaEngine>,
        requests: Vec<DeviceRequest>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<usize>> {
        let requests = arguments::requests(&requests)?;
        let engine = engine.get();
        self.watcher.run(py, progress, || self.inner.apply_into_device(&engine.0, &requests))
    }

    /// A description of the file (versions, tensors, sizes, metadata), as JSON.
    fn inspect(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&self.watcher.run(py, None, || self.inner.inspect(false))?)
    }

    /// Reads all data and checks all checksums. Returns a report as JSON.
    fn verify(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&self.watcher.run(py, None, || self.inner.verify())?)
    }
}

/// Memory to read into: disjoint, so that threads can fill it in parallel.
///
/// # Safety
/// For all of `'a`, each request's address and size are
/// - within one allocation, initialised or of a type without invalid values,
/// - and accessed by no one else.
pub(crate) unsafe fn buffers<'a>(requests: &[Request]) -> PyResult<Vec<(usize, &'a mut [u8])>> {
    let mut spans: Vec<_> = requests.iter().filter(|r| r.2 > 0).map(|r| (r.1, r.2)).collect();
    spans.sort_unstable();
    let overlap = spans.windows(2).any(|w| w[1].0 - w[0].0 < w[0].1);
    if overlap || spans.first().is_some_and(|s| s.0 == 0) {
        return Err(PyValueError::new_err("buffers overlap or have no address"));
    }
    let buffer = |&(number, address, nbytes): &Request| {
        if nbytes == 0 {
            return (number, [].as_mut_slice());
        }
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: The caller vouches for the memory; that no two buffers overlap was checked.
        (number, unsafe { std::slice::from_raw_parts_mut(start, nbytes) })
    };
    Ok(requests.iter().map(buffer).collect())
}

fn to_json(report: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(report).map_err(|e| PyValueError::new_err(e.to_string()))
}
