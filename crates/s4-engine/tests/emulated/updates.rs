//! The kernels for weights that are predicted from moments, or have contexts from them, compared with the CPU engine.

use s4_codec_cpu::rans::{Precision, parse_tables};
use s4_engine::{
    CpuEngine, EncodeJob, EncodedChunk, MomentSample, ParentSample, PlanJob, PlaneCoding, Preset,
    Scratch, TensorPlan, TensorView, chunk_log2, parent_probes,
};
use s4_format::layout::Planes;
use s4_format::side::SideKind;
use s4_format::{
    CodecId, DType, Digest, Error, LayoutId, Plan, PredictorId, ResidualId, StreamEntry, crc32c,
};
use s4_planes::patterns::{self, Kind as Pattern};
use s4_planes::{Simd, StepFactors};
use s4_predict::{Step, Update};

use super::{
    Answers, CORRUPT, Contexts, Decode, Encode, Jobs, Kind, MAX_PLANES, OK, Predicted, UNSUPPORTED,
    codings, shared_table,
};

const ALL: [(DType, Pattern); 3] = [
    (DType::Float32, Pattern::F32),
    (DType::BFloat16, Pattern::BF16),
    (DType::Float16, Pattern::F16),
];

/// `kPredictStep`.
const STEP: u8 = 6;

/// A chunk of weights, their values a step before, and their moments.
struct Case {
    name: String,
    dtype: DType,
    plan: TensorPlan,
    values: Vec<u8>,
    inputs: [Vec<u8>; 3],
    coded: EncodedChunk,
    frame: Vec<u8>,
}

fn forced(dtype: DType, update: Update, codings: &[PlaneCoding]) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(update.second.is_some())];
    let plan = Plan::update(Digest::of(b"parent"), 3, moments);
    let planes = codings.iter().copied().cycle().take(dtype.value_width()).collect();
    let mut plan = TensorPlan::new(plan, planes, chunk_log2(dtype));
    plan.side.push(SideKind::CONTEXTS, update.to_bytes()).unwrap();
    plan
}

/// A plan that takes a step, and codes its planes in turn as given.
fn forced_step(dtype: DType, step: Step, layout: LayoutId, codings: &[PlaneCoding]) -> TensorPlan {
    let moments = &[4, 5][..1 + usize::from(step.second.is_some())];
    let plan = Plan::step(layout, Digest::of(b"parent"), 3, moments);
    let planes = Planes::new(layout, dtype.value_width(), 0).unwrap().sizes().len();
    let planes = codings.iter().copied().cycle().take(planes).collect();
    let mut plan = TensorPlan::new(plan, planes, chunk_log2(dtype));
    plan.side.push(SideKind::STEP, step.to_bytes()).unwrap();
    plan
}

impl Case {
    /// `None`: the CPU has no room for the tables of so few values, which no planner plans.
    fn new(
        name: String,
        dtype: DType,
        plan: TensorPlan,
        values: Vec<u8>,
        inputs: [Vec<u8>; 3],
    ) -> Option<Self> {
        let n = (values.len() / dtype.value_width()) as u64;
        let view = TensorView { dtype, shape: &[n], data: &values };
        let given = inputs.each_ref().map(|i| &i[..]);
        let given = &given[..1 + plan.plan.moments().len()];
        let job = EncodeJob { view: &view, plan: &plan, chunk: 0, inputs: given };
        let mut frame = vec![];
        let cpu = CpuEngine::new(Simd::detect());
        let coded = match cpu.encode(&job, &mut Scratch::default(), &mut frame) {
            Err(Error::Limit { .. }) if n < 2000 => return None,
            coded => coded.unwrap(),
        };
        Some(Self { name, dtype, plan, values, inputs, coded, frame })
    }

    fn is_step(&self) -> bool {
        self.plan.plan.predictor == PredictorId::STEP
    }

    fn kind(&self) -> Kind {
        if self.is_step() { Kind::Predicted } else { Kind::Update }
    }

