//! What each layout of a sample would cost.

use std::rc::Rc;

use s4_codec_cpu::rans::{Counts, Precision, Table, cost, cost_with, entropy};
use s4_codec_cpu::{Context, Symbols};
use s4_format::dtype::Form;
use s4_format::limits::MAX_TABLES;
use s4_format::{CodecId, DType, LayoutId, Result};
use s4_predict::{ContextModel, Known, Tensor};

use super::{About, allowed, sample};
use crate::chunk::{chunk_log2, repeats};
use crate::planes::Layout;
use crate::scratch::sized;
use crate::{CpuEngine, PlaneCoding, Scratch};

// Thresholds are parts of what is compared: 128 means one in 128.

/// A layout must save this part of the one before it in [`layouts`], which is faster.
const LAYOUT_GAIN: u64 = 256;
/// Zstandard must save this part of the other layouts' cost: it is the slowest to decode.
const ZSTD_GAIN: u64 = 20;
/// A plane that entropy coding makes smaller by less than this part is noise, and not worth the time.
const NOISE_GAIN: u64 = 50;
/// Rans in pairs (P = 8) may lose this part of the plane to P = 12: one renormalisation for two symbols is
/// much the faster.
const PAIRS_LOSS: u64 = 50;
/// As [`PAIRS_LOSS`] for a delta, of the bits of all its planes: coarse frequencies waste a larger part of
/// planes that take few bits.
const PAIRS_LOSS_OF_ALL: u64 = 128;
/// As [`PAIRS_LOSS_OF_ALL`], where more is done for size.
const LITTLE_LOSS_OF_ALL: u64 = 512;
/// As that, of values whose exponents come with some bits of the mantissa: with more than [`MANY`] symbols. Those of fp16
/// do, and 256 slots hardly tell them apart.
const LEAST_LOSS_OF_ALL: u64 = 2048;
/// See [`LEAST_LOSS_OF_ALL`].
const MANY: usize = 32;
/// Contexts of a plane must save this part of all planes' bits: one table is faster.
const CONTEXTS_LOSS: u64 = 256;
/// What entropy coding costs, as a part of a bit for each value: it is most of a decoder's work.
const RANS_WORK: u64 = 8;

/// In planes of at least so many bytes, one block of four may show that all is noise, as most mantissas are.
const COARSE: usize = 8192;
const BLOCK: usize = 256;
/// What is counted so must save less than this part, far less than [`NOISE_GAIN`], to be noise.
const SURE_NOISE: u64 = 256;

/// What chunks save by tables of their own counts from this part on: less may be chance.
const OWN_GAIN: u64 = 64;
/// Parts of a sample that are counted by themselves.
const PARTS: usize = 8;

/// Units of a symbol that was seen once, where means of counts are taken.
const SMOOTH: u64 = 64;

/// What is coded, and how.
#[derive(Clone, Copy)]
pub(super) enum Of<'a> {
    /// Values.
    Values,
    /// What is left of values after a prediction from the tensor itself.
    Residuals,
    /// Differences from a parent's values, which may be anything where the sample saw none.
    Differences,
    /// Such differences in the order of values: their top bit hardly ever is set.
    Ordered,
    /// The same, with contexts: of a tensor whose side data this is, from the values of inputs.
    InContext {
        model: &'a dyn ContextModel,
        tensor: Tensor<'a>,
        inputs: &'a [&'a [u8]],
        values: u64,
    },
}

impl Of<'_> {
    /// Whether a chunk may have other tables than the tensor's.
    fn has_own_tables(self) -> bool {
        // As the encoder has it: the contexts of `update` do without.
        !matches!(self, Self::InContext { model, .. } if !model.depends_on_planes())
    }
}

/// How a plane is coded.
pub(super) struct PlannedPlane {
    pub(super) coding: PlaneCoding,
    /// Of each context, or of all symbols.
    pub(super) counts: Vec<Counts>,
    /// Whether there are contexts that are not used.
    pub(super) one_table: bool,
    noise: bool,
}

pub(super) struct Candidate {
    pub(super) layout: LayoutId,
    pub(super) planes: Vec<PlannedPlane>,
    /// Estimated bits of the sample, and a price for the work.
    cost: u64,
    /// Without the price.
    pub(super) bits: u64,
    /// With what tables take, and no plane larger than it is: what coding really comes to.
    total: u64,
}

