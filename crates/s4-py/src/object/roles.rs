//! Finds each tensor's role in the optimizer from the structure of a state dict.
//!
//! A training checkpoint is usually `{"model": ..., "optimizer": optimizer.state_dict(), ...}`. Its tensors are
//! stored in two groups, so that weights can be read without the optimizer's state, and the file says which moment
//! belongs to which weight. A wrong guess only costs compression ratio.

use std::collections::BTreeMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::shape::{Shape, sizes};
use super::storages::Storages;
use super::tree::address;
use crate::errors::to_value_error;
use s4weights::format::limits::MAX_SCALARS;

/// The group of an optimizer's state; weights and everything else are in the first group.
const OPTIMIZER: u8 = 1;

/// The depth of the search for optimizers: `{"trainer": {"optimizers": [...]}}`.
const DEPTH: usize = 4;

/// Keys under which frameworks keep the fp32 master weights of a 16-bit model: lists of tensors, in the order of the
/// parameters, in their shapes or flattened.
const MASTERS: [&str; 9] = [
    // apex.fp16_utils, and apex.amp's master parameters
    "fp32_from_fp16",
    "fp32_groups_flat",
    "master_params",
    "master_weights",
    // Megatron-LM
    "fp32_from_fp16_params",
    "fp32_from_float16_params",
    "shard_fp32_from_float16_groups",
    // DeepSpeed
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
];

/// The role of an optimizer's state, from the name that PyTorch's and other optimizers give it.
fn kind_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "exp_avg" | "momentum_buffer" => "exp_avg",
        "exp_avg_sq" => "exp_avg_sq",
        // The last two: Megatron's distributed optimizer, per parameter.
        "master" | "master_param" | "master_params" | "param" | "fp32_param" => "master",
        _ => return None,
    })
}

/// Puts weights and the optimizers' state into different groups. Returns the role table as JSON, if there is one.
pub(super) fn find(obj: &Bound<'_, PyAny>, storages: &mut Storages) -> PyResult<Option<String>> {
    let kind = obj.py().import("torch")?.getattr("Tensor")?.cast_into()?;
    let mut parts = Parts { tensor: &kind, optimizers: vec![], masters: vec![] };
    parts.find(obj, DEPTH, true)?;
    let Parts { optimizers, masters, .. } = parts;
    if optimizers.is_empty() && masters.is_empty() {
        return Ok(None);
    }
    let parts: Vec<_> = optimizers.iter().map(|o| o.as_any()).chain(&masters).collect();
    let inside = parts.iter().map(|part| address(part)).collect();
    let mut weights = Weights::default();
    for tensor in tensors_in(obj, inside, &kind)? {
        if let Some(number) = storages.of_tensor(&tensor) {
            weights.add(number, shape_of(&tensor, storages));
        }
    }
    for part in parts {
        for tensor in tensors_in(part, FxHashSet::default(), &kind)? {
            if let Some(number) = storages.of_tensor(&tensor)
                && !weights.known.contains(&number)
            {
                storages.entries[number].group = OPTIMIZER;
            }
        }
    }
    let mut table = Table { rows: vec![], groups: vec![] };
    let mut parameters = Parameters::default();
    let mut next = 0;
    for optimizer in &optimizers {
        table.add(optimizer, storages, &weights, &mut parameters, &mut next)?;
    }
    let mut next = 0;
    for part in &masters {
        for tensor in tensors_in(part, FxHashSet::default(), &kind)? {
            table.add_master(&tensor, storages, &weights, &mut parameters, &mut next);
        }
    }
    let numbers: usize = table.groups.iter().map(|group| 1 + group.len()).sum();
    if table.rows.is_empty() || numbers > MAX_SCALARS {
        return Ok(None);
    }
    if table.groups.is_empty() {
        table.groups.push(BTreeMap::new());
    }
    serde_json::to_string(&table).map(Some).map_err(to_value_error)
}

/// Parts of an object that belong to optimizers.
struct Parts<'a, 'py> {
    tensor: &'a Bound<'py, PyType>,
    /// State dicts of optimizers, none nested in another.
    optimizers: Vec<Bound<'py, PyDict>>,
    /// Containers of fp32 master weights, which may be inside optimizers.
    masters: Vec<Bound<'py, PyAny>>,
}

impl<'py> Parts<'_, 'py> {
    /// Looks into containers, `depth` levels deep. `outside`: the object is not inside an optimizer's state.
    fn find(&mut self, obj: &Bound<'py, PyAny>, depth: usize, outside: bool) -> PyResult<()> {
        // By far the most common case.
        if obj.get_type().is(self.tensor) {
            return Ok(());
        }
        let Ok(dict) = obj.cast::<PyDict>() else {
            let items = if depth > 0 { items_of(obj)? } else { vec![] };
            return items.iter().try_for_each(|item| self.find(item, depth - 1, outside));
        };
        let is_optimizer = outside && is_state_dict(dict)?;
        if is_optimizer {
            self.optimizers.push(dict.clone());
        }
        for (key, item) in pairs_of(dict)? {
            let name = key.cast_exact::<PyString>().ok().and_then(|k| k.to_str().ok());
            let is_master = name.is_some_and(|name| MASTERS.contains(&name)) && is_container(&item);
            if is_master {
                self.masters.push(item.clone());
            }
            if depth > 0 && !is_master {
                self.find(&item, depth - 1, outside && !is_optimizer)?;
            }
        }
        Ok(())
    }
}

