//! The CUDA kernels' device code, run on the CPU by a small emulator, against the CPU engine: the same
//! frames byte for byte, values back bit for bit, and no stray access whatever a frame holds.
//!
//! It is here, and not next to the kernels, because it needs the engine that they are compared with.

#![expect(clippy::unwrap_used, reason = "a test; its helpers are no `#[test]` of their own")]

mod emulated;

use emulated::{
    Answers, Contexts, Decode, Encode, Encoded, Jobs, Kind, Predicted, codings, tables,
};
use s4_engine::{
    CpuEngine, DecodeJob, EncodeJob, EncodedChunk, PlanJob, PlaneCoding, Preset, Scratch,
    TensorPlan, TensorSpec, TensorView,
};
use s4_format::layout::Planes;
use s4_format::side::Side;
use s4_format::{
    ChunkRecord, CodecId, DType, Digest, LayoutId, Plan, ResidualId, StreamEntry, crc32c,
};
use s4_planes::patterns;
use s4_planes::{Simd, Width};

/// A chunk as the CPU engine encoded it.
struct Expected {
    name: String,
    dtype: DType,
    plan: Plan,
    side: Side,
    chunk_log2: u8,
    coding: [u8; 8],
    tables: Vec<u8>,
    values: Vec<u8>,
    chunk: EncodedChunk,
    frame: Vec<u8>,
}

impl Expected {
    fn width(&self) -> usize {
        self.dtype.value_width()
    }

    fn encode(&self, kind: Kind, flags: u32, skew: u32) -> Encode {
        Encode {
            kind,
            width: self.width(),
            layout: self.plan.layout,
            residual: 0,
            coding: self.coding,
            flags,
            skew,
            tables: self.tables.clone(),
            values: self.values.clone(),
            parent: vec![],
            contexts: Contexts::default(),
            predicted: Predicted::default(),
        }
    }

    fn decode(&self, kind: Kind, skew: u32) -> Decode {
        Decode {
            kind,
            width: self.width(),
            layout: self.plan.layout,
            residual: 0,
            plain: self.chunk.plain,
            n: self.values.len() / self.width(),
            check: true,
            crc_encoded: self.chunk.crc_encoded,
            crc_raw: self.chunk.crc_raw,
            skew,
            tables: self.tables.clone(),
            frame: self.frame.clone(),
            parent: vec![],
            contexts: Contexts::default(),
            predicted: Predicted::default(),
        }
    }

    /// The kernels that can encode it: the fused ones, if there are any, and the composed ones.
    fn encode_kinds(&self) -> Vec<Kind> {
        let fused = Kind::fused(self.plan.layout, self.width(), self.coding);
        fused.into_iter().chain([Kind::Composed]).collect()
    }

    fn decode_kinds(&self) -> Vec<Kind> {
        let coded = self.streams().first().map(|s| (s.codec, s.param)) == Some((CodecId::RANS, 8));
        let raw = self.streams().iter().skip(1).all(|s| s.codec == CodecId::RAW);
        let mut kinds = self.encode_kinds();
        kinds.retain(|&k| k == Kind::Composed || !self.chunk.plain && coded && raw);
        kinds
    }

    fn streams(&self) -> &[StreamEntry] {
        let planes = Planes::new(self.plan.layout, self.width(), 1).unwrap();
        &self.chunk.streams[..if self.chunk.plain { 0 } else { planes.sizes().len() }]
    }
}

/// The chunks of a tensor, by the engine's own plan or a given one; none if the plan is not for the
/// kernels.
fn expect(name: &str, dtype: DType, data: &[u8], given: Option<TensorPlan>) -> Vec<Expected> {
    let engine = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let shape = [(data.len() / dtype.size()) as u64];
    let view = TensorView { dtype, shape: &shape, data };
    let plan = given
        .unwrap_or_else(|| engine.plan(&PlanJob::new(Preset::Fast, &view), &mut scratch).unwrap());
    let Some(coding) = codings(&plan) else { return vec![] };
    let side = plan.side_data(true).unwrap();
    let size = dtype.value_width() << plan.chunk_log2;
    let mut out = vec![];
    for (i, values) in data.chunks(size).enumerate() {
        let mut frame = vec![];
        let chunk = engine
            .encode(
                &EncodeJob { view: &view, plan: &plan, chunk: i as u64, inputs: &[] },
                &mut scratch,
                &mut frame,
            )
            .unwrap();
        out.push(Expected {
            name: format!("{dtype} {name} {} chunk {i} {:?}", shape[0], plan.planes),
            dtype,
            plan: plan.plan.clone(),
            side: side.clone(),
            chunk_log2: plan.chunk_log2,
            coding,
            tables: tables(&side, coding),
            values: values.to_vec(),
            chunk,
            frame,
        });
    }
    out
}

