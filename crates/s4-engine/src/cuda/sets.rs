//! Data that chunks need in device memory besides their values and frames: tables, the offsets of rows and columns, and
//! the parameters for using moments.

use s4_codec_cpu::rans::{Precision, Table, parse_tables};
use s4_codec_gpu::abi::{self, SharedTable, TableSet};
use s4_format::layout::MAX_PLANES;
use s4_format::limits::ALIGN;
use s4_format::side::{Side, SideKind};
use s4_format::{DType, Error, Plan, Result};
use s4_planes::StepFactors;
use s4_predict::rank1::Offsets;
use s4_predict::{Step, Tensor, Update};

use crate::moments::MomentUse;
use crate::tables::SharedTables;
use crate::{TensorPlan, TensorSpec, TensorValues};

/// Data that the chunks of a tensor share.
#[derive(Default)]
pub(super) struct TensorSet<'a> {
    tables: Vec<SharedTable>,
    /// Number of tables of each plane.
    counts: [u32; MAX_PLANES],
    /// The offsets of the columns.
    columns: &'a [u8],
    /// The use of the moments, if there are some.
    moments: Option<ByMoments>,
}

/// The uses of moments.
enum ByMoments {
    /// Contexts.
    Update(abi::Update),
    /// Predictions.
    Step(abi::Step),
}

impl ByMoments {
    /// Bytes in device memory.
    const LEN: usize = ALIGN;

    fn write(&self, to: &mut [u8]) {
        let bytes = match self {
            Self::Update(update) => bytemuck::bytes_of(update),
            Self::Step(step) => bytemuck::bytes_of(step),
        };
        to[..bytes.len()].copy_from_slice(bytes);
    }
}

/// The place of a [`TensorSet`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SetPlace {
    /// Address, or offset from one.
    pub(super) at: u64,
    /// Bytes there.
    pub(super) len: usize,
    counts: [u32; MAX_PLANES],
    columns: bool,
    /// Offset from the start of [`abi::Update`] or [`abi::Step`], if there is one.
    moments: Option<usize>,
}

/// Data that only one chunk needs: the offsets of its rows.
pub(super) struct Rows<'a> {
    head: abi::Offsets,
    rows: &'a [u8],
}

