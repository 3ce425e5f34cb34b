//! Remembers the choice made for a tensor, so that the next time it only needs to be checked.

use s4_format::layout::MAX_PLANES;
use s4_format::side::SideKind;
use s4_format::{DType, LayoutId, PredictorId, ResidualId};
use s4_predict::{Step, Update};

use super::coding::{KnownPlane, PlannedPlane, RememberedPlane};
use super::update::Shape;
use crate::{Preset, TensorPlan};

/// A choice holds while its cost is within this part of the earlier cost: 8 means one in 8.
const HOLDS: u64 = 8;
/// The same for a choice made at another distance to the parent.
const HOLDS_ELSEWHERE: u64 = 4;
/// The same for a choice made for another, similar tensor.
const HOLDS_ALIKE: u64 = 16;
/// A remembered step is kept while its cost has grown by at most this part of the cost without a parent: a step leaves so
/// few bits that no other method can compete, even after it has grown by that much.
const STEP_HOLDS: u64 = 32;
/// As long as it takes no more than this part more, no other constants or layouts are tried either.
const STEP_HOLDS_AS_IS: u64 = 128;
/// Findings about a plane of the same tensor are reused while its entropy stays within this part of the bits of all
/// planes. Findings about another tensor's plane are estimates anyway, and are reused as long as the choice may hold.
const PLANE_HOLDS: u64 = 128;
/// A remembered difference is used again, without a comparison with the values stored without the
/// parent, if it saves at least this part of what they took.
const SURE_GAIN: u64 = 64;

/// The ways to predict values that the planner compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// Not predicted.
    Direct,
    /// By rows and columns.
    Rank1,
    /// The XOR with the parent.
    Xor,
    /// The difference from the parent, taken in the order of values.
    Sub,
    /// The same with the parent's exponents as contexts.
    Contexts,
    /// The same with contexts from moments.
    Update,
    /// The difference from what the optimizer's step makes of the parent.
    Step,
    /// By rows and columns and a share of the parent.
    Blend,
}

/// The planner's choice for a tensor. Given to the planner for the same tensor of a later
/// checkpoint, it is tried first, and nothing else is tried while it costs about the same as
/// before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The preset by whose rules planes are coded: for a small tensor, `fast` if those make it smaller.
    pub(super) preset: Preset,
    pub(super) method: Method,
    pub(super) layout: LayoutId,
    dtype: DType,
    /// Number of values of the tensor.
    values: u64,
    /// Bits of the sample as planned, and in `alone` without a parent.
    bits: u64,
    alone: u64,
    /// Whether row and column offsets were worth trying.
    offsets: bool,
    /// Findings about planes whose symbols have contexts.
    planes: [Option<KnownPlane>; MAX_PLANES],
    /// The parameters of the contexts of [`Method::Update`], and the part of them that similar tensors share.
    update: Option<Update>,
    shape: Option<Shape>,
    /// The step of [`Method::Step`], if it was found for the same checkpoint: an optimizer changes all weights alike.
    step: Option<Step>,
    /// The tensor that the choice was made for.
    of: ChosenFor,
}

/// The tensor that a choice was made for, compared with the tensor that it is tried for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChosenFor {
    /// The same, at the same distance to its parent.
    Same,
    /// The same, at another distance.
    OtherDistance,
    /// Another tensor of the same checkpoint.
    Another,
}

/// Findings about each plane of a plan.
pub(super) fn known_planes(planes: &[PlannedPlane]) -> [Option<KnownPlane>; MAX_PLANES] {
    std::array::from_fn(|i| planes.get(i)?.known)
}

impl Choice {
    /// Records a tensor's facts (`TensorFacts::remembered`), its plan, the findings about its planes, and the estimated
    /// bits of the sample with the plan and without a parent.
    pub(super) fn of(
        (preset, dtype, values, offsets): (Preset, DType, u64, bool),
        (planned, planes, shape): (&TensorPlan, [Option<KnownPlane>; MAX_PLANES], Option<Shape>),
        (bits, alone): (u64, u64),
    ) -> Self {
        let plan = &planned.plan;
        let method = match (plan.predictor, plan.residual) {
            (PredictorId::RANK1, _) => Method::Rank1,
            (PredictorId::BLEND, _) => Method::Blend,
            (PredictorId::STEP, _) => Method::Step,
            (PredictorId::PARENT, ResidualId::XOR) => Method::Xor,
            (PredictorId::PARENT, ResidualId::DESCENT) => Method::Update,
            (PredictorId::PARENT, _) if plan.contexts.is_none() => Method::Sub,
            (PredictorId::PARENT, _) => Method::Contexts,
            _ => Method::Direct,
        };
        let side = |kind| planned.side.get(kind);
        let (update, step) = match method {
            Method::Update => (Update::parse(side(SideKind::CONTEXTS)).ok(), None),
            Method::Step => (None, Step::parse(side(SideKind::STEP)).ok()),
            _ => (None, None),
        };
        Self {
            preset,
            method,
            layout: plan.layout,
            dtype,
            values,
            bits,
            alone,
            offsets,
            planes,
            update,
            shape,
            step,
            of: ChosenFor::Same,
        }
    }

    /// The same, for which row and column offsets were compared, too, or were not.
    pub(super) fn compared_as(self, offsets: bool) -> Self {
        Self { offsets, ..self }
    }

    /// The same for a later checkpoint at the same distance to its parent.
    #[must_use]
    pub fn of_earlier(self) -> Self {
        Self { step: None, ..self }
    }