fn dtypes() -> Vec<(DType, patterns::Kind)> {
    use patterns::Kind;
    vec![
        (DType::BFloat16, Kind::BF16),
        (DType::Float16, Kind::F16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
        (DType::Float8E4M3Fn, Kind::F8_E4M3),
        (DType::Int16, Kind::int(Width::B2)),
        (DType::Int32, Kind::int(Width::B4)),
        (DType::Int64, Kind::int(Width::B8)),
    ]
}

fn pattern(kind: patterns::Kind, name: &str, n: usize) -> Vec<u8> {
    patterns::all(kind, n).find(|p| p.0 == name).unwrap().1
}

/// Encodes all chunks by every kernel that can, and compares; decodes them by every kernel that can.
fn compare(file: &'static str, all: &[Expected]) {
    let mut jobs = Jobs::new(file);
    let mut encode = vec![];
    let mut decode = vec![];
    for (i, e) in all.iter().enumerate() {
        // Odd addresses for every third chunk, and planes by way of scratch for every other.
        let skew = if i % 3 == 2 { e.width() as u32 } else { 0 };
        let flags = i as u32 % 2;
        encode.extend(e.encode_kinds().into_iter().map(|k| (i, e.encode(k, flags, skew))));
        decode.extend(e.decode_kinds().into_iter().map(|k| (i, e.decode(k, skew))));
    }
    encode.sort_by_key(|c| c.1.kind);
    decode.sort_by_key(|c| c.1.kind);
    let (encode_of, encode): (Vec<_>, Vec<_>) = encode.into_iter().unzip();
    let (decode_of, decode): (Vec<_>, Vec<_>) = decode.into_iter().unzip();
    jobs.encode(&encode);
    assert_eq!(jobs.decode(&decode).len(), decode.len());
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for ((i, job), got) in encode_of.into_iter().zip(&encode).zip(encoded) {
        let e = &all[i];
        let what = format!("{:?} {}", job.kind, e.name);
        assert_eq!(got.status, 0, "{what}");
        assert_eq!(got.streams, e.streams(), "{what}");
        assert_eq!((got.plain, got.shared), (e.chunk.plain, e.chunk.shared), "{what}");
        assert!(got.frame == e.frame, "{what}: the frame differs");
        let crcs = (e.chunk.crc_encoded, e.chunk.crc_raw);
        assert_eq!((got.crc_encoded, got.crc_raw), crcs, "{what}");
    }
    for ((i, job), (status, values)) in decode_of.into_iter().zip(&decode).zip(decoded) {
        let what = format!("{:?} {}", job.kind, all[i].name);
        assert_eq!(*status, emulated::OK, "{what}");
        assert!(*values == all[i].values, "{what}: the values differ");
    }
}

#[test]
fn every_pattern_of_every_dtype_is_coded_as_by_the_cpu() {
    let mut all = vec![];
    for (dtype, kind) in dtypes() {
        for n in [1, 2, 16, 17, 80, 81, 257, 2100] {
            for (name, data) in patterns::all(kind, n) {
                all.extend(expect(name, dtype, &data, None));
            }
        }
        for name in ["random", "like-weights", "sparse", "two-values", "like-squares", "runs"] {
            if let Some((_, data)) = patterns::all(kind, 33_000).find(|p| p.0 == name) {
                all.extend(expect(name, dtype, &data, None));
            }
        }
    }
    let coded = |codec, param| {
        all.iter().any(|e| e.streams().iter().any(|s| (s.codec, s.param) == (codec, param)))
    };
    assert!(coded(CodecId::RANS, 8) && coded(CodecId::RANS, 12) && coded(CodecId::CONST, 0));
    assert!(coded(CodecId::BITS, 7) && all.iter().any(|e| e.chunk.plain));
    compare("patterns", &all);
}

/// Values whose exponents change along the tensor, so that some chunks want tables of their own.
fn changing(dtype: DType, kind: patterns::Kind, n: usize) -> Vec<u8> {
    let mut data = pattern(kind, "like-weights", n);
    let width = dtype.value_width();
    let third = data.len() / 3;
    data[..third].chunks_exact_mut(width).for_each(|v| v[width - 1] ^= 5);
    data
}

#[test]
fn tensors_of_several_chunks_share_tables() {
    use patterns::Kind;
    let mut all = vec![];
    for (dtype, kind, log2) in [
        (DType::BFloat16, Kind::BF16, 17),
        (DType::Float32, Kind::F32, 16),
        (DType::Float16, Kind::F16, 17),
        (DType::Int64, Kind::int(Width::B8), 16),
    ] {
        // Whole chunks of one kind are enough for the emulator: it is slow.
        let n = (1 << log2) + if dtype == DType::BFloat16 { 1000 } else { 9000 };
        let data = match kind.exponent_bits {
            0 => pattern(kind, "sparse", n),
            _ => changing(dtype, kind, n),
        };
        all.extend(expect("several", dtype, &data, None));
    }
    let shared = all.iter().filter(|e| e.chunk.shared).count();
    assert!(shared > 0 && shared < all.len(), "{shared} of {} share", all.len());
    let carrying = all.iter().any(|e| {
        let n = e.values.len() / e.width();
        e.plan.layout == LayoutId::FIELDS && (e.streams()[1].len as usize) < n
    });
    assert!(carrying, "no stream carries");
    compare("several", &all);
}

/// A plan of one chunk with every plane coded as named.
fn forced(dtype: DType, layout: LayoutId, data: &[u8], planes: &[PlaneCoding]) -> Vec<Expected> {
    let engine = CpuEngine::new(Simd::detect());
    let shape = [(data.len() / dtype.size()) as u64];
    let view = TensorView { dtype, shape: &shape, data };
    let mut plan =
        engine.plan(&PlanJob::new(Preset::Fast, &view), &mut Scratch::default()).unwrap();
    plan.plan = Plan::direct(layout);
    plan.planes = planes.to_vec();
    expect("forced", dtype, data, Some(plan))
}

#[test]
fn every_layout_with_every_coding_is_coded_as_by_the_cpu() {
    let (p8, p12) = (PlaneCoding::RANS8, PlaneCoding::RANS12);
    let mut all = vec![];
    for (dtype, kind) in dtypes() {
        let mut layouts = vec![LayoutId::WHOLE, LayoutId::BYTES];
        if dtype.value_width() > 1 {
            layouts.extend([LayoutId::FIELDS, LayoutId::FIELDS_SIGN]);
        }
        let squares = if kind.exponent_bits > 0 { "like-squares" } else { "sparse" };
        for layout in layouts {
            for (name, n) in [(squares, 4099), ("sparse", 700), ("alternating-bits", 3000)] {
                let data = pattern(kind, name, n);
                for planes in [[p8; 8], [p12; 8], [p8, p12, p8, p12, p8, p12, p8, p12]] {
                    let mut planes = planes;
                    if layout == LayoutId::FIELDS_SIGN && n == 700 {
                        planes[2] = PlaneCoding::BITS7;
                    }
                    all.extend(forced(dtype, layout, &data, &planes));
                }
            }
        }
    }
    // A plane with the most symbols that a chunk has.
    let data = pattern(patterns::Kind::int(Width::B8), "sparse", 1 << 16);
    all.extend(forced(DType::Int64, LayoutId::WHOLE, &data, &[p12]));
    compare("forced", &all);
}

/// One chunk as its difference from a parent, as the CPU engine encodes it with every plane coded as
/// named.
fn difference(
    dtype: DType,
    (layout, residual): (LayoutId, ResidualId),
    values: &[u8],
    parent: &[u8],
    planes: &[PlaneCoding],
) -> Expected {
    let engine = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let shape = [(values.len() / dtype.size()) as u64];
    let view = TensorView { dtype, shape: &shape, data: values };
    let mut plan = engine.plan(&PlanJob::new(Preset::Fast, &view), &mut scratch).unwrap();
    plan.plan = Plan::delta(layout, Digest::of(parent), 0);
    plan.plan.residual = residual;
    plan.planes = planes.to_vec();
    let mut frame = vec![];
    let chunk = engine
        .encode(
            &EncodeJob { view: &view, plan: &plan, chunk: 0, inputs: &[parent] },
            &mut scratch,
            &mut frame,
        )
        .unwrap();
    let coding = codings(&plan).unwrap();
    Expected {
        name: format!("{dtype} {residual} {layout} {} values {planes:?}", shape[0]),
        dtype,
        plan: plan.plan.clone(),
        side: Side::default(),
        chunk_log2: plan.chunk_log2,
        coding,
        tables: vec![],
        values: values.to_vec(),
        chunk,
        frame,
    }
}

/// Values a training step later: most change a little, some a lot.
fn later(values: &[u8], every: usize) -> Vec<u8> {
    let mut parent = values.to_vec();
    for (i, b) in parent.iter_mut().enumerate().filter(|(i, _)| i % every == 0) {
        *b = b.wrapping_add((i % 7) as u8) ^ (i % 11 / 10 * 128) as u8;
    }
    parent
}

#[test]
fn residuals_are_the_cpus() {
    let (p8, p12) = (PlaneCoding::RANS8, PlaneCoding::RANS12);
    let mut cases = vec![];
    for (dtype, kind) in dtypes() {
        let name = if kind.exponent_bits > 0 { "like-weights" } else { "sparse" };
        let floats = kind.exponent_bits > 0 && dtype.value_width() > 1;
        let layout = if floats { LayoutId::FIELDS } else { LayoutId::WHOLE };
        // Beyond 8192 symbols, the counts of other streams come from a sample.
        for n in [1237, 9001] {
            let values = pattern(kind, name, n);
            for residual in [ResidualId::XOR, ResidualId::SUB] {
                for (layout, planes) in [(LayoutId::BYTES, [p12; 8]), (layout, [p8; 8])] {
                    cases.push((dtype, (layout, residual), values.clone(), 5, planes));
                }
            }
        }
    }
    // Planes of 2^16 symbols and one more, and whole chunks: longer segments.
    let bytes = patterns::Kind::F8_E4M3;
    for n in [1 << 16, (1 << 16) + 1, 1 << 18] {
        let values = pattern(bytes, "like-weights", n);
        let shape = (LayoutId::WHOLE, ResidualId::XOR);
        cases.push((DType::Float8E4M3Fn, shape, values.clone(), 40, [p8; 8]));
        cases.push((DType::Float8E4M3Fn, shape, values, 40, [p12; 8]));
    }
    let weights = pattern(patterns::Kind::BF16, "like-weights", 1 << 17);
    cases.push((DType::BFloat16, (LayoutId::FIELDS, ResidualId::XOR), weights, 3, [p8; 8]));
    // The most symbols that a plane has, nearly all of them the same.
    let most = pattern(patterns::Kind::int(Width::B8), "sparse", 1 << 16);
    cases.push((DType::Int64, (LayoutId::WHOLE, ResidualId::XOR), most.clone(), 5001, [p12; 8]));
    cases.push((DType::Int64, (LayoutId::WHOLE, ResidualId::XOR), most, 5001, [p8; 8]));

    let mut jobs = Jobs::new("residuals");
    let (mut encode, mut decode, mut expected) = (vec![], vec![], vec![]);
    for (dtype, what, values, every, planes) in cases {
        let parent = later(&values, every);
        let count = Planes::new(what.0, dtype.value_width(), 1).unwrap().sizes().len();
        let e = difference(dtype, what, &values, &parent, &planes[..count]);
        let id = what.1.0;
        let skew = (expected.len() % 3 * dtype.value_width()) as u32;
        encode.push(Encode {
            parent: parent.clone(),
            residual: id,
            ..e.encode(Kind::Residual, 0, skew)
        });
        decode.push(Decode { parent, residual: id, ..e.decode(Kind::Composed, skew) });
        expected.push(e);
    }
    // These kernels refuse what is not a difference, and the others refuse a difference.
    let mut wrong = [encode[0].clone(), encode[0].clone()];
    wrong[0].kind = Kind::Composed;
    (wrong[1].residual, wrong[1].parent) = (0, vec![]);
    jobs.encode(&encode);
    jobs.decode(&decode);
    jobs.encode(&wrong);
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded), Answers::Encoded(refused)] =
        &answers[..]
    else {
        panic!()
    };
    for (e, got) in expected.iter().zip(encoded) {
        assert_eq!(got.status, 0, "{}", e.name);
        assert_eq!(got.streams, e.streams(), "{}", e.name);
        assert!(got.frame == e.frame, "{}: the frame differs", e.name);
        let crcs = (e.chunk.crc_encoded, e.chunk.crc_raw);
        assert_eq!((got.crc_encoded, got.crc_raw, got.plain), (crcs.0, crcs.1, e.chunk.plain));
    }
    let coded = expected.iter().filter(|e| !e.chunk.plain).count();
    assert!(coded > expected.len() / 2, "only {coded} of {} became smaller", expected.len());
    for (e, (status, values)) in expected.iter().zip(decoded) {
        assert_eq!(*status, emulated::OK, "{}", e.name);
        assert!(*values == e.values, "{}", e.name);
    }
    assert!(refused.iter().all(|r| u32::from(r.status) == emulated::UNSUPPORTED));
}

