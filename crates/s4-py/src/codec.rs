//! `_core.TensorCodec`: the codec without a file around it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use s4weights::{DType, MemoryOptions, TensorView};

use crate::arguments::values;
use crate::errors::{to_python, to_value_error};
use crate::reader::buffers;
use crate::watch::{detached, watched};

/// Compresses and decompresses tensors in memory, one after the other.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct TensorCodec(s4weights::TensorCodec);

/// A compressed tensor in memory.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct Compressed(s4weights::Compressed);

#[pymethods]
impl Compressed {
    fn __len__(&self) -> usize {
        self.0.bytes()
    }
}

#[pymethods]
impl TensorCodec {
    #[new]
    fn new(
        py: Python<'_>,
        preset: &str,
        threads: Option<usize>,
        simd: Option<&str>,
    ) -> PyResult<Self> {
        let options = MemoryOptions {
            preset: preset.parse().map_err(PyValueError::new_err)?,
            threads,
            simd: simd.map(str::parse).transpose().map_err(PyValueError::new_err)?,
        };
        watched(py, None, || s4weights::TensorCodec::new(options)).map(Self)
    }

    fn compress(
        &self,
        py: Python<'_>,
        address: usize,
        nbytes: usize,
        dtype: String,
        shape: Vec<u64>,
    ) -> PyResult<Compressed> {
        let dtype: DType = dtype.parse().map_err(to_value_error)?;
        let data = values("tensor", address, nbytes)?;
        let view = TensorView { dtype, shape: &shape, data };
        let bytes = view.shape.iter().try_fold(view.dtype.size() as u64, |n, &d| n.checked_mul(d));
        if bytes != Some(nbytes as u64) {
            return Err(to_value_error(format!(
                "{nbytes} bytes do not match shape {:?}",
                view.shape
            )));
        }
        let done = detached(py, || self.0.compress(&view))?;
        done.map(Compressed).map_err(|e| to_python(py, e))
    }

    fn decompress(
        &self,
        py: Python<'_>,
        tensor: &Compressed,
        address: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        // SAFETY: the caller passes memory that it owns and does not use during the call.
        let mut requests = unsafe { buffers(&[(0, address, nbytes)])? };
        let done = detached(py, move || match requests.as_mut_slice() {
            [(_, to)] => self.0.decompress(&tensor.0, to),
            _ => Ok(()),
        })?;
        done.map_err(|e| to_python(py, e))
    }
}