    /// `Update` or `Step`, as the kernels read them; `one`: a mask of planes with one table.
    fn by_moments(&self, one: u8) -> Vec<u8> {
        let number = |d: DType| match d {
            DType::BFloat16 => 1,
            DType::Float16 => 2,
            _ => 3,
        };
        if self.is_step() {
            let step = Step::parse(self.plan.side.get(SideKind::STEP)).unwrap();
            let Step { factors, first, second } = step;
            let StepFactors { keep, rate, epsilon } = factors;
            let mut out = [keep, rate, epsilon].map(f32::to_le_bytes).concat();
            out.extend([number(self.dtype), number(first), second.map_or(0, number), 0]);
            return out;
        }
        let update = Update::parse(self.plan.side.get(SideKind::CONTEXTS)).unwrap();
        let Update { floor, offset, first, second } = update;
        let mut out = [floor.to_le_bytes(), offset.to_le_bytes()].concat();
        out.extend([number(self.dtype), number(first), second.map_or(0, number), one]);
        out
    }

    /// The shared tables of each plane, as the kernels read them, and how many there are.
    fn tables(&self) -> (Contexts, Vec<u8>) {
        let side = self.plan.side_data(true).unwrap();
        let (mut counts, mut all) = ([0; MAX_PLANES], vec![]);
        if let Some((lens, mut rest)) = side.get(SideKind::TABLES).split_at_checked(4 * MAX_PLANES)
        {
            for (i, len) in lens.chunks_exact(4).enumerate() {
                let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
                let (bytes, later) = rest.split_at(len);
                rest = later;
                if len > 0 {
                    let precision = Precision::from_param(self.plan.planes[i].param).unwrap();
                    let tables = parse_tables(precision, bytes).unwrap();
                    counts[i] = tables.len() as u8;
                    all.extend(tables.iter().flat_map(shared_table));
                }
            }
        }
        (Contexts { tables: Some(counts), ..Contexts::default() }, all)
    }

    fn told(&self, contexts: &Contexts, in_place: bool) -> Predicted {
        // Planes with contexts share a table for each context.
        let counts = contexts.tables.unwrap();
        let one = (0..MAX_PLANES).fold(0, |bits, i| bits | u8::from(counts[i] == 1) << i);
        let has_second = self.plan.plan.moments().len() == 2;
        Predicted {
            prediction: if self.is_step() { STEP } else { 1 },
            sparse: true,
            contexts: if self.is_step() { 0 } else { 2 },
            offsets: self.inputs[1].clone(),
            columns: if has_second { self.inputs[2].clone() } else { vec![] },
            by_moments: self.by_moments(one),
            in_place,
            ..Predicted::default()
        }
    }

    fn encode(&self, skew: u32) -> Encode {
        let (contexts, tables) = self.tables();
        let predicted = self.told(&contexts, false);
        Encode {
            kind: self.kind(),
            width: self.dtype.value_width(),
            layout: self.plan.plan.layout,
            residual: self.plan.plan.residual.0,
            coding: codings(&self.plan).unwrap(),
            flags: 0,
            skew,
            tables,
            values: self.values.clone(),
            parent: self.inputs[0].clone(),
            contexts,
            predicted,
        }
    }

    fn decode(&self, skew: u32, in_place: bool) -> Decode {
        let (contexts, tables) = self.tables();
        let mut predicted = self.told(&contexts, in_place);
        // A stream says itself how many tables it has.
        if !self.is_step() {
            predicted.by_moments[7] = 0;
        }
        Decode {
            kind: self.kind(),
            width: self.dtype.value_width(),
            layout: self.plan.plan.layout,
            residual: self.plan.plan.residual.0,
            plain: self.coded.plain,
            n: self.values.len() / self.dtype.value_width(),
            check: true,
            crc_encoded: self.coded.crc_encoded,
            crc_raw: self.coded.crc_raw,
            skew,
            tables,
            frame: self.frame.clone(),
            parent: self.inputs[0].clone(),
            contexts,
            predicted,
        }
    }
}