#[test]
fn checksums_and_copies_are_right_at_any_address() {
    let data = pattern(patterns::Kind::int(Width::B1), "random", 150_000);
    let lens = [0, 1, 3, 4, 7, 64, 65, 71, 511, 513, 4096, 20_479, 20_480, 20_483, 41_000, 149_990];
    let spans: Vec<_> = lens.iter().flat_map(|&n| (0..4).map(move |s| (n, s))).collect();
    let mut jobs = Jobs::new("spans");
    let sums: Vec<_> = spans.iter().map(|&(n, s)| (&data[s..s + n], 3 * s as u32)).collect();
    jobs.checksums(&sums);
    let skews = [0, 1, 2, 3, 5, 8, 13];
    let copies: Vec<_> = [0, 1, 15, 16, 31, 40, 300, 4099]
        .iter()
        .flat_map(|&n| skews.map(move |f| (n, f)))
        .flat_map(|(n, f)| skews.map(move |t| (n, f, t)))
        .map(|(n, from, to)| (&data[..n], from, to))
        .collect();
    jobs.copies(&copies);
    let shapes =
        [[1, 1, 40], [2, 7, 9], [64, 64, 3], [130, 4096, 11], [256, 300, 20], [4099, 0, 2]];
    let shapes = shapes.iter().flat_map(|s| skews.map(|skew| (*s, skew)));
    let rows: Vec<_> = shapes
        .map(|([len, step, count], skew)| {
            let bytes = &data[skew as usize..][..step * (count - 1) + len];
            (bytes, [len, step, count], skew, 13 - skew)
        })
        .collect();
    jobs.rows(&rows);
    let answers = jobs.run();
    let [Answers::Checksums(crcs), Answers::Copies(copied), Answers::Copies(rowed)] = &answers[..]
    else {
        panic!()
    };
    for ((bytes, [len, step, count], ..), got) in rows.iter().zip(rowed) {
        let expected: Vec<_> =
            (0..*count).flat_map(|i| &bytes[i * step..][..*len]).copied().collect();
        assert!(*got == expected, "{count} rows of {len} bytes, {step} apart");
    }
    for ((span, skew), crc) in sums.iter().zip(crcs) {
        assert_eq!(*crc, crc32c(span), "{} bytes at {skew}", span.len());
    }
    for ((span, from, to), got) in copies.iter().zip(copied) {
        assert!(got == span, "{} bytes from {from} to {to}", span.len());
    }
}

