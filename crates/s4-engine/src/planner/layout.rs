//! The cost of each layout on a sample.

use std::sync::Arc;

use s4_codec_cpu::{Context, Symbols};
use s4_format::dtype::ElementForm;
use s4_format::{DType, LayoutId, Result};
use s4_predict::{ContextModel, Known, Tensor};

use super::allowed::allowed;
use super::coding::{
    PlannedPlane, bits_of_signs, by_own_tables, choose, choose_in_context, expect_changes,
    precision,
};
use super::counted::{CountedPlane, symbols_of};
use super::facts::TensorFacts;
use super::sample;
use crate::chunk::{chunk_log2, repeats};
use crate::planes::Layout;
use crate::scratch::sized;
use crate::{CpuEngine, PlaneCoding, Scratch};

// Thresholds are parts of the compared quantities: 128 means one in 128.

/// A layout must save this part of the cost of the best one before it in [`layouts`], which is faster.
const LAYOUT_GAIN: u64 = 256;
/// Zstandard must save this part of the other layouts' cost: it is the slowest to decode.
const ZSTD_GAIN: u64 = 20;
/// rANS in pairs (P = 8) may lose this part of the plane to P = 12: with one renormalisation for
/// two symbols it is much faster.
const PAIRS_LOSS: u64 = 50;
/// As [`PAIRS_LOSS`] for a delta, as a part of the bits of all its planes: coarse frequencies waste
/// a larger part of planes that take few bits.
const PAIRS_LOSS_OF_ALL: u64 = 128;
/// As [`PAIRS_LOSS_OF_ALL`], for presets that do more for size.
const LITTLE_LOSS_OF_ALL: u64 = 512;
/// As [`LITTLE_LOSS_OF_ALL`], for planes with more than [`MANY`] symbols: exponents that come with
/// some bits of the mantissa, as those of fp16 do. 256 slots hardly tell them apart.
const LEAST_LOSS_OF_ALL: u64 = 2048;
/// See [`LEAST_LOSS_OF_ALL`].
const MANY: usize = 32;
/// Contexts of a plane must save this part of all planes' bits: a single table is faster.
const CONTEXTS_LOSS: u64 = 256;
/// The price of entropy coding, one bit for this many values: it is most of a decoder's work.
const RANS_WORK: u64 = 8;

/// Tables of their own must save chunks at least this part to count: less may be chance.
const OWN_GAIN: u64 = 64;
/// The kind of data that is coded, and the contexts that it may have.
#[derive(Clone, Copy)]
pub(super) enum SampleKind<'a> {
    /// Values.
    Values,
    /// Residuals of a prediction from the tensor itself.
    Residuals,
    /// Differences from a parent's values, which may be anything outside the sample.
    Differences,
    /// Such differences, taken in the order of values: their top bit is hardly ever set.
    Ordered,
    /// The same, with contexts. `tensor` has their side data, `inputs` the values that they depend on.
    InContext {
        model: &'a dyn ContextModel,
        tensor: Tensor<'a>,
        inputs: &'a [&'a [u8]],
        values: u64,
    },
}

impl SampleKind<'_> {
    /// Whether a chunk may have other tables than the tensor's.
    fn has_own_tables(self) -> bool {
        // As in the encoder, contexts `update` do without.
        !matches!(self, Self::InContext { model, .. } if !model.depends_on_planes())
    }
}

pub(super) struct Candidate {
    pub(super) layout: LayoutId,
    pub(super) planes: Vec<PlannedPlane>,
    /// Estimated bits of the sample, and a price for the decoder's work.
    cost: u64,
    /// The same without the price.
    pub(super) bits: u64,
    /// The same with tables, and no plane larger than stored raw: the real outcome.
    total: u64,
}