/// The planes of some values as they were counted, layout by layout: whatever is asked of the values, they are the same.
#[derive(Default)]
pub(super) struct Counted(Vec<(LayoutId, Rc<[CountedPlane]>)>);

/// How often each symbol of a plane occurs.
struct CountedPlane {
    /// Of noise perhaps of a part.
    counts: Counts,
    /// Their entropy, in bits; of noise what it takes.
    least: u64,
}

impl CountedPlane {
    /// Of a plane whose symbols have so many bits. `coarse`: whether a part may tell that it is noise.
    fn of(plane: &[u8], bits: u64, coarse: bool) -> Self {
        if coarse && plane.len() >= COARSE {
            let counts = Counts::of_pieces(plane.chunks(BLOCK).step_by(4));
            let raw = bits * counts.total();
            if entropy(&counts) + unseen(&counts) >= raw - raw / SURE_NOISE {
                return Self { counts, least: bits * plane.len() as u64 };
            }
        }
        let counts = Counts::of_all(plane);
        let least = entropy(&counts);
        Self { counts, least }
    }
}

impl Counted {
    /// The planes of a layout, with the bits of their symbols, if they have to be counted.
    fn planes<'a>(
        &mut self,
        layout: LayoutId,
        coarse: bool,
        planes: impl Iterator<Item = (&'a [u8], u64)>,
    ) -> Rc<[CountedPlane]> {
        if let Some((_, counted)) = self.0.iter().find(|(known, _)| *known == layout) {
            return counted.clone();
        }
        let counted: Rc<[_]> =
            planes.map(|(plane, bits)| CountedPlane::of(plane, bits, coarse)).collect();
        self.0.push((layout, counted.clone()));
        counted
    }
}

