//! The arrays that a .s4w file becomes in a .safetensors file: its tensors as they were saved. The .s4w file
//! stores their memory, of which a tensor may be a part, in any order, so each is read by its shape, offset and
//! strides.

use std::collections::HashMap;

use s4weights::{ArrayView, DType, Reader, Slice, TensorInfo};
use safetensors::tensor::Dtype;

use crate::error::{Failure, Result};
use crate::left_out::LeftOut;
use crate::tree::{Place, Tree};

/// Prefix of the metadata that keeps the safetensors dtype and shape of a tensor whose dtype PyTorch lacks.
pub(crate) const FOREIGN: &str = "safetensors.";

/// How much larger than the stored data the arrays may be: views may repeat values without end.
const MOST_TIMES: u64 = 16;
const MOST_MORE: u64 = 1 << 30;

/// The dtypes that both formats have.
pub(crate) const DTYPES: [(Dtype, DType); 19] = [
    (Dtype::BOOL, DType::Bool),
    (Dtype::U8, DType::UInt8),
    (Dtype::I8, DType::Int8),
    (Dtype::F8_E5M2, DType::Float8E5M2),
    (Dtype::F8_E4M3, DType::Float8E4M3Fn),
    (Dtype::F8_E8M0, DType::Float8E8M0Fnu),
    (Dtype::F8_E4M3FNUZ, DType::Float8E4M3FnUz),
    (Dtype::F8_E5M2FNUZ, DType::Float8E5M2FnUz),
    (Dtype::I16, DType::Int16),
    (Dtype::U16, DType::UInt16),
    (Dtype::F16, DType::Float16),
    (Dtype::BF16, DType::BFloat16),
    (Dtype::I32, DType::Int32),
    (Dtype::U32, DType::UInt32),
    (Dtype::F32, DType::Float32),
    (Dtype::C64, DType::Complex64),
    (Dtype::F64, DType::Float64),
    (Dtype::I64, DType::Int64),
    (Dtype::U64, DType::UInt64),
];

/// One tensor of the .safetensors file.
#[derive(Debug)]
pub(crate) struct Array {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// The shape in the .safetensors file.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: usize,
    /// The number of the stored tensor, and which part of it this is, in elements of `item` bytes.
    tensor: usize,
    item: u64,
    sizes: Vec<u64>,
    offset: u64,
    stride: Vec<u64>,
}

/// The content of the .safetensors file, and what is left out of it.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    pub(crate) arrays: Vec<Array>,
    pub(crate) metadata: HashMap<String, String>,
    pub(crate) left_out: LeftOut,
}

impl Arrays {
    /// Finds the tensors of a checkpoint.
    ///
    /// # Errors
    /// `Unsupported` if only PyTorch can tell what they are, or safetensors cannot hold one; `Damaged`.
    pub(crate) fn of(reader: &Reader, input: &str) -> Result<Self> {
        let mut out = Self {
            metadata: reader.manifest().metadata.clone().into_iter().collect(),
            left_out: LeftOut::of(reader),
            ..Self::default()
        };
        let stored: Vec<_> = reader.tensors().collect();
        match reader.tree() {
            Some(tree) => out.of_tree(&stored, input, tree)?,
            None if out.left_out.pickled => return Err(pickled(input)),
            None => {
                for (number, t) in stored.iter().enumerate() {
                    let place = Place { tensor: number as u64, ..Place::default() };
                    let mut array = array(&stored, input, t.name.to_owned(), &place)?;
                    if let Some(known) = foreign(&mut out.metadata, t) {
                        (array.dtype, array.shape) = known;
                    }
                    out.arrays.push(array);
                }
            }
        }
        // The format has its metadata under this name.
        if out.arrays.iter().any(|a| a.name == "__metadata__") {
            let what = "safetensors does not allow a tensor named `__metadata__`; write a .pt file with the Python \
                        wheel";
            return Err(Failure::Unsupported(format!("{input}: {what}")));
        }
        Ok(out)
    }

