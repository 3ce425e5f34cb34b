//! Tensors that are rounded copies of wider ones in the same checkpoint, as a model's are of the optimizer's weights.

use s4_engine::{
    Input, InputSize, Inputs, TensorError, TensorPlan, TensorValues, Values, chunk_log2, copy_once,
};
use s4_format::index::chunk_count;
use s4_format::manifest::RoleKind;
use s4_format::{ChunkRecord, DType, Error, LayoutId, Plan};
use s4_planes::Kernels;

use crate::inputs::Failure;

/// Values that are compared, evenly spaced, and how many of them may differ.
const LOOKED_AT: u64 = 64;
const MAY_DIFFER: usize = 4;

/// For each tensor the one of which it is a rounded copy, as its number in the list, if a look at a few values finds one:
/// among those with its shape, the weights that the optimizer keeps for it first.
pub(crate) fn wider_copies(tensors: &[TensorValues<'_>]) -> Vec<Option<usize>> {
    let wide = |t: &TensorValues<'_>| t.dtype == DType::Float32;
    let narrow = |t: &TensorValues<'_>| matches!(t.dtype, DType::BFloat16 | DType::Float16);
    if !tensors.iter().any(wide) {
        return vec![None; tensors.len()];
    }
    let find = |t: &TensorValues<'_>| {
        let own = t.role.map(|r| r.row.parameter);
        let alike = |(i, other): (usize, &TensorValues<'_>)| {
            let master = other
                .role
                .is_some_and(|r| r.row.kind == RoleKind::Master && Some(r.row.parameter) == own);
            (wide(other) && other.shape == t.shape).then_some((!master, i))
        };
        let mut found: Vec<_> = tensors.iter().enumerate().filter_map(alike).collect();
        found.sort_unstable();
        found.into_iter().map(|f| f.1).find(|i| is_copy(t, &tensors[*i]))
    };
    tensors.iter().map(|t| if narrow(t) { find(t) } else { None }).collect()
}

/// Whether what is looked at of a tensor is another's, rounded, and not all the same.
fn is_copy(t: &TensorValues<'_>, other: &TensorValues<'_>) -> bool {
    let (Values::Host(own), Values::Host(wide)) = (t.values, other.values) else { return false };
    let values = own.len() as u64 / 2;
    let places = (0..LOOKED_AT.min(values)).map(|i| (values / LOOKED_AT.min(values) * i) as usize);
    let (mut rounded, mut first, mut differ, mut varied) = ([0; 2], None, 0, false);
    for at in places {
        let (Some(x), Some(wide)) = (own.get(2 * at..2 * at + 2), wide.get(4 * at..4 * at + 4))
        else {
            return false;
        };
        match t.dtype {
            DType::BFloat16 => Kernels::default().to_bf16(wide, &mut rounded),
            _ => Kernels::default().to_fp16(wide, &mut rounded),
        }
        differ += usize::from(rounded != x);
        varied |= *first.get_or_insert(x) != x;
        if differ > MAY_DIFFER {
            return false;
        }
    }
    varied
}

/// The plan of a rounded copy of tensor number `tensor`.
pub(crate) fn plan(dtype: DType, tensor: u32) -> TensorPlan {
    // Planes of zeros are stored as such, in any coding; a value that differs is rare.
    let planes = vec![s4_engine::PlaneCoding::RANS8; 2];
    TensorPlan::new(Plan::cast(LayoutId::FIELDS, tensor), planes, chunk_log2(dtype))
}

/// What a rounded copy is made from: values of the host's, and what was stored of them.
pub(crate) struct Wider<'a> {
    pub(crate) values: &'a [u8],
    pub(crate) dtype: DType,
    pub(crate) records: &'a [ChunkRecord],
}

/// The inputs of rounded copies, by number.
pub(crate) struct WiderInputs<'a> {
    pub(crate) tensors: &'a [TensorValues<'a>],
    pub(crate) wider: Vec<Wider<'a>>,
}

impl Inputs<Failure> for WiderInputs<'_> {
    fn size(&self, _: usize, _: u64) -> InputSize {
        InputSize::default()
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, Failure> {
        Ok(chunks.iter().map(|_| Input::Late).collect())
    }

    /// The values that a chunk is predicted from, in one copy. None, if they are not those that were stored: a
    /// reader has only these.
    fn read<'b>(
        &'b self,
        tensor: usize,
        chunk: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], Failure> {
        let (own, wider) = (self.tensors[tensor].dtype, &self.wider[tensor]);
        let size = wider.dtype.value_width() << chunk_log2(wider.dtype);
        // Chunks of the narrower one are whole chunks of the wider one.
        let each = 1u64 << (chunk_log2(own) - chunk_log2(wider.dtype));
        let all = chunk_count(wider.values.len() as u64 / 4, chunk_log2(wider.dtype));
        buffer.clear();
        for number in chunk * each..((chunk + 1) * each).min(all) {
            let number = number as usize;
            let part = wider.values.chunks(size).nth(number).zip(wider.records.get(number));
            let Some((values, record)) = part else {
                let source = Error::corrupt("an input without its record").in_chunk(chunk);
                return Err(TensorError { tensor, source }.into());
            };
            if copy_once(values, buffer) != record.crc_raw {
                return Ok(&[]);
            }
        }
        Ok(buffer)
    }
}
