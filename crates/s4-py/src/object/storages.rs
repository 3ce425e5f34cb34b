//! `_core.Storages`: the storages of an object, on their way to a file.
//!
//! Whole storages are stored, keyed by identity, as in PyTorch: this preserves views, strides, ties and aliases. A
//! storage is written as one tensor of the file, under the key path, dtype and shape of the first tensor that uses it.

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
use s4weights::format::limits::MAX_RANK;

use super::names::{Path, UniqueNames};
use super::roles;
use super::shape::{Shape, row_major, sizes};
use super::sources::{Source, Sources};
use super::torch::{DTypes, Device, Plain, Torch, TorchDType, device_of, location_tag};
use super::tree::{Leaf, Leaves, Stop, address, tree_of};
use crate::arguments::HOST;

/// Storages in the order in which they are found. The index of a storage is that of the tensor that it becomes in a
/// file.
#[pyclass(module = "s4weights._core")]
#[derive(Default)]
pub(crate) struct Storages {
    pub(super) entries: Vec<Entry>,
    /// The index of each storage by its identity, which is unique because the entries keep the storages alive.
    numbers: FxHashMap<usize, usize>,
    /// For each tensor in the tree, by address: the index of its storage, and its shape. The object keeps the tensors
    /// alive.
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
    /// Known for storages of plain tensors.
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

    /// Bytes of all storages.
    fn nbytes(&self) -> u64 {
        self.entries.iter().map(|e| e.nbytes).sum()
    }

    /// The object's tree as JSON; adds the storages of its tensors. `None` if the object does not fit into a tree; this
    /// `Storages` must then be discarded. `yields_gil`: other threads get the GIL from time to time, and must not change
    /// the object meanwhile.
    #[pyo3(signature = (obj, yields_gil = false))]
    fn tree(&mut self, obj: &Bound<'_, PyAny>, yields_gil: bool) -> PyResult<Option<String>> {
        let mut tensors = Tensors::new(obj.py(), self)?;
        tensors.yields_gil = yields_gil;
        tree_of(obj, &mut tensors)
    }

    /// Puts weights and the optimizer's state into different groups. Returns the role table (each tensor's role in the
    /// optimizer) as JSON, if there is one.
    fn roles(&mut self, obj: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        roles::find(obj, self)
    }

    /// The index of a storage; `None` if it was not added.
    fn find(&self, storage: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        Ok(self.numbers.get(&identity(storage)?).copied())
    }

    /// Adds a new storage, as a tensor of this name, dtype and shape, and returns its index. Without a shape it is
    /// stored as one dimension that covers the whole storage.
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

    /// The storages with these indices.
    fn get(&self, py: Python<'_>, numbers: Vec<usize>) -> PyResult<Vec<Py<PyAny>>> {
        let entry = |n: usize| self.entries.get(n).ok_or_else(|| PyIndexError::new_err(n));
        numbers.into_iter().map(|n| Ok(entry(n)?.storage.clone_ref(py))).collect()
    }

    /// The ordinals of the CUDA devices that hold values.
    fn devices(&self) -> Vec<u32> {
        let with_values = self.entries.iter().filter(|e| e.nbytes > 0);
        let ordinals: BTreeSet<_> = with_values
            .filter_map(|e| if let Device::Cuda(n) = e.device { Some(n) } else { None })
            .collect();
        ordinals.into_iter().collect()
    }

    /// The places of the values. `streams` has the CUDA devices on which values will be read, by ordinal, and for each
    /// the stream to read them on. Values on other devices must be copied to the host first.
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
            // Stored as bytes: the format has no such dtype, or the size is not a whole number of elements.
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

    /// The index of a tensor's storage, if it was added.
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

/// Writes the nodes of tensors, of arrays that lend their memory, and of PyTorch's sizes, dtypes and devices.
pub(super) struct Tensors<'a, 'py> {
    torch: Torch<'py>,
    storages: &'a mut Storages,
    /// PyTorch's location tags of CUDA devices, by ordinal, as JSON.
    tags: BTreeMap<u32, String>,
    /// A buffer for the path of a tensor.
    path: String,
    is_array: Bound<'py, PyAny>,
    as_tensor: Bound<'py, PyAny>,
    /// Whether to let other threads have the GIL from time to time.
    yields_gil: bool,
}

/// After this many tensors, which take some 50 µs, the GIL is released for at least this long: a thread that waits for
/// it needs time to wake up.
const AT_A_TIME: usize = 16;
const FOR_OTHERS: Duration = Duration::from_micros(50);

/// Whether the bytes of all elements are fewer than 2^63.
fn is_countable(shape: &[u64], item: u64) -> bool {
    let bytes = shape.iter().try_fold(item, |n, &size| n.checked_mul(size));
    shape.contains(&0) || bytes.is_some_and(|bytes| bytes < 1 << 63)
}

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
            yields_gil: false,
        })
    }

    /// Writes the node of a tensor. `owner`: the object in the tree, which may be an array that the tensor was made of.
    fn tensor(
        &mut self,
        tensor: &Bound<'py, PyAny>,
        owner: &Bound<'py, PyAny>,
        path: &Path<'_>,
        text: &mut Vec<u8>,
    ) -> Result<(), Stop> {
        let py = tensor.py();
        if self.yields_gil && self.storages.tensors.len() % AT_A_TIME == AT_A_TIME - 1 {
            py.detach(|| thread::sleep(FOR_OTHERS));
        }
        let Some(plain) = self.torch.plain(tensor, &mut self.storages.dtypes)? else {
            return Err(Stop::NotPlain);
        };
        let Plain { device, dtype, shape, offset, contiguous, storage, address, nbytes } = plain;
        // Readers of a tree refuse such views, however few bytes they show; a pickle keeps them.
        if shape.len() > MAX_RANK || !is_countable(&shape, dtype.item) {
            return Err(Stop::NotPlain);
        }
        // Whether the tensor's elements, in order, make up its whole storage.
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
        // Most tensors are the first of their storage, and cover all of it.
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
        // For dimensions of size 1, and for empty tensors, PyTorch allows any strides.
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
            // Such as `torch.Size([-1, 3])`, the argument of a reshape.
            let Ok(sizes) = sizes(obj) else { return Err(Stop::NotPlain) };
            format!("{{\"torch.Size\":{sizes:?}}}")
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