    fn of_tree(&mut self, stored: &[TensorInfo<'_>], input: &str, text: &str) -> Result<()> {
        let tree = Tree::parse(text).map_err(|what| damaged(input, &what))?;
        if tree.is_cut {
            let what = "the names of its tensors are longer than a .safetensors file can hold";
            return Err(Failure::Unsupported(format!("{input}: {what}")));
        }
        let most: u64 = stored.iter().map(|t| t.bytes).sum();
        let mut written = 0_u64;
        let mut first: HashMap<Place, usize> = HashMap::new();
        for (name, place) in tree.tensors {
            // As safetensors' own `save_model` does: one of several tensors that are the same is written, and the metadata
            // has the names of the others.
            if let Some(same) = first.get(&place) {
                let same = self.arrays[*same].name.clone();
                self.metadata.entry(name).or_insert(same);
                self.left_out.shared += 1;
                continue;
            }
            let array = array(stored, input, name, &place)?;
            written = written.saturating_add(array.bytes as u64);
            first.insert(place, self.arrays.len());
            self.arrays.push(array);
            if written > most.saturating_mul(MOST_TIMES).saturating_add(MOST_MORE) {
                return Err(Failure::Unsupported(format!(
                    "{input}: its tensors repeat what is stored, and a .safetensors file would hold every copy: \
                     at least {written} bytes for {most} stored; write a .pt file with the Python wheel instead"
                )));
            }
        }
        let mut used = vec![false; stored.len()];
        self.arrays.iter().for_each(|a| used[a.tensor] = true);
        self.left_out.values = tree.values;
        self.left_out.unreached = used.iter().filter(|used| !**used).count();
        Ok(())
    }
}

/// The dtype and shape of a tensor that `compress` stored as mere bytes, taken out of the metadata. Others' metadata
/// may have keys that look like its own, and stay.
fn foreign(
    metadata: &mut HashMap<String, String>,
    stored: &TensorInfo<'_>,
) -> Option<(Dtype, Vec<usize>)> {
    let key = format!("{FOREIGN}{}", stored.name);
    let known: (Dtype, Vec<usize>) = serde_json::from_str(metadata.get(&key)?).ok()?;
    let (dtype, shape) = &known;
    let bits = shape.iter().try_fold(dtype.bitsize() as u64, |n, d| n.checked_mul(*d as u64))?;
    if stored.dtype != DType::Bytes || stored.bytes.checked_mul(8) != Some(bits) {
        return None;
    }
    metadata.remove(&key);
    Some(known)
}

fn damaged(input: &str, what: &str) -> Failure {
    Failure::Damaged(format!("{input}: corrupt data (tree): {what}"))
}

fn pickled(input: &str) -> Failure {
    Failure::Unsupported(format!(
        "{input}: the saved object is a pickle, and only PyTorch can tell which tensors it has. Use the Python \
         wheel's `s4w` to write them, or everything to a .pt file: `pip install s4weights torch`"
    ))
}

/// The array of a tensor, once its place is known to lie within what is stored.
fn array(stored: &[TensorInfo<'_>], input: &str, name: String, place: &Place) -> Result<Array> {
    let tensor = usize::try_from(place.tensor).unwrap_or(usize::MAX);
    let no_tensor =
        || damaged(input, &format!("`{name}` is tensor {tensor}, which does not exist"));
    let stored = stored.get(tensor).ok_or_else(no_tensor)?;
    let (dtype, item) = match &place.dtype {
        None => (their_type(stored.dtype), stored.dtype.size() as u64),
        Some(known) => {
            let ours = DType::ALL.iter().find(|d| d.name() == known && **d != DType::Bytes);
            (ours.and_then(|d| their_type(*d)), ours.map_or(1, |d| d.size() as u64))
        }
    };
    let dtype = dtype.ok_or_else(|| {
        let dtype = place.dtype.as_deref().unwrap_or(stored.dtype.name());
        let dtype: String = dtype.chars().take(100).collect();
        Failure::Unsupported(format!(
            "{input}: tensor `{name}` has dtype {dtype}, which safetensors does not support; write a .pt file \
             with the Python wheel instead"
        ))
    })?;
    let sizes = place.shape.clone().unwrap_or_else(|| stored.shape.to_vec());
    let stride = place.stride.clone().unwrap_or_else(|| row_major(&sizes));
    let outside =
        || damaged(input, &format!("`{name}` is outside of the {} stored bytes", stored.bytes));
    let elements = match sizes.contains(&0) {
        true => Some(0),
        false => sizes.iter().try_fold(1_u64, |n, size| n.checked_mul(*size)),
    };
    let last = sizes.iter().zip(&stride).try_fold(place.offset, |at, (size, step)| {
        at.checked_add(size.saturating_sub(1).checked_mul(*step)?)
    });
    let end = last.and_then(|last| last.checked_add(1)?.checked_mul(item));
    let fits = elements == Some(0) || end.is_some_and(|end| end <= stored.bytes);
    if sizes.len() != stride.len() || !fits {
        return Err(outside());
    }
    let bytes = elements.and_then(|n| usize::try_from(n.checked_mul(item)?).ok());
    let shape = sizes.iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect();
    let bytes = bytes.ok_or_else(outside)?;
    Ok(Array { name, dtype, shape, bytes, tensor, item, sizes, offset: place.offset, stride })
}

impl Array {
    /// Reads the values, in row-major order.
    pub(crate) fn read(&self, reader: &Reader) -> Result<Vec<u8>> {
        let mut out = buffer(self.bytes, &self.name)?;
        if self.bytes == 0 {
            return Ok(out);
        }
        let (tensor, item) = (self.tensor, self.item);
        let all = |sizes: &[u64]| Slice(sizes.iter().map(|n| 0..*n).collect());
        let offset = self.offset * item;
        if let Some(run) = self.run().filter(|run| *run == self.bytes) {
            debug_assert_eq!(run, out.len());
            let view = ArrayView { offset, item, shape: &self.sizes };
            reader.read_view(tensor, view, &all(&self.sizes), &mut out)?;
            return Ok(out);
        }
        // The range that it lies in is read as a whole.
        let last: u64 = self.sizes.iter().zip(&self.stride).map(|(n, step)| (n - 1) * step).sum();
        let span = [last + 1];
        let bytes = usize::try_from((last + 1) * item).unwrap_or(usize::MAX);
        let mut range = buffer(bytes, &self.name)?;
        reader.read_view(
            tensor,
            ArrayView { offset, item, shape: &span },
            &all(&span),
            &mut range,
        )?;
        self.gather(&range, &mut out);
        Ok(out)
    }

    /// How many dimensions, counted from the last, lie in memory without gaps.
    fn adjacent(&self) -> usize {
        let mut step = 1;
        let dimensions = self.sizes.iter().zip(&self.stride).rev();
        dimensions
            .take_while(|&(&size, &stride)| {
                let is_next = size == 1 || stride == step;
                step *= size;
                is_next
            })
            .count()
    }

    /// The bytes of a run of elements that are adjacent both in memory and in the array.
    fn run(&self) -> Option<usize> {
        let inner = &self.sizes[self.sizes.len() - self.adjacent()..];
        usize::try_from(inner.iter().product::<u64>() * self.item).ok()
    }

    /// Copies the elements from the range of memory that they lie in.
    fn gather(&self, from: &[u8], to: &mut [u8]) {
        let outer = self.sizes.len() - self.adjacent();
        let run = self.run().unwrap_or(1);
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        // A dimension of size 1 may have any stride, also one that no memory has.
        let outer = self.sizes[..outer].iter().zip(&self.stride).filter(|(n, _)| **n > 1);
        let outer: Vec<_> = outer.map(|(n, step)| (size(*n), size(step * self.item))).collect();
        let mut index = vec![0; outer.len()];
        let mut at = 0;
        for part in to.chunks_exact_mut(run) {
            part.copy_from_slice(&from[at..at + run]);
            for (index, (size, step)) in index.iter_mut().zip(&outer).rev() {
                *index += 1;
                at += step;
                if *index < *size {
                    break;
                }
                at -= step * size;
                *index = 0;
            }
        }
    }
}

/// Memory for values of a tensor: a file may claim more of them than fit.
pub(crate) fn buffer(bytes: usize, name: &str) -> Result<Vec<u8>> {
    let mut out = vec![];
    out.try_reserve_exact(bytes).map_err(|_| {
        Failure::NoMemory(format!("no memory for {bytes} bytes of tensor `{name}`"))
    })?;
    out.resize(bytes, 0);
    Ok(out)
}

/// The strides of a tensor whose elements lie in order.
fn row_major(sizes: &[u64]) -> Vec<u64> {
    let mut step = 1_u64;
    let mut stride = vec![0; sizes.len()];
    for (to, size) in stride.iter_mut().zip(sizes).rev() {
        *to = step;
        step = step.saturating_mul((*size).max(1));
    }
    stride
}

fn their_type(dtype: DType) -> Option<Dtype> {
    let found = DTYPES.iter().find(|(_, ours)| *ours == dtype).map(|(theirs, _)| *theirs);
    found.or_else(|| (dtype == DType::Bytes).then_some(Dtype::U8))
}
