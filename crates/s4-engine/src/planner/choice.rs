//! What was chosen for a tensor before: to choose again is then to see whether it still is as good.

use s4_format::{DType, LayoutId, Plan, PredictorId, ResidualId};

use super::About;

/// A choice holds while what it costs differs from what it did by less than this part: 8 means one in 8.
const HOLDS: u64 = 8;
/// The same at another distance to the parent.
const HOLDS_ELSEWHERE: u64 = 4;
/// A remembered difference is used again without a look at the values by themselves if it saves at least this part of what
/// they took.
const SURE_GAIN: u64 = 64;

/// How values are predicted, of what the planner compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By nothing.
    Direct,
    /// By rows and columns.
    Rank1,
    /// The XOR with the parent.
    Xor,
    /// The difference from the parent in the order of values.
    Sub,
    /// The same with the parent's exponents as contexts.
    Contexts,
    /// The same with contexts from moments.
    Update,
    /// By rows and columns and a share of the parent.
    Blend,
}

/// What the planner chose for a tensor. Given to it with the same tensor of a later checkpoint, it is tried first, and
/// nothing else is as long as it costs about what it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub(super) way: Way,
    pub(super) layout: LayoutId,
    dtype: DType,
    /// Of the tensor.
    values: u64,
    /// Bits of the sample, and of it without a parent.
    bits: u64,
    alone: u64,
    /// It holds within this part of its bits.
    holds: u64,
}

impl Choice {
    /// Records a plan, and the estimated bits of the sample by it and without a parent. `None` if the sample is the whole
    /// tensor: such plans are compared by encoding it.
    pub(super) fn of(
        about: &About<'_>,
        sampled: usize,
        plan: &Plan,
        (bits, alone): (u64, u64),
    ) -> Option<Self> {
        let way = match (plan.predictor, plan.residual) {
            (PredictorId::RANK1, _) => Way::Rank1,
            (PredictorId::BLEND, _) => Way::Blend,
            (PredictorId::PARENT, ResidualId::XOR) => Way::Xor,
            (PredictorId::PARENT, ResidualId::DESCENT) => Way::Update,
            (PredictorId::PARENT, _) if plan.contexts.is_none() => Way::Sub,
            (PredictorId::PARENT, _) => Way::Contexts,
            _ => Way::Direct,
        };
        let (dtype, values, layout) = (about.dtype, about.values(), plan.layout);
        let choice = Self { way, layout, dtype, values, bits, alone, holds: HOLDS };
        (sampled < about.bytes).then_some(choice)
    }

    /// The same for another distance to the parent: what a difference takes depends on it more than which way is best.
    #[must_use]
    pub fn at_other_distance(self) -> Self {
        Self { holds: HOLDS_ELSEWHERE, ..self }
    }

    /// The same after it was made again, of a sample that takes so many bits: one of another distance is one of this distance
    /// from now on.
    pub(super) fn made_again(self, bits: u64) -> Self {
        match self.holds {
            HOLDS => self,
            _ => Self { bits, holds: HOLDS, ..self },
        }
    }

    /// Whether the tensor is stored as a difference from a parent.
    pub fn is_delta(&self) -> bool {
        !matches!(self.way, Way::Direct | Way::Rank1)
    }

    /// Whether it was made for such a tensor.
    pub(super) fn fits(&self, about: &About<'_>) -> bool {
        (self.dtype, self.values) == (about.dtype, about.values())
    }

    /// Whether row and column offsets are needed.
    pub(super) fn needs_offsets(&self) -> bool {
        matches!(self.way, Way::Rank1 | Way::Blend)
    }

    /// Whether the sample without a parent takes clearly more bits than these, which a difference takes.
    pub(super) fn exceeds(&self, bits: u64) -> bool {
        bits < self.alone - self.alone / SURE_GAIN
    }

    /// Whether it may be made again of a sample that takes so many bits by it.
    pub(super) fn holds(&self, bits: u64) -> bool {
        bits.abs_diff(self.bits) <= self.bits / self.holds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_of_another_distance_is_one_of_this_once_it_was_made_again() {
        let (way, layout, dtype) = (Way::Sub, LayoutId::FIELDS, DType::Float32);
        let choice = Choice { way, layout, dtype, values: 1, bits: 800, alone: 2000, holds: HOLDS };
        assert!(choice.holds(900) && choice.holds(700) && !choice.holds(901));
        // The bits that it was made for stay, so that it does not drift.
        assert_eq!(choice.made_again(900), choice);
        let elsewhere = choice.at_other_distance();
        assert!(elsewhere.holds(1000) && !elsewhere.holds(1001));
        let here = elsewhere.made_again(1000);
        assert_eq!(here, Choice { bits: 1000, ..choice });
        assert!(here.holds(1125) && !here.holds(1126) && !here.holds(800));
    }
}
