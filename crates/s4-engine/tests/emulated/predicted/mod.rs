//! The kernels for any prediction: the predictions, the residuals, and the contexts of the residuals.

mod reference;

use s4_codec_cpu::rans::{Counts, Precision, Table};
use s4_engine::{CpuEngine, EncodeJob, PlaneCoding, Scratch, TensorPlan, TensorView};
use s4_format::{CodecId, DType, LayoutId, Plan, StreamEntry, crc32c};
use s4_planes::patterns::{self, Kind as Pattern};
use s4_planes::{Simd, Width};

use super::{Answers, CORRUPT, Encode, Jobs, OK, UNSUPPORTED};
use reference::{BF16, Case, Expected, F16, INPUT, MAGNITUDE, Offsets, SUB, XOR};

/// Encodes and decodes cases by the kernels, and compares.
fn compare(file: &'static str, cases: &[Case]) -> Vec<Expected> {
    let expected: Vec<_> = cases.iter().map(Case::expected).collect();
    let skew = |i: usize| (i % 3 / 2 * cases[i].width) as u32;
    let mut jobs = Jobs::new(file);
    let encode: Vec<_> = cases.iter().enumerate().map(|(i, c)| c.encode(skew(i))).collect();
    let decode: Vec<_> = (0..cases.len())
        .map(|i| {
            // A parent's values may lie where the chunk's go.
            let in_place = cases[i].prediction == INPUT && i % 2 == 1;
            cases[i].decode(&expected[i], skew(i), in_place)
        })
        .collect();
    jobs.encode(&encode);
    assert_eq!(jobs.decode(&decode).len(), cases.len());
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for ((case, e), got) in cases.iter().zip(&expected).zip(encoded) {
        let what = case.what();
        assert_eq!((got.status, got.plain), (0, e.plain), "{what}");
        assert_eq!(got.streams, e.streams, "{what}");
        assert!(got.frame == e.frame, "{what}: the frame differs");
        assert_eq!((got.shared, got.crc_raw), (e.shared, crc32c(&case.values)), "{what}");
    }
    for (case, (status, values)) in cases.iter().zip(decoded) {
        assert_eq!(*status, OK, "{}", case.what());
        assert!(*values == case.values, "{}: the values differ", case.what());
    }
    expected
}

