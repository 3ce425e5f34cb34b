//! Prediction by rows and columns, and contexts by the exponents of a parent: the CPU's frames, made and read by the
//! kernels alone.

use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions};
use s4_engine::{
    CpuEngine, Engine, NoInputs, PlanJob, PlaneCoding, Preset, Scratch, TensorPlan, chunk_log2,
};
use s4_format::layout::Planes;
use s4_format::side::SideKind;
use s4_format::{ContextsId, DType, LayoutId, Plan, PredictorId, ResidualId};
use s4_planes::Simd;
use s4_planes::patterns::{self, Kind};

use crate::delta::{self, Given, Line, MANIFEST, Parents, delta_on_cpu};
use crate::support::{Gpu, Host, Upload, compare, decode, gpu, on_cpu, on_gpu};

const FLOATS: [(DType, Kind); 4] = [
    (DType::BFloat16, Kind::BF16),
    (DType::Float16, Kind::F16),
    (DType::Float32, Kind::F32),
    (DType::Float64, Kind::F64),
];

fn noise(i: u64) -> u64 {
    (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}

/// Offsets for the given numbers of rows and columns; some rows are zeros.
fn offsets(dtype: DType, rows: u32, cols: u32) -> Vec<u8> {
    let bits = 8 * dtype.value_width() as u32;
    let mut side = [rows, cols].map(u32::to_le_bytes).concat();
    side.extend((0x1b_u64 << (bits - 7)).to_le_bytes());
    side.extend([[0, 0, 0, 0, 14, 0, 0, 0, 43][dtype.value_width()], 0, 0, 0, 0, 0, 0, 0]);
    for i in 0..u64::from(rows) + u64::from(cols) {
        let zeros = i < u64::from(rows) && noise(i).is_multiple_of(19);
        let offset = if zeros { i16::MIN } else { (noise(i) % 61) as i16 * 7 - 210 };
        side.extend(offset.to_le_bytes());
    }
    side
}

/// The values that offsets predict, except for some of the lowest bits, and signs if `signed`.
fn near(dtype: DType, side: &[u8], values: u64, signed: bool) -> Vec<u8> {
    let width = dtype.value_width();
    let number = |at: usize| u32::from_le_bytes(side[at..at + 4].try_into().unwrap());
    let (rows, cols) = (u64::from(number(0)), u64::from(number(4)));
    let base = u64::from_le_bytes(side[8..16].try_into().unwrap());
    let offset = |i: u64| {
        let at = 24 + 2 * i as usize;
        i64::from(i16::from_le_bytes([side[at], side[at + 1]]))
    };
    let value = |i: u64| {
        let row = offset(i / cols);
        if row == i64::from(i16::MIN) {
            return 0;
        }
        let sum = (row + offset(rows + i % cols)) as u64;
        let sign = if signed { (noise(i) & 1) << (8 * width - 1) } else { 0 };
        base.wrapping_add(sum << side[16]) ^ (noise(i + 77) % (1 << (3 * width))) ^ sign
    };
    (0..values).flat_map(|i| value(i).to_le_bytes()[..width].to_vec()).collect()
}

/// A plan that is forced, without shared tables.
fn plan_of(
    host: &Host,
    plan: Plan,
    planes: &[PlaneCoding],
    (kind, side): (SideKind, Vec<u8>),
) -> TensorPlan {
    let count = Planes::new(plan.layout, host.dtype.value_width(), 0).unwrap().sizes().len();
    let mut plan = TensorPlan::new(plan, planes[..count].to_vec(), chunk_log2(host.dtype));
    plan.side.push(kind, side).unwrap();
    plan
}

fn rank1(host: &Host, layout: LayoutId, planes: &[PlaneCoding], side: Vec<u8>) -> TensorPlan {
    plan_of(host, Plan::rank1(layout), planes, (SideKind::OFFSETS, side))
}

/// Checks that frames equal the CPU's and decode again, all by the kernels.
fn check(gpu: &Gpu, engine: &CudaEngine, hosts: &[Host], plans: &[TensorPlan]) {
    let uploads: Vec<Upload> =
        (0..).zip(hosts).map(|(i, h)| gpu.upload(&h.data, i % 3 * 8)).collect();
    let encoded = on_gpu(engine, hosts, &uploads, Some(plans.to_vec())).unwrap();
    let cpu: Vec<_> = hosts.iter().zip(plans).map(|(h, p)| on_cpu(h, Some(p.clone()))).collect();
    let all = hosts.iter().zip(&encoded).zip(&cpu);
    let differ: Vec<_> = all.filter_map(|((host, gpu), cpu)| compare(host, gpu, cpu)).collect();
    assert!(differ.is_empty(), "{} of {} differ: {differ:#?}", differ.len(), hosts.len());
    drop(uploads);
    for (host, back) in hosts.iter().zip(decode(gpu, engine, hosts, &encoded).unwrap()) {
        assert!(back == host.data, "{}: decoded values differ", host.name);
    }
    let chunks = engine.chunks();
    assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
}

#[test]
fn rows_and_columns_are_predicted_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let (p8, p12, raw, bits) =
        (PlaneCoding::RANS8, PlaneCoding::RANS12, PlaneCoding::RAW, PlaneCoding::BITS7);
    let (mut hosts, mut plans) = (vec![], vec![]);
    // Chunks that start within a row, rows longer than a chunk, and chunks that end with a row.
    let large: (u32, u32) = if gpu.is_slow() { (137, 1001) } else { (4001, 3003) };
    for (dtype, kind) in FLOATS {
        let sides = [(1, 16), (1, 4097), (4097, 1), (17, 24), (96, 96), large];
        for (rows, cols) in sides {
            let n = u64::from(rows) * u64::from(cols);
            let side = offsets(dtype, rows, cols);
            for layout in [LayoutId::FIELDS, LayoutId::FIELDS_SIGN, LayoutId::BYTES] {
                let signs = layout != LayoutId::FIELDS_SIGN;
                let mut add = |name: &str, data: Vec<u8>, planes: &[PlaneCoding]| {
                    let shape = vec![u64::from(rows), u64::from(cols)];
                    let name = format!("{dtype} {rows} x {cols} {layout} {name}");
                    let host = Host { name, dtype, shape, data };
                    plans.push(rank1(&host, layout, planes, side.clone()));
                    hosts.push(host);
                };
                let usual = if signs { [p8, raw, raw, raw] } else { [raw, p8, bits, raw] };
                let usual = [&usual[..], &[raw; 4]].concat();
                add("near", near(dtype, &side, n, signs), &usual);
                if n < 20_000 {
                    add("signed", near(dtype, &side, n, true), &[p12; 8]);
                    for name in ["random", "weights-and-nans", "zeros"] {
                        let data = patterns::all(kind, n as usize).find(|p| p.0 == name).unwrap().1;
                        add(name, data, &[p8; 8]);
                    }
                }
            }
        }
    }
    for scratch in [16 << 20, 256 << 20] {
        let engine = gpu.engine(CudaOptions { scratch, ..CudaOptions::default() });
        check(&gpu, &engine, &hosts, &plans);
    }
}