impl CpuEngine {
    /// The cheapest layout of a sample. Its bits include tables, except for preset `fast`.
    pub(super) fn best(
        &self,
        about: &TensorFacts<'_>,
        values: &[u8],
        of: SampleKind<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let dtype = about.dtype;
        let tried = match (&about.again, of) {
            _ if values.is_empty() => &[],
            (Some(again), _) => std::slice::from_ref(&again.layout),
            (None, SampleKind::InContext { .. }) => IN_CONTEXT,
            (None, _) => layouts(dtype),
        };
        // Preset `fast` must write what its golden files hold.
        let small = allowed(about.preset).rank1;
        let mut best: Option<Candidate> = None;
        for &layout in tried {
            let fits = match of {
                SampleKind::InContext { model, .. } => model.tables(layout, 1) > 1,
                SampleKind::Residuals => matches!(layout, LayoutId::FIELDS | LayoutId::FIELDS_SIGN),
                _ => true,
            };
            if !fits {
                continue;
            }
            let mut c = self.candidate(layout, about, values, of, scratch)?;
            if best.as_ref().is_none_or(|b| c.cost < b.cost - b.cost / LAYOUT_GAIN) {
                // If everything but the exponents is noise, signs included, no other layout is smaller.
                let noise = c.planes.iter().skip(1).all(|p| p.noise);
                let differs = !matches!(of, SampleKind::Values | SampleKind::Residuals);
                if differs || small {
                    c.planes.iter_mut().for_each(expect_changes);
                }
                best = Some(c);
                // (But signs that are constant in some places may look like noise among the low bits.)
                let plain = matches!(of, SampleKind::Values | SampleKind::Differences);
                let signs = !small || sample::signs_change(values, about.width(), about.run());
                if layout == LayoutId::FIELDS && noise && plain && signs {
                    break;
                }
            }
        }
        if let Some(best) = best.as_mut().filter(|_| allowed(about.preset).rank1) {
            best.bits = best.total;
        }
        Ok(best)
    }

    fn candidate(
        &self,
        layout: LayoutId,
        about: &TensorFacts<'_>,
        sample: &[u8],
        of: SampleKind<'_>,
        scratch: &mut Scratch,
    ) -> Result<Candidate> {
        let width = about.width();
        let values = sample.len() / width;
        let split = Layout::new(self.kernels, layout, width)?;
        let sizes = split.planes(sample.len())?;
        split.split(sample, scratch)?;
        let mut counted = std::mem::take(&mut scratch.counted);
        let mut c = Candidate { layout, planes: vec![], cost: 0, bits: 0, total: 0 };
        let planes = sizes.sizes().len();
        let plane = |i| scratch.plane(layout, sizes.sizes(), i);
        // A delta codes several planes, some of them in few bits. The coarse frequencies of pairs
        // waste a larger part of those, so the loss is measured against the bits of all planes.
        let delta = !matches!(of, SampleKind::Values | SampleKind::Residuals);
        let small = allowed(about.preset).rank1;
        let is_dense = |i| layout == LayoutId::FIELDS_SIGN && i == 2;
        let bits = |i| if is_dense(i) { 7 } else { 8 };
        let mut count = |i| counted.plane(plane(i), bits(i));
        // If an earlier choice says what all planes take, planes with contexts need no count without contexts.
        let known = about.again.filter(|_| matches!(of, SampleKind::InContext { .. }));
        let counts: Vec<_> = (0..planes).filter(|_| known.is_none()).map(&mut count).collect();
        let least = |(i, counted): (usize, &Arc<CountedPlane>)| {
            counted.least.min(8 * plane(i).len() as u64)
        };
        let all = match known {
            Some(choice) => choice.bits(),
            None if delta || small => counts.iter().enumerate().map(least).sum(),
            None => 0,
        };
        for i in 0..planes {
            let dense = is_dense(i);
            let may_lose = |many: bool, pairs: u64| match (small, delta) {
                (true, false) if many => all / LEAST_LOSS_OF_ALL,
                (true, _) => all / LITTLE_LOSS_OF_ALL,
                (false, true) => all / PAIRS_LOSS_OF_ALL,
                (false, false) => pairs / PAIRS_LOSS,
            };
            let known: Vec<_> = (0..i).map(plane).collect();
            let contexts = self.contexts(of, layout, &known, plane(i).len())?;
            let plane = plane(i);
            let (planned, cost, table) = match (of, &contexts[..]) {
                (SampleKind::InContext { values, .. }, [_, ..]) => {
                    // In the last plane, even and odd symbols mean different things.
                    let alike = if i + 1 == planes { 2 } else { 1 };
                    let smooth =
                        (layout == LayoutId::BYTES).then_some((alike, all / CONTEXTS_LOSS));
                    let known = about.again.and_then(|choice| choice.plane(i));
                    let tables = (smooth, about.shares_tables());
                    let (planned, cost) =
                        choose_in_context((plane, &contexts), dense, values, tables, known);
                    // The cost already includes the tables of contexts.
                    (planned, cost, 0)
                }
                _ => {
                    let counted = counts.get(i).map_or_else(|| count(i), Arc::clone);
                    let many = symbols_of(&counted.counts) > MANY;
                    let may_lose = |pairs| may_lose(many, pairs);
                    choose((plane, &counted), dense, may_lose, |table| match small {
                        true => 8 * (table * values) as u64 / about.values().max(1),
                        false => 0,
                    })
                }
            };
            let cost = match (layout, i) {
                (LayoutId::FIELDS_SIGN, 0) if small => cost.min(bits_of_signs(plane, about.run())),
                _ => cost,
            };
            let precision = precision(planned.coding);
            let chunks = about.chunks_with_own_tables().filter(|_| small && of.has_own_tables());
            let cost = match (precision, chunks) {
                (Some(p), Some(chunks)) => {
                    let chunks = (chunks, chunk_log2(about.dtype));
                    let own = by_own_tables((plane, values), &contexts, p, chunks);
                    if own < cost - cost / OWN_GAIN { own } else { cost }
                }
                _ => cost,
            };
            let work = if precision.is_some() { values as u64 / RANS_WORK } else { 0 };
            // The tensor stores the table once.
            let tables = 8 * (table * values) as u64 / about.values().max(1);
            c.planes.push(planned);
            c.cost += cost + work;
            // A plane that repeats a short unit is stored as that unit, whatever is planned.
            if !repeats(plane, plane.len()) {
                c.bits += cost;
                c.total += (cost + tables).min(8 * plane.len() as u64);
            }
        }
        scratch.counted = counted;
        if layout == LayoutId::WHOLE {
            let bits = 8 * self.zstd_len(sample, scratch)? as u64;
            if bits < c.cost - c.cost / ZSTD_GAIN {
                c.planes[0].coding = PlaneCoding::ZSTD;
                (c.cost, c.bits, c.total) = (bits, bits.min(c.bits), bits.min(c.total));
            }
        }
        Ok(c)
    }

