//! Plans a tensor as its difference from a parent's tensor.

use s4_format::dtype::ElementForm;
use s4_format::side::{Side, SideKind};
use s4_format::{ContextsId, Error, Plan, ResidualId, Result};
use s4_predict::{ContextModel, Exponents, Tensor, Update, Updates, exponent};

use super::choice::{Choice, Method, known_planes};
use super::layout::{Candidate, SampleKind};
use super::update::Shape;
use super::{
    FittedOffsets, MOMENT, MomentSample, PLAN_BITS, ParentSample, Sample, TensorFacts, allowed,
    are_same, finish,
};
use crate::scratch::width_of;
use crate::{CpuEngine, Preset, Scratch, TensorPlan};

// Thresholds are parts of the compared quantities: 128 means one in 128.

/// A delta must save this part of the tensor stored without the parent: it is read together with its parents.
const DELTA_GAIN: u64 = 512;
/// The difference in the order of values must save this part of the XOR, which is faster.
const SUB_GAIN: u64 = 256;
/// Rows and columns together with the parent must save this part of the difference from the parent
/// alone.
const BLEND_GAIN: u64 = 512;
/// Contexts must save this part of the difference without them: several tables are more work.
const CONTEXTS_GAIN: u64 = 512;
/// Contexts from moments must save this part of the difference without them: reading the tensor
/// then reads the moments, too.
const UPDATE_GAIN: u64 = 512;
/// Where a difference takes this many bits a value less than the values themselves, rows and columns alone cannot
/// take less.
const EXPLAINED: u64 = 3;
/// Where the difference takes this part of a bit a value more than the values themselves, contexts do not save enough.
const CONTEXTS_SAVE: u64 = 2;
/// A step that leaves less than this part of the XOR's bits explains the change: nothing else is compared.
const STEP_EXPLAINS: u64 = 2;

impl CpuEngine {
    /// The plan of a tensor with a parent. `sample`: its values at [`super::parent_probes`].
    /// `alone` plans it without the parent.
    pub(crate) fn plan_difference(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        parent: &ParentSample<'_>,
        offsets: &FittedOffsets<'_>,
        scratch: &mut Scratch,
        alone: &dyn Fn(&TensorFacts<'_>, &mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        if sample.values.len() != parent.values.len() {
            return Err(Error::corrupt(format!(
                "sample has {} bytes, but its parent's sample has {}",
                sample.values.len(),
                parent.values.len()
            )));
        }
        let about = &about.with_offsets(offsets.are_wanted());
        let known = about.choice;
        let mut from = Differences::of(sample);
        if let Some(choice) = known {
            match self.again(choice, about, &mut from, parent, offsets, scratch)? {
                Again::Holds(plan) => return Ok(*plan),
                Again::NoDifference => return alone(about, scratch),
                Again::Differs => {}
            }
            from = Differences::of(sample);
        }
        let about = &about.without_choice();
        // If the earlier choice did not hold, less may have been compared: then nothing is
        // remembered, so that the next time everything is.
        let all = |c: Choice| c.needs_offsets() || c.is_of_another() || !about.may_have_offsets();
        let all = known.is_none_or(all);
        let direct = self.best(about, &sample.values, SampleKind::Values, scratch)?;
        let plain = direct.as_ref().map_or(0, |direct| direct.bits);
        let delta = self.difference(about, plain, &mut from, parent, offsets, scratch)?;
        let found = match delta.as_ref().is_some_and(|d| from.explains(about, plain, d.bits())) {
            true => (direct, false),
            false => self.direct_or_by_offsets(about, direct, sample, offsets.get()?, scratch)?,
        };
        let least = found.0.as_ref().map_or(0, |best| best.bits);
        let Some(delta) = delta.filter(|delta| from.is_worth(about, least, delta.bits())) else {
            let plan = match are_same(about.dtype, about.values()) {
                true => self.plan_found(about, found, sample, offsets.get()?, scratch)?,
                false => alone(about, scratch)?,
            };
            let choice = plan.choice.filter(|_| all);
            return Ok(TensorPlan { choice, ..plan });
        };
        let (bits, planes, shape) = (delta.bits(), known_planes(&delta.best.planes), delta.shape);
        let plan = delta.plan(about, parent)?;
        let choice = Choice::of(about.remembered(), (&plan, planes, shape), (bits, least));
        let mut plan = TensorPlan { choice: Some(choice), ..plan };
        if sample.values.len() == about.bytes && plan.plan.residual != ResidualId::XOR {
            let fast = TensorFacts { preset: Preset::Fast, ..*about };
            plan = self.smaller_of_small(about, plan, sample, Some(parent), scratch, |s| {
                let alone =
                    |_: &TensorFacts<'_>, s: &mut Scratch| self.plan_alone(&fast, sample, None, s);
                self.plan_difference(&fast, sample, parent, &FittedOffsets::new(None), s, &alone)
            })?;
        }
        Ok(TensorPlan { choice: plan.choice.filter(|_| all), ..plan })
    }

