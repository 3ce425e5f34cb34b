//! Weights that are predicted from their moments, or have contexts from them: the CPU's plans and frames, wherever the
//! moments are, made and read by the kernels alone.

use bytes::Bytes;
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, Destination, FrameJob};
use s4_engine::{
    CpuEngine, DeviceMemory, EncodeJob, Engine, Input, InputSize, Inputs, Jobs, Moment,
    MomentSample, ParentSample, PlanJob, PlaneCoding, Preset, Scratch, TensorPlan, Values,
    chunk_log2, parent_probes,
};
use s4_format::layout::Planes;
use s4_format::side::SideKind;
use s4_format::{ChunkRecord, DType, Digest, LayoutId, Plan, PredictorId, ResidualId, crc32c};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, StepFactors};
use s4_predict::{Step, Update};

use crate::delta::MANIFEST;
use crate::racing::{Racing, while_changing};
use crate::support::{Encoded, Gpu, Host, Upload, compare, gpu};

const ALL: [(DType, Kind); 3] =
    [(DType::Float32, Kind::F32), (DType::BFloat16, Kind::BF16), (DType::Float16, Kind::F16)];

/// A tensor, its values a step before, its moments, and the CPU's frames of it.
struct Weights {
    host: Host,
    before: Vec<u8>,
    moments: [(DType, Vec<u8>); 2],
    coded: Encoded,
}

/// The place of inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Given {
    Device,
    /// As `Device`, in memory that nobody changes, as the weights are.
    Fixed,
    Host,
    /// The parent and the second moment on the host, the first moment on the device.
    Mixed,
    /// As `Device`, and moments are no longer what was stored.
    Changed,
    /// As `Host`, and moments are no longer what was stored.
    Gone,
}

fn sample(dtype: DType, n: usize, width: usize, bytes: &[u8]) -> Vec<u8> {
    let part = |r: std::ops::Range<u64>| &bytes[r.start as usize * width..r.end as usize * width];
    parent_probes(dtype, n as u64).into_iter().flat_map(part).copied().collect()
}

impl Weights {
    /// `plan`: the plan to use; `None`: the planner's choice.
    fn new(
        host: Host,
        before: Vec<u8>,
        moments: [(DType, Vec<u8>); 2],
        plan: Option<TensorPlan>,
    ) -> Self {
        let (cpu, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
        let view = host.view();
        let (dtype, n) = (host.dtype, host.data.len() / host.dtype.value_width());
        let plan = plan.unwrap_or_else(|| {
            let values = sample(dtype, n, dtype.value_width(), &before);
            let samples =
                moments.each_ref().map(|(d, bytes)| sample(dtype, n, d.value_width(), bytes));
            let moment = |k: usize| MomentSample {
                tensor: 4 + k as u32,
                dtype: moments[k].0,
                values: &samples[k],
            };
            let moments = &[moment(0), moment(1)];
            let parent = ParentSample {
                manifest: MANIFEST,
                tensor: 3,
                values: &values,
                moments,
                expected: None,
            };
            let preset = Preset::Balanced;
            let job = PlanJob { parent: Some(&parent), ..PlanJob::new(preset, &view) };
            cpu.plan(&job, &mut scratch).unwrap()
        });
        let mut chunks = vec![];
        for chunk in 0..host.chunks(&plan) {
            let count = host.chunk_bytes(&plan, chunk) as usize / dtype.value_width();
            let first = (chunk as usize) << plan.chunk_log2;
            let part =
                |bytes: &'_ [u8], width: usize| bytes[first * width..][..count * width].to_vec();
            let [(m, first_moment), (v, second)] = &moments;
            let given = [
                part(&before, dtype.value_width()),
                part(first_moment, m.value_width()),
                part(second, v.value_width()),
            ];
            let inputs = given.each_ref().map(|i| &i[..]);
            let inputs = &inputs[..1 + plan.plan.moments().len()];
            let job = EncodeJob { view: &view, plan: &plan, chunk, inputs };
            let mut frame = vec![];
            chunks.push((cpu.encode(&job, &mut scratch, &mut frame).unwrap(), frame));
        }
        let coded = Encoded::new(plan, chunks);
        Self { host, before, moments, coded }
    }

    /// The records of a moment's chunks; `wrong`: those of other values.
    fn records(&self, k: usize, wrong: bool) -> Vec<ChunkRecord> {
        let (dtype, bytes) = &self.moments[k];
        let record = |chunk: &[u8]| ChunkRecord {
            offset: 0,
            object: 0,
            len: 0,
            plain: false,
            crc_encoded: 0,
            crc_raw: crc32c(chunk) ^ u32::from(wrong),
        };
        bytes.chunks(dtype.value_width() << chunk_log2(*dtype)).map(record).collect()
    }
}

/// A plan that codes every plane in the same way, with contexts from `update`.
fn forced(dtype: DType, update: Update, coding: PlaneCoding) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(update.second.is_some())];
    let plan = Plan::update(MANIFEST, 3, moments);
    let planes = vec![coding; dtype.value_width()];
    let mut plan = TensorPlan::new(plan, planes, chunk_log2(dtype));
    plan.side.push(SideKind::CONTEXTS, update.to_bytes()).unwrap();
    plan
}

