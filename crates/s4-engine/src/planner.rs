//! Chooses, for a tensor, a layout and a codec for each plane.

use std::ops::Range;

use s4_codec_cpu::rans::{Counts, Precision, cost, entropy, write_tables};
use s4_codec_cpu::{Context, Symbols};
use s4_format::dtype::Form;
use s4_format::manifest::TensorRole;
use s4_format::{CodecId, DType, Digest, Error, LayoutId, Plan, Result};

use crate::chunk::{chunk_log2, repeats};
use crate::planes::Layout;
use crate::scratch::sized;
use crate::{CpuEngine, PlaneCoding, Preset, Scratch, TensorPlan, TensorView};

/// Runs of values that the planner looks at, and values in each.
const PROBES: usize = 16;
const PROBE: usize = 1024;
/// Chunks of the parent that the planner looks into: each may have to be read and decoded whole.
const PARENT_CHUNKS: u64 = 4;
/// What one more plan costs in the manifest, in bits: a delta has to save more.
const PLAN_BITS: u64 = 8 * 160;

// Thresholds are parts of what is compared: 128 means one in 128.

/// A delta must save this part of the tensor stored by itself: it is read together with its parents.
const DELTA_GAIN: u64 = 128;
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
/// What entropy coding costs, as a part of a bit for each value: it is most of a decoder's work.
const RANS_WORK: u64 = 8;

/// The tensor of a parent checkpoint that a tensor may be stored as its difference from.
#[derive(Debug, Clone, Copy)]
pub struct ParentSample<'a> {
    /// Hash of the parent's manifest.
    pub manifest: Digest,
    /// Number of the tensor in the parent, where it has the same dtype and shape.
    pub tensor: u32,
    /// Its values at [`parent_probes`], one run after the other.
    pub values: &'a [u8],
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
    /// What it is to the optimizer, and the hyperparameters of its group. Nothing is chosen by it yet.
    pub role: Option<TensorRole<'a>>,
}

/// The values of a tensor's parent that the planner looks at, as ranges of value numbers in
/// ascending order. Fixed for a dtype and a number of values; they lie in a few chunks.
pub fn parent_probes(dtype: DType, values: u64) -> Vec<Range<u64>> {
    let (probes, probe) = (PROBES as u64, PROBE as u64);
    if values <= probes * probe {
        // The one range of all values.
        return std::iter::once(0..values).filter(|r| !r.is_empty()).collect();
    }
    let chunk = 1 << chunk_log2(dtype);
    let whole = values / chunk;
    if whole <= PARENT_CHUNKS {
        return spread(0..values, probes).collect();
    }
    // Whole chunks, from the first to the last of them, and some probes in each.
    let at = |i| (whole - 1) * i / (PARENT_CHUNKS - 1) * chunk;
    (0..PARENT_CHUNKS).flat_map(|i| spread(at(i)..at(i) + chunk, probes / PARENT_CHUNKS)).collect()
}

/// Runs of [`PROBE`] values, evenly spaced from the start of a range to its end.
fn spread(within: Range<u64>, runs: u64) -> impl Iterator<Item = Range<u64>> {
    let step = (within.end - within.start - PROBE as u64) / (runs - 1);
    (0..runs).map(move |i| {
        let first = within.start + step * i;
        first..first + PROBE as u64
    })
}

struct Candidate {
    layout: LayoutId,
    /// For each plane its coding, its counts, and whether it is noise.
    planes: Vec<(PlaneCoding, Counts, bool)>,
    /// Estimated bits of the sample, and a price for the work.
    cost: u64,
    /// Without the price.
    bits: u64,
}

impl CpuEngine {
    /// Chooses a plan by looking at up to 16,384 values at fixed positions of the tensor.
    ///
    /// With a parent, the tensor is stored as the XOR with the parent's values if that is clearly
    /// smaller, and otherwise as if there were no parent. Preset `nvcomp` stores every tensor by itself.
    ///
    /// # Errors
    /// Errors of a codec; `Corrupt` if the parent's sample has another size.
    pub fn plan(&self, job: &PlanJob<'_>, scratch: &mut Scratch) -> Result<TensorPlan> {
        let PlanJob { preset, view: &TensorView { dtype, data, .. }, parent, .. } = *job;
        let width = dtype.value_width();
        let values = (data.len() / width) as u64;
        let direct = |scratch: &mut Scratch| {
            let sample = gather(data, width, sampled_runs(values));
            self.plan_sample(preset, dtype, data.len(), &sample, scratch)
        };
        match parent.filter(|_| preset != Preset::Nvcomp) {
            None => direct(scratch),
            Some(parent) => {
                let sample = gather(data, width, parent_probes(dtype, values));
                self.plan_difference(dtype, data.len(), sample, parent, scratch, direct)
            }
        }
    }

