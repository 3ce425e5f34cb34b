//! States of training runs, from safetensors files.

use std::path::Path;

use s4_format::manifest::{Role, RoleKind, Roles};
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
            let dtype = dtype(view.dtype())
                .ok_or_else(|| format!("tensor `{name}` of {:?}", view.dtype()))?;
            let shape = view.shape().iter().map(|&d| d as u64).collect();
            tensors.push((name, dtype, shape, view.data().to_vec()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self(tensors))
    }

    /// The roles of the tensors, derived from their names: `model.N`, `master.N`, `optimizer.exp_avg.N` and
    /// `optimizer.exp_avg_sq.N` belong to the same parameter of AdamW.
    pub fn roles(&self) -> Roles {
        let kinds = [
            ("model.", RoleKind::Weight),
            ("master.", RoleKind::Master),
            ("optimizer.exp_avg.", RoleKind::ExpAvg),
            ("optimizer.momentum_buffer.", RoleKind::ExpAvg),
            ("optimizer.exp_avg_sq.", RoleKind::ExpAvgSq),
        ];
        let mut parameters: Vec<&str> = vec![];
        let mut tensors = vec![];
        for (tensor, (name, ..)) in (0..).zip(&self.0) {
            let known = kinds.iter().find_map(|(p, kind)| Some((name.strip_prefix(p)?, *kind)));
            let Some((parameter, kind)) = known else { continue };
            let number = parameters.iter().position(|p| *p == parameter).unwrap_or_else(|| {
                parameters.push(parameter);
                parameters.len() - 1
            });
            tensors.push(Role { tensor, parameter: number as u32, kind, group: 0 });
        }
        let group = [("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-8), ("weight_decay", 0.1)];
        Roles { tensors, groups: vec![group.map(|(k, v)| (k.to_owned(), v)).into()] }
    }

    /// The state of a run in mixed precision with the same values: the fp32 weights become the optimizer's master
    /// weights, and the model gets copies of them, rounded to bf16.
    #[must_use]
    pub fn in_mixed_precision(&self) -> Self {
        let mut out = vec![];
        for (name, dtype, shape, data) in &self.0 {
            let Some(parameter) = name.strip_prefix("model.").filter(|_| *dtype == DType::Float32)
            else {
                out.push((name.clone(), *dtype, shape.clone(), data.clone()));
                continue;
            };
            let rounded = |x: &[u8; 4]| {
                let x = u32::from_le_bytes(*x);
                ((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16
            };
            let bf16 = data.as_chunks().0.iter().flat_map(|x| rounded(x).to_le_bytes()).collect();
            out.push((name.clone(), DType::BFloat16, shape.clone(), bf16));
            out.push((format!("master.{parameter}"), *dtype, shape.clone(), data.clone()));
        }
        out.sort_by(|a, b| a.0.cmp(&b.0));
        Self(out)
    }

    /// The tensors to save.
    pub fn sources(&self) -> Vec<TensorSource<'_>> {
        let list = self.0.iter();
        list.map(|(name, dtype, shape, data)| TensorSource::new(name, *dtype, shape, data))
            .collect()
    }

    /// Whether `names` and `values`, in this order, are those of this state.
    pub fn equals<'a>(&self, names: impl Iterator<Item = &'a str>, values: &[Vec<u8>]) -> bool {
        let all = names.zip(values).zip(&self.0);
        values.len() == self.0.len()
            && all.into_iter().all(|((name, v), t)| name == t.0 && *v == t.3)
    }
}

fn dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::Float64,
        Dtype::F32 => DType::Float32,
        Dtype::BF16 => DType::BFloat16,
        Dtype::F16 => DType::Float16,
        Dtype::F8_E4M3 => DType::Float8E4M3Fn,
        Dtype::F8_E5M2 => DType::Float8E5M2,
        Dtype::I64 => DType::Int64,
        Dtype::I32 => DType::Int32,
        Dtype::I8 => DType::Int8,
        Dtype::U8 => DType::UInt8,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}
