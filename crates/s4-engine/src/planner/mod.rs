//! Chooses, for a tensor, a prediction, a layout and a codec for each plane.

use std::sync::Arc;

use s4_codec_cpu::rans::{Counts, Precision, Table, write_tables};
use s4_format::dtype::Form;
use s4_format::manifest::{RoleKind, TensorRole};
use s4_format::offsets::stored_len;
use s4_format::side::{Side, SideKind};
use s4_format::{ContextsId, DType, Digest, Error, LayoutId, Plan, ResidualId, Result};
use s4_predict::rank1::{self, Expected, Grid, Offsets};
use s4_predict::{ContextModel, Exponents, Tensor, Update, Updates, exponent};

use crate::chunk::chunk_log2;
use crate::scratch::width_of;
use crate::{CpuEngine, EncodeJob, Inputs, PlaneCoding, Preset, Scratch, TensorPlan, TensorView};

mod blend;
mod choice;
mod coding;
mod layout;
mod sample;
mod update;

pub use blend::expected_of;
pub use choice::Choice;
use choice::Way;
use coding::precision;
use layout::{Candidate, Counted, Of};
use sample::gather;
pub use sample::parent_probes;
pub(crate) use sample::sampled_runs;
pub(crate) use sample::{Sample, probed};
pub use update::MomentSample;

/// What one more plan costs in the manifest, in bits: a delta has to save more.
const PLAN_BITS: u64 = 8 * 160;

/// What the first delta costs in the manifest, in bytes, with the name of the parent; and what contexts add.
const FIRST_DELTA: u64 = PLAN_BITS / 8 + 100;
const CONTEXTS: u64 = 16;
/// What two more inputs add.
const MOMENTS: u64 = 40;

// Thresholds are parts of what is compared: 128 means one in 128.

/// A delta must save this part of the tensor stored by itself: it is read together with its parents.
const DELTA_GAIN: u64 = 512;
/// A prediction from rows and columns must save this part of the values by themselves: it is more work.
const RANK1_GAIN: u64 = 128;
/// The difference in the order of values must save this part of the XOR, which is faster.
const SUB_GAIN: u64 = 256;
/// Rows and columns beside the parent must save this part of the difference from the parent alone.
const BLEND_GAIN: u64 = 512;
/// Contexts must save this part of the difference without them: several tables are more work.
const CONTEXTS_GAIN: u64 = 512;
/// Contexts from moments must save this part of the difference without: reading the tensor reads the moments, too.
const UPDATE_GAIN: u64 = 512;

/// The predictors that may be planned. Every reader decodes all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// Rows and columns.
    pub(crate) rank1: bool,
    /// Rows and columns, and a share of the parent.
    pub(crate) blend: bool,
    /// The difference from a parent in the order of values.
    pub(crate) sub: bool,
    /// Such differences with the parent's exponents as contexts.
    pub(crate) contexts: bool,
    /// Such differences with contexts from the optimizer's update.
    pub(crate) update: bool,
    /// Copies of other tensors, as they are or rounded.
    pub(crate) copies: bool,
}

/// The one place that says which preset uses which predictor.
pub(crate) fn allowed(preset: Preset) -> Allowed {
    let all = matches!(preset, Preset::Balanced | Preset::Small);
    Allowed { rank1: all, blend: all, sub: all, contexts: all, update: all, copies: all }
}

/// Whether tensors that are copies of others, as they are or rounded, are predicted from these. Who writes several
/// tensors finds them.
pub fn makes_copies(preset: Preset) -> bool {
    allowed(preset).copies
}

/// [`Inputs::expected`] of some tensors, if a preset has a use for it.
pub(crate) fn expected<E>(
    preset: Preset,
    inputs: &dyn Inputs<E>,
    tensors: &[usize],
) -> std::result::Result<Vec<Option<Arc<Expected>>>, E> {
    let wanted = allowed(preset).blend;
    tensors.iter().map(|t| if wanted { inputs.expected(*t) } else { Ok(None) }).collect()
}

