//! Describes tensors by asking PyTorch.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyType};
use s4weights::DType;

use super::dlpack::{Described, DlDType, Exchange};
use super::shape::{Shape, sizes};

/// PyTorch's classes and functions, looked up once per saved object.
pub(super) struct Torch<'py> {
    pub(super) tensor: Bound<'py, PyType>,
    pub(super) parameter: Bound<'py, PyType>,
    pub(super) size: Bound<'py, PyType>,
    pub(super) dtype: Bound<'py, PyType>,
    pub(super) device: Bound<'py, PyType>,
    strided: Bound<'py, PyAny>,
    exchange: Option<Exchange>,
    /// Whether tensors can have named dimensions, which PyTorch is abandoning.
    may_have_names: bool,
}

/// The dtypes seen so far; there are few.
#[derive(Default)]
pub(super) struct DTypes {
    known: Vec<(Py<PyAny>, Arc<TorchDType>)>,
    /// By DLPack's description.
    by_code: Vec<(DlDType, Arc<TorchDType>)>,
}

/// A dtype of PyTorch's.
pub(super) struct TorchDType {
    /// Its name without `torch.`.
    pub(super) name: String,
    /// The dtype of the format that it is stored as: bytes, if the format has no such dtype.
    pub(super) stored: DType,
    /// Bytes of an element.
    pub(super) item: u64,
    is_complex: bool,
    is_quantized: bool,
}

/// A tensor of PyTorch's own classes without attributes or hooks of its own: strided elements of a storage on the
/// host or on a CUDA device.
pub(super) struct Plain<'py> {
    pub(super) device: Device,
    pub(super) dtype: Arc<TorchDType>,
    pub(super) shape: Shape,
    /// Elements of the storage that precede the tensor's first one.
    pub(super) offset: u64,
    pub(super) contiguous: bool,
    pub(super) storage: Bound<'py, PyAny>,
    /// Address and bytes of the storage.
    pub(super) address: usize,
    pub(super) nbytes: u64,
}

/// The place of a storage.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Device {
    Host,
    Cuda(u32),
    Other,
}

impl DTypes {
    /// The description of a dtype.
    pub(super) fn get(&mut self, dtype: &Bound<'_, PyAny>) -> PyResult<Arc<TorchDType>> {
        if let Some((_, info)) = self.known.iter().find(|(known, _)| known.is(dtype)) {
            return Ok(Arc::clone(info));
        }
        let name = dtype.str()?.to_str()?.trim_start_matches("torch.").to_owned();
        let info = Arc::new(TorchDType {
            stored: name.parse().unwrap_or(DType::Bytes),
            item: dtype.getattr("itemsize")?.extract()?,
            is_complex: dtype.getattr("is_complex")?.is_truthy()?,
            is_quantized: name.starts_with('q'),
            name,
        });
        self.known.push((dtype.clone().unbind(), Arc::clone(&info)));
        Ok(info)
    }

    /// The description of a tensor's dtype, found by DLPack's description of it.
    fn of_code(&mut self, code: DlDType, tensor: &Bound<'_, PyAny>) -> PyResult<Arc<TorchDType>> {
        if let Some((_, info)) = self.by_code.iter().find(|(known, _)| *known == code) {
            return Ok(Arc::clone(info));
        }
        let info = self.get(&tensor.getattr("dtype")?)?;
        self.by_code.push((code, Arc::clone(&info)));
        Ok(info)
    }
}

impl<'py> Torch<'py> {
    pub(super) fn new(py: Python<'py>) -> PyResult<Self> {
        static TORCH: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let torch = TORCH.get_or_try_init(py, || py.import("torch").map(Bound::unbind))?.bind(py);
        let of = |name: &str| Ok::<_, PyErr>(torch.getattr(name)?.cast_into::<PyType>()?);
        let tensor = of("Tensor")?;
        Ok(Self {
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into()?,
            size: of("Size")?,
            dtype: of("dtype")?,
            device: of("device")?,
            strided: torch.getattr("strided")?,
            exchange: Exchange::of(&tensor),
            may_have_names: tensor.hasattr("has_names")?,
            tensor,
        })
    }

    /// Whether an object is a tensor of one of PyTorch's own classes, not of a class derived from them.
    pub(super) fn is_own_tensor(&self, obj: &Bound<'py, PyAny>) -> bool {
        let kind = obj.get_type();
        kind.is(&self.tensor) || kind.is(&self.parameter)
    }