    /// [`CpuEngine::plan`] for a tensor of `bytes` bytes whose sampled runs lie in `sample`.
    pub(crate) fn plan_sample(
        &self,
        preset: Preset,
        dtype: DType,
        bytes: usize,
        sample: &[u8],
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        if preset == Preset::Nvcomp {
            return Ok(nvcomp(dtype));
        }
        let best = self.best(dtype, sample, false, scratch)?;
        Ok(finish(dtype, bytes, best, Plan::direct))
    }

    /// [`CpuEngine::plan`], with a parent, for a tensor of `bytes` bytes whose values at [`parent_probes`] lie in
    /// `sample`. `direct` plans it by itself.
    pub(crate) fn plan_difference(
        &self,
        dtype: DType,
        bytes: usize,
        mut sample: Vec<u8>,
        parent: &ParentSample<'_>,
        scratch: &mut Scratch,
        direct: impl FnOnce(&mut Scratch) -> Result<TensorPlan>,
    ) -> Result<TensorPlan> {
        let width = dtype.value_width();
        let values = (bytes / width) as u64;
        if sample.len() != parent.values.len() {
            return Err(Error::corrupt(format!(
                "a sample of {} bytes and {} of its parent",
                sample.len(),
                parent.values.len()
            )));
        }
        let alone = self.best(dtype, &sample, false, scratch)?.map_or(0, |b| b.bits);
        self.kernels.xor(&mut sample, parent.values);
        let delta = self.best(dtype, &sample, true, scratch)?;
        let saved = alone.saturating_sub(delta.as_ref().map_or(u64::MAX, |d| d.bits));
        // It must be worth it here, in the sample, and as a whole.
        let whole = saved.saturating_mul(values) / ((sample.len() / width) as u64).max(1);
        if saved == 0 || saved < alone / DELTA_GAIN || whole <= PLAN_BITS {
            return direct(scratch);
        }
        let plan = |layout| Plan::delta(layout, parent.manifest, parent.tensor);
        Ok(finish(dtype, bytes, delta, plan))
    }

    /// The cheapest layout of a sample. `delta`: of differences, which may be anything where the
    /// sample saw none.
    fn best(
        &self,
        dtype: DType,
        sample: &[u8],
        delta: bool,
        scratch: &mut Scratch,
    ) -> Result<Option<Candidate>> {
        let tried = if sample.is_empty() { &[] } else { layouts(dtype) };
        let mut best: Option<Candidate> = None;
        for &layout in tried {
            let mut c = self.candidate(layout, dtype.value_width(), sample, delta, scratch)?;
            if best.as_ref().is_none_or(|b| c.cost < b.cost - b.cost / LAYOUT_GAIN) {
                // Where all but the exponents are noise, sign and all, no other layout is smaller.
                let noise = c.planes.iter().skip(1).all(|p| p.2);
                if delta {
                    c.planes.iter_mut().for_each(expect_changes);
                }
                best = Some(c);
                if layout == LayoutId::FIELDS && noise {
                    break;
                }
            }
        }
        Ok(best)
    }

    fn candidate(
        &self,
        layout: LayoutId,
        width: usize,
        sample: &[u8],
        delta: bool,
        scratch: &mut Scratch,
    ) -> Result<Candidate> {
        let values = sample.len() / width;
        let split = Layout::new(self.kernels, layout, width)?;
        let sizes = split.planes(sample.len())?;
        split.split(sample, scratch)?;
        let mut c = Candidate { layout, planes: vec![], cost: 0, bits: 0 };
        let planes = sizes.sizes().len();
        let plane = |i| scratch.plane(layout, sizes.sizes(), i);
        // Several planes of differences are coded, some of them in few bits, of which the coarse
        // frequencies of pairs waste a larger part: what counts is the part of all bits.
        let least = |i| entropy(&Counts::of_all(plane(i))).min(8 * plane(i).len() as u64);
        let all = if delta { (0..planes).map(least).sum() } else { 0 };
        for i in 0..planes {
            let plane = plane(i);
            let dense = layout == LayoutId::FIELDS_SIGN && i == 2;
            let may_lose =
                |pairs: u64| if delta { all / PAIRS_LOSS_OF_ALL } else { pairs / PAIRS_LOSS };
            let (coding, counts, cost) = choose(plane, dense, may_lose);
            let work = if precision(coding).is_some() { values as u64 / RANS_WORK } else { 0 };
            c.planes.push((coding, counts, cost == 8 * plane.len() as u64));
            c.cost += cost + work;
            // A plane that repeats a short unit is stored as that, whatever is planned.
            c.bits += if repeats(plane, plane.len()) { 0 } else { cost };
        }
        if layout == LayoutId::WHOLE {
            let bits = 8 * self.zstd_len(sample, scratch)? as u64;
            if bits < c.cost - c.cost / ZSTD_GAIN {
                c.planes[0].0 = PlaneCoding::ZSTD;
                (c.cost, c.bits) = (bits, bits.min(c.bits));
            }
        }
        Ok(c)
    }

