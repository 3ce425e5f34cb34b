//! The typed JSON tree (defined in python/s4weights/_tree.py), written while the object is walked.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet,
    PyString, PyTuple, PyType,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::names::{Path, UniqueNames};

/// Deepest nesting: JSON readers that stop at 128 levels can read it (a dict takes three).
pub(super) const MAX_DEPTH: usize = 32;
/// The most nodes of a tree. Larger objects (long lists of numbers) are smaller and faster as a pickle.
pub(super) const MAX_NODES: usize = 1 << 20;
/// The most bytes of the JSON text, and of a byte string in it.
const MAX_TEXT: usize = 64 << 20;
const MAX_BYTES: usize = 1 << 20;
/// Only integers below this in size are exact in every JSON reader.
const SAFE_INT: i64 = 1 << 53;

/// The reasons why there is no tree.
pub(super) enum Stop {
    /// The object needs a pickle: it is more than plain values in plain containers.
    NotPlain,
    Error(PyErr),
}

impl<E: Into<PyErr>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// The kind of node written for an object that is neither a plain value nor a container.
pub(super) enum Leaf {
    /// A tensor's node: if the object occurs again, a reference to this node is written.
    Tensor,
    Value,
}

/// Writes the nodes of objects that are neither plain values nor containers.
pub(super) trait Leaves<'py> {
    /// Writes the node of an object at a path.
    fn write(
        &mut self,
        obj: &Bound<'py, PyAny>,
        path: &Path<'_>,
        text: &mut Vec<u8>,
    ) -> Result<Leaf, Stop>;
}

/// The tree of an object as JSON text; `None` if the object does not fit into a tree.
pub(super) fn tree_of<'py>(
    obj: &Bound<'py, PyAny>,
    leaves: &mut dyn Leaves<'py>,
) -> PyResult<Option<String>> {
    let py = obj.py();
    let mut tree = Tree {
        text: b"{\"root\":".to_vec(),
        nodes: 0,
        seen: FxHashSet::default(),
        tensors: FxHashMap::default(),
        ordered: py.import("collections")?.getattr("OrderedDict")?.cast_into()?,
        leaves,
    };
    match tree.node(obj, &Path::Root, 0) {
        Ok(()) => {}
        Err(Stop::NotPlain) => return Ok(None),
        Err(Stop::Error(error)) => return Err(error),
    }
    tree.text.push(b'}');
    Ok(if tree.text.len() > MAX_TEXT { None } else { String::from_utf8(tree.text).ok() })
}

/// The tree of an object as JSON; `None` if the object does not fit into a tree. `number` is called once for each
/// object that is neither a plain value nor a container, with the object and its path as a unique name; it returns the
/// index of a tensor of the file.
#[pyfunction]
pub(crate) fn write_tree<'py>(
    obj: &Bound<'py, PyAny>,
    number: Bound<'py, PyAny>,
) -> PyResult<Option<String>> {
    struct Numbers<'py>(Bound<'py, PyAny>, UniqueNames);

    impl<'py> Leaves<'py> for Numbers<'py> {
        fn write(
            &mut self,
            obj: &Bound<'py, PyAny>,
            path: &Path<'_>,
            text: &mut Vec<u8>,
        ) -> Result<Leaf, Stop> {
            let number: usize = self.0.call1((obj, &*self.1.take(&path.text())))?.extract()?;
            text.extend_from_slice(format!("{{\"tensor\":{number}}}").as_bytes());
            Ok(Leaf::Tensor)
        }
    }

    tree_of(obj, &mut Numbers(number, UniqueNames::default()))
}

struct Tree<'a, 'py> {
    text: Vec<u8>,
    nodes: usize,
    /// Mutable containers visited so far, by address; the object keeps them alive.
    seen: FxHashSet<usize>,
    /// Likewise tensors, with the index of the node of each.
    tensors: FxHashMap<usize, usize>,
    ordered: Bound<'py, PyType>,
    leaves: &'a mut dyn Leaves<'py>,
}