    /// Describes a tensor of PyTorch's own classes; `None` if it is not plain.
    pub(super) fn plain(
        &self,
        tensor: &Bound<'py, PyAny>,
        dtypes: &mut DTypes,
    ) -> PyResult<Option<Plain<'py>>> {
        // Wrappers and tensors of other layouts raise an error for one query or another.
        match self.ask(tensor, dtypes) {
            Err(e) if e.is_instance_of::<PyRuntimeError>(tensor.py()) => Ok(None),
            answer => answer,
        }
    }

    fn ask(&self, tensor: &Bound<'py, PyAny>, dtypes: &mut DTypes) -> PyResult<Option<Plain<'py>>> {
        let py = tensor.py();
        if is_set(tensor, intern!(py, "__dict__"))?
            || is_set(tensor, intern!(py, "_backward_hooks"))?
            || says(tensor, intern!(py, "is_neg"))?
            || (self.may_have_names && says(tensor, intern!(py, "has_names"))?)
        {
            return Ok(None);
        }
        // An empty tensor has no address to compute the offset from.
        let described = self.exchange.and_then(|exchange| exchange.describe(tensor));
        let described = described.filter(|d| !d.shape.contains(&0));
        let (device, dtype, shape, contiguous, address) = match described {
            Some(Described { cuda, dtype, address, shape, contiguous }) => {
                let device = cuda.map_or(Device::Host, Device::Cuda);
                (device, dtypes.of_code(dtype, tensor)?, shape, contiguous, Some(address))
            }
            None => {
                let on_device = is_set(tensor, intern!(py, "is_cuda"))?;
                if !(on_device || is_set(tensor, intern!(py, "is_cpu"))?)
                    || !tensor.getattr(intern!(py, "layout"))?.is(&self.strided)
                    || is_set(tensor, intern!(py, "is_nested"))?
                {
                    return Ok(None);
                }
                let device = match on_device {
                    true => {
                        let number = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
                        Device::Cuda(number)
                    }
                    false => Device::Host,
                };
                let dtype = dtypes.get(&tensor.getattr(intern!(py, "dtype"))?)?;
                let shape = sizes(&tensor.getattr(intern!(py, "shape"))?)?;
                let contiguous = says(tensor, intern!(py, "is_contiguous"))?;
                (device, dtype, shape, contiguous, None)
            }
        };
        if dtype.is_quantized || (dtype.is_complex && says(tensor, intern!(py, "is_conj"))?) {
            return Ok(None);
        }
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let nbytes = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        // Zero tensors without memory, and wrappers left behind by functional transforms.
        if start == 0 && nbytes > 0 {
            return Ok(None);
        }
        let before = address.and_then(|address| address.checked_sub(start)).map(|n| n as u64);
        let offset = match before.filter(|bytes| dtype.item > 0 && bytes.is_multiple_of(dtype.item))
        {
            Some(bytes) => bytes / dtype.item,
            None => tensor.call_method0(intern!(py, "storage_offset"))?.extract()?,
        };
        let address = start;
        Ok(Some(Plain { device, dtype, shape, offset, contiguous, storage, address, nbytes }))
    }
}

/// The place of a PyTorch storage.
pub(super) fn device_of(storage: &Bound<'_, PyAny>) -> PyResult<Device> {
    let device = storage.getattr("device")?;
    Ok(match device.getattr("type")?.extract::<String>()?.as_str() {
        "cpu" => Device::Host,
        "cuda" => Device::Cuda(device.getattr("index")?.extract()?),
        _ => Device::Other,
    })
}

/// PyTorch's name for the device of a storage.
pub(super) fn location_tag(storage: &Bound<'_, PyAny>) -> PyResult<String> {
    let torch = storage.py().import("torch")?;
    torch.getattr("serialization")?.call_method1("location_tag", (storage,))?.extract()
}

/// Whether an attribute is true, or a dict with something in it.
fn is_set(obj: &Bound<'_, PyAny>, attribute: &Bound<'_, PyString>) -> PyResult<bool> {
    let value = obj.getattr(attribute)?;
    match value.cast::<PyDict>() {
        Ok(dict) => Ok(!dict.is_empty()),
        Err(_) => value.is_truthy(),
    }
}

fn says(obj: &Bound<'_, PyAny>, method: &Bound<'_, PyString>) -> PyResult<bool> {
    obj.call_method0(method)?.is_truthy()
}
