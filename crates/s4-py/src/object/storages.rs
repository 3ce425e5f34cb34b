//! `_core.Storages`: the storages of an object, on their way to a file.
//!
//! What is stored are whole storages, as PyTorch does, keyed by identity: so views, strides, ties and aliases come
//! back as they were. A storage is written as one tensor of the file, under the key path, dtype and shape of the
//! first tensor that uses it.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::io::Write as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit, intern};
use rustc_hash::FxHashMap;
use s4weights::DType;

use super::names::{Path, UniqueNames};
use super::roles;
use super::sources::{Source, Sources};
use super::torch::{
    DTypes, Device, Plain, Shape, Torch, TorchDType, device_of, location_tag, row_major, sizes,
};
use super::tree::{Leaf, Leaves, Stop, address, tree_of};
use crate::device::HOST;

/// Numbers storages in the order in which they are met.
#[pyclass(module = "s4weights._core")]
#[derive(Default)]
pub(crate) struct Storages {
    pub(super) entries: Vec<Entry>,
    /// By identity: the entries keep the storages alive, so that it is theirs alone.
    numbers: FxHashMap<usize, usize>,
    /// Of tensors that are in the tree, by address: the number of the storage, and the shape. The object keeps them.
    pub(super) tensors: FxHashMap<usize, (usize, Shape)>,
    names: UniqueNames,
    dtypes: DTypes,
}

/// A storage, and the stored tensor that it becomes.
pub(super) struct Entry {
    storage: Py<PyAny>,
    name: Arc<str>,
    dtype: DType,
    shape: Shape,
    nbytes: u64,
    device: Device,
    /// Of a storage of plain tensors.
    address: Option<usize>,
    pub(super) group: u8,
}

#[pymethods]
impl Storages {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of all.
    fn nbytes(&self) -> u64 {
        self.entries.iter().map(|e| e.nbytes).sum()
    }

    /// The object's tree as JSON, with the storages of its tensors numbered as they are met; `None` if it cannot be
    /// one: the storages are then to be thrown away. `patiently`: other threads get Python's lock meanwhile, and do not
    /// change the object.
    #[pyo3(signature = (obj, patiently = false))]
    fn tree(&mut self, obj: &Bound<'_, PyAny>, patiently: bool) -> PyResult<Option<String>> {
        let mut tensors = Tensors::new(obj.py(), self)?;
        tensors.patiently = patiently;
        tree_of(obj, &mut tensors)
    }

    /// Tells the weights of an object from the state of its optimizers. Returns the role table as JSON, if there is
    /// one.
    fn roles(&mut self, obj: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        roles::find(obj, self)
    }

    /// The number of a storage, if it has been met.
    fn find(&self, storage: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        Ok(self.numbers.get(&identity(storage)?).copied())
    }

    /// Numbers a storage that has not been met, as a tensor of this name, dtype and shape; without a shape it is all
    /// there is in the storage, in a row.
    fn add(
        &mut self,
        storage: &Bound<'_, PyAny>,
        name: &str,
        dtype: &Bound<'_, PyAny>,
        shape: Option<Vec<u64>>,
    ) -> PyResult<usize> {
        let dtype = self.dtypes.get(dtype)?;
        let device = device_of(storage)?;
        let nbytes = storage.call_method0("nbytes")?.extract()?;
        Ok(self.enter(
            storage,
            identity(storage)?,
            name,
            &dtype,
            shape.map(Shape::from),
            nbytes,
            device,
        ))
    }

    /// Some of the storages themselves.
    fn get(&self, py: Python<'_>, numbers: Vec<usize>) -> PyResult<Vec<Py<PyAny>>> {
        let entry = |n: usize| self.entries.get(n).ok_or_else(|| PyIndexError::new_err(n));
        numbers.into_iter().map(|n| Ok(entry(n)?.storage.clone_ref(py))).collect()
    }

    /// The numbers of the CUDA devices that have values.
    fn devices(&self) -> Vec<u32> {
        let with_values = self.entries.iter().filter(|e| e.nbytes > 0);
        let ordinals: BTreeSet<_> = with_values
            .filter_map(|e| if let Device::Cuda(n) = e.device { Some(n) } else { None })
            .collect();
        ordinals.into_iter().collect()
    }