fn is_state_dict(dict: &Bound<'_, PyDict>) -> PyResult<bool> {
    let (state, groups) = (dict.get_item("state")?, dict.get_item("param_groups")?);
    let state = state.is_some_and(|state| state.is_instance_of::<PyDict>());
    Ok(state && groups.is_some_and(|groups| groups.is_instance_of::<PyList>()))
}

/// Tensors in nested containers, in order. Containers whose address is in `without` are skipped.
fn tensors_in<'py>(
    root: &Bound<'py, PyAny>,
    without: FxHashSet<usize>,
    tensor: &Bound<'py, PyType>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let (mut seen, mut todo, mut found) = (without, vec![root.clone()], vec![]);
    while let Some(obj) = todo.pop() {
        // Comparing exact types is faster, and enough for nearly all tensors.
        if obj.get_type().is(tensor) {
            found.push(obj);
        } else if is_container(&obj) {
            if seen.insert(address(&obj)) {
                todo.extend(items_of(&obj)?.into_iter().rev());
            }
        } else if obj.is_instance(tensor)? {
            found.push(obj);
        }
    }
    Ok(found)
}

fn is_container(obj: &Bound<'_, PyAny>) -> bool {
    obj.is_instance_of::<PyDict>()
        || obj.is_instance_of::<PyList>()
        || obj.is_instance_of::<PyTuple>()
}

/// The items of a container; none if it is not one.
fn items_of<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if let Ok(dict) = obj.cast_exact::<PyDict>() {
        Ok(dict.iter().map(|(_, value)| value).collect())
    } else if obj.is_instance_of::<PyDict>() {
        own_method(obj, "values")?.try_iter()?.collect()
    } else if is_container(obj) {
        obj.try_iter()?.collect()
    } else {
        Ok(vec![])
    }
}

/// The pairs of a dict, in its own order.
fn pairs_of<'py>(
    dict: &Bound<'py, PyDict>,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    if dict.is_exact_instance_of::<PyDict>() {
        return Ok(dict.iter().collect());
    }
    own_method(dict, "items")?.try_iter()?.map(|item| item?.extract()).collect()
}

/// Calls a method of an object's class: in the idiom `self.__dict__ = self` of dicts whose keys are attributes, too, a
/// key of that name hides it.
fn own_method<'py>(obj: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    obj.get_type().getattr(name)?.call1((obj,))
}

/// The shape of a tensor; `None`, which matches no other, if it is not a list of numbers.
fn shape_of(tensor: &Bound<'_, PyAny>, storages: &Storages) -> Option<Shape> {
    if let Some((_, shape)) = storages.tensors.get(&address(tensor)) {
        return Some(shape.clone());
    }
    sizes(&tensor.getattr(intern!(tensor.py(), "shape")).ok()?).ok()
}

/// The tensors outside of optimizers, each storage once, in order.
#[derive(Default)]
struct Weights {
    /// The indices of their storages.
    numbers: Vec<usize>,
    known: FxHashSet<usize>,
    /// Positions in `numbers`, by the tensor's shape, and by how many values it has.
    alike: FxHashMap<Shape, Vec<usize>>,
    as_large: FxHashMap<u128, Vec<usize>>,
}

impl Weights {
    fn add(&mut self, number: usize, shape: Option<Shape>) {
        if !self.known.insert(number) {
            return;
        }
        let at = self.numbers.len();
        self.numbers.push(number);
        if let Some(shape) = shape {
            self.as_large.entry(values_of(&shape)).or_default().push(at);
            self.alike.entry(shape).or_default().push(at);
        }
    }

    /// The position of the next weight, from `first` on, with this shape; if there is none, of the next with as many
    /// values: an optimizer's tensors may be flattened.
    fn find(&self, first: usize, shape: &[u64]) -> Option<usize> {
        let next = |list: Option<&Vec<usize>>| {
            let list = list?;
            list.get(list.partition_point(|&at| at < first)).copied()
        };
        next(self.alike.get(shape)).or_else(|| next(self.as_large.get(&values_of(shape))))
    }
}

fn values_of(shape: &[u64]) -> u128 {
    shape.iter().fold(1, |n: u128, &size| n.saturating_mul(size.into()))
}

/// The parameters found so far.
#[derive(Default)]
struct Parameters {
    count: usize,
    /// The parameter and group of each weight that has one, by the index of its storage.
    of: FxHashMap<usize, (usize, usize)>,
}

#[derive(Serialize)]
struct Table {
    #[serde(rename = "tensors")]
    rows: Vec<Row>,
    groups: Vec<BTreeMap<String, f64>>,
}

