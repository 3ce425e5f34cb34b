//! Tensors that are planned and encoded together.

use s4_engine::{Moment, TensorValues};

use crate::tensor_source::TensorSource;

/// Tensors with chunks of their own, to be written together: all in host memory, or all on devices.
#[derive(Default)]
pub(crate) struct Batch<'a> {
    pub(crate) names: Vec<&'a str>,
    pub(crate) tensors: Vec<TensorValues<'a>>,
    pub(crate) groups: Vec<u8>,
    /// For each tensor, the number of the parent's tensor that it may be a delta of.
    pub(crate) parents: Vec<Option<u32>>,
    /// For each tensor, its moments, if it may be predicted from them. Empty if no tensor has any.
    pub(crate) moments: Vec<Vec<Moment<'a>>>,
}

impl<'a> Batch<'a> {
    /// Adds a tensor. `parent` is the number of the parent's tensor that it may be a delta of.
    pub(crate) fn push(
        &mut self,
        source: &TensorSource<'a>,
        values: TensorValues<'a>,
        parent: Option<u32>,
    ) {
        self.names.push(source.name);
        self.tensors.push(values);
        self.groups.push(source.group);
        self.parents.push(parent);
    }

    /// The tensors at these indices.
    pub(crate) fn only(&self, numbers: &[usize]) -> Self {
        fn pick<T: Clone>(from: &[T], numbers: &[usize]) -> Vec<T> {
            numbers.iter().filter_map(|&i| from.get(i)).cloned().collect()
        }
        Self {
            names: pick(&self.names, numbers),
            tensors: pick(&self.tensors, numbers),
            groups: pick(&self.groups, numbers),
            parents: pick(&self.parents, numbers),
            moments: pick(&self.moments, numbers),
        }
    }

    /// Whether the tensors are on devices.
    pub(crate) fn is_on_device(&self) -> bool {
        self.tensors.first().is_some_and(|t| t.values.memory().is_some())
    }
}