    /// Where the values are. `streams`: of the CUDA devices on which values are to be read, by number, the stream
    /// to read them on. Those of other devices are to be copied to the host.
    fn sources(&self, py: Python<'_>, streams: HashMap<u32, u64>) -> PyResult<Sources> {
        let source = |e: &Entry| {
            let place = match e.device {
                _ if e.nbytes == 0 => Some(HOST),
                Device::Host => Some(HOST),
                Device::Cuda(n) => streams.get(&n).map(|&stream| (i64::from(n), stream)),
                Device::Other => None,
            };
            let address = match e.address {
                _ if e.nbytes == 0 || place.is_none() => 0,
                Some(address) => address,
                None => e.storage.bind(py).call_method0("data_ptr")?.extract()?,
            };
            Ok(Source {
                name: Arc::clone(&e.name),
                dtype: e.dtype,
                shape: e.shape.clone(),
                address,
                nbytes: usize::try_from(e.nbytes)?,
                place,
                fixed: false,
                group: e.group,
            })
        };
        let sources: PyResult<Vec<_>> = self.entries.iter().map(source).collect();
        Ok(Sources::new(sources?))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.entries.iter().try_for_each(|e| visit.call(&e.storage))
    }

    fn __clear__(&mut self) {
        *self = Self::default();
    }
}

impl Storages {
    #[expect(clippy::too_many_arguments, reason = "what is known of a storage")]
    fn enter(
        &mut self,
        storage: &Bound<'_, PyAny>,
        identity: usize,
        name: &str,
        dtype: &TorchDType,
        shape: Option<Shape>,
        nbytes: u64,
        device: Device,
    ) -> usize {
        let (mut stored, mut item) = (dtype.stored, dtype.item.max(1));
        let mut shape = shape;
        if stored == DType::Bytes || !nbytes.is_multiple_of(item) {
            // What the format has no dtype for is so many bytes, whatever its elements are.
            shape = shape.filter(|_| item == 1);
            (stored, item) = (DType::Bytes, 1);
        }
        let number = self.entries.len();
        self.numbers.insert(identity, number);
        self.entries.push(Entry {
            storage: storage.clone().unbind(),
            name: self.names.take(name),
            dtype: stored,
            shape: shape.unwrap_or_else(|| Shape::from_slice(&[nbytes / item])),
            nbytes,
            device,
            address: None,
            group: 0,
        });
        number
    }

    /// The number of the storage of a tensor, if it has been met.
    pub(super) fn of_tensor(&self, tensor: &Bound<'_, PyAny>) -> Option<usize> {
        if let Some((number, _)) = self.tensors.get(&address(tensor)) {
            return Some(*number);
        }
        // Wrappers have no storage of their own.
        let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage")).ok()?;
        self.numbers.get(&identity(&storage).ok()?).copied()
    }
}

