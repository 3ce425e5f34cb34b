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
mod coding;
mod layout;
mod sample;
mod update;

pub use blend::expected_of;
use coding::precision;
use layout::{Candidate, Counted, Of};
pub(crate) use sample::Sample;
use sample::gather;
pub use sample::parent_probes;
pub(crate) use sample::sampled_runs;
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
}

/// What is known of a tensor before its values are looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) preset: Preset,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    pub(crate) bytes: usize,
    pub(crate) role: Option<RoleKind>,
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
    /// # Errors
    /// Errors of a codec; `Corrupt` if the parent's sample has another size.
    pub fn plan(&self, job: &PlanJob<'_>, scratch: &mut Scratch) -> Result<TensorPlan> {
        let PlanJob { preset, view: &TensorView { dtype, shape, data }, parent, role } = *job;
        let role = role.map(|r| r.row.kind);
        let about = About { preset, dtype, shape, bytes: data.len(), role };
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
                let alone = |s: &mut Scratch| self.plan_alone(&about, &alone(), offsets, s);
                self.plan_difference(&about, sample, parent, offsets, scratch, &alone)
            }
        }
    }

    /// The grid of values that row and column offsets are made from, if they may be worth it: in what is looked at
    /// first, signs are all alike, as those of second moments are, or sizes differ from run to run.
    pub(crate) fn wants_offsets(&self, about: &About<'_>, sample: &[u8]) -> Option<Grid> {
        let About { preset, dtype, shape, role, .. } = *about;
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
        let (best, by_offsets) = self.alone(about, sample, offsets, scratch)?;
        let side = offsets.filter(|_| by_offsets).map(|side| (SideKind::OFFSETS, side));
        let plan = finish(about, best, if by_offsets { Plan::rank1 } else { Plan::direct }, side)?;
        if !by_offsets {
            return Ok(plan);
        }
        self.smaller_of_small(about, plan, sample, None, scratch, |s| {
            self.plan_alone(about, sample, None, s)
        })
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
        mut sample: Sample,
        parent: &ParentSample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
        alone: &dyn Fn(&mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        if sample.values.len() != parent.values.len() {
            return Err(Error::corrupt(format!(
                "a sample of {} bytes and {} of its parent",
                sample.values.len(),
                parent.values.len()
            )));
        }
        let small = (sample.values.len() == about.bytes).then(|| sample.clone());
        let least = self.alone(about, &sample, offsets, scratch)?.0.map_or(0, |b| b.bits);
        let delta = self.difference(about, &mut sample, parent, offsets, scratch)?;
        let saved = least.saturating_sub(delta.best.as_ref().map_or(u64::MAX, |d| d.bits));
        // It must be worth it here, in the sample, and as a whole.
        let sampled = (sample.values.len() / about.width()) as u64;
        let whole = saved.saturating_mul(about.values()) / sampled.max(1);
        if saved == 0 || saved < least / DELTA_GAIN || whole <= PLAN_BITS {
            return alone(scratch);
        }
        let Difference { best, residual, side } = delta;
        let plan = |layout| match (residual, &parent.moments) {
            (ResidualId::DESCENT, Some(moments)) => {
                let moments = moments.each_ref().map(|m| m.tensor);
                Plan { layout, ..Plan::update(parent.manifest, parent.tensor, moments) }
            }
            (ResidualId::MAGNITUDE, _) => Plan::blend(layout, parent.manifest, parent.tensor),
            _ => Plan {
                residual,
                contexts: if side.is_empty() { ContextsId::NONE } else { ContextsId::EXPONENT },
                ..Plan::delta(layout, parent.manifest, parent.tensor)
            },
        };
        let kind = match residual {
            ResidualId::MAGNITUDE => SideKind::OFFSETS,
            _ => SideKind::CONTEXTS,
        };
        let side = (!side.is_empty()).then_some((kind, &side[..]));
        let plan = finish(about, best, plan, side)?;
        let Some(small) = small.filter(|_| plan.plan.residual != ResidualId::XOR) else {
            return Ok(plan);
        };
        let fast = About { preset: Preset::Fast, ..*about };
        self.smaller_of_small(about, plan, &small, Some(parent.values), scratch, |s| {
            let alone = |s: &mut Scratch| self.plan_alone(&fast, &small, None, s);
            self.plan_difference(&fast, small.clone(), parent, None, s, &alone)
        })
    }

    /// The cheapest difference of a sample, which is used up, from the parent's.
    fn difference(
        &self,
        about: &About<'_>,
        sample: &mut Sample,
        parent: &ParentSample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<Difference> {
        let (allowed, dtype) = (allowed(about.preset), about.dtype);
        let blended = match offsets.filter(|_| allowed.blend) {
            Some(offsets) => self.blend(about, sample, parent, offsets, scratch)?,
            None => None,
        };
        let (moments, parent) = (parent.moments.as_ref(), parent.values);
        let sample = &mut sample.values[..];
        let mut ordered = if allowed.sub { sample.to_vec() } else { vec![] };
        self.kernels.xor(sample, parent);
        let best = self.best(about, (sample, &mut Counted::default()), Of::Differences, scratch)?;
        let mut cheapest = Difference { best, residual: ResidualId::XOR, side: vec![] };
        if !allowed.sub {
            return Ok(cheapest);
        }
        self.kernels.sub_values(width_of(about.width())?, &mut ordered, parent);
        let mut counted = Counted::default();
        let sub = self.best(about, (&ordered, &mut counted), Of::Ordered, scratch)?;
        cheapest.replace_by(sub, ResidualId::SUB, vec![], SUB_GAIN);
        if allowed.contexts && dtype.form() == Form::Float && about.width() > 1 {
            let contexts = exponent::side_data(dtype, parent);
            let mut side = Side::default();
            side.push(SideKind::CONTEXTS, contexts.clone())?;
            let tensor = Tensor { dtype, shape: about.shape, side: &side };
            let (model, values) = (&Exponents as &dyn ContextModel, about.values());
            let of = Of::InContext { model, tensor, inputs: &[parent], values };
            let best = self.best(about, (&ordered, &mut counted), of, scratch)?;
            cheapest.replace_by(best, ResidualId::SUB, contexts, CONTEXTS_GAIN);
        }
        let all = ordered.len() == about.bytes;
        if let Some(moments) = moments.filter(|_| allowed.update && !all)
            && let Some(update) = self.fit_update(dtype, parent, moments, &mut ordered)?
        {
            let best = self.in_updates(about, &ordered, (parent, moments), update, scratch)?;
            cheapest.replace_by(best, ResidualId::DESCENT, update.to_bytes(), UPDATE_GAIN);
        }
        if let Some((best, side)) = blended {
            cheapest.replace_by(best, ResidualId::MAGNITUDE, side, BLEND_GAIN);
        }
        Ok(cheapest)
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

/// How a sample is stored as its difference from the parent's.
struct Difference {
    best: Option<Candidate>,
    residual: ResidualId,
    /// Side data that its chunks need: of contexts, or offsets.
    side: Vec<u8>,
}

impl Difference {
    /// Takes another one that saves a part, one in `gain`.
    fn replace_by(
        &mut self,
        best: Option<Candidate>,
        residual: ResidualId,
        side: Vec<u8>,
        gain: u64,
    ) {
        let bits = |c: &Option<Candidate>| c.as_ref().map_or(0, |c| c.bits);
        let least = bits(&self.best);
        if bits(&best) < least - least / gain {
            *self = Self { best, residual, side };
        }
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
