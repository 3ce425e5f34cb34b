//! Chooses a prediction, a layout and a codec for each plane of a tensor.

use std::sync::Arc;

use rayon::ThreadPool;
use s4_codec_cpu::rans::{Counts, Precision, Table, write_tables};
use s4_format::dtype::ElementForm;
use s4_format::manifest::TensorRole;
use s4_format::offsets::stored_len;
use s4_format::side::{Side, SideKind};
use s4_format::{DType, Digest, Error, LayoutId, Plan, Result};
use s4_predict::rank1::{self, Expected, Grid, Offsets};

use crate::chunk::chunk_log2;
use crate::engine::{each, fills};
use crate::scratch::width_of;
use crate::{CpuEngine, EncodeJob, Inputs, PlaneCoding, Preset, Scratch, TensorPlan, TensorView};

mod allowed;
mod blend;
mod choice;
mod coding;
mod counted;
mod difference;
mod facts;
mod fitted;
mod layout;
mod sample;
mod step;
mod update;

pub(crate) use allowed::allowed;
pub use allowed::makes_copies;
#[cfg(feature = "cuda")]
pub(crate) use allowed::makes_offsets;
pub use blend::expected_of;
pub use choice::Choice;
use choice::{Method, known_planes};
use coding::precision;
pub(crate) use counted::Counted;
pub(crate) use facts::TensorFacts;
pub(crate) use fitted::FittedOffsets;
use layout::{Candidate, SampleKind};
use sample::gather;
pub use sample::parent_probes;
pub(crate) use sample::{Sample, are_same, probed, sampled_runs};
pub use update::MomentSample;

/// The size of one more plan in the manifest, in bits: a delta must save more.
const PLAN_BITS: u64 = 8 * 160;

/// The size of the first delta in the manifest, in bytes, with the name of the parent. Contexts add
/// [`CONTEXTS`].
const FIRST_DELTA: u64 = PLAN_BITS / 8 + 100;
const CONTEXTS: u64 = 16;
/// The size that each moment adds as an input of a plan.
const MOMENT: u64 = 20;
/// A prediction from rows and columns must save one part in this many of the unpredicted values'
/// bits: it is more work.
const RANK1_GAIN: u64 = 128;

/// [`Inputs::expected`] of some tensors, if the preset has a use for it. For each, its parent's side data may have to be
/// read and parsed.
pub(crate) fn expected<E: Send>(
    preset: Preset,
    inputs: &dyn Inputs<E>,
    tensors: &[usize],
    pool: Option<&ThreadPool>,
) -> std::result::Result<Vec<Option<Arc<Expected>>>, E> {
    let wanted = |tensor| allowed(preset).blend && inputs.parent(tensor).is_some();
    let mut found: Vec<_> = tensors.iter().map(|tensor| (*tensor, Ok(None))).collect();
    let mut asked: Vec<_> = found.iter_mut().filter(|(tensor, _)| wanted(*tensor)).collect();
    each(pool, &mut asked, |(tensor, expected)| *expected = inputs.expected(*tensor));
    found.into_iter().map(|(_, expected)| expected).collect()
}

/// The tensor of a parent checkpoint that a tensor may be stored as a difference from.
#[derive(Debug, Clone, Copy)]
pub struct ParentSample<'a> {
    /// Hash of the parent's manifest.
    pub manifest: Digest,
    /// Index of the tensor in the parent, where it has the same dtype and shape.
    pub tensor: u32,
    /// Its values at [`parent_probes`], one run after the other.
    pub values: &'a [u8],
    /// The tensor's first moment, and the second if there is one, in its own checkpoint, if they are stored and may be
    /// read with it.
    pub moments: &'a [MomentSample<'a>],
    /// The prediction that its rows and columns make for its values, if it is stored with them.
    pub expected: Option<&'a Expected>,
}

/// A tensor to plan.
#[derive(Debug, Clone, Copy)]
pub struct PlanJob<'a> {
    /// The effort put into making it smaller.
    pub preset: Preset,
    /// The tensor.
    pub view: &'a TensorView<'a>,
    /// The parent's tensor that it may be stored as a difference from.
    pub parent: Option<&'a ParentSample<'a>>,
    /// Its role in the optimizer, and the hyperparameters of its group.
    pub role: Option<TensorRole<'a>>,
    /// The choice made for the same tensor of an earlier checkpoint.
    pub choice: Option<Choice>,
}