/// The tensor of a parent checkpoint that a tensor may be stored as its difference from.
#[derive(Debug, Clone, Copy)]
pub struct ParentSample<'a> {
    /// Hash of the parent's manifest.
    pub manifest: Digest,
    /// Number of the tensor in the parent, where it has the same dtype and shape.
    pub tensor: u32,
    /// Its values at [`parent_probes`], one run after the other.
    pub values: &'a [u8],
    /// The tensor's moments, in its own checkpoint, if they are stored and may be read with it. Tensors of which the
    /// sample is all have no use for them.
    pub moments: Option<[MomentSample<'a>; 2]>,
    /// What its rows and columns say of its values, if they are stored so.
    pub expected: Option<&'a Expected>,
}

/// A tensor to be planned.
#[derive(Debug, Clone, Copy)]
pub struct PlanJob<'a> {
    /// How much is tried to make it smaller.
    pub preset: Preset,
    /// The tensor.
    pub view: &'a TensorView<'a>,
    /// The tensor that it may be stored as its difference from.
    pub parent: Option<&'a ParentSample<'a>>,
    /// What it is to the optimizer, and the hyperparameters of its group.
    pub role: Option<TensorRole<'a>>,
    /// What was chosen for the same tensor of an earlier checkpoint.
    pub choice: Option<Choice>,
}

/// What is known of a tensor before its values are looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) preset: Preset,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    pub(crate) bytes: usize,
    pub(crate) role: Option<RoleKind>,
    /// What was chosen before, if it was for such a tensor.
    pub(crate) choice: Option<Choice>,
    /// The one layout that is looked at; `None`: all of them.
    pub(crate) layout: Option<LayoutId>,
}

impl<'a> About<'a> {
    /// Of a tensor of so many bytes.
    pub(crate) fn new(
        preset: Preset,
        (dtype, shape, bytes): (DType, &'a [u64], usize),
        role: Option<RoleKind>,
        choice: Option<Choice>,
    ) -> Self {
        let about = Self { preset, dtype, shape, bytes, role, choice: None, layout: None };
        Self { choice: choice.filter(|choice| choice.fits(&about)), ..about }
    }

    /// The same, of which one layout is looked at.
    fn in_layout(self, layout: LayoutId) -> Self {
        Self { choice: None, layout: Some(layout), ..self }
    }

    /// The same, of which nothing is known.
    fn without_choice(self) -> Self {
        Self { choice: None, ..self }
    }
}

impl About<'_> {
    fn width(&self) -> usize {
        self.dtype.value_width()
    }

    pub(crate) fn values(&self) -> u64 {
        (self.bytes / self.width()) as u64
    }

    /// Whether it has so many chunks that a sample of it is from several.
    fn is_long(&self) -> bool {
        self.values() >> chunk_log2(self.dtype) >= sample::MANY_CHUNKS
    }
}

