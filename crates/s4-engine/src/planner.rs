//! Chooses, for a tensor, a layout and a codec for each plane.

use std::ops::Range;

use s4_codec_cpu::Context;
use s4_codec_cpu::rans::{Counts, Precision, Table, cost, entropy};
use s4_format::dtype::Form;
use s4_format::layout::Planes;
use s4_format::{CodecId, DType, Digest, Error, LayoutId, Plan, Result};

use crate::encode::repeats;
use crate::scratch::sized;
use crate::{CpuEngine, Preset, Scratch, TensorView, chunk_log2};

/// Runs of values that the planner looks at, and values in each.
const PROBES: usize = 16;
const PROBE: usize = 1024;
/// Chunks of the parent that the planner looks into: each may have to be read and decoded whole.
const PARENT_CHUNKS: u64 = 4;
/// What one more plan costs in the manifest, in bits: a delta has to save more.
const PLAN_BITS: u64 = 8 * 160;

/// How one plane is coded. In each chunk a constant plane is stored as its constant, and one that
/// does not get smaller as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaneCoding {
    /// As it is: it looks like noise.
    Raw,
    /// rANS.
    Rans(Precision),
    /// Dense packing of values below 128.
    Bits,
    /// Zstandard.
    Zstd,
    /// GDeflate.
    Gdeflate,
    /// nvCOMP's ANS, which is closed: an engine of [`CpuEngine::writing`] has it.
    NvcompAns,
}