/// More offsets than a slot has room for: the CPU does these tensors, with the same bytes.
#[test]
fn offsets_that_are_too_many_are_left_to_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // Two chunks, the second of which begins within the row.
    let (dtype, cols) = (DType::BFloat16, 200_000);
    let side = offsets(dtype, 1, cols);
    let (name, shape) = ("wide".into(), vec![1, u64::from(cols)]);
    let host = Host { name, dtype, shape, data: near(dtype, &side, u64::from(cols), false) };
    let plan = rank1(&host, LayoutId::FIELDS, &[PlaneCoding::RANS8, PlaneCoding::RAW], side);
    let engine = gpu.engine(CudaOptions { scratch: 16 << 20, ..CudaOptions::default() });
    let hosts = [host];
    let upload = [gpu.upload(&hosts[0].data, 0)];
    let [encoded] = &on_gpu(&engine, &hosts, &upload, Some(vec![plan.clone()])).unwrap()[..] else {
        panic!()
    };
    assert_eq!(compare(&hosts[0], encoded, &on_cpu(&hosts[0], Some(plan))), None);
    assert_eq!(engine.chunks().host, 2);
    let back = decode(&gpu, &engine, &hosts, std::slice::from_ref(encoded)).unwrap();
    assert!(back[0] == hosts[0].data);
}