/// Encodes and decodes cases by the kernels: the CPU's bytes, and the values.
fn compare(file: &'static str, cases: &[Case]) {
    let skew = |i: usize| (i % 3 * cases[i].dtype.value_width()) as u32;
    let mut jobs = Jobs::new(file);
    jobs.encode(&cases.iter().enumerate().map(|(i, c)| c.encode(skew(i))).collect::<Vec<_>>());
    let decode: Vec<_> =
        cases.iter().enumerate().map(|(i, c)| c.decode(skew(i), i % 2 == 1)).collect();
    assert_eq!(jobs.decode(&decode).len(), cases.len());
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for (case, got) in cases.iter().zip(encoded) {
        let (what, e) = (&case.name, &case.coded);
        let streams = e.streams.iter().take(got.streams.len()).copied().collect::<Vec<_>>();
        assert_eq!((got.status, got.plain, got.shared), (0, e.plain, e.shared), "{what}");
        assert_eq!(got.streams, streams, "{what}");
        assert!(got.frame == case.frame, "{what}: the frame differs");
        assert_eq!((got.crc_raw, got.crc_encoded), (e.crc_raw, e.crc_encoded), "{what}");
        assert_eq!(got.crc_raw, crc32c(&case.values), "{what}");
    }
    for (case, (status, values)) in cases.iter().zip(decoded) {
        assert_eq!(*status, OK, "{}", case.name);
        assert!(*values == case.values, "{}: the values differ", case.name);
    }
}

/// Number of tables of every coded stream of some cases.
fn tables_of(cases: &[Case]) -> Vec<u8> {
    let coded = cases.iter().filter(|c| !c.coded.plain);
    let each = coded.flat_map(|c| {
        let planes = Planes::new(c.plan.plan.layout, c.dtype.value_width(), 0).unwrap();
        let list = StreamEntry::parse_chunk(&c.frame, planes.sizes().len()).unwrap();
        let rans = list.items().iter().filter(|(e, _)| e.codec == CodecId::RANS);
        rans.map(|(_, bytes)| bytes[6]).collect::<Vec<_>>()
    });
    each.collect()
}

/// Every mix of dtypes, with values of every kind: NaNs, infinities, denormals, zeros of both signs.
#[test]
fn weights_are_told_as_on_the_cpu() {
    let mut cases = vec![];
    for (w, m, v) in (0..27).map(|i| (i % 3, i / 3 % 3, i / 9)) {
        let dtypes = [w, m, v].map(|i| ALL[i].0);
        for (k, n) in [1, 3, 8, 257, 2100, 9001].into_iter().enumerate() {
            let lists = [w, m, v].map(|i| patterns::all(ALL[i].1, n).collect::<Vec<_>>());
            for number in 0..lists[0].len() {
                let of = |i: usize, by: usize| {
                    let list = &lists[i];
                    list[(number + by) % list.len()].1.clone()
                };
                let case = cases.len();
                if n > 300 && number % 5 != (w + m + k) % 5 {
                    continue;
                }
                let (floor, offset) =
                    [(0, 0), (-3000, 9000), (i16::MIN, 2000), (i16::MIN, i16::MIN)][case % 4];
                // SGD and Lion have no second moment.
                let (first, second) = (dtypes[1], (case % 5 > 0).then_some(dtypes[2]));
                let update = Update { floor, offset, first, second };
                let codings: &[PlaneCoding] = match case % 5 {
                    0 => &[PlaneCoding::RANS12],
                    1 => &[PlaneCoding::RANS8, PlaneCoding::RAW],
                    _ => &[PlaneCoding::RANS8],
                };
                let plan = forced(dtypes[0], update, codings);
                let inputs = [of(0, 1 + case % 4), of(1, case % 7), of(2, case % 5)];
                let name = format!("{case}: {} {n} {dtypes:?}", lists[0][number].0);
                cases.extend(Case::new(name, dtypes[0], plan, of(0, 0), inputs));
            }
        }
    }
    for width in [2, 4] {
        for n in [1, 3, 8, 257, 2100, 9001] {
            assert!(cases.iter().any(|c| c.values.len() == n * width), "{n} of {width}");
        }
    }
    compare("updates", &cases);
    let tables = tables_of(&cases);
    assert!([1, 2, 16].iter().all(|t| tables.contains(t)), "{tables:?}");
    assert!(tables.iter().any(|t| (3..16).contains(t)), "{tables:?}");
    assert!(cases.iter().any(|c| c.coded.plain));
}