fn rounded(dtype: DType, wide: Vec<u8>) -> Vec<u8> {
    let mut out = vec![0; wide.len() / 2];
    match dtype {
        DType::BFloat16 => Kernels::default().to_bf16(&wide, &mut out),
        DType::Float16 => Kernels::default().to_fp16(&wide, &mut out),
        _ => return wide,
    }
    out
}

/// A plan that takes a step, and codes every plane in the same way.
fn forced_step(dtype: DType, step: Step, layout: LayoutId, coding: PlaneCoding) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(step.second.is_some())];
    let plan = Plan::step(layout, MANIFEST, 3, moments);
    let planes = Planes::new(layout, dtype.value_width(), 0).unwrap().sizes().len();
    let mut plan = TensorPlan::new(plan, vec![coding; planes], chunk_log2(dtype));
    plan.side.push(SideKind::STEP, step.to_bytes()).unwrap();
    plan
}

/// A step of an optimizer, which the moments tell exactly, or only its size and sign.
fn step([w, m, v]: [DType; 3], n: usize, exactly: bool) -> Weights {
    let noise = |i: usize, k: u64| {
        let x = (i as u64 + (k << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut out = [const { vec![] }; 4];
    for i in 0..n {
        let (weight, first) = (0.1 * noise(i, 1), 0.01 * noise(i, 2) * (8.0 * noise(i, 3)).exp());
        let second = 1e-5 * (3.0 * noise(i, 4)).exp();
        let more = if exactly { 1.0 } else { (3.0 * noise(i, 5)).exp() };
        let after = weight - more * 3e-4 * first / second.sqrt();
        for (to, x) in out.iter_mut().zip([after, weight, first, second]) {
            to.extend(x.to_le_bytes());
        }
    }
    let [after, before, first, second] = out;
    let host = Host::new(format!("{w} by {m}, {v}: {n}"), w, rounded(w, after));
    Weights::new(host, rounded(w, before), [(m, rounded(m, first)), (v, rounded(v, second))], None)
}

/// Values of every kind, by forced plans.
fn adversarial(n: usize) -> Vec<Weights> {
    let mut out = vec![];
    for (w, m, v) in (0..54).map(|i| (i % 3, i / 3 % 3, i / 9 % 3)) {
        let dtypes = [w, m, v].map(|i| ALL[i].0);
        let lists = [w, m, v].map(|i| patterns::all(ALL[i].1, n).collect::<Vec<_>>());
        let case = out.len();
        let of = |i: usize, by: usize| {
            let list = &lists[i];
            list[(3 * case + by) % list.len()].1.clone()
        };
        let (floor, offset) = [(0, 0), (-3000, 9000), (i16::MIN, 2000)][case % 3];
        // SGD and Lion have no second moment.
        let (first, second) = (dtypes[1], (case % 4 > 0).then_some(dtypes[2]));
        let update = Update { floor, offset, first, second };
        let coding = [PlaneCoding::RANS8, PlaneCoding::RANS12][case % 2];
        let plan = if case < 27 {
            forced(dtypes[0], update, coding)
        } else {
            let layout = [LayoutId::BYTES, LayoutId::FIELDS][case % 2];
            let [keep, rate, epsilon] = [[0.9999, 1e-4, 1e-8], [1.0, 1.0, 0.0]][case / 2 % 2];
            let factors = StepFactors { keep, rate, epsilon };
            let by = Step { factors, first, second };
            forced_step(dtypes[0], by, layout, coding)
        };
        let host = Host::new(format!("{case}: {dtypes:?} {n}"), dtypes[0], of(0, 0));
        let moments = [(dtypes[1], of(1, 2)), (dtypes[2], of(2, 5))];
        out.push(Weights::new(host, of(0, 1), moments, Some(plan)));
    }
    out
}

struct Told<'a> {
    all: &'a [Weights],
    parents: Vec<Upload>,
    moments: Vec<[Moment<'a>; 2]>,
    given: Given,
    _uploads: Vec<Upload>,
}

/// The records of all moments.
fn records(all: &[Weights], given: Given) -> Vec<[Vec<ChunkRecord>; 2]> {
    let wrong = matches!(given, Given::Changed | Given::Gone);
    // One of the two is enough.
    (0..).zip(all).map(|(i, w)| [0, 1].map(|k| w.records(k, wrong && i % 2 == k))).collect()
}

impl<'a> Told<'a> {
    fn new(
        gpu: &Gpu,
        all: &'a [Weights],
        records: &'a [[Vec<ChunkRecord>; 2]],
        given: Given,
    ) -> Self {
        let parents = match given {
            Given::Device | Given::Fixed | Given::Changed => {
                (0..).zip(all).map(|(i, w)| gpu.upload(&w.before, i % 3 * 4)).collect()
            }
            _ => vec![],
        };
        let mut uploads = vec![];
        let mut moments = vec![];
        for (i, w) in all.iter().enumerate() {
            moments.push([0, 1].map(|k| {
                let (dtype, bytes) = &w.moments[k];
                let on_host = match given {
                    Given::Device | Given::Fixed | Given::Changed => false,
                    Given::Mixed => k == 1,
                    Given::Host | Given::Gone => true,
                };
                let values = match on_host {
                    true => Values::Host(bytes),
                    false => {
                        uploads.push(gpu.upload(bytes, (i % 3 * 4 + k * 4) as u64));
                        Values::Device(uploads[uploads.len() - 1].memory_as(given == Given::Fixed))
                    }
                };
                let tensor = 4 + k as u32;
                Moment { tensor, dtype: *dtype, values, records: &records[i][k] }
            }));
        }
        Self { all, parents, moments, given, _uploads: uploads }
    }

    fn range(&self, tensor: usize, chunk: u64) -> std::ops::Range<usize> {
        let w = &self.all[tensor];
        let first = (chunk as usize * w.host.dtype.value_width()) << w.coded.plan.chunk_log2;
        first..first + w.host.chunk_bytes(&w.coded.plan, chunk) as usize
    }
}

impl Inputs<CudaError> for Told<'_> {
    fn parent(&self, _: usize) -> Option<(Digest, u32)> {
        Some((MANIFEST, 3))
    }

    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, CudaError> {
        let of = |&i: &usize| {
            let Weights { host, before, .. } = &self.all[i];
            let width = host.dtype.value_width();
            sample(host.dtype, before.len() / width, width, before)
        };
        Ok(tensors.iter().map(of).collect())
    }

    fn moments(&self, tensor: usize) -> &[Moment<'_>] {
        let plan = &self.all[tensor].coded.plan.plan;
        // One that was not predicted from moments might have been.
        let count = if plan.has_moments() { plan.moments().len() } else { 2 };
        &self.moments[tensor][..count]
    }

    fn memory(&self) -> Vec<DeviceMemory> {
        let moments = self.moments.iter().flatten().filter_map(|m| m.values.memory());
        self.parents.iter().map(Upload::memory).chain(moments).collect()
    }

    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        let bytes = match self.given {
            Given::Device | Given::Fixed | Given::Changed => 0,
            _ => self.range(tensor, chunk).len() as u64,
        };
        InputSize { bytes, frames: 0 }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
        let one = |&(tensor, chunk): &(usize, u64)| {
            let range = self.range(tensor, chunk);
            Ok(match self.parents.get(tensor) {
                Some(upload) => {
                    Input::Device(upload.memory().part(range.start as u64, range.len() as u64)?)
                }
                None => Input::Host(Bytes::copy_from_slice(&self.all[tensor].before[range])),
            })
        };
        chunks.iter().map(one).collect()
    }
}

/// Encodes by the CPU's plans, or by the device's own.
fn encode(gpu: &Gpu, engine: &CudaEngine, inputs: &Told<'_>, planned: bool) -> Vec<Encoded> {
    let all = inputs.all;
    let uploads: Vec<_> =
        (0..).zip(all).map(|(i, w)| gpu.upload(&w.host.data, i % 3 * 4)).collect();
    let fixed = inputs.given == Given::Fixed;
    let tensors: Vec<_> = all.iter().zip(&uploads).map(|(w, u)| w.host.on_as(u, fixed)).collect();
    let plans = match planned {
        true => engine.plan(Preset::Balanced, &tensors, inputs, None).unwrap(),
        false => all.iter().map(|w| w.coded.plan.clone()).collect(),
    };
    let mut chunks: Vec<Vec<_>> = all.iter().map(|_| vec![]).collect();
    let done = engine.encode(&Jobs { inputs, ..Jobs::new(&tensors, &plans) }, |frames| {
        for frame in frames {
            assert_eq!(frame.chunk, chunks[frame.tensor].len() as u64);
            chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
        }
        Ok(())
    });
    done.unwrap();
    plans.into_iter().zip(chunks).map(|(p, c)| Encoded::new(p, c)).collect()
}

/// Decodes frames over the parents' values; `given`: with the moments in place. Also returns what was left undone.
fn decode(
    gpu: &Gpu,
    engine: &CudaEngine,
    all: &[Weights],
    coded: &[Encoded],
    given: bool,
) -> (Vec<Vec<u8>>, Vec<usize>) {
    let moments: Vec<_> =
        all.iter().map(|w| [0, 1].map(|k| gpu.upload(&w.moments[k].1, 4 * k as u64))).collect();
    let to: Vec<_> = (0..).zip(all).map(|(i, w)| gpu.upload(&w.before, i % 3 * 4)).collect();
    let memory: Vec<_> = to.iter().chain(moments.iter().flatten()).map(Upload::memory).collect();
    let mut undone = vec![];
    let done = engine.decode::<CudaError>(&memory, None, |decoder| {
        for (tensor, (w, e)) in all.iter().zip(coded).enumerate() {
            let width = w.host.dtype.value_width() as u64;
            let mut first = 0;
            for (chunk, (_, frame)) in e.chunks.iter().enumerate() {
                let bytes = w.host.chunk_bytes(&e.plan, chunk as u64);
                let part = |k: usize| {
                    let each = w.moments[k].0.value_width() as u64;
                    moments[tensor][k].memory().part(first / width * each, bytes / width * each)
                };
                let job = FrameJob {
                    tensor,
                    spec: e.spec(&w.host),
                    chunk: chunk as u64,
                    record: e.record(chunk),
                    at: 0,
                    bytes,
                    destinations: vec![Destination {
                        from: 0,
                        to: to[tensor].memory().part(first, bytes)?,
                    }],
                    input: None,
                    // Twice the first if there is no second.
                    moments: match given {
                        true => Some([part(0)?, part(e.plan.plan.moments().len().max(1) - 1)?]),
                        false => None,
                    },
                };
                first += bytes;
                decoder.push::<CudaError>(gpu.device.ordinal(), frame.len(), vec![job], |to| {
                    to.copy_from_slice(frame);
                    Ok(())
                })?;
            }
        }
        undone = decoder.undone()?;
        Ok(())
    });
    done.unwrap();
    (to.iter().map(|u| gpu.download(u.address, u.bytes)).collect(), undone)
}

/// Checks that frames equal the CPU's wherever inputs are, and that they decode again, all by the kernels.
fn check(gpu: &Gpu, all: &[Weights], planned: bool) {
    for given in [Given::Device, Given::Fixed, Given::Host, Given::Mixed] {
        let records = records(all, given);
        for scratch in [16 << 20, 256 << 20] {
            let engine = gpu.engine(CudaOptions { scratch, ..CudaOptions::default() });
            let inputs = Told::new(gpu, all, &records, given);
            for (w, e) in all.iter().zip(encode(gpu, &engine, &inputs, planned)) {
                assert_eq!(compare(&w.host, &e, &w.coded), None, "{given:?}");
            }
            let chunks = engine.chunks();
            assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
        }
    }
    let engine = gpu.engine(CudaOptions::default());
    let coded: Vec<_> = all.iter().map(|w| again(&w.coded)).collect();
    let (values, undone) = decode(gpu, &engine, all, &coded, true);
    assert_eq!(undone, [0; 0]);
    for (w, values) in all.iter().zip(values) {
        assert!(values == w.host.data, "{}", w.host.name);
    }
    let chunks = engine.chunks();
    assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
}

fn again(coded: &Encoded) -> Encoded {
    Encoded::new(coded.plan.clone(), coded.chunks.clone())
}

#[test]
fn values_of_every_kind_are_told_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[usize] = if gpu.is_slow() { &[9001] } else { &[9001, 140_003] };
    for &n in sizes {
        check(&gpu, &adversarial(n), false);
    }
}