/// The values that the CPU decodes from a frame whose own checksum matches; `None` if it refuses the frame.
fn decode_on_cpu(e: &Expected, frame: &[u8], crc_encoded: u32) -> Option<Vec<u8>> {
    let shape = [(e.values.len() / e.dtype.size()) as u64];
    let spec = TensorSpec {
        dtype: e.dtype,
        shape: &shape,
        plan: &e.plan,
        side: &e.side,
        chunk_log2: e.chunk_log2,
    };
    let record = ChunkRecord {
        offset: 0,
        object: 0,
        len: frame.len() as u32,
        plain: e.chunk.plain,
        crc_encoded,
        crc_raw: e.chunk.crc_raw,
    };
    let mut out = vec![0; e.values.len()];
    let engine = CpuEngine::new(Simd::detect());
    let done = engine.decode(
        &DecodeJob { spec: &spec, chunk: 0, record: &record, frame, inputs: &[] },
        &mut Scratch::default(),
        &mut out,
    );
    done.is_ok().then_some(out)
}

/// A frame with one of many kinds of damage, chosen by `i`.
fn damaged(frame: &[u8], i: usize) -> Vec<u8> {
    let mut bad = frame.to_vec();
    let noise = |k: usize| k.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let len = bad.len();
    match i % 8 {
        // The head of the first stream is where most is decided.
        0..=3 => bad[(16 + i / 2).min(len - 1)] ^= 1 << (noise(i) % 8),
        4 | 5 => bad[noise(i) % len] ^= 1 << (i / 8 % 8),
        6 => {
            let from = 40 + noise(i) % len.saturating_sub(40).max(1);
            (from.min(len)..len).for_each(|k| bad[k] = noise(k * 31 + i) as u8);
        }
        _ => bad[..32.min(len)][noise(i) % 32.min(len)] = noise(i + 7) as u8,
    }
    bad
}

