//! Facts about a tensor that are known before its values are sampled.

use s4_format::DType;
use s4_format::dtype::ElementForm;
use s4_format::manifest::{RoleKind, TensorRole};

use super::allowed::allowed;
use super::choice::Choice;
use super::sample;
use crate::Preset;
use crate::chunk::chunk_log2;

/// Facts about a tensor that are known before its values are sampled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorFacts<'a> {
    pub(crate) preset: Preset,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    pub(crate) bytes: usize,
    pub(crate) role: Option<RoleKind>,
    /// The constant that its optimizer adds to the roots of second moments, if it is known.
    pub(crate) epsilon: Option<f64>,
    /// The earlier choice, if it was made for a tensor of this kind.
    pub(crate) choice: Option<Choice>,
    /// Whether row and column offsets are worth trying for it.
    pub(super) has_offsets: bool,
    /// Whether chunks with tables of their own are considered, however few there are.
    pub(super) own_tables: bool,
    /// The choice being tried again: values are only sampled in its layout.
    pub(super) again: Option<Choice>,
}

impl<'a> TensorFacts<'a> {
    /// For a tensor of `bytes` bytes; `choice` is dropped if it does not fit.
    pub(crate) fn new(
        preset: Preset,
        (dtype, shape, bytes): (DType, &'a [u64], usize),
        role: Option<TensorRole<'_>>,
        choice: Option<Choice>,
    ) -> Self {
        let epsilon = role.and_then(|r| r.scalars()?.get("eps").copied());
        let role = role.map(|r| r.row.kind);
        let about = Self {
            preset,
            dtype,
            shape,
            bytes,
            role,
            epsilon,
            choice: None,
            has_offsets: false,
            own_tables: false,
            again: None,
        };
        Self { choice: choice.filter(|choice| choice.fits(dtype, about.values())), ..about }
    }

    /// The same, with a choice to try again, by the rules that it was made by.
    pub(super) fn again(self, choice: Choice) -> Self {
        Self { choice: None, again: Some(choice), preset: choice.preset, ..self }
    }

    /// The same, with or without row and column offsets. A choice made for another tensor that had none
    /// is dropped if this one has some.
    pub(super) fn with_offsets(self, has_offsets: bool) -> Self {
        let unlike = |choice: &Choice| has_offsets && choice.knows_no_offsets();
        Self { choice: self.choice.filter(|choice| !unlike(choice)), has_offsets, ..self }
    }

    /// The same, without an earlier choice.
    pub(super) fn without_choice(self) -> Self {
        Self { choice: None, ..self }
    }
}

impl TensorFacts<'_> {
    pub(super) fn width(&self) -> usize {
        self.dtype.value_width()
    }

    pub(crate) fn values(&self) -> u64 {
        (self.bytes / self.width()) as u64
    }

    /// What a choice remembers of it: preset, dtype, number of values, and whether row and column offsets
    /// were worth trying.
    pub(super) fn remembered(&self) -> (Preset, DType, u64, bool) {
        (self.preset, self.dtype, self.values(), self.has_offsets)
    }

    /// Values in each run of a sample.
    pub(super) fn run(&self) -> u64 {
        sample::probe(self.values())
    }

    /// Whether its chunks share tables.
    pub(super) fn shares_tables(&self) -> bool {
        self.values() > 1 << chunk_log2(self.dtype)
    }

    /// Whether row and column offsets may be worth it, which they are not for weights.
    pub(super) fn may_have_offsets(&self) -> bool {
        let floats = self.dtype.form() == ElementForm::Float
            && self.dtype.size() == self.dtype.value_width();
        let weight = matches!(self.role, Some(RoleKind::Weight | RoleKind::Master));
        allowed(self.preset).rank1 && floats && !weight
    }

    /// Whether it has so many chunks that a sample takes values from several of them.
    pub(super) fn is_long(&self) -> bool {
        self.values() >> chunk_log2(self.dtype) >= sample::MANY_CHUNKS
    }

    /// The number of chunks, if it is considered that each may have tables of its own.
    pub(super) fn chunks_with_own_tables(&self) -> Option<u64> {
        let considered = self.own_tables || self.is_long();
        considered.then(|| self.values().div_ceil(1 << chunk_log2(self.dtype)))
    }
}
