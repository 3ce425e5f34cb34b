//! What PyTorch says of a tensor.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{intern, sync::PyOnceLock};
use s4weights::DType;

/// PyTorch's classes and functions, looked up once for an object.
pub(super) struct Torch<'py> {
    pub(super) tensor: Bound<'py, PyType>,
    pub(super) parameter: Bound<'py, PyType>,
    pub(super) size: Bound<'py, PyType>,
    pub(super) dtype: Bound<'py, PyType>,
    pub(super) device: Bound<'py, PyType>,
    strided: Bound<'py, PyAny>,
    is_wrapped: Bound<'py, PyAny>,
    /// Names of dimensions, which PyTorch gives up.
    may_have_names: bool,
}

/// The dtypes that were met, of which there are few.
#[derive(Default)]
pub(super) struct DTypes(Vec<(Py<PyAny>, Arc<TorchDType>)>);

/// A dtype of PyTorch's.
pub(super) struct TorchDType {
    /// Its name without `torch.`.
    pub(super) name: String,
    /// What the format calls it. One that it has no name for is stored as bytes.
    pub(super) stored: DType,
    /// Bytes of an element.
    pub(super) item: u64,
    is_complex: bool,
}

/// Where a storage is.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Device {
    Host,
    Cuda(u32),
    Other,
}

impl DTypes {
    /// What is known of a dtype.
    pub(super) fn get(&mut self, dtype: &Bound<'_, PyAny>) -> PyResult<Arc<TorchDType>> {
        if let Some((_, info)) = self.0.iter().find(|(known, _)| known.is(dtype)) {
            return Ok(Arc::clone(info));
        }
        let name = dtype.str()?.to_str()?.trim_start_matches("torch.").to_owned();
        let info = Arc::new(TorchDType {
            stored: name.parse().unwrap_or(DType::Bytes),
            item: dtype.getattr("itemsize")?.extract()?,
            is_complex: dtype.getattr("is_complex")?.is_truthy()?,
            name,
        });
        self.0.push((dtype.clone().unbind(), Arc::clone(&info)));
        Ok(info)
    }
}

impl<'py> Torch<'py> {
    pub(super) fn new(py: Python<'py>) -> PyResult<Self> {
        static TORCH: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let torch = TORCH.get_or_try_init(py, || py.import("torch").map(Bound::unbind))?.bind(py);
        let of = |name: &str| Ok::<_, PyErr>(torch.getattr(name)?.cast_into::<PyType>()?);
        let functorch = torch.getattr("_C")?.getattr("_functorch")?;
        let tensor = of("Tensor")?;
        Ok(Self {
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into()?,
            size: of("Size")?,
            dtype: of("dtype")?,
            device: of("device")?,
            strided: torch.getattr("strided")?,
            is_wrapped: functorch.getattr("is_functorch_wrapped_tensor")?,
            may_have_names: tensor.hasattr("names")?,
            tensor,
        })
    }

    /// Whether an object is of PyTorch's own classes of tensors, not of one that others derive.
    pub(super) fn is_own_tensor(&self, obj: &Bound<'py, PyAny>) -> bool {
        let kind = obj.get_type();
        kind.is(&self.tensor) || kind.is(&self.parameter)
    }

    /// Where a tensor of PyTorch's own classes is and what type it has, if it is elements at strides of a
    /// storage of the host or of a CUDA device and all its state is what those classes have as attributes.
    pub(super) fn plain(
        &self,
        tensor: &Bound<'py, PyAny>,
        dtypes: &mut DTypes,
    ) -> PyResult<Option<(Device, Arc<TorchDType>)>> {
        // Wrappers refuse one question or another.
        match self.ask_plain(tensor, dtypes) {
            Err(e) if e.is_instance_of::<PyRuntimeError>(tensor.py()) => Ok(None),
            answer => answer,
        }
    }

    fn ask_plain(
        &self,
        tensor: &Bound<'py, PyAny>,
        dtypes: &mut DTypes,
    ) -> PyResult<Option<(Device, Arc<TorchDType>)>> {
        let py = tensor.py();
        if !tensor.getattr(intern!(py, "layout"))?.is(&self.strided) {
            return Ok(None);
        }
        let on_host = is(tensor, intern!(py, "is_cpu"))?;
        if !(on_host || is(tensor, intern!(py, "is_cuda"))?)
            || is(tensor, intern!(py, "is_quantized"))?
            || is(tensor, intern!(py, "is_nested"))?
            || says(tensor, intern!(py, "_is_zerotensor"))?
            || self.is_wrapped.call1((tensor,))?.is_truthy()?
            || is(tensor, intern!(py, "__dict__"))?
            || is(tensor, intern!(py, "_backward_hooks"))?
            || says(tensor, intern!(py, "is_neg"))?
            || (self.may_have_names && has_names(tensor)?)
        {
            return Ok(None);
        }
        let dtype = dtypes.get(&tensor.getattr(intern!(py, "dtype"))?)?;
        if dtype.is_complex && says(tensor, intern!(py, "is_conj"))? {
            return Ok(None);
        }
        let device = if on_host {
            Device::Host
        } else {
            Device::Cuda(tensor.call_method0(intern!(py, "get_device"))?.extract()?)
        };
        Ok(Some((device, dtype)))
    }
}

/// Where a storage of PyTorch's is.
pub(super) fn device_of(storage: &Bound<'_, PyAny>) -> PyResult<Device> {
    let device = storage.getattr("device")?;
    Ok(match device.getattr("type")?.extract::<String>()?.as_str() {
        "cpu" => Device::Host,
        "cuda" => Device::Cuda(device.getattr("index")?.extract()?),
        _ => Device::Other,
    })
}

/// What PyTorch calls the device of a storage.
pub(super) fn location_tag(storage: &Bound<'_, PyAny>) -> PyResult<String> {
    let torch = storage.py().import("torch")?;
    torch.getattr("serialization")?.call_method1("location_tag", (storage,))?.extract()
}

/// Sizes of a tensor's dimensions, or its strides.
pub(super) fn sizes(tuple: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    tuple.cast::<PyTuple>()?.iter().map(|size| size.extract()).collect()
}

/// The strides of a contiguous tensor, in elements.
pub(super) fn row_major(shape: &[u64]) -> Vec<u64> {
    let (mut strides, mut step) = (vec![], 1_u64);
    for &size in shape.iter().rev() {
        strides.push(step);
        step = step.saturating_mul(size.max(1));
    }
    strides.reverse();
    strides
}

fn is(obj: &Bound<'_, PyAny>, attribute: &Bound<'_, pyo3::types::PyString>) -> PyResult<bool> {
    let value = obj.getattr(attribute)?;
    match value.cast::<PyDict>() {
        Ok(dict) => Ok(!dict.is_empty()),
        Err(_) => value.is_truthy(),
    }
}

fn says(obj: &Bound<'_, PyAny>, method: &Bound<'_, pyo3::types::PyString>) -> PyResult<bool> {
    obj.call_method0(method)?.is_truthy()
}

fn has_names(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let names = tensor.getattr(intern!(tensor.py(), "names"))?;
    for name in names.cast::<PyTuple>()? {
        if name.is_truthy()? {
            return Ok(true);
        }
    }
    Ok(false)
}
