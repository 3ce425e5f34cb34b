//! Differences from a parent: the CPU's plans and frames, wherever the parent's values are, and chains
//! of them decoded where they belong.

use bytes::Bytes;
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, Destination, DeviceMemory, GpuError};
use s4_engine::{
    CpuEngine, EncodeJob, Engine, Input, InputFrame, InputSize, Inputs, Jobs, ParentSample,
    PlanJob, PlaneCoding, Preset, Scratch, TensorPlan, parent_probes,
};
use s4_format::{DType, Digest, PredictorId};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Simd, Width};

use crate::support::{Encoded, Gpu, Host, Span, Upload, compare, gpu, kinds, on_cpu};

pub(crate) const MANIFEST: Digest = Digest([7; 32]);

/// A tensor, training step by training step, and its frames: the first without a parent, the others
/// as the planner chooses with the previous step as the parent.
pub(crate) struct Line {
    pub(crate) steps: Vec<Host>,
    pub(crate) coded: Vec<Encoded>,
}

/// The values a step later: most change a little.
pub(crate) fn later(host: &Host, step: usize) -> Host {
    let width = host.dtype.value_width();
    let mut data = host.data.clone();
    let floats = host.name.contains("like-");
    for (i, value) in data.chunks_exact_mut(width).enumerate() {
        let noise = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + step as u64) >> 40;
        if floats && width > 1 {
            value[0] ^= (noise % 4) as u8;
        } else if noise.is_multiple_of(50) {
            value[0] ^= 1 + (noise / 50 % 3) as u8;
        }
    }
    Host { data, ..host.clone() }
}

fn sample(host: &Host) -> Vec<u8> {
    let width = host.dtype.value_width();
    let probes = parent_probes(host.dtype, (host.data.len() / width) as u64);
    let part =
        |r: std::ops::Range<u64>| &host.data[r.start as usize * width..r.end as usize * width];
    probes.into_iter().flat_map(part).copied().collect()
}

pub(crate) fn delta_on_cpu(host: &Host, before: &Host, plan: Option<TensorPlan>) -> Encoded {
    let cpu = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let view = host.view();
    let values = &sample(before)[..];
    let parent =
        ParentSample { manifest: MANIFEST, tensor: 3, values, moments: &[], expected: None };
    let plan = plan.unwrap_or_else(|| {
        cpu.plan(
            &PlanJob { parent: Some(&parent), ..PlanJob::new(Preset::Fast, &view) },
            &mut scratch,
        )
        .unwrap()
    });
    let mut first = 0;
    let chunk = |chunk| {
        let mut frame = vec![];
        let bytes = host.chunk_bytes(&plan, chunk) as usize;
        let below = Some(&before.data[first..first + bytes]);
        first += bytes;
        let e = cpu.encode(
            &EncodeJob { view: &view, plan: &plan, chunk, inputs: below.as_slice() },
            &mut scratch,
            &mut frame,
        );
        (e.unwrap(), frame)
    };
    let chunks = (0..host.chunks(&plan)).map(chunk).collect();
    Encoded::new(plan, chunks)
}

impl Line {
    fn new(first: Host, steps: usize) -> Self {
        let mut line = Self { coded: vec![on_cpu(&first, None)], steps: vec![first] };
        for step in 1..steps {
            let next = later(&line.steps[step - 1], step);
            line.coded.push(delta_on_cpu(&next, &line.steps[step - 1], None));
            line.steps.push(next);
        }
        line
    }

    pub(crate) fn last(&self) -> &Host {
        &self.steps[self.steps.len() - 1]
    }

    fn needs_parent(&self, step: usize, chunk: usize) -> bool {
        let e = &self.coded[step];
        e.plan.plan.is_delta() && !e.chunks[chunk].0.plain
    }

    /// The steps whose frames of a chunk make its values of step `last`.
    fn levels(&self, last: usize, chunk: usize) -> Vec<usize> {
        let first = (0..=last).rev().find(|&s| !self.needs_parent(s, chunk)).unwrap();
        (first..=last).collect()
    }
}

/// The place of parents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Given {
    Device,
    Host,
    Frames,
}

/// The values of the last step but one.
pub(crate) struct Parents<'a> {
    lines: &'a [Line],
    uploads: Vec<Upload>,
    given: Given,
    /// A byte of the frames of this tensor is damaged.
    damaged: Option<usize>,
}