/// What the planner chose for a tensor.
#[derive(Debug, Clone)]
pub struct TensorPlan {
    /// Predictor, residual and layout, as the manifest keeps them.
    pub plan: Plan,
    /// The coding of each plane.
    pub planes: Vec<PlaneCoding>,
    /// Values in each chunk but the last, as a power of two.
    pub chunk_log2: u8,
    /// Side data that the chunks need, but for shared tables.
    pub side: s4_format::side::Side,
    /// For each plane a table that all chunks may share.
    pub(crate) shared: Vec<Option<Table>>,
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
    /// # Errors
    /// Errors of a codec.
    pub fn plan(
        &self,
        preset: Preset,
        view: &TensorView<'_>,
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        let sample = sample(view.data, view.dtype.value_width());
        self.plan_sample(preset, view.dtype, view.data.len(), &sample, scratch)
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

    /// As [`CpuEngine::plan`], with a parent: the tensor is stored as its exclusive or with the
    /// parent's values if that is clearly smaller, and otherwise as if there were no parent. Preset
    /// `nvcomp` stores every tensor by itself.
    ///
    /// # Errors
    /// As [`CpuEngine::plan`]; `Corrupt` if the parent's sample has another size.
    pub fn plan_from(
        &self,
        preset: Preset,
        view: &TensorView<'_>,
        parent: &ParentSample<'_>,
        scratch: &mut Scratch,
    ) -> Result<TensorPlan> {
        if preset == Preset::Nvcomp {
            return Ok(nvcomp(view.dtype));
        }
        let width = view.dtype.value_width();
        let mut sample = vec![];
        for r in parent_probes(view.dtype, (view.data.len() / width) as u64) {
            sample.extend_from_slice(&view.data[r.start as usize * width..r.end as usize * width]);
        }
        let direct = |scratch: &mut Scratch| self.plan(preset, view, scratch);
        self.plan_difference(view.dtype, view.data.len(), sample, parent, scratch, direct)
    }

    /// [`CpuEngine::plan_from`] for a tensor of `bytes` bytes whose values at [`parent_probes`] lie in
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
        // A delta is read together with its parents: it must be worth it, here and as a whole.
        let whole = saved.saturating_mul(values) / ((sample.len() / width) as u64).max(1);
        if saved == 0 || saved < alone / 128 || whole <= PLAN_BITS {
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
            // Layouts stand in ascending order of work: a slower one must be worth it.
            if best.as_ref().is_none_or(|b| c.cost < b.cost - b.cost / 256) {
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
        let sizes = Planes::new(layout, width, values)?;
        self.split(layout, width, sample, scratch)?;
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
            let may_lose = |pairs: u64| if delta { all / 128 } else { pairs / 50 };
            let (coding, counts, cost) = choose(plane, dense, may_lose);
            // Entropy coding a plane is most of the work: it must save an eighth of a bit more.
            let work = if matches!(coding, PlaneCoding::Rans(_)) { values as u64 / 8 } else { 0 };
            c.planes.push((coding, counts, cost == 8 * plane.len() as u64));
            c.cost += cost + work;
            // A plane that repeats a short unit is stored as that, whatever is planned.
            c.bits += if repeats(plane, plane.len()) { 0 } else { cost };
        }
        if layout == LayoutId::WHOLE {
            let bits = 8 * self.zstd_len(sample, &mut scratch.joined)? as u64;
            // Zstandard is the slowest to decode: it must save a twentieth.
            if bits < c.cost - c.cost / 20 {
                c.planes[0].0 = PlaneCoding::Zstd;
                (c.cost, c.bits) = (bits, bits.min(c.bits));
            }
        }
        Ok(c)
    }

    fn zstd_len(&self, sample: &[u8], buffer: &mut Vec<u8>) -> Result<usize> {
        let zstd = self.codecs.get(CodecId::ZSTD)?;
        let out = sized(buffer, zstd.bound(sample.len()));
        Ok(zstd.encode(Context::default(), sample, out)?.len)
    }
}

/// The plan of preset `nvcomp`, which depends on the dtype alone. In each chunk a plane that does not get
/// smaller is stored as it is.
fn nvcomp(dtype: DType) -> TensorPlan {
    use PlaneCoding::{Gdeflate, NvcompAns, Raw};
    let (layout, planes) = match (dtype.form(), dtype.value_width()) {
        // Signs are bits already.
        (Form::Float, 2) => (LayoutId::FIELDS_SIGN, vec![Raw, NvcompAns, Gdeflate]),
        (Form::Float, _) => (LayoutId::FIELDS_SIGN, vec![Raw, NvcompAns, Gdeflate, Gdeflate]),
        (Form::Bytes, 1) => (LayoutId::WHOLE, vec![Gdeflate]),
        (Form::Bytes, width) => (LayoutId::BYTES, vec![Gdeflate; width]),
    };
    TensorPlan {
        plan: Plan::direct(layout),
        planes,
        chunk_log2: chunk_log2(dtype),
        side: s4_format::side::Side::default(),
        shared: vec![],
    }
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
    let shared = planes.iter().map(|(coding, counts, _)| match coding {
        PlaneCoding::Rans(p) if several => Some(match (0..=255).all(|s| counts.get(s) > 0) {
            // Nothing is left to escape, and tables without an escape are faster to decode.
            true => counts.table(*p),
            // The sample need not have seen every symbol of the tensor.
            false => counts.clone().partial().table(*p),
        }),
        _ => None,
    });
    TensorPlan {
        shared: shared.collect(),
        planes: planes.iter().map(|p| p.0).collect(),
        plan: plan(layout),
        chunk_log2,
        side: s4_format::side::Side::default(),
    }
}

/// A plane of differences that is constant in the sample may have some elsewhere: few, as a rule.
fn expect_changes((coding, counts, noise): &mut (PlaneCoding, Counts, bool)) {
    let constant = (0..=255).any(|s| counts.get(s) == counts.total());
    if *coding == PlaneCoding::Raw && !*noise && constant {
        *coding = PlaneCoding::Rans(Precision::P8);
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

fn sample(data: &[u8], width: usize) -> Vec<u8> {
    let values = data.len() / width;
    let mut out = Vec::with_capacity(values.min(PROBES * PROBE) * width);
    for run in sampled_runs(values as u64) {
        // Runs lie within the tensor.
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
        return (PlaneCoding::Raw, counts, 0);
    }
    let raw = plane.len() as u64 * if dense { 7 } else { 8 };
    let noise = if dense { PlaneCoding::Bits } else { PlaneCoding::Raw };
    // A plane that loses less than a fiftieth is noise; coding it is not worth the time.
    let worth = |bits: u64| bits < raw - raw / 50;
    let least = entropy(&counts);
    if !worth(least) {
        return (noise, counts, raw);
    }
    let pairs = cost(&counts, &counts.table(Precision::P8));
    // One renormalisation for two symbols is much the faster.
    let much_less = pairs.saturating_sub(may_lose(pairs));
    let singles = match least < much_less {
        true => cost(&counts, &counts.table(Precision::P12)),
        false => pairs,
    };
    let (precision, cost) = match singles < much_less {
        true => (Precision::P12, singles),
        false => (Precision::P8, pairs),
    };
    if worth(cost) { (PlaneCoding::Rans(precision), counts, cost) } else { (noise, counts, raw) }
}