    /// Whether the tensor is predicted by the optimizer's step.
    pub fn is_step(&self) -> bool {
        self.method == Method::Step
    }

    /// The same with the step that was found for another tensor of the checkpoint that is planned.
    #[must_use]
    pub fn with_step_of(self, other: &Self) -> Self {
        Self { step: other.step, ..self }
    }

    /// The same for another distance to the parent, which changes the cost of a difference more
    /// than which method is best.
    #[must_use]
    pub fn at_other_distance(self) -> Self {
        Self { update: None, step: None, of: ChosenFor::OtherDistance, ..self }
    }

    /// The same for another, similar tensor of the same checkpoint that has no choice of its own.
    #[must_use]
    pub fn for_one_alike(self) -> Self {
        Self { update: None, of: ChosenFor::Another, ..self }
    }

    /// The choice after it held, where `now` records the new plan. If it was made at another
    /// distance or for another tensor, it belongs to this one from now on. If it was made for the
    /// same, it keeps its old bits, so that it does not drift.
    pub(super) fn renewed(self, now: Self) -> Self {
        let now = Self { preset: self.preset, alone: self.alone, ..now };
        match self.of {
            ChosenFor::Same => Self { bits: self.bits, ..now },
            _ => now,
        }
    }

    /// Estimated bits of the sample.
    pub(super) fn bits(&self) -> u64 {
        self.bits
    }

    /// The remembered findings about a plane whose symbols have contexts.
    pub(super) fn plane(&self, number: usize) -> Option<RememberedPlane> {
        let plane = (*self.planes.get(number)?)?;
        let is_own = self.of == ChosenFor::Same;
        let part = if is_own { PLANE_HOLDS } else { self.tolerance() };
        Some(RememberedPlane { plane, within: self.bits / part, is_own })
    }

    /// Whether `planes` turned out as remembered.
    pub(super) fn planes_are(&self, planes: &[PlannedPlane]) -> bool {
        known_planes(planes) == self.planes
    }

    /// The shape of the contexts of [`Method::Update`].
    pub(super) fn shape(&self) -> Option<Shape> {
        self.shape
    }

    /// The parameters of the contexts of [`Method::Update`].
    pub(super) fn update(&self) -> Option<Update> {
        self.update
    }

    /// The step to try.
    pub(super) fn step(&self) -> Option<Step> {
        self.step
    }

    /// Whether a step that costs `bits` is about as good as before: then no other constants or layouts are tried.
    pub(super) fn leaves_little_more(&self, bits: u64) -> bool {
        bits <= self.bits + self.alone / STEP_HOLDS_AS_IS
    }

    /// Whether the tensor is stored as a difference from a parent.
    pub fn is_delta(&self) -> bool {
        !matches!(self.method, Method::Direct | Method::Rank1)
    }

    /// Whether it was made for a tensor of this dtype and number of values.
    pub(super) fn fits(&self, dtype: DType, values: u64) -> bool {
        (self.dtype, self.values) == (dtype, values)
    }

    /// Whether it was made at another distance to the parent.
    pub(super) fn is_of_other_distance(&self) -> bool {
        self.of == ChosenFor::OtherDistance
    }

    /// Whether it was made for another tensor.
    pub(super) fn is_of_another(&self) -> bool {
        self.of == ChosenFor::Another
    }

    /// Whether it was made for another tensor for which row and column offsets were not worth trying.
    pub(super) fn knows_no_offsets(&self) -> bool {
        self.is_of_another() && !self.offsets
    }

    /// Whether row and column offsets are needed.
    pub(super) fn needs_offsets(&self) -> bool {
        matches!(self.method, Method::Rank1 | Method::Blend)
    }

    /// Whether the sample without a parent took clearly more than `bits`, the bits of a difference.
    pub(super) fn exceeds(&self, bits: u64) -> bool {
        bits < self.alone - self.alone / SURE_GAIN
    }

    /// Whether the choice may be kept for a sample that takes `bits` with it.
    pub(super) fn holds(&self, bits: u64) -> bool {
        match self.method {
            Method::Step => bits <= self.bits + self.alone / STEP_HOLDS,
            _ => bits.abs_diff(self.bits) <= self.bits / self.tolerance(),
        }
    }

    /// The part of its bits by which the cost may differ.
    fn tolerance(&self) -> u64 {
        match self.of {
            ChosenFor::Same => HOLDS,
            ChosenFor::OtherDistance => HOLDS_ELSEWHERE,
            ChosenFor::Another => HOLDS_ALIKE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_of_another_distance_is_one_of_this_once_it_was_made_again() {
        let choice = Choice {
            preset: Preset::Balanced,
            method: Method::Sub,
            layout: LayoutId::FIELDS,
            dtype: DType::Float32,
            values: 1,
            bits: 800,
            alone: 2000,
            offsets: false,
            planes: [None; MAX_PLANES],
            update: None,
            shape: None,
            step: None,
            of: ChosenFor::Same,
        };
        assert!(choice.holds(900) && choice.holds(700) && !choice.holds(901));
        let now = Choice { bits: 900, ..choice };
        assert_eq!(choice.renewed(now), choice);
        let elsewhere = choice.at_other_distance();
        assert!(elsewhere.holds(1000) && !elsewhere.holds(1001));
        let now = Choice { bits: 1000, alone: 0, ..choice };
        let here = elsewhere.renewed(now);
        assert_eq!(here, Choice { bits: 1000, ..choice });
        assert!(here.holds(1125) && !here.holds(1126) && !here.holds(800));
    }
}