impl<'a> Parents<'a> {
    pub(crate) fn new(gpu: &Gpu, lines: &'a [Line], given: Given) -> Self {
        let parent = |l: &'a Line| &l.steps[l.steps.len() - 2].data;
        let uploads = match given {
            Given::Device => lines.iter().map(|l| gpu.upload(parent(l), 2)).collect(),
            _ => vec![],
        };
        Self { lines, uploads, given, damaged: None }
    }

    fn range(&self, tensor: usize, chunk: u64) -> (u64, u64) {
        let line = &self.lines[tensor];
        let e = &line.coded[line.steps.len() - 2];
        let size = (line.last().dtype.value_width() as u64) << e.plan.chunk_log2;
        (chunk * size, line.last().chunk_bytes(&e.plan, chunk))
    }

    fn frames(&self, tensor: usize, chunk: u64) -> Vec<InputFrame<'_>> {
        let line = &self.lines[tensor];
        let frame = |step: usize| {
            let (host, e) = (&line.steps[step], &line.coded[step]);
            let mut bytes = e.chunks[chunk as usize].1.clone();
            if self.damaged == Some(tensor) {
                bytes[9] ^= 4;
            }
            InputFrame { spec: e.spec(host), record: e.record(chunk as usize), bytes: bytes.into() }
        };
        line.levels(line.steps.len() - 2, chunk as usize).into_iter().map(frame).collect()
    }
}

impl Inputs<CudaError> for Parents<'_> {
    fn parent(&self, _: usize) -> Option<(Digest, u32)> {
        Some((MANIFEST, 3))
    }

    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, CudaError> {
        let before = |&i: &usize| {
            let steps = &self.lines[i].steps;
            sample(&steps[steps.len() - 2])
        };
        Ok(tensors.iter().map(before).collect())
    }

    fn memory(&self) -> Vec<DeviceMemory> {
        self.uploads.iter().map(Upload::memory).collect()
    }

    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        match self.given {
            Given::Device => InputSize::default(),
            Given::Host => InputSize { bytes: self.range(tensor, chunk).1, frames: 0 },
            Given::Frames => {
                let frames = self.frames(tensor, chunk);
                let bytes = frames.iter().map(|f| f.bytes.len().next_multiple_of(16) as u64).sum();
                InputSize { bytes, frames: frames.len() as u32 }
            }
        }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
        let one = |&(tensor, chunk): &(usize, u64)| {
            let line = &self.lines[tensor];
            let (first, len) = self.range(tensor, chunk);
            let data = &line.steps[line.steps.len() - 2].data;
            Ok(match self.given {
                Given::Device => Input::Device(self.uploads[tensor].memory().part(first, len)?),
                Given::Host => {
                    let part = &data[first as usize..(first + len) as usize];
                    Input::Host(Bytes::copy_from_slice(part))
                }
                Given::Frames => Input::Frames(self.frames(tensor, chunk)),
            })
        };
        chunks.iter().map(one).collect()
    }
}

/// Encodes the last step of each line on the device.
pub(crate) fn encode(
    gpu: &Gpu,
    engine: &CudaEngine,
    parents: &Parents<'_>,
    plans: Option<Vec<TensorPlan>>,
) -> Result<Vec<Encoded>, CudaError> {
    let lines = parents.lines;
    let uploads: Vec<_> =
        (0..).zip(lines).map(|(i, l)| gpu.upload(&l.last().data, i % 3 * 8)).collect();
    let tensors: Vec<_> = lines.iter().zip(&uploads).map(|(l, u)| l.last().on(u)).collect();
    let plan = || engine.plan(Preset::Fast, &tensors, parents, None);
    let plans = plans.map_or_else(plan, Ok)?;
    let mut chunks: Vec<Vec<_>> = lines.iter().map(|_| vec![]).collect();
    engine.encode(&Jobs { inputs: parents, ..Jobs::new(&tensors, &plans) }, |frames| {
        for frame in frames {
            assert_eq!(frame.chunk, chunks[frame.tensor].len() as u64);
            chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
        }
        Ok(())
    })?;
    Ok(plans.into_iter().zip(chunks).map(|(p, c)| Encoded::new(p, c)).collect())
}