    /// Tries an earlier choice again.
    fn again(
        &self,
        choice: Choice,
        about: &TensorFacts<'_>,
        from: &mut Differences<'_>,
        parent: &ParentSample<'_>,
        offsets: &FittedOffsets<'_>,
        scratch: &mut Scratch,
    ) -> Result<Again> {
        let again = &about.again(choice);
        let method = if choice.is_delta() { choice.method } else { Method::Xor };
        let made = self.by_method(method, again, from, parent, offsets, scratch)?;
        if !choice.is_delta() {
            // If the tensor changes less than it did, a difference may be worth it now.
            let less = made.is_some_and(|made| choice.exceeds(made.bits()));
            return Ok(if less { Again::Differs } else { Again::NoDifference });
        }
        let Some(made) = made.filter(|made| choice.holds(made.bits())) else {
            return Ok(Again::Differs);
        };
        // A step explains one distance, and there nearly everything.
        if choice.is_of_other_distance()
            && choice.method != Method::Step
            && self.step_of(about, from.sample, parent)?.is_some()
        {
            return Ok(Again::Differs);
        }
        // If the difference saves little, it is compared with the values without the parent.
        if !choice.exceeds(made.bits()) {
            let about = &TensorFacts { again: None, ..*again };
            let alone = self.alone(about, from.sample, offsets.get()?, scratch)?.0;
            if alone.is_some_and(|alone| !from.is_worth(about, alone.bits, made.bits())) {
                return Ok(Again::Differs);
            }
        }
        let (bits, planes, shape) = (made.bits(), known_planes(&made.best.planes), made.shape);
        let plan = made.plan(again, parent)?;
        let now = Choice::of(about.remembered(), (&plan, planes, shape), (bits, bits));
        Ok(Again::Holds(Box::new(TensorPlan { choice: Some(choice.renewed(now)), ..plan })))
    }

