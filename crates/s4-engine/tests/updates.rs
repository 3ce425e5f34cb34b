//! Predictor `step` and contexts `update`, forced on values of every kind: they may cost bytes, but never a value.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::iter;

use common::encode;
use s4_engine::{
    CpuEngine, DecodeJob, InputValues, PlaneCoding, Scratch, TensorPlan, TensorSpec, TensorView,
};
use s4_format::layout::Planes;
use s4_format::side::SideKind;
use s4_format::{ChunkRecord, DType, Digest, Error, LayoutId, Plan};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Simd, StepFactors};
use s4_predict::{Step, Update};

const ALL: [(DType, Kind); 3] =
    [(DType::Float32, Kind::F32), (DType::BFloat16, Kind::BF16), (DType::Float16, Kind::F16)];
const UPDATE: Update =
    Update { floor: i16::MIN, offset: 8300, first: DType::Float32, second: Some(DType::Float32) };
const CODINGS: [PlaneCoding; 2] = [PlaneCoding::RANS8, PlaneCoding::RANS12];

fn plan(dtype: DType, update: Update, coding: PlaneCoding) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(update.second.is_some())];
    let plan = Plan::update(Digest::of(b"parent"), 3, moments);
    let planes = vec![coding; dtype.value_width()];
    let mut plan = TensorPlan::new(plan, planes, s4_engine::chunk_log2(dtype));
    plan.side.push(SideKind::CONTEXTS, update.to_bytes()).unwrap();
    plan
}

fn step_plan(dtype: DType, step: Step, layout: LayoutId, coding: PlaneCoding) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(step.second.is_some())];
    let plan = Plan::step(layout, Digest::of(b"parent"), 3, moments);
    let planes = Planes::new(layout, dtype.value_width(), 0).unwrap().sizes().len();
    let mut plan = TensorPlan::new(plan, vec![coding; planes], s4_engine::chunk_log2(dtype));
    plan.side.push(SideKind::STEP, step.to_bytes()).unwrap();
    plan
}

/// The chunk decoded over the parent's values, and into other memory.
fn decode(
    engine: &CpuEngine,
    view: &TensorView<'_>,
    plan: &TensorPlan,
    inputs: &[&[u8]],
    (record, frame): &(ChunkRecord, Vec<u8>),
) -> Result<[Vec<u8>; 2], Error> {
    let spec = TensorSpec {
        dtype: view.dtype,
        shape: view.shape,
        plan: &plan.plan,
        side: &plan.side,
        chunk_log2: plan.chunk_log2,
    };
    let parent = inputs[0];
    let mut out = [parent.to_vec(), vec![9; view.data.len()]];
    for (to, first) in out.iter_mut().zip([InputValues::Destination, InputValues::Slice(parent)]) {
        let moments = inputs[1..].iter().map(|moment| InputValues::Slice(moment));
        let inputs = &iter::once(first).chain(moments).collect::<Vec<_>>()[..];
        let job = DecodeJob { spec: &spec, chunk: 0, record, frame, inputs };
        engine.decode(&job, &mut Scratch::default(), to)?;
    }
    Ok(out)
}