fn identity(storage: &Bound<'_, PyAny>) -> PyResult<usize> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

/// Writes the nodes of tensors, and of arrays that lend their memory, and of what else PyTorch has.
pub(super) struct Tensors<'a, 'py> {
    torch: Torch<'py>,
    storages: &'a mut Storages,
    /// What PyTorch calls CUDA devices, by number, as JSON.
    tags: BTreeMap<u32, String>,
    /// The path of the tensor that is written.
    path: String,
    is_array: Bound<'py, PyAny>,
    as_tensor: Bound<'py, PyAny>,
    /// Whether Python's lock is for others, too.
    patiently: bool,
}

/// After so many tensors, which take some 50 µs, others may have Python's lock, for at least this long: a thread that waits
/// for it needs time to wake up.
const AT_A_TIME: usize = 16;
const FOR_OTHERS: Duration = Duration::from_micros(50);

impl<'a, 'py> Tensors<'a, 'py> {
    fn new(py: Python<'py>, storages: &'a mut Storages) -> PyResult<Self> {
        let arrays = py.import("s4weights._device")?;
        Ok(Self {
            torch: Torch::new(py)?,
            storages,
            tags: BTreeMap::new(),
            path: String::new(),
            is_array: arrays.getattr("is_array")?,
            as_tensor: arrays.getattr("as_tensor")?,
            patiently: false,
        })
    }

    /// Writes the node of a tensor. `owner`: the object that it stands for.
    fn tensor(
        &mut self,
        tensor: &Bound<'py, PyAny>,
        owner: &Bound<'py, PyAny>,
        path: &Path<'_>,
        text: &mut Vec<u8>,
    ) -> Result<(), Stop> {
        let py = tensor.py();
        if self.patiently && self.storages.tensors.len() % AT_A_TIME == AT_A_TIME - 1 {
            py.detach(|| thread::sleep(FOR_OTHERS));
        }
        let Some(plain) = self.torch.plain(tensor, &mut self.storages.dtypes)? else {
            return Err(Stop::NotPlain);
        };
        let Plain { device, dtype, shape, offset, contiguous, storage, address, nbytes } = plain;
        // Whether the tensor's elements, in order, are all there is in its storage.
        let whole = contiguous
            && offset == 0
            && shape.iter().try_fold(dtype.item, |n, &size| n.checked_mul(size)) == Some(nbytes);
        if !whole {
            let storages = py.import("s4weights._storages")?;
            storages.call_method1("require_storage", (tensor, path.text()))?;
        }
        let key = identity(&storage)?;
        let known = self.storages.numbers.get(&key).copied();
        let number = match known {
            Some(number) => number,
            None => {
                let shape = whole.then(|| shape.clone());
                self.path.clear();
                path.write(&mut self.path);
                let number =
                    self.storages.enter(&storage, key, &self.path, &dtype, shape, nbytes, device);
                self.storages.entries[number].address = Some(address);
                number
            }
        };
        let stored = &self.storages.entries[number];
        write!(text, "{{\"tensor\":{number}")?;
        // Most are the first tensor of their storage, and all of it.
        if known.is_some() || !whole || stored.dtype == DType::Bytes {
            if stored.dtype == DType::Bytes || dtype.stored != stored.dtype {
                write!(text, ",\"dtype\":\"{}\"", dtype.name)?;
            }
            if shape != stored.shape {
                write!(text, ",\"shape\":{shape:?}")?;
            }
            if offset > 0 {
                write!(text, ",\"offset\":{offset}")?;
            }
        }
        // Of dimensions of one element, and of tensors of none, PyTorch leaves the strides open.
        if !contiguous || shape.iter().any(|&size| size <= 1) {
            let stride = sizes(&tensor.call_method0(intern!(py, "stride"))?)?;
            if stride != row_major(&shape) {
                write!(text, ",\"stride\":{stride:?}")?;
            }
        }
        if let Device::Cuda(ordinal) = device {
            let tag = match self.tags.entry(ordinal) {
                btree_map::Entry::Occupied(known) => known.into_mut(),
                btree_map::Entry::Vacant(new) => {
                    new.insert(serde_json::Value::from(location_tag(&storage)?).to_string())
                }
            };
            write!(text, ",\"device\":{tag}")?;
        }
        if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            text.extend_from_slice(b",\"grad\":true");
        }
        if tensor.get_type().is(&self.torch.parameter) {
            text.extend_from_slice(b",\"parameter\":true");
        }
        text.push(b'}');
        self.storages.tensors.insert(owner.as_ptr().addr(), (number, shape));
        Ok(())
    }
}

impl<'py> Leaves<'py> for Tensors<'_, 'py> {
    fn write(
        &mut self,
        obj: &Bound<'py, PyAny>,
        path: &Path<'_>,
        text: &mut Vec<u8>,
    ) -> Result<Leaf, Stop> {
        if self.torch.is_own_tensor(obj) {
            self.tensor(obj, obj, path, text)?;
            return Ok(Leaf::Tensor);
        }
        let kind = obj.get_type();
        let node = if kind.is(&self.torch.size) {
            format!("{{\"torch.Size\":{:?}}}", sizes(obj)?)
        } else if kind.is(&self.torch.dtype) {
            format!("{{\"torch.dtype\":\"{}\"}}", self.storages.dtypes.get(obj)?.name)
        } else if kind.is(&self.torch.device) {
            format!("{{\"torch.device\":\"{}\"}}", obj.str()?.to_str()?)
        } else if self.is_array.call1((obj,))?.is_truthy()? {
            let tensor = self.as_tensor.call1((obj,))?;
            if !self.torch.is_own_tensor(&tensor) {
                return Err(Stop::NotPlain);
            }
            self.tensor(&tensor, obj, path, text)?;
            return Ok(Leaf::Tensor);
        } else {
            return Err(Stop::NotPlain);
        };
        text.extend_from_slice(node.as_bytes());
        Ok(Leaf::Value)
    }
}