impl<'py> Tree<'_, 'py> {
    fn node(&mut self, obj: &Bound<'py, PyAny>, path: &Path<'_>, depth: usize) -> Result<(), Stop> {
        self.nodes += 1;
        if depth > MAX_DEPTH || self.nodes > MAX_NODES || self.text.len() > MAX_TEXT {
            return Err(Stop::NotPlain);
        }
        let depth = depth + 1;
        if let Ok(text) = obj.cast_exact::<PyString>() {
            self.string(text)
        } else if obj.is_none() {
            self.raw("null")
        } else if let Ok(value) = obj.cast_exact::<PyBool>() {
            self.raw(if value.is_true() { "true" } else { "false" })
        } else if let Ok(value) = obj.cast_exact::<PyInt>() {
            self.integer(value)
        } else if let Ok(value) = obj.cast_exact::<PyFloat>() {
            self.float(value.value())
        } else if let Ok(dict) = obj.cast_exact::<PyDict>() {
            self.raw("{\"dict\":")?;
            self.pairs(dict, path, depth)?;
            self.raw("}")
        } else if obj.get_type().is(&self.ordered) {
            self.ordered_dict(obj, path, depth)
        } else if let Ok(list) = obj.cast_exact::<PyList>() {
            self.once(obj)?;
            self.items(list.iter().map(Ok), path, depth)
        } else if let Ok(tuple) = obj.cast_exact::<PyTuple>() {
            self.raw("{\"tuple\":")?;
            self.items(tuple.iter().map(Ok), path, depth)?;
            self.raw("}")
        } else {
            self.rare(obj, path, depth)
        }
    }

    fn rare(&mut self, obj: &Bound<'py, PyAny>, path: &Path<'_>, depth: usize) -> Result<(), Stop> {
        if let Ok(value) = obj.cast_exact::<PyComplex>() {
            self.raw("{\"complex\":[")?;
            self.float(value.real())?;
            self.raw(",")?;
            self.float(value.imag())?;
            self.raw("]}")
        } else if let Ok(bytes) = obj.cast_exact::<PyBytes>() {
            self.bytes("bytes", bytes.as_bytes())
        } else if let Ok(bytes) = obj.cast_exact::<PyByteArray>() {
            self.once(obj)?;
            self.bytes("bytearray", &bytes.to_vec())
        } else if obj.cast_exact::<PySet>().is_ok() {
            self.once(obj)?;
            self.raw("{\"set\":")?;
            self.unordered(obj, path, depth)?;
            self.raw("}")
        } else if obj.cast_exact::<PyFrozenSet>().is_ok() {
            self.raw("{\"frozenset\":")?;
            self.unordered(obj, path, depth)?;
            self.raw("}")
        } else if let Some(known) = self.tensors.get(&address(obj)) {
            let same = format!("{{\"same\":{known}}}");
            self.raw(&same)
        } else {
            if let Leaf::Tensor = self.leaves.write(obj, path, &mut self.text)? {
                self.tensors.insert(address(obj), self.tensors.len());
            }
            Ok(())
        }
    }

    fn raw(&mut self, text: &str) -> Result<(), Stop> {
        self.text.extend_from_slice(text.as_bytes());
        Ok(())
    }

    fn string(&mut self, text: &Bound<'py, PyString>) -> Result<(), Stop> {
        // Lone surrogates have no UTF-8 form.
        let text = text.to_str().map_err(|_| Stop::NotPlain)?;
        self.json(text)
    }

    fn json(&mut self, value: &(impl serde::Serialize + ?Sized)) -> Result<(), Stop> {
        serde_json::to_writer(&mut self.text, value).map_err(|_| Stop::NotPlain)
    }

    fn integer(&mut self, value: &Bound<'py, PyInt>) -> Result<(), Stop> {
        match value.extract::<i64>() {
            Ok(small) if -SAFE_INT < small && small < SAFE_INT => self.json(&small),
            _ => {
                let hex = value.py().import("builtins")?.call_method1("hex", (value,))?;
                self.raw("{\"int\":")?;
                self.json(&hex.extract::<String>()?)?;
                self.raw("}")
            }
        }
    }

    fn float(&mut self, value: f64) -> Result<(), Stop> {
        if value.is_finite() {
            return self.json(&value);
        }
        self.raw(&format!("{{\"float\":\"{:016x}\"}}", value.to_bits()))
    }

    fn bytes(&mut self, kind: &str, bytes: &[u8]) -> Result<(), Stop> {
        if bytes.len() > MAX_BYTES {
            return Err(Stop::NotPlain);
        }
        self.raw(&format!("{{\"{kind}\":\"{}\"}}", STANDARD.encode(bytes)))
    }

    /// Refuses a mutable container that occurs twice: shared containers and cycles need a pickle.
    fn once(&mut self, obj: &Bound<'py, PyAny>) -> Result<(), Stop> {
        if self.seen.insert(address(obj)) { Ok(()) } else { Err(Stop::NotPlain) }
    }

    fn items(
        &mut self,
        items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<(), Stop> {
        self.raw("[")?;
        for (i, item) in items.enumerate() {
            self.raw(if i == 0 { "" } else { "," })?;
            self.node(&item?, &Path::Index(path, i), depth)?;
        }
        self.raw("]")
    }

    /// The elements of a set in the order of their texts: a set's own order may differ in every process. Sets that
    /// hold tensors keep it, since tensors are numbered in the order of the text.
    fn unordered(
        &mut self,
        set: &Bound<'py, PyAny>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<(), Stop> {
        self.raw("[")?;
        let (start, tensors) = (self.text.len(), self.tensors.len());
        let mut ends = vec![];
        for (i, item) in set.try_iter()?.enumerate() {
            self.node(&item?, &Path::Index(path, i), depth)?;
            ends.push(self.text.len() - start);
        }
        let texts = self.text.split_off(start);
        let begins = std::iter::once(0).chain(ends.iter().copied());
        let mut parts: Vec<&[u8]> =
            begins.zip(&ends).map(|(begin, &end)| texts.get(begin..end).unwrap_or(b"")).collect();
        if self.tensors.len() == tensors {
            parts.sort_unstable();
        }
        self.text.extend_from_slice(&parts.join(&b','));
        self.raw("]")
    }

    fn ordered_dict(
        &mut self,
        obj: &Bound<'py, PyAny>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<(), Stop> {
        self.raw("{\"odict\":")?;
        self.pairs(obj.cast::<PyDict>()?, path, depth)?;
        let attributes = obj.getattr("__dict__")?;
        if !attributes.cast::<PyDict>()?.is_empty() {
            self.raw(",\"attrs\":")?;
            self.node(&attributes, path, depth)?;
        }
        self.raw("}")
    }

    fn pairs(
        &mut self,
        dict: &Bound<'py, PyDict>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<(), Stop> {
        self.once(dict)?;
        self.raw("[")?;
        for (i, (key, value)) in pairs_of(dict)?.into_iter().enumerate() {
            self.raw(if i == 0 { "[" } else { ",[" })?;
            self.key(&key, path, depth)?;
            self.raw(",")?;
            match key.cast_exact::<PyString>() {
                Ok(key) => self.node(&value, &Path::Key(path, key.to_str()?), depth)?,
                Err(_) => self.node(&value, &Path::Key(path, &label(&key)?), depth)?,
            }
            self.raw("]")?;
        }
        self.raw("]")
    }

    fn key(&mut self, key: &Bound<'py, PyAny>, path: &Path<'_>, depth: usize) -> Result<(), Stop> {
        if let Ok(text) = key.cast_exact::<PyString>() {
            return self.string(text);
        }
        if let Ok(parts) = key.cast_exact::<PyTuple>()
            && depth < MAX_DEPTH
        {
            self.raw("{\"tuple\":[")?;
            for (i, part) in parts.iter().enumerate() {
                self.raw(if i == 0 { "" } else { "," })?;
                self.key(&part, path, depth + 1)?;
            }
            return self.raw("]}");
        }
        let is_plain = key.is_none()
            || key.cast_exact::<PyInt>().is_ok()
            || key.cast_exact::<PyFloat>().is_ok()
            || key.cast_exact::<PyBool>().is_ok();
        if is_plain { self.node(key, path, depth) } else { Err(Stop::NotPlain) }
    }
}

/// The pairs of a dict, in the order of an ordered dict. They are copied, because code that tensors and arrays run when
/// they are asked may change the dict.
pub(super) fn pairs_of<'py>(
    dict: &Bound<'py, PyDict>,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    if dict.is_exact_instance_of::<PyDict>() {
        return Ok(dict.iter().collect());
    }
    let items = dict.call_method0(pyo3::intern!(dict.py(), "items"))?;
    items.try_iter()?.map(|item| item?.extract()).collect()
}

/// A key as text.
fn label(key: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(number) =
        key.cast_exact::<PyInt>().map_err(PyErr::from).and_then(|n| n.extract::<i64>())
    {
        return Ok(number.to_string());
    }
    key.py().import("s4weights._names")?.call_method1("label", (key,))?.extract()
}

pub(super) fn address(obj: &Bound<'_, PyAny>) -> usize {
    obj.as_ptr().addr()
}