/// Every mix of dtypes and every layout, with values of every kind: NaNs, infinities, denormals, zeros of both signs.
#[test]
fn steps_are_taken_as_on_the_cpu() {
    let mut cases = vec![];
    for (w, m, v) in (0..27).map(|i| (i % 3, i / 3 % 3, i / 9)) {
        let dtypes = [w, m, v].map(|i| ALL[i].0);
        for (k, n) in [1, 3, 8, 257, 2100, 9001].into_iter().enumerate() {
            let lists = [w, m, v].map(|i| patterns::all(ALL[i].1, n).collect::<Vec<_>>());
            let real = step(dtypes, n, true);
            for number in 0..=lists[0].len() {
                let case = cases.len();
                if n > 300 && number % 5 != (w + m + k) % 5 {
                    continue;
                }
                let of = |i: usize, by: usize| {
                    let list = &lists[i];
                    list[(number + by) % list.len()].1.clone()
                };
                let [keep, rate, epsilon] =
                    [[0.9999, 1e-4, 1e-8], [1.0, 1.0, 0.0], [-2.0, 1e30, 1e-30], [1e30, -0.5, 3.0]]
                        [case % 4];
                let factors = StepFactors { keep, rate, epsilon };
                // SGD has no second moment.
                let second = (case % 5 > 0).then_some(dtypes[2]);
                let by = Step { factors, first: dtypes[1], second };
                let codings: &[PlaneCoding] = match case % 3 {
                    0 => &[PlaneCoding::RANS12],
                    1 => &[PlaneCoding::RANS8, PlaneCoding::RAW],
                    _ => &[PlaneCoding::RANS8],
                };
                let layout = [LayoutId::BYTES, LayoutId::FIELDS, LayoutId::WHOLE][case % 3];
                let (values, inputs) = match number < lists[0].len() {
                    true => (of(0, 0), [of(0, 1 + case % 4), of(1, case % 7), of(2, case % 5)]),
                    false => {
                        let [now, before, first, second] = real.clone();
                        (now, [before, first, second])
                    }
                };
                let name = format!("step {case}: {number} {n} {dtypes:?} {factors:?}");
                let plan = forced_step(dtypes[0], by, layout, codings);
                cases.extend(Case::new(name, dtypes[0], plan, values, inputs));
            }
        }
    }
    compare("steps", &cases);
    assert!(
        cases.iter().any(|c| c.coded.plain)
            && cases.iter().filter(|c| !c.coded.plain).count() > 300
    );
    // What is predicted exactly takes next to nothing.
    let dtypes = [DType::Float32; 3];
    let [now, before, first, second] = step(dtypes, 9001, true);
    let factors = StepFactors { keep: 1.0, rate: 1e-4, epsilon: 0.0 };
    let by = Step { factors, first: DType::Float32, second: Some(DType::Float32) };
    let plan = forced_step(DType::Float32, by, LayoutId::BYTES, &[PlaneCoding::RANS8]);
    let exact = Case::new("exact".into(), dtypes[0], plan, now, [before, first, second]).unwrap();
    assert!(exact.frame.len() < 9001 / 4, "{}", exact.frame.len());
}