fn check(gpu: &Gpu, engine: &CudaEngine, lines: &[Line], given: Given) {
    let encoded = encode(gpu, engine, &Parents::new(gpu, lines, given), None).unwrap();
    let mut differences = vec![];
    for (line, e) in lines.iter().zip(&encoded) {
        differences.extend(compare(line.last(), e, &line.coded[line.steps.len() - 1]));
    }
    let (count, all) = (differences.len(), lines.len());
    assert!(count == 0, "{given:?}: {count} of {all} tensors differ: {differences:#?}");
}

fn lines(sizes: &[usize], steps: usize) -> Vec<Line> {
    let mut out = vec![];
    for (dtype, kind) in kinds() {
        for &n in sizes {
            for (pattern, data) in patterns::all(kind, n.next_multiple_of(2)) {
                if ["like-weights", "sparse", "random", "two-values"].contains(&pattern) {
                    out.push(Line::new(
                        Host::new(format!("{dtype} {pattern} {n}"), dtype, data),
                        steps,
                    ));
                }
            }
        }
    }
    out
}

#[test]
fn differences_are_as_on_the_cpu_wherever_the_parent_is() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[usize] = match gpu.is_slow() {
        true => &[1, 4096, 9001],
        false => &[1, 4096, 17_001, 70_003, 200_001, 600_000],
    };
    for steps in [2, 4] {
        let lines = lines(sizes, steps);
        let delta = |l: &&Line| l.coded[steps - 1].plan.plan.predictor == PredictorId::PARENT;
        let deltas = lines.iter().filter(delta).count();
        assert!(deltas > lines.len() / 3 && deltas < lines.len(), "{deltas} of {}", lines.len());
        for given in [Given::Device, Given::Host, Given::Frames] {
            let engine = gpu.engine(CudaOptions::default());
            check(&gpu, &engine, &lines, given);
            let chunks = engine.chunks();
            println!("{steps} steps, {given:?}: {deltas} deltas, {chunks:?}");
            assert!(chunks.refused == 0 && chunks.device > 2 * chunks.host, "{chunks:?}");
        }
    }
}

/// Whole chunks, whose planes have long segments, in groups that fill the least memory there can be.
#[test]
fn differences_of_large_tensors_stay_within_small_budgets() {
    let Some(gpu) = gpu() else { return };
    // In the smaller budgets, a group has more than a slot's host memory has room for.
    let n = if gpu.is_slow() { 800_000 } else { 30_000_000 };
    let of = |dtype, kind, n| {
        let data = patterns::all(kind, n).find(|p| p.0 == "like-weights").unwrap().1;
        Line::new(Host::new(format!("{dtype} like-weights {n}"), dtype, data), 3)
    };
    let lines = [
        of(DType::BFloat16, Kind::BF16, n),
        of(DType::Float32, Kind::F32, n / 2),
        of(DType::Float8E4M3Fn, Kind::F8_E4M3, n),
        of(DType::BFloat16, Kind::BF16, 5000),
    ];
    for (scratch, pinned) in [(32 << 20, 9 << 20), (256 << 20, 96 << 20)] {
        for given in [Given::Device, Given::Host, Given::Frames] {
            let engine = gpu.engine(CudaOptions { scratch, pinned, ..CudaOptions::default() });
            check(&gpu, &engine, &lines, given);
            let peak = engine.scratch_high_water(0);
            if !gpu.is_slow() {
                assert!((1..=scratch).contains(&peak), "{peak} of {scratch}");
            }
        }
    }
}

#[test]
fn ordered_differences_are_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let mut lines = lines(&[5000], 2);
    let mut plans = vec![];
    for line in &mut lines {
        let mut plan = line.coded[1].plan.clone();
        plan.plan = s4_format::Plan::delta(plan.plan.layout, MANIFEST, 3);
        plan.plan.residual = s4_format::ResidualId::SUB;
        line.coded[1] = delta_on_cpu(&line.steps[1], &line.steps[0], Some(plan.clone()));
        plans.push(plan);
    }
    let engine = gpu.engine(CudaOptions::default());
    let parents = Parents::new(&gpu, &lines, Given::Frames);
    let encoded = encode(&gpu, &engine, &parents, Some(plans)).unwrap();
    for (line, e) in lines.iter().zip(&encoded) {
        assert_eq!(compare(line.last(), e, &line.coded[1]), None);
    }
}

