//! `_core.CudaEngine`, and copies of tensors in the memory of CUDA devices and of the host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use s4weights::Error;
use s4weights::cuda::{
    Chunks, Cuda, CudaError, CudaOptions, DeviceMemory, FrameMemory, GpuError, StagedCopies,
};

use crate::arguments::{Where, memory};
use crate::object::Sources;
use crate::watch::watched;

/// Encodes and decodes on CUDA devices. Calls may come from several threads at the same time.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct CudaEngine(pub(crate) Arc<s4weights::cuda::CudaEngine>);

/// Copies of tensors on CUDA devices, in memory allocated from the driver, until they are freed.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct DeviceCopies {
    by_device: Mutex<Option<Arc<BTreeMap<u32, StagedCopies>>>>,
    places: Vec<(usize, Where)>,
    bytes: u64,
}

/// Copies of CUDA tensors in page-locked host memory, until they are freed.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct HostCopies(Mutex<Option<s4weights::cuda::HostCopies>>);

#[pymethods]
impl CudaEngine {
    #[new]
    fn new(py: Python<'_>, scratch: u64, frames: u64) -> PyResult<Self> {
        let options = CudaOptions { scratch, frames, ..CudaOptions::default() };
        watched(py, None, || {
            let cuda = Cuda::discover().map_err(of_cuda)?;
            Ok(Self(Arc::new(s4weights::cuda::CudaEngine::new(cuda, options))))
        })
    }

    /// Opens a device, and allocates and frees its scratch memory, so that problems show up now.
    fn open(&self, py: Python<'_>, ordinal: u32) -> PyResult<()> {
        watched(py, None, || self.0.open(ordinal).map_err(of_engine))
    }

    /// Queues copies of the values on devices, on the streams that they are used on: after the work that is queued
    /// there already, and before any that is queued later. `leave`: bytes of memory that must stay free on each
    /// device, by ordinal.
    fn copy(
        &self,
        py: Python<'_>,
        sources: &Sources,
        leave: BTreeMap<u32, u64>,
    ) -> PyResult<DeviceCopies> {
        let tensors = sources.on_devices();
        let mut lists = BTreeMap::<u32, (Vec<usize>, Vec<DeviceMemory>)>::new();
        for (i, &(address, nbytes, place)) in tensors.iter().enumerate() {
            let memory = memory(address, nbytes, place)?;
            let (numbers, list) = lists.entry(memory.ordinal()).or_default();
            numbers.push(i);
            list.push(memory);
        }
        watched(py, None, || {
            let mut places = vec![(0, (-1, 0)); tensors.len()];
            let mut by_device = BTreeMap::new();
            for (ordinal, (numbers, list)) in lists {
                let stager = self.0.stager(ordinal).map_err(of_cuda)?;
                let leave = leave.get(&ordinal).copied().unwrap_or(0);
                let copies = stager.copy(&list, leave).map_err(of_cuda)?;
                for (i, m) in numbers.into_iter().zip(copies.memory()) {
                    places[i] = (m.address() as usize, (i64::from(ordinal), m.stream()));
                }
                by_device.insert(ordinal, copies);
            }
            let bytes = by_device.values().map(StagedCopies::bytes).sum();
            Ok(DeviceCopies { by_device: Mutex::new(Some(Arc::new(by_device))), places, bytes })
        })
    }

    /// Copies the values on devices to page-locked host memory, which is kept for later copies. When this returns, the
    /// values may be changed. `room`: bytes of memory that copies may take on each device, by ordinal, until they have
    /// arrived on the host.
    fn copy_to_host(
        &self,
        py: Python<'_>,
        sources: &Sources,
        room: BTreeMap<u32, u64>,
    ) -> PyResult<HostCopies> {
        let tensors = sources.on_devices();
        let memory = tensors.iter().map(|&(address, nbytes, place)| memory(address, nbytes, place));
        let memory = memory.collect::<PyResult<Vec<_>>>()?;
        watched(py, None, || {
            let copies = self.0.copy_to_host(&memory, &room).map_err(of_cuda)?;
            Ok(HostCopies(Mutex::new(Some(copies))))
        })
    }

    /// Free and total bytes of a device's memory, as the driver counts them.
    fn memory(&self, py: Python<'_>, ordinal: u32) -> PyResult<(u64, u64)> {
        watched(py, None, || {
            let stager = self.0.stager(ordinal).map_err(of_cuda)?;
            stager.memory().map_err(of_cuda)
        })
    }