#[test]
fn every_pattern_of_every_dtype_comes_back_and_every_simd_writes_the_same_bytes() {
    let engines: Vec<_> = Simd::available().map(CpuEngine::new).collect();
    let n = 9000;
    let patterns = |kind| patterns::all(kind, n).map(|p| p.1).collect::<Vec<_>>();
    let values = ALL.map(|(_, kind)| patterns(kind));
    let mut case = 0;
    for (w, m, v) in (0..27).map(|i| (i % 3, i / 3 % 3, i / 9)) {
        let dtypes = [w, m, v].map(|i| ALL[i].0);
        for number in 0..values[w].len() {
            case += 1;
            let of = |i: usize, k: usize| &values[i][(number + k) % values[i].len()][..];
            let (data, inputs) =
                (of(w, 0), [of(w, 1 + case % 4), of(m, case % 7), of(v, case % 5)]);
            let (floor, offset) = [(0, 0), (-3000, 9000), (i16::MIN, 2000)][case % 3];
            // SGD and Lion have no second moment.
            let (first, second) = (dtypes[1], (case % 4 > 0).then_some(dtypes[2]));
            let update = Update { floor, offset, first, second };
            let view = TensorView { dtype: dtypes[0], shape: &[n as u64], data };
            let [keep, rate, epsilon] = [[0.9999, 3e-4, 1e-8], [1.0, 1.0, 0.0]][case % 2];
            let factors = StepFactors { keep, rate, epsilon };
            let step = Step { factors, first, second };
            let layout = [LayoutId::BYTES, LayoutId::FIELDS, LayoutId::TOKEN][case % 3];
            let coding = CODINGS[case % 2];
            for plan in
                [plan(dtypes[0], update, coding), step_plan(dtypes[0], step, layout, coding)]
            {
                let inputs = &inputs[..1 + plan.plan.moments().len()];
                let first = encode(&engines[0], &view, &plan, inputs).unwrap();
                assert!(first.1.len() <= data.len());
                for engine in &engines {
                    assert!(encode(engine, &view, &plan, inputs).unwrap() == first, "{dtypes:?}");
                    for out in decode(engine, &view, &plan, inputs, &first).unwrap() {
                        assert!(out == data, "{dtypes:?} {number} {engine:?}");
                    }
                }
            }
        }
    }
}

