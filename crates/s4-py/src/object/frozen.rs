//! Copies an object's containers, so that it can be described later while the object itself changes.

use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType,
};
use pyo3::{PyTypeInfo, intern};
use rustc_hash::FxHashMap;

use super::torch::Torch;
use super::tree::{MAX_DEPTH, MAX_NODES, address, pairs_of};

/// A copy of an object in which only tensors can still change, and the ordinals of the CUDA devices that they are
/// on; `None` if it holds anything that cannot be copied that way.
#[pyfunction]
pub(crate) fn freeze<'py>(
    obj: &Bound<'py, PyAny>,
) -> PyResult<Option<(Bound<'py, PyAny>, Vec<u32>)>> {
    let py = obj.py();
    let mut freeze = Freeze {
        torch: Torch::new(py)?,
        ordered: py.import("collections")?.getattr("OrderedDict")?.cast_into()?,
        nodes: 0,
        copies: FxHashMap::default(),
        devices: vec![],
    };
    Ok(freeze.copy(obj, 0)?.map(|copy| (copy, freeze.devices)))
}

struct Freeze<'py> {
    torch: Torch<'py>,
    ordered: Bound<'py, PyType>,
    /// Objects visited so far. A tuple counts each time it occurs, since it is walked each time.
    nodes: usize,
    /// Copies of mutable containers, by the original's address: one that occurs twice is copied once.
    copies: FxHashMap<usize, Bound<'py, PyAny>>,
    devices: Vec<u32>,
}

impl<'py> Freeze<'py> {
    fn copy(
        &mut self,
        obj: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.nodes += 1;
        if self.torch.is_own_tensor(obj) {
            return Ok(self.has_known_device(obj)?.then(|| obj.clone()));
        }
        if is_plain(obj) {
            return Ok(Some(obj.clone()));
        }
        if depth > MAX_DEPTH || self.nodes > MAX_NODES {
            return Ok(None);
        }
        if let Some(copy) = self.copies.get(&address(obj)) {
            return Ok(Some(copy.clone()));
        }
        if let Ok(dict) = obj.cast_exact::<PyDict>() {
            let copy = PyDict::new(obj.py());
            self.copies.insert(address(obj), copy.clone().into_any());
            return self.pairs(dict, &copy, depth);
        }
        if obj.get_type().is(&self.ordered) {
            let copy = self.ordered.call0()?;
            self.copies.insert(address(obj), copy.clone());
            let attributes = obj.getattr(intern!(obj.py(), "__dict__"))?;
            let Some(attributes) = self.copy(&attributes, depth + 1)? else { return Ok(None) };
            let own = copy.getattr(intern!(obj.py(), "__dict__"))?;
            own.cast::<PyDict>()?.update(attributes.cast::<PyDict>()?.as_mapping())?;
            return self.pairs(obj.cast::<PyDict>()?, &copy, depth);
        }
        if let Ok(list) = obj.cast_exact::<PyList>() {
            let copy = PyList::empty(obj.py());
            self.copies.insert(address(obj), copy.clone().into_any());
            for item in list {
                let Some(item) = self.copy(&item, depth + 1)? else { return Ok(None) };
                copy.append(item)?;
            }
            return Ok(Some(copy.into_any()));
        }
        if let Ok(tuple) = obj.cast_exact::<PyTuple>() {
            let mut items = Vec::with_capacity(tuple.len());
            for item in tuple {
                let Some(item) = self.copy(&item, depth + 1)? else { return Ok(None) };
                items.push(item);
            }
            return Ok(Some(PyTuple::new(obj.py(), items)?.into_any()));
        }
        let kind = obj.get_type();
        let torch = &self.torch;
        let fixed = kind.is(&torch.size) || kind.is(&torch.dtype) || kind.is(&torch.device);
        Ok(fixed.then(|| obj.clone()))
    }

    /// Copies a dict's pairs to another dict and returns that; `None` if a key or a value cannot be copied.
    fn pairs(
        &mut self,
        from: &Bound<'py, PyDict>,
        to: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        for (key, value) in pairs_of(from)? {
            if !is_plain(&key) && key.cast_exact::<PyTuple>().is_err() {
                return Ok(None);
            }
            let Some(value) = self.copy(&value, depth + 1)? else { return Ok(None) };
            to.set_item(key, value)?;
        }
        Ok(Some(to.clone()))
    }

    /// Records a tensor's CUDA device; `false` if it is neither on one nor on the host.
    fn has_known_device(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let number: i64 = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
        let Ok(number) = u32::try_from(number) else {
            return tensor.getattr(intern!(py, "is_cpu"))?.is_truthy();
        };
        if self.devices.contains(&number) {
            return Ok(true);
        }
        let on_cuda = tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()?;
        if on_cuda {
            self.devices.push(number);
        }
        Ok(on_cuda)
    }
}

/// Whether an object is a plain value, which cannot change.
fn is_plain(obj: &Bound<'_, PyAny>) -> bool {
    fn is<T: PyTypeInfo>(obj: &Bound<'_, PyAny>) -> bool {
        obj.cast_exact::<T>().is_ok()
    }
    obj.is_none()
        || is::<PyString>(obj)
        || is::<PyInt>(obj)
        || is::<PyFloat>(obj)
        || is::<PyBool>(obj)
        || is::<PyBytes>(obj)
        || is::<PyComplex>(obj)
}