impl<'a> PlanJob<'a> {
    /// A tensor without a parent, role or earlier choice.
    pub fn new(preset: Preset, view: &'a TensorView<'a>) -> Self {
        Self { preset, view, parent: None, role: None, choice: None }
    }
}

impl CpuEngine {
    /// Chooses a plan from up to 16,384 values at fixed positions of the tensor, and from more if
    /// rows and columns may predict it.
    ///
    /// With a parent, the tensor is stored as a difference from the parent's values if that is clearly smaller, and
    /// otherwise as if there were no parent. Preset `nvcomp` stores every tensor without a parent.
    ///
    /// With an earlier choice, nothing else is compared while that one costs about the same as
    /// before.
    ///
    /// # Errors
    /// Errors of a codec; `Limit` if the values do not fill the shape; `Corrupt` if the parent's sample has another size.
    pub fn plan(&self, job: &PlanJob<'_>, scratch: &mut Scratch) -> Result<TensorPlan> {
        let PlanJob { preset, view: &TensorView { dtype, shape, data }, parent, role, choice } =
            *job;
        fills(dtype, shape, data.len() as u64)?;
        let about = TensorFacts::new(preset, (dtype, shape, data.len()), role, choice);
        if preset == Preset::Nvcomp {
            return Ok(nvcomp(dtype));
        }
        scratch.counted.clear();
        let (width, values) = (about.width(), about.values());
        let alone = || Sample::of(data, width, sampled_runs(values).collect());
        let sample = match parent {
            None => alone(),
            Some(_) => Sample::of(data, width, parent_probes(dtype, values)),
        };
        let grid = self.wants_offsets(&about, &sample.values);
        let fit =
            grid.map(|grid| move || self.fit(&about, &grid, &gather(data, width, grid.ranges())));
        let offsets = FittedOffsets::new(fit.as_ref().map(|fit| fit as _));
        match parent {
            None => self.plan_alone(&about, &sample, offsets.get()?, scratch),
            Some(parent) => {
                let alone = |about: &TensorFacts<'_>, s: &mut Scratch| {
                    self.plan_alone(about, &alone(), offsets.get()?, s)
                };
                self.plan_difference(&about, &sample, parent, &offsets, scratch, &alone)
            }
        }
    }

    /// The grid of values to compute row and column offsets from, or `None` if they are not worth trying. They may be
    /// worth it if all signs in the sample are equal, as in second moments, or sizes differ from run to run.
    pub(crate) fn wants_offsets(&self, about: &TensorFacts<'_>, sample: &[u8]) -> Option<Grid> {
        let unused = |choice: Choice| !choice.needs_offsets() && !choice.knows_no_offsets();
        let unused = about.choice.is_some_and(unused);
        let tells = || sample::is_uneven(sample, about.width(), about.run());
        if unused || !about.may_have_offsets() || !tells() {
            return None;
        }
        Grid::of(about.shape)
    }

    /// Row and column offsets from the values of a grid.
    pub(crate) fn fit(
        &self,
        about: &TensorFacts<'_>,
        grid: &Grid,
        values: &[u8],
    ) -> Result<Vec<u8>> {
        rank1::fit(width_of(about.width())?, grid, values)
    }

    /// The plan of a tensor without a parent. `offsets`: its row and column offsets, if they may be used.
    pub(crate) fn plan_alone(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        let about = &about.with_offsets(offsets.is_some());
        if let Some(choice) = about.choice {
            if let Some(found) = self.alone_again(about, choice, sample, offsets, scratch)? {
                return self.plan_found(about, found, sample, offsets, scratch);
            }
            let plan = self.plan_alone(&about.without_choice(), sample, offsets, scratch)?;
            // Less may have been compared because of the tensor's own choice: nothing is remembered, so that the next
            // time everything is.
            let choice = plan.choice.filter(|_| choice.is_of_another());
            return Ok(TensorPlan { choice, ..plan });
        }
        let found = self.alone(about, sample, offsets, scratch)?;
        self.plan_found(about, found, sample, offsets, scratch)
    }

    /// Makes the plan from the cheapest candidate of the sample and whether that uses row and column offsets. If the
    /// tensor has an earlier choice, that is the candidate.
    fn plan_found(
        &self,
        about: &TensorFacts<'_>,
        (best, by_offsets): (Option<Candidate>, bool),
        sample: &Sample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        let bits = best.as_ref().map_or(0, |best| best.bits);
        let planes = known_planes(best.as_ref().map_or(&[], |best| &best.planes));
        let side = offsets.filter(|_| by_offsets).map(|side| (SideKind::OFFSETS, side));
        let plan = finish(about, best, if by_offsets { Plan::rank1 } else { Plan::direct }, side)?;
        let now = Choice::of(about.remembered(), (&plan, planes, None), (bits, bits));
        if let Some(choice) = about.choice {
            return Ok(TensorPlan { choice: Some(choice.renewed(now)), ..plan });
        }
        let plan = TensorPlan { choice: Some(now), ..plan };
        if sample.values.len() < about.bytes || about.preset == Preset::Fast {
            return Ok(plan);
        }
        let simpler =
            if by_offsets { *about } else { TensorFacts { preset: Preset::Fast, ..*about } };
        self.smaller_of_small(about, plan, sample, None, scratch, |s| {
            self.plan_alone(&simpler, sample, None, s)
        })
    }

    /// The sample's cost by the earlier choice, and whether that uses row and column offsets;
    /// `None` if the cost is not close to the earlier one.
    fn alone_again(
        &self,
        about: &TensorFacts<'_>,
        choice: Choice,
        sample: &Sample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<Option<(Option<Candidate>, bool)>> {
        let about = &about.again(choice);
        let best = match (choice.method, offsets) {
            (Method::Direct, _) => self.best(about, &sample.values, SampleKind::Values, scratch)?,
            (Method::Rank1, Some(offsets)) => {
                self.by_offsets(about, sample, offsets, &[], scratch)?
            }
            _ => None,
        };
        let best = best.filter(|best| choice.holds(best.bits));
        Ok(best.map(|best| (Some(best), choice.method == Method::Rank1)))
    }

    /// For a tensor that the sample holds whole: the plan that encodes it smaller, `plan` or the one that `simpler`
    /// makes. Such a tensor is small, so its tables and side data, which the estimates hardly include, are a large
    /// part of it.
    fn smaller_of_small(
        &self,
        about: &TensorFacts<'_>,
        plan: TensorPlan,
        sample: &Sample<'_>,
        parent: Option<&ParentSample<'_>>,
        scratch: &mut Scratch,
        simpler: impl FnOnce(&mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        let simpler = simpler(scratch)?;
        if (&plan.plan, &plan.planes) == (&simpler.plan, &simpler.planes) {
            return Ok(plan);
        }
        let mut size = |plan: &TensorPlan| {
            let view = TensorView { dtype: about.dtype, shape: about.shape, data: &sample.values };
            let from = parent.filter(|_| plan.plan.is_delta());
            let moments = from.filter(|_| plan.plan.has_moments()).map_or(&[][..], |p| p.moments);
            let values = from.map(|parent| parent.values).into_iter();
            let inputs: Vec<_> = values.chain(moments.iter().map(|m| m.values)).collect();
            let job = EncodeJob { view: &view, plan, chunk: 0, inputs: &inputs };
            let mut frame = vec![];
            let encoded = self.encode(&job, scratch, &mut frame)?;
            let mut side = vec![];
            plan.side_data(encoded.shared)?.write(&mut side)?;
            let contexts = if plan.plan.contexts.is_none() { 0 } else { CONTEXTS };
            let listed = match plan.plan.is_delta() {
                true => FIRST_DELTA + contexts + MOMENT * moments.len() as u64,
                false => 0,
            };
            Ok::<u64, Error>(frame.len() as u64 + side.len() as u64 + listed)
        };
        if size(&plan)? <= size(&simpler)? {
            return Ok(plan);
        }
        let choice = simpler.choice.map(|choice| choice.compared_as(about.has_offsets));
        Ok(TensorPlan { choice, ..simpler })
    }

    /// The cheaper of plain values and values predicted by row and column offsets, and whether it is the latter.
    fn alone(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<(Option<Candidate>, bool)> {
        let direct = self.best(about, &sample.values, SampleKind::Values, scratch)?;
        self.direct_or_by_offsets(about, direct, sample, offsets, scratch)
    }

    /// The same, given the cost of plain values.
    fn direct_or_by_offsets(
        &self,
        about: &TensorFacts<'_>,
        direct: Option<Candidate>,
        sample: &Sample<'_>,
        offsets: Option<&[u8]>,
        scratch: &mut Scratch,
    ) -> Result<(Option<Candidate>, bool)> {
        let Some((offsets, least)) = offsets.zip(direct.as_ref().map(|d| d.bits)) else {
            return Ok((direct, false));
        };
        let best = self.by_offsets(about, sample, offsets, &[], scratch)?;
        let smaller = best.as_ref().is_some_and(|b| b.bits < least - least / RANK1_GAIN);
        if smaller && !about.own_tables && about.shares_tables() && !about.is_long() {
            // The offsets may save only because chunks differ, in which case tables for each chunk save as well. Only
            // this comparison considers such tables: remembered costs are estimated as they will be the next time.
            let about = TensorFacts { own_tables: true, ..*about };
            let (_, by_offsets) = self.alone(&about, sample, Some(offsets), scratch)?;
            return Ok(if by_offsets { (best, true) } else { (direct, false) });
        }
        Ok(if smaller { (best, true) } else { (direct, false) })
    }

    /// The sample's cost if row and column offsets predict it, including the offsets. `parent`: its
    /// parent's values, if they have a share.
    fn by_offsets(
        &self,
        about: &TensorFacts<'_>,
        sample: &Sample<'_>,
        offsets: &[u8],
        parent: &[u8],
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let width = width_of(about.width())?;
        // The size of the offsets, scaled to the sample's part of the tensor.
        let stored =
            8 * stored_len(offsets) as u64 * sample.values.len() as u64 / about.bytes.max(1) as u64;
        let offsets = Offsets::parse(width, offsets)?;
        let (mut residuals, mut room, mut at) = (sample.values.to_vec(), vec![], 0);
        for run in &sample.runs {
            let bytes = at..at + (run.end - run.start) as usize * width.bytes();
            at = bytes.end;
            room.resize(bytes.len(), 0);
            let before = if offsets.share() == 0 { &[][..] } else { &parent[bytes.clone()] };
            offsets.predict_range(self.kernels, run.start, before, &mut room)?;
            self.kernels.sub_magnitudes(width, &mut residuals[bytes], &room);
        }
        let mut best = self.best(about, &residuals, SampleKind::Residuals, scratch)?;
        if let Some(best) = best.as_mut() {
            best.bits += stored;
        }
        Ok(best)
    }
}

/// The plan of preset `nvcomp`, which depends only on the dtype. In each chunk, a plane that coding
/// does not make smaller is stored raw.
pub(crate) fn nvcomp(dtype: DType) -> TensorPlan {
    const RAW: PlaneCoding = PlaneCoding::RAW;
    const ANS: PlaneCoding = PlaneCoding::NVCOMP_ANS;
    const GDEFLATE: PlaneCoding = PlaneCoding::GDEFLATE;
    let (layout, planes) = match (dtype.form(), dtype.value_width()) {
        // Signs are single bits already.
        (ElementForm::Float, 2) => (LayoutId::FIELDS_SIGN, vec![RAW, ANS, GDEFLATE]),
        (ElementForm::Float, _) => (LayoutId::FIELDS_SIGN, vec![RAW, ANS, GDEFLATE, GDEFLATE]),
        (ElementForm::Bytes, 1) => (LayoutId::WHOLE, vec![GDEFLATE]),
        (ElementForm::Bytes, width) => (LayoutId::BYTES, vec![GDEFLATE; width]),
    };
    TensorPlan::new(Plan::direct(layout), planes, chunk_log2(dtype))
}

/// The plan of a tensor from its cheapest candidate. `needs`: side data that its chunks need.
fn finish(
    about: &TensorFacts<'_>,
    best: Option<Candidate>,
    plan: impl FnOnce(LayoutId) -> Plan,
    needs: Option<(SideKind, &[u8])>,
) -> Result<TensorPlan> {
    let (layout, planes) = best.map_or((LayoutId::WHOLE, vec![]), |b| (b.layout, b.planes));
    let chunk_log2 = chunk_log2(about.dtype);
    let one_table = (0u8..).zip(&planes).filter(|(_, plane)| plane.one_table);
    let one_table = one_table.fold(0, |bits, (i, _)| bits | 1 << i);
    let shared = planes.iter().map(|plane| match precision(plane.coding) {
        Some(p) if about.shares_tables() => write_tables(&shared_tables(&plane.counts, p)),
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