fn noise(i: u64) -> u64 {
    (i ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17
}

fn kind_of(width: usize) -> Pattern {
    match width {
        1 => Pattern::int(Width::B1),
        2 => Pattern::BF16,
        4 => Pattern::F32,
        _ => Pattern::F64,
    }
}

/// Values that are nearly those of `of`: most differ little, some much.
fn near(of: &[u8], width: usize) -> Vec<u8> {
    let mut out = of.to_vec();
    for (i, v) in out.chunks_mut(width).enumerate() {
        match noise(i as u64) % 16 {
            0 => v[width - 1] ^= 0x81,
            1..6 => {}
            k => v[0] = v[0].wrapping_add(k as u8).wrapping_sub(9),
        }
    }
    out
}

fn layouts(width: usize) -> Vec<LayoutId> {
    let mut all = vec![LayoutId::WHOLE, LayoutId::BYTES];
    if width > 1 {
        all.extend([LayoutId::FIELDS, LayoutId::FIELDS_SIGN]);
    }
    all
}

/// Offsets whose rows and columns hold `n` values from index `first` on.
fn offsets(width: usize, cols: usize, first: u64, n: usize) -> Offsets {
    let bits = 8 * width as u32;
    let rows = (first as usize + n).div_ceil(cols);
    let of = |i: u64, seed: u64| match noise(i + seed) % 23 {
        0 => i16::MIN,
        1 => i16::MAX,
        2 => i16::MIN + 1,
        k => (k as i16 - 12) * 17,
    };
    let shift = [0, 0, 0, 0, 14, 0, 0, 0, 43][width];
    Offsets {
        base: 0x3f << (bits - 9) | 5,
        shift,
        rows: (0..rows as u64).map(|i| of(i, 3)).collect(),
        cols: (0..cols as u64).map(|i| of(i, 99)).collect(),
    }
}

#[test]
fn rows_and_columns_predict_as_specified() {
    let mut cases = vec![];
    for width in [2, 4, 8] {
        let mut some = 0;
        for (cols, first) in
            [(1, 0), (7, 3), (8, 65536), (24, 65541), (1000, 65536), (100_000, 65536)]
        {
            for n in [1, 5, 16, 257, 2100] {
                let patterns: Vec<_> = patterns::all(kind_of(width), n).collect();
                let (name, values) = &patterns[some % patterns.len()];
                some += 1;
                for layout in layouts(width) {
                    let o = offsets(width, cols, first, n);
                    // Values near their prediction, too.
                    let like = |i: u64| o.predict(first + i, 8 * width as u32) ^ (noise(i) % 64);
                    let close: Vec<u8> = (0..n as u64)
                        .flat_map(|i| like(i).to_le_bytes()[..width].to_vec())
                        .collect();
                    for values in [values, &close] {
                        let case = Case::new(name, width, layout, values.clone())
                            .with_offsets(o.clone(), first);
                        let codings: &[u8] =
                            if layout == LayoutId::FIELDS_SIGN { &[0, 8, 7, 0] } else { &[8, 0] };
                        cases.push(case.clone().coded(codings));
                        cases.push(case.coded(&[12, 8, 12, 8]));
                    }
                }
            }
        }
        // More than is counted as a whole, in several segments.
        let o = offsets(width, 768, 65536 * 3 + 5, 20_000);
        let like = |i: u64| o.predict(65536 * 3 + 5 + i, 8 * width as u32) ^ (noise(i) % 640);
        let values = (0..20_000).flat_map(|i| like(i).to_le_bytes()[..width].to_vec()).collect();
        let case =
            Case::new("long", width, LayoutId::FIELDS_SIGN, values).with_offsets(o, 65536 * 3 + 5);
        cases.push(case.coded(&[0, 8, 8, 0]));
    }
    let expected = compare("offsets", &cases);
    let coded = expected.iter().filter(|e| !e.plain).count();
    assert!(coded > cases.len() / 4, "{coded} of {} are coded", cases.len());
}

#[test]
fn rows_of_zeros_stay_constant() {
    let o = Offsets { base: 1000, shift: 14, rows: vec![i16::MIN; 4], cols: (0..600).collect() };
    let case = Case::new("zeros", 4, LayoutId::FIELDS_SIGN, vec![0; 4 * 2400]).with_offsets(o, 0);
    let [e] = &compare("zero-rows", &[case])[..] else { panic!() };
    assert!(!e.plain && e.streams.iter().all(|s| s.codec == CodecId::CONST), "{:?}", e.streams);
}

#[test]
fn inputs_predict_as_specified() {
    let mut cases = vec![];
    for width in [1, 2, 4, 8] {
        for n in [1, 3, 255, 2100] {
            for (name, values) in patterns::all(kind_of(width), n) {
                for (k, layout) in layouts(width).into_iter().enumerate() {
                    let residual = if (k + n) % 2 == 0 { XOR } else { SUB };
                    let input = near(&values, width);
                    let case = Case::new(name, width, layout, values.clone());
                    cases
                        .push(case.with_input(INPUT, residual, &input).coded(&[[8, 12][n % 2]; 1]));
                }
            }
        }
        // The same values: every plane is constant.
        let values = patterns::all(kind_of(width), 3000).next().unwrap().1;
        let case = Case::new("same", width, layouts(width).pop().unwrap(), values.clone());
        cases.push(case.with_input(INPUT, XOR, &values));
    }
    // Differences with all symbols counted, and with long segments.
    for (n, coding) in [(9001, 8), ((1 << 16) + 300, 12)] {
        let values = patterns::all(Pattern::BF16, n).find(|p| p.0 == "like-weights").unwrap().1;
        let mut case = Case::new("sparse", 2, LayoutId::FIELDS, values.clone());
        case.sparse = true;
        cases.push(case.with_input(INPUT, SUB, &near(&values, 2)).coded(&[coding]));
    }
    let expected = compare("inputs", &cases);
    let same =
        expected.iter().filter(|e| e.streams.iter().all(|s| s.codec == CodecId::CONST) && !e.plain);
    assert!(same.count() >= 4);
}

#[test]
fn rounded_copies_are_nothing_but_their_exceptions() {
    let mut cases = vec![];
    // Every exponent with mantissas around ties, and random ones.
    let mut wide: Vec<u32> = vec![];
    for exponent in 0..512u32 {
        for mantissa in [
            0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000,
            0x7f_ffff,
        ] {
            wide.push(exponent << 23 | mantissa);
        }
    }
    wide.extend((0..3000).map(|i| noise(i) as u32));
    let input: Vec<u8> = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
    for prediction in [BF16, F16] {
        let mut case = Case::new("rounded", 2, LayoutId::FIELDS, vec![0; 2 * wide.len()]);
        case = case.with_input(prediction, XOR, &input);
        let rounded: Vec<u8> =
            case.predicted().iter().flat_map(|x| (*x as u16).to_le_bytes()).collect();
        for (name, every) in
            [("all", usize::MAX), ("few differ", 997), ("one differs", wide.len() - 1)]
        {
            case.name = name.into();
            case.values = rounded.clone();
            (0..wide.len()).step_by(every).skip(1).for_each(|i| case.values[2 * i] ^= 1);
            for layout in layouts(2) {
                cases.push(Case { layout, ..case.clone() }.coded(&[8]));
            }
        }
        // Rust's own rounding gives the same, except for NaNs.
        let finite = |x: &u32| !f32::from_bits(*x).is_nan();
        if prediction == BF16 {
            let as_f32 = |x: u64| f32::from_bits((x as u32) << 16);
            for (x, p) in wide.iter().zip(case.predicted()).filter(|(x, _)| finite(x)) {
                let (x, p) = (f32::from_bits(*x), as_f32(p));
                let next = |d: i32| f32::from_bits(p.to_bits().wrapping_add_signed(d << 16));
                let error = (f64::from(x) - f64::from(p)).abs();
                let others = [next(-1), next(1)].into_iter().filter(|v| v.is_finite());
                assert!(
                    !p.is_finite()
                        || others.map(|v| (f64::from(x) - f64::from(v)).abs()).all(|e| error <= e)
                );
            }
        }
    }
    let expected = compare("rounded", &cases);
    assert!(
        expected.iter().filter(|e| e.streams.iter().all(|s| s.codec == CodecId::CONST)).count()
            >= 4
    );
}

/// Cases with contexts: `n` values that a step changed.
fn with_contexts(width: usize, n: usize, class: (u8, u8), sparse: bool) -> Vec<Case> {
    let mut cases = vec![];
    for name in ["like-weights", "like-squares", "random", "zeros", "weights-and-nans"] {
        let Some((_, values)) = patterns::all(kind_of(width), n).find(|p| p.0 == name) else {
            continue;
        };
        for layout in [LayoutId::FIELDS, LayoutId::FIELDS_SIGN] {
            for coding in [[8, 8, 0, 0], [12, 12, 12, 12], [12, 8, 12, 0]] {
                let case = Case::new(name, width, layout, values.clone());
                let case = case.with_input(INPUT, SUB, &near(&values, width)).coded(&coding);
                cases.push(Case { class: Some(class), sparse, ..case });
            }
        }
    }
    cases
}

#[test]
fn exponents_of_the_input_tell_the_tables() {
    let mut cases = vec![];
    for width in [2, 4, 8] {
        for n in [1, 9, 700, 9001] {
            cases.extend(with_contexts(width, n, (127, 1), true));
        }
        cases.extend(with_contexts(width, 1000, (255, 7), true));
        cases.extend(with_contexts(width, 1000, (0, 0), false));
        cases.extend(with_contexts(width, 9001, (124, 0), false));
    }
    // Long segments.
    cases.extend(with_contexts(2, (1 << 16) + 300, (126, 0), true).into_iter().take(3));
    // Shared tables as good as their own, and too few of them.
    let mut more = vec![];
    for case in cases.iter().filter(|c| c.values.len() > 5000) {
        let planes = case.planes();
        let tables = |i: usize| {
            let (contexts, tables) = case.contexts(i, &planes);
            let mut counts = vec![Counts::new(); tables];
            for (k, &symbol) in planes[i].iter().enumerate() {
                counts[contexts.get(k).map_or(0, |&c| usize::from(c))].add_symbol(symbol, 1);
            }
            let precision = Precision::from_param(case.coding[i]);
            precision.map_or(vec![], |p| {
                counts.into_iter().map(|c| c.partial().table(p)).collect::<Vec<_>>()
            })
        };
        let mut shared: Vec<Vec<Table>> = (0..planes.len()).map(tables).collect();
        if more.len() % 3 == 2 {
            shared.iter_mut().for_each(|list| list.truncate(list.len().saturating_sub(1)));
        }
        more.push(Case { shared, name: format!("{}, shared", case.name), ..case.clone() });
    }
    cases.extend(more);
    let expected = compare("exponents", &cases);
    let of = |k: u8| {
        let count = |e: &Expected| {
            let streams = StreamEntry::parse_chunk(&e.frame, e.streams.len()).unwrap();
            streams
                .items()
                .iter()
                .any(|(entry, bytes)| entry.codec == CodecId::RANS && bytes.get(6) == Some(&k))
        };
        expected.iter().filter(|e| !e.plain).any(count)
    };
    assert!(of(8) && of(10) && (2..8).any(of) && of(1));
    assert!(expected.iter().any(|e| e.shared) && expected.iter().any(|e| !e.shared && !e.plain));
}

#[test]
fn what_is_dense_is_as_without_a_prediction() {
    // The planes' streams are those of the residuals stored as if they were values.
    let engine = CpuEngine::new(Simd::detect());
    for width in [2, 4] {
        let n = 20_000;
        let o = offsets(width, 96, 0, n);
        let like = |i: u64| o.predict(i, 8 * width as u32) ^ (noise(i) % 640);
        let values: Vec<u8> =
            (0..n as u64).flat_map(|i| like(i).to_le_bytes()[..width].to_vec()).collect();
        let case =
            Case::new("dense", width, LayoutId::FIELDS, values).with_offsets(o, 0).coded(&[8, 0]);
        let data: Vec<u8> =
            case.residuals().iter().flat_map(|u| u.to_le_bytes()[..width].to_vec()).collect();
        let dtype = if width == 2 { DType::BFloat16 } else { DType::Float32 };
        let view = TensorView { dtype, shape: &[n as u64], data: &data };
        let planes = [PlaneCoding::RANS8, PlaneCoding::RAW, PlaneCoding::RAW];
        let plan =
            TensorPlan::new(Plan::direct(LayoutId::FIELDS), planes[..width.min(3)].to_vec(), 16);
        let mut frame = vec![];
        let job = EncodeJob { view: &view, plan: &plan, chunk: 0, inputs: &[] };
        engine.encode(&job, &mut Scratch::default(), &mut frame).unwrap();
        assert!(frame == case.expected().frame);
    }
}

#[test]
fn descriptors_that_do_not_fit_are_refused() {
    let values = patterns::all(Pattern::F32, 300).find(|p| p.0 == "like-weights").unwrap().1;
    let input = near(&values, 4);
    let good =
        Case::new("good", 4, LayoutId::FIELDS, values.clone()).with_input(INPUT, SUB, &input);
    let good = Case { class: Some((127, 1)), ..good };
    let mut long = good.clone();
    (long.values, long.input) = (values.repeat(20), input.repeat(20));
    let expected = long.expected();
    assert!(expected.streams[0].codec == CodecId::RANS, "{:?}", expected.streams);
    let o = offsets(4, 10, 0, 300);
    let placed = Case::new("placed", 4, LayoutId::FIELDS, values).with_offsets(o, 0);
    type Change = fn(&mut Encode);
    let wrong: Vec<(Encode, Change)> = vec![
        (good.encode(0), |e| e.predicted.contexts = 2),
        (good.encode(0), |e| e.predicted.class.1 = 8),
        (good.encode(0), |e| e.layout = LayoutId::BYTES),
        (good.encode(0), |e| e.parent.clear()),
        (good.encode(0), |e| e.predicted.prediction = BF16),
        (good.encode(0), |e| e.predicted.prediction = 9),
        (good.encode(0), |e| e.residual = MAGNITUDE),
        (good.encode(0), |e| e.residual = 0),
        (placed.encode(0), |e| e.residual = SUB),
        (placed.encode(0), |e| e.predicted.offsets.clear()),
        // The last value is in a row that is not there.
        (placed.encode(0), |e| e.predicted.offsets[8] = 1),
        (placed.encode(0), |e| e.predicted.offsets[16] = 32),
        (placed.encode(0), |e| e.predicted.offsets[24..28].fill(0)),
        (placed.encode(0), |e| e.predicted.columns.clear()),
    ];
    let mut jobs = Jobs::new("predicted-refused");
    let encode: Vec<_> = wrong.into_iter().map(|(mut e, change)| (change(&mut e), e).1).collect();
    jobs.encode(&encode);
    // Fewer tables than contexts.
    let mut several = long.decode(&expected, 0, false);
    several.check = false;
    let first = StreamEntry::header_len(expected.streams.len());
    several.frame[first + 6] -= 1;
    jobs.decode(&[several]);
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for (i, e) in encoded.iter().enumerate() {
        assert_eq!(u32::from(e.status), UNSUPPORTED, "number {i}");
    }
    assert_eq!(decoded[0].0, CORRUPT);
}