    /// The handle of a stream of the engine's own that waits for the work queued on `stream` so far.
    fn after(&self, py: Python<'_>, ordinal: u32, stream: u64) -> PyResult<u64> {
        watched(py, None, || {
            let stager = self.0.stager(ordinal).map_err(of_cuda)?;
            // SAFETY: the caller, the package's own Python part, passes the device's current stream.
            unsafe { stager.after(stream) }.map_err(of_cuda)
        })
    }

    /// Chunks done by the kernels, by the CPU, and by the CPU after the kernels refused them.
    fn chunks(&self) -> (u64, u64, u64) {
        let Chunks { device, host, refused } = self.0.chunks();
        (device, host, refused)
    }

    /// Page-locked memory for encoded frames and copies: bytes taken from the system, the idle part of them, and the
    /// limit; and how many times memory was taken.
    fn frame_memory(&self) -> (u64, u64, u64, u64) {
        let FrameMemory { taken, idle, budget, pieces, .. } = self.0.frame_memory();
        (taken, idle, budget, pieces)
    }

    /// Limits the page-locked memory for encoded frames; idle memory beyond that is returned to the system immediately.
    fn limit_frame_memory(&self, py: Python<'_>, bytes: u64) {
        py.detach(|| self.0.limit_frame_memory(bytes));
    }

    /// Allocates one more piece of that memory from the system, unless there is already room for `bytes` of frames or
    /// the limit is reached. Returns whether memory was allocated.
    fn grow_frame_memory(&self, py: Python<'_>, bytes: u64) -> bool {
        py.detach(|| self.0.grow_frame_memory(bytes))
    }

    /// Returns idle page-locked memory for encoded frames to the system.
    fn trim_frame_memory(&self, py: Python<'_>) {
        py.detach(|| self.0.trim_frame_memory());
    }

    /// The most memory, in bytes, that the engine held on a device at one time.
    fn scratch_high_water(&self, py: Python<'_>, ordinal: u32) -> u64 {
        py.detach(|| self.0.scratch_high_water(ordinal))
    }
}

#[pymethods]
impl DeviceCopies {
    /// Address and place of each copy, in the order of the tensors. Work on the stream of a place runs after the
    /// copy.
    fn places(&self) -> Vec<(usize, Where)> {
        self.places.clone()
    }

    /// Bytes of device memory that the copies take.
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Waits until the copies are complete. Does nothing once they are freed.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let Some(all) = self.held() else { return Ok(()) };
        watched(py, None, || {
            all.values().try_for_each(StagedCopies::wait).map_err(of_cuda)?;
            drop(all);
            Ok(())
        })
    }

    /// Makes work that is queued on a stream from now on wait for the copies.
    fn hold(&self, py: Python<'_>, ordinal: u32, stream: u64) -> PyResult<()> {
        let Some(all) = self.held() else { return Ok(()) };
        watched(py, None, || match all.get(&ordinal) {
            // SAFETY: the caller, the package's own Python part, passes the device's current stream.
            Some(copies) => unsafe { copies.hold(stream) }.map_err(of_cuda),
            None => Ok(()),
        })
    }

    /// Frees the device memory. The copies must no longer be in use.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let all = lock(&self.by_device).take();
        watched(py, None, || {
            drop(all);
            Ok(())
        })
    }
}

#[pymethods]
impl HostCopies {
    /// The address of each copy, in the order of the tensors.
    fn addresses(&self) -> Vec<u64> {
        let copies = lock(&self.0);
        copies.iter().flat_map(s4weights::cuda::HostCopies::addresses).collect()
    }

    /// Waits until all copies have arrived, and frees what they took of devices. Does nothing once they are freed.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        watched(py, None, || match &mut *lock(&self.0) {
            Some(copies) => copies.wait().map_err(of_cuda),
            None => Ok(()),
        })
    }

    /// Bytes of host memory that the copies take.
    fn nbytes(&self) -> u64 {
        lock(&self.0).as_ref().map_or(0, s4weights::cuda::HostCopies::bytes)
    }

    /// Releases the memory for later copies. These copies must no longer be in use.
    fn free(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.0).take()));
    }
}

impl DeviceCopies {
    /// The copies; `None` once they are freed.
    fn held(&self) -> Option<Arc<BTreeMap<u32, StagedCopies>>> {
        lock(&self.by_device).clone()
    }
}

fn lock<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of_cuda(source: GpuError) -> Error {
    Error::Device { target: "CUDA".into(), source }
}

fn of_engine(e: CudaError) -> Error {
    match e {
        CudaError::Gpu(source) => of_cuda(source),
        CudaError::Format { source, .. } => Error::Format { target: "CUDA".into(), source },
    }
}