    fn zstd_len(&self, sample: &[u8], scratch: &mut Scratch) -> Result<usize> {
        let PlaneCoding { codec, param } = PlaneCoding::ZSTD;
        let zstd = self.codecs.get(codec)?;
        let out = sized(&mut scratch.joined, zstd.bound(param, sample.len()));
        let symbols = Symbols::new(sample, Context::of(param));
        Ok(zstd.encode(&symbols, out, &mut scratch.work)?.len)
    }
}

/// The plan of preset `nvcomp`, which depends on the dtype alone. In each chunk a plane that does not get
/// smaller is stored as it is.
fn nvcomp(dtype: DType) -> TensorPlan {
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

/// The plan of a tensor whose layout is chosen.
fn finish(
    dtype: DType,
    bytes: usize,
    best: Option<Candidate>,
    plan: impl FnOnce(LayoutId) -> Plan,
) -> TensorPlan {
    let (layout, planes) = best.map_or((LayoutId::WHOLE, vec![]), |b| (b.layout, b.planes));
    let chunk_log2 = chunk_log2(dtype);
    let several = bytes > dtype.value_width() << chunk_log2;
    let shared = planes.iter().map(|(coding, counts, _)| match precision(*coding) {
        Some(p) if several => write_tables(&[match (0..=255).all(|s| counts.get(s) > 0) {
            // Nothing is left to escape, and tables without an escape are faster to decode.
            true => counts.table(p),
            // The sample need not have seen every symbol of the tensor.
            false => counts.clone().partial().table(p),
        }]),
        _ => vec![],
    });
    TensorPlan {
        shared: shared.collect(),
        planes: planes.iter().map(|p| p.0).collect(),
        plan: plan(layout),
        chunk_log2,
        side: s4_format::side::Side::default(),
    }
}

/// The precision of a plane that is coded by rANS.
fn precision(coding: PlaneCoding) -> Option<Precision> {
    let param = (coding.codec == CodecId::RANS).then_some(coding.param)?;
    Precision::from_param(param).ok()
}

/// A plane of differences that is constant in the sample may have some elsewhere: few, as a rule.
fn expect_changes((coding, counts, noise): &mut (PlaneCoding, Counts, bool)) {
    let constant = (0..=255).any(|s| counts.get(s) == counts.total());
    if *coding == PlaneCoding::RAW && !*noise && constant {
        *coding = PlaneCoding::RANS8;
    }
}

/// The layouts that are tried for a dtype, in ascending order of work.
fn layouts(dtype: DType) -> &'static [LayoutId] {
    use LayoutId as L;
    match (dtype.form(), dtype.value_width()) {
        (Form::Float, 2) => &[L::FIELDS, L::FIELDS_SIGN],
        (Form::Float, _) => &[L::FIELDS, L::FIELDS_SIGN, L::BYTES],
        (Form::Bytes, 1) => &[L::WHOLE],
        (Form::Bytes, _) => &[L::BYTES, L::WHOLE],
    }
}

/// The runs of values that are looked at, evenly spaced over the tensor: the whole of a small one.
pub(crate) fn sampled_runs(values: u64) -> impl Iterator<Item = Range<u64>> {
    let all = values <= (PROBES * PROBE) as u64;
    let (runs, len) = if all { (1, values) } else { (PROBES, PROBE as u64) };
    (0..runs as u64).map(move |i| {
        let first = values.saturating_sub(PROBE as u64) / (PROBES as u64 - 1) * i;
        first..first + len
    })
}

/// The values of some runs, which lie within the tensor, one run after the other.
fn gather(data: &[u8], width: usize, runs: impl IntoIterator<Item = Range<u64>>) -> Vec<u8> {
    let mut out = vec![];
    for run in runs {
        out.extend_from_slice(&data[run.start as usize * width..run.end as usize * width]);
    }
    out
}

/// The coding of a plane, its counts and its estimated cost in bits. `may_lose`: of how many bits, for
/// being faster.
fn choose(plane: &[u8], dense: bool, may_lose: impl Fn(u64) -> u64) -> (PlaneCoding, Counts, u64) {
    let counts = Counts::of_all(plane);
    if plane.iter().all(|b| *b == plane[0]) {
        // Stored as a constant wherever it is one.
        return (PlaneCoding::RAW, counts, 0);
    }
    let raw = plane.len() as u64 * if dense { 7 } else { 8 };
    let noise = if dense { PlaneCoding::BITS7 } else { PlaneCoding::RAW };
    let worth = |bits: u64| bits < raw - raw / NOISE_GAIN;
    let least = entropy(&counts);
    if !worth(least) {
        return (noise, counts, raw);
    }
    let pairs = cost(&counts, &counts.table(Precision::P8));
    let much_less = pairs.saturating_sub(may_lose(pairs));
    let singles = match least < much_less {
        true => cost(&counts, &counts.table(Precision::P12)),
        false => pairs,
    };
    let (coding, cost) = match singles < much_less {
        true => (PlaneCoding::RANS12, singles),
        false => (PlaneCoding::RANS8, pairs),
    };
    if worth(cost) { (coding, counts, cost) } else { (noise, counts, raw) }
}
