//! States of training runs, from safetensors files.

use std::path::Path;

use s4weights::{DType, TensorSource};
use safetensors::{Dtype, SafeTensors};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The tensors of a file, by name.
pub(crate) struct State(Vec<(String, DType, Vec<u64>, Vec<u8>)>);

impl State {
    pub(crate) fn read(path: &Path) -> Outcome<Self> {
        Self::parse(&std::fs::read(path)?)
    }

    pub(crate) fn parse(file: &[u8]) -> Outcome<Self> {
        let mut tensors = vec![];
        for (name, view) in SafeTensors::deserialize(file)?.tensors() {
            let dtype = match view.dtype() {
                Dtype::F32 => DType::Float32,
                Dtype::BF16 => DType::BFloat16,
                Dtype::F16 => DType::Float16,
                Dtype::I64 => DType::Int64,
                other => return Err(format!("tensor `{name}` of {other:?}").into()),
            };
            let shape = view.shape().iter().map(|&d| d as u64).collect();
            tensors.push((name, dtype, shape, view.data().to_vec()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self(tensors))
    }

    pub(crate) fn sources(&self) -> Vec<TensorSource<'_>> {
        let list = self.0.iter();
        list.map(|(name, dtype, shape, data)| TensorSource { name, dtype: *dtype, shape, data })
            .collect()
    }

    /// Whether these are its values, in the order of `names`.
    pub(crate) fn equals<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
        values: &[Vec<u8>],
    ) -> bool {
        let all = names.zip(values).zip(&self.0);
        values.len() == self.0.len()
            && all.into_iter().all(|((name, v), t)| name == t.0 && *v == t.3)
    }
}
