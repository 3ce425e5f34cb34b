//! `_core.CudaEngine`, and tensors in the memory of CUDA devices.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use s4weights::cuda::{Chunks, Cuda, CudaError, CudaOptions, DeviceMemory, GpuError};
use s4weights::{DType, Error, TensorSource};

use crate::watch::watched;
use crate::writer::{to_value_error, values};

/// Number of the device, or -1 for the host; handle of the stream that the memory was used on.
type Where = (i64, u64);

/// Name, dtype, shape, address, bytes, and where.
pub(crate) type PlacedTensor = (String, String, Vec<u64>, usize, usize, Where);

/// Number, address, bytes, and where.
pub(crate) type DeviceRequest = (usize, usize, usize, Where);

/// Encodes and decodes on CUDA devices. Calls may come from several threads at once.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct CudaEngine(pub(crate) Arc<s4weights::cuda::CudaEngine>);

#[pymethods]
impl CudaEngine {
    #[new]
    fn new(py: Python<'_>, scratch: u64) -> PyResult<Self> {
        let options = CudaOptions { scratch, ..CudaOptions::default() };
        watched(py, None, || {
            let cuda = Cuda::discover().map_err(of_cuda)?;
            Ok(Self(Arc::new(s4weights::cuda::CudaEngine::new(cuda, options))))
        })
    }

    /// Opens a device, takes the scratch memory and gives it back: what fails then would fail later.
    fn open(&self, py: Python<'_>, ordinal: u32) -> PyResult<()> {
        // SAFETY: no bytes are used; the legacy default stream is always there.
        let nothing = unsafe { DeviceMemory::new(ordinal, 0, 0, 0) };
        let open = || self.0.decode::<CudaError>(&[nothing], None, |_| Ok(()));
        watched(py, None, || open().map_err(of_engine))
    }

    /// Chunks done by the kernels, by the CPU, and by the CPU after the kernels refused them.
    fn chunks(&self) -> (u64, u64, u64) {
        let Chunks { device, host, refused } = self.0.chunks();
        (device, host, refused)
    }

    /// The most device memory, in bytes, that was held at once.
    fn scratch_high_water(&self, py: Python<'_>, ordinal: u32) -> PyResult<u64> {
        watched(py, None, || self.0.scratch_high_water(ordinal).map_err(of_engine))
    }
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

/// A tensor's description and, for one of the host, its values.
pub(crate) fn placed(tensor: &PlacedTensor) -> PyResult<TensorSource<'_>> {
    let (name, dtype, shape, address, nbytes, (ordinal, stream)) = tensor;
    let dtype: DType = dtype.parse().map_err(to_value_error)?;
    Ok(if *ordinal < 0 {
        TensorSource::new(name, dtype, shape, values(name, *address, *nbytes)?)
    } else {
        let memory = memory(*address, *nbytes, (*ordinal, *stream))?;
        TensorSource::new(name, dtype, shape, memory)
    })
}

/// Memory to read into: disjoint, since kernels fill it at once.
pub(crate) fn requests(list: &[DeviceRequest]) -> PyResult<Vec<(usize, DeviceMemory)>> {
    let mut spans: Vec<_> = list.iter().filter(|r| r.2 > 0).map(|r| (r.3.0, r.1, r.2)).collect();
    spans.sort_unstable();
    if spans.windows(2).any(|w| w[0].0 == w[1].0 && w[1].1 - w[0].1 < w[0].2) {
        return Err(PyValueError::new_err("buffers overlap"));
    }
    list.iter().map(|r| Ok((r.0, memory(r.1, r.2, r.3)?))).collect()
}

fn memory(address: usize, nbytes: usize, (ordinal, stream): Where) -> PyResult<DeviceMemory> {
    let ordinal = u32::try_from(ordinal);
    let ordinal = ordinal.map_err(|_| PyValueError::new_err("a device's number expected"))?;
    // SAFETY:
    // - The caller, the package's own Python part, passes the address and size of a storage on that
    //   device, and that device's current stream; it keeps both alive during the call.
    // - What is read into it has just made, or was given by its user to be overwritten.
    // - Whoever changes the values meanwhile from another stream saves some mixture of both, as with
    //   any save. The engine itself checks that the bytes are memory of the device.
    Ok(unsafe { DeviceMemory::new(ordinal, address as u64, nbytes as u64, stream) })
}