impl CpuEngine {
    /// The cheapest layout of a sample, whose bits count tables where more is compared than what `fast` has. `counted`:
    /// what was counted of these values before.
    pub(super) fn best(
        &self,
        about: &About<'_>,
        (values, counted): (&[u8], &mut Counted),
        of: Of<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let dtype = about.dtype;
        let tried = match of {
            _ if values.is_empty() => &[],
            Of::InContext { .. } => IN_CONTEXT,
            _ => layouts(dtype),
        };
        // `fast` writes what its golden files hold.
        let small = allowed(about.preset).rank1;
        let mut best: Option<Candidate> = None;
        for &layout in tried {
            let fits = match of {
                Of::InContext { model, .. } => model.tables(layout, 1) > 1,
                Of::Residuals => matches!(layout, LayoutId::FIELDS | LayoutId::FIELDS_SIGN),
                _ => true,
            };
            if !fits {
                continue;
            }
            let mut c = self.candidate(layout, about, (values, counted), of, scratch)?;
            if best.as_ref().is_none_or(|b| c.cost < b.cost - b.cost / LAYOUT_GAIN) {
                // Where all but the exponents are noise, sign and all, no other layout is smaller.
                let noise = c.planes.iter().skip(1).all(|p| p.noise);
                let differs = !matches!(of, Of::Values | Of::Residuals);
                if differs || small {
                    c.planes.iter_mut().for_each(expect_changes);
                }
                best = Some(c);
                // (But a sign that does not change, here or there, may look like noise among the low bits.)
                let plain = matches!(of, Of::Values | Of::Differences);
                let signs = !small || sample::signs_change(values, about.width());
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
        about: &About<'_>,
        (sample, counted): (&[u8], &mut Counted),
        of: Of<'_>,
        scratch: &mut Scratch,
    ) -> Result<Candidate> {
        let width = about.width();
        let values = sample.len() / width;
        let split = Layout::new(self.kernels, layout, width)?;
        let sizes = split.planes(sample.len())?;
        split.split(sample, scratch)?;
        let mut c = Candidate { layout, planes: vec![], cost: 0, bits: 0, total: 0 };
        let planes = sizes.sizes().len();
        let plane = |i| scratch.plane(layout, sizes.sizes(), i);
        // Several planes of differences are coded, some of them in few bits, of which the coarse
        // frequencies of pairs waste a larger part: what counts is the part of all bits.
        let delta = !matches!(of, Of::Values | Of::Residuals);
        let small = allowed(about.preset).rank1;
        let is_dense = |i| layout == LayoutId::FIELDS_SIGN && i == 2;
        let each = (0..planes).map(|i| (plane(i), if is_dense(i) { 7 } else { 8 }));
        let counted = counted.planes(layout, small, each);
        let least = |i: usize| counted[i].least.min(8 * plane(i).len() as u64);
        let all = if delta || small { (0..planes).map(least).sum() } else { 0 };
        for i in 0..planes {
            let dense = is_dense(i);
            let many = symbols_of(&counted[i].counts) > MANY;
            let may_lose = |pairs: u64| match (small, delta) {
                (true, false) if many => all / LEAST_LOSS_OF_ALL,
                (true, _) => all / LITTLE_LOSS_OF_ALL,
                (false, true) => all / PAIRS_LOSS_OF_ALL,
                (false, false) => pairs / PAIRS_LOSS,
            };
            let known: Vec<_> = (0..i).map(plane).collect();
            let contexts = self.contexts(of, layout, &known, plane(i).len())?;
            let plane = plane(i);
            let (planned, cost) = match (of, &contexts[..]) {
                (Of::InContext { values, .. }, [_, ..]) => {
                    // Of the last plane even symbols say another thing than odd ones.
                    let alike = if i + 1 == planes { 2 } else { 1 };
                    let smooth =
                        (layout == LayoutId::BYTES).then_some((alike, all / CONTEXTS_LOSS));
                    choose_in_context(plane, &contexts, dense, (values, smooth))
                }
                _ => choose((plane, &counted[i]), dense, may_lose, |table| match small {
                    true => 8 * (table.encoded_len() * values) as u64 / about.values().max(1),
                    false => 0,
                }),
            };
            let cost = match (layout, i) {
                (LayoutId::FIELDS_SIGN, 0) if small => cost.min(bits_of_signs(plane)),
                _ => cost,
            };
            let precision = precision(planned.coding);
            let cost = match precision {
                Some(p) if small && of.has_own_tables() && about.is_long() => {
                    let own = by_own_tables((plane, values), &contexts, p, chunk_log2(about.dtype));
                    if own < cost - cost / OWN_GAIN { own } else { cost }
                }
                _ => cost,
            };
            let work = if precision.is_some() { values as u64 / RANS_WORK } else { 0 };
            // The tensor keeps tables once; with contexts they were counted.
            let tables = match (precision, contexts.is_empty()) {
                (Some(p), true) => planned.counts.iter().map(|c| c.table(p).encoded_len()).sum(),
                _ => 0,
            };
            let tables = 8 * (tables * values) as u64 / about.values().max(1);
            c.planes.push(planned);
            c.cost += cost + work;
            // A plane that repeats a short unit is stored as that, whatever is planned.
            if !repeats(plane, plane.len()) {
                c.bits += cost;
                c.total += (cost + tables).min(8 * plane.len() as u64);
            }
        }
        if layout == LayoutId::WHOLE {
            let bits = 8 * self.zstd_len(sample, scratch)? as u64;
            if bits < c.cost - c.cost / ZSTD_GAIN {
                c.planes[0].coding = PlaneCoding::ZSTD;
                (c.cost, c.bits, c.total) = (bits, bits.min(c.bits), bits.min(c.total));
            }
        }
        Ok(c)
    }

    /// The contexts of the symbols behind the planes that are known; none, if they have none.
    fn contexts(
        &self,
        of: Of<'_>,
        layout: LayoutId,
        planes: &[&[u8]],
        len: usize,
    ) -> Result<Vec<u8>> {
        let Of::InContext { model, tensor, inputs, .. } = of else { return Ok(vec![]) };
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

/// The precision of a plane that is coded by rANS.
pub(super) fn precision(coding: PlaneCoding) -> Option<Precision> {
    let param = (coding.codec == CodecId::RANS).then_some(coding.param)?;
    Precision::from_param(param).ok()
}

/// A plane that is constant in the sample may have other symbols elsewhere: few, as a rule.
fn expect_changes(plane: &mut PlannedPlane) {
    let PlannedPlane { coding, counts, noise, .. } = plane;
    let constant = |c: &Counts| (0..=255).any(|s| c.get(s) == c.total());
    if *coding == PlaneCoding::RAW && !*noise && counts.iter().all(constant) {
        *coding = PlaneCoding::RANS8;
    }
}

/// The layouts that may have planes with contexts: which do is up to the model.
const IN_CONTEXT: &[LayoutId] = &[LayoutId::FIELDS, LayoutId::FIELDS_SIGN, LayoutId::BYTES];

/// The layouts that are tried for a dtype, in ascending order of work.
pub(super) fn layouts(dtype: DType) -> &'static [LayoutId] {
    use LayoutId as L;
    match (dtype.form(), dtype.value_width()) {
        (Form::Float, 2) => &[L::FIELDS, L::FIELDS_SIGN],
        (Form::Float, _) => &[L::FIELDS, L::FIELDS_SIGN, L::BYTES],
        (Form::Bytes, 1) => &[L::WHOLE],
        (Form::Bytes, _) => &[L::BYTES, L::WHOLE],
    }
}

/// What signs take in chunks of which some have one sign alone, as those of moments in a buffer of weights and moments do.
fn bits_of_signs(plane: &[u8]) -> u64 {
    let varies = |run: &&[u8]| run.iter().any(|b| *b != run[0]);
    plane.chunks(sample::PROBE / 8).filter(varies).map(|run| 8 * run.len() as u64).sum()
}

/// How a plane is coded, and its estimated cost in bits. `may_lose`: of how many bits, for being faster. `stored`: the bits of
/// a table, as far as they count.
fn choose(
    (plane, counted): (&[u8], &CountedPlane),
    dense: bool,
    may_lose: impl Fn(u64) -> u64,
    stored: impl Fn(&Table) -> u64,
) -> (PlannedPlane, u64) {
    let CountedPlane { counts, least } = counted;
    let least = *least;
    let (raw, noise) = noise(plane, dense);
    let (coding, cost) = if plane.iter().all(|b| *b == plane[0]) {
        // Stored as a constant wherever it is one.
        (PlaneCoding::RAW, 0)
    } else if !is_worth(least, raw) {
        (noise, raw)
    } else {
        let table = counts.table(Precision::P8);
        let pairs = cost(counts, &table);
        let much_less = (pairs + stored(&table)).saturating_sub(may_lose(pairs));
        let singles = (least < much_less).then(|| counts.table(Precision::P12));
        let singles = singles.map(|table| (cost(counts, &table), stored(&table)));
        let (coding, cost) = match singles {
            Some((singles, table)) if singles + table < much_less => (PlaneCoding::RANS12, singles),
            _ => (PlaneCoding::RANS8, pairs),
        };
        if is_worth(cost, raw) { (coding, cost) } else { (noise, raw) }
    };
    let noise = cost == 8 * plane.len() as u64;
    (PlannedPlane { coding, counts: vec![counts.clone()], one_table: false, noise }, cost)
}

/// As [`choose`], with the contexts of the symbols. A tensor of so many values keeps the tables once. `smooth`: symbols
/// that are so far apart are about as frequent, if both are large; and one table may lose so many bits, which is faster.
fn choose_in_context(
    plane: &[u8],
    contexts: &[u8],
    dense: bool,
    (values, smooth): (u64, Option<(usize, u64)>),
) -> (PlannedPlane, u64) {
    let (raw, noise) = noise(plane, dense);
    let tables = 1 + usize::from(contexts.iter().fold(0, |a, b| a.max(*b)));
    let mut seen = vec![Counts::new(); tables];
    for (symbol, context) in plane.iter().zip(contexts) {
        seen[usize::from(*context)].add_symbol(*symbol, 1);
    }
    let as_noise = |counts| {
        let noise_planned = raw == 8 * plane.len() as u64;
        (PlannedPlane { coding: noise, counts, one_table: false, noise: noise_planned }, raw)
    };
    // Tables cost most of the time, and none makes noise smaller.
    let least = seen.iter().map(|c| entropy(c) + unseen(c)).sum();
    if !is_worth(least, raw) {
        return as_noise(seen);
    }
    let bits = |counts: &[Counts], expected: &[Counts]| -> u64 {
        let each =
            counts.iter().zip(expected).filter(|(c, _)| c.total() > 0).map(|(c, expected)| {
                let (bits, table) = cost_with(c, expected, Precision::P8);
                let stored = 8 * table as u64 * plane.len() as u64 / values.max(1);
                let unseen = if smooth.is_some() { 0 } else { unseen(c) };
                bits + stored + unseen
            });
        each.sum()
    };
    let expected = match smooth {
        Some((alike, _)) => {
            // Chunks have no other tables than the tensor's, which must do for any context.
            seen.resize(MAX_TABLES, Counts::new());
            seen.iter().map(|c| smoothed(c, alike)).collect()
        }
        None => seen.clone(),
    };
    let (mut cost, mut counts, mut one_table) = (bits(&seen, &expected), expected, false);
    if let Some((alike, may_lose)) = smooth {
        let mut all = Counts::new();
        seen.iter().for_each(|c| all.add(c));
        let expected = vec![smoothed(&all, alike)];
        let single = bits(&[all], &expected);
        if single <= cost + may_lose {
            (cost, counts, one_table) = (single, expected, true);
        }
    }
    if !is_worth(cost, raw) {
        return as_noise(counts);
    }
    (PlannedPlane { coding: PlaneCoding::RANS8, counts, one_table, noise: false }, cost)
}

/// The bits of a plane, of a sample of so many values, if each chunk of the tensor has tables of its own. That is how chunks
/// are stored that differ much from others, as in a buffer of weights and moments.
fn by_own_tables(
    (plane, values): (&[u8], usize),
    contexts: &[u8],
    precision: Precision,
    chunk_log2: u8,
) -> u64 {
    let tables = 1 + usize::from(contexts.iter().fold(0, |a, b| a.max(*b)));
    let part = plane.len().div_ceil(PARTS).max(1);
    let mut bits = 0;
    let mut seen = vec![Counts::new(); tables];
    for (at, symbols) in plane.chunks(part).enumerate() {
        seen.fill(Counts::new());
        match contexts.get(at * part..) {
            Some(contexts) if !contexts.is_empty() => {
                for (symbol, context) in symbols.iter().zip(contexts) {
                    seen[usize::from(*context)].add_symbol(*symbol, 1);
                }
            }
            _ => seen[0] = Counts::of_all(symbols),
        }
        for counts in seen.iter().filter(|c| c.total() > 0) {
            let (coded, table) = cost_with(counts, counts, precision);
            bits += coded + unseen(counts) + ((8 * table * values / PARTS) as u64 >> chunk_log2);
        }
    }
    bits
}

/// How many symbols there are.
fn symbols_of(counts: &Counts) -> usize {
    (0..=255).filter(|s| counts.get(*s) > 0).count()
}

/// Bits that a table of a sample's own counts seems to save and does not: with many tables it adds up. For independent
/// frequencies it is 0.7 bits each (G. A. Miller, "Note on the bias of information estimates", 1955); those of residuals
/// depend on each other, and on the files of `docs/ratio.md` half a bit told best which plan is smaller.
fn unseen(counts: &Counts) -> u64 {
    (symbols_of(counts) as u64).saturating_sub(1) / 2
}

/// Counts of what a sample need not have seen: each symbol's becomes the mean of those near it, which are the more the
/// larger it is, as logarithms have it. Only every `alike`th is like it.
fn smoothed(counts: &Counts, alike: usize) -> Counts {
    if counts.total() == 0 {
        return Counts::new();
    }
    // Of a symbol and all that are like it below.
    let mut sums = [0; 256];
    for symbol in 0..=255u8 {
        let at = usize::from(symbol);
        sums[at] = counts.get(symbol) + at.checked_sub(alike).map_or(0, |below| sums[below]);
    }
    let mut out = Counts::new();
    for symbol in 0..=255u8 {
        let at = usize::from(symbol);
        let reach = at / (8 * alike);
        let above = reach.min((255 - at) / alike);
        let below = (at - reach * alike).checked_sub(alike).map_or(0, |i| sums[i]);
        let sum = sums[at + above * alike] - below;
        out.add_symbol(symbol, SMOOTH * sum / (reach + above + 1) as u64);
    }
    out
}

/// The bits of a plane that is noise, and how it is stored.
fn noise(plane: &[u8], dense: bool) -> (u64, PlaneCoding) {
    let raw = plane.len() as u64 * if dense { 7 } else { 8 };
    (raw, if dense { PlaneCoding::BITS7 } else { PlaneCoding::RAW })
}

/// Whether a plane is made so much smaller that it is worth the time.
fn is_worth(bits: u64, raw: u64) -> bool {
    bits < raw - raw / NOISE_GAIN
}