/// Decodes lines into device memory, level by level. Returns the values, and what was left undone.
pub(crate) fn decode(gpu: &Gpu, engine: &CudaEngine, lines: &[Line]) -> (Vec<Vec<u8>>, Vec<usize>) {
    let last = lines[0].steps.len() - 1;
    let to: Vec<_> = (0..)
        .zip(lines)
        .map(|(i, l)| gpu.upload(&vec![0xee; l.last().data.len()], i % 3 * 8))
        .collect();
    let memory: Vec<_> = to.iter().map(Upload::memory).collect();
    let mut undone = vec![];
    engine
        .decode::<CudaError>(&memory, None, |decoder| {
            for step in 0..=last {
                let mut span = Span::default();
                for (number, line) in lines.iter().enumerate() {
                    let (host, e) = (&line.steps[step], &line.coded[step]);
                    let mut first = 0;
                    for chunk in 0..e.chunks.len() {
                        let bytes = host.chunk_bytes(&e.plan, chunk as u64);
                        let to = memory[number].part(first, bytes)?;
                        first += bytes;
                        if !line.levels(last, chunk).contains(&step) {
                            continue;
                        }
                        if span.bytes.len() + e.chunks[chunk].1.len() + 16 > decoder.room() {
                            std::mem::take(&mut span).push(decoder, 0)?;
                        }
                        let destinations = vec![Destination { from: 0, to }];
                        span.add(number, e.spec(host), chunk, e, bytes, destinations);
                    }
                }
                span.push(decoder, 0)?;
            }
            undone = decoder.undone()?;
            Ok(())
        })
        .unwrap();
    (to.iter().map(|u| gpu.download(u.address, u.bytes)).collect(), undone)
}

#[test]
fn chains_are_decoded_where_they_belong() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[usize] = match gpu.is_slow() {
        true => &[4096, 9001],
        false => &[4096, 70_003, 600_000],
    };
    let lines = lines(sizes, 4);
    let engine = gpu.engine(CudaOptions::default());
    let (values, undone) = decode(&gpu, &engine, &lines);
    // Only the CPU decodes Zstandard: the caller must decode these another way.
    let lacking = |l: &Line| (1..4).any(|s| l.coded[s].plan.planes.contains(&PlaneCoding::ZSTD));
    for (number, (line, values)) in lines.iter().zip(values).enumerate() {
        assert_eq!(undone.contains(&number), lacking(line), "{}", line.last().name);
        assert!(undone.contains(&number) || values == line.last().data, "{}", line.last().name);
    }
    assert!(undone.len() < lines.len() / 2, "{} of {}", undone.len(), lines.len());
}

/// Zstandard of whole integers, which the kernels lack, in chains both ways.
#[test]
fn what_the_kernels_lack_is_left_to_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let data: Vec<u8> = (0..40_000u64).flat_map(|i| (i * i * 977).to_le_bytes()).collect();
    let mut lines = [
        Line::new(Host::new("counters", DType::Int64, data.clone()), 3),
        Line::new(Host::new("like-counters", DType::Int64, data), 3),
    ];
    for line in &mut lines {
        for step in 1..3 {
            let mut plan = line.coded[step].plan.clone();
            plan.plan = s4_format::Plan::delta(s4_format::LayoutId::WHOLE, MANIFEST, 3);
            plan.planes = vec![PlaneCoding::ZSTD];
            line.coded[step] = delta_on_cpu(&line.steps[step], &line.steps[step - 1], Some(plan));
        }
    }
    let engine = gpu.engine(CudaOptions::default());
    let plans: Vec<_> = lines.iter().map(|l| l.coded[2].plan.clone()).collect();
    let parents = Parents::new(&gpu, &lines, Given::Frames);
    let encoded = encode(&gpu, &engine, &parents, Some(plans)).unwrap();
    for (line, e) in lines.iter().zip(&encoded) {
        assert_eq!(compare(line.last(), e, &line.coded[2]), None);
    }
    assert_eq!(decode(&gpu, &engine, &lines).1, [0, 1]);
    // Unless the caller asks what is undone, it is an error: nobody takes the memory for their values.
    let to = gpu.upload(&lines[0].last().data, 0);
    let e = &lines[0].coded[1];
    let left = engine.decode::<CudaError>(&[to.memory()], None, |decoder| {
        let mut span = Span::default();
        let bytes = lines[0].last().chunk_bytes(&e.plan, 0);
        let destinations = vec![Destination { from: 0, to: to.memory().part(0, bytes)? }];
        span.add(5, e.spec(&lines[0].steps[1]), 0, e, bytes, destinations);
        span.push(decoder, 0)
    });
    assert!(matches!(left, Err(CudaError::Format { tensor: 5, .. })), "{left:?}");
}