/// Weights after a step, before it, and the moments that predict the difference: exactly, or its size and sign.
fn step(dtypes: [DType; 3], n: usize, exactly: bool) -> [Vec<u8>; 4] {
    let noise = |i: usize, k: u64| {
        let x = (i as u64 + (k << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut out = [const { vec![] }; 4];
    for i in 0..n {
        let (w, m) = (0.1 * noise(i, 1), 0.01 * noise(i, 2) * (8.0 * noise(i, 3)).exp());
        let v = 1e-5 * (3.0 * noise(i, 4)).exp();
        let more = if exactly { 1.0 } else { (3.0 * noise(i, 5)).exp() };
        for (to, x) in out.iter_mut().zip([w - more * 1e-4 * m / v.sqrt(), w, m, v]) {
            to.extend(x.to_le_bytes());
        }
    }
    let kernels = s4_planes::Kernels::default();
    let [w, m, v] = dtypes;
    for (bytes, dtype) in out.iter_mut().zip([w, w, m, v]) {
        let wide = std::mem::take(bytes);
        *bytes = vec![0; if dtype == DType::Float32 { 0 } else { wide.len() / 2 }];
        match dtype {
            DType::BFloat16 => kernels.to_bf16(&wide, bytes),
            DType::Float16 => kernels.to_fp16(&wide, bytes),
            _ => *bytes = wide,
        }
    }
    out
}

/// The planner's choice for a tensor of several chunks: tables that they share.
fn planned([w, m, v]: [DType; 3], [now, before, first, second]: &[Vec<u8>; 4]) -> TensorPlan {
    let n = now.len() / w.value_width();
    let sample = |bytes: &[u8], dtype: DType| {
        let width = dtype.value_width();
        let probes = parent_probes(w, n as u64).into_iter();
        probes
            .flat_map(|r| bytes[r.start as usize * width..r.end as usize * width].to_vec())
            .collect::<Vec<_>>()
    };
    let [values, first, second] = [sample(before, w), sample(first, m), sample(second, v)];
    let moment = |tensor, dtype, values| MomentSample { tensor, dtype, values };
    let moments = &[moment(4, m, &first[..]), moment(5, v, &second[..])];
    let manifest = Digest::of(b"parent");
    let parent = ParentSample { manifest, tensor: 3, values: &values, moments, expected: None };
    let view = TensorView { dtype: w, shape: &[n as u64], data: now };
    let job = PlanJob { parent: Some(&parent), ..PlanJob::new(Preset::Small, &view) };
    CpuEngine::new(Simd::detect()).plan(&job, &mut Scratch::default()).unwrap()
}

#[test]
fn chunks_use_the_tables_that_their_tensor_shares() {
    let mut cases = vec![];
    for (w, m, v) in [(0, 0, 0), (0, 1, 1), (1, 1, 0), (2, 1, 2)] {
        let dtypes = [w, m, v].map(|i| ALL[i].0);
        // A chunk, and some of the next one.
        let n = (1 << chunk_log2(dtypes[0])) + 5003;
        let all = step(dtypes, n, false);
        let plan = planned(dtypes, &all);
        assert_eq!(plan.plan.residual, ResidualId::DESCENT, "{dtypes:?}");
        let part = |first: usize, end: usize| {
            let widths = [w, w, m, v].map(|i| ALL[i].0.value_width());
            let cut = |i: usize| all[i][first * widths[i]..end * widths[i]].to_vec();
            (cut(0), [cut(1), cut(2), cut(3)])
        };
        for (first, end) in [(0, if w == 0 { n - 5003 } else { 70_000 }), (n - 5003, n), (7, 8)] {
            let (values, inputs) = part(first, end);
            let name = format!("{dtypes:?} {first}..{end}");
            cases.extend(Case::new(name, dtypes[0], plan.clone(), values, inputs));
        }
        // Symbols that the tables do not expect.
        for (pattern, values) in patterns::all(ALL[w].1, 3001) {
            let (_, inputs) = part(0, 3001);
            let name = format!("{dtypes:?} {pattern}");
            cases.extend(Case::new(name, dtypes[0], plan.clone(), values, inputs));
        }
    }
    compare("updates-shared", &cases);
    let tables = tables_of(&cases);
    assert!(tables.contains(&16) && tables.contains(&1), "{tables:?}");
    assert!(cases.iter().any(|c| c.coded.shared));
}

#[test]
fn descriptors_and_streams_that_do_not_fit_are_refused() {
    let dtypes = [DType::Float32, DType::BFloat16, DType::Float32];
    let [now, before, m, v] = step(dtypes, 6000, true);
    let (first, second) = (dtypes[1], Some(dtypes[2]));
    let update = Update { floor: i16::MIN, offset: 8300, first, second };
    let plan = forced(dtypes[0], update, &[PlaneCoding::RANS8]);
    let good = Case::new("good".into(), dtypes[0], plan, now, [before, m, v]).unwrap();
    assert!(tables_of(std::slice::from_ref(&good))[0] > 10);
    type Change = fn(&mut Encode);
    let wrong: [Change; 12] = [
        |e| e.predicted.contexts = 1,
        |e| e.predicted.contexts = 0,
        |e| e.predicted.prediction = 0,
        |e| e.residual = ResidualId::SUB.0,
        |e| e.layout = LayoutId::FIELDS,
        |e| e.parent.clear(),
        |e| e.predicted.offsets.clear(),
        |e| e.predicted.columns.clear(),
        // Weights of another width, and types that are not floats.
        |e| e.predicted.by_moments[4] = 1,
        |e| e.predicted.by_moments[4] = 0,
        |e| e.predicted.by_moments[5] = 4,
        |e| e.predicted.by_moments[6] = 4,
    ];
    let encode = wrong.map(|change| {
        let mut e = good.encode(0);
        change(&mut e);
        e
    });
    // Fewer tables than contexts, and missing tables.
    let at = StreamEntry::header_len(4).next_multiple_of(16);
    let mut decode = vec![];
    for (offset, with) in [(6, 15), (6, 1), (6, 0), (6, 17), (7, 1)] {
        let mut d = good.decode(0, false);
        d.check = false;
        d.frame[at + offset] = with;
        decode.push(d);
    }
    // Arbitrary bytes: whatever comes out, nothing is read or written out of bounds.
    for i in 0..200usize {
        let mut d = good.decode((i % 3) as u32 * 4, i % 2 == 1);
        d.check = false;
        let place = at + i * 7919 % (d.frame.len() - at);
        d.frame[place] ^= 1 << (i % 8);
        decode.push(d);
    }
    for (i, status) in refused("updates-refused", &good, &encode, &decode).into_iter().enumerate() {
        // No damage goes unnoticed: the values are compared with their checksum.
        assert_ne!(status, OK, "number {i}");
        assert!(i >= 5 || status == CORRUPT, "number {i}: {status}");
    }
}

/// Checks that the kernels encode none of these chunks, and do not decode a case from moments of other values. Returns
/// the statuses of the chunks to decode.
fn refused(file: &'static str, good: &Case, encode: &[Encode], decode: &[Decode]) -> Vec<u32> {
    let mut other = good.decode(0, false);
    std::mem::swap(&mut other.parent, &mut other.predicted.columns);
    let mut jobs = Jobs::new(file);
    jobs.encode(encode);
    assert_eq!(jobs.decode(decode).len(), decode.len());
    jobs.decode(&[other]);
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded), Answers::Decoded(other)] =
        &answers[..]
    else {
        panic!()
    };
    assert_eq!(encoded.len(), encode.len());
    for (i, e) in encoded.iter().enumerate() {
        assert_eq!(u32::from(e.status), UNSUPPORTED, "number {i}");
    }
    assert_ne!(other[0].0, OK);
    decoded.iter().map(|(status, _)| *status).collect()
}

#[test]
fn steps_that_do_not_fit_are_refused() {
    let dtypes = [DType::Float32, DType::BFloat16, DType::Float32];
    let [now, before, m, v] = step(dtypes, 6000, true);
    let factors = StepFactors { keep: 1.0, rate: 1e-4, epsilon: 0.0 };
    let by = Step { factors, first: dtypes[1], second: Some(dtypes[2]) };
    let plan = forced_step(dtypes[0], by, LayoutId::BYTES, &[PlaneCoding::RANS8]);
    let good = Case::new("good".into(), dtypes[0], plan, now, [before, m, v]).unwrap();
    let wrong: [fn(&mut Predicted, &mut Vec<u8>, &mut u8); 8] = [
        |_, parent, _| parent.clear(),
        |p, _, _| p.offsets.clear(),
        |p, _, _| p.columns.clear(),
        |_, _, residual| *residual = ResidualId::XOR.0,
        // Weights of another width, and types that are not floats.
        |p, _, _| p.by_moments[12] = 1,
        |p, _, _| p.by_moments[12] = 0,
        |p, _, _| p.by_moments[13] = 4,
        |p, _, _| p.by_moments[14] = 4,
    ];
    let encode = wrong.map(|change| {
        let mut e = good.encode(0);
        change(&mut e.predicted, &mut e.parent, &mut e.residual);
        e
    });
    let decode = wrong.map(|change| {
        let mut d = good.decode(0, false);
        d.check = false;
        change(&mut d.predicted, &mut d.parent, &mut d.residual);
        d
    });
    let statuses = refused("steps-refused", &good, &encode, &decode);
    assert_eq!(statuses, [UNSUPPORTED; 8]);
}
