//! States of training runs, from safetensors files.

use std::path::Path;

use s4weights::{DType, TensorSource};
use safetensors::{Dtype, SafeTensors};

/// Any error: for programs that print it and stop.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The tensors of a file, by name.
#[derive(Debug)]
pub struct State(Vec<(String, DType, Vec<u64>, Vec<u8>)>);

impl State {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is no safetensors file, or has a tensor of a dtype that is not benchmarked.
    pub fn read(path: &Path) -> Outcome<Self> {
        Self::parse(&std::fs::read(path)?)
    }

    /// Parses a file.
    ///
    /// # Errors
    /// As [`State::read`].
    pub fn parse(file: &[u8]) -> Outcome<Self> {
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

    /// The tensors to save.
    pub fn sources(&self) -> Vec<TensorSource<'_>> {
        let list = self.0.iter();
        list.map(|(name, dtype, shape, data)| TensorSource::new(name, *dtype, shape, data))
            .collect()
    }

    /// Whether `values`, in the order of `names`, are its values.
    pub fn equals<'a>(&self, names: impl Iterator<Item = &'a str>, values: &[Vec<u8>]) -> bool {
        let all = names.zip(values).zip(&self.0);
        values.len() == self.0.len()
            && all.into_iter().all(|((name, v), t)| name == t.0 && *v == t.3)
    }
}