/// Either of the two. Extras lie one after the other.
pub(super) enum Extra<'a> {
    Set(TensorSet<'a>),
    Rows(Rows<'a>),
}

impl<'a> TensorSet<'a> {
    /// For an encoder.
    ///
    /// # Errors
    /// `Corrupt` if the plan's side data is not for the tensor.
    pub(super) fn of_plan(plan: &'a TensorPlan, t: &TensorValues<'a>) -> Result<Self> {
        let mut set = Self::default();
        for i in 0..MAX_PLANES {
            if plan.tables(i).is_empty() {
                continue;
            }
            let Ok(precision) = Precision::from_param(plan.coding(i).param) else { continue };
            set.add(i, &parse_tables(precision, plan.tables(i))?);
        }
        let tensor = Tensor { dtype: t.dtype, shape: t.shape, side: &plan.side };
        set.columns = offsets(&plan.plan, &tensor)?.map_or(&[][..], |o| o.col_offsets());
        set.moments = by_moments(&plan.plan, t.dtype, &plan.side, plan.one_table)?;
        Ok(set)
    }

    /// For a decoder. A plane whose tables fit neither precision gets none: the CPU decodes its streams.
    ///
    /// # Errors
    /// `Corrupt` if the side data is not valid.
    pub(super) fn of_spec(spec: &TensorSpec<'a>) -> Result<Self> {
        let mut set = Self::default();
        let bytes = SharedTables::parse(spec.side.get(SideKind::TABLES))?;
        for i in 0..MAX_PLANES {
            if bytes.plane(i).is_empty() {
                continue;
            }
            // The streams say which precision it is; a table is valid for one only.
            let parse = |precision| parse_tables(precision, bytes.plane(i)).ok();
            let tables = [Precision::P8, Precision::P12].into_iter().find_map(parse);
            set.add(i, &tables.unwrap_or_default());
        }
        let tensor = Tensor { dtype: spec.dtype, shape: spec.shape, side: spec.side };
        set.columns = offsets(spec.plan, &tensor)?.map_or(&[][..], |o| o.col_offsets());
        set.moments = by_moments(spec.plan, spec.dtype, spec.side, 0)?;
        Ok(set)
    }

    fn add(&mut self, plane: usize, tables: &[Table]) {
        // At most `MAX_TABLES`.
        self.counts[plane] = tables.len() as u32;
        self.tables.extend(tables.iter().map(SharedTable::from));
    }

    /// Its place if it starts at `at`.
    pub(super) fn place(&self, at: u64) -> SetPlace {
        let (counts, columns) = (self.counts, !self.columns.is_empty());
        let moments = self.moments.as_ref().map(|_| self.tables_len() + self.columns_len());
        SetPlace { at, len: self.len(), counts, columns, moments }
    }

    fn tables_len(&self) -> usize {
        size_of_val(&self.tables[..]).next_multiple_of(ALIGN)
    }

    fn columns_len(&self) -> usize {
        self.columns.len().next_multiple_of(ALIGN)
    }

    fn len(&self) -> usize {
        let moments = if self.moments.is_some() { ByMoments::LEN } else { 0 };
        self.tables_len() + self.columns_len() + moments
    }

    fn write(&self, to: &mut [u8]) {
        let tables = bytemuck::cast_slice::<_, u8>(&self.tables);
        to[..tables.len()].copy_from_slice(tables);
        to[self.tables_len()..][..self.columns.len()].copy_from_slice(self.columns);
        if let Some(moments) = &self.moments {
            moments.write(&mut to[self.tables_len() + self.columns_len()..]);
        }
    }
}

impl SetPlace {
    /// The place, with its offset taken from `base`.
    pub(super) fn moved_by(self, base: u64) -> Self {
        Self { at: base + self.at, ..self }
    }

    /// The tables of each plane.
    pub(super) fn tables(&self) -> [TableSet; MAX_PLANES] {
        TableSet::of_counts(self.at, &self.counts)
    }

    /// Address of the offsets of columns; 0 if there are none.
    pub(super) fn columns(&self) -> u64 {
        let tables = self.counts.iter().sum::<u32>() as usize * size_of::<SharedTable>();
        if self.columns { self.at + tables.next_multiple_of(ALIGN) as u64 } else { 0 }
    }

    /// Address of [`abi::Update`] or [`abi::Step`]; 0 if the plan uses no moments.
    pub(super) fn moments(&self) -> u64 {
        self.moments.map_or(0, |at| self.at + at as u64)
    }
}

impl<'a> Rows<'a> {
    /// The rows of `n` values from index `first` on of a tensor; `None` if nothing is predicted by rows.
    ///
    /// # Errors
    /// `Corrupt` if the side data is not for the tensor.
    pub(super) fn of(
        plan: &Plan,
        tensor: &Tensor<'a>,
        (first, n): (u64, u64),
    ) -> Result<Option<Self>> {
        let Some(offsets) = offsets(plan, tensor)? else { return Ok(None) };
        let cols = offsets.cols() as u64;
        let (row, end) = (first / cols, (first + n).div_ceil(cols));
        // The values are within the tensor, so their rows exist.
        let rows = offsets.row_offsets().get(2 * row as usize..2 * end as usize);
        let rows = rows.unwrap_or_default();
        let head = abi::Offsets {
            base: offsets.base(),
            first: first - row * cols,
            shift: offsets.shift(),
            rows: (rows.len() / 2) as u32,
            cols: cols as u32,
            share: offsets.share().into(),
        };
        Ok(Some(Self { head, rows }))
    }

    /// Bytes in device memory.
    pub(super) fn len(&self) -> usize {
        (size_of::<abi::Offsets>() + self.rows.len()).next_multiple_of(ALIGN)
    }

    fn write(&self, to: &mut [u8]) {
        let (head, rows) = to.split_at_mut(size_of::<abi::Offsets>());
        head.copy_from_slice(bytemuck::bytes_of(&self.head));
        rows[..self.rows.len()].copy_from_slice(self.rows);
    }
}

impl Extra<'_> {
    /// Bytes in device memory: a multiple of 16.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Set(set) => set.len(),
            Self::Rows(rows) => rows.len(),
        }
    }

    /// Writes it to the start of `to`.
    pub(super) fn write(&self, to: &mut [u8]) {
        match self {
            Self::Set(set) => set.write(to),
            Self::Rows(rows) => rows.write(to),
        }
    }
}