#[test]
fn parents_that_are_damaged_or_missing_are_errors() {
    let Some(gpu) = gpu() else { return };
    let data = patterns::all(Kind::BF16, 20_000).find(|p| p.0 == "like-weights").unwrap().1;
    let host = Host::new("like-weights", DType::BFloat16, data);
    let lines = [Line::new(host.clone(), 3), Line::new(host, 3)];
    let engine = gpu.engine(CudaOptions::default());
    let mut parents = Parents::new(&gpu, &lines, Given::Frames);
    parents.damaged = Some(1);
    let e = encode(&gpu, &engine, &parents, None).err().expect("refused");
    assert!(matches!(&e, CudaError::Format { tensor: 1, .. }), "{e}");
    assert!(e.to_string().contains("checksum mismatch in the stored bytes"), "{e}");

    let uploads: Vec<_> = lines.iter().map(|l| gpu.upload(&l.last().data, 0)).collect();
    let tensors: Vec<_> = lines.iter().zip(&uploads).map(|(l, u)| l.last().on(u)).collect();
    let plans: Vec<_> = lines.iter().map(|l| l.coded[2].plan.clone()).collect();
    let none = engine.encode(&Jobs::<CudaError>::new(&tensors, &plans), |_| Ok(()));
    assert!(matches!(&none, Err(CudaError::Format { tensor: 0, .. })), "{none:?}");

    struct Short;
    impl Inputs<CudaError> for Short {
        fn size(&self, _: usize, _: u64) -> InputSize {
            InputSize { bytes: 10, frames: 0 }
        }
        fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
            Ok(chunks.iter().map(|_| Input::Host(Bytes::from_static(&[0; 10]))).collect())
        }
    }
    let short = engine.encode(&Jobs { inputs: &Short, ..Jobs::new(&tensors, &plans) }, |_| Ok(()));
    assert!(matches!(&short, Err(CudaError::Gpu(GpuError::Argument(_)))), "{short:?}");
    // The engine still works.
    parents.damaged = None;
    assert!(encode(&gpu, &engine, &parents, None).is_ok());
}

/// More levels than a slot of the smallest memory has room for: the CPU decodes the parent.
#[test]
fn chains_too_long_for_the_device_are_decoded_by_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let data = patterns::all(Kind::int(Width::B8), 9000).find(|p| p.0 == "random").unwrap().1;
    let lines = [Line::new(Host::new("like-random", DType::Float64, data), 20)];
    let (scratch, pinned) = (32 << 20, 9 << 20);
    let engine = gpu.engine(CudaOptions { scratch, pinned, ..CudaOptions::default() });
    assert_eq!(lines[0].levels(18, 0).len(), 19);
    check(&gpu, &engine, &lines, Given::Frames);
}

/// Differences with every symbol, some of them frequent: tables that several chunks share, without an escape.
#[test]
fn tables_of_all_symbols_are_shared_without_an_escape() {
    let Some(gpu) = gpu() else { return };
    let n = if gpu.is_slow() { 140_000 } else { 1_000_000 };
    let data = patterns::all(Kind::BF16, n).find(|p| p.0 == "random").unwrap().1;
    let first = Host::new("random", DType::BFloat16, data);
    let mut last = first.clone();
    for (i, value) in last.data.chunks_exact_mut(2).enumerate() {
        let noise = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 24;
        if noise.is_multiple_of(2) {
            value[0] ^= (noise >> 1) as u8;
            value[1] ^= (noise >> 2) as u8 & 0x80;
        }
    }
    let coded = vec![on_cpu(&first, None), delta_on_cpu(&last, &first, None)];
    assert!(coded[1].chunks.iter().any(|c| c.0.shared), "{:?}", coded[1].plan);
    let lines = [Line { steps: vec![first, last], coded }];
    let engine = gpu.engine(CudaOptions::default());
    check(&gpu, &engine, &lines, Given::Host);
    let (values, undone) = decode(&gpu, &engine, &lines);
    assert!(values[0] == lines[0].last().data && undone.is_empty());
    assert_eq!(engine.chunks().host + engine.chunks().refused, 0);
}