/// Lines whose steps are differences with contexts, in every layout that has them.
fn lines_with_contexts(n: usize, steps: usize) -> Vec<Line> {
    let mut lines = vec![];
    for (dtype, kind) in FLOATS {
        for pattern in ["like-weights", "random", "weights-and-nans"] {
            for (layout, class) in [(LayoutId::FIELDS, [126, 0]), (LayoutId::FIELDS_SIGN, [200, 3])]
            {
                let data = patterns::all(kind, n).find(|p| p.0 == pattern).unwrap().1;
                let first = Host::new(format!("{dtype} {pattern} like-{layout}"), dtype, data);
                let mut line = Line { coded: vec![on_cpu(&first, None)], steps: vec![first] };
                for step in 1..steps {
                    let before = &line.steps[step - 1];
                    let next = delta::later(before, step);
                    let mut plan = Plan::delta(layout, MANIFEST, 3);
                    plan.residual = ResidualId::SUB;
                    plan.contexts = ContextsId::EXPONENT;
                    let codings = [PlaneCoding::RANS8, PlaneCoding::RANS12];
                    let planes: Vec<_> = (0..4).map(|i| codings[(i + step) % 3 / 2]).collect();
                    let side = (SideKind::CONTEXTS, [&class[..], &[0; 6]].concat());
                    let plan = plan_of(&next, plan, &planes, side);
                    line.coded.push(delta_on_cpu(&next, before, Some(plan)));
                    line.steps.push(next);
                }
                lines.push(line);
            }
        }
    }
    lines
}

#[test]
fn contexts_of_differences_are_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[usize] = if gpu.is_slow() { &[300, 9001] } else { &[300, 9001, 70_003, 600_000] };
    for &n in sizes {
        check_lines(&gpu, &lines_with_contexts(n, 3));
    }
}

/// Checks that the last of three steps equals the CPU's, wherever its parent is, and that all decode by the kernels.
fn check_lines(gpu: &Gpu, lines: &[Line]) {
    let plans: Vec<_> = lines.iter().map(|l| l.coded[2].plan.clone()).collect();
    for given in [Given::Device, Given::Host, Given::Frames] {
        let engine = gpu.engine(CudaOptions::default());
        let parents = Parents::new(gpu, lines, given);
        let encoded = delta::encode(gpu, &engine, &parents, Some(plans.clone())).unwrap();
        for (line, e) in lines.iter().zip(&encoded) {
            assert_eq!(compare(line.last(), e, &line.coded[2]), None, "{given:?}");
        }
        let chunks = engine.chunks();
        assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
    }
    let engine = gpu.engine(CudaOptions::default());
    let (values, undone) = delta::decode(gpu, &engine, lines);
    assert_eq!(undone, [0; 0]);
    for (line, values) in lines.iter().zip(values) {
        assert!(values == line.last().data, "{}", line.last().name);
    }
    assert_eq!(engine.chunks().host + engine.chunks().refused, 0);
}

/// Rows, columns and a share of a parent that is itself predicted that way.
#[test]
fn blends_are_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let large: (u32, u32) = if gpu.is_slow() { (137, 1001) } else { (1501, 1203) };
    let mut lines = vec![];
    for (dtype, _) in FLOATS {
        for (rows, cols) in [(1, 4097), (4097, 1), (17, 24), large] {
            for layout in [LayoutId::FIELDS, LayoutId::FIELDS_SIGN, LayoutId::BYTES] {
                let side = offsets(dtype, rows, cols);
                let n = u64::from(rows) * u64::from(cols);
                let data = near(dtype, &side, n, layout == LayoutId::BYTES);
                let shape = vec![u64::from(rows), u64::from(cols)];
                let name = format!("{dtype} like-{rows} x {cols} {layout}");
                let first = Host { name, dtype, shape, data };
                let mut line = Line { coded: vec![on_cpu(&first, None)], steps: vec![first] };
                for (step, share) in [(1, 77), (2, 255)] {
                    let before = &line.steps[step - 1];
                    let next = delta::later(before, step);
                    let mut side = side.clone();
                    side[17] = share;
                    let plan = Plan::blend(layout, MANIFEST, 3);
                    let codings = [PlaneCoding::RANS8, PlaneCoding::RANS12, PlaneCoding::RAW];
                    let planes: Vec<_> = (0..8).map(|i| codings[(i + step) % 3]).collect();
                    let plan = plan_of(&next, plan, &planes, (SideKind::OFFSETS, side));
                    line.coded.push(delta_on_cpu(&next, before, Some(plan)));
                    line.steps.push(next);
                }
                lines.push(line);
            }
        }
    }
    check_lines(&gpu, &lines);
}