    /// The cheapest difference of the sample from the parent's. `plain`: the bits of its values.
    fn difference(
        &self,
        about: &TensorFacts<'_>,
        plain: u64,
        from: &mut Differences<'_>,
        parent: &ParentSample<'_>,
        offsets: &FittedOffsets<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<Difference>> {
        const METHODS: [(Method, u64); 5] = [
            (Method::Step, UPDATE_GAIN),
            (Method::Sub, SUB_GAIN),
            (Method::Contexts, CONTEXTS_GAIN),
            (Method::Update, UPDATE_GAIN),
            (Method::Blend, BLEND_GAIN),
        ];
        let mut cheapest = self.by_method(Method::Xor, about, from, parent, offsets, scratch)?;
        let (mut in_order, most) = (0, plain + from.values(about) / CONTEXTS_SAVE);
        for (method, gain) in METHODS {
            if matches!(method, Method::Contexts | Method::Update) && in_order > most {
                continue;
            }
            let other = self.by_method(method, about, from, parent, offsets, scratch)?;
            let least = cheapest.as_ref().map_or(0, Difference::bits);
            if method == Method::Sub {
                in_order = other.as_ref().map_or(0, Difference::bits);
            }
            if other.as_ref().is_some_and(|other| other.bits() < least - least / gain) {
                let all = method == Method::Step
                    && other.as_ref().is_some_and(|step| step.bits() < least / STEP_EXPLAINS);
                cheapest = other;
                if all {
                    break;
                }
            }
        }
        Ok(cheapest)
    }

    /// The sample's difference from the parent's by one method; `None` if that method does not apply.
    fn by_method(
        &self,
        method: Method,
        about: &TensorFacts<'_>,
        from: &mut Differences<'_>,
        parent: &ParentSample<'_>,
        offsets: &FittedOffsets<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<Difference>> {
        let (allowed, dtype) = (allowed(about.preset), about.dtype);
        let in_order = matches!(method, Method::Sub | Method::Contexts | Method::Update);
        if allowed.sub && in_order && from.ordered.is_empty() {
            from.ordered.extend_from_slice(&from.sample.values);
            let width = width_of(about.width())?;
            self.kernels.sub_values(width, &mut from.ordered, parent.values);
        }
        let mut shape = None;
        let (best, side) = match method {
            Method::Xor => {
                let mut sample = from.sample.values.to_vec();
                self.kernels.xor(&mut sample, parent.values);
                (self.best(about, &sample, SampleKind::Differences, scratch)?, vec![])
            }
            Method::Sub if allowed.sub => {
                (self.best(about, &from.ordered, SampleKind::Ordered, scratch)?, vec![])
            }
            Method::Contexts
                if allowed.sub
                    && allowed.contexts
                    && dtype.form() == ElementForm::Float
                    && about.width() > 1 =>
            {
                let contexts = exponent::side_data(dtype, parent.values);
                let mut side = Side::default();
                side.push(SideKind::CONTEXTS, contexts.clone())?;
                let tensor = Tensor { dtype, shape: about.shape, side: &side };
                let (model, values) = (&Exponents as &dyn ContextModel, about.values());
                let of = SampleKind::InContext { model, tensor, inputs: &[parent.values], values };
                (self.best(about, &from.ordered, of, scratch)?, contexts)
            }
            Method::Update if allowed.sub && allowed.update => {
                let moments = parent.moments;
                // Negated in place as the moments say; nothing after this needs them unnegated.
                let mut turned = std::mem::take(&mut from.ordered);
                let Some(turn) = self.turn(dtype, moments, &mut turned)? else { return Ok(None) };
                let given = (parent.values, moments);
                if let Some(choice) = about.again
                    && let Some(known) = choice.update().filter(|known| known.is_of_moments(&turn))
                    && let Some(best) = self.in_updates(about, &turned, given, known, scratch)?
                    && choice.planes_are(&best.planes)
                {
                    shape = choice.shape();
                    (Some(best), known.to_bytes())
                } else {
                    let of = about.again.filter(Choice::is_of_another).and_then(|c| c.shape());
                    let values = (dtype, parent.values);
                    let (update, found) = self.fit_update(turn, values, moments, &turned, of)?;
                    shape = Some(found);
                    (self.in_updates(about, &turned, given, update, scratch)?, update.to_bytes())
                }
            }
            Method::Step => match self.by_step(about, from.sample, parent, scratch)? {
                Some((best, step)) => (Some(best), step.to_bytes()),
                None => return Ok(None),
            },
            Method::Blend if allowed.blend && parent.expected.is_some() => {
                let Some(offsets) = offsets.get()? else { return Ok(None) };
                match self.blend(about, from.sample, parent, offsets, scratch)? {
                    Some(blended) => blended,
                    None => return Ok(None),
                }
            }
            _ => return Ok(None),
        };
        Ok(best.map(|best| Difference { method, best, side, shape }))
    }

    /// The cost of differences in the order of values, negated as the moments say, with contexts from updates.
    fn in_updates(
        &self,
        about: &TensorFacts<'_>,
        differences: &[u8],
        (parent, moments): (&[u8], &[MomentSample<'_>]),
        update: Update,
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let mut side = Side::default();
        side.push(SideKind::CONTEXTS, update.to_bytes())?;
        let tensor = Tensor { dtype: about.dtype, shape: about.shape, side: &side };
        let (model, values) = (&Updates as &dyn ContextModel, about.values());
        let inputs = std::iter::once(parent).chain(moments.iter().map(|m| m.values));
        let inputs: Vec<_> = inputs.collect();
        let of = SampleKind::InContext { model, tensor, inputs: &inputs, values };
        let best = self.best(about, differences, of, scratch)?;
        Ok(best.map(|best| best.with_moments(moments.len(), about, differences.len())))
    }
}

impl Candidate {
    /// The same for a plan that also lists the moments as inputs, once for the tensor. `len`: bytes of the sample.
    pub(super) fn with_moments(
        mut self,
        moments: usize,
        about: &TensorFacts<'_>,
        len: usize,
    ) -> Self {
        let bytes = MOMENT * moments as u64;
        let listed = 8 * bytes * (len / about.width()) as u64 / about.values().max(1);
        self.bits += listed;
        self
    }
}

/// A sample, and its differences from the parent's in the order of values, made when first needed.
struct Differences<'a> {
    sample: &'a Sample<'a>,
    ordered: Vec<u8>,
}

impl<'a> Differences<'a> {
    fn of(sample: &'a Sample<'a>) -> Self {
        Self { sample, ordered: vec![] }
    }

    /// The number of values of the sample.
    fn values(&self, about: &TensorFacts<'_>) -> u64 {
        (self.sample.values.len() / about.width()) as u64
    }

    /// Whether a difference of `bits` bits leaves little of the values, which take `plain` bits.
    fn explains(&self, about: &TensorFacts<'_>, plain: u64, bits: u64) -> bool {
        self.values(about) * EXPLAINED <= plain.saturating_sub(bits)
    }

    /// Whether a difference is worth it, in the sample and for the whole tensor. `alone` and `bits`
    /// are the bits of the sample without the parent and as a difference.
    fn is_worth(&self, about: &TensorFacts<'_>, alone: u64, bits: u64) -> bool {
        let saved = alone.saturating_sub(bits);
        let whole = saved.saturating_mul(about.values()) / self.values(about).max(1);
        saved > 0 && saved >= alone / DELTA_GAIN && whole > PLAN_BITS
    }
}

/// The outcome of trying a choice again.
enum Again {
    /// It holds, and this is its plan.
    Holds(Box<TensorPlan>),
    /// The tensor still is better stored without the parent.
    NoDifference,
    /// It does not hold: all ways must be compared.
    Differs,
}

/// A sample stored as its difference from the parent's.
struct Difference {
    method: Method,
    best: Candidate,
    /// Side data that its chunks need: that of contexts or of a step, or offsets. Empty if there is none.
    side: Vec<u8>,
    /// The shape of contexts from moments.
    shape: Option<Shape>,
}

impl Difference {
    fn bits(&self) -> u64 {
        self.best.bits
    }

    /// The plan of the tensor.
    fn plan(self, about: &TensorFacts<'_>, parent: &ParentSample<'_>) -> Result<TensorPlan> {
        let Self { method, best, side, .. } = self;
        let (manifest, tensor) = (parent.manifest, parent.tensor);
        let moments: Vec<_> = parent.moments.iter().map(|m| m.tensor).collect();
        let plan = |layout| match method {
            Method::Update => Plan { layout, ..Plan::update(manifest, tensor, &moments) },
            Method::Step => Plan::step(layout, manifest, tensor, &moments),
            Method::Blend => Plan::blend(layout, manifest, tensor),
            Method::Xor => Plan::delta(layout, manifest, tensor),
            _ => Plan {
                residual: ResidualId::SUB,
                contexts: if side.is_empty() { ContextsId::NONE } else { ContextsId::EXPONENT },
                ..Plan::delta(layout, manifest, tensor)
            },
        };
        let kind = match method {
            Method::Blend => SideKind::OFFSETS,
            Method::Step => SideKind::STEP,
            _ => SideKind::CONTEXTS,
        };
        finish(about, Some(best), plan, (!side.is_empty()).then_some((kind, &side[..])))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use s4_format::{DType, Digest, PredictorId};
    use s4_predict::rank1::Grid;

    use super::*;
    use crate::planner::{gather, parent_probes};

    /// Positive values whose size depends on the row, as in second moments. Those of two seeds differ by up to `noise`
    /// times the row's size.
    fn moments(noise: f32, seed: u32) -> Vec<u8> {
        let mut x = seed;
        let value = |i: u32| {
            x = (x ^ i).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(5);
            let of_all = (i.wrapping_mul(0x85eb_ca6b) >> 8) as f32 / 16_777_216.0;
            let own = (x >> 8) as f32 / 16_777_216.0;
            let row = f32::exp2((i / 256 * 7919 % 64) as f32 / -4.0);
            row * (1.0 + of_all + noise * own)
        };
        (0..64 * 256).map(value).flat_map(f32::to_le_bytes).collect()
    }

    #[test]
    fn rows_and_columns_alone_are_chosen_only_where_the_parent_explains_little() {
        let engine = CpuEngine::new(s4_planes::Simd::detect());
        let (shape, dtype) = ([64, 256], DType::Float32);
        for (noise, chosen) in [(1e-4, false), (4.0, true)] {
            let (now, before) = (moments(noise, 1), moments(noise, 2));
            let about = TensorFacts::new(Preset::Balanced, (dtype, &shape, now.len()), None, None);
            let sample = Sample::of(&now, 4, parent_probes(dtype, about.values()));
            let before = Sample::of(&before, 4, parent_probes(dtype, about.values()));
            let (manifest, values) = (Digest([7; 32]), &before.values[..]);
            let parent = ParentSample { manifest, tensor: 0, values, moments: &[], expected: None };
            let (grid, fitted) = (Grid::of(&shape).unwrap(), Cell::new(0));
            let fit = || {
                fitted.set(fitted.get() + 1);
                engine.fit(&about, &grid, &gather(&now, 4, grid.ranges()))
            };
            let offsets = FittedOffsets::new(Some(&fit));
            let mut scratch = Scratch::default();
            let alone = |about: &TensorFacts<'_>, scratch: &mut Scratch| {
                engine.plan_alone(about, &sample, offsets.get()?, scratch)
            };
            let plan = engine
                .plan_difference(&about, &sample, &parent, &offsets, &mut scratch, &alone)
                .unwrap();
            // Without the parent's own there is no blend, and nothing else needs them.
            assert_eq!(fitted.get(), u32::from(chosen), "noise {noise}");
            let expected = if chosen { PredictorId::RANK1 } else { PredictorId::PARENT };
            assert_eq!(plan.plan.predictor, expected, "noise {noise}");
        }
    }
}