#[test]
fn damaged_frames_with_mended_checksums_are_treated_as_by_the_cpu() {
    use patterns::Kind as P;
    let mixed = [PlaneCoding::RANS8, PlaneCoding::RANS12];
    let mut sources =
        expect("damaged", DType::BFloat16, &pattern(P::BF16, "like-weights", 9000), None);
    sources.extend(expect(
        "damaged",
        DType::Float32,
        &pattern(P::F32, "weights-and-nans", 700),
        None,
    ));
    let data = pattern(P::BF16, "like-squares", 900);
    sources.extend(forced(DType::BFloat16, LayoutId::BYTES, &data, &mixed));
    sources.extend(forced(DType::BFloat16, LayoutId::WHOLE, &data, &mixed[1..]));
    let signs = [PlaneCoding::RAW, mixed[0], PlaneCoding::BITS7];
    sources.extend(forced(DType::BFloat16, LayoutId::FIELDS_SIGN, &data, &signs));

    let mut jobs = Jobs::new("damaged");
    let mut tried = vec![];
    for e in &sources {
        for i in 0..160 {
            let frame = damaged(&e.frame, i);
            let streams = StreamEntry::parse_chunk(&frame, e.streams().len());
            let Ok(crc_encoded) = streams.map(|s| s.crc()) else { continue };
            for kind in e.decode_kinds() {
                let job = e.decode(kind, 0);
                tried.push((e, Decode { frame: frame.clone(), crc_encoded, ..job }));
            }
        }
    }
    tried.sort_by_key(|t| t.1.kind);
    let decode: Vec<_> = tried.iter().map(|t| t.1.clone()).collect();
    assert_eq!(jobs.decode(&decode).len(), tried.len());
    let answers = jobs.run();
    let [Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    let mut refused = 0;
    for ((e, job), (status, values)) in tried.iter().zip(decoded) {
        let cpu = decode_on_cpu(e, &job.frame, job.crc_encoded);
        assert_ne!(*status, emulated::FRAME_CHECKSUM, "{:?} {}", job.kind, e.name);
        // The fused kernels leave streams of another codec to the others.
        let other = job.kind != Kind::Composed && cpu.is_some();
        assert!(cpu.is_some() == (*status == emulated::OK) || other, "{status} {}", e.name);
        if *status == emulated::OK {
            assert!(cpu.as_ref() == Some(values) && *values == e.values, "{}", e.name);
        }
        refused += usize::from(*status != emulated::OK && *status != emulated::VALUE_CHECKSUM);
    }
    assert!(refused > tried.len() / 4, "only {refused} of {} were refused", tried.len());
}

#[test]
fn streams_of_other_encoders_are_decoded_or_refused() {
    emulated::foreign();
}

#[test]
fn wrong_checksums_are_named() {
    let data = pattern(patterns::Kind::BF16, "like-weights", 3000);
    let [e] = &expect("checksums", DType::BFloat16, &data, None)[..] else { panic!() };
    let good = e.decode(Kind::Fused2, 0);
    let frame = Decode { crc_encoded: !good.crc_encoded, ..good.clone() };
    let values = Decode { crc_raw: !good.crc_raw, ..good.clone() };
    let mut jobs = Jobs::new("checksums");
    jobs.decode(&[good, frame, values]);
    let answers = jobs.run();
    let [Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    let status: Vec<_> = decoded.iter().map(|d| d.0).collect();
    assert_eq!(status, [emulated::OK, emulated::FRAME_CHECKSUM, emulated::VALUE_CHECKSUM]);
}

#[test]
fn both_ways_of_the_raw_planes_give_the_same_frame() {
    let data = pattern(patterns::Kind::F32, "like-weights", 20_000);
    let [e] = &expect("flags", DType::Float32, &data, None)[..] else { panic!() };
    let mut jobs = Jobs::new("flags");
    jobs.encode(&[
        e.encode(Kind::Fused4, 0, 0),
        e.encode(Kind::Fused4, 1, 0),
        e.encode(Kind::Fused4, 1, 4),
    ]);
    let answers = jobs.run();
    let [Answers::Encoded(encoded)] = &answers[..] else { panic!() };
    let [a, b, c]: &[Encoded; 3] = encoded.as_slice().try_into().unwrap();
    assert!(a == b && b == c && a.frame == e.frame);
}