    /// The contexts of the symbols of the plane after `planes`; empty if they have none.
    fn contexts(
        &self,
        of: SampleKind<'_>,
        layout: LayoutId,
        planes: &[&[u8]],
        len: usize,
    ) -> Result<Vec<u8>> {
        let SampleKind::InContext { model, tensor, inputs, .. } = of else { return Ok(vec![]) };
        if model.tables(layout, planes.len()) == 1 {
            return Ok(vec![]);
        }
        let mut out = vec![0; len];
        let (kernels, first) = (self.kernels, 0);
        let known = Known { kernels, tensor, first, layout, planes, inputs };
        model.contexts(&known, &mut out)?;
        Ok(out)
    }

    fn zstd_len(&self, sample: &[u8], scratch: &mut Scratch) -> Result<usize> {
        let PlaneCoding { codec, param } = PlaneCoding::ZSTD;
        let zstd = self.codecs.get(codec)?;
        let out = sized(&mut scratch.joined, zstd.bound(param, sample.len()));
        let symbols = Symbols::new(sample, Context::of(param));
        Ok(zstd.encode(&symbols, out, &mut scratch.work)?.len)
    }
}

/// The layouts that may have planes with contexts; the model decides which do.
const IN_CONTEXT: &[LayoutId] = &[LayoutId::FIELDS, LayoutId::FIELDS_SIGN, LayoutId::BYTES];

/// The layouts that are tried for a dtype, in ascending order of work.
pub(super) fn layouts(dtype: DType) -> &'static [LayoutId] {
    use LayoutId as L;
    match (dtype.form(), dtype.value_width()) {
        (ElementForm::Float, 2) => &[L::FIELDS, L::FIELDS_SIGN],
        (ElementForm::Float, _) => &[L::FIELDS, L::FIELDS_SIGN, L::BYTES],
        (ElementForm::Bytes, 1) => &[L::WHOLE],
        (ElementForm::Bytes, _) => &[L::BYTES, L::WHOLE],
    }
}