/// With the planner's plans, whose chunks share tables, and moments in other chunks than their weights.
#[test]
fn what_is_planned_is_told_by_the_kernels_alone() {
    let Some(gpu) = gpu() else { return };
    let n = if gpu.is_slow() { 140_003 } else { 700_001 };
    let mixes = [(0, 0, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (1, 1, 1), (2, 1, 2)];
    for exactly in [false, true] {
        let of = |(w, m, v): (usize, usize, usize)| step([w, m, v].map(|i| ALL[i].0), n, exactly);
        let all: Vec<_> = mixes.map(of).into();
        for w in &all {
            let plan = &w.coded.plan.plan;
            let is = (plan.predictor == PredictorId::STEP, plan.residual == ResidualId::DESCENT);
            assert_eq!(is, (exactly, !exactly), "{}", w.host.name);
            assert!(w.coded.chunks.iter().any(|c| c.0.shared) || exactly, "{}", w.host.name);
        }
        check(&gpu, &all, true);
    }
}

/// Moments that a reader would not have are not used.
#[test]
fn weights_whose_moments_changed_are_stored_as_they_are() {
    let Some(gpu) = gpu() else { return };
    let all = adversarial(9001);
    for given in [Given::Changed, Given::Gone] {
        let records = records(&all, given);
        let engine = gpu.engine(CudaOptions::default());
        let inputs = Told::new(&gpu, &all, &records, given);
        for (w, e) in all.iter().zip(encode(&gpu, &engine, &inputs, false)) {
            for (said, frame) in &e.chunks {
                assert!(said.plain && said.crc_raw == crc32c(&w.host.data), "{given:?}");
                assert!(*frame == w.host.data, "{given:?} {}", w.host.name);
            }
        }
        let chunks = engine.chunks();
        assert_eq!((chunks.host, chunks.refused), (all.len() as u64, 0), "{given:?}");
    }
}

/// Moments that change while weights are encoded: every frame decodes with what was stored of them.
#[test]
fn weights_whose_moments_change_meanwhile_decode_by_the_stored_ones() {
    let Some(gpu) = gpu() else { return };
    for exactly in [false, true] {
        change_meanwhile(&gpu, exactly);
    }
}

fn change_meanwhile(gpu: &Gpu, exactly: bool) {
    let dtypes = [DType::Float32, DType::BFloat16, DType::Float32];
    let all = [step(dtypes, 200_000, exactly)];
    let w = &all[0];
    let records = records(&all, Given::Device);
    let racing = [0, 1].map(|k| {
        let (dtype, data) = &w.moments[k];
        let host = Host::new("a moment", *dtype, data.clone());
        // Signs and sizes differ in the first chunks alone.
        let mut other = data.clone();
        other[..70_000].iter_mut().for_each(|b| *b ^= 0x91);
        Racing { upload: gpu.upload(data, 4), host, other }
    });
    let moment = |k: usize| {
        let values = Values::Device(racing[k].upload.memory());
        Moment { tensor: 4, dtype: w.moments[k].0, values, records: &records[0][k] }
    };
    let parents = vec![gpu.upload(&w.before, 0)];
    let moments = vec![[moment(0), moment(1)]];
    let inputs = Told { all: &all, parents, moments, given: Given::Device, _uploads: vec![] };
    let mut coded = vec![];
    while_changing(gpu, &racing, || {
        for _ in 0..3 {
            let engine = gpu.engine(CudaOptions::default());
            coded.extend(encode(gpu, &engine, &inputs, false));
            assert_eq!(engine.chunks().refused, 0);
        }
    });
    assert!(coded.iter().any(|e| e.chunks.iter().any(|c| !c.0.plain)), "none was told");
    for e in coded {
        let engine = gpu.engine(CudaOptions::default());
        let (values, undone) = decode(gpu, &engine, &all, std::slice::from_ref(&e), true);
        assert!(undone.is_empty() && values[0] == w.host.data);
    }
}

/// Weights whose moments are missing are left to the caller, and so are damaged frames.
#[test]
fn weights_without_their_moments_are_left_undone() {
    let Some(gpu) = gpu() else { return };
    let all = adversarial(9001);
    let engine = gpu.engine(CudaOptions::default());
    let mut coded: Vec<_> = all.iter().map(|w| again(&w.coded)).collect();
    let told = |e: &Encoded| !e.chunks[0].0.plain;
    let expected: Vec<_> = (0..).zip(&coded).filter(|(_, e)| told(e)).map(|(i, _)| i).collect();
    assert!(!expected.is_empty());
    assert_eq!(decode(&gpu, &engine, &all, &coded, false).1, expected);
    // Checksums that do not match, then checksums that do.
    for repaired in [false, true] {
        for (i, e) in coded.iter_mut().enumerate().filter(|(_, e)| told(e)) {
            let (said, frame) = &mut e.chunks[0];
            let at = frame.len() - 1 - (97 * i + 31 * usize::from(repaired)) % (frame.len() / 2);
            frame[at] ^= 1 << (i % 8);
            if repaired {
                let planes = all[i].host.dtype.value_width();
                if let Ok(list) = s4_format::StreamEntry::parse_chunk(frame, planes) {
                    said.crc_encoded = list.crc();
                }
            }
        }
        let (_, undone) = decode(&gpu, &engine, &all, &coded, true);
        assert_eq!(undone, expected, "{repaired}");
    }
}