/// Parents that are predicted by their own rows and columns, decoded on the device before their children.
#[test]
fn parents_may_be_predicted_themselves() {
    let Some(gpu) = gpu() else { return };
    let (dtype, rows, cols) = (DType::Float32, 40, 320);
    let side = offsets(dtype, rows, cols);
    let data = near(dtype, &side, u64::from(rows * cols), true);
    let shape = vec![u64::from(rows), u64::from(cols)];
    let first = Host { name: "like-first".into(), dtype, shape, data };
    let planes = [PlaneCoding::RANS8, PlaneCoding::RAW, PlaneCoding::RAW];
    let plan = rank1(&first, LayoutId::FIELDS, &planes, side);
    let mut line = Line { coded: vec![on_cpu(&first, Some(plan))], steps: vec![first] };
    for step in 1..3 {
        let next = delta::later(&line.steps[step - 1], step);
        line.coded.push(delta_on_cpu(&next, &line.steps[step - 1], None));
        line.steps.push(next);
    }
    assert_eq!(line.coded[2].plan.plan.predictor, PredictorId::PARENT);
    let lines = [line];
    let engine = gpu.engine(CudaOptions::default());
    let plans = vec![lines[0].coded[2].plan.clone()];
    let parents = Parents::new(&gpu, &lines, Given::Frames);
    let encoded = delta::encode(&gpu, &engine, &parents, Some(plans)).unwrap();
    assert_eq!(compare(lines[0].last(), &encoded[0], &lines[0].coded[2]), None);
    let (values, undone) = delta::decode(&gpu, &engine, &lines);
    assert!(undone.is_empty() && values[0] == lines[0].last().data);
    assert_eq!(engine.chunks().host + engine.chunks().refused, 0);
}

/// Second moments of matrices, nearly a factor of the row times one of the column.
fn moments(dtype: DType, rows: u64, cols: u64) -> Host {
    let factor = |i: u64| (2 + noise(i) % 1000) as f32 * 1e-6;
    let value = |i: u64| {
        factor(i / cols) * factor(9999 + i % cols) * (1.0 + (noise(i + 5) % 64) as f32 / 64.0)
    };
    let bytes = |i: u64| {
        let bits = value(i).to_bits();
        if dtype == DType::BFloat16 {
            (bits >> 16).to_le_bytes()[..2].to_vec()
        } else {
            bits.to_le_bytes().to_vec()
        }
    };
    let data = (0..rows * cols).flat_map(bytes).collect();
    Host { name: format!("{dtype} moments"), dtype, shape: vec![rows, cols], data }
}

/// Checks that the plan is by rows and columns, and the one that the CPU makes.
fn check_plan(cpu: &CpuEngine, host: &Host, plan: &TensorPlan) {
    let view = host.view();
    let job = PlanJob::new(Preset::Balanced, &view);
    let own = cpu.plan(&job, &mut Scratch::default()).unwrap();
    assert_eq!(format!("{plan:?}"), format!("{own:?}"), "{}", host.name);
    assert_eq!(plan.plan.predictor, PredictorId::RANK1, "{plan:?}");
}

/// The planner's own choice, with tables that chunks share.
#[test]
fn what_is_planned_is_coded_by_the_kernels_alone() {
    let Some(gpu) = gpu() else { return };
    let hosts = [moments(DType::BFloat16, 274, 512), moments(DType::Float32, 330, 256)];
    let uploads: Vec<_> = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
    let tensors: Vec<_> = hosts.iter().zip(&uploads).map(|(h, u)| h.on(u)).collect();
    let engine = gpu.engine(CudaOptions::default());
    let plans = engine.plan::<CudaError>(Preset::Balanced, &tensors, &NoInputs, None).unwrap();
    let cpu = CpuEngine::new(Simd::detect());
    for (host, plan) in hosts.iter().zip(&plans) {
        check_plan(&cpu, host, plan);
        let chunks = on_cpu(host, Some(plan.clone())).chunks;
        assert!(chunks.len() > 1 && chunks.iter().any(|c| c.0.shared), "{}", host.name);
    }
    check(&gpu, &engine, &hosts, &plans);
}

/// The sample of each tensor is larger than a slot.
#[test]
fn tall_tensors_are_planned_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let hosts = [16_384, 16_400, 20_000].map(|rows| moments(DType::BFloat16, rows, 128));
    let uploads: Vec<_> = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
    let tensors: Vec<_> = hosts.iter().zip(&uploads).map(|(h, u)| h.on(u)).collect();
    let engine = gpu.engine(CudaOptions { scratch: 16 << 20, ..CudaOptions::default() });
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let plan = |pool| engine.plan::<CudaError>(Preset::Balanced, &tensors, &NoInputs, pool);
    let cpu = CpuEngine::new(Simd::detect());
    for plans in [plan(None).unwrap(), plan(Some(&pool)).unwrap()] {
        for (host, plan) in hosts.iter().zip(&plans) {
            check_plan(&cpu, host, plan);
        }
    }
}