impl CpuEngine {
    /// Chooses a plan by looking at up to 16,384 values at fixed positions of the tensor, and at more of one that may be
    /// predicted by its rows and columns.
    ///
    /// With a parent, the tensor is stored as a difference from the parent's values if that is clearly
    /// smaller, and otherwise as if there were no parent. Preset `nvcomp` stores every tensor by itself.
    ///
    /// With a choice that was made before, nothing else is compared as long as that costs about what it did.
    ///
    /// # Errors
    /// Errors of a codec; `Corrupt` if the parent's sample has another size.
    pub fn plan(&self, job: &PlanJob<'_>, scratch: &mut Scratch) -> Result<TensorPlan> {
        let PlanJob { preset, view: &TensorView { dtype, shape, data }, parent, role, choice } =
            *job;
        let role = role.map(|r| r.row.kind);
        let about = About::new(preset, (dtype, shape, data.len()), role, choice);
        if preset == Preset::Nvcomp {
            return Ok(nvcomp(dtype));
        }
        let (width, values) = (about.width(), about.values());
        let alone = || Sample::of(data, width, sampled_runs(values).collect());
        let sample = match parent {
            None => alone(),
            Some(_) => Sample::of(data, width, parent_probes(dtype, values)),
        };
        let offsets = match self.wants_offsets(&about, &sample.values) {
            Some(grid) => Some(self.fit(&about, &grid, &gather(data, width, grid.ranges()))?),
            None => None,
        };
        let offsets = offsets.as_deref();
        match parent {
            None => self.plan_alone(&about, &sample, offsets, scratch),
            Some(parent) => {
                let alone = |about: &About<'_>, s: &mut Scratch| {
                    self.plan_alone(about, &alone(), offsets, s)
                };
                self.plan_difference(&about, sample, parent, offsets, scratch, &alone)
            }
        }
    }

    /// The grid of values that row and column offsets are made from, if they may be worth it: in what is looked at
    /// first, signs are all alike, as those of second moments are, or sizes differ from run to run.
    pub(crate) fn wants_offsets(&self, about: &About<'_>, sample: &[u8]) -> Option<Grid> {
        let About { preset, dtype, shape, role, choice, .. } = *about;
        if choice.is_some_and(|choice| !choice.needs_offsets()) {
            return None;
        }
        let floats = dtype.form() == Form::Float && dtype.size() == dtype.value_width();
        let weight = matches!(role, Some(RoleKind::Weight | RoleKind::Master));
        if !allowed(preset).rank1 || !floats || weight || !sample::is_uneven(sample, about.width())
        {
            return None;
        }
        Grid::of(shape)
    }

    /// Row and column offsets from the values of a grid.
    pub(crate) fn fit(&self, about: &About<'_>, grid: &Grid, values: &[u8]) -> Result<Vec<u8>> {
        rank1::fit(width_of(about.width())?, grid, values)
    }

    /// The plan of a tensor without a parent. `offsets`: its row and column offsets, if it may have some.
    pub(crate) fn plan_alone(
        &self,
        about: &About<'_>,
        sample: &Sample,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        let known = about.choice;
        let again = match known {
            Some(choice) => self.alone_again(about, choice, sample, offsets, scratch)?,
            None => None,
        };
        let (best, by_offsets) = match again {
            Some(found) => found,
            None => self.alone(about, sample, offsets, scratch)?,
        };
        let bits = best.as_ref().map_or(0, |best| best.bits);
        let side = offsets.filter(|_| by_offsets).map(|side| (SideKind::OFFSETS, side));
        let plan = finish(about, best, if by_offsets { Plan::rank1 } else { Plan::direct }, side)?;
        if known.is_none() && by_offsets && sample.values.len() == about.bytes {
            return self.smaller_of_small(about, plan, sample, None, scratch, |s| {
                self.plan_alone(about, sample, None, s)
            });
        }
        // Where what was chosen did not hold, less was looked at: the next time all is.
        let choice = match known {
            Some(_) => known.filter(|choice| choice.holds(bits)),
            None => Choice::of(about, sample.values.len(), &plan.plan, (bits, bits)),
        };
        Ok(TensorPlan { choice, ..plan })
    }

    /// What a sample takes by what was chosen before, and whether that is by row and column offsets; `None`: not about as
    /// much as it did.
    fn alone_again(
        &self,
        about: &About<'_>,
        choice: Choice,
        sample: &Sample,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<Option<(Option<Candidate>, bool)>> {
        let about = &about.in_layout(choice.layout);
        let best = match (choice.way, offsets) {
            (Way::Direct, _) => {
                let values = (&sample.values[..], &mut Counted::default());
                self.best(about, values, Of::Values, scratch)?
            }
            (Way::Rank1, Some(offsets)) => self.by_offsets(about, sample, offsets, &[], scratch)?,
            _ => None,
        };
        let best = best.filter(|best| choice.holds(best.bits));
        Ok(best.map(|best| (Some(best), choice.way == Way::Rank1)))
    }

    /// Of a tensor whose sample is all of it, the plan that makes it smaller: `plan`, or what preset `fast` makes. Such a
    /// tensor is small, so that its tables and side data, which estimates know little of, are much of it.
    fn smaller_of_small(
        &self,
        about: &About<'_>,
        plan: TensorPlan,
        sample: &Sample,
        parent: Option<&[u8]>,
        scratch: &mut Scratch,
        fast: impl FnOnce(&mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        if sample.values.len() != about.bytes {
            return Ok(plan);
        }
        let fast = fast(scratch)?;
        let mut size = |plan: &TensorPlan| {
            let view = TensorView { dtype: about.dtype, shape: about.shape, data: &sample.values };
            let inputs = parent.filter(|_| plan.plan.is_delta());
            let job = EncodeJob { view: &view, plan, chunk: 0, inputs: inputs.as_slice() };
            let mut frame = vec![];
            let encoded = self.encode(&job, scratch, &mut frame)?;
            let mut side = vec![];
            plan.side_data(encoded.shared)?.write(&mut side)?;
            let listed = match plan.plan.is_delta() {
                true => FIRST_DELTA + if plan.plan.contexts.is_none() { 0 } else { CONTEXTS },
                false => 0,
            };
            Ok::<u64, Error>(frame.len() as u64 + side.len() as u64 + listed)
        };
        Ok(if size(&plan)? <= size(&fast)? { plan } else { fast })
    }

    /// The cheaper of values by themselves and predicted by row and column offsets, and whether it is these.
    fn alone(
        &self,
        about: &About<'_>,
        sample: &Sample,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<(Option<Candidate>, bool)> {
        let direct =
            self.best(about, (&sample.values, &mut Counted::default()), Of::Values, scratch)?;
        let Some((offsets, least)) = offsets.zip(direct.as_ref().map(|d| d.bits)) else {
            return Ok((direct, false));
        };
        let best = self.by_offsets(about, sample, offsets, &[], scratch)?;
        let smaller = best.as_ref().is_some_and(|b| b.bits < least - least / RANK1_GAIN);
        Ok(if smaller { (best, true) } else { (direct, false) })
    }

    /// What a sample takes if it is predicted by row and column offsets, and these. `parent`: its parent's values, if they
    /// have a share.
    fn by_offsets(
        &self,
        about: &About<'_>,
        sample: &Sample,
        offsets: &[u8],
        parent: &[u8],
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let width = width_of(about.width())?;
        // What the offsets take, as a part of what the sample does.
        let stored =
            8 * stored_len(offsets) as u64 * sample.values.len() as u64 / about.bytes.max(1) as u64;
        let offsets = Offsets::parse(width, offsets)?;
        let (mut residuals, mut room, mut at) = (sample.values.clone(), vec![], 0);
        for run in &sample.runs {
            let bytes = at..at + (run.end - run.start) as usize * width.bytes();
            at = bytes.end;
            room.resize(bytes.len(), 0);
            let before = if offsets.share() == 0 { &[][..] } else { &parent[bytes.clone()] };
            offsets.predict_range(self.kernels, run.start, before, &mut room)?;
            self.kernels.sub_magnitudes(width, &mut residuals[bytes], &room);
        }
        let mut best =
            self.best(about, (&residuals, &mut Counted::default()), Of::Residuals, scratch)?;
        if let Some(best) = best.as_mut() {
            best.bits += stored;
        }
        Ok(best)
    }

    /// The plan of a tensor with a parent. `sample`: its values at [`parent_probes`]. `alone` plans it by itself.
    pub(crate) fn plan_difference(
        &self,
        about: &About<'_>,
        sample: Sample,
        parent: &ParentSample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
        alone: &dyn Fn(&About<'_>, &mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        if sample.values.len() != parent.values.len() {
            return Err(Error::corrupt(format!(
                "a sample of {} bytes and {} of its parent",
                sample.values.len(),
                parent.values.len()
            )));
        }
        let small = (sample.values.len() == about.bytes).then(|| sample.clone());
        let known = about.choice;
        if known.is_some_and(|choice| !choice.is_delta()) {
            return alone(about, scratch);
        }
        let about = &about.without_choice();
        let mut from = Differences { sample, ordered: vec![], counted: Counted::default() };
        if let Some(choice) = known {
            let about = &about.in_layout(choice.layout);
            let again = self.by_way(choice.way, about, &mut from, parent, offsets, scratch)?;
            if let Some(again) = again.filter(|again| choice.holds(again.bits())) {
                let plan = again.plan(about, parent)?;
                return Ok(TensorPlan { choice: known, ..plan });
            }
            from =
                Differences { sample: from.sample, ordered: vec![], counted: Counted::default() };
        }
        let sampled = from.sample.values.len();
        let least = self.alone(about, &from.sample, offsets, scratch)?.0.map_or(0, |b| b.bits);
        let delta = self.difference(about, &mut from, parent, offsets, scratch)?;
        let saved = delta.as_ref().map_or(0, |delta| least.saturating_sub(delta.bits()));
        // It must be worth it here, in the sample, and as a whole.
        let whole = saved.saturating_mul(about.values()) / (sampled / about.width()).max(1) as u64;
        let worth = saved > 0 && saved >= least / DELTA_GAIN && whole > PLAN_BITS;
        let Some(delta) = delta.filter(|_| worth) else {
            // Where what was chosen did not hold, less was looked at: the next time all is.
            let plan = alone(about, scratch)?;
            let choice = plan.choice.filter(|_| known.is_none());
            return Ok(TensorPlan { choice, ..plan });
        };
        let bits = delta.bits();
        let plan = delta.plan(about, parent)?;
        let Some(small) = small.filter(|_| plan.plan.residual != ResidualId::XOR) else {
            let choice = Choice::of(about, sampled, &plan.plan, (bits, least));
            return Ok(TensorPlan { choice: choice.filter(|_| known.is_none()), ..plan });
        };
        let fast = About { preset: Preset::Fast, ..*about };
        self.smaller_of_small(about, plan, &small, Some(parent.values), scratch, |s| {
            let alone = |_: &About<'_>, s: &mut Scratch| self.plan_alone(&fast, &small, None, s);
            self.plan_difference(&fast, small.clone(), parent, None, s, &alone)
        })
    }

    /// The cheapest difference of a sample from the parent's.
    fn difference(
        &self,
        about: &About<'_>,
        from: &mut Differences,
        parent: &ParentSample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<Option<Difference>> {
        const WAYS: [(Way, u64); 4] = [
            (Way::Sub, SUB_GAIN),
            (Way::Contexts, CONTEXTS_GAIN),
            (Way::Update, UPDATE_GAIN),
            (Way::Blend, BLEND_GAIN),
        ];
        let mut cheapest = self.by_way(Way::Xor, about, from, parent, offsets, scratch)?;
        for (way, gain) in WAYS {
            let other = self.by_way(way, about, from, parent, offsets, scratch)?;
            let least = cheapest.as_ref().map_or(0, Difference::bits);
            if other.as_ref().is_some_and(|other| other.bits() < least - least / gain) {
                cheapest = other;
            }
        }
        Ok(cheapest)
    }

    /// What a sample takes as its difference from the parent's in one way; `None`: it cannot be made in that.
    fn by_way(
        &self,
        way: Way,
        about: &About<'_>,
        from: &mut Differences,
        parent: &ParentSample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<Option<Difference>> {
        let (allowed, dtype) = (allowed(about.preset), about.dtype);
        let in_order = matches!(way, Way::Sub | Way::Contexts | Way::Update);
        if allowed.sub && in_order && from.ordered.is_empty() {
            from.ordered.clone_from(&from.sample.values);
            let width = width_of(about.width())?;
            self.kernels.sub_values(width, &mut from.ordered, parent.values);
        }
        let (best, side) = match way {
            Way::Xor => {
                let mut sample = from.sample.values.clone();
                self.kernels.xor(&mut sample, parent.values);
                let counted = &mut Counted::default();
                (self.best(about, (&sample, counted), Of::Differences, scratch)?, vec![])
            }
            Way::Sub if allowed.sub => {
                let values = (&from.ordered[..], &mut from.counted);
                (self.best(about, values, Of::Ordered, scratch)?, vec![])
            }
            Way::Contexts
                if allowed.sub
                    && allowed.contexts
                    && dtype.form() == Form::Float
                    && about.width() > 1 =>
            {
                let contexts = exponent::side_data(dtype, parent.values);
                let mut side = Side::default();
                side.push(SideKind::CONTEXTS, contexts.clone())?;
                let tensor = Tensor { dtype, shape: about.shape, side: &side };
                let (model, values) = (&Exponents as &dyn ContextModel, about.values());
                let of = Of::InContext { model, tensor, inputs: &[parent.values], values };
                (self.best(about, (&from.ordered, &mut from.counted), of, scratch)?, contexts)
            }
            Way::Update if allowed.sub && allowed.update && from.ordered.len() < about.bytes => {
                let Some(moments) = &parent.moments else { return Ok(None) };
                // These are turned as the moments say: nothing else is made of them after that.
                let mut turned = std::mem::take(&mut from.ordered);
                let update = self.fit_update(dtype, parent.values, moments, &mut turned)?;
                let Some(update) = update else { return Ok(None) };
                let given = (parent.values, moments);
                (self.in_updates(about, &turned, given, update, scratch)?, update.to_bytes())
            }
            Way::Blend if allowed.blend => {
                let Some(offsets) = offsets else { return Ok(None) };
                match self.blend(about, &from.sample, parent, offsets, scratch)? {
                    Some(blended) => blended,
                    None => return Ok(None),
                }
            }
            _ => return Ok(None),
        };
        Ok(best.map(|best| Difference { way, best, side }))
    }

    /// What differences in the order of values, negated as the moments say, take with contexts from updates.
    fn in_updates(
        &self,
        about: &About<'_>,
        differences: &[u8],
        (parent, moments): (&[u8], &[MomentSample<'_>; 2]),
        update: Update,
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let mut side = Side::default();
        side.push(SideKind::CONTEXTS, update.to_bytes())?;
        let tensor = Tensor { dtype: about.dtype, shape: about.shape, side: &side };
        let (model, values) = (&Updates as &dyn ContextModel, about.values());
        let inputs = &[parent, moments[0].values, moments[1].values][..];
        let mut best = self.best(
            about,
            (differences, &mut Counted::default()),
            Of::InContext { model, tensor, inputs, values },
            scratch,
        )?;
        // Its inputs are listed, once for the tensor.
        let listed = 8 * MOMENTS * (differences.len() / about.width()) as u64 / values.max(1);
        if let Some(best) = best.as_mut() {
            best.bits += listed;
        }
        Ok(best)
    }
}

/// A sample, and its differences from the parent's in the order of values once they are asked for.
struct Differences {
    sample: Sample,
    ordered: Vec<u8>,
    /// What was counted of these.
    counted: Counted,
}

/// How a sample is stored as its difference from the parent's.
struct Difference {
    way: Way,
    best: Candidate,
    /// Side data that its chunks need: of contexts, or offsets.
    side: Vec<u8>,
}

impl Difference {
    fn bits(&self) -> u64 {
        self.best.bits
    }

    /// The plan of the tensor.
    fn plan(self, about: &About<'_>, parent: &ParentSample<'_>) -> Result<TensorPlan> {
        let Self { way, best, side } = self;
        let (manifest, tensor) = (parent.manifest, parent.tensor);
        let plan = |layout| match (way, &parent.moments) {
            (Way::Update, Some(moments)) => {
                let moments = moments.each_ref().map(|m| m.tensor);
                Plan { layout, ..Plan::update(manifest, tensor, moments) }
            }
            (Way::Blend, _) => Plan::blend(layout, manifest, tensor),
            (Way::Xor, _) => Plan::delta(layout, manifest, tensor),
            _ => Plan {
                residual: ResidualId::SUB,
                contexts: if side.is_empty() { ContextsId::NONE } else { ContextsId::EXPONENT },
                ..Plan::delta(layout, manifest, tensor)
            },
        };
        let kind = if way == Way::Blend { SideKind::OFFSETS } else { SideKind::CONTEXTS };
        finish(about, Some(best), plan, (!side.is_empty()).then_some((kind, &side[..])))
    }
}

/// The plan of preset `nvcomp`, which depends on the dtype alone. In each chunk a plane that does not get
/// smaller is stored as it is.
pub(crate) fn nvcomp(dtype: DType) -> TensorPlan {
    const RAW: PlaneCoding = PlaneCoding::RAW;
    const ANS: PlaneCoding = PlaneCoding::NVCOMP_ANS;
    const GDEFLATE: PlaneCoding = PlaneCoding::GDEFLATE;
    let (layout, planes) = match (dtype.form(), dtype.value_width()) {
        // Signs are bits already.
        (Form::Float, 2) => (LayoutId::FIELDS_SIGN, vec![RAW, ANS, GDEFLATE]),
        (Form::Float, _) => (LayoutId::FIELDS_SIGN, vec![RAW, ANS, GDEFLATE, GDEFLATE]),
        (Form::Bytes, 1) => (LayoutId::WHOLE, vec![GDEFLATE]),
        (Form::Bytes, width) => (LayoutId::BYTES, vec![GDEFLATE; width]),
    };
    TensorPlan::new(Plan::direct(layout), planes, chunk_log2(dtype))
}

/// The plan of a tensor whose layout is chosen. `needs`: side data that its chunks need.
fn finish(
    about: &About<'_>,
    best: Option<Candidate>,
    plan: impl FnOnce(LayoutId) -> Plan,
    needs: Option<(SideKind, &[u8])>,
) -> Result<TensorPlan> {
    let (layout, planes) = best.map_or((LayoutId::WHOLE, vec![]), |b| (b.layout, b.planes));
    let chunk_log2 = chunk_log2(about.dtype);
    let several = about.values() > 1 << chunk_log2;
    let one_table = (0u8..).zip(&planes).filter(|(_, plane)| plane.one_table);
    let one_table = one_table.fold(0, |bits, (i, _)| bits | 1 << i);
    let shared = planes.iter().map(|plane| match precision(plane.coding) {
        Some(p) if several => write_tables(&shared_tables(&plane.counts, p)),
        _ => vec![],
    });
    let mut side = Side::default();
    if let Some((kind, bytes)) = needs {
        side.push(kind, bytes.to_vec())?;
    }
    Ok(TensorPlan {
        shared: shared.collect(),
        planes: planes.iter().map(|p| p.coding).collect(),
        plan: plan(layout),
        chunk_log2,
        side,
        one_table,
        choice: None,
    })
}

/// The tables that the chunks of a tensor share, one for each context.
fn shared_tables(counts: &[Counts], precision: Precision) -> Vec<Table> {
    let table = |counts: &Counts| {
        let mut counts = counts.clone();
        counts.expect_any();
        match (0..=255).all(|s| counts.get(s) > 0) {
            // Nothing is left to escape, and tables without an escape are faster to decode.
            true => counts.table(precision),
            // The sample need not have seen every symbol of the tensor.
            false => counts.partial().table(precision),
        }
    };
    counts.iter().map(table).collect()
}