/// Writes all extras, one after the other; returns the bytes that they take.
pub(super) fn write_all(extras: &[Extra<'_>], to: &mut [u8]) -> usize {
    extras.iter().fold(0, |at, extra| {
        extra.write(&mut to[at..]);
        at + extra.len()
    })
}

fn offsets<'a>(plan: &Plan, tensor: &Tensor<'a>) -> Result<Option<Offsets<'a>>> {
    if !plan.has_offsets() {
        return Ok(None);
    }
    Offsets::of(plan.predictor, tensor).map(Some)
}

/// The use that a plan makes of its tensor's moments, if any.
fn by_moments(plan: &Plan, dtype: DType, side: &Side, one_table: u8) -> Result<Option<ByMoments>> {
    let Some(by) = MomentUse::of(plan, side)? else { return Ok(None) };
    let (first, second) = by.dtypes();
    let type_of = |dtype| {
        let what =
            || Error::corrupt(format!("values cannot be predicted from moments of dtype {dtype}"));
        float(dtype).ok_or_else(what)
    };
    let second = second.map_or(Ok(abi::float::NONE), type_of)?;
    let (weight, moments) = (type_of(dtype)?, [type_of(first)?, second]);
    Ok(Some(match by {
        MomentUse::Step(Step { factors: StepFactors { keep, rate, epsilon }, .. }) => {
            ByMoments::Step(abi::Step { keep, rate, epsilon, weight, moments, reserved: 0 })
        }
        MomentUse::Contexts(Update { floor, offset, .. }) => {
            ByMoments::Update(abi::Update { floor, offset, weight, moments, one_table })
        }
    }))
}

/// The kernels' number of a dtype that weights and moments may have.
pub(super) fn float(dtype: DType) -> Option<u8> {
    match dtype {
        DType::BFloat16 => Some(abi::float::BF16),
        DType::Float16 => Some(abi::float::F16),
        DType::Float32 => Some(abi::float::F32),
        _ => None,
    }
}

/// The inputs of a descriptor, by address: the values of its input, its rows, what its tensor's chunks share, and its
/// moments if it has some.
pub(super) fn inputs(
    values: u64,
    rows: u64,
    set: &SetPlace,
    moments: [u64; 2],
) -> [u64; abi::MAX_INPUTS] {
    let mut inputs = abi::parent_input(values);
    if set.moments() == 0 {
        (inputs[abi::OFFSETS], inputs[abi::COLUMNS]) = (rows, set.columns());
    } else {
        [inputs[abi::FIRST], inputs[abi::SECOND]] = moments;
        // The same place, whatever they are used for.
        const { assert!(abi::UPDATE == abi::FACTORS) }
        inputs[abi::FACTORS] = set.moments();
    }
    inputs
}

/// Exponent of class 0, and the shift of exponents below it, from the side data of contexts.
///
/// # Errors
/// `Corrupt` if the side data has none.
pub(super) fn class(side: &Side) -> Result<[u8; 2]> {
    let (top, shift) = s4_predict::exponent::parse(side.get(SideKind::CONTEXTS))?;
    // At most 7.
    Ok([top, shift as u8])
}