#[derive(Serialize)]
struct Row {
    tensor: usize,
    kind: &'static str,
    parameter: usize,
    group: usize,
}

impl Table {
    fn push(&mut self, tensor: usize, kind: &'static str, (parameter, group): (usize, usize)) {
        self.rows.push(Row { tensor, kind, parameter, group });
    }

    /// Adds an optimizer's state. Its parameters are in the model's order, as in `torch.optim`. `next`: the position
    /// from which to look for the next weight.
    fn add(
        &mut self,
        optimizer: &Bound<'_, PyDict>,
        storages: &Storages,
        weights: &Weights,
        parameters: &mut Parameters,
        next: &mut usize,
    ) -> PyResult<()> {
        let (Some(state), Some(groups)) =
            (optimizer.get_item("state")?, optimizer.get_item("param_groups")?)
        else {
            return Ok(());
        };
        let state = state.cast::<PyDict>()?;
        for group in groups.cast::<PyList>()? {
            let Ok(group) = group.cast::<PyDict>() else { continue };
            let Some(params) = group.get_item("params")? else { continue };
            let Ok(params) = params.cast::<PyList>() else { continue };
            let number = self.groups.len();
            self.groups.push(scalars(group)?);
            for key in params {
                if key.cast_exact::<PyInt>().is_err() && key.cast_exact::<PyString>().is_err() {
                    continue;
                }
                if let Some(of) = state.get_item(key)?
                    && let Ok(of) = of.cast::<PyDict>()
                {
                    self.add_parameter(of, number, storages, weights, parameters, next)?;
                }
            }
        }
        Ok(())
    }

    fn add_parameter(
        &mut self,
        state: &Bound<'_, PyDict>,
        group: usize,
        storages: &Storages,
        weights: &Weights,
        parameters: &mut Parameters,
        next: &mut usize,
    ) -> PyResult<()> {
        let parameter = (parameters.count, group);
        let mut last = None;
        for (name, tensor) in pairs_of(state)? {
            let name = name.cast_exact::<PyString>().ok().and_then(|name| name.to_str().ok());
            if let Some(kind) = name.and_then(kind_of)
                && let Some(number) = storages.of_tensor(&tensor)
            {
                self.push(number, kind, parameter);
                last = Some(tensor);
            }
        }
        let Some(last) = last else { return Ok(()) };
        if let Some(shape) = shape_of(&last, storages)
            && let Some(at) = weights.find(*next, &shape)
        {
            let weight = weights.numbers[at];
            self.push(weight, "weight", parameter);
            parameters.of.insert(weight, parameter);
            *next = at + 1;
        }
        parameters.count += 1;
        Ok(())
    }

    /// Adds a tensor of fp32 master weights. They come in the order of the parameters.
    fn add_master(
        &mut self,
        tensor: &Bound<'_, PyAny>,
        storages: &Storages,
        weights: &Weights,
        parameters: &mut Parameters,
        next: &mut usize,
    ) {
        let Some(shape) = shape_of(tensor, storages) else { return };
        let (Some(number), Some(at)) = (storages.of_tensor(tensor), weights.find(*next, &shape))
        else {
            return;
        };
        let weight = weights.numbers[at];
        *next = at + 1;
        if number == weight {
            return;
        }
        let parameter = match parameters.of.get(&weight) {
            Some(parameter) => *parameter,
            None => {
                let parameter = (parameters.count, 0);
                parameters.count += 1;
                parameters.of.insert(weight, parameter);
                self.push(weight, "weight", parameter);
                parameter
            }
        };
        self.push(number, "master", parameter);
    }
}

/// The most numbers of a list (betas have two or three), and the most bytes of a name: anything larger is not a
/// hyperparameter.
const MAX_PARTS: usize = 8;
const MAX_NAME: usize = 128;

/// Numbers of a parameter group (lr, betas, eps...) that JSON can hold.
fn scalars(group: &Bound<'_, PyDict>) -> PyResult<BTreeMap<String, f64>> {
    let mut out = BTreeMap::new();
    for (name, value) in pairs_of(group)? {
        let Ok(name) = name.cast_exact::<PyString>() else { continue };
        let Ok(name) = name.to_str() else { continue };
        if name == "params" || name.len() > MAX_NAME {
            continue;
        }
        if value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>() {
            let parts = items_of(&value)?;
            if parts.len() > MAX_PARTS {
                continue;
            }
            for (i, part) in parts.iter().enumerate() {
                out.extend(number_of(part).map(|part| (format!("{name}{i}"), part)));
            }
        } else {
            out.extend(number_of(&value).map(|value| (name.to_owned(), value)));
        }
    }
    Ok(out)
}

fn number_of(value: &Bound<'_, PyAny>) -> Option<f64> {
    let is_number = value.cast_exact::<PyInt>().is_ok() || value.cast_exact::<PyFloat>().is_ok();
    let number: f64 = is_number.then(|| value.extract().ok())??;
    (number.is_finite() && number.abs() < 1e300).then_some(number)
}