/// Weights, their values a step before, and moments that predict the difference.
fn step(n: usize) -> [Vec<u8>; 4] {
    let noise = |i: usize, k: u64| {
        let x = (i as u64 + (k << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut out = [const { vec![] }; 4];
    for i in 0..n {
        let (w, m) = (0.1 * noise(i, 1), 0.01 * noise(i, 2) * (8.0 * noise(i, 3)).exp());
        let v = 1e-5 * (3.0 * noise(i, 4)).exp();
        for (to, x) in out.iter_mut().zip([w - 1e-4 * m / v.sqrt(), w, m, v]) {
            to.extend(x.to_le_bytes());
        }
    }
    out
}

#[test]
fn what_moments_say_makes_a_step_smaller_and_their_sign_does() {
    let [now, before, m, v] = step(60_000);
    let engine = CpuEngine::new(Simd::detect());
    let view = TensorView { dtype: DType::Float32, shape: &[60_000], data: &now };
    let told = plan(DType::Float32, UPDATE, PlaneCoding::RANS8);
    let len = |m: &[u8], v: &[u8]| {
        let encoded = encode(&engine, &view, &told, &[&before, m, v]).unwrap();
        for out in decode(&engine, &view, &told, &[&before, m, v], &encoded).unwrap() {
            assert!(out == now);
        }
        encoded.1.len()
    };
    let right = len(&m, &v);
    let opposite: Vec<u8> =
        m.iter().enumerate().map(|(i, b)| if i % 4 == 3 { b ^ 0x80 } else { *b }).collect();
    // The sign is known either way, if it is always the same; another tensor's says nothing.
    assert!(len(&opposite, &v) < right + right / 50);
    assert!(right + right / 12 < len(&before, &v), "{right}");
}

#[test]
fn a_first_moment_alone_tells_size_and_sign() {
    let [_, before, m, v] = step(60_000);
    // Momentum: the change is a part of the first moment.
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let now: Vec<u8> = before
        .chunks(4)
        .zip(m.chunks(4))
        .flat_map(|(w, m)| (float(w) - 0.03 * float(m)).to_le_bytes())
        .collect();
    let engine = CpuEngine::new(Simd::detect());
    let view = TensorView { dtype: DType::Float32, shape: &[60_000], data: &now };
    let single = Update { offset: 1300, second: None, ..UPDATE };
    let len = |update: Update, moments: &[&[u8]]| {
        let told = plan(DType::Float32, update, PlaneCoding::RANS8);
        let inputs = [&[&before[..]], moments].concat();
        let encoded = encode(&engine, &view, &told, &inputs).unwrap();
        for out in decode(&engine, &view, &told, &inputs, &encoded).unwrap() {
            assert!(out == now);
        }
        encoded.1.len()
    };
    let right = len(single, &[&m]);
    assert!(right + right / 12 < len(single, &[&before]), "{right}");
    assert!(right < len(UPDATE, &[&m, &v]), "{right}");
}

#[test]
fn chunks_of_fewer_values_than_their_tables_have_entries_come_back() {
    for n in (1..70).chain([255, 256, 257, 300, 513]) {
        let [now, before, m, v] = step(n);
        // Any other change, so that no context sees the same few symbols.
        let now: Vec<u8> = now.iter().zip(0u32..).map(|(b, i)| b ^ (i * i * 37) as u8).collect();
        let shape = [n as u64];
        let view = TensorView { dtype: DType::Float32, shape: &shape, data: &now };
        for coding in CODINGS {
            let plan = plan(DType::Float32, UPDATE, coding);
            for simd in Simd::available() {
                let engine = CpuEngine::new(simd);
                let encoded = encode(&engine, &view, &plan, &[&before, &m, &v]).unwrap();
                for out in decode(&engine, &view, &plan, &[&before, &m, &v], &encoded).unwrap() {
                    assert!(out == now, "{n} {coding:?} {simd}");
                }
            }
        }
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let [now, before, m, v] = step(5000);
    let engine = CpuEngine::new(Simd::detect());
    let view = TensorView { dtype: DType::Float32, shape: &[5000], data: &now };
    let update = Update { floor: 0, ..UPDATE };
    let plan_of = |update| plan(DType::Float32, update, PlaneCoding::RANS8);
    let good = plan_of(update);
    let encoded = encode(&engine, &view, &good, &[&before, &m, &v]).unwrap();
    let narrow = plan_of(Update { second: Some(DType::BFloat16), ..update });
    // A wrong offset is found by the checksum of the values.
    let other = plan_of(Update { offset: 8800, ..update });
    check_refusals(&engine, &view, [&good, &narrow, &other], [&before, &m, &v], &encoded);
}

/// Checks that nothing is encoded or decoded from inputs that do not fit, by a plan with moments of another dtype, without
/// side data, or with other constants.
fn check_refusals(
    engine: &CpuEngine,
    view: &TensorView<'_>,
    [good, narrow, other]: [&TensorPlan; 3],
    [before, m, v]: [&[u8]; 3],
    encoded: &(ChunkRecord, Vec<u8>),
) {
    let mut bare = good.clone();
    bare.side = Default::default();
    for (plan, inputs) in [
        (good, &[before, m][..]),
        (good, &[before]),
        (good, &[before, &m[4..], v]),
        (good, &[before, m, &v[..10_000]]),
        (narrow, &[before, m, v]),
        (&bare, &[before, m, v]),
    ] {
        assert!(encode(engine, view, plan, inputs).is_err());
    }
    for (plan, inputs) in [
        (good, [before, &m[4..], v]),
        (good, [before, m, &v[..10_000]]),
        (narrow, [before, m, v]),
        (&bare, [before, m, v]),
        // Swapped moments: the result is not what was stored.
        (good, [before, v, m]),
        (other, [before, m, v]),
    ] {
        assert!(decode(engine, view, plan, &inputs, encoded).is_err());
    }
}

#[test]
fn a_step_leaves_next_to_nothing_and_needs_what_it_was_taken_from() {
    let [now, before, m, v] = step(60_000);
    let engine = CpuEngine::new(Simd::detect());
    let view = TensorView { dtype: DType::Float32, shape: &[60_000], data: &now };
    let factors = StepFactors { keep: 1.0, rate: 1e-4, epsilon: 0.0 };
    let by = |factors, second| {
        let step = Step { factors, first: DType::Float32, second: Some(second) };
        step_plan(DType::Float32, step, LayoutId::BYTES, PlaneCoding::RANS8)
    };
    let good = by(factors, DType::Float32);
    let encoded = encode(&engine, &view, &good, &[&before, &m, &v]).unwrap();
    assert!(encoded.1.len() < 60_000 / 4, "{}", encoded.1.len());
    for out in decode(&engine, &view, &good, &[&before, &m, &v], &encoded).unwrap() {
        assert!(out == now);
    }
    let narrow = by(factors, DType::BFloat16);
    let other = by(StepFactors { rate: 2e-4, ..factors }, DType::Float32);
    check_refusals(&engine, &view, [&good, &narrow, &other], [&before, &m, &v], &encoded);
}
